"""The mode of sw.tuning and sw.batch_invariant in a backward: that of its forward call, in every thread."""

from __future__ import annotations

import contextvars
import multiprocessing
import os
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import stoneware as sw
from stoneware import nn
from stoneware.ops import dispatch
from stoneware.tuning import policy

K, N = 128, 256


def fused(layer: torch.nn.Module) -> torch.nn.Module:
    layer.fuse_wgrad_accumulation = True
    layer.weight.main_grad = torch.zeros(N, K)
    return layer


class Product(torch.nn.Module):
    """sw.matmul, whose gradients are also matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(K, N).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sw.matmul(x, self.weight)


class RoutedExperts(nn.Float8InferenceExperts):
    """Frozen experts, each of which has every fourth token."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, torch.arange(len(x))[:, None] % 4, torch.ones(len(x), 1))


LAYERS = {
    "matmul": Product,
    "bf16": lambda: nn.Linear(K, N, dtype=torch.bfloat16),
    **{
        recipe: lambda recipe=recipe: nn.Float8Linear(K, N, recipe=recipe, dtype=torch.bfloat16)
        for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")
    },
    "frozen": lambda: nn.Float8InferenceLinear(K, N, dtype=torch.bfloat16),
    "experts": lambda: RoutedExperts(4, K, N, dtype=torch.bfloat16),
    "adapters": lambda: nn.Lora(nn.Float8InferenceLinear(K, N, dtype=torch.bfloat16), 16),
    "fused wgrad": lambda: fused(nn.Linear(K, N, dtype=torch.bfloat16)),
}


@pytest.fixture
def modes(monkeypatch):
    """The mode and the batch invariance of each plan that is made; no plan of another test is used."""
    seen = []
    plan = dispatch.Operation.plan

    def recorded(self, *arguments, **options):
        seen.append((policy.current_mode(), policy.is_batch_invariant()))
        return plan(self, *arguments, **options)

    monkeypatch.setattr(dispatch.Operation, "plan", recorded)
    policy.forget_plans()
    return seen


def loss_of(layer: torch.nn.Module) -> torch.Tensor:
    return layer(torch.randn(32, K).bfloat16().requires_grad_()).float().square().sum()


def in_another_thread(loss: torch.Tensor) -> None:
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


layers = pytest.mark.parametrize("name", LAYERS)


@layers
def test_the_mode_of_the_forward_call_holds_in_another_thread(name, modes):
    with sw.tuning("error_on_miss", batch_invariant=True):
        loss = loss_of(LAYERS[name]())
    modes.clear()
    in_another_thread(loss)
    assert set(modes) == {("error_on_miss", True)}


@layers
def test_the_mode_of_the_forward_call_holds_in_its_own_thread(name, modes):
    with sw.tuning("error_on_miss", batch_invariant=True):
        loss = loss_of(LAYERS[name]())
    modes.clear()
    with sw.tuning("on_miss", batch_invariant=False):
        loss.backward()
        assert policy.current_mode() == "on_miss" and not policy.is_batch_invariant()
    assert set(modes) == {("error_on_miss", True)}
    assert policy.state() is None


@layers
def test_batch_invariance_around_backward_alone_holds_there(name, modes):
    with sw.tuning("error_on_miss", batch_invariant=False):
        loss = loss_of(LAYERS[name]())
    modes.clear()
    with sw.tuning("on_miss", batch_invariant=True):
        loss.backward()
    assert set(modes) == {("error_on_miss", True)}


@layers
def test_a_forward_call_outside_of_any_scope_has_the_mode_where_backward_is_called(name, modes):
    loss = loss_of(LAYERS[name]())
    assert set(modes) == {("off", False)}
    modes.clear()
    with sw.tuning("error_on_miss"), sw.batch_invariant():
        loss.backward()
    assert set(modes) == {("error_on_miss", True)}


def test_a_second_derivative_has_the_mode_of_the_first(modes):
    x = torch.randn(32, K).bfloat16().requires_grad_()
    with sw.batch_invariant():
        y = sw.matmul(x, torch.randn(K, N).bfloat16().requires_grad_()).float().square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    modes.clear()
    policy.forget_plans()
    in_another_thread(dx.float().square().sum())
    assert set(modes) == {("off", True)}


@pytest.mark.parametrize("name", ["bf16", "rowwise", "frozen", "adapters"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_repeats_a_layer_in_its_mode(name, use_reentrant, modes):
    layer = LAYERS[name]()
    x = torch.randn(32, K).bfloat16().requires_grad_()
    # A reentrant checkpoint does not know the first call: its function must set the mode.
    call = sw.batch_invariant()(layer.forward) if use_reentrant else layer
    with sw.batch_invariant():
        loss = checkpoint(call, x, use_reentrant=use_reentrant).float().sum()
    modes.clear()
    policy.forget_plans()
    in_another_thread(loss)
    assert modes and set(modes) == {("off", True)}


def test_a_scope_that_another_task_of_the_thread_holds_open_is_not_in_force(modes):
    task, scope = contextvars.copy_context(), sw.batch_invariant()
    task.run(scope.__enter__)
    loss_of(LAYERS["matmul"]()).backward()
    assert set(modes) == {("off", False)}
    task.run(scope.__exit__)


class Deep(torch.autograd.Function):
    """Runs a function in a thread of autograd, also on a CPU: that of a backward within 61 others."""

    @staticmethod
    def forward(ctx, x, depth, function):
        ctx.depth, ctx.function = depth, function
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.depth == 0:
            ctx.function()
        else:
            with torch.enable_grad():
                Deep.apply(torch.ones((), requires_grad=True), ctx.depth - 1, ctx.function).backward()
        return gradient, None, None


def check_threads_of_autograd() -> None:
    seen = []
    plan = dispatch.Operation.plan

    def recorded(self, *arguments, **options):
        seen.append((threading.get_ident(), policy.current_mode(), policy.is_batch_invariant()))
        return plan(self, *arguments, **options)

    dispatch.Operation.plan = recorded

    def modes_of(loss: torch.Tensor) -> set[tuple[str, bool]]:
        seen.clear()
        policy.forget_plans()
        Deep.apply(torch.ones((), requires_grad=True), 61, loss.backward).backward()
        assert seen and all(thread != threading.get_ident() for thread, *_ in seen)
        return {(mode, is_invariant) for _, mode, is_invariant in seen}

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        # The last function's saved tensors are read first, and repeat all.
        return checkpoint(lambda x: layer(x).tanh(), x, use_reentrant=False)

    for name in ("matmul", "rowwise", "frozen", "adapters"):
        layer = LAYERS[name]()
        calls = [layer, checkpointed]
        if name != "adapters":
            calls.append(torch.compile(layer, backend="aot_eager"))
        for call in calls:
            assert modes_of(loss_of(call)) == {("off", False)}, (name, call)
            loss = loss_of(call)
            with sw.tuning("error_on_miss"), sw.batch_invariant():
                assert modes_of(loss) == {("error_on_miss", True)}, (name, call)
            with sw.batch_invariant():
                assert modes_of(loss_of(call)) == {("off", True)}, (name, call)
            # A scope that this thread opened and another one left is open nowhere.
            scope = sw.batch_invariant()
            contextvars.copy_context().run(scope.__enter__)
            threading.Thread(target=scope.__exit__).start()
            assert modes_of(loss_of(call)) == {("off", False)}, (name, call)
    os._exit(0)  # torch cannot join its threads for nested backwards at exit


def test_threads_of_autograd_have_the_mode_where_backward_was_called():
    child = multiprocessing.get_context("spawn").Process(target=check_threads_of_autograd)
    child.start()
    child.join(300)
    assert child.exitcode == 0
