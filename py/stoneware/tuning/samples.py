"""Samples: what was measured, where and how; and the lines of text that keep them everywhere.

The lines are canonical JSON:

    a candidate   its config, the digest of its kernel, and an id, which is a digest of both
    a run         versions, clocks, commit, command
    samples       a problem, the id of the run, and a list per candidate, which begins with its id

The user's store (`store.py`) has a line a row. A device's folder (such as `nvidia_h200/`) has the same
lines in files, where the runs are one document:

    <op>.jsonl    the candidates, then the samples; sorted
    runs.json     the runs
    device.json   the device's fingerprint and the names people give it

Every candidate at every shape is kept, not only the fastest. Lines do not depend on their place, so the
union of two files is a union of lines. Reading checks each value; an error names the file and the line.
"""

from __future__ import annotations

import base64
import codecs
import contextlib
import hashlib
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from stoneware.errors import TableError, quoted
from stoneware.kernels.config import AnyConfig, Config, KernelConfig
from stoneware.kernels.key import AnyKey, KernelKey, check_fields, key_from_json
from stoneware.runtime import regular_file
from stoneware.runtime.canonical import canonical_document, canonical_json, check_count, check_name, parse_json
from stoneware.runtime.device import DeviceFingerprint
from stoneware.tuning.table import RUN_FIELDS

SCHEMA = 3
STATUSES = ("ok", "wrong", "failed", "hung")
"""Timed; error above the tolerance; did not run; did not end within the limit."""

PARSE_ERRORS = (ValueError, TypeError, KeyError, RecursionError, OverflowError)
"""What a value that breaks a rule raises; OverflowError: an int too large for a float."""

_ID_BYTES = 6
"""The part of a digest that is kept, eight letters. Two of 5,000 candidates share an id once in 20 million stores."""

_IN_A_LIST = (
    "median_us",
    "spread_us",
    "count",
    "error",
    "sm_clock_mhz_before",
    "sm_clock_mhz_after",
    "status",
    "detail",
)
"""What follows a candidate's id in its list; the last two only if it is not ok."""

REMEDY = "restore the file from version control, or measure again with `stoneware tune`"

_REMEDY_OF_SCHEMA = "if an older Stoneware wrote the folder, write it anew with `stoneware merge STORE --out FOLDER`"

Place = TypeVar("Place", bound=Hashable)

_Candidate = tuple[AnyConfig, str]
"""A config, and the digest of its kernel."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One candidate timed at one problem, in one run.

    Attributes:
      key: the problem.
      config: the candidate.
      median_us, spread_us: median and interquartile range of the timings; 0 without any.
      count: how many timings.
      sm_clock_mhz_before, sm_clock_mhz_after: SM clock around the timings; 0 if unknown.
      status: one of STATUSES.
      error: relative error against float64; 0 where no reference is known.
      kernel_sha256: digest of the kernel's code, or of the source of a decorated kernel; empty for
        kernels that are not ours.
      run: id of the run, an entry of runs.json.
      detail: for a sample that is not ok, what happened.

    Raises:
      TypeError, ValueError: a field breaks its rule.
    """

    key: AnyKey
    config: AnyConfig
    median_us: float
    spread_us: float
    count: int
    sm_clock_mhz_before: int = 0
    sm_clock_mhz_after: int = 0
    status: str
    error: float = 0.0
    kernel_sha256: str = ""
    run: str
    detail: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.key, AnyKey):
            raise TypeError(f"key={quoted(self.key)} must be a Key or a KernelKey")
        cls = KernelConfig if isinstance(self.key, KernelKey) else Config
        if not isinstance(self.config, cls):
            raise TypeError(f"config={quoted(self.config)} of {self.op} must be a {cls.__name__}")
        check_name("op", self.op)
        check_name("run", self.run)
        if not isinstance(self.detail, str):
            raise TypeError(f"detail={self.detail!r:.60} must be a str")
        _check_sha256(self.kernel_sha256)
        if self.status not in STATUSES:
            raise ValueError(f"status={self.status!r:.60} must be one of {', '.join(STATUSES)}")
        for name in ("count", "sm_clock_mhz_before", "sm_clock_mhz_after"):
            check_count(name, getattr(self, name))
        for name in ("median_us", "spread_us", "error"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
                raise ValueError(f"{name}={value!r:.60} must be a finite number >= 0")
            object.__setattr__(self, name, float(value))
        if self.status == "ok" and (self.median_us <= 0 or self.count < 1):
            raise ValueError(
                f"median_us={self.median_us} and count={self.count} of a sample with status 'ok' must be positive"
            )

    @property
    def op(self) -> str:
        return self.key.op

    @property
    def identity(self) -> tuple[str, AnyKey, AnyConfig, str, str]:
        """What was measured, and in which run: two samples with one identity are the same measurement.

        Also the order of samples. By op first: problems of our ops and of decorated kernels are not comparable.
        """
        return self.op, self.key, self.config, self.run, self.kernel_sha256

    @property
    def figures(self) -> tuple[Any, ...]:
        """What was measured: the values of a candidate's list, without its id."""
        return tuple(getattr(self, name) for name in _IN_A_LIST)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of the tuner: the environment that its samples share.

    Attributes:
      id: unique name, such as "2026-11-21-h200-a".
      device: fingerprint of the GPU.
      driver, cuda, torch, triton, python: versions, as text.
      sm_clock_mhz_before, sm_clock_mhz_after: SM clock at the start and the end; 0 if unknown.
      memory_clock_mhz_before, memory_clock_mhz_after: the same of the memory.
      date: ISO 8601.
      commit: of this repository.
      command: as it was typed.
    """

    id: str
    device: DeviceFingerprint
    driver: str
    cuda: str
    torch: str
    triton: str
    python: str
    sm_clock_mhz_before: int
    sm_clock_mhz_after: int
    memory_clock_mhz_before: int
    memory_clock_mhz_after: int
    date: str
    commit: str
    command: str

    def __post_init__(self) -> None:
        if not isinstance(self.device, DeviceFingerprint):
            raise TypeError(f"device={quoted(self.device)} must be a DeviceFingerprint")
        check_name("id", self.id)
        for name, value in vars(self).items():
            if "_clock_mhz_" in name:
                check_count(name, value)
            elif name != "device" and not isinstance(value, str):
                raise TypeError(f"{name}={value!r:.60} must be a str")

    @property
    def in_table(self) -> dict[str, str]:
        """What a table keeps of a run."""
        return {name: getattr(self, name) for name in RUN_FIELDS}

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "device": self.device.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Run:
        check_fields("run", data, {field.name for field in fields(cls)})
        return cls(**{**data, "device": DeviceFingerprint.from_json(data["device"])})


@dataclass(frozen=True, kw_only=True)
class DeviceRecord:
    """device.json: the fingerprint of a device that was measured, and its other names."""

    fingerprint: DeviceFingerprint
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.fingerprint.name, *self.aliases)

    def to_json(self) -> dict[str, Any]:
        return {"fingerprint": self.fingerprint.to_json(), "aliases": sorted(self.aliases)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DeviceRecord:
        aliases = data["aliases"]
        if not isinstance(aliases, list):
            raise ValueError(f"aliases={aliases!r:.60} must be a list of names")
        for alias in aliases:
            check_name("alias", alias)
        return cls(fingerprint=DeviceFingerprint.from_json(data["fingerprint"]), aliases=tuple(aliases))


def newest(
    taken: Iterable[tuple[Run, Sample]],
    place: Callable[[Run, Sample], Place],
    is_preferred: Callable[[Sample], bool] = lambda sample: True,
) -> dict[Place, Sample]:
    """The newest sample of each place, by the date and id of its run; the order does not matter.

    Args:
      taken: samples, each with its run.
      place: what samples are alternatives for, such as key and config.
      is_preferred: whether a sample comes before a newer one that is not.

    Returns:
      place -> sample; preferred ones first, and then newer ones.
    """
    best: dict[Place, tuple[tuple[bool, str, str], tuple[Any, ...], Sample]] = {}
    for run, sample in taken:
        # By figures if one run has two: their order must not be by chance.
        rank = (is_preferred(sample), run.date, run.id), sample.figures
        at = place(run, sample)
        if at not in best or best[at][:2] < rank:
            best[at] = *rank, sample
    ordered = sorted(best.items(), key=lambda item: item[1][0], reverse=True)
    return {at: sample for at, (*_, sample) in ordered}


def read_samples(path: Path, problems: list[str] | None = None) -> list[tuple[int, Sample]]:
    """Reads a .jsonl file: (line number, sample) in the order of the file.

    Args:
      path: the file.
      problems: gets what is skipped, each with file, line and reason: samples that break a rule, or a
        file that cannot be read. Nothing but the bad sample is lost, whatever its bytes are.

    Raises:
      TableError: without `problems`, one of them.
    """
    lines: list[bytes] = []
    with _skipping(problems, path, "samples"):
        lines = regular_file.read(path).removeprefix(codecs.BOM_UTF8).split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    return decode(path, enumerate(lines, start=1), problems).samples


@dataclass
class Decoded:
    """What lines hold.

    Attributes:
      samples: each with the number of its line.
      runs: by id; the last one that was stored.
      candidates: config and digest of its kernel, by id.
    """

    samples: list[tuple[int, Sample]] = field(default_factory=list)
    runs: dict[str, Run] = field(default_factory=dict)
    candidates: dict[str, _Candidate] = field(default_factory=dict)


def decode(
    path: Path,
    lines: Iterable[tuple[int, bytes]],
    problems: list[str] | None = None,
    *,
    before_number: str = ":",
    candidates: Mapping[str, _Candidate] | None = None,
) -> Decoded:
    """Decodes lines; a candidate's may stand anywhere among them.

    Args:
      path: the file.
      lines: each with its number.
      problems: like in `read_samples`.
      before_number: stands between path and number in a problem.
      candidates: of lines that were decoded before.

    Raises:
      TableError: without `problems`, a line breaks a rule.
    """
    place = f"{path}{before_number}"
    decoded = Decoded(candidates=dict(candidates or {}))
    documents: list[tuple[int, Any]] = []
    for number, line in lines:
        with _skipping(problems, f"{place}{number}", "a sample"):
            document = parse_json(line.decode("utf-8"))
            if isinstance(document, Mapping) and "candidate" in document:
                _add_candidate(decoded.candidates, document)
            elif isinstance(document, Mapping) and isinstance(document.get("run"), Mapping):
                run = Run.from_json(document["run"])
                decoded.runs[run.id] = run
            else:
                documents.append((number, document))
    if documents and not decoded.candidates:
        with _skipping(problems, path, "samples"):
            raise ValueError(f"no line names a candidate, as schema {SCHEMA} must; {_REMEDY_OF_SCHEMA}")
        return decoded
    lacking: dict[str, list[int]] = {}
    for number, document in documents:
        with _skipping(problems, f"{place}{number}", "a sample"):
            key, run_id, listed = _checked_line(document)
            for id, *values in listed:
                with _skipping(problems, f"{place}{number}", "a sample"):
                    check_name("candidate", id)
                    if id not in decoded.candidates:
                        lacking.setdefault(id, []).append(number)
                        continue
                    config, sha256 = decoded.candidates[id]
                    figures = {"status": "ok", **dict(zip(_IN_A_LIST, values))}
                    sample = Sample(key=key, config=config, kernel_sha256=sha256, run=run_id, **figures)
                    decoded.samples.append((number, sample))
    for id, numbers in lacking.items():
        with _skipping(problems, f"{place}{numbers[0]}", "a sample"):
            raise ValueError(f"candidate={quoted(id)} of {len(numbers)} samples must be the id of a line of the file")
    return decoded


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Writes samples, sorted; the same samples give the same bytes."""
    regular_file.write(path, samples_text(samples).encode("ascii"))


def samples_text(samples: Iterable[Sample]) -> str:
    """What `write_samples` writes."""
    return "".join(f"{line.text}\n" for line in lines_of(samples))


class Line(NamedTuple):
    """A line, and the name by which it is found: the id of a candidate or a run, or the op of samples."""

    name: str
    text: str

    @property
    def is_of_samples(self) -> bool:
        return self.text.startswith('{"key":')


def lines_of(samples: Iterable[Sample]) -> list[Line]:
    """The lines of samples, in the order of a file."""
    candidates: dict[str, str] = {}
    problems: dict[tuple[str, AnyKey, str], list[tuple[AnyConfig, str]]] = {}
    for sample in samples:
        text = _candidate_text(sample)
        id = candidates.get(text)
        if id is None:
            digest = hashlib.sha256(text.encode()).digest()
            id = candidates[text] = base64.urlsafe_b64encode(digest[:_ID_BYTES]).decode()
        values = [id, *sample.figures]
        text = canonical_json(values[:-2] if sample.status == "ok" and not sample.detail else values)
        problems.setdefault((sample.op, sample.key, sample.run), []).append((sample.config, text))
    lines = [Line(id, f'{{"candidate":"{id}",{text[1:]}') for text, id in sorted(candidates.items())]
    for (op, key, run), listed in sorted(problems.items()):
        # Then by text, for samples that differ in nothing they are sorted by.
        shared = canonical_json({"key": key.to_json(), "run": run})
        lines.append(Line(op, f'{shared[:-1]},"samples":[{",".join(text for _, text in sorted(listed))}]}}'))
    return lines


def line_of_run(run: Run) -> Line:
    return Line(run.id, canonical_json({"run": run.to_json()}))


def _candidate_text(sample: Sample) -> str:
    """What a candidate's line says, without the id."""
    config = sample.config.to_json()
    if isinstance(sample.config, Config):
        config = {name: value for name, value in config.items() if value != getattr(Config, name, None)}
    return canonical_json({"config": config, "kernel_sha256": sample.kernel_sha256})


def read_runs(path: Path, problems: list[str] | None = None) -> dict[str, Run]:
    """Reads runs.json: runs by id; `problems` and errors as of `read_samples`."""
    items: list[Any] = []
    with _skipping(problems, path, "runs"):
        listed = _read_document(path)["runs"]
        if not isinstance(listed, list):
            raise TypeError(f"a list of runs is expected, found {type(listed).__name__}")
        items = listed
    runs: dict[str, Run] = {}
    for data in items:
        with _skipping(problems, path, "a run"):
            run = Run.from_json(data)
            if run.id in runs:
                raise ValueError(f"two runs have the id {run.id!r}")
            runs[run.id] = run
    return runs


def write_runs(path: Path, runs: Iterable[Run]) -> None:
    ordered = sorted(runs, key=lambda run: run.id)
    _write_document(path, {"runs": [run.to_json() for run in ordered]})


def read_folder(
    folder: Path, pattern: str = "*.jsonl", problems: list[str] | None = None
) -> tuple[DeviceRecord, list[tuple[str, Run, Sample]]] | None:
    """Reads a device's folder.

    Args:
      folder: which.
      pattern: of the files of samples.
      problems: as of `read_samples`.

    Returns:
      The device, and the samples that have a run, each with its file and line and the run; None if
      nothing tells the device.
    """
    runs_path = folder / "runs.json"
    runs = read_runs(runs_path, problems)
    located: list[tuple[str, Run, Sample]] = []
    for path in sorted(folder.glob(pattern)):
        samples = read_samples(path, problems)
        located += [(f"{path}:{number}", runs[sample.run], sample) for number, sample in samples if sample.run in runs]
        with _skipping(problems, path, "complete"):
            if lacking := sorted(sample.run for _, sample in samples if sample.run not in runs):
                raise ValueError(
                    f"{runs_path} lacks the runs of {len(lacking)} of {len(samples)} samples, such as {lacking[0]!r}"
                )
    # If its names are lost, each run knows its device.
    record = DeviceRecord(fingerprint=min(runs.items())[1].device) if runs else None
    with _skipping(problems, folder / "device.json", "a device"):
        record = DeviceRecord.from_json(_read_document(folder / "device.json"))
    return None if record is None else (record, located)


def foreign_runs(place: Path, record: DeviceRecord, runs: Iterable[Run]) -> Iterator[str]:
    """What is wrong with runs that stand in the folder of another device."""
    for run in runs:
        if not run.device.same_hardware(record.fingerprint):
            yield (
                f"{place}: run {run.id!r} is of {run.device}, and device.json of "
                f"{record.fingerprint}; move its samples to the folder of its device"
            )


def write_device(path: Path, record: DeviceRecord) -> None:
    _write_document(path, record.to_json())


def _add_candidate(candidates: dict[str, _Candidate], line: Mapping[str, Any]) -> None:
    check_fields("a candidate's line", line, {"candidate", "config", "kernel_sha256"})
    id, data, sha256 = line["candidate"], line["config"], line["kernel_sha256"]
    check_name("candidate", id)
    _check_sha256(sha256)
    candidate = (Config if isinstance(data, Mapping) and "backend" in data else KernelConfig).from_json(data), sha256
    if candidates.setdefault(id, candidate) != candidate:
        raise ValueError(f"candidate={quoted(id)} must name one candidate, and names two")


def _checked_line(line: Any) -> tuple[AnyKey, str, list[list[Any]]]:
    """The key and the run that the samples of a line share, and their lists."""
    check_fields("a line", line, {"key", "run", "samples"})
    if type(line["samples"]) is not list or not line["samples"]:
        raise ValueError(f"samples={line['samples']!r:.60} must be a list that is not empty")
    for listed in line["samples"]:
        if type(listed) is not list or len(listed) not in (len(_IN_A_LIST) - 1, len(_IN_A_LIST) + 1):
            raise TypeError(f"samples={listed!r:.60} must be lists of a candidate's id, {', '.join(_IN_A_LIST)}")
    check_name("run", line["run"])
    return key_from_json(line["key"]), line["run"], line["samples"]


def _read_document(path: Path) -> Mapping[str, Any]:
    data: dict[str, Any] = parse_json(regular_file.read(path).decode("utf-8", "replace"))
    schema = data.get("schema") if isinstance(data, dict) else None
    if type(schema) is not int or schema != SCHEMA:
        raise ValueError(f"schema={schema!r:.60} must be {SCHEMA}; {_REMEDY_OF_SCHEMA}")
    return data


def _write_document(path: Path, data: Mapping[str, Any]) -> None:
    regular_file.write(path, canonical_document({"schema": SCHEMA, **data}).encode("ascii"))


@contextlib.contextmanager
def _skipping(problems: list[str] | None, place: object, what: str) -> Iterator[None]:
    """Adds what is wrong inside to the problems; without a list, raises it.

    A problem has a bounded length, however long the bad value is.
    """
    try:
        yield
    except (OSError, *PARSE_ERRORS) as error:
        text = f"the key {error} is missing" if isinstance(error, KeyError) else str(error)
        rule = "cannot be read" if isinstance(error, OSError) else f"not {what}"
        problem = f"{place}: {rule}: {text if len(text) <= 500 else text[:500] + '...'}; {REMEDY}"
        if problems is None:
            raise TableError(problem) from error
        problems.append(problem)


def _check_sha256(value: Any) -> None:
    if not isinstance(value, str) or not re.fullmatch("([0-9a-f]{64})?", value):
        raise ValueError(f"kernel_sha256={value!r:.80} must be empty or 64 hexadecimal digits")
