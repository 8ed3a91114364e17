"""What sw.autotune costs the host compared with triton.autotune, in one run: first launch and each launch.

    python -m tools.gpu_check.autotune_bench --out DIR

First launch: each decorator tunes once and keeps its results, in folders of this run. Then new processes,
interleaved, launch the tuned kernel once (first_launch.py).

Each launch: in one process, with the kernel tuned and launched before. The host's time per call, without waiting for
the GPU, in interleaved rounds of 100 calls.

Every result is compared with float64; a wrong one makes the exit code 1. experiment.py has the rest.
"""

from __future__ import annotations

import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from absl import flags

import stoneware
from tools.gpu_check import experiment, processes, tuned_matmul
from tools.gpu_check.document import heading, table, timing
from tools.gpu_check.experiment import Experiment, Row
from tools.gpu_check.first_launch import OURS, TRITON, decorated

JIT = "triton.jit"
FIRST_LAUNCH_RATIO = 3.0
"""The goal: triton.autotune's first launch costs at least this many times ours."""
LAUNCH_LIMIT_US = 15.0
MOST_ERROR = 1e-3

_CALLS_PER_ROUND = 100  # far fewer than the 1024 that a stream queues before the host waits
_CHILD_LIMIT_S = 300.0


def first_launches(folder: pathlib.Path, size: int, num_processes: int, ordinal: int) -> dict[str, list[Row]]:
    """For each decorator the results of new processes, after one that tuned."""
    environment = {
        # Bytecode is kept, as pip does; gpu_check's other programs write none.
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
        "STONEWARE_CACHE_DIR": str(folder / "stoneware"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", str(ordinal)),
    }

    def launched(name: str, mode: str = "off") -> list[Row]:
        arguments = [f"--decorator={name}", f"--mode={mode}", f"--size={size}"]
        module = "tools.gpu_check.first_launch"
        print(f"autotune: {name}, {mode}", flush=True)
        return processes.json_lines(
            processes.run_module(module, *arguments, environment=environment, limit_s=_CHILD_LIMIT_S)
        )

    launched(OURS, "on_miss"), launched(TRITON)  # they tune
    return experiment.interleaved({name: partial(launched, name) for name in (OURS, TRITON)}, num_processes)


def launches(folder: pathlib.Path, size: int, rounds: int) -> dict[str, list[float]]:
    """Host time per launch in microseconds, one value a round, for each way to launch."""
    os.environ["STONEWARE_CACHE_DIR"] = str(folder / "stoneware")
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    operands = tuned_matmul.operands(*[size] * 3)
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

    def round_us(call: Callable[[], object]) -> list[float]:
        call()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(_CALLS_PER_ROUND):
            call()
        us = (time.perf_counter() - begin) / _CALLS_PER_ROUND * 1e6
        torch.cuda.synchronize()
        return [us]

    return experiment.interleaved({name: partial(round_us, call) for name, call in calls.items()}, rounds)


def figures(samples: Sequence[float], unit: str) -> Row:
    return {**experiment.figures(samples, unit), "least": min(samples), "most": max(samples)}


def to_markdown(report: Mapping[str, Any]) -> str:
    first_ms, second_ms = report["first_launch_ms"], report["second_launch_ms"]
    first = [[name, timing(first_ms[name], "ms", 1), timing(second_ms[name], "ms", 3)] for name in (OURS, TRITON)]
    return "\n".join(
        [
            *heading("sw.autotune", report),
            f"A matmul of {report['size']}, {len(tuned_matmul.CONFIGS)} configs.",
            "",
            f"First launch in a new process after a persisted tune, milliseconds, "
            f"{report['settings']['processes']} processes each, interleaved: median ± interquartile range.",
            "",
            *table(["decorator", "first launch", "second launch"], first),
            "",
            f"triton.autotune costs {report['first_launch_ratio']:.1f} times ours (goal: at least "
            f"{FIRST_LAUNCH_RATIO:g}).",
            "",
            f"Host time per launch, microseconds, interleaved: median ± interquartile range (goal for ours: "
            f"{LAUNCH_LIMIT_US:g}).",
            "",
            *table(
                ["launched by", "host time"],
                [[name, timing(times, "us", 1)] for name, times in report["launch_us"].items()],
            ),
            "",
        ]
    )


class Autotune(Experiment):
    name = "autotune"

    @property
    def ordinal(self) -> int:
        return self.values.device

    def settings(self) -> Row:
        return {name: getattr(self.values, name) for name in ("processes", "rounds", "size")}

    def measure(self) -> None:
        torch.cuda.set_device(self.ordinal)
        report, size = self.report, self.values.size
        report["size"] = f"{size} x {size} x {size}, fp16"
        with tempfile.TemporaryDirectory(prefix="autotune_bench_") as name:
            folder = pathlib.Path(name)
            if "runs" not in report:
                report["runs"] = first_launches(folder, size, self.values.processes, self.ordinal)
                self.save()
            if "launch_us" not in report:
                times = launches(folder, size, self.values.rounds)
                report["launch_us"] = {name: figures(samples, "us") for name, samples in times.items()}
        for time_ms in ("first_launch_ms", "second_launch_ms"):
            report[time_ms] = {
                name: figures([run[time_ms] for run in report["runs"][name]], "ms") for name in report["runs"]
            }
        medians = {name: first["median_ms"] for name, first in report["first_launch_ms"].items()}
        report["first_launch_ratio"] = medians[TRITON] / medians[OURS]

    def problems(self) -> list[str]:
        runs = self.report["runs"]
        problems = [
            f"{name}: error {run['error']}" for name in runs for run in runs[name] if not run["error"] < MOST_ERROR
        ]
        asked = sum(run["asked_triton_key"] or run["made_triton_driver"] for run in runs[OURS])
        return problems + ([f"{OURS} asked Triton in {asked} first launches"] if asked else [])

    def page(self) -> str:
        return to_markdown(self.report)

    @classmethod
    def define_flags(cls) -> None:
        super().define_flags()
        flags.DEFINE_integer("device", 0, "Number of the GPU.")
        flags.DEFINE_integer("processes", 7, "New processes of each.", lower_bound=1)
        flags.DEFINE_integer("rounds", 30, "Rounds of launches.", lower_bound=1)
        flags.DEFINE_integer("size", 512, "M, N and K.", lower_bound=16)


if __name__ == "__main__":
    Autotune.start()
