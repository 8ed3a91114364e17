"""The gradients of matmul on the reference backend: values, layouts, what is saved, what is refused."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
from operands import OUT_DTYPES, relative_error
from torch.autograd import forward_ad

import stoneware as sw
from stoneware.errors import ForwardOnlyError
from stoneware.kernels.config import Config
from stoneware.ops.matmul import api
from stoneware.specs.tolerance import tolerance

REFERENCE = Config(backend="reference", kernel="torch.matmul_float32")
LAYOUTS = ("n", "t", "sliced", "sliced t", "strided")

SHAPES = {
    "a linear layer": ((33, 24), (24, 40)),
    "rows of a batch": ((3, 5, 24), (24, 40)),
    "rows of two batches": ((2, 3, 5, 24), (24, 40)),
    "a batch": ((3, 5, 24), (3, 24, 40)),
    "a broadcast batch": ((2, 1, 5, 24), (3, 24, 40)),
    "a batch of one": ((1, 5, 24), (3, 24, 40)),
    "a shared": ((5, 24), (3, 24, 40)),
    "a row": ((24,), (24, 40)),
    "a row and a batch": ((24,), (3, 24, 40)),
    "a column": ((33, 24), (24,)),
    "a batch and a column": ((2, 3, 5, 24), (24,)),
    "two vectors": ((24,), (24,)),
    "one of all": ((1, 1), (1, 1)),
}


def operand(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> torch.Tensor:
    """A random leaf of this layout, with a gradient."""
    if len(shape) == 1:
        return torch.randn(shape).to(dtype).requires_grad_()
    *batch, rows, columns = shape
    if layout.endswith("t"):
        rows, columns = columns, rows
    margin, step = (3 if layout != "n" and layout != "t" else 0), (2 if layout == "strided" else 1)
    base = torch.randn(*batch, rows * step + margin, columns * step + margin).to(dtype)
    view = base[..., margin::step, margin::step]
    return (view.mT if layout.endswith("t") else view).requires_grad_()


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().double().requires_grad_()


def check(actual: torch.Tensor, expected: torch.Tensor, dtype: str, length: int) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == OUT_DTYPES.get(dtype, torch.float32)
    assert relative_error(actual, expected) <= tolerance(dtype, length)


@pytest.mark.parametrize("dtype", OUT_DTYPES)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("is_wide", [False, True])
def test_gradients_are_near_float64_whatever_the_layout(dtype, name, is_wide):
    for _ in range(4):
        layouts = random.choice(LAYOUTS), random.choice(LAYOUTS)
        a, b = (operand(shape, layout, OUT_DTYPES[dtype]) for shape, layout in zip(SHAPES[name], layouts))
        out_dtype = torch.float32 if is_wide else OUT_DTYPES[dtype]
        inputs = [a, b]
        if b.ndim > 1 and random.random() < 0.7:
            inputs.append(torch.randn(b.shape[-1]).to(out_dtype).requires_grad_())
        wide = [double(one) for one in inputs]
        expected = torch.matmul(*wide[:2])
        if len(wide) > 2:
            expected = expected + wide[2]
        result = sw.matmul(*inputs, out_dtype=torch.float32 if is_wide else None)
        # In the operands' precision: the gradient of a float32 result is rounded to it.
        dc = torch.randn(result.shape).to(a.dtype).to(result.dtype)
        grads = torch.autograd.grad(result, inputs, dc)
        wanted = torch.autograd.grad(expected, wide, dc.double())
        for grad, want, one in zip(grads, wanted, inputs):
            check(grad, want, "fp32" if one.dtype == torch.float32 else dtype, 1000)


@pytest.mark.parametrize(
    "shapes",
    [((0, 8), (8, 4)), ((3, 0), (0, 4)), ((3, 8), (8, 0)), ((0, 3, 8), (8, 4)), ((3, 8), (0, 8, 4)), ((0,), (0, 4))],
    ids=str,
)
def test_gradients_of_empty_sums_are_zero(shapes):
    inputs = [operand(shape, "n", torch.bfloat16) for shape in (*shapes, shapes[1][-1:])]
    result = sw.matmul(*inputs)
    grads = torch.autograd.grad(result.sum(), inputs)
    for grad, one in zip(grads, inputs):
        assert grad.shape == one.shape
    rows = result.numel() // max(result.shape[-1], 1)
    assert not grads[0].any() and not grads[1].any()
    assert torch.equal(grads[2], torch.full_like(inputs[2], rows))


def test_an_operand_that_is_changed_before_the_backward_is_noticed():
    a, b = operand((8, 24), "n", torch.bfloat16), torch.randn(24, 16).bfloat16()
    result = sw.matmul(a, b)
    b.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


@pytest.mark.parametrize("expand", [False, True])
def test_gradient_has_the_layout_of_its_operand(expand):
    x = torch.randn(3, 16, 24).bfloat16().requires_grad_()
    weight = torch.nn.Parameter(torch.randn(40, 24).bfloat16())
    bias = torch.nn.Parameter(torch.randn(40).bfloat16())
    result = sw.matmul(x, weight.t(), bias)
    if expand:
        result.sum().backward()
    else:
        result.backward(torch.randn(result.shape).bfloat16())
    assert x.grad.stride() == x.stride()
    assert weight.grad.stride() == weight.stride()
    column_major = torch.randn(24, 16).bfloat16().t().requires_grad_()
    (grad,) = torch.autograd.grad(sw.matmul(column_major, weight.t()).sum(), column_major)
    assert grad.stride() == column_major.stride()
    (grad,) = torch.autograd.grad(sw.matmul(column_major, torch.randn(3, 24, 40).bfloat16()).sum(), column_major)
    assert grad.stride() == column_major.stride()  # summed over the batch, too


def layouts_of_calls(monkeypatch, step) -> list[str]:
    """The layouts of the matmuls that `step` computes, in order."""
    seen = []
    whole = api.OPERATION.plan

    def plan(problem, *arguments, **options):
        seen.append(problem.layout)
        return whole(problem, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(api, "_PLANS", type(api._PLANS)())
        patch.setattr(api.OPERATION, "plan", plan)
        step()
    return seen


@pytest.mark.parametrize(
    ("needed", "layouts", "saved"),
    [
        ("x", ["nt", "nn"], "w"),
        ("w", ["nt", "tn"], "x"),
        ("b", ["nt"], ""),
        ("xw", ["nt", "nn", "tn"], "xw"),
        ("xwb", ["nt", "nn", "tn"], "xw"),
    ],
)
def test_only_what_is_needed_is_saved_and_computed(monkeypatch, needed, layouts, saved):
    tensors = {"x": torch.randn(16, 24), "w": torch.randn(40, 24), "b": torch.randn(40)}
    tensors = {name: one.bfloat16().requires_grad_(name in needed) for name, one in tensors.items()}
    packed = []

    def step():
        with torch.autograd.graph.saved_tensors_hooks(lambda one: packed.append(one.shape), lambda one: None):
            sw.matmul(tensors["x"], tensors["w"].t(), tensors["b"])
        result = sw.matmul(tensors["x"], tensors["w"].t(), tensors["b"])
        result.backward(torch.randn(result.shape).bfloat16())

    assert layouts_of_calls(monkeypatch, step) == layouts
    shapes = {"x": tensors["x"].shape, "w": tensors["w"].t().shape}
    assert sorted(packed) == sorted(shapes[name] for name in saved)
    assert {name for name, one in tensors.items() if one.grad is not None} == set(needed)


# Integers so small that every value is exact in 16 bits and every sum in float32; the function is
# bilinear, so that the differences over a step of one are its very derivatives.
EXACT = {"eps": 1.0, "atol": 0.0, "rtol": 0.0, "fast_mode": False}


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape).double().requires_grad_()


@pytest.mark.parametrize("shapes", [((2, 3), (3, 4)), ((2, 2, 3), (3, 2)), ((2, 1, 3), (2, 3, 2)), ((3,), (3, 2))])
def test_gradcheck_and_gradgradcheck_are_exact(shapes):
    def multiply(a, b, bias):
        return sw.matmul(a.bfloat16(), b.bfloat16(), bias.float(), out_dtype=torch.float32).double()

    a, b = (integers(*shape) for shape in shapes)
    inputs = (a, b, integers(b.shape[-1]))
    assert torch.autograd.gradcheck(multiply, inputs, **EXACT)
    dc = integers(*multiply(*inputs).shape)
    assert torch.autograd.gradgradcheck(multiply, inputs, (dc,), **EXACT)


def test_second_order_of_a_weight_is_near_float64():
    x, w = torch.randn(8, 24), torch.randn(40, 24)

    def penalty(x, w, multiply):
        (grad,) = torch.autograd.grad(multiply(x, w.t()).pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.pow(2).sum(), (x, w))

    tensors = [one.bfloat16().requires_grad_() for one in (x, w)]
    for actual, expected in zip(penalty(*tensors, sw.matmul), penalty(*(double(one) for one in tensors), torch.matmul)):
        assert relative_error(actual, expected) <= 4 * tolerance("bf16", 40)  # of as many matmuls, one after another


def test_backend_is_that_of_the_gradients_and_config_is_not(monkeypatch):
    a, b = torch.randn(8, 24).bfloat16().requires_grad_(), torch.randn(24, 16).bfloat16().requires_grad_()
    seen = []
    whole = api.OPERATION.plan

    def plan(problem, device, *, backend, config):
        seen.append((problem.layout, backend, config))
        return whole(problem, device, backend=backend, config=config)

    monkeypatch.setattr(api, "_PLANS", type(api._PLANS)())
    monkeypatch.setattr(api.OPERATION, "plan", plan)
    sw.matmul(a, b, backend="reference", config=REFERENCE).sum().backward()
    assert seen == [("nn", "reference", REFERENCE), ("nt", "reference", None), ("tn", "reference", None)]


@pytest.mark.parametrize("has_module", [True, False])
def test_out_and_tangents_are_refused(monkeypatch, has_module):
    fresh = type(api._PLANS)()
    if not has_module:
        fresh.call = fresh.slow
    monkeypatch.setattr(api, "_PLANS", fresh)
    a, b = torch.randn(8, 24).bfloat16().requires_grad_(), torch.randn(24, 16).bfloat16()
    out = torch.empty(8, 16).bfloat16()
    rule = "matmul with out= has no backward, and a requires a gradient; .*or omit out"
    with pytest.raises(ForwardOnlyError, match=rule):
        sw.matmul(a, b, out=out)
    with pytest.raises(ForwardOnlyError, match=rule):
        torch.ops.stoneware.matmul_out(a, b, None, out, None, False, None, None)
    with pytest.raises(ForwardOnlyError, match="out requires a gradient"):
        sw.matmul(a.detach(), b, out=torch.empty(8, 16).bfloat16().requires_grad_())
    with torch.no_grad():
        assert sw.matmul(a, b, out=out) is out
    with forward_ad.dual_level():
        with pytest.raises(ForwardOnlyError, match="no forward-mode derivative, and a has a tangent"):
            sw.matmul(forward_ad.make_dual(a, torch.ones_like(a)), b)
    assert torch.equal(torch.autograd.grad(sw.matmul(a, b).sum(), a)[0], (torch.ones(8, 16) @ b.float().t()).bfloat16())


def test_an_inference_result_and_a_detached_one_have_no_graph():
    a, b = torch.randn(8, 24).bfloat16().requires_grad_(), torch.randn(24, 16).bfloat16()
    assert sw.matmul(a, b).grad_fn is not None
    with torch.no_grad():
        assert sw.matmul(a, b).grad_fn is None
    with torch.inference_mode():
        assert sw.matmul(a, b).is_inference()
    assert sw.matmul(a.detach(), b).grad_fn is None


def test_bad_arguments_are_refused_as_without_a_gradient():
    a = torch.zeros(8, 24).bfloat16().requires_grad_()
    with pytest.raises(ValueError, match="24 is not 16"):
        sw.matmul(a, torch.zeros(16, 8).bfloat16())
    with pytest.raises(TypeError, match="b of matmul must be a torch.Tensor, not list"):
        sw.matmul(a, [1])


def loss(x, w, bias):
    return sw.matmul(x, w.t(), bias).float().pow(2).sum()


def training_operands(m: int) -> list[torch.Tensor]:
    shapes = (m, 24), (40, 24), (40,)
    return [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_compiled_gradients_are_the_eager_ones_in_one_graph(compiler, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend=compiler, fullgraph=True, dynamic=dynamic)
    for m in (16, 17, 33):
        inputs = training_operands(m)
        expected = torch.autograd.grad(loss(*inputs), inputs)
        for actual, one in zip(torch.autograd.grad(compiled(*inputs), inputs), expected):
            assert torch.equal(actual, one)
            assert actual.stride() == one.stride()


def test_operator_passes_torch_s_own_checks_with_gradients():
    for shapes in (((32, 24), (24, 40)), ((2, 3, 24), (24, 8)), ((2, 3, 24), (2, 24, 8))):
        a, b = (torch.randn(shape).bfloat16().requires_grad_() for shape in shapes)
        bias = torch.randn(b.shape[-1]).bfloat16().requires_grad_()
        torch.library.opcheck(torch.ops.stoneware.matmul, (a, b, bias, None, False, "reference", None))


def test_transforms_of_torch_func_give_gradients_of_every_order():
    a, b = torch.randint(-3, 4, (3, 4)).bfloat16(), torch.randint(-3, 4, (4, 2)).bfloat16()

    def total(a, b, multiply):
        return multiply(a, b).float().pow(2).sum()

    for argnums in (0, (0, 1)):
        actual = torch.func.grad(total, argnums)(a, b, sw.matmul)
        expected = torch.func.grad(total, argnums)(a, b, torch.matmul)
        for one, two in zip(*((found,) if argnums == 0 else found for found in (actual, expected))):
            assert torch.equal(one, two)
    jacobian = torch.func.jacrev(torch.func.jacrev(total))
    assert torch.equal(jacobian(a, b, sw.matmul), jacobian(a, b, torch.matmul))
    each = torch.vmap(torch.func.grad(total), in_dims=(0, None, None))
    batch = torch.stack([a, -a, a.roll(1)])
    assert torch.equal(each(batch, b, sw.matmul), torch.stack([each(one[None], b, torch.matmul)[0] for one in batch]))


def test_export_keeps_the_call_and_its_gradient():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(40, 24).bfloat16())

        def forward(self, x):
            return sw.matmul(x, self.weight.t())

    block = Block()
    x = torch.randn(16, 24).bfloat16()
    module = torch.export.export(block, (x,)).module()
    module(x).float().sum().backward()
    (expected,) = torch.autograd.grad(block(x).float().sum(), block.weight)
    (weight,) = module.parameters()
    assert torch.equal(weight.grad, expected)


def test_a_graph_that_is_alive_at_the_end_leaves_nothing_behind():
    code = """
import torch, stoneware as sw
a, scale = torch.ones(8, 16).bfloat16().requires_grad_(), torch.ones((), requires_grad=True)
y = sw.matmul(a, torch.ones(16, 8).bfloat16())
z = sw.grouped_mm(a, torch.ones(1, 8, 16).bfloat16().mT, torch.tensor([8], dtype=torch.int32))
fp8 = torch.ones(16, 16).to(torch.float8_e4m3fn)
d = sw.scaled_mm(fp8, fp8.t(), scale, torch.ones(()))
(grad,) = torch.autograd.grad(z.sum(), a, create_graph=True)
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert "leaked" not in process.stderr
