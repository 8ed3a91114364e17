"""Which products a call needs: its own and, of those of its gradients, the ones that are asked for.

    matmul    c = a @ b + bias        da = dc @ b^T   (dgrad)
                                      db = a^T @ dc   (wgrad)
                                      dbias = the sum of dc over its rows

Autograd saves and computes what this says, and nothing else: for a frozen weight there is no wgrad
and `a` is not saved, for an input without a gradient no dgrad and `b` is not saved. Free of torch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from stoneware.runtime.fast_dataclass import dataclass

FORWARD, DGRAD, WGRAD, DBIAS = "forward", "dgrad", "wgrad", "dbias"

_FLIPPED = {"n": "t", "t": "n"}


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product, or for `dbias` a sum, with the gradient dc row-major.

    Attributes:
      role: FORWARD, DGRAD, WGRAD or DBIAS.
      left, right: its operands, "a", "b" or "dc", and "^T" behind one that is transposed; a sum has
        no right one.
      result: "c", "da", "db" or "dbias". "da^T" and "db^T" are gradients of a column-major operand:
        their transposed views have its layout.
      layout: of left and right, as a Problem's; empty for a sum.
      a_dtype, b_dtype: of left and right; b_dtype is empty for a sum.
      out_dtype: of the result.
    """

    role: str
    left: str
    right: str = ""
    result: str
    layout: str = ""
    a_dtype: str
    b_dtype: str = ""
    out_dtype: str

    @property
    def saved(self) -> tuple[str, ...]:
        """The operands that the forward call must keep for it."""
        return tuple(name.removesuffix("^T") for name in (self.left, self.right) if name and name[:2] != "dc")


@functools.lru_cache(maxsize=1024)
def products(
    op: str, *, dtype: str, out_dtype: str, layout: str, needs_input_grad: frozenset[str]
) -> tuple[Product, ...]:
    """The products of a call, its own first.

    Args:
      op: "matmul".
      dtype: of a and b.
      out_dtype: of the result and of the bias.
      layout: of a and b, as a Problem's.
      needs_input_grad: the inputs that need a gradient: of "a", "b" and "bias".
    """
    if op != "matmul":
        raise ValueError(f"op={op!r} must be matmul; no other op has gradients")
    return tuple(_of_matmul(dtype, out_dtype, layout, needs_input_grad))


def _of_matmul(dtype: str, out_dtype: str, layout: str, needs: frozenset[str]) -> Iterator[Product]:
    a, b = layout[0], layout[1]
    dtypes = {"a_dtype": dtype, "b_dtype": dtype}
    yield Product(role=FORWARD, left="a", right="b", result="c", layout=layout, **dtypes, out_dtype=out_dtype)
    if "a" in needs and a == "n":
        yield Product(
            role=DGRAD, left="dc", right="b^T", result="da", layout="n" + _FLIPPED[b], **dtypes, out_dtype=dtype
        )
    elif "a" in needs:
        yield Product(role=DGRAD, left="b", right="dc^T", result="da^T", layout=b + "t", **dtypes, out_dtype=dtype)
    if "b" in needs and b == "n":
        yield Product(
            role=WGRAD, left="a^T", right="dc", result="db", layout=_FLIPPED[a] + "n", **dtypes, out_dtype=dtype
        )
    elif "b" in needs:
        yield Product(role=WGRAD, left="dc^T", right="a", result="db^T", layout="t" + a, **dtypes, out_dtype=dtype)
    if "bias" in needs:
        yield Product(role=DBIAS, left="dc", result="dbias", a_dtype=out_dtype, out_dtype=out_dtype)
