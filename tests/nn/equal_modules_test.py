"""Equal modules of a model are proved once, and which modules are not equal."""

from __future__ import annotations

import pytest
import torch

from stoneware import nn
from stoneware.nn import proofs


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict({"a": torch.nn.Linear(64, 64), "b": torch.nn.Linear(64, 64)})
        self.activation = torch.nn.SiLU()
        self.eps, self.options = 0.0, {"scale": 1.0}
        self.function = torch.nn.functional.silu
        self.register_buffer("table", torch.zeros(4), persistent=False)


class Prover:
    """A proof that counts the modules it is called for, and fails for those of zeros."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, module: torch.nn.Module) -> int:
        self.num_calls += 1
        if not module.layers["a"].weight.any():
            raise proofs.NoProof("it is zero")
        return self.num_calls


def set_attribute(name: str, value: object):
    return lambda block: setattr(block, name, value)


def share_weights(block: Block) -> None:
    block.layers["b"].weight = block.layers["a"].weight


CHANGES = {
    "number": set_attribute("eps", 1e-6),
    "sign of zero": set_attribute("eps", -0.0),
    "type of a number": set_attribute("eps", 0),
    "new attribute": set_attribute("scale", 1.0),
    "value in a dict": lambda block: block.options.update(scale=2.0),
    "function": set_attribute("function", torch.nn.functional.gelu),
    "mode": lambda block: block.eval(),
    "attribute of a part": lambda block: setattr(block.activation, "inplace", True),
    "class of a part": set_attribute("activation", torch.nn.GELU()),
    "class": lambda block: setattr(block, "__class__", type("Block", (Block,), {})),
    "forward of its own": set_attribute("forward", lambda x: x),
    "hook": lambda block: block.register_forward_hook(lambda *arguments: None),
    "hook of a part": lambda block: block.activation.register_forward_pre_hook(lambda *arguments: None),
    "shape": lambda block: block.layers.update({"b": torch.nn.Linear(64, 32)}),
    "bias": lambda block: block.layers.update({"b": torch.nn.Linear(64, 64, bias=False)}),
    "dtype": lambda block: block.layers["b"].bfloat16(),
    "device": lambda block: block.layers["b"].to("meta"),
    "gradient": lambda block: block.layers["b"].requires_grad_(False),
    "shared weight": share_weights,
    "shared part": lambda block: block.layers.update({"b": block.layers["a"]}),
    "order of parts": lambda block: block.layers.update({"a": block.layers.pop("a")}),
    "buffer": set_attribute("table", torch.zeros(5)),
}  # fmt: skip


def test_modules_that_differ_in_their_weights_alone_are_proved_once():
    known, prove = proofs.Proofs(), Prover()
    assert [known.of(prove, Block()) for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_modules_that_differ_in_more_have_proofs_of_their_own(change):
    known, prove = proofs.Proofs(), Prover()
    changed = Block()
    change(changed)
    assert [known.of(prove, block) for block in (Block(), changed, Block())] == [1, 2, 1]


def test_a_proof_that_fails_is_not_tried_again():
    known, prove = proofs.Proofs(), Prover()
    for _ in range(2):
        block = Block()
        torch.nn.init.zeros_(block.layers["a"].weight)
        with pytest.raises(proofs.NoProof, match="it is zero"):
            known.of(prove, block)
    assert prove.num_calls == 1


def test_a_model_with_one_norm_that_differs_computes_the_same():
    torch.manual_seed(0)
    norms = [torch.nn.RMSNorm(64, eps=eps, dtype=torch.bfloat16) for eps in (1e-6, 1e-6, 10.0, 1e-6)]
    model = torch.nn.Sequential(*norms)
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    expected = model(x)
    done = nn.convert(model, "rowwise")
    assert len(done.blocks) == 4
    torch.testing.assert_close(model(x), expected, rtol=2**-7, atol=2**-7)


SPECIAL: set[int] = set()


class RegisteredNorm(torch.nn.Module):
    """A norm whose code asks a global whether it is special, which no attribute shows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64))

    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return y * 3 if id(self) in SPECIAL else y


class RegisteredRMSNorm(RegisteredNorm):
    pass


def test_each_module_is_still_called_and_compared():
    model = torch.nn.Sequential(*(RegisteredRMSNorm() for _ in range(3)))
    SPECIAL.add(id(model[1]))
    done = nn.convert(model, "rowwise")
    assert {*done.blocks} == {"0", "2"}
    assert "1" in done.kept_blocks
