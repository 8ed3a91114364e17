"""Gradients on a GPU are right: of matmul in every layout, of grouped_mm, of the scales of scaled_mm."""

from __future__ import annotations

import math

import pytest
import torch

import stoneware
from stoneware.ops.tensor_checks import DTYPE_NAMES
from stoneware.specs import tolerance

DTYPES = [torch.bfloat16, torch.float16]

SHAPES = {
    "linear layer": ((3, 129, 256), (256, 512)),
    "odd number of tokens": ((1001, 256), (256, 512)),
    "odd sizes": ((33, 25), (25, 41)),
    "batch": ((5, 64, 128), (5, 128, 72)),
    "a for all": ((64, 128), (5, 128, 72)),
    "b for some": ((2, 3, 16, 64), (3, 64, 40)),
    "row": ((256,), (256, 512)),
    "column": ((512, 256), (256,)),
}


def leaf(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> torch.Tensor:
    """A random operand, column-major if its layout is "t"."""
    if len(shape) == 1 or layout == "n":
        return torch.randn(shape, device="cuda").to(dtype).requires_grad_()
    *batch, rows, columns = shape
    return torch.randn(*batch, columns, rows, device="cuda").to(dtype).mT.requires_grad_()


def check(actual: torch.Tensor, expected: torch.Tensor, length: int) -> None:
    limit = tolerance.on_gpu("bf16", DTYPE_NAMES[actual.dtype], length)
    error = torch.linalg.norm(actual.double() - expected) / torch.linalg.norm(expected)
    assert actual.shape == expected.shape
    assert error.item() <= limit, f"{error.item()} of {limit}"


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().double().requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("is_wide", [False, True])
def test_matmul(dtype, layout, name, is_wide):
    a, b = (leaf(shape, one, dtype) for shape, one in zip(SHAPES[name], layout))
    inputs, out_dtype = [a, b], torch.float32 if is_wide else dtype
    if b.ndim > 1:
        inputs.append(torch.randn(b.shape[-1], device="cuda").to(out_dtype).requires_grad_())
    wide = [double(one) for one in inputs]
    result = stoneware.matmul(*inputs, out_dtype=out_dtype)
    expected = torch.matmul(*wide[:2]) + (wide[2] if len(wide) > 2 else 0)
    dc = torch.randn(result.shape, device="cuda").to(dtype).to(out_dtype)
    grads = torch.autograd.grad(result, inputs, dc)
    for grad, want in zip(grads, torch.autograd.grad(expected, wide, dc.double())):
        check(grad, want, 4096)
    for grad, one in zip(grads[:2], (a, b)):
        if one.ndim == 2 and min(one.shape) > 1:
            assert grad.stride() == one.stride()


def test_second_order_of_matmul():
    tensors = [leaf((64, 128), "n", torch.bfloat16), leaf((128, 96), "t", torch.bfloat16)]

    def penalty(a, b, multiply):
        (grad,) = torch.autograd.grad(multiply(a, b).pow(2).sum(), a, create_graph=True)
        return torch.autograd.grad(grad.pow(2).sum(), (a, b))

    wide = penalty(*(double(one) for one in tensors), torch.matmul)
    for actual, expected in zip(penalty(*tensors, stoneware.matmul), wide):
        error = torch.linalg.norm(actual.double() - expected) / torch.linalg.norm(expected)
        assert error <= 4 * tolerance.on_gpu("bf16", "bf16", 128)  # of as many products, one after another


@pytest.mark.parametrize("counts", [[64, 64], [1, 0, 300, 17, 0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("rows_after", [0, 9])
def test_grouped_mm(counts, rows_after):
    used, groups, n, k = sum(counts), len(counts), 528, 272
    a = torch.randn(used + rows_after, k, device="cuda").bfloat16()
    a[used:] = math.nan
    a.requires_grad_()
    weight = torch.randn(groups, n, k, device="cuda").bfloat16().requires_grad_()
    offs = torch.tensor(counts).cumsum(0).to(torch.int32).cuda()
    dc = torch.randn(used + rows_after, n, device="cuda").bfloat16()
    dc[used:] = math.nan
    for _ in range(3):  # also where the memory of a result had other values
        grads = torch.autograd.grad(stoneware.grouped_mm(a, weight.mT, offs), (a, weight), dc)
    assert not grads[0][used:].any()
    begin = 0
    for group, count in enumerate(counts):
        rows = slice(begin, begin + count)
        begin += count
        if not count:
            assert not grads[1][group].any()
            continue
        check(grads[0][rows], dc[rows].double() @ weight[group].double(), n)
        check(grads[1][group], dc[rows].double().t() @ a[rows].double(), count)
    assert grads[1].is_contiguous()


@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
def test_scales_of_scaled_mm(kind):
    m, n, k = 192, 256, 512
    a, b = (torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
    shapes = {"tensor": ((), ()), "row": ((m, 1), (1, n)), "block": ((m, k // 128), (k // 128, n // 128))}
    scales = [(torch.rand(shape, device="cuda") + 0.5).requires_grad_() for shape in shapes[kind]]
    wide = [double(scale) for scale in scales]
    rows, columns = wide
    if kind == "block":
        rows = rows.repeat_interleave(128, 1)
        columns = columns.repeat_interleave(128, 0).repeat_interleave(128, 1)
        expected = (a.double() * rows) @ (b.double().t() * columns)
    else:
        expected = a.double() @ b.double().t() * rows * columns
    result = stoneware.scaled_mm(a, b.t(), *scales, use_fast_accum=False)
    dc = torch.randn(m, n, device="cuda").bfloat16()
    wanted = torch.autograd.grad(expected, wide, dc.double())
    for actual, want, scale in zip(torch.autograd.grad(result, scales, dc), wanted, wide):
        size = torch.linalg.norm(want)
        if kind == "tensor":
            # The terms of its only sum may cancel.
            size = torch.maximum(size, torch.linalg.norm(dc.double() * expected.detach() / scale.detach()))
        assert torch.linalg.norm(actual.double() - want) <= 1e-3 * size
