"""What ends the fused call of a converted block, before its first call as well as after it."""

from __future__ import annotations

import pytest
import torch

from stoneware import nn

HIDDEN, WIDTH = 128, 256


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = torch.nn.Linear(HIDDEN, WIDTH, bias=False)
        self.up_proj = torch.nn.Linear(HIDDEN, WIDTH, bias=False)
        self.down_proj = torch.nn.Linear(WIDTH, HIDDEN, bias=False)
        self.act_fn = torch.nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def converted():
    torch.manual_seed(1)
    model = torch.nn.Sequential(Block()).bfloat16().eval().requires_grad_(False)
    assert nn.convert(model).blocks == {"0": "SwiGLU"}
    return model, model[0]


def new_weight(weight):
    return torch.nn.Parameter(weight.data.flip(0).clone(), requires_grad=False)


def replace_weight(block):
    block.gate_proj.weight = new_weight(block.gate_proj.weight)


def replace_scale(block):
    block.up_proj.weight_scale_inv = new_weight(block.up_proj.weight_scale_inv * 2)


def replace_both(block):
    for layer in (block.gate_proj, block.down_proj):
        layer.weight = new_weight(layer.weight)


def move_weight(block):
    block.up_proj.weight.data = new_weight(block.up_proj.weight).data


CHANGES = {
    "activation by add_module": lambda block: block.add_module("act_fn", torch.nn.GELU()),
    "activation by set_submodule": lambda block: block.set_submodule("act_fn", torch.nn.GELU()),
    "layer by add_module": lambda block: block.add_module("gate_proj", torch.nn.Linear(HIDDEN, WIDTH).bfloat16()),
    "weight": replace_weight,
    "scale": replace_scale,
    "weights of two layers": replace_both,
    "memory of a weight": move_weight,
    "hook": lambda block: block.gate_proj.register_forward_hook(lambda module, args, y: 2 * y),
    "forward": lambda block: setattr(block.act_fn, "forward", torch.nn.functional.gelu),
}


@pytest.mark.parametrize("was_called", [False, True], ids=["before the first call", "after it"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@torch.no_grad()
def test_a_block_computes_with_what_it_has(change, was_called):
    model, block = converted()
    x = torch.randn(4, HIDDEN).bfloat16()
    before = model(x) if was_called else converted()[0](x)
    change(block)
    wanted = Block.forward(block, x)
    assert (wanted - before).norm() > 0.1 * before.norm(), "the change must matter"
    for _ in range(2):
        assert (model(x) - wanted).float().norm() <= 0.02 * wanted.float().norm()


@torch.no_grad()
def test_a_transform_of_the_weights_runs_the_block_layer_by_layer():
    model, block = converted()
    x = torch.randn(4, HIDDEN).bfloat16()
    stacked = {name: tensor.unsqueeze(0) for name, tensor in model.state_dict().items()}
    found = torch.func.vmap(lambda tensors: torch.func.functional_call(model, tensors, (x,)))(stacked)
    for _ in range(2):
        assert (found[0] - model(x)).float().norm() <= 0.02 * found.float().norm()
    assert block._stoneware.holds()


@torch.no_grad()
def test_other_weights_for_a_time_are_used_for_that_time():
    model, block = converted()
    x = torch.randn(4, HIDDEN).bfloat16()
    others = {"0.gate_proj.weight": new_weight(block.gate_proj.weight)}
    found = torch.func.functional_call(model, others, (x,))  # the first call
    own = model(x)
    block.gate_proj.weight = others["0.gate_proj.weight"]
    assert (found - Block.forward(block, x)).float().norm() <= 0.02 * found.float().norm()
    assert (found - own).float().norm() > 0.1 * own.float().norm()
