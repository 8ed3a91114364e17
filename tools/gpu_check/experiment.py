"""What all measuring programs have in common: a run over named cases, from its flags to its exit code.

deadline   --seconds are divided among the cases; the time left is printed after each
resume     NAME.json is written after each case. The same command goes on with what is missing, failed or was
           wrong; results of another commit, wheel, GPU, kernel or setting are measured anew, with the reason
values     are checked first (checks.py): `prepare` of a case returns only the calls whose values are right
peers      are timed against ours in rounds of random order; figures are medians and interquartile ranges
output     NAME.json, and a page for people; the exit code is 1 if anything was wrong or is missing
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import pathlib
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from absl import app, flags

from stoneware.errors import quoted
from stoneware.measuring.device_timer import spread
from tools.gpu_check import document, machine

Call = Callable[[], object]
Row = dict[str, Any]
"""A case in the report: its labels, what was measured and, if something was wrong, "problems"."""

Prepared = tuple[Row, Mapping[str, Call]]
"""What the row has besides its labels, and the calls to time, of right values, by name."""

Name = TypeVar("Name", bound=Hashable)

LEAST_S = 0.05
"""For timing a case, however little time is left."""

LEAST_ROUNDS = 3

OVERRUN = 1.25
"""Cases begin until this multiple of a run's seconds is over, because preparing them sometimes takes longer."""


_SAVED_EVERY_S = 2.0
"""Writing a report of many cases also takes time."""


class Deadline:
    """Divides seconds among cases.

    Args:
      seconds: from now on.
      now: seconds.
    """

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._seconds, self._end = now, seconds, now() + seconds
        self._untimed_s, self._num_prepared = 0.0, 0

    @property
    def left(self) -> float:
        return max(0.0, self._end - self._now())

    @property
    def is_overrun(self) -> bool:
        return self._now() >= self._end + (OVERRUN - 1) * self._seconds

    def prepared(self, seconds: float) -> None:
        """A case took these seconds before it was timed."""
        self._untimed_s += seconds
        self._num_prepared += 1

    def share(self, num_left: int, most_s: float) -> float:
        """Seconds for timing the first of `num_left` cases: its share of the rest, less the mean time of preparing."""
        share = self.left / max(num_left, 1) - self._untimed_s / max(self._num_prepared, 1)
        return min(max(share, LEAST_S), most_s)


def interleaved(
    samples_of: Mapping[Name, Callable[[], Sequence[float]]],
    rounds: int,
    *,
    seconds: float = math.inf,
    seed: int = 0,
    now: Callable[[], float] = time.monotonic,
) -> dict[Name, list[float]]:
    """Takes samples of everything once a round, in a new random order each.

    Args:
      samples_of: by name: takes samples.
      rounds: how many.
      seconds: no round begins after these, except the first three.
    """
    order, names, end = random.Random(seed), list(samples_of), now() + seconds
    samples: dict[Name, list[float]] = {name: [] for name in names}
    for round_idx in range(rounds):
        if round_idx >= LEAST_ROUNDS and now() > end:
            break
        order.shuffle(names)
        for name in names:
            samples[name] += samples_of[name]()
    return samples


def figures(samples: Sequence[float], unit: str) -> dict[str, Any]:
    """Median, interquartile range and number of samples, as JSON values."""
    return {
        f"median_{unit}": round(statistics.median(samples), 5),
        f"spread_{unit}": round(spread(samples), 5),
        "count": len(samples),
    }


class Part:
    """Cases in one place of a report: their rows, and what was wrong.

    Args:
      report: where the rows are, under "rows"; those that are there are not measured again.
      deadline: for all cases.
    """

    def __init__(self, experiment: Experiment, name: str, report: Row, deadline: Deadline) -> None:
        self.name, self.report, self.deadline, self._experiment = name, report, deadline, experiment
        self.rows: list[Row] = report.setdefault("rows", [])

    def measure(
        self,
        cases: Sequence[Row],
        prepare: Callable[[Row], Prepared],
        time_calls: Callable[[Mapping[str, Call], float, Row], Any],
        *,
        judge: Callable[[Row], Sequence[str]],
        most_s: float,
        figures_as: str = "step",
        is_sample: bool = False,
    ) -> None:
        """Measures the cases that have no good row; what one raises is reported, and the next is measured.

        Args:
          cases: the labels of each, all of the same names.
          prepare: draws operands and checks values; see `Prepared`.
          time_calls: gives the figures by name; takes calls, seconds, and the row, where it may say why one failed.
          judge: what is wrong with a row, each in a sentence.
          most_s: seconds for timing one case.
          figures_as: name of the figures in the row.
          is_sample: each case is timed for `most_s`, until the time is over; the other cases are not missing.
        """
        places = {_labels(case, cases): idx for idx, case in enumerate(cases)}
        rows = {places.get(_labels(row, cases), -1 - idx): row for idx, row in enumerate(self.rows)}
        missing = [idx for idx in range(len(cases)) if idx not in rows or "problems" in rows[idx]]
        if len(missing) < len(cases):
            self.say(f"{len(cases) - len(missing)} of {len(cases)} cases are known")
        self.report.pop("unmeasured", None)
        for num_done, idx in enumerate(missing):
            num_left = len(missing) - num_done
            if is_sample and not self.deadline.left:
                break
            if self._experiment.deadline.is_overrun:
                self.report["unmeasured"] = num_left
                break
            begin, row, calls = self._experiment.now(), dict(cases[idx]), {}
            try:
                more, calls = prepare(cases[idx])
                row |= more
                self.deadline.prepared(self._experiment.now() - begin)
                if calls:
                    seconds = most_s if is_sample else self.deadline.share(num_left, most_s)
                    row[figures_as] = time_calls(calls, seconds, row)
                problems = list(judge(row))
            except Exception as error:
                traceback.print_exc(file=sys.stdout)
                problems = [document.text_of(error)]
            del calls  # and with them their tensors
            case = ", ".join(f"{name} {label}" for name, label in cases[idx].items() if label not in ("", 0))
            if problems:
                row["problems"] = [f"{case}: {problem}" for problem in problems]
            rows[idx] = row
            self.rows[:] = [rows[place] for place in sorted(rows)]
            medians = {name: _first(times) for name, times in row.get(figures_as, {}).items()}
            progress = f"[{num_done + 1}/{len(missing)}] {case}: {problems or medians}"
            self.say(f"{progress}; {self.deadline.left:.0f} s left")
            self._experiment.save(_SAVED_EVERY_S)
            self._experiment.release()

    def folder(self) -> pathlib.Path:
        """For files of this part, with this head and these settings alone."""
        key = [self._experiment.head, self.report["settings"]]
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self._experiment.folder / f"{self._experiment.name}_{self.name}_{digest[:12]}"

    def say(self, text: str) -> None:
        print(f"{self.name}: {text}", flush=True)

    def problems(self) -> list[str]:
        wrong = [problem for row in self.rows for problem in row.get("problems", ())]
        wrong += self.report.get("wrong", [])
        if num_left := self.report.get("unmeasured"):
            wrong.append(f"time was over before {num_left} cases; the same command goes on with them")
        return wrong


def _labels(row: Row, cases: Sequence[Row]) -> tuple[Any, ...]:
    """The labels of a row by which these cases differ."""
    return tuple(row.get(name) for name in cases[0])


def _first(figures: Any) -> Any:
    """The median, which comes first."""
    return next(iter(figures.values())) if isinstance(figures, dict) else figures


class Experiment:
    """A program; a subclass measures in `measure`, and has its page in `page`.

    Attributes:
      name: of its files.
      schema: of NAME.json.
      page_suffix: of the page's file.
      anew: what becomes of a report with another head.
      values: the flags' values as attributes.
      head: of the report, on which all results depend: schema, commit, wheel_sha256, gpu, settings, and kernels
        (id -> digest of the code, of those that this GPU runs).
      report: what NAME.json has.
      deadline: of the run.
    """

    name = ""
    schema = 1
    page_suffix = ".md"
    anew = "all is measured anew"

    def __init__(self, values: Any, now: Callable[[], float] = time.monotonic) -> None:
        self.values, self.now, self._begin = values, now, now()
        self.folder = pathlib.Path(values.out).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.deadline = Deadline(self.seconds, now)
        self._parts: dict[str, Part] = {}
        self._saved = -math.inf
        self.report = self._started()

    @property
    def ordinal(self) -> int | None:
        """torch's number of the GPU; None: a CPU."""
        return 0

    @property
    def seconds(self) -> float:
        """For the run."""
        return math.inf

    def settings(self) -> Row:
        """The flags on which all results depend, as JSON values."""
        return {}

    def measure(self) -> None:
        """Measures what `self.report` lacks."""
        raise NotImplementedError

    def page(self) -> str:
        """The report for people."""
        raise NotImplementedError

    def problems(self) -> list[str]:
        """What makes the run fail; a subclass adds to it."""
        return [f"{part.name}: {problem}" for part in self._parts.values() for problem in part.problems()]

    def rows(self, seconds: float | None = None) -> Part:
        """The rows of a report without parts; they have the rest of the run's time, or these seconds."""
        deadline = self.deadline if seconds is None else Deadline(seconds, self.now)
        part = self._parts[self.name] = Part(self, self.name, self.report, deadline)
        return part

    def part(self, name: str, measure: Callable[[Part], None], seconds: float, settings: Row) -> None:
        """Has `measure` fill a part of the report, unless it is complete. What it raises is reported, and the other
        parts are measured.

        Args:
          seconds: for timing.
          settings: that this part alone depends on.
        """
        parts = self.report.setdefault("parts", {})
        if name in parts and parts[name]["settings"] != settings:
            print(f"{name}: was measured with {parts[name]['settings']}, not {settings}, and is measured anew")
            del parts[name]
        report = parts.setdefault(name, {"settings": settings, "seconds": 0.0})
        part = self._parts[name] = Part(self, name, report, Deadline(seconds, self.now))
        if report.get("is_complete"):
            part.say(f"{self.name}.json has it already")
            return
        if self.deadline.is_overrun:
            report["wrong"] = ["time was over before it began; the same command goes on with it"]
            return
        begin = self.now()
        report |= {"date": _date(), "machine": self.machine(), "wrong": []}
        try:
            measure(part)
        except Exception as error:
            traceback.print_exc(file=sys.stdout)
            report["wrong"] = [document.text_of(error)]
        report["seconds"] = round(report["seconds"] + self.now() - begin, 1)
        report |= {"machine_after": self.machine(), "is_complete": not part.problems()}
        self.save()
        self.release()

    def save(self, every_s: float = 0.0) -> None:
        """Writes NAME.json, unless it was written within these seconds."""
        if self.now() - self._saved < every_s:
            return
        self._saved = self.now()
        document.write(self.folder / f"{self.name}.json", document.to_json(self.report) + "\n")

    def release(self) -> None:
        """Gives back what torch holds and does not use."""
        if self.ordinal is not None:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def machine(self) -> Row:
        return machine.describe(self.ordinal)

    def run(self) -> int:
        """Measures, writes both files, and returns the exit code."""
        try:
            self.measure()
        finally:
            self.save()  # also when it is interrupted
        self.report["machine_after"] = self.machine()
        self.report["seconds"] = round(self.report.get("seconds", 0.0) + self.now() - self._begin, 1)
        self.report["problems"] = problems = self.problems()
        self.save()
        page = self.page()
        document.write(self.folder / (self.name + self.page_suffix), page)
        print(page.partition("<details>")[0])
        for problem in problems:
            print(f"{self.name}: FAILED {problem}")
        return int(bool(problems))

    def _started(self) -> Row:
        """The report of an earlier run with the same head, or a new one."""
        facts = self.machine()
        self.head = head = {
            "schema": self.schema,
            "commit": self.values.commit,
            "wheel_sha256": self.values.wheel_sha256,
            "gpu": facts["gpu"],
            "settings": self.settings(),
            "kernels": machine.packaged_digests([facts]),
        }
        command = self.values.command or " ".join([self.name, *sys.argv[1:]])
        path = self.folder / f"{self.name}.json"
        if path.exists():
            try:
                earlier = json.loads(path.read_text(encoding="utf-8"))
                differing = [name for name in head if earlier.get(name) != head[name]]
            except (ValueError, AttributeError) as error:
                earlier, differing = {}, [f"content, which is not a report ({error})"]
            if not differing:
                return earlier | {"command": command}
            shown = [
                f"{name} {quoted(earlier[name])}" if isinstance(earlier.get(name), str) else name for name in differing
            ]
            print(f"{self.name}: {path.name} has another {', another '.join(shown)}; {self.anew}")
        return {"date": _date(), "command": command, "machine": facts, **head}

    @classmethod
    def define_flags(cls) -> None:
        """The flags of all programs, which gpu_check.pyz passes; a subclass adds its own."""
        flags.DEFINE_string("out", None, "Folder to write to.", required=True)
        flags.DEFINE_string("commit", "unknown", "That the wheel was built from.")
        flags.DEFINE_string("wheel_sha256", "unknown", "Of the installed wheel.")
        flags.DEFINE_string("command", None, "What the user typed, if not this program.")

    @classmethod
    def start(cls) -> None:
        """The main program."""

        def main(argv: Sequence[str]) -> int:
            if len(argv) > 1:
                raise app.UsageError(f"only flags are taken, found {argv[1:]}")
            return cls(flags.FLAGS).run()

        cls.define_flags()
        app.run(main)


def _date() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
