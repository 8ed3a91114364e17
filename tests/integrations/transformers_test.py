"""Transformers loads models through the quantizer, and FP8Linear and FP8Experts run on the kernel module."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys

import pytest
import torch
from fp8_experts import ERROR, Routed, dense_experts, error, fp8_experts, routing
from safetensors.torch import load_file, save_file
from tiny_llama import CONTINUATION, PROMPT, build, generate, save_fp8, save_mixtral_fp8
from transformers import AutoModelForCausalLM, GPTNeoXConfig, MixtralConfig
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear, replace_with_fp8_linear
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils import import_utils
from transformers.utils.quantization_config import FineGrainedFP8Config

from stoneware import nn, quantize
from stoneware.errors import UnsupportedError
from stoneware.integrations import finegrained_fp8, hosts
from stoneware.integrations import transformers as engine


@pytest.fixture
def folder(tmp_path):
    build().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "blockwise"])
def test_from_pretrained_quantizes_like_convert(recipe, folder):
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=engine.config(recipe)
    )
    converted = build()
    done = nn.convert(converted, recipe, frozen=True)
    assert loaded.stoneware_conversion.swapped == done.swapped and done.swapped
    assert loaded.stoneware_conversion.blocks == done.blocks and done.blocks
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, converted(tokens).logits)
    assert generate(loaded) == generate(converted) == CONTINUATION


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "blockwise"])
def test_from_pretrained_fuses_feed_forwards_of_two_layers_like_convert(recipe, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    source = AutoModelForCausalLM.from_config(GPTNeoXConfig(**sizes, vocab_size=128), dtype=torch.bfloat16).eval()
    source.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=engine.config(recipe)
    )
    done = nn.convert(source, recipe, frozen=True)
    assert done.blocks == {f"gpt_neox.layers.{layer}.mlp": "MLP" for layer in range(2)}
    assert loaded.stoneware_conversion.blocks == done.blocks
    assert loaded.stoneware_conversion.swapped == done.swapped
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, source(tokens).logits)


def test_a_device_map_that_offloads_loads_16_bits_first(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map="auto", max_memory={"cpu": 2**20, "disk": 2**30},
        offload_folder=tmp_path / "offloaded", quantization_config=engine.config("rowwise"),
    )  # fmt: skip
    assert "disk" in model.hf_device_map.values()
    assert any("on meta" in reason for reason in model.stoneware_conversion.kept.values())
    assert model(torch.tensor([PROMPT])).logits[0, -1].argmax() == CONTINUATION[0]


def test_one_16_bit_weight_is_in_memory_at_a_time(folder, monkeypatch):
    quantized, numbers = nn.Float8InferenceLinear.quantized, []
    shapes = {module.weight.shape for module in build().modules() if isinstance(module, torch.nn.Linear)}

    def counted(weight, recipe):
        tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
        dense = [one for one in tensors if one.dtype == torch.bfloat16 and not one.is_meta and one.shape in shapes]
        numbers.append(len({one.untyped_storage().data_ptr() for one in dense}))
        return quantized(weight, recipe)

    monkeypatch.setattr(nn.Float8InferenceLinear, "quantized", staticmethod(counted))
    gc.freeze()  # get_objects then returns what is made from here on
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, quantization_config=engine.config("rowwise")
        )
    finally:
        gc.unfreeze()
    assert len(numbers) == len(model.stoneware_conversion.swapped) == 14
    assert max(numbers) <= 3, "the embedding and the head have such a shape, and stay in 16 bits"
    model.stoneware_conversion.undo()
    assert {type(module) for module in model.modules() if isinstance(module, torch.nn.Linear)} == {torch.nn.Linear}
    assert generate(model) == CONTINUATION


def test_a_weight_that_the_checkpoint_lacks_is_quantized_afterwards(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=engine.config("rowwise")
    )
    layer = model.model.layers[1].mlp.up_proj
    assert len(model.stoneware_conversion.swapped) == 14 and type(layer) is nn.Float8InferenceLinear
    assert layer.weight_scale_inv.shape == (384, 1) and model(torch.tensor([[1, 2]])).logits.isfinite().all()


def test_a_weight_of_another_shape_is_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(16, 256).bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RuntimeError, match="conversion of the weights"):  # details are in the log
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=engine.config("rowwise"))


def test_a_tied_weight_stays_in_16_bits(tmp_path):
    model = build()
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    every_layer = engine.config("rowwise", [])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=every_layer)
    assert "shared with" in loaded.stoneware_conversion.kept["lm_head"]
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_named_layers_stay_in_16_bits(folder):
    quantization = engine.config("rowwise", ["o_proj", "lm_head", "model.layers.0.mlp.up_proj"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=quantization)
    assert {name.rpartition(".")[2] for name in model.stoneware_conversion.kept} == {"o_proj", "lm_head", "up_proj"}
    assert type(model.model.layers[1].mlp.up_proj) is nn.Float8InferenceLinear


def test_a_blockwise_model_that_was_quantized_on_load_is_saved_for_transformers_alone(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=engine.config("blockwise")
    )
    model.save_pretrained(tmp_path / "fp8")
    saved = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert saved["quantization_config"]["quant_method"] == "fp8"


def test_an_unknown_recipe_is_refused():
    with pytest.raises(ValueError, match="recipe='int4' must be one of tensorwise, rowwise.*pass one of these"):
        engine.config("int4")


def fp8_model(folder):
    """The model that transformers builds on a GPU; on a CPU it would dequantize the checkpoint."""
    save_fp8(folder)
    source = build()
    nn.convert(source, "blockwise")
    model = build()
    replace_with_fp8_linear(
        model, ["lm_head"], FineGrainedFP8Config(weight_block_size=(128, 128)), pre_quantized=True
    )  # fmt: skip
    model.load_state_dict(source.state_dict(), assign=True)
    assert type(model.model.layers[0].mlp.up_proj) is FP8Linear
    return model.requires_grad_(False)


def test_a_converted_fp8_checkpoint_generates_what_transformers_does_with_dequantized_weights(tmp_path):
    model = fp8_model(tmp_path)
    done = nn.convert(model, "blockwise")
    assert {*done.swapped.values()} == {"Float8InferenceLinear, blockwise"}
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert type(reference.model.layers[0].mlp.up_proj) is torch.nn.Linear, "transformers dequantizes on a CPU"
    assert generate(model) == generate(reference) == CONTINUATION


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_feed_forwards_of_an_fp8_checkpoint_are_one_call_with_its_weights(recipe, tmp_path):
    """Whatever the recipe of the call: a norm must not hand over rows to a feed-forward with blocks."""
    model, tokens = fp8_model(tmp_path), torch.arange(16)[None]
    parameters = dict(model.named_parameters())
    values = {name: parameter.clone() for name, parameter in parameters.items()}
    done = nn.convert(model, recipe)
    assert [label for name, label in done.blocks.items() if name.endswith("mlp")] == ["SwiGLU", "SwiGLU"]
    mlp = model.model.layers[0].mlp
    assert mlp._stoneware.holds()
    x = torch.randn(5, 256).bfloat16()
    with torch.no_grad():
        layer_by_layer = mlp.down_proj(torch.nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
        assert error(mlp(x), layer_by_layer) < 2**-5
        logits = model(tokens).logits
        reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert error(logits, reference(tokens).logits) < 0.1
    done.undo()
    assert type(mlp.gate_proj) is FP8Linear
    assert all(
        parameters[name] is parameter and torch.equal(parameter.view(torch.uint8), values[name].view(torch.uint8))
        for name, parameter in model.named_parameters()
    )


@pytest.mark.parametrize("options", [{"block_size": (128, 128), "scale_fmt": "ue8m0"}, {"block_size": None}])
def test_other_scales_of_fp8_layers_keep_their_weights(options):
    layer = FP8Linear(256, 384, **options)
    scales, empty = "tensor" if options["block_size"] is None else "block_2d", layer.weight_scale_inv
    weight, scale = quantize(torch.randn(384, 256), scales, power_of_two=True)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.weight_scale_inv = torch.nn.Parameter(scale.reshape(empty.shape).to(empty.dtype), requires_grad=False)
    dense = weight.float() * (
        scale if scale.numel() == 1 else scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    )
    model, x = torch.nn.Sequential(layer).eval(), torch.randn(4, 256).bfloat16()
    done = nn.convert(model, "rowwise")
    assert layer.weight.data_ptr() == weight.data_ptr() and done.swapped
    with torch.no_grad():
        assert error(model(x), x.float() @ dense.t()) < ERROR
    done.undo()
    assert type(layer) is FP8Linear and {*dict(layer.named_parameters())} == {"weight", "weight_scale_inv"}


THROUGH_LOCAL_KERNELS = """
import sys, torch
from stoneware.integrations import transformers as engine
engine.use_kernels()
import transformers_test as test
from transformers.integrations.finegrained_fp8 import load_finegrained_fp8_kernel
from pathlib import Path
folder = Path(sys.argv[1])
model = test.fp8_model(folder)
tokens = test.generate(model)
assert load_finegrained_fp8_kernel().matmul.__module__ == "stoneware.integrations.finegrained_fp8"
reference = test.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
assert tokens == test.generate(reference) == test.CONTINUATION
layer, dense = model.model.layers[0].mlp.up_proj, reference.model.layers[0].mlp.up_proj
x = torch.randn(4, 256).bfloat16()
assert test.error(layer(x), dense(x)) < test.ERROR
for block_size in ((128, 128), None):
    test.check_experts("batched_mm", block_size)
    test.check_experts("grouped_mm", block_size)
print("done")
"""


def test_fp8_layers_load_our_kernels_through_local_kernels(tmp_path):
    if not import_utils.is_kernels_available():
        pytest.skip("no package `kernels` that this transformers takes is installed; docs/engines.md has the command")
    program = [sys.executable, "-c", THROUGH_LOCAL_KERNELS, str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, cwd=__file__.rpartition("/")[0])
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stdout + done.stderr


def check_experts(implementation, block_size, device="cpu"):
    """FP8Experts as transformers calls them, against its own loop over dequantized weights."""
    experts, dense = fp8_experts(block_size, device)
    experts.config._experts_implementation = implementation
    x, index, weights = routing(37, device)
    assert error(experts(x, index, weights), dense_experts(dense, x, index, weights)) < 2 * ERROR


@pytest.mark.parametrize(
    "options", [{}, {"scale_fmt": "ue8m0"}, {"block_size": None}], ids=["blocks", "ue8m0", "one scale"]
)
def test_convert_keeps_the_weights_of_fp8_experts(options):
    experts, dense = fp8_experts(**options)
    names, weight = {**experts.state_dict()}, experts.gate_up_proj
    model, (x, index, weights) = Routed(experts).eval(), routing(37)
    done = nn.convert(model, "rowwise")
    recipe = "blockwise" if options.get("block_size", True) else "rowwise"
    assert done.blocks == {"experts": f"Float8InferenceExperts, {recipe}"} and "swapped 1 of 1" in str(done)
    assert experts.gate_up_proj is weight and {*experts.state_dict()} == {*names}
    x.requires_grad_()
    y, expected = experts(x, index, weights), dense_experts(dense, x, index, weights)
    assert error(y.detach(), expected.detach()) < 2 * ERROR
    g = torch.randn_like(y)
    (gradient,) = torch.autograd.grad(y, x, g)
    (expected_gradient,) = torch.autograd.grad(expected, x, g.float())
    assert error(gradient, expected_gradient) < 3 * ERROR
    assert experts.half().gate_up_proj_scale_inv.dtype == torch.float32
    done.undo()
    assert type(experts) is FP8Experts
    assert all(torch.equal(tensor.float(), names[name].float()) for name, tensor in experts.state_dict().items())


def test_converted_fp8_experts_keep_their_gate():
    experts, dense = fp8_experts()
    experts.limit = 0.5
    x, index, weights = routing(5)
    nn.convert(Routed(experts).eval(), "rowwise")
    clamped = experts(x, index, weights)
    assert error(clamped, dense_experts(dense, x, index, weights)) > 4 * ERROR
    experts.limit = None
    with pytest.raises(RuntimeError, match="attributes of experts.*undo the conversion"):
        experts(x, index, weights)


def static(experts):
    experts.activation_scheme = "static"


def parallel(experts):
    experts._is_expert_parallel = True


def megamoe(experts):
    experts.config._experts_implementation = "deepgemm_megamoe"


def four_bits(experts):
    experts.down_proj = torch.nn.Parameter(experts.down_proj.view(torch.int8), requires_grad=False)


def other_blocks(experts):
    experts.block_size = (64, 64)
    for name in ("gate_up_proj_scale_inv", "down_proj_scale_inv"):
        scale = 0.3 * getattr(experts, name).repeat_interleave(2, 1).repeat_interleave(2, 2)
        setattr(experts, name, torch.nn.Parameter(scale, requires_grad=False))


def larger_blocks(experts):
    experts.block_size = (384, 256)
    for name in ("gate_up_proj_scale_inv", "down_proj_scale_inv"):
        num_experts, n, k = getattr(experts, name.removesuffix("_scale_inv")).shape
        scale = torch.ones(num_experts, n // 384, k // 256)
        setattr(experts, name, torch.nn.Parameter(scale, requires_grad=False))


def hooked(experts):
    experts.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (static, "activation_scheme is 'static'"),
        (parallel, "_is_expert_parallel is True"),
        (megamoe, "deepgemm_megamoe"),
        (four_bits, "down_proj is a Tensor of torch.int8"),
        (other_blocks, "blocks of 64x64 have scales that are not powers of two"),
        (larger_blocks, "does not divide blocks of 128x128"),
        (hooked, "has hooks"),
    ],
)
def test_fp8_experts_of_other_forms_are_kept(change, reason):
    experts, _ = fp8_experts()
    change(experts)
    done = nn.convert(Routed(experts).eval(), "rowwise")
    assert not done.blocks and re.search(reason, done.kept["experts"]), done.kept
    assert type(experts) is FP8Experts


def load_fp8(folder, monkeypatch):
    """Loads FP8Linear and FP8Experts, which transformers refuses on a CPU."""
    with monkeypatch.context() as patch:
        patch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def test_a_checkpoint_with_fp8_experts_is_loaded_converted_and_saved(tmp_path, monkeypatch):
    save_mixtral_fp8(tmp_path)
    model = load_fp8(tmp_path, monkeypatch)
    assert type(model.model.layers[0].mlp.experts) is FP8Experts
    done = nn.convert(model, "rowwise")
    assert sum(label == "Float8InferenceExperts, blockwise" for label in done.blocks.values()) == 2
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert type(reference.model.layers[0].mlp.experts) is MixtralExperts, "transformers dequantizes on a CPU"
    assert generate(model) == generate(reference) == CONTINUATION
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.bfloat16).state_dict()
    for name, tensor in reference.state_dict().items():
        assert torch.equal(tensor, again[name]), name


SIZES = {
    "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "num_local_experts": 4,
}  # fmt: skip


def test_experts_compute_what_those_of_transformers_do():
    # In a second layer, rounding in the first could change the experts of a token.
    model = AutoModelForCausalLM.from_config(MixtralConfig(**{**SIZES, "num_hidden_layers": 1}), dtype=torch.bfloat16)
    tokens, results = torch.arange(48).view(2, 24), {}
    for name in ("grouped_mm", engine.register_experts()):
        model.set_experts_implementation(name)
        model.zero_grad()
        logits = model(tokens).logits
        logits.square().mean().backward()
        weight = model.model.layers[0].mlp.experts.gate_up_proj
        results[name] = logits.detach(), weight.grad
    for ours, theirs in zip(results["stoneware"], results["grouped_mm"]):
        assert error(ours, theirs) < 2**-6


def test_experts_of_another_form_are_left_to_transformers():
    module, calls = torch.nn.Module(), []
    module.has_gate, module.has_bias, module.is_transposed, module._is_expert_parallel = True, True, False, False
    module.gate_up_proj = module.down_proj = torch.ones(1)
    engine.experts_forward(lambda *args: calls.append(args), module, torch.ones(1), None, None)
    assert len(calls) == 1


def test_the_kernel_module_computes_what_its_names_promise():
    a, w = torch.randn(3, 5, 256).bfloat16(), torch.randn(384, 256)
    expected = a.float() @ w.t()
    for scales, block_size in (("block_2d", (128, 128)), ("tensor", None), ("tensor", (384, 256))):
        w8, scale = quantize(w, scales)
        y = finegrained_fp8.matmul_2d(a, w8, scale, block_size, torch.bfloat16)
        assert y.shape == (3, 5, 384) and error(y, expected) < ERROR
        static = finegrained_fp8.matmul_2d(a, w8, scale, block_size, activation_scale=torch.tensor(0.01))
        assert error(static, expected) < ERROR
    values, scale = finegrained_fp8.fp8_act_quant(a)
    assert values.shape == a.shape and scale.shape == (3, 5, 2)
    with pytest.raises(ValueError, match=r"block_size=\(64, 64\) must be None or \(128, 128\); unset LOCAL_KERNELS"):
        finegrained_fp8.matmul_2d(a, w8, scale, (64, 64))
    with pytest.raises(TypeError, match="b.dtype=torch.int8 must be torch.float8_e4m3fn; unset LOCAL_KERNELS"):
        finegrained_fp8.matmul_2d(a, w8.view(torch.int8), scale)


def test_another_version_is_named_in_the_error():
    message = str(hosts.unfit("transformers", ImportError("no name register_quantizer")))
    assert hosts.TRIED["transformers"][-1] in message and "is installed" in message and "register_quantizer" in message


def test_use_kernels_without_a_fitting_pair_names_both_versions_to_install(monkeypatch):
    monkeypatch.setattr("transformers.utils.import_utils.is_kernels_available", lambda: False)
    with pytest.raises(UnsupportedError, match="kernels 0.17.2 and transformers 5.19.0.*takes kernels from") as caught:
        engine.use_kernels()
    assert 'pip install "kernels==0.17.2" "transformers==5.19.0"' in str(caught.value)
    assert "0.17.2" in hosts.TRIED["kernels"] and "5.19.0" in hosts.TRIED["transformers"]
