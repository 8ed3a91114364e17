"""The ops: one list, of which the wheel's sources, manifest and tables are made."""

# A folder each, with a table in the wheel; as OPS in py/stoneware/kernels/registry.py.
OPS = [
    "grouped_mm",
    "matmul",
    "scaled_mm",
]

# Those with Triton kernels, a kernel_group `triton` in the op's folder.
TRITON_KERNELS = [
    "//py/stoneware/ops/{}:triton".format(op)
    for op in OPS
    if op != "grouped_mm"
]

# Those of sw.quantize, which the small kernel set lacks: plain torch quantizes there.
QUANTIZING_KERNELS = ["//py/stoneware/quantizing:triton"]

def op_sources():
    """The sources of the op in this folder: `srcs`, and of these `spec`, which the bake imports."""
    native.filegroup(
        name = "srcs",
        srcs = native.glob(["*.py"]),
    )
    native.filegroup(
        name = "spec",
        srcs = [
            "__init__.py",
            "problem.py",
            "spec.py",
        ],
    )
