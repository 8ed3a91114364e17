"""Samples: what was measured, where and how; the committed input of the bake.

A device's folder (such as `nvidia_h200/`) holds

    <op>.jsonl    one sample a line, sorted, canonical JSON
    runs.json     the runs that took them: versions, clocks, commit, command
    device.json   the device's fingerprint and the names people give it

Every candidate at every shape is kept, not only the winner. Reading checks each value; an error
names the file and the line.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from stoneware.autotune.canonical import canonical_document, canonical_json
from stoneware.autotune.config import Config
from stoneware.autotune.key import Key
from stoneware.errors import TableError
from stoneware.runtime.device import DeviceFingerprint

SCHEMA = 1
STATUSES = ("ok", "wrong", "failed")
SCALES = ("row", "tensor", "none")
LAYOUTS = ("nt", "nn", "tn", "tt")
REMEDY = "restore the file from version control, or measure again with tools/tune"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One candidate timed at one shape, in one run.

    Attributes:
      op: "scaled_mm" or "matmul".
      n, k, m: sizes.
      a_dtype, b_dtype, out_dtype: names such as "e4m3", "bf16", "fp16".
      scales: "row", "tensor", or "none" for an op without scales.
      layout: of a and b, "n" for row-major and "t" for column-major; "nt" is a @ weight.t().
      config: the candidate.
      median_us, spread_us: median and interquartile range of the timings; 0 if status is "failed".
      count: how many timings.
      status: "ok"; "wrong" if the error was above the tolerance; "failed" if it did not run.
      error: relative error against float64.
      kernel_sha256: digest of the cubin; empty for kernels that are not ours.
      run: id of the run, an entry of runs.json.
      detail: for a sample that is not ok, what happened.

    Raises:
      TypeError, ValueError: a field breaks its rule.
    """

    op: str
    n: int
    k: int
    m: int
    a_dtype: str
    b_dtype: str
    out_dtype: str
    scales: str
    layout: str = "nt"
    config: Config
    median_us: float
    spread_us: float
    count: int
    status: str
    error: float
    kernel_sha256: str = ""
    run: str
    detail: str = ""

    def __post_init__(self) -> None:
        for name in ("op", "a_dtype", "b_dtype", "out_dtype", "run", "kernel_sha256", "detail"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name}={getattr(self, name)!r} must be a str")
        for name in ("op", "a_dtype", "b_dtype", "out_dtype", "run"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        for name in ("n", "k", "m"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} must be an int >= 1")
        for name, known in (("status", STATUSES), ("scales", SCALES), ("layout", LAYOUTS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} must be one of {', '.join(known)}"
                )
        if not isinstance(self.config, Config):
            raise TypeError(f"config={self.config!r} must be a Config")
        if type(self.count) is not int or self.count < 0:
            raise ValueError(f"count={self.count!r} must be an int >= 0")
        for name in ("median_us", "spread_us", "error"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
                raise ValueError(f"{name}={value!r} must be a finite number >= 0")
            object.__setattr__(self, name, float(value))
        if self.status == "ok" and (self.median_us <= 0 or self.count < 1):
            raise ValueError(
                f"median_us={self.median_us} and count={self.count} of a sample with status 'ok' "
                "must be positive"
            )
        if self.kernel_sha256 and not _is_sha256(self.kernel_sha256):
            raise ValueError(
                f"kernel_sha256={self.kernel_sha256!r} must be empty or 64 hexadecimal digits"
            )

    @property
    def key(self) -> Key:
        """The problem that was measured."""
        return Key(
            op=self.op, a_dtype=self.a_dtype, b_dtype=self.b_dtype, out_dtype=self.out_dtype,
            scales=self.scales, layout=self.layout, n=self.n, k=self.k, m=self.m,
        )

    @property
    def sort_key(self) -> tuple[Key, Config, str]:
        """The order of samples in a file: by problem, then candidate, then run."""
        return self.key, self.config, self.run

    def to_json(self) -> dict[str, Any]:
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        if not self.detail:
            del data["detail"]
        return {**data, "config": self.config.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Sample:
        _check_fields(cls, data, optional={"layout", "kernel_sha256", "detail"})
        return cls(**{**data, "config": Config.from_json(data["config"])})


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
            raise TypeError(f"device={self.device!r} must be a DeviceFingerprint")
        for field in fields(self):
            value = getattr(self, field.name)
            if "_clock_mhz_" in field.name:
                if type(value) is not int or value < 0:
                    raise ValueError(f"{field.name}={value!r} must be an int >= 0")
            elif field.name != "device" and not isinstance(value, str):
                raise TypeError(f"{field.name}={value!r} must be a str")
        if not self.id:
            raise ValueError("id of a run must not be empty")

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "device": self.device.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Run:
        _check_fields(cls, data, optional=set())
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
        if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
            raise ValueError(f"aliases={aliases!r} must be a list of names")
        return cls(
            fingerprint=DeviceFingerprint.from_json(data["fingerprint"]), aliases=tuple(aliases)
        )


def read_samples(path: str | os.PathLike[str]) -> list[tuple[int, Sample]]:
    """Reads a .jsonl file: (line number, sample) in the order of the file.

    Raises:
      TableError: naming file and line, if a line is not JSON or breaks a rule.
    """
    located = []
    for line_number, line in enumerate(_read_text(path).splitlines(), start=1):
        try:
            located.append((line_number, Sample.from_json(json.loads(line))))
        except (ValueError, TypeError, RecursionError) as error:
            raise TableError(f"{path}:{line_number}: not a sample: {error}; {REMEDY}") from error
    return located


def write_samples(path: str | os.PathLike[str], samples: Iterable[Sample]) -> None:
    """Writes samples sorted, one a line; the same samples give the same bytes."""
    ordered = sorted(samples, key=lambda sample: sample.sort_key)
    text = "".join(canonical_json(sample.to_json()) + "\n" for sample in ordered)
    Path(path).write_text(text, encoding="ascii", newline="\n")


def read_runs(path: str | os.PathLike[str]) -> dict[str, Run]:
    """Reads runs.json: runs by id."""
    runs = _read_document(path, "runs", lambda data: [Run.from_json(run) for run in data["runs"]])
    by_id = {run.id: run for run in runs}
    if len(by_id) != len(runs):
        raise TableError(f"{path}: two runs have one id; {REMEDY}")
    return by_id


def write_runs(path: str | os.PathLike[str], runs: Iterable[Run]) -> None:
    ordered = sorted(runs, key=lambda run: run.id)
    document = {"schema": SCHEMA, "runs": [run.to_json() for run in ordered]}
    Path(path).write_text(canonical_document(document), encoding="ascii", newline="\n")


def read_device(path: str | os.PathLike[str]) -> DeviceRecord:
    """Reads device.json."""
    return _read_document(path, "a device", DeviceRecord.from_json)


def write_device(path: str | os.PathLike[str], record: DeviceRecord) -> None:
    document = {"schema": SCHEMA, **record.to_json()}
    Path(path).write_text(canonical_document(document), encoding="ascii", newline="\n")


def _read_text(path: str | os.PathLike[str]) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{path}: cannot be read: {error}; {REMEDY}") from error


def _read_document(path: str | os.PathLike[str], what: str, parse: Any) -> Any:
    try:
        data = json.loads(_read_text(path))
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema={data['schema']!r} must be {SCHEMA}")
        return parse(data)
    except KeyError as error:
        raise TableError(f"{path}: not {what}: the key {error} is missing; {REMEDY}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise TableError(f"{path}: not {what}: {error}; {REMEDY}") from error


def _check_fields(cls: type, data: Any, optional: set[str]) -> None:
    if not isinstance(data, Mapping):
        raise TypeError(f"a JSON object is expected, found {type(data).__name__}")
    known = {field.name for field in fields(cls)}
    unknown = sorted(map(str, set(data) - known))
    missing = sorted(known - optional - set(data))
    if unknown or missing:
        raise ValueError(f"unknown fields {unknown}, missing fields {missing}")


def _is_sha256(text: str) -> bool:
    return len(text) == 64 and all(letter in "0123456789abcdef" for letter in text)
