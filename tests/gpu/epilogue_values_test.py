"""Epilogues in every kind of open kernel are right: all ops, ragged sizes, several outputs, gradients."""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import fitting_kernels
import pytest
import torch
from torch.nn import functional

import stoneware as sw
from stoneware.epilogue import linked
from stoneware.kernels import manifest
from stoneware.kernels.config import Config
from stoneware.kernels.manifest import KernelRecord
from stoneware.measuring import operands
from stoneware.ops import APIS, dropout_kernel, fused
from stoneware.specs import spec_of

PROBLEMS = {
    "matmul": {"bf16": {"dtype": "bf16"}, "fp16": {"dtype": "fp16"}, "bias": {"dtype": "bf16", "has_bias": True}},
    "scaled_mm": {"row": {"scales": "row"}, "tensor": {"scales": "tensor"}, "block": {"scales": "block"}},
    "grouped_mm": {
        "bf16": {"dtype": "bf16", "num_groups": 5},
        "row": {"dtype": "e4m3", "num_groups": 5},
        "block": {"dtype": "e4m3", "num_groups": 5, "scales": "block"},
    },
}
KINDS = [(op, kind) for op, kinds in PROBLEMS.items() for kind in kinds]
SHAPES = [(1, 528, 512), (37, 1040, 384), (100, 512, 512), (300, 2064, 640), (1000, 528, 512), (2000, 8208, 512)]

Function = Callable[..., Any]
MakeInputs = Callable[[int, int], tuple[torch.Tensor, ...]]


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


EXPRESSIONS: dict[str, tuple[Function, MakeInputs]] = {
    "gelu of a bias, and a residual": (
        lambda acc, bias, r: functional.gelu(acc * 0.1 + bias) + r,
        lambda m, n: (normal(n), normal(m, n)),
    ),
    "silu, times a float16": (
        lambda acc, r: functional.silu(acc * 0.1) * r,
        lambda m, n: (normal(m, n, dtype=torch.float16),),
    ),
    "swiglu in fp8": (  # far below 464, from which on a conversion to e4m3 gives NaN
        lambda acc, s: (functional.silu(acc[..., 0::2] * 0.1) * acc[..., 1::2] * s).to(torch.float8_e4m3fn),
        lambda m, n: (torch.tensor(0.1, device="cuda"),),
    ),
    "several results": (
        lambda acc: (acc.relu(), acc.abs().amax(-1), (acc * 0.5).to(torch.float16), acc.to(torch.float8_e5m2)),
        lambda m, n: (),
    ),
    "a transposed input and a column": (
        lambda acc, r, c: acc * c[:, None] + r.t(),
        lambda m, n: (normal(n, m), normal(m, dtype=torch.float32)),
    ),
    "the maximum of pairs": (
        lambda acc: (acc[..., ::2] - acc[..., 1::2], (acc[..., ::2] * acc[..., 1::2]).amax(-1, keepdim=True)),
        lambda m, n: (),
    ),
    "a mask, and an input that is sliced": (
        lambda acc, r, k: torch.where(k, acc, r[:, 1:]),
        lambda m, n: (normal(m, n + 1), torch.rand(m, n, device="cuda") > 0.5),
    ),
}


def problem(op: str, kind: str, shape: tuple[int, int, int]) -> Any:
    m, n, k = shape
    return spec_of(op).make_problem(m=m, n=n, k=k, **PROBLEMS[op][kind])


def poison() -> None:
    """Leaves NaN in the memory that the next allocations get."""
    blocks = [torch.full((1 << 16,), math.nan, device="cuda") for _ in range(40)]
    blocks += [torch.full((1 << 21,), math.nan, device="cuda") for _ in range(4)]
    del blocks


def as_tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def fused_calls(
    op: str, function: Function, inputs: tuple[torch.Tensor, ...], tensors: list[Any], config: Config | None = None
) -> Any:
    """The calls of an op with an epilogue, which is linked and fused."""
    plans = importlib.import_module(APIS[op])._PLANS
    objects = {"matmul": (None, False), "scaled_mm": (torch.bfloat16, True), "grouped_mm": (None,)}[op]
    with sw.tuning("on_miss"):
        calls = fused.calls_of(plans, function, inputs, tensors, (*objects, None, config))
        assert hasattr(calls.plan(*tensors, *inputs), "native_launch"), "it must be fused"
    return calls


def check(
    op: str, kind: str, shape: tuple[int, int, int], function: Function, inputs: tuple[torch.Tensor, ...]
) -> None:
    """Compares a call that is fused with float64."""
    drawn = operands.make(problem(op, kind, shape), "cuda")
    tensors = [drawn.tensors[name] for name in spec_of(op).inputs]
    calls = fused_calls(op, function, inputs, tensors)
    with sw.tuning("on_miss"):
        poison()
        results = calls.call(*tensors, *inputs)
    acc = operands.of_op(op).reference(drawn)
    expected = as_tuple(function(acc.double(), *[one.double() if one.is_floating_point() else one for one in inputs]))
    by_torch = as_tuple(function(acc, *inputs))
    results = as_tuple(results)
    assert len(results) == len(expected)
    rows = shape[0] if op != "grouped_mm" else int(drawn.tensors["offs"][-1])
    for position, (result, reference, of_torch) in enumerate(zip(results, expected, by_torch)):
        assert result.shape == reference.shape, position
        found, wanted = result[:rows].double(), reference[:rows].double()
        finite = wanted.isfinite()
        assert torch.equal(found.isfinite() | ~finite, torch.ones_like(finite)), f"result {position} has NaN"
        size = wanted[finite].norm().clamp_min(1e-30)
        error = (found - wanted)[finite].norm() / size
        limit = 0.05 if result.dtype.itemsize == 1 else 0.008
        error_of_torch = (of_torch[:rows].double() - wanted)[finite].norm() / size
        if error_of_torch < limit:  # otherwise the expression magnifies any rounding
            assert error < limit, f"result {position}: {error:.2e}, by torch {error_of_torch:.2e}"


@pytest.mark.parametrize(("op", "kind"), KINDS, ids="-".join)
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_an_expression_is_right(op: str, kind: str, name: str) -> None:
    function, make_inputs = EXPRESSIONS[name]
    for shape in SHAPES:
        if kind == "block":
            shape = (*shape[:2], shape[2] // 128 * 128)
        check(op, kind, shape, function, make_inputs(*shape[:2]))


UNARY: tuple[Function, ...] = (
    torch.sigmoid,
    torch.tanh,
    torch.relu,
    torch.abs,
    torch.neg,
    torch.sin,
    functional.silu,
    functional.gelu,
    functional.softplus,
    functional.mish,
    functional.hardswish,
    functional.elu,
    lambda x: functional.gelu(x, approximate="tanh"),
    lambda x: x.clamp(-1.5, 2),
    lambda x: (x * 0.25).exp(),
    lambda x: x.square().add(1).sqrt(),
    lambda x: x.square().add(1).log(),
    lambda x: (x.square() + 0.5).rsqrt(),
    lambda x: torch.where(x > 0.25, x, 0.1 * x),
    lambda x: x / 3,
)
BINARY: tuple[Function, ...] = (
    torch.add,
    torch.sub,
    torch.mul,
    torch.maximum,
    torch.minimum,
    lambda x, y: x / (y.abs() + 1),
    lambda x, y: torch.where(x > y, x, y * 0.5),
    lambda x, y: torch.add(x, y, alpha=0.5),
)


def random_function(seed: int) -> Function:
    """A function of acc, a matrix, a row, a column and a number, of some ten operators."""
    choose = random.Random(seed)
    steps = [(choose.choice(UNARY), choose.choice(BINARY), choose.random(), choose.random()) for _ in range(5)]
    num_results = choose.choice((1, 1, 2))

    def function(acc: torch.Tensor, *inputs: torch.Tensor) -> Any:
        values = [acc * 0.05, *inputs]
        for unary, binary, first, second in steps:
            left, right = values[int(first * len(values))], values[int(second * len(values))]
            values.append(binary(unary(values[-1] if len(values) > 5 else values[0]), right) + left)
        results = [value + values[0] for value in values[-num_results:]]
        return tuple(results) if num_results > 1 else results[0]

    return function


@pytest.mark.parametrize("seed", range(60))
def test_a_random_expression_is_right(seed: int) -> None:
    choose = random.Random(seed)
    op, kind = choose.choice(KINDS)
    m, n, k = choose.choice(SHAPES)
    shape = (m, n, k // 128 * 128)
    dtype = choose.choice((torch.bfloat16, torch.float16, torch.float32))
    inputs = normal(m, n, dtype=dtype), normal(n), normal(m, 1, dtype=dtype), torch.tensor(0.7, device="cuda")
    check(op, kind, shape, random_function(seed), inputs)


def grads_of(function: Function, leaves: list[torch.Tensor], weight: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from torch.autograd.grad((function(*leaves) * weight).sum(), leaves)


def test_gradients_are_those_of_float64() -> None:
    m, n, k = 300, 528, 512
    leaves = [normal(m, k), normal(n, k), normal(n), normal(m, n)]
    weight = normal(m, n)

    def epilogue(acc: torch.Tensor, bias: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return functional.gelu(acc * 0.05 + bias) * r

    def call(a: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return sw.matmul(a, w.t(), epilogue=epilogue, inputs=(bias, r))

    def reference(a: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return epilogue(a @ w.t(), bias, r)

    with sw.tuning("on_miss"):
        found = list(grads_of(call, [leaf.requires_grad_() for leaf in leaves], weight))
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    for one, wanted in zip(found, grads_of(reference, doubles, weight.double())):
        assert (one.double() - wanted).norm() / wanted.norm() < 0.008


def test_a_call_is_right_before_its_epilogue_is_linked_and_fused_after() -> None:
    a, w, r = normal(64, 512), normal(528, 512), normal(64, 528)
    scale = random.random()  # new to this machine

    def epilogue(acc: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return functional.silu(acc * scale) + r

    with sw.tuning("off"):
        before = sw.matmul(a, w.t(), epilogue=epilogue, inputs=(r,))
        assert linked.wait(60)
        after = sw.matmul(a, w.t(), epilogue=epilogue, inputs=(r,))
    assert (before.float() - after.float()).norm() / before.float().norm() < 2e-3


def test_a_cuda_graph_replays_a_fused_call() -> None:
    a, w, r = normal(64, 512), normal(528, 512), normal(64, 528)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return sw.matmul(a, w.t(), epilogue=lambda acc, r: (acc + r, (acc + r).abs().amax(-1)), inputs=(r,))

    sw.prepare(call)
    expected, expected_amax = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result, amax = call()
    result.zero_()
    amax.zero_()
    graph.replay()
    assert torch.equal(result, expected) and torch.equal(amax, expected_amax)


OFFSET = 2**40 + 5


def masks(acc: torch.Tensor, seed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Dropouts of ones: of all elements, of pairs of columns, and of all with numbers as seed and offset."""
    one = acc * 0 + 1
    pairs = one[..., ::2] * one[..., 1::2]
    return sw.dropout(one, 0.3, seed, OFFSET), sw.dropout(pairs, 0.5, 7, seed), sw.dropout(one, 0.1, -5)


def of_ones(m: int, n: int, seed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same on the CPU."""
    return tuple(mask.cuda() for mask in masks(torch.ones(m, n), seed.cpu()))


def traits(kernel: KernelRecord) -> set[tuple[Any, ...]]:
    """What decides how a kernel's threads hold a tile: each with and without swapped operands is a trait."""
    config = kernel.config
    values = (
        ("op", kernel.op, config["a"], config.get("scales")),
        ("rows", config["tile"][0]),
        ("is a cluster", config.get("cluster", [1, 1, 1]) != [1, 1, 1]),
        ("schedule", config["schedule"], config.get("shares"), config.get("pingpong")),
    )
    return {(config["swap_ab"], *value) for value in values}


def open_kernels() -> list[KernelRecord]:
    """Open kernels of calls with default arguments, and of fp16, that together have each trait: linking all takes
    minutes."""
    opened = manifest.packaged().open
    rest = [
        kernel
        for op in PROBLEMS
        for kernel in fitting_kernels.of(op)
        if kernel.id in opened
        and (op != "scaled_mm" or (kernel.dtypes, kernel.config["accumulation"]) == (("e4m3", "e4m3", "bf16"), "fast"))
    ]
    chosen: list[KernelRecord] = []
    missing = set().union(*map(traits, rest))
    while missing:
        chosen.append(max(rest, key=lambda kernel: len(traits(kernel) & missing)))
        missing -= traits(chosen[-1])
    return chosen


@pytest.mark.parametrize("kernel", open_kernels(), ids=fitting_kernels.kernel_id)
def test_dropout_has_the_same_bits_in_every_sort_of_kernel_and_split(kernel: KernelRecord) -> None:
    seed = torch.tensor([random.getrandbits(62)], device="cuda")
    options: dict[str, Any] = {"scales": "row"} if kernel.op == "scaled_mm" else {"dtype": kernel.config["a"]}
    if kernel.op == "matmul":
        options["layout"] = kernel.config["layout"]
    if kernel.config.get("scales") == "block":
        options["scales"] = "block"
    if kernel.op == "grouped_mm":
        options["num_groups"] = 5
    for m, n, k in ((300, 1040, 1024), (37, 528, 1024)):
        drawn = operands.make(spec_of(kernel.op).make_problem(m=m, n=n, k=k, **options), "cuda")
        tensors = [drawn.tensors[name] for name in spec_of(kernel.op).inputs]
        rows = m if kernel.op != "grouped_mm" else int(drawn.tensors["offs"][-1])
        for splits in (1, *[each for _, each in fitting_kernels.with_splits([kernel], m, n, k)]):
            calls = fused_calls(kernel.op, masks, (seed,), tensors, fitting_kernels.config(kernel, splits))
            poison()
            results = calls.call(*tensors, seed)
            for position, (result, wanted) in enumerate(zip(results, of_ones(m, n, seed))):
                wrong = (result[:rows] != wanted[:rows].to(result.dtype)).nonzero()
                assert not len(wrong), f"result {position}, splits {splits}, {len(wrong)} elements, first {wrong[:4]}"


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dropout_outside_of_an_epilogue_has_the_bits_of_the_cpu(
    dtype: torch.dtype, has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_kernel:
        assert dropout_kernel.run(torch.ones(4, 4, device="cuda"), 0.5, 1, 0) is not None
    else:
        monkeypatch.setattr(dropout_kernel, "run", lambda *_: None)
    seed = torch.tensor(random.getrandbits(63) - 2**62)
    wide = torch.randn(1000, 528).to(dtype)
    for x in (wide, wide[:37, :45], wide[:, 1:], wide.t(), wide[:, :1], wide[0], wide.view(10, 100, 528), wide[:0]):
        expected = sw.dropout(x, 0.3, seed, OFFSET)
        on_gpu = wide.cuda().as_strided(x.shape, x.stride(), x.storage_offset())
        poison()
        found = sw.dropout(on_gpu, 0.3, seed.cuda(), OFFSET)
        assert found.dtype == dtype and torch.equal(found.cpu(), expected)
        assert torch.equal(sw.dropout(on_gpu, 0.3, int(seed), torch.tensor([OFFSET], device="cuda")), found)


def test_a_cuda_graph_drops_by_the_seed_of_each_replay() -> None:
    a, w, seed = normal(64, 512), normal(528, 512), torch.tensor([1], device="cuda")

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        fused_one = sw.matmul(a, w.t(), epilogue=lambda acc, s: sw.dropout(acc * 0 + 1, 0.3, s), inputs=(seed,))
        return fused_one, sw.dropout(torch.ones(64, 528, device="cuda", dtype=torch.bfloat16), 0.3, seed)

    call()
    assert linked.wait(60)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    for step in range(3):
        seed.fill_(step - 1)
        graph.replay()
        expected = sw.dropout(torch.ones(64, 528), 0.3, step - 1).bfloat16()
        assert all(torch.equal(result.cpu(), expected) for result in results)


def test_the_gradient_of_a_dropout_has_its_mask() -> None:
    m, n, k = 300, 528, 512
    a, w, seed = normal(m, k).requires_grad_(), normal(n, k), torch.tensor([5], device="cuda")
    with sw.tuning("on_miss"):
        y = sw.matmul(a, w.t(), epilogue=lambda acc, s: sw.dropout(acc, 0.3, s), inputs=(seed,))
    kept = sw.dropout(torch.ones(m, n, device="cuda"), 0.3, seed)
    assert torch.equal(y.detach() == 0, kept == 0)
    grad = normal(m, n)
    y.backward(grad)
    expected = (grad.double() * kept.double()) @ w.double()
    assert (a.grad.double() - expected).norm() / expected.norm() < 0.008


def test_a_compiled_dropout_has_the_same_bits() -> None:
    x, seed = torch.randn(300, 528, device="cuda"), torch.tensor([5], device="cuda")
    compiled = torch.compile(lambda x, seed: sw.dropout(x, 0.3, seed, OFFSET))
    assert torch.equal(compiled(x, seed), sw.dropout(x, 0.3, seed, OFFSET))
