"""MXFP8 layers and experts of transformers are converted with folded scales, and restored as they were."""

from __future__ import annotations

import re
import weakref

import pytest
import torch
from fp8_experts import ERROR, Routed, dense_experts, error, fp8_experts, routing
from mxfp8 import mxfp8, spread
from tiny_llama import CONTINUATION, build, generate
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import FP8Linear, replace_with_fp8_linear
from transformers.utils.quantization_config import FineGrainedFP8Config

from stoneware import nn
from stoneware.nn import folded_scales


def fill(module, name, blocks, dense):
    """Gives a parameter of an fp8 module and its scales the values of MXFP8; returns what they stand for."""
    weight, scale = mxfp8(dense, *blocks)
    for key, value in ((name, weight), (f"{name}_scale_inv", scale.to(torch.float8_e8m0fnu))):
        assert getattr(module, key).shape == value.shape
        setattr(module, key, torch.nn.Parameter(value, requires_grad=False))
    return weight.float() * spread(scale, weight.shape)


def mxfp8_model(unconverted):
    """A tiny Llama with the weights of `build` in MXFP8, like transformers loads it."""
    source, model = build(), build()
    config = FineGrainedFP8Config(weight_block_size=(1, 32), scale_fmt="ue8m0")
    replace_with_fp8_linear(model, unconverted, config, pre_quantized=True)
    rest = {name: tensor for name, tensor in source.state_dict().items() if "proj" not in name}
    model.load_state_dict(rest, strict=False)
    for name, layer in model.named_modules():
        if isinstance(layer, FP8Linear):
            fill(layer, "weight", (1, 32), source.get_submodule(name).weight.detach().float())
    return model.requires_grad_(False).eval()


MXFP8 = pytest.mark.parametrize("blocks", [(1, 32), (32, 32)], ids=["1x32", "32x32"])


@MXFP8
def test_mxfp8_layers_run_with_folded_scales(blocks):
    layer = FP8Linear(256, 384, block_size=blocks, scale_fmt="ue8m0")
    dense = fill(layer, "weight", blocks, torch.randn(384, 256) * torch.randn(384, 1).exp())
    before = {name: tensor.view(torch.uint8).clone() for name, tensor in layer.state_dict().items()}
    model, x = torch.nn.Sequential(layer).eval(), torch.randn(4, 256).bfloat16()
    done = nn.convert(model, "rowwise")
    rows, columns = blocks
    assert re.fullmatch(
        f"Float8InferenceLinear, blockwise, {rows}x{columns} scales folded, (exact|at most [0-9.]+ % rounded)",
        done.swapped["0"],
    )
    assert layer.weight_scale_inv.shape == (3, 2)
    with torch.no_grad():
        assert error(model(x), x.float() @ dense.t()) < ERROR
    done.undo()
    assert type(layer) is FP8Linear
    after = {name: tensor.view(torch.uint8) for name, tensor in layer.state_dict().items()}
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@MXFP8
def test_mxfp8_experts_run_with_folded_scales(blocks):
    experts, _ = fp8_experts(blocks, scale_fmt="ue8m0", has_values=False)
    dense = {
        name: fill(experts, name, blocks, torch.randn(getattr(experts, name).shape) / 16)
        for name in ("gate_up_proj", "down_proj")
    }
    before = {name: tensor.view(torch.uint8).clone() for name, tensor in experts.state_dict().items()}
    x, index, weights = routing(37)
    done = nn.convert(Routed(experts).eval(), "rowwise")
    assert done.blocks["experts"].startswith("Float8InferenceExperts, blockwise, {}x{} scales folded".format(*blocks))
    assert error(experts(x, index, weights), dense_experts(dense, x, index, weights)) < 2 * ERROR
    done.undo()
    after = {name: tensor.view(torch.uint8) for name, tensor in experts.state_dict().items()}
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("blocks", [(1, 32), (128, 128)], ids=["folded", "other form of scales"])
def test_undo_leaves_a_layer_whose_weights_were_loaded_since(blocks, assign, caplog):
    """The old class would read the new values with the old scales."""
    layer = FP8Linear(256, 384, block_size=blocks, scale_fmt="ue8m0")
    fill(layer, "weight", blocks, torch.randn(384, 256))
    model, x = torch.nn.Sequential(layer).eval(), torch.randn(4, 256).bfloat16()
    done = nn.convert(model)
    other = torch.nn.Sequential(FP8Linear(256, 384, block_size=(128, 128))).eval()
    dense = fill(other[0], "weight", (128, 128), 3 * torch.randn(384, 256))
    other[0].weight_scale_inv = torch.nn.Parameter(other[0].weight_scale_inv.float(), requires_grad=False)
    model.load_state_dict(other.state_dict(), assign=assign)
    with caplog.at_level("WARNING"):
        done.undo()
    assert "undo left 0 as it is: its weights were loaded since" in caplog.text
    assert type(layer) is nn.Float8InferenceLinear
    with torch.no_grad():
        assert error(model(x), x.float() @ dense.t()) < ERROR


def test_undo_leaves_experts_whose_weights_were_loaded_since(caplog):
    experts, _ = fp8_experts((1, 32), scale_fmt="ue8m0", has_values=False)
    for name in ("gate_up_proj", "down_proj"):
        fill(experts, name, (1, 32), torch.randn(getattr(experts, name).shape) / 16)
    model = Routed(experts).eval()
    done = nn.convert(model)
    with torch.no_grad():
        experts.down_proj.copy_(experts.down_proj.flip(0))
    x, index, weights = routing(37)
    y = experts(x, index, weights)
    with caplog.at_level("WARNING"):
        done.undo()
    assert "undo left experts as it is: its weights were loaded since" in caplog.text
    assert torch.equal(experts(x, index, weights), y)


def test_an_mxfp8_layer_that_cannot_be_folded_stays_with_the_reason():
    layer = FP8Linear(256, 384, block_size=(1, 32), scale_fmt="ue8m0")
    fill(layer, "weight", (1, 32), torch.randn(384, 256) * torch.tensor([1.0, 2.0**-30]).repeat(192)[:, None])
    done = nn.convert(torch.nn.Sequential(layer).eval())
    assert type(layer) is FP8Linear and "change a row or a column" in done.kept["0"]


def test_a_partly_folded_model_is_not_saved(tmp_path):
    """Transformers would load the layer that stayed without its scales."""
    model = mxfp8_model(["lm_head"])
    layer = model.model.layers[1].self_attn.v_proj
    fill(layer, "weight", (1, 32), torch.randn(layer.weight.shape) * torch.tensor([1.0, 2.0**-30]).repeat(64)[:, None])
    done = nn.convert(model)
    assert {*done.kept} == {"lm_head", "model.layers.1.self_attn.v_proj"}
    with pytest.raises(ValueError, match=r"v_proj was not converted and has 8-bit weights.*undo the conversion before"):
        model.save_pretrained(tmp_path)
    done.undo()
    model.save_pretrained(tmp_path)


def test_a_failing_conversion_restores_folded_weights(monkeypatch):
    model, fold = mxfp8_model(["lm_head"]), folded_scales.fold
    parameters = dict(model.named_parameters())
    values = {name: parameter.clone() for name, parameter in parameters.items()}
    calls = []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 9:
            raise RuntimeError("no")
        return fold(*arguments)

    monkeypatch.setattr(folded_scales, "fold", failing)
    with pytest.raises(RuntimeError, match="no"):
        nn.convert(model)
    assert {type(module) for name, module in model.named_modules() if name.endswith("_proj")} == {FP8Linear}
    assert all(
        parameters[name] is parameter and torch.equal(parameter.view(torch.uint8), values[name].view(torch.uint8))
        for name, parameter in model.named_parameters()
    )


def test_a_folded_weight_is_kept_once_and_restored_as_it_was():
    model = mxfp8_model(["lm_head"])
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight.requires_grad_(False)._is_hf_initialized = True
    references = [weakref.ref(layer.weight) for layer in (mlp.gate_proj, mlp.up_proj)]
    before = mlp.up_proj.weight.clone()
    done = nn.convert(model)
    assert mlp._stoneware.holds() and not any(reference() for reference in references)
    for change in done._changes:
        if hasattr(change, "published"):
            assert change.published.weight is change.module.weight
    done.undo()
    weight = mlp.up_proj.weight
    assert torch.equal(weight.view(torch.uint8), before.view(torch.uint8))
    assert weight._is_hf_initialized and not weight.requires_grad


def test_a_folded_model_is_saved_as_an_fp8_checkpoint_that_transformers_loads(tmp_path):
    model = mxfp8_model(["lm_head"])
    assert "blockwise, 1x32 scales folded" in str(nn.convert(model))
    model.save_pretrained(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert generate(model) == generate(reference) == CONTINUATION
