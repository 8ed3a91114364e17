"""A model of transformers with random weights, and copies of it with other linears."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

ATTENTION = "sdpa_without_mask"
"""torch's attention with is_causal and never a mask. transformers' own "sdpa" waits for the GPU in each
forward pass to find that it needs no mask, and makes one in a CUDA graph, where it cannot look."""


def build(kind: str, config: Mapping[str, Any], num_layers: int, device: torch.device) -> torch.nn.Module:
    """`kind` is a class like "LlamaForCausalLM", or "LlamaModel" without logits; bf16, in eval mode, random weights.

    Raises:
      ImportError: transformers is not installed.
    """
    import transformers  # only where a part asks for it
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # No mask is made for an attention that has no function to make one.
    transformers.AttentionInterface.register(ATTENTION, sdpa_attention_forward)
    settings = getattr(transformers, kind).config_class(
        **config, num_hidden_layers=num_layers, attn_implementation=ATTENTION
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return getattr(transformers, kind)(settings).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(default)


def sharing_copy(model: torch.nn.Module) -> torch.nn.Module:
    """Modules of its own with the same tensors, so that what is not replaced takes no memory."""
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    return copy.deepcopy(model, memo)


def linears(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """Name -> linear layer of the blocks; not the head."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head")
    }


def replace(model: torch.nn.Module, make: Callable[[str, torch.nn.Linear], torch.nn.Module]) -> None:
    """Replaces each of `linears` by make(name, layer)."""
    for name, layer in linears(model).items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, make(name, layer))


def weight_bytes(model: torch.nn.Module, suffix: str = "") -> int:
    """Bytes of the blocks' linear layers whose names end with the suffix, scales included."""
    found = [layer for name, layer in linears(model).items() if name.endswith(suffix)]
    return sum(one.numel() * one.element_size() for layer in found for one in layer.parameters())
