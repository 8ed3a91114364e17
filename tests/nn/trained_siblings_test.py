"""Layers of one argument that are trained as one node."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from stoneware import nn
from stoneware.nn import data_flow, trained_siblings

K, HEADS = 128, 4


class Attention(torch.nn.Module):
    """As in Llama, with fewer heads for k and v."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(K, K, bias=bias)
        self.k_proj, self.v_proj = (torch.nn.Linear(K, K // 2, bias=bias) for _ in range(2))
        self.o_proj = torch.nn.Linear(K, K, bias=False)

    def forward(self, hidden_states, mask=None):
        shape = (*hidden_states.shape[:-1], -1, K // HEADS)
        q = self.q_proj(hidden_states).view(shape).transpose(-3, -2)
        k = self.k_proj(hidden_states).view(shape).transpose(-3, -2)
        v = self.v_proj(hidden_states).view(shape).transpose(-3, -2)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return self.o_proj(y.transpose(-3, -2).flatten(-2))


class Twice(Attention):
    """One that changes its argument on the way."""

    def forward(self, hidden_states):
        q = self.q_proj(hidden_states)
        hidden_states = hidden_states * 2
        return self.o_proj(q + torch.cat((self.k_proj(hidden_states), self.v_proj(hidden_states)), -1))


def new(kind=Attention, **options):
    torch.manual_seed(0)
    return torch.nn.Sequential(kind(**options)).bfloat16()


def step(model, x, dy):
    """y and the gradients, by name."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad, **{name: one.grad for name, one in model.named_parameters()}}


def inputs(*shape):
    return torch.randn(*shape, K).bfloat16(), torch.randn(*shape, K).bfloat16()


@pytest.fixture
def counted(monkeypatch):
    """Whether each call was one node."""
    calls = []

    def counting(call):
        def run(*tensors):
            results = call(*tensors)
            calls.append(results is not None)
            return results

        return run

    for name in ("_call", "_call_cast"):
        monkeypatch.setattr(trained_siblings, name, counting(getattr(trained_siblings, name)))
    return calls


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(2, 8), (16,), (3, 5)])
def test_gradients(counted, bias, shape):
    model = new(bias=bias)
    (x, dy), exact = inputs(*shape), copy.deepcopy(model).double()
    done = nn.convert(model, "rowwise")
    assert done.blocks == {"0": "q_proj + k_proj + v_proj"}
    found, wanted = step(model, x, dy), step(exact, x.double(), dy.double())
    assert counted == [shape != (3, 5)]  # 15 rows are not a multiple of 16
    for name, value in wanted.items():
        # A key's bias changes no softmax, so its exact gradient is 0.
        scale = wanted["0.q_proj.bias"].norm() if name == "0.k_proj.bias" else value.norm()
        assert (found[name] - value).norm() <= 0.2 * scale, name


@pytest.mark.parametrize("bias", [False, True])
def test_autocast_casts_all_and_the_gradients_keep_their_dtype(counted, bias):
    model, (x, dy) = new(bias=bias).float(), inputs(16)
    exact = copy.deepcopy(model).double()
    with torch.autocast("cpu", torch.bfloat16):
        nn.convert(model, "rowwise")
        found = step(model, x.float(), dy)
    assert counted == [True]
    assert found["y"].dtype == torch.bfloat16
    wanted = step(exact, x.double(), dy.double())
    for name, value in wanted.items():
        assert found[name].dtype == (torch.bfloat16 if name == "y" else torch.float32)
        of = wanted["0.q_proj.bias"] if name == "0.k_proj.bias" else value
        assert (found[name] - value).norm() <= 0.2 * of.norm(), name


def test_results_have_the_bits_of_the_layers_and_may_be_changed_in_place(counted):
    class InPlace(Attention):
        def forward(self, x):
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
            q.mul_(2)
            return self.o_proj(q + torch.cat((k, v), -1))

    model, (x, dy) = new(InPlace), inputs(16)
    single = copy.deepcopy(model)
    nn.convert(model, "rowwise")
    nn.convert(single, "rowwise")
    single[0].siblings = None
    for layer in single[0].children():
        layer.siblings = None
    found, wanted = step(model, x, dy), step(single, x, dy)
    assert counted == [True]
    assert torch.equal(found["y"], wanted["y"])
    for name in found:
        assert (found[name] - wanted[name]).float().norm() <= 0.1 * wanted[name].float().norm()


def test_an_argument_that_is_assigned_to_or_changed_has_no_siblings():
    class Changed(Attention):
        def forward(self, x):
            q = self.q_proj(x)
            x.mul_(0)
            return self.o_proj(q + torch.cat((self.k_proj(x), self.v_proj(x)), -1))

    class Chain(Attention):
        def forward(self, x):
            x = torch.relu(self.q_proj(x))
            return self.o_proj(x)

    for kind in (Twice, Changed, Chain):
        assert data_flow.siblings(new(kind)[0], lambda layer: True) is None


def test_layers_that_a_call_may_leave_out_have_no_siblings():
    """The gradient of a weight that was not used must stay None."""

    class Either(Attention):
        def forward(self, x):
            if self.training:
                return self.k_proj(x)
            return self.v_proj(x)

    class Early(Attention):
        def forward(self, x):
            q = self.q_proj(x)
            if self.training:
                return q
            return q + torch.cat((self.k_proj(x), self.v_proj(x)), -1)

    class Expression(Attention):
        def forward(self, x):
            return self.k_proj(x) if self.training else self.v_proj(x)

    class Loop(Attention):
        def forward(self, x):
            return [self.k_proj(x) + self.v_proj(x) for _ in range(0 if self.training else 2)]

    class Together(Attention):
        def forward(self, x):
            if x.ndim == 1:
                raise ValueError
            k, v = (y * 2 for y in (self.k_proj(x), self.v_proj(x)))
            return k + v

    for kind in (Either, Early, Expression, Loop):
        assert data_flow.siblings(new(kind)[0], lambda layer: True) is None
    assert data_flow.siblings(new(Together)[0], lambda layer: True) == ("k_proj", "v_proj")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_layers_run_by_themselves(counted, mode):
    model, (x, _) = new(), inputs(16)
    nn.convert(model, "rowwise")
    with mode():
        model(x)
    assert not counted


def test_layers_that_are_called_by_hand_run_by_themselves(counted):
    model, (x, _) = new(), inputs(16)
    nn.convert(model, "rowwise")
    model[0].q_proj(x.requires_grad_())
    assert not counted


@pytest.mark.parametrize("name", ["q_proj", "v_proj"])
def test_frozen_weights_and_hooks_are_seen(counted, name):
    model, (x, dy) = new(), inputs(16)
    nn.convert(model, "rowwise")
    layer = model[0].get_submodule(name)
    layer.requires_grad_(False)
    assert step(model, x, dy)[f"0.{name}.weight"] is None
    layer.requires_grad_(True)
    handle = layer.register_forward_hook(lambda module, args, y: torch.zeros_like(y))
    assert not any(counted)
    if name == "v_proj":
        assert not model(x).any()
    handle.remove()
    assert step(model, x, dy)[f"0.{name}.weight"].abs().sum() > 0
    assert counted[-1]


def test_copies_and_pickles_have_their_own_siblings(counted):
    model, (x, dy) = new(), inputs(16)
    nn.convert(model, "rowwise")
    wanted = step(model, x, dy)
    twin = copy.deepcopy(model)
    twin[0].v_proj.weight.data.zero_()
    assert not step(twin, x, dy)["y"].any()
    assert torch.equal(step(model, x, dy)["y"], wanted["y"])
    assert counted == [True] * 3
    layer = copy.deepcopy(model[0].q_proj)
    assert layer.siblings is None
    layer(x).sum().backward()
    loaded = pickle.loads(pickle.dumps(model[0].q_proj))
    assert loaded.siblings.owner is not model[0]


def test_results_are_freed_with_the_call(counted):
    model, (x, _) = new(), inputs(16)
    nn.convert(model, "rowwise")
    model(x.requires_grad_())
    siblings = model[0].q_proj.siblings
    assert siblings._computed is None and siblings.thread is None
    with pytest.raises(Exception, match="mask"):
        model[0](x, mask="mask")
    assert siblings._computed is None and siblings.thread is None


def test_threads_compute_what_is_theirs():
    model, (x, _) = new(), inputs(16)
    nn.convert(model, "rowwise")
    model.requires_grad_()
    x.requires_grad_()
    wanted = torch.autograd.grad(model(x).sum(), x)[0]

    def run(_):
        return [torch.autograd.grad(model(x).sum(), x)[0] for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        for gradients in pool.map(run, range(4)):
            for found in gradients:
                # Computed by themselves, the gradients of q, k and v have other scales.
                assert (found - wanted).float().norm() <= 0.1 * wanted.float().norm()


def test_other_recipes_and_accumulating_layers_are_left():
    for options in ({"recipe": "bf16"}, {"recipe": "tensorwise"}, {"fuse_wgrad_accumulation": True}):
        assert not nn.convert(new(), **options).blocks


def test_undo():
    model = new()
    done = nn.convert(model, "rowwise")
    done.undo()
    assert type(model[0]) is Attention
    assert "siblings" not in vars(model[0].q_proj)
