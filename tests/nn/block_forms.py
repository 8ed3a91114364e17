"""Modules that are generated from source: feed-forwards and norms, and models that own and read a norm."""

from __future__ import annotations

import itertools
import linecache
import re
import textwrap
from typing import Any, NamedTuple

import torch

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


def module_of(form: Form) -> Any:
    """A module of a generated class, with small weights, for which activations look alike."""
    name = "BlockRMSNorm" if form.base.endswith("RMSNorm") or "self.weight" in form.body else "Block"
    module = types_of(**{name: form})[name]()
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear):
            torch.nn.init.normal_(layer.weight, std=0.001)
    return module


def near(y: torch.Tensor, reference: torch.Tensor) -> bool:
    """Whether they differ by what fp8 activations and 16-bit results may differ by if roundings fall elsewhere."""
    return y.dtype == reference.dtype and bool((y - reference).float().norm() <= 0.01 * reference.float().norm())


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
