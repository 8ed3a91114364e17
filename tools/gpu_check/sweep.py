"""Times a matmul at every m of a range, next to torch's: python -m tools.gpu_check.sweep --out DIR

    fp8_row    row scales, next to torch's kernels for row scales and for tensor scales
    fp8_block  block scales
    bf16       next to torch.mm

Four weights each, two of which the wheel's table lacks. All m of a weight, and torch's calls, are timed interleaved.
Values are first compared with float64, over an output of NaN.

Time should grow with m. A *dip* is how much longer an m takes than the fastest larger m, which a caller could pad to.
walk_experiment.py has the rest.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from absl import flags

import stoneware as sw
from stoneware.measuring import operands
from stoneware.measuring.device_timer import Timing
from stoneware.measuring.operands import Operands
from stoneware.runtime.device import Device
from stoneware.specs import spec_of, tolerance
from tools.gpu_check import document
from tools.gpu_check.checks import Check
from tools.gpu_check.experiment import Call, Prepared, Row
from tools.gpu_check.walk_experiment import MEANS, Walk, WalkExperiment, cells, copies_of, means

OURS, ROW, TENSOR, MM = "stoneware", "torch, row scales", "torch, tensor scales", "torch.mm"

SETS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "fp8_row": ("scaled_mm", {"dtype": "e4m3", "scales": "row"}),
    "fp8_block": ("scaled_mm", {"dtype": "e4m3", "scales": "block"}),
    "bf16": ("matmul", {"dtype": "bf16"}),
}
"""Name -> op, and arguments of its `make_problem`."""

WEIGHTS = (6144, 4096), (4096, 14336), (7680, 5120), (3584, 14336)
"""(n, k): two of Llama 3 8B, and two that the wheel's table lacks."""

BANDS = (96, 128), (129, 256), (257, 512), (513, 1024), (1025, 8192)
"""m of a summary's rows."""

MOST_DIP = 0.03

Calls = Mapping[str, Callable[[int, torch.Tensor], object]]
"""Name -> call(m, weight [n, k]): the product of the first m rows, into the first m rows of out."""


def calls_of(tensors: Operands) -> Calls:
    """Ours first; all write to `tensors.out`."""
    a, out = tensors.a, tensors.out
    if tensors.problem.key.op == "matmul":
        return {
            OURS: lambda m, weight: sw.matmul(a[:m], weight.t(), out=out[:m]),
            MM: lambda m, weight: torch.mm(a[:m], weight.t(), out=out[:m]),
        }
    scale_a, scale_b = tensors.scale_a, tensors.scale_b
    if tensors.problem.has_block_scales:
        # Column by column for each m, like `sw.quantize` writes them.
        scales = functools.lru_cache(maxsize=None)(lambda m: scale_a[:m].t().contiguous().t())
        return {OURS: lambda m, weight: sw.scaled_mm(a[:m], weight.t(), scales(m), scale_b, out=out[:m])}

    def vendor(m: int, weight: torch.Tensor, of_a: torch.Tensor, of_b: torch.Tensor) -> object:
        return torch._scaled_mm(a[:m], weight.t(), of_a, of_b, out_dtype=out.dtype, use_fast_accum=True, out=out[:m])

    one = torch.ones((), device=a.device)  # tensor scales
    return {
        OURS: lambda m, weight: sw.scaled_mm(a[:m], weight.t(), scale_a[:m], scale_b, out=out[:m]),
        ROW: lambda m, weight: vendor(m, weight, scale_a[:m], scale_b),
        TENSOR: lambda m, weight: vendor(m, weight, one, one),
    }


def expected_of(tensors: Operands, name: str) -> torch.Tensor:
    """[m, n] float32: what a call computes, in float64 arithmetic."""
    if name != TENSOR:
        return operands.reference(tensors)
    result = torch.empty(tensors.out.shape, dtype=torch.float32, device=tensors.out.device)
    operands.multiply(result, tensors.a, tensors.b)
    return result


def prepare(case: Row, device: Device, ms: Sequence[int], walk: Walk) -> Prepared:
    """The checks of a weight's calls at every m, and these calls.

    Args:
      ms: ascending.
    """
    op, options = SETS[case["set"]]
    problem = spec_of(op).make_problem(m=ms[-1], n=case["n"], k=case["k"], **options)
    tensors = operands.make(problem, "cpu" if device.kind == "cpu" else f"cuda:{device.ordinal}")
    weight, limit = tensors.b.mT, tolerance.on_gpu(problem.a_dtype, problem.out_dtype, problem.k)
    copies = copies_of(weight)
    calls: dict[str, Call] = {}
    checks: dict[str, Row] = {}
    for name, call in calls_of(tensors).items():
        expected, check = expected_of(tensors, name), Check()
        with check.refusals():
            for m in ms:
                tensors.out.fill_(math.nan)
                call(m, weight)
                check.product(f"m={m}", tensors.out[:m], expected[:m], limit, tolerance.MAX_ELEMENT_ERROR)
        largest = max(filter(None, check.errors.values()), default=None)
        checks[name] = {"is_right": not check.wrong, "detail": "; ".join(check.wrong), "largest_error": largest}
        if not check.wrong:
            calls |= {_label(name, m): walk(functools.partial(call, m), copies) for m in ms}
    row = {"m": list(ms), "copies": len(copies), "checks": checks}
    return row, calls if not checks[OURS]["detail"] else {}


def _label(name: str, m: int) -> str:
    return f"{name}, m={m}"


def dips(ms: Sequence[int], times_us: Sequence[float]) -> list[tuple[float, int, int]]:
    """(dip, m, the faster larger m) of each m but the last; negative where every larger m takes longer."""
    result = []
    for idx, time_us in enumerate(times_us[:-1]):
        fastest = min(range(idx + 1, len(ms)), key=times_us.__getitem__)
        result.append((time_us / times_us[fastest] - 1, ms[idx], ms[fastest]))
    return result


def summary_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The dips of each weight, and by set and band of m the fastest of torch's times over ours."""
    timed = [row for row in rows if OURS in row.get("device_us", {})]
    smoothness = []
    for row in timed:
        found = dips(row["m"], row["device_us"][OURS]["median_us"])
        dip, m, faster = max(found, default=(0.0, 0, 0))
        smoothness.append({
            **{name: row[name] for name in ("set", "n", "k")},
            "largest_dip": round(dip, 4), "at": m, "faster": faster,
            "above_limit": sum(one[0] > MOST_DIP for one in found), "num_m": len(row["m"]),
        })  # fmt: skip
    ratios: dict[tuple[str, str], dict[str, float]] = {}
    for row in timed:
        peers = [figures["median_us"] for name, figures in row["device_us"].items() if name != OURS]
        for idx, m in enumerate(row["m"] if peers else ()):
            band = next((f"{first} to {last}" for first, last in BANDS if first <= m <= last), "other")
            ours = row["device_us"][OURS]["median_us"][idx]
            at = f"{m}x{row['n']}x{row['k']}"
            ratios.setdefault((row["set"], band), {})[at] = min(peer[idx] for peer in peers) / ours
    speedups = [{"set": name, "band": band, **means(group)} for (name, band), group in ratios.items()]
    return {"smoothness": smoothness, "speedups": speedups}


class Sweep(WalkExperiment):
    name = "sweep"

    def settings(self) -> Row:
        return {name: getattr(self.values, name) for name in ("rounds", "first", "last", "step")}

    def measure(self) -> None:
        self.measure_walks(
            [{"set": name, "n": n, "k": k} for name, (n, k) in itertools.product(self.values.sets, WEIGHTS)]
        )
        self.report["summary"] = summary_of(self.report["rows"])

    def prepare(self, case: Row, device: Device, walk: Walk) -> Prepared:
        values = self.values
        return prepare(case, device, range(values.first, values.last + 1, values.step), walk)

    def figures(self, row: Row, timings: Mapping[str, Timing]) -> Row:
        """Each call's median and spread in microseconds at every m."""
        result = {}
        for name in row["checks"]:
            of_call = [timings[_label(name, m)] for m in row["m"] if _label(name, m) in timings]
            if of_call:
                result[name] = {
                    "count": of_call[0].count,
                    "median_us": [round(timing.median_us, 3) for timing in of_call],
                    "spread_us": [round(timing.spread_us, 3) for timing in of_call],
                }
        return result

    def page(self) -> str:
        summary = self.report["summary"]
        lines = document.heading("Matmuls at every m", self.report)
        lines += [f"A dip above {MOST_DIP:.0%} is where padding m would be faster.", ""]
        rows = [
            (row["set"], f"{row['n']}x{row['k']}", f"{100 * row['largest_dip']:.1f} %", row["at"], row["faster"],
             f"{row['above_limit']} of {row['num_m']}")
            for row in summary["smoothness"]
        ]  # fmt: skip
        lines += document.table(("set", "n x k", "largest dip", "at m", "than m", f"above {MOST_DIP:.0%}"), rows)
        lines += ["", "The fastest of torch's times over ours:", ""]
        rows = [(item["set"], item["band"], *cells(item)) for item in summary["speedups"]]
        lines += document.table(("set", "m", *MEANS), rows)
        return "\n".join([*lines, ""])

    @classmethod
    def define_flags(cls) -> None:
        super().define_flags()
        flags.DEFINE_list("sets", list(SETS), f"Which of {', '.join(SETS)}.")
        flags.register_validator(
            "sets", set(SETS).issuperset, f"--sets must be of {', '.join(SETS)}; name some of these"
        )
        flags.DEFINE_integer("first", 96, "The least m.", lower_bound=1)
        flags.DEFINE_integer("last", 1024, "No m is larger.", lower_bound=1)
        flags.DEFINE_integer("step", 8, "From one m to the next.", lower_bound=1)
        flags.register_multi_flags_validator(
            ["first", "last"],
            lambda values: values["first"] < values["last"],
            "--first must be less than --last; a sweep has several m",
        )


if __name__ == "__main__":
    Sweep.start()
