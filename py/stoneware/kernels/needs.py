"""Which matmuls a call needs: its own, and those of the requested gradients.

    matmul      c = a @ b + bias                da = dc @ b^T                            (dgrad)
                                                db = a^T @ dc                            (wgrad)
                                                dbias = the sum of dc over its rows
    grouped_mm  c = a @ b of each row's group   da, db like matmul's, db over the rows of a group
    scaled_mm   c = scale_a * scale_b * ab      ab = a @ b, before the scales (unscaled)
                    + bias                      dscale_a, dscale_b = sums of dc * ab * the other scale

Autograd saves and computes only these: a frozen weight needs neither wgrad nor a saved `a`, and an input
without a gradient needs neither dgrad nor a saved `b`. Operands in fp8 have no gradients.
Imports without torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from stoneware.runtime.fast_dataclass import dataclass

FORWARD, DGRAD, WGRAD, DBIAS, UNSCALED, DSCALE = "forward", "dgrad", "wgrad", "dbias", "unscaled", "dscale"

_FLIPPED = {"n": "t", "t": "n"}
_NOT_SAVED = ("", "dc", "ab")


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """A matmul, or a sum, which has neither layout nor b_dtype; dc is row-major.

    Attributes:
      op: the op that computes it.
      role: one of the constants above.
      left, right: the operands: an input, "dc" or "ab", with "^T" if it is transposed; right is empty
        for DBIAS.
      result: "c", "ab", or "d" and an input. "da^T" and "db^T" are gradients of a column-major
        operand: their transposed views have its layout.
      layout: layout of left and right, like a problem's.
      a_dtype, b_dtype: dtypes of left and right.
      out_dtype: dtype of the result.
      scales: like a problem's, for the fp8 operands of a layer; otherwise empty.
    """

    op: str
    role: str
    left: str
    right: str = ""
    result: str
    layout: str = ""
    a_dtype: str
    b_dtype: str = ""
    out_dtype: str
    scales: str = ""

    @property
    def saved(self) -> tuple[str, ...]:
        """The inputs that the forward call must save for it."""
        names = (name.removesuffix("^T") for name in (self.left, self.right))
        return tuple(name for name in names if name not in _NOT_SAVED)


def matmuls(
    op: str, *, dtypes: tuple[str, str, str], layout: str, needs_input_grad: frozenset[str]
) -> tuple[Matmul, ...]:
    """The matmuls of a call, its own first.

    Args:
      op: "matmul", "scaled_mm" or "grouped_mm".
      dtypes: of a, of b, and of the result and the bias.
      layout: of a and b, like a problem's.
      needs_input_grad: the inputs that need a gradient.

    Raises:
      ValueError: the op has no gradient of one of them.
    """
    gradients = {"matmul": _matmul_gradients, "grouped_mm": _matmul_gradients, "scaled_mm": _scale_gradients}
    allowed = {"matmul": {"a", "b", "bias"}, "grouped_mm": {"a", "b"}, "scaled_mm": {"scale_a", "scale_b", "bias"}}
    if op not in gradients or not needs_input_grad <= allowed[op]:
        raise ValueError(
            f"op={op!r} has no gradients of {', '.join(sorted(needs_input_grad))}; "
            f"ask for those of {', '.join(sorted(allowed.get(op, ()))) or 'none'}"
        )
    a_dtype, b_dtype, out_dtype = dtypes
    forward = Matmul(
        op=op,
        role=FORWARD,
        left="a",
        right="b",
        result="c",
        layout=layout,
        a_dtype=a_dtype,
        b_dtype=b_dtype,
        out_dtype=out_dtype,
    )
    bias = Matmul(op=op, role=DBIAS, left="dc", result="dbias", a_dtype=out_dtype, out_dtype=out_dtype)
    return (forward, *gradients[op](forward, needs_input_grad), *([bias] if "bias" in needs_input_grad else []))


def _matmul_gradients(forward: Matmul, needs: frozenset[str]) -> Iterator[Matmul]:
    (a, b), dtype = tuple(forward.layout), forward.a_dtype
    shared = {"op": forward.op, "a_dtype": dtype, "b_dtype": dtype, "out_dtype": dtype}
    if "a" in needs and a == "n":
        yield Matmul(role=DGRAD, left="dc", right="b^T", result="da", layout="n" + _FLIPPED[b], **shared)
    elif "a" in needs:
        yield Matmul(role=DGRAD, left="b", right="dc^T", result="da^T", layout=b + "t", **shared)
    if "b" in needs and b == "n":
        yield Matmul(role=WGRAD, left="a^T", right="dc", result="db", layout=_FLIPPED[a] + "n", **shared)
    elif "b" in needs:
        yield Matmul(role=WGRAD, left="dc^T", right="a", result="db^T", layout="t" + a, **shared)


Operands = tuple[str, str, str]
"""Operands in fp8: the dtypes of left and right, and their scales like a problem's."""


def linear_matmuls(
    *, dtype: str, forward: Operands, dgrad: Operands | None, wgrad: Operands | None, needs_input_grad: frozenset[str]
) -> tuple[Matmul, ...]:
    """The matmuls of a linear layer c = a @ b + bias that quantizes its operands, its own first.

    Matmuls in fp8 have layout nt: the tensor cores need both operands contiguous along the summed
    dimension, so they are transposed before they are quantized.

    Args:
      dtype: of a, b, c and bias, with 16 or 32 bits; b is a weight [n, k], transposed.
      forward, dgrad, wgrad: the operands of each matmul; None keeps it in `dtype`.
      needs_input_grad: those of "a", "b" and "bias" that need a gradient.
    """
    result = []
    for matmul in matmuls("matmul", dtypes=(dtype,) * 3, layout="nt", needs_input_grad=needs_input_grad):
        operands = {FORWARD: forward, DGRAD: dgrad, WGRAD: wgrad}.get(matmul.role)
        if operands is not None:
            a_dtype, b_dtype, scales = operands
            matmul = replace(matmul, op="scaled_mm", layout="nt", a_dtype=a_dtype, b_dtype=b_dtype, scales=scales)
        result.append(matmul)
    return tuple(result)


def _scale_gradients(forward: Matmul, needs: frozenset[str]) -> Iterator[Matmul]:
    if needs & {"scale_a", "scale_b"}:
        yield replace(forward, role=UNSCALED, result="ab", out_dtype="fp32")
    for name, other in (("scale_a", "scale_b"), ("scale_b", "scale_a")):
        if name in needs:
            dtypes = dict.fromkeys(("a_dtype", "b_dtype", "out_dtype"), "fp32")
            yield Matmul(op=forward.op, role=DSCALE, left="ab", right=other, result=f"d{name}", **dtypes)
