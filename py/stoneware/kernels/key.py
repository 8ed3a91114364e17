"""Keys: under what a measurement is filed and looked up.

`Key` is a problem of one of our ops, `KernelKey` one of a kernel under `sw.autotune`. Both have
`sizes`; a `kind`, all but the sizes; and a `family`, the kinds whose times can be compared. A kernel's
time depends on how many bytes an element has, not on its dtype, and on the class of scales:

    family   kinds
    kind     problems: the exact dtypes and scales that were measured
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import asdict, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

from stoneware.errors import quoted
from stoneware.runtime.canonical import check_name
from stoneware.runtime.fast_dataclass import dataclass, field_names

SCALES = ("row", "tensor", "none", "block", "block_1d")
ACCUMULATIONS = ("fast", "slow")
LAYOUTS = ("nt", "nn", "tn", "tt")

ELEMENT_BYTES = {"e4m3": 1, "e5m2": 1, "bf16": 2, "fp16": 2, "fp32": 4}

_CLASSES_OF_SCALES = {"row": "epilogue", "tensor": "epilogue"}
"""Scales of rows and of tensors multiply finished sums, in the same time (docs/design/table.md)."""

MAX_SIZE = 2**31 - 1
"""Of m, n and k, as the ops have it."""

Value = bool | int | float | str | None
"""What the value of a key argument may be: what JSON gives back unchanged."""


T = TypeVar("T")


def unchecked(cls: type[T], values: Mapping[str, Any]) -> T:
    """Makes a frozen dataclass from all its fields, which are known to be right: a look-up makes a
    few dozen objects, and the generated __init__ with its checks takes several times as long."""
    made = object.__new__(cls)
    made.__dict__.update(values)
    return made


class Family(NamedTuple):
    """Problems of an op that differ in sizes, and in what does not change the time of a tile.

    Attributes:
      op, layout, accumulation: as of a Key.
      a_bytes, b_bytes, out_bytes: of an element.
      scales: their class: "epilogue" for "row" and "tensor", else as of a Key.
      batch: products of a batch; 0 for none.
    """

    op: str
    a_bytes: int
    b_bytes: int
    out_bytes: int
    scales: str
    layout: str
    accumulation: str
    batch: int


@dataclass(frozen=True, kw_only=True, order=True)
class Key:
    """A shape (n, k, m, groups) of a kind (op, dtypes, scales, layout, accumulation, products of a batch).

    Attributes:
      op: such as "scaled_mm"; it has no colon.
      a_dtype, b_dtype, out_dtype: names in ELEMENT_BYTES.
      scales: one of SCALES; "none" for an op without scales, "block" for 1x128 of a and 128x128
        of b, "block_1d" for 1x128 of both.
      layout: of a and b, "n" for row-major and "t" for column-major; "nt" is a @ weight.t().
      n, k, m: sizes; all 0 in a kind.
      accumulation: one of ACCUMULATIONS; "slow" where sums of fp8 products must be kept in full
        fp32, "fast" elsewhere. JSON leaves "fast" out, so that
        keys read and write as they did before there was "slow".
      num_groups: of a grouped product the matrices b, each with its own rows, of which m is the
        mean; of a batch its products, each of m rows; 0 for one product.
    """

    op: str
    a_dtype: str
    b_dtype: str
    out_dtype: str
    scales: str
    layout: str
    n: int
    k: int
    m: int
    accumulation: str = "fast"
    num_groups: int = 0

    has_m: ClassVar[bool] = True

    @property
    def dtypes(self) -> tuple[str, str, str]:
        return self.a_dtype, self.b_dtype, self.out_dtype

    @property
    def kind(self) -> Key:
        return self.with_sizes((0,) * len(self.sizes))

    @property
    def family(self) -> Family:
        return Family(
            self.op,
            ELEMENT_BYTES[self.a_dtype],
            ELEMENT_BYTES[self.b_dtype],
            ELEMENT_BYTES[self.out_dtype],
            _CLASSES_OF_SCALES.get(self.scales, self.scales),
            self.layout,
            self.accumulation,
            self.num_groups if self.is_batch else 0,
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """What problems of a kind differ in: n and k, of a grouped product num_groups before them; the last
        is m, which varies at run time."""
        sizes = self.n, self.k, self.m
        return (self.num_groups, *sizes) if self.op == "grouped_mm" else sizes

    def with_sizes(self, sizes: tuple[int, ...]) -> Key:
        *groups, n, k, m = sizes
        num_groups = groups[0] if groups else self.num_groups
        return unchecked(Key, {**self.__dict__, "n": n, "k": k, "m": m, "num_groups": num_groups})

    @property
    def shape(self) -> str:
        name = "batch" if self.is_batch else "groups"
        groups = f" {name}={self.num_groups}" if self.num_groups else ""
        return f"m={self.m} n={self.n} k={self.k}{groups}"

    @property
    def is_batch(self) -> bool:
        """Whether it is of several products of one shape."""
        return self.num_groups > 0 and self.op != "grouped_mm"

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        if self.accumulation == "fast":
            del data["accumulation"]
        # What was written before there were groups stays as it is.
        if not self.num_groups:
            del data["num_groups"]
        return data


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelKey:
    """The key arguments of a call of a decorated kernel.

    Attributes:
      op: the kernel, as "package.module:function".
      names: the key arguments in the order of the decorator's `key`.
      values: the value of each; an argument that was omitted and has no default is None.
      dtypes: (argument, dtype) of each tensor, in the order of the signature.
    """

    op: str
    names: tuple[str, ...]
    values: tuple[Value, ...]
    dtypes: tuple[tuple[str, str], ...]

    is_batch: ClassVar[bool] = False
    scales: ClassVar[str] = "none"

    def __eq__(self, other: object) -> bool:
        # By type too: True is not a size, though it equals 1.
        return isinstance(other, KernelKey) and self._order == other._order

    def __hash__(self) -> int:
        return hash(self._order)

    def __lt__(self, other: KernelKey) -> bool:
        return self._order < other._order

    @property
    def _order(self) -> tuple[Any, ...]:
        return self.op, self.names, self.dtypes, tuple(map(value_order, self.values))

    @property
    def _size_positions(self) -> list[int]:
        positions = [idx for idx, value in enumerate(self.values) if type(value) is int]
        # m last, as in a Key: it is what varies at run time.
        return sorted(positions, key=lambda idx: self.names[idx].lower() == "m")

    @property
    def kind(self) -> KernelKey:
        return self.with_sizes((0,) * len(self._size_positions))

    @property
    def family(self) -> KernelKey:
        return self.kind

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.values[idx] for idx in self._size_positions)

    def with_sizes(self, sizes: tuple[int, ...]) -> KernelKey:
        values = list(self.values)
        for idx, size in zip(self._size_positions, sizes, strict=True):
            values[idx] = size
        return replace(self, values=tuple(values))

    @property
    def has_m(self) -> bool:
        """Whether the last of the sizes is m."""
        positions = self._size_positions
        return bool(positions) and self.names[positions[-1]].lower() == "m"

    @property
    def shape(self) -> str:
        return " ".join(f"{name}={value}" for name, value in zip(self.names, self.values))

    def to_json(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "names": list(self.names),
            "values": list(self.values),
            "dtypes": [list(pair) for pair in self.dtypes],
        }


AnyKey = Key | KernelKey
AnyFamily = Family | KernelKey

_FIELDS, _KERNEL_FIELDS = set(field_names(Key)), set(field_names(KernelKey))


def rows_run_along_n(layout: str) -> bool:
    """Whether a row of b in memory has all n of one k, not all k of one n."""
    return layout[1] == "n"


def is_kernel(op: str) -> bool:
    """Whether `op` names a decorated kernel, "package.module:function", and not an op of ours."""
    return ":" in op


def check_fields(what: str, data: object, known: Set[str], optional: Set[str] = frozenset()) -> None:
    """Raises TypeError or ValueError unless `data` is a JSON object with these fields."""
    if not isinstance(data, Mapping):
        raise TypeError(f"{what}={data!r:.60} must be a JSON object, not {type(data).__name__}")
    if not known - optional <= data.keys() <= known:
        raise ValueError(
            f"{what} has unknown fields {sorted(map(str, data.keys() - known))}, missing fields "
            f"{sorted(known - optional - data.keys())}"
        )


def key_from_json(data: Mapping[str, Any], *, is_kind: bool = False) -> AnyKey:
    """Makes the key that `to_json` wrote.

    Args:
      data: the JSON object.
      is_kind: sizes are 0.

    Raises:
      TypeError, ValueError: a field is missing, unknown, or breaks its rule.
    """
    if isinstance(data, Mapping):
        check_name("op", data.get("op"))
        if is_kernel(data["op"]):
            check_fields("key", data, _KERNEL_FIELDS)
            return _kernel_key(data)
    check_fields("key", data, _FIELDS, {"accumulation", "num_groups"})
    return _op_key(data, least=0 if is_kind else 1)


def _op_key(data: Mapping[str, Any], least: int) -> Key:
    for name in ("a_dtype", "b_dtype", "out_dtype"):
        if not isinstance(data[name], str) or data[name] not in ELEMENT_BYTES:
            raise ValueError(f"{name}={quoted(data[name])} must be one of {', '.join(ELEMENT_BYTES)}")
    key = Key(**data)
    for name, least_size in (("n", least), ("k", least), ("m", least), ("num_groups", 0)):
        size = getattr(key, name)
        if type(size) is not int or not least_size <= size <= MAX_SIZE:
            raise ValueError(f"{name}={size!r:.40} must be an int from {least_size} to {MAX_SIZE}")
    for name, values in (("scales", SCALES), ("layout", LAYOUTS), ("accumulation", ACCUMULATIONS)):
        if getattr(key, name) not in values:
            raise ValueError(f"{name}={quoted(getattr(key, name))} must be one of {', '.join(values)}")
    return key


def _kernel_key(data: Mapping[str, Any]) -> KernelKey:
    names, values, dtypes = data["names"], data["values"], data["dtypes"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"names={quoted(names)} must be a list of str")
    if not isinstance(values, list) or len(values) != len(names):
        raise ValueError(f"values={quoted(values)} must be a list as long as names={quoted(names)}")
    for name, value in zip(names, values):
        check_value(name, value)
    if not isinstance(dtypes, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair) for pair in dtypes
    ):
        raise ValueError(f"dtypes={quoted(dtypes)} must be a list of [argument, dtype]")
    return KernelKey(
        op=data["op"], names=tuple(names), values=tuple(values), dtypes=tuple((name, dtype) for name, dtype in dtypes)
    )


def value_order(value: Value) -> tuple[str, Value, str]:
    """By what values of any type are compared and sorted; by text last, for -0.0 equals 0.0."""
    return type(value).__name__, 0 if value is None else value, str(value)


def check_value(name: str, value: object) -> None:
    """Raises TypeError or ValueError unless `value` may stand in a key."""
    if value is not None and type(value) not in (bool, int, float, str):
        raise TypeError(
            f"{name}={quoted(value)} of type {type(value).__name__} cannot be part of a key; a key "
            "argument must be a bool, int, float, str or None: leave it out of key="
        )
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise ValueError(f"{name}={value!r:.40} of a key must be an int of 64 bits; leave it out of key=")
    if type(value) is float and not math.isfinite(value):
        raise ValueError(f"{name}={value!r} of a key must be finite; leave it out of key=")
