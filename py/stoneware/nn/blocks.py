"""Finds in other people's models the blocks that have a layer here, by what they compute.

A block is recognized by its parts, and then called once with random numbers: it is taken for what it
looks like only if it gives the same.
"""

from __future__ import annotations

import torch

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

    return _gives(module, wanted, gate.weight, gate.in_features)


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

    return epsilon if _gives(module, wanted, weight, size) else None


def _gives(module: torch.nn.Module, wanted: object, weight: torch.Tensor, size: int) -> bool:
    """Whether module(x) is wanted(x) for one row of random numbers of the weight's device and dtype."""
    assert callable(wanted)
    if weight.is_meta or module._forward_hooks or module._forward_pre_hooks:
        return False
    x = torch.randn(1, 1, size, generator=torch.Generator().manual_seed(0)).to(weight)
    with torch.no_grad():
        try:
            found = module(x)
        except (TypeError, ValueError, RuntimeError):
            return False  # it wants other arguments: a block of another kind
        expected = wanted(x)
    if not isinstance(found, torch.Tensor) or found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return bool((found - expected).float().norm() <= _TOLERANCE * expected.float().norm())
