"""In which order a kernel adds up an element of the result, and which order is batch invariant.

The bits of an element depend on its row of a, its column of b, their scales and its bias, and on the
order of the arithmetic. All sm90 kernels of an op have one order: products are added along k by the
same instruction; then, of fp8, the sum is multiplied by scale_a, and with scale_b and the bias in one
fused step; it is rounded once. Neither tile nor schedule nor cluster changes that. What is left is

    chunk     elements of k whose sum is added to a second accumulator in full float32; 0 without one
    splits    shares of k that are summed apart, and then added

`chunk` is in the kernel's config ("sum_chunk"), where the family states it; a kernel without is not
known. The order of batch-invariant results is the chunk of the problem, and one share. It does not
depend on m, n, the device or a table. Free of torch.
"""

from __future__ import annotations

from stoneware.kernels.config import Config
from stoneware.kernels.key import Key
from stoneware.kernels.manifest import KernelRecord

CHUNK = 128
"""Of slow accumulation and of block scales."""


def of(kernel: KernelRecord | None, splits: int) -> str:
    """The order in words, for people: "one sum", "4 shares", "one sum, in chunks of 128", "unknown"."""
    chunk = None if kernel is None else kernel.config.get("sum_chunk")
    if chunk is None:
        return "unknown"
    words = "one sum along k" if splits == 1 else f"{splits} shares of k, summed apart and then added"
    return f"{words}, in chunks of {chunk}" if chunk else words


def why_not_invariant(kernel: KernelRecord | None, config: Config, key: Key) -> str | None:
    """None if a config of the kernel adds up in the order of batch-invariant results; otherwise the reason."""
    chunk = None if kernel is None else kernel.config.get("sum_chunk")
    if chunk is None:
        return "results must be batch invariant, and the order of its sums is not known"
    invariant_chunk = CHUNK if key.accumulation == "slow" or "block" in key.scales else 0
    if chunk != invariant_chunk:
        return f"results must be batch invariant, and its sums have chunks of {chunk}, not {invariant_chunk}"
    if config.splits != 1:
        return f"results must be batch invariant, and splits={config.splits} sums shares of k apart"
    return None
