"""What a norm passes to the layers that read its result, in fp8, and where it passes nothing."""

from __future__ import annotations

import copy
import io
import threading
from typing import Any

import pytest
import torch
from block_forms import FEED_FORWARDS, HIDDEN, OWNER, OWNING, READER, READING, Form, PickledOwner, types_of

from stoneware import nn
from stoneware.nn.fused_blocks import FusedBlock
from stoneware.nn.handover import Handover


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
