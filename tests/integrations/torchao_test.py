"""Linears of torchao's Float8Tensor run on Stoneware's kernels, and `convert` keeps their weights.

Needs the package torchao; docs/engines.md has the command.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torchao", reason="torchao is not installed; docs/engines.md has the command")

from torchao.float8.inference import Float8MMConfig
from torchao.quantization import Float8Tensor, PerBlock, PerRow, PerTensor
from torchao.quantization.quantize_.workflows.float8.float8_tensor import QuantizeTensorToFloat8Kwargs

from stoneware import nn
from stoneware.errors import UnsupportedError
from stoneware.integrations import hosts
from stoneware.integrations import torchao as engine

SCALES = {
    "rowwise": (PerRow(), PerRow()),
    "tensorwise": (PerTensor(), PerTensor()),
    "blockwise": (PerBlock([1, 128]), PerBlock([128, 128])),
}


@pytest.fixture
def registered():
    engine.register()
    engine.register()
    yield
    engine.unregister()


def layer_of(recipe, bias=True, **options):
    """What `quantize_` makes of a layer, which itself wants a GPU."""
    x, weight = SCALES[recipe]
    linear = torch.nn.Linear(256, 384, bias=bias).bfloat16().requires_grad_(False)
    dense = linear.weight.float()
    quantized = Float8Tensor.from_hp(
        linear.weight.detach(), granularity=weight, mm_config=Float8MMConfig(use_fast_accum=True),
        act_quant_kwargs=QuantizeTensorToFloat8Kwargs(granularity=x, **options),
    )  # fmt: skip
    linear.weight = torch.nn.Parameter(quantized, requires_grad=False)
    return linear, dense


def error(y, expected):
    return float((y.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_the_linear_computes_what_torchao_does(recipe, bias):
    layer, _ = layer_of(recipe, bias)
    x = torch.randn(2, 5, 256).bfloat16()
    theirs = layer(x)
    engine.register()
    ours = layer(x)
    engine.unregister()
    assert ours.shape == theirs.shape and error(ours, theirs) < 2**-4
    assert torch.equal(layer(x), theirs), "unregister puts torchao's back"


@pytest.mark.parametrize("recipe", SCALES)
def test_the_linear_is_near_the_dense_one(recipe, registered):
    layer, dense = layer_of(recipe)
    x = torch.randn(5, 256).bfloat16()
    assert error(layer(x), x.float() @ dense.t() + layer.bias.float()) < 2**-4


def test_what_it_does_not_take_is_torchaos(registered, monkeypatch):
    layer, _ = layer_of("rowwise", hp_value_ub=1.0)
    calls = []
    monkeypatch.setattr(engine.frozen_linear, "linear", lambda *args: calls.append(args))
    layer(torch.randn(5, 256).bfloat16())
    assert not calls


@pytest.mark.parametrize("recipe", SCALES)
def test_convert_keeps_the_weights(recipe, monkeypatch):
    layer, dense = layer_of(recipe)
    before = layer.weight
    model, x = torch.nn.Sequential(layer).eval(), torch.randn(5, 256).bfloat16()
    done = nn.convert(model, "rowwise")
    assert done.swapped == {"0": f"Float8InferenceLinear, {recipe}"}
    assert layer.weight.data_ptr() == before.qdata.data_ptr()
    assert {*model.state_dict()} == {"0.weight", "0.bias", "0.weight_scale_inv"}
    assert error(model(x), x.float() @ dense.t() + layer.bias.float()) < 2**-4
    done.undo()
    assert layer.weight is before and type(layer) is torch.nn.Linear


def test_convert_keeps_torchaos_layers_of_other_formats():
    layer, _ = layer_of("rowwise", hp_value_ub=1.0)
    kept = nn.convert(torch.nn.Sequential(layer).eval(), "rowwise").kept
    assert "its weight is a Float8Tensor" in kept["0"]


def test_errors(monkeypatch):
    with pytest.raises(UnsupportedError, match="must follow register"):
        engine.unregister()
    monkeypatch.setitem(Float8Tensor._TORCH_FN_TABLE, Float8Tensor, {})
    with pytest.raises(UnsupportedError, match=f"tried with torchao {hosts.TRIED['torchao'][0]}"):
        engine.register()
