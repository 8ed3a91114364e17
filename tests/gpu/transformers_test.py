"""fp8 layers of transformers on a GPU: converted with their weights, on the kernel module, and quantized on load."""

from __future__ import annotations

import pytest
import torch

from stoneware import nn, quantize

pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers accelerate")

from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig
from transformers.integrations import finegrained_fp8 as theirs
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts, FP8Linear
from transformers.integrations.moe import use_experts_implementation

from stoneware.integrations import finegrained_fp8
from stoneware.integrations import transformers as engine

SIZES = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 512, "eos_token_id": None,
}  # fmt: skip

FP8_ERROR = 2**-4
"""Relative error of one matmul with an fp8 operand on each side, in the Frobenius norm."""

MODEL_ERROR = 0.1
"""The same of the logits of two layers of a Llama."""


@pytest.fixture(autouse=True)
def _needs_hopper(device):
    if device.compute_capability != (9, 0):
        pytest.skip(f"{device} is not a Hopper GPU; the fp8 kernels are built for that alone")


def error(y, expected):
    return ((y.double() - expected.double()).norm() / expected.double().norm()).item()


def fp8_layer(n, k):
    """An FP8Linear like transformers loads it, and its dense weight."""
    layer = FP8Linear(k, n, block_size=(128, 128)).cuda()
    weight, scale = quantize(torch.randn(n, k, device="cuda"), "block_2d")
    layer.weight, layer.weight_scale_inv = (torch.nn.Parameter(tensor, False) for tensor in (weight, scale))
    return layer, weight.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)


@pytest.fixture
def ours(monkeypatch):
    """What FP8Linear finds after LOCAL_KERNELS; set directly, since the package `kernels` may be missing."""
    functions = theirs.FineGrainedFP8(
        matmul=finegrained_fp8.matmul_2d,
        batched_matmul=finegrained_fp8.matmul_batched,
        grouped_matmul=finegrained_fp8.matmul_grouped,
    )
    monkeypatch.setattr(theirs, "_FINEGRAINED_FP8", functions)
    monkeypatch.setenv("TRANSFORMERS_DISABLE_DEEPGEMM_LINEAR", "1")


@pytest.mark.parametrize("m", [1, 17, 512])
def test_fp8linear_on_the_kernel_module_and_converted(m, ours):
    layer, dense = fp8_layer(1024, 2048)
    x = torch.randn(2, m, 2048, device="cuda").bfloat16()
    expected = x.double() @ dense.double().t()
    with torch.no_grad():
        through_module = layer(x)
    assert error(through_module, expected) < FP8_ERROR
    weight = layer.weight
    done = nn.convert(torch.nn.Sequential(layer).eval(), "blockwise")
    assert done.swapped == {"0": "Float8InferenceLinear, blockwise"} and layer.weight is weight
    with torch.no_grad():
        assert error(layer(x), expected) < FP8_ERROR
        assert error(layer(x), through_module) < 2**-7


@pytest.mark.parametrize("m", [1, 17, 512])
@pytest.mark.parametrize("blocks", [(1, 32), (32, 32)])
def test_an_mxfp8_layer_runs_with_folded_scales(m, blocks):
    n, k, (rows, columns) = 1024, 2048, blocks
    layer = FP8Linear(k, n, block_size=blocks, scale_fmt="ue8m0").cuda()
    weight = torch.randn(n, k, device="cuda") * torch.randn(n, 1, device="cuda").exp()
    largest = weight.abs().unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).amax((1, 3))
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448)))
    spread = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    values = ((weight / spread).to(torch.float8_e4m3fn), scale.to(torch.float8_e8m0fnu))
    layer.weight, layer.weight_scale_inv = (torch.nn.Parameter(tensor, False) for tensor in values)
    before = {name: tensor.view(torch.uint8).clone() for name, tensor in layer.state_dict().items()}
    x = torch.randn(2, m, k, device="cuda").bfloat16()
    expected = x.double() @ (values[0].double() * spread).t()
    done = nn.convert(torch.nn.Sequential(layer).eval(), "rowwise")
    assert done.swapped["0"].startswith(f"Float8InferenceLinear, blockwise, {rows}x{columns} scales folded")
    with torch.no_grad():
        assert error(layer(x), expected) < FP8_ERROR
    done.undo()
    assert all(torch.equal(tensor.view(torch.uint8), before[name]) for name, tensor in layer.state_dict().items())


@pytest.mark.parametrize("implementation", ["batched", "grouped"])
@pytest.mark.parametrize("block_size", [(128, 128), None])
def test_matmuls_of_experts(implementation, block_size):
    num_experts, m, n, k = 4, 61, 768, 512
    pairs = [
        quantize(torch.randn(n, k, device="cuda"), "tensor" if block_size is None else "block_2d")
        for _ in range(num_experts)
    ]
    weights = torch.stack([weight for weight, _ in pairs])
    scales = torch.stack([scale.view(1, 1) if block_size is None else scale for _, scale in pairs])
    full = scales if block_size is None else scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
    dense = weights.float() * full
    x, expert = torch.randn(m, k, device="cuda").bfloat16(), torch.randint(num_experts, (m,), device="cuda")
    if implementation == "batched":
        y = finegrained_fp8.matmul_batched(x, weights, scales, block_size, expert_ids=expert)
    else:
        expert, _ = expert.sort()
        counts = torch.bincount(expert, minlength=num_experts)
        y = finegrained_fp8.matmul_grouped(x, weights, scales, counts.cumsum(0).int(), counts, block_size)
    assert error(y, torch.einsum("mk,mnk->mn", x.float(), dense[expert])) < FP8_ERROR


def test_converted_fp8_experts(ours):
    config = MixtralConfig(hidden_size=512, intermediate_size=768, num_local_experts=4)
    kind = use_experts_implementation(experts_class=FP8Experts, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS)
    experts = kind(config, block_size=(128, 128)).cuda().eval().requires_grad_(False)
    for name in ("gate_up_proj", "down_proj"):
        empty = getattr(experts, name)
        pairs = [quantize(torch.randn(*weight.shape, device="cuda") / 16, "block_2d") for weight in empty]
        empty.copy_(torch.stack([weight for weight, _ in pairs]))
        getattr(experts, f"{name}_scale_inv").copy_(torch.stack([scale for _, scale in pairs]))
    config._experts_implementation = "grouped_mm"
    x = torch.randn(61, 512, device="cuda").bfloat16()
    index = torch.rand(61, 4, device="cuda").topk(2).indices
    weights = torch.rand(61, 2, device="cuda")
    through_module = experts(x, index, weights)
    model = torch.nn.ModuleDict({"experts": experts}).eval()
    assert nn.convert(model, "rowwise").blocks == {"experts": "Float8InferenceExperts, blockwise"}
    assert error(experts(x, index, weights), through_module) < 2**-7
    assert torch.autograd.grad(experts(x.requires_grad_(), index, weights).sum(), x)[0].isfinite().all()


def test_an_fp8_checkpoint_is_loaded_converted_and_generates(tmp_path, ours):
    pytest.importorskip("accelerate", reason="transformers loads fp8 checkpoints with accelerate only")
    model = (
        LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.06)).bfloat16().cuda().eval().requires_grad_(False)
    )
    nn.convert(model, "blockwise")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map="cuda")
    assert type(loaded.model.layers[0].mlp.up_proj) is FP8Linear
    tokens = torch.randint(SIZES["vocab_size"], (2, 64), device="cuda")
    with torch.no_grad():
        through_module = loaded(tokens).logits
        done = nn.convert(loaded, "blockwise")
        assert {*done.swapped.values()} == {"Float8InferenceLinear, blockwise"}
        assert error(loaded(tokens).logits, through_module) < MODEL_ERROR
    assert loaded.generate(tokens, max_new_tokens=8, do_sample=False).shape == (2, 72)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_the_quantizer_loads_a_16_bit_checkpoint(recipe, tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.06)).bfloat16().eval()
    model.save_pretrained(tmp_path)
    quantization = engine.config(recipe)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, device_map="cuda", quantization_config=quantization
    )
    assert type(loaded.model.layers[0].mlp.up_proj) is nn.Float8InferenceLinear
    tokens = torch.randint(SIZES["vocab_size"], (2, 64), device="cuda")
    with torch.no_grad():
        assert error(loaded(tokens).logits, model.cuda()(tokens).logits) < 2 * MODEL_ERROR
