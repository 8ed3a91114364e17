"""A grouped matmul as plain values: the description of a call for look-up, backends and explain.

    d[m, n] = scale_a[m] * scale_b[g, n] * (a[m, k] @ b[g, k, n])  for the rows m of group g

a is row-major with leading dimension lda, each b[g] column-major with ldb, d row-major with ldd;
strides count elements. Only the device has the offsets of the groups. Imports without torch, so that
the build and `explain` can use it.
"""

from __future__ import annotations

from typing import ClassVar

from stoneware.runtime.fast_dataclass import dataclass
from stoneware.specs.problem import AnyProblem, check_count, dense, unit

OP = "grouped_mm"

OUT_DTYPES = {"e4m3": ("bf16", "fp16"), "bf16": ("bf16",)}
"""Dtype of a and b -> dtypes of d."""

IN_DTYPES = tuple(OUT_DTYPES)


@dataclass(frozen=True, kw_only=True)
class Problem(AnyProblem):
    """One grouped matmul; the fields are validated and every message has rule, value, remedy.

    Attributes:
      m: rows of a, over all groups; at least 1.
      n, k: sizes of each group's b; multiples of 16 bytes of the operands.
      num_groups: at least 1.
      a_dtype, b_dtype: "e4m3", with scales, or "bf16", without; both the same.
      out_dtype: "bf16", or with e4m3 also "fp16".
      lda, ldb, ldd: leading dimensions in elements.
      group_stride_b: from one group's b to the next, in elements.

    Raises:
      TypeError: a size or a stride is not an int.
      ValueError: a field breaks its rule.
    """

    op: ClassVar[str] = OP
    counts: ClassVar[tuple[str, ...]] = (*AnyProblem.counts, "num_groups")
    strides: ClassVar[tuple[str, ...]] = ("group_stride_b",)

    num_groups: int
    a_dtype: str = "e4m3"
    b_dtype: str = "e4m3"
    out_dtype: str = "bf16"
    group_stride_b: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("num_groups", self.num_groups, remedy="pass how many groups there are")
        self.check_choices({"a_dtype": IN_DTYPES, "b_dtype": (self.a_dtype,)})
        self.check_choices({"out_dtype": OUT_DTYPES[self.a_dtype]})
        self.check_sizes(in_units=True)
        remedy = "copy the view into a dense tensor"
        check_count("group_stride_b", self.group_stride_b, least=0, multiple=unit(self.b_dtype), remedy=remedy)

    @classmethod
    def dense(cls, *, m: int, n: int, k: int, num_groups: int, dtype: str = "e4m3", out_dtype: str = "bf16") -> Problem:
        """The problem whose tensors are not views."""
        return cls(
            **dense(m, n, k),
            num_groups=num_groups,
            a_dtype=dtype,
            b_dtype=dtype,
            out_dtype=out_dtype,
            group_stride_b=n * k,
        )

    @property
    def scales(self) -> str:
        return "row" if self.a_dtype == "e4m3" else "none"

    @property
    def rows_per_group(self) -> int:
        """The mean, rounded up: reading the offsets from the device would synchronize."""
        return -(-self.m // self.num_groups)

    @property
    def representative(self) -> Problem:
        """Dense tensors, in which every group has the mean number of rows."""
        return Problem.dense(
            m=self.rows_per_group * self.num_groups,
            n=self.n,
            k=self.k,
            num_groups=self.num_groups,
            dtype=self.a_dtype,
            out_dtype=self.out_dtype,
        )

    @property
    def key_m(self) -> int:
        return self.rows_per_group

    @property
    def key_groups(self) -> int:
        return self.num_groups

    def __str__(self) -> str:
        return (
            f"{OP} m={self.m} n={self.n} k={self.k} groups={self.num_groups} "
            f"{self.a_dtype}*{self.b_dtype}->{self.out_dtype}"
        )
