"""Compares blocks that were proved with their references on random inputs, before they are replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stoneware.nn import proofs
from stoneware.nn.arguments import BITS_16
from stoneware.quantizing.fused import silu_mul

_TOLERANCE = 0.01
"""The largest relative difference of two results; one more rounding to 16 bits makes 0.004."""

_MAGNITUDES = (1.0, 10.0, 50.0)
"""Magnitudes of the random inputs on which a proved block must agree."""


def rms_norm(known: proofs.Proofs, norm: Any) -> tuple[float, frozenset[torch.dtype]]:
    """The epsilon of a norm that is an RMSNorm, and the dtypes of weight and x for which it is one: its own, and
    those that it may have later, as FSDP2's mixed precision hands it a weight in 16 bits.

    Raises:
      NoProof: it is not an RMSNorm with its present weight.
    """
    eps = _checked_norm(known, norm)
    weight, dtypes = norm._parameters["weight"], {norm.weight.dtype}
    is_plain = type(weight) in (torch.nn.Parameter, torch.Tensor)  # no other type is fused in a call
    for dtype in {torch.float32, *BITS_16} - dtypes if is_plain else ():
        norm._parameters["weight"] = torch.nn.Parameter(weight.detach().to(dtype), weight.requires_grad)
        try:
            if _checked_norm(known, norm) == eps:
                dtypes.add(dtype)
        except proofs.NoProof:
            continue  # with this dtype its own code runs
        finally:
            norm._parameters["weight"] = weight
    return eps, frozenset(dtypes)


def _checked_norm(known: proofs.Proofs, norm: Any) -> float:
    eps = known.of(proofs.rms_norm, norm)

    def reference(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, norm.weight.shape, norm.weight, eps)

    _check_agreement(known, norm, reference, norm.weight, norm.weight.shape[0])
    return eps


def check_swiglu(known: proofs.Proofs, block: torch.nn.Module, parts: proofs.SwiGLUParts) -> None:
    """Raises NoProof if a feed-forward differs from down(silu(gate(x)) * up(x))."""
    layers = [block.get_submodule(name) for name in parts.gate_up]
    down = block.get_submodule(parts.down)

    def reference(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = down(silu_mul(torch.cat([layer(x) for layer in layers], -1)))
        return y

    weight: Any = layers[0].weight
    _check_agreement(known, block, reference, weight, weight.shape[1])


def check_mlp(known: proofs.Proofs, block: torch.nn.Module, parts: proofs.MLPParts) -> None:
    """Raises NoProof if a feed-forward differs from down(activation(up(x)))."""
    up, down = block.get_submodule(parts.up), block.get_submodule(parts.down)

    def reference(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = down(parts.activation(up(x)))
        return y

    weight: Any = up.weight
    _check_agreement(known, block, reference, weight, weight.shape[1])


def _check_agreement(
    known: proofs.Proofs, block: torch.nn.Module, reference: Callable[..., torch.Tensor], weight: torch.Tensor, k: int
) -> None:
    """Raises NoProof if a proved block differs from its reference on random inputs of several magnitudes."""
    x = torch.randn(2, k, generator=torch.Generator().manual_seed(0), device="cpu").to(weight.device, weight.dtype)
    expected_operations = known.of(proofs.operations, block)
    for magnitude in _MAGNITUDES:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            scaled_x = x * magnitude
            try:
                y = proofs.checked_call(block, scaled_x, expected_operations)
            except proofs.NoProof:
                raise
            except Exception as error:  # whatever other people's code raises
                raise proofs.NoProof(f"it refuses a random input ({type(error).__name__})") from error
            if weight.is_meta:
                return
            expected_y = reference(scaled_x)
        is_alike = isinstance(y, torch.Tensor) and y.shape == expected_y.shape and y.dtype == expected_y.dtype
        if not is_alike or (y - expected_y).float().norm() > _TOLERANCE * expected_y.float().norm():
            raise proofs.NoProof("its results on random inputs differ")
