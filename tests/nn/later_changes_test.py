"""A block that was swapped computes what its own code does, after later changes too."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch
from block_forms import FEED_FORWARDS, HIDDEN, NORMS, Form, module_of, near

from stoneware import nn


def with_another_forward_of_its_class(module: Any) -> None:
    own: Any = type(module).__mro__[3]  # behind the class of the swapped block, and the two of Stoneware
    own.forward = lambda self, x: 3 * x


def with_another_epsilon(module: Any) -> None:
    module.eps = 1.0


def with_another_activation(module: Any) -> None:
    module.act_fn = torch.nn.ReLU()


def with_a_hook_of_the_activation(module: Any) -> None:
    module.act_fn.register_forward_hook(lambda layer, args, y: 2 * y)


def with_a_pre_hook_of_the_activation(module: Any) -> None:
    module.act_fn.register_forward_pre_hook(lambda layer, args: (2 * args[0],))


def with_a_forward_of_the_activation(module: Any) -> None:
    module.act_fn.forward = torch.nn.functional.relu


def with_an_attribute_of_the_activation(module: Any) -> None:
    module.act_fn.beta = 2.0


def with_a_hook_of_a_layer(module: Any) -> None:
    module.down_proj.register_forward_hook(lambda layer, args, y: 2 * y)


def with_a_bias_of_a_layer(module: Any) -> None:
    module.down_proj.bias = torch.nn.Parameter(torch.ones(HIDDEN, dtype=torch.bfloat16), requires_grad=False)


def with_another_limit(module: Any) -> None:
    module.limits[0] = 0.1


def with_a_limit_of_the_config(module: Any) -> None:
    module.config.limit = 0.1


def with_a_loaded_limit(module: Any) -> None:
    module.load_state_dict({**module.state_dict(), "limit": torch.tensor(0.1)})


LIMIT = {
    with_another_limit: ("self.limits = [None]", "self.limits[0]"),
    with_a_limit_of_the_config: ("self.config = type('Config', (), {'limit': None})()", "self.config.limit"),
    with_a_loaded_limit: ("self.register_buffer('limit', torch.tensor(0.0))", "(self.limit.item() or None)"),
}


def limited(form: Form, init: str, limit: str) -> Form:
    form = form._replace(init=f"{textwrap.dedent(form.init)}\n{init}")
    return form.with_operation("x", f"limit = {limit}\nif limit is not None:\n    x = x.clamp(max=limit)")


SWISH = FEED_FORWARDS["Llama"].with_text("torch.nn.SiLU()", "ScaledSwish()")

LATER_CHANGES = [
    *((NORMS[name], with_another_epsilon) for name in NORMS),
    *((form, with_another_forward_of_its_class) for form in (NORMS["Llama"], FEED_FORWARDS["Llama"])),
    *(
        (FEED_FORWARDS["Llama"], change)
        for change in (
            with_another_activation, with_a_hook_of_the_activation, with_a_pre_hook_of_the_activation,
            with_a_forward_of_the_activation, with_a_hook_of_a_layer, with_a_bias_of_a_layer,
        )
    ),
    (SWISH, with_an_attribute_of_the_activation),
    *((limited(form, *LIMIT[change]), change) for form in (NORMS["Llama"], FEED_FORWARDS["Llama"]) for change in LIMIT),
]  # fmt: skip


@pytest.mark.parametrize(("form", "change"), LATER_CHANGES)
def test_a_block_computes_what_its_own_code_does_after_a_later_change(form, change):
    module = module_of(form)
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.reset_parameters()
    own = type(module)
    model = torch.nn.Sequential(module).bfloat16().requires_grad_(False)
    nn.convert(model, "rowwise", frozen=True)
    x = torch.randn(5, HIDDEN).bfloat16()
    before = model(x)
    change(module)
    y = own.forward(module, x)
    assert not near(before, y)
    assert near(model(x), y)


def test_global_hooks_see_the_layers_of_a_feed_forward():
    model = torch.nn.Sequential(module_of(FEED_FORWARDS["Llama"])).bfloat16()
    nn.convert(model, "rowwise", frozen=True)
    seen = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda layer, *_: seen.append(layer))
    try:
        model(torch.randn(5, HIDDEN).bfloat16())
    finally:
        handle.remove()
    assert model[0].down_proj in seen
