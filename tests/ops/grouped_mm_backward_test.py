"""The gradients of grouped_mm in bf16 on the reference backend."""

from __future__ import annotations

import itertools

import pytest
import torch
from operands import random_fp8, relative_error

import stoneware as sw
from stoneware.errors import ForwardOnlyError, UnsupportedError
from stoneware.ops.grouped_mm import backward
from stoneware.specs.tolerance import tolerance

N, K = 48, 64
ENDS = {"even": [8, 16, 24], "empty groups": [0, 17, 17], "one row": [1, 1, 1], "no rows": [0, 0, 0]}


def operands(ends: list[int], rows_after: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a = torch.randn(ends[-1] + rows_after, K).bfloat16().requires_grad_()
    weight = torch.randn(len(ends), N, K).bfloat16().requires_grad_()
    return a, weight, torch.tensor(ends, dtype=torch.int32)


def grouped(a, b, offs):
    """The result in the operands' dtype, of the rows that have a group."""
    begins = [0, *offs.tolist()]
    return torch.cat([a[begin:end] @ b[group] for group, (begin, end) in enumerate(itertools.pairwise(begins))])


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("rows_after", [0, 5])
def test_gradients_are_near_float64_and_those_of_rows_without_a_group_are_zero(ends, rows_after):
    a, weight, offs = operands(ends, rows_after)
    wide = [one.detach().double().requires_grad_() for one in (a, weight)]
    result = sw.grouped_mm(a, weight.mT, offs)
    dc = torch.randn(result.shape).bfloat16()
    dc[ends[-1] :] = float("nan")
    actual = torch.autograd.grad(result, (a, weight), dc)
    expected = torch.autograd.grad(grouped(wide[0], wide[1].mT, offs), wide, dc[: ends[-1]].double())
    for one, two in zip(actual, expected):
        assert one.dtype == torch.bfloat16
        assert one.is_contiguous()  # as its operand
        if two.norm():
            assert relative_error(one, two) <= tolerance("bf16", max(N, ends[-1]))
        else:
            assert not one.any()
    assert not actual[0][ends[-1] :].any()


@pytest.mark.parametrize("needed", ["a", "b"])
def test_only_what_is_needed_is_saved_and_computed(needed):
    a, weight, offs = operands([8, 16, 24])
    (a if needed == "b" else weight).requires_grad_(False)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: packed.append(one.shape), lambda one: None):
        sw.grouped_mm(a, weight.mT, offs)
    assert packed == [{"a": weight.mT, "b": a}[needed].shape, offs.shape]
    sw.grouped_mm(a, weight.mT, offs).sum().backward()
    assert (a.grad is None, weight.grad is None) == (needed == "b", needed == "a")


def test_gradcheck_and_gradgradcheck_are_exact():
    """As of matmul: small integers, and a step of one for a function that is bilinear."""
    offs = torch.tensor([2, 2, 3], dtype=torch.int32)

    def integers(*shape):
        return torch.randint(-3, 4, shape).double().requires_grad_()

    def multiply(a, weight):
        return sw.grouped_mm(a.bfloat16(), weight.bfloat16().mT, offs).double()

    inputs = integers(3, 8), integers(3, 8, 8)
    options = {"eps": 1.0, "atol": 0.0, "rtol": 0.0, "fast_mode": False}
    assert torch.autograd.gradcheck(multiply, inputs, **options)
    assert torch.autograd.gradgradcheck(multiply, inputs, (integers(3, 8),), **options)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiled_gradients_are_the_eager_ones_in_one_graph(compiler):
    torch._dynamo.reset()

    def loss(a, weight, offs):
        return sw.grouped_mm(a, weight.mT, offs).float().pow(2).sum()

    compiled = torch.compile(loss, backend=compiler, fullgraph=True)
    for ends in ENDS.values():
        a, weight, offs = operands(ends)
        expected = torch.autograd.grad(loss(a, weight, offs), (a, weight))
        for one, two in zip(torch.autograd.grad(compiled(a, weight, offs), (a, weight)), expected):
            assert torch.equal(one, two)


def test_operators_of_the_gradients_pass_torch_s_own_checks():
    a, weight, offs = operands([8, 16, 24])
    dc = torch.randn(24, N).bfloat16().requires_grad_()
    torch.library.opcheck(torch.ops.stoneware.grouped_mm, (a, weight.mT, offs, None, None, None, None, None))
    torch.library.opcheck(torch.ops.stoneware.grouped_mm_rows, (dc, weight, offs, "reference"))
    torch.library.opcheck(torch.ops.stoneware.grouped_mm_groups, (dc, a, offs, None))


def test_what_has_no_gradient_is_refused():
    a, weight, offs = operands([8, 16, 24])
    with pytest.raises(UnsupportedError, match="'sm90' has no kernels for the gradients of grouped_mm; use 've"):
        backward.rule((True, False, False, False, False), a, weight.mT, offs, None, None, None, None, "sm90", None)
    with pytest.raises(ForwardOnlyError, match="grouped_mm with out= has no backward, and a, b require a gradient"):
        sw.grouped_mm(a, weight.mT, offs, out=torch.empty(24, N).bfloat16())
    a8, w8 = random_fp8(24, K), random_fp8(3 * N, K).view(3, N, K)
    scales = torch.ones(24, requires_grad=True), torch.ones(3, N)
    with pytest.raises(ForwardOnlyError, match="no backward in fp8, and scale_a requires a gradient; multiply in bf16"):
        sw.grouped_mm(a8, w8.mT, offs, *scales)
