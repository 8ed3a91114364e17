"""Measures the candidates of one problem on this GPU: right values first, then the time.

Each candidate runs once on fresh random operands over an output of NaN, without a bias and, if it
and its op take one, with; every element is compared with float64. What is right is timed against
the others (device_timer.py); what is wrong or fails is written down as such, with the reason.

A kernel that hangs or destroys the CUDA context takes this process along: `session.tune` runs it in
one of its own, and passes `announce` and `emit` to know how far it came.
"""

from __future__ import annotations

import dataclasses
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from stoneware.errors import StonewareError, UnsupportedError
from stoneware.kernels import manifest
from stoneware.kernels.config import Config
from stoneware.measuring import operands, search, workloads
from stoneware.measuring.device_timer import DeviceTimer, Timing, TimingFailed
from stoneware.measuring.settings import Settings
from stoneware.runtime.device import Device
from stoneware.tuning.samples import Sample

if TYPE_CHECKING:
    from stoneware.ops.dispatch import Operation
    from stoneware.ops.product import Product

MakePlan = Callable[[Any, Config, Device], Callable[..., Any]]

_LARGEST_ERROR = 1e9
"""Stands for infinity, which JSON has not."""

LONGEST_DETAIL = 500

_LOG = logging.getLogger("stoneware.measuring")


class ContextLostError(StonewareError, RuntimeError):
    """A candidate destroyed the CUDA context; this process can measure no more."""


def of_problem(operation: Operation, problem: Any, device: Device) -> list[Config]:
    """The candidates of a problem, the always-timed ones first."""
    found = operation.candidates(problem, device)
    always = always_timed(operation, problem, device, found)
    return [*always, *(config for config in found if config not in always)]


def always_timed(operation: Operation, problem: Any, device: Device, found: Sequence[Config]) -> list[Config]:
    """The candidates in `found` that are always timed: the default config and the vendor library's."""
    rule = operation.preferred(problem.key, device.compute_capability, manifest.packaged())
    default = next((config for config in rule if config in found), None)
    always = [config for config in (default,) if config is not None]
    return always + [config for config in found if config.backend == "vendor" and config not in always]


def kernel_sha256(config: Config) -> str:
    """Digest of the code of the config's kernel; empty if it is not one of ours."""
    record = manifest.packaged().kernels.get(config.kernel)
    return record.measured_sha256 if record else ""


def measure(
    problem: Product,
    configs: Sequence[Config],
    device: Device,
    timer: DeviceTimer,
    settings: Settings,
    run_id: str,
    *,
    always: Sequence[Config] = (),
    known: Mapping[Config, float | None] | None = None,
    make_plan: MakePlan | None = None,
    announce: Callable[[Config], None] = lambda config: None,
    emit: Callable[[list[Sample]], None] = lambda samples: None,
) -> list[Sample]:
    """Checks and times candidates.

    Args:
      problem: what to run.
      configs: the candidates. Above search.EXHAUSTIVE_LIMIT not all of them are measured.
      device: where; a CPU for tests.
      timer: of that device.
      settings: how thoroughly.
      run_id: of the Run that the samples belong to.
      always: the candidates that a search races against each other one.
      known: medians in microseconds that a search may build on; None for a config that is wrong.
      make_plan: in place of the op's own, for tests.
      announce: called with a candidate before each of its runs.
      emit: called with samples as soon as they are final.

    Returns:
      A sample of each candidate that was measured.

    Raises:
      ContextLostError: a candidate destroyed the CUDA context; its sample was emitted.
    """
    make_plan = make_plan or workloads.operation(problem.key.op).make_plan
    timer.stopwatch.announce = announce
    known = known or {}
    race = _Race(problem, device, timer, settings, run_id, make_plan, announce, emit)
    search.run(configs, race.run, always=always, known=known, most_trials=max(1, settings.most_trials - len(known)))
    return list(race.samples.values())


_NOT_TIMED = Timing(0.0, 0.0, 0)


@dataclasses.dataclass
class _Measured:
    """What became of one candidate."""

    status: str
    error: float
    detail: str = ""
    timing: Timing = _NOT_TIMED


class _Race:
    """One problem's operands, and the candidates that were checked on them."""

    def __init__(
        self,
        problem: Product,
        device: Device,
        timer: DeviceTimer,
        settings: Settings,
        run_id: str,
        make_plan: MakePlan,
        announce: Callable[[Config], None],
        emit: Callable[[list[Sample]], None],
    ) -> None:
        self.samples: dict[Config, Sample] = {}
        self._problem, self._device, self._timer = problem, device, timer
        self._settings, self._run_id = settings, run_id
        self._make_plan, self._announce, self._emit = make_plan, announce, emit
        where = torch.device(device.kind, device.ordinal) if device.kind == "cuda" else "cpu"
        self._tensors = operands.make(operands.with_bias(problem, False), where)
        self._expected = operands.reference(self._tensors)
        self._takes_bias = operands.takes_bias(problem)
        self._bias = operands.bias(problem, self._tensors.out.dtype, where)
        self._checked: dict[Config, _Measured] = {}

    def run(self, configs: Sequence[Config]) -> dict[Config, float | None]:
        """Checks those that were not, and times the right ones against each other; their medians
        in microseconds, or None."""
        for config in configs:
            if config not in self._checked:
                self._announce(config)
                self._checked[config] = self._check(config)
                if self._checked[config].status != "ok":
                    self._finish([config])
        timings = self._time([c for c in configs if self._checked[c].status == "ok"])
        for config, timing in timings.items():
            if config not in self.samples:
                self._checked[config].timing = timing
        self._finish([config for config in timings if config not in self.samples])
        return {config: timings[config].median_us if config in timings else None for config in configs}

    def _check(self, config: Config) -> _Measured:
        """Runs a candidate with and without bias, or as its op has it; the error is the larger."""
        worst = 0.0
        for has_bias in self._variants():
            variant = f"{'with' if has_bias else 'without'} bias"
            try:
                call = self._call(config, has_bias)
                self._tensors.poison()
                call()
                self._synchronize()
            except Exception as error:
                if has_bias and not self._has_bias and isinstance(error, UnsupportedError):
                    continue  # a refusal, which look-ups of problems with a bias see too
                return self._failed(config, error, variant)
            want = self._expected + self._bias.float() if has_bias else self._expected
            comparison = operands.compare(self._tensors.out, want, self._problem)
            if not comparison.is_right:
                detail = f"{variant}: {comparison}"
                _LOG.error("%s, %s is wrong: %s", self._problem, config, detail)
                return _Measured("wrong", min(comparison.error, _LARGEST_ERROR), detail)
            worst = max(worst, comparison.error)
        return _Measured("ok", worst)

    @property
    def _has_bias(self) -> bool:
        return self._takes_bias and self._problem.has_bias  # type: ignore[attr-defined]

    def _variants(self) -> tuple[bool, ...]:
        """Whether each of the calls that are checked has a bias."""
        if not self._takes_bias:
            return (False,)
        return (True,) if self._has_bias else (False, True)

    def _time(self, configs: Sequence[Config]) -> dict[Config, Timing]:
        left = list(configs)
        while left:
            try:
                return self._timer.time(
                    {config: self._call(config, self._has_bias) for config in left},
                    rounds=self._settings.rounds,
                    max_seconds=self._settings.seconds_per_problem,
                    rounds_before_drop=self._settings.rounds_before_drop,
                    drop_ratio=self._settings.drop_ratio,
                )
            except TimingFailed as failed:
                if failed.name not in left:
                    raise  # it is not a candidate that failed
                left.remove(failed.name)
                cause = failed.__cause__
                self._checked[failed.name] = self._failed(failed.name, cause, "while it was timed")
                self._finish([failed.name])
        return {}

    def _call(self, config: Config, has_bias: bool) -> Callable[[], object]:
        problem = operands.with_bias(self._problem, has_bias)
        plan = self._make_plan(problem, config, self._device)
        bias = self._bias if has_bias else None
        tensors = self._tensors.replace(bias=bias) if self._takes_bias else self._tensors
        arguments = tensors.arguments
        return lambda: plan(*arguments)

    def _failed(self, config: Config, error: BaseException | None, when: str) -> _Measured:
        text = "".join(traceback.format_exception(error)) if error is not None else ""
        _LOG.error("%s, %s failed %s:\n%s", self._problem, config, when, text)
        detail = f"{when}: {type(error).__name__}: {error}"
        return _Measured("failed", 0.0, detail)

    def _finish(self, configs: Sequence[Config]) -> None:
        """Makes and emits the samples; notices that the last of them took the context along."""
        made = [self._sample(config, self._checked[config]) for config in configs]
        self.samples.update(zip(configs, made))
        if made:
            self._emit(made)
        if any(sample.status == "failed" for sample in made):
            try:
                self._synchronize()
            except RuntimeError as error:
                raise ContextLostError(
                    f"{configs[-1]} destroyed the CUDA context of this process; measure in a new one: {error}"
                ) from error

    def _sample(self, config: Config, measured: _Measured) -> Sample:
        timing = measured.timing
        return Sample(
            key=self._problem.key,
            config=config,
            # A call that is faster than the resolution still took some time.
            median_us=max(round(timing.median_us, 3), 0.001) if timing.count else 0.0,
            spread_us=round(timing.spread_us, 3),
            count=timing.count,
            sm_clock_mhz_before=timing.sm_clock_mhz_before,
            sm_clock_mhz_after=timing.sm_clock_mhz_after,
            status=measured.status,
            error=float(f"{measured.error:.3e}"),
            kernel_sha256=kernel_sha256(config),
            run=self._run_id,
            detail=measured.detail[:LONGEST_DETAIL],
        )

    def _synchronize(self) -> None:
        if self._device.kind == "cuda":
            torch.cuda.synchronize(self._device.ordinal)
