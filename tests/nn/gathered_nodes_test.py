"""Layers whose weights are gathered in fp8 on two ranks, over gloo, are one node of autograd where several can be."""

from __future__ import annotations

import pytest
import torch
from ranks import BF16_ERROR, MIXED, WIDTH, Gathered, data, error, trained
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.utils.checkpoint import checkpoint

import stoneware as sw
from stoneware.quantizing import reference


class Attention(nn.Module):
    """Layers of one argument, and one more."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, size, bias=bias) for size in (WIDTH, 64, 64))
        self.o = nn.Linear(WIDTH + 128, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(torch.cat((self.q(x), self.k(x), self.v(x)), -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


JOINED = {
    "attention": (lambda: Attention(bias=False), "_SiblingsBackward", 1),
    "biases": (lambda: Attention(bias=True), "_SiblingsBackward", 1),
    "feed-forward": (FeedForward, "_SwiGLUBackward", 0),
    "SwiGLU": (lambda: sw.nn.SwiGLU(WIDTH, 2 * WIDTH, recipe="rowwise"), "_SwiGLUBackward", 0),
}
"""What makes a module, its node of several layers, and how many other layers it has."""


class Checkpointed(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def joined_and_gathered(name: str, *, is_alone: bool = False, is_checkpointed: bool = False) -> nn.Module:
    """The module, with weights whose rows have scales of their own; hooks have its layers run alone."""
    torch.manual_seed(0)
    model = (Checkpointed if is_checkpointed else nn.Sequential)(JOINED[name][0]())
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    for layer in layers:
        layer.weight.data *= torch.linspace(0.25, 2, layer.out_features)[:, None]
    sw.nn.convert(model, "rowwise")
    for layer in layers if is_alone else ():
        layer.register_forward_pre_hook(lambda *arguments: None)
    sw.nn.gather_in_fp8(model)
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=MIXED)


def nodes_of(y: torch.Tensor) -> list[str]:
    """The names of the nodes of autograd that compute layers."""
    found, waiting = set(), [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [one for one, _ in node.next_functions]
    names = [type(node).__name__ for node in found]
    return sorted(name for name in names if name in ("_SiblingsBackward", "_SwiGLUBackward", "_LinearBackward"))


def check_joined(name: str, is_checkpointed: bool) -> None:
    """y and the gradients of parameters have the bits of the layers alone; dx is one matmul for several layers."""
    x, dy = (one.chunk(2)[distributed.get_rank()] for one in data())
    model, alone = joined_and_gathered(name), joined_and_gathered(name, is_alone=True)
    _, node, num_others = JOINED[name]
    layers = [layer for layer in alone.modules() if isinstance(layer, nn.Linear)]
    whole = {tuple(layer.weight.shape) for layer in layers}
    whole |= {shape[::-1] for shape in whole} - {tuple(layer.weight.to_local().shape) for layer in layers}
    expected = trained(alone, x, dy)
    assert nodes_of(alone(x.clone().requires_grad_())) == ["_LinearBackward"] * len(layers)
    assert nodes_of(model(x.clone().requires_grad_())) == sorted([node, *["_LinearBackward"] * num_others])
    if is_checkpointed:
        model = joined_and_gathered(name, is_checkpointed=True)
    shapes, quantize = set(), reference.quantize
    reference.quantize = lambda tensor, *arguments: shapes.add(tuple(tensor.shape)) or quantize(tensor, *arguments)
    try:
        found = [trained(model, x, dy) for _ in range(2)]
    finally:
        reference.quantize = quantize
    assert shapes and not shapes & whole  # only shards of weights are quantized
    for name, value in expected.items():
        for one in found:
            assert torch.equal(one[name], value) or (name == "dx" and error(one[name], value) < 2 * BF16_ERROR), name


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("name", JOINED)
def test_layers_gathered_in_fp8_are_one_node(on_both, name, is_checkpointed):
    on_both(check_joined, name, is_checkpointed)


def check_alone(name: str) -> None:
    model, (x, _) = joined_and_gathered(name), data()
    num_layers = sum(isinstance(layer, nn.Linear) for layer in model.modules())
    with Gathered():
        assert nodes_of(model(x.requires_grad_())) == ["_LinearBackward"] * num_layers
    assert nodes_of(model(x[:, :3])) == ["_LinearBackward"] * num_layers  # 12 rows are not a multiple of 16
    with torch.autocast("cpu", torch.bfloat16):
        assert len(nodes_of(model(x))) < num_layers
        assert torch.equal(model(x), model(x.float()))


@pytest.mark.parametrize("name", JOINED)
def test_layers_gathered_in_fp8_run_alone_in_unusual_calls(on_both, name):
    on_both(check_alone, name)
