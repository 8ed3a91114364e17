"""Quantizes the weights of a model that FSDP2 gathers in fp8.

Gathering   what the weights of a model share: one collective a step, and one call for those gathered together
Place       a weight among them
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import distributed

from stoneware.nn import steps
from stoneware.nn.recipes import RECIPES, Cast
from stoneware.nn.steps import Steps
from stoneware.quantizing.api import quantize_with_amax

if torch.backends.cuda.is_built():
    from torch._C import _cuda_getCurrentRawStream as _current_stream

_MOST_IN_CALL = 8
"""Weights that one call quantizes: a native call has at most 32 tensors, four for a weight with tensor scales."""

Quantized = tuple[torch.Tensor, torch.Tensor]
"""Values and scales."""

_Where = tuple[Any, torch.dtype, Any]
"""The process group that gathers a weight, the dtype that it is quantized from, and `Gathering._stream`."""


class Weight(Protocol):
    """Rows of a weight on this rank: a tensor that holds another one.

    Attributes: see `stoneware.nn.gathered_weight.ShardedWeight`.
    """

    tensor: torch.Tensor
    recipe: str
    place: Place

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...


class Gathering:
    """What the weights of a model share.

    The host pays for each call, so weights that are gathered one after the other are quantized in one call: with
    the first of them those that followed it the last time.

    Tensor scales need the largest |x| of whole weights, which one collective reduces among the ranks. If a weight has
    changed since, all are reduced again: optimizers change all weights, so this happens once a step, when the model is
    called or, if it is compiled, when the first weight is gathered. A weight is registered when it is first gathered.
    Copies that FSDP2 makes for a gather, with weights on the CPU, are reduced one by one.

    Args:
      num_weights: how many the model has.
    """

    def __init__(self, num_weights: int) -> None:
        self.num_weights = num_weights
        self._registered: dict[int, tuple[weakref.ref[Weight], _Where]] = {}
        self._next: dict[int, int] = {}
        self._last: int | None = None
        self._ahead: dict[int, tuple[tuple[Any, ...], Quantized]] = {}
        self._streams: dict[Any, torch.cuda.Stream] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a model has weights and process groups of its own."""
        return Gathering, (self.num_weights,)

    def quantized(self, weight: Weight, group: Any, dtype: torch.dtype) -> Quantized:
        """The rows of a weight on this rank as they are in this dtype, in fp8, and their scales."""
        # The stream too: on another one the results may not be there yet.
        where, position = (group, dtype, self._stream(weight.device)), weight.place.position
        self._registered[position] = weakref.ref(weight), where
        if self._last is not None:
            self._next[self._last] = position
        self._last = position
        state, ahead = _state(weight, where), self._ahead.pop(position, None)
        if ahead is not None and ahead[0] == (weight.place, *state):
            return ahead[1]
        followers = self._weights(self._followers(position), where)
        weights = [weight, *(follower for follower in followers if _is_alike(follower, weight))]
        result, *results = self._quantize(weights, where)
        for follower, of_follower in zip(weights[1:], results):
            self._ahead[follower.place.position] = (follower.place, *_state(follower, where)), of_follower
        return result

    def reduce_ahead(self, model: torch.nn.Module, arguments: object) -> None:
        """A forward pre-hook of the model: reduces what has changed, while FSDP gathers what comes first."""
        if torch.compiler.is_compiling():
            return
        for where in dict.fromkeys(where for _, where in self._registered.values()):
            weights, stream = self._weights(self._registered, where), self._streams.get(where[2])
            if all(weight.place.state in ((), _state(weight, where)) for weight in weights):
                continue
            if stream is not None:  # what changed the weights may be on the present one
                stream.wait_stream(torch.cuda.current_stream(stream.device))
            with torch.no_grad(), torch.cuda.stream(stream):
                self._reduce(where)

    def end_burst(self) -> None:
        """Says that the gathered weights have arrived: the next one does not follow the last one."""
        self._ahead.clear()
        if self._last is not None:
            self._next.pop(self._last, None)
            self._last = None

    def _stream(self, device: torch.device) -> Any:
        """What stands for the current stream in `_Where`: its object would cost the host ten times as much."""
        if device.type != "cuda":
            return None
        stream = device.index, _current_stream(device.index)
        if stream not in self._streams:
            self._streams[stream] = torch.cuda.current_stream(device)
        return stream

    def _followers(self, position: int) -> list[int]:
        """Those of one call that followed a weight the last time."""
        positions = [position]
        while len(positions) < _MOST_IN_CALL and self._next.get(positions[-1], position) not in positions:
            positions.append(self._next[positions[-1]])
        return positions[1:]

    def _weights(self, positions: Iterable[int], where: _Where) -> list[Weight]:
        """The weights that were last gathered there, and are alive."""
        entries = [self._registered[position] for position in positions]
        return [weight for ref, last in entries if last == where and (weight := ref()) is not None]

    def _quantize(self, weights: Sequence[Weight], where: _Where) -> list[Quantized]:
        rows, dtype, cast = [weight.tensor for weight in weights], where[1], _cast(weights[0])
        if rows[0].dtype != dtype:
            shards, rows = rows, [torch.empty_like(tensor, dtype=dtype) for tensor in rows]
            torch._foreach_copy_(rows, shards)
        if cast.scales == "tensor":
            amaxes = [self._amax(weight, where) for weight in weights]
            results = quantize_with_amax(rows, amaxes, cast.dtype, cast.power_of_two)
            return [(values, weight.place.scale_of(scale)) for weight, (values, scale) in zip(weights, results)]
        tensors = _quantize_each(weights[0].recipe, len(rows))(*rows)
        return [*zip(tensors[::2], tensors[1::2])]

    def _amax(self, weight: Weight, where: _Where) -> torch.Tensor:
        """The largest |x| of the whole weight [1], float32."""
        if weight.place.state != _state(weight, where):
            self._reduce(where)
        return weight.place.amax

    def _reduce(self, where: _Where) -> None:
        group, dtype, _ = where
        weights = [weight for weight in self._weights(self._registered, where) if _cast(weight).scales == "tensor"]
        norms = torch._foreach_norm([weight.tensor for weight in weights], float("inf"))
        # As many numbers on every rank, whatever else differs; without an index that the host would have to copy.
        all_norms = [torch.zeros_like(norms[0])] * self.num_weights
        for weight, norm in zip(weights, norms):
            all_norms[weight.place.position] = norm
        amax = torch.stack(all_norms).to(dtype).float().abs()
        distributed.all_reduce(amax, distributed.ReduceOp.MAX, group)
        for weight in weights:
            place = weight.place
            place.amax = amax[place.position : place.position + 1]
            place.state = _state(weight, where)


class Place:
    """A weight among those of a model, shared by the views of its memory.

    Attributes:
      gathering, position: the arguments.
      mesh, num_ranks, group: the mesh that FSDP2 passed last, its size and its process group.
      num_changes: how often an operator of the weight wrote to it.
      amax, state: what was reduced last, and of which `_state`.
      scale, scaled: the tensor scale, and of which amax.
    """

    num_ranks: int
    group: Any
    amax: torch.Tensor
    scale: torch.Tensor
    scaled: torch.Tensor | None = None
    mesh: Any = None
    state: tuple[Any, ...] = ()

    def __init__(self, gathering: Gathering, position: int) -> None:
        self.gathering, self.position, self.num_changes = gathering, position, 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Place, (self.gathering, self.position)

    def scale_of(self, scale: torch.Tensor) -> torch.Tensor:
        """The scale for the present amax, of which `scale` may be a copy."""
        if self.scaled is not self.amax:
            self.scaled, self.scale = self.amax, scale
        return self.scale


def _state(weight: Weight, where: _Where) -> tuple[Any, ...]:
    """What the numbers of a weight depend on: its changes, process group, dtype and stream."""
    # An inference tensor has no version, so its state equals no other.
    version = object() if weight.tensor.is_inference() else weight.tensor._version
    return weight.place.num_changes, version, *where


def _cast(weight: Weight) -> Cast:
    return RECIPES[weight.recipe].forward[1]


def _is_alike(weight: Weight, other: Weight) -> bool:
    """Whether one call can quantize both."""
    return (weight.recipe, weight.dtype, weight.device) == (other.recipe, other.dtype, other.device)


@functools.cache
def _quantize_each(recipe: str, count: int) -> Callable[..., Sequence[torch.Tensor]]:
    """call(*matrices) -> values and scales of each, as of a weight of this recipe."""
    names = [f"part_{position}" for position in range(count)]
    quantized = [steps.quantize(name, RECIPES[recipe].forward[1]) for name in names]
    results = [output for step in quantized for output in step.outputs]
    several = Steps(tuple(names), tuple(results), (steps.together(*quantized),))
    return steps.native_call(several, lambda *tensors: several.run(*tensors))
