"""Converted models are saved and loaded without losing a scale, or refuse to be saved."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3Config
from transformers.integrations.finegrained_fp8 import FP8Linear

from stoneware import nn

SIZES = {
    "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=64),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "biased": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
}
TOKENS = torch.arange(32)[None]


def build(name):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.bfloat16).eval().requires_grad_(False)


@pytest.fixture(params=CONFIGS)
def any_model(request):
    return build(request.param)


@pytest.fixture(params=["llama", "mixtral"])
def model(request):
    return build(request.param)


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).requires_grad_(False)


def test_a_blockwise_model_has_the_same_logits_when_it_is_loaded(any_model, tmp_path):
    nn.convert(any_model, "blockwise")
    wanted, names = logits(any_model), {*any_model.state_dict()}
    any_model.save_pretrained(tmp_path)
    saved = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert saved["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    loaded = load(tmp_path)
    nn.convert(loaded, "blockwise")
    assert {*loaded.state_dict()} == names
    assert torch.equal(logits(loaded), wanted)


WITHOUT_STONEWARE = """
import sys, torch
from transformers import AutoModelForCausalLM

folder, bf16 = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
assert "stoneware" not in sys.modules
with torch.no_grad():
    found, wanted = model(torch.arange(32)[None]).logits.float(), torch.load(bf16)
print(float((found - wanted).norm() / wanted.norm()))
"""


def test_transformers_alone_loads_a_blockwise_model(model, tmp_path):
    torch.save(logits(model).float(), tmp_path / "bf16.pt")
    nn.convert(model, "blockwise")
    model.save_pretrained(tmp_path / "model")
    program = [sys.executable, "-c", WITHOUT_STONEWARE, str(tmp_path / "model"), str(tmp_path / "bf16.pt")]
    error = float(subprocess.run(program, check=True, capture_output=True, text=True).stdout)
    assert 0 < error < 0.1


def test_the_config_names_what_stayed_in_16_bits(model, tmp_path):
    done = nn.convert(model, "blockwise")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "fp8" and config["weight_block_size"] == [128, 128]
    assert {*done.kept} <= {*config["modules_to_not_convert"]}
    assert not {*done.swapped} & {*config["modules_to_not_convert"]}
    assert not hasattr(model.config, "quantization_config"), "other models may share the config"
    done.undo()
    model.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_save_pretrained_refuses_scales_that_transformers_has_no_format_for(model, recipe, tmp_path):
    done = nn.convert(model, recipe)
    for one in (model, copy.deepcopy(model)):
        with pytest.raises(ValueError, match="but model.layers.0.* has recipe .*save model.state_dict"):
            one.save_pretrained(tmp_path)
    assert not [*tmp_path.iterdir()]
    done.undo()
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
def test_models_that_keep_their_weights_are_saved_like_any_other(model, recipe, tmp_path):
    wanted = logits(model)
    nn.convert(model.train(), recipe)
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert torch.equal(logits(load(tmp_path)), wanted)


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "blockwise"])
@pytest.mark.parametrize("way", ["safetensors", "torch"])
def test_a_state_dict_loads_into_a_model_that_was_converted_the_same_way(model, recipe, way, tmp_path):
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.fill_(0.5)
    nn.convert(model, recipe)
    nn.convert(other, recipe)
    file = tmp_path / "weights"
    if way == "safetensors":
        safetensors.torch.save_model(model, str(file))
        safetensors.torch.load_model(other, str(file))
    else:
        torch.save(model.state_dict(), file)
        other.load_state_dict(torch.load(file))
    assert torch.equal(logits(other), logits(model))


def test_safetensors_saves_a_swiglu_of_ones_own(tmp_path):
    layer = nn.SwiGLU(128, 256, frozen=True, dtype=torch.bfloat16)
    layer.gate_up_proj.quantize_(torch.randn(512, 128))
    other = nn.SwiGLU(128, 256, frozen=True, dtype=torch.bfloat16)
    safetensors.torch.save_model(layer, str(tmp_path / "weights"))
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "weights"))
    x = torch.randn(4, 128).bfloat16()
    with torch.no_grad():
        assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_layers_of_an_fp8_checkpoint_keep_its_weights(recipe, has_bias, tmp_path):
    """As transformers loads them on a GPU."""
    source = torch.nn.Linear(256, 384, bias=has_bias).bfloat16()
    frozen = nn.Float8InferenceLinear.from_linear(source, "blockwise")
    layer = FP8Linear(256, 384, block_size=(128, 128), has_bias=has_bias)
    layer.load_state_dict(frozen.state_dict(), assign=True)
    weight, scale = layer.weight, layer.weight_scale_inv
    model, x = torch.nn.Sequential(layer).eval(), torch.randn(4, 256).bfloat16()
    done = nn.convert(model, recipe)
    assert done.swapped == {"0": "Float8InferenceLinear, blockwise"}
    assert layer.weight is weight and layer.weight_scale_inv is scale
    with torch.no_grad():
        assert torch.equal(model(x), frozen(x))
    done.undo()
    assert type(layer) is FP8Linear and layer.weight is weight


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"block_size": (64, 64)}, "blocks of 64x64 have scales that are not powers of two"),
        ({"block_size": (128, 128), "activation_scheme": "static"}, "it is a FP8Linear"),
    ],
)
def test_fp8_layers_of_another_format_are_kept(options, reason):
    model = torch.nn.Sequential(FP8Linear(256, 384, **options)).eval()
    model[0].weight_scale_inv.data.fill_(0.3)
    assert reason in nn.convert(model, "blockwise").kept["0"]
