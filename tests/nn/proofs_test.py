"""Blocks of a model are swapped only where their code proves that nothing changes.

Modules are generated from source: each differs from a real feed-forward or norm by one operation, which random inputs
of the sizes that convert tries do not show.
"""

from __future__ import annotations

import copy
import itertools
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from block_forms import FEED_FORWARDS, HIDDEN, NORMS, Form, module_of, near

from stoneware import nn
from stoneware.nn.fused_blocks import FusedBlock

OPERATIONS = {
    "clamp": "{v} = {v}.clamp(-1e4, 1e4)",
    "maximum alone": "{v} = {v}.clamp(max=1e4)",
    "functional clamp": "{v} = torch.clamp({v}, min=-1e4)",
    "clamp in place": "{v}.clamp_(-1e4, 1e4)",
    "hardtanh": "{v} = F.hardtanh({v}, -1e4, 1e4)",
    "number": "{v} = {v} * 1.001",
    "number in place": "{v}.mul_(1.001)",
    "number by an operator in place": "{v} *= 1.001",
    "attribute": "self.scale = 1.001\n{v} = {v} * self.scale",
    "tensor": "{v} = {v} * torch.ones(1, dtype={v}.dtype)",
    "function": "{v} = scaled({v})",
    "quotient": "{v} = {v} / 0.999",
    "sum": "{v} = {v} + 1e-4",
    "itself": "{v} = {v} + {v}",
    "dropout": "{v} = F.dropout({v}, 0.1, self.training)",
    "dropout of nothing": "{v} = F.dropout({v}, 0.0)",
    "noise in training": "if self.training:\n    {v} = {v} + 1e-4 * torch.randn_like({v})",
    "gradient mode": "if torch.is_grad_enabled():\n    {v} = {v} * 1.001",
    "shape": "if {v}.shape[0] > 4:\n    {v} = {v} * 2",
    "dimensions": "if {v}.ndim > 2:\n    {v} = {v} * 2",
    "dtype": "if {v}.dtype == torch.float16:\n    {v} = {v} * 2",
    "value": "if {v}.abs().max() > 1e4:\n    {v} = {v} * 2",
    "needs a gradient": "if {v}.requires_grad:\n    {v} = {v} * 2",
    "float64": "{v} = {v}.to(torch.float64).to({v}.dtype)",
    "detach": "{v} = {v}.detach()",
    "nan_to_num": "{v} = torch.nan_to_num({v})",
    "first elements": "{v}[..., 0] = 0",
    "order": "{v} = {v}.flip(-1)",
    "tanh": "{v} = 1e4 * torch.tanh({v} / 1e4)",
    "norm": "{v} = F.rms_norm({v}, {v}.shape[-1:])",
    "counter": "self.calls = getattr(self, 'calls', 0) + 1",
    "tensors alone": "if isinstance({v}, torch.Tensor):\n    {v} = {v}.clamp(-1e4, 1e4)",
    "tensors of a type": "if type({v}) is torch.Tensor:\n    {v} = {v}.clamp(-1e4, 1e4)",
    "values of tensors alone": "if torch.is_tensor({v}) and {v}.abs().max() > 1e4:\n    {v} = {v} / 2",
    "attribute of the argument": "x.kept = {v}",
}
"""Statements that change a variable v, or are not to be seen in what is computed."""

STATES = {
    "a buffer": ("self.register_buffer('calls', torch.zeros(()))", "self.calls += 1"),
    "a dictionary": ("self.calls = {'number': 0}", "self.calls['number'] += 1"),
    "a list": ("self.calls = []", "self.calls.append(1)"),
    "a list of tensors": ("self.calls = []", "self.calls.append(x)"),
    "the last argument": ("self.last = None", "self.last = x"),
    "the last result": ("self.last = None", "self.last = y"),
    "a tensor": ("self.last = torch.zeros(3)", "self.last = torch.ones(3)"),
}
"""Statements of __init__ and of forward that keep something."""

CONTEXTS = ("torch.no_grad()", "torch.inference_mode()")

ACTIVATIONS = (
    "torch.nn.functional.gelu(gate)", "F.gelu(gate, approximate='tanh')", "F.relu(gate)", "F.mish(gate)",
    "F.hardswish(gate)", "F.softplus(gate)", "F.elu(gate)", "torch.sigmoid(gate)", "torch.tanh(gate)", "gate",
    "gate * torch.sigmoid(1.702 * gate)", "F.silu(-gate)", "F.relu(gate).square()", "F.silu(gate, inplace=True)",
    "F.silu(F.silu(gate))", "F.gelu(gate) if self.training else F.silu(gate)",
)  # fmt: skip

TEXTS_OF_FEED_FORWARDS = (
    *((old, new) for old in ("self.act_fn(gate)", "F.silu(gate)") for new in ACTIVATIONS),
    *(("torch.nn.SiLU()", f"torch.nn.{new}()") for new in ("GELU", "Mish", "Identity", "Hardswish", "ReLU")),
    ("Swish()", "torch.nn.GELU()"), ("Swish()", "torch.nn.Hardswish()"),
    *((f"Linear({sizes}, bias=False)", f"Linear({sizes})") for sizes in ("64, 128", "128, 64", "64, 256")),
    *((f"torch.nn.Linear({sizes}", f"DoubledLinear({sizes}") for sizes in ("64, 128", "128, 64", "64, 256")),
    ("gate, up =", "up, gate ="), ("chunk(2, dim=-1)", "chunk(2)"), ("chunk(2, dim=-1)", "chunk(2, dim=1)"),
    ("both.chunk(2, dim=-1)", "both.split(128, dim=-1)"),
    ("both.chunk(2, dim=-1)", "(both[..., ::2], both[..., 1::2])"),
    ("gate, up = both.chunk(2, dim=-1)", "gate, up, _ = both.chunk(3, dim=-1)"),
    ("gate, up = both.chunk(2, dim=-1)", "(gate, _), (_, up) = both.chunk(2, dim=-1), both.flip(0).chunk(2, dim=-1)"),
    ("both, 2, -1", "both, 2, 0"), ("both, 2, -1", "both, 2"),
    ("= self.up_proj(x)", "= self.up_proj(gate)"), ("= self.up_proj(x)", "= self.gate_proj(x)"),
    ("= self.w3(x)", "= self.w1(x)"), ("= self.w3(x)", "= self.w3(x.flip(0))"),
    ("return y", "return y + x"), ("return y", "return y, x"), ("return y", "return (y,)"),
    ("return y", "return y * up.mean()"), ("return y", "return y.double()"), ("return y", "return product"),
    ("activated * up", "activated * up * up"), ("activated * up", "activated + up"),
    ("activated * up", "activated * (up + 1)"),
    ("activated * up", "activated * 1.5"), ("activated * up", "activated * activated"), ("activated * up", "gate * up"),
    ("up * activated", "up - activated"), ("up * activated", "(up + 1) * activated"),
    ("up * activated", "up * activated.abs()"),
    ("torch.mul(up, activated)", "torch.add(up, activated)"),
    ("torch.mul(up, activated)", "torch.maximum(up, activated)"),
)  # fmt: skip

TEXTS_OF_NORMS = (
    ("+ self.eps", ""), ("+ self.eps", "+ 1"), ("+ self.eps", "+ torch.tensor(self.eps)"), ("+ self.eps", "- self.eps"),
    ("+ self.eps", "* self.eps"), ("+ self.eps", "+ self.eps + self.eps"), ("+ self.eps)", ") + self.eps"),
    ("variance + self.eps", "variance.clamp(min=self.eps)"),
    ("variance + self.eps", "torch.maximum(variance, self.eps)"),
    ("torch.rsqrt(", "torch.sqrt("), ("torch.rsqrt(", "torch.reciprocal("), ("torch.rsqrt(", "("),
    ("torch.rsqrt(variance + self.eps)", "1 / (torch.sqrt(variance) + self.eps)"),
    ("mean(-1", "mean(-2"), ("mean(-1", "mean((-2, -1)"), ("mean(-1", "mean(0"), ("mean(-1", "sum(-1"),
    ("mean(-1", "amax(-1"),
    ("mean(-1", "median(-1"), ("mean(-1", "var(-1"), ("mean(-1, keepdim=True)", "mean()"), (", keepdim=True)", ")"),
    ("wide.pow(2)", "wide.pow(3)"), ("wide.pow(2)", "wide.abs()"), ("wide.pow(2)", "wide"),
    ("wide.pow(2)", "wide.pow(2).pow(2)"),
    ("wide.pow(2)", "wide[..., :32].pow(2)"), ("wide.pow(2)", "(wide - wide.mean(-1, keepdim=True)).pow(2)"),
    ("scaled = wide *", "scaled = (wide - wide.mean(-1, keepdim=True)) *"),
    ("scaled = wide *", "scaled = wide.pow(2) *"),
    ("self.weight *", "(1 + self.weight) *"), ("self.weight *", "(self.weight + 1.0) *"),
    ("self.weight *", "self.weight * self.weight *"),
    ("self.weight *", ""), ("self.weight *", "self.weight.abs() *"), ("self.weight *", "2 * self.weight *"),
    ("self.weight *", "self.weight +"), ("self.weight *", "F.softplus(self.weight) *"),
    ("self.weight *", "self.weight.flip(0) *"),
    ("* self.weight", "* (1 + self.weight)"), ("* self.weight", "* self.weight.tanh()"),
    ("* self.weight", "/ self.weight"),
    ("F.rms_norm(x, (64,), self.weight, self.eps)", "F.layer_norm(x, (64,), self.weight, None, self.eps)"),
    ("F.rms_norm(x, (64,), self.weight, self.eps)", "F.rms_norm(x, (64,), 1 + self.weight, self.eps)"),
    ("F.rms_norm(x, (64,), self.weight, self.eps)", "F.rms_norm(x, (64,), None, self.eps) + 0 * self.weight"),
    ("(64,), self.weight, self.eps", "(64,), self.weight"), ("(64,), self.weight, self.eps", "(64,), None, self.eps"),
    ("(64,), self.weight, self.eps", "(64,), self.weight, 1"),
    ("(64,), self.weight, self.eps", "x.shape[-1:], self.weight, self.eps"),
    ("super().forward(x)", "super().forward(super().forward(x))"), ("super().forward(x)", "super().forward(x.abs())"),
    ("super().forward(x)", "F.layer_norm(x, (64,), self.weight, None, self.eps)"),
    ("return y", "return y + x"), ("return y", "return y, x"), ("return y", "return y.double()"),
    ("return y", "return (y,)"),
    ("return y", "return y.to(torch.float16)"), ("return y", "return self.weight * y"), ("return y", "return y.cpu()"),
    ("torch.rand(64) + 0.5)", "torch.rand(1, 64) + 0.5)"),
    ("self.eps = 1e-5", "self.eps = 1"), ("self.eps = 1e-5", "self.eps = torch.tensor(1e-5)"),
    ("self.eps = 1e-5", "self.eps = None"),
    ("self.eps = 1e-5", "self.eps = torch.nn.Parameter(torch.tensor(1e-5))"),
    ("self.eps = 1e-5", "self.eps = 1e-5\nself.bias = torch.nn.Parameter(torch.zeros(64))"),
)  # fmt: skip


def hooked(add: str, *names: str) -> Callable[[torch.nn.Module], None]:
    def change(module: torch.nn.Module) -> None:
        for name in names or [""]:
            getattr(module.get_submodule(name), add)(lambda *_: None)

    return change


def with_a_forward_of_its_own(module: torch.nn.Module) -> None:
    forward = module.forward
    module.forward = lambda x: forward(x)


def with_a_call_of_its_class(module: torch.nn.Module) -> None:
    type(module).__call__ = lambda self, x: self.forward(x) * 2  # type: ignore[method-assign,misc]


def with_a_parameter_more(module: torch.nn.Module) -> None:
    module.register_parameter("bias", torch.nn.Parameter(torch.zeros(HIDDEN)))


def last_layer_of(module: torch.nn.Module) -> torch.nn.Module:
    return [layer for layer in module.children() if isinstance(layer, torch.nn.Linear)][-1]


class Doubled(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def with_a_parametrization(module: torch.nn.Module) -> None:
    torch.nn.utils.parametrize.register_parametrization(module, "weight", Doubled())


def with_a_parametrized_layer(module: torch.nn.Module) -> None:
    with_a_parametrization(last_layer_of(module))


def with_weight_norm(module: torch.nn.Module) -> None:
    torch.nn.utils.parametrizations.weight_norm(last_layer_of(module))


def with_a_bias(module: torch.nn.Module) -> None:
    last_layer_of(module).bias = torch.nn.Parameter(torch.zeros(HIDDEN))


def with_a_forward_of_its_last_layer(module: torch.nn.Module) -> None:
    with_a_forward_of_its_own(last_layer_of(module))


def with_a_hook_of_its_last_layer(module: torch.nn.Module) -> None:
    last_layer_of(module).register_forward_hook(lambda layer, args, y: 2 * y)


HOOKS = (
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
    "register_full_backward_pre_hook",
)  # fmt: skip

CHANGES = {
    **{add: hooked(add) for add in HOOKS},
    "a forward of its own": with_a_forward_of_its_own,
    "a call of its class": with_a_call_of_its_class,
}

CHANGES_OF_FEED_FORWARDS = {
    **CHANGES,
    "a parametrized layer": with_a_parametrized_layer,
    "weight_norm": with_weight_norm,
    "a bias": with_a_bias,
    "a layer with a forward of its own": with_a_forward_of_its_last_layer,
    "a layer with a hook": with_a_hook_of_its_last_layer,
}

CHANGES_OF_NORMS = {**CHANGES, "a parameter more": with_a_parameter_more, "a parametrization": with_a_parametrization}


class Mutant(NamedTuple):
    """A form that differs from a real one by one operation, or is then changed."""

    name: str
    form: Form
    change: Callable[[torch.nn.Module], None] | None = None
    dtype: torch.dtype = torch.bfloat16


def mutants(
    kind: str,
    forms: dict[str, Form],
    texts: tuple[tuple[str, str], ...],
    changes: dict[str, Callable[[torch.nn.Module], None]],
) -> Iterator[Mutant]:
    for form_idx, (name, form) in enumerate(forms.items()):
        variables = form.variables()
        for idx, (variable, operation) in enumerate(itertools.product(variables, OPERATIONS)):
            if form_idx and idx % len(variables):
                continue  # a place of each operation is enough where all were tried in another form
            statement = OPERATIONS[operation]
            yield Mutant(f"{kind} of {name}: {operation} of {variable}", form.with_operation(variable, statement))
        for old, new in texts:
            changed = form.with_text(old, new)
            if changed != form:
                yield Mutant(f"{kind} of {name}: {new or 'nothing'} for {old}", changed)
        for what, change in changes.items():
            yield Mutant(f"{kind} of {name}: with {what}", form, change)
        for what, (init, statement) in STATES.items():
            state = form._replace(init=f"{textwrap.dedent(form.init)}\n{init}")
            yield Mutant(
                f"{kind} of {name}: keeps {what}", state.with_text("return y", f"{statement}\n        return y")
            )
        for context in CONTEXTS:
            yield Mutant(f"{kind} of {name}: in {context}", form.in_context(context))


IN_PLACE = "scaled = wide\n        scaled *="
"""Changes x itself where x is float32, of which .to(torch.float32) makes no copy."""

MUTANTS = [
    *mutants("feed-forward", FEED_FORWARDS, TEXTS_OF_FEED_FORWARDS, CHANGES_OF_FEED_FORWARDS),
    *mutants("norm", NORMS, TEXTS_OF_NORMS, CHANGES_OF_NORMS),
    *(
        Mutant(f"norm of {name}: in place", NORMS[name].with_text("scaled = wide *", IN_PLACE), dtype=torch.float32)
        for name in ("Llama", "OLMo2")
    ),
    Mutant("norm of Llama: in 16 bits", NORMS["Llama"].with_text("x.to(torch.float32)", "x")),
    Mutant("norm of OLMo2: a result of 32 bits", NORMS["OLMo2"].with_text(".to(dtype)", "")),
    Mutant("norm of T5: a result of 32 bits", NORMS["T5"].with_text("self.weight.dtype in", "0 in")),
]  # fmt: skip


def name_of(mutant: Mutant) -> str:
    return mutant.name


def test_there_are_200_mutants_and_all_differ():
    assert len(MUTANTS) >= 200
    differences = {(mutant.form, mutant.change and mutant.name.partition(": ")[2]) for mutant in MUTANTS}
    assert len(differences) == len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    real = {*FEED_FORWARDS.values(), *NORMS.values()}
    assert all(mutant.change is not None or mutant.form not in real for mutant in MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=name_of)
def test_a_block_that_differs_by_one_operation_is_kept(mutant):
    module = module_of(mutant.form)
    if mutant.change is not None:
        mutant.change(module)
    model = torch.nn.Sequential(module).to(mutant.dtype)
    kind, attributes = type(module), {**vars(module)}
    kept = copy.deepcopy([attributes.get(name) for name in ("calls", "last")] + [*module.buffers()])
    done = nn.convert(model, "rowwise", frozen=True)
    assert not done.blocks
    assert type(module) is kind and {**vars(module)} == attributes
    assert str([attributes.get(name) for name in ("calls", "last")] + [*module.buffers()]) == str(kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("kind", "form"),
    [*(("SwiGLU", form) for form in FEED_FORWARDS.values()), *(("RMSNorm", form) for form in NORMS.values())],
    ids=[*FEED_FORWARDS, *(f"norm of {name}" for name in NORMS)],
)
def test_a_block_with_no_difference_is_swapped(kind, form, dtype):
    module = module_of(form)
    own = type(module)
    model = torch.nn.Sequential(module).to(dtype)
    done = nn.convert(model, "rowwise", frozen=True)
    assert done.blocks == {"0": kind}
    assert isinstance(module, FusedBlock) and isinstance(module, own)
    x = torch.randn(5, HIDDEN).to(dtype)
    with torch.no_grad():
        assert near(model(x), own.forward(module, x))


@pytest.mark.parametrize("form", [FEED_FORWARDS["Llama"], FEED_FORWARDS["Swish"]])
def test_the_layer_whose_result_is_activated_is_the_gate_whatever_its_name(form):
    other_names = form.with_text("gate = ", "other = ").with_text("up = ", "gate = ").with_text("other = ", "up = ")
    check_that_it_is_swapped(module_of(other_names))


@pytest.mark.parametrize("name", ["Llama", "OLMo2", "T5", "Llama4"])
def test_the_epsilon_is_that_of_the_code(name):
    check_that_it_is_swapped(module_of(NORMS[name].with_text("+ self.eps", "+ 0.5")))


def check_that_it_is_swapped(module: Any) -> None:
    own = type(module)
    model = torch.nn.Sequential(module).bfloat16()
    assert nn.convert(model, "rowwise", frozen=True).blocks
    x = torch.randn(5, HIDDEN).bfloat16()
    with torch.no_grad():
        assert near(model(x), own.forward(module, x))


def test_a_norm_that_widens_its_result_is_kept_without_memory_too():
    form = NORMS["OLMo2"].with_text("dtype = x.dtype", "x = x.float()\n        dtype = x.dtype")
    model = torch.nn.Sequential(module_of(form)).bfloat16().to("meta")
    assert not nn.convert(model, "rowwise", frozen=True).blocks


def test_code_that_depends_on_autocast_is_traced_without_it():
    clamp = "if not torch.is_autocast_enabled('cpu'):\n    x = x.clamp(-1e4, 1e4)"
    model = torch.nn.Sequential(module_of(NORMS["Llama"].with_operation("x", clamp))).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert not nn.convert(model, "rowwise", frozen=True).blocks
