"""Random bits of `sw.dropout`, with torch: what philox.h computes, whose first lines describe it."""

from __future__ import annotations

from typing import Any

import torch

from stoneware.errors import UnsupportedError

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10

_MOST = 2**31
"""Rows and columns that a tensor must stay below: those of a matmul's result are int32."""

Word = Any
"""32 bits without sign: an int, or an int64 tensor of them. An operation on words broadcasts."""


def philox(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Philox-4x32-10: 4 words of random bits."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(_NUM_ROUNDS):
        high0, low0 = _product(_MULTIPLIERS[0], c0)
        high1, low1 = _product(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def _product(multiplier: int, word: Word) -> tuple[Word, Word]:
    """The high and the low word of multiplier * word, for an odd multiplier.

    In int64 without overflow: with word = 2^31 + w, the product is multiplier // 2 * 2^32 + 2^31 + multiplier * w.
    """
    rest = (word - 2**31) * multiplier + 2**31
    return (rest >> 32) + multiplier // 2, rest & _MASK


def halves(value: Any) -> tuple[Word, Word]:
    """The low and the high word of an int64: an int or a tensor."""
    return value & _MASK, (value >> 32) & _MASK


def threshold(p: float) -> int:
    """Elements whose word is less are dropped."""
    return min(round(p * 2**32), _MASK)


def scale(p: float) -> float:
    """What kept values are multiplied by."""
    return 1 / (1 - p)


def is_dropped(shape: torch.Size, p: float, seed: Any, offset: Any, device: torch.device) -> torch.Tensor:
    """Whether each element of a tensor is dropped: bool, of this shape.

    Args:
      shape: of the tensor. Leading dimensions are rows; a tensor of one dimension is a row.
      p: probability that an element is dropped.
      seed, offset: int64: an int, or a tensor with one element on the device.
      device: of the result.

    Raises:
      UnsupportedError: there are too many rows or columns.
    """
    columns = shape[-1] if len(shape) else 1
    rows = shape[:-1].numel()
    if rows >= _MOST or columns >= _MOST:
        raise UnsupportedError(
            f"x.shape={list(shape)} of dropout must have fewer than {_MOST} rows and columns, and has {rows} and "
            f"{columns}; reshape x"
        )
    seed, offset = (value.reshape(()) if isinstance(value, torch.Tensor) else value for value in (seed, offset))
    blocks = (columns + 15) // 16
    counter = (torch.arange(blocks * 4, device=device), torch.arange(rows, device=device)[:, None], *halves(offset))
    least = threshold(p)
    of_words = torch.stack([word < least for word in philox(counter, halves(seed))], -1)
    # A word is 2 * (bit 3 of the column) + (bit 0), and a counter has bits 1 and 2.
    in_order = of_words.view(rows, blocks, 4, 2, 2).permute(0, 1, 3, 2, 4)
    return in_order.reshape(rows, blocks * 16)[:, :columns].reshape(shape)


def dropout(x: torch.Tensor, p: float, seed: Any, offset: Any) -> torch.Tensor:
    """x with some elements 0, and the others scaled.

    Args:
      x: any floating point dtype that torch multiplies; the result is rounded once.
      p, seed, offset: as for `is_dropped`.
    """
    mask = is_dropped(x.shape, p, seed, offset, x.device)
    return (x * scale(p)).masked_fill_(mask, 0.0)
