"""A norm's result in fp8, on its way from the norm to the layers that read it.

One kernel writes the result in 16 bits and in fp8. The layers take the fp8 one if they are called with the very tensor
that the norm returned. Nothing is kept on a tensor: a handover exists only where the code of the modules proves that
nothing comes between the norm and its readers (`stoneware.nn.data_flow`), and a norm uses it only while these modules
are what they were, without hooks that could change the result.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules import module as torch_module


class Handover:
    """What a norm gave last, until all of its readers took it."""

    def __init__(self) -> None:
        self._given: list[Any] | None = None

    def give(self, y: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, num_readers: int) -> None:
        """Keeps y in fp8, with scales of its rows, for as many calls of `take`."""
        self._given = [y, values, scale, num_readers]

    def take(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(values, scale) if x is what the norm returned, else nothing."""
        given = self._given  # once: another thread may give its own
        if given is None or given[0] is not x:
            return ()
        given[3] -= 1
        if not given[3]:
            self._given = None
        return given[1], given[2]

    def __getstate__(self) -> None:
        """Nothing: what is on its way belongs to a call."""

    def __setstate__(self, state: None) -> None:
        self._given = None


class Route:
    """The modules between a norm and its readers, as they were when the handover was proved.

    Args:
      owner: the module whose forward calls the norm.
      places: (module, name of a submodule) for the norm, for the module that gets its result, and for its readers.
    """

    def __init__(self, owner: torch.nn.Module, places: Sequence[tuple[torch.nn.Module, str]]) -> None:
        self.owner, self.places = owner, [*places]
        self.num_readers = max(len(places) - 2, 1)
        self._watched: _Watched | None = _Watched(self)

    def is_open(self) -> bool:
        """Whether the modules are the same, and nothing else sees the result."""
        watched = self._watched
        if watched is None:  # in a copy, whose modules are complete by now
            watched = self._watched = _Watched(self)
        if any(watched.hooks):
            return False
        for modules, name, module in watched.places:
            if modules.get(name) is not module:
                return False
        for kind, forward in watched.forwards:
            if kind.forward is not forward:
                return False
        return not any("forward" in own for own in watched.own)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_watched": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Route | None:
        """The route of a copy of the owner; a norm that is copied alone has none."""
        if id(self.owner) not in memo:
            return None
        new = memo[id(self)] = Route.__new__(Route)
        vars(new).update(copy.deepcopy(self.__getstate__(), memo))
        return new


class _Watched:
    """What a call of the modules of a route depends on, as it is now."""

    def __init__(self, route: Route) -> None:
        modules = [place.get_submodule(name) for place, name in route.places]
        norm, reader, *layers = modules
        self.places = [(place._modules, name, module) for (place, name), module in zip(route.places, modules)]
        self.forwards: list[tuple[Any, Any]] = [(type(one), type(one).forward) for one in (route.owner, *modules)]
        self.own = [vars(one) for one in (route.owner, *modules)]
        # A hook of the reader that runs after its forward comes when the result was read.
        self.hooks = (
            norm._forward_hooks, reader._forward_pre_hooks, torch_module._global_forward_hooks,
            torch_module._global_forward_pre_hooks,
            *(hooks for one in layers or [reader] for hooks in (one._forward_pre_hooks, one._forward_hooks)),
        )  # fmt: skip
