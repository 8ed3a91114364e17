"""Experts give the values and the gradients of their feed-forwards."""

from __future__ import annotations

import re

import pytest
import torch
from rounding import BF16_ERROR, FP8_ERROR, error

from stoneware import nn


def test_experts_are_the_sum_of_their_mlps():
    experts, top_k, hidden, inner = 4, 2, 64, 96
    layer = nn.Experts(experts, hidden, inner, dtype=torch.bfloat16)
    x = torch.randn(2, 9, hidden).bfloat16()
    weights, chosen = torch.rand(2, 9, experts).topk(top_k)
    expected = torch.zeros(x.shape, dtype=torch.float64)
    for position in [(batch, token) for batch in range(2) for token in range(9)]:
        for weight, expert in zip(weights[position], chosen[position]):
            gate, up = (layer.gate_up_proj[expert].double() @ x[position].double()).chunk(2)
            y = layer.down_proj[expert].double() @ (torch.nn.functional.silu(gate) * up)
            expected[position] += weight.double() * y
    with torch.no_grad():
        assert error(layer(x, chosen, weights), expected) < 2 * BF16_ERROR
        in_fp8 = nn.Float8InferenceExperts.from_experts(layer)
        assert error(in_fp8(x, chosen, weights), expected) < 2 * FP8_ERROR


def test_experts_under_autocast_and_frozen_ones_from_a_checkpoint():
    layer = nn.Experts(4, 64, 96)
    x, chosen, weights = torch.randn(9, 64), torch.randint(4, (9, 2)), torch.rand(9, 2)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x, chosen, weights)
        assert expected.dtype == torch.bfloat16
        expected.sum().backward()
        assert layer.down_proj.grad.dtype == torch.float32
    frozen = nn.Float8InferenceExperts.from_experts(layer)
    loaded = nn.Float8InferenceExperts(4, 64, 96)
    loaded.load_state_dict(frozen.state_dict())
    with torch.no_grad():
        found = loaded.half().bfloat16()(x.bfloat16(), chosen, weights)
        assert torch.equal(found, frozen(x.bfloat16(), chosen, weights))
        assert error(found, expected.detach()) < 2 * FP8_ERROR


def test_frozen_experts_take_float16_and_others_state_the_dtype_of_autocast():
    layer = nn.Experts(4, 64, 96, dtype=torch.bfloat16)
    x, chosen, weights = torch.randn(9, 64), torch.randint(4, (9, 2)), torch.rand(9, 2)
    expected = layer(x.bfloat16(), chosen, weights).detach()
    with torch.autocast("cpu", torch.float16):
        found = nn.Float8InferenceExperts.from_experts(layer)(x, chosen, weights)
        assert found.dtype == torch.float16 and error(found, expected) < 2 * FP8_ERROR
        with pytest.raises(TypeError, match="under torch.autocast, with dtype=torch.bfloat16"):
            layer(x, chosen, weights)


@pytest.mark.parametrize("counts", [[0, 5, 0, 16], [0, 0, 0, 0], [21, 0, 0, 0]])
def test_experts_without_tokens_have_gradients_of_zeros(counts):
    layer = nn.Experts(4, 64, 96, dtype=torch.bfloat16)
    chosen = torch.repeat_interleave(torch.arange(4), torch.tensor(counts)).reshape(-1, 1)
    x = torch.randn(sum(counts), 64, dtype=torch.bfloat16, requires_grad=True)
    layer(x, chosen, torch.ones(chosen.shape)).float().square().sum().backward()
    assert x.grad.shape == x.shape
    assert [bool(one.any()) for one in layer.down_proj.grad] == [count > 0 for count in counts]


def test_experts_are_transformed_by_torch_func():
    layer = nn.Experts(4, 64, 96, dtype=torch.bfloat16)
    x, chosen, weights = torch.randn(9, 64).bfloat16(), torch.randint(4, (9, 2)), torch.rand(9, 2)

    def loss(parameters):
        return torch.func.functional_call(layer, parameters, (x, chosen, weights)).float().square().sum()

    found = torch.func.grad(loss)({name: one.detach() for name, one in layer.named_parameters()})
    loss(dict(layer.named_parameters())).backward()
    for name, one in layer.named_parameters():
        assert error(found[name], one.grad) < BF16_ERROR, name


@pytest.mark.parametrize(
    ("chosen", "weights", "text"),
    [
        (torch.full((9, 2), 4), torch.ones(9, 2), "numbers from 4 to 4, they must lie in 0 to 3"),
        (torch.full((9, 2), -1), torch.ones(9, 2), "numbers from -1 to -1, they must lie in 0 to 3"),
        (torch.zeros(5, 2, dtype=torch.int64), torch.ones(5, 2), "begin as x.shape=[9, 64] does"),
        (torch.zeros(9, 2, dtype=torch.int64), torch.ones(9, 1), "weights.shape=[9, 1] must be equal"),
    ],
)
def test_experts_that_do_not_fit_are_refused(chosen, weights, text):
    layer = nn.Experts(4, 64, 96, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=re.escape(text)):
        layer(torch.zeros(9, 64, dtype=torch.bfloat16), chosen, weights)


@pytest.mark.parametrize(
    ("dtype", "chosen_dtype", "text"),
    [
        (torch.bfloat16, torch.float32, "experts.dtype=torch.float32 must be torch.int64"),
        (torch.bfloat16, torch.bool, "experts.dtype=torch.bool must be torch.int64"),
        (torch.float32, torch.int64, "gate_up_proj.dtype=torch.float32 must be torch.bfloat16; cast the layer"),
    ],
)
def test_experts_of_a_dtype_that_cannot_be_are_refused(dtype, chosen_dtype, text):
    layer = nn.Experts(4, 64, 96, dtype=dtype)
    with pytest.raises(TypeError, match=re.escape(text)):
        layer(torch.zeros(9, 64).bfloat16(), torch.zeros(9, 2).to(chosen_dtype), torch.ones(9, 2))
