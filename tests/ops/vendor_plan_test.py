"""Plans of the vendor's kernels: what they do at each call beside the kernel's own call."""

from __future__ import annotations

import threading

import pytest
import torch
from operands import block_scaled_operands, poisoned, scaled_operands

from stoneware.ops.matmul import vendor as matmul_vendor
from stoneware.ops.matmul.problem import Problem
from stoneware.ops.scaled_mm import vendor
from stoneware.ops.scaled_mm.problem import Problem as ScaledProblem
from stoneware.runtime.device import CPU


def plan_of(backend, problem):
    return backend.plan(problem, backend.config, CPU)


def matmul_call(*, m=32, has_bias=False):
    """A plan of matmul and its arguments."""
    problem = Problem.dense(m=m, n=64, k=128, has_bias=has_bias)
    a, b = torch.randn(m, 128).bfloat16(), torch.randn(64, 128).bfloat16().t()
    bias = torch.randn(64).bfloat16() if has_bias else None
    return plan_of(matmul_vendor.BACKEND, problem), (a, b, poisoned(m, 64, torch.bfloat16), bias)


def scaled_call(**options):
    problem = ScaledProblem.dense(m=32, n=64, k=128, scales="tensor", **options)
    x = scaled_operands(32, 64, 128, scale_a="tensor", scale_b="tensor")
    return plan_of(vendor.BACKEND, problem), (x.a, x.b, poisoned(32, 64, torch.bfloat16), x.scale_a, x.scale_b, None)


def block_call(monkeypatch, *, m=32, n=256, k=512, is_1d=False):
    """A plan of block scales in torch's layout, its arguments, and the list of what torch's kernel gets."""
    given = []
    monkeypatch.setattr(torch.ops.aten._scaled_mm_v2, "out", lambda *arguments, out: given.append(arguments))
    problem = ScaledProblem.dense(m=m, n=n, k=k, scales="block_1d" if is_1d else "block")
    x = block_scaled_operands(m, n, k, is_1d=is_1d)
    return plan_of(vendor.BACKEND, problem), (x.a, x.b, poisoned(m, n, torch.bfloat16), x.scale_a, x.scale_b, None)


@pytest.mark.parametrize("call", ["matmul", "scaled", "block"])
def test_the_first_call_in_a_thread_makes_a_cuda_context_current(monkeypatch, call):
    """As the first backward does, in autograd's thread."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: calls.append(threading.get_ident()))
    plan, arguments = {"matmul": matmul_call, "scaled": scaled_call, "block": lambda: block_call(monkeypatch)}[call]()

    def work():
        for _ in range(3):
            plan(*arguments)

    for num_threads in (1, 2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert len(calls) == num_threads


def test_without_cuda_nothing_is_asked_of_it(monkeypatch):
    def fail():
        raise AssertionError("this would initialize CUDA")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fail)
    plan, arguments = matmul_call()
    thread = threading.Thread(target=plan, args=arguments)
    thread.start()
    thread.join()
    assert torch.equal(arguments[2], arguments[0] @ arguments[1])
