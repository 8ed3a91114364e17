"""Hands the fp8 result of a norm to the layers that read it.

One kernel writes the result in 16 bits and in fp8. The layers use the fp8 result if they are called with the same
tensor object that the norm returned. Nothing is stored on a tensor, or beyond a call of the module that has the norm.
A handover exists only if the code of that module proves that nothing comes between the norm and its readers
(`stoneware.nn.data_flow`). A norm uses it only while these modules are unchanged, without hooks that could change the
result.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stoneware.nn import conditions


class Handover:
    """The fp8 results of a module's norms during one of its calls.

    Attributes:
      thread: where the call runs; None outside of calls. If two threads call the module at once, only the call that
        started last hands over.
      result: (y, its values in fp8, their scales by row) of the norm that ran last.
    """

    def __init__(self) -> None:
        self.thread: int | None = None
        self.result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def take(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(values, scale) if x is the tensor that the norm returned, otherwise ()."""
        result = self.result  # read once: another thread may write its own
        return () if result is None or result[0] is not x else result[1:]

    def __getstate__(self) -> dict[str, Any]:
        """The state of a running call is not pickled."""
        return {"thread": None, "result": None}


class Route:
    """The modules between a norm and its readers at the time of the proof.

    Args:
      owner: the module whose forward calls the norm.
      places: (module, name of a submodule) for the norm, for the module that gets its result, and for its readers.
    """

    def __init__(self, owner: torch.nn.Module, places: Sequence[tuple[torch.nn.Module, str]]) -> None:
        self.owner = owner
        self.places = [(place, name, place.get_submodule(name)) for place, name in places]
        self._forwards: list[Any] | None = [type(module).forward for module in self._modules]

    @property
    def _modules(self) -> list[torch.nn.Module]:
        return [self.owner, *(module for *_, module in self.places)]

    @functools.cached_property
    def is_open(self) -> Callable[[], bool]:
        """is_open() returns whether the modules are unchanged, and no hook reads the result."""
        modules = self._modules
        if self._forwards is None:  # a pickle has no functions
            self._forwards = [type(module).forward for module in modules]
        # The owner's hooks and the norm's pre-hooks do not see the result. A hook of the module that gets it runs
        # before its forward, or when its readers have read.
        _, norm, reader, *layers = modules
        hooks = [(norm, "_forward_hooks"), (reader, "_forward_pre_hooks")]
        hooks += [(module, name) for module in layers or [reader] for name in ("_forward_pre_hooks", "_forward_hooks")]
        return conditions.check(
            submodules=self.places, forwards=[*zip(modules, map(type, modules), self._forwards)], hooks=hooks
        )

    def __getstate__(self) -> dict[str, Any]:
        own = {**vars(self), "_forwards": None}
        own.pop("is_open", None)
        return own

    def __deepcopy__(self, memo: dict[int, Any]) -> Route | None:
        """The route in a copy of the owner; a norm copied without its owner has none."""
        if id(self.owner) not in memo:
            return None
        new = memo[id(self)] = Route.__new__(Route)
        own = {name: value for name, value in vars(self).items() if name != "is_open"}
        vars(new).update(copy.deepcopy(own, memo))
        return new
