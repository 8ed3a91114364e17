"""Feed-forwards of two layers without gradients: what is proved, what runs, and when the kernel has the activation."""

from __future__ import annotations

import copy
import functools
import io

import pytest
import torch
from torch.nn import functional

import stoneware as sw
from stoneware import nn
from stoneware.epilogue import linked
from stoneware.errors import TuningMissError
from stoneware.nn import mlp
from stoneware.nn.fused_mlp import FusedMLP
from stoneware.nn.recipes import RECIPES
from stoneware.ops import fused, tensor_checks
from stoneware.ops.matmul import api as matmul_api
from stoneware.runtime.device import Device
from stoneware.tuning import table_file

HIDDEN, WIDTH = 128, 256
ACTIVATIONS = {
    "gelu": torch.nn.GELU,
    "gelu by tanh": functools.partial(torch.nn.GELU, approximate="tanh"),
    "relu": torch.nn.ReLU,
    "relu in place": functools.partial(torch.nn.ReLU, inplace=True),
    "silu": torch.nn.SiLU,
    "tanh": torch.nn.Tanh,
}


class Named(torch.nn.Module):
    """Written like in transformers, with an activation in an attribute of a module."""

    class Activation(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = functional.gelu

        def forward(self, x):
            return self.act(x)

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(HIDDEN, WIDTH), torch.nn.Linear(WIDTH, HIDDEN)
        self.activation_fn = self.Activation()

    def forward(self, hidden_states):
        hidden_states = self.fc1(hidden_states)
        hidden_states = self.activation_fn(hidden_states)
        return self.fc2(hidden_states)


class Written(Named):
    """An activation that is a formula."""

    def forward(self, x):
        h = self.fc1(x)
        return self.fc2(h * torch.sigmoid(1.702 * h))


class Other(Named):
    """Two layers with another function between them."""

    def __init__(self, between) -> None:
        super().__init__()
        self.between = between

    def forward(self, x):
        return self.fc2(self.between(self.fc1(x)))


def sequential(activation, bias=True):
    layers = torch.nn.Linear(HIDDEN, WIDTH, bias=bias), activation, torch.nn.Linear(WIDTH, HIDDEN, bias=bias)
    return torch.nn.Sequential(*layers)


def in_inference(*blocks):
    torch.manual_seed(0)
    return torch.nn.Sequential(*blocks).bfloat16().eval().requires_grad_(False)


def rows(*shape):
    return torch.randn(*shape).bfloat16()


def error(y, expected):
    return ((y.double() - expected).norm() / expected.norm()).item()


@pytest.fixture(autouse=True)
def no_plans():
    no_plans_of_calls()


def no_plans_of_calls():
    """Forgets what earlier calls decided."""
    mlp.frozen.cache_clear()
    mlp.plain.cache_clear()


@pytest.fixture
def kernels(monkeypatch):
    """Stands in for linked kernels: the functions that they compute, once for each plan."""
    functions = []
    no_plans_of_calls()

    def kernel_plan(self, *tensors):
        names = self.plans.spec.plan_order

        def plan(*tensors):
            own = dict(zip(names, tensors))
            factors = [own[name].double() for name in ("scale_a", "scale_b") if own.get(name) is not None]
            a, b = own["a"].double(), own["b"].double()
            if factors and factors[1].ndim == 2 and factors[1].shape[1] * 128 == b.shape[1]:  # of blocks
                a = a * factors[0].repeat_interleave(128, 1)
                b = b * factors[1].repeat_interleave(128, 0).repeat_interleave(128, 1)
                factors = []
            acc = functools.reduce(torch.mul, factors, a @ b)
            acc = acc if own["bias"] is None else acc + own["bias"]
            own["out"].copy_(self.function(acc.float()))

        functions.append(self.function)
        return plan, True

    monkeypatch.setattr(fused._FusedCalls, "kernel_plan", kernel_plan)
    return functions


@pytest.mark.parametrize("recipe", ["bf16", *RECIPES])
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_feed_forward_is_near_float64_with_and_without_a_kernel(recipe, name, bias, request):
    model = in_inference(sequential(ACTIVATIONS[name](), bias))
    exact, x = copy.deepcopy(model).double(), rows(2, 5, HIDDEN)
    assert nn.convert(model, recipe).blocks == {"0": "MLP"}
    own = torch.nn.Sequential.forward(model[0], x)
    by_layers = model(x)
    assert torch.equal(by_layers, own)
    functions = request.getfixturevalue("kernels")
    with_kernel = model(x)
    assert len(functions) == 1
    # Rounding before or after it is the same for relu.
    assert torch.equal(with_kernel, by_layers) == name.startswith("relu")
    assert with_kernel.shape == x.shape and with_kernel.dtype == x.dtype
    limit = 0.01 if recipe == "bf16" else 0.08
    assert error(with_kernel, exact(x.double())) < limit and error(by_layers, exact(x.double())) < limit


@pytest.mark.parametrize("block", [Named, Written], ids=lambda block: block.__name__)
def test_activations_of_other_packages_are_proved(block, kernels):
    model = in_inference(block())
    exact, x = copy.deepcopy(model).double(), rows(7, HIDDEN)
    assert nn.convert(model, "rowwise").blocks == {"0": "MLP"}
    assert error(model(x), exact(x.double())) < 0.08 and len(kernels) == 1


class Scaled:
    def __init__(self) -> None:
        self.scale = 2.0

    def __call__(self, h):
        return torch.tanh(h) * self.scale


def scaled_by(scales):
    return lambda h: torch.tanh(h) * scales[0]


def changed_below_a_view(h):
    view = h.view_as(h)
    h.mul_(2)
    return view + h


BETWEEN = {
    "softmax": lambda h: h.softmax(-1),
    "a size": lambda h: functional.gelu(h) * h.size(0),
    "a dtype": lambda h: functional.gelu(h.float()).to(h.dtype),
    "a dropout": torch.nn.Dropout(0.1),
    "nothing": lambda h: h,
    "a tensor of its own": lambda h: h * torch.ones(WIDTH, dtype=torch.bfloat16),
    "a second call": lambda h: functional.gelu(h) + h.mean(),
    "a change in place below a view": changed_below_a_view,
    "a change in place of a view": lambda h: h.view_as(h).mul_(2) + h,
    "a change in place that bfloat16 does not share": lambda h: (h.float() * functional.relu(h, inplace=True)).type_as(
        h
    ),
    "a callable with a state": Scaled(),
    "a closure": scaled_by([2.0]),
    "a partial of a closure": functools.partial(scaled_by([2.0])),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_what_no_epilogue_computes_is_left_as_it_is(name, kernels):
    block = Other(BETWEEN[name])
    model = in_inference(block)
    x, done = rows(5, HIDDEN), nn.convert(model, "bf16")
    assert not done.blocks and type(block) is Other and len(done.swapped) == 2
    model(x)
    assert not kernels


def test_a_model_that_trains_keeps_its_layers():
    model = sequential(torch.nn.GELU()).bfloat16()
    assert not nn.convert(torch.nn.Sequential(model), "bf16").blocks
    assert type(model) is torch.nn.Sequential


def changed_approximation(block):
    block[1].approximate = "tanh"


def with_one_more(block):
    block.append(torch.nn.ReLU())


def with_another(block):
    block[1] = torch.nn.ReLU()


def with_hook(block):
    block[1].register_forward_hook(lambda module, arguments, y: y * 2)


def with_own_forward(block):
    block[1].forward = torch.relu


class Listed(torch.nn.Module):
    """An activation with parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.others = torch.nn.GELU(), torch.nn.ModuleList()
        self.silu = torch.nn.SiLU()
        self.tanh = functools.partial(scaled_tanh, scale=0.5)

    def forward(self, h):
        h = self.compute(self.first(h))
        for other in self.others:
            h = other(h)
        return h

    def compute(self, h):
        return self.tanh(self.silu(h)) + h


class ChangedClass(Listed):
    def compute(self, h):
        return torch.relu(h)


def scaled_tanh(h, scale, shift=0.0):
    return torch.tanh(h) * scale + shift


def with_one_more_part(block):
    block[1].others.append(torch.nn.Tanh())


def with_another_part(block):
    block[1].first = torch.nn.ReLU()


def with_own_method(block):
    block[1].compute = torch.relu


def with_another_method_of_the_class(block):
    block[1].__class__ = ChangedClass


def with_another_class_of_a_part(block):
    block[1].silu.__class__ = torch.nn.ReLU


def with_a_part_in_place(block):
    block[1].silu.inplace = True


def with_another_keyword(block):
    block[1].tanh.keywords["scale"] = 0.75


def with_one_more_keyword(block):
    block[1].tanh.keywords["shift"] = 1.0


CHANGES = [changed_approximation, with_one_more, with_another, with_hook, with_own_forward]
CHANGES_OF_PARTS = [
    with_one_more_part, with_another_part, with_own_method, with_another_method_of_the_class,
    with_another_class_of_a_part, with_a_part_in_place, with_another_keyword, with_one_more_keyword,
]  # fmt: skip


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
@pytest.mark.parametrize("change", [*CHANGES, *CHANGES_OF_PARTS], ids=lambda change: change.__name__)
@pytest.mark.parametrize("is_called", [False, True])
def test_a_block_that_changes_runs_its_own_code(change, recipe, is_called, kernels):
    model = in_inference(sequential(Listed() if change in CHANGES_OF_PARTS else torch.nn.GELU()))
    twin, x = copy.deepcopy(model), rows(5, HIDDEN)
    nn.convert(model, recipe)
    if is_called:
        model(x)
    kernels.clear()
    no_plans_of_calls()
    for each in (model, twin):
        change(each[0])
    assert type(model[0]) is not torch.nn.Sequential
    for _ in range(2):  # the first may compare the block again
        assert error(model(x), twin(x).double()) < 0.08 and not kernels


@pytest.mark.parametrize("is_called", [False, True])
def test_a_block_whose_class_changes_runs_its_own_code(is_called, kernels, monkeypatch):
    model = in_inference(sequential(Listed()))
    x = rows(5, HIDDEN)
    assert nn.convert(model, "rowwise").blocks == {"0": "MLP"}
    if is_called:
        model(x)
    kernels.clear()
    no_plans_of_calls()
    monkeypatch.setattr(Listed, "compute", lambda self, h: torch.relu(h))
    for _ in range(2):
        assert torch.equal(model(x), torch.nn.Sequential.forward(model[0], x)) and not kernels


@pytest.mark.parametrize("is_called", [False, True])
def test_a_block_that_changed_for_a_time_is_fused_again(is_called, kernels):
    model = in_inference(sequential(torch.nn.GELU()))
    x = rows(5, HIDDEN)
    nn.convert(model, "rowwise")
    if is_called:
        model(x)
    parts = model[0]._modules
    gelu, parts["1"] = parts["1"], torch.nn.ReLU()
    kernels.clear()
    no_plans_of_calls()
    model(x)
    assert not kernels
    parts["1"] = gelu
    model(x)
    assert len(kernels) == 1


def test_a_slice_of_a_sequential_runs_its_own_code(kernels):
    model = in_inference(sequential(torch.nn.GELU()))
    x = rows(5, HIDDEN)
    nn.convert(model, "rowwise")
    layers = model[0]
    assert torch.equal(layers[:2](x), layers[1](layers[0](x))) and not kernels


class WithOwnMethod(torch.nn.Module):
    """An activation whose attributes are a number and a method, like in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.act = 1.702, self.sigmoid

    def sigmoid(self, h):
        return h * torch.sigmoid(self.scale * h)

    def forward(self, h):
        return self.act(h)


PICKLED = [torch.nn.GELU, functools.partial(torch.nn.LeakyReLU, 0.1), WithOwnMethod, Listed]


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
@pytest.mark.parametrize("activation", PICKLED, ids=["gelu", "leaky relu", "own method", "parts"])
def test_copies_and_pickles_are_fused_and_undo_restores_the_class(activation, recipe, kernels):
    model = in_inference(sequential(activation()))
    x, done = rows(5, HIDDEN), nn.convert(model, recipe)
    y = model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        kernels.clear()
        no_plans_of_calls()
        assert torch.equal(other(x), y) and len(kernels) == 1
    done.undo()
    assert type(model[0]) is torch.nn.Sequential


def test_blocks_with_one_activation_share_their_plans(kernels):
    model = in_inference(*(sequential(torch.nn.GELU()) for _ in range(3)))
    nn.convert(model, "rowwise")
    model(rows(5, HIDDEN))
    assert len(kernels) == 1


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
def test_gradients_are_those_of_the_layers(recipe, kernels):
    model = in_inference(sequential(torch.nn.GELU()))
    nn.convert(model, recipe)
    if recipe == "bf16":
        model.requires_grad_()
    x = rows(16, HIDDEN).requires_grad_()
    operands = [x, *filter(lambda parameter: parameter.requires_grad, model.parameters())]
    wanted = torch.autograd.grad(torch.nn.Sequential.forward(model[0], x).sum(), operands)
    gradients = torch.autograd.grad(model(x).sum(), operands)
    assert not kernels and all(map(torch.equal, gradients, wanted))


def test_autocast_and_compiled_calls_run_the_own_code(kernels):
    model = in_inference(sequential(torch.nn.GELU()))
    exact, x = copy.deepcopy(model).double(), rows(5, HIDDEN)
    nn.convert(model, "rowwise")
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = model(x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)(x)
    assert not kernels and error(under_autocast, exact(x.double())) < 0.08 and error(compiled, exact(x.double())) < 0.08


def test_a_wrong_x_is_refused_like_by_the_layer(kernels):
    model = in_inference(sequential(torch.nn.GELU()))
    nn.convert(model, "rowwise")
    with pytest.raises(ValueError, match="128"):
        model(rows(5, HIDDEN + 16))


class NormThenMLP(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = torch.nn.RMSNorm(HIDDEN, eps=1e-6), Named()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def test_a_norm_hands_its_result_over_in_fp8(kernels, monkeypatch):
    model = in_inference(NormThenMLP())
    exact, x = copy.deepcopy(model).double(), rows(5, HIDDEN)
    nn.convert(model, "rowwise")
    taken = []
    frozen = mlp.frozen
    monkeypatch.setattr(mlp, "frozen", lambda *arguments: taken.append(arguments[-1]) or frozen(*arguments))
    assert error(model(x), exact(x.double())) < 0.08
    assert taken == [True] and len(kernels) == 1


# Which calls get a kernel, on a GPU that is only described.


@pytest.fixture
def h200(monkeypatch):
    """A GPU that is only described, and whose kernels nobody launches."""
    table = table_file.packaged("matmul")
    [fingerprint] = [each.fingerprint for each in table.devices if "H200" in each.fingerprint.name]
    device = Device(ordinal=0, fingerprint=fingerprint, driver_version=(13, 0))
    monkeypatch.setattr(tensor_checks, "check_one_device", lambda tensors: device)
    monkeypatch.setattr(fused._FusedCalls, "_native_plan", lambda self, kind, *others: kind.config.kernel)
    return device


def calls(m, n, k, out_dtype=torch.bfloat16):
    a, weight = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((m, k), (n, k)))
    tensors = a, weight.t(), None
    return fused.calls_of(matmul_api._PLANS, functional.gelu, (), tensors, (out_dtype, False, None, None)), tensors


@pytest.fixture
def links(monkeypatch):
    """What a link in the background has made, and which links were asked for."""
    made, asked = {}, []

    def soon(kernel, text):
        asked.append(kernel)
        return made.get(kernel)

    monkeypatch.setattr(linked, "soon", soon)
    return made, asked


def test_a_kernel_serves_once_it_is_linked(h200, links):
    made, asked = links
    call, tensors = calls(16, 4096, 512)
    assert call.kernel_plan(*tensors) == (None, False)
    made[asked[0]] = object()
    assert call.kernel_plan(*tensors) == (asked[0], True)


def test_layers_run_their_ops_where_a_link_is_missing_under_error_on_miss(h200, links):
    call, tensors = calls(16, 4096, 512)
    with sw.tuning("error_on_miss"):
        assert call.kernel_plan(*tensors) == (None, False)
    with pytest.raises(TuningMissError), sw.tuning("error_on_miss"):
        call._make(*tensors, *call._nones)


def test_a_link_that_failed_is_not_asked_for_again(h200, links, monkeypatch):
    monkeypatch.setattr(linked, "has_failed", lambda kernel, text: True)
    call, tensors = calls(16, 4096, 512)
    assert call.kernel_plan(*tensors) == (None, True)


def test_no_kernel_is_linked_without_a_predicted_gain_or_with_fixed_bits(h200, links, monkeypatch):
    call, tensors = calls(16, 4096, 512)
    with sw.batch_invariant():
        assert call.kernel_plan(*tensors) == (None, True)
    monkeypatch.setattr(fused, "lead_us", lambda *arguments: 5.0)
    assert call.kernel_plan(*tensors) == (None, True)
    monkeypatch.setattr(fused, "lead_us", lambda *arguments: None)
    assert call.kernel_plan(*tensors) == (None, True)
    assert not links[1]


def test_a_float32_result_has_no_kernel(h200, links):
    call, tensors = calls(16, 4096, 512, torch.float32)
    assert call.kernel_plan(*tensors) == (None, True) and not links[1]


def test_a_plan_without_a_kernel_yet_is_made_again(monkeypatch):
    answers = [(None, False), (None, False), (None, True)]
    asked = []

    def kernel_plan(self, *tensors):
        asked.append(self.function)
        return answers[len(asked) - 1]

    monkeypatch.setattr(fused._FusedCalls, "kernel_plan", kernel_plan)
    model = in_inference(sequential(torch.nn.GELU()))
    nn.convert(model, "rowwise")
    x = rows(5, HIDDEN)
    results = [model(x) for _ in range(6)]
    assert len(asked) == 3 and isinstance(model[0], FusedMLP)
    assert all(torch.equal(y, results[0]) for y in results)
