"""Whether the vendor library's kernel is bitwise equal to ours at a problem, checked at first use.

Its order of sums is not documented, and may change with a version of the library: it often splits k
where m is small. So `sw.batch_invariant` uses it for a problem only after both kernels have run here with
the same result. A problem that is not checked, for example during a capture, runs our kernel: it
loses time but has the same bits.

The operands make rounding visible: in every other row of a the second half repeats the first, and the
second half of b is minus the first, so that such an element consists only of the rounding of its
sums. Where the vendor split k, 7 to 40 % of the elements differed (docs/batch_invariance.md).

The vendor chooses its kernel by m, n and k, so the operands have the problem's size and strides, and b
takes the memory of another weight while they are compared. (A view that repeats a few columns would not do:
cuBLAS and TMA want a leading dimension that spans k.) But only PERIOD rows of a and columns of b are drawn,
and repeated. Every difference still shows. An element of the result depends on its row, its column and the
order of its sum alone, and a kernel sums all elements of a tile in one order. No tile is larger than
PERIOD x PERIOD, so no two elements of a tile have the same operands, and a tile that is summed in another
order differs as often as one of operands that were all drawn.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from stoneware.errors import UnsupportedError
from stoneware.kernels import sm90_kernels
from stoneware.kernels.config import Config
from stoneware.runtime.device import Device
from stoneware.tuning import policy

_warn_once = functools.cache(logging.getLogger("stoneware").warning)

PERIOD = 256
"""The longest side of a tile: of cuBLAS's, CUTLASS's and our own kernels for compute capability 9.0."""

_CHUNK_BYTES = 1 << 26
"""Size of the parts in which results are compared, since a comparison needs additional memory."""


@functools.lru_cache(maxsize=4096)
def _verdict(ordinal: int | None, problem: Any) -> list[str | None]:
    """The result of the check at a problem on a device: [] before it, then [why the vendor's kernel may not run]
    or [None]. A problem that the cache dropped is checked again; each m is a problem."""
    return []


def why_not(operation: Any, vendor: Config, problem: Any, device: Device, *, may_run: bool) -> str | None:
    """Why the vendor's kernel may not replace ours here, or None.

    Args:
      operation: the op with its backends (`dispatch.Operation`).
      problem, device: the call.
      vendor: the config of its kernel.
      may_run: whether to check a problem that was not checked yet; if not, this is the reason.
    """
    verdict = _verdict(device.ordinal, problem)
    if verdict:
        return verdict[0]
    if not may_run or device.is_described or policy.is_capturing():
        return "whether it gives the bits of our kernels here is checked at the first call outside of a capture"
    try:
        reason = _difference(operation, vendor, problem, device)
    except torch.OutOfMemoryError:
        reason = "there was no memory to compare it with our kernel"
        _warn_once(
            "sw.%s runs our kernels, which may be slower: no memory is left to check that the vendor's have the same "
            "bits; make the first calls while there is room for another weight",
            operation.spec.name,
        )
    verdict[:] = [reason]
    return reason


def _difference(operation: Any, vendor: Config, problem: Any, device: Device) -> str | None:
    try:
        ours = operation.decide(problem, device, backend=sm90_kernels.BACKEND).config
    except UnsupportedError:
        return "no kernel of ours runs the problem, so there is nothing to compare its bits with"
    ordinals = [] if device.ordinal is None else [device.ordinal]  # a CPU, in tests, has none
    where = torch.device("cuda", *ordinals) if ordinals else torch.device("cpu")
    with torch.cuda.device(*ordinals or [-1]), torch.no_grad(), torch.random.fork_rng(ordinals):
        from stoneware.measuring import operands

        tensors = operands.make(problem, where, period=PERIOD).tensors
        cancel(tensors["a"], tensors["b"])
        out, bias = tensors["out"], tensors.get("bias")
        plans = [operation.make_plan(problem, config, device) for config in (ours, vendor)]
        # A bias hides the rounding that its absence shows.
        for factor in (1, 0) if bias is not None else (1,):
            if bias is not None:
                bias *= factor
            results: list[torch.Tensor] = []
            for plan in plans:
                out.fill_(float("nan"))
                plan(*[tensors[name] for name in operation.spec.plan_order])
                results.append(out if results else out.clone())
            if num_differing := _num_differing(*results):
                return (
                    f"its bits are not those of our kernels here: {num_differing} of {out.numel()} elements of a "
                    "result differ"
                )
    return None


def _num_differing(first: torch.Tensor, second: torch.Tensor) -> int:
    """Elements of two results [..., m, n] that differ in their bits."""
    row_bytes = first.numel() // first.shape[-2] * first.itemsize
    num_rows = max(1, _CHUNK_BYTES // row_bytes)
    chunks = zip(*(_bits(result).split(num_rows, dim=-2) for result in (first, second)))
    return int(sum((x != y).sum() for x, y in chunks))


def cancel(a: torch.Tensor, b: torch.Tensor) -> None:
    """Makes every other row of a @ b, a [..., m, k] and b [..., k, n], consist only of the rounding
    of its sums."""
    half = a.shape[-1] // 2
    # If a batch shares an operand, torch can write to its memory only through one matrix.
    a, bits = (operand[0] if operand.ndim == 3 and operand.stride(0) == 0 else operand for operand in (a, _bits(b)))
    a[..., ::2, half : 2 * half] = a[..., ::2, :half]
    # In place. torch cannot negate fp8, so the highest bit, the sign, is flipped.
    torch.bitwise_xor(bits[..., :half, :], torch.iinfo(bits.dtype).min, out=bits[..., half : 2 * half, :])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers of its size."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])
