"""An epilogue as text, which a node of a graph carries and a compiled graph keeps."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from stoneware.errors import UnsupportedError


class Step(NamedTuple):
    """A call of an operator of torch.ops.aten.

    Attributes:
      operator: its name with the overload, such as "mul.Tensor".
      args, kwargs: its arguments: numbers, lists of them, None; "%2" for value 2; the name of a dtype as `dtype`.
    """

    operator: str
    args: Sequence[Any]
    kwargs: dict[str, Any]

    def run(self, values: Sequence[Any]) -> Any:
        """The result.

        Args:
          values: value 0 and those after it.
        """
        packet, overload = self.operator.split(".")
        kwargs = {
            name: getattr(torch, value) if name == "dtype" else _argument(value, values)
            for name, value in self.kwargs.items()
        }
        return getattr(getattr(torch.ops.aten, packet), overload)(
            *[_argument(value, values) for value in self.args], **kwargs
        )


class Result(NamedTuple):
    """A result.

    Attributes:
      value: its number.
      kind: "full" with the shape of the matmul's result, "half" with half of its columns, or "row_max" with one
        element per row.
      dtype: name of the tensor's dtype; "float32" for "row_max".
    """

    value: int
    kind: str
    dtype: str

    def shape(self, full: Sequence[Any]) -> tuple[Any, ...]:
        """The shape of the tensor; that of the matmul's result is `full`."""
        return {"full": (*full,), "half": (*full[:-1], full[-1] // 2), "row_max": (*full[:-1],)}[self.kind]


class Program:
    """An epilogue: program(acc, *inputs) is a tuple of its results.

    Value 0 is acc, the next are the inputs, and each step adds one. No step has a size, so a program serves every
    shape.

    Args:
      num_inputs: tensors after acc.
      steps, results: what it computes.
    """

    def __init__(self, num_inputs: int, steps: Sequence[Step], results: Sequence[Result]) -> None:
        self.num_inputs, self.steps, self.results = num_inputs, tuple(steps), tuple(results)

    def __call__(self, acc: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values: list[Any] = [acc, *inputs]
        for step in self.steps:
            values.append(step.run(values))
        return tuple(_cast(values[result.value], getattr(torch, result.dtype)) for result in self.results)

    def text(self) -> str:
        """The text that `parse` reads."""
        return json.dumps([self.num_inputs, self.steps, self.results], separators=(",", ":"))

    def supported_steps(self, acc: Any, inputs: Sequence[Any]) -> list[bool]:
        """Which steps an epilogue can have; a step that reads an unsupported one is unsupported.

        Args:
          acc, inputs: what `stoneware.epilogue.trace` traces with.
        """
        values = [acc, *inputs]
        for step in self.steps:
            try:
                values.append(step.run(values))
            except (UnsupportedError, ValueError, TypeError, RuntimeError):
                values.append(None)
        return [value is not None for value in values[1 + self.num_inputs :]]


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Not tensor.to, which a trace below autograd does not take apart.
    return tensor if tensor.dtype == dtype else torch.ops.aten._to_copy.default(tensor, dtype=dtype)


def _argument(value: Any, values: Sequence[Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_argument(item, values) for item in value]
    if isinstance(value, str) and value.startswith("%"):
        if (referred := values[int(value[1:])]) is None:
            raise UnsupportedError(f"{value} is the result of a step that no epilogue can have; leave its readers out")
        return referred
    return value


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Program:
    """The program of a text: one object for each text, which tells the calls of one program from another's."""
    num_inputs, steps, results = json.loads(text)
    return Program(num_inputs, [Step(*step) for step in steps], [Result(*result) for result in results])
