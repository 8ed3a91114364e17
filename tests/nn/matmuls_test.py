"""Which matmuls a layer in fp8 needs, as a table of every recipe and every set of needs; and what it refuses."""

from __future__ import annotations

import itertools

import pytest
import torch

import stoneware as sw
from stoneware.errors import BackwardNotBuiltError
from stoneware.kernels import manifest
from stoneware.kernels.manifest import Manifest
from stoneware.nn import recipes
from stoneware.ops import backward

TENSOR, ROW, BLOCK = (("e4m3", "e4m3", scales) for scales in ("tensor", "row", "block"))
WIDE = ("e5m2", "e4m3", "tensor")
HIGH = ("bf16", "bf16", "")

# recipe -> operands of the forward matmul, dgrad and wgrad; HIGH is not quantized
TABLE = {
    "tensorwise": (TENSOR, WIDE, WIDE),
    "rowwise": (ROW, ROW, ROW),
    "rowwise_with_gw_hp": (ROW, ROW, HIGH),
    "blockwise": (BLOCK, BLOCK, HIGH),
}
# The layouts of a matmul in bf16 without transposed copies of operands.
LAYOUTS = {"dgrad": "nn", "wgrad": "tn"}


def test_the_table_has_every_recipe():
    assert TABLE.keys() == recipes.RECIPES.keys()


@pytest.mark.parametrize("needed", list(itertools.product((False, True), repeat=3)), ids=str)
@pytest.mark.parametrize("recipe", TABLE)
def test_matmuls_of_a_recipe(recipe, needed):
    expected = []
    for role, operands, is_needed in zip(("forward", "dgrad", "wgrad"), TABLE[recipe], (True, *needed)):
        if is_needed:
            op, layout = ("matmul", LAYOUTS[role]) if operands is HIGH else ("scaled_mm", "nt")
            expected.append((role, op, layout, operands, "bf16"))
    if needed[2]:
        expected.append(("dbias", "matmul", "", ("bf16", "", ""), "bf16"))
    found = recipes._needed_matmuls(recipe, torch.bfloat16, needed)
    assert [
        (matmul.role, matmul.op, matmul.layout, (matmul.a_dtype, matmul.b_dtype, matmul.scales), matmul.out_dtype)
        for matmul in found
    ] == expected


@pytest.fixture
def forward_only(monkeypatch):
    monkeypatch.setattr(manifest, "installed", lambda: Manifest({}, has_backward=False))
    caches = recipes._needed_matmuls, backward.is_saved
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


LAYERS = {
    **{
        recipe: lambda recipe=recipe: sw.nn.Float8Linear(128, 128, recipe=recipe, dtype=torch.bfloat16)
        for recipe in TABLE
    },
    "frozen": lambda: sw.nn.Float8InferenceLinear(128, 128, recipe="rowwise", dtype=torch.bfloat16),
    "bf16": lambda: sw.nn.Linear(128, 128, dtype=torch.bfloat16),
}


@pytest.mark.usefixtures("forward_only")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_a_layer_refuses_a_gradient_that_is_not_built_at_its_forward_call(name, compiler):
    layer = LAYERS[name]()
    torch._dynamo.reset()
    call = layer if compiler is None else torch.compile(layer, backend=compiler, fullgraph=True)
    x = torch.randn(32, 128).bfloat16()
    with pytest.raises(
        Exception, match="has no dgrad of layout n. in this build, and . requires|and x requires"
    ) as caught:
        call(x.clone().requires_grad_())
    if compiler is None:
        assert isinstance(caught.value, BackwardNotBuiltError)
    with torch.no_grad():
        assert call(x).shape == (32, 128)


@pytest.mark.usefixtures("forward_only")
@pytest.mark.parametrize("recipe", TABLE)
def test_a_frozen_layer_without_an_input_s_gradient_is_not_refused(recipe):
    layer = LAYERS[recipe]().requires_grad_(False)
    assert layer(torch.randn(32, 128).bfloat16()).grad_fn is None
