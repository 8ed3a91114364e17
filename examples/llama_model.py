"""A Llama of bytes in plain PyTorch, and text to train it on, for the other examples."""

from __future__ import annotations

import pydoc_data.topics

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and a SwiGLU MLP, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate_up, self.down = nn.Linear(width, 8 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.qkv(self.norm_1(x)).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class Llama(nn.Module):
    """Predicts the next byte; positions are trained embeddings."""

    def __init__(self, layers: int, width: int, length: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(layers))
        self.norm, self.lm_head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


def text() -> torch.Tensor:
    """The topics of Python's own help, as bytes."""
    return torch.tensor(list("\n".join(pydoc_data.topics.topics.values()).encode()), dtype=torch.uint8)


def loss_of(model: nn.Module, data: torch.Tensor, step: int, batch: int, length: int) -> torch.Tensor:
    """The loss at the batch of a step, which depends on nothing but its number."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(data) - length - 1, (batch, 1), generator=generator)
    rows = data[starts + torch.arange(length + 1)].long().to(next(model.parameters()).device)
    return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten())
