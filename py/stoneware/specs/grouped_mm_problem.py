"""A grouped matmul as plain values: the description of a call for look-up, backends and explain.

    d[m, n] = scale_a[m] * scale_b[g, n] * (a[m, k] @ b[g, k, n])  for the rows m of group g

and with block scales

    d[m, n] = sum_j scale_a[m, j] * scale_b[g, j, n // 128] * (a[m, block j of k] @ b[g, block j of k, n]),
              block j of k being its elements 128 j to 128 j + 127

a is row-major with leading dimension lda, each b[g] column-major with ldb, d row-major with ldd;
strides count elements. Only the device has the offsets of the groups. Imports without torch, so that
the build and `explain` can use it.
"""

from __future__ import annotations

from typing import Any, ClassVar

from stoneware.runtime.fast_dataclass import dataclass
from stoneware.specs.problem import PADDING, AnyProblem, check_choice, check_count, dense, unit
from stoneware.specs.scaled_mm_problem import BLOCK, num_blocks

OP = "grouped_mm"

OUT_DTYPES = {"e4m3": ("bf16", "fp16"), "bf16": ("bf16",)}
"""Dtype of a and b -> dtypes of d."""

IN_DTYPES = tuple(OUT_DTYPES)

SCALES = ("row", "block")
"""Kinds of the scales of e4m3, for `Problem.dense`."""


@dataclass(frozen=True, kw_only=True)
class Problem(AnyProblem):
    """One grouped matmul; the fields are validated and every message has rule, value, remedy.

    Attributes:
      m: rows of a, over all groups; at least 1.
      n, k: sizes of each group's b; multiples of 16 bytes of the operands.
      num_groups: at least 1.
      a_dtype, b_dtype: "e4m3", with scales, or "bf16", without; both the same.
      out_dtype: "bf16", or with e4m3 also "fp16".
      has_block_scales: whether e4m3 has a scale per 128 elements of a row of a, and per 128 of k and 128 columns of
        b, and not per row of a and column of each b; k is then a multiple of 128.
      lda, ldb, ldd: leading dimensions in elements.
      group_stride_b: from one group's b to the next, in elements.
      scale_a_stride_m, ld_scale_a: of block scales, elements from one row of scale_a to the next, and from one
        block of k to the next; any of 0 or more.
      scale_b_stride_n, ld_scale_b, group_stride_scale_b: likewise, from 128 columns of a b to the next, from one
        block of k to the next, and from one group to the next.

    Raises:
      TypeError: a size or a stride is not an int.
      ValueError: a field breaks its rule.
    """

    op: ClassVar[str] = OP
    counts: ClassVar[tuple[str, ...]] = (*AnyProblem.counts, "num_groups")
    strides: ClassVar[tuple[str, ...]] = (
        "group_stride_b",
        "scale_a_stride_m",
        "ld_scale_a",
        "scale_b_stride_n",
        "ld_scale_b",
        "group_stride_scale_b",
    )

    num_groups: int
    a_dtype: str = "e4m3"
    b_dtype: str = "e4m3"
    out_dtype: str = "bf16"
    has_block_scales: bool = False
    group_stride_b: int
    scale_a_stride_m: int = 0
    ld_scale_a: int = 0
    scale_b_stride_n: int = 0
    ld_scale_b: int = 0
    group_stride_scale_b: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("num_groups", self.num_groups, remedy="pass how many groups there are")
        self.check_choices({"a_dtype": IN_DTYPES, "b_dtype": (self.a_dtype,)})
        self.check_choices({"out_dtype": OUT_DTYPES[self.a_dtype]})
        self.check_sizes(in_units=True)
        remedy = "copy the view into a dense tensor"
        check_count("group_stride_b", self.group_stride_b, least=0, multiple=unit(self.b_dtype), remedy=remedy)
        if self.has_block_scales:
            if self.a_dtype != "e4m3":
                raise ValueError(f"has_block_scales of {self.a_dtype} must be False; give e4m3 operands block scales")
            check_count("k", self.k, multiple=BLOCK, remedy=PADDING["k"])

    @classmethod
    def dense(
        cls,
        *,
        m: int,
        n: int,
        k: int,
        num_groups: int,
        dtype: str = "e4m3",
        out_dtype: str = "bf16",
        scales: str = "row",
    ) -> Problem:
        """The problem whose tensors are not views.

        Args:
          scales: one of SCALES; bf16 has none, and ignores "row". Block scales have the layout that `sw.quantize`
            writes: scale_a [m, k / 128] with the strides (1, m), each scale_b [k / 128, ceil(n / 128)] with
            the strides (1, k / 128).
        """
        check_choice("dtype", dtype, IN_DTYPES)
        check_choice("scales", scales, SCALES)
        layout: dict[str, Any] = {}
        if scales == "block":
            layout = {
                "has_block_scales": True,
                "scale_a_stride_m": 1,
                "ld_scale_a": m,
                "scale_b_stride_n": num_blocks(k),
                "ld_scale_b": 1,
                "group_stride_scale_b": num_blocks(k) * num_blocks(n),
            }
        return cls(
            **dense(m, n, k),
            **layout,
            num_groups=num_groups,
            a_dtype=dtype,
            b_dtype=dtype,
            out_dtype=out_dtype,
            group_stride_b=n * k,
        )

    @property
    def scales(self) -> str:
        """See Key."""
        return "none" if self.a_dtype != "e4m3" else "block" if self.has_block_scales else "row"

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
            scales="block" if self.has_block_scales else "row",
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
            f"{self.a_dtype}*{self.b_dtype}->{self.out_dtype}, scales {self.scales}"
        )
