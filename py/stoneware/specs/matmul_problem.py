"""A bf16 or fp16 matmul as plain values: the description of a call for look-up, backends and explain.

    d[i, m, n] = a[i, m, k] @ b[i, k, n] + bias[n]     for each i of the batch; or d += a @ b

Leading dimensions and strides count elements. Imports without torch, so that the build and `explain`
can use it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from stoneware.kernels.key import LAYOUTS
from stoneware.runtime.fast_dataclass import dataclass
from stoneware.specs.problem import AnyProblem, check_choice, check_count, check_int, dense, is_free_of_overlap

OP = "matmul"
DTYPES = ("bf16", "fp16")
WIDE_DTYPE = "fp32"
"""The other dtype that d may have."""


@dataclass(frozen=True, kw_only=True)
class Problem(AnyProblem):
    """One matmul, or a batch of one shape; the fields are validated and every message has rule,
    value, remedy.

    Attributes:
      m, n, k: sizes of one matmul, at least 1.
      a_dtype, b_dtype: "bf16" or "fp16", both the same.
      out_dtype: the same, or "fp32".
      layout: of a and b, "n" for row-major and "t" for column-major; "nt" is a @ weight.t().
      has_bias: whether a bias of n elements of out_dtype is added to each row.
      accumulate: whether the products are added to d; only without a bias. The key omits it: the time is
        that of a matmul that overwrites d.
      lda, ldb: stride of the operand's outer dimension: of rows for "n", of columns for "t".
      ldd: stride of the rows of d, which is row-major.
      is_aligned: whether the pointers of a, b and d are multiples of 16 bytes.
      batch: number of matmuls of this shape.
      batch_stride_a, batch_stride_b: from an operand of one matmul to that of the next; 0 if all share
        it, and for a batch of 1.
      batch_stride_d: the same for d; 0 for a batch of 1.

    Raises:
      TypeError: a size or a leading dimension is not an int.
      ValueError: a field breaks its rule.
    """

    op: ClassVar[str] = OP
    counts: ClassVar[tuple[str, ...]] = (*AnyProblem.counts, "batch")
    strides: ClassVar[tuple[str, ...]] = ("batch_stride_a", "batch_stride_b", "batch_stride_d")

    a_dtype: str = "bf16"
    b_dtype: str = "bf16"
    out_dtype: str = "bf16"
    layout: str = "nt"
    has_bias: bool = False
    accumulate: bool = False
    is_aligned: bool = True
    batch: int = 1
    batch_stride_a: int = 0
    batch_stride_b: int = 0
    batch_stride_d: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choices({"a_dtype": DTYPES, "b_dtype": (self.a_dtype,), "out_dtype": (self.a_dtype, WIDE_DTYPE)})
        self.check_choices({"layout": LAYOUTS})
        self.check_sizes(in_units=False)
        if self.accumulate and self.has_bias:
            raise ValueError("accumulate=True must have no bias; leave out has_bias")
        check_count("batch", self.batch, remedy="leave it out for one matmul")
        for name in self.strides:
            if self.batch == 1 and getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)} must be 0 with batch=1; leave it out")
        if self.batch > 1 and not is_free_of_overlap((self.batch, self.m, self.n), (self.batch_stride_d, self.ldd, 1)):
            raise ValueError(
                f"batch_stride_d={self.batch_stride_d} and ldd={self.ldd} must keep {self.batch} "
                f"matmuls of m={self.m}, n={self.n} apart, or they would overwrite one another; "
                "pass an out that is not expanded"
            )

    @classmethod
    def dense(
        cls,
        *,
        m: int,
        n: int,
        k: int,
        dtype: str = "bf16",
        out_dtype: str | None = None,
        layout: str = "nt",
        has_bias: bool = False,
        batch: int = 1,
    ) -> Problem:
        """The problem whose tensors are not views; `out_dtype` is `dtype` if it is left out.

        Raises:
          TypeError, ValueError: see the class.
        """
        check_choice("dtype", dtype, DTYPES)
        check_choice("layout", layout, LAYOUTS)
        check_int("batch", batch)
        return cls(
            **dense(m, n, k, layout),
            a_dtype=dtype,
            b_dtype=dtype,
            out_dtype=dtype if out_dtype is None else out_dtype,
            layout=layout,
            has_bias=has_bias,
            batch=batch,
            batch_stride_a=m * k if batch > 1 else 0,
            batch_stride_b=k * n if batch > 1 else 0,
            batch_stride_d=m * n if batch > 1 else 0,
        )

    @property
    def representative(self) -> Problem:
        """A batch of dense tensors, whatever the strides of this one; a single matmul that overwrites d represents
        itself."""
        if self.batch == 1:
            return replace(self, accumulate=False) if self.accumulate else self
        return Problem.dense(
            m=self.m,
            n=self.n,
            k=self.k,
            dtype=self.a_dtype,
            out_dtype=self.out_dtype,
            layout=self.layout,
            has_bias=self.has_bias,
            batch=self.batch,
        )

    @property
    def key_groups(self) -> int:
        """The size of a batch. The time of one matmul predicts little about a batch, which fills the grid
        sooner and which the vendor library computes with other kernels. A batch that shares b becomes one
        matmul over all its rows if the strides of a and d allow it (layouts.py)."""
        return self.batch if self.batch > 1 else 0

    def __str__(self) -> str:
        return (
            f"{OP} "
            + (f"batch={self.batch} " if self.batch > 1 else "")
            + f"m={self.m} n={self.n} k={self.k} {self.a_dtype} {self.layout}"
            + (f" -> {self.out_dtype}" if self.out_dtype != self.a_dtype else "")
            + (", bias" if self.has_bias else "")
            + (", added to out" if self.accumulate else "")
        )
