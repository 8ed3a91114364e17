"""Problems to measure: of named layers and of the user's shapes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from stoneware.errors import quoted
from stoneware.specs import OPS, spec_of

if TYPE_CHECKING:
    from stoneware.specs.op_spec import OpSpec
    from stoneware.specs.problem import AnyProblem

SCALE_KINDS = ("row", "tensor")


def problems(
    *,
    ops: Sequence[str] | None = None,
    weights: Sequence[str] | None = None,
    m_values: Sequence[int] | None = None,
    shapes: Sequence[str] = (),
    scales: Sequence[str] = SCALE_KINDS,
    out_dtypes: Sequence[str] = ("bf16",),
    layouts: Sequence[str] = ("nt",),
    dtypes: Sequence[str] = ("e4m3", "bf16"),
    a_dtypes: Sequence[str] = ("e4m3",),
    accumulations: Sequence[str] = ("fast",),
) -> list[AnyProblem]:
    """Every combination, in a fixed order and none twice; the arguments are the flags of
    `stoneware tune`, and an op takes those that it knows.

    Args:
      ops: None takes all.
      weights: names of layers; None takes all, or none if `shapes` are given.
      m_values: rows of a for `weights`; None takes those of the op's spec.
      shapes: such as "16x4096x14336", in a form of one of the ops.

    Raises:
      ValueError: a name is unknown, a shape breaks a rule of its op, or the ops have none of the
        output dtypes.
    """
    ops = tuple(OPS) if ops is None else ops
    _check_names("ops", ops, tuple(OPS))
    specs = [spec_of(op) for op in ops]
    layers = dict.fromkeys(name for spec in specs for name in spec.layers)
    if weights is None:
        weights = () if shapes else tuple(layers)
    _check_names("weights", weights, tuple(layers))
    lists = {
        "scales": scales,
        "layouts": layouts,
        "dtypes": dtypes,
        "out_dtypes": out_dtypes,
        "a_dtypes": a_dtypes,
        "accumulations": accumulations,
    }
    for name, values in lists.items():
        of_ops = [spec_of(op).choices.get(name, ()) for op in OPS]
        _check_names(name, values, tuple(dict.fromkeys(one for known in of_ops for one in known)))
    further = [_sizes(shape, specs) for shape in shapes]
    found = list(
        dict.fromkeys(
            problem
            for spec in specs
            for sizes in (
                *_of_layers(spec, weights, m_values),
                *(shape for shape in further if len(shape) in spec.forms),
            )
            for problem in spec.problems(sizes, **{name: lists[name] for name in spec.choices})
        )
    )
    if not found:
        for spec in specs:
            _check_pairs(spec, dtypes, out_dtypes)
    return found


def _check_names(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(f"{what}={','.join(unknown)} must be among {', '.join(known)}; name some of them")


def _check_pairs(spec: OpSpec, dtypes: Sequence[str], out_dtypes: Sequence[str]) -> None:
    """Raises ValueError if the op has none of the output dtypes for these operands."""
    known = {dtype: spec.out_dtypes_of[dtype] for dtype in dtypes if dtype in spec.out_dtypes_of}
    if known and not any(set(out_dtypes) & set(of_dtype) for of_dtype in known.values()):
        has = "; ".join(f"{dtype} has {', '.join(outs)}" for dtype, outs in known.items())
        raise ValueError(
            f"out_dtypes={','.join(out_dtypes)} must be among those that {spec.name} has for "
            f"dtypes={','.join(dtypes)} ({has}); name one of them"
        )


def _of_layers(spec: OpSpec, weights: Sequence[str], m_values: Sequence[int] | None) -> Iterator[tuple[int, ...]]:
    """Sizes in the order of a shape: m before the last two."""
    for name in weights:
        if name in spec.layers:
            *groups, n, k = sizes = spec.layers[name]
            yield from ((*groups, m, n, k) for m in m_values or spec.m_values(sizes))


def _sizes(shape: str, specs: Sequence[OpSpec]) -> tuple[int, ...]:
    sizes = shape.split("x") if re.fullmatch(r"[0-9]+(x[0-9]+)*", shape) else []
    if not any(len(sizes) in spec.forms for spec in specs):
        forms = dict.fromkeys(form for spec in specs for form in spec.forms.values())
        raise ValueError(
            f"shapes={quoted(shape)} must be of the form that {' or '.join(spec.name for spec in specs)} "
            f"takes: {' or '.join(forms)}; correct it, or name another op"
        )
    return tuple(map(int, sizes))


def cost(problem: AnyProblem) -> float:
    """Relative time of a problem, to estimate the remaining time: a fixed part, and the arithmetic."""
    return 1.0 + spec_of(problem.key.op).num_operations(problem.key) / 2e12
