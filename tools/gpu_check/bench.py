"""Times every family of matmuls beside torch's, in one run: bench_cases.py says which.

    python -m tools.gpu_check.bench --out DIR [--families scaled_mm,matmul] [--workloads all]

Every element of each call's result is first compared with float64, over an output of NaN. A shape at
which ours is wrong gets no figure, and the exit code is 1; a peer that is wrong or refuses is omitted
from that row. Then the calls are timed against each other on the GPU, interleaved, with a cold L2
(device_timer.py). Host time is measured call by call at one small shape of each family, without
waiting for the GPU; first calls are timed in fresh processes. A family that this installation lacks
is listed as missing, with the error, and the exit code is 1.

The rest of --seconds is divided among the shapes, so that the run ends in time; checks are never cut
short. Writes bench.json, with all that is needed to judge it, and bench.md, for people.
"""

from __future__ import annotations

import compileall
import contextlib
import datetime
import importlib.metadata
import io
import json
import math
import os
import pathlib
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from absl import app, flags, logging

import stoneware
from stoneware.kernels import registry
from stoneware.measuring import operands, tolerance
from stoneware.measuring.device_timer import DeviceTimer, Timing, TimingFailed
from stoneware.measuring.stopwatch import CudaStopwatch
from stoneware.runtime.device import Device, cuda_device
from tools.gpu_check import bench_summary, document, machine
from tools.gpu_check.bench_cases import FAMILIES, OURS, Case, Family, Run, Workload
from tools.gpu_check.document import text_of

FIRST_CALL_LIMIT_MS = 100.0

_LEAST_SECONDS = 0.05
"""For timing one shape, however little time is left."""

_HOST_BLOCKS, _HOST_CALLS = 12, 25
"""Calls in a block stay far below the 1024 launches that a stream queues before the host waits."""

_DEVICE_ORDINAL = flags.DEFINE_integer("device", 0, "Number of the GPU.")
_FAMILIES = flags.DEFINE_list("families", list(FAMILIES), "Which of " + ", ".join(FAMILIES) + ".")
_WORKLOADS = flags.DEFINE_enum("workloads", "bench", ["bench", "all"], "Which dense weights.")
_ROUNDS = flags.DEFINE_integer("rounds", 50, "Timings of each call.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 220.0, "For the whole run; timing takes what is left.")
_SECONDS_PER_SHAPE = flags.DEFINE_float("seconds_per_shape", 1.5, "For timing one at most.")
_L2 = flags.DEFINE_enum("l2", "clean", ["clean", "dirty"], "What a call finds: see stopwatch.py.")
_PROCESSES = flags.DEFINE_integer("processes", 9, "Fresh processes for each first call.")


class Schedule:
    """Spreads the time that is left over the shapes that are left.

    Args:
      deadline: in the seconds of `now`.
      num_shapes: how many will be measured.
      most: seconds for timing one shape at most.
      now: seconds.
    """

    def __init__(
        self, deadline: float, num_shapes: int, most: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._deadline, self._num_left, self._most, self._now = deadline, num_shapes, most, now
        self._untimed, self._num_done = 0.0, 0

    @property
    def seconds_left(self) -> float:
        return self._deadline - self._now()

    def seconds_for_timing(self) -> float:
        """For the next shape: its share of the rest, less the mean time of drawing and checking."""
        share = self.seconds_left / max(self._num_left, 1)
        untimed = self._untimed / max(self._num_done, 1)
        return min(max(share - untimed, _LEAST_SECONDS), self._most)

    def done(self, untimed: float) -> None:
        """One shape is measured; `untimed` seconds of it were not timing."""
        self._num_left -= 1
        self._num_done += 1
        self._untimed += untimed


def check(name: str, case: Case, run: Run, expected: torch.Tensor, dtype: str) -> dict[str, Any]:
    """Runs a call over NaN and compares it: {"is_right", "error", "detail"}."""
    call = case.calls[name]
    # A call that allocates is likely to be given the memory that was freed last.
    poisoned = case.out if call.takes_out else torch.empty_like(case.out)
    poisoned.fill_(math.nan)
    out = poisoned if call.takes_out else None
    del poisoned
    try:
        result = run(out)
        if result.is_cuda:
            torch.cuda.synchronize()
    except Exception as error:
        return {"is_right": False, "error": None, "detail": text_of(error)}
    if result.shape != expected.shape or result.dtype != torch.bfloat16:
        detail = f"gave {result.dtype} {list(result.shape)}, not bfloat16 {list(expected.shape)}"
        return {"is_right": False, "error": None, "detail": detail}
    limit = tolerance.on_gpu(dtype, "bf16", case.a.shape[1])
    comparison = operands.compare_within(result, expected, limit)
    is_finite = math.isfinite(comparison.error)
    return {
        "is_right": comparison.is_right,
        "error": float(f"{comparison.error:.3g}") if is_finite else None,
        "detail": str(comparison),
    }


def right_calls(case: Case, dtype: str) -> tuple[dict[str, Run], dict[str, dict[str, Any]]]:
    """The calls whose values are right, and the result of `check` for each."""
    right: dict[str, Run] = {}
    checks: dict[str, dict[str, Any]] = {}
    expected, of_scales = None, None
    for name, call in case.calls.items():
        try:
            run = call.load()
        except Exception as error:  # the op or torch's function is not there
            checks[name] = {"is_right": False, "error": None, "detail": text_of(error)}
            continue
        if expected is None or of_scales is not call.scales:
            expected, of_scales = case.expected(call), call.scales
        checks[name] = check(name, case, run, expected, dtype)
        if checks[name]["is_right"]:
            right[name] = run
    return right, checks


def decide(family: Family, workload: Workload, device: Device) -> dict[str, str]:
    """Which config the call gets, and why, as in `stoneware.explain`."""
    spec = registry.spec(family.op)
    sizes = {"m": workload.m, "n": workload.n, "k": workload.k}
    if workload.groups:
        sizes["num_groups"] = workload.groups
    decision = spec.operation.decide(spec.make_problem(**sizes, **family.problem), device)
    return {"config": str(decision.config), "decided_by": decision.layer, "grade": decision.grade}


def measure(
    family: Family, workload: Workload, device: Device, timer: DeviceTimer, schedule: Schedule, rounds: int
) -> dict[str, Any]:
    """One row of the result: the decision, whether the values are right, and the times."""
    begin = time.monotonic()
    case = family.make(workload, _torch_device(device))
    row: dict[str, Any] = {
        **_labels(family, workload),
        "weight_bytes": case.weight_bytes,
        "num_bytes": case.num_bytes,
        **decide(family, workload, device),
    }
    right, checks = right_calls(case, family.dtype)
    row["errors"] = {name: found["error"] for name, found in checks.items() if name in right}
    row["no_figure"] = {name: found["detail"] for name, found in checks.items() if name not in right}
    untimed = time.monotonic() - begin
    if OURS in right:  # no figure without a right value
        limits = {"rounds": rounds, "max_seconds": schedule.seconds_for_timing()}
        timings = _timings(case, right, timer, row["no_figure"], **limits)
        row["device_us"] = {name: timing.figures for name, timing in timings.items()}
    schedule.done(untimed)
    return row


def _timings(
    case: Case, right: Mapping[str, Run], timer: DeviceTimer, no_figure: dict[str, str], **limits: Any
) -> dict[str, Timing]:
    """Timings of the calls; a peer that fails only now goes to `no_figure`.

    Raises:
      TimingFailed: ours failed.
    """
    calls = {name: _bound(run, case.out if case.calls[name].takes_out else None) for name, run in right.items()}
    while True:
        try:
            return timer.time(calls, **limits)
        except TimingFailed as error:
            if error.name not in calls or error.name == OURS:
                raise
            del calls[error.name]
            no_figure[error.name] = text_of(error)


def _bound(run: Run, out: torch.Tensor | None) -> Callable[[], torch.Tensor]:
    return lambda: run(out)


def host_times(case: Case, right: Mapping[str, Run]) -> dict[str, dict[str, Any]]:
    """Host time per call in microseconds, into out and allocating, all calls interleaved."""
    calls = {("allocating", name): _bound(run, None) for name, run in right.items()}
    calls |= {("out", name): _bound(run, case.out) for name, run in right.items() if case.calls[name].takes_out}
    samples_us: dict[tuple[str, str], list[float]] = {name: [] for name in calls}
    order = list(calls)
    for block in range(_HOST_BLOCKS):
        random.Random(block).shuffle(order)
        for name in order:
            call = calls[name]
            for _ in range(3):
                call()
            torch.cuda.synchronize()
            for _ in range(_HOST_CALLS):
                begin = time.perf_counter_ns()
                call()
                samples_us[name].append((time.perf_counter_ns() - begin) / 1e3)
            torch.cuda.synchronize()
    times: dict[str, dict[str, Any]] = {"out": {}, "allocating": {}}
    for (how, name), samples in samples_us.items():
        times[how][name] = Timing.of(samples).figures
    return times


def first_calls(families: Sequence[str], num_processes: int) -> list[dict[str, Any]]:
    """What first_call.py measures, one entry a process."""
    # pip compiles what it installs; the wheel that gpu_check.pyz unpacks is not compiled yet.
    with contextlib.redirect_stdout(io.StringIO()):
        compileall.compile_dir(pathlib.Path(stoneware.__file__).parent, quiet=2)
    command = [
        sys.executable, "-m", "tools.gpu_check.first_call", f"--of={','.join(families)}",
        f"--repeat={num_processes}",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True, env=environment)
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        stderr = getattr(error, "stderr", None) or ""
        message = f"{error}\n{stderr if isinstance(stderr, str) else stderr.decode()}"[-4000:]
        logging.error("first calls could not be measured:\n%s", message)
        return [{"family": family, "call": OURS, "error": message} for family in families]


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
    """What makes the run fail besides families that are missing: wrong values, no figures, slow or
    meddling first calls."""
    problems = []
    for row in report["rows"]:
        if "device_us" not in row:
            why = row.get("failure") or row["no_figure"].get(OURS)
            problems.append(f"{row['family']} {row['layer']} m={row['m']}: no figure: {why}")
    for name, why in report["host_failures"].items():
        problems.append(f"{name}: no host time: {why}")
    for item in bench_summary.first_calls(report["first_calls"]):
        name = f"the first call of {item['family']}"
        if item["call"] != OURS or item["family"] in report["missing"]:
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


def find_families(
    names: Sequence[str], weights: str, device: torch.device
) -> tuple[dict[str, list[Workload]], dict[str, str]]:
    """The workloads of each family that this installation has, and for the others why not.

    A family is there if its workloads are, and ours takes its first one.
    """
    found: dict[str, list[Workload]] = {}
    missing: dict[str, str] = {}
    for name in names:
        family = FAMILIES[name]
        try:
            workloads = family.workloads(weights)
            case = family.make(family.first, device)
            case.calls[OURS].load()(case.out)
        except Exception as error:
            logging.error("%s is not in this installation:\n%s", name, traceback.format_exc())
            missing[name] = text_of(error)
        else:
            found[name] = workloads
    return found, missing


def _torch_device(device: Device) -> torch.device:
    return torch.device("cpu") if device.kind == "cpu" else torch.device("cuda", device.ordinal)


def _labels(family: Family, workload: Workload) -> dict[str, Any]:
    return {
        "family": family.name,
        "layer": workload.layer,
        "m": workload.m,
        "n": workload.n,
        "k": workload.k,
        "groups": workload.groups,
    }


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"only flags are taken, found {argv[1:]}")
    unknown = sorted(set(_FAMILIES.value) - set(FAMILIES))
    if unknown:
        raise app.UsageError(f"--families={','.join(unknown)} must be of {', '.join(FAMILIES)}")
    begin = time.monotonic()
    out_dir = pathlib.Path(flags.FLAGS.out)
    out_dir.mkdir(parents=True, exist_ok=True)
    ordinal = _DEVICE_ORDINAL.value
    report: dict[str, Any] = {
        "schema": 3,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **document.origin("bench", flags.FLAGS),
        "rounds": _ROUNDS.value,
        "l2": _L2.value,
        "families": {name: FAMILIES[name].title for name in _FAMILIES.value},
        "installed": installed(),
        # Before the long part, on an idle GPU: first calls are about the host and the driver.
        "first_calls": first_calls(_FAMILIES.value, _PROCESSES.value),
    }
    torch.cuda.set_device(ordinal)
    device = cuda_device(ordinal)
    report["machine"] = machine.describe(ordinal)
    logging.info("first calls: %.0f s gone", time.monotonic() - begin)
    found, report["missing"] = find_families(_FAMILIES.value, _WORKLOADS.value, _torch_device(device))
    report["host_us"], report["host_failures"] = {}, {}
    for name in found:
        family = FAMILIES[name]
        try:
            case = family.make(family.first, _torch_device(device))
            report["host_us"][name] = host_times(case, right_calls(case, family.dtype)[0])
        except Exception as error:
            logging.error("host time of %s:\n%s", name, traceback.format_exc())
            report["host_failures"][name] = text_of(error)
    report["rows"] = _measure_all(found, device, begin + _SECONDS.value)
    report["machine_after"] = machine.describe(ordinal)
    report["seconds"] = round(time.monotonic() - begin, 1)
    report["problems"] = problems_of(report)
    report["summary"] = {
        "speedups": bench_summary.speedups(report["rows"]),
        "floors": bench_summary.floors(report["rows"]),
        "import_and_first_call": bench_summary.import_and_first_call(report["first_calls"]),
    }
    (out_dir / "bench.json").write_text(document.to_json(report), encoding="ascii")
    markdown = bench_summary.to_markdown(report)
    (out_dir / "bench.md").write_text(markdown, encoding="utf-8")
    print(markdown.partition("<details>")[0])
    sys.exit(1 if report["problems"] or report["missing"] else 0)


def _measure_all(found: Mapping[str, Sequence[Workload]], device: Device, deadline: float) -> list[dict[str, Any]]:
    todo = [(FAMILIES[name], workload) for name, workloads in found.items() for workload in workloads]
    schedule = Schedule(deadline, len(todo), _SECONDS_PER_SHAPE.value)
    timer = DeviceTimer(device.ordinal, CudaStopwatch(device.ordinal, _L2.value))
    rows: list[dict[str, Any]] = []
    for idx, (family, workload) in enumerate(todo, start=1):
        try:
            row = measure(family, workload, device, timer, schedule, _ROUNDS.value)
        except Exception as error:
            logging.error("%s %s:\n%s", family.name, workload, traceback.format_exc())
            row = {**_labels(family, workload), "failure": text_of(error)}
            schedule.done(0.0)
        rows.append(row)
        torch.cuda.empty_cache()
        us = {name: timing["median_us"] for name, timing in row.get("device_us", {}).items()}
        logging.info(
            "[%d/%d] %s %s: %s us; %.0f s left at most",
            idx, len(todo), family.name, workload, us or row.get("failure") or row["no_figure"],
            schedule.seconds_left,
        )  # fmt: skip
    return rows


if __name__ == "__main__":
    document.define_flags()
    app.run(main)
