"""The ops as operators of torch's, for what traces calls: torch.compile, torch.export, modes.

An eager call does not come by here: a function in `api.py` calls its operator only while Dynamo
traces it, and `PlanCache.slow` only under a torch dispatch mode or for a subclass of torch.Tensor
that wants to see operators. The operator itself, when a compiled graph runs, is the eager call.

An operator that writes to `out` is one of its own, named NAME_out: torch.compile can make a call
without side effects of one that returns nothing, but not of one that returns its argument.

Registering takes half a millisecond and imports nothing, so it is done at import.
"""

from __future__ import annotations

import ast
import functools
import importlib
from typing import Any

import torch

from stoneware.kernels.config import Config

NAMESPACE = "stoneware"

_SCHEMAS = {
    "scaled_mm": (
        "Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias",
        "ScalarType out_dtype, bool use_fast_accum, str? backend, str? config",
    ),
    "matmul": (
        "Tensor a, Tensor b, Tensor? bias", "ScalarType? out_dtype, str? backend, str? config"
    ),
    "grouped_mm": (
        "Tensor a, Tensor b, Tensor offs, Tensor? scale_a, Tensor? scale_b",
        "ScalarType? out_dtype, str? backend, str? config",
    ),
}
"""op -> its tensors, and its other arguments; `out` stands between them."""

_TAGS = (
    torch.Tag.pt2_compliant_tag,
    torch.Tag.needs_exact_strides,  # a weight is column-major, and stays so
)


def scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
    bias: torch.Tensor | None, out: torch.Tensor | None, out_dtype: torch.dtype,
    use_fast_accum: bool, backend: str | None, config: Config | None,
) -> torch.Tensor:
    """scaled_mm by its operator; arguments as in `PlanCache`."""
    text = None if config is None else _text(config)
    if out is None:
        return torch.ops.stoneware.scaled_mm(
            a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum, backend, text
        )
    torch.ops.stoneware.scaled_mm_out(
        a, b, scale_a, scale_b, bias, out, out_dtype, use_fast_accum, backend, text
    )
    return out


def matmul(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None,
    out_dtype: torch.dtype | None, backend: str | None, config: Config | None,
) -> torch.Tensor:
    """matmul by its operator; arguments as in `PlanCache`."""
    text = None if config is None else _text(config)
    if out is None:
        return torch.ops.stoneware.matmul(a, b, bias, out_dtype, backend, text)
    torch.ops.stoneware.matmul_out(a, b, bias, out, out_dtype, backend, text)
    return out


def grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None, out: torch.Tensor | None, out_dtype: torch.dtype | None,
    backend: str | None, config: Config | None,
) -> torch.Tensor:
    """grouped_mm by its operator; arguments as in `PlanCache`."""
    text = None if config is None else _text(config)
    if out is None:
        return torch.ops.stoneware.grouped_mm(
            a, b, offs, scale_a, scale_b, out_dtype, backend, text
        )
    torch.ops.stoneware.grouped_mm_out(
        a, b, offs, scale_a, scale_b, out, out_dtype, backend, text
    )
    return out


def _text(config: Config) -> str:
    """A config as an operator's argument, written as Dynamo can trace it; json.dumps it cannot."""
    return "{" + ", ".join([f"{name!r}: {value!r}" for name, value in config.to_json().items()]) + "}"


@functools.lru_cache(maxsize=256)
def _config(text: str | None) -> Config | None:
    return None if text is None else Config.from_json(ast.literal_eval(text))


def _plans(op: str) -> Any:
    return importlib.import_module(f"stoneware.ops.{op}.api")._PLANS


def _run(op: str, arguments: tuple[Any, ...]) -> torch.Tensor:
    """The eager call; the last argument is the config's text."""
    from stoneware.ops.plan_cache import is_traced

    plans = _plans(op)
    arguments = (*arguments[:-1], _config(arguments[-1]))
    # Torch has shown the call to every mode by now, so it must not go there again.
    run = plans.run if is_traced(arguments[: len(plans.tensors)]) else plans.call
    return run(*arguments)


def _refuse_gradients(op: str, tensors: tuple[torch.Tensor | None, ...]) -> None:
    from stoneware.ops import tensor_checks

    tensor_checks.refuse_gradients(op, list(zip(_plans(op).tensors, tensors)))


def _check_scaled_mm(a: torch.Tensor, b: torch.Tensor) -> None:
    """What a shape cannot be inferred without; the call itself checks everything."""
    if a.ndim != 2 or b.ndim != 2:
        raise ValueError(
            f"a and b of scaled_mm must have 2 dimensions, not {a.ndim} and {b.ndim}; flatten "
            "leading dimensions with a.flatten(0, -2)"
        )
    torch._check(
        a.shape[1] == b.shape[0],
        lambda: f"a.shape={list(a.shape)} and b.shape={list(b.shape)} of scaled_mm must agree in "
        "k; pass a weight [n, k] as weight.t()",
    )


def _fake_scaled_mm(a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum, backend, config):
    _check_scaled_mm(a, b)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def _fake_matmul(a, b, bias, out_dtype, backend, config):
    if a.ndim and b.ndim:
        torch._check(
            a.shape[-1] == b.shape[-2 if b.ndim > 1 else -1],
            lambda: f"a.shape={list(a.shape)} and b.shape={list(b.shape)} of matmul must agree in k; "
            "pass a weight [n, k] as weight.t()",
        )
    # torch's own, for its rules of ranks and of broadcasting.
    return torch.matmul(a, b).to(out_dtype or a.dtype)


def _fake_grouped_mm(a, b, offs, scale_a, scale_b, out_dtype, backend, config):
    if a.ndim != 2 or b.ndim != 3:
        raise ValueError(
            f"a and b of grouped_mm must have 2 and 3 dimensions, not {a.ndim} and {b.ndim}; pass "
            "weights [groups, n, k] as weights.mT"
        )
    torch._check(
        a.shape[1] == b.shape[1],
        lambda: f"a.shape={list(a.shape)} and b.shape={list(b.shape)} of grouped_mm must agree in "
        "k; pass weights [groups, n, k] as weights.mT",
    )
    return a.new_empty((a.shape[0], b.shape[2]), dtype=out_dtype or torch.bfloat16)


_FAKES = {"scaled_mm": _fake_scaled_mm, "matmul": _fake_matmul, "grouped_mm": _fake_grouped_mm}


def _register(library: torch.library.Library, op: str) -> None:
    tensors, others = _SCHEMAS[op]
    num_inputs = tensors.count("Tensor")

    def run(*arguments: Any) -> torch.Tensor:
        return _run(op, (*arguments[:num_inputs], None, *arguments[num_inputs:]))

    def run_out(*arguments: Any) -> None:
        _run(op, arguments)

    def fake_out(*arguments: Any) -> None:
        _FAKES[op](*arguments[:num_inputs], *arguments[num_inputs + 1:])

    variants = (
        (op, f"({tensors}, {others}) -> Tensor", run, _FAKES[op], num_inputs),
        (f"{op}_out", f"({tensors}, Tensor(a!) out, {others}) -> ()", run_out, fake_out,
         num_inputs + 1),
    )
    for name, schema, eager, fake, num_tensors in variants:
        library.define(name + schema, tags=_TAGS)
        library.impl(name, eager, "CompositeExplicitAutograd")
        library.impl(name, _forward_only(op, name, num_tensors), "Autograd")
        # Not register_fake, which reads the source of its caller, 6 ms for all.
        library.impl(name, fake, "Meta")


def _forward_only(op: str, name: str, num_tensors: int) -> Any:
    """Refuses gradients where the eager call does, when the graph is traced."""

    def run(*arguments: Any) -> Any:
        _refuse_gradients(op, arguments[:num_tensors])
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.stoneware, name)(*arguments)

    return run


_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
for _op in _SCHEMAS:
    _register(_LIBRARY, _op)
