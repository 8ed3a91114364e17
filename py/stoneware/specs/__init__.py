"""The specs of the ops: names, arguments, problems, heuristics and named layers. Imports without torch.

Every floor above may use them. `spec_of` imports the module of the op; importing this package does not.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # typing's own, without the cost of importing typing
if TYPE_CHECKING:
    from stoneware.specs.op_spec import OpSpec

OPS = {
    "scaled_mm": "stoneware.specs.scaled_mm",
    "matmul": "stoneware.specs.matmul",
    "grouped_mm": "stoneware.specs.grouped_mm",
}
"""Op -> the module that has its `SPEC`."""


def spec_of(op: str) -> OpSpec:
    """The spec of an op; KeyError for another name."""
    return importlib.import_module(OPS[op]).SPEC
