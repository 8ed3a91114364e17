"""Under torch.compile, matmuls with fused pointwise operators are right, run one kernel, and are captured in CUDA
graphs; Inductor runs our candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.nn import functional

import stoneware as sw
from stoneware.inductor import EpilogueFusion
from stoneware.inductor.operators import OPERATORS, plans_of
from stoneware.inductor.program import parse
from stoneware.ops import fused

Function = Callable[..., Any]

N, K = 1040, 512
M_VALUES = (16, 100, 1000)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


class Spy(EpilogueFusion):
    """Fuses wherever it can, and keeps the texts of the epilogues, by op."""

    def __init__(self) -> None:
        super().__init__(always=True)
        self.texts: list[tuple[str, str]] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        super().__call__(graph)
        ops = {operator: op for op, operator in OPERATORS.items()}
        self.texts += [(ops[node.target], node.args[-1]) for node in graph.nodes if node.target in ops]

    def uuid(self) -> None:  # type: ignore[override]
        """Nothing is read from Inductor's cache: each test compiles."""


def compiled_with_spy(function: Function, **options: Any) -> tuple[Function, Spy]:
    spy = Spy()
    return torch.compile(function, options={"post_grad_custom_pre_pass": spy, **options}, fullgraph=True), spy


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def check(results: Any, expected: Any) -> None:
    results, expected = (each if isinstance(each, tuple) else (each,) for each in (results, expected))
    assert len(results) == len(expected)
    for position, (result, reference) in enumerate(zip(results, expected)):
        assert result.shape == reference.shape, position
        assert result.isfinite().all() if result.dtype.itemsize > 1 else True
        error = (result.double() - reference.double()).norm() / reference.double().norm().clamp_min(1e-30)
        assert error < (0.05 if result.dtype.itemsize == 1 else 0.008), f"result {position}: {error:.2e}"


FUNCTIONS: dict[str, Function] = {
    "silu": lambda y, r, bias: functional.silu(y),
    "gelu of a bias, times a matrix": lambda y, r, bias: functional.gelu(y + bias) * r,
    # Both sides are 0 at the limit: values next to it may be rounded to either side.
    "where": lambda y, r, bias: torch.where(y > 0.5, y - 0.5, (y - 0.5) * bias),
    "swiglu in fp8": lambda y, r, bias: (
        (functional.silu(y[..., ::2]) * y[..., 1::2]).clamp(-448, 448).to(torch.float8_e4m3fn)
    ),
    "several results": lambda y, r, bias: (y, functional.silu(y) * r, y.abs().amax(-1)),
}


def in_float64(name: str, acc: torch.Tensor, r: torch.Tensor, bias: torch.Tensor) -> Any:
    return FUNCTIONS[name](acc, r.double(), bias.double())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_matmul_is_right_for_every_m(name: str) -> None:
    w, bias = normal(N, K), normal(N)
    compiled, spy = compiled_with_spy(lambda a, w, r, bias: FUNCTIONS[name](sw.matmul(a, w.t()), r, bias))
    for m in M_VALUES:
        a, r = normal(m, K) * 0.1, normal(m, N)
        with torch.no_grad():
            before, after = (compiled(a, w, r, bias) for _ in range(2))
        for results in (before, after):
            check(results, in_float64(name, a.double() @ w.double().t(), r, bias))
    assert {op for op, _ in spy.texts} == {"matmul"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_scaled_mm_is_right(name: str) -> None:
    m = 300
    a, w = (normal(rows, K).to(torch.float8_e4m3fn) for rows in (m, N))
    scale_a, scale_b = (torch.rand(shape, device="cuda") * 0.2 + 0.01 for shape in ((m, 1), (1, N)))
    r, bias = normal(m, N), normal(N)

    def block(*tensors: torch.Tensor) -> Any:
        *operands, r, bias = tensors
        return FUNCTIONS[name](sw.scaled_mm(*operands), r, bias)

    compiled, spy = compiled_with_spy(block)
    with torch.no_grad():
        results = compiled(a, w.t(), scale_a, scale_b, r, bias)
    acc = (a.double() @ w.double().t()) * scale_a.double() * scale_b.double()
    check(results, in_float64(name, acc, r, bias))
    assert [op for op, _ in spy.texts] == ["scaled_mm"]


def test_grouped_mm_is_right() -> None:
    ends = [37, 37, 150, 260]
    a, w = normal(ends[-1], K), normal(len(ends), N, K)
    offs = torch.tensor(ends, device="cuda", dtype=torch.int32)
    compiled, spy = compiled_with_spy(lambda *tensors: functional.silu(sw.grouped_mm(*tensors)))
    with torch.no_grad():
        result = compiled(a, w.mT, offs)

    def groups() -> Iterator[torch.Tensor]:
        for group, (start, end) in enumerate(zip([0, *ends], ends)):
            yield functional.silu(a[start:end].double() @ w[group].double().t())

    check(result, torch.cat(list(groups())))
    assert [op for op, _ in spy.texts] == ["grouped_mm"]


def test_the_call_after_the_first_runs_one_linked_kernel() -> None:
    a, w, r = normal(256, K), normal(N, K), normal(256, N)
    compiled, spy = compiled_with_spy(lambda a, w, r: functional.silu(sw.matmul(a, w.t())) * r)
    with torch.no_grad():
        compiled(a, w, r)
    [(op, text)] = spy.texts
    tensors = a, w.t(), None
    calls = fused.calls_of(
        plans_of(op), parse(text), [r], tensors, (None, *([False] if op == "matmul" else []), None, None)
    )
    assert hasattr(calls.plan(*tensors, r), "native_launch")


def test_views_with_more_dimensions_are_right_for_every_size() -> None:
    w, bias = normal(N, K), normal(N)

    def block(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = sw.matmul(x.reshape(-1, K), w.t()).view(*x.shape[:-1], N)
        h = functional.gelu(y * 0.05 + bias) * r
        return h, h.abs().amax(-1)

    spy = Spy()
    compiled = torch.compile(block, options={"post_grad_custom_pre_pass": spy}, fullgraph=True, dynamic=True)
    for sizes in ((2, 30), (3, 77)):
        x, r = normal(*sizes, K), normal(*sizes, N)
        with torch.no_grad():
            results = compiled(x, w, r, bias)
        h = functional.gelu((x.double() @ w.double().t()) * 0.05 + bias.double()) * r.double()
        check(results, (h, h.abs().amax(-1)))
    assert len(spy.texts) == 1


def test_gradients_are_those_of_float64() -> None:
    leaves = [each.requires_grad_() for each in (normal(300, K), normal(N, K), normal(300, N))]

    def block(a: torch.Tensor, w: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return functional.silu(sw.matmul(a, w.t()) * 0.05) * r

    compiled, spy = compiled_with_spy(block)
    weight = normal(300, N)
    found = torch.autograd.grad(compiled(*leaves), leaves, weight)
    assert spy.texts
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    result = functional.silu((doubles[0] @ doubles[1].t()) * 0.05) * doubles[2]
    for one, wanted in zip(found, torch.autograd.grad(result, doubles, weight.double())):
        assert (one.double() - wanted).norm() / wanted.norm() < 0.01


def test_a_cuda_graph_of_inductor_s_is_right() -> None:
    w = normal(N, K)
    compiled, spy = compiled_with_spy(lambda a, w: functional.silu(sw.matmul(a, w.t())), **{"triton.cudagraphs": True})
    for _ in range(4):  # a first call, a warm-up, the capture, and a replay
        a = normal(64, K)
        with torch.no_grad():
            result = compiled(a, w).clone()
        check(result, functional.silu(a.double() @ w.double().t()))
    assert len(spy.texts) == 1


def test_the_options_are_right_whatever_is_predicted() -> None:
    compiled = torch.compile(
        lambda a, w, v: functional.silu(sw.matmul(a, w.t())) * (a @ v.t()), options=sw.inductor.options()
    )
    w, v = normal(N, K), normal(N, K)
    for m in M_VALUES:
        a = normal(m, K) * 0.1
        with torch.no_grad():
            result = compiled(a, w, v)
        doubles = [each.double() for each in (a, w, v)]
        check(result, functional.silu(doubles[0] @ doubles[1].t()) * (doubles[0] @ doubles[2].t()))


def test_inductor_runs_a_candidate() -> None:
    a, w = normal(300, K), normal(N, K)
    # Without kernels of torch's the candidate is the only one.
    only = {"max_autotune": True, "max_autotune_gemm_backends": "NONE"}
    compiled = torch.compile(torch.mm, options={**only, **sw.inductor.options(fuse_epilogues=False)})
    with torch.no_grad():
        result, [code] = run_and_get_code(compiled, a, w.t())
    assert "extern_kernels.stoneware_mm(" in code
    check(result, a.double() @ w.double().t())


def test_max_autotune_times_a_candidate() -> None:
    a, w = normal(300, K), normal(N, K)
    options = {"max_autotune": True, **sw.inductor.options(fuse_epilogues=False)}
    compiled = torch.compile(lambda a, w: a @ w.t(), options=options)
    with torch.no_grad():
        check(compiled(a, w), a.double() @ w.double().t())
