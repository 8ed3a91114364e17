"""Finds in other people's models the blocks that have a layer here, by what they compute.

A block is recognized by its parts, and then called once with random numbers: it is taken for what it
looks like only if it gives the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from stoneware.nn.arguments import has_hooks
from stoneware.nn.experts import WEIGHTS, Experts
from stoneware.nn.recipes import UNIT
from stoneware.nn.swiglu import HALVES
from stoneware.quantizing.fused import silu_mul

DOWN = "down_proj"

_TOLERANCE = 0.01
"""Of the norm of the difference, over the norm: 16-bit results that are rounded once more or less differ by
0.004, another activation or a weight that is one more than it says by far more."""


def is_swiglu(module: torch.nn.Module) -> bool:
    """Whether it is down_proj(silu(gate_proj(x)) * up_proj(x)), of layers without a bias."""
    parts = [getattr(module, name, None) for name in (*HALVES, DOWN)]
    if not all(isinstance(part, torch.nn.Linear) and part.bias is None for part in parts):
        return False
    gate, up, down = parts
    assert gate is not None and up is not None and down is not None
    if sum(1 for _ in module.parameters()) != len(parts):
        return False

    def wanted(x: torch.Tensor) -> torch.Tensor:
        z: torch.Tensor = torch.cat([gate(x), up(x)], -1)
        y: torch.Tensor = down(silu_mul(z))
        return y

    return _gives(module, wanted, _random(gate.weight, 1, 1, gate.in_features))


def rms_norm_epsilon(module: torch.nn.Module) -> float | None:
    """The epsilon of a norm that computes what torch.nn.RMSNorm does over one dimension, else None."""
    parameters = dict(module.named_parameters())
    epsilon = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    is_like_one = type(module).__name__.endswith("RMSNorm") and [*parameters] == ["weight"]
    if not is_like_one or parameters["weight"].ndim != 1 or not isinstance(epsilon, float):
        return None
    weight = parameters["weight"]
    size = weight.shape[0]

    def wanted(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (size,), weight, epsilon)

    return epsilon if _gives(module, wanted, _random(weight, 1, 1, size)) else None


def has_experts(module: torch.nn.Module) -> bool:
    """Whether it holds the weights of many experts, under the names of transformers."""
    weights = [getattr(module, name, None) for name in WEIGHTS]
    return all(isinstance(weight, torch.nn.Parameter) and weight.ndim == 3 for weight in weights)


def experts_like(module: torch.nn.Module) -> Experts | None:
    """`Experts` with the parameters of a module that has no others and computes the same, else None."""
    gate_up, down = (module.get_parameter(name) for name in WEIGHTS)
    if len([*module.parameters()]) != len(WEIGHTS) or gate_up.dtype != torch.bfloat16 or down.dtype != torch.bfloat16:
        return None
    num_experts, hidden_size, intermediate_size = down.shape
    is_whole = not hidden_size % UNIT and not intermediate_size % UNIT
    if not is_whole or gate_up.shape != (num_experts, 2 * intermediate_size, hidden_size):
        return None
    new = Experts(num_experts, hidden_size, intermediate_size, device="meta")
    new.gate_up_proj, new.down_proj = gate_up, down
    new.train(module.training)
    if isinstance(module, Experts):
        return None if down.is_meta or has_hooks(module) else new
    chosen = torch.tensor([[0, num_experts - 1], [num_experts // 2, 0]], device=down.device)
    weights = torch.tensor([[0.75, 0.25], [0.5, 0.5]], device=down.device, dtype=down.dtype)
    return new if _gives(module, new, _random(down, 2, hidden_size), chosen, weights) else None


def _random(weight: torch.Tensor, *shape: int) -> torch.Tensor:
    """Numbers of the weight's device and dtype, each time the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(weight)


def _gives(module: torch.nn.Module, wanted: Callable[..., torch.Tensor], *arguments: torch.Tensor) -> bool:
    """Whether module(*arguments) is wanted(*arguments); zeros, as weights of zeros give, show nothing."""
    if arguments[0].is_meta or has_hooks(module):
        return False
    with torch.no_grad():
        try:
            found = module(*arguments)
        except Exception:  # whatever other people's code raises that wants other arguments
            return False
        expected = wanted(*arguments)
    if not isinstance(found, torch.Tensor) or found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    norm = expected.float().norm()
    return bool(norm > 0 and (found - expected).float().norm() <= _TOLERANCE * norm)
