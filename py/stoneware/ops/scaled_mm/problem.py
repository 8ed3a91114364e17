"""A scaled matmul as plain values: what look-up, backends and explain know about a call.

    d[m, n] = scale_a * scale_b * (a[m, k] @ b[k, n]) + bias[n]

a is row-major with leading dimension lda, b column-major with ldb, d row-major with ldd; leading
dimensions count elements. Free of torch, so that the build and `explain` can use it.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoneware.autotune.key import Key
from stoneware.ops.size_checks import check_sizes

OP = "scaled_mm"
IN_DTYPES = ("e4m3",)
OUT_DTYPES = ("bf16", "fp16")
SCALES = ("tensor", "row")

K_MULTIPLE = 16
"""n, k, lda and ldb: TMA wants 16-byte strides, and an e4m3 is one byte (CUDA driver API,
cuTensorMapEncodeTiled, globalStrides)."""

LDD_MULTIPLE = 8
"""ldd: the same 16 bytes in elements of two bytes."""


def check_multiple(name: str, value: int, multiple: int, remedy: str) -> None:
    """Raises ValueError unless `value` is a positive multiple of `multiple`."""
    if value < multiple or value % multiple:
        raise ValueError(f"{name}={value} must be a positive multiple of {multiple}; {remedy}")


def check_stride(name: str, value: int, least: int, of: str, multiple: int, remedy: str) -> None:
    """Raises ValueError unless the leading dimension `value` spans a row and is aligned."""
    if value < least:
        raise ValueError(f"{name}={value} must be at least {of}={least}; {remedy}")
    if value % multiple:
        raise ValueError(f"{name}={value} must be a multiple of {multiple}; {remedy}")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One scaled matmul; the fields are validated and every message has rule, value, remedy.

    Attributes:
      m, n, k: sizes; m >= 1, n and k multiples of 16.
      a_dtype, b_dtype, out_dtype: "e4m3"; "e4m3"; "bf16" or "fp16".
      scale_a: "tensor" (one float32) or "row" (one per row of a).
      scale_b: "tensor" or "row" (one per column of b, that is per row of the weight).
      has_bias: whether a bias of n elements of the out dtype is added.
      lda, ldb, ldd: leading dimensions in elements.

    Raises:
      TypeError: a size or a leading dimension is no int.
      ValueError: a field breaks its rule.
    """

    m: int
    n: int
    k: int
    a_dtype: str = "e4m3"
    b_dtype: str = "e4m3"
    out_dtype: str = "bf16"
    scale_a: str = "row"
    scale_b: str = "row"
    has_bias: bool = False
    lda: int
    ldb: int
    ldd: int

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.m < 1:
            raise ValueError(f"m={self.m} must be at least 1; nothing is computed for no rows")
        check_multiple("n", self.n, K_MULTIPLE, "pad b (and bias) with columns of zeros")
        check_multiple("k", self.k, K_MULTIPLE, "pad a and b along k with zeros")
        for name, known in (
            ("a_dtype", IN_DTYPES), ("b_dtype", IN_DTYPES), ("out_dtype", OUT_DTYPES),
            ("scale_a", SCALES), ("scale_b", SCALES),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} must be one of {', '.join(known)}"
                )
        copy = "copy the view with .contiguous(), or allocate its base with padded rows"
        check_stride("lda", self.lda, self.k, "k", K_MULTIPLE, copy)
        check_stride("ldb", self.ldb, self.k, "k", K_MULTIPLE, copy.replace(
            ".contiguous()", ".t().contiguous().t()"))
        check_stride("ldd", self.ldd, self.n, "n", LDD_MULTIPLE, "pass an out with aligned rows")

    @classmethod
    def dense(
        cls, *, m: int, n: int, k: int, dtype: str = "e4m3", out_dtype: str = "bf16",
        scales: str = "row", has_bias: bool = False,
    ) -> Problem:
        """The problem whose tensors are not views: lda = ldb = k and ldd = n."""
        return cls(
            m=m, n=n, k=k, a_dtype=dtype, b_dtype=dtype, out_dtype=out_dtype, scale_a=scales,
            scale_b=scales, has_bias=has_bias, lda=k, ldb=k, ldd=n,
        )

    @property
    def scales(self) -> str:
        """"tensor" if both scales are, else "row": one scale of each kind is filed as "row"."""
        return "tensor" if self.scale_a == self.scale_b == "tensor" else "row"

    @property
    def key(self) -> Key:
        """The key under which the table files the problem."""
        return Key(
            op=OP, a_dtype=self.a_dtype, b_dtype=self.b_dtype, out_dtype=self.out_dtype,
            scales=self.scales, layout="nt", n=self.n, k=self.k, m=self.m,
        )

    def __str__(self) -> str:
        return (
            f"{OP} m={self.m} n={self.n} k={self.k} {self.a_dtype}*{self.b_dtype}->"
            f"{self.out_dtype}, scales {self.scale_a}/{self.scale_b}"
            + (", bias" if self.has_bias else "")
        )
