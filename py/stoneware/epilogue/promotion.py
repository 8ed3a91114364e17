"""The shape and the dtype of an operator's result, by torch's rules of broadcasting and promotion.

Torch has these rules for the device "meta" in Python, where the first call imports 800 modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...] | None:
    """The shape that they broadcast to, or None. torch.broadcast_shapes imports 490 modules."""
    result = [1] * max(map(len, shapes))
    for shape in shapes:
        for place, extent in enumerate(shape, start=len(result) - len(shape)):
            if extent != 1 and result[place] not in (1, extent):
                return None
            result[place] = extent if result[place] == 1 else result[place]
    return tuple(result)


_TRUTHS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf"})


def result_of(name: str, arguments: dict[str, Any]) -> torch.Tensor:
    """The result of an operator of `arithmetic.py`, on the device "meta", by torch's rules of promotion."""
    tensors = {key: value for key, value in arguments.items() if isinstance(value, torch.Tensor)}
    shape = broadcast(*[tensor.shape for tensor in tensors.values()])
    if shape is None:
        shapes = " and ".join(str(list(tensor.shape)) for tensor in tensors.values())
        raise ValueError(f"the shapes {shapes} of {name} in an epilogue must broadcast; reshape one of them")
    if name in _TRUTHS or name.startswith("logical_"):
        dtype = torch.bool
    elif name == "_to_copy":
        dtype = arguments.get("dtype") or arguments["self"].dtype
    else:
        dtype = _promoted([value for key, value in arguments.items() if key not in ("condition", "mask", "alpha")])
        if dtype == torch.bool and not name.startswith("bitwise_") and name not in ("where", "masked_fill"):
            dtype = torch.float32
    return torch.empty(shape, dtype=dtype, device="meta")


def _promoted(values: Sequence[Any]) -> torch.dtype:
    """The dtype of a result of tensors and numbers: of all with a dimension, else of all without, else of numbers."""
    numbers = [value for value in values if isinstance(value, (bool, int, float))]
    dtypes: list[list[torch.dtype]] = [[], []]
    for value in values:
        if isinstance(value, torch.Tensor):
            dtypes[value.ndim == 0].append(value.dtype)
    of_tensors = dtypes[0] or dtypes[1]
    promoted = of_tensors[0]
    for dtype in (*of_tensors[1:], *dtypes[1]):
        promoted = (
            torch.result_type(torch.empty(1, dtype=promoted), torch.empty((), dtype=dtype))
            if (dtype in dtypes[1] and dtypes[0])
            else torch.promote_types(promoted, dtype)
        )
    for number in numbers:
        promoted = torch.result_type(torch.empty(1, dtype=promoted), number)
    return promoted
