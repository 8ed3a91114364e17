"""Measures what the look-up's choices cost at problems that no one tuned for.

    python -m tools.gpu_check.held_out --out DIR --seed 11 [--problems 600] [--ops scaled_mm,bf16_nt]
        [--minutes 60]

held_out_problems.py draws the problems: by the seed, and half of them with an (n, k) of the wheel's table.
Two parts, each a tune into a store of its own in DIR:

    first   every candidate of every problem, as a model calls it (weight_walk.py)
    again   the same at the worst problems of each set, to tell whether they are noise

All visible GPUs share a part, one process each. Samples are stored as they are taken, apart from held_out.json: the
same command goes on where an interrupted one stopped, and measures kernels that changed anew. Choices are those of the
wheel's table, without any store.

Writes held_out.json and held_out.txt (held_out_figures.py), of what was measured until --minutes if that
is given; the exit code is 1 if a candidate was wrong, failed or hung, or nothing was measured.
"""

from __future__ import annotations

import math
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from absl import flags

from stoneware.kernels.config import Config
from stoneware.measuring import candidates
from stoneware.measuring.progress import Reporter
from stoneware.measuring.settings import Settings
from stoneware.ops import operation_of
from stoneware.runtime.device import Device, cuda_device
from stoneware.sessions import session
from stoneware.sessions.session import Ranks
from stoneware.specs.problem import AnyProblem
from stoneware.tuning import policy
from stoneware.tuning.lookup import Decision
from stoneware.tuning.samples import Sample
from stoneware.tuning.store import Store
from tools.gpu_check import held_out_figures, held_out_problems, weight_walk
from tools.gpu_check.experiment import Deadline, Experiment, Row
from tools.gpu_check.held_out_problems import SETS

PARTS = {"first": 0.8, "again": 0.2}
"""Each part's share of --minutes."""

Problems = Mapping[str, Sequence[AnyProblem]]
"""Set -> its problems."""


class TimeIsUp(Exception):
    """A part has had its share of the time; what it measured is stored."""


class TimedReporter(Reporter):
    """Prints the progress, and ends the session after the problem in which its time is over."""

    def __init__(self, deadline: Deadline, name: str) -> None:
        self._name, self._deadline = name, deadline

    def end(self, problem: str, cost: float, outcome: str) -> None:
        super().end(problem, cost, outcome)
        if not self._deadline.left:
            raise TimeIsUp

    def say(self, text: str, level: int = 0) -> None:
        print(f"{self._name}: {text}", flush=True)


def chosen_sets(names: Sequence[str]) -> list[str]:
    """The sets of these names, of sets or of ops.

    Raises:
      ValueError: a name is neither.
    """
    choices = {*SETS, *(problem_set.op for problem_set in SETS.values())}
    if unknown := sorted(set(names) - choices):
        raise ValueError(f"ops={','.join(unknown)} must be among {', '.join(sorted(choices))}; name some of these")
    return [name for name, problem_set in SETS.items() if {name, problem_set.op} & set(names)]


class HeldOut:
    """The problems of a seed, and what of them is measured.

    Args:
      folder: has a store of each part.
      problems: of each set.
      device: where they are measured.
      decide: the look-up's decision for a problem.
    """

    def __init__(
        self, folder: pathlib.Path, problems: Problems, device: Device, decide: Callable[[AnyProblem], Decision]
    ) -> None:
        self._folder, self._problems, self._device, self._decide = folder, problems, device, decide

    def store(self, part: str) -> Store:
        return Store(self._folder / f"held_out_{part}.sqlite3")

    def samples(self, part: str) -> list[Sample]:
        """The samples that this hardware took."""
        here = self._device.fingerprint
        return [sample for run, sample in self.store(part).samples() if here is None or run.device.same_hardware(here)]

    def rows(self, part: str) -> list[held_out_figures.Row]:
        """The rows of the problems whose choice was timed."""
        right = held_out_figures.right_samples(self.samples(part), candidates.kernel_sha256)
        rows = [
            held_out_figures.row_of(name, str(problem), problem.key.m, self._decide(problem), right[problem.key])
            for name, problems in self._problems.items()
            for problem in problems
            if problem.key in right
        ]
        return [row for row in rows if row is not None]

    def to_measure(self, part: str, again: int) -> list[AnyProblem]:
        """The problems of a part, of all sets in turn; the second part repeats the worst `again` of each set."""
        if part == "first":
            return held_out_problems.interleaved(list(self._problems.values()))
        chosen = {(row["set"], row["problem"]) for row in held_out_figures.worst(self.rows("first"), again)}
        return held_out_problems.interleaved(
            [
                [problem for problem in problems if (name, str(problem)) in chosen]
                for name, problems in self._problems.items()
            ]
        )

    def candidates_of(self, problem: AnyProblem) -> tuple[list[Config], list[Config]]:
        """As `candidates.of_problem`; the choice is always timed."""
        always, others = candidates.of_problem(operation_of(problem.key.op), problem, self._device)
        choice = self._decide(problem).config
        always = list(dict.fromkeys([choice, *always]))
        return always, [config for config in others if config != choice]

    def report(self) -> dict[str, Any]:
        """Figures, rows, and what was not right."""
        rows = held_out_figures.with_second_pass(self.rows("first"), self.rows("again"))
        bad = [sample for sample in self.samples("first") if sample.status != "ok"]
        return {
            "of_problems": {name: len(of_set) for name, of_set in self._problems.items()},
            "groups": held_out_figures.figures(rows),
            "bad": [f"{sample.key.shape} {sample.config}: {sample.status}: {sample.detail}" for sample in bad],
            "rows": sorted(rows, key=held_out_figures.badness, reverse=True),
        }


def wheels_decision(device: Device) -> Callable[[AnyProblem], Decision]:
    """Decides by the wheel's table alone, from now on in this process."""
    policy.use_wheel_only()
    return lambda problem: operation_of(problem.key.op).decide(problem, device, lists_refusals=False)


def measure(
    held_out: HeldOut, part: str, problems: Sequence[AnyProblem], ranks: Ranks, settings: Settings, seconds: float
) -> None:
    """This rank's share of a part; returns when it is done, or its time is over."""
    ordinal = ranks.local_rank
    try:
        session.tune(
            problems,
            held_out.store(part),
            ordinal,
            settings,
            TimedReporter(Deadline(seconds), f"{part}, GPU {ordinal}" if ranks.world_size > 1 else part),
            ranks=ranks,
            command=weight_walk.COMMAND,
            candidates_of=held_out.candidates_of,
        )
    except TimeIsUp:
        print(f"{part}: stopped after {seconds / 60:.1f} minutes; start again without --minutes to measure the rest")


def measure_on_all(part: str, num_gpus: int) -> None:
    """The part on each GPU, by a process like this one.

    Raises:
      SystemExit: one of them failed.
    """
    command = [sys.executable, "-m", "tools.gpu_check.held_out", *sys.argv[1:], f"--part={part}"]
    processes = [
        subprocess.Popen(
            command, env={**os.environ, "RANK": str(idx), "WORLD_SIZE": str(num_gpus), "LOCAL_RANK": str(idx)}
        )
        for idx in range(num_gpus)
    ]
    codes = [process.wait() for process in processes]
    if failed := [idx for idx, code in enumerate(codes) if code]:
        sys.exit(f"held_out: {part} failed on GPU {', '.join(map(str, failed))}; start again to go on")


def _are_known(names: Sequence[str]) -> bool:
    try:
        return bool(chosen_sets(names))
    except ValueError as error:
        raise flags.ValidationError(str(error)) from error


class HeldOutExperiment(Experiment):
    """The program; with --part one of its processes, which measures its share of a part and writes no report."""

    name = "held_out"
    page_suffix = ".txt"
    anew = "samples of the same kernels are kept"

    def settings(self) -> Row:
        return {name: getattr(self.values, name) for name in ("seed", "problems", "ops")}

    def run(self) -> int:
        if not self.values.part:
            return super().run()
        self.measure()
        return 0

    def measure(self) -> None:
        values = self.values
        ranks = Ranks.from_environment()
        device = cuda_device(ranks.local_rank)
        problems = {
            name: held_out_problems.take(name, values.seed, values.problems) for name in chosen_sets(values.ops)
        }
        held_out = HeldOut(self.folder, problems, device, wheels_decision(device))
        settings = Settings(
            rounds=values.rounds,
            rounds_before_drop=min(4, values.rounds),
            seconds_per_problem=values.seconds_per_problem,
            command=self.report["command"],
            commit=values.commit,
        )
        num_gpus = torch.cuda.device_count()
        for part in [values.part] if values.part else PARTS:
            if num_gpus > 1 and not values.part:
                measure_on_all(part, num_gpus)
            else:
                chosen = held_out.to_measure(part, values.again)
                seconds = 60 * values.minutes * PARTS[part] or math.inf
                measure(held_out, part, chosen, ranks, settings, seconds)
        if not values.part:
            self.report |= {"num_gpus": num_gpus, "seed": values.seed, **held_out.report()}

    def problems(self) -> list[str]:
        return self.report["bad"] or ([] if self.report["rows"] else ["nothing was measured"])

    def page(self) -> str:
        return held_out_figures.table(self.report)

    @classmethod
    def define_flags(cls) -> None:
        super().define_flags()
        flags.DEFINE_integer("seed", None, "Of the problems; take one that no one tuned to.", required=True)
        flags.DEFINE_integer("problems", 600, "Of each set.", lower_bound=1)
        flags.DEFINE_list("ops", list(SETS), "Ops, or sets of problems: " + ", ".join(SETS) + ".")
        flags.register_validator("ops", _are_known)
        flags.DEFINE_float("minutes", 0.0, "Stop after these and report; 0: measure all.", lower_bound=0.0)
        flags.DEFINE_integer("again", 20, "Worst problems of each set that are measured twice.", lower_bound=0)
        flags.DEFINE_integer("rounds", 20, "Timings of each candidate.", lower_bound=1)
        flags.DEFINE_float("seconds_per_problem", 2.0, "For timing one at most.")
        flags.DEFINE_enum("part", None, list(PARTS), "Measure this part only, as one of several processes.")


if __name__ == "__main__":
    HeldOutExperiment.start()
