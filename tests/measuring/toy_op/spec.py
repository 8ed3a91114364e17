"""An op as small as an op can be: out[m, n] = a[m, n] + 2 * b[m, n] in float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from stoneware.kernels.config import Config
from stoneware.runtime.fast_dataclass import dataclass
from stoneware.specs.op_spec import SHAPE_FORM, OpSpec
from stoneware.specs.problem import AnyProblem

ADD = Config(backend="vendor", kernel="toy.add_300")
ADDCMUL = Config(backend="vendor", kernel="toy.addcmul_200")


@dataclass(frozen=True, kw_only=True)
class Problem(AnyProblem):
    op: ClassVar[str] = "toy_add"
    layout: ClassVar[str] = "nn"

    k: int = 1
    a_dtype: str = "fp32"
    b_dtype: str = "fp32"
    out_dtype: str = "fp32"
    lda: int = 0
    ldb: int = 0

    @classmethod
    def dense(cls, *, m: int, n: int, k: int = 1) -> Problem:
        return cls(m=m, n=n, k=k, ldd=n)

    def __str__(self) -> str:
        return f"toy_add m={self.m} n={self.n}"


def _problems(sizes: Sequence[int]) -> Iterator[Problem]:
    m, n, k = sizes
    yield Problem.dense(m=m, n=n, k=k)


SPEC = OpSpec(
    name="toy_add",
    inputs={"a": "Tensor", "b": "Tensor"},
    arguments=(),
    must_be_aligned=False,
    problem=Problem,
    make_problem=Problem.dense,
    tolerance=lambda problem: 1e-6,
    preferred=lambda key, compute_capability, manifest: [ADD],
    preferred_reason={"vendor": "no measurement applies; the first"},
    forms={3: SHAPE_FORM},
    layers={"toy_layer": (32, 1)},
    m_values=lambda sizes: (4, 16),
    choices={},
    problems=_problems,
    num_operations=lambda key: 2 * key.m * key.n,
    least_bytes=lambda key: 12 * key.m * key.n,
)
