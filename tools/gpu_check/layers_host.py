"""The part `host`: what calls and small layers cost the host, next to torch's.

A block of calls is timed on the host alone, from an idle GPU on, and the queue of the GPU never fills.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping

import torch

import stoneware as sw
from stoneware.nn.recipes import RECIPES
from tools.gpu_check.checks import Check, failures
from tools.gpu_check.experiment import Call, Part, Prepared, Row
from tools.gpu_check.layers_clock import Clock, timing
from tools.gpu_check.layers_sizes import TORCH, Sizes

SIZE = 512
"""Of all dimensions: the GPU takes less time than the host."""

VENDOR, OURS = "stoneware, torch's kernel", "stoneware"
ROW, BLOCK = "row scales", "block scales"
CALLS = {"matmul": ("matmul",), ROW: (ROW,), BLOCK: (BLOCK,), f"{ROW} and {BLOCK}": (ROW, BLOCK)}
"""Case -> the kinds of calls that are timed against each other."""

_LIMIT = 0.08
"""Relative error of a result against torch's, bf16 or of the fp8 recipes."""

_MOST_SECONDS = 4.0


class Enqueue(Clock):
    """Times calls until they are queued."""

    def __init__(self, clock: Clock) -> None:
        self.device = clock.device

    def block_ms(self, call: Call, num_steps: int) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(num_steps):
            call()
        return (time.perf_counter() - begin) * 1e3


def measure(part: Part, sizes: Sizes, clock: Clock) -> None:
    """A row of each call, and of a layer's forward and backward."""
    cases = [{"call": name} for name in (*CALLS, "layer", "layer with a bias")]

    def prepare(case: Row) -> Prepared:
        return (_layers if case["call"].startswith("layer") else _calls)(case["call"], clock.device)

    part.report["limits"] = {"y": _LIMIT}
    part.measure(cases, prepare, timing(Enqueue(clock), sizes.rounds), judge=failures, most_s=_MOST_SECONDS)


def _calls(case: str, device: torch.device) -> Prepared:
    a, weight = (torch.randn(SIZE, SIZE, device=device).bfloat16() for _ in range(2))
    kinds = {name: _calls_of(name, a, weight) for name in CALLS[case]}
    calls = {
        name if len(kinds) == 1 else f"{kind}, {name}": call for kind, by in kinds.items() for name, call in by.items()
    }
    return _checked(calls, a.double() @ weight.double().t())


def _calls_of(name: str, a: torch.Tensor, weight: torch.Tensor) -> dict[str, Call]:
    is_cuda = a.is_cuda
    # As code has these calls: functools.partial would join keywords at each of them.
    calls: dict[str, Call] = {}
    if name == "matmul":
        b = weight.t()
        calls[TORCH] = lambda: torch.mm(a, b)
        calls[OURS] = lambda: sw.matmul(a, b)
        if is_cuda:
            calls[VENDOR] = lambda: sw.matmul(a, b, backend="vendor")
    else:
        of_a, of_weight = ("row", "row") if name == ROW else ("block", "block_2d")
        a8, scale_a = sw.quantize(a, of_a)
        w8, scale_w = sw.quantize(weight, of_weight)
        b8, scale_b = w8.t(), scale_w.t()
        if is_cuda and name == ROW:  # torch has row and block scales there alone
            calls[TORCH] = lambda: torch._scaled_mm(
                a8, b8, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        elif is_cuda:
            recipes = [4], [5]  # BlockWise1x128, BlockWise128x128 of torch.nn.functional.ScalingType
            calls[TORCH] = lambda: torch._scaled_mm_v2(
                a8, b8, [scale_a], recipes[0], [], [scale_b], recipes[1], [], None, torch.bfloat16
            )
        calls[OURS] = lambda: sw.scaled_mm(a8, b8, scale_a, scale_b)
        if is_cuda:
            calls[VENDOR] = lambda: sw.scaled_mm(a8, b8, scale_a, scale_b, backend="vendor")
    return calls


def _layers(name: str, device: torch.device) -> Prepared:
    has_bias = name.endswith("bias")
    own = torch.nn.Linear(SIZE, SIZE, has_bias, device=device, dtype=torch.bfloat16)
    layers = {TORCH: own, "stoneware bf16": sw.nn.Linear(SIZE, SIZE, has_bias, device=device, dtype=torch.bfloat16)}
    for recipe in RECIPES:
        kind = functools.partial(sw.nn.Float8Linear, recipe=recipe)
        layers[f"stoneware {recipe}"] = kind(SIZE, SIZE, has_bias, device=device, dtype=torch.bfloat16)
    for layer in layers.values():
        layer.load_state_dict(own.state_dict())
    x, dy = (torch.randn(SIZE, SIZE, device=device).bfloat16() for _ in range(2))
    x.requires_grad_()

    def step(layer: torch.nn.Linear) -> torch.Tensor:
        x.grad = None
        layer.zero_grad()
        y: torch.Tensor = layer(x)
        y.backward(dy)
        return y.detach()

    steps = {name: functools.partial(step, layer) for name, layer in layers.items()}
    bias = 0 if own.bias is None else own.bias.detach().double()
    return _checked(steps, x.detach().double() @ own.weight.detach().double().t() + bias)


def _checked(calls: Mapping[str, Call], expected: torch.Tensor) -> Prepared:
    checks, right = {}, {}
    for name, call in calls.items():
        check = Check()
        with check.refusals():
            found = call()
            assert isinstance(found, torch.Tensor)  # each returns its result
            check.error("y", float((found.double() - expected).norm() / expected.norm()), _LIMIT)
        checks[name] = check.to_json()
        if not check.wrong:
            right[name] = call
    return {"checks": checks}, right
