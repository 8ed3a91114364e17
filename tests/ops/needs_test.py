"""Which products a call and its gradients need, as a table of every layout and every set of needs."""

from __future__ import annotations

import itertools

import pytest

from stoneware.kernels import needs

# layout of the call -> the gradient's product: layout, left, right, result
DGRAD = {
    "nt": ("nn", "dc", "b^T", "da"),
    "nn": ("nt", "dc", "b^T", "da"),
    "tt": ("tt", "b", "dc^T", "da^T"),
    "tn": ("nt", "b", "dc^T", "da^T"),
}
WGRAD = {
    "nt": ("tn", "dc^T", "a", "db^T"),
    "nn": ("tn", "a^T", "dc", "db"),
    "tt": ("tt", "dc^T", "a", "db^T"),
    "tn": ("nn", "a^T", "dc", "db"),
}
SETS = [frozenset(names) for count in range(4) for names in itertools.combinations(("a", "b", "bias"), count)]


@pytest.mark.parametrize("layout", DGRAD)
@pytest.mark.parametrize("needed", SETS, ids=lambda names: "+".join(sorted(names)) or "nothing")
@pytest.mark.parametrize(("dtype", "out_dtype"), [("bf16", "bf16"), ("fp16", "fp32")])
def test_products_of_matmul(layout, needed, dtype, out_dtype):
    expected = [("forward", layout, "a", "b", "c", dtype, dtype, out_dtype)]
    if "a" in needed:
        expected.append(("dgrad", *DGRAD[layout], dtype, dtype, dtype))
    if "b" in needed:
        expected.append(("wgrad", *WGRAD[layout], dtype, dtype, dtype))
    if "bias" in needed:
        expected.append(("dbias", "", "dc", "", "dbias", out_dtype, "", out_dtype))
    found = needs.products("matmul", dtype=dtype, out_dtype=out_dtype, layout=layout, needs_input_grad=needed)
    assert [
        (one.role, one.layout, one.left, one.right, one.result, one.a_dtype, one.b_dtype, one.out_dtype)
        for one in found
    ] == expected
    saved = {name for one in found[1:] for name in one.saved}
    assert saved == ({"b"} if "a" in needed else set()) | ({"a"} if "b" in needed else set())


def test_an_op_without_gradients_is_refused():
    with pytest.raises(ValueError, match="op='toy_add' must be"):
        needs.products("toy_add", dtype="bf16", out_dtype="bf16", layout="nt", needs_input_grad=frozenset())
