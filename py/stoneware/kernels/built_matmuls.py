"""Whether this installation has kernels for the matmuls of gradients.

A build without them is smaller and compiles faster. If a call needs a gradient whose matmul is missing, the
forward call raises an error. No other kernel replaces it, and the backward does not fail later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from stoneware.errors import BackwardNotBuiltError
from stoneware.kernels import manifest
from stoneware.kernels.manifest import KernelRecord, Manifest
from stoneware.kernels.needs import DGRAD, WGRAD, Matmul

FLAG = "--//:enable_backward"


def check(
    matmuls: Sequence[Matmul], build: Manifest | None = None, names: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Refuses a call if one of its gradients needs a matmul that is not built.

    Args:
      matmuls: the matmuls of the call (`needs.matmuls`).
      build: the manifest of a build; None means this installation's. A checkout in which nothing is
        built has every matmul: the vendor library and the reference compute them.
      names: other names of "a" and "b" for the message.

    Raises:
      BackwardNotBuiltError: a matmul is not built.
    """
    build = manifest.installed() if build is None else build
    if build is None:
        return
    for matmul in matmuls:
        if matmul.role in (DGRAD, WGRAD) and not is_built(matmul, build):
            name = matmul.result.removesuffix("^T")[1:]
            name = names.get(name, name)
            raise BackwardNotBuiltError(
                f"{matmul.op} of {matmul.a_dtype} has no {matmul.role} of layout {matmul.layout} in this "
                f"build, and {name} requires a gradient; {_remedy(build)}, call it under torch.no_grad(), or pass "
                f"{name}.detach()"
            )


def check_kernel(kernel: str, call: str) -> None:
    """Refuses a call whose kernel serves only gradients and is not built.

    Args:
      kernel: id of the kernel.
      call: description of the call for the message.

    Raises:
      BackwardNotBuiltError: the kernel is not built.
    """
    build = manifest.packaged()
    if kernel in build.removed:
        raise BackwardNotBuiltError(f"{call} is for gradients, and has no kernel in this build; {_remedy(build)}")


def _remedy(build: Manifest) -> str:
    return 'build its kernels without backward = "off"' if build.has_backward else f"build the wheel with {FLAG}=true"


def is_built(matmul: Matmul, build: Manifest) -> bool:
    """Whether a build computes a matmul: with one of its kernels or, if no kernel exists for it in any
    build, with another library. A forward-only build computes no other gradients."""
    kernels = (*build.kernels.values(), *build.removed.values())
    states = [kernel.serves[matmul.role] for kernel in kernels if _is_for(kernel, matmul)]
    return any(states) if states else build.has_backward


def _is_for(kernel: KernelRecord, matmul: Matmul) -> bool:
    config = kernel.config
    return (
        kernel.op == matmul.op
        and matmul.role in kernel.serves
        and config.get("layout", "nt") == matmul.layout
        and (config.get("a"), config.get("b")) == (matmul.a_dtype, matmul.b_dtype)
    )
