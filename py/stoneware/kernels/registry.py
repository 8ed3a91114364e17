"""The ops, an op a folder, and the names by which they and their backends are known everywhere."""

OPS = ("scaled_mm", "matmul", "grouped_mm")

CALL_MODULE = "stoneware.ops._call"
"""The native module that makes a call which was made before without Python (`plan_cache.py`)."""

VENDOR = "vendor"
REFERENCE = "reference"

BACKENDS_WITHOUT_KERNELS = (VENDOR, REFERENCE)
"""Backends whose kernels are torch's, and so are not in the manifest."""
