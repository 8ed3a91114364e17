"""Norms that convert fuses: in which dtypes, under autocast, and which it leaves."""

from __future__ import annotations

import copy

import pytest
import torch
from fused_models import HIDDEN, LlamaRMSNorm, near, new_model, rows

from stoneware import nn


@pytest.fixture
def model():
    return new_model()


def test_a_norm_that_computes_something_else_is_left(model):
    model[0].input_layernorm = LlamaRMSNorm(HIDDEN, offset=1.0).bfloat16()
    done = nn.convert(model)
    assert "0.input_layernorm" not in done.blocks and "1.input_layernorm" in done.blocks
    assert "it computes add" in done.kept_blocks["0.input_layernorm"]


def test_a_norm_that_trains_runs_its_own_code_under_autocast_and_for_subclasses(monkeypatch):
    norm = LlamaRMSNorm(HIDDEN).bfloat16()
    assert nn.convert(torch.nn.Sequential(norm), "bf16").blocks == {"0": "RMSNorm"}
    calls = []
    fused = torch.nn.functional.rms_norm
    monkeypatch.setattr(torch.nn.functional, "rms_norm", lambda *arguments: calls.append(1) or fused(*arguments))
    x = rows(4, HIDDEN)
    norm(x)
    assert len(calls) == 1
    with torch.autocast("cpu", torch.bfloat16):
        norm(x)
    norm(torch.nn.Parameter(x))
    assert len(calls) == 1


def test_a_norm_in_32_bits_is_one_operator_under_autocast(monkeypatch):
    """Where weights and the sum of layers' results have 32 bits, and matmuls 16."""
    norm = LlamaRMSNorm(HIDDEN)
    plain, model = copy.deepcopy(norm), torch.nn.Sequential(norm)
    nn.convert(model, "bf16")
    calls, fused = [], torch.nn.functional.rms_norm
    monkeypatch.setattr(torch.nn.functional, "rms_norm", lambda *arguments: calls.append(1) or fused(*arguments))
    x = rows(4, HIDDEN, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = norm(x), plain(x)
        torch.testing.assert_close(found, wanted)
        assert found.dtype == torch.float32 and len(calls) == 1
        # Of 16 bits, it is the norm's own product with a weight of 32.
        assert torch.equal(norm(x.bfloat16()), plain(x.bfloat16())) and len(calls) == 1


def test_a_norm_that_depends_on_autocast_keeps_its_code():
    class CastRMSNorm(LlamaRMSNorm):
        def forward(self, x):
            y = super().forward(x)
            return y.bfloat16() if torch.is_autocast_enabled("cpu") else y

    norm = CastRMSNorm(HIDDEN)
    assert "depends on its mode" in nn.convert(torch.nn.Sequential(norm), "bf16").kept_blocks["0"]


@pytest.mark.parametrize(("name", "value"), [("variance_epsilon", 1.0), ("offset", 1.0)], ids=["epsilon", "offset"])
def test_a_norm_whose_attributes_change_computes_with_them(model, name, value):
    plain = copy.deepcopy(model)
    nn.convert(model)
    for one in (model, plain):
        setattr(one[0].input_layernorm, name, value)
    x = rows(4, HIDDEN)
    with torch.no_grad():
        assert torch.equal(model[0].input_layernorm(x), plain[0].input_layernorm(x))


def test_another_dtype_than_the_weight_has_is_the_norms_own_code(model):
    plain = copy.deepcopy(model)
    nn.convert(model)
    x = rows(4, HIDDEN, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(model[0].input_layernorm(x), plain[0].input_layernorm(x))


@pytest.mark.parametrize("later", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
def test_a_norm_is_one_operator_in_a_dtype_that_its_weight_has_later(monkeypatch, first, later):
    """As FSDP2's mixed precision hands over weights of 32 bits in 16."""
    norm = LlamaRMSNorm(HIDDEN).to(first)
    plain, model = copy.deepcopy(norm), torch.nn.Sequential(norm)
    nn.convert(model)
    calls, own = [], torch.nn.functional.rms_norm
    monkeypatch.setattr(torch.nn.functional, "rms_norm", lambda x, *others: calls.append(x) or own(x, *others))
    x = rows(4, HIDDEN, dtype=later)
    assert near(model.to(later)(x), plain.to(later)(x)) and len(calls) == 1


def test_a_norm_that_computes_something_else_in_another_dtype_does_so():
    class DoubledRMSNorm(LlamaRMSNorm):
        def forward(self, x):
            y = super().forward(x)
            return y if self.weight.dtype == torch.float32 else y + y

    norm = DoubledRMSNorm(HIDDEN)
    plain, model, weight = copy.deepcopy(norm), torch.nn.Sequential(norm), norm.weight
    assert nn.convert(model).blocks == {"0": "RMSNorm"}
    assert norm._stoneware.dtypes == {torch.float32} and norm.weight is weight
    for dtype in (torch.float32, torch.bfloat16):
        x = rows(4, HIDDEN, dtype=dtype)
        assert near(model.to(dtype)(x), plain.to(dtype)(x))
    assert norm.weight.dtype == torch.bfloat16
