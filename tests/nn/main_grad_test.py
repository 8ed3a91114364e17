"""Gradients of weights that are added to weight.main_grad."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stoneware import batch_invariant, matmul, nn
from stoneware.nn import main_grad

K, N = 128, 256
LAYERS = {
    "bf16": lambda: nn.Linear(K, N, dtype=torch.bfloat16),
    **{
        recipe: lambda recipe=recipe: nn.Float8Linear(K, N, recipe=recipe, dtype=torch.bfloat16)
        for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")
    },
}


def with_buffer(layer: torch.nn.Module, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    layer.fuse_wgrad_accumulation = True
    layer.weight.main_grad = torch.randn(N, K).to(dtype)
    return layer


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_two_calls_find_is_added_to_the_buffer(name, dtype):
    layer = with_buffer(LAYERS[name](), dtype)
    expected = layer.weight.main_grad.double()
    for shape in ((2, 64), (40,)):
        x, dy = torch.randn(*shape, K).bfloat16().requires_grad_(), torch.randn(*shape, N).bfloat16()
        layer.fuse_wgrad_accumulation = False
        plain = torch.autograd.grad(layer(x), [x, layer.weight, layer.bias], dy)
        layer.fuse_wgrad_accumulation = True
        expected += plain[1].double()
        fused = torch.autograd.grad(layer(x), [x, layer.weight, layer.bias], dy, allow_unused=True)
        assert torch.equal(fused[0], plain[0]) and fused[1] is None and torch.equal(fused[2], plain[2])
    # Two sums are rounded to the buffer's dtype, and what is compared with to 16 bits.
    torch.testing.assert_close(layer.weight.main_grad.double(), expected, rtol=0.02, atol=0.3)
    layer(x).backward(dy)
    assert layer.weight.grad is None


@pytest.mark.parametrize("name", ["bf16", "rowwise"])
def test_hooks_that_wait_for_a_gradient_get_one(name):
    layer, seen = with_buffer(LAYERS[name]()), []
    layer.weight.grad_added_to_main_grad = False
    layer.weight.register_post_accumulate_grad_hook(seen.append)
    layer(torch.randn(32, K).bfloat16()).sum().backward()
    assert layer.weight.grad_added_to_main_grad is True
    assert len(seen) == 1 and layer.weight.grad.shape == (N, K)


@pytest.mark.parametrize("is_invariant", [False, True])
def test_a_batch_invariant_backward_asks_for_no_kernel_that_adds(is_invariant, monkeypatch):
    """Few of them have a fixed order of sums, and torch's has none."""
    asked = []

    def recorded(*args, **options):
        asked.append(options.get("accumulate", False))
        return matmul(*args, **options)

    monkeypatch.setattr(main_grad, "matmul", recorded)
    layer, x = with_buffer(LAYERS["bf16"]()), torch.randn(32, K).bfloat16()
    expected = layer.weight.main_grad + x.float().sum(0)
    with batch_invariant() if is_invariant else contextlib.nullcontext():
        layer(x).sum().backward()
    assert asked == [not is_invariant]
    torch.testing.assert_close(layer.weight.main_grad, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["bf16", "rowwise"])
def test_a_frozen_weight_needs_no_buffer(name):
    layer = LAYERS[name]()
    layer.fuse_wgrad_accumulation = True
    layer.weight.requires_grad_(False)
    layer(torch.randn(32, K).bfloat16().requires_grad_()).sum().backward()
    with torch.no_grad():
        layer.requires_grad_()(torch.randn(32, K).bfloat16())


def test_the_experts_of_a_mixture_have_buffers_of_three_dimensions():
    experts = nn.Experts(4, K, N, dtype=torch.bfloat16)
    x, chosen = torch.randn(40, K).bfloat16(), torch.randint(4, (40, 2))
    weights = torch.rand(40, 2)
    experts(x, chosen, weights).sum().backward()
    plain = [experts.gate_up_proj.grad, experts.down_proj.grad]
    experts.zero_grad()
    experts.fuse_wgrad_accumulation = True
    for weight in experts.parameters():
        weight.main_grad = torch.zeros(weight.shape)
    experts(x, chosen, weights).sum().backward()
    for weight, expected in zip(experts.parameters(), plain, strict=True):
        assert weight.grad is None
        assert torch.equal(weight.main_grad, expected.float())


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
def test_a_converted_model_is_told(recipe):
    model = torch.nn.Sequential(torch.nn.Linear(K, N), torch.nn.Linear(N, K)).bfloat16()
    nn.convert(model, recipe, fuse_wgrad_accumulation=True)
    for layer in model:
        layer.weight.main_grad = torch.zeros(layer.weight.shape)
    model(torch.randn(32, K).bfloat16()).sum().backward()
    for layer in model:
        assert layer.weight.grad is None and layer.weight.main_grad.any()


@pytest.mark.parametrize("kind", [nn.Linear, nn.Float8Linear])
def test_parameters_in_32_bits_under_autocast(kind):
    layer = with_buffer(kind(K, N))
    before, x = layer.weight.main_grad.clone(), torch.randn(32, K)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(layer.weight.main_grad - before, x.sum(0).expand(N, K), rtol=0.1, atol=0.5)


class Casts(TorchDispatchMode):
    """The shapes of the tensors that are cast."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("kind", [nn.Linear, nn.Float8Linear])
def test_autocast_casts_each_operand_once(kind):
    layer, x = with_buffer(kind(K, N)), torch.randn(32, K)
    with torch.autocast("cpu", torch.bfloat16), Casts() as casts:
        layer(x)
    assert sorted(casts.shapes) == [(32, K), (N,), (N, K)]


def test_a_compiled_model_breaks_its_graph_there():
    torch._dynamo.reset()
    layer = with_buffer(LAYERS["rowwise"]())
    before, x = layer.weight.main_grad.clone(), torch.randn(32, K).bfloat16()
    torch.compile(layer, backend="aot_eager")(x).sum().backward()
    assert layer.weight.grad is None and not torch.equal(layer.weight.main_grad, before)


@pytest.mark.parametrize(
    ("main_grad", "error", "rule"),
    [
        (None, ValueError, r"weight.main_grad must be .* shape \[256, 128\], but is missing; give each weight"),
        (torch.zeros(K, N), ValueError, r"but is of shape \[128, 256\]"),
        (torch.zeros(K, N).t(), ValueError, r"strides \(1, 256\)"),
        (torch.zeros(N, K, dtype=torch.float64), TypeError, "but is of torch.float64 on cpu"),
    ],
)
@pytest.mark.parametrize("name", ["bf16", "rowwise"])
def test_a_wrong_buffer_is_refused_at_the_forward_call(name, main_grad, error, rule):
    layer = LAYERS[name]()
    layer.fuse_wgrad_accumulation = True
    layer.weight.main_grad = main_grad
    with pytest.raises(error, match=rule):
        layer(torch.randn(32, K).bfloat16())


def test_a_weight_that_is_gathered_in_fp8_is_refused():
    model = torch.nn.Sequential(LAYERS["rowwise"]())
    model[0].fuse_wgrad_accumulation = True
    nn.gather_in_fp8(model)
    with pytest.raises(ValueError, match="weight must be a plain tensor on one rank, not ShardedWeight; give each"):
        model(torch.randn(32, K).bfloat16())


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("is_backward", [False, True])
def test_a_gradient_of_x_alone_adds_nothing(name, is_backward):
    layer, x = with_buffer(LAYERS[name]()), torch.randn(32, K).bfloat16().requires_grad_()
    before, y = layer.weight.main_grad.clone(), layer(x).sum()
    if is_backward:
        y.backward(inputs=[x])
    else:
        torch.autograd.grad(y, x)
    assert torch.equal(layer.weight.main_grad, before)


@pytest.mark.parametrize("name", LAYERS)
def test_a_second_derivative_is_refused(name):
    layer, x = with_buffer(LAYERS[name]()), torch.randn(32, K).bfloat16().requires_grad_()
    (dx,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        dx.sum().backward()
