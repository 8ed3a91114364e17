"""What a fused call is: the problem of its open kernel, and what its function computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stoneware.epilogue import trace
from stoneware.epilogue.expression import Expression
from stoneware.ops import tensor_checks
from stoneware.ops.backend import Plan
from stoneware.ops.plan_cache import OpPlans

Epilogue = Callable[..., Any]


def problem_of(plans: OpPlans, tensors: Sequence[Any], objects: Sequence[Any]) -> Any | str:
    """The problem of the open kernel of a fused call, whose result has 16 bits, or why the call cannot be fused.

    Args:
      plans: of the op.
      tensors: of the op, without out.
      objects: its other arguments, without backend and config.
    """
    biases = [tensor for name, tensor in zip(plans.spec.inputs, tensors) if name == "bias" and tensor is not None]
    if any(bias.dtype == torch.float32 for bias in biases):
        return "its bias is float32; pass it as an input, and add it in the function"
    narrow = list(objects)
    place = place_of_out_dtype(plans.spec)
    if narrow[place] == torch.float32:
        narrow[place] = narrow_dtype(tensors[0].dtype)
    problems: list[Any] = []

    def plan(problem: Any) -> Plan:
        problems.append(problem)
        return tensor_checks.run_nothing

    if plans.checks.plan(plan, *tensors, None, *narrow) is not tensor_checks.run_nothing:
        return "an operand is copied first"
    if not problems:
        return "the result is empty"
    (problem,) = problems
    return "it is a batch" if getattr(problem, "batch", 1) != 1 else problem


def narrow_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of 16 bits that a product of this dtype has."""
    return dtype if dtype.itemsize == 2 else torch.bfloat16


def traced(
    function: Epilogue,
    shape: Sequence[int],
    out_dtype: torch.dtype,
    inputs: Sequence[torch.Tensor],
    device: torch.device,
) -> Expression:
    """What an epilogue computes: `trace.trace`, with float32 results in the call's out dtype."""
    expression = trace.trace(function, shape, inputs, device)
    outputs = tuple(
        output._replace(dtype=out_dtype) if output.dtype == torch.float32 and output.kind != "row_max" else output
        for output in expression.outputs
    )
    return expression._replace(outputs=outputs)


def main_output(expression: Expression, out_dtype: torch.dtype) -> int | None:
    """The output that the kernel itself stores; None if it stores none."""
    return next(
        (
            position
            for position, output in enumerate(expression.outputs)
            if output.kind == "full" and output.dtype == out_dtype
        ),
        None,
    )


def with_sums(function: Epilogue, dtype: torch.dtype) -> Epilogue:
    """The epilogue of a call that needs gradients: the sums in 16 bits are its last result."""

    def both(acc: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sums = acc.to(dtype)  # before the function, which may change acc in place
        returned = function(acc, *inputs)
        results = returned if isinstance(returned, (tuple, list)) else (returned,)
        return (*results, sums)

    return both


def place_of_out_dtype(spec: Any) -> int:
    """The position of out_dtype among the op's other arguments."""
    return [name for name, _ in spec.arguments].index("out_dtype")
