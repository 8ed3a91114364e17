"""sw.nn.convert swaps a model's layers, says so, and takes it back."""

from __future__ import annotations

import weakref

import pytest
import torch

from stoneware import nn


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
    done = nn.convert(model, recipe)
    assert isinstance(model.up, nn.Float8InferenceLinear)
    assert model.up.weight.dtype == torch.float8_e4m3fn
    assert (model(tokens) - expected).norm() < 0.1 * expected.norm()
    done.undo()
    assert type(model.up) is torch.nn.Linear
    assert (model.up.weight - bits).norm() < 2**-4 * bits.norm()
    assert all(one.requires_grad for one in model.parameters())


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


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda layer: layer.double(), "its weight is torch.float64 on cpu"),
        (lambda layer: layer.to("meta"), "its weight is torch.bfloat16 on meta"),
    ],
)
def test_a_weight_that_cannot_be_quantized_is_kept(model, change, text):
    change(model.down)
    done = nn.convert(model.eval())
    assert list(done.swapped) == ["up"]
    assert text in done.kept["down"]


def test_a_filter_decides_alone(model):
    done = nn.convert(model, filter=lambda name, layer: name == "lm_head")
    assert list(done.swapped) == ["lm_head"]
    assert done.kept["up"] == "the filter says no"


def test_a_frozen_layer_is_quantized_after_the_last_one_is_freed():
    model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(3)]).eval()
    seen = []

    def filter(name, layer):
        assert all(one() is None for one in seen)
        seen.append(weakref.ref(layer.weight))
        return True

    assert len(nn.convert(model, filter=filter).swapped) == len(seen) == 3


def test_an_unknown_recipe_swaps_nothing(model):
    with pytest.raises(ValueError, match="recipe='fp4' must be one of bf16, tensorwise"):
        nn.convert(model, "fp4")
    assert type(model.up) is torch.nn.Linear


def test_a_layer_that_two_places_share_is_kept():
    layer = torch.nn.Linear(128, 128)
    model = torch.nn.Sequential(layer, torch.nn.ReLU(), layer)
    done = nn.convert(model)
    assert "shared with 2" in done.kept["0"]
    assert model[0] is model[2]


def test_layers_whose_weights_are_read_by_their_owner_are_kept():
    model = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).bfloat16().eval()
    done = nn.convert(model)
    assert not done.swapped
    assert "reads the weights of its layers itself" in done.kept["linear1"]
    model(torch.randn(2, 8, 64).bfloat16())


class Mixture(torch.nn.Module):
    """Experts with the names, shapes and arguments that transformers gives them."""

    activation = staticmethod(torch.nn.functional.silu)

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(4, 192, 64) / 8)
        self.down_proj = torch.nn.Parameter(torch.randn(4, 64, 96) / 10)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        y = torch.zeros_like(hidden_states)
        for token, (experts, weights) in enumerate(zip(top_k_index, top_k_weights)):
            for expert, weight in zip(experts, weights):
                gate, up = (self.gate_up_proj[expert] @ hidden_states[token]).chunk(2)
                y[token] += weight * (self.down_proj[expert] @ (self.activation(gate) * up))
        return y


class OtherMixture(Mixture):
    activation = staticmethod(torch.nn.functional.gelu)


class BiasedMixture(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.down_proj_bias = torch.nn.Parameter(torch.zeros(4, 64))


class Sparse(torch.nn.Module):
    def __init__(self, kind: type[torch.nn.Module] = Mixture) -> None:
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
    done = nn.convert(model, recipe)
    assert type(model.experts) is kind
    assert set(names) <= set(model.state_dict())
    assert "swapped 1 of 2 linear layers and experts" in str(done)
    assert (model(x) - expected).norm() < limit * expected.norm()
    done.undo()
    assert model.experts is was
    assert (model(x) - expected).norm() < limit * expected.norm()
    assert all(one.requires_grad for one in model.parameters())
    if kind is nn.Experts:
        assert all(weights[name] is now for name, now in model.named_parameters())


@pytest.mark.parametrize("options", [{}, {"strict": False}, {"assign": True}])
def test_a_16_bit_checkpoint_of_experts_is_quantized_when_it_is_loaded(options):
    model, other = (Sparse().bfloat16().eval() for _ in range(2))
    x, checkpoint = torch.randn(9, 64).bfloat16(), other.state_dict()
    nn.convert(other, "rowwise")
    nn.convert(model, "rowwise")
    assert not torch.equal(model(x), other(x))
    model.load_state_dict(checkpoint, **options)
    assert torch.equal(model(x), other(x))
    assert model.experts.down_proj.dtype == torch.float8_e4m3fn
    wrong = {**checkpoint, "experts.down_proj": checkpoint["experts.down_proj"][1:]}
    with pytest.raises(RuntimeError, match="size mismatch for experts.down_proj"):
        model.load_state_dict(wrong)


@pytest.mark.parametrize("kind", [OtherMixture, BiasedMixture])
def test_experts_that_compute_something_else_are_kept(kind):
    model = Sparse(kind).bfloat16().eval()
    done = nn.convert(model, "bf16")
    assert type(model.experts) is kind
    assert "silu" in done.kept["experts"]


@pytest.mark.parametrize("add", HOOKS)
@pytest.mark.parametrize("kind", [Mixture, lambda: nn.Experts(4, 64, 96)])
def test_experts_with_hooks_are_kept_with_them(add, kind):
    model = Sparse(kind).bfloat16().eval()
    getattr(model.experts, add)(lambda *_: None)
    assert "hooks" in nn.convert(model).kept["experts"]


def test_experts_without_memory_are_kept():
    model = Sparse(lambda: nn.Experts(4, 64, 96, device="meta", dtype=torch.bfloat16)).eval()
    assert "experts" in nn.convert(model).kept


@pytest.mark.parametrize("kind", [lambda: torch.nn.Linear(128, 128), Mixture])
def test_a_model_that_is_itself_a_layer_is_kept_with_a_reason(kind):
    done = nn.convert(kind().bfloat16().eval())
    assert "swapped 0 of 1" in str(done)
    assert "wrap it in torch.nn.Sequential" in str(done)


def test_a_filter_decides_about_experts():
    model = Sparse().bfloat16().eval()
    done = nn.convert(model, "bf16", lambda name, layer: name != "experts")
    assert done.kept == {"experts": "the filter says no"}
