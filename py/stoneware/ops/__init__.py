"""The ops: from tensors to a launch."""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # typing's own, without the cost of importing typing
if TYPE_CHECKING:
    from stoneware.ops.dispatch import Operation

APIS = {
    "scaled_mm": "stoneware.ops.scaled_mm.api",
    "matmul": "stoneware.ops.matmul.api",
    "grouped_mm": "stoneware.ops.grouped_mm.api",
}
"""Op -> the module that has its function and its `OPERATION`."""


def operation_of(op: str) -> Operation:
    """The op with its backends; imports torch. KeyError for another name."""
    return importlib.import_module(APIS[op]).OPERATION
