"""Fresh operands of a problem, its float64 reference, and the comparison with it.

The tuner, the benchmark and the GPU tests share them, so that "right" means the same in all three.
An op's own `<op>_operands.py` draws and multiplies with the parts below.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from stoneware.runtime.dtypes import TORCH_DTYPES
from stoneware.specs import spec_of, tolerance

Device = torch.device | str

_CHUNK_BYTES = 1 << 29

OPERANDS = {
    "scaled_mm": "stoneware.measuring.scaled_mm_operands",
    "matmul": "stoneware.measuring.matmul_operands",
    "grouped_mm": "stoneware.measuring.grouped_mm_operands",
}
"""Op -> the module that has its `make` and `reference`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operands:
    """Tensors of a problem; `operands.a` is `operands.tensors["a"]`, and so on.

    Attributes:
      tensors: by the names of the op's spec, with the problem's strides; what a view skips is NaN.
        `out` is a view of `out_base`; both are all NaN until something is written.
      out_base: the memory of out, with the guard rows and columns that must stay NaN.
    """

    problem: Any
    tensors: Mapping[str, torch.Tensor | None]
    out_base: torch.Tensor

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["tensors"][name]
        except KeyError:
            raise AttributeError(f"{name!r} is no tensor of {self.__dict__.get('problem')}") from None

    @property
    def scales(self) -> tuple[torch.Tensor, ...]:
        """(scale_a, scale_b) if the problem has them."""
        scales = [self.tensors.get(name) for name in ("scale_a", "scale_b")]
        return tuple(scale for scale in scales if scale is not None)

    @property
    def arguments(self) -> tuple[torch.Tensor | None, ...]:
        """In the order of a plan."""
        return tuple(self.tensors[name] for name in spec_of(self.problem.key.op).plan_order)

    def replace(self, **tensors: torch.Tensor | None) -> Operands:
        """A copy in which these tensors replace those of the same name."""
        return dataclasses.replace(self, tensors={**self.tensors, **tensors})

    def poison(self) -> None:
        """Fills out and its guard with NaN."""
        self.out_base.fill_(math.nan)

    def is_guard_unharmed(self) -> bool:
        """Whether everything around out is still NaN."""
        saved = self.out.clone()
        self.out.fill_(math.nan)
        unharmed = bool(self.out_base.isnan().all())
        self.out.copy_(saved)
        return unharmed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """How far a result is from its reference.

    Attributes:
      error: relative error in the Frobenius norm; infinite if an element is NaN or infinite.
      element_error: largest error of an element, in units of its row's root mean square.
      limit: `error` must be below it, see tolerance.py.
    """

    error: float
    element_error: float
    limit: float

    @property
    def is_right(self) -> bool:
        return self.error < self.limit and self.element_error < tolerance.MAX_ELEMENT_ERROR

    def __str__(self) -> str:
        return (
            f"relative error {self.error:.2e} (must be under {self.limit:.2e}), worst element "
            f"{self.element_error:.2e} of its row's rms (must be under {tolerance.MAX_ELEMENT_ERROR:g})"
        )


def with_bias(problem: Any, has_bias: bool) -> Any:
    """The problem with a bias or without; unchanged if its op takes no bias."""
    return dataclasses.replace(problem, has_bias=has_bias) if takes_bias(problem) else problem


def takes_bias(problem: Any) -> bool:
    """Whether the problem's op takes a bias, not whether the problem has one."""
    return "has_bias" in spec_of(problem.key.op).takes


def of_op(op: str) -> ModuleType:
    """The module with an op's `make` and `reference`; KeyError for another op."""
    return importlib.import_module(OPERANDS[op])


def make(problem: Any, device: Device, **options: Any) -> Operands:
    """Draws operands: normal values, scales in [0.5, 1.5), a bias as large as the products; for
    grouped_mm groups of rows as uneven as a router makes them."""
    drawn: Operands = of_op(problem.key.op).make(problem, device, **options)
    return drawn


def guarded(operands: Operands) -> Operands:
    """The operands with an out that has a guard of NaN: a row above and below, 8 columns on each side.

    Raises:
      ValueError: ldd < n + 16, or the problem is a batch.
    """
    out, ldd = operands.out, operands.problem.ldd
    if out.dim() != 2:
        raise ValueError(f"out of shape {list(out.shape)} must be one matrix for a guard; check one product of a batch")
    m, n = out.shape
    if ldd < n + 16:
        raise ValueError(f"ldd={ldd} must be at least n + 16 = {n + 16} for a guarded output; pass a larger ldd")
    base = torch.full((m + 2, ldd), math.nan, dtype=out.dtype, device=out.device)
    out = base[1 : m + 1, 8 : n + 8]  # 8: 16 bytes, so aligned
    return dataclasses.replace(operands.replace(out=out), out_base=base)


def reference(operands: Operands) -> torch.Tensor:
    """The result in float64 arithmetic, kept as float32 (an error of 6e-8) to halve its memory."""
    result: torch.Tensor = of_op(operands.problem.key.op).reference(operands)
    return result


def compare(out: torch.Tensor, expected: torch.Tensor, problem: Any) -> Comparison:
    """Compares every element of `problem`'s result with the reference."""
    return compare_within(out, expected, spec_of(problem.key.op).tolerance(problem))


def compare_within(out: torch.Tensor, expected: torch.Tensor, limit: float) -> Comparison:
    """Compares every element; the relative error must be under `limit`."""
    squared_error = squared_norm = element_error = 0.0
    out, expected = out.flatten(0, -2), expected.flatten(0, -2)
    rows_at_once = max(1, _CHUNK_BYTES // (8 * out.shape[1]))
    for start in range(0, out.shape[0], rows_at_once):
        want = expected[start : start + rows_at_once].double()
        difference = out[start : start + rows_at_once].double() - want
        if not bool(torch.isfinite(difference).all()):
            return Comparison(error=math.inf, element_error=math.inf, limit=limit)
        squared_error += float(difference.square().sum())
        squared_norm += float(want.square().sum())
        row_rms = want.square().mean(dim=1, keepdim=True).sqrt().clamp_min(1e-30)
        element_error = max(element_error, float((difference.abs() / row_rms).max()))
    return Comparison(
        error=math.sqrt(squared_error / max(squared_norm, 1e-300)), element_error=element_error, limit=limit
    )


def multiply(
    result: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    block: int = 1,
) -> None:
    """(scale_a * a) @ (scale_b * b) + bias into `result`, in float64, in pieces that fit memory.

    In each dimension a scale has the size of its operand, 1, or one element per `block`.
    """
    (m, k), n = a.shape, b.shape[1]
    step = max(block, _CHUNK_BYTES // (8 * k) // block * block, 16)
    scale_b = None if scale_b is None else scale_b.t()
    for m_start in range(0, m, step):
        rows = slice(m_start, m_start + step)
        a_rows = _scaled_rows(a, scale_a, rows, block)
        for n_start in range(0, n, step):
            columns = slice(n_start, n_start + step)
            product = a_rows @ _scaled_rows(b.t(), scale_b, columns, block).t()
            if bias is not None:
                product += bias[columns].double()
            result[rows, columns] = product.float()


def _scaled_rows(x: torch.Tensor, scale: torch.Tensor | None, rows: slice, block: int) -> torch.Tensor:
    """Rows of scale * x, in float64."""
    values = x[rows].float().double()
    if scale is not None:
        if scale.shape[0] not in (1, x.shape[0]):
            scale = scale.repeat_interleave(block, 0)
        scale = scale if scale.shape[0] == 1 else scale[rows][: values.shape[0]]
        if scale.shape[1] not in (1, x.shape[1]):
            scale = scale.repeat_interleave(block, 1)[:, : x.shape[1]]
        values *= scale.double()
    return values


def product(
    problem: Any,
    device: Device,
    batch: Mapping[str, tuple[int, int]] | None = None,
    *,
    period: int | None = None,
    **others: torch.Tensor | None,
) -> Operands:
    """Draws a and b with the problem's dtypes, layout and leading dimensions, a bias if it has one, and makes
    out; see `make`.

    Args:
      batch: "a", "b" or "out" -> (matrices, elements from one to the next; 0 if all are the same one), where
        it is a batch.
      period: draw this number of rows of a and columns of b, and repeat them; None: draw all.
      others: the op's other tensors.
    """
    m, n, k, batch = problem.m, problem.n, problem.k, batch or {}
    tensors: dict[str, torch.Tensor | None] = dict(others)
    for name, size, drawn, layout in (
        ("a", (m, k), (min(m, period or m), k), problem.layout[0]),
        ("b", (k, n), (k, min(n, period or n)), problem.layout[1]),
    ):
        dtype, leading = TORCH_DTYPES[getattr(problem, f"{name}_dtype")], getattr(problem, f"ld{name}")
        tensors[name] = _matrices(size, drawn, leading, batch.get(name), layout == "n", dtype, device)
    dtype, (num, stride) = TORCH_DTYPES[problem.out_dtype], batch.get("out", (1, 0))
    out_base, out = poisoned((num, m, n), (stride, problem.ldd, 1), dtype, device)
    tensors["out"] = out if "out" in batch else out[0]
    if takes_bias(problem):
        tensors["bias"] = bias(problem, dtype, device) if problem.has_bias else None
    return Operands(problem=problem, out_base=out_base, tensors=tensors)


def _matrices(
    size: tuple[int, int],
    drawn: tuple[int, int],
    leading: int,
    batch: tuple[int, int] | None,
    is_row_major: bool,
    dtype: torch.dtype,
    device: Device,
) -> torch.Tensor:
    """A view of normal values, of one matrix or of a batch; either rows or columns are contiguous. Elements
    beyond `drawn` repeat it."""
    outer, inner = size if is_row_major else size[::-1]
    drawn = drawn if is_row_major else drawn[::-1]
    num, stride = batch or (1, 0)
    _, values = poisoned((num, outer, inner), (stride, leading, 1), dtype, device)
    # One at a time: float32 values of all would take four times the memory of fp8.
    for matrix in values if stride else values[:1]:
        matrix[: drawn[0], : drawn[1]] = torch.randn(drawn, device=device).to(dtype)
        _repeat(matrix, drawn[0])
        _repeat(matrix.t(), drawn[1])
    values = values if is_row_major else values.mT
    return values if batch else values[0]


def _repeat(matrix: torch.Tensor, num_rows: int) -> None:
    """Fills the rows from `num_rows` on with those before, again and again."""
    while num_rows < matrix.shape[0]:
        further = matrix[num_rows : 2 * num_rows]
        further.copy_(matrix[: further.shape[0]])
        num_rows *= 2


def poisoned(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: Device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory of NaN that ends with the view's last element, and the view."""
    size = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides))
    # Bytes of ones are NaN in every dtype here, and fill_ does not take fp8.
    base = torch.full((size * dtype.itemsize,), 255, dtype=torch.uint8, device=device).view(dtype)
    return base, base.as_strided(shape, strides)


def scale(rows: int, columns: int, device: Device) -> torch.Tensor:
    """float32 [rows, columns] in [0.5, 1.5)."""
    return torch.rand(rows, columns, device=device) + 0.5


def bias(problem: Any, dtype: torch.dtype, device: Device) -> torch.Tensor:
    """[n], as large as the products of the problem."""
    return (torch.randn(problem.n, device=device) * math.sqrt(problem.k)).to(dtype)
