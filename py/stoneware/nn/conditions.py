"""What must hold of modules so that one kernel may stand for their calls, checked without Python."""

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
    """The native function that returns whether all of this holds; without the native module it never does.

    Args:
      items: (dict, key, value): what a dict has; None for a key that it lacks.
      attributes: (owner, name, value): what an object or a class has.
      submodules: (module, name, submodule): what a module has under a name.
      forwards: (module, class, function): a module's class and that class's forward, with none of the module's own.
      hooks: (module, name of HOOKS): hooks that a module must not have. With any of them, global hooks are refused.
      memory: (tensor, address): where a tensor begins.
    """
    of_classes = [*attributes]
    kinds: list[tuple[Any, Any]] = []
    every = [*items]
    empty: list[Any] = []
    for module, name, submodule in submodules:
        every += _own(module, "_modules")
        every.append((vars(module)["_modules"], name, submodule))
    for module, kind, forward in forwards:
        kinds.append((module, kind))
        of_classes.append((kind, "forward", forward))
        every.append((vars(module), "forward", None))
    for module, name in hooks:
        every += _own(module, name)
        empty.append(vars(module)[name])
    if empty:
        empty += [getattr(torch_module, f"_global{name}") for name in HOOKS]
    try:
        guard = native.load(CALL_MODULE).Guard
    except UnsupportedError:
        return lambda: False
    holds: Callable[[], bool] = guard(
        items=every, empty=empty, kinds=kinds, attributes=of_classes, addresses=[*memory]
    ).holds
    return holds


def _own(module: torch.nn.Module, name: str) -> Sequence[tuple[dict[str, Any], str, Any]]:
    """That the module still has this very dict."""
    return [(vars(module), name, vars(module)[name])]
