"""The ops by name, and the names of backends that every floor knows.

Importing this module imports no op: `spec` does that, of the op that is asked for.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # typing's own, without the cost of importing typing
if TYPE_CHECKING:
    from stoneware.ops.spec import OpSpec

OPS = {
    "scaled_mm": "stoneware.ops.scaled_mm.spec",
    "matmul": "stoneware.ops.matmul.spec",
    "grouped_mm": "stoneware.ops.grouped_mm.spec",
}
"""Op -> the module that has its `SPEC`, free of torch."""

CALL_MODULE = "stoneware.ops._call"
"""The native module that makes a call which was made before without Python (`plan_cache.py`)."""

VENDOR = "vendor"
REFERENCE = "reference"

TRITON_AOT = "triton_aot"
BACKENDS_WITHOUT_KERNELS = (VENDOR, REFERENCE)
"""Backends whose kernels are torch's, and so are not in the manifest."""


def spec(op: str) -> OpSpec:
    """The spec of an op; KeyError if there is no such op."""
    return importlib.import_module(OPS[op]).SPEC
