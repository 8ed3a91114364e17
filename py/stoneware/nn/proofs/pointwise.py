"""Proves that an epilogue can have the function between two nodes of a trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import BuiltinFunctionType
from typing import Any, NamedTuple

import torch

from stoneware.epilogue import source, trace
from stoneware.epilogue.expression import Expression
from stoneware.nn.proofs import fx_nodes
from stoneware.nn.proofs.no_proof import NoProof


class Reference(NamedTuple):
    """A value of a `Pointwise`.

    Attributes:
      position: of the operation that computes it, from 1 on; 0 is the argument.
    """

    position: int


class Operation(NamedTuple):
    """An operation of a `Pointwise`.

    Attributes:
      target: a function, or the name of a tensor's method.
      arguments, options: positional arguments and keywords: References and constants.
    """

    target: Callable[..., Any] | str
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Pointwise:
    """A function of one tensor that computes each element by itself. Equal ones share their linked kernels' plans.

    Attributes:
      operations: what it computes; its result is that of the last one.
    """

    operations: tuple[Operation, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.values(x)[-1]
        return result

    def values(self, x: torch.Tensor) -> list[Any]:
        """The argument, and the result of each operation."""
        values: list[Any] = [x]
        for target, arguments, options in self.operations:
            operands = [values[each.position] if isinstance(each, Reference) else each for each in arguments]
            keywords = {name: values[each.position] if isinstance(each, Reference) else each for name, each in options}
            function = getattr(operands.pop(0), target) if isinstance(target, str) else target
            values.append(function(*operands, **keywords))
        return values


def pointwise(
    module: torch.nn.Module, argument: torch.fx.Node, result: torch.fx.Node, others: set[torch.fx.Node]
) -> Pointwise:
    """The function from a node to a later one; all nodes of the trace but `others` are in it."""
    values = {argument: Reference(0)}
    operations: list[Operation] = []
    for node in argument.graph.nodes:
        if node.op == "output" or node in others:
            continue
        arguments = tuple(_operand(value, values, node) for value in node.args)
        options = tuple((name, _operand(value, values, node)) for name, value in node.kwargs.items())
        if fx_nodes.is_silu(module, node):
            operations.append(Operation(torch.nn.functional.silu, arguments[:1], ()))
        elif node.op == "call_method" or (node.op == "call_function" and _is_of_torch(node.target)):
            operations.append(Operation(node.target, arguments, options))
        else:
            raise NoProof(f"it computes {fx_nodes.name(node)} between its layers")
        values[node] = Reference(len(operations))
    if not operations or values.get(result) != Reference(len(operations)):
        raise NoProof("its last layer does not read the result of an activation")
    activation = Pointwise(tuple(operations))

    def with_one_shape(x: torch.Tensor) -> torch.Tensor:
        values = activation.values(x)
        # Code that reads a size gets another one in the kernel, for which all dimensions but the last are rows.
        if any(not isinstance(value, torch.Tensor) or value.shape != x.shape for value in values):
            raise NoProof("it changes or reads a shape between its layers")
        result: torch.Tensor = values[-1]
        return result

    try:
        (output,) = trace.trace(with_one_shape, (2, 4), (), torch.device("cpu")).outputs
        source.write(Expression((output,), False), main=0, has_pairs=[])
    except NoProof:
        raise
    except Exception as error:  # what torch raises for arguments that it refuses
        raise NoProof(f"no epilogue can compute the function between its layers: {error}") from error
    if (output.kind, output.dtype) != ("full", torch.float32):
        raise NoProof("the function between its layers has another shape or dtype")
    if _changes_aliases(activation):
        raise NoProof("it changes a value in place that it reads twice between its layers")
    return activation


def _changes_aliases(activation: Pointwise) -> bool:
    """Whether an operation may change a value in place that another one reads.

    Which values share memory depends on dtypes: `x.float()` is x itself only for float32.
    """
    with torch.inference_mode(False), torch.no_grad():
        values = activation.values(torch.ones(2, 4, device="cpu"))
    is_in_place = any(value._version for value in values)
    reads = [
        position
        for operation in activation.operations
        for position in {*operation.arguments, *dict(operation.options).values()}
        if isinstance(position, Reference)
    ]
    return is_in_place and len({*reads}) < len(reads)


def _is_of_torch(function: Any) -> bool:
    """Whether it is a function of torch or an operator of Python, whose code reads nothing that can change."""
    if function is getattr or not callable(function):
        return False
    return isinstance(function, BuiltinFunctionType) or str(function.__module__).startswith("torch.")


def _operand(value: Any, values: dict[torch.fx.Node, Reference], node: torch.fx.Node) -> Any:
    if isinstance(value, torch.fx.Node) and value in values:
        return values[value]
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise NoProof(f"it computes {fx_nodes.name(node)} of {value}")
