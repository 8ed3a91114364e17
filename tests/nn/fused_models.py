"""A model whose norms and feed-forwards convert fuses, and inputs for it."""

from __future__ import annotations

import torch

HIDDEN, WIDTH, HEADS = 128, 256, 4


class LlamaRMSNorm(torch.nn.Module):
    """Written like in models, rounded before the weight."""

    def __init__(self, size: int, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(size) + 0.5)
        self.variance_epsilon = 1e-5
        self.offset = offset

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        weight = self.weight + self.offset if self.offset else self.weight
        return weight * wide.to(x.dtype)


class LlamaMLP(torch.nn.Module):
    def __init__(self, activation=torch.nn.functional.silu, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(HIDDEN, WIDTH, bias=bias)
        self.up_proj = torch.nn.Linear(HIDDEN, WIDTH, bias=bias)
        self.down_proj = torch.nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.activation = activation

    def forward(self, x):
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, torch.nn.Linear(HIDDEN, HIDDEN, bias=False))
        self.q_norm = LlamaRMSNorm(HIDDEN // HEADS)

    def forward(self, x):
        shape = (*x.shape[:-1], HEADS, HIDDEN // HEADS)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(-3, -2)
        k = self.k_proj(x).view(shape).transpose(-3, -2)
        v = self.v_proj(x).view(shape).transpose(-3, -2)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o_proj(y.transpose(-3, -2).flatten(-2))


class Block(torch.nn.Module):
    def __init__(self, mlp: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = LlamaRMSNorm(HIDDEN), LlamaRMSNorm(HIDDEN)
        self.self_attn, self.mlp = Attention(), mlp or LlamaMLP()

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


def new_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(Block(), Block()).bfloat16().eval().requires_grad_(False)


def rows(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape).to(dtype)


def near(found, wanted):
    return (found - wanted).float().norm() <= 0.08 * wanted.float().norm()
