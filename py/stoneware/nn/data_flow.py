"""Follows tensors between the modules of a model, in the source of their classes.

reader     the only layers that read the result of a norm
siblings   the layers that read the same argument
foreign    the layers whose weight other code reads
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

_SIZES = frozenset({"shape", "dtype", "device", "ndim", "is_cuda", "size", "dim"})
"""Attributes of a tensor that neither read nor change its elements, and do not return the tensor."""

_NOT_AT_RUN_TIME = frozenset({"__init__", "_init_weights", "init_weights", "reset_parameters", "_reset_parameters"})
"""Methods that run before a model is converted."""


@dataclass(frozen=True, kw_only=True)
class Reader:
    """The module that gets the result of a norm, and its layers that read it.

    Attributes:
      name: name of the module in the norm's owner.
      layers: names of its layers, each called once with the result; empty if the module itself reads it.
    """

    name: str
    layers: tuple[str, ...]


def reader(owner: torch.nn.Module, norm: str, is_reader: Callable[[torch.nn.Module], bool]) -> Reader | None:
    """The only module that gets the result of a norm, if nothing can change the result before it is read.

    The code of `owner.forward` must have one of these forms, where `norm` has no other use:

        y = self.norm(x)                    self.module(self.norm(x), ...)
        y = self.module(y, ...)

    Either the module reads its argument itself (`is_reader`), or its forward passes the argument to layers that do,
    and otherwise reads only its shape, dtype or device.

    Args:
      owner: the module that has the norm.
      norm: its name there.
      is_reader: whether a module reads its argument, and neither changes nor keeps it.
    """
    definition = _forward(owner)
    if definition is None:
        return None
    calls = [node for node in ast.walk(definition) if _is_own(node, definition, norm)]
    if len(calls) != 1:
        return None
    destination = _destination(definition, norm)
    if destination is None:
        return None
    name, position = destination
    module = owner._modules.get(name)
    if module is None or type(module).__call__ is not torch.nn.Module.__call__:
        return None
    if is_reader(module):
        return Reader(name=name, layers=()) if position in (0, _parameters(module)[:1]) else None
    layers = _reading_layers(module, position)
    if not layers or not all(is_reader(module.get_submodule(layer)) for layer in layers):
        return None
    return Reader(name=name, layers=layers)


def siblings(module: torch.nn.Module, is_layer: Callable[[torch.nn.Module], bool]) -> tuple[str, ...] | None:
    """The layers of a module that forward calls with one of its arguments, each once, if there are several and forward
    otherwise reads only the argument's shape, dtype or device, and assigns nothing to it. A call of forward calls all
    of them or none.

    Args:
      module: the module.
      is_layer: whether a submodule may be one of them.
    """
    definition = _forward(module)
    if definition is None:
        return None
    assigned = {
        node.id for node in ast.walk(definition) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }
    for name in _parameters(module):
        layers = None if name in assigned else _reading_layers(module, [name])
        if layers is None or len(layers) < 2 or not _are_called_together(definition, layers):
            continue
        if all(is_layer(module.get_submodule(layer)) for layer in layers):
            return layers
    return None


def _are_called_together(definition: ast.FunctionDef, layers: tuple[str, ...]) -> bool:
    """Whether no condition, loop or early return comes between the calls of layers."""
    places: dict[str | None, int] = {}
    for idx, statement in enumerate(definition.body):
        if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)):
            called = {_own_call(node, definition) for node in _always_evaluated(statement)}
            places |= dict.fromkeys(called.intersection(layers), idx)
    if len(places) < len(layers):
        return False
    between = definition.body[min(places.values()) : max(places.values())]
    return not any(isinstance(node, ast.Return) for statement in between for node in ast.walk(statement))


def _always_evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """A node and those below it, without the parts of expressions that may not be evaluated, or more than once."""
    yield node
    children = ast.iter_child_nodes(node)
    if isinstance(node, (ast.IfExp, ast.BoolOp, ast.Lambda)):
        return
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        children = iter([node.generators[0].iter])
    for child in children:
        yield from _always_evaluated(child)


def _destination(definition: ast.FunctionDef, norm: str) -> tuple[str, Any] | None:
    """The module that gets the norm's result: its name, and the position or [name] of the argument."""
    for block in _blocks(definition):
        for idx, statement in enumerate(block):
            for call in ast.walk(statement):
                name = _own_call(call, definition)
                if name is None or not isinstance(call, ast.Call):
                    continue
                for position, value in _arguments(call):
                    if _own_call(value, definition) == norm:
                        return name, position
            if idx + 1 == len(block) or not isinstance(statement, ast.Assign):
                continue
            (target, *more_targets), successor = statement.targets, block[idx + 1]
            if more_targets or not isinstance(target, ast.Name) or _own_call(statement.value, definition) != norm:
                continue
            if not _is_plain(definition, target.id):
                return None
            if not isinstance(successor, ast.Assign) or target.id not in _targets(successor):
                continue  # the result would have later uses
            name = _own_call(successor.value, definition)
            loads = [node for node in ast.walk(successor) if _is_load(node, target.id)]
            if name is None or len(loads) != 1:
                continue
            assert isinstance(successor.value, ast.Call)
            for position, value in _arguments(successor.value):
                if value is loads[0]:
                    return name, position
    return None


def _reading_layers(module: torch.nn.Module, position: Any) -> tuple[str, ...] | None:
    """The layers that forward calls with the argument; None if it uses the argument in any other way."""
    definition = _forward(module)
    if definition is None:
        return None
    parameters = _parameters(module)
    if isinstance(position, int):
        if position >= len(parameters):
            return None
        position = [parameters[position]]
    (name,) = position
    if name not in parameters:
        return None
    if not _is_plain(definition, name):
        return None
    layers: list[str] = []
    allowed = set()
    for node in ast.walk(definition):
        if isinstance(node, ast.Attribute) and _is_load(node.value, name) and node.attr in _SIZES:
            allowed.add(id(node.value))
        layer = _own_call(node, definition)
        if layer is None or not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
            continue
        if _is_load(node.args[0], name) and (layer in module._modules or not hasattr(module, layer)):
            layers += [layer] * (layer in module._modules)  # a layer that only other configs have is never called
            allowed.add(id(node.args[0]))
    loads = [node for node in ast.walk(definition) if isinstance(node, ast.Name) and node.id == name]
    if any(id(node) not in allowed and isinstance(node.ctx, ast.Load) for node in loads):
        return None
    return tuple(layers) if len({*layers}) == len(layers) else None


def _is_plain(definition: ast.FunctionDef, name: str) -> bool:
    """Whether a function uses a name only in plain loads and assignments."""
    for node in ast.walk(definition):
        if isinstance(node, ast.Name) and node.id in ("locals", "vars", "eval", "exec"):
            return False
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            return False
        if isinstance(node, (ast.Global, ast.Nonlocal, ast.Try)):
            return False
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and node is not definition
        if is_function and any(isinstance(inner, ast.Name) and inner.id == name for inner in ast.walk(node)):
            return False
    return True


def _forward(module: torch.nn.Module) -> ast.FunctionDef | None:
    """The code of a module's forward, below decorators of transformers and torch, which rename arguments."""
    function = type(module).forward
    if "forward" in vars(module):
        return None
    while hasattr(function, "__wrapped__"):
        package = function.__globals__["__name__"].partition(".")[0]
        if package not in ("transformers", "torch"):
            return None
        function = function.__wrapped__
    return _definition(function)


def function_definition(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """The syntax tree of a function; None without its source."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return definition if isinstance(definition, ast.FunctionDef) else None


_definition = functools.lru_cache(maxsize=1024)(function_definition)


def _parameters(module: torch.nn.Module) -> list[str]:
    """The names of the positional arguments of forward."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    _, *parameters = inspect.signature(inspect.unwrap(type(module).forward)).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _blocks(definition: ast.FunctionDef) -> Iterator[list[ast.stmt]]:
    """Lists of statements that run one after the other."""
    for node in ast.walk(definition):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield block


def _self(definition: ast.FunctionDef) -> str:
    return definition.args.args[0].arg if definition.args.args else ""


def _is_own(node: ast.AST, definition: ast.FunctionDef, name: str) -> bool:
    """Whether it is self.name."""
    if not isinstance(node, ast.Attribute) or node.attr != name:
        return False
    return isinstance(node.value, ast.Name) and node.value.id == _self(definition)


def _own_call(node: ast.AST | None, definition: ast.FunctionDef) -> str | None:
    """The name in self.name(...)."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    return node.func.attr if _is_own(node.func, definition, node.func.attr) else None


def _arguments(call: ast.Call) -> Iterator[tuple[Any, ast.expr]]:
    """Position, or [name], and value of each argument."""
    for position, value in enumerate(call.args):
        if isinstance(value, ast.Starred):
            return
        yield position, value
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield [keyword.arg], keyword.value


def _is_load(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)


def _targets(statement: ast.Assign) -> set[str]:
    names = set()
    for target in statement.targets:
        elements = target.elts if isinstance(target, ast.Tuple) else [target]
        names |= {element.id for element in elements if isinstance(element, ast.Name)}
    return names


def foreign(model: torch.nn.Module) -> dict[int, str]:
    """id of each torch.nn.Linear whose weight or bias other code reads -> the class that does.

    Searches the methods of the model's classes for `self.name.weight` and `anything.name.weight`; the latter counts
    for each layer of that name below the module. Reading the shape or the device is allowed.
    """
    readers: dict[int, str] = {}
    for module in model.modules():
        for kind in type(module).__mro__:
            if kind.__module__.partition(".")[0] == "torch" or kind is object:
                continue
            for chain in _weights_read(kind):
                for layer in _layers(module, chain):
                    readers.setdefault(id(layer), kind.__name__)
    return readers


@functools.lru_cache(maxsize=4096)
def _weights_read(kind: type) -> frozenset[tuple[str, ...]]:
    """The names that lead to the layer, self first, for each read of a weight in the methods of a class."""
    chains = set()
    for name, function in vars(kind).items():
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        if name in _NOT_AT_RUN_TIME or not inspect.isfunction(function):
            continue
        definition = _definition(function)
        if definition is None:
            continue
        aliases = _aliases(definition)
        attributes = [node for node in ast.walk(definition) if isinstance(node, ast.Attribute)]
        harmless = {id(node.value) for node in attributes if node.attr in _HARMLESS}
        for node in attributes:
            if node.attr not in ("weight", "bias") or id(node) in harmless or not isinstance(node.ctx, ast.Load):
                continue
            chain = _chain(node.value)
            chain = (*aliases.get(chain[0], chain[:1]), *chain[1:])
            if len(chain) > 1:
                chains.add(("self", *chain[1:]) if chain[0] == _self(definition) else ("", chain[-1]))
    return frozenset(chains)


def _aliases(definition: ast.FunctionDef) -> dict[str, tuple[str, ...]]:
    """Local names of a module's attributes: layer = self.layer, or for layer in self.layers."""
    aliases = {}
    for node in ast.walk(definition):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            aliases[node.targets[0].id] = _chain(node.value)
        elif isinstance(node, (ast.For, ast.comprehension)) and isinstance(node.target, ast.Name):
            aliases[node.target.id] = (*_chain(node.iter), "*")
    return {name: chain for name, chain in aliases.items() if chain[0] == _self(definition)}


_HARMLESS = _SIZES - {"dtype"}
"""Attributes of a weight that other code may read; not its dtype, which freezing changes."""


def _chain(node: ast.expr) -> tuple[str, ...]:
    """The names in a.b[i].c; "*" for an index, "" for any other expression."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        return (*_chain(node.value), node.attr)
    if isinstance(node, ast.Subscript):
        return (*_chain(node.value), "*")
    return ("",)


def _layers(module: torch.nn.Module, chain: tuple[str, ...]) -> Iterator[torch.nn.Linear]:
    root, *names = chain
    places = [module]
    if root != "self":
        places, names = [*module.modules()], names[-1:]
    for name in names:
        places = [
            child
            for place in places
            for child_name, child in place._modules.items()
            if child is not None and name in ("*", child_name)
        ]
    for place in places:
        if isinstance(place, torch.nn.Linear):
            yield place
