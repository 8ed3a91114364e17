"""Comparing the vendor's bits with ours: what it costs, that it finds a difference anywhere, what it keeps."""

from __future__ import annotations

import dataclasses
import types
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stoneware.measuring import operands
from stoneware.ops import vendor_bits
from stoneware.runtime.device import CPU
from stoneware.specs import matmul, scaled_mm
from stoneware.specs.matmul_problem import Problem
from stoneware.specs.scaled_mm_problem import Problem as ScaledProblem

OURS, VENDOR = "ours", "vendor"
M, N, K = 300, 700, 512


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    vendor_bits._verdict.cache_clear()
    yield
    vendor_bits._verdict.cache_clear()


class Operation:
    """matmul or scaled_mm with two kernels: float32 sums along k, of which the vendor's are in two halves
    at the rows and columns of `split`."""

    def __init__(self, spec=matmul.SPEC, split=None):
        self.spec, self.split, self.num_runs = spec, split, 0

    def decide(self, problem, device, backend):
        return types.SimpleNamespace(config=OURS)

    def make_plan(self, problem, config, device):
        def plan(a, b, out, *others):
            self.num_runs += 1
            out.copy_(self.multiply(a, b, problem, config))

        return plan

    def multiply(self, a, b, problem, config):
        a, b = a.float() * 0.3, b.float()  # or sums of fp8 would be exact
        half = problem.k // 2
        whole = torch.zeros(*a.shape[:-1], b.shape[-1])
        for at in range(0, problem.k, 16):
            whole += a[..., at : at + 16] @ b[..., at : at + 16, :]
        if config == VENDOR and self.split is not None:
            halves = a[..., :half] @ b[..., :half, :] + a[..., half:] @ b[..., half:, :]
            whole[self.split] = halves[self.split]
        return whole


def why_not(operation, problem):
    return vendor_bits.why_not(operation, VENDOR, problem, CPU, may_run=True)


class Allocations(TorchDispatchMode):
    """The most bytes that tensors made inside had at once."""

    def __init__(self):
        super().__init__()
        self.num_bytes, self.peak_bytes, self.storages = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(one, torch.Tensor) and (storage := one.untyped_storage())._cdata not in self.storages:
                self.storages.add(storage._cdata)
                self.num_bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.num_bytes)
                weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())
        return result

    def freed(self, key, num_bytes):
        self.storages.discard(key)
        self.num_bytes -= num_bytes


@pytest.mark.parametrize(
    "problem",
    [
        Problem.dense(m=M, n=N, k=K),
        Problem.dense(m=M, n=N, k=K, layout="tn", has_bias=True),
        Problem.dense(m=M, n=N, k=K, out_dtype="fp32"),
        Problem.dense(m=20, n=30, k=K, batch=3),
        dataclasses.replace(Problem.dense(m=20, n=30, k=K, batch=3), batch_stride_b=0),
        dataclasses.replace(Problem.dense(m=M, n=N, k=K), lda=K + 8, ldb=K + 16, ldd=N + 8),
    ],
    ids=str,
)
def test_equal_kernels_are_equal_and_a_split_of_k_is_found(problem):
    assert why_not(Operation(), problem) is None
    vendor_bits._verdict.cache_clear()
    assert "elements of a result differ" in why_not(Operation(split=...), problem)


@pytest.mark.parametrize("rows", [slice(0, 64), slice(240, 300)])
@pytest.mark.parametrize("columns", [slice(0, 64), slice(230, 294), slice(640, 700)])
def test_one_tile_that_is_summed_otherwise_is_found(rows, columns):
    problem = Problem.dense(m=M, n=N, k=K)
    assert "differ" in why_not(Operation(split=(rows, columns)), problem)
    assert vendor_bits.why_not(Operation(), VENDOR, problem, CPU, may_run=True) is not None, "it is remembered"


def test_no_two_elements_of_a_tile_have_the_same_operands():
    drawn = operands.make(Problem.dense(m=600, n=700, k=64), "cpu", period=vendor_bits.PERIOD)
    for rows, size in ((drawn.a, 600), (drawn.b.t(), 700)):
        assert len(rows.unique(dim=0)) == 256
        assert rows[256:].equal(rows[: size - 256])
        assert len(rows[100:356].unique(dim=0)) == 256


def test_it_takes_little_more_than_another_weight_and_two_results():
    problem = Problem.dense(m=4, n=4096, k=1024)
    weight_bytes = 4096 * 1024 * 2
    operation = Operation()
    operation.multiply = lambda a, b, problem, config: torch.zeros(1, 1)  # what the kernels take is not counted
    with Allocations() as allocations:
        assert why_not(operation, problem) is None
    assert weight_bytes <= allocations.peak_bytes < 1.4 * weight_bytes


def test_block_scales_in_fp8_are_compared_too():
    problem = ScaledProblem.dense(m=40, n=272, k=K, scales="block")
    assert why_not(Operation(scaled_mm.SPEC), problem) is None
    vendor_bits._verdict.cache_clear()
    operation = Operation(scaled_mm.SPEC, split=(slice(32, 40), slice(256, 272)))
    assert why_not(operation, dataclasses.replace(problem, out_dtype="fp32")) is not None


def test_a_problem_is_compared_once_and_the_memo_is_bounded():
    operation = Operation()
    limit = vendor_bits._verdict.cache_info().maxsize
    assert limit and limit <= 10_000
    problem = Problem.dense(m=1, n=16, k=32)
    for _ in range(2):
        why_not(operation, problem)
    assert operation.num_runs == 2
    for m in range(2, limit + 10):
        vendor_bits._verdict(None, dataclasses.replace(problem, m=m))
    assert vendor_bits._verdict.cache_info().currsize == limit
    why_not(operation, problem)
    assert operation.num_runs == 4


def test_nothing_runs_where_it_may_not():
    operation = Operation()
    problem = Problem.dense(m=1, n=16, k=32)
    assert "outside of a capture" in vendor_bits.why_not(operation, VENDOR, problem, CPU, may_run=False)
    assert operation.num_runs == 0
    assert why_not(operation, problem) is None


def test_random_numbers_of_the_user_are_left_alone():
    state = torch.random.get_rng_state()
    why_not(Operation(), Problem.dense(m=4, n=16, k=32))
    assert torch.equal(torch.random.get_rng_state(), state)
