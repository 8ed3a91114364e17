"""Conditions under which one kernel may replace the calls of modules, checked without Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from stoneware.errors import UnsupportedError
from stoneware.runtime import native
from stoneware.runtime.native import CALL_MODULE

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Kinds of hooks of a module; torch has global hooks of the same kinds."""


def check(
    *,
    items: Iterable[tuple[dict[str, Any], str, Any]] = (),
    attributes: Iterable[tuple[Any, str, Any]] = (),
    submodules: Iterable[tuple[torch.nn.Module, str, torch.nn.Module | None]] = (),
    forwards: Iterable[tuple[torch.nn.Module, type, Any]] = (),
    hooks: Iterable[tuple[torch.nn.Module, str]] = (),
    memory: Iterable[tuple[torch.Tensor, int]] = (),
) -> Callable[[], bool]:
    """A native function that returns whether all conditions hold. Without the native module they never do.

    Args:
      items: (dict, key, value): the value in a dict; None means that the key is missing.
      attributes: (owner, name, value): the attribute of an object or a class.
      submodules: (module, name, submodule): the submodule of a module.
      forwards: (module, class, function): a module's class and the forward of that class; the module has none itself.
      hooks: (module, name of HOOKS): hooks that a module must not have. With any of them, global hooks are refused.
      memory: (tensor, address): the address of a tensor.
    """
    class_attributes = [*attributes]
    kinds: list[tuple[Any, Any]] = []
    dict_items = [*items]
    empty: list[Any] = []
    for module, name, submodule in submodules:
        dict_items += _own(module, "_modules")
        dict_items.append((vars(module)["_modules"], name, submodule))
    for module, kind, forward in forwards:
        kinds.append((module, kind))
        class_attributes.append((kind, "forward", forward))
        dict_items.append((vars(module), "forward", None))
    for module, name in hooks:
        dict_items += _own(module, name)
        empty.append(vars(module)[name])
    if empty:
        empty += [getattr(torch_module, f"_global{name}") for name in HOOKS]
    try:
        guard = native.load(CALL_MODULE).Guard
    except UnsupportedError:
        return lambda: False
    holds: Callable[[], bool] = guard(
        items=dict_items, empty=empty, kinds=kinds, attributes=class_attributes, addresses=[*memory]
    ).holds
    return holds


def of_layers(layers: Sequence[Any], others: Sequence[torch.nn.Module] = ()) -> dict[str, list[Any]]:
    """Arguments of `check`: layers that train, and other modules, are as now and have no hooks, and the gradients of
    weights are not added to a buffer."""
    modules = [*layers, *others]
    items = [(vars(layer), "_parameters", layer._parameters) for layer in layers]
    items += [(vars(layer), "recipe", vars(layer).get("recipe")) for layer in layers]
    items += [(vars(layer), "fuse_wgrad_accumulation", False) for layer in layers]
    return {
        "items": items,
        "forwards": [(module, type(module), type(module).forward) for module in modules],
        "hooks": [(module, name) for module in modules for name in HOOKS],
    }


def _own(module: torch.nn.Module, name: str) -> Sequence[tuple[dict[str, Any], str, Any]]:
    """The condition that the module still has this dict."""
    return [(vars(module), name, vars(module)[name])]
