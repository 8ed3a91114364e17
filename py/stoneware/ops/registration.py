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
from stoneware.ops.spec import OpSpec

if TYPE_CHECKING:
    from stoneware.ops.backward import Rule

NAMESPACE = "stoneware"

_TAGS = (
    torch.Tag.pt2_compliant_tag,
    torch.Tag.needs_exact_strides,  # a weight is column-major, and stays so
)

_LIBRARY = torch.library.Library(NAMESPACE, "DEF")

Call = Callable[..., torch.Tensor]


def register(spec: OpSpec, result: Callable[..., Any], call: Call, has_gradients: bool = False) -> Call:
    """Registers an op's two operators; takes a fraction of a millisecond and imports nothing.

    Args:
      spec: of the op.
      result: infers the result: (*inputs, out or None, *other arguments) -> its shape and dtype.
      call: the eager call: (*inputs, out or None, *other arguments) -> out.
      has_gradients: whether it has a rule for its gradients, which takes the arguments of `call`.

    Returns:
      The call by its operator, with the arguments of `call`; Dynamo can trace it.
    """
    inputs = ", ".join(f"Tensor{'?' if one.is_optional else ''} {one.name}" for one in spec.inputs)
    others = ", ".join(f"{kind} {name}" for name, kind in (*spec.arguments, ("backend", "str?"), ("config", "str?")))
    tensors, num_inputs, name = spec.tensors, len(spec.inputs), spec.name

    def eager(*arguments: Any) -> torch.Tensor:
        return eager_out(*arguments[:num_inputs], None, *arguments[num_inputs:])

    def eager_out(*arguments: Any) -> torch.Tensor:
        return call(*arguments[:-1], _config(arguments[-1]))

    def write_out(*arguments: Any) -> None:
        eager_out(*arguments)

    def fake(*arguments: Any) -> torch.Tensor:
        shape, dtype = result(*arguments[:num_inputs], None, *arguments[num_inputs:-2])
        return arguments[0].new_empty(shape, dtype=dtype)

    def fake_out(*arguments: Any) -> None:
        result(*arguments[:-2])

    def followed(*arguments: Any) -> torch.Tensor:
        named = list(zip(tensors, arguments[:num_inputs]))
        tensor_checks.refuse_tangents(name, named)
        if has_gradients and tensor_checks.needs_gradient(arguments[:num_inputs]):
            from stoneware.ops import backward

            of_op = backward.rule_of(spec)

            def rule(needed: Sequence[bool], *arguments: Any) -> Any:
                return of_op(needed, *arguments[:num_inputs], None, *arguments[num_inputs:])

            return backward.apply_below_autograd(operator, rule, num_inputs, *arguments)
        tensor_checks.refuse_gradients(name, named)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    def refused(*arguments: Any) -> None:
        named = list(zip(tensors, arguments[: num_inputs + 1]))
        tensor_checks.refuse_gradients(name, named, is_out=has_gradients)
        tensor_checks.refuse_tangents(name, named)
        with torch._C._AutoDispatchBelowAutograd():
            operator_out(*arguments)

    _define(name, f"({inputs}, {others}) -> Tensor", eager, followed, fake)
    _define(f"{name}_out", f"({inputs}, Tensor(a!) out, {others}) -> ()", write_out, refused, fake_out)
    operator = getattr(torch.ops.stoneware, name)
    operator_out = getattr(torch.ops.stoneware, f"{name}_out")

    def traced(*arguments: Any) -> torch.Tensor:
        config = arguments[-1]
        arguments = (*arguments[:-1], None if config is None else _text(config))
        out = arguments[num_inputs]
        if out is None:
            return operator(*arguments[:num_inputs], *arguments[num_inputs + 1 :])
        operator_out(*arguments)
        return out

    return traced


def register_product(
    name: str, tensors: Sequence[str], eager: Call, fake: Call, gradients: Rule
) -> Callable[..., torch.Tensor]:
    """Registers an operator that gradients are computed with: (*tensors, backend) -> a tensor.

    Args:
      name: of the operator.
      tensors: the names of its tensors.
      eager: computes it.
      fake: infers the result.
      gradients: the rule for its own gradients.
    """

    def followed(*arguments: Any) -> torch.Tensor:
        named = list(zip(tensors, arguments))
        tensor_checks.refuse_tangents(name, named)
        if tensor_checks.needs_gradient(arguments[:-1]):
            from stoneware.ops import backward

            return backward.apply_below_autograd(operator, gradients, len(tensors), *arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    inputs = "".join(f"Tensor {one}, " for one in tensors)
    _define(name, f"({inputs}str? backend) -> Tensor", eager, followed, fake)
    operator = getattr(torch.ops.stoneware, name)
    return operator


def _define(
    name: str, schema: str, eager: Callable[..., Any], autograd: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    _LIBRARY.define(name + schema, tags=_TAGS)
    _LIBRARY.impl(name, eager, "CompositeExplicitAutograd")
    # Not register_autograd, whose functions the transforms of torch.func refuse.
    _LIBRARY.impl(name, autograd, "Autograd")
    # Not register_fake, which reads the source of its caller, 6 ms for all.
    _LIBRARY.impl(name, fake, "Meta")


def _text(config: Config) -> str:
    """A config as an operator's argument, written as Dynamo can trace it; json.dumps it cannot."""
    return "{" + ", ".join([f"{name!r}: {value!r}" for name, value in config.to_json().items()]) + "}"


@functools.lru_cache(maxsize=256)
def _config(text: str | None) -> Config | None:
    return None if text is None else Config.from_json(ast.literal_eval(text))
