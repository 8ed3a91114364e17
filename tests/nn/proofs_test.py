"""Blocks of a model are swapped only where their code proves that nothing changes.

Modules are generated from source: each differs from a real feed-forward or norm by one operation, which random inputs
of the sizes that convert tries do not show.
"""

from __future__ import annotations

import copy
import io
import itertools
import linecache
import re
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from stoneware import nn
from stoneware.nn import inference
from stoneware.nn.fused_blocks import FusedBlock
from stoneware.nn.handover import Handover

HIDDEN, WIDTH = 64, 128

HEADER = """
import functools
import torch
from torch.nn import functional as F

class Swish(torch.nn.Module):
    def forward(self, x):
        return F.silu(x)

class DoubledLinear(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2

class ScaledSwish(torch.nn.Module):
    beta = 1.0

    def forward(self, x):
        return F.silu(x) if self.beta == 1.0 else F.silu(x) * self.beta

def scaled(x):
    return x * 1.001

def doubling(function):
    @functools.wraps(function)
    def wrapper(self, h, *others):
        return function(self, h, *others) * 2
    return wrapper

def doubling_the_argument(function):
    @functools.wraps(function)
    def wrapper(self, h, *others):
        return function(self, h.mul_(2), *others)
    return wrapper
"""

FILE_NUMBERS = itertools.count()


class Form(NamedTuple):
    """The source of a module.

    Attributes:
      init, body: statements of __init__ and of forward(self, x).
      methods: further methods.
      base: what it is derived from.
      arguments: of super().__init__.
    """

    init: str
    body: str
    methods: str = ""
    base: str = "torch.nn.Module"
    arguments: str = ""
    signature: str = "self, x"
    decorator: str = ""

    def source(self, name: str) -> str:
        lines = [f"class {name}({self.base}):", "    def __init__(self):"]
        init = f"super().__init__({self.arguments})\n{textwrap.dedent(self.init)}"
        lines += [textwrap.indent(init, " " * 8), textwrap.indent(self.decorator, " " * 4)]
        lines += [f"    def forward({self.signature}):", textwrap.indent(textwrap.dedent(self.body), " " * 8)]
        return "\n".join([*lines, textwrap.indent(textwrap.dedent(self.methods), " " * 4)])

    def variables(self) -> list[str]:
        """What forward computes, in order; x first."""
        targets = re.findall(r"^(\w+(?:, \w+)*) = ", textwrap.dedent(self.body), re.MULTILINE)
        return ["x", *(name for target in targets for name in target.split(", ") if name != "dtype")]

    def with_operation(self, variable: str, statement: str) -> Form:
        """The form with a statement behind the one that computes the variable."""
        lines = textwrap.dedent(self.body).strip().splitlines()
        places = [idx for idx, line in enumerate(lines) if variable in line.partition(" = ")[0].split(", ")]
        place = places[0] + 1 if places else 0
        return self._replace(body="\n".join([*lines[:place], statement.format(v=variable), *lines[place:]]))

    def in_context(self, context: str) -> Form:
        body = textwrap.indent(textwrap.dedent(self.body).strip(), "    ")
        return self._replace(body=f"with {context}:\n{body}")

    def with_text(self, old: str, new: str) -> Form:
        """The form with one text for another; the same form if it does not have that text."""
        return self._replace(**{name: getattr(self, name).replace(old, new) for name in ("init", "body", "methods")})


def types_of(**forms: Form) -> dict[str, Any]:
    """Classes of these names, whose source inspect finds."""
    source = HEADER + "\n".join(form.source(name) for name, form in forms.items())
    filename = f"<generated {next(FILE_NUMBERS)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    names: dict[str, Any] = {"__name__": "generated"}
    exec(compile(source, filename, "exec"), names)
    return names


LAYERS = """
    self.{0} = torch.nn.Linear(64, 128, bias=False)
    self.{1} = torch.nn.Linear(64, 128, bias=False)
    self.{2} = torch.nn.Linear(128, 64, bias=False)
"""

JOINED = """
    self.gate_up_proj = torch.nn.Linear(64, 256, bias=False)
    self.down_proj = torch.nn.Linear(128, 64, bias=False)
"""

FEED_FORWARDS = {
    "Llama": Form(
        LAYERS.format("gate_proj", "up_proj", "down_proj") + "    self.act_fn = torch.nn.SiLU()",
        """
        gate = self.gate_proj(x)
        up = self.up_proj(x)
        activated = self.act_fn(gate)
        product = activated * up
        y = self.down_proj(product)
        return y
        """,
    ),
    "Mixtral": Form(
        LAYERS.format("w1", "w3", "w2"),
        """
        gate = self.w1(x)
        activated = F.silu(gate)
        up = self.w3(x)
        product = torch.mul(up, activated)
        y = self.w2(product)
        return y
        """,
    ),
    "Swish": Form(
        LAYERS.format("wi_0", "wi_1", "wo") + "    self.act_fn = Swish()",
        """
        up = self.wi_1(x)
        gate = self.wi_0(x)
        activated = self.act_fn(gate)
        product = up * activated
        y = self.wo(product)
        return y
        """,
    ),
    "Phi": Form(
        JOINED + "    self.act_fn = torch.nn.SiLU()",
        """
        both = self.gate_up_proj(x)
        gate, up = both.chunk(2, dim=-1)
        activated = self.act_fn(gate)
        product = up * activated
        y = self.down_proj(product)
        return y
        """,
    ),
    "GLM": Form(
        JOINED,
        """
        both = self.gate_up_proj(x)
        gate, up = torch.chunk(both, 2, -1)
        activated = F.silu(gate)
        product = activated * up
        y = self.down_proj(product)
        return y
        """,
    ),
}

WEIGHT = "self.weight = torch.nn.Parameter(torch.rand(64) + 0.5)\nself.eps = 1e-5"

NORMS = {
    "Llama": Form(
        WEIGHT,
        """
        dtype = x.dtype
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        scaled = wide * torch.rsqrt(variance + self.eps)
        y = self.weight * scaled.to(dtype)
        return y
        """,
    ),
    "OLMo2": Form(
        WEIGHT,
        """
        dtype = x.dtype
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        scaled = wide * torch.rsqrt(variance + self.eps)
        y = (self.weight * scaled).to(dtype)
        return y
        """,
    ),
    "T5": Form(
        WEIGHT,
        """
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        scaled = x * torch.rsqrt(variance + self.eps)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            scaled = scaled.to(self.weight.dtype)
        y = self.weight * scaled
        return y
        """,
    ),
    "Llama4": Form(
        WEIGHT,
        """
        scaled = self._norm(x.float()).type_as(x)
        y = scaled * self.weight
        return y
        """,
        """
        def _norm(self, wide):
            variance = wide.pow(2).mean(-1, keepdim=True)
            return wide * torch.rsqrt(variance + self.eps)
        """,
    ),
    "functional": Form(
        WEIGHT,
        """
        y = F.rms_norm(x, (64,), self.weight, self.eps)
        return y
        """,
    ),
    "torch": Form(
        "",
        """
        y = super().forward(x)
        return y
        """,
        base="torch.nn.RMSNorm",
        arguments="64, eps=1e-5",
    ),
}

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


def module_of(form: Form) -> Any:
    """A module of a generated class, with small weights, for which activations look alike."""
    name = "BlockRMSNorm" if form.base.endswith("RMSNorm") or "self.weight" in form.body else "Block"
    module = types_of(**{name: form})[name]()
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear):
            torch.nn.init.normal_(layer.weight, std=0.001)
    return module


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


def near(y: torch.Tensor, reference: torch.Tensor) -> bool:
    """Whether they differ by what fp8 activations and 16-bit results may differ by if roundings fall elsewhere."""
    return y.dtype == reference.dtype and bool((y - reference).float().norm() <= 0.01 * reference.float().norm())


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


# What a proved block computes after a later change.


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


# What passes between modules.

READER = """
    for name in ("q", "k", "v", "o"):
        setattr(self, name, torch.nn.Linear(64, 64, bias=False))
    self.norm = torch.nn.LayerNorm(64)
    self.kept = None
"""
READING = "return self.o(self.q(h) + self.k(h) * self.v(h))"
OWNER = """
    self.norm = torch.nn.RMSNorm(64, eps=1e-5)
    self.reader = Reader()
    self.linear = torch.nn.Linear(64, 64)
    self.kept = None
"""
OWNING = "return x + self.reader(self.norm(x))"


def converted(
    owning: str = OWNING,
    reading: str = READING,
    *,
    decorator: str = "",
    decorator_of_reader: str = "",
    reader: str = "",
) -> Any:
    """A frozen model of one owner of a norm and a reader with this code."""
    form = Form(READER, reading, signature="self, h, other=None", decorator=decorator_of_reader)
    names = types_of(Reader=FEED_FORWARDS[reader] if reader else form, Owner=Form(OWNER, owning, decorator=decorator))
    model = torch.nn.Sequential(names["Owner"]()).bfloat16()
    nn.convert(model, "rowwise", frozen=True)
    return model


def has_handover(model: Any) -> bool:
    return model[0].norm._stoneware.handover is not None


def without_handovers(model: torch.nn.Module, x: torch.Tensor) -> Any:
    """The result of a model whose norms give nothing but their result."""
    routes = {}
    for module in model.modules():
        state: Any = vars(module).get("_stoneware")
        if hasattr(state, "route"):
            routes[module], state.route = state.route, None
    try:
        return model(x)
    finally:
        for module, route in routes.items():
            vars(module)["_stoneware"].route = route


def is_right(model: Any) -> bool:
    """Whether a model computes what it does without handovers, bit for bit."""
    x = torch.randn(5, HIDDEN).bfloat16()
    with torch.no_grad():
        return torch.equal(model(x.clone()), without_handovers(model, x.clone()))


ROUTES = {
    "nested calls": {},
    "one name": {"owning": "y = self.norm(x)\ny = self.reader(y)\nreturn x + y"},
    "a tuple": {
        "owning": "y = self.norm(x)\ny, other = self.reader(y)\nreturn x + y",
        "reading": "return self.o(self.q(h) + self.k(h)), None",
    },
    "a keyword": {"owning": "return self.reader(h=self.norm(x))"},
    "another argument": {"owning": "return self.reader(self.norm(x), x)"},
    "shapes and dtypes": {"reading": "q = self.q(h).view(*h.shape[:-1], -1)\nreturn self.o(q.to(h.dtype))"},
    "one of two branches": {"owning": "if x.shape[0] > 9:\n    return x\nelse:\n    return self.reader(self.norm(x))"},
    "a decorator of torch": {"decorator": "@torch.no_grad()", "decorator_of_reader": "@torch.no_grad()"},
    "a linear layer": {"owning": "return self.linear(self.norm(x))"},
    "a feed-forward": {"reader": "Llama"},
    "a feed-forward with one layer for gate and up": {"reader": "Phi"},
}


@pytest.mark.parametrize("code", ROUTES.values(), ids=ROUTES)
def test_a_norm_gives_its_result_in_fp8_where_nothing_comes_between(code, monkeypatch):
    model, found = converted(**code), []
    assert has_handover(model)
    take = Handover.take

    def recording(self: Handover, x: torch.Tensor) -> Any:
        found.append(take(self, x))
        return found[-1]

    monkeypatch.setattr(Handover, "take", recording)
    assert is_right(model)
    assert any(found)


OWNERS = {
    "a method in place": "y = self.norm(x)\ny.mul_(2)\ny = self.reader(y)\nreturn y",
    "an operator in place": "y = self.norm(x)\ny *= 2\ny = self.reader(y)\nreturn y",
    "an element": "y = self.norm(x)\ny[0] = 0\ny = self.reader(y)\nreturn y",
    "data": "y = self.norm(x)\ny.data.mul_(2)\ny = self.reader(y)\nreturn y",
    "a later use": "y = self.norm(x)\nz = self.reader(y)\nreturn z + y",
    "an earlier use": "y = self.norm(x)\nz = y.mul_(2)\ny = self.reader(y)\nreturn y + z",
    "an alias": "y = self.norm(x)\nz = y\nz.mul_(2)\ny = self.reader(y)\nreturn y",
    "two targets": "y = z = self.norm(x)\ny = self.reader(y)\nreturn y + z",
    "an attribute": "y = self.norm(x)\nself.kept = y\ny = self.reader(y)\nreturn y",
    "an attribute that is a target": "self.kept = y = self.norm(x)\ny = self.reader(y)\nreturn y",
    "an attribute alone": "self.kept = self.norm(x)\nself.kept.mul_(2)\nreturn self.reader(self.kept)",
    "a function": "return self.reader(F.relu(self.norm(x)))",
    "a function between": "y = self.norm(x)\ny = scaled(y)\ny = self.reader(y)\nreturn y",
    "a sum": "return self.reader(self.norm(x) + x)",
    "the result": "return self.norm(x)",
    "two results": "y = self.norm(x)\nreturn self.reader(y), y",
    "a walrus": "return self.reader(y := self.norm(x)) + y",
    "a lambda": "return (lambda y: self.reader(y.mul_(2)))(self.norm(x))",
    "a lambda between": "y = self.norm(x)\n(lambda z: z.mul_(2))(y)\ny = self.reader(y)\nreturn y",
    "a nested function": "def change(y):\n    return y.mul_(2)\nreturn self.reader(change(self.norm(x)))",
    "an argument twice": "y = self.norm(x)\ny = self.reader(y, y.mul_(2))\nreturn y",
    "a condition": "y = self.norm(x) if x.shape[0] > 2 else x\ny = self.reader(y)\nreturn y",
    "a branch": "y = x\nif x.shape[0] > 2:\n    y = self.norm(x)\ny = self.reader(y)\nreturn y",
    "a loop": "for y in [self.norm(x)]:\n    y = self.reader(y)\nreturn y",
    "a second call": "y = self.norm(x)\ny = self.reader(y)\nreturn self.norm(y)",
    "the norm itself": "norm = self.norm\ny = norm(x)\ny = self.reader(y.mul_(2))\nreturn y",
    "an argument with a star": "return self.reader(*[self.norm(x)])",
    "a keyword with two stars": "return self.reader(**{'h': self.norm(x)})",
    "a list": "ys = [self.norm(x)]\nys[0].mul_(2)\nreturn self.reader(ys[0])",
    "two readers": "y = self.norm(x)\nreturn self.reader(y) + self.linear(y)",
    "a clone": "y = self.norm(x)\ny = self.reader(y.clone())\nreturn y",
    "a view": "y = self.norm(x)\ny = self.reader(y[:])\nreturn y",
}

READERS = {
    "a method in place": f"h.mul_(2)\n{READING}",
    "a method in place behind the first": "q = self.q(h)\nh.mul_(2)\nreturn self.o(q + self.k(h))",
    "a new tensor": f"h = h * 2\n{READING}",
    "an element": f"h[0] = 0\n{READING}",
    "data": f"h.data.mul_(2)\n{READING}",
    "out": f"torch.mul(h, 2, out=h)\n{READING}",
    "a function": "return self.o(self.q(h) + F.relu(h))",
    "a function in place": f"F.relu(h, inplace=True)\n{READING}",
    "a function of the module": f"scaled(h)\n{READING}",
    "a norm": "return self.o(self.q(self.norm(h)) + self.k(h))",
    "a layer twice": "return self.o(self.q(h) + self.q(h))",
    "a keyword of a layer": "return self.o(self.q(input=h) + self.k(h))",
    "an alias": f"g = h\ng.mul_(2)\n{READING}",
    "an attribute": f"self.kept = h\n{READING}",
    "a lambda": f"(lambda: h.mul_(2))()\n{READING}",
    "a nested function": f"def change():\n    h.mul_(2)\nchange()\n{READING}",
    "a list": f"[one.mul_(2) for one in [h]]\n{READING}",
    "the result": "return self.o(self.q(h)) + h",
    "two results": "return torch.stack([self.o(self.q(h)), h]).sum(0)",
    "locals": f"locals()['h'].mul_(2)\n{READING}",
    "eval": f"eval('h').mul_(2)\n{READING}",
    "no layer": "return h",
    "a condition": f"if h.abs().max() > 1:\n    h = h / 2\n{READING}",
    "a kept argument": f"self.kept = [h]\n{READING}",
    "an operator in place": f"h *= 2\n{READING}",
    "a sum in place": f"h += h.shape[0]\n{READING}",
    "an operator in place behind the first": "q = self.q(h)\nh *= 2\nreturn self.o(q + self.k(h))",
}  # fmt: skip

DECORATORS = {
    f"{decorator} of the {place}": {name: f"@{decorator}"}
    for decorator in ("doubling", "doubling_the_argument")
    for place, name in (("owner", "decorator"), ("reader", "decorator_of_reader"))
}

CALLING = f"other and other()\n{READING}"

CLOSURES = {
    "a lambda that sees the name": {
        "owning": "change = lambda: y.mul_(2)\ny = self.norm(x)\ny = self.reader(y, change)\nreturn y",
        "reading": CALLING,
    },
    "a function that sees the name": {
        "owning": "def change():\n    y.mul_(2)\ny = self.norm(x)\ny = self.reader(y, change)\nreturn y",
        "reading": CALLING,
    },
    "a global name": {
        "owning": "global y\ny = self.norm(x)\ny = self.reader(y)\nreturn y",
        "reading": f"y.mul_(2)\n{READING}",
    },
    "an exception": {
        "owning": """
            try:
                y = self.norm(x)
                y = self.reader(y, 1 / 0)
            except ZeroDivisionError:
                y.mul_(2)
                y = self.reader(y)
            return y
        """
    },
}


@pytest.mark.parametrize("code", CLOSURES.values(), ids=CLOSURES)
def test_results_are_right_where_a_name_has_other_readers(code):
    assert is_right(converted(**code))


@pytest.mark.parametrize("call", ["reader", "reader.q"])
@pytest.mark.parametrize("reader", ["", "Llama"])
def test_results_are_right_where_other_code_calls_the_norm_and_its_reader(reader, call):
    model = converted(reader=reader)
    owner = model[0]
    layer = owner.get_submodule(call if not reader else "reader")
    x = torch.randn(5, HIDDEN).bfloat16()

    def step(x: torch.Tensor) -> torch.Tensor:
        y = owner.norm(x)
        y.mul_(2)
        z: torch.Tensor = layer(y)
        return z

    owner.forward = step
    with torch.no_grad():
        y = model(x)
        assert torch.equal(y, without_handovers(model, x))
        owner.forward = lambda x: None
        del owner.forward
        assert torch.equal(step(x), y)


def test_a_norm_keeps_nothing_that_a_reader_does_not_take():
    model = converted(reading="q = self.q(h)\nif other:\n    q = q + self.k(h)\nreturn self.o(q)")
    with torch.no_grad():
        model(torch.randn(5, HIDDEN).bfloat16())
    state = model[0].norm._stoneware
    assert state.handover is None or state.handover.result is None


BREAKS = {
    **{f"owner: {name}": {"owning": code} for name, code in OWNERS.items()},
    **{f"reader: {name}": {"reading": code} for name, code in READERS.items()},
    **DECORATORS,
}


@pytest.mark.parametrize("code", BREAKS.values(), ids=BREAKS)
def test_a_norm_gives_its_result_alone_where_something_comes_between(code):
    model = converted(**code)
    assert isinstance(model[0].norm, FusedBlock)
    assert not has_handover(model)
    x = torch.randn(5, HIDDEN).bfloat16()
    with torch.no_grad():
        model(x)


def double_in_place(module: torch.nn.Module, args: Any, y: torch.Tensor | None = None) -> None:
    """A hook of either kind."""
    (args[0] if y is None else y).mul_(2)


@pytest.mark.parametrize("name", ["norm", "reader", "reader.q", "reader.k"])
@pytest.mark.parametrize("add", ["register_forward_hook", "register_forward_pre_hook"])
def test_results_are_right_where_a_hook_changes_them(add, name):
    names = types_of(Reader=Form(READER, READING, signature="self, h"), Owner=Form(OWNER, OWNING))
    model = torch.nn.Sequential(names["Owner"]()).bfloat16()
    getattr(model[0].get_submodule(name), add)(double_in_place)
    nn.convert(model, "rowwise", frozen=True)
    assert is_right(model)


def with_a_later_hook(model: Any) -> None:
    model[0].norm.register_forward_hook(double_in_place)


def with_a_later_pre_hook(model: Any) -> None:
    model[0].reader.register_forward_pre_hook(double_in_place)


def with_a_later_hook_with_keywords(model: Any) -> None:
    def change(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        args[0].mul_(2)

    model[0].reader.register_forward_pre_hook(change, with_kwargs=True)


def with_a_later_pre_hook_of_a_layer(model: Any) -> None:
    model[0].reader.q.register_forward_pre_hook(double_in_place)


def with_another_reader(model: Any) -> None:
    reader = types_of(Reader=Form(READER, READERS["a method in place"], signature="self, h"))["Reader"]()
    model[0].reader = reader.bfloat16()


def with_another_layer(model: Any) -> None:
    class Layer(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.mul_(2))

    model[0].reader.q = Layer(HIDDEN, HIDDEN, bias=False).bfloat16()


def with_another_norm(model: Any) -> None:
    model[0].norm = torch.nn.RMSNorm(HIDDEN, eps=0.1).bfloat16()


def with_a_later_forward_of_the_reader(model: Any) -> None:
    reader = model[0].reader
    reader.forward = lambda h: type(reader).forward(reader, h.mul_(2))


def with_a_later_forward_of_the_class(model: Any) -> None:
    kind = type(model[0].reader)
    forward = kind.forward
    kind.forward = lambda self, h: forward(self, h.mul_(2))


def with_a_later_forward_of_the_owner(model: Any) -> None:
    owner = model[0]
    owner.forward = lambda x: owner.reader(owner.norm(x).mul_(2))


def with_a_later_forward_of_the_class_of_the_owner(model: Any) -> None:
    type(model[0]).forward = lambda self, x: self.reader(self.norm(x).mul_(2))


def with_a_later_epsilon(model: Any) -> None:
    model[0].norm.eps = 1.0


def with_later_weights(model: Any) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


def with_an_autocast_block(model: Any) -> None:
    forward = model[0].forward
    model[0].forward = lambda x: torch.autocast("cpu", torch.bfloat16)(forward)(x)


LATER = [value for name, value in sorted(globals().items()) if name.startswith("with_a") and "later" in name]
LATER += [with_another_reader, with_another_layer, with_another_norm, with_later_weights, with_an_autocast_block]


@pytest.mark.parametrize("change", LATER)
def test_results_stay_right_after_a_later_change(change):
    model = converted()
    change(model)
    assert is_right(model)


@pytest.mark.parametrize("code", ROUTES.values(), ids=ROUTES)
def test_a_copy_computes_the_same(code):
    model = converted(**code)
    x = torch.randn(5, HIDDEN).bfloat16()
    with torch.no_grad():
        y = model(x)
        twin = copy.deepcopy(model)
        assert has_handover(twin) and torch.equal(twin(x), y) and is_right(twin)
        del twin[0].reader, twin[0].norm
        assert torch.equal(model(x), y)


@pytest.mark.parametrize("change", LATER)
def test_results_of_a_copy_stay_right_after_a_later_change(change):
    model = copy.deepcopy(converted())
    change(model)
    assert is_right(model)


@pytest.mark.parametrize("copied", [False, True])
def test_results_are_right_under_later_global_hooks(copied):
    model = converted()
    model = copy.deepcopy(model) if copied else model
    reader = model[0].reader

    def change(module: torch.nn.Module, args: Any) -> None:
        if module is reader:
            args[0].mul_(2)

    handle = torch.nn.modules.module.register_module_forward_pre_hook(change)
    try:
        assert is_right(model)
    finally:
        handle.remove()


@pytest.mark.parametrize(("reader", "name"), [("Llama", "reader"), ("Phi", "reader"), ("", "reader.q"), ("", "norm")])
def test_a_copy_of_a_part_computes_the_same(reader, name):
    part = converted(reader=reader)[0].get_submodule(name)
    x = torch.randn(5, HIDDEN).bfloat16()
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(part)(x), part(x))


class PickledRMSNorm(torch.nn.RMSNorm):
    """Whose class pickle finds."""


class PickledMLP(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(HIDDEN, WIDTH, bias=False)
        self.up_proj = torch.nn.Linear(HIDDEN, WIDTH, bias=False)
        self.down_proj = torch.nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class PickledOwner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = PickledRMSNorm(HIDDEN, eps=1e-5), PickledMLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.mlp(self.norm(x))
        return y


def test_a_model_goes_through_torch_save():
    model = torch.nn.Sequential(PickledOwner()).bfloat16()
    nn.convert(model, "rowwise", frozen=True)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    x = torch.randn(5, HIDDEN).bfloat16()
    with torch.no_grad():
        assert has_handover(twin) and torch.equal(twin(x), model(x)) and is_right(twin)


@pytest.mark.parametrize("reader", ["", "Llama", "Phi"])
def test_threads_do_not_take_the_results_of_others(reader):
    model = converted(reader=reader)
    xs = [torch.randn(5, HIDDEN).bfloat16() for _ in range(4)]
    wrong = []

    def work(x: torch.Tensor, y: torch.Tensor) -> None:
        with torch.no_grad():
            wrong.extend([x for _ in range(50) if not torch.equal(model(x), y)])

    with torch.no_grad():
        ys = [without_handovers(model, x) for x in xs]
    threads = [threading.Thread(target=work, args=pair) for pair in zip(xs, ys)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# A conversion that fails.


def snapshot(model: torch.nn.Module) -> Any:
    """Classes, attributes and tensors of a model, by identity, and the bits of its tensors."""
    places = []
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            items = [*value.items()] if isinstance(value, dict) else []
            places += [(name, type(module), attribute, [(key, id(item)) for key, item in items] or id(value))]
    return places, {name: tensor.view(torch.uint8).clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, torch.OutOfMemoryError])
@pytest.mark.parametrize("num_calls", range(1, 8))
def test_an_exception_leaves_the_model_as_it_was(error, num_calls, monkeypatch):
    names = types_of(Reader=FEED_FORWARDS["Llama"], Owner=Form(OWNER, OWNING))
    model = torch.nn.Sequential(names["Owner"](), names["Reader"]()).bfloat16().train()
    places, bits = snapshot(model)
    calls = itertools.count(1)
    quantize = inference.quantize

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) >= num_calls:
            raise error
        return quantize(*args, **kwargs)

    monkeypatch.setattr(inference, "quantize", failing)
    with pytest.raises(error):
        nn.convert(model, "rowwise", frozen=True)
    found = snapshot(model)
    assert found[0] == places
    assert all(torch.equal(bits[name], tensor) for name, tensor in found[1].items())


def test_an_interrupt_in_the_code_of_a_block_leaves_the_model_as_it_was():
    module = module_of(FEED_FORWARDS["Llama"].with_operation("gate", "raise KeyboardInterrupt"))
    model = torch.nn.Sequential(module).bfloat16().train()
    places, _ = snapshot(model)
    with pytest.raises(KeyboardInterrupt):
        nn.convert(model, "rowwise", frozen=True)
    assert snapshot(model)[0] == places


# Models of which a part is unusual.


class Wrapper(torch.nn.Module):
    """Calls a linear layer by a function."""

    def __init__(self, call: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.call(self.linear, x) if self.call else self.linear(input=x)
        return y


class LocalName(Wrapper):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.linear
        return torch.nn.functional.linear(x, layer.weight, layer.bias)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "model",
    [
        lambda: Wrapper(lambda layer, x: layer(input=x)),
        lambda: Wrapper(lambda layer, x: torch.nn.functional.linear(x, layer.weight, layer.bias)),
        LocalName,
    ],
    ids=["a keyword", "a function that reads the weight", "a local name"],
)
def test_layers_are_called_like_those_of_torch(model, frozen):
    model = torch.nn.Sequential(model()).bfloat16()
    nn.convert(model, "rowwise", frozen=frozen)
    if frozen and model[0].call and "weight" in model[0].call.__code__.co_names:
        # No method of a class of the model reads the weight, so nothing shows that it must stay in 16 bits.
        with pytest.raises(RuntimeError, match="dtype"):
            model(torch.randn(16, HIDDEN).bfloat16())
        return
    assert model(torch.randn(16, HIDDEN).bfloat16()).shape == (16, HIDDEN)


def feed_forward() -> Any:
    return torch.nn.Sequential(module_of(FEED_FORWARDS["Llama"])).bfloat16().requires_grad_(False)


def with_a_lazy_layer(model: Any) -> None:
    model.append(torch.nn.LazyLinear(HIDDEN))


def with_a_sparse_buffer(model: Any) -> None:
    model.register_buffer("mask", torch.eye(3).to_sparse())


def with_a_scripted_layer(model: Any) -> None:
    model.append(torch.jit.script(torch.nn.SiLU()))


@pytest.mark.parametrize("change", [with_a_lazy_layer, with_a_sparse_buffer, with_a_scripted_layer])
def test_unusual_parts_do_not_stop_a_conversion(change):
    model = feed_forward()
    change(model)
    assert nn.convert(model, "rowwise", frozen=True).blocks == {"0": "SwiGLU"}


def test_a_model_is_converted_moved_and_loaded_under_autocast():
    model = feed_forward()
    with torch.autocast("cpu", torch.bfloat16):
        assert nn.convert(model, "rowwise", frozen=True).blocks
        model.to("cpu").load_state_dict(model.state_dict())
        model(torch.randn(5, HIDDEN).bfloat16())


def test_a_class_that_registers_its_subclasses_does_not_see_that_of_a_block():
    registered = []

    class Registered(PickledMLP):
        def __init_subclass__(cls, *, name: str) -> None:
            registered.append(name)

    class Block(Registered, name="block"):
        pass

    model = torch.nn.Sequential(Block()).bfloat16()
    assert nn.convert(model, "rowwise", frozen=True).blocks
    assert registered == ["block"]


def test_attributes_of_the_same_names_are_given_back():
    model = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), PickledRMSNorm(HIDDEN, eps=1e-5)).bfloat16()
    names = ("recipe", "compute_dtype", "handover", "fuse_wgrad_accumulation", "_stoneware")
    for module in model:
        for name in names:
            setattr(module, name, "mine")
    nn.convert(model, "rowwise", frozen=True).undo()
    assert [[getattr(module, name) for name in names] for module in model] == [["mine"] * len(names)] * 2


def test_functional_call_leaves_the_tensors_it_is_given():
    model = feed_forward()
    nn.convert(model, "rowwise", frozen=True)
    tensors = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    x = torch.randn(5, HIDDEN).bfloat16()
    y = model(x)
    assert torch.equal(torch.func.functional_call(model, tensors, (x,)), y)
    assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == addresses
    assert torch.equal(model(x), y)


def test_a_replica_of_data_parallel_computes_the_same():
    model = torch.nn.Sequential(PickledOwner()).bfloat16().requires_grad_(False)
    nn.convert(model, "rowwise", frozen=True)

    def replica(module: Any) -> Any:
        new = module._replicate_for_data_parallel()
        for name, parameter in module._parameters.items():
            if parameter is None:
                new._parameters[name] = None
            else:
                setattr(new, name, parameter.detach())
        for name, child in module._modules.items():
            new._modules[name] = replica(child)
        return new

    x = torch.randn(5, HIDDEN).bfloat16()
    y = model(x)
    assert near(replica(model)(x), y)
    assert torch.equal(model(x), y)


def test_a_model_is_exported():
    model = torch.nn.Sequential(PickledOwner()).bfloat16().requires_grad_(False)
    nn.convert(model, "rowwise", frozen=True)
    x = torch.randn(5, HIDDEN).bfloat16()
    assert near(torch.export.export(model, (x,)).module()(x), model(x))


def test_a_forward_of_its_own_below_a_hook_that_replaces_it_is_kept():
    """Like the hooks of accelerate, which keep what they replace."""
    layer = torch.nn.Linear(HIDDEN, HIDDEN)
    forward = layer.forward
    layer.forward = lambda x: 3 * forward(x)
    layer._hf_hook, layer._old_forward = object(), layer.forward
    layer.forward = lambda x: layer._old_forward(x)
    model = torch.nn.Sequential(layer).bfloat16()
    x = torch.randn(5, HIDDEN).bfloat16()
    y = model(x)
    nn.convert(model, "rowwise", frozen=True)
    assert (model(x) - y).norm() < 0.1 * y.norm()
