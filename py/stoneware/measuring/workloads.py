"""Problems to measure: named layers and shapes of the user's, and their form between processes."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stoneware.autotune.key import LAYOUTS
from stoneware.ops.matmul.problem import DTYPES
from stoneware.ops.matmul.problem import Problem as MatmulProblem
from stoneware.ops.scaled_mm.problem import OUT_DTYPES, SCALES
from stoneware.ops.scaled_mm.problem import Problem as ScaledMmProblem
from stoneware.ops.scaled_mm.shapes import M_VALUES, WEIGHTS

if TYPE_CHECKING:
    from stoneware.ops.dispatch import Operation

Problem = ScaledMmProblem | MatmulProblem

PROBLEMS: dict[str, type[Problem]] = {"scaled_mm": ScaledMmProblem, "matmul": MatmulProblem}
"""The ops that are measured, with their Problem."""

SCALE_KINDS = ("row", "tensor")


def operation(op: str) -> Operation:
    """The op with its backends; imports torch."""
    return importlib.import_module(f"stoneware.ops.{op}.api").OPERATION


def problems(
    *,
    ops: Sequence[str] = tuple(PROBLEMS),
    weights: Sequence[str] | None = None,
    m_values: Sequence[int] | None = None,
    shapes: Sequence[str] = (),
    scales: Sequence[str] = SCALE_KINDS,
    out_dtypes: Sequence[str] = ("bf16",),
    layouts: Sequence[str] = ("nt",),
) -> list[Problem]:
    """Every combination, in a fixed order and none twice.

    Args:
      ops: names of PROBLEMS.
      weights: names of layers in ops/scaled_mm/shapes.py; None takes all, or none if `shapes` are
        given.
      m_values: rows of a, for `weights`; None takes those of ops/scaled_mm/shapes.py.
      shapes: further shapes, as "MxNxK".
      scales: kinds of scales, for scaled_mm.
      out_dtypes: output dtypes; for matmul all dtypes.
      layouts: of a and b, for matmul.

    Raises:
      ValueError: a name is unknown or a shape breaks a rule of its op.
    """
    if weights is None:
        weights = () if shapes else tuple(WEIGHTS)
    for what, found, known in (
        ("ops", ops, tuple(PROBLEMS)), ("weights", weights, tuple(WEIGHTS)),
        ("scales", scales, SCALES), ("layouts", layouts, LAYOUTS),
        ("out_dtypes", out_dtypes, tuple(dict.fromkeys((*OUT_DTYPES, *DTYPES)))),
    ):
        unknown = sorted(set(found) - set(known))
        if unknown:
            raise ValueError(f"{what}={','.join(unknown)} must be among {', '.join(known)}")
    sizes = [
        (m, *WEIGHTS[name]) for name in weights for m in (m_values or M_VALUES)
    ] + list(map(_sizes, shapes))
    made = (
        problem
        for op in ops
        for m, n, k in sizes
        for problem in _of_sizes(op, m, n, k, scales, out_dtypes, layouts)
    )
    return list(dict.fromkeys(made))


def _sizes(shape: str) -> tuple[int, int, int]:
    if not re.fullmatch(r"[0-9]+x[0-9]+x[0-9]+", shape):
        raise ValueError(f"shapes={shape!r} must be of the form MxNxK, such as 16x4096x14336")
    m, n, k = map(int, shape.split("x"))
    return m, n, k


def _of_sizes(
    op: str, m: int, n: int, k: int, scales: Iterable[str], out_dtypes: Iterable[str],
    layouts: Iterable[str],
) -> Iterator[Problem]:
    for out_dtype in out_dtypes:
        if op == "scaled_mm":
            for kind in scales:
                yield ScaledMmProblem.dense(m=m, n=n, k=k, out_dtype=out_dtype, scales=kind)
        else:
            for layout in layouts:
                yield MatmulProblem.dense(
                    m=m, n=n, k=k, dtype=out_dtype, out_dtype=out_dtype, layout=layout
                )


def cost(problem: Problem) -> float:
    """A problem's time in arbitrary units, for the time left: a fixed part, and the arithmetic."""
    return 1.0 + problem.m * problem.n * problem.k / 1e12


def problem_to_json(problem: Problem) -> dict[str, Any]:
    """For `json.dumps`; `problem_from_json` gives the same problem back."""
    return {"op": problem.key.op, **dataclasses.asdict(problem)}


def problem_from_json(data: Mapping[str, Any]) -> Problem:
    fields = dict(data)
    return PROBLEMS[fields.pop("op")](**fields)
