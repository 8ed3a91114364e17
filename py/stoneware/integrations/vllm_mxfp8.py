"""MXFP8 weights of vLLM, brought to scales of 128x128 elements."""

from __future__ import annotations

import logging

import torch

from stoneware.nn import folded_scales
from stoneware.nn.inference import dequantize
from stoneware.nn.recipes import BLOCK

_LOG = logging.getLogger("stoneware.integrations")


def fold(weight: torch.nn.Parameter, exponents: torch.Tensor, what: str) -> torch.Tensor | None:
    """Folds the scales into the values, in place; a weight that would change too much gets 16 bits instead.

    Each matrix is folded for itself, so that little memory is needed besides.

    Args:
      weight: [..., n, k] float8_e4m3fn, n and k multiples of 128. It keeps its shape.
      exponents: [..., n, k / 32] uint8, of powers of two (UE8M0).
      what: the layer, in a warning.

    Returns:
      The scales [..., n / 128, k / 128] float32; None if the weight is bfloat16 now.
    """
    *groups, n, k = weight.shape
    matrices, scales = weight.data.view(-1, n, k), _factors(exponents).view(-1, *exponents.shape[-2:])
    pairs = list(zip(matrices, scales))
    for values, scale in pairs:
        loss = folded_scales.loss(values, scale)
        if not isinstance(loss, folded_scales.Loss):
            _LOG.warning("%s with MXFP8 weights runs in 16 bits: %s", what, loss)
            weight.data = _in_16_bits(weight.data, pairs)
            return None
    blocks = scales.new_empty(len(pairs), n // BLOCK, k // BLOCK)
    for (values, scale), block in zip(pairs, blocks):
        folded = folded_scales.fold(values, scale)
        values.copy_(folded.weight)
        block.copy_(folded.scale)
    return blocks.view(*groups, n // BLOCK, k // BLOCK)


def _factors(exponents: torch.Tensor) -> torch.Tensor:
    return exponents.detach().view(torch.float8_e8m0fnu).float()


def _in_16_bits(weight: torch.Tensor, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    dense = torch.empty(len(pairs), *weight.shape[-2:], dtype=torch.bfloat16, device=weight.device)
    for out, (values, scale) in zip(dense, pairs):
        out.copy_(dequantize(values, scale, torch.bfloat16))
    return dense.view(weight.shape)
