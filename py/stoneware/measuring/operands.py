"""Fresh operands for a problem of an op, its float64 reference, and the comparison with it.

Shared by the tuner, the benchmark and the GPU tests, so that all three mean the same by "right".
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from stoneware.measuring import tolerance
from stoneware.ops.grouped_mm.problem import Problem as GroupedMmProblem
from stoneware.ops.grouped_mm.shapes import ragged
from stoneware.ops.matmul.problem import Problem as MatmulProblem
from stoneware.ops.scaled_mm.problem import (
    BLOCK, Problem as ScaledMmProblem, num_blocks, padded_num_blocks,
)
from stoneware.ops.tensor_checks import TORCH_DTYPES

Problem = ScaledMmProblem | MatmulProblem | GroupedMmProblem

_CHUNK_BYTES = 1 << 29


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operands:
    """Tensors of a problem, as a plan takes them.

    Attributes:
      problem: what they are operands of.
      a, b: [m, k] and [k, n], of grouped_mm [groups, k, n], of a batch [batch, m, k] and
        [batch, k, n], with the problem's strides; what a view skips is NaN.
      out: [m, n] or [batch, m, n] view of `out_base`; both all NaN until something is written.
      out_base: the memory around out: guard rows and columns that must stay NaN.
      scales: (scale_a, scale_b) of fp8 operands, else empty.
      bias: [n] or None.
      offs: of grouped_mm, [groups] int32, the row after each group's last; else None.
    """

    problem: Problem
    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    out_base: torch.Tensor
    scales: tuple[torch.Tensor, ...]
    bias: torch.Tensor | None
    offs: torch.Tensor | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """In the order of a plan: a, b, out, the scales if the op has any, bias; of grouped_mm: a,
        b, out, offs, and each scale or None."""
        if self.offs is not None:
            return (self.a, self.b, self.out, self.offs, *(self.scales or (None, None)))
        return (self.a, self.b, self.out, *self.scales, self.bias)

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
    """A result beside its reference.

    Attributes:
      error: relative error in the Frobenius norm; infinite if an element is NaN or infinite.
      element_error: largest error of an element, in units of its row's root mean square.
      limit: what `error` must stay under, see tolerance.py.
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
            f"{self.element_error:.2e} of its row's rms (must be under "
            f"{tolerance.MAX_ELEMENT_ERROR:g})"
        )


def with_bias(problem: Problem, has_bias: bool) -> Problem:
    """The problem with a bias or without; the same one if its op has no bias."""
    return dataclasses.replace(problem, has_bias=has_bias) if takes_bias(problem) else problem


def takes_bias(problem: Problem) -> bool:
    """Whether the problem's op has a bias, not whether the problem has one."""
    return not isinstance(problem, GroupedMmProblem)


def make(problem: Problem, device: torch.device | str, *, guarded: bool = False) -> Operands:
    """Draws operands: normal values, scales in [0.5, 1.5), a bias as large as the products; for
    grouped_mm groups of rows as `ragged` deals them out.

    Args:
      problem: sizes, dtypes and leading dimensions.
      device: where.
      guarded: surround out with a guard of NaN, at the cost of two rows and of ldd >= n + 16; not
        of a batch.

    Raises:
      ValueError: `guarded` and ldd leaves no room for guard columns, or the problem is a batch.
    """
    out_dtype = TORCH_DTYPES[problem.out_dtype]
    if isinstance(problem, GroupedMmProblem):
        return _make_grouped(problem, device, guarded)
    layout = getattr(problem, "layout", "nt")
    a_dtype, b_dtype = TORCH_DTYPES[problem.a_dtype], TORCH_DTYPES[problem.b_dtype]
    if getattr(problem, "batch", 1) > 1:
        if guarded:
            raise ValueError(
                f"guarded={guarded} must be False for batch={problem.batch}; check one product "
                "with a guard"
            )
        a = _matrices(
            problem.batch, problem.m, problem.k, problem.batch_stride_a, problem.lda,
            layout[0] == "n", a_dtype, device,
        )
        b = _matrices(
            problem.batch, problem.k, problem.n, problem.batch_stride_b, problem.ldb,
            layout[1] == "n", b_dtype, device,
        )
        out_base, out = _poisoned_batch(
            (problem.batch, problem.m, problem.n), (problem.batch_stride_d, problem.ldd, 1),
            out_dtype, device,
        )
    else:
        a = _matrix(problem.m, problem.k, problem.lda, layout[0] == "n", a_dtype, device)
        b = _matrix(problem.k, problem.n, problem.ldb, layout[1] == "n", b_dtype, device)
        out_base, out = _poisoned_output(problem, out_dtype, device, guarded)
    scales: tuple[torch.Tensor, ...] = ()
    if isinstance(problem, ScaledMmProblem):
        scales = _block_scales(problem, device) if problem.scales == "block" else (
            torch.rand(problem.m if problem.scale_a == "row" else 1, 1, device=device) + 0.5,
            torch.rand(1, problem.n if problem.scale_b == "row" else 1, device=device) + 0.5,
        )
    bias = None
    if problem.has_bias:
        bias = (torch.randn(problem.n, device=device) * math.sqrt(problem.k)).to(out_dtype)
    return Operands(problem=problem, a=a, b=b, out=out, out_base=out_base, scales=scales, bias=bias)


def reference(operands: Operands) -> torch.Tensor:
    """The result in float64 arithmetic, kept as float32 (an error of 6e-8) to halve its memory."""
    result = torch.empty(operands.out.shape, dtype=torch.float32, device=operands.a.device)
    if result.dim() == 3:
        for product, a, b in zip(result, operands.a, operands.b):
            _multiply(product, a, b, operands.scales, operands.bias, False)
        return result
    if operands.offs is None:
        is_block = getattr(operands.problem, "scales", None) == "block"
        _multiply(result, operands.a, operands.b, operands.scales, operands.bias, is_block)
        return result
    ends = operands.offs.tolist()
    for group, (begin, end) in enumerate(zip([0, *ends], ends)):
        rows = slice(begin, end)
        scales: tuple[torch.Tensor, ...] = ()
        if operands.scales:
            scale_a, scale_b = operands.scales
            scales = scale_a[rows, None], scale_b[group, None]
        _multiply(result[rows], operands.a[rows], operands.b[group], scales, None, False)
    return result


def _multiply(
    result: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scales: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None, is_block: bool,
) -> None:
    """One product into `result`, by pieces that fit into memory in float64."""
    (m, k), n = a.shape, b.shape[1]
    chunk = max(16, _CHUNK_BYTES // (8 * k))
    for m_start in range(0, m, chunk):
        rows = slice(m_start, m_start + chunk)
        a_rows = a[rows].float().double()
        if is_block:
            a_rows *= scales[0][rows].double().repeat_interleave(BLOCK, 1)
        for n_start in range(0, n, chunk):
            columns = slice(n_start, n_start + chunk)
            b_columns = b[:, columns].float().double()
            if is_block:
                places = torch.arange(n, device=b.device)[columns] // BLOCK
                scale_b = scales[1][: k // BLOCK, places].double()
                b_columns *= scale_b.repeat_interleave(BLOCK, 0)
            block = a_rows @ b_columns
            if scales and not is_block:
                scale_a, scale_b = scales
                block *= (scale_a if scale_a.numel() == 1 else scale_a[rows]).double()
                block *= (scale_b if scale_b.numel() == 1 else scale_b[:, columns]).double()
            if bias is not None:
                block += bias[columns].double()
            result[rows, columns] = block.float()


def compare(out: torch.Tensor, expected: torch.Tensor, problem: Problem) -> Comparison:
    """Compares every element of a result of `problem` with `reference`'s."""
    limit = tolerance.on_gpu(problem.a_dtype, problem.out_dtype, problem.k)
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
        error=math.sqrt(squared_error / max(squared_norm, 1e-300)), element_error=element_error,
        limit=limit,
    )


def _matrix(
    rows: int,
    columns: int,
    stride: int,
    is_row_major: bool,
    dtype: torch.dtype,
    device: torch.device | str,
) -> torch.Tensor:
    """A [rows, columns] view of normal values with the leading dimension `stride`."""
    outer, inner = (rows, columns) if is_row_major else (columns, rows)
    values = torch.randn(outer, inner, device=device).to(dtype)
    if stride != inner:
        base = torch.full((outer, stride), math.nan, dtype=torch.float32, device=device).to(dtype)
        base[:, :inner] = values
        values = base[:, :inner]
    return values if is_row_major else values.t()


def _matrices(
    batch: int,
    rows: int,
    columns: int,
    batch_stride: int,
    stride: int,
    is_row_major: bool,
    dtype: torch.dtype,
    device: torch.device | str,
) -> torch.Tensor:
    """A [batch, rows, columns] view of normal values; of a batch stride of 0 all are the same."""
    outer, inner = (rows, columns) if is_row_major else (columns, rows)
    shape, strides = (batch, outer, inner), (batch_stride, stride, 1)
    _, values = _poisoned_batch(shape, strides, dtype, device)
    # One at a time: in float32 all of them take four times what fp8 does.
    for matrix in values if batch_stride else values[:1]:
        matrix.copy_(torch.randn(outer, inner, device=device).to(dtype))
    return values if is_row_major else values.mT


def _poisoned_batch(
    shape: tuple[int, int, int], strides: tuple[int, int, int], dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory of NaN that ends with the last element, and a view of it."""
    size = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides))
    # Bytes of ones are NaN in every dtype here, and fill_ does not take fp8.
    base = torch.full((size * dtype.itemsize,), 255, dtype=torch.uint8, device=device).view(dtype)
    return base, base.as_strided(shape, strides)


def _make_grouped(
    problem: GroupedMmProblem, device: torch.device | str, guarded: bool
) -> Operands:
    m, n, k, num_groups = problem.m, problem.n, problem.k, problem.num_groups
    dtype = TORCH_DTYPES[problem.a_dtype]
    a = _matrix(m, k, problem.lda, True, dtype, device)
    b = _matrices(
        num_groups, k, n, problem.group_stride_b, problem.ldb, False, dtype, device
    )
    scales: tuple[torch.Tensor, ...] = ()
    if problem.scales == "row":
        scales = (
            torch.rand(m, device=device) + 0.5, torch.rand(num_groups, n, device=device) + 0.5
        )
    offs = torch.tensor(ragged(m, num_groups), device=device).cumsum(0).to(torch.int32)
    out_base, out = _poisoned_output(problem, TORCH_DTYPES[problem.out_dtype], device, guarded)
    return Operands(
        problem=problem, a=a, b=b, out=out, out_base=out_base, scales=scales, bias=None, offs=offs
    )


def _block_scales(
    problem: ScaledMmProblem, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """scale_a [m, k / 128] and scale_b [k / 128, ceil(n / 128)], or with as many rows as torch wants;
    with the problem's strides, in memory that ends with the last element. What they skip is NaN."""
    blocks, columns = num_blocks(problem.k), num_blocks(problem.n)
    rows = padded_num_blocks(problem.k) if problem.is_scale_b_padded else blocks

    def view(rows: int, columns: int, row_stride: int, column_stride: int) -> torch.Tensor:
        size = (rows - 1) * row_stride + (columns - 1) * column_stride + 1
        base = torch.full((size,), math.nan, device=device)
        return base.as_strided((rows, columns), (row_stride, column_stride))

    scale_a = view(problem.m, blocks, problem.scale_a_stride_m, problem.ld_scale_a)
    scale_a.copy_(torch.rand(problem.m, blocks, device=device) + 0.5)
    scale_b = view(rows, columns, problem.ld_scale_b, problem.scale_b_stride_n)
    scale_b[:blocks].copy_(torch.rand(blocks, columns, device=device) + 0.5)
    return scale_a, scale_b


def _poisoned_output(
    problem: Problem, dtype: torch.dtype, device: torch.device | str, guarded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    m, n, ldd = problem.m, problem.n, problem.ldd
    if guarded and ldd < n + 16:
        raise ValueError(f"ldd={ldd} must be at least n + 16 = {n + 16} for a guarded output")
    rows = m + 2 if guarded else m
    base = torch.full((rows, ldd), math.nan, dtype=dtype, device=device)
    first_row, first_column = (1, 8) if guarded else (0, 0)  # 8: 16 bytes, so aligned
    return base, base[first_row : first_row + m, first_column : first_column + n]
