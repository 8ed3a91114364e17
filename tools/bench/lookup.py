"""What a look-up takes, without a GPU: warm, cold, and the loading of a table.

    python tools/bench/lookup.py --commit COMMIT --json_out lookup.json

with an installed stoneware, or an unpacked wheel on PYTHONPATH. --package DIR asks another folder
that holds tables/ and kernel_manifest.json.

- warm: the time of a call with a cached plan that does nothing, with `out`; through the
  native module, and in Python, as without the module;
- load: reading, checking and opening a table; and, where a user has a store of measurements, also
  the table that is baked from it; a decision after one more sample; and the bake;
- cold: from a problem to its decision, once these are loaded: the first of its family, of which
  nothing was read before; a later one; and the first of all, right after the load, which pushed
  everything else out of the processor's caches; exact, at another m of a weight that was measured,
  and at another shape, which are both modelled. No problem is looked up twice in a row, so that a
  cached result does not answer the next one; the device is a GPU as the driver describes it.

Each is done with the table of the installation and the family that has the most entries there; cold
ones also with a user's store that has measurements at some of the shapes.

Most are taken in this process ("how": "objects"): tables, stores and all that was read of them are
made anew for each timing of a first look-up, by code that ran before. The load and the first
look-ups are also taken once in each of --processes new processes ("how": "processes"), in which no
look-up ran before.

Each figure is the median of as many timings as it says, with the interquartile range, and the least
and the 10th percentile, which other work on the machine moves less, in us.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from absl import app, flags

from stoneware.kernels import manifest, sm90_kernels
from stoneware.kernels.key import AnyKey, Key
from stoneware.measuring import operands
from stoneware.ops import operation_of
from stoneware.runtime import native, package_files
from stoneware.runtime.device import DRIVER_MODULE, Device
from stoneware.specs import OPS, spec_of
from stoneware.tuning import policy, sources, store_table, table_file
from stoneware.tuning.samples import Run, Sample
from stoneware.tuning.store import user_store
from stoneware.tuning.table import Block, DeviceTable

_PACKAGE = flags.DEFINE_string("package", None, "Folder with the tables; default: the installed.")
_COMMIT = flags.DEFINE_string("commit", "unknown", "Commit that is measured, for the record.")
_JSON_OUT = flags.DEFINE_string("json_out", None, "File to write the figures to, besides.")
_REPEATS = flags.DEFINE_integer("repeats", 200, "Timings per figure.", lower_bound=5)
_PROCESSES = flags.DEFINE_integer("processes", 10, "New processes per op and step.", lower_bound=2)
_OF_PROCESS = flags.DEFINE_list(
    "of_process", None, "Internal: op, step and number of the problem that this process asks."
)

CALLS_PER_TIMING = 2000
"""Of what takes less than a microsecond."""

STORE_LOADS = 20
"""Timings of, or after, the opening of the table of a user's store."""

WHOLE_STORE_LOADS = 5
"""The same, of a store with every problem of the table."""

STORE_PROBLEMS = 150
"""How many problems the user's store has: a tune of some models."""

NUM_OTHERS = 20
"""Look-ups of another family before the first of the one that is timed."""


def timed(
    run: Callable[[], Any], prepare: Callable[[], Any] = lambda: None, calls: int = 1, repeats: int | None = None
) -> dict[str, float]:
    """The figures of timings of `calls` runs, in us per run, `prepare` not timed."""
    timings_us = []
    for _ in range(repeats or _REPEATS.value):
        prepare()
        start_ns = time.perf_counter_ns()
        for _ in range(calls):
            run()
        timings_us.append((time.perf_counter_ns() - start_ns) / 1000 / calls)
    return in_short(timings_us)


def in_short(timings_us: Sequence[float]) -> dict[str, float]:
    """Median, interquartile range, least, 10th percentile and count."""
    low, median, high = statistics.quantiles(timings_us, n=4)
    return {
        "median_us": round(median, 3),
        "spread_us": round(high - low, 3),
        "min_us": round(min(timings_us), 3),
        "p10_us": round(statistics.quantiles(timings_us, n=10, method="inclusive")[0], 3),
        "count": len(timings_us),
    }


def warm_calls(op: str) -> dict[str, Callable[[], Any]]:
    """Calls of the op whose plan does nothing: by the native module, if there is one, and
    without."""
    spec = spec_of(op)
    api = importlib.import_module(f"stoneware.ops.{spec.name}.api")
    function, plans = getattr(api, op), api._PLANS
    sizes = {"m": 16, "n": 32, "k": 64, **({"num_groups": 2} if "num_groups" in spec.takes else {})}
    tensors = dict(operands.make(spec.make_problem(**sizes), "cpu").tensors)
    others = [inspect.signature(function).parameters[name].default for name, _ in spec.arguments]
    arguments = [*(tensors[name] for name in spec.tensors), *others, None, None]

    def run() -> None:
        function(**tensors)

    def run_in_python() -> None:
        plans.run(*arguments)

    run()
    plans.checked_plan = lambda *arguments: lambda *tensors: None
    policy.forget_plans()
    calls = {"warm call without the plan, in Python": run_in_python}
    if plans.fast is not None:
        calls["warm call without the plan"] = run
    for call in calls.values():
        call()
    return calls


def warm_figures(op: str) -> Iterator[dict[str, Any]]:
    for what, run in warm_calls(op).items():
        yield {"what": what, "op": op, **timed(run, calls=CALLS_PER_TIMING)}


def measured_ops() -> list[str]:
    """Those with a table that has measurements, except ops with groups: each number of groups is a
    family of a few entries there, and none is modelled."""
    return [op for op in OPS if "num_groups" not in spec_of(op).takes and table_file.packaged(op).devices]


def measured_device(op: str) -> DeviceTable:
    """The device with the most measurements."""
    return max(table_file.packaged(op).devices, key=lambda device: device.num_entries)


def largest_family(op: str) -> AnyKey:
    """The family of that device with the most entries."""
    device = measured_device(op)
    return max(device.blocks, key=lambda family: len(device.block(family).sizes))


def largest_block(op: str) -> Block:
    return measured_device(op).block(largest_family(op))


def problem_keys(op: str) -> dict[str, list[Key]]:
    """For each step the keys that it answers: every measured one of a family, and those with other
    sizes, in an order by chance that is always the same."""
    block = largest_block(op)
    measured = [block.kind.with_sizes(sizes) for sizes in block.sizes]
    random.Random(0).shuffle(measured)
    known = {(key.n, key.k) for key in measured}
    keys = {
        "exact": measured,
        "nearest m": [replace(key, m=key.m + 3) for key in measured],
        "nearest shape": [
            replace(key, n=key.n + 16 * 3, m=key.m + 3) for key in measured if (key.n + 16 * 3, key.k) not in known
        ],
    }
    taken = set(measured)
    return {step: [key for key in found if step == "exact" or key not in taken] for step, found in keys.items()}


def gpu(op: str) -> Device:
    """The device with the most measurements as the driver describes it; where the installation
    lacks the native modules, as `explain` describes it."""
    fingerprint = measured_device(op).fingerprint
    if any(native.why_missing(module) for module in (DRIVER_MODULE, sm90_kernels.MODULE)):
        return Device(fingerprint=fingerprint)
    return Device(
        ordinal=0, fingerprint=replace(fingerprint, power_limit_w=0), driver_version=(sm90_kernels.CUDA_MAJOR, 0)
    )


def problems_of(op: str, step: str) -> tuple[list[Any], list[Any]]:
    """Problems that a step answers, in an order by chance that is always the same, and a few of
    another family."""
    spec = spec_of(op)
    keys = problem_keys(op)[step]
    options = {name: getattr(keys[0], name) for name in ("scales", "layout") if name in spec.takes}
    problems = [
        spec.make_problem(m=key.m, n=key.n, k=key.k, dtype=key.a_dtype, out_dtype=key.out_dtype, **options)
        for key in keys
    ]
    return problems, [_of_another_family(problem) for problem in problems[-NUM_OTHERS:]]


def _of_another_family(problem: Any) -> Any:
    """The same with bf16 and fp16 exchanged."""
    exchanged = {"bf16": "fp16", "fp16": "bf16"}
    dtypes = {name: getattr(problem, name) for name in ("a_dtype", "b_dtype", "out_dtype")}
    return replace(problem, **{name: exchanged.get(dtype, dtype) for name, dtype in dtypes.items()})


def decides(op: str, device: Device) -> Callable[[Any], Any]:
    operation = operation_of(op)
    return lambda problem: operation.decide(problem, device, lists_refusals=False)


def cold_figures(op: str, step: str, num_loads: int, **row: Any) -> Iterator[dict[str, Any]]:
    device = gpu(op)
    decide_for = decides(op, device)
    all_problems, others = problems_of(op, step)
    # Packages are searched here, once per process. At another m, a near weight may answer before its own.
    all_problems = [each for each in all_problems if decide_for(each).step == step]
    if not all_problems:
        raise RuntimeError(f"{op}: no problem was answered by {step!r}")
    problems = itertools.cycle(all_problems)
    problem = all_problems[-1]

    def decide() -> Any:
        return decide_for(problem)

    def take() -> None:
        nonlocal problem
        problem = next(problems)

    def load() -> None:
        take()
        table_file.packaged.cache_clear()
        sources.forget_stores()
        sources.sources(op, has_packages=False)

    def load_and_ask_others() -> None:
        load()
        for other in others:
            decide_for(other)

    row = {**row, "op": op, "step": step, "is_described": device.is_described}
    yield {"what": "cold, first of all", "how": "objects", **row, **timed(decide, load, repeats=num_loads)}
    yield {
        "what": "cold, first of its family",
        "how": "objects",
        **row,
        **timed(decide, load_and_ask_others, repeats=num_loads),
    }
    yield {"what": "cold, later", "how": "objects", **row, **timed(decide, take)}


def time_in_this_process(op: str, step: str, number: int) -> dict[str, float]:
    """What takes how many us when it is done for the first time in a process, where what a look-up
    needs is imported, the manifest is read, and packages were asked."""
    manifest.packaged()
    sources.packages(op)
    timings_us = {}

    def take(what: str, run: Callable[[], Any]) -> None:
        start_ns = time.perf_counter_ns()
        run()
        timings_us[what] = (time.perf_counter_ns() - start_ns) / 1000

    take("load table", lambda: table_file.packaged(op))
    problems, others = problems_of(op, step)
    decide = decides(op, gpu(op))
    # A table that is loaded and of which nothing was read yet, as the choice of problems did.
    table_file.packaged.cache_clear()
    sources.sources(op, has_packages=False)
    take("cold, first of all", lambda: decide(others[0]))
    for other in others[1:]:
        decide(other)
    take("cold, first of its family", lambda: decide(problems[number % len(problems)]))
    return timings_us


def process_figures(op: str, **row: Any) -> Iterator[dict[str, Any]]:
    paths = os.pathsep.join(filter(None, sys.path))  # a launcher's, which a new process lacks
    for step in problem_keys(op):
        timings: dict[str, list[float]] = {}
        for number in range(_PROCESSES.value):
            done = subprocess.run(
                [
                    sys.executable,
                    __file__,
                    f"--of_process={op},{step},{number}",
                    *([f"--package={_PACKAGE.value}"] if _PACKAGE.value else []),
                ],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": paths},
            )
            for what, timing_us in json.loads(done.stdout).items():
                timings.setdefault(what, []).append(timing_us)
        for what, timings_us in timings.items():
            yield {"what": what, "how": "processes", "op": op, "step": step, **row, **in_short(timings_us)}


def load_figures(op: str, **row: Any) -> Iterator[dict[str, Any]]:
    num_bytes = table_file.packaged_path(op).stat().st_size
    yield {
        "what": "load table",
        "how": "objects",
        "op": op,
        **row,
        "num_bytes": num_bytes,
        **timed(lambda: table_file.packaged(op), table_file.packaged.cache_clear),
    }


def fill_store(op: str, num_problems: int) -> list[Sample]:
    """Stores samples at shapes of the table, evenly spread, as a user's tuning would."""
    found = measured_device(op)
    run = Run(
        id=f"bench-{op}",
        device=found.fingerprint,
        driver="",
        cuda="",
        torch="",
        triton="",
        python="",
        sm_clock_mhz_before=0,
        sm_clock_mhz_after=0,
        memory_clock_mhz_before=0,
        memory_clock_mhz_after=0,
        date="2026-01-01",
        commit="",
        command="",
    )
    kernels = manifest.packaged().kernels
    samples = []
    entries = list(found.entries())
    for entry in entries[:: max(len(entries) // num_problems, 1)]:
        for choice in entry.choices:
            kernel = kernels.get(choice.config.kernel)
            samples.append(
                Sample(
                    key=entry.key,
                    config=choice.config,
                    median_us=choice.median_us,
                    spread_us=choice.spread_us,
                    count=1,
                    status="ok",
                    run=run.id,
                    kernel_sha256=kernel.sha256 if kernel is not None else "",
                )
            )
    user_store().add(run, samples)
    store_table.bake(user_store().path)
    return samples


def store_figures(op: str, samples: Sequence[Sample], num_loads: int, **row: Any) -> Iterator[dict[str, Any]]:
    """Opening the table of a store; a look-up after one more sample, like at a miss; and the bake."""
    row = {"op": op, "how": "objects", "num_store_samples": len(samples), **row}
    yield {
        "what": "load store",
        **row,
        **timed(lambda: sources.sources(op, has_packages=False), sources.forget_stores, repeats=num_loads),
    }
    store, decide = user_store(), decides(op, gpu(op))
    [(run, _), *_] = store.samples(op)
    problems = itertools.cycle(problems_of(op, "nearest shape")[0])
    changed = itertools.cycle(samples)

    def add() -> None:
        sample = next(changed)
        store.add(run, [replace(sample, median_us=sample.median_us * random.uniform(1, 1.001))])

    yield {
        "what": "look-up after one more sample",
        **row,
        **timed(lambda: decide(next(problems)), add, repeats=num_loads),
    }
    yield {"what": "bake", **row, **timed(lambda: store_table.bake(store.path), add, repeats=2)}


def table_figures(folder: Path) -> Iterator[dict[str, Any]]:
    """Those that depend on the table."""
    for op in measured_ops():
        os.environ["STONEWARE_CACHE_DIR"] = str(folder / f"user-{op}")
        row = {"family_entries": len(largest_block(op).sizes)}
        yield from load_figures(op, **row)
        for step in problem_keys(op):
            yield from cold_figures(op, step, _REPEATS.value, **row, store="absent")
        yield from process_figures(op, **row)
        samples = fill_store(op, STORE_PROBLEMS)
        yield from store_figures(op, samples, STORE_LOADS, **row)
        for step in problem_keys(op):
            yield from cold_figures(op, step, STORE_LOADS, **row, store="present", num_store_samples=len(samples))
        samples = fill_store(op, measured_device(op).num_entries)
        yield from store_figures(op, samples, WHOLE_STORE_LOADS, **row)


def figures() -> Iterator[dict[str, Any]]:
    yield {"what": "state of sw.tuning", **timed(policy.state, calls=CALLS_PER_TIMING)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["STONEWARE_CACHE_DIR"] = str(folder / "none")
        for op in OPS:
            yield from warm_figures(op)
        yield from table_figures(folder)


def processor() -> str:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return next(
        (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")),
        platform.processor(),
    )


def main(argv: Sequence[str]) -> int:
    if _PACKAGE.value:
        package_files.ROOT = Path(_PACKAGE.value)
    if _OF_PROCESS.value:
        op, step, number = _OF_PROCESS.value
        print(json.dumps(time_in_this_process(op, step, int(number))))
        return 0
    rows = []
    for row in figures():
        rows.append(row)
        name = ", ".join(f"{row[part]}" for part in ("what", "how", "op", "step") if part in row)
        if "family_entries" in row:
            name += f"; {row['family_entries']} entries in the family"
        if "store" in row:
            name += f", store {row['store']}"
        if "num_store_samples" in row:
            name += f", {row['num_store_samples']} samples in it"
        print(
            f"{row['median_us']:10.3f} us  +- {row['spread_us']:8.3f}  "
            f"p10 {row['p10_us']:10.3f}  of {row['count']:3}  {name}",
            flush=True,
        )
    if _JSON_OUT.value:
        document = {
            "command": f"lookup --repeats {_REPEATS.value} --processes {_PROCESSES.value}",
            "commit": _COMMIT.value,
            "processor": processor(),
            "num_cpus": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "figures": rows,
        }
        Path(_JSON_OUT.value).write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    app.run(main)
