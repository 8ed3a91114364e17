"""Tuning: measures problems on this machine's GPU and stores each sample as it is taken.

A kernel that hangs cannot be interrupted, and one that faults destroys the CUDA context of its
process. A child process therefore measures (child.py), and this one watches it: it knows which
candidate runs, kills the child if that takes too long, stores what happened to the candidate, and
continues with the others in a new child. The child never writes the store.

A session that is interrupted or killed keeps what it stored. The next one skips what has a sample
of the same kernel, by its digest, on the same hardware, also if that was wrong, failed or hung. The
default config and the vendor library's are timed wherever something is measured, so that each run
has its own comparison.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoneware.errors import quoted
from stoneware.kernels.config import AnyConfig, Config
from stoneware.kernels.key import AnyKey
from stoneware.measuring import candidates, device_timer, machine, workloads
from stoneware.measuring.progress import Reporter
from stoneware.measuring.settings import Settings
from stoneware.ops import operation_of
from stoneware.runtime.device import Device, cuda_device
from stoneware.sessions.child import COMMAND, Worker, WorkerError, WorkerLost
from stoneware.tuning import store_table
from stoneware.tuning.samples import Run, Sample, decode
from stoneware.tuning.store import user_store

if TYPE_CHECKING:
    from stoneware.specs.problem import AnyProblem
    from stoneware.tuning.store import Store

_MOST_LOSSES = 2
"""How often a problem may lose its process with no candidate to blame, before it is given up."""

_MOST_GIVEN_UP = 3
"""How many problems in a row may be given up: on a GPU that does not come back, all of them fail."""

_PIPE = Path("pipe of the measuring process")

CandidatesOf = Callable[[Any], tuple[Sequence[Config], Sequence[Config]]]

_LOG = logging.getLogger("stoneware.measuring")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those that torchrun started; problem i belongs to rank i % world_size.

    Attributes:
      rank: of this process, from 0.
      world_size: number of processes.
      local_rank: rank on this machine; the GPU to use.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> Ranks:
        """From torchrun's RANK, WORLD_SIZE and LOCAL_RANK; without them the only process.

        Raises:
          ValueError: one is not a number, or they do not fit together.
        """
        numbers = {}
        for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
            text = os.environ.get(name) or default
            if not text.isdecimal():
                raise ValueError(f"{name}={quoted(text)} must be a number, as torchrun sets it; unset it")
            numbers[name.lower()] = int(text)
        ranks = cls(**numbers)
        if ranks.rank >= ranks.world_size:
            raise ValueError(
                f"RANK={ranks.rank} must be below WORLD_SIZE={ranks.world_size}; start with torchrun, or unset both"
            )
        return ranks


@dataclasses.dataclass(kw_only=True)
class Summary:
    """What a session did to the problems of its rank.

    Attributes:
      run: id of the run.
      num_known: problems that had all their samples.
      statuses: number of samples stored, by status.
      failures: (problem, reason) of problems that could not be measured.
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
    problems: Sequence[AnyProblem],
    store: Store,
    ordinal: int,
    settings: Settings,
    reporter: Reporter,
    *,
    ranks: Ranks,
    command: Sequence[str] = COMMAND,
    candidates_of: CandidatesOf | None = None,
) -> Summary:
    """Measures the candidates of problems on a GPU, stores each sample as it is taken, and bakes the user's store.

    Args:
      problems: of all ranks; this one measures its share.
      store: what it has is not measured again, unless settings.remeasure.
      ordinal: torch's number of the GPU.
      command: the measuring process, if it is not child.py.
      candidates_of: see Session; None takes those of the problem's op.

    Raises:
      KeyboardInterrupt: on Ctrl-C, once the measuring process is ended and the run's end stored.
      StoreError: the store cannot be written; what it has is kept.
      WorkerError: the measuring process does not start, or the GPU no longer answers.
      DriverError, UnsupportedError: this GPU does not exist.
    """
    device = cuda_device(ordinal)
    run = machine.new_run(ordinal, settings.command, settings.commit)
    is_users = store is user_store()
    if is_users:
        store_table.bake_at_exit()  # also of one that is interrupted
    summary = Session(
        store=store,
        run=run,
        device=device,
        settings=settings,
        reporter=reporter,
        command=command,
        candidates_of=candidates_of
        or (lambda problem: candidates.of_problem(operation_of(problem.key.op), problem, device, settings.fastest)),
        end_run=lambda: machine.end_run(run, ordinal),
    ).measure(problems, ranks)
    if is_users:
        store_table.bake_user_store()
    return summary


@dataclasses.dataclass(kw_only=True)
class Session:
    """One run over problems; `tune` makes it for a GPU, tests make it without one.

    Attributes:
      candidates_of: the always-timed candidates of a problem, and the others.
      end_run: the run with its clocks at the end.
      digest: of a config's kernel.
    """

    store: Store
    run: Run
    device: Device
    settings: Settings
    reporter: Reporter
    command: Sequence[str]
    candidates_of: CandidatesOf
    end_run: Callable[[], Run]
    digest: Callable[[Config], str] = candidates.kernel_sha256

    def __post_init__(self) -> None:
        self._worker: Worker | None = None
        self._num_given_up = 0
        self._summary = Summary(run=self.run.id)

    def measure(self, problems: Sequence[AnyProblem], ranks: Ranks) -> Summary:
        """Measures those of the problems that belong to this rank."""
        begin, summary = time.monotonic(), self._summary
        own = problems[ranks.rank :: ranks.world_size]
        known = self._known()
        work = {problem: configs for problem in own if (configs := self._missing(problem, known))}
        summary.num_problems, summary.num_known = len(own), len(own) - len(work)
        self.reporter.start(len(own), summary.num_known, sum(map(workloads.cost, work)), str(self.device))
        outcome = "interrupted; what was stored is kept, and the next start continues after it"
        try:
            if work:
                self.store.add(self.run, [])  # raises before anything is measured
            for problem, configs in work.items():
                said = self._measure(problem, configs)
                self.reporter.end(str(problem), workloads.cost(problem), said)
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

    def _known(self) -> dict[tuple[AnyKey, AnyConfig, str], Sample]:
        """The samples of this hardware by problem, candidate and digest."""
        if self.settings.remeasure:
            return {}
        return {
            (sample.key, sample.config, sample.kernel_sha256): sample
            for run, sample in self.store.samples()
            if run.device.same_hardware(self.run.device)
        }

    def _missing(self, problem: AnyProblem, known: Mapping[tuple[AnyKey, AnyConfig, str], Sample]) -> list[Config]:
        """What to measure of a problem: the candidates without a sample, and those they must beat."""
        always, others = self.candidates_of(problem)
        samples = {config: known.get((problem.key, config, self.digest(config))) for config in (*always, *others)}
        missing = [config for config, sample in samples.items() if sample is None]
        if not missing:
            return []
        right_us = {config: one.median_us for config, one in samples.items() if one is not None and one.status == "ok"}
        racing = dict.fromkeys([*always, *sorted(right_us, key=right_us.__getitem__)[:1], *missing])
        return [config for config in racing if config in right_us or samples[config] is None]

    def _measure(self, problem: AnyProblem, configs: Sequence[Config]) -> str:
        """Measures one problem, in as many processes as it takes; returns the outcome."""
        taken: dict[AnyConfig, Sample] = {}
        num_losses = 0
        while left := [config for config in configs if config not in taken]:
            at, num_before = None, len(taken)
            try:
                worker = self._start()
                worker.send(
                    {
                        "op": problem.key.op,
                        "problem": dataclasses.asdict(problem),
                        "configs": [one.to_json() for one in left],
                    }
                )
                for event in worker.events(self.settings.hang_limit_s):
                    if event["event"] == "at":
                        at = event["config"]
                    elif event["event"] == "samples":
                        lines = enumerate(line.encode() for line in event["lines"])
                        self._store((sample for _, sample in decode(_PIPE, lines).samples), taken)
                    elif event["event"] == "error":
                        return self._not_measured(problem, event["detail"])
                    elif event["event"] == "done":
                        return self._outcome(taken)
            except WorkerLost as error:
                self._end_worker()
                self.reporter.note(f"{problem}: {error}")
                if at is not None:
                    self._store([self._lost(problem, left[at], error)], taken)
                num_losses += len(taken) == num_before
                if num_losses == _MOST_LOSSES:
                    self._give_up(str(error))
                    return self._not_measured(problem, str(error))
        return self._outcome(taken)

    def _lost(self, problem: AnyProblem, config: Config, error: WorkerLost) -> Sample:
        """The sample of a candidate that took its process along."""
        return Sample(
            key=problem.key,
            config=config,
            **device_timer.Timing().figures,
            status=error.status,
            kernel_sha256=self.digest(config),
            run=self.run.id,
            detail=str(error)[: candidates.LONGEST_DETAIL],
        )

    def _give_up(self, reason: str) -> None:
        self._num_given_up += 1
        if self._num_given_up == _MOST_GIVEN_UP:
            raise WorkerError(
                f"{_MOST_GIVEN_UP} problems in a row could not be measured, though no candidate of "
                f"theirs ran, so the GPU or its driver is at fault: {reason}; check nvidia-smi, "
                "then start again to continue"
            )

    def _not_measured(self, problem: AnyProblem, reason: str) -> str:
        self._summary.failures.append((str(problem), reason))
        self.reporter.note(f"{problem} cannot be measured: {reason}")
        return f"cannot be measured: {reason}"

    def _start(self) -> Worker:
        if self._worker is None:
            hello = {"device": self.device.ordinal, "run": self.run.id, "settings": dataclasses.asdict(self.settings)}
            self._worker = Worker(self.command, hello)
        return self._worker

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.kill()
        self._worker = None

    def _store(self, samples: Iterable[Sample], taken: dict[AnyConfig, Sample]) -> None:
        """Stores those that are new: a candidate's sample may stand before the end of its process."""
        new = [sample for sample in samples if sample.config not in taken]
        if new:
            self.store.add(self.run, new)
            taken.update((sample.config, sample) for sample in new)
            self._summary.statuses.update(sample.status for sample in new)

    def _outcome(self, taken: Mapping[AnyConfig, Sample]) -> str:
        self._summary.num_measured += 1
        self._num_given_up = 0
        right = [sample for sample in taken.values() if sample.status == "ok"]
        bad = len(taken) - len(right)
        suffix = f", {bad} wrong, failed or hung" if bad else ""
        if not right:
            return f"no candidate is right{suffix}"
        best = min(right, key=lambda sample: sample.median_us)
        return f"best of {len(right)}: {best.config} {best.median_us:.1f} us{suffix}"
