"""What sw.autotune costs the host beside triton.autotune, in one run: first launch and each launch.

    python -m tools.gpu_check.autotune_bench --out DIR

First launch: each decorator tunes once and keeps its results, in folders of this run. Then new
processes, interleaved, launch the tuned kernel once. Before the clock runs a process has imported
torch, Triton and Stoneware, decorated the kernel, made the operands and started CUDA; it stops when
the GPU has finished. triton.autotune has cache_results=True.

Each launch: in one process, with the kernel tuned and launched before. The host's time per call,
without waiting for the GPU, in interleaved rounds of 100 calls.

Every result is compared with float64; a wrong one makes the exit code 1. Writes autotune.json and
autotune.md, and prints the latter.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
from absl import app, flags, logging

import stoneware
from stoneware.measuring.device_timer import spread
from tools.gpu_check import machine, tuned_matmul

OURS, TRITON, JIT = "stoneware.autotune", "triton.autotune", "triton.jit"
FIRST_LAUNCH_RATIO = 3.0
"""The goal: triton.autotune's first launch costs at least this many times ours."""
LAUNCH_LIMIT_US = 15.0
MOST_ERROR = 1e-3

_CALLS_PER_ROUND = 100  # far fewer than the 1024 that a stream queues before the host waits
_CHILD_LIMIT_S = 300

_OUT = flags.DEFINE_string("out", None, "Folder to write to.")
_DEVICE_ORDINAL = flags.DEFINE_integer("device", 0, "Number of the GPU.")
_PROCESSES = flags.DEFINE_integer("processes", 7, "New processes of each.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 30, "Rounds of launches.", lower_bound=1)
_SIZE = flags.DEFINE_integer("size", 512, "M, N and K.", lower_bound=16)
_COMMAND = flags.DEFINE_string("command", None, "What the user typed, if not this program's name.")
_CHILD = flags.DEFINE_enum("child", None, [OURS, TRITON], "Internal: launch once.")
_MODE = flags.DEFINE_string("mode", "off", "Internal: tuning mode of the child.")


def decorated(name: str) -> Any:
    """The kernel under one of the two decorators."""
    if name == OURS:
        return stoneware.autotune(tuned_matmul.CONFIGS, tuned_matmul.KEY)(tuned_matmul.matmul)
    return triton.autotune(tuned_matmul.CONFIGS, tuned_matmul.KEY, cache_results=True)(tuned_matmul.matmul)


def _timed_ms(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def launch_once(name: str, mode: str) -> dict[str, Any]:
    """In a new process: what the first launch costs, and the second."""
    from triton.runtime import cache, driver

    a, b, c = tuned_matmul.operands(*[_SIZE.value] * 3)
    kernel = decorated(name)
    arguments = tuned_matmul.arguments(a, b, c)
    torch.cuda.synchronize()

    def launch() -> None:
        kernel[tuned_matmul.grid](*arguments)

    with stoneware.tuning(mode):
        first_ms = _timed_ms(launch)
        second_ms = _timed_ms(launch)
    return {
        "first_launch_ms": first_ms,
        "second_launch_ms": second_ms,
        "error": tuned_matmul.error(a, b, c),
        "config": str(kernel.best_config),
        "asked_triton_key": cache.triton_key.cache_info().misses > 0,
        "made_triton_driver": driver._active is not None,
    }


def _child(name: str, mode: str, environment: Mapping[str, str]) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "tools.gpu_check.autotune_bench",
        f"--child={name}",
        f"--mode={mode}",
        f"--size={_SIZE.value}",
    ]
    done = subprocess.run(
        command, env=dict(environment), capture_output=True, text=True, timeout=_CHILD_LIMIT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{name}, {mode}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def first_launches(folder: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
    """For each decorator the results of new processes, after one that tuned."""
    environment = {
        # Bytecode is kept, as pip does; gpu_check's other programs write none.
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
        "STONEWARE_CACHE_DIR": str(folder / "stoneware"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", str(_DEVICE_ORDINAL.value)),
    }
    for name, mode in ((OURS, "on_miss"), (TRITON, "off")):
        logging.info("%s tunes", name)
        _child(name, mode, environment)
    results: dict[str, list[dict[str, Any]]] = {OURS: [], TRITON: []}
    order = random.Random(0)
    for process_idx in range(_PROCESSES.value):
        for name in order.sample(list(results), len(results)):
            results[name].append(_child(name, "off", environment))
        logging.info("first launch: process %d/%d", process_idx + 1, _PROCESSES.value)
    return results


def launches(folder: pathlib.Path) -> dict[str, list[float]]:
    """Host time per launch in microseconds, one value a round, for each way to launch."""
    os.environ["STONEWARE_CACHE_DIR"] = str(folder / "stoneware")
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    operands = tuned_matmul.operands(*[_SIZE.value] * 3)
    arguments = tuned_matmul.arguments(*operands)
    ours, tritons = decorated(OURS), decorated(TRITON)
    with stoneware.tuning("on_miss"):
        ours[tuned_matmul.grid](*arguments)
    tritons[tuned_matmul.grid](*arguments)
    # One config for all, so that the same kernel is launched.
    meta = ours.best_config.all_kwargs()
    tritons.cache = dict.fromkeys(tritons.cache, ours.best_config)
    named = {**dict(zip(tuned_matmul.matmul.arg_names, arguments)), **ours.best_config.kwargs}
    grids = {"callable grid": tuned_matmul.grid, "tuple grid": tuned_matmul.grid(named)}
    calls: dict[str, Callable[[], object]] = {}
    for kind, grid in grids.items():
        calls[f"{OURS}, {kind}"] = lambda grid=grid: ours[grid](*arguments)
        calls[f"{TRITON}, {kind}"] = lambda grid=grid: tritons[grid](*arguments)
        calls[f"{JIT}, {kind}"] = lambda grid=grid: tuned_matmul.matmul[grid](*arguments, **meta)
    for name, call in calls.items():
        operands[2].fill_(float("nan"))
        call(), call()
        if tuned_matmul.error(*operands) > MOST_ERROR:
            raise RuntimeError(f"{name} is wrong")
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    for _ in range(_ROUNDS.value):
        for name in order.sample(list(calls), len(calls)):
            call = calls[name]
            call()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(_CALLS_PER_ROUND):
                call()
            times[name].append((time.perf_counter() - begin) / _CALLS_PER_ROUND * 1e6)
            torch.cuda.synchronize()
    return times


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, interquartile range and extremes."""
    return {
        "median": statistics.median(values),
        "spread": spread(values),
        "least": min(values),
        "most": max(values),
        "count": len(values),
    }


def to_markdown(report: Mapping[str, Any]) -> str:
    facts, first = report["machine"], report["first_launch_ms"]
    second = report["second_launch_ms"]

    def shown(times: Mapping[str, float], digits: int) -> str:
        return f"{times['median']:.{digits}f} ± {times['spread']:.{digits}f}"

    return "\n".join(
        [
            f"# sw.autotune on {facts['gpu']}",
            "",
            f"{report['date']}, driver {facts['driver']}, torch {facts['torch']}, Triton "
            f"{facts['triton']}, Python {facts['python']}. A matmul of {report['size']}, "
            f"{len(tuned_matmul.CONFIGS)} configs.",
            "",
            f"Command: `{report['command']}`",
            "",
            f"First launch in a new process after a persisted tune, milliseconds, "
            f"{report['processes']} processes each, interleaved: median ± interquartile range.",
            "",
            "| decorator | first launch | second launch |",
            "|---|---|---|",
            *(f"| {name} | {shown(first[name], 1)} | {shown(second[name], 3)} |" for name in (OURS, TRITON)),
            "",
            f"triton.autotune costs {report['first_launch_ratio']:.1f} times ours (goal: at least "
            f"{FIRST_LAUNCH_RATIO:g}).",
            "",
            "Host time per launch, microseconds, interleaved: median ± interquartile range.",
            "",
            "| launched by | host time |",
            "|---|---|",
            *(f"| {name} | {shown(times, 1)} |" for name, times in report["launch_us"].items()),
            "",
        ]
    )


def _report(first: Mapping[str, list[dict[str, Any]]], times: Mapping[str, list[float]]) -> dict[str, Any]:
    def summaries(of: str) -> dict[str, dict[str, float]]:
        return {name: summary([run[of] for run in runs]) for name, runs in first.items()}

    first_ms = summaries("first_launch_ms")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _COMMAND.value or "python -m tools.gpu_check.autotune_bench",
        "machine": machine.describe(_DEVICE_ORDINAL.value),
        "size": f"{_SIZE.value} x {_SIZE.value} x {_SIZE.value}, fp16",
        "processes": _PROCESSES.value,
        "first_launch_ms": first_ms,
        "second_launch_ms": summaries("second_launch_ms"),
        "first_launch_ratio": first_ms[TRITON]["median"] / first_ms[OURS]["median"],
        "launch_us": {name: summary(values) for name, values in times.items()},
        "runs": first,
    }


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if _CHILD.value is not None:
        print(json.dumps(launch_once(_CHILD.value, _MODE.value)))
        return
    if _OUT.value is None:
        raise app.UsageError("--out must be a folder to write to")
    torch.cuda.set_device(_DEVICE_ORDINAL.value)
    out = pathlib.Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="autotune_bench_") as folder:
        first = first_launches(pathlib.Path(folder))
        times = launches(pathlib.Path(folder))
    report = _report(first, times)
    (out / "autotune.json").write_text(json.dumps(report, indent=1) + "\n")
    page = to_markdown(report)
    (out / "autotune.md").write_text(page)
    print(page)
    wrong = [run for runs in first.values() for run in runs if not run["error"] < MOST_ERROR]
    asked = [run for run in first[OURS] if run["asked_triton_key"] or run["made_triton_driver"]]
    slowest_us = max(values["median"] for name, values in report["launch_us"].items() if name.startswith(OURS))
    logging.info(
        "wrong: %d; ours that asked Triton: %d; ratio %.1f (goal %g); launch %.1f us (goal %g)",
        len(wrong),
        len(asked),
        report["first_launch_ratio"],
        FIRST_LAUNCH_RATIO,
        slowest_us,
        LAUNCH_LIMIT_US,
    )
    if wrong or asked:
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
