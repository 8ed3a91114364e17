"""The ops, an op a folder, and the names by which they and their backends are known everywhere."""

OPS = ("scaled_mm", "matmul", "grouped_mm")

VENDOR = "vendor"
REFERENCE = "reference"

BACKENDS_WITHOUT_KERNELS = (VENDOR, REFERENCE)
"""Backends whose kernels are torch's, and so are not in the manifest."""
