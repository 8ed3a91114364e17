"""A call that autograd follows: the op's own plan forward, and the op's rule for its gradients.

    OpPlans.run                an eager call that needs a gradient: `apply`
    the operator's Autograd    the same call under torch.compile, torch.export, torch dispatch modes
      kernel (registration)    and the transforms of torch.func: `apply_below_autograd`

A rule's gradients are calls of ops again, so that they have gradients themselves where those ops do.
They run in the tuning state of the call, also in autograd's threads.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

import torch

from stoneware.kernels import built_matmuls, needs
from stoneware.ops import APIS
from stoneware.runtime.dtypes import DTYPE_NAMES
from stoneware.specs.op_spec import OpSpec
from stoneware.tuning import policy

Tensors = tuple[torch.Tensor | None, ...]

Gradients = Callable[..., Tensors]
"""(gradient of the result, *what was saved) -> the gradient of each input, or None."""

Rule = Callable[..., tuple[Tensors, Gradients]]
"""(whether each input needs a gradient, *arguments of the call, which was checked) -> what to save, and
the gradients. Gradients hold no tensor of the call themselves, or it would outlive its backward."""


Backward = TypeVar("Backward", bound=Callable[..., Any])


def in_state_of_call(backward: Backward) -> Backward:
    """Decorates a `backward(ctx, *gradients)`: it runs in the tuning state `ctx.state` of its forward call.

    So do calls that a checkpoint repeats when the saved tensors are read. While Dynamo traces, this adds
    nothing: the operators of its graph do it (`stoneware.ops.registration`).
    """

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: torch.Tensor) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return backward(ctx, *gradients)
        return policy.run_in(ctx.state, backward, ctx, *gradients)

    return run


def differentiable_once(backward: Backward) -> Backward:
    """Decorates a `backward(ctx, *gradients)` whose own gradients are refused: see `refuse_second`.

    Not torch's once_differentiable, which does not see that a gradient depends on the saved tensors too.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.compiler.is_dynamo_compiling() or not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        unpacked = _Unpacked(ctx)
        with torch.no_grad():
            results = backward(unpacked, *gradients)
        return refuse_second(results, (*gradients, *unpacked.saved_tensors))

    return cast(Backward, run)


class _Unpacked:
    """A ctx whose saved tensors are read once, as a checkpoint demands."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def refuse_second(results: Tensors, origins: Tensors) -> Tensors:
    """The results of a backward, which have no gradients themselves: where one is needed, an error is raised.

    Args:
      results: new tensors.
      origins: what they depend on.
    """
    origins = tuple(origin for origin in origins if origin is not None and origin.requires_grad)
    if not origins or not torch.is_grad_enabled():  # without create_graph=True
        return results
    refused: Tensors = _WithoutGradient.apply(results, *origins)
    return refused


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, results: Tensors, *origins: torch.Tensor) -> Tensors:
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> NoReturn:
        raise RuntimeError(
            "the gradients of fp8 layers, of blocks that run as one, of layers with fuse_wgrad_accumulation and of "
            "calls with an epilogue are differentiable once, but create_graph=True asks for a second derivative; use "
            "torch's layers, or calls without an epilogue, where it is needed"
        )


class _AutogradCall(torch.autograd.Function):
    """_AutogradCall.apply(run, rule, num_inputs, *arguments) is run(*arguments), and differentiable."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., torch.Tensor], rule: Rule, num_inputs: int, *arguments: Any
    ) -> torch.Tensor:
        ctx.state = policy.state()
        out = policy.run_in(None, run, *arguments)
        saved, ctx.gradients = rule(ctx.needs_input_grad[3 : 3 + num_inputs], *arguments)
        ctx.save_for_backward(*saved)
        ctx.num_arguments = len(arguments)
        return out

    @staticmethod
    @in_state_of_call
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = ctx.gradients(grad, *ctx.saved_tensors)
        return None, None, None, *gradients, *[None] * (ctx.num_arguments - len(gradients))


apply: Callable[..., torch.Tensor] = _AutogradCall.apply


class _AutogradCallAtOneLevel(torch.autograd.function._SingleLevelFunction):
    """The same for one of the nested transforms of torch.func: torch.autograd.Function refuses to run under them."""

    forward = _AutogradCall.forward
    backward = _AutogradCall.backward


_apply_at_one_level = _AutogradCallAtOneLevel.apply  # type: ignore[attr-defined]  # torch's stubs lack it


def rule_of(spec: OpSpec) -> Rule:
    """The op's rule."""
    rule: Rule = importlib.import_module(f"stoneware.ops.{spec.name}.backward").rule
    return rule


def apply_below_autograd(
    operator: Callable[..., torch.Tensor], rule: Rule, num_inputs: int, *arguments: Any
) -> torch.Tensor:
    """An operator's call as its Autograd kernel makes it."""

    def below(*arguments: Any) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    if not torch._C._are_functorch_transforms_active():
        return apply(below, rule, num_inputs, *arguments)

    # The dispatcher has come to one of the nested transforms, and `below` leads to the next one,
    # which may be a gradient too: so the function is of this level alone, and leaves gradients on.
    from torch._functorch.utils import enable_single_level_autograd_function

    def at_next_level(*arguments: Any) -> torch.Tensor:
        with torch.enable_grad():
            return below(*arguments)

    with enable_single_level_autograd_function():
        return _apply_at_one_level(at_next_level, rule, num_inputs, *arguments)


@functools.lru_cache(maxsize=1024)
def is_saved(
    spec: OpSpec, needs_input_grad: tuple[bool, ...], dtypes: tuple[torch.dtype, ...], layout: str
) -> tuple[bool, ...]:
    """Whether each input must be saved for the matmuls of a call's gradients; cached for each kind
    of call.

    Args:
      spec: of the op.
      needs_input_grad: of each input.
      dtypes: of a, of b, and of the result.
      layout: of a and b.

    Raises:
      BackwardNotBuiltError: this installation was built without one of the matmuls.
    """
    a_dtype, b_dtype, out_dtype = (DTYPE_NAMES[dtype] for dtype in dtypes)
    _, *matmuls = needs.matmuls(
        spec.name,
        dtypes=(a_dtype, b_dtype, out_dtype),
        layout=layout,
        needs_input_grad=frozenset(itertools.compress(spec.inputs, needs_input_grad)),
    )
    built_matmuls.check(matmuls)
    names = {name for matmul in matmuls for name in matmul.saved}
    return tuple(name in names for name in spec.inputs)


def sum_of_rows(dc: torch.Tensor) -> torch.Tensor:
    """The gradient of a bias."""
    return dc.sum(tuple(range(dc.ndim - 1)), dtype=torch.float32).to(dc.dtype) if dc.ndim > 1 else dc


def call_of(spec: OpSpec) -> Callable[..., torch.Tensor]:
    """The op's call, for its gradients, which must not keep it: a graph that is alive when the
    interpreter ends is never freed, and would keep the native module's objects with it, of which
    nanobind complains."""
    return importlib.import_module(APIS[spec.name])._PLANS.call
