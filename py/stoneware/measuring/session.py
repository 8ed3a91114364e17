"""Tuning: measures problems on this machine's GPU and puts each sample into a store as it is taken.

A kernel that hangs cannot be interrupted, and one that faults takes the CUDA context of its process
along. So another process measures (child.py), and this one watches it (worker.py): it knows which
candidate runs, kills the process if that takes too long, writes down what happened to the candidate
and goes on without it in a new process. The measuring process never writes the store.

A session that is interrupted or killed keeps what it stored. The next one does not measure again
what has a sample of the same kernel, by its digest, on the same hardware; a candidate that was
wrong, failed or hung has one too. The default config and the vendor library's race wherever
something is measured, so that there is always a comparison of one run.

Under torchrun problem i of the full list belongs to rank i % world_size, whatever was done before,
so that each is measured once.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stoneware.kernels.config import AnyConfig, Config
from stoneware.kernels.key import AnyKey
from stoneware.measuring import candidates, machine, progress, search, workloads
from stoneware.measuring.ranks import Ranks
from stoneware.measuring.settings import ON_MISS, Settings
from stoneware.measuring.worker import COMMAND, Worker, WorkerDied, WorkerError, WorkerHung
from stoneware.runtime.device import Device, cuda_device
from stoneware.tuning.samples import Run, Sample

if TYPE_CHECKING:
    from stoneware.ops.dispatch import Operation
    from stoneware.ops.spec import Problem
    from stoneware.tuning.store import Store

_MOST_LOSSES = 2
"""How often a problem may lose its process with no candidate to blame, before it is given up."""

_MOST_GIVEN_UP = 3
"""How many problems in a row may be given up so: a GPU that does not come back fails them all."""

_LONGEST_DETAIL = 500

_LOG = logging.getLogger("stoneware.measuring")


@dataclasses.dataclass(kw_only=True)
class Summary:
    """What a session did.

    Attributes:
      run: id of the run.
      num_problems: of this rank.
      num_known: problems that had all their samples.
      num_measured: problems that were measured.
      statuses: how many samples were stored, by status.
      failures: (problem, reason) of problems that could not be measured.
      seconds: how long it took.
    """

    run: str
    num_problems: int = 0
    num_known: int = 0
    num_measured: int = 0
    statuses: Counter[str] = dataclasses.field(default_factory=Counter)
    failures: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_samples(self) -> int:
        return self.statuses.total()

    def __str__(self) -> str:
        bad = [f"{self.statuses[name]} {name}" for name in ("wrong", "failed", "hung")
               if self.statuses[name]]
        return (
            f"{self.num_measured} problems measured, {self.num_known} known, "
            f"{len(self.failures)} not measurable; {self.num_samples} samples"
            + (f" ({', '.join(bad)})" if bad else "") + f" in {self.seconds:.0f} s"
        )


def tune(
    problems: Sequence[Problem],
    store: Store,
    ordinal: int = 0,
    settings: Settings = Settings(),
    reporter: progress.Reporter | None = None,
    *,
    ranks: Ranks | None = None,
    command: Sequence[str] = COMMAND,
) -> Summary:
    """Measures the candidates of problems on a GPU, and stores each sample as it is taken.

    Args:
      problems: of all ranks; see workloads.problems.
      store: what it has is not measured again, unless settings.remeasure.
      ordinal: torch's number of the GPU.
      settings: how thoroughly.
      reporter: None takes a progress bar on a terminal, and lines in the log elsewhere.
      ranks: None takes torchrun's, see Ranks.from_environment.
      command: the measuring process, for tests.

    Returns:
      What was done.

    Raises:
      KeyboardInterrupt: on Ctrl-C, once the measuring process is ended and the run's end stored.
      StoreError: the store cannot be written; what it has is kept.
      WorkerError: the measuring process does not start, or the GPU does not answer any more.
      DriverError, UnsupportedError: there is no such GPU.
    """
    device = cuda_device(ordinal)
    run = machine.new_run(ordinal, settings.command, settings.commit)
    session = Session(
        store=store, run=run, device=device, settings=settings,
        reporter=reporter or progress.default(), command=command,
        candidates_of=lambda problem: candidates.of_problem(
            workloads.operation(problem.key.op), problem, device
        ),
        always_of=lambda problem, found: candidates.racers(
            workloads.operation(problem.key.op), problem, device, found
        ),
        end_run=lambda: machine.end_run(run, ordinal),
    )
    return session.measure(problems, ranks or Ranks.from_environment())


@dataclasses.dataclass(kw_only=True)
class Session:
    """One run over problems; `tune` makes it for a GPU, tests for none.

    Attributes:
      store, run, device, settings, reporter, command: as in `tune`.
      candidates_of: configs of a problem.
      always_of: those of them that always race, the default first.
      end_run: the run with its clocks at the end.
      digest: of a config's kernel.
    """

    store: Store
    run: Run
    device: Device
    settings: Settings
    reporter: progress.Reporter
    command: Sequence[str]
    candidates_of: Callable[[Any], list[Config]]
    always_of: Callable[[Any, Sequence[Config]], list[Config]]
    end_run: Callable[[], Run]
    digest: Callable[[Config], str] = candidates.kernel_sha256

    def __post_init__(self) -> None:
        self._worker: Worker | None = None
        self._num_given_up = 0
        self._summary = Summary(run=self.run.id)

    def measure(self, problems: Sequence[Problem], ranks: Ranks) -> Summary:
        """Measures those of the problems that belong to this rank."""
        begin, summary = time.monotonic(), self._summary
        own = list(problems)[ranks.rank :: ranks.world_size]
        known = self._known()
        work = [task for problem in own if (task := self._task(problem, known)) is not None]
        summary.num_problems, summary.num_known = len(own), len(own) - len(work)
        total_cost = sum(workloads.cost(task.problem) for task in work)
        self.reporter.start(len(own), summary.num_known, total_cost, str(self.device))
        outcome = "interrupted; what was stored is kept, and the next start goes on after it"
        try:
            for task in work:
                self.reporter.begin(str(task.problem))
                said = self._measure(task)
                self.reporter.end(str(task.problem), workloads.cost(task.problem), said)
            if self._worker is not None:
                self._worker.close()
                self._worker = None
            summary.seconds = time.monotonic() - begin
            outcome = str(summary)
        finally:
            if self._worker is not None:
                self._worker.kill()
            try:
                if summary.num_samples:
                    self.store.add(self.end_run(), [])
            finally:
                self.reporter.finish(outcome)
        return summary

    def _known(self) -> dict[AnyKey, dict[tuple[AnyConfig, str], Sample]]:
        """Samples of this hardware by problem, then by candidate and digest."""
        known: dict[AnyKey, dict[tuple[AnyConfig, str], Sample]] = {}
        if self.settings.remeasure:
            return known
        for run, sample in self.store.samples():
            if run.device.same_hardware(self.run.device):
                known.setdefault(sample.key, {})[sample.config, sample.kernel_sha256] = sample
        return known

    def _task(
        self, problem: Problem,
        known: Mapping[AnyKey, Mapping[tuple[AnyConfig, str], Sample]],
    ) -> _Task | None:
        """What is left to measure of a problem; None if nothing is."""
        configs = self.candidates_of(problem)
        of_problem = known.get(problem.key, {})
        found = {
            config: sample for config in configs
            if (sample := of_problem.get((config, self.digest(config)))) is not None
        }
        is_searched = len(configs) > search.EXHAUSTIVE_LIMIT
        wanted = min(self.settings.most_trials, len(configs)) if is_searched else len(configs)
        if not configs or len(found) >= wanted:
            return None
        medians = {
            config: sample.median_us if sample.status == "ok" else None
            for config, sample in found.items()
        }
        right = {config: us for config, us in medians.items() if us is not None}
        # With the best of before, so that a new candidate meets what it has to beat.
        racing = [*self.always_of(problem, configs), *sorted(right, key=right.get)[:1]]
        always = [
            config for config in dict.fromkeys(racing) if medians.get(config, 0.0) is not None
        ]
        missing = [config for config in configs if config not in found and config not in always]
        return _Task(problem=problem, always=always, missing=missing, known=medians)

    def _measure(self, task: _Task) -> str:
        """Measures one problem, in as many processes as it takes; returns the outcome."""
        taken: dict[Config, Sample] = {}
        reason = ""
        num_losses = 0
        while not reason:
            always = [config for config in task.always if _is_in_race(taken.get(config))]
            missing = [config for config in task.missing if config not in taken]
            if not missing and all(config in taken for config in always):
                break
            configs, at, num_before = [*always, *missing], None, len(taken)
            try:
                worker = self._start()
                worker.send(task.to_json(configs, len(always), taken, num_losses > 0))
                for event in worker.events(self.settings.hang_limit_s):
                    if event["event"] == "at":
                        at = event["config"]
                    elif event["event"] == "samples":
                        self._store(map(Sample.from_json, event["samples"]), taken)
                    elif event["event"] == "error":
                        reason = event["detail"]
                        break
                    elif event["event"] == "lost":
                        raise WorkerDied(event["detail"])
                    elif event["event"] == "done":
                        return self._outcome(taken)
            except (WorkerHung, WorkerDied) as error:
                self._end_worker()
                culprit = None if at is None else configs[at]
                self.reporter.note(f"{task.problem}: {error}")
                if culprit is not None and culprit not in taken:
                    status = "hung" if isinstance(error, WorkerHung) else "failed"
                    self._store([self._sample(task.problem, culprit, status, str(error))], taken)
                if len(taken) == num_before:
                    num_losses += 1
                    if num_losses == _MOST_LOSSES:
                        reason = str(error)
                        self._give_up(reason)
        if reason:
            self._summary.failures.append((str(task.problem), reason))
            self.reporter.note(f"{task.problem} cannot be measured: {reason}")
            return f"cannot be measured: {reason}"
        return self._outcome(taken)

    def _give_up(self, reason: str) -> None:
        self._num_given_up += 1
        if self._num_given_up == _MOST_GIVEN_UP:
            raise WorkerError(
                f"{_MOST_GIVEN_UP} problems in a row could not be measured, though no candidate of "
                f"theirs ran, so the GPU or its driver is at fault: {reason}; check nvidia-smi, "
                "and start again to go on"
            )

    def _start(self) -> Worker:
        if self._worker is None:
            hello = {
                "device": self.device.ordinal, "run": self.run.id,
                "settings": self.settings.to_json(),
            }
            self._worker = Worker(self.command, hello, self.settings.start_limit_s)
        return self._worker

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.kill()
        self._worker = None

    def _store(self, samples: Any, taken: dict[Config, Sample]) -> None:
        """Stores those that are new: a candidate that always races is timed again after a
        restart."""
        new = [sample for sample in samples if sample.config not in taken]
        if new:
            self.store.add(self.run, new)
            taken.update((sample.config, sample) for sample in new)
            self._summary.statuses.update(sample.status for sample in new)
            self.reporter.stored(new)

    def _sample(
        self, problem: Problem, config: Config, status: str, detail: str
    ) -> Sample:
        return Sample(
            key=problem.key, config=config, median_us=0.0, spread_us=0.0, count=0, status=status,
            kernel_sha256=self.digest(config), run=self.run.id, detail=detail[:_LONGEST_DETAIL],
        )

    def _outcome(self, taken: Mapping[Config, Sample]) -> str:
        self._summary.num_measured += 1
        self._num_given_up = 0
        right = [sample for sample in taken.values() if sample.status == "ok"]
        bad = len(taken) - len(right)
        suffix = f", {bad} wrong, failed or hung" if bad else ""
        if not right:
            return f"no candidate is right{suffix}"
        best = min(right, key=lambda sample: sample.median_us)
        return f"best of {len(right)}: {best.config} {best.median_us:.1f} us{suffix}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Task:
    """What is left to measure of a problem.

    Attributes:
      problem: which.
      always: configs that race in any case.
      missing: other configs without a sample.
      known: medians of configs with one; None for one that is not right.
    """

    problem: Problem
    always: list[Config]
    missing: list[Config]
    known: dict[Config, float | None]

    def to_json(
        self, configs: Sequence[Config], num_always: int, taken: Mapping[Config, Sample],
        is_careful: bool,
    ) -> dict[str, Any]:
        """The line for the measuring process, see child.py."""
        known = {
            **self.known,
            **{
                config: sample.median_us if sample.status == "ok" else None
                for config, sample in taken.items()
            },
        }
        return {
            "problem": workloads.problem_to_json(self.problem),
            "configs": [config.to_json() for config in configs],
            "always": list(range(num_always)),
            "known": [[config.to_json(), us] for config, us in known.items()],
            "careful": is_careful,
        }


def _is_in_race(sample: Sample | None) -> bool:
    return sample is None or sample.status == "ok"


def tune_on_miss(operation: Operation, problem: Problem, device: Device) -> None:
    """Measures one problem in this process, and puts the samples into the user's store.

    For a program that runs under `sw.tuning("on_miss")`: short, without a process of its own, and
    without a trace in torch's random numbers. If the samples cannot be stored, the log says so once
    and they are kept in memory.

    Args:
      operation: the op.
      problem: what to measure.
      device: a GPU.

    Raises:
      ContextLostError: a candidate destroyed the CUDA context.
    """
    import torch

    from stoneware.measuring.device_timer import DeviceTimer
    from stoneware.tuning import policy as tuning

    run = machine.new_run(device.ordinal, ON_MISS.command)
    try:
        gpus = [device.ordinal] if device.kind == "cuda" else []
        with torch.random.fork_rng(devices=gpus), torch.no_grad():
            candidates.measure(
                problem, candidates.of_problem(operation, problem, device), device,
                DeviceTimer(device.ordinal), ON_MISS, run.id,
                always=candidates.racers(
                    operation, problem, device, operation.candidates(problem, device)
                ),
                make_plan=operation.make_plan,
                emit=lambda samples: tuning.keep(run, samples),
            )
    except torch.OutOfMemoryError as error:
        _LOG.warning("%s is not measured, the GPU's memory is full: %s", problem, error)
        return
    tuning.keep(machine.end_run(run, device.ordinal), [])
