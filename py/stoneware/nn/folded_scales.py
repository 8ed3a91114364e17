"""Weights in MXFP8, brought to blocks of 128x128.

A matmul on Hopper takes one scale of the weight for 128x128 elements. MXFP8 has a power of two for 32 elements of a row
(OCP Microscaling Formats Specification 1.0, section 5.2), some models for 32x32. A block of 128x128 gets the smallest
power of two with which its values fit float8_e4m3fn, and each value is multiplied by the ratio of its old scale to the
new one. That is exact, unless the product is below 2**-6, where the format has fewer bits. Such values are rounded.
They are saved, so that the old weight can be restored bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from stoneware.nn.recipes import BLOCK

_E4M3 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_E4M3).max

MOST_ERROR = 2.0**-6
"""The largest change of a row or a column, relative to its norm. Quantizing to fp8 costs about 2.7 %."""

_MOST_EXPONENT = 100
"""The largest exponent of a scale: products with any value of float8_e4m3fn are normal numbers in float32."""

_MOST_ELEMENTS = 1 << 24
"""How many are in float32 at a time."""


class Before(NamedTuple):
    """What restores a weight: its scales, and the elements that were rounded, by position in memory, as bytes."""

    scale: torch.Tensor
    positions: torch.Tensor
    values: torch.Tensor


class Folded(NamedTuple):
    """A weight [..., n, k] float8_e4m3fn, its scales [..., n / 128, k / 128] float32, and what restores the old one."""

    weight: torch.Tensor
    scale: torch.Tensor
    before: Before


class Loss(NamedTuple):
    """What folding costs: the share of elements that are rounded, and the largest relative error of a row, or of a
    column of the rows that are folded together."""

    share_rounded: float
    error: float


def loss(weight: torch.Tensor, scale: torch.Tensor) -> Loss | str:
    """What `fold` would round, or why it should not be called.

    Args:
      weight: [..., n, k] float8_e4m3fn, with n and k multiples of 128.
      scale: [..., n / i, k / j] float32, one for i x j elements.
    """
    (*groups, n, k), (*scale_groups, rows, columns) = weight.shape, scale.shape
    if groups != scale_groups or any(
        number == 0 or size % number or BLOCK % (size // number) for number, size in ((rows, n), (columns, k))
    ):
        return f"its scales have the shape {[*scale.shape]}, which does not divide blocks of {BLOCK}x{BLOCK}"
    scale = _in_use(weight, scale)
    mantissa, exponent = torch.frexp(scale)
    if not bool(((mantissa == 0.5) & (exponent.abs() <= _MOST_EXPONENT)).all()):
        return (
            f"its blocks of {n // rows}x{k // columns} have scales that are not powers of two from "
            f"2**-{_MOST_EXPONENT} to 2**{_MOST_EXPONENT}, so blocks of {BLOCK}x{BLOCK} would round all values"
        )
    num_rounded, errors = 0, []
    for slab in _slabs(weight, scale):
        num_rounded += int(slab.is_rounded.sum())
        change = slab.weight.float().mul_(spread(slab.scale, slab.weight)).sub_(slab.dense)
        for dim in (0, 1):
            error, norm = (some.norm(dim=dim, dtype=torch.float64) for some in (change, slab.dense))
            errors.append((error / norm.clamp_min(torch.finfo(torch.float64).tiny)).max())
    error = float(torch.stack(errors).max())
    if not error <= MOST_ERROR:
        return (
            f"blocks of {BLOCK}x{BLOCK} would change a row or a column of the weight by {error:.2g} of its norm, more "
            f"than {MOST_ERROR:.2g}"
        )
    return Loss(num_rounded / weight.numel(), error)


def fold(weight: torch.Tensor, scale: torch.Tensor) -> Folded:
    """The same weight with scales for 128x128 elements; shapes as for `loss`, which must return a Loss."""
    *_, n, k = weight.shape
    scale = _in_use(weight, scale)
    new_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    new_scale = scale.new_empty(*weight.shape[:-2], n // BLOCK, k // BLOCK)
    rows, blocks, bytes_before = _rows(new_weight), _rows(new_scale), _rows(weight).view(torch.uint8)
    positions, values = [], []
    for slab in _slabs(weight, scale):
        end = slab.first_row + slab.weight.shape[0]
        rows[slab.first_row : end] = slab.weight
        blocks[slab.first_row // BLOCK : end // BLOCK] = slab.scale
        position = slab.is_rounded.flatten().nonzero().squeeze(1)
        values.append(bytes_before[slab.first_row : end].flatten()[position])
        positions.append(position + slab.first_row * k)
    return Folded(new_weight, new_scale, Before(scale, torch.cat(positions), torch.cat(values)))


def unfold(weight: torch.Tensor, scale: torch.Tensor, before: Before) -> torch.Tensor:
    """The weight that `fold` was called with, on the device of the one that it returned."""
    before = Before(*(tensor.to(weight.device) for tensor in before))
    old_weight = torch.empty_like(weight)
    rows, old_rows, scales, old_scales = _rows(weight), _rows(old_weight), _rows(scale), _rows(before.scale)
    for first, end in row_ranges(rows):
        values = rows[first:end]
        new, old = (spread(part_of(some, rows, first, end), values) for some in (scales, old_scales))
        old_rows[first:end] = (values.float() * new / old).to(_E4M3)
    old_weight.view(torch.uint8).flatten()[before.positions] = before.values
    return old_weight


class _Slab(NamedTuple):
    """Some rows: their values with the new scales, and what they stand for, in float32."""

    first_row: int
    weight: torch.Tensor
    scale: torch.Tensor
    dense: torch.Tensor
    is_rounded: torch.Tensor


def _in_use(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The scales, 1 for blocks without values, whose scales may be anything."""
    rows, columns = (size // number for size, number in zip(weight.shape[-2:], scale.shape[-2:]))
    magnitudes = weight.detach().view(torch.uint8) & 0x7F
    return scale.where(magnitudes.unflatten(-2, (-1, rows)).unflatten(-1, (-1, columns)).amax((-3, -1)) > 0, 1.0)


def _slabs(weight: torch.Tensor, scale: torch.Tensor) -> Iterator[_Slab]:
    """The rows with scales that are `_in_use`."""
    rows, scales = _rows(weight), _rows(scale)
    for first, end in row_ranges(rows):
        values = rows[first:end]
        dense = values.float() * spread(part_of(scales, rows, first, end), values)
        largest = dense.abs().unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).amax((1, 3))
        mantissa, exponent = torch.frexp(largest / _LARGEST)
        # The quotient is 2**exponent at most, and 2**(exponent - 1) where the mantissa is a half.
        new = torch.ldexp(torch.ones_like(largest), exponent - (mantissa == 0.5).int())
        factor = spread(new, values)
        folded = (dense / factor).to(_E4M3)
        yield _Slab(first, folded, new, dense, folded.float() * factor != dense)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """[..., n, k] as [rows, k]."""
    return tensor.detach().reshape(-1, tensor.shape[-1])


def row_ranges(rows: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Whole blocks of rows, first and end, few enough for float32."""
    num_rows, k = rows.shape
    step = max(_MOST_ELEMENTS // k // BLOCK, 1) * BLOCK
    for first in range(0, num_rows, step):
        yield first, min(first + step, num_rows)


def part_of(scales: torch.Tensor, rows: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """The scales of a range of rows."""
    per_scale = rows.shape[0] // scales.shape[0]
    return scales[first // per_scale : -(-end // per_scale)]


def spread(scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Each scale at all of its elements, [rows, columns] of values."""
    rows, columns = (size // number for size, number in zip(values.shape, scales.shape))
    return scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
