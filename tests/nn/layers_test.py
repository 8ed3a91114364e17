"""The layers of sw.nn give the values and the gradients of torch's."""

from __future__ import annotations

import collections
import copy
import re

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from rounding import BF16_ERROR, E4M3, FP8_ERROR, error, tolerance
from torch._dynamo.backends.common import aot_autograd

from stoneware import nn
from stoneware.errors import ForwardOnlyError
from stoneware.nn import frozen_linear, steps, trained_linear, trained_steps
from stoneware.nn.recipes import RECIPES


def training_tolerances(recipe: str, dtype: torch.dtype, num_rows: int) -> dict[str, float]:
    """For each value of `gradients`, of a Float8Linear of this recipe."""
    casts = RECIPES[recipe]
    # Parameters in 32 bits get the gradient of a product in bfloat16, which rounds its operands.
    in_16_bits = [torch.bfloat16] * 2 if dtype == torch.float32 else []
    rounded = {
        "y": [cast.dtype for cast in casts.forward],
        "x": [cast.dtype for cast in casts.grad_input],
        "weight": in_16_bits if casts.grad_weight is None else [cast.dtype for cast in casts.grad_weight],
        "bias": [torch.float32] * num_rows,  # a sum of them
    }
    num_values = {"y": num_rows * K, "x": num_rows * K, "weight": num_rows * K, "bias": N}
    return {name: tolerance(*dtypes, dtype, num_values=num_values[name]) for name, dtypes in rounded.items()}


K, N = 256, 384

recipes = pytest.mark.parametrize("recipe", RECIPES)


def in_float64(layer: torch.nn.Linear) -> torch.nn.Linear:
    twin = torch.nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, dtype=torch.float64)
    twin.load_state_dict(layer.state_dict())
    return twin


def gradients(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """y, dx and the gradients of the parameters."""
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(dy.to(y.dtype))
    return {"y": y.detach(), "x": x.grad, **{name: one.grad for name, one in layer.named_parameters()}}


@recipes
@pytest.mark.parametrize("shape", [(32, K), (3, 7, K), (1, K)])
@pytest.mark.parametrize("bias", [True, False])
def test_training_in_fp8_is_near_float64(recipe, shape, bias):
    layer = nn.Float8Linear(K, N, bias, recipe=recipe, dtype=torch.bfloat16)
    x, dy = torch.randn(shape), torch.randn(*shape[:-1], N)
    found = gradients(layer, x.bfloat16(), dy.bfloat16())
    expected = gradients(in_float64(layer), x.bfloat16().double(), dy.bfloat16())
    tolerances = training_tolerances(recipe, torch.bfloat16, x.numel() // K)
    for name, value in expected.items():
        assert error(found[name], value) < tolerances[name], name
        assert found[name].dtype == torch.bfloat16


@recipes
def test_parameters_in_32_bits_train_without_autocast(recipe):
    layer = nn.Float8Linear(K, N, recipe=recipe)
    x, dy = torch.randn(32, K), torch.randn(32, N)
    found, expected = gradients(layer, x, dy), gradients(in_float64(layer), x.double(), dy)
    tolerances = training_tolerances(recipe, torch.float32, 32)
    for name, value in expected.items():
        assert error(found[name], value) < tolerances[name], name
        assert found[name].dtype == torch.float32


@pytest.mark.parametrize("kind", [*RECIPES, "bf16"])
def test_no_rows_give_gradients_of_zeros(kind):
    layer = nn.Linear(K, N) if kind == "bf16" else nn.Float8Linear(K, N, recipe=kind)
    found = gradients(layer.bfloat16(), torch.empty(2, 0, K).bfloat16(), torch.empty(2, 0, N))
    assert found["y"].shape == (2, 0, N) and found["x"].shape == (2, 0, K)
    assert not found["weight"].any() and not found["bias"].any()


@pytest.mark.parametrize("kind", [*RECIPES, "bf16"])
def test_a_vector_is_one_row(kind):
    layer = nn.Linear(K, N) if kind == "bf16" else nn.Float8Linear(K, N, recipe=kind)
    frozen = [] if kind == "bf16" else [nn.Float8InferenceLinear.from_linear(layer, kind)]
    x, dy = torch.randn(K).bfloat16(), torch.randn(N)
    for one in (layer, *frozen, *(nn.Lora(one, 4) for one in frozen)):
        one = one.bfloat16()
        found, expected = gradients(one, x, dy), gradients(copy.deepcopy(one), x[None], dy[None])
        assert torch.equal(found["y"], expected["y"][0])
        assert torch.equal(found["x"], expected["x"][0])


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (torch.empty(3, K - 1, dtype=torch.bfloat16), f"x.shape=[3, {K - 1}] must end with in_features={K}"),
        (torch.empty((), dtype=torch.bfloat16), f"x.shape=[] must end with in_features={K}"),
        (torch.empty(3, K), "x.dtype=torch.float32 must be torch.bfloat16 for this layer; cast it with x.to"),
        (torch.empty(3, K, dtype=torch.float64), "x.dtype=torch.float64 must be torch.bfloat16"),
    ],
)
@pytest.mark.parametrize("kind", [nn.Linear, nn.Float8Linear, nn.Float8InferenceLinear])
def test_an_x_that_does_not_fit_is_refused(kind, x, text):
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        kind(K, N, dtype=torch.bfloat16)(x)


@pytest.mark.parametrize(("kind", "dtype"), [(nn.Linear, torch.float32), (nn.Float8Linear, torch.float64)])
def test_a_weight_in_a_dtype_that_cannot_be_is_refused(kind, dtype):
    with pytest.raises(TypeError, match=f"weight.dtype={dtype} must be torch.bfloat16"):
        kind(K, N, dtype=dtype)(torch.empty(3, K, dtype=dtype))


@recipes
def test_a_gradient_is_the_same_whatever_else_is_needed(recipe):
    layer = nn.Float8Linear(K, N, recipe=recipe, dtype=torch.bfloat16)
    x, dy = torch.randn(32, K).bfloat16(), torch.randn(32, N).bfloat16()
    both = gradients(layer, x, dy)
    layer.zero_grad()
    layer(x).backward(dy)
    assert torch.equal(layer.weight.grad, both["weight"])
    layer.requires_grad_(False)
    assert torch.equal(gradients(layer, x, dy)["x"], both["x"])


@recipes
@pytest.mark.parametrize("shape", [(256, K), (2, 128, K), (3, 9, K), (0, K), (2064, K)])
@pytest.mark.parametrize("needs", [("x",), ("weight",), ("x", "weight", "bias")])
def test_one_native_call_has_the_bits_of_its_ops(recipe, shape, needs, monkeypatch):
    layer = nn.Float8Linear(K, N, recipe=recipe, dtype=torch.bfloat16)
    for name, one in layer.named_parameters():
        one.requires_grad_(name in needs)
    x, dy = torch.randn(shape).bfloat16(), torch.randn(*shape[:-1], N).bfloat16()

    def found():
        operand = x.clone().requires_grad_("x" in needs)
        y = layer(operand)
        grads = torch.autograd.grad(
            y, [operand] * ("x" in needs) + [one for one in layer.parameters() if one.requires_grad], dy
        )
        return [y.detach(), *grads]

    run = steps.Steps.run
    monkeypatch.setattr(steps.Steps, "run", None)  # what a native call does where it cannot run
    native = found()
    monkeypatch.setattr(steps.Steps, "run", run)
    monkeypatch.setattr(steps.native, "build", lambda *arguments, **named: (None, "not in this test"))
    for module, name in ((trained_linear, "_native_forward"), (trained_steps, "native_backward")):
        monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)  # without those that were built
    by_ops = found()
    for one, other in zip(native, by_ops, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert one.stride() == other.stride()


FROZEN = nn.Float8InferenceLinear.from_linear(torch.nn.Linear(K, N).bfloat16())


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.jacrev, lambda f: lambda x: torch.func.vjp(f, x)[0]])
@pytest.mark.parametrize("layer", [nn.Float8Linear(K, N, dtype=torch.bfloat16), FROZEN, nn.Lora(FROZEN, 16)])
def test_transforms_of_torch_func_are_refused_with_gradients(layer, transform, is_compiled):
    call = transform(layer)
    with pytest.raises(ForwardOnlyError, match=r"under torch.no_grad\(\)"):
        (torch.compile(call, backend="eager") if is_compiled else call)(
            torch.ones(2, 16, K).bfloat16().requires_grad_()
        )


@pytest.mark.parametrize("layer", [nn.Float8Linear(K, N, dtype=torch.bfloat16), FROZEN])
def test_layers_are_vectorized_without_gradients(layer):
    x = torch.randn(2, 16, K).bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(layer)(x), layer(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_is_near_float64(dtype):
    layer = nn.Linear(K, N, dtype=dtype)
    x, dy = torch.randn(5, 6, K).to(dtype), torch.randn(5, 6, N).to(dtype)
    found, expected = gradients(layer, x, dy), gradients(in_float64(layer), x.double(), dy)
    for name, value in expected.items():
        assert error(found[name], value) < tolerance(dtype, num_values=value.numel()), name
    assert layer.weight.grad.is_contiguous()


@pytest.mark.parametrize("needs", ["x", "weight", "none"])
@pytest.mark.parametrize("rows", [16, 528], ids=["short columns", "long columns"])
def test_only_what_is_needed_is_saved_and_computed(needs, rows):
    layer = nn.Float8Linear(K, rows, dtype=torch.bfloat16).requires_grad_(needs == "weight")
    saved = []
    x = torch.randn(rows, K, dtype=torch.bfloat16, requires_grad=needs == "x")
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one.shape) or one, lambda one: one):
        y = layer(x)
    # With the operand, the scales of its columns, unless backward finds them as it reads the columns.
    assert saved == ([] if needs == "none" else [(rows, K), (K, 1)][: 1 + (rows > 512)])
    assert y.requires_grad == (needs != "none")


@recipes
@pytest.mark.parametrize("no_gradients", [torch.no_grad, torch.inference_mode])
def test_nothing_is_computed_for_backward_under_no_grad(recipe, no_gradients, monkeypatch):
    layer = nn.Float8Linear(K, N, recipe=recipe, dtype=torch.bfloat16)
    x = torch.randn(32, K).bfloat16()
    expected = layer(x)
    needed = []
    forward = trained_linear._native_forward
    monkeypatch.setattr(
        trained_linear, "_native_forward", lambda recipe, *needs: needed.append(needs) or forward(recipe, *needs)
    )
    with no_gradients():
        y = layer(x)
    assert needed == []
    assert torch.equal(y, expected) and not y.requires_grad


@recipes
def test_backward_can_run_twice(recipe):
    layer = nn.Float8Linear(K, N, recipe=recipe, dtype=torch.bfloat16)
    x = torch.randn(32, K, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x).square().sum()
    first = torch.autograd.grad(y, [x, layer.weight], retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(y, [x, layer.weight]), strict=True):
        assert torch.equal(one, other)


@recipes
@pytest.mark.parametrize("m", [32, 20], ids=["no_padding", "padding"])
@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
def test_a_compiled_layer_is_one_graph_with_the_same_values(recipe, m, is_frozen):
    torch._dynamo.reset()
    layer = nn.Float8Linear(K, N, recipe=recipe, dtype=torch.bfloat16)
    layer.weight.requires_grad_(not is_frozen)
    twin = copy.deepcopy(layer)
    x, dy = torch.randn(m, K).bfloat16(), torch.randn(m, N).bfloat16()
    found = gradients(torch.compile(layer, backend="aot_eager", fullgraph=True), x, dy)
    for (name, value), expected in zip(found.items(), gradients(twin, x, dy).values(), strict=True):
        assert value is expected is None or torch.equal(value, expected), name


@recipes
def test_compiled_layers_quantize_an_input_that_they_share_once(recipe):
    torch._dynamo.reset()
    num_calls: collections.Counter[str] = collections.Counter()

    def count(graph, example_inputs):
        num_calls.update(
            str(node.target).split(".")[1] for node in graph.graph.nodes if "stoneware" in str(node.target)
        )
        return make_boxed_func(graph)

    layers = torch.nn.ModuleList(nn.Float8Linear(K, N, recipe=recipe, dtype=torch.bfloat16) for _ in range(2))
    x = torch.randn(32, K, dtype=torch.bfloat16, requires_grad=True)
    call = torch.compile(
        lambda x: sum(layer(x) for layer in layers),
        backend=aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition),
        fullgraph=True,
    )
    call(x).sum().backward()
    quantize = "quantize" if RECIPES[recipe].grad_weight is None else "quantize_both"
    assert num_calls == {quantize: 1, "linear": 2, "linear_backward": 2}


@pytest.mark.parametrize("kind", [nn.Linear, nn.Float8Linear])
def test_autocast_casts_as_torch_does(kind):
    layer = kind(K, N)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.randn(16, K))
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_checkpointing_recomputes_the_same_gradients():
    layer = nn.Float8Linear(K, N, dtype=torch.bfloat16)
    twin = copy.deepcopy(layer)
    x, dy = torch.randn(32, K).bfloat16(), torch.randn(32, N).bfloat16()
    found = gradients(twin, x, dy)
    x = x.requires_grad_()
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).backward(dy)
    assert torch.equal(layer.weight.grad, found["weight"])
    assert torch.equal(x.grad, found["x"])


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_a_frozen_layer_is_near_float64_and_passes_the_gradient_on(recipe):
    linear = torch.nn.Linear(K, N, dtype=torch.bfloat16)
    layer = nn.Float8InferenceLinear.from_linear(linear, recipe)
    twin = in_float64(linear).requires_grad_(False)
    x, dy = torch.randn(4, 5, K).bfloat16(), torch.randn(4, 5, N).bfloat16()
    found, expected = gradients(layer, x, dy), gradients(twin, x.double(), dy)
    assert error(found["y"], expected["y"]) < FP8_ERROR
    assert error(found["x"], expected["x"]) < FP8_ERROR
    assert found["weight"] is None
    with torch.no_grad():
        assert torch.equal(layer(x), found["y"])


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_a_compiled_frozen_layer_is_one_graph_with_the_same_values(recipe):
    torch._dynamo.reset()
    layer = nn.Float8InferenceLinear.from_linear(torch.nn.Linear(K, N, dtype=torch.bfloat16), recipe)
    x, dy = torch.randn(32, K).bfloat16(), torch.randn(32, N).bfloat16()
    found = gradients(torch.compile(layer, backend="aot_eager", fullgraph=True), x, dy)
    layer.zero_grad()
    for (name, value), expected in zip(found.items(), gradients(layer, x, dy).values(), strict=True):
        assert value is expected is None or torch.equal(value, expected), name


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_one_native_call_is_the_gradient_of_a_frozen_layer(recipe, monkeypatch):
    layer = nn.Float8InferenceLinear.from_linear(torch.nn.Linear(K, N, dtype=torch.bfloat16), recipe)
    x, dy = torch.randn(4, 5, K).bfloat16(), torch.randn(4, 5, N).bfloat16()
    (by_ops,) = frozen_linear.GRAD_INPUT[recipe, False].run(dy, layer.weight, layer.weight_scale_inv)
    monkeypatch.setattr(steps.Steps, "run", None)  # what a native call does where it cannot run
    dx = gradients(layer, x, dy)["x"]
    assert error(dx, by_ops) < FP8_ERROR  # one rounds dy times the scales to 16 bits first
    assert error(dx, dy.double() @ layer.dequantized().double()) < tolerance(E4M3)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_a_frozen_layer_loads_16_bit_and_fp8_checkpoints(recipe):
    linear = torch.nn.Linear(K, N, dtype=torch.bfloat16)
    first = nn.Float8InferenceLinear.from_linear(linear, recipe)
    second = nn.Float8InferenceLinear(K, N, recipe=recipe, dtype=torch.bfloat16)
    third = copy.deepcopy(second)
    second.load_state_dict(linear.state_dict(), strict=False)
    third.load_state_dict(first.state_dict())
    x = torch.randn(16, K).bfloat16()
    assert torch.equal(first(x), second(x))
    assert torch.equal(first(x), third(x))
    assert error(first.dequantized(), linear.weight) < tolerance(E4M3)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_cast_leaves_a_frozen_weight_as_it_is(recipe, dtype):
    linear = torch.nn.Linear(K, N, dtype=torch.bfloat16)
    frozen = nn.Float8InferenceLinear.from_linear(linear, recipe)
    before = copy.deepcopy(frozen)
    frozen.to(dtype)
    assert frozen.weight.view(torch.uint8).equal(before.weight.view(torch.uint8))
    assert frozen.weight_scale_inv.equal(before.weight_scale_inv)
    assert frozen.bias.dtype == frozen.dequantized().dtype == dtype
    x = torch.randn(8, K)
    assert error(frozen(x.to(dtype)), in_float64(linear)(x.double())) < FP8_ERROR
    assert frozen.to("meta").weight.is_meta


def test_a_frozen_layer_made_on_meta_takes_a_16_bit_checkpoint():
    linear = torch.nn.Linear(K, N, dtype=torch.bfloat16)
    frozen = nn.Float8InferenceLinear(K, N, device="meta", dtype=torch.bfloat16)
    frozen.load_state_dict(dict(linear.named_parameters()), assign=True)
    x = torch.randn(8, K).bfloat16()
    assert error(frozen(x), in_float64(linear)(x.double())) < FP8_ERROR


def test_an_adapter_has_the_dtype_of_its_base():
    base = nn.Float8InferenceLinear(K, N, dtype=torch.float16)
    assert nn.Lora(base, rank=8)(torch.ones(2, K, dtype=torch.float16)).dtype == torch.float16


def test_an_adapter_trains_over_a_frozen_layer():
    base = nn.Float8InferenceLinear.from_linear(torch.nn.Linear(K, N, dtype=torch.bfloat16))
    layer = nn.Lora(base, rank=16, alpha=32)
    x = torch.randn(16, K).bfloat16()
    assert torch.equal(layer(x), base(x))
    torch.nn.init.normal_(layer.b.weight)
    expected = base.dequantized().double() + 2 * layer.b.weight.double() @ layer.a.weight.double()
    y = layer(x)
    assert error(y, x.double() @ expected.t() + base.bias.double()) < FP8_ERROR
    y.sum().backward()
    assert layer.a.weight.grad.norm() > 0
    assert base.weight.grad is None


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("needs", [("x",), ("a", "b"), ("x", "a", "b"), ("b",)])
def test_an_adapter_in_one_step_is_its_layers(recipe, needs, monkeypatch):
    base = nn.Float8InferenceLinear.from_linear(torch.nn.Linear(K, N, dtype=torch.bfloat16), recipe)
    layer = nn.Lora(base, rank=16, alpha=8)
    torch.nn.init.normal_(layer.b.weight)
    for name in ("a", "b"):
        getattr(layer, name).requires_grad_(name in needs)
    x, dy = torch.randn(3, 16, K).bfloat16(), torch.randn(3, 16, N).bfloat16()

    def found():
        operand = x.clone().requires_grad_("x" in needs)
        y = layer(operand)
        leaves = [operand, layer.a.weight, layer.b.weight]
        return y, *torch.autograd.grad(y, [one for one in leaves if one.requires_grad], dy)

    in_one_step = found()
    assert type(in_one_step[0].grad_fn).__name__ == "_LoraFunctionBackward"
    monkeypatch.setattr(layer, "_is_plain", lambda x: False)
    for one, other in zip(in_one_step, found(), strict=True):
        assert error(one, other) < 2 * BF16_ERROR
        assert one.dtype == other.dtype and one.shape == other.shape


@pytest.mark.parametrize("part", ["base", "a", "b"])
@pytest.mark.parametrize("add", ["register_forward_hook", "register_full_backward_hook"])
def test_a_hook_of_an_adapted_layer_is_called(part, add):
    layer = nn.Lora(nn.Float8InferenceLinear(K, N, dtype=torch.bfloat16), rank=8, alpha=16)
    torch.nn.init.normal_(layer.b.weight)
    x, dy = torch.randn(2, K).bfloat16(), torch.randn(2, N).bfloat16()
    expected = gradients(copy.deepcopy(layer), x, dy)
    called = []
    getattr(getattr(layer, part), add)(lambda *arguments: called.append(1))
    found = gradients(layer, x, dy)
    assert called
    for name in ("y", "x", "a.weight", "b.weight"):
        assert error(found[name], expected[name]) < 2 * BF16_ERROR, name


def test_a_bias_under_an_adapter_is_trained_if_it_requires_a_gradient():
    layer = nn.Lora(nn.Float8InferenceLinear(K, N, dtype=torch.bfloat16), rank=8)
    layer.base.bias.requires_grad_(True)
    dy = torch.randn(16, N).bfloat16()
    found = gradients(layer, torch.randn(16, K).bfloat16(), dy)
    assert error(found["base.bias"], dy.double().sum(0)) < BF16_ERROR


def test_an_adapted_layer_refuses_other_dtypes():
    layer = nn.Lora(nn.Float8InferenceLinear(K, N, dtype=torch.bfloat16), rank=8)
    for dtype in (torch.float32, torch.float64, torch.int64):
        with pytest.raises(TypeError, match=f"x.dtype={dtype} must be torch.bfloat16 for this layer"):
            layer(torch.ones(2, K, dtype=dtype))


@pytest.mark.parametrize("kind", [nn.Float8Linear, nn.Float8InferenceLinear])
def test_a_size_or_a_recipe_that_cannot_be_is_refused(kind):
    with pytest.raises(ValueError, match="in_features=100 must be a positive multiple of 16.*pad the layer"):
        kind(100, N)
    with pytest.raises(ValueError, match="out_features=144 must be a positive multiple of 128"):
        kind(K, 144, recipe="blockwise")
    with pytest.raises(ValueError, match="recipe='row' must be one of tensorwise, rowwise"):
        kind(K, N, recipe="row")
    with pytest.raises(ValueError, match=r"recipe=\['rowwise'\] must be one of tensorwise, rowwise"):
        kind(K, N, recipe=["rowwise"])
    with pytest.raises(ValueError, match="out_features=-16 must be a positive multiple of 16"):
        kind(K, -16)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: nn.Float8Linear("a", N), "in_features='a' must be an int, not str"),
        (lambda: nn.Float8InferenceLinear(K, 16.0), "out_features=16.0 must be an int, not float"),
        (lambda: nn.Experts("a", K, N), "num_experts='a' must be an int, not str"),
        (lambda: nn.Experts(4, K, None), "intermediate_size=None must be an int, not NoneType"),
        (lambda: nn.SwiGLU(K, "a"), "intermediate_size='a' must be an int, not str"),
        (lambda: nn.SwiGLU(K, N, frozen=1), "frozen=1 must be a bool, not int"),
    ],
)
def test_an_argument_of_another_type_is_refused(make, text):
    with pytest.raises(TypeError, match=text):
        make()
