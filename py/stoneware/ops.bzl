"""The ops: one list, of which the wheel's sources, manifest and tables are made."""

# A folder each, with a table in the wheel; like OPS in py/stoneware/specs/__init__.py.
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

def served_matmuls(op, a, layout):
    """The matmuls that a kernel computes. tests/ops/built_matmuls_test.py derives the same from needs.py.

    Args:
      op: "matmul", "scaled_mm" or "grouped_mm".
      a: the dtype of the left operand; e5m2 is that of gradients alone. In fp8 a gradient's operands
        are transposed before they are quantized, and have the layout of the forward operands.
      layout: of a and b. Forward calls of matmul have kernels for nt, nn and tt. They may have layout tn
        too, but its kernels are there for the gradient of a weight.

    Returns:
      A list of "forward", "dgrad" and "wgrad".
    """
    if op == "grouped_mm":
        return ["forward"]
    if op == "scaled_mm":
        return ["dgrad", "wgrad"] if a == "e5m2" else ["forward", "dgrad", "wgrad"]
    return {
        "nn": ["forward", "dgrad"],
        "nt": ["forward", "dgrad"],
        "tn": ["wgrad"],
        "tt": ["forward", "dgrad", "wgrad"],
    }[layout]

def op_sources():
    """The sources of the op in this folder: `srcs`."""
    native.filegroup(
        name = "srcs",
        srcs = native.glob(["*.py"]),
    )

# Op -> how many bytes of the wheel its kernels with linked epilogues may take.
LINKED_EPILOGUES = {
    "matmul": 735000,
    "scaled_mm": 765000,
}
