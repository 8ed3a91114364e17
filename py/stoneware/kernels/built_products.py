"""Whether this installation was built with the products of a gradient.

A build without them is smaller and compiles faster. A call whose gradient would need one is refused
where it is made: no other kernel takes its place, and the backward does not fail later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from stoneware.errors import BackwardNotBuiltError
from stoneware.kernels import manifest
from stoneware.kernels.manifest import KernelRecord, Manifest
from stoneware.kernels.needs import DGRAD, WGRAD, Product

FLAG = "--//:enable_backward"


def check(
    products: Sequence[Product], found: Manifest | None = None, names: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Refuses a call if one of its products is of a gradient and not built.

    Args:
      products: of the call (`needs.products`).
      found: the manifest of a build; None for that of this installation. A checkout in which nothing
        is built has every product, of the vendor library and the reference.
      names: what the caller calls "a" and "b", if otherwise.

    Raises:
      BackwardNotBuiltError: a product is not built.
    """
    found = manifest.installed() if found is None else found
    if found is None:
        return
    for product in products:
        if product.role in (DGRAD, WGRAD) and not is_built(product, found):
            name = product.result.removesuffix("^T")[1:]
            name = names.get(name, name)
            raise BackwardNotBuiltError(
                f"{product.op} of {product.a_dtype} has no {product.role} of layout {product.layout} in this "
                f"build, and {name} requires a gradient; {_remedy(found)}, call it under torch.no_grad(), or pass "
                f"{name}.detach()"
            )


def check_kernel(kernel: str, call: str) -> None:
    """Refuses a call whose kernel serves gradients alone and is not built.

    Args:
      kernel: its id.
      call: the call in words, for the message.

    Raises:
      BackwardNotBuiltError: the kernel is not built.
    """
    found = manifest.packaged()
    if kernel in found.removed:
        raise BackwardNotBuiltError(f"{call} is for gradients, and has no kernel in this build; {_remedy(found)}")


def _remedy(found: Manifest) -> str:
    return 'build its kernels without backward = "off"' if found.has_backward else f"build the wheel with {FLAG}=true"


def is_built(product: Product, found: Manifest) -> bool:
    """Whether a build computes a product: by one of the kernels that are for it, or, where no kernel
    ever is, by another library, unless the whole build is forward only."""
    kernels = (*found.kernels.values(), *found.removed.values())
    states = [kernel.serves[product.role] for kernel in kernels if _is_for(kernel, product)]
    return any(states) if states else found.has_backward


def _is_for(kernel: KernelRecord, product: Product) -> bool:
    config = kernel.config
    return (
        kernel.op == product.op
        and product.role in kernel.serves
        and config.get("layout", "nt") == product.layout
        and (config.get("a"), config.get("b")) == (product.a_dtype, product.b_dtype)
    )
