"""Tuning: measures problems on this machine's GPU and puts each sample into a store as it is taken.

A kernel that hangs cannot be interrupted, and one that faults takes the CUDA context of its process
along. So another process measures (child.py), and this one watches it: it knows which candidate
runs, kills the process if that takes too long, writes down what happened to the candidate and goes
on without it in a new process. The measuring process never writes the store.

A session that is interrupted or killed keeps what it stored. The next one does not measure again
what has a sample of the same kernel, by its digest, on the same hardware; a candidate that was
wrong, failed or hung has one too. The default config and the vendor library's are timed wherever
something is measured, so that there is always a comparison of one run.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stoneware.kernels.config import AnyConfig, Config
from stoneware.kernels.key import AnyKey
from stoneware.measuring import candidates, machine, search, workloads
from stoneware.measuring.child import COMMAND, Worker, WorkerDied, WorkerError, WorkerHung
from stoneware.measuring.progress import Reporter
from stoneware.measuring.settings import ON_MISS, Settings
from stoneware.runtime.device import Device, cuda_device
from stoneware.tuning.samples import Run, Sample

if TYPE_CHECKING:
    from stoneware.ops.dispatch import Operation
    from stoneware.ops.product import Product
    from stoneware.tuning.store import Store

_MOST_LOSSES = 2
"""How often a problem may lose its process with no candidate to blame, before it is given up."""

_MOST_GIVEN_UP = 3
"""How many problems in a row may be given up so: a GPU that does not come back fails them all."""

_LOG = logging.getLogger("stoneware.measuring")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those that torchrun started; problem i belongs to rank i % world_size.

    Attributes:
      rank: of this process, from 0.
      world_size: how many there are.
      local_rank: among those of this machine; the GPU to use.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> Ranks:
        """From torchrun's RANK, WORLD_SIZE and LOCAL_RANK; without them the only process.

        Raises:
          ValueError: one is no number, or they do not fit together.
        """
        found = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        for name in found:
            found[name] = os.environ.get(name) or found[name]
            if not found[name].isdecimal():
                raise ValueError(f"{name}={found[name]!r} must be a number, as torchrun sets it; unset it")
        ranks = cls(**{name.lower(): int(text) for name, text in found.items()})
        if ranks.rank >= ranks.world_size:
            raise ValueError(
                f"RANK={ranks.rank} must be below WORLD_SIZE={ranks.world_size}; start with torchrun, or unset both"
            )
        return ranks


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
        bad = [f"{self.statuses[name]} {name}" for name in ("wrong", "failed", "hung") if self.statuses[name]]
        return (
            f"{self.num_measured} problems measured, {self.num_known} known, "
            f"{len(self.failures)} not measurable; {self.num_samples} samples"
            + (f" ({', '.join(bad)})" if bad else "")
            + f" in {self.seconds:.0f} s"
        )


def tune(
    problems: Sequence[Product],
    store: Store,
    ordinal: int,
    settings: Settings,
    reporter: Reporter,
    *,
    ranks: Ranks,
    command: Sequence[str] = COMMAND,
) -> Summary:
    """Measures the candidates of problems on a GPU, and stores each sample as it is taken.

    Args:
      problems: of all ranks; see workloads.problems.
      store: what it has is not measured again, unless settings.remeasure.
      ordinal: torch's number of the GPU.
      settings: how thoroughly.
      reporter: is told how far it is.
      ranks: of which this one measures its share of the problems.
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
        store=store,
        run=run,
        device=device,
        settings=settings,
        reporter=reporter,
        command=command,
        candidates_of=lambda problem: candidates.of_problem(workloads.operation(problem.key.op), problem, device),
        always_of=lambda problem, found: candidates.always_timed(
            workloads.operation(problem.key.op), problem, device, found
        ),
        end_run=lambda: machine.end_run(run, ordinal),
    )
    return session.measure(problems, ranks)


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
    reporter: Reporter
    command: Sequence[str]
    candidates_of: Callable[[Any], list[Config]]
    always_of: Callable[[Any, Sequence[Config]], list[Config]]
    end_run: Callable[[], Run]
    digest: Callable[[Config], str] = candidates.kernel_sha256

    def __post_init__(self) -> None:
        self._worker: Worker | None = None
        self._num_given_up = 0
        self._summary = Summary(run=self.run.id)

    def measure(self, problems: Sequence[Product], ranks: Ranks) -> Summary:
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
            if work:
                self.store.add(self.run, [])  # raises now where it could not take the samples
            for task in work:
                self.reporter.begin(str(task.problem))
                said = self._measure(task)
                self.reporter.end(str(task.problem), workloads.cost(task.problem), said)
            summary.seconds = time.monotonic() - begin
            outcome = str(summary)
        finally:
            self._end_worker()
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

    def _task(self, problem: Product, known: Mapping[AnyKey, Mapping[tuple[AnyConfig, str], Sample]]) -> _Task | None:
        """What is left to measure of a problem; None if nothing is."""
        configs = self.candidates_of(problem)
        of_problem = known.get(problem.key, {})
        found = {
            config: _median(sample)
            for config in configs
            if (sample := of_problem.get((config, self.digest(config)))) is not None
        }
        is_searched = len(configs) > search.EXHAUSTIVE_LIMIT
        wanted = min(self.settings.most_trials, len(configs)) if is_searched else len(configs)
        if not configs or len(found) >= wanted:
            return None
        right = {config: us for config, us in found.items() if us is not None}
        # With the best of before, so that a new candidate meets what it has to beat.
        racing = [*self.always_of(problem, configs), *sorted(right, key=right.get)[:1]]
        always = [config for config in dict.fromkeys(racing) if config in right or config not in found]
        missing = [config for config in configs if config not in found and config not in always]
        return _Task(problem=problem, always=always, missing=missing, known=found)

    def _measure(self, task: _Task) -> str:
        """Measures one problem, in as many processes as it takes; returns the outcome."""
        taken: dict[Config, Sample] = {}
        num_losses = 0
        while True:
            always = [c for c in task.always if c not in taken or taken[c].status == "ok"]
            missing = [config for config in task.missing if config not in taken]
            if not missing and all(config in taken for config in always):
                return self._outcome(taken)
            configs, at, num_before = [*always, *missing], None, len(taken)
            try:
                worker = self._start()
                worker.send(
                    {
                        "problem": workloads.problem_to_json(task.problem),
                        "configs": [config.to_json() for config in configs],
                        "always": list(range(len(always))),
                        "known": [
                            [config.to_json(), us]
                            for config, us in {**task.known, **{c: _median(taken[c]) for c in taken}}.items()
                        ],
                    }
                )
                for event in worker.events(self.settings.hang_limit_s):
                    if event["event"] == "at":
                        at = event["config"]
                    elif event["event"] == "samples":
                        self._store(map(Sample.from_json, event["samples"]), taken)
                    elif event["event"] == "error":
                        return self._not_measured(task.problem, event["detail"])
                    elif event["event"] == "done":
                        return self._outcome(taken)
            except (WorkerHung, WorkerDied) as error:
                self._end_worker()
                self.reporter.note(f"{task.problem}: {error}")
                if at is not None and configs[at] not in taken:
                    status = "hung" if isinstance(error, WorkerHung) else "failed"
                    self._store(
                        [
                            Sample(
                                key=task.problem.key,
                                config=configs[at],
                                median_us=0.0,
                                spread_us=0.0,
                                count=0,
                                status=status,
                                kernel_sha256=self.digest(configs[at]),
                                run=self.run.id,
                                detail=str(error)[: candidates.LONGEST_DETAIL],
                            )
                        ],
                        taken,
                    )
                num_losses += len(taken) == num_before
                if num_losses == _MOST_LOSSES:
                    self._give_up(str(error))
                    return self._not_measured(task.problem, str(error))

    def _give_up(self, reason: str) -> None:
        self._num_given_up += 1
        if self._num_given_up == _MOST_GIVEN_UP:
            raise WorkerError(
                f"{_MOST_GIVEN_UP} problems in a row could not be measured, though no candidate of "
                f"theirs ran, so the GPU or its driver is at fault: {reason}; check nvidia-smi, "
                "and start again to go on"
            )

    def _not_measured(self, problem: Product, reason: str) -> str:
        self._summary.failures.append((str(problem), reason))
        self.reporter.note(f"{problem} cannot be measured: {reason}")
        return f"cannot be measured: {reason}"

    def _start(self) -> Worker:
        if self._worker is None:
            hello = {"device": self.device.ordinal, "run": self.run.id, "settings": dataclasses.asdict(self.settings)}
            self._worker = Worker(self.command, hello, self.settings.start_limit_s)
        return self._worker

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.kill()
        self._worker = None

    def _store(self, samples: Iterable[Sample], taken: dict[Config, Sample]) -> None:
        """Stores those that are new: after a restart some candidates are timed again."""
        new = [sample for sample in samples if sample.config not in taken]
        if new:
            self.store.add(self.run, new)
            taken.update((sample.config, sample) for sample in new)
            self._summary.statuses.update(sample.status for sample in new)
            self.reporter.stored(new)

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
      always: configs that are timed in any case.
      missing: other configs without a sample.
      known: medians of configs with one; None for one that is not right.
    """

    problem: Product
    always: list[Config]
    missing: list[Config]
    known: dict[Config, float | None]


def _median(sample: Sample) -> float | None:
    return sample.median_us if sample.status == "ok" else None


def tune_on_miss(operation: Operation, problem: Product, device: Device) -> None:
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
                problem,
                candidates.of_problem(operation, problem, device),
                device,
                DeviceTimer(device.ordinal),
                ON_MISS,
                run.id,
                always=candidates.always_timed(operation, problem, device, operation.candidates(problem, device)),
                make_plan=operation.make_plan,
                emit=lambda samples: tuning.keep(run, samples),
            )
    except torch.OutOfMemoryError as error:
        _LOG.warning("%s is not measured, the GPU's memory is full: %s", problem, error)
        return
    tuning.keep(machine.end_run(run, device.ordinal), [])
