"""Which matmuls a call needs: its own, and those of the requested gradients.

    matmul      c = a @ b + bias                da = dc @ b^T                            (dgrad)
                                                db = a^T @ dc                            (wgrad)
                                                dbias = the sum of dc over its rows
    grouped_mm  c = a @ b of each row's group   da, db as of matmul, db along a group's rows
    scaled_mm   c = scale_a * scale_b * ab      ab = a @ b, which scales had been applied to (unscaled)
                    + bias                      dscale_a, dscale_b = sums of dc * ab * the other scale

Autograd saves and computes only these: a frozen weight has no wgrad
and `a` is not saved, for an input without a gradient no dgrad and `b` is not saved. Operands in fp8
have no gradients. Free of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from stoneware.runtime.fast_dataclass import dataclass

FORWARD, DGRAD, WGRAD, DBIAS, UNSCALED, DSCALE = "forward", "dgrad", "wgrad", "dbias", "unscaled", "dscale"

_FLIPPED = {"n": "t", "t": "n"}
_NOT_SAVED = ("", "dc", "ab")


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product, or a sum, for which layout and b_dtype are empty; dc is row-major.

    Attributes:
      op: of the call.
      role: one of the constants above.
      left, right: what is multiplied: an input, "dc" or "ab", and "^T" behind what is transposed;
        right is empty for DBIAS.
      result: "c", "ab", or "d" and an input. "da^T" and "db^T" are gradients of a column-major
        operand: their transposed views have its layout.
      layout: of left and right, as a Problem's.
      a_dtype, b_dtype: of left and right.
      out_dtype: of the result.
      scales: of scaled_mm and grouped_mm in fp8, as a Problem's.
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
        """The inputs that the forward call must keep for it."""
        names = (name.removesuffix("^T") for name in (self.left, self.right))
        return tuple(name for name in names if name not in _NOT_SAVED)


def products(
    op: str, *, dtypes: tuple[str, str, str], layout: str, scales: str = "", needs_input_grad: frozenset[str]
) -> tuple[Product, ...]:
    """The matmuls of a call, its own first.

    Args:
      op: "matmul", "scaled_mm" or "grouped_mm".
      dtypes: of a, of b, and of the result and the bias.
      layout: of a and b, like a Problem's.
      scales: like a Problem's for operands in fp8, otherwise empty.
      needs_input_grad: the inputs that need a gradient.

    Raises:
      ValueError: the op has no gradient of one of them.
    """
    of_op = {"matmul": _of_matmul, "grouped_mm": _of_matmul, "scaled_mm": _of_scaled_mm}
    allowed = {
        "matmul": {"a", "b", "bias"},
        "grouped_mm": set() if scales else {"a", "b"},
        "scaled_mm": {"scale_a", "scale_b", "bias"},
    }
    if op not in of_op or not needs_input_grad <= allowed[op]:
        raise ValueError(
            f"op={op!r} with scales={scales!r} has no gradients of {', '.join(sorted(needs_input_grad))}; "
            f"ask for those of {', '.join(sorted(allowed.get(op, ()))) or 'none'}"
        )
    a_dtype, b_dtype, out_dtype = dtypes
    forward = Product(
        op=op,
        role=FORWARD,
        left="a",
        right="b",
        result="c",
        layout=layout,
        a_dtype=a_dtype,
        b_dtype=b_dtype,
        out_dtype=out_dtype,
        scales=scales,
    )
    bias = Product(op=op, role=DBIAS, left="dc", result="dbias", a_dtype=out_dtype, out_dtype=out_dtype)
    return (forward, *of_op[op](forward, needs_input_grad), *([bias] if "bias" in needs_input_grad else []))


def _of_matmul(forward: Product, needs: frozenset[str]) -> Iterator[Product]:
    (a, b), dtype = tuple(forward.layout), forward.a_dtype
    known = {"op": forward.op, "a_dtype": dtype, "b_dtype": dtype, "out_dtype": dtype}
    if "a" in needs and a == "n":
        yield Product(role=DGRAD, left="dc", right="b^T", result="da", layout="n" + _FLIPPED[b], **known)
    elif "a" in needs:
        yield Product(role=DGRAD, left="b", right="dc^T", result="da^T", layout=b + "t", **known)
    if "b" in needs and b == "n":
        yield Product(role=WGRAD, left="a^T", right="dc", result="db", layout=_FLIPPED[a] + "n", **known)
    elif "b" in needs:
        yield Product(role=WGRAD, left="dc^T", right="a", result="db^T", layout="t" + a, **known)


Operands = tuple[str, str, str]
"""In fp8: the dtypes of left and right, and their scales as a Problem's."""


def of_quantizing_layer(
    *, dtype: str, forward: Operands, dgrad: Operands | None, wgrad: Operands | None, needs_input_grad: frozenset[str]
) -> tuple[Product, ...]:
    """The matmuls of a linear layer c = a @ b + bias that quantizes its operands, its own first.

    Products in fp8 have layout nt, with operands that are transposed before they are quantized: the
    tensor cores want both contiguous along the summed dimension.

    Args:
      dtype: of a, b, c and bias, in 16 or 32 bits; b is a weight [n, k], transposed.
      forward, dgrad, wgrad: the operands of each product; None leaves it in `dtype`.
      needs_input_grad: of "a", "b" and "bias".
    """
    found = []
    for product in products("matmul", dtypes=(dtype,) * 3, layout="nt", needs_input_grad=needs_input_grad):
        operands = {FORWARD: forward, DGRAD: dgrad, WGRAD: wgrad}.get(product.role)
        if operands is not None:
            a_dtype, b_dtype, scales = operands
            product = replace(product, op="scaled_mm", layout="nt", a_dtype=a_dtype, b_dtype=b_dtype, scales=scales)
        found.append(product)
    return tuple(found)


def _of_scaled_mm(forward: Product, needs: frozenset[str]) -> Iterator[Product]:
    if needs & {"scale_a", "scale_b"}:
        yield replace(forward, role=UNSCALED, result="ab", out_dtype="fp32", scales="tensor")
    for name, other in (("scale_a", "scale_b"), ("scale_b", "scale_a")):
        if name in needs:
            dtypes = dict.fromkeys(("a_dtype", "b_dtype", "out_dtype"), "fp32")
            yield Product(op=forward.op, role=DSCALE, left="ab", right=other, result=f"d{name}", **dtypes)
