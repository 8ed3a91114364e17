"""Measures the candidates of one problem on this GPU: right values first, then the time.

Each candidate runs once on fresh random operands over an output of NaN, without a bias and, if it
and its op take one, with a bias. Every element is compared with float64. The right ones are timed
against each other (device_timer.py). Wrong and failed ones get a sample that says why.

A kernel that hangs or destroys the CUDA context takes its process along. `session.tune` therefore
runs this in a child process, and learns from `announce` and `emit` how far it came.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from stoneware.errors import StonewareError, UnsupportedError
from stoneware.kernels import manifest
from stoneware.kernels.config import AnyConfig, Config
from stoneware.kernels.key import Key
from stoneware.measuring import machine, operands
from stoneware.measuring.device_timer import DeviceTimer, Timing, TimingFailed
from stoneware.measuring.settings import ON_MISS, Settings
from stoneware.runtime.device import Device
from stoneware.tuning.lookup import Answer
from stoneware.tuning.samples import Sample

MakePlan = Callable[[Any, Config, Device], Callable[..., Any]]

LONGEST_DETAIL = 500
"""Characters of a sample's detail."""

_LARGEST_ERROR = 1e9
"""Stands for infinity, which JSON lacks."""

_LOG = logging.getLogger("stoneware.measuring")


class Operation(Protocol):
    """The part of `stoneware.ops.dispatch.Operation` that measuring uses."""

    def candidates(self, problem: Any, device: Device) -> list[Config]: ...

    def preferred(self, key: Key, compute_capability: tuple[int, int], manifest: manifest.Manifest) -> list[Config]: ...

    def answers(self, key: Key, device: Device, most_choices: int) -> Iterator[Answer]: ...

    def make_plan(self, problem: Any, config: Config, device: Device) -> Callable[..., Any]: ...


class ContextLostError(StonewareError, RuntimeError):
    """A candidate destroyed the CUDA context; this process can measure no more."""


def of_problem(
    operation: Operation, problem: Any, device: Device, fastest: int | None = None
) -> tuple[list[Config], list[Config]]:
    """The always-timed candidates of a problem (the default config, the vendor library's), and the others.

    Args:
      fastest: the most others, those that the tables expect to be the fastest; None for all.
    """
    configs = operation.candidates(problem, device)
    heuristic = operation.preferred(problem.key, device.compute_capability, manifest.packaged())
    default = [config for config in heuristic if config in configs][:1]
    always = [*default, *(config for config in configs if config.backend == "vendor" and config not in default)]
    others = [config for config in configs if config not in always]
    if fastest is None or device.fingerprint is None:
        return always, others
    # The choices may have the always-timed candidates.
    answers = operation.answers(problem.key, device, fastest + len(always))
    return always, _expected(answers, others)[:fastest] or others


def _expected(answers: Iterator[Answer], configs: Sequence[Config]) -> list[Config]:
    """The configs that the tables expect to be the fastest, the best first; none if nothing near was measured.

    Takes turns between what was measured at this very problem and what is modelled from near ones, so
    that kernels newer than the measurements are among them.
    """
    entries = [answer.entry.choices for answer in itertools.islice(answers, 2)]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*entries))
    expected = dict.fromkeys(choice.config for choice in turns if choice)
    allowed: dict[AnyConfig, Config] = {config: config for config in configs}
    return [allowed[config] for config in expected if config in allowed]


def kernel_sha256(config: Config) -> str:
    """Digest of the code of the config's kernel; empty if it is not one of ours."""
    record = manifest.packaged().kernels.get(config.kernel)
    return record.measured_sha256 if record else ""


@dataclass(kw_only=True)
class Race:
    """Checks candidates of one problem, and times the right ones against each other.

    Attributes:
      problem: an op's Problem.
      device: where it runs; a CPU in tests.
      run_id: of the Run that the samples belong to.
      make_plan: the op's, unless a test replaces it.
      emit: called with samples as soon as they are final.
      announce: called with a candidate before each of its runs.
    """

    problem: Any
    device: Device
    timer: DeviceTimer
    settings: Settings
    run_id: str
    make_plan: MakePlan
    emit: Callable[[list[Sample]], None]
    announce: Callable[[Any], None] = lambda config: None

    def __post_init__(self) -> None:
        where = torch.device("cpu" if self.device.ordinal is None else f"cuda:{self.device.ordinal}")
        self._tensors = operands.make(operands.with_bias(self.problem, False), where)
        self._expected = operands.reference(self._tensors)
        self._takes_bias = operands.takes_bias(self.problem)
        self._has_bias = self._takes_bias and self.problem.has_bias
        self._bias = operands.bias(self.problem, self._tensors.out.dtype, where)
        self.timer.stopwatch.announce = self.announce

    def run(self, configs: Sequence[Config]) -> None:
        """Emits a sample of each candidate.

        Raises:
          ContextLostError: a candidate destroyed the CUDA context; its sample was emitted.
        """
        errors: dict[Config, float] = {}
        for config in configs:
            self.announce(config)
            error = self._check(config)
            if error is not None:
                errors[config] = error
        timings = self._time(list(errors))
        if timings:
            self.emit([self._sample(config, "ok", errors[config], timing) for config, timing in timings.items()])

    def _check(self, config: Config) -> float | None:
        """Runs a candidate with and without bias; returns the larger error, or None if it is not right."""
        worst = 0.0
        variants = (False, True) if self._takes_bias and not self._has_bias else (self._has_bias,)
        for has_bias in variants:
            variant = f"{'with' if has_bias else 'without'} bias"
            try:
                call = self._call(config, has_bias)
                self._tensors.poison()
                call()
                self._synchronize()
            except Exception as error:
                if has_bias and not self._has_bias and isinstance(error, UnsupportedError):
                    continue  # a refusal, which look-ups of problems with a bias see too
                self._failed(config, error, variant)
                return None
            want = self._expected + self._bias.float() if has_bias else self._expected
            comparison = operands.compare(self._tensors.out, want, self.problem)
            if not comparison.is_right:
                detail = f"{variant}: {comparison}"
                _LOG.error("%s, %s is wrong: %s", self.problem, config, detail)
                self.emit([self._sample(config, "wrong", min(comparison.error, _LARGEST_ERROR), detail=detail)])
                return None
            worst = max(worst, comparison.error)
        return worst

    def _time(self, configs: list[Config]) -> Mapping[Config, Timing]:
        """Times candidates; those that fail meanwhile are left out."""
        while configs:
            try:
                return self.timer.time(
                    {config: self._call(config, self._has_bias) for config in configs},
                    rounds=self.settings.rounds,
                    max_seconds=self.settings.seconds_per_problem,
                    rounds_before_drop=self.settings.rounds_before_drop,
                )
            except TimingFailed as failed:
                bad = next((config for config in configs if config == failed.name), None)
                if bad is None:
                    raise  # it is not a candidate that failed
                configs.remove(bad)
                self._failed(bad, failed.__cause__, "while it was timed")
        return {}

    def _call(self, config: Config, has_bias: bool) -> Callable[[], object]:
        plan = self.make_plan(operands.with_bias(self.problem, has_bias), config, self.device)
        bias = self._bias if has_bias else None
        tensors = self._tensors.replace(bias=bias) if self._takes_bias else self._tensors
        arguments = tensors.arguments
        return lambda: plan(*arguments)

    def _failed(self, config: Config, error: BaseException | None, when: str) -> None:
        """Emits the sample; raises ContextLostError if the candidate took the context along."""
        _LOG.error("%s, %s failed %s", self.problem, config, when, exc_info=error)
        self.emit([self._sample(config, "failed", detail=f"{when}: {type(error).__name__}: {error}")])
        try:
            self._synchronize()
        except RuntimeError as lost:
            raise ContextLostError(
                f"{config} destroyed the CUDA context of this process: {lost}; start a new process"
            ) from lost

    def _sample(
        self, config: Config, status: str, error: float = 0.0, timing: Timing = Timing(), detail: str = ""
    ) -> Sample:
        return Sample(
            key=self.problem.key,
            config=config,
            **timing.figures,
            status=status,
            error=float(f"{error:.3e}"),
            kernel_sha256=kernel_sha256(config),
            run=self.run_id,
            detail=detail[:LONGEST_DETAIL],
        )

    def _synchronize(self) -> None:
        if self.device.kind == "cuda":
            torch.cuda.synchronize(self.device.ordinal)


def tune_on_miss(operation: Operation, problem: Any, device: Device, *, measures_all: bool = False) -> None:
    """Measures one problem in this process, and puts the samples into the user's store.

    For a program that runs under `sw.tuning("on_miss")`: short, without a child process, and without
    a trace in torch's random numbers. If the samples cannot be stored, one warning is logged and
    they are kept in memory. The caller holds `device_timer.MEASURING`.

    Args:
      measures_all: measure every candidate, instead of those that are expected to be fastest.

    Raises:
      ContextLostError: a candidate destroyed the CUDA context.
    """
    from stoneware.tuning import policy

    ordinal = device.ordinal or 0  # a CPU, in tests, has none
    run = machine.new_run(ordinal, ON_MISS.command)
    always, others = of_problem(operation, problem, device, None if measures_all else ON_MISS.fastest)
    try:
        with torch.random.fork_rng(devices=[ordinal] if device.kind == "cuda" else []), torch.no_grad():
            Race(
                problem=problem,
                device=device,
                timer=DeviceTimer(ordinal),
                settings=ON_MISS,
                run_id=run.id,
                make_plan=operation.make_plan,
                emit=lambda samples: policy.keep(run, samples),
            ).run([*always, *others])
    except torch.OutOfMemoryError as error:
        _LOG.warning("%s is not measured, the GPU's memory is full: %s; free memory and call again", problem, error)
        return
    policy.keep(machine.end_run(run, ordinal), [])
