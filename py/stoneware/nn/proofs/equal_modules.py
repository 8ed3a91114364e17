"""Proves once what equal modules compute: the blocks of a model differ in their weights alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch

from stoneware.nn.proofs.attribute_reads import is_immutable
from stoneware.nn.proofs.no_proof import NoProof

Result = TypeVar("Result")


class Proofs:
    """The proofs of modules of a model, which must not change meanwhile."""

    def __init__(self) -> None:
        self._results: dict[Hashable, Any] = {}

    def of(self, prove: Callable[[torch.nn.Module], Result], module: torch.nn.Module) -> Result:
        """prove(module), or the result for an equal module.

        Raises:
          NoProof: as `prove` does.
        """
        key = prove, _kind(module)
        if key not in self._results:
            try:
                self._results[key] = prove(module)
            except NoProof as error:
                self._results[key] = _Failure(str(error))
        result: Any = self._results[key]
        if isinstance(result, _Failure):
            raise NoProof(result.reason)
        found: Result = result
        return found


class _Failure(NamedTuple):
    """A proof that fails."""

    reason: str


def _kind(module: torch.nn.Module) -> Hashable:
    """What modules that run the same code on weights of the same shapes have in common."""
    order: dict[int, int] = {}
    return tuple(
        (name, type(part), *((attribute, _value(value, order)) for attribute, value in vars(part).items()))
        for name, part in module.named_modules()
    )


def _value(value: Any, order: dict[int, int]) -> Hashable:
    """What must be equal of an attribute: of tensors and modules what they are, of other objects which they are."""
    if is_immutable(value):
        return type(value), repr(value)  # 0.0 == -0.0 and 1 == True, but their texts differ
    if isinstance(value, torch.Tensor):
        place = order.setdefault(id(value), len(order))  # shared weights
        return place, type(value), value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    if isinstance(value, torch.nn.Module):
        return (type(value),)  # its attributes are those of a part
    if isinstance(value, dict):
        return type(value), *(
            (_value(key, order), id(each) if isinstance(each, dict) else _value(each, order))
            for key, each in value.items()
        )
    if isinstance(value, (list, set)) and all(map(is_immutable, value)):
        texts = map(repr, value)
        return type(value), tuple(texts) if isinstance(value, list) else frozenset(texts)
    return id(value)
