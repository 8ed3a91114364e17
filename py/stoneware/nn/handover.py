"""A norm's result in fp8, on its way from the norm to the layers that read it.

One kernel writes the result in 16 bits and in fp8. The layers take the fp8 one if they are called with the very tensor
that the norm returned. Nothing is kept on a tensor, nor beyond a call of the module that has the norm. A handover
exists only where the code of that module proves that nothing comes between the norm and its readers
(`stoneware.nn.data_flow`), and a norm uses it only while these modules are what they were, without hooks that could
change the result.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules import module as torch_module


class Handover:
    """What a norm gave, during a call of its owner."""

    def __init__(self) -> None:
        self._thread: int | None = None
        self._given: list[Any] | None = None

    def open(self) -> None:
        """Begins a call of the owner in this thread. Another thread's call that is not over gives nothing any more."""
        self._thread, self._given = threading.get_ident(), None

    def close(self) -> None:
        """Ends a call of the owner."""
        self._thread = self._given = None

    def is_open(self) -> bool:
        """Whether the owner is called in this thread."""
        return self._thread == threading.get_ident()

    def give(self, y: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> None:
        """Keeps y in fp8, with scales of its rows."""
        self._given = [y, values, scale]

    def take(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(values, scale) if x is what the norm returned, else nothing."""
        given = self._given  # once: another thread may give its own
        return () if given is None or given[0] is not x else (given[1], given[2])

    def __getstate__(self) -> dict[str, Any]:
        """Nothing of a call that is under way."""
        return {"_thread": None, "_given": None}


class Route:
    """The modules between a norm and its readers, as they were when the handover was proved.

    Args:
      owner: the module whose forward calls the norm.
      places: (module, name of a submodule) for the norm, for the module that gets its result, and for its readers.
    """

    def __init__(self, owner: torch.nn.Module, places: Sequence[tuple[torch.nn.Module, str]]) -> None:
        self.owner = owner
        self.places = [(place, name, place.get_submodule(name)) for place, name in places]
        self._modules = [self.owner, *(module for *_, module in self.places)]
        self._forwards: list[Any] | None = [type(one).forward for one in self._modules]
        self._dicts: tuple[Any, ...] | None = None

    def is_open(self) -> bool:
        """Whether the modules are the same, and nothing else sees the result."""
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return False
        hooks, places, classes = self._dicts or self._found_dicts()
        for modules, name, module in places:
            if modules.get(name) is not module:
                return False
        for module, attributes, kind, forward in classes:
            if type(module) is not kind or kind.forward is not forward or "forward" in attributes:
                return False
        return not any(hooks)

    def _found_dicts(self) -> tuple[Any, ...]:
        """What `is_open` reads, in the modules of this route; a copy has others."""
        if self._forwards is None:  # a pickle has no functions
            self._forwards = [type(one).forward for one in self._modules]
        # The owner's hooks and the norm's pre-hooks do not see the result. A hook of the module that gets it runs
        # before its forward, or when its readers have read.
        _, norm, reader, *layers = map(vars, self._modules)
        hooks = [norm["_forward_hooks"], reader["_forward_pre_hooks"]]
        for own in layers or [reader]:
            hooks += [own["_forward_pre_hooks"], own["_forward_hooks"]]
        self._dicts = (
            tuple(hooks),
            tuple((place._modules, name, module) for place, name, module in self.places),
            tuple((one, vars(one), type(one), forward) for one, forward in zip(self._modules, self._forwards)),
        )
        return self._dicts

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_forwards": None, "_dicts": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Route | None:
        """The route of a copy of the owner; a norm that is copied alone has none."""
        if id(self.owner) not in memo:
            return None
        new = memo[id(self)] = Route.__new__(Route)
        vars(new).update(copy.deepcopy({**vars(self), "_dicts": None}, memo))
        return new
