"""sw.nn.convert swaps a model's layers, says so, and takes it back."""

from __future__ import annotations

import contextlib
import copy
import importlib
import weakref
from collections.abc import Callable

import pytest
import torch
from transformers import DeepseekV4Config, MixtralConfig
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from stoneware import nn
from stoneware.nn import changes
from stoneware.nn.convert import convert_loaded, loadable


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(64, 128)
        self.up = torch.nn.Linear(128, 256)
        self.down = torch.nn.Linear(256, 128, bias=False)
        self.narrow = torch.nn.Linear(128, 10)
        self.special = torch.nn.modules.linear.NonDynamicallyQuantizableLinear(128, 128)
        self.tied = torch.nn.Linear(128, 64, bias=False)
        self.tied.weight = self.embed.weight
        self.lm_head = torch.nn.Linear(128, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.down(self.up(self.embed(tokens)).relu()))


@pytest.fixture
def model():
    return Model().bfloat16()


def test_every_linear_layer_is_swapped_or_kept_with_a_reason(model):
    done = nn.convert(model)
    assert done.swapped == {"up": "Float8Linear, rowwise", "down": "Float8Linear, rowwise"}
    assert {name: reason.split()[0] for name, reason in done.kept.items()} == {
        "narrow": "out_features=10",
        "special": "it",
        "tied": "its",
        "lm_head": "heads",
    }
    assert "shared with embed" in done.kept["tied"]
    text = str(done)
    assert "swapped 2 of 6 linear layers" in text
    assert all(reason in text for reason in done.kept.values())


@pytest.mark.parametrize("recipe", ["bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"])
def test_training_keeps_parameters_and_state_dict(model, recipe):
    before, names = {id(one) for one in model.parameters()}, list(model.state_dict())
    done = nn.convert(model, recipe)
    assert {id(one) for one in model.parameters()} == before
    assert list(model.state_dict()) == names
    model(torch.arange(16)).sum().backward()
    assert model.up.weight.grad is not None
    done.undo()
    assert {id(one) for one in model.parameters()} == before
    assert type(model.up) is type(model.down) is torch.nn.Linear


@pytest.mark.parametrize("is_removed", [False, True])
def test_undo_leaves_what_was_replaced_since_and_says_so(model, is_removed, caplog):
    done = nn.convert(model)
    if is_removed:
        del model.up
    else:
        model.up = torch.nn.Sequential(model.up)
    done.undo()
    assert type(model.down) is torch.nn.Linear
    assert is_removed or type(model.up) is torch.nn.Sequential
    assert "undo left up as it is" in caplog.text
    caplog.clear()
    done.undo()
    assert not caplog.text, "there is nothing left to take back"


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_an_evaluated_model_gets_frozen_weights(model, recipe):
    tokens = torch.arange(16)
    expected = model.eval()(tokens)
    bits = model.up.weight.clone()
    done = nn.convert(model, recipe, frozen=True)
    assert isinstance(model.up, nn.Float8InferenceLinear)
    assert model.up.weight.dtype == torch.float8_e4m3fn
    assert (model(tokens) - expected).norm() < 0.1 * expected.norm()
    done.undo()
    assert type(model.up) is torch.nn.Linear
    assert (model.up.weight - bits).norm() < 2**-4 * bits.norm()
    assert all(one.requires_grad for one in model.parameters())


def test_weights_that_require_gradients_are_not_frozen_by_eval_mode(model, caplog):
    model.up.weight.requires_grad_(False)
    done = nn.convert(model.eval())
    assert type(model.up) is nn.Float8InferenceLinear
    assert type(model.down) is nn.Float8Linear
    assert "frozen=True" in done.swapped["down"] and "frozen" not in done.swapped["up"]
    assert "1 layers of a model in eval mode have weights that require gradients" in caplog.text
    model.train()(torch.arange(16)).sum().backward()
    assert model.down.weight.grad is not None


def test_the_recipe_without_fp8_stays_in_16_bits_when_evaluated(model):
    nn.convert(model.eval(), "bf16")
    assert type(model.up) is nn.Linear


HOOKS = (
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
    "register_full_backward_pre_hook",
)  # fmt: skip


@pytest.mark.parametrize("add", HOOKS)
def test_a_layer_with_hooks_is_kept_with_them(model, add):
    getattr(model.up, add)(lambda *_: None)
    done = nn.convert(model)
    assert type(model.up) is torch.nn.Linear
    assert "it has hooks" in done.kept["up"]


def test_a_layer_with_a_forward_of_its_own_is_kept_with_it(model):
    model.up.forward = lambda x: torch.nn.functional.linear(2 * x, model.up.weight, model.up.bias)
    done = nn.convert(model)
    assert type(model.up) is torch.nn.Linear
    assert "a forward of its own" in done.kept["up"]


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda layer: layer.double(), "its weight is torch.float64"),
        (lambda layer: layer.to(torch.float8_e4m3fn), "its weight is torch.float8_e4m3fn"),
    ],
)
def test_a_layer_that_would_fail_when_it_is_called_is_kept(model, recipe, is_training, change, text):
    change(model.down)
    done = nn.convert(model.train(is_training), recipe, frozen=not is_training)
    assert "up" in done.swapped and text in done.kept["down"]


def test_weights_in_32_bits_take_the_bf16_recipe_under_autocast_alone(model):
    model.float()
    assert "its weight is torch.float32, and recipe 'bf16' takes 16 bits" in nn.convert(model, "bf16").kept["up"]
    model(torch.arange(16))
    with torch.autocast("cpu", torch.bfloat16):
        assert "up" in nn.convert(model, "bf16").swapped
        model(torch.arange(16)).sum().backward()


def test_a_weight_without_memory_is_not_quantized(model):
    model.down.to("meta")
    done = nn.convert(model.eval(), frozen=True)
    assert "its weight is torch.bfloat16 on meta" in done.kept["down"]


def test_a_filter_decides_alone(model):
    done = nn.convert(model, filter=lambda name, layer: name == "lm_head")
    assert list(done.swapped) == ["lm_head"]
    assert done.kept["up"] == "the filter refuses it"


@pytest.mark.parametrize("value", ["meta-llama", None])
def test_what_is_no_module_is_refused(value):
    with pytest.raises(TypeError, match=f"model={value!r} must be a torch.nn.Module, not {type(value).__name__}; load"):
        nn.convert(value)


def test_an_unknown_recipe_swaps_nothing(model):
    with pytest.raises(ValueError, match="recipe='fp4' must be one of bf16, tensorwise"):
        nn.convert(model, "fp4")
    assert type(model.up) is torch.nn.Linear


@pytest.mark.parametrize(
    ("recipe", "frozen", "kind"),
    [("bf16", False, "Linear"), ("rowwise", False, "Float8Linear"), ("rowwise", True, "Float8InferenceLinear")],
)
def test_a_second_conversion_changes_nothing_and_says_so(model, recipe, frozen, kind):
    names = {*nn.convert(model, recipe, frozen=frozen).swapped}
    done = nn.convert(model, "tensorwise", frozen=frozen)
    assert names and not done.swapped
    assert {done.kept[name] for name in names} == {
        f"it is a sw.nn.{kind} already; undo() the conversion that made it first"
    }


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"recipe": ["rowwise"]}, ValueError, r"recipe=\['rowwise'\] must be one of bf16, tensorwise"),
        ({"filter": "up"}, TypeError, "filter='up' must be a function of a name and a layer, not str; pass for"),
        ({"frozen": 1}, TypeError, "frozen=1 must be a bool, not int; pass True or False"),
        ({"fuse_wgrad_accumulation": "no"}, TypeError, "fuse_wgrad_accumulation='no' must be a bool, not str; pass"),
    ],
)
def test_an_option_of_another_type_swaps_nothing(model, options, error, text):
    with pytest.raises(error, match=text):
        nn.convert(model, **options)
    assert type(model.up) is torch.nn.Linear


def test_a_layer_that_two_places_share_stays_one():
    layer = torch.nn.Linear(128, 128)
    model = torch.nn.Sequential(layer, torch.nn.ReLU(), layer)
    done = nn.convert(model)
    assert model[0] is model[2] is layer and type(layer) is nn.Float8Linear
    done.undo()
    assert model[0] is model[2] is layer and type(layer) is torch.nn.Linear


def test_layers_whose_weights_are_read_by_their_owner_are_kept():
    model = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).bfloat16().eval()
    done = nn.convert(model)
    assert not done.swapped
    assert "reads the weights of its layers itself" in done.kept["linear1"]
    model(torch.randn(2, 8, 64).bfloat16())


def Mixture(**changes) -> torch.nn.Module:
    """The experts of a model of transformers."""
    config = MixtralConfig(hidden_size=64, intermediate_size=96, num_local_experts=4, **changes)
    config._experts_implementation = "eager"
    experts = MixtralExperts(config)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.12)
    return experts


def other_mixture() -> torch.nn.Module:
    return Mixture(hidden_act="gelu")


def biased_mixture() -> torch.nn.Module:
    experts = Mixture()
    experts.down_proj_bias = torch.nn.Parameter(torch.zeros(4, 64))
    return experts


def clamped_mixture() -> torch.nn.Module:
    config = DeepseekV4Config(hidden_size=64, moe_intermediate_size=96, intermediate_size=96, n_routed_experts=4)
    config._experts_implementation = "eager"
    return DeepseekV4Experts(config)


class Sparse(torch.nn.Module):
    def __init__(self, kind: Callable[[], torch.nn.Module] = Mixture) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(64, 4, bias=False)
        self.experts = kind()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        return self.experts(x, chosen, weights)


@pytest.mark.parametrize(
    ("recipe", "is_training", "kind", "limit"),
    [("bf16", True, nn.Experts, 0.01), ("rowwise", True, nn.Experts, 0.01), ("bf16", False, nn.Experts, 0.01),
     ("rowwise", False, nn.Float8InferenceExperts, 0.08)],
)  # fmt: skip
def test_experts_are_swapped_and_put_back(recipe, is_training, kind, limit):
    model = Sparse().bfloat16().train(is_training)
    x, was, names = torch.randn(9, 64).bfloat16(), model.experts, list(model.state_dict())
    weights = dict(model.named_parameters())
    expected = model(x)
    done = nn.convert(model, recipe, frozen=not is_training)
    assert model.experts is was and isinstance(was, kind) and isinstance(was, MixtralExperts)
    assert done.blocks["experts"] == kind.__name__
    assert set(names) <= set(model.state_dict())
    assert "swapped 1 of 2 linear layers and experts" in str(done)
    assert (model(x) - expected).norm() < limit * expected.norm()
    done.undo()
    assert model.experts is was and type(was) is MixtralExperts
    assert (model(x) - expected).norm() < limit * expected.norm()
    assert all(one.requires_grad for one in model.parameters())
    if kind is nn.Experts:
        assert all(weights[name] is now for name, now in model.named_parameters())


@pytest.mark.parametrize(("recipe", "frozen"), [("bf16", False), ("rowwise", False), ("rowwise", True)])
def test_experts_run_under_autocast_in_float16(recipe, frozen):
    model = Sparse().bfloat16()
    x = torch.randn(9, 64).half().requires_grad_()
    with torch.autocast("cpu", torch.float16):
        expected = model(x)
        nn.convert(model, recipe, frozen=frozen)
        found = model(x)
        found.sum().backward()
    assert found.dtype == expected.dtype
    assert (found - expected).norm() < 0.08 * expected.norm()
    assert x.grad.any()


@pytest.mark.parametrize("options", [{}, {"strict": False}, {"assign": True}])
def test_a_16_bit_checkpoint_of_experts_is_quantized_when_it_is_loaded(options):
    model, other = (Sparse().bfloat16().eval() for _ in range(2))
    x, checkpoint = torch.randn(9, 64).bfloat16(), other.state_dict()
    nn.convert(other, "rowwise", frozen=True)
    nn.convert(model, "rowwise", frozen=True)
    assert not torch.equal(model(x), other(x))
    model.load_state_dict(checkpoint, **options)
    assert torch.equal(model(x), other(x))
    assert model.experts.down_proj.dtype == torch.float8_e4m3fn
    wrong = {**checkpoint, "experts.down_proj": checkpoint["experts.down_proj"][1:]}
    with pytest.raises(RuntimeError, match="size mismatch for experts.down_proj"):
        model.load_state_dict(wrong)


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [(other_mixture, "gelu"), (biased_mixture, "no biases"), (clamped_mixture, "DeepseekV4Experts.forward")],
)
def test_experts_that_compute_something_else_are_kept(kind, reason, recipe):
    model = Sparse(kind).bfloat16().eval()
    was = type(model.experts)
    done = nn.convert(model, recipe, frozen=True)
    assert type(model.experts) is was
    assert reason in done.kept["experts"]


def test_a_forward_that_was_patched_is_kept(monkeypatch):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states.clamp(-1, 1)

    monkeypatch.setattr(MixtralExperts, "forward", forward)
    assert "is not known" in nn.convert(Sparse().bfloat16().eval(), frozen=True).kept["experts"]


@pytest.mark.parametrize("add", HOOKS)
@pytest.mark.parametrize("kind", [Mixture, lambda: nn.Experts(4, 64, 96)])
def test_experts_with_hooks_are_kept_with_them(add, kind):
    model = Sparse(kind).bfloat16().eval()
    getattr(model.experts, add)(lambda *_: None)
    assert "hooks" in nn.convert(model, frozen=True).kept["experts"]


def test_experts_without_memory_are_kept():
    model = Sparse(lambda: nn.Experts(4, 64, 96, device="meta", dtype=torch.bfloat16)).eval()
    assert "experts" in nn.convert(model, frozen=True).kept


@pytest.mark.parametrize("is_training", [True, False])
def test_experts_take_the_arguments_of_their_class(is_training):
    model = Sparse().bfloat16().train(is_training)
    x, index = torch.randn(9, 64).bfloat16(), torch.randint(4, (9, 2))
    weights = torch.rand(9, 2).bfloat16()
    nn.convert(model, frozen=not is_training)
    expected = model.experts(x, index, weights)
    assert torch.equal(model.experts(hidden_states=x, top_k_index=index, top_k_weights=weights), expected)


@pytest.mark.parametrize("frozen", [True, False])
def test_experts_that_get_another_activation_later_do_not_compute_the_old_one(frozen):
    model = Sparse().bfloat16().eval()
    plain, x = copy.deepcopy(model), torch.randn(9, 64).bfloat16()
    nn.convert(model, frozen=frozen)
    for one in (model, plain):
        one.experts.act_fn = torch.nn.GELU()
    if frozen:
        with pytest.raises(RuntimeError, match="undo the conversion, set it, and convert again"):
            model(x)
    else:
        assert torch.equal(model.experts(x, *ROUTES), plain.experts(x, *ROUTES))


ROUTES = torch.arange(18).view(9, 2) % 4, torch.ones(9, 2).bfloat16()


def test_frozen_experts_give_a_gradient_to_what_is_before_them():
    torch.manual_seed(0)
    model = Sparse().bfloat16().eval()
    x = torch.randn(9, 64).bfloat16()
    gradients = []
    for is_frozen in (False, True):
        if is_frozen:
            nn.convert(model, frozen=True)
        given = x.clone().requires_grad_()
        model.experts(given, *ROUTES).square().sum().backward()
        gradients.append(given.grad)
    assert (gradients[1] - gradients[0]).norm() < 0.12 * gradients[0].norm()


@pytest.mark.parametrize("frozen", [True, False])
def test_a_model_that_is_itself_a_layer_is_converted(frozen):
    layer = torch.nn.Linear(128, 128).bfloat16()
    done = nn.convert(layer, frozen=frozen)
    assert "swapped 1 of 1" in str(done)
    assert layer(torch.randn(4, 128).bfloat16()).shape == (4, 128)
    done.undo()
    assert type(layer) is torch.nn.Linear


def test_a_filter_decides_about_experts():
    model = Sparse().bfloat16().eval()
    done = nn.convert(model, "bf16", lambda name, layer: name != "experts")
    assert done.kept == {"experts": "the filter refuses it"}


class Decorated(torch.nn.Module):
    """A layer with everything that a module can have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(128, 128)
        self.layer.register_buffer("mask", torch.ones(128))
        self.layer.register_parameter("extra", torch.nn.Parameter(torch.ones(3)))
        self.layer.child = torch.nn.Linear(128, 128)
        self.layer.tag = "kept"
        self.aliases = [self.layer]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.layer.mask


@pytest.mark.parametrize(
    ("recipe", "frozen"), [("bf16", True), ("rowwise", True), ("blockwise", True), ("rowwise", False)]
)
def test_what_a_layer_has_besides_its_weight_survives(recipe, frozen):
    model = Decorated().bfloat16().eval()
    hooked = []
    model.layer.register_state_dict_post_hook(lambda *_: hooked.append(1))
    layer, names = model.layer, set(model.state_dict())
    before = {name: id(one) for name, one in vars(layer).items()}
    done = nn.convert(model, recipe, frozen=frozen)
    assert set(done.swapped) == {"layer", "layer.child"}
    assert model.layer is layer and model.aliases[0] is layer
    assert layer.tag == "kept" and layer.mask.sum() == 128 and layer.extra.shape == (3,)
    hooked.clear()
    assert names <= set(model.state_dict()) and hooked
    model(torch.randn(4, 128).bfloat16())
    done.undo()
    assert type(layer) is type(layer.child) is torch.nn.Linear
    assert {name: id(one) for name, one in vars(layer).items()} == before
    assert set(model.state_dict()) == names


class LeakyMLP(torch.nn.Module):
    """Where `is_alike` is False it computes other values than its trace, with the same operations."""

    def __init__(self, is_alike: bool) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(128, 256), torch.nn.Linear(256, 128)
        self.is_alike = is_alike

    def forward(self, x):
        slope = 0.1 if self.is_alike or type(x) is not torch.Tensor else 0.9
        return self.down(torch.nn.functional.leaky_relu(self.up(x), slope))


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
@pytest.mark.parametrize("is_alike", [True, False])
def test_values_are_checked_of_a_feed_forward_that_was_quantized_while_it_was_loaded(recipe, is_alike):
    source = torch.nn.ModuleDict({"mlp": LeakyMLP(is_alike)}).bfloat16().eval().requires_grad_(False)
    model = copy.deepcopy(source)
    for layer in (model["mlp"].up, model["mlp"].down):
        layer.weight = torch.nn.Parameter(layer.weight.to("meta"))
    weights = {
        layer: changes.LoadedWeight(
            *nn.Float8InferenceLinear.quantized(source.get_submodule(name).weight.detach(), recipe)
        )
        for name, layer in loadable(model, recipe).items()
    }
    done = convert_loaded(model, recipe, None, weights)
    assert done.blocks == nn.convert(source, recipe, frozen=True).blocks == ({"mlp": "MLP"} if is_alike else {})
    x = torch.randn(4, 128).bfloat16()
    assert torch.equal(model["mlp"](x), source["mlp"](x))
    done.undo()
    assert model["mlp"].up.weight.dtype == torch.bfloat16 and not model["mlp"].up.weight.is_meta


def snapshot(model: torch.nn.Module):
    """Everything of a model that convert could change."""
    modules = [(name, module, type(module)) for name, module in model.named_modules()]
    attributes = [{name: id(one) for name, one in vars(module).items()} for module in model.modules()]
    parameters = [(name, one, one.detach().clone()) for name, one in model.named_parameters()]
    return modules, attributes, parameters


def assert_unchanged(model, before):
    modules, attributes, parameters = before
    now = snapshot(model)
    assert now[0] == modules and now[1] == attributes
    for (name, one, bits), (old_name, old, old_bits) in zip(now[2], parameters, strict=True):
        assert name == old_name and one is old and torch.equal(bits, old_bits)


@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "blockwise"])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_the_filter_leaves_the_model_as_it_was(recipe, frozen, error):
    model = Sparse().bfloat16().eval()
    before = snapshot(model)

    def filter(name, layer):
        if name == "experts":
            raise error
        return True

    with pytest.raises(error):
        nn.convert(model, recipe, filter, frozen=frozen)
    assert_unchanged(model, before)


@pytest.mark.parametrize("failing", [1, 2, 3, 4])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_while_weights_are_quantized_leaves_the_model_as_it_was(model, failing, error, monkeypatch):
    model = torch.nn.Sequential(model, Sparse().bfloat16()).eval()
    before, calls = snapshot(model), []
    for module in ("inference", "experts"):
        quantizing = importlib.import_module(f"stoneware.nn.{module}")
        original = quantizing.quantize

        def failing_quantize(*arguments, original=original, **named):
            calls.append(1)
            if len(calls) == failing:
                raise error
            return original(*arguments, **named)

        monkeypatch.setattr(quantizing, "quantize", failing_quantize)
    with pytest.raises(error):
        nn.convert(model, filter=lambda name, layer: True, frozen=True)
    assert len(calls) == failing
    assert_unchanged(model, before)


@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_old_weights_leave_the_device_if_it_has_no_room_for_them(model, is_held, fails, monkeypatch):
    """On a device that is the CPU here. They come back if the conversion fails after all."""
    inference, calls, spilled = importlib.import_module("stoneware.nn.inference"), [], []
    quantize, spill = inference.quantize, changes._SavedParameter.spill
    held = [*model.parameters()] if is_held else []
    bits = {name: one.detach().clone() for name, one in model.named_parameters()}
    original = weakref.ref(model.up.weight)

    def full(*arguments, **named):
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError
        if len(calls) == 4 and fails:
            raise RuntimeError
        return quantize(*arguments, **named)

    def spill_from_cpu(self):
        with monkeypatch.context() as patch:
            patch.setattr(changes, "HOST", "elsewhere")
            spilled.append(spill(self))
        return spilled[-1]

    monkeypatch.setattr(inference, "quantize", full)
    monkeypatch.setattr(changes._SavedParameter, "spill", spill_from_cpu)
    names = ("up", "down", "lm_head")
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        nn.convert(model.eval(), filter=lambda name, layer: name in names, frozen=True)
    assert spilled == [True], "the first layer's weight"
    assert (original() is None) == (not is_held)
    if fails:
        assert all(type(model.get_submodule(name)) is torch.nn.Linear for name in names)
        assert all(torch.equal(one, bits[name]) for name, one in model.named_parameters())
        assert not is_held or all(one is other for one, other in zip(held, model.parameters(), strict=True))
    else:
        assert all(type(model.get_submodule(name)) is nn.Float8InferenceLinear for name in names)


def test_a_default_device_does_not_matter():
    model = Sparse().bfloat16().eval()
    with torch.device("meta"):
        done = nn.convert(model, frozen=True)
    assert "experts" in done.blocks
    assert model(torch.randn(9, 64).bfloat16()).isfinite().all()


def test_weights_that_share_memory_are_kept(model):
    whole = torch.randn(512, 128).bfloat16()
    model.up.weight = torch.nn.Parameter(whole[:256])
    model.register_buffer("view", whole[256:])
    done = nn.convert(model.eval(), frozen=True)
    assert "its weight is shared with" in done.kept["up"]


class ReadsItsWeight(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo = torch.nn.Linear(128, 128), torch.nn.Linear(128, 128)
        self.sizes = torch.nn.Linear(128, 128)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(128, 128)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wi(x).to(self.wo.weight.dtype)
        assert self.sizes.weight.shape == (128, 128)
        for _ in self.layers:
            x = torch.nn.functional.linear(x, self.layers[0].weight)
        return self.sizes(self.wo(x))


def test_layers_whose_weight_other_code_reads_are_kept_if_it_would_be_fp8():
    model = ReadsItsWeight().bfloat16().eval()
    done = nn.convert(model, frozen=True)
    assert {*done.swapped} == {"wi", "sizes"}
    assert {*done.kept.values()} == {"ReadsItsWeight reads its weight and expects 16 bits"}
    model(torch.randn(4, 128).bfloat16())
    done.undo()
    assert len(nn.convert(model, frozen=False).swapped) == 4


def test_names_with_control_characters_are_shown_as_escapes():
    model = torch.nn.Sequential()
    model.add_module("up\x1b[31m", torch.nn.Linear(128, 128))
    assert "up\\x1b[31m" in str(nn.convert(model))
