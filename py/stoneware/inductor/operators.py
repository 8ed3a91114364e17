"""The torch operators of fused nodes: an op with an epilogue, torch.ops.stoneware.matmul_epilogue and the like.

    NAME_epilogue(the op's tensors, Tensor[] inputs, the op's other arguments, str epilogue) -> Tensor[]

`epilogue` is the text of a `Program`. When a compiled graph runs, the operator makes the call of
`stoneware.ops.fused`, and its first call of a kind waits for the link: a CUDA graph that is captured after it has
the fused kernel.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from stoneware.epilogue import linked
from stoneware.inductor.program import parse
from stoneware.ops import APIS, fused, registration, tensor_checks
from stoneware.ops.plan_cache import OpPlans
from stoneware.tuning import policy


def plans_of(op: str) -> OpPlans:
    """The plans of an op."""
    plans: OpPlans = importlib.import_module(APIS[op])._PLANS
    return plans


def _register(op: str) -> Any:
    spec, result = plans_of(op).spec, plans_of(op).checks.result
    names, num_tensors = list(spec.inputs), len(spec.inputs)
    tensors = ", ".join(f"{kind} {name}" for name, kind in spec.inputs.items())
    others = "".join(f"{kind} {name}, " for name, kind in spec.arguments)

    def run(*arguments: Any) -> list[torch.Tensor]:
        *others, text = arguments[num_tensors + 1 :]
        tensors, inputs = arguments[:num_tensors], arguments[num_tensors]
        calls = fused.calls_of(plans_of(op), parse(text), inputs, tensors, (*others, None, None))
        results = calls.call(*tensors, *inputs)
        linked.wait()
        return list(results)

    def eager(*arguments: Any) -> list[torch.Tensor]:
        results: list[torch.Tensor] = policy.run_in(None, run, *arguments)
        return results

    def fake(*arguments: Any) -> list[torch.Tensor]:
        *others, text = arguments[num_tensors + 1 :]
        shape, _ = result(*arguments[:num_tensors], None, *others)
        return [
            arguments[0].new_empty(each.shape(shape), dtype=getattr(torch, each.dtype)) for each in parse(text).results
        ]

    def refuse(*arguments: Any) -> None:
        *tensors, inputs = arguments
        named = [*zip(names, tensors), *((f"inputs[{position}]", tensor) for position, tensor in enumerate(inputs))]
        tensor_checks.refuse_tangents(f"{op}_epilogue", named)
        tensor_checks.refuse_gradients(f"{op}_epilogue", named)

    schema = f"{op}_epilogue({tensors}, Tensor[] inputs, {others}str epilogue) -> Tensor[]"
    operator: Any = registration.define(schema, [*names, "inputs"], eager, fake, refuse=refuse)
    return operator.default


OPERATORS: dict[str, Callable[..., Any]] = {op: _register(op) for op in APIS}
"""Op -> its operator with an epilogue."""
