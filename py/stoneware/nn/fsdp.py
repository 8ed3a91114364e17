"""Prepares a model for torch.distributed.fsdp."""

from __future__ import annotations

from typing import Any

import torch

from stoneware.nn.arguments import is_distributed
from stoneware.nn.gathered_weight import ShardedWeight
from stoneware.nn.gathering import Gathering, Place
from stoneware.nn.linear import Float8Linear
from stoneware.nn.recipes import RECIPES


def gather_in_fp8(model: torch.nn.Module) -> list[str]:
    """Lets fully_shard gather the weights of all `Float8Linear` in fp8; call it before.

    Each rank quantizes its own rows and gathers all rows, in forward and again in backward. y is bitwise
    unchanged, and so is dx for "tensorwise" and "blockwise". For the recipes with row scales dx is a matmul
    with the same fp8 weight, whose scales are applied to dy before its cast. "tensorwise" reduces one number
    per weight among the ranks, those of all weights together once a step. The state_dict stays the same.
    Layers of an earlier call are not changed.

    Args:
      model: a model with converted layers, not yet sharded.

    Returns:
      The names of the layers.

    Raises:
      ValueError: a weight is a DTensor already.
      At a forward call, ValueError: a weight cannot be cut into equal parts of whole scales.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    for name, layer in layers.items():
        if is_distributed(layer.weight):
            raise ValueError(
                f"weight of {name} is a DTensor, it must be a plain tensor; call gather_in_fp8 before fully_shard, "
                "and do not use it for layers of a tensor parallel plan"
            )
    gathering, reduces = Gathering(len(layers)), False
    for position, layer in enumerate(layers.values()):
        weight = layer.weight
        if isinstance(weight, ShardedWeight):
            continue
        shard = ShardedWeight(weight.detach(), layer.recipe, Place(gathering, position))
        layer.weight = torch.nn.Parameter(shard, requires_grad=weight.requires_grad)
        layer.register_state_dict_post_hook(_plain_weight)
        reduces = reduces or RECIPES[layer.recipe].forward[1].scales == "tensor"
    if reduces:
        model.register_forward_pre_hook(gathering.reduce_ahead)
    return [*layers]


def _plain_weight(layer: torch.nn.Module, state_dict: dict[str, Any], prefix: str, metadata: object) -> None:
    """Replaces a ShardedWeight in the state_dict by its plain tensor, in the same memory."""
    name = f"{prefix}weight"
    weight = state_dict[name]
    if isinstance(weight, ShardedWeight):
        state_dict[name] = weight.tensor
    elif is_distributed(weight) and isinstance(local := weight.to_local(), ShardedWeight):
        from torch.distributed.tensor import DTensor

        state_dict[name] = DTensor.from_local(
            local.tensor,
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )
