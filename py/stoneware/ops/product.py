"""What the Problems of the ops share: sizes, dtypes, leading dimensions, their checks and the key.

Free of torch, so that the build and `explain` can use it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import ClassVar

from stoneware.kernels.key import Key
from stoneware.runtime.fast_dataclass import dataclass

MAX_SIZE = 2**31 - 1
"""Of sizes and leading dimensions: kernels, cuBLAS and TMA descriptors count them in int32."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """Products d = a @ b with sizes and strides in elements. A subclass is an op's Problem: it sets
    `op`, gives its dtypes defaults, and checks what it asks beyond integers that kernels can count.

    Attributes:
      op: its name.
      scales, layout, accumulation: as in Key.
      m, n, k: sizes.
      a_dtype, b_dtype, out_dtype: names such as "bf16".
      lda, ldb, ldd: leading dimensions.

    Raises:
      TypeError: a size or a leading dimension is no int, or a bool.
      ValueError: one is above MAX_SIZE.
    """

    op: ClassVar[str]
    scales: ClassVar[str] = "none"
    layout: ClassVar[str] = "nt"
    accumulation: ClassVar[str] = "fast"

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
        for name in ("m", "n", "k", "lda", "ldb", "ldd"):
            value = getattr(self, name)
            check_int(name, value)
            if value > MAX_SIZE:
                raise ValueError(
                    f"{name}={value} must be at most 2**31-1={MAX_SIZE}; "
                    + ("split the problem" if len(name) == 1 else "copy the view into a dense tensor")
                )

    @property
    def as_filed(self) -> Product:
        """The problem that is measured where this one is missed: that of its key, where several
        problems have one."""
        return self

    @property
    def filed_m(self) -> int:
        """The m of the key."""
        return self.m

    @property
    def filed_groups(self) -> int:
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
            m=self.filed_m,
            accumulation=self.accumulation,
            num_groups=self.filed_groups,
        )

    def check_positive(self, names: Iterable[str]) -> None:
        """Raises ValueError unless these fields are at least 1."""
        for name in names:
            if getattr(self, name) < 1:
                remedy = "pass how many groups there are" if name == "num_groups" else "nothing is computed for none"
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1; {remedy}")

    def check_known(self, known: Mapping[str, Iterable[str]]) -> None:
        """Raises ValueError unless each named field has one of the values known for it."""
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} must be one of {', '.join(values)}; pass one of these"
                )


def check_int(name: str, value: object) -> None:
    """Raises TypeError unless the value is an int; a bool is refused."""
    if type(value) is not int:
        raise TypeError(f"{name}={value!r} must be an int, not {type(value).__name__}; pass int({name})")
