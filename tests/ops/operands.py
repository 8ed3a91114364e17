"""Random operands, the float64 result that they should give, and the distance from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

OUT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


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
    m: int, n: int, k: int, *, scale_a: str = "row", scale_b: str = "row",
    bias_dtype: torch.dtype | None = None,
) -> ScaledOperands:
    """Fresh random operands; each scale is its own random number in [0.5, 1.5)."""
    return ScaledOperands(
        a=random_fp8(m, k),
        b=random_fp8(n, k).t(),
        scale_a=torch.rand((m, 1) if scale_a == "row" else (1, 1)) + 0.5,
        scale_b=torch.rand((1, n) if scale_b == "row" else ()) + 0.5,
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
