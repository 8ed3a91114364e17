"""The base class of the ops' Problems: sizes, dtypes, leading dimensions, their checks and the key.

Imports without torch, so that the build and `explain` can use it.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from stoneware.errors import quoted
from stoneware.kernels.key import ELEMENT_BYTES, MAX_SIZE, Key
from stoneware.runtime.fast_dataclass import dataclass

UNIT_BYTES = 16
"""TMA needs addresses and strides that are multiples of 16 bytes (CUDA driver API, cuTensorMapEncodeTiled,
globalAddress and globalStrides). So do the loads of the AOT kernels and torch._grouped_mm.
FastCall::kAlignment in cc/call/fast_call.h is the same."""


@dataclass(frozen=True, kw_only=True)
class AnyProblem:
    """A call of an op as plain values: d = a @ b, with sizes and strides in elements. Each op has a subclass
    `Problem`, which sets `op` and the default dtypes, and checks the rules of the op.

    Attributes:
      op: name of the op.
      m, n, k: sizes.
      a_dtype, b_dtype, out_dtype: names such as "bf16".
      lda, ldb, ldd: leading dimensions.

    Raises:
      TypeError: a size or a leading dimension is not an int, or is a bool.
      ValueError: one is above MAX_SIZE.
    """

    op: ClassVar[str]
    counts: ClassVar[tuple[str, ...]] = ("m", "n", "k", "lda", "ldb", "ldd")
    """Fields that kernels, cuBLAS and TMA descriptors count in int32."""
    strides: ClassVar[tuple[str, ...]] = ()
    """Further strides, which kernels count in int64; 0 or more."""

    m: int
    n: int
    k: int
    a_dtype: str
    b_dtype: str
    out_dtype: str
    lda: int
    ldb: int
    ldd: int

    def __post_init__(self) -> None:
        for name in (*self.counts, *self.strides):
            check_int(name, getattr(self, name))
        for name in self.counts:
            if (value := getattr(self, name)) > MAX_SIZE:
                remedy = "copy the view into a dense tensor" if name.startswith("ld") else "split the problem"
                raise ValueError(f"{name}={quoted(value)} must be at most 2**31-1={MAX_SIZE}; {remedy}")
        for name in self.strides:
            check_count(name, getattr(self, name), least=0, remedy=_COPY)

    @property
    def scales(self) -> str:
        """See Key."""
        return "none"

    @property
    def layout(self) -> str:
        """See Key."""
        return "nt"

    @property
    def accumulation(self) -> str:
        """See Key."""
        return "fast"

    @property
    def representative(self) -> AnyProblem:
        """The problem that is measured under this one's key: problems with the same key share its times."""
        return self

    @property
    def key_m(self) -> int:
        """The m of the key."""
        return self.m

    @property
    def key_groups(self) -> int:
        """The number of groups of the key."""
        return 0

    @functools.cached_property
    def key(self) -> Key:
        """The key under which the table files the problem."""
        return Key(
            op=self.op,
            a_dtype=self.a_dtype,
            b_dtype=self.b_dtype,
            out_dtype=self.out_dtype,
            scales=self.scales,
            layout=self.layout,
            n=self.n,
            k=self.k,
            m=self.key_m,
            accumulation=self.accumulation,
            num_groups=self.key_groups,
        )

    def check_sizes(self, *, in_units: bool) -> None:
        """Raises ValueError unless sizes are positive and each leading dimension is at least the size of its
        rows or columns. With `in_units`, n, k and the leading dimensions must be multiples of 16 bytes too."""
        operands, result = (unit(self.a_dtype), unit(self.out_dtype)) if in_units else (1, 1)
        for name, multiple in (("m", 1), ("n", operands), ("k", operands)):
            remedy = PADDING[name] if multiple > 1 else "an empty matmul runs no kernel, so leave it out"
            check_count(name, getattr(self, name), multiple=multiple, remedy=remedy)
        for name, spanned in _spanned(self.layout).items():
            multiple, remedy = (result, "pass an out with aligned rows") if name == "ldd" else (operands, _COPY)
            least = getattr(self, spanned)
            check_count(name, getattr(self, name), least=least, least_is=spanned, multiple=multiple, remedy=remedy)

    def check_choices(self, choices: Mapping[str, Collection[str]]) -> None:
        """Raises ValueError unless each named field has one of its values."""
        for name, values in choices.items():
            check_choice(name, getattr(self, name), values)


PADDING = {"n": "pad b (and bias) with columns of zeros", "k": "pad a and b along k with zeros"}
_COPY = "copy the view with .contiguous() (column-major: .mT.contiguous().mT), or pad the rows of its base"


def unit(dtype: str) -> int:
    """Elements in UNIT_BYTES."""
    return UNIT_BYTES // ELEMENT_BYTES[dtype]


def _spanned(layout: str) -> dict[str, str]:
    """Leading dimension -> the size that is contiguous under it."""
    return {"lda": "k" if layout[0] == "n" else "m", "ldb": "n" if layout[1] == "n" else "k", "ldd": "n"}


def dense(m: int, n: int, k: int, layout: str = "nt") -> dict[str, Any]:
    """The sizes and leading dimensions of a matmul whose tensors are not views.

    Raises:
      TypeError: a size is not an int.
    """
    sizes = {"m": m, "n": n, "k": k}
    for name, value in sizes.items():
        check_int(name, value)
    return {**sizes, **{name: sizes[spanned] for name, spanned in _spanned(layout).items()}}


def check_count(name: str, value: int, *, least: int = 1, least_is: str = "", multiple: int = 1, remedy: str) -> None:
    """Raises ValueError unless the value is a multiple of `multiple` and at least `least`, the value of the
    size named `least_is`."""
    if value >= least and value % multiple == 0:
        return
    rule = f"at least {least_is and least_is + '='}{least}"
    if multiple > 1:
        rule = f"a positive multiple of {multiple}" if least == 1 else f"{rule} and a multiple of {multiple}"
    raise ValueError(f"{name}={quoted(value)} must be {rule}; {remedy}")


def is_free_of_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether no two elements share memory: each stride is past the end of the dimensions with smaller strides."""
    end = 1
    for stride, size in sorted(zip(strides, shape)):
        if size > 1:
            if stride < end:
                return False
            end += (size - 1) * stride
    return True


def check_choice(name: str, value: object, values: Collection[str]) -> None:
    """Raises ValueError unless the value, which may be of any type, is among `values`."""
    if value not in (*values,):  # a list has no hash
        raise ValueError(f"{name}={quoted(value)} must be one of {', '.join(values)}; pass one of these")


def check_int(name: str, value: object) -> None:
    """Raises TypeError unless the value is an int; a bool is refused."""
    if type(value) is not int:
        raise TypeError(f"{name}={quoted(value)} must be an int, not {type(value).__name__}; pass int({name})")


def check_bool(name: str, value: object) -> None:
    """Raises TypeError unless the value is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={quoted(value)} must be a bool, not {type(value).__name__}; pass True or False")
