"""The gradients of scaled_mm on the reference backend: of scales and bias; fp8 operands are frozen."""

from __future__ import annotations

import pytest
import torch
from operands import BLOCK, block_scaled_operands, relative_error, scaled_operands

import stoneware as sw
from stoneware.errors import ForwardOnlyError
from stoneware.specs.tolerance import tolerance

M, N, K = 33, 144, 256
KINDS = {
    "row, row": lambda: scaled_operands(M, N, K, bias_dtype=torch.bfloat16),
    "tensor, row": lambda: scaled_operands(M, N, K, scale_a="tensor", bias_dtype=torch.bfloat16),
    "row, tensor": lambda: scaled_operands(M, N, K, scale_b="tensor", bias_dtype=torch.bfloat16),
    "tensor, tensor": lambda: scaled_operands(M, N, K, scale_a="tensor", scale_b="tensor", bias_dtype=torch.bfloat16),
    "one row": lambda: scaled_operands(1, N, K, bias_dtype=torch.bfloat16),
    **{
        f"block, {layout}": lambda layout=layout: block_scaled_operands(
            M, N, K, layout=layout, bias_dtype=torch.bfloat16
        )
        for layout in ("torch", "dense", "strided")
    },
    **{
        f"blocks of columns, {layout}": lambda layout=layout: block_scaled_operands(
            M, N, K, layout=layout, bias_dtype=torch.bfloat16, is_1d=True
        )
        for layout in ("dense", "strided")
    },
    "one block of k": lambda: block_scaled_operands(M, N, BLOCK, layout="dense", bias_dtype=torch.bfloat16),
}


def leaves(x) -> list[torch.Tensor]:
    # What a view skips is NaN; clone() would drop the strides.
    return [one.detach().requires_grad_() for one in (x.scale_a, x.scale_b, x.bias)]


def in_double(x, scale_a, scale_b, bias):
    return type(x)(x.a, x.b, scale_a, scale_b, bias).expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_gradients_are_near_float64_for_every_kind_of_scale(kind, out_dtype):
    x = KINDS[kind]()
    scale_a, scale_b, bias = leaves(x)
    bias = bias.detach().to(out_dtype).requires_grad_()
    inputs = [scale_a, scale_b, bias]
    result = sw.scaled_mm(x.a, x.b, *inputs, out_dtype=out_dtype)
    dc = torch.randn(result.shape).to(out_dtype)
    wide = [one.detach().double().requires_grad_() for one in inputs]
    expected = torch.autograd.grad(in_double(x, *wide), wide, dc.double())
    actual = torch.autograd.grad(result, inputs, dc)
    for one, two, dtype in zip(actual, expected, ("fp32", "fp32", "fp32" if out_dtype == torch.float32 else "bf16")):
        assert one.shape == two.shape
        known = torch.nan_to_num(one), torch.nan_to_num(two)
        assert relative_error(*known) <= tolerance(dtype, M * N * K)


def test_scale_of_zero_has_a_gradient():
    x = scaled_operands(M, N, K)
    zero = torch.zeros(M, 1, requires_grad=True)
    sw.scaled_mm(x.a, x.b, zero, x.scale_b).float().sum().backward()
    expected = (x.a.double() @ x.b.double() * x.scale_b.double()).sum(1, keepdim=True)
    assert relative_error(zero.grad, expected) <= tolerance("fp32", N * K)


@pytest.mark.parametrize("needed", ["scale_a", "scale_b", "bias"])
def test_only_what_is_needed_is_saved(needed):
    x = scaled_operands(M, N, K, bias_dtype=torch.bfloat16)
    tensors = {"scale_a": x.scale_a, "scale_b": x.scale_b, "bias": x.bias}
    tensors[needed].requires_grad_()
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: packed.append(one.shape), lambda one: None):
        sw.scaled_mm(x.a, x.b, **tensors)
    other = {"scale_a": x.scale_b, "scale_b": x.scale_a}
    assert packed == ([] if needed == "bias" else [x.a.shape, x.b.shape, other[needed].shape])


def test_second_order_of_scales_is_near_float64():
    x = scaled_operands(M, N, K)
    inputs = [x.scale_a.requires_grad_(), x.scale_b.requires_grad_()]
    wide = [one.detach().double().requires_grad_() for one in inputs]

    def second(result, inputs):
        (grad,) = torch.autograd.grad(result.pow(2).sum(), inputs[:1], create_graph=True)
        return torch.autograd.grad(grad.pow(2).sum(), inputs)

    actual = second(sw.scaled_mm(x.a, x.b, *inputs, out_dtype=torch.float32), inputs)
    for one, two in zip(actual, second(in_double(x, *wide, None), wide)):
        assert relative_error(one, two) <= 1e-5


@pytest.mark.parametrize("name", ["a", "b"])
def test_fp8_operands_are_frozen(name):
    x = scaled_operands(M, N, K)
    tensors = {"a": x.a, "b": x.b}
    tensors[name].requires_grad_()
    with pytest.raises(
        ForwardOnlyError, match=rf"fp8, and {name} requires a gradient; .*sw.nn.Float8Linear, or .*{name}.det"
    ):
        sw.scaled_mm(**tensors, scale_a=x.scale_a, scale_b=x.scale_b)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiled_gradients_are_the_eager_ones_in_one_graph(compiler):
    torch._dynamo.reset()

    def loss(a, b, scale_a, scale_b, bias):
        return sw.scaled_mm(a, b, scale_a, scale_b, bias).float().pow(2).sum()

    for make in (KINDS["row, row"], KINDS["block, torch"]):
        x = make()
        inputs = leaves(x)
        expected = torch.autograd.grad(loss(x.a, x.b, *inputs), inputs)
        compiled = torch.compile(loss, backend=compiler, fullgraph=True)
        for one, two in zip(torch.autograd.grad(compiled(x.a, x.b, *inputs), inputs), expected):
            assert torch.equal(one, two)
