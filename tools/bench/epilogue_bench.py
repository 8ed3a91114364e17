"""What an epilogue in a matmul's kernel saves, next to the same function in a kernel of its own by torch.compile.

    python tools/bench/epilogue_bench.py [--m=16,256,4096] [--functions=silu,swiglu] [--rounds=9] [--json_out=FILE]

with Stoneware and torch on PYTHONPATH, on a GPU of Hopper. Each case is an op, a function and a shape m x n x k. Three
calls are timed, interleaved: the fused one; Stoneware's op, followed by the function compiled by torch.compile, on the
16-bit result; and the op alone, which no fused call can beat. Each is a CUDA graph that walks through as many copies of
the weight and of the inputs as exceed the L2 cache several times. Fused results are first compared with float64.

With --rounds=0 it links only, and later runs read the linked cubins from the disk. Several processes, with other
--functions each, may do that at once.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from absl import app, flags
from torch.nn import functional

import stoneware as sw
from stoneware.epilogue import linked, philox
from stoneware.measuring import machine, operands
from stoneware.specs import spec_of

_M = flags.DEFINE_list("m", ["16", "256", "4096"], "Rows of a.")
_FUNCTIONS = flags.DEFINE_list("functions", [], "Those that are measured; all by default.")
_OPS = flags.DEFINE_list("ops", [], "Those that are measured; all by default.")
_ROUNDS = flags.DEFINE_integer("rounds", 9, "Rounds, each of which times every call; 0 links only.", lower_bound=0)
_JSON_OUT = flags.DEFINE_string("json_out", None, "Where the figures go.")

_NK = ((4096, 4096), (14336, 4096), (4096, 14336))
"""n and k: those of Llama 3 8B's layers."""

_OPERANDS_BYTES = 300 << 20
"""Of all copies of a case: several times the L2 of a Hopper GPU."""

_OPS_AND_KEYS: dict[str, tuple[str, dict[str, str]]] = {
    "bf16": ("matmul", {"dtype": "bf16"}),
    "fp8 rows": ("scaled_mm", {"scales": "row"}),
    "fp8 blocks": ("scaled_mm", {"scales": "block"}),
}

Function = Callable[..., Any]
Tensors = tuple[torch.Tensor, ...]


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _swiglu(acc: torch.Tensor) -> torch.Tensor:
    return functional.silu(acc[..., 0::2]) * acc[..., 1::2]


FUNCTIONS: dict[str, tuple[Function, Callable[[int, int], Tensors]]] = {
    "silu": (functional.silu, lambda m, n: ()),
    "relu squared": (lambda acc: functional.relu(acc).square(), lambda m, n: ()),
    "bias, gelu": (lambda acc, bias: functional.gelu(acc + bias), lambda m, n: (_normal(n),)),
    "bias, gelu by tanh": (
        lambda acc, bias: functional.gelu(acc + bias, approximate="tanh"),
        lambda m, n: (_normal(n),),
    ),
    "residual": (lambda acc, r: acc + r, lambda m, n: (_normal(m, n),)),
    "silu, times a tensor": (lambda acc, r: functional.silu(acc) * r, lambda m, n: (_normal(m, n),)),
    "bias, gelu, residual": (
        lambda acc, bias, r: functional.gelu(acc + bias) + r,
        lambda m, n: (_normal(n), _normal(m, n)),
    ),
    "swiglu": (_swiglu, lambda m, n: ()),
    "swiglu in fp8": (
        lambda acc, s: (_swiglu(acc) * s).clamp(-448, 448).to(torch.float8_e4m3fn),
        lambda m, n: (torch.tensor(0.01, device="cuda"),),
    ),
    "silu, and its argument": (lambda acc, bias: (functional.silu(acc + bias), acc + bias), lambda m, n: (_normal(n),)),
    "row maximum": (lambda acc: (acc, acc.abs().amax(-1)), lambda m, n: ()),
    "dropout": (lambda acc: sw.dropout(acc, 0.1, seed=1), lambda m, n: ()),
}
"""Name -> the epilogue, and its inputs for m and n."""

_BY_TORCH: dict[str, Function] = {"dropout": lambda acc: philox.dropout(acc, 0.1, 1, 0)}
"""What torch.compile gets instead of an epilogue, so that the kernel after the op is Inductor's."""


def _as_tuple(results: Any) -> Tensors:
    return results if isinstance(results, tuple) else (results,)


def _error(results: Any, expected: Any) -> float:
    """The largest relative error of several results."""
    pairs = zip(_as_tuple(results), _as_tuple(expected), strict=True)
    return max(float((one.double() - two.double()).norm() / two.double().norm()) for one, two in pairs)


def _graph(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    return graph


def _times_us(graphs: dict[str, torch.cuda.CUDAGraph], num_calls: int) -> dict[str, list[float]]:
    """The µs per call of each graph, a figure a round."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(_ROUNDS.value + 2):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1000 / num_calls)
    return {name: values[2:] for name, values in times.items()}


def _measure(op_name: str, name: str, shape: tuple[int, int, int], compiled: Function) -> dict[str, Any] | None:
    """The figures of a case; None with --rounds=0."""
    m, n, k = shape
    op, key = _OPS_AND_KEYS[op_name]
    run: Function = getattr(sw, op)
    function, make_inputs = FUNCTIONS[name]
    drawn = operands.make(spec_of(op).make_problem(m=m, n=n, k=k, **key), "cuda")
    arguments = [drawn.tensors[one] for one in spec_of(op).inputs]
    arguments = arguments[: 2 if op == "matmul" else 4]
    inputs = make_inputs(m, n)
    sw.prepare(run, *arguments, epilogue=function, inputs=inputs)
    if not _ROUNDS.value:
        return None
    acc = operands.of_op(op).reference(drawn)
    results = run(*arguments, epilogue=function, inputs=inputs)
    expected = function(acc.double(), *[one.double() for one in inputs])
    error = _error(results, expected)
    assert error < (0.05 if "fp8" in name else 0.008), f"{op_name}, {name}, {shape}: wrong by {error:.1e}"

    b_bytes = arguments[1].nbytes
    num_copies = max(2, min(64, -(-_OPERANDS_BYTES // b_bytes)))
    strides = arguments[1].t()
    copies = [arguments[1]] + [strides.clone().t() for _ in range(num_copies - 1)]
    inputs_of = [inputs] + [tuple(one.clone() for one in inputs) for _ in range(num_copies - 1)]
    both = list(zip(copies, inputs_of, strict=True))

    def arguments_with(b: torch.Tensor) -> list[Any]:
        return [arguments[0], b, *arguments[2:]]

    kept: list[Any] = []  # so that each call of a graph writes memory of its own
    fused = [
        lambda b=b, ins=ins: kept.append(run(*arguments_with(b), epilogue=function, inputs=ins)) for b, ins in both
    ]
    after = [lambda b=b, ins=ins: kept.append(compiled(run(*arguments_with(b)), *ins)) for b, ins in both]
    alone = [lambda b=b: kept.append(run(*arguments_with(b))) for b, _ in both]
    graphs = {"fused": _graph(fused), "unfused": _graph(after), "op alone": _graph(alone)}
    times = _times_us(graphs, num_copies)
    medians = {one: statistics.median(values) for one, values in times.items()}
    return {
        "op": op_name,
        "function": name,
        "m": m,
        "n": n,
        "k": k,
        "us": {one: round(value, 2) for one, value in medians.items()},
        "spread": {one: round((max(v) - min(v)) / medians[one], 3) for one, v in times.items()},
        "ratio": round(medians["unfused"] / medians["fused"], 3),
        "bound": round(medians["unfused"] / medians["op alone"], 3),
        "error": float(f"{error:.1e}"),
    }


def _summary(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The geometric mean and the least of the ratios of each op and function, and the mean of their bounds."""
    result = []
    for op in dict.fromkeys(case["op"] for case in cases):
        for name in dict.fromkeys(case["function"] for case in cases):
            some = [case for case in cases if (case["op"], case["function"]) == (op, name)]
            if not some:
                continue
            mean, bound = (
                math.exp(sum(math.log(case[one]) for case in some) / len(some)) for one in ("ratio", "bound")
            )
            least = min(case["ratio"] for case in some)
            result.append(
                {"op": op, "function": name, "mean": round(mean, 3), "least": least, "bound": round(bound, 3)}
            )
    return result


def _shown(argument: str) -> str:
    """An argument of the command as the document shows it."""
    return "--json_out=FILE" if argument.startswith("--json_out=") else argument


def main(argv: Sequence[str]) -> None:
    del argv
    run = machine.new_run(0, " ".join(["python tools/bench/epilogue_bench.py", *map(_shown, sys.argv[1:])]))
    names, ops = _FUNCTIONS.value or list(FUNCTIONS), _OPS.value or list(_OPS_AND_KEYS)
    cases = []
    for name in names:
        compiled = torch.compile(_BY_TORCH.get(name, FUNCTIONS[name][0]), dynamic=True)
        for op in ops:
            for m in map(int, _M.value):
                for n, k in _NK:
                    case = _measure(op, name, (m, n, k), compiled)
                    if case is None:
                        continue
                    cases.append(case)
                    times = ", ".join(f"{one} {value:.1f} us" for one, value in case["us"].items())
                    print(
                        f"{op}, {name}, {m}x{n}x{k}: {times}; ratio {case['ratio']}, bound {case['bound']}", flush=True
                    )
    linked.wait()
    summary = _summary(cases)
    for row in summary:
        print(
            f"{row['op']:10} {row['function']:24} {row['mean']:.3f}, least {row['least']:.3f}, bound {row['bound']:.3f}"
        )
    if _JSON_OUT.value:
        document = {"run": dataclasses.asdict(machine.end_run(run, 0)), "summary": summary, "cases": cases}
        Path(_JSON_OUT.value).write_text(json.dumps(document, indent=1, default=str) + "\n")


if __name__ == "__main__":
    app.run(main)
