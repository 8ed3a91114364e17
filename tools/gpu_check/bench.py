"""Times sw.scaled_mm beside torch._scaled_mm, row and tensor scales, in one run.

    python -m tools.gpu_check.bench --out DIR

For each shape the three calls are first compared with float64, every element; a shape at which ours
is wrong gets no figure and makes the exit code 1, and a peer that is wrong or refuses is left out
of that row. Then the calls are timed against each other on the GPU, interleaved, with a cold L2
(device_timer.py), and on the host, call by call, without waiting for the GPU. The first call is
timed in fresh processes.

Writes bench.json, with all that is needed to judge it, and bench.md, the same for people.
"""

from __future__ import annotations

import datetime
import json
import math
import pathlib
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from absl import app, flags, logging

import stoneware
from stoneware.measuring import machine, operands
from stoneware.measuring.device_timer import DeviceTimer, host_time
from stoneware.ops.scaled_mm import api
from stoneware.ops.scaled_mm.problem import Problem
from stoneware.ops.scaled_mm.shapes import BENCH_M_VALUES, BENCH_WEIGHTS
from stoneware.runtime.device import Device, cuda_device

OURS, TORCH_ROW, TORCH_TENSOR = "stoneware", "torch_row", "torch_tensor"
SMALL_M = 128
"""Up to this m the speed of light is that of memory; the goal against torch is set there."""

FIRST_CALL_LIMIT_MS = 100.0

_OUT = flags.DEFINE_string("out", None, "Folder to write to.", required=True)
_DEVICE_ORDINAL = flags.DEFINE_integer("device", 0, "Number of the GPU.")
_ROUNDS = flags.DEFINE_integer("rounds", 60, "Timings of each call.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds_per_shape", 3.0, "Stop timing a shape after this long.")
_PROCESSES = flags.DEFINE_integer("processes", 7, "Fresh processes for the first call.")
_WHEEL_SHA256 = flags.DEFINE_string("wheel_sha256", "unknown", "Of the installed wheel.")
_COMMAND = flags.DEFINE_string("command", None, "What the user typed, if not this program.")


def _calls(
    row: operands.Operands, tensor_scales: tuple[torch.Tensor, ...], with_out: bool
) -> dict[str, Callable[[], torch.Tensor]]:
    """The three calls. With `with_out` each writes to row.out, else each allocates its result."""
    a, b, out = row.a, row.b, row.out if with_out else None
    scale_a, scale_b = row.scales
    tensor_a, tensor_b = tensor_scales
    dtype = row.out.dtype

    def ours() -> torch.Tensor:
        return stoneware.scaled_mm(a, b, scale_a, scale_b, out_dtype=dtype, out=out)

    def torch_row() -> torch.Tensor:
        return torch._scaled_mm(
            a, b, scale_a, scale_b, out_dtype=dtype, use_fast_accum=True, out=out
        )

    def torch_tensor() -> torch.Tensor:
        return torch._scaled_mm(
            a, b, tensor_a, tensor_b, out_dtype=dtype, use_fast_accum=True, out=out
        )

    return {OURS: ours, TORCH_ROW: torch_row, TORCH_TENSOR: torch_tensor}


def _check_values(
    calls: Mapping[str, Callable[[], torch.Tensor]],
    row: operands.Operands,
    tensor_scales: tuple[torch.Tensor, ...],
) -> dict[str, dict[str, Any]]:
    """For each call whether it is right, its error, and why not if not."""
    expected = operands.reference(row)
    checked: dict[str, dict[str, Any]] = {}
    for name, call in calls.items():
        want = expected
        if name == TORCH_TENSOR:
            row_scale_a, row_scale_b = row.scales
            want = expected * (tensor_scales[0] / row_scale_a) * (tensor_scales[1] / row_scale_b)
        row.poison()
        try:
            call()
            torch.cuda.synchronize()
        except Exception as error:
            logging.error("%s at %s failed:\n%s", name, row.problem, traceback.format_exc())
            checked[name] = {"is_right": False, "error": None, "detail": str(error)[:1000]}
            continue
        comparison = operands.compare(row.out, want, row.problem)
        checked[name] = {
            "is_right": comparison.is_right,
            "error": comparison.error if math.isfinite(comparison.error) else None,
            "detail": str(comparison),
        }
    return checked


def measure(problem: Problem, device: Device, timer: DeviceTimer) -> dict[str, Any]:
    """One row of the result: the decision, whether the values are right, and the times."""
    torch_device = torch.device("cuda", device.ordinal)
    row = operands.make(problem, torch_device)
    tensor_scales = tuple(torch.rand(1, 1, device=torch_device) + 0.5 for _ in range(2))
    decision = api.OPERATION.decide(problem, device)
    result: dict[str, Any] = {
        "m": problem.m,
        "n": problem.n,
        "k": problem.k,
        "config": decision.config.to_json(),
        "layer": decision.layer,
        "grade": decision.grade,
    }
    result["checks"] = _check_values(_calls(row, tensor_scales, True), row, tensor_scales)
    right = [name for name, check in result["checks"].items() if check["is_right"]]
    if OURS not in right:
        return result  # no figure without a right value
    into_out = _calls(row, tensor_scales, True)
    timings = timer.time(
        {name: into_out[name] for name in right},
        rounds=_ROUNDS.value,
        max_seconds=_SECONDS.value,
    )
    result["device_us"] = {name: vars(timing) for name, timing in timings.items()}
    allocating = _calls(row, tensor_scales, False)
    result["host_us"] = {name: vars(host_time(allocating[name])) for name in right}
    return result


def geometric_mean(values: Sequence[float]) -> float | None:
    return math.exp(statistics.fmean(map(math.log, values))) if values else None


def speedups(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Geometric means of peer's time over ours; above 1 ours is faster."""

    def over(peers: Sequence[str], largest_m: float) -> dict[str, Any]:
        ratios = []
        for row in rows:
            device_us = row.get("device_us", {})
            peer_us = [device_us[name]["median_us"] for name in peers if name in device_us]
            if row["m"] <= largest_m and peer_us and OURS in device_us:
                ratios.append(min(peer_us) / device_us[OURS]["median_us"])
        return {
            "geomean": geometric_mean(ratios),
            "least": min(ratios, default=None),
            "num_shapes": len(ratios),
        }

    return {
        f"m <= {SMALL_M}, over torch row scales": over([TORCH_ROW], SMALL_M),
        "all m, over torch row scales": over([TORCH_ROW], math.inf),
        "all m, over the faster of torch row and tensor scales": over(
            [TORCH_ROW, TORCH_TENSOR], math.inf
        ),
    }


def first_calls(num_processes: int) -> dict[str, Any]:
    """Medians over fresh processes of what first_call.py measures, ours and torch's."""
    results: dict[str, Any] = {}
    for call in ("stoneware", "torch"):
        runs, errors = [], []
        for process_idx in range(num_processes):
            command = [sys.executable, "-m", "tools.gpu_check.first_call", f"--call={call}"]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=300, check=True
                )
                runs.append(json.loads(done.stdout.strip().splitlines()[-1]))
            except (subprocess.SubprocessError, OSError, ValueError, IndexError) as error:
                errors.append(f"{error}\n{getattr(error, 'stderr', '') or ''}"[-4000:])
            logging.info("first call of %s: process %d/%d", call, process_idx + 1, num_processes)
        medians = {
            name: statistics.median(run[name] for run in runs)
            for name in ("import_ms", "first_call_ms", "second_call_ms")
            if runs
        }
        results[call] = {"medians": medians, "runs": runs, "errors": errors}
    return results


def to_markdown(report: Mapping[str, Any]) -> str:
    """The report as a page."""
    facts = report["machine"]
    lines = [
        f"# scaled_mm on {facts['gpu']}",
        "",
        f"{report['date']}, driver {facts['driver']}, torch {facts['torch']}, "
        f"Python {facts['python']}, SM clock {facts['sm_clock_mhz']} MHz before and "
        f"{report['machine_after']['sm_clock_mhz']} MHz after, wheel sha256 "
        f"{report['wheel_sha256']}.",
        "",
        f"Command: `{report['command']}`",
        "",
        "Device time in microseconds: median ± interquartile range, cold L2, bf16 output, the "
        "calls "
        "interleaved. Each figure's values were compared with float64 in the same run.",
        "",
        "| m | n | k | kernel | layer | stoneware | torch row | torch tensor | row / ours | "
        "fastest torch / ours | error | host us (ours, torch row) |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_markdown_row(row) for row in report["rows"]]
    lines += [
        "",
        "| times faster than torch | geometric mean | least | shapes |",
        "|---|---|---|---|",
    ]
    for name, speedup in report["speedups"].items():
        lines.append(
            f"| {name} | {_number(speedup['geomean'], 3)} | {_number(speedup['least'], 3)} | "
            f"{speedup['num_shapes']} |"
        )
    lines += [
        "",
        "| first call, fresh processes, medians | import ms | first call ms | second call ms | "
        "processes |",
        "|---|---|---|---|---|",
    ]
    for name, calls in report["first_call"].items():
        medians = calls["medians"]
        lines.append(
            f"| {name} | {_number(medians.get('import_ms'), 1)} | "
            f"{_number(medians.get('first_call_ms'), 2)} | "
            f"{_number(medians.get('second_call_ms'), 3)} | {len(calls['runs'])} |"
        )
    lines += ["", *(f"- PROBLEM: {problem}" for problem in report["problems"])]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_row(row: Mapping[str, Any]) -> str:
    device_us, host_us = row.get("device_us", {}), row.get("host_us", {})

    def timing(name: str) -> str:
        found = device_us.get(name)
        return f"{found['median_us']:.1f} ± {found['spread_us']:.1f}" if found else "-"

    def ratio(names: Sequence[str]) -> str:
        peers = [device_us[name]["median_us"] for name in names if name in device_us]
        return f"{min(peers) / device_us[OURS]['median_us']:.2f}" if peers else "-"

    error = row.get("checks", {}).get(OURS, {}).get("error")
    host = ", ".join(
        f"{host_us[name]['median_us']:.1f}" for name in (OURS, TORCH_ROW) if name in host_us
    )
    cells = [
        str(row["m"]),
        str(row["n"]),
        str(row["k"]),
        f"`{row.get('config', {}).get('kernel', '-')}`",
        row.get("layer", "-"),
        timing(OURS),
        timing(TORCH_ROW),
        timing(TORCH_TENSOR),
        ratio([TORCH_ROW]),
        ratio([TORCH_ROW, TORCH_TENSOR]),
        "-" if error is None else f"{error:.1e}",
        host or "-",
    ]
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _problems(rows: Sequence[Mapping[str, Any]], first_call: Mapping[str, Any]) -> list[str]:
    """What makes the run fail: wrong values, a slow first call, a call that reaches outside."""
    problems = [
        f"m={row['m']} n={row['n']} k={row['k']}: no figure: "
        f"{row.get('failure') or row['checks'][OURS]['detail']}"
        for row in rows
        if "device_us" not in row
    ]
    ours = first_call["stoneware"]
    first_call_ms = ours["medians"].get("first_call_ms")
    if first_call_ms is None:
        problems.append(f"no first call was measured: {ours['errors'][:1]}")
    elif first_call_ms >= FIRST_CALL_LIMIT_MS:
        problems.append(
            f"first_call_ms={first_call_ms:.1f} must be under {FIRST_CALL_LIMIT_MS:g} ms"
        )
    outside = sorted({event for run in ours["runs"] for event in run["outside"]})
    problems += [f"the first call reached outside: {event}" for event in outside]
    return problems


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"only flags are taken, found {argv[1:]}")
    out_dir = pathlib.Path(_OUT.value)
    out_dir.mkdir(parents=True, exist_ok=True)
    ordinal = _DEVICE_ORDINAL.value
    torch.cuda.set_device(ordinal)
    device = cuda_device(ordinal)
    timer = DeviceTimer(ordinal)
    report: dict[str, Any] = {
        "schema": 1,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _COMMAND.value or " ".join(["bench", *sys.argv[1:]]),
        "wheel_sha256": _WHEEL_SHA256.value,
        "machine": machine.describe(ordinal),
        "rounds": _ROUNDS.value,
    }
    # Before the long part, on an idle GPU: first calls are about the host and the driver.
    report["first_call"] = first_calls(_PROCESSES.value)
    shapes = [(m, n, k) for n, k in BENCH_WEIGHTS.values() for m in BENCH_M_VALUES]
    rows: list[dict[str, Any]] = []
    start = time.monotonic()
    for idx, (m, n, k) in enumerate(shapes, start=1):
        problem = Problem.dense(m=m, n=n, k=k)
        try:
            row = measure(problem, device, timer)
        except Exception as error:
            logging.error("%s could not be measured:\n%s", problem, traceback.format_exc())
            row = {"m": m, "n": n, "k": k, "failure": f"{type(error).__name__}: {error}"[:1000]}
        rows.append(row)
        torch.cuda.empty_cache()
        elapsed = time.monotonic() - start
        logging.info(
            "[%d/%d] %s; %.0f s gone, about %.0f s left",
            idx,
            len(shapes),
            _markdown_row(row),
            elapsed,
            elapsed / idx * (len(shapes) - idx),
        )
    report["rows"] = rows
    report["speedups"] = speedups(rows)
    report["machine_after"] = machine.describe(ordinal)
    report["problems"] = _problems(rows, report["first_call"])
    text = json.dumps(report, sort_keys=True, indent=1) + "\n"
    (out_dir / "bench.json").write_text(text, encoding="ascii")
    markdown = to_markdown(report)
    (out_dir / "bench.md").write_text(markdown, encoding="utf-8")
    print(markdown)
    sys.exit(1 if report["problems"] else 0)


if __name__ == "__main__":
    app.run(main)
