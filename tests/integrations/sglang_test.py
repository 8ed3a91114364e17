"""SGLang loads the plug-in through its entry point, and its block-scaled linears run on Stoneware's kernels.

Needs the package sglang; docs/engines.md has the command.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed; docs/engines.md has the command")

from sglang.srt import plugins
from sglang.srt.layers.quantization import fp8_utils

from stoneware import quantize
from stoneware.errors import UnsupportedError
from stoneware.integrations import hosts
from stoneware.integrations import sglang as engine

N, K = 384, 256


@pytest.fixture(scope="module", autouse=True)
def _plugin():
    os.environ["STONEWARE_ENGINES_ON_CPU"] = "1"
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


def test_an_older_sglang_is_named(monkeypatch):
    monkeypatch.delattr("sglang.srt.plugins.hook_registry.HookType")
    with pytest.raises(UnsupportedError, match=f"tried with sglang {hosts.TRIED['sglang'][0]}"):
        engine.register.__wrapped__()
