"""SGLang loads the plug-in through its entry point, and its block-scaled linears run on Stoneware's kernels.

Needs the package sglang; docs/engines.md has the command.
"""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed; docs/engines.md has the command")

from sglang.srt import plugins
from sglang.srt.layers.moe import MoeRunner, MoeRunnerBackend, MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.quantization import fp8_utils

from stoneware import quantize
from stoneware.errors import UnsupportedError
from stoneware.integrations import hosts
from stoneware.integrations import sglang as engine

N, K = 384, 256


@pytest.fixture(scope="module", autouse=True)
def _plugin():
    os.environ["STONEWARE_ENGINES_ON_CPU"] = os.environ["STONEWARE_ENGINES_EXPERTS"] = "1"
    before = fp8_utils.dispatch_w8a8_block_fp8_linear
    plugins.load_plugins()
    plugins.HookRegistry.apply_hooks()
    assert fp8_utils.dispatch_w8a8_block_fp8_linear is not before, "the entry point was not found"


def error(y, expected):
    return float((y.double() - expected.double()).norm() / expected.double().norm())


def test_the_dispatch_returns_our_linear_and_it_is_near_the_dense_one():
    linear = fp8_utils.dispatch_w8a8_block_fp8_linear([128, 128])
    assert linear.func is engine.block_linear
    weight, scale = quantize(torch.randn(N, K), "block_2d")
    dense = weight.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    x, bias = torch.randn(2, 5, K).bfloat16(), torch.randn(N).bfloat16()
    y = linear(x, weight, [128, 128], scale, bias=bias)
    assert y.shape == (2, 5, N) and y.dtype == torch.bfloat16
    assert error(y, x.float() @ dense.t() + bias.float()) < 2**-4
    x8, x_scale = quantize(x.view(-1, K), "block")
    assert torch.equal(linear(x8, weight, [128, 128], scale, input_scale=x_scale, bias=bias), y.view(-1, N))


def test_other_blocks_and_a_cpu_are_left_to_sglang(monkeypatch):
    assert getattr(fp8_utils.dispatch_w8a8_block_fp8_linear([64, 64]), "func", None) is not engine.block_linear
    calls = []
    engine.block_linear(
        lambda *args: calls.append(args), torch.ones(1, K), torch.ones(24, K), [64, 64], torch.ones(1, 4)
    )
    assert len(calls) == 1
    monkeypatch.delenv("STONEWARE_ENGINES_ON_CPU")
    assert "STONEWARE_ENGINES_ON_CPU=1" in engine.why_not_here()


NUM_EXPERTS = 4


def experts(is_fp8, **options):
    """A runner like SGLang's methods make it, its weights, and these dequantized."""
    sizes = {"num_experts": NUM_EXPERTS, "num_local_experts": NUM_EXPERTS, "hidden_size": K, "top_k": 2}
    config = MoeRunnerConfig(**{**sizes, "intermediate_size_per_partition": N, **options})
    weights, scales, dense = [], [], []
    for n, k in ((2 * N, K), (K, N)):
        values = torch.randn(NUM_EXPERTS, n, k) / 16
        if is_fp8:
            values, scale = (
                torch.stack(tensors) for tensors in zip(*(quantize(value, "block_2d") for value in values))
            )
            dense.append(values.float() * scale.repeat_interleave(128, 1).repeat_interleave(128, 2))
        else:
            values, scale = values.bfloat16(), None
            dense.append(values.float())
        weights.append(values)
        scales.append(scale)
    quantization = TritonMoeQuantInfo(
        *weights, use_fp8_w8a8=is_fp8, w13_scale=scales[0], w2_scale=scales[1],
        block_shape=[128, 128] if is_fp8 else None,
    )  # fmt: skip
    return MoeRunner(MoeRunnerBackend.TRITON, config), quantization, dense


def routing(num_tokens):
    index = torch.stack([torch.randperm(NUM_EXPERTS)[:2] for _ in range(num_tokens)]).int()
    weights = torch.rand(num_tokens, 2)
    index[-1] = -1  # a row of padding
    topk = StandardTopKOutput(topk_weights=weights, topk_ids=index, router_logits=torch.empty(0))
    return StandardDispatchOutput(torch.randn(num_tokens, K).bfloat16(), None, topk)


@pytest.mark.parametrize("is_fp8", [True, False])
def test_experts_compute_the_dequantized_product(is_fp8):
    runner, quantization, (w13, w2) = experts(is_fp8, routed_scaling_factor=2.5)
    dispatched = routing(37)
    assert engine.why_not_experts(runner, dispatched, quantization) is None
    y = runner.run(dispatched, quantization).hidden_states
    expected = torch.zeros(37, K)
    weights, index, _ = dispatched.topk_output
    for token in range(36):
        for expert, weight in zip(index[token], weights[token]):
            gate, up = (w13[expert] @ dispatched.hidden_states[token].float()).chunk(2)
            expected[token] += 2.5 * weight * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
    assert y.shape == expected.shape and error(y, expected) < (2**-3 if is_fp8 else 2**-6)
    assert not y[-1].any()


@pytest.mark.parametrize(
    "options", [{"activation": "gelu"}, {"swiglu_limit": 7.0}, {"no_combine": True}, {"num_local_experts": 2}]
)
def test_other_experts_are_left_to_sglang(options):
    runner, quantization, _ = experts(True, **options)
    calls, dispatched = [], routing(5)
    engine.run_experts(lambda *args: calls.append(args), runner, dispatched, quantization)
    assert calls == [(runner, dispatched, quantization)]


def test_weights_of_other_forms_are_left_to_sglang():
    runner, quantization, _ = experts(True)
    for name, value in (("block_shape", [64, 64]), ("per_channel_quant", True), ("b13", torch.zeros(1))):
        changed = dataclasses.replace(quantization, **{name: value})
        assert engine.why_not_experts(runner, routing(5), changed), name


def test_an_older_sglang_is_named(monkeypatch):
    monkeypatch.delattr("sglang.srt.plugins.hook_registry.HookType")
    with pytest.raises(UnsupportedError, match=f"tried with sglang {hosts.TRIED['sglang'][0]}"):
        engine.register.__wrapped__()
