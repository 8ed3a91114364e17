"""Random operands, the float64 result that they should give, and the distance from it; and a device
to decide for."""

from __future__ import annotations

from dataclasses import dataclass

import h200
import torch

from stoneware.runtime.device import Device

H200 = Device(fingerprint=h200.H200)

OUT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BLOCK = 128


@dataclass(frozen=True)
class ScaledOperands:
    """Arguments of scaled_mm."""

    a: torch.Tensor
    b: torch.Tensor
    scale_a: torch.Tensor
    scale_b: torch.Tensor
    bias: torch.Tensor | None

    @property
    def expected(self) -> torch.Tensor:
        """The result in float64."""
        d = self.a.double() @ self.b.double() * self.scale_a.double() * self.scale_b.double()
        return d if self.bias is None else d + self.bias.double()


def random_fp8(num_rows: int, num_columns: int) -> torch.Tensor:
    return torch.randn(num_rows, num_columns).to(torch.float8_e4m3fn)


def scaled_operands(
    m: int, n: int, k: int, *, scale_a: str = "row", scale_b: str = "row", bias_dtype: torch.dtype | None = None
) -> ScaledOperands:
    """Fresh random operands; each scale is its own random number in [0.5, 1.5)."""
    return ScaledOperands(
        a=random_fp8(m, k),
        b=random_fp8(n, k).t(),
        scale_a=torch.rand((m, 1) if scale_a == "row" else (1, 1)) + 0.5,
        scale_b=torch.rand((1, n) if scale_b == "row" else ()) + 0.5,
        bias=None if bias_dtype is None else torch.randn(n).to(bias_dtype),
    )


@dataclass(frozen=True)
class BlockScaledOperands(ScaledOperands):
    """With scale_a [m, k / 128] and scale_b [at least k / 128, ceil(n / 128) or n]."""

    @property
    def expected(self) -> torch.Tensor:
        (_, k), n = self.a.shape, self.b.shape[1]
        rows = self.scale_a.double().repeat_interleave(BLOCK, 1)
        columns = self.scale_b.double()[: k // BLOCK].repeat_interleave(BLOCK, 0)
        columns = columns if columns.shape[1] == n else columns.repeat_interleave(BLOCK, 1)[:, :n]
        d = (self.a.double() * rows) @ (self.b.double() * columns)
        return d if self.bias is None else d + self.bias.double()


def block_scaled_operands(
    m: int, n: int, k: int, *, layout: str = "torch", bias_dtype: torch.dtype | None = None, is_1d: bool = False
) -> BlockScaledOperands:
    """Fresh random operands; the scales of a block are its own random numbers in [0.5, 1.5).

    Args:
      layout: of the scales. "torch": scale_a with the strides (1, m), scale_b padded along k to a
        multiple of 4 rows, with the strides (1, rows); "dense": both row-major; "padded": scale_a
        with the strides (1, m rounded up to 4), scale_b a view without its padding; "strided":
        every second element both ways. What a view skips is NaN.
      is_1d: whether each column of b has scales of its own; "torch" has these row-major.
    """
    blocks, columns = k // BLOCK, n if is_1d else -(-n // BLOCK)
    rows = -(-blocks // 4) * 4
    scale_a, scale_b = torch.rand(m, blocks) + 0.5, torch.rand(blocks, columns) + 0.5

    def inside(shape: tuple[int, int], strides: tuple[int, int], size: int) -> torch.Tensor:
        return torch.full((size,), float("nan")).as_strided(shape, strides)

    if layout == "torch":
        a = inside((m, blocks), (1, m), m * blocks).copy_(scale_a)
        b = scale_b
        if not is_1d:
            b = inside((rows, columns), (1, rows), rows * columns)
            b[:blocks].copy_(scale_b)
    elif layout == "dense":
        a, b = scale_a, scale_b
    elif layout == "padded":
        ld = -(-m // 4) * 4
        a = inside((m, blocks), (1, ld), ld * blocks).copy_(scale_a)
        b = inside((blocks, columns), (1, rows), rows * columns).copy_(scale_b)
    else:
        a = inside((m, blocks), (4 * blocks, 2), 4 * m * blocks).copy_(scale_a)
        b = inside((blocks, columns), (4 * columns, 2), 4 * blocks * columns).copy_(scale_b)
    return BlockScaledOperands(
        a=random_fp8(m, k),
        b=random_fp8(n, k).t(),
        scale_a=a,
        scale_b=b,
        bias=None if bias_dtype is None else torch.randn(n).to(bias_dtype),
    )


def poisoned(m: int, n: int, dtype: torch.dtype, ldd: int | None = None) -> torch.Tensor:
    """An out of [m, n] in rows of ldd elements, full of NaN."""
    return torch.full((m, ldd or n), float("nan"), dtype=dtype)[:, :n]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """|actual - expected| / |expected| in the Frobenius norm; NaN in `actual` gives NaN, which is
    below no tolerance."""
    difference = torch.linalg.norm(actual.double() - expected)
    return (difference / torch.linalg.norm(expected)).item()
