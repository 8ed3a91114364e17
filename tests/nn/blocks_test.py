"""SwiGLU and RMSNorm, alone and where convert finds them in a model."""

from __future__ import annotations

import copy

import pytest
import torch

import stoneware as sw
from stoneware import nn
from stoneware.nn import frozen_product

HIDDEN, WIDTH, HEADS = 128, 256, 4


class LlamaRMSNorm(torch.nn.Module):
    """Written as models have it, rounded before the weight."""

    def __init__(self, size: int, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(size) + 0.5)
        self.variance_epsilon = 1e-5
        self.offset = offset

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight + self.offset) * wide.to(x.dtype)


class LlamaMLP(torch.nn.Module):
    def __init__(self, activation=torch.nn.functional.silu, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(HIDDEN, WIDTH, bias=bias)
        self.up_proj = torch.nn.Linear(HIDDEN, WIDTH, bias=bias)
        self.down_proj = torch.nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.activation = activation

    def forward(self, x):
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, torch.nn.Linear(HIDDEN, HIDDEN, bias=False))
        self.q_norm = LlamaRMSNorm(HIDDEN // HEADS)

    def forward(self, x):
        q, k, v = (one(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj))
        y = torch.nn.functional.scaled_dot_product_attention(self.q_norm(q), k, v)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Block(torch.nn.Module):
    def __init__(self, mlp: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = LlamaRMSNorm(HIDDEN), LlamaRMSNorm(HIDDEN)
        self.self_attn, self.mlp = Attention(), mlp or LlamaMLP()

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


@pytest.fixture
def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(Block(), Block()).bfloat16().eval().requires_grad_(False)


def rows(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape).to(dtype)


def near(found, wanted):
    return (found - wanted).float().norm() <= 0.06 * wanted.float().norm()


def test_convert_swaps_norms_and_feed_forwards_and_says_so(model):
    x = rows(2, 5, HIDDEN)
    wanted = model(x)
    done = nn.convert(model)
    assert done.blocks == {
        f"{i}.{name}": kind
        for i in (0, 1)
        for name, kind in (
            ("input_layernorm", "RMSNorm"),
            ("post_attention_layernorm", "RMSNorm"),
            ("self_attn.q_norm", "RMSNorm"),
            ("mlp", "SwiGLU"),
        )
    }
    assert type(model[0].self_attn.q_norm) is torch.nn.RMSNorm  # no layer takes its result
    assert isinstance(model[0].input_layernorm, nn.RMSNorm)
    assert "whole 0.mlp, 1.mlp: SwiGLU" in str(done)
    with torch.no_grad():
        assert near(model(x), wanted)


def test_undo_puts_everything_back(model):
    names, kinds = list(model.state_dict()), [type(one) for one in model.modules()]
    x, before = rows(3, HIDDEN)[None], copy.deepcopy(model)
    done = nn.convert(model)
    with torch.no_grad():
        converted = model(x)
    done.undo()
    assert list(model.state_dict()) == names
    assert [type(one) for one in model.modules()] == kinds
    assert near(model(x), before(x)) and near(model(x), converted)
    assert not done.blocks and not done.swapped


def test_the_state_dict_keeps_its_names_and_is_loaded(model):
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.1)
    names = {name for name in model.state_dict() if name.endswith("weight")}
    nn.convert(model)
    nn.convert(other)
    saved = other.state_dict()
    assert {name for name in saved if name.endswith("weight")} == names
    assert saved["0.mlp.gate_proj.weight_scale_inv"].shape == (WIDTH, 1)
    model.load_state_dict(saved)
    x = rows(7, HIDDEN)[None]
    with torch.no_grad():
        assert torch.equal(model(x), other(x))


def test_a_16_bit_checkpoint_is_quantized_when_it_is_loaded(model):
    saved = {name: tensor * 2 for name, tensor in copy.deepcopy(model).state_dict().items()}
    nn.convert(model)
    model.load_state_dict(saved, strict=False)  # without weight_scale_inv
    weight = model[0].mlp.gate_up_proj
    assert near(weight.dequantized(), torch.cat([saved["0.mlp.gate_proj.weight"], saved["0.mlp.up_proj.weight"]]))


@pytest.mark.parametrize(
    "mlp",
    [LlamaMLP(torch.nn.functional.gelu), LlamaMLP(bias=True), LlamaMLP(lambda x: torch.nn.functional.silu(x) + 1)],
)
def test_another_activation_or_a_bias_leaves_the_feed_forward_as_it_is(mlp):
    model = torch.nn.Sequential(Block(copy.deepcopy(mlp))).bfloat16().eval()
    done = nn.convert(model)
    assert "0.mlp" not in done.blocks and isinstance(model[0].mlp, LlamaMLP)
    assert done.swapped["0.mlp.gate_proj"] == "Float8InferenceLinear, rowwise"


def test_a_feed_forward_that_gives_zeros_is_left():
    mlp = LlamaMLP(torch.nn.functional.gelu)
    torch.nn.init.zeros_(mlp.down_proj.weight)  # as some models begin; their checkpoint comes later
    model = torch.nn.Sequential(mlp).bfloat16().eval()
    assert not nn.convert(model).blocks
    assert model[0] is mlp


@pytest.mark.parametrize("error", [AssertionError, AttributeError, IndexError, KeyError])
def test_a_block_that_refuses_the_call_is_left(error):
    def refuse(x):
        raise error

    done = nn.convert(torch.nn.Sequential(LlamaMLP(refuse)).bfloat16().eval())
    assert not done.blocks and len(done.swapped) == 3


def test_a_norm_that_computes_something_else_is_left(model):
    model[0].input_layernorm = LlamaRMSNorm(HIDDEN, offset=1.0).bfloat16()
    done = nn.convert(model)
    assert "0.input_layernorm" not in done.blocks and "1.input_layernorm" in done.blocks


def test_a_filter_that_refuses_one_layer_keeps_its_block(model):
    done = nn.convert(model, filter=lambda name, layer: not name.endswith("0.mlp.up_proj"))
    assert "0.mlp" not in done.blocks and "1.mlp" in done.blocks
    assert isinstance(model[0].mlp.gate_proj, nn.Float8InferenceLinear)


@pytest.mark.parametrize("recipe", ["bf16", "tensorwise", "blockwise"])
def test_other_recipes_and_training_swap_linear_layers_alone(model, recipe):
    assert not nn.convert(model, recipe).blocks
    assert not nn.convert(Block().bfloat16(), "rowwise").blocks


def test_a_norm_carries_its_result_in_fp8():
    norm = nn.RMSNorm(HIDDEN, 1e-5, dtype=torch.bfloat16)
    torch.nn.init.uniform_(norm.weight)
    x = rows(2, 3, HIDDEN)
    with torch.no_grad():
        y = norm(x)
        assert torch.equal(y, torch.nn.functional.rms_norm(x, (HIDDEN,), norm.weight, 1e-5))
        values, scale = frozen_product.attached(y)
    wanted = sw.quantize(y, "row", power_of_two=True)
    assert torch.equal(values.float(), wanted[0].float()) and torch.equal(scale, wanted[1])
    assert values.shape == y.shape and scale.shape == (2, 3, 1)
    assert not frozen_product.attached(y.clone())


def test_a_result_that_was_changed_in_place_is_quantized_anew(model):
    nn.convert(model)
    layer, norm = model[0].self_attn.q_proj, model[0].input_layernorm
    with torch.no_grad():
        y = norm(rows(4, HIDDEN))
        y.mul_(-1)
        assert not frozen_product.attached(y)
        assert torch.equal(layer(y), layer(y.clone()))


@pytest.mark.parametrize("shape", [(4, HIDDEN // 2), (4, 2 * HIDDEN)])
def test_a_norm_refuses_an_x_of_another_width(shape):
    with torch.no_grad(), pytest.raises(ValueError, match=f"must end with in_features={HIDDEN}; reshape or pad x"):
        nn.RMSNorm(HIDDEN, dtype=torch.bfloat16)(rows(*shape))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
def test_nothing_is_carried_where_changes_are_not_counted_or_gradients_are_needed(mode):
    norm = nn.RMSNorm(HIDDEN, 1e-5, dtype=torch.bfloat16)
    with mode():
        y = norm(rows(4, HIDDEN))
        assert not frozen_product.attached(y)
        assert y.requires_grad == torch.is_grad_enabled()


@pytest.mark.parametrize("shape", [(1, HIDDEN), (2, 3, HIDDEN), (0, HIDDEN), (HIDDEN,)])
def test_layers_take_what_the_norm_carries(model, shape):
    nn.convert(model)
    block, x = model[0], rows(*shape)
    with torch.no_grad():
        y = block.post_attention_layernorm(x)
        for layer in (block.mlp, block.self_attn.q_proj):
            assert torch.equal(layer(y), layer(y.clone()))
            assert layer(y).shape == x.shape


def test_a_result_that_a_norm_carries_in_fp8_can_be_given_a_gradient(model):
    nn.convert(model)
    block = model[0]
    with torch.no_grad():
        y = block.post_attention_layernorm(rows(4, HIDDEN))
    assert frozen_product.attached(y)
    for layer in (block.mlp, block.self_attn.q_proj):
        (found,) = torch.autograd.grad(layer(y.requires_grad_()).sum(), y)
        other = y.detach().clone().requires_grad_()
        assert torch.equal(found, torch.autograd.grad(layer(other).sum(), other)[0])


@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "blockwise"])
def test_swiglu_trains(recipe):
    torch.manual_seed(2)
    layer = nn.SwiGLU(HIDDEN, WIDTH, recipe=recipe, dtype=torch.bfloat16)
    plain = LlamaMLP().bfloat16()
    plain.load_state_dict(layer.state_dict())
    x = rows(128, HIDDEN)
    results = []
    for one in (layer, plain):
        given = x.clone().requires_grad_()
        y = one(given)
        y.square().sum().backward()
        results.append((y, given.grad))
    for found, wanted in zip(*results):
        assert (found - wanted).float().norm() <= 0.12 * wanted.float().norm()


def test_frozen_swiglu_gives_a_gradient_to_x(model):
    nn.convert(model)
    x = rows(16, HIDDEN).requires_grad_()
    model[0].mlp(x).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("add", ["register_forward_hook", "register_full_backward_hook"])
def test_hooks_of_frozen_layers_are_called(part, add):
    layer = nn.SwiGLU(HIDDEN, WIDTH, frozen=True, dtype=torch.bfloat16)
    called = []
    getattr(getattr(layer, part), add)(lambda *_: called.append(1))
    layer(rows(4, HIDDEN).requires_grad_()).sum().backward()
    assert called


def test_compiled_blocks_give_what_eager_ones_do(model):
    nn.convert(model)
    x = rows(1, 16, HIDDEN)
    with torch.no_grad():
        assert near(torch.compile(model, fullgraph=True)(x), model(x))


def test_frozen_layers_need_fp8():
    with pytest.raises(ValueError, match="recipe='bf16' must be one of tensorwise"):
        nn.SwiGLU(HIDDEN, WIDTH, recipe="bf16", frozen=True)
