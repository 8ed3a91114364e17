"""A scaled matmul as plain values: the description of a call for look-up, backends and explain.

    d[m, n] = scale_a * scale_b * (a[m, k] @ b[k, n]) + bias[n]

and with block scales

    d[m, n] = sum_j scale_a[m, j] * scale_b[j, n // 128] * (a[m, block j of k] @ b[block j of k, n])
              + bias[n],    block j of k being its elements 128 j to 128 j + 127

or with scale_b[j, n] of each column, if b is an activation or a gradient, like a.

a is row-major with leading dimension lda, b column-major with ldb, d row-major with ldd; leading
dimensions and strides count elements. Imports without torch, so that the build and `explain` can use it.
"""

from __future__ import annotations

from typing import Any, ClassVar

from stoneware.errors import quoted
from stoneware.runtime.fast_dataclass import dataclass
from stoneware.specs.problem import PADDING, AnyProblem, check_choice, check_count, dense

OP = "scaled_mm"
IN_DTYPES = ("e4m3", "e5m2")
OUT_DTYPES = ("bf16", "fp16", "fp32")
SCALES = ("tensor", "row", "block", "block_1d")
"""Kinds of a pair of scales, for `Problem.dense`."""

SCALE_A_KINDS = ("tensor", "row", "block_1x128")
SCALE_B_KINDS = ("tensor", "row", "block_128x128", "block_1x128")

BLOCK = 128
"""Elements of k, and columns of b, that share a block scale."""

BLOCK_PADDING = 4
"""torch pads scale_b along k to a multiple of this number of blocks, which is 16 bytes."""


def num_blocks(size: int) -> int:
    """How many blocks of scales `size` elements of k, or columns of b, have."""
    return -(-size // BLOCK)


def padded_num_blocks(k: int) -> int:
    """Rows of scale_b in the layout that torch requires: k / 128, padded."""
    return -(-num_blocks(k) // BLOCK_PADDING) * BLOCK_PADDING


@dataclass(frozen=True, kw_only=True)
class Problem(AnyProblem):
    """One scaled matmul; the fields are validated and every message has rule, value, remedy.

    Attributes:
      m, n, k: sizes; m >= 1, n and k multiples of 16; with block scales k a multiple of 128.
      a_dtype, b_dtype, out_dtype: "e4m3" or "e5m2"; likewise; "bf16", "fp16" or "fp32".
      scale_a: "tensor" (one float32), "row" (one per row of a) or "block_1x128" (one per 128
        elements of a row of a).
      scale_b: "tensor", "row" (one per column of b, that is per row of the weight), "block_128x128"
        (one per 128 of k and 128 columns of b) or "block_1x128" (one per 128 elements of a column);
        block scales come in pairs.
      has_bias: whether a bias of n elements of the out dtype is added.
      lda, ldb, ldd: leading dimensions in elements.
      use_fast_accum: whether the tensor core alone may keep the sums, with about 14 bits; block
        scales always add each 128 of k in full fp32.
      scale_a_stride_m, ld_scale_a: of block scales, elements from one row of scale_a to the next,
        and from one block of k to the next; any of 0 or more.
      scale_b_stride_n, ld_scale_b: likewise, from one column of b, or 128 of them, to the next, and
        from one block of k to the next.
      is_scale_b_padded: whether scale_b has `padded_num_blocks` rows.

    Raises:
      TypeError: a size or a leading dimension is not an int.
      ValueError: a field breaks its rule.
    """

    op: ClassVar[str] = OP
    strides: ClassVar[tuple[str, ...]] = ("scale_a_stride_m", "ld_scale_a", "scale_b_stride_n", "ld_scale_b")

    a_dtype: str = "e4m3"
    b_dtype: str = "e4m3"
    out_dtype: str = "bf16"
    scale_a: str = "row"
    scale_b: str = "row"
    has_bias: bool = False
    use_fast_accum: bool = True
    scale_a_stride_m: int = 0
    ld_scale_a: int = 0
    scale_b_stride_n: int = 0
    ld_scale_b: int = 0
    is_scale_b_padded: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choices({"a_dtype": IN_DTYPES, "b_dtype": IN_DTYPES, "out_dtype": OUT_DTYPES})
        self.check_choices({"scale_a": SCALE_A_KINDS, "scale_b": SCALE_B_KINDS})
        if (self.scale_a == "block_1x128") != (self.scale_b in ("block_128x128", "block_1x128")):
            raise ValueError(
                f"scale_a={quoted(self.scale_a)} and scale_b={quoted(self.scale_b)} must both be block scales "
                "or none; give a and b scales 1x128 and 128x128, or one per row and column"
            )
        self.check_sizes(in_units=True)
        if self.has_block_scales:
            check_count("k", self.k, multiple=BLOCK, remedy=PADDING["k"])

    @classmethod
    def dense(
        cls,
        *,
        m: int,
        n: int,
        k: int,
        dtype: str = "e4m3",
        b_dtype: str | None = None,
        out_dtype: str = "bf16",
        scales: str = "row",
        has_bias: bool = False,
        use_fast_accum: bool = True,
    ) -> Problem:
        """The problem whose tensors are not views: lda = ldb = k and ldd = n.

        Args:
          dtype: of a, and of b unless `b_dtype` is given.
          scales: one of SCALES, or one for a and one for b, such as "tensor/row". Block scales have
            torch's layout: scale_a [m, k / 128] with the strides (1, m), scale_b
            [padded_num_blocks(k), ceil(n / 128)] with the strides (1, padded_num_blocks(k)), or for
            "block_1d" [k / 128, n], row-major.
        """
        check_choice("dtype", dtype, IN_DTYPES)
        kind_a, _, kind_b = scales.partition("/")
        if not {kind_a, kind_b or kind_a} <= set(SCALES):
            raise ValueError(
                f"scales={quoted(scales)} must be one of {', '.join(SCALES)}, or two as tensor/row, for "
                "a and b; pass one of these"
            )
        sizes = dense(m, n, k)
        scale_a, scale_b = kind_a, kind_b or kind_a
        layout: dict[str, Any] = {}
        if kind_a.startswith("block"):
            scale_a = "block_1x128"
            layout = {"scale_a_stride_m": 1, "ld_scale_a": m}
        if kind_a == "block_1d":
            scale_b = kind_b or "block_1x128"
            layout |= {"ld_scale_b": n, "scale_b_stride_n": 1}
        elif kind_a == "block":
            scale_b = kind_b or "block_128x128"
            layout |= {"ld_scale_b": 1, "scale_b_stride_n": padded_num_blocks(k), "is_scale_b_padded": True}
        return cls(
            **sizes,
            **layout,
            a_dtype=dtype,
            b_dtype=dtype if b_dtype is None else b_dtype,
            out_dtype=out_dtype,
            scale_a=scale_a,
            scale_b=scale_b,
            has_bias=has_bias,
            use_fast_accum=use_fast_accum,
        )

    @property
    def representative(self) -> Problem:
        """This problem with block scales in the layout of `dense`. The key does not include scale strides,
        and the measured time of a backend excludes its conversion from other layouts."""
        if not self.has_block_scales:
            return self
        from dataclasses import replace

        dense = Problem.dense(m=self.m, n=self.n, k=self.k, scales=self.scales)
        return replace(self, **{name: getattr(dense, name) for name in (*self.strides, "is_scale_b_padded")})

    @property
    def scales(self) -> str:
        """ "tensor" if both scales are, "block" or "block_1d" by the kind of scale_b; otherwise "row", also for
        "tensor/row" and "row/tensor"."""
        if self.has_block_scales:
            return "block_1d" if self.scale_b == "block_1x128" else "block"
        return "tensor" if self.scale_a == self.scale_b == "tensor" else "row"

    @property
    def accumulation(self) -> str:
        """ "slow" or "fast"; always "fast" with block scales, which leave no choice."""
        return "fast" if self.use_fast_accum or self.has_block_scales else "slow"

    @property
    def has_block_scales(self) -> bool:
        """Whether scales change along k."""
        return self.scale_a == "block_1x128"

    def __str__(self) -> str:
        return (
            f"{OP} m={self.m} n={self.n} k={self.k} {self.a_dtype}*{self.b_dtype}->"
            f"{self.out_dtype}, scales {self.scale_a}/{self.scale_b}"
            + (", bias" if self.has_bias else "")
            + (", slow accumulation" if self.accumulation == "slow" else "")
        )
