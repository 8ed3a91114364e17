"""A call with an epilogue that autograd follows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from stoneware.ops import backward
from stoneware.tuning import policy


class Trained(torch.autograd.Function):
    """Trained.apply(calls, with_sums, *tensors) is a call, and differentiable once.

    `calls` are those of the op with its epilogue, and `with_sums` return the op's result too, behind the others.
    The sums are saved in the op's own dtype, as the result of a layer would be, and the function runs again
    on them in backward, under autograd. The gradients of the op are those of its rule.
    """

    @staticmethod
    def forward(ctx: Any, calls: Any, with_sums: Any, *arguments: torch.Tensor | None) -> Any:
        ctx.calls, ctx.state = calls, policy.state()
        *results, sums = policy.run_in(None, with_sums.call, *arguments)
        ctx.save_for_backward(sums, *arguments)
        ctx.mark_non_differentiable(*[result for result in results if result.dtype.itemsize == 1])
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @backward.differentiable_once
    @backward.in_state_of_call
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        calls = ctx.calls
        sums, *arguments = ctx.saved_tensors
        tensors, inputs = calls.split(arguments)
        needs = ctx.needs_input_grad[2:]
        needs_op, needs_inputs = needs[: len(tensors)], needs[len(tensors) :]
        with torch.enable_grad():
            acc = sums.float().requires_grad_()
            leaves = [one.detach().requires_grad_(need) for one, need in zip(inputs, needs_inputs)]
            returned = calls.function(acc.clone(), *leaves)  # a function may change it in place, but not a leaf
            results = returned if isinstance(returned, (tuple, list)) else (returned,)
            pairs = [
                (result, grad) for result, grad in zip(results, grads) if grad is not None and result.requires_grad
            ]
            wanted = [acc, *itertools.compress(leaves, needs_inputs)]
            found: Sequence[torch.Tensor | None] = [None] * len(wanted)
            if pairs:
                outputs, given = zip(*((result, grad.to(result.dtype)) for result, grad in pairs))
                found = torch.autograd.grad(outputs, wanted, given, allow_unused=True)
        dacc, *of_inputs = found
        of_op: Sequence[torch.Tensor | None] = [None] * len(tensors)
        if any(needs_op) and dacc is not None:
            saved, gradients = backward.rule_of(calls.plans.spec)(needs_op, *tensors, None, *calls.objects)
            of_op = gradients(dacc.to(sums.dtype), *saved)
        remaining = iter(of_inputs)
        return None, None, *of_op, *[next(remaining) if need else None for need in needs_inputs]
