"""The functions of the kernel package `kernels-community/finegrained-fp8`, on Stoneware's matmuls.

Transformers loads that package for `FP8Linear` and `FP8Experts`, and calls it by position and by these keywords:

    matmul_2d(a, b, b_scale, block_size, output_dtype, activation_scale=)
    matmul_grouped(a, b, b_scale, offsets=, tokens_per_expert=, block_size=)
    matmul_batched(a, b, b_scale, block_size=, expert_ids=)

Weights are float8_e4m3fn with one float32 or float8_e8m0fnu scale, or one for each 128 x 128 elements. a is quantized
here: each row with one scale, or with one for each 128 elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stoneware.errors import quoted
from stoneware.ops.grouped_mm.api import grouped_mm
from stoneware.ops.scaled_mm.api import scaled_mm
from stoneware.quantizing.api import quantize

__all__ = ["fp8_act_quant", "matmul_2d", "matmul_batched", "matmul_grouped"]

BLOCK = 128
_FP8 = torch.float8_e4m3fn
_REMEDY = "; unset LOCAL_KERNELS to use the Triton kernels of kernels-community/finegrained-fp8 for this checkpoint"


def matmul_2d(
    a: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    block_size: Sequence[int] | None = None,
    output_dtype: torch.dtype | None = None,
    activation_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """a @ b.t(), with a quantized at the call.

    Args:
      a: [..., k], 16 or 32 bits.
      b: [n, k] float8_e4m3fn; n and k are multiples of 16, k of 128 with blocks.
      b_scale: the factor of b: one element, or [ceil(n / 128), k / 128].
      block_size: (128, 128), or None or (n, k) for one scale.
      output_dtype: of the result; None for that of a.
      activation_scale: the one scale of a, of static checkpoints; None finds the scales.

    Returns:
      [..., n].

    Raises:
      TypeError: b is not float8_e4m3fn.
      ValueError: block_size is another, or a size breaks a rule of `sw.scaled_mm`.
    """
    has_blocks = _has_blocks(b, block_size)
    rows = a.reshape(-1, a.shape[-1])
    if activation_scale is None:
        x, x_scale = quantize(rows, "block" if has_blocks else "row")
    else:
        limit, scale = torch.finfo(_FP8).max, activation_scale.float().reshape(1, 1)
        x = (rows.float() / scale).clamp(-limit, limit).to(_FP8)
        x_scale = scale.expand(rows.shape[0], rows.shape[1] // BLOCK if has_blocks else 1)
    w_scale = b_scale.float().t() if has_blocks else b_scale.float().reshape(1, 1).expand(1, b.shape[0])
    y = scaled_mm(x, b.t(), x_scale, w_scale, None, output_dtype or a.dtype)
    return y.view(*a.shape[:-1], b.shape[0])


def matmul_grouped(
    a: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    offsets: torch.Tensor,
    tokens_per_expert: torch.Tensor | None = None,
    block_size: Sequence[int] | None = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Each group of rows of a times the matrix of its expert, transposed.

    Args:
      a: [m, k] bfloat16 or float16, sorted by expert.
      b: [experts, n, k] float8_e4m3fn.
      b_scale: [experts, 1, 1], [experts, 2, 1] for two halves of n, or [experts, ceil(n / 128), k / 128].
      offsets: [experts], the row after each expert's last.
      tokens_per_expert: not read; the offsets have the same information.
      block_size, output_dtype: like for `matmul_2d`; the result has 16 bits.

    Returns:
      [m, n]; rows from offsets[-1] on are undefined.

    Raises:
      TypeError, ValueError: like `matmul_2d`.
    """
    has_blocks = _has_blocks(b, block_size)
    x, x_scale = quantize(a, "block" if has_blocks else "row")
    scale = b_scale.float()
    if has_blocks:
        w_scale = scale.mT
    else:
        scale = scale.reshape(b.shape[0], -1)  # one for all rows, or one each for gate and up
        x_scale, w_scale = x_scale.squeeze(-1), scale.repeat_interleave(b.shape[1] // scale.shape[1], 1)
    return grouped_mm(x, b.mT, offsets.int(), x_scale, w_scale, output_dtype or a.dtype)


def matmul_batched(
    a: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    block_size: Sequence[int] | None = None,
    expert_ids: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Each row of a times the matrix of its own expert, transposed: sorted by expert, then `matmul_grouped`.

    Args:
      a, b, b_scale, block_size, output_dtype: like for `matmul_grouped`, with rows in any order.
      expert_ids: [m], the expert of each row; rows of experts that do not exist are undefined in the result.

    Returns:
      [m, n].

    Raises:
      TypeError: expert_ids is missing.
      TypeError, ValueError: like `matmul_2d`.
    """
    if expert_ids is None:
        raise TypeError("expert_ids=None must be a tensor [m] with the expert of each row; pass it")
    by_expert, order = expert_ids.sort(stable=True)
    numbers = torch.arange(b.shape[0], device=a.device, dtype=by_expert.dtype)
    offsets = torch.searchsorted(by_expert, numbers, right=True)
    y = matmul_grouped(a[order], b, b_scale, offsets, block_size=block_size, output_dtype=output_dtype)
    return torch.empty_like(y).index_copy_(0, order, y)


def fp8_act_quant(x: torch.Tensor, block_size: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., k] in float8_e4m3fn, and float32 scales [..., k / 128] of 128 elements each.

    Raises:
      ValueError: block_size is not 128.
    """
    if block_size != BLOCK:
        raise ValueError(f"block_size={quoted(block_size)} must be {BLOCK}{_REMEDY}")
    values, scale = quantize(x.reshape(-1, x.shape[-1]), "block")
    return values.view(x.shape), scale.reshape(*x.shape[:-1], -1)


def _has_blocks(b: torch.Tensor, block_size: Sequence[int] | None) -> bool:
    """Whether b has scales of 128 x 128 elements, instead of one."""
    if b.dtype != _FP8:
        raise TypeError(f"b.dtype={b.dtype} must be {_FP8}{_REMEDY}")
    if block_size is None or tuple(block_size) == tuple(b.shape[-2:]):
        return False
    if tuple(block_size) != (BLOCK, BLOCK):
        raise ValueError(f"block_size={quoted(block_size)} must be None or ({BLOCK}, {BLOCK}){_REMEDY}")
    return True
