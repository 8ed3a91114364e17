"""Plans of the vendor's kernels: what they do at each call in addition to calling the kernel."""

from __future__ import annotations

import dataclasses
import sys
import threading

import pytest
import torch
from operands import block_scaled_operands, poisoned, scaled_operands
from torch.utils._python_dispatch import TorchDispatchMode

from stoneware.ops.matmul import vendor as matmul_vendor
from stoneware.ops.scaled_mm import vendor
from stoneware.runtime.device import CPU
from stoneware.specs.matmul_problem import Problem
from stoneware.specs.scaled_mm_problem import Problem as ScaledProblem


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
    """A plan of block scales in torch's layout, and its arguments; torch has no CPU version of its kernel."""
    monkeypatch.setattr(torch, "_scaled_mm_v2", lambda *arguments, out: None)
    problem = ScaledProblem.dense(m=m, n=n, k=k, scales="block_1d" if is_1d else "block")
    x = block_scaled_operands(m, n, k, is_1d=is_1d)
    return plan_of(vendor.BACKEND, problem), (x.a, x.b, poisoned(m, n, torch.bfloat16), x.scale_a, x.scale_b, None)


class Operators(TorchDispatchMode):
    """The names of torch's operators that run inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def work_of(plan, arguments) -> tuple[list[str], int]:
    """(torch's operators, number of Python functions) of a call that is not the first."""
    plan(*arguments)
    with Operators() as operators:
        plan(*arguments)
    num_functions = 0

    def profile(frame, event, argument):
        nonlocal num_functions
        num_functions += event == "call"

    sys.setprofile(profile)
    try:
        plan(*arguments)
    finally:
        sys.setprofile(None)
    return operators.names, num_functions


@pytest.mark.parametrize(("has_bias", "kernel"), [(False, "mm"), (True, "addmm")])
def test_a_matmul_of_matrices_is_one_function_and_its_kernel(has_bias, kernel):
    assert work_of(*matmul_call(has_bias=has_bias)) == ([kernel], 1)


def test_only_what_is_not_a_matrix_gets_a_view():
    """A linear layer: x [batch, tokens, k] @ weight.t()."""
    a, b = torch.randn(2, 16, 128).bfloat16(), torch.randn(64, 128).bfloat16().t()
    out = torch.empty(2, 16, 64).bfloat16()
    plan = plan_of(matmul_vendor.BACKEND, Problem.dense(m=32, n=64, k=128))
    assert work_of(plan, (a, b, out, None)) == (["as_strided", "as_strided", "mm"], 2)
    assert torch.equal(out.view(32, 64), torch.mm(a.view(32, 128), b))


def test_a_batch_that_lies_as_its_problem_gets_no_views():
    a, b = torch.randn(3, 8, 128).bfloat16(), torch.randn(3, 64, 128).bfloat16().mT
    out = torch.empty(3, 8, 64).bfloat16()
    problem = Problem.dense(m=8, n=64, k=128, batch=3)
    assert work_of(plan_of(matmul_vendor.BACKEND, problem), (a, b, out, None)) == (["bmm"], 2)
    assert torch.equal(out, torch.bmm(a, b))
    # One matrix for all, as it is broadcast, is a view.
    problem = dataclasses.replace(problem, batch_stride_b=0)
    names, _ = work_of(plan_of(matmul_vendor.BACKEND, problem), (a, b[0], out, None))
    assert names == ["as_strided", "bmm"]
    assert torch.equal(out, torch.matmul(a, b[0]))


def test_fp8_with_one_scale_each_is_one_function_and_its_kernel():
    assert work_of(*scaled_call()) == (["_scaled_mm"], 1)


@pytest.mark.parametrize(
    ("sizes", "operators", "num_functions"),
    [
        ({}, [], 2),
        ({"is_1d": True}, ["t"], 2),
        ({"k": 128}, ["as_strided"], 3),  # a single column of scale_a
        ({"n": 128}, ["as_strided"], 3),
    ],
)
def test_block_scales_in_torchs_layout_are_passed_on(monkeypatch, sizes, operators, num_functions):
    """The second function is the kernel's double."""
    assert work_of(*block_call(monkeypatch, **sizes)) == (operators, num_functions)


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
