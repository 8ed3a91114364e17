"""The part `linear`: forward and backward of single layers, ours and torch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

import stoneware as sw
from stoneware.measuring import operands
from tools.gpu_check.checks import BF16_LIMIT, E4M3_LIMIT, E5M2_LIMIT, Check, failures
from tools.gpu_check.experiment import Part, Prepared
from tools.gpu_check.layers_clock import Clock, timing
from tools.gpu_check.layers_peers import Float8Peer
from tools.gpu_check.layers_sizes import OURS_BF16, TORCH, Sizes

_MOST_SECONDS = 4.0
"""For timing one layer at one number of tokens."""

Step = Callable[[], tuple[torch.Tensor, ...]]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A kind of layer.

    Attributes:
      kind, recipe: class and attribute of the layer.
      limits: of the relative errors of y, dx and dw.
      is_ours: whether a wrong value fails the run.
      is_compiled: by torch.compile.
    """

    kind: type[torch.nn.Linear]
    recipe: str = "bf16"
    limits: tuple[float, float, float]
    is_ours: bool = True
    is_compiled: bool = False


def _contenders() -> dict[str, Contender]:
    bf16, e4m3 = (BF16_LIMIT,) * 3, (E4M3_LIMIT,) * 3
    e5m2 = (E4M3_LIMIT, E5M2_LIMIT, E5M2_LIMIT)
    ours = {
        "tensorwise": e5m2, "rowwise": e4m3, "rowwise_with_gw_hp": (E4M3_LIMIT, E4M3_LIMIT, BF16_LIMIT),
        # Whether dw has fp8 operands is the recipe's own affair; both are within this.
        "blockwise": e4m3,
    }  # fmt: skip
    return {
        TORCH: Contender(kind=torch.nn.Linear, limits=bf16, is_ours=False),
        OURS_BF16: Contender(kind=sw.nn.Linear, limits=bf16),
        **{
            f"stoneware {recipe}": Contender(kind=sw.nn.Float8Linear, recipe=recipe, limits=limits)
            for recipe, limits in ours.items()
        },
        **{
            f"{name} {recipe}, compiled": Contender(
                kind=kind, recipe=recipe, limits=ours[recipe], is_ours=kind is sw.nn.Float8Linear, is_compiled=True
            )
            for name, kind in (("stoneware", sw.nn.Float8Linear), ("torchao's", Float8Peer))
            for recipe in ("tensorwise", "rowwise")
        },
    }


def measure(part: Part, sizes: Sizes, clock: Clock) -> None:
    """A row of each layer and number of tokens."""
    contenders = _contenders()
    part.report["limits"] = {name: dict(zip(("y", "dx", "dw"), one.limits)) for name, one in contenders.items()}
    cases = [
        {"layer": name, "tokens": tokens, "in": in_features, "out": out_features}
        for tokens in sizes.linear_tokens
        for name, (in_features, out_features) in sizes.linears.items()
    ]
    counted = {TORCH, *(name for name, one in contenders.items() if one.is_ours)}
    part.measure(
        cases,
        lambda case: _prepare(contenders, case["tokens"], case["in"], case["out"], clock.device),
        timing(clock, sizes.rounds),
        judge=lambda row: failures(row, counted),
        most_s=_MOST_SECONDS,
    )
    torch.compiler.reset()


def _prepare(
    contenders: Mapping[str, Contender], tokens: int, in_features: int, out_features: int, device: torch.device
) -> Prepared:
    torch.compiler.reset()  # layers are compiled for their own sizes
    x, weight, gradient = (
        torch.randn(shape, device=device, dtype=torch.bfloat16)
        for shape in ((tokens, in_features), (out_features, in_features), (tokens, out_features))
    )
    weight.mul_(in_features**-0.5)
    expected = []
    for a, b in ((x, weight.t()), (gradient, weight), (gradient.t(), x)):
        expected.append(torch.empty(a.shape[0], b.shape[1], device=device))
        operands.multiply(expected[-1], a, b)
    x.requires_grad_()
    parameter = torch.nn.Parameter(weight)
    steps: dict[str, Step] = {}
    checks = {}
    for name, contender in contenders.items():
        layer = contender.kind(in_features, out_features, bias=False, device="meta", dtype=torch.bfloat16)
        layer.recipe = contender.recipe
        layer.weight = parameter  # the same of all: each computes its gradient and drops it
        step = _step(layer, contender.is_compiled, x, gradient)
        check = Check()
        with check.refusals():
            for what, result, want, limit in zip(("y", "dx", "dw"), step(), expected, contender.limits):
                check.product(what, result, want, limit)
        checks[name] = check.to_json()
        if not check.wrong:
            steps[name] = step
    return {"checks": checks}, steps


def _step(layer: torch.nn.Linear, is_compiled: bool, x: torch.Tensor, gradient: torch.Tensor) -> Step:
    """Forward and backward: y, dx and dw."""
    forward: Callable[[torch.Tensor], torch.Tensor] = layer
    if is_compiled:
        backend = "inductor" if x.is_cuda else "aot_eager"  # Inductor needs a C++ compiler on a CPU
        forward = torch.compile(layer, fullgraph=True, dynamic=False, backend=backend)

    def step() -> tuple[torch.Tensor, ...]:
        y = forward(x)
        return y.detach(), *torch.autograd.grad(y, (x, layer.weight), gradient)

    return step
