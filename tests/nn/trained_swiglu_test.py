"""The feed-forward that trains as one node of autograd, and its layers one by one."""

from __future__ import annotations

import copy

import pytest
import torch

import stoneware as sw
from stoneware import nn
from stoneware.nn import trained_swiglu
from stoneware.nn.gathered_weight import GatheredWeight
from stoneware.nn.recipes import RECIPES

K, N = 128, 256
ERRORS = {"bf16": 0.02}
"""Recipe -> the largest relative error; fp8 has 3 bits behind the point."""


class MLP(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(K, N, bias=False) for _ in range(2))
        self.down_proj = torch.nn.Linear(N, K, bias=False)
        self.act_fn = torch.nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def weights(dtype=torch.bfloat16):
    torch.manual_seed(0)
    shapes = (N, K), (N, K), (K, N)
    return [(torch.randn(shape) / shape[1] ** 0.5).to(dtype).requires_grad_() for shape in shapes]


def step(function, x, tensors, dy):
    """y and the gradients of x and of the weights."""
    x = x.detach().requires_grad_()
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    y = function(x, *tensors)
    return [y.detach(), *torch.autograd.grad(y, [x, *tensors], dy)]


def exact(x, gate, up, down):
    return (torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def assert_near(found, wanted, error):
    for ours, expected in zip(found, wanted, strict=True):
        assert ours.shape == expected.shape
        assert (ours.double() - expected).norm() <= error * expected.norm()


def converted(recipe, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(MLP()).bfloat16()
    return model, nn.convert(model, recipe, **options)


@pytest.mark.parametrize("recipe", [*RECIPES, "bf16"])
@pytest.mark.parametrize("shape", [(2, 8, K), (16, K), (3, 5, K), (1, K)])
@pytest.mark.parametrize("is_joined", [False, True])
def test_gradients(recipe, shape, is_joined):
    gate, up, down = weights()
    x, dy = torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()
    wanted = step(exact, x.double(), [one.double() for one in (gate, up, down)], dy.double())

    def joined(x, gate_up, down):
        return trained_swiglu.call(x, gate_up, None, down, None, recipe)

    def separate(x, gate, up, down):
        return trained_swiglu.call(x, gate, up, down, None, recipe)

    if is_joined:
        wanted[2:4] = [torch.cat(wanted[2:4])]
        found = step(joined, x, [torch.cat((gate, up)), down], dy)
    else:
        found = step(separate, x, [gate, up, down], dy)
    assert [one.dtype for one in found] == [torch.bfloat16] * len(found)
    assert_near(found, wanted, ERRORS.get(recipe, 0.13))


def test_the_one_node_gives_the_bits_of_its_layers():
    gate, up, down = weights()
    x = torch.randn(32, K).bfloat16()
    found = trained_swiglu.call(x, gate, up, down, None, "rowwise")
    assert type(found.grad_fn).__name__ == "_SwiGLUBackward"
    layers = [nn.Float8Linear(*weight.shape[::-1], bias=False, dtype=torch.bfloat16) for weight in (gate, up, down)]
    with torch.no_grad():
        for layer, weight in zip(layers, (gate, up, down)):
            layer.weight.copy_(weight)
    first, second, last = layers
    assert torch.equal(found, last(torch.nn.functional.silu(first(x)) * second(x)))


def test_a_gradient_is_saved_for_what_the_layers_would_save_twice():
    """z for gate, up, silu(gate) and h."""
    saved = []
    x, (gate, up, down) = torch.randn(32, K).bfloat16().requires_grad_(), weights()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        trained_swiglu.call(x, gate, up, down, None, "rowwise")
    own = {tensor.data_ptr() for tensor in (x, gate, up, down)}
    shapes = sorted((tuple(one.shape) for one in saved if one.data_ptr() not in own), key=lambda shape: -shape[-1])
    assert shapes[0] == (32, 2 * N) and all(shape[1] == 1 for shape in shapes[1:])


def gathered(weight):
    """The weight as FSDP2 gathers it in fp8."""
    return GatheredWeight(*sw.quantize(weight.detach(), power_of_two=True), weight.dtype).requires_grad_()


def test_a_gradient_saves_gathered_weights_themselves():
    saved = []
    x, operands = torch.randn(32, K).bfloat16().requires_grad_(), [gathered(weight) for weight in weights()]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = trained_swiglu.call(x, *operands, None, "rowwise")
    assert type(y.grad_fn).__name__ == "_SwiGLUBackward"
    assert [tensor for tensor in saved if isinstance(tensor, GatheredWeight)] == operands
    plain = [tensor for tensor in saved if not isinstance(tensor, GatheredWeight)]
    assert plain[0].data_ptr() == x.data_ptr()
    assert [tuple(tensor.shape) for tensor in plain[1:]] == [(32, 2 * N), (K, 1)]


def test_gathered_weights_that_need_no_gradient_or_are_mixed_with_others_run_layer_by_layer():
    gate, up, down = weights()
    x, dy = torch.randn(32, K).bfloat16(), torch.randn(32, K).bfloat16()
    operands = [gathered(weight) for weight in (gate, up, down)]
    wanted = step(lambda x, *operands: trained_swiglu.call(x, *operands, None, "rowwise"), x, operands, dy)
    frozen = gathered(gate).requires_grad_(False)
    for first in (frozen, gate):
        y = trained_swiglu.call(x, first, *operands[1:], None, "rowwise")
        assert type(y.grad_fn).__name__ == "_LinearBackward"
        assert torch.equal(y, wanted[0])
        y.backward(dy)
    assert frozen.grad is None
    assert_near([gate.grad], [wanted[2].double()], 0.01)
    with torch.no_grad():
        assert torch.equal(trained_swiglu.call(x, *operands, None, "rowwise"), wanted[0])


@pytest.mark.parametrize("recipe", ["rowwise", "bf16"])
def test_autocast_casts_all_and_the_gradients_keep_their_dtype(recipe):
    tensors, x, dy = weights(torch.float32), torch.randn(16, K), torch.randn(16, K).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = step(lambda *operands: trained_swiglu.call(*operands, None, recipe), x, tensors, dy)
    assert [one.dtype for one in found] == [torch.bfloat16] + [torch.float32] * 4
    wanted = step(exact, x.double(), [one.double() for one in tensors], dy.double())
    assert_near(found, wanted, ERRORS.get(recipe, 0.13))


@pytest.mark.parametrize("recipe", ["rowwise", "bf16"])
@pytest.mark.parametrize("trained", [(0,), (2,), (0, 1), ()])
def test_only_what_requires_a_gradient_gets_one(recipe, trained):
    tensors, x, dy = weights(), torch.randn(16, K).bfloat16(), torch.randn(16, K).bfloat16()
    everything = step(lambda *operands: trained_swiglu.call(*operands, None, recipe), x, tensors, dy)[2:]
    for position, tensor in enumerate(tensors):
        tensor.requires_grad_(position in trained)
    y = trained_swiglu.call(x, *tensors, None, recipe)
    assert y.requires_grad == bool(trained)
    if trained:
        y.backward(dy)
    for position, (tensor, wanted) in enumerate(zip(tensors, everything, strict=True)):
        assert (tensor.grad is not None) == (position in trained)
        if tensor.grad is not None:
            assert_near([tensor.grad], [wanted.double()], ERRORS.get(recipe, 0.13))
    with torch.no_grad():
        assert torch.equal(trained_swiglu.call(x, *tensors, None, recipe), y)


def test_bf16_has_a_second_derivative_and_fp8_refuses_it():
    tensors, x = weights(), torch.randn(16, K).bfloat16()
    found = []
    for function in (lambda *operands: trained_swiglu.call(*operands, None, "bf16"), exact):
        operand = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(function(operand, *tensors).square().sum(), operand, create_graph=True)
        found.append(torch.autograd.grad(dx.float().square().sum(), [operand, tensors[1]]))
    assert_near(found[0], [one.double() for one in found[1]], 0.1)
    operand = x.clone().requires_grad_()
    y = trained_swiglu.call(operand, *tensors, None, "rowwise")
    (dx,) = torch.autograd.grad(y.sum(), operand, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        dx.sum().backward()


def test_gradients_accumulate_and_are_their_own():
    """gate's and up's gradients are computed together."""
    model, _ = converted("rowwise")
    x = torch.randn(16, K).bfloat16()
    model(x).sum().backward()
    first = [parameter.grad.clone() for parameter in model.parameters()]
    model(x).sum().backward()
    for parameter, once in zip(model.parameters(), first):
        torch.testing.assert_close(parameter.grad, 2 * once)
    model[0].gate_proj.weight.grad.zero_()
    assert model[0].up_proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("recipe", ["rowwise", "bf16", "blockwise"])
def test_a_converted_block_runs_as_one_call(monkeypatch, recipe):
    model, done = converted(recipe)
    assert done.blocks == {"0": "SwiGLU"}
    calls = []
    call = trained_swiglu.call
    monkeypatch.setattr(trained_swiglu, "call", lambda *operands: calls.append(1) or call(*operands))
    model(torch.randn(16, K).bfloat16())
    assert len(calls) == 1
    twin = copy.deepcopy(model)
    twin(torch.randn(16, K).bfloat16())
    assert len(calls) == 2
    assert [*model.state_dict()] == ["0.gate_proj.weight", "0.up_proj.weight", "0.down_proj.weight"]


@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj", "act_fn"])
def test_a_hook_that_is_added_later_runs(part):
    model, _ = converted("rowwise")
    x = torch.randn(16, K).bfloat16()
    wanted = model(x)
    handle = model[0].get_submodule(part).register_forward_hook(lambda module, args, y: torch.zeros_like(y))
    assert not model(x).any()
    handle.remove()
    assert torch.equal(model(x), wanted)


def test_a_layer_or_an_activation_that_is_replaced_later_counts():
    model, _ = converted("rowwise")
    x = torch.randn(16, K).bfloat16()
    wanted = model(x)
    model[0].act_fn = torch.nn.ReLU()
    assert not torch.equal(model(x), wanted)
    model, _ = converted("rowwise")
    model[0].up_proj = torch.nn.Linear(K, N, bias=False, dtype=torch.bfloat16)
    assert not torch.equal(model(x), wanted)


def test_accumulating_layers_run_their_own_code():
    _, done = converted("rowwise", fuse_wgrad_accumulation=True)
    assert not done.blocks


@pytest.mark.parametrize("was_called", [False, True])
@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_parametrized_layers_run_their_own_code(name, was_called):
    class Twice(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    model, _ = converted("rowwise")
    x = torch.randn(16, K).bfloat16()
    if was_called:
        model(x)
    torch.nn.utils.parametrize.register_parametrization(model[0].get_submodule(name), "weight", Twice())
    block = model[0]
    assert torch.equal(block(x), block.down_proj(block.act_fn(block.gate_proj(x)) * block.up_proj(x)))


def test_undo_gives_the_block_its_own_class_and_code():
    model, done = converted("rowwise")
    done.undo()
    assert type(model[0]) is MLP and type(model[0].gate_proj) is torch.nn.Linear


def test_shapes_that_do_not_fit_are_refused_by_name():
    gate, up, down = weights()
    with pytest.raises(ValueError, match=r"x\.shape=\[16, 64\] must end with in_features=128"):
        trained_swiglu.call(torch.randn(16, 64).bfloat16(), gate, up, down, None, "rowwise")
