"""Registers the ops as torch operators, for torch.compile, torch.export and dispatch modes.

Eager calls do not use the operators. A function in `api.py` calls its operator while Dynamo traces
it; the plan cache calls it under a torch dispatch mode or for a subclass of torch.Tensor that
intercepts operators. When a compiled graph runs, the operator makes the eager call.

The variant that writes to `out` is a separate operator, NAME_out, which returns nothing: torch.compile
can functionalize that, but not an operator that returns its argument.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from stoneware.kernels.config import Config
from stoneware.ops import tensor_checks
from stoneware.specs.op_spec import OpSpec
from stoneware.tuning import policy

if TYPE_CHECKING:
    from stoneware.ops.backward import Rule

NAMESPACE = "stoneware"

_TAGS = (
    torch.Tag.pt2_compliant_tag,
    torch.Tag.needs_exact_strides,  # a weight stays column-major
)

_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def register(
    spec: OpSpec, result: Callable[..., Any], call: Callable[..., torch.Tensor], has_gradients: bool = False
) -> Callable[..., torch.Tensor]:
    """Registers an op's two operators; takes a fraction of a millisecond and imports nothing.

    Args:
      spec: of the op.
      result: infers the result: (*inputs, out or None, *other arguments) -> its shape and dtype.
      call: the eager call: (*inputs, out or None, *other arguments) -> out.
      has_gradients: whether it has a rule for its gradients, which takes the arguments of `call`.

    Returns:
      The call by its operator, with the arguments of `call`; Dynamo can trace it.
    """
    inputs = ", ".join(f"{kind} {name}" for name, kind in spec.inputs.items())
    others = ", ".join(f"{kind} {name}" for name, kind in (*spec.arguments, ("backend", "str?"), ("config", "str?")))
    tensors, num_inputs, name = spec.tensors, len(spec.inputs), spec.name

    def eager(*arguments: Any) -> torch.Tensor:
        return eager_out(*arguments[:num_inputs], None, *arguments[num_inputs:])

    def eager_out(*arguments: Any) -> torch.Tensor:
        # A compiled graph's backward comes here in a thread of autograd.
        return policy.run_in(None, call, *arguments[:-1], _config(arguments[-1]))

    def write_out(*arguments: Any) -> None:
        eager_out(*arguments)

    def fake(*arguments: Any) -> torch.Tensor:
        shape, dtype = result(*arguments[:num_inputs], None, *arguments[num_inputs:-2])
        return arguments[0].new_empty(shape, dtype=dtype)

    def fake_out(*arguments: Any) -> None:
        result(*arguments[:-2])

    def rule(needs_input_grad: Sequence[bool], *arguments: Any) -> Any:
        from stoneware.ops import backward

        return backward.rule_of(spec)(needs_input_grad, *arguments[:num_inputs], None, *arguments[num_inputs:])

    operator = define(
        f"{name}({inputs}, {others}) -> Tensor", tensors[:-1], eager, fake, rule=rule if has_gradients else None
    )
    operator_out = define(
        f"{name}_out({inputs}, Tensor(a!) out, {others}) -> ()", tensors, write_out, fake_out, is_out=has_gradients
    )

    def traced(*arguments: Any) -> torch.Tensor:
        config = arguments[-1]
        arguments = (*arguments[:-1], None if config is None else _text(config))
        out = arguments[num_inputs]
        if out is None:
            return operator(*arguments[:num_inputs], *arguments[num_inputs + 1 :])
        operator_out(*arguments)
        return out

    return traced


def define(
    schema: str,
    tensors: Sequence[str],
    eager: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    rule: Rule | None = None,
    refuse: Callable[..., None] | None = None,
    is_out: bool = False,
) -> Callable[..., Any]:
    """Defines an operator, and returns it.

    Args:
      schema: its name and arguments, the tensors first.
      tensors: their names.
      eager: computes it.
      fake: infers the result.
      rule: the rule for its gradients; None refuses a call that needs one.
      refuse: refuse(*tensors) raises the errors of calls that need a gradient or a tangent; None: those of
        `tensor_checks`.
      is_out: whether gradients are refused only because of `out`.
    """
    name = schema.partition("(")[0]

    def above_autograd(*arguments: Any) -> Any:
        inputs = arguments[: len(tensors)]
        if refuse is not None:
            refuse(*inputs)
        else:
            named = list(zip(tensors, inputs))
            tensor_checks.refuse_tangents(name.removesuffix("_out"), named)
            if rule is not None and tensor_checks.needs_gradient(inputs):
                from stoneware.ops import backward

                return backward.apply_below_autograd(operator, rule, len(tensors), *arguments)
            tensor_checks.refuse_gradients(name.removesuffix("_out"), named, is_out=is_out)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    _LIBRARY.define(schema, tags=_TAGS)
    _LIBRARY.impl(name, eager, "CompositeExplicitAutograd")
    # Not register_autograd: the transforms of torch.func refuse its functions.
    _LIBRARY.impl(name, above_autograd, "Autograd")
    # Not register_fake: it reads the source of its caller, which takes 6 ms for all operators.
    _LIBRARY.impl(name, fake, "Meta")
    operator: Callable[..., Any] = getattr(torch.ops.stoneware, name)
    return operator


def _text(config: Config) -> str:
    """A config as an operator's argument, in code that Dynamo can trace, unlike json.dumps."""
    return "{" + ", ".join([f"{name!r}: {value!r}" for name, value in config.to_json().items()]) + "}"


@functools.lru_cache(maxsize=256)
def _config(text: str | None) -> Config | None:
    return None if text is None else Config.from_json(ast.literal_eval(text))
