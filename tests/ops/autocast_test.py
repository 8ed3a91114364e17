"""Calls under torch.autocast: the dtypes of a call are its own, so the same values come out."""

from __future__ import annotations

import functools

import pytest
import torch
from operands import scaled_operands

import stoneware as sw
from stoneware.ops import dispatch
from stoneware.ops.matmul import vendor
from stoneware.runtime.device import CPU
from stoneware.tuning import policy

M, N, K = 24, 48, 64
OFFS = torch.tensor([9, M], dtype=torch.int32)
DTYPES = [torch.bfloat16, torch.float16]

autocast = functools.partial(torch.autocast, "cpu")


def matmul_operands(dtype=torch.bfloat16):
    return torch.randn(M, K).to(dtype), torch.randn(N, K).to(dtype).t()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["matmul", "scaled_mm", "grouped_mm"])
def test_a_result_has_the_bits_that_it_has_without_autocast(op, dtype):
    a, b = matmul_operands()
    if op == "scaled_mm":
        x = scaled_operands(M, N, K)
        call = functools.partial(sw.scaled_mm, x.a, x.b, x.scale_a, x.scale_b, out_dtype=torch.float32)
    elif op == "matmul":
        call = functools.partial(sw.matmul, a, b, out_dtype=torch.float32)
    else:
        call = functools.partial(sw.grouped_mm, a, torch.stack([b.t(), -b.t()]).mT, OFFS)
    expected = call()
    with autocast(dtype):
        assert torch.equal(call(), expected)


@pytest.mark.parametrize("op", ["matmul", "grouped_mm"])
def test_a_backward_under_autocast_has_the_same_gradients(op):
    def gradients(is_enabled):
        x, w = a.clone().requires_grad_(), b.clone().requires_grad_()
        with autocast(torch.float16, enabled=is_enabled):
            y = sw.matmul(x, w) if op == "matmul" else sw.grouped_mm(x, w, OFFS)
            return torch.autograd.grad(y, (x, w), dy)

    a, b = matmul_operands()
    b, dy = b if op == "matmul" else torch.stack([b.t(), -b.t()]).mT, torch.randn(M, N).bfloat16()
    for found, expected in zip(gradients(True), gradients(False)):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("has_bias", [False, True])
def test_what_torch_answers_keeps_the_dtype_of_the_call(has_bias, monkeypatch):
    def plan(operation, problem, device, **kwargs):
        return vendor.BACKEND.plan(problem, vendor.BACKEND.config, CPU)

    monkeypatch.setattr(dispatch.Operation, "plan", plan)
    policy.forget_plans()
    a, b = matmul_operands()
    bias = torch.randn(N).bfloat16() if has_bias else None
    expected = sw.matmul(a, b, bias)
    with autocast(torch.float16):
        found = sw.matmul(a, b, bias)
    policy.forget_plans()
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
