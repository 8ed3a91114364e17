"""The spec of an op: one value that describes everything but the op's arithmetic.

The torch operator (registration.py), the plan cache (plan_cache.py), the look-up (dispatch.py),
`explain`, `tune` and its measuring process, the report and the GPU checks all read an OpSpec. An op
consists of

    specs/<op>.py                SPEC, an OpSpec. Imports without torch, for the build and `explain`
    specs/<op>_problem.py        its Problem, from sizes or tensors
    measuring/<op>_operands.py   make(problem, device) and reference(operands), for measuring and checks
    ops/<op>/api.py              the function that users call, its OPERATION with the backends, its plans

and a line in `specs.OPS`, `measuring.operands.OPERANDS` and `ops.APIS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

from stoneware.kernels.config import Config
from stoneware.kernels.key import ELEMENT_BYTES, Key
from stoneware.kernels.manifest import Manifest
from stoneware.runtime.fast_dataclass import dataclass
from stoneware.specs.problem import AnyProblem

FLAGS = {
    "scales": "kinds of scales",
    "has_bias": "bias",
    "num_groups": "groups",
    "batch": "batch",
    "layout": "choice of a layout",
}
"""Field that describes a problem in addition to m, n, k, dtype and out_dtype -> its name in messages."""


SHAPE_FORM = "MxNxK, such as 16x4096x14336"
"""A shape of `--shapes` for one matmul."""


def matmul_operations(key: Key) -> int:
    """Floating-point operations, 2 m n k, of all groups or of the whole batch."""
    return 2 * key.m * key.n * key.k * max(1, key.num_groups)


def matmul_bytes(key: Key) -> int:
    """Bytes of a, b and the result of all groups or of the whole batch, without scales and bias.

    If a group has no rows, its b is counted although it is not read.
    """
    return max(1, key.num_groups) * (
        key.m * key.k * ELEMENT_BYTES[key.a_dtype]
        + key.k * key.n * ELEMENT_BYTES[key.b_dtype]
        + key.m * key.n * ELEMENT_BYTES[key.out_dtype]
    )


def matmul_tolerance(problem: Any) -> float:
    """The largest relative error of a result, in the Frobenius norm."""
    from stoneware.specs.tolerance import on_gpu

    return on_gpu(problem.a_dtype, problem.out_dtype, problem.k)


@dataclass(frozen=True, kw_only=True, eq=False)
class OpSpec:
    """An op.

    Attributes:
      name: of the op, its function and its torch operator.
      inputs: name -> type in torch's schema ("Tensor", or "Tensor?" if it may be None) of the tensors, in the
        order of the operator, the two operands first; `out` follows them.
      arguments: (name, type in torch's schema) of the other arguments; `backend` and `config`
        follow them.
      must_be_aligned: whether operands and an out whose addresses are no multiples of 16 bytes are refused.
      problem: the class of its problems; their text names the op and every value that a choice
        depends on.
      make_problem: (m, n, k, dtype, out_dtype, and what `takes` names) -> Problem; dtypes that are
        left out are the op's defaults.
      takes: the names of FLAGS that `make_problem` takes.
      needs: those of them without a default -> what to pass.
      tolerance: the largest relative error of a problem's result.
      preferred: the heuristic: configs by key, compute capability and manifest, best first.
      preferred_reason: backend -> why the heuristic chose one of its configs, a sentence.
      forms: number of sizes in a shape -> its form, with an example.
      layers: named layer -> its sizes without m, as in a shape.
      m_values: sizes of a layer -> the m that are measured.
      choices: list flags of `tune` that the op takes (scales, out_dtypes, layouts, dtypes,
        a_dtypes, accumulations) -> the values it knows.
      out_dtypes_of: dtype of the operands -> dtypes of the result, where not every pair exists.
      problems: (sizes of a shape, and a list for each of `choices`) -> the problems to measure.
      m_title: what m is, for a person.
      num_operations: floating-point operations of a key's problem.
      least_bytes: bytes that must be moved for it.
    """

    name: str
    inputs: Mapping[str, str]
    arguments: tuple[tuple[str, str], ...]
    must_be_aligned: bool = True
    problem: type[AnyProblem]
    make_problem: Callable[..., Any]
    takes: tuple[str, ...] = ()
    needs: Mapping[str, str] = field(default_factory=dict)
    tolerance: Callable[[Any], float] = matmul_tolerance
    preferred: Callable[[Key, tuple[int, int], Manifest], list[Config]]
    preferred_reason: Mapping[str, str]
    forms: Mapping[int, str]
    layers: Mapping[str, tuple[int, ...]]
    m_values: Callable[[Sequence[int]], Sequence[int]]
    choices: Mapping[str, tuple[str, ...]]
    out_dtypes_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    problems: Callable[..., Iterator[Any]]
    m_title: str = "m"
    num_operations: Callable[[Key], int] = matmul_operations
    least_bytes: Callable[[Key], int] = matmul_bytes

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the tensors in the order of the operator, out last."""
        return (*self.inputs, "out")

    @property
    def plan_order(self) -> tuple[str, ...]:
        """The names of the tensors in the order in which a plan takes them: out behind the operands."""
        a, b, *others = self.inputs
        return (a, b, "out", *others)
