"""A bf16 or fp16 matmul as plain values: what look-up, backends and explain know about a call.

    d[m, n] = a[m, k] @ b[k, n] + bias[n]

Leading dimensions count elements. Free of torch, so that the build and `explain` can use it.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoneware.autotune.key import Key
from stoneware.ops.size_checks import check_sizes

OP = "matmul"
DTYPES = ("bf16", "fp16")
LAYOUTS = ("nt", "nn", "tn", "tt")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One matmul; the fields are validated and every message has rule, value, remedy.

    Attributes:
      m, n, k: sizes, at least 1.
      a_dtype, b_dtype, out_dtype: "bf16" or "fp16", all three the same.
      layout: of a and b, "n" for row-major and "t" for column-major; "nt" is a @ weight.t().
      has_bias: whether a bias of n elements of the same dtype is added.
      lda, ldb: stride of the operand's outer dimension: of rows for "n", of columns for "t".
      ldd: stride of the rows of d, which is row-major.
      is_aligned: whether the pointers of a, b and d are multiples of 16 bytes.

    Raises:
      TypeError: a size or a leading dimension is no int.
      ValueError: a field breaks its rule.
    """

    m: int
    n: int
    k: int
    a_dtype: str = "bf16"
    b_dtype: str = "bf16"
    out_dtype: str = "bf16"
    layout: str = "nt"
    has_bias: bool = False
    lda: int
    ldb: int
    ldd: int
    is_aligned: bool = True

    def __post_init__(self) -> None:
        check_sizes(self)
        for name in ("m", "n", "k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1; "
                                 "nothing is computed for an empty matrix")
        for name in ("a_dtype", "b_dtype", "out_dtype"):
            if getattr(self, name) not in DTYPES:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of "
                                 f"{', '.join(DTYPES)}; cast the tensor with .to(torch.bfloat16)")
        if not self.a_dtype == self.b_dtype == self.out_dtype:
            raise ValueError(
                f"a_dtype={self.a_dtype}, b_dtype={self.b_dtype} and out_dtype={self.out_dtype} "
                "must be the same; cast one with .to(...)"
            )
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout={self.layout!r} must be one of {', '.join(LAYOUTS)}")
        least = {
            "lda": self.k if self.layout[0] == "n" else self.m,
            "ldb": self.n if self.layout[1] == "n" else self.k,
            "ldd": self.n,
        }
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be at least {value} for layout "
                    f"{self.layout!r}; copy the view with .contiguous()"
                )

    @classmethod
    def dense(
        cls, *, m: int, n: int, k: int, dtype: str = "bf16", out_dtype: str = "bf16",
        layout: str = "nt", has_bias: bool = False,
    ) -> Problem:
        """The problem whose tensors are not views."""
        return cls(
            m=m, n=n, k=k, a_dtype=dtype, b_dtype=dtype, out_dtype=out_dtype, layout=layout,
            has_bias=has_bias, lda=k if layout[0] == "n" else m, ldb=n if layout[1] == "n" else k,
            ldd=n,
        )

    @property
    def key(self) -> Key:
        """The key under which the table files the problem."""
        return Key(
            op=OP, a_dtype=self.a_dtype, b_dtype=self.b_dtype, out_dtype=self.out_dtype,
            scales="none", layout=self.layout, n=self.n, k=self.k, m=self.m,
        )

    def __str__(self) -> str:
        return (
            f"{OP} m={self.m} n={self.n} k={self.k} {self.a_dtype} {self.layout}"
            + (", bias" if self.has_bias else "")
        )
