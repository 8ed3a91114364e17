"""FP8Experts of transformers with random weights, and what they compute."""

from __future__ import annotations

import torch
from transformers import MixtralConfig
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import use_experts_implementation

from stoneware import quantize

ERROR = 2**-4
"""Relative error of one fp8 matmul of random operands."""


def error(y, expected):
    return float((y.double() - expected.double()).norm() / expected.double().norm())


def fp8_experts(block_size=(128, 128), device="cpu", *, has_values=True, **options):
    """FP8Experts like transformers loads them, and their dequantized weights."""
    config = MixtralConfig(hidden_size=256, intermediate_size=384, num_local_experts=4)
    kind = use_experts_implementation(experts_class=FP8Experts, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS)
    experts = kind(config, block_size=block_size, **options).to(device).requires_grad_(False)
    dense = {}
    for name in ("gate_up_proj", "down_proj") if has_values else ():
        empty, empty_scale = getattr(experts, name), getattr(experts, f"{name}_scale_inv")
        num_experts, n, k = empty.shape
        parts = 1 if block_size else empty_scale.shape[1]  # gate and up have a scale each
        pairs = [
            quantize(
                torch.randn(n // parts, k, device=device) / 16,
                "block_2d" if block_size else "tensor",
                power_of_two=True,
            )
            for _ in range(num_experts * parts)
        ]
        weight = torch.cat([weight for weight, _ in pairs]).view(empty.shape)
        scale = torch.cat([scale.view(-1, empty_scale.shape[2]) for _, scale in pairs]).view(empty_scale.shape)
        getattr(experts, name).copy_(weight)
        getattr(experts, f"{name}_scale_inv").copy_(scale)
        rows, columns = n // scale.shape[1], k // scale.shape[2]
        dense[name] = weight.float() * scale.repeat_interleave(rows, 1).repeat_interleave(columns, 2)
    return experts.eval(), dense


def routing(num_tokens, device="cpu"):
    x = torch.randn(num_tokens, 256, device=device).bfloat16()
    index = torch.stack([torch.randperm(4, device=device)[:2] for _ in range(num_tokens)])
    return x, index, torch.rand(num_tokens, 2, device=device)


def dense_experts(dense, x, index, weights):
    """The loop of transformers over dequantized weights."""
    y = torch.zeros(x.shape, device=x.device)
    for token, (experts, factors) in enumerate(zip(index, weights)):
        for expert, weight in zip(experts, factors):
            gate, up = (dense["gate_up_proj"][expert] @ x[token].float()).chunk(2)
            y[token] += weight * (dense["down_proj"][expert] @ (torch.nn.functional.silu(gate) * up))
    return y


class Routed(torch.nn.Module):
    """A block with experts, under their name in transformers."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts
