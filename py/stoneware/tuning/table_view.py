"""A table's file as look-ups ask it: of its bytes each part is read when it is needed.

The digest proves integrity, not correctness. So every value that is read is checked, and a value that
breaks a rule is a TableError.
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from stoneware.errors import TableError
from stoneware.kernels.config import AnyConfig, config_from_json
from stoneware.kernels.key import AnyKey, Key, key_from_json, unchecked
from stoneware.runtime.device import DeviceFingerprint
from stoneware.tuning.table import RUN_FIELDS, Block, DeviceTable, Sizes
from stoneware.tuning.table_entry import Choice, Entry

if TYPE_CHECKING:
    from stoneware.tuning.time_model import Candidate, Corrections, TimeModel

MODEL = struct.Struct("<14I8d")
CORRECTION = struct.Struct("<HBee")
_ENDS = struct.Struct("<2I")
"""Two neighbours of a column of ends: where an item begins and ends."""

DAMAGES = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError, struct.error)
"""What reading or checking wrong contents raises."""

_INFINITY = float("inf")
_MOST = 1e12
"""The limit of a time in µs and of a ratio of times: products of a few stay finite."""

Method = TypeVar("Method", bound=Callable[..., Any])


def _checked(method: Method) -> Method:
    """Turns what wrong contents raise into a TableError."""

    @functools.wraps(method)
    def run(self: Any, *args: Any) -> Any:
        try:
            return method(self, *args)
        except DAMAGES as error:
            raise self.content.damaged(error) from error

    return run


def _check(is_right: bool, rule: str) -> None:
    if not is_right:
        raise ValueError(rule)


def _at(items: Sequence[Any], position: Any) -> Any:
    """The item at a position, which must not be negative."""
    if type(position) is not int or position < 0:
        raise ValueError(f"position {position!r:.40} must be an int >= 0")
    return items[position]


class Content:
    """What the blocks of all devices share: the bytes after the header, and the header's lists.

    Raises:
      any of DAMAGES: a part of the header breaks a rule.
    """

    def __init__(self, header: Mapping[str, Any], body: memoryview, damaged: Callable[[Exception], TableError]) -> None:
        self.op: str = header["op"]
        self.digest: str = header["digest"]
        self.body = body
        self.damaged = damaged
        self.rules = _texts(header["rules"], "rules")
        self.runs: dict[str, dict[str, str]] = {}
        for run in header["runs"]:
            _texts([*run.values()], "a run")
            _check(set(run) == set(RUN_FIELDS), f"a run must have the fields {RUN_FIELDS}")
            self.runs[run["id"]] = run
        self.run_ids = list(self.runs)
        _check(len(self.runs) == len(header["runs"]), "two runs must not have one id")
        self._configs: list[Any] = header["configs"]
        _check(
            isinstance(self._configs, list) and all(type(config) is dict for config in self._configs),
            "configs must be objects",
        )

    def config(self, position: int) -> AnyConfig:
        config = self._configs[position]
        if type(config) is dict:
            config = self._configs[position] = config_from_json(self.op, config)
        return config

    @property
    def num_configs(self) -> int:
        return len(self._configs)


def _texts(items: Any, name: str) -> list[str]:
    _check(isinstance(items, list) and all(isinstance(item, str) for item in items), f"{name} must be texts")
    return items


def device_table(header: Mapping[str, Any], content: Content) -> DeviceTable:
    """The device that a part of the header is of.

    Raises:
      any of DAMAGES: it breaks a rule.
    """
    blocks: dict[AnyKey, Block] = {}
    for part in header["kinds"]:
        kind = key_from_json(part["key"], is_kind=True)
        _check(kind.op == content.op and kind == kind.kind, "key of a kind: has sizes")
        _check(kind not in blocks, "two blocks must not be of one kind")
        blocks[kind] = _StoredBlock(kind, content, part)
    return DeviceTable(DeviceFingerprint.from_json(header["fingerprint"]), _texts(header["aliases"], "aliases"), blocks)


class _StoredBlock(Block):
    """A block of a table's bytes; for the columns see `table_file.py`."""

    def __init__(self, kind: AnyKey, content: Content, header: Mapping[str, Any]) -> None:
        self.kind = kind
        self.content = content
        self._configs: list[int] = header["configs"]
        _check(
            isinstance(self._configs, list)
            and all(type(position) is int and 0 <= position < content.num_configs for position in self._configs),
            "configs of a kind must be positions",
        )
        offset, self._num_groups, self.num_entries, num_corrections = (
            header[name] for name in ("offset", "groups", "entries", "corrections")
        )
        for number in (offset, self._num_groups, self.num_entries, num_corrections):
            _check(
                type(number) is int and 0 <= number <= len(content.body),
                "offset, groups, entries and corrections must be ints within the file",
            )
        self._num_sizes = num_sizes = len(kind.sizes)
        _check(1 <= self._num_groups <= self.num_entries, "a block must have groups of entries")
        _check(not num_corrections or isinstance(kind, Key), "only ops of ours have models")
        self._least_size = 1 if isinstance(kind, Key) else -_INFINITY
        self._found_last_sizes: dict[Sizes, tuple[int, ...]] = {}
        self._found_corrections: dict[Sizes, Corrections] = {}
        self._candidates: dict[int, Candidate] = _Candidates(self)
        # Where each column begins.
        self._first_sizes_at = at = offset
        self._group_ends_at = at = at + 8 * max(num_sizes - 1, 0) * self._num_groups
        self._last_sizes_at = at = at + 4 * (self._num_groups + 1)
        self._text_ends_at = at = at + 8 * min(num_sizes, 1) * self.num_entries
        at += 4 * (self.num_entries + 1)
        self.has_models = num_corrections > 0
        if self.has_models:
            self._correction_ends_at = at
            self._models_at = at = at + 4 * (self.num_entries + 1)
            self._corrections_at = at = at + MODEL.size * len(self._configs)
            at += CORRECTION.size * num_corrections
        self._texts_at = at

    @functools.cached_property
    @_checked
    def first_sizes(self) -> list[Sizes]:
        sizes: list[Sizes] = [()]
        if self._num_sizes > 1:
            columns = self.content.body[self._first_sizes_at : self._group_ends_at]
            sizes = list(struct.iter_unpack(f"<{self._num_sizes - 1}q", columns))
        _check(len(sizes) == self._num_groups and _ascends(sizes), "first sizes must ascend")
        _check(min(map(min, filter(None, sizes)), default=1) >= self._least_size, "size below 1")
        return sizes

    @functools.cached_property
    @_checked
    def _groups(self) -> dict[Sizes, tuple[int, int]]:
        """First sizes -> where the entries of their group begin and end."""
        ends = struct.unpack_from(f"<{self._num_groups + 1}I", self.content.body, self._group_ends_at)
        _check(
            (ends[0], ends[-1]) == (0, self.num_entries) and _ascends(ends),
            "ends of groups must ascend from 0 to the number of entries",
        )
        return dict(zip(self.first_sizes, itertools.pairwise(ends)))

    def last_sizes(self, first: Sizes) -> Sequence[int]:
        sizes = self._found_last_sizes.get(first)
        return self._read_last_sizes(first) if sizes is None else sizes

    @_checked
    def _read_last_sizes(self, first: Sizes) -> Sequence[int]:
        if first not in self._groups or not self._num_sizes:
            return ()
        start, end = self._groups[first]
        sizes = struct.unpack_from(f"<{end - start}q", self.content.body, self._last_sizes_at + 8 * start)
        _check(_ascends(sizes) and sizes[0] >= self._least_size, "last sizes must ascend from 1")
        self._found_last_sizes[first] = sizes
        return sizes

    def _position(self, sizes: Sizes) -> int:
        if not sizes:
            return 0
        first = sizes[:-1]
        return self._groups[first][0] + self.last_sizes(first).index(sizes[-1])

    @_checked
    def variants(self, sizes: Sizes) -> list[Entry]:
        content = self.content
        start, end = _ENDS.unpack_from(content.body, self._text_ends_at + 4 * self._position(sizes))
        text = content.body[self._texts_at + start : self._texts_at + end]
        variants = json.loads(str(text, "ascii"))
        _check(isinstance(variants, list) and bool(variants), "an entry must have variants")
        key = self.kind.with_sizes(sizes)
        return [self._entry(key, *variant) for variant in variants]

    def _entry(self, key: AnyKey, rule: int, run: int, rows: Any, sha256: str) -> Entry:
        _check(isinstance(rows, list) and bool(rows), "an entry must have choices")
        _texts([sha256], "digest")
        return Entry(
            key=key,
            choices=tuple([self._choice(run, *row) for row in rows]),
            rule=_at(self.content.rules, rule),
            kernel_sha256=sha256,
        )

    def _choice(
        self,
        usual_run: int,
        position: int,
        median_us: float,
        spread_us: float,
        run: int | None = None,
        is_stale: int = 0,
    ) -> Choice:
        is_right = (
            type(median_us) is float
            and 0 < median_us < _MOST
            and type(spread_us) is float
            and 0 <= spread_us < _MOST
            and is_stale in (0, 1)
        )
        _check(is_right, "a choice must have times in us, and is_stale be 0 or 1")
        return unchecked(
            Choice,
            {
                "config": self.content.config(_at(self._configs, position)),
                "median_us": median_us,
                "spread_us": spread_us,
                "run": _at(self.content.run_ids, usual_run if run is None else run),
                "is_stale": bool(is_stale),
                "interval_us": None,
            },
        )

    @functools.cached_property
    def models(self) -> dict[AnyConfig, TimeModel]:
        if not self.has_models:
            return {}
        candidates = map(self.candidate, range(len(self._configs)))
        return {config: model for config, model in candidates if model is not None}

    @_checked
    def candidate(self, position: int) -> Candidate:
        """The candidate of a config of a block with models, and its model."""
        from stoneware.kernels.candidate import candidate_of
        from stoneware.tuning.time_model import ALONG_K, ALONG_N, NUM_TIMES, TimeModel

        config = candidate_of(self.content.config(self._configs[position]), self.kind)
        # Not TimeModel._make, which takes twice as long.
        model = tuple.__new__(TimeModel, MODEL.unpack_from(self.content.body, self._models_at + MODEL.size * position))
        if not model.slots:
            return config, None
        times = model[-NUM_TIMES:]
        _check(
            min(model[:-NUM_TIMES]) >= 1
            and model.rows_along in (ALONG_K, ALONG_N)
            and all(0 <= us < _MOST for us in times)
            and sum(times) > model.unfilled_us,
            "a model must have counts >= 1, rows along k or n, and times",
        )
        return config, model

    def corrections(self, sizes: Sizes) -> Corrections:
        corrections = self._found_corrections.get(sizes)
        if corrections is None:
            corrections = self._found_corrections[sizes] = self._read_corrections(sizes)
        return corrections

    @_checked
    def _read_corrections(self, sizes: Sizes) -> Corrections:
        from stoneware.tuning.time_model import Corrections

        body, columns, num_configs = self.content.body, self._corrections_at, len(self._configs)
        position = self._position(sizes)
        begin, end = _ENDS.unpack_from(body, self._correction_ends_at + 4 * position)
        rows = list(CORRECTION.iter_unpack(body[columns + CORRECTION.size * begin : columns + CORRECTION.size * end]))
        _check(bool(rows) and len(rows) == end - begin, "an entry must have its corrections")
        _check(
            all(
                at < num_configs
                and 0 <= ratio < _MOST
                and 0 <= fullness <= 1
                and (ratio > 0 or self._candidates[at][1] is None)
                for at, _, ratio, fullness in rows
            ),
            "a correction must be of a config, a ratio of times and a part of the blocks",
        )
        return Corrections(self._candidates, rows)


def _ascends(values: Sequence[Any]) -> bool:
    return all(map(operator.lt, values, values[1:]))


class _Candidates(dict[int, "Candidate"]):
    """Position of a config -> it and its model, made once: the same objects each time."""

    def __init__(self, block: _StoredBlock) -> None:
        super().__init__()
        self._block = block

    def __missing__(self, position: int) -> Candidate:
        candidate = self[position] = self._block.candidate(position)
        return candidate
