"""Problems to measure: named layers and shapes of the user's, and their form between processes."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stoneware.kernels.key import LAYOUTS
from stoneware.ops.grouped_mm.problem import (
    IN_DTYPES, OUT_DTYPES as GROUPED_OUT_DTYPES, Problem as GroupedMmProblem,
)
from stoneware.ops.grouped_mm.shapes import EXPERTS, MAX_ROWS, ROWS_PER_GROUP
from stoneware.ops.matmul.problem import DTYPES, Problem as MatmulProblem
from stoneware.ops.scaled_mm.problem import OUT_DTYPES, SCALES, Problem as ScaledMmProblem
from stoneware.ops.scaled_mm.shapes import M_VALUES, WEIGHTS

if TYPE_CHECKING:
    from stoneware.ops.dispatch import Operation

Problem = ScaledMmProblem | MatmulProblem | GroupedMmProblem

PROBLEMS: dict[str, type[Problem]] = {
    "scaled_mm": ScaledMmProblem, "matmul": MatmulProblem, "grouped_mm": GroupedMmProblem,
}
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
    dtypes: Sequence[str] = IN_DTYPES,
) -> list[Problem]:
    """Every combination, in a fixed order and none twice.

    Args:
      ops: names of PROBLEMS.
      weights: names of layers in ops/scaled_mm/shapes.py, or for grouped_mm in
        ops/grouped_mm/shapes.py; an op takes those that it knows. None takes all, or none if
        `shapes` are given.
      m_values: rows of a, for grouped_mm the mean of a group, for `weights`; None takes those of
        the same files, for grouped_mm as far as all groups together have MAX_ROWS.
      shapes: further shapes, as "MxNxK", for grouped_mm as "GxMxNxK" with G groups of M rows on
        average, for a batch of matmul as "BxMxNxK"; an op takes those of its forms.
      scales: kinds of scales, for scaled_mm.
      out_dtypes: output dtypes; for matmul all dtypes. grouped_mm takes those that it has for the
        operands.
      layouts: of a and b, for matmul.
      dtypes: of a and b, for grouped_mm; "e4m3" has row scales.

    Raises:
      ValueError: a name is unknown, a shape breaks a rule of its op, or grouped_mm alone is asked
        for and has none of the output dtypes.
    """
    layers = {name: sizes for op in ops if op in PROBLEMS for name, sizes in _layers(op).items()}
    if weights is None:
        weights = () if shapes else tuple(layers)
    for what, found, known in (
        ("ops", ops, tuple(PROBLEMS)), ("weights", weights, tuple(layers)),
        ("scales", scales, SCALES), ("layouts", layouts, LAYOUTS), ("dtypes", dtypes, IN_DTYPES),
        ("out_dtypes", out_dtypes, tuple(dict.fromkeys((*OUT_DTYPES, *DTYPES)))),
    ):
        unknown = sorted(set(found) - set(known))
        if unknown:
            raise ValueError(
                f"{what}={','.join(unknown)} must be among {', '.join(known)}; name some of them"
            )
    further = [(shape, _sizes(shape)) for shape in shapes]
    for shape, sizes in further:
        if not any(len(sizes) in _NUM_SIZES[op] for op in ops):
            raise ValueError(
                f"shapes={shape!r} must be of the form that {' or '.join(ops)} takes: "
                f"{' or '.join(dict.fromkeys(_FORMS[op] for op in ops))}; write it so, or name "
                "another op"
            )
    made: Iterator[Problem] = (
        problem
        for op in ops
        for sizes in (
            *_of_layers(op, weights, m_values),
            *(sizes for _, sizes in further if len(sizes) in _NUM_SIZES[op]),
        )
        for problem in _of_sizes(op, sizes, scales, out_dtypes, layouts, dtypes)
    )
    found = list(dict.fromkeys(made))
    if not found and set(ops) == {"grouped_mm"} and not any(
        set(out_dtypes) & set(GROUPED_OUT_DTYPES[dtype]) for dtype in dtypes
    ):
        has = "; ".join(f"{dtype} has {', '.join(GROUPED_OUT_DTYPES[dtype])}" for dtype in dtypes)
        raise ValueError(
            f"out_dtypes={','.join(out_dtypes)} must be among those that grouped_mm has for "
            f"dtypes={','.join(dtypes)} ({has}); name one of them"
        )
    return found


def _layers(op: str) -> Mapping[str, tuple[int, ...]]:
    return EXPERTS if op == "grouped_mm" else WEIGHTS


_NUM_SIZES = {"scaled_mm": (3,), "matmul": (3, 4), "grouped_mm": (4,)}

_FORMS = {
    "scaled_mm": "MxNxK, such as 16x4096x14336",
    "matmul": "MxNxK, such as 16x4096x14336, or BxMxNxK, such as 128x16x512x128",
    "grouped_mm": "GxMxNxK, such as 8x16x4096x14336",
}


def _of_layers(
    op: str, weights: Sequence[str], m_values: Sequence[int] | None
) -> Iterator[tuple[int, ...]]:
    """(m, n, k), or for grouped_mm (groups, mean m, n, k)."""
    layers = _layers(op)
    for name in weights:
        if name in layers:
            *groups, n, k = layers[name]
            yield from ((*groups, m, n, k) for m in m_values or _m_values(*groups))


def _m_values(num_groups: int | None = None) -> Sequence[int]:
    if num_groups is None:
        return M_VALUES
    return [m for m in ROWS_PER_GROUP if m * num_groups <= MAX_ROWS]


def _sizes(shape: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[0-9]+(x[0-9]+){2,3}", shape):
        raise ValueError(
            f"shapes={shape!r} must be of the form {_FORMS['scaled_mm']}, for a batch of matmul "
            f"BxMxNxK, or for grouped_mm {_FORMS['grouped_mm']}"
        )
    return tuple(map(int, shape.split("x")))


def _of_sizes(
    op: str, sizes: tuple[int, ...], scales: Iterable[str], out_dtypes: Iterable[str],
    layouts: Iterable[str], dtypes: Sequence[str],
) -> Iterator[Problem]:
    *groups, m, n, k = sizes
    for out_dtype in out_dtypes:
        if op == "scaled_mm":
            for kind in scales:
                yield ScaledMmProblem.dense(m=m, n=n, k=k, out_dtype=out_dtype, scales=kind)
        elif op == "matmul":
            for layout in layouts:
                yield MatmulProblem.dense(
                    m=m, n=n, k=k, dtype=out_dtype, out_dtype=out_dtype, layout=layout,
                    batch=groups[0] if groups else 1,
                )
        else:
            [num_groups] = groups
            for dtype in dtypes:
                if out_dtype in GROUPED_OUT_DTYPES[dtype]:
                    yield GroupedMmProblem.dense(
                        m=m * num_groups, n=n, k=k, num_groups=num_groups, dtype=dtype,
                        out_dtype=out_dtype,
                    )


def cost(problem: Problem) -> float:
    """A problem's time in arbitrary units, for the time left: a fixed part, and the arithmetic."""
    return 1.0 + getattr(problem, "batch", 1) * problem.m * problem.n * problem.k / 1e12


def problem_to_json(problem: Problem) -> dict[str, Any]:
    """For `json.dumps`; `problem_from_json` gives the same problem back."""
    return {"op": problem.key.op, **dataclasses.asdict(problem)}


def problem_from_json(data: Mapping[str, Any]) -> Problem:
    fields = dict(data)
    return PROBLEMS[fields.pop("op")](**fields)
