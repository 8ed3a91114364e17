"""Backend of the vendor library: torch._scaled_mm, which is cuBLASLt or torch's own CUTLASS.

Block scales go to torch._scaled_mm_v2, behind torch.nn.functional.scaled_mm, which takes an out. It takes
them in one layout; those of another one are copied into it at each call. cuBLASLt reads scale_a in units of
16 bytes, so m must be a multiple of 4; the remaining rows run as a second matmul.
"""

from __future__ import annotations

import functools

import torch

from stoneware.ops import tensor_checks
from stoneware.ops.backend import Conversion, Plan, TorchBackend, torch_plan
from stoneware.ops.cuda_context import THREAD, make_current
from stoneware.ops.native_call import Direct
from stoneware.ops.tensor_checks import Copy
from stoneware.runtime.device import Device
from stoneware.runtime.dtypes import TORCH_DTYPES
from stoneware.specs.scaled_mm import SPEC, VENDOR
from stoneware.specs.scaled_mm_problem import Problem, num_blocks, padded_num_blocks

_CUDA = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])

_BLOCK_RECIPES = {"block_1x128": 4, "block_128x128": 5}
"""BlockWise1x128 and BlockWise128x128 of torch.nn.functional.ScalingType."""


_UNIT_M, _LEAST_M_IN_PARTS = 4, 1024


def _block_scales(problem: Problem, device: Device) -> str | None:
    """Restrictions of `_scaled_block1x128_block128x128` (ScaledBlas.cpp) and of cuBLASLt."""
    if device.compute_capability[0] != 9:
        return (
            "torch has block scales on compute capability 9.0 only, the device has "
            f"{_dotted(device.compute_capability)}"
        )
    if problem.m % _UNIT_M and problem.m < _LEAST_M_IN_PARTS:
        return (
            f"m={problem.m} must be a multiple of {_UNIT_M} for cuBLASLt, which reads scale_a in units of 16 bytes, "
            f"or at least {_LEAST_M_IN_PARTS}, where a second matmul for the last rows costs little"
        )
    if device.is_described:
        return None
    if _CUDA < (12, 9):
        return f"torch has block scales from CUDA 12.9 on, this one has {torch.version.cuda}"
    return None


def _row_scales(problem: Problem, device: Device) -> str | None:
    """Restrictions of cuBLASLt behind row scales, and of the CUTLASS kernels that torch uses where
    cuBLASLt is older than 12.9 or the arch is not Hopper."""
    where = f"torch {torch.__version__} on compute capability {_dotted(device.compute_capability)}"
    if _CUDA >= (12, 9) and device.compute_capability[0] == 9:
        if problem.has_bias:
            # Seen with torch 2.11 and CUDA 13.0 at m=1 and 16, n=2112, k=7168 and six more shapes.
            return (
                f"torch._scaled_mm with row scales and a bias fails at some shapes in {where} "
                "(CUBLAS_STATUS_NOT_SUPPORTED)"
            )
        return None
    if problem.out_dtype == "fp32":
        return f"torch._scaled_mm with row scales gives no float32 result in {where}"
    if problem.lda != problem.k or problem.ldb != problem.k:
        return (
            f"torch._scaled_mm with row scales takes no sliced views in {where}: lda={problem.lda} "
            f"and ldb={problem.ldb} must be k={problem.k}"
        )
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _plan(problem: Problem) -> Plan:
    plan = _plan_block_scales(problem) if problem.has_block_scales else _plan_matrix_scales(problem)
    # torch's kernels of row and block scales write dense rows.
    return tensor_checks.with_copies(SPEC, plan, {} if problem.ldd == problem.n else {"out": tensor_checks.dense_like})


def _plan_matrix_scales(problem: Problem) -> Plan:
    scaled_mm, use_fast_accum = torch._scaled_mm, problem.use_fast_accum
    out_dtype = TORCH_DTYPES[problem.out_dtype]

    def run(
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> None:
        if not THREAD.has_context:
            make_current()
        scaled_mm(a, b, scale_a, scale_b, bias=bias, out_dtype=out_dtype, use_fast_accum=use_fast_accum, out=out)

    return torch_plan(run, _direct(problem, use_fast_accum))


def _direct(problem: Problem, use_fast_accum: bool) -> Direct:
    """A call of torch._scaled_mm."""
    scale_result = None
    return Direct(torch._scaled_mm, _INPUTS, (scale_result, TORCH_DTYPES[problem.out_dtype], use_fast_accum))


_INPUTS = [SPEC.plan_order.index(name) for name in ("a", "b", "scale_a", "scale_b", "bias")]
"""The positions of the inputs among the tensors of a plan. A bias may be None."""


_COPY_US, _COPY_BYTES_PER_US = 1.4, 0.6e6
"""Time of a transposing copy of float32: 1.3 us for 16 KB, 3.3 for 1 MB and 8.5 for 4 MB, on an H200, in a CUDA
graph of fifty."""


_PART_US, _READ_BYTES_PER_US = 5.0, 3e6
"""Time of a matmul of four rows: its launch, and its read of the weight."""


def _parts(m: int) -> list[tuple[int, int]]:
    """The first row and the end of each matmul. The last matmul may repeat rows of the first, with the same
    result."""
    whole = m - m % _UNIT_M
    return [(0, m)] if whole == m else [(0, whole), (m - _UNIT_M, m)]


def _scales_to_copy(problem: Problem) -> list[str]:
    """The block scales whose layout is not that of torch's kernel."""
    if not problem.has_block_scales:
        return []
    strides_a = problem.scale_a_stride_m, problem.ld_scale_a
    strides_b = problem.ld_scale_b, problem.scale_b_stride_n
    is_a_right = strides_a == (1, problem.m) and problem.m % _UNIT_M == 0
    if problem.scales == "block_1d":
        is_b_right = strides_b == (problem.n, 1)
    else:
        is_b_right = problem.is_scale_b_padded and strides_b == (1, padded_num_blocks(problem.k))
    return [name for name, is_right in (("a", is_a_right), ("b", is_b_right)) if not is_right]


def _layout(columns: int, rows: int, *, copies_scales: bool) -> Copy | None:
    """How scales with this number of columns get the strides (1, rows) and zeros up to `rows` rows; None if
    they have this layout."""
    if copies_scales:
        return functools.partial(_copy, rows)
    if columns > 1:
        return None
    # The second stride of a single column is arbitrary, but torch checks it.
    return lambda scale: scale.as_strided(scale.shape, (1, scale.shape[0]))


def _copy(rows: int, scale: torch.Tensor) -> torch.Tensor:
    make = scale.new_empty if rows == scale.shape[0] else scale.new_zeros
    copy = make(scale.shape[1], rows).t()
    copy[: scale.shape[0]] = scale
    return copy


def _plan_block_scales(problem: Problem) -> Plan:
    # Not torch.ops.aten._scaled_mm_v2.out, which takes a Python function and a slower parser at each call.
    scaled_mm, out_dtype = torch._scaled_mm_v2, TORCH_DTYPES[problem.out_dtype]
    recipe_a, recipe_b = ([_BLOCK_RECIPES[kind]] for kind in (problem.scale_a, problem.scale_b))
    is_1d = problem.scales == "block_1d"
    copies, parts, blocks = _scales_to_copy(problem), _parts(problem.m), num_blocks(problem.k)
    # torch takes scales of single columns like those of a, [n, k / 128].
    rows, columns = (problem.n, blocks) if is_1d else (padded_num_blocks(problem.k), num_blocks(problem.n))
    layouts_a = [_layout(blocks, end - begin, copies_scales="a" in copies) for begin, end in parts]
    layout_b = _layout(columns, rows, copies_scales="b" in copies)

    def run(
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> None:
        if not THREAD.has_context:
            make_current()
        if is_1d:
            scale_b = scale_b.t()
        if layout_b is not None:
            scale_b = layout_b(scale_b)
        for (begin, end), layout in zip(parts, layouts_a):
            a_rows, scale, out_rows = a, scale_a, out
            if len(parts) > 1:
                a_rows, scale, out_rows = a[begin:end], scale_a[begin:end], out[begin:end]
            if layout is not None:
                scale = layout(scale)
            scaled_mm(
                a_rows, b, [scale], recipe_a, [], [scale_b], recipe_b, [], bias, out_dtype, [], False, out=out_rows
            )

    layout_a = layouts_a[0]
    if len(parts) > 1:
        return torch_plan(run)
    if not is_1d and layout_a is layout_b is None and rows == blocks:
        # It tells these scales from others by their shapes, without lists, which take longer to read. Columns of
        # scale_b that end with zeros it refuses.
        return torch_plan(run, _direct(problem, use_fast_accum=False))

    def direct(
        a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if is_1d:
            scale_b = scale_b.t()
        if layout_b is not None:
            scale_b = layout_b(scale_b)
        if layout_a is not None:
            scale_a = layout_a(scale_a)
        return scaled_mm(a, b, [scale_a], recipe_a, [], [scale_b], recipe_b, [], bias, out_dtype)

    return torch_plan(run, Direct(direct, _INPUTS))


class _Vendor(TorchBackend):
    def why_not(self, problem: Problem, device: Device) -> str | None:
        """The restrictions of `_scaled_mm_out_cuda` (aten/src/ATen/native/cuda/ScaledBlas.cpp)."""
        if device.compute_capability < (8, 9):
            has = _dotted(device.compute_capability)
            return f"torch._scaled_mm needs compute capability 8.9 or later, {device} has {has}"
        if problem.a_dtype == problem.b_dtype == "e5m2":
            return "torch._scaled_mm cannot multiply two float8_e5m2 matrices"
        if problem.has_bias and problem.out_dtype == "fp32":
            return "torch._scaled_mm adds no bias to a float32 result"
        if problem.has_block_scales:
            return _block_scales(problem, device)
        if problem.scale_a != problem.scale_b:
            return (
                "torch._scaled_mm takes two scales of one kind, these are "
                f"scale_a={problem.scale_a} and scale_b={problem.scale_b}"
            )
        if problem.scale_a == "tensor" or device.is_described:
            return None
        return _row_scales(problem, device)

    def conversion(self, problem: Problem) -> Conversion | None:
        copies = _scales_to_copy(problem)
        if not copies:
            return None
        m, blocks, padded = problem.m, num_blocks(problem.k), padded_num_blocks(problem.k)
        is_1d = problem.scales == "block_1d"
        num_floats = {"a": m * blocks, "b": blocks * (problem.n if is_1d else num_blocks(problem.n))}
        strides = f"strides (n, 1)=({problem.n}, 1)" if is_1d else f"{padded} rows and strides (1, {padded})"
        remedies = {
            "a": f"scale_a with strides (1, m)=(1, {m}) instead of ({problem.scale_a_stride_m}, {problem.ld_scale_a})",
            "b": f"scale_b with {strides} instead of ({problem.ld_scale_b}, {problem.scale_b_stride_n})",
        }
        us = sum(_COPY_US + 4 * num_floats[name] / _COPY_BYTES_PER_US for name in copies)
        work = "copies " + " and ".join(f"scale_{name} ({num_floats[name]} floats)" for name in copies)
        if m % _UNIT_M:
            us += _PART_US + problem.n * problem.k / _READ_BYTES_PER_US
            work += f" and runs a second matmul for the last {_UNIT_M} rows"
            remedies["a"] = f"a with rows of zeros up to a multiple of {_UNIT_M}"
        return Conversion(
            f"each call {work}, for the layout of torch's kernel, about {us:.1f} us in addition to the measured time; "
            f"lay them out once: {', '.join(remedies[name] for name in copies)}",
            us,
        )

    def may_have_our_bits(self, problem: Problem) -> bool:
        """Only with block scales: torch applies row and tensor scales in another order than our kernels."""
        return problem.scales == "block"


BACKEND = _Vendor(VENDOR, _plan)
