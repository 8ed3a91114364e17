"""Which matmuls a call and its gradients need, as a table of every layout and every set of needs."""

from __future__ import annotations

import itertools

import pytest

from stoneware.kernels import needs

# layout of the call -> the gradient's matmul: layout, left, right, result
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


def subsets(*names: str) -> list[frozenset[str]]:
    return [frozenset(some) for count in range(len(names) + 1) for some in itertools.combinations(names, count)]


def named(sets):
    return pytest.mark.parametrize("needed", sets, ids=lambda names: "+".join(sorted(names)) or "nothing")


def found(op: str, **options) -> list[tuple]:
    """(role, layout, left, right, result, dtypes) of each matmul."""
    return [
        (
            matmul.role,
            matmul.layout,
            matmul.left,
            matmul.right,
            matmul.result,
            matmul.a_dtype,
            matmul.b_dtype,
            matmul.out_dtype,
        )
        for matmul in needs.matmuls(op, **options)
    ]


def saved(op: str, **options) -> set[str]:
    return {name for matmul in needs.matmuls(op, **options)[1:] for name in matmul.saved}


@pytest.mark.parametrize("layout", DGRAD)
@named(subsets("a", "b", "bias"))
@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp32"), ("fp16", "fp32")]
)
def test_needs_of_matmul(layout, needed, dtype, out_dtype):
    options = {"dtypes": (dtype, dtype, out_dtype), "layout": layout, "needs_input_grad": needed}
    expected = [("forward", layout, "a", "b", "c", dtype, dtype, out_dtype)]
    if "a" in needed:
        expected.append(("dgrad", *DGRAD[layout], dtype, dtype, dtype))
    if "b" in needed:
        expected.append(("wgrad", *WGRAD[layout], dtype, dtype, dtype))
    if "bias" in needed:
        expected.append(("dbias", "", "dc", "", "dbias", out_dtype, "", out_dtype))
    assert found("matmul", **options) == expected
    assert saved("matmul", **options) == ({"b"} if "a" in needed else set()) | ({"a"} if "b" in needed else set())


@named(subsets("a", "b"))
def test_needs_of_grouped_mm(needed):
    options = {"dtypes": ("bf16",) * 3, "layout": "nt", "needs_input_grad": needed}
    expected = [("forward", "nt", "a", "b", "c", "bf16", "bf16", "bf16")]
    if "a" in needed:
        expected.append(("dgrad", *DGRAD["nt"], "bf16", "bf16", "bf16"))
    if "b" in needed:
        expected.append(("wgrad", *WGRAD["nt"], "bf16", "bf16", "bf16"))
    assert found("grouped_mm", **options) == expected


@named(subsets("scale_a", "scale_b", "bias"))
@pytest.mark.parametrize(("a_dtype", "b_dtype"), [("e4m3", "e4m3"), ("e5m2", "e4m3")])
@pytest.mark.parametrize("out_dtype", ["bf16", "fp16", "fp32"])
def test_needs_of_scaled_mm(needed, a_dtype, b_dtype, out_dtype):
    options = {"dtypes": (a_dtype, b_dtype, out_dtype), "layout": "nt", "needs_input_grad": needed}
    expected = [("forward", "nt", "a", "b", "c", a_dtype, b_dtype, out_dtype)]
    if needed & {"scale_a", "scale_b"}:
        expected.append(("unscaled", "nt", "a", "b", "ab", a_dtype, b_dtype, "fp32"))
    if "scale_a" in needed:
        expected.append(("dscale", "", "ab", "scale_b", "dscale_a", "fp32", "fp32", "fp32"))
    if "scale_b" in needed:
        expected.append(("dscale", "", "ab", "scale_a", "dscale_b", "fp32", "fp32", "fp32"))
    if "bias" in needed:
        expected.append(("dbias", "", "dc", "", "dbias", out_dtype, "", out_dtype))
    assert found("scaled_mm", **options) == expected


@pytest.mark.parametrize(
    ("op", "needed"), [("toy_add", ""), ("scaled_mm", "a"), ("grouped_mm", "bias"), ("matmul", "scale_a")]
)
def test_what_has_no_gradient_is_refused(op, needed):
    with pytest.raises(ValueError, match=f"op='{op}' has no gradients of {needed}; ask for"):
        needs.matmuls(op, dtypes=("bf16",) * 3, layout="nt", needs_input_grad=frozenset([needed] if needed else ()))
