"""Whether the vendor library's kernel gives the very bits of ours at a problem, checked at first use.

Its order of sums is not documented, and may change with a version of the library: it often splits k
where m is small. So `sw.batch_invariant` takes it for a problem only after both have run it here, with
the same result. Since the bits are then the same, a problem that is not checked, as during a capture,
runs our kernel and loses time alone.

The operands make rounding visible: in every other row of a the second half repeats the first, and the
second half of b is minus the first, so that what is left of such an element is the rounding of its
sums. Where the vendor split k, 7 to 40 % of the elements differed (docs/batch_invariance.md).
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch

from stoneware.errors import UnsupportedError
from stoneware.kernels import cutlass_kernels
from stoneware.kernels.config import Config
from stoneware.runtime.device import Device
from stoneware.tuning import policy

if TYPE_CHECKING:
    from stoneware.ops.dispatch import Operation

_warn_once = functools.cache(logging.getLogger("stoneware").warning)

_found: dict[tuple[int | None, Any], str | None] = {}
"""(device, problem) -> why the vendor's kernel may not run it; None if it may."""


def why_not(operation: Operation, vendor: Config, problem: Any, device: Device, *, may_run: bool) -> str | None:
    """Why the vendor's kernel may not stand for ours here, or None.

    Args:
      operation, problem, device: what runs.
      vendor: the config of its kernel.
      may_run: whether to check a problem that was not checked yet; else that is the reason.
    """
    place = device.ordinal, problem
    if place in _found:
        return _found[place]
    if not may_run or device.is_described or policy.is_capturing():
        return "whether it gives the bits of our kernels here is checked at the first call outside of a capture"
    try:
        _found[place] = _difference(operation, vendor, problem, device)
    except torch.OutOfMemoryError:
        _found[place] = "there was no memory to compare it with our kernel"
        _warn_once(
            "sw.%s runs our kernels, which may be slower: no memory is left to check that the vendor's have the same "
            "bits; make the first calls while there is room for another weight",
            operation.spec.name,
        )
    return _found[place]


def _difference(operation: Operation, vendor: Config, problem: Any, device: Device) -> str | None:
    from stoneware.measuring import operands

    try:
        ours = operation.decide(problem, device, backend=cutlass_kernels.BACKEND).config
    except UnsupportedError:
        return "no kernel of ours runs the problem, so there is nothing to compare its bits with"
    with torch.cuda.device(device.ordinal), torch.no_grad(), torch.random.fork_rng([device.ordinal]):
        tensors = operands.make(problem, torch.device("cuda", device.ordinal)).tensors
        cancel(tensors["a"], tensors["b"])
        out, bias = tensors["out"], tensors.get("bias")
        plans = [operation.make_plan(problem, config, device) for config in (ours, vendor)]
        # A bias hides the rounding that its absence shows.
        for factor in (1, 0) if bias is not None else (1,):
            if bias is not None:
                bias *= factor
            results = []
            for plan in plans:
                out.fill_(float("nan"))
                plan(*[tensors[name] for name in operation.spec.plan_order])
                results.append(out.clone(memory_format=torch.contiguous_format).view(torch.uint8))
            differing = int((results[0] != results[1]).sum())
            if differing:
                return (
                    f"its bits are not those of our kernels here: {differing} of {results[0].numel()} bytes of a "
                    "result differ"
                )
    return None


def cancel(a: torch.Tensor, b: torch.Tensor) -> None:
    """Makes what is left of every other row of a @ b, a [..., m, k] and b [..., k, n], the rounding of
    its sums."""
    half = a.shape[-1] // 2
    a[..., ::2, half : 2 * half] = a[..., ::2, :half]
    b[..., half : 2 * half, :] = (-b[..., :half, :].float()).to(b.dtype)
