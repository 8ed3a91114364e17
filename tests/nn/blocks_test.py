"""SwiGLU alone, and the norms and feed-forwards of a model that convert fuses."""

from __future__ import annotations

import copy
import ctypes
import gc
import inspect
import io
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from fused_models import HIDDEN, WIDTH, Attention, Block, LlamaMLP, LlamaRMSNorm, near, new_model, rows

from stoneware import nn
from stoneware.nn import handover
from stoneware.quantizing import fused, kernels


@pytest.fixture
def model():
    return new_model()


def test_convert_fuses_norms_and_feed_forwards_and_says_so(model):
    x, names, kinds = rows(2, 5, HIDDEN), list(model.state_dict()), [type(one) for one in model.modules()]
    modules = [*model.modules()]
    wanted = model(x)
    done = nn.convert(model)
    assert done.blocks == {
        f"{i}.{name}": kind
        for i in (0, 1)
        for name, kind in (
            ("input_layernorm", "RMSNorm"),
            ("post_attention_layernorm", "RMSNorm"),
            ("self_attn.q_norm", "RMSNorm"),
            ("mlp", "SwiGLU"),
        )
    }
    assert "whole 0.mlp, 1.mlp: SwiGLU" in str(done)
    assert [*model.modules()] == modules and all(map(isinstance, modules, kinds))
    assert {*names} <= {*model.state_dict()}
    with torch.no_grad():
        assert near(model(x), wanted)


def has_handover(norm) -> bool:
    return norm._stoneware.handover is not None


def test_norms_hand_over_where_the_code_proves_who_reads_their_result(model):
    nn.convert(model)
    for block in model:
        assert has_handover(block.input_layernorm) and has_handover(block.post_attention_layernorm)
        assert not has_handover(block.self_attn.q_norm)


def test_undo_puts_everything_back(model):
    names, kinds = list(model.state_dict()), [type(one) for one in model.modules()]
    x, before = rows(3, HIDDEN)[None], copy.deepcopy(model)
    done = nn.convert(model)
    with torch.no_grad():
        converted = model(x)
    done.undo()
    assert list(model.state_dict()) == names
    assert [type(one) for one in model.modules()] == kinds
    assert near(model(x), before(x)) and near(model(x), converted)
    assert not done.blocks and not done.swapped


def test_the_state_dict_keeps_its_names_and_is_loaded(model):
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.1)
    names = {name for name in model.state_dict() if name.endswith("weight")}
    nn.convert(model)
    nn.convert(other)
    saved = other.state_dict()
    assert {name for name in saved if name.endswith("weight")} == names
    assert saved["0.mlp.gate_proj.weight_scale_inv"].shape == (WIDTH, 1)
    model.load_state_dict(saved)
    x = rows(7, HIDDEN)[None]
    with torch.no_grad():
        assert torch.equal(model(x), other(x))


def test_a_16_bit_checkpoint_is_quantized_when_it_is_loaded(model):
    saved = {name: tensor * 2 for name, tensor in copy.deepcopy(model).state_dict().items()}
    nn.convert(model)
    model.load_state_dict(saved, strict=False)  # without weight_scale_inv
    for name in ("gate_proj", "up_proj"):
        assert near(model[0].mlp.get_submodule(name).dequantized(), saved[f"0.mlp.{name}.weight"])


@pytest.mark.parametrize(
    ("mlp", "reason"),
    [
        (LlamaMLP(torch.nn.functional.gelu), "gelu"),
        (LlamaMLP(bias=True), "has a bias"),
        (LlamaMLP(lambda x: torch.nn.functional.silu(x) + 1), "neither is silu"),
    ],
)
def test_another_activation_or_a_bias_leaves_the_feed_forward_as_it_is(mlp, reason):
    model = torch.nn.Sequential(Block(copy.deepcopy(mlp))).bfloat16().eval()
    done = nn.convert(model, frozen=True)
    assert "0.mlp" not in done.blocks and type(model[0].mlp) is LlamaMLP
    assert reason in done.kept_blocks["0.mlp"] and reason in str(done)
    assert done.swapped["0.mlp.gate_proj"] == "Float8InferenceLinear, rowwise"


def test_a_feed_forward_that_gives_zeros_is_left():
    mlp = LlamaMLP(torch.nn.functional.gelu)
    torch.nn.init.zeros_(mlp.down_proj.weight)  # as some models begin; their checkpoint comes later
    model = torch.nn.Sequential(mlp).bfloat16().eval()
    assert not nn.convert(model, frozen=True).blocks
    assert model[0] is mlp


@pytest.mark.parametrize("error", [AssertionError, AttributeError, IndexError, KeyError])
def test_a_block_that_refuses_the_call_is_left(error):
    def refuse(x):
        raise error

    done = nn.convert(torch.nn.Sequential(LlamaMLP(refuse)).bfloat16().eval(), frozen=True)
    assert not done.blocks and len(done.swapped) == 3


def test_a_filter_that_refuses_one_layer_keeps_its_block(model):
    done = nn.convert(model, filter=lambda name, layer: not name.endswith("0.mlp.up_proj"))
    assert "0.mlp" not in done.blocks and "1.mlp" in done.blocks
    assert isinstance(model[0].mlp.gate_proj, nn.Float8InferenceLinear)


@pytest.mark.parametrize("recipe", ["bf16", "tensorwise", "blockwise"])
def test_other_recipes_hand_nothing_over(model, recipe):
    x = rows(2, 5, HIDDEN)
    wanted = model(x)
    # With tensor scales, gate and up cannot be one matmul.
    assert ("SwiGLU" in nn.convert(model, recipe).blocks.values()) == (recipe != "tensorwise")
    assert not any(has_handover(one) for name, one in model.named_modules() if name.endswith("norm"))
    assert near(model(x), wanted)


@pytest.mark.parametrize("num_tokens", [1, 16, 131])
def test_a_blockwise_feed_forward_is_one_call_of_joined_weights(num_tokens):
    block, x = LlamaMLP().bfloat16().eval().requires_grad_(False), rows(num_tokens, HIDDEN)
    exact = copy.deepcopy(block).double()
    by_layers = copy.deepcopy(block)
    model = torch.nn.Sequential(block).eval()
    done = nn.convert(model, "blockwise")
    assert done.blocks == {"0": "SwiGLU"}
    nn.convert(by_layers, "blockwise", filter=lambda name, layer: name != "down_proj")
    assert torch.equal(*(one.gate_proj.weight.view(torch.uint8) for one in (block, by_layers)))
    assert torch.equal(block.up_proj.weight_scale_inv, by_layers.up_proj.weight_scale_inv)
    state = block._stoneware
    assert state.joined[0].shape == (2 * WIDTH, HIDDEN) and state.joined[1].shape == (2 * WIDTH // 128, HIDDEN // 128)
    y = model(x)
    own = LlamaMLP.forward(block, x)
    assert near(y, exact(x.double())) and (y - own).float().norm() <= 0.01 * own.float().norm()
    x.requires_grad_()
    (dx,) = torch.autograd.grad(model(x).sum(), x)
    (wanted,) = torch.autograd.grad(exact(x.double()).sum(), x)
    assert near(dx, wanted)
    done.undo()
    assert near(model(x.detach()), y)


def test_a_blockwise_feed_forward_of_more_rows_than_its_kernel_takes_runs_by_its_layers(monkeypatch):
    block, x = LlamaMLP().bfloat16().eval().requires_grad_(False), rows(17, HIDDEN)
    exact = copy.deepcopy(block).double()
    done = nn.convert(torch.nn.Sequential(block).eval(), "blockwise")
    assert done.blocks == {"0": "SwiGLU"}
    monkeypatch.setattr(fused, "_has_kernels", lambda *_: True)  # the CPU has none to load
    monkeypatch.setattr(kernels, "MOST_TILE_ROWS", 16)
    for _ in range(2):
        assert near(block(x), exact(x.double()))


def training(model, x, dy):
    """The result and the gradients, by name, of a step."""
    model.zero_grad()
    operand = x.clone().requires_grad_()
    y = model(operand)
    y.backward(dy)
    return {"y": y.detach(), "x": operand.grad, **{name: one.grad for name, one in model.named_parameters()}}


@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "tensorwise", "blockwise"])
@pytest.mark.parametrize("num_tokens", [5, 8])
def test_a_model_that_trains_fuses_norms_and_feed_forwards(recipe, num_tokens):
    torch.manual_seed(1)
    model = torch.nn.Sequential(Block(), Block()).bfloat16()
    expected, x, dy = copy.deepcopy(model).double(), rows(2, num_tokens, HIDDEN), rows(2, num_tokens, HIDDEN)
    own = copy.deepcopy(model)
    done = nn.convert(model, recipe)
    joined = ["q_proj + k_proj + v_proj"] * 2 if recipe == "rowwise" else []
    assert sorted(done.blocks.values()) == ["RMSNorm"] * 6 + ["SwiGLU"] * 2 + joined
    norms = [model.get_submodule(name) for name, kind in done.blocks.items() if kind == "RMSNorm"]
    assert not any(has_handover(norm) for norm in norms)
    found, wanted = training(model, x, dy), training(expected, x.double(), dy.double())
    for name, value in wanted.items():
        assert (found[name] - value).norm() <= (0.03 if recipe == "bf16" else 0.2) * value.norm(), name
    done.undo()
    for name, value in training(own, x, dy).items():
        assert torch.equal(training(model, x, dy)[name], value), name


@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "rowwise_with_gw_hp", "tensorwise", "blockwise"])
@pytest.mark.parametrize("kind", [lambda: torch.nn.Linear(HIDDEN, HIDDEN, bias=False), LlamaMLP, Attention])
def test_negated_views_train_as_what_they_mean(recipe, kind):
    """Their memory holds the negatives of their elements."""
    model = torch.nn.Sequential(kind()).bfloat16()
    nn.convert(model, recipe)
    results = []
    x, dy = rows(16, HIDDEN), rows(16, HIDDEN)
    for view in (torch.Tensor.neg, torch._neg_view):
        model.zero_grad()
        operand, gradient = view(x).requires_grad_(), view(dy)
        model(operand).backward(gradient)
        results.append([operand.grad, *(one.grad for one in model.parameters())])
    assert gradient.is_neg()
    assert all(map(near, *results))  # of layers one by one, which round more often than as one node


def without_handovers(model):
    """The same model, whose layers all quantize what they are called with."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if (state := vars(module).get("_stoneware")) is not None:
            state.handover = None
        vars(module).pop("handover", None)
    return model


@pytest.fixture
def counted(monkeypatch):
    """How often fp8 was taken over, and a layer or a block quantized x itself."""
    counts = {"taken": 0, "not taken": 0}
    take = handover.Handover.take

    def counted_take(self, x):
        found = take(self, x)
        counts["taken" if found else "not taken"] += 1
        return found

    monkeypatch.setattr(handover.Handover, "take", counted_take)
    return counts


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("shape", [(1, HIDDEN), (2, 3, HIDDEN), (1, 0, HIDDEN)])
def test_layers_take_what_a_norm_hands_over(model, shape, mode, counted):
    nn.convert(model)
    x = rows(*shape)
    with mode():
        assert torch.equal(model(x), without_handovers(model)(x))
    assert counted == {"taken": 2 * 4, "not taken": 0}


CHANGES = {
    "in place": lambda y: y.mul_(-1),
    ".data": lambda y: y.data.mul_(-1),
    "numpy": lambda y: np.negative(y.view(torch.int16).numpy(), out=y.view(torch.int16).numpy()),
    "dlpack": lambda y: torch.from_dlpack(y.__dlpack__()).mul_(-1),
    "raw pointer": lambda y: ctypes.memset(y.data_ptr(), 0, y.nbytes),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CHANGES)
def test_a_hook_that_changes_the_result_of_a_norm_is_seen_by_the_layers(model, name, mode):
    nn.convert(model)

    def change(module, arguments, y):
        CHANGES[name](y)

    for one in (model[0].input_layernorm, model[1].post_attention_layernorm):
        one.register_forward_hook(change)
    x = rows(2, 5, HIDDEN)
    with mode():
        assert torch.equal(model(x), without_handovers(model)(x))


@pytest.mark.parametrize("name", CHANGES)
def test_layers_called_by_hand_see_what_was_changed(model, name):
    nn.convert(model)
    block = model[0]
    with torch.no_grad():
        y = block.input_layernorm(rows(4, HIDDEN))
        assert torch.equal(block.self_attn.q_proj(y), block.self_attn.q_proj(y.clone())), "as it was handed over"
        y = y.clone()
        CHANGES[name](y)
        assert torch.equal(block.self_attn.k_proj(y), block.self_attn.k_proj(y.clone()))


def test_a_result_has_no_attributes(model):
    nn.convert(model)
    with torch.no_grad():
        assert not vars(model[0].input_layernorm(rows(4, HIDDEN)))


@pytest.mark.parametrize("part", ["self_attn", "self_attn.q_proj", "self_attn.v_proj", "mlp", "input_layernorm"])
@pytest.mark.parametrize("add", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_that_are_added_later_run_and_may_change_everything(model, part, add):
    nn.convert(model)
    called = []

    def change(module, *others):
        called.append(1)
        for one in others:
            for tensor in one if isinstance(one, tuple) else (one,):
                tensor.mul_(-1)

    getattr(model[0].get_submodule(part), add)(change)
    x = rows(1, 4, HIDDEN)
    with torch.no_grad():
        found = model(x.clone())
        assert called and torch.equal(found, without_handovers(model)(x.clone()))


def test_a_layer_that_was_replaced_later_gets_what_the_norm_returned(model):
    """As adapters replace it."""
    nn.convert(model)
    model[0].self_attn.q_proj = nn.Lora(model[0].self_attn.q_proj, rank=4)
    x = rows(1, 4, HIDDEN)
    with torch.no_grad():
        assert torch.equal(model(x), without_handovers(model)(x))


def test_threads_take_what_is_theirs(model):
    nn.convert(model)
    inputs = [rows(1, 1 + i % 3, HIDDEN) for i in range(24)]
    plain = without_handovers(model)
    with torch.no_grad():
        wanted = [plain(x) for x in inputs]

    def call(x):
        with torch.no_grad():
            return model(x)

    with ThreadPoolExecutor(8) as pool:
        for found, expected in zip(pool.map(call, inputs), wanted):
            assert torch.equal(found, expected)


def test_copies_and_pickles_are_fused_too(model, counted):
    nn.convert(model)
    x = rows(1, 4, HIDDEN)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.no_grad():
        wanted = model(x)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            counted.update({"taken": 0, "not taken": 0})
            assert torch.equal(other(x), wanted)
            assert counted == {"taken": 8, "not taken": 0}
            assert not {id(one) for one in model.modules()} & {id(one) for one in other.modules()}


def test_a_norm_that_is_copied_alone_leaves_the_model_behind(model):
    nn.convert(model)
    norm = copy.deepcopy(model[0].input_layernorm)
    x = rows(4, HIDDEN)
    with torch.no_grad():
        assert torch.equal(norm(x), model[0].input_layernorm(x))
    assert norm._stoneware.route is None


def test_fused_blocks_keep_signature_attributes_and_keywords(model):
    plain = copy.deepcopy(model)
    nn.convert(model)
    block, x = model[0], rows(4, HIDDEN)
    with torch.no_grad():
        assert torch.equal(block.input_layernorm(x=x), plain[0].input_layernorm(x))
        assert near(block.mlp(x=x), plain[0].mlp(x))
    assert isinstance(block.mlp, LlamaMLP) and isinstance(block.input_layernorm, LlamaRMSNorm)
    assert block.mlp.gate_proj.weight.shape == (WIDTH, HIDDEN) and block.input_layernorm.variance_epsilon == 1e-5
    assert str(inspect.signature(block.mlp.forward)) == "(x)"
    assert type(block.mlp).__name__ == "LlamaMLP"


def test_a_feed_forward_whose_activation_changes_computes_it(model):
    plain = copy.deepcopy(model)
    nn.convert(model)
    for one in (model, plain):
        one[0].mlp.activation = torch.nn.functional.relu
    x = rows(4, HIDDEN)
    with torch.no_grad():
        assert near(model[0].mlp(x), plain[0].mlp(x))


@pytest.mark.parametrize("change", ["assign", "data", "parameter", "half", "quantize_"])
def test_a_weight_that_changes_is_used(model, change):
    """Gate and up are one matmul, which shares their memory."""
    nn.convert(model)
    mlp, x = model[0].mlp, rows(4, HIDDEN)
    with torch.no_grad():
        mlp(x)
        if change == "assign":
            state = {f"0{name[1:]}": one.clone() for name, one in model.state_dict().items() if name[0] == "1"}
            model.load_state_dict(state, assign=True, strict=False)
        elif change == "data":
            mlp.up_proj.weight.data = model[1].mlp.up_proj.weight.data.clone()
        elif change == "parameter":
            mlp.gate_proj.weight = torch.nn.Parameter(model[1].mlp.gate_proj.weight.clone(), requires_grad=False)
        elif change == "half":
            model.half()
            x = x.half()
        else:
            mlp.up_proj.quantize_(torch.randn(WIDTH, HIDDEN).bfloat16())
        wanted = LlamaMLP.forward(mlp, x)
        assert torch.equal(mlp(x), wanted)


def test_weights_of_a_fused_feed_forward_are_their_own_parameters(model):
    shapes = {name: one.shape for name, one in model.named_parameters()}
    nn.convert(model)
    assert shapes.items() <= {name: one.shape for name, one in model.named_parameters()}.items()


def test_dropout_keeps_a_feed_forward():
    class Dropped(LlamaMLP):
        def forward(self, x):
            return torch.nn.functional.dropout(super().forward(x), 0.5, self.training)

    model = torch.nn.Sequential(Dropped()).bfloat16().eval()
    assert "depends on its mode" in nn.convert(model, frozen=True).kept_blocks["0"]
    assert (model.train()(rows(64, HIDDEN)) == 0).any()


@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "blockwise"])
def test_swiglu_trains(recipe):
    torch.manual_seed(2)
    layer = nn.SwiGLU(HIDDEN, WIDTH, recipe=recipe, dtype=torch.bfloat16)
    plain = LlamaMLP().bfloat16()
    plain.load_state_dict(layer.state_dict())
    x = rows(128, HIDDEN)
    results = []
    for one in (layer, plain):
        given = x.clone().requires_grad_()
        y = one(given)
        y.square().sum().backward()
        results.append((y, given.grad))
    for found, wanted in zip(*results):
        assert (found - wanted).float().norm() <= 0.12 * wanted.float().norm()


def test_frozen_swiglu_gives_a_gradient_to_x(model):
    nn.convert(model)
    x = rows(16, HIDDEN).requires_grad_()
    model[0].mlp(x).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("add", ["register_forward_hook", "register_full_backward_hook"])
def test_hooks_of_frozen_layers_are_called(part, add):
    layer = nn.SwiGLU(HIDDEN, WIDTH, frozen=True, dtype=torch.bfloat16)
    called = []
    getattr(getattr(layer, part), add)(lambda *_: called.append(1))
    layer(rows(4, HIDDEN).requires_grad_()).sum().backward()
    assert called


def test_compiled_blocks_give_what_eager_ones_do(model):
    nn.convert(model)
    x = rows(1, 16, HIDDEN)
    with torch.no_grad():
        assert near(torch.compile(model, fullgraph=True)(x), model(x))


def test_frozen_layers_need_fp8():
    with pytest.raises(ValueError, match="recipe='bf16' must be one of tensorwise"):
        nn.SwiGLU(HIDDEN, WIDTH, recipe="bf16", frozen=True)


def test_a_converted_model_is_freed_with_its_conversion():
    model = new_model()
    done = nn.convert(model)
    with torch.no_grad():
        model(rows(1, 4, HIDDEN))
    weights = [weakref.ref(parameter) for parameter in model.parameters()]
    del model, done
    gc.collect()
    assert not [one for one in weights if one() is not None]
