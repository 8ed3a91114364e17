"""Times every family of matmuls next to torch's, in one run: bench_cases.py says which.

    python -m tools.gpu_check.bench --out DIR [--families scaled_mm,matmul] [--workloads all]

Every element of each call's result is first compared with float64, over an output of NaN. A shape at which ours is
wrong gets no figure; a peer that is wrong or refuses is omitted from that row. Then the calls are timed against each
other on the GPU, interleaved, with a cold L2 (device_timer.py). Host time is measured call by call at one small shape
of each family, without waiting for the GPU; first calls are timed in fresh processes. experiment.py has the rest.
"""

from __future__ import annotations

import compileall
import contextlib
import functools
import importlib.metadata
import io
import math
import os
import pathlib
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from absl import flags

import stoneware
from stoneware.measuring.device_timer import DeviceTimer, TimingFailed
from stoneware.measuring.stopwatch import CudaStopwatch
from stoneware.ops import operation_of
from stoneware.runtime.device import Device, cuda_device
from stoneware.specs import spec_of, tolerance
from tools.gpu_check import bench_cases, bench_summary, processes
from tools.gpu_check.bench_cases import FAMILIES, OURS, Case, Family, Run, Workload
from tools.gpu_check.checks import Check
from tools.gpu_check.document import text_of
from tools.gpu_check.experiment import Call, Experiment, Prepared, Row, figures, interleaved
from tools.gpu_check.processes import ProcessFailed

FIRST_CALL_LIMIT_MS = 100.0

_HOST_BLOCKS, _HOST_CALLS = 12, 25
"""Calls in a block stay far below the 1024 launches that a stream queues before the host waits."""


def over_nan(case: Case, call: bench_cases.Call, run: Run) -> torch.Tensor:
    """The result of a call, into an output of NaN if it takes one."""
    # A call that allocates is likely to be given the memory that was freed last.
    poisoned = case.out if call.takes_out else torch.empty_like(case.out)
    poisoned.fill_(math.nan)
    out = poisoned if call.takes_out else None
    del poisoned
    result = run(out)
    if result.is_cuda:
        torch.cuda.synchronize()
    return result


def right_calls(case: Case, dtype: str) -> tuple[dict[str, Run], dict[str, Check]]:
    """The calls whose values are right, and the check of each; a call that is not there or refuses is wrong."""
    right: dict[str, Run] = {}
    checks: dict[str, Check] = {}
    limit = tolerance.on_gpu(dtype, "bf16", case.a.shape[1])
    expected, of_scales = None, None
    for name, call in case.calls.items():
        check = checks[name] = Check()
        with check.refusals():
            run = call.load()
            if expected is None or of_scales is not call.scales:
                expected, of_scales = case.expected(call), call.scales
            check.product(name, over_nan(case, call, run), expected, limit, tolerance.MAX_ELEMENT_ERROR)
        if not check.wrong:
            right[name] = run
    return right, checks


def decide(family: Family, workload: Workload, device: Device) -> dict[str, str]:
    """Which config the call gets, and why, as in `stoneware.explain`."""
    spec = spec_of(family.op)
    sizes = {"m": workload.m, "n": workload.n, "k": workload.k}
    if workload.groups:
        sizes["num_groups"] = workload.groups
    decision = operation_of(spec.name).decide(spec.make_problem(**sizes, **family.problem), device)
    return {"config": str(decision.config), "decided_by": decision.step, "grade": decision.grade}


def prepare(row: Row, device: Device) -> Prepared:
    """The decision and the errors of a row's workload, and the calls to time: none unless ours is right."""
    family, workload = FAMILIES[row["family"]], Workload(**{name: row[name] for name in _SIZES})
    case = family.make(workload, _torch_device(device))
    right, checks = right_calls(case, family.dtype)
    more = {
        "weight_bytes": case.weight_bytes,
        "num_bytes": case.num_bytes,
        **decide(family, workload, device),
        "errors": {name: checks[name].errors[name] for name in right},
        "no_figure": {name: "; ".join(check.wrong) for name, check in checks.items() if check.wrong},
    }
    calls = {name: _bound(run, case.out if case.calls[name].takes_out else None) for name, run in right.items()}
    return more, calls if OURS in right else {}


_SIZES = ("layer", "m", "n", "k", "groups")


def time_calls(calls: Mapping[str, Call], seconds: float, row: Row, timer: DeviceTimer, rounds: int) -> Row:
    """Figures of the calls; a peer that fails only now goes to the row's `no_figure`.

    Raises:
      TimingFailed: ours failed.
    """
    calls = dict(calls)
    while True:
        try:
            timings = timer.time(calls, rounds=rounds, max_seconds=seconds)
            return {name: timing.figures for name, timing in timings.items()}
        except TimingFailed as error:
            if error.name not in calls or error.name == OURS:
                raise
            del calls[error.name]
            row["no_figure"][error.name] = text_of(error)


def why_no_figure(row: Row) -> list[str]:
    return [] if "device_us" in row else [f"no figure: {row['no_figure'].get(OURS)}"]


def _bound(run: Run, out: torch.Tensor | None) -> Callable[[], torch.Tensor]:
    return lambda: run(out)


def host_times(case: Case, right: Mapping[str, Run]) -> dict[str, dict[str, Any]]:
    """Host time per call in microseconds, into out and allocating, all calls interleaved."""
    calls = {("allocating", name): _bound(run, None) for name, run in right.items()}
    calls |= {("out", name): _bound(run, case.out) for name, run in right.items() if case.calls[name].takes_out}

    def block_us(call: Call) -> list[float]:
        samples_us = []
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        for _ in range(_HOST_CALLS):
            begin = time.perf_counter_ns()
            call()
            samples_us.append((time.perf_counter_ns() - begin) / 1e3)
        torch.cuda.synchronize()
        return samples_us

    times: dict[str, dict[str, Any]] = {"out": {}, "allocating": {}}
    blocks = {name: functools.partial(block_us, call) for name, call in calls.items()}
    for (how, name), samples_us in interleaved(blocks, _HOST_BLOCKS).items():
        times[how][name] = figures(samples_us, "us")
    return times


def first_calls(families: Sequence[str], num_processes: int) -> list[dict[str, Any]]:
    """What first_call.py measures, one entry a process."""
    # pip compiles what it installs; the wheel that gpu_check.pyz unpacks is not compiled yet.
    with contextlib.redirect_stdout(io.StringIO()):
        compileall.compile_dir(pathlib.Path(stoneware.__file__).parent, quiet=2)
    arguments = [f"--of={','.join(families)}", f"--repeat={num_processes}"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return processes.json_lines(
            processes.run_module("tools.gpu_check.first_call", *arguments, environment=environment)
        )
    except (ProcessFailed, OSError, ValueError) as error:
        return [{"family": family, "call": OURS, "error": str(error)} for family in families]


def installed() -> dict[str, int]:
    """Files of the installed wheel, and their size in bytes, without those that Python compiles."""
    files = importlib.metadata.files("stoneware") or []
    sizes = [
        path.stat().st_size
        for file in files
        if file.suffix != ".pyc" and (path := pathlib.Path(str(file.locate()))).is_file()
    ]
    return {"num_files": len(sizes), "num_bytes": sum(sizes)}


def problems_of(report: Mapping[str, Any]) -> list[str]:
    """What makes the run fail in addition to rows: no host times, slow first calls, or ones that write files."""
    problems = [f"{name}: no host time: {why}" for name, why in report["host_failures"].items()]
    for item in bench_summary.first_calls(report["first_calls"]):
        name = f"the first call of {item['family']}"
        if item["call"] != OURS:
            continue
        problems += [f"{name} failed: {error}" for error in item["errors"]]
        taken_ms = item.get("import_and_first_call_ms")
        if taken_ms is not None and taken_ms >= FIRST_CALL_LIMIT_MS:
            problems.append(
                f"{name} took {taken_ms:.1f} ms with its import and must take under {FIRST_CALL_LIMIT_MS:g} ms"
            )
    outside = {
        (run["family"], event)
        for run in report["first_calls"]
        if run["call"] == OURS
        for event in run.get("outside", ())
    }
    return problems + [f"the first call of {name} reached outside: {event}" for name, event in sorted(outside)]


def _torch_device(device: Device) -> torch.device:
    return torch.device("cpu") if device.kind == "cpu" else torch.device("cuda", device.ordinal)


class Bench(Experiment):
    name = "bench"
    schema = 3

    @property
    def ordinal(self) -> int:
        return self.values.device

    @property
    def seconds(self) -> float:
        return self.values.seconds

    def settings(self) -> Row:
        return {"rounds": self.values.rounds, "l2": self.values.l2, "workloads": self.values.workloads}

    def measure(self) -> None:
        report, families = self.report, self.values.families
        report["l2"] = self.values.l2
        report.setdefault("families", {}).update({name: FAMILIES[name].title for name in families})
        report["installed"] = installed()
        # Before the long part, on an idle GPU: first calls are about the host and the driver.
        runs = report.setdefault("first_calls", [])
        unknown = [name for name in families if all(run["family"] != name or "error" in run for run in runs)]
        runs[:] = [run for run in runs if run["family"] not in unknown]
        runs += first_calls(unknown, self.values.processes) if unknown else []
        self.save()
        torch.cuda.set_device(self.ordinal)
        device = cuda_device(self.ordinal)
        self._measure_host([FAMILIES[name] for name in families], _torch_device(device))
        timer = DeviceTimer(self.ordinal, CudaStopwatch(self.ordinal, self.values.l2))
        self.rows().measure(
            [
                {"family": name, **{size: getattr(workload, size) for size in _SIZES}}
                for name in families
                for workload in FAMILIES[name].workloads(self.values.workloads)
            ],
            functools.partial(prepare, device=device),
            functools.partial(time_calls, timer=timer, rounds=self.values.rounds),
            judge=why_no_figure,
            most_s=self.values.seconds_per_shape,
            figures_as="device_us",
        )
        report["summary"] = {
            "speedups": bench_summary.speedups(report["rows"]),
            "floors": bench_summary.floors(report["rows"]),
            "import_and_first_call": bench_summary.import_and_first_call(report["first_calls"]),
        }

    def _measure_host(self, families: Sequence[Family], device: torch.device) -> None:
        times, failures = self.report.setdefault("host_us", {}), {}
        for family in families:
            if family.name in times:
                continue
            try:
                case = family.make(family.first, device)
                times[family.name] = host_times(case, right_calls(case, family.dtype)[0])
            except Exception as error:
                traceback.print_exc()
                failures[family.name] = text_of(error)
        self.report["host_failures"] = failures
        self.save()

    def problems(self) -> list[str]:
        return super().problems() + problems_of(self.report)

    def page(self) -> str:
        return bench_summary.to_markdown(self.report)

    @classmethod
    def define_flags(cls) -> None:
        super().define_flags()
        flags.DEFINE_integer("device", 0, "Number of the GPU.")
        flags.DEFINE_list("families", list(FAMILIES), "Which of " + ", ".join(FAMILIES) + ".")
        flags.register_validator(
            "families", set(FAMILIES).issuperset, f"--families must be of {', '.join(FAMILIES)}; name some of these"
        )
        flags.DEFINE_enum("workloads", "bench", ["bench", "all"], "Which dense weights.")
        flags.DEFINE_integer("rounds", 50, "Timings of each call.", lower_bound=1)
        flags.DEFINE_float("seconds", 220.0, "For the whole run; timing takes the rest.")
        flags.DEFINE_float("seconds_per_shape", 1.5, "For timing one at most.")
        flags.DEFINE_enum("l2", "clean", ["clean", "dirty"], "What a call finds: see stopwatch.py.")
        flags.DEFINE_integer("processes", 9, "Fresh processes for each first call.")


if __name__ == "__main__":
    Bench.start()
