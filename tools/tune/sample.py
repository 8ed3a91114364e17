"""Measures every candidate at every shape on this machine's GPU, and writes the samples of the
bake.

    sample --out py/stoneware/tuning_data/nvidia_h200

For each problem, all candidates (our kernels with their knobs, and the vendor library) first run
once on fresh random operands over an output of NaN and are compared with float64, every element,
with and without bias. Only what is right is timed; what is wrong or fails is written down as such.
Then the candidates are timed against each other, see device_timer.py.

Each problem's samples are written when it is done, so that a run that is killed loses one problem;
the next run goes on where it stopped, and does not measure again what has a sample of the same
kernel (by its digest). A candidate that corrupts the CUDA context ends the process with exit code
3; start it again, and that candidate counts as failed.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import pathlib
import platform
import sys
import time
import traceback
from collections.abc import Iterator, Sequence

import torch
from absl import app, flags, logging

from stoneware.autotune import samples as sample_files
from stoneware.autotune.config import Config
from stoneware.autotune.samples import DeviceRecord, Run, Sample
from stoneware.errors import UnsupportedError
from stoneware.ops.matmul import api as matmul_api
from stoneware.ops.matmul.problem import Problem as MatmulProblem
from stoneware.ops.scaled_mm import api as scaled_mm_api
from stoneware.ops.scaled_mm.problem import Problem as ScaledMmProblem
from stoneware.ops.scaled_mm.shapes import M_VALUES, WEIGHTS
from stoneware.runtime import manifest
from stoneware.runtime.device import Device, cuda_device
from tools.tune import machine, operands
from tools.tune.device_timer import DeviceTimer, Timing

_APIS = {"scaled_mm": scaled_mm_api, "matmul": matmul_api}
_LOST_CONTEXT_EXIT_CODE = 3

_LARGEST_ERROR = 1e9
"""Stands for infinity, which JSON has not."""

_DEVICE_ORDINAL = flags.DEFINE_integer("device", 0, "Number of the GPU.")
_OUT = flags.DEFINE_string("out", None, "Folder of the device's samples.", required=True)
_OPS = flags.DEFINE_list("ops", list(_APIS), "Ops to measure.")
_WEIGHTS = flags.DEFINE_list(
    "weights", list(WEIGHTS), "Names of layers in ops/scaled_mm/shapes.py."
)
_M_VALUES = flags.DEFINE_list("m", list(map(str, M_VALUES)), "Rows of a.")
_SCALES = flags.DEFINE_list("scales", ["row", "tensor"], "Kinds of scales, for scaled_mm.")
_OUT_DTYPES = flags.DEFINE_list("out_dtypes", ["bf16"], "Output dtypes; for matmul, all dtypes.")
_LAYOUTS = flags.DEFINE_list("layouts", ["nt"], "Layouts, for matmul.")
_ALIASES = flags.DEFINE_list("aliases", [], "Further names of this device, for device.json.")
_ROUNDS = flags.DEFINE_integer("rounds", 50, "Timings of each candidate.", lower_bound=1)
_ROUNDS_BEFORE_DROP = flags.DEFINE_integer(
    "rounds_before_drop", 7, "After so many, candidates twice slower than the best are dropped."
)
_SECONDS = flags.DEFINE_float("seconds_per_problem", 2.0, "Stop timing a problem after this long.")
_REMEASURE = flags.DEFINE_bool("remeasure", False, "Measure again what has a sample.")
_COMMAND = flags.DEFINE_string("command", None, "What the user typed, if not this program.")
_COMMIT = flags.DEFINE_string("commit", "unknown", "Commit of the repository, for the record.")


@dataclasses.dataclass(frozen=True)
class _Measured:
    """What became of one candidate."""

    status: str
    error: float
    detail: str = ""
    timing: Timing = Timing(0.0, 0.0, 0)


class SampleStore:
    """The sample files of one device, added to problem by problem."""

    def __init__(self, folder: pathlib.Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def read(self, op: str) -> list[Sample]:
        """The samples on disk; a last line that was cut off by a kill is dropped and said."""
        path = self._path(op)
        if not path.exists():
            return []
        text = path.read_text(encoding="ascii")
        whole, _, rest = text.rpartition("\n")
        if rest:
            logging.warning("%s: the last line was cut off by a kill, it is dropped", path)
            path.write_text(whole + "\n" if whole else "", encoding="ascii")
        return [sample for _, sample in sample_files.read_samples(path)]

    def append(self, op: str, samples: Sequence[Sample]) -> None:
        """Adds samples durably; `sort` puts the file in order at the end."""
        lines = [sample_files.canonical_json(sample.to_json()) + "\n" for sample in samples]
        with self._path(op).open("a", encoding="ascii", newline="\n") as file:
            file.write("".join(lines))
            file.flush()
            os.fsync(file.fileno())

    def sort(self, op: str) -> None:
        """Rewrites the file in canonical order, with the newest sample of each candidate only."""
        newest = {(sample.key, sample.config): sample for sample in self.read(op)}
        unsorted = self._path(op)
        ordered = unsorted.with_suffix(".sorting")
        sample_files.write_samples(ordered, newest.values())
        ordered.replace(unsorted)

    def write_run(self, run: Run) -> None:
        path = self._folder / "runs.json"
        runs = sample_files.read_runs(path) if path.exists() else {}
        sample_files.write_runs(path, {**runs, run.id: run}.values())

    def drop_unused_runs(self) -> None:
        """Forgets runs of which no sample is left."""
        path = self._folder / "runs.json"
        used = {sample.run for op in _APIS for sample in self.read(op)}
        runs = sample_files.read_runs(path)
        sample_files.write_runs(path, [run for run in runs.values() if run.id in used])

    def write_device(self, record: DeviceRecord) -> None:
        path = self._folder / "device.json"
        if path.exists():
            known = sample_files.read_device(path)
            if not known.fingerprint.same_hardware(record.fingerprint):
                raise app.UsageError(
                    f"--out={self._folder} holds samples of {known.fingerprint}, and this GPU is "
                    f"{record.fingerprint}; give each device a folder of its own"
                )
            aliases = tuple(sorted({*known.aliases, *record.aliases}))
            record = dataclasses.replace(known, aliases=aliases)
        sample_files.write_device(path, record)

    def _path(self, op: str) -> pathlib.Path:
        return self._folder / f"{op}.jsonl"


def _problems() -> list[operands.Problem]:
    unknown = set(_WEIGHTS.value) - set(WEIGHTS)
    if unknown:
        raise app.UsageError(f"--weights={sorted(unknown)} must be among {', '.join(WEIGHTS)}")
    unknown = set(_OPS.value) - set(_APIS)
    if unknown:
        raise app.UsageError(f"--ops={sorted(unknown)} must be among {', '.join(_APIS)}")
    return [
        problem
        for op in _OPS.value
        for name in _WEIGHTS.value
        for m in map(int, _M_VALUES.value)
        for problem in _problems_of_shape(op, m, *WEIGHTS[name])
    ]


def _problems_of_shape(op: str, m: int, n: int, k: int) -> Iterator[operands.Problem]:
    for out_dtype in _OUT_DTYPES.value:
        if op == "scaled_mm":
            for scales in _SCALES.value:
                yield ScaledMmProblem.dense(m=m, n=n, k=k, out_dtype=out_dtype, scales=scales)
        else:
            for layout in _LAYOUTS.value:
                yield MatmulProblem.dense(
                    m=m, n=n, k=k, dtype=out_dtype, out_dtype=out_dtype, layout=layout
                )


def _kernel_sha256(config: Config) -> str:
    record = manifest.packaged().kernels.get(config.kernel)
    return record.sha256 if record else ""


def _run_once(
    problem: operands.Problem, config: Config, device: Device, tensors: operands.Operands
) -> None:
    tensors.poison()
    _APIS[problem.key.op].make_plan(problem, config, device)(*tensors.arguments)
    torch.cuda.synchronize(device.ordinal)


def _check_values(
    problem: operands.Problem,
    config: Config,
    device: Device,
    tensors: operands.Operands,
    expected: torch.Tensor,
    bias: torch.Tensor,
) -> _Measured:
    """Runs a candidate without bias, and with one if it takes that; the error is the larger."""
    worst = 0.0
    for has_bias in (False, True):
        try:
            _run_once(
                dataclasses.replace(problem, has_bias=has_bias),
                config,
                device,
                dataclasses.replace(tensors, bias=bias if has_bias else None),
            )
        except Exception as error:
            if has_bias and isinstance(error, UnsupportedError):
                continue  # a refusal, which look-ups of problems with a bias see too
            logging.error("%s, %s failed:\n%s", problem, config, traceback.format_exc())
            detail = f"{'with' if has_bias else 'without'} bias: {type(error).__name__}: {error}"
            return _Measured("failed", 0.0, detail[:500])
        want = expected + bias.float() if has_bias else expected
        comparison = operands.compare(tensors.out, want)
        if not comparison.is_right:
            detail = f"{'with' if has_bias else 'without'} bias: {comparison}"
            logging.error("%s, %s is wrong: %s", problem, config, detail)
            return _Measured("wrong", min(comparison.error, _LARGEST_ERROR), detail)
        worst = max(worst, comparison.error)
    return _Measured("ok", worst)


def _is_context_lost(device: Device) -> bool:
    try:
        torch.cuda.synchronize(device.ordinal)
        return False
    except RuntimeError:
        return True


def measure(
    problem: operands.Problem, configs: Sequence[Config], device: Device, timer: DeviceTimer
) -> dict[Config, _Measured]:
    """Checks and times the candidates of one problem; stops at one that loses the context."""
    torch_device = torch.device("cuda", device.ordinal)
    tensors = operands.make(problem, torch_device)
    expected = operands.reference(tensors)
    dtype = tensors.out.dtype
    bias = (torch.randn(problem.n, device=torch_device) * problem.k**0.5).to(dtype)
    measured: dict[Config, _Measured] = {}
    for config in configs:
        measured[config] = _check_values(problem, config, device, tensors, expected, bias)
        if measured[config].status == "failed" and _is_context_lost(device):
            # What was right but is not timed yet is measured by the next start.
            return {config: item for config, item in measured.items() if item.status != "ok"}
    del expected
    api = _APIS[problem.key.op]
    plans = {
        config: api.make_plan(problem, config, device)
        for config in configs
        if measured[config].status == "ok"
    }
    arguments = tensors.arguments
    if plans:
        timings = timer.time(
            {
                config: (lambda plan=plan: plan(*arguments))
                for config, plan in plans.items()
            },
            rounds=_ROUNDS.value,
            max_seconds=_SECONDS.value,
            rounds_before_drop=_ROUNDS_BEFORE_DROP.value,
        )
        for config, timing in timings.items():
            measured[config] = dataclasses.replace(measured[config], timing=timing)
    return measured


def _to_sample(
    problem: operands.Problem, config: Config, measured: _Measured, run_id: str
) -> Sample:
    key = problem.key
    return Sample(
        op=key.op,
        n=key.n,
        k=key.k,
        m=key.m,
        a_dtype=key.a_dtype,
        b_dtype=key.b_dtype,
        out_dtype=key.out_dtype,
        scales=key.scales,
        layout=key.layout,
        config=config,
        median_us=round(measured.timing.median_us, 3),
        spread_us=round(measured.timing.spread_us, 3),
        count=measured.timing.count,
        status=measured.status,
        error=float(f"{measured.error:.3e}"),
        kernel_sha256=_kernel_sha256(config),
        run=run_id,
        detail=measured.detail,
    )


def _begin_run(device: Device) -> Run:
    now = datetime.datetime.now(datetime.UTC)
    sm_clock_mhz, memory_clock_mhz = machine.clocks_mhz(device.ordinal)
    name = device.fingerprint.name.lower().replace(" ", "_")
    return Run(
        id=f"{now:%Y-%m-%dT%H%M%SZ}-{name}",
        device=device.fingerprint,
        driver=machine.driver(),
        cuda=torch.version.cuda or machine.UNKNOWN,
        torch=torch.__version__,
        triton=machine.version_of("triton"),
        python=platform.python_version(),
        sm_clock_mhz_before=sm_clock_mhz,
        sm_clock_mhz_after=0,
        memory_clock_mhz_before=memory_clock_mhz,
        memory_clock_mhz_after=0,
        date=now.isoformat(timespec="seconds"),
        commit=_COMMIT.value,
        command=_COMMAND.value or " ".join(["sample", *sys.argv[1:]]),
    )


def _end_run(run: Run, device: Device) -> Run:
    sm_clock_mhz, memory_clock_mhz = machine.clocks_mhz(device.ordinal)
    return dataclasses.replace(
        run, sm_clock_mhz_after=sm_clock_mhz, memory_clock_mhz_after=memory_clock_mhz
    )


def _cost(problem: operands.Problem) -> float:
    """A problem's time in arbitrary units, for the time left: a fixed part, and the arithmetic."""
    return 1.0 + problem.m * problem.n * problem.k / 1e12


def _summary(measured: dict[Config, _Measured]) -> str:
    timed = {config: item for config, item in measured.items() if item.status == "ok"}
    refused = len(measured) - len(timed)
    suffix = f", {refused} wrong or failed" if refused else ""
    if not timed:
        return f"no candidate is right{suffix}"
    best = min(timed, key=lambda config: timed[config].timing.median_us)
    timing = timed[best].timing
    return f"best of {len(timed)}: {best} {timing.median_us:.1f} us{suffix}"


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"only flags are taken, found {argv[1:]}")
    torch.cuda.set_device(_DEVICE_ORDINAL.value)
    device = cuda_device(_DEVICE_ORDINAL.value)
    store = SampleStore(pathlib.Path(_OUT.value))
    store.write_device(DeviceRecord(fingerprint=device.fingerprint, aliases=tuple(_ALIASES.value)))
    known = {
        (sample.key, sample.config, sample.kernel_sha256): sample
        for op in _OPS.value
        for sample in store.read(op)
    }
    work = []
    for problem in _problems():
        configs = _APIS[problem.key.op].candidates(problem, device)
        found = [known.get((problem.key, config, _kernel_sha256(config))) for config in configs]
        if all(found) and not _REMEASURE.value:
            continue
        # What failed before may have cost the context; it is measured again only if told to.
        skipped = {
            sample.config
            for sample in found
            if sample is not None and sample.status == "failed" and not _REMEASURE.value
        }
        work.append((problem, [config for config in configs if config not in skipped]))
    run = _begin_run(device)
    store.write_run(run)
    timer = DeviceTimer(device.ordinal)
    logging.info("%d problems to measure on %s", len(work), device)
    exit_code, start = 0, time.monotonic()
    total_cost = sum(_cost(problem) for problem, _ in work)
    done_cost = 0.0
    for idx, (problem, configs) in enumerate(work, start=1):
        try:
            measured = measure(problem, configs, device, timer)
        except Exception:
            logging.error("%s could not be measured:\n%s", problem, traceback.format_exc())
            exit_code = 1
            if _is_context_lost(device):
                exit_code = _LOST_CONTEXT_EXIT_CODE
                break
            continue
        store.append(
            problem.key.op,
            [_to_sample(problem, config, item, run.id) for config, item in measured.items()],
        )
        done_cost += _cost(problem)
        elapsed = time.monotonic() - start
        left = elapsed / done_cost * (total_cost - done_cost)
        logging.info(
            "[%d/%d] %s: %s; %.0f s gone, about %.0f s left",
            idx,
            len(work),
            problem,
            _summary(measured),
            elapsed,
            left,
        )
        if any(item.status == "wrong" for item in measured.values()):
            exit_code = exit_code or 1
        if _is_context_lost(device):
            logging.error("a candidate destroyed the CUDA context; start again to go on after it")
            exit_code = _LOST_CONTEXT_EXIT_CODE
            break
        torch.cuda.empty_cache()
    store.write_run(_end_run(run, device))
    for op in _OPS.value:
        if store.read(op):
            store.sort(op)
    store.drop_unused_runs()
    sys.exit(exit_code)


if __name__ == "__main__":
    app.run(main)
