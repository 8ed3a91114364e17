"""A gradient that this installation was built without is refused at the forward call, by name."""

from __future__ import annotations

import itertools

import pytest
import torch

import stoneware as sw
from stoneware.errors import BackwardNotBuiltError, ForwardOnlyError
from stoneware.kernels import built_matmuls, manifest, needs
from stoneware.kernels.manifest import KernelRecord, Manifest
from stoneware.ops import backward

SERVES = {"nt": ("forward", "dgrad"), "nn": ("forward", "dgrad"), "tn": ("wgrad",)}


def build(off: set[str] = frozenset(), *, has_backward: bool = True, twice: set[str] = frozenset()) -> Manifest:
    """A build with a bf16 kernel of each layout, off for some, and a second one that is on for some."""
    kernels, removed = {}, {}
    for layout, is_second in itertools.product(SERVES, (False, True)):
        if is_second and layout not in twice:
            continue
        is_on = is_second or layout not in off
        about = {
            "id": f"{layout}{is_second}",
            "op": "matmul",
            "backend": "sm90",
            "arch": "sm_90a",
            "config": {"a": "bf16", "b": "bf16", "layout": layout},
            "serves": {role: role == "forward" or is_on for role in SERVES[layout]},
        }
        if any(about["serves"].values()):
            kernels[about["id"]] = KernelRecord(**about, sha256="0" * 64, size_bytes=1)
        else:
            removed[about["id"]] = KernelRecord(**about)
    return Manifest(kernels, removed=removed, has_backward=has_backward)


def matmuls(needed: str, layout: str = "nt", dtype: str = "bf16") -> tuple[needs.Matmul, ...]:
    names = frozenset({"x": "a", "w": "b", "b": "bias"}[name] for name in needed)
    return needs.matmuls("matmul", dtypes=(dtype,) * 3, layout=layout, needs_input_grad=names)


ALL_OFF = build({"nt", "nn", "tn"}, has_backward=False)
# build, layout, dtype, needs -> the matmul that it lacks
TABLE = [
    *[(build(), layout, "bf16", needed, None) for layout in SERVES for needed in ("", "x", "w", "b", "xwb")],
    *[(ALL_OFF, layout, "bf16", needed, None) for layout in SERVES for needed in ("", "b")],
    *[(ALL_OFF, layout, "bf16", "x", "dgrad") for layout in SERVES],
    *[(ALL_OFF, layout, "bf16", "w", "wgrad") for layout in SERVES],
    *[(ALL_OFF, layout, "fp16", "x", "dgrad") for layout in SERVES],
    (ALL_OFF, "nt", "bf16", "xwb", "dgrad"),
    # Off for the kernels of a layout alone: dgrad of nt is nn, of nn nt, and wgrad of both tn.
    (build({"nn"}), "nt", "bf16", "x", "dgrad"),
    (build({"nn"}), "nt", "bf16", "w", None),
    (build({"nn"}), "nn", "bf16", "x", None),
    (build({"tn"}), "nt", "bf16", "x", None),
    (build({"tn"}), "nt", "bf16", "w", "wgrad"),
    (build({"tn"}), "nt", "fp16", "w", None),
    # One kernel of several is enough.
    (build({"tn"}, twice={"tn"}), "nt", "bf16", "w", None),
    # On for a layout, in a build that is off.
    (build({"nt", "nn"}, has_backward=False), "nt", "bf16", "w", None),
    (build({"nt", "nn"}, has_backward=False), "nt", "bf16", "x", "dgrad"),
]


@pytest.mark.parametrize(("found", "layout", "dtype", "needed", "lacks"), TABLE)
def test_a_call_is_refused_if_a_matmul_is_not_built(found, layout, dtype, needed, lacks):
    if lacks is None:
        built_matmuls.check(matmuls(needed, layout, dtype), found)
        return
    with pytest.raises(BackwardNotBuiltError, match=f"matmul of {dtype} has no {lacks} of layout .. in this build"):
        built_matmuls.check(matmuls(needed, layout, dtype), found)


def test_the_remedy_is_the_setting_that_is_off():
    with pytest.raises(BackwardNotBuiltError, match=r"and b requires .*--//:enable_backward=true, .*b.detach\(\)"):
        built_matmuls.check(matmuls("w"), ALL_OFF)
    with pytest.raises(BackwardNotBuiltError, match='build its kernels without backward = "off", '):
        built_matmuls.check(matmuls("w"), build({"tn"}))


@pytest.fixture
def forward_only(monkeypatch):
    monkeypatch.setattr(manifest, "installed", lambda: ALL_OFF)
    backward.is_saved.cache_clear()
    yield
    backward.is_saved.cache_clear()


@pytest.mark.usefixtures("forward_only")
@pytest.mark.parametrize("way", ["eager", "aot_eager", "operator", "torch.func"])
def test_the_forward_call_refuses_whatever_its_way(way):
    x, w = torch.randn(8, 16).bfloat16(), torch.randn(24, 16).bfloat16().requires_grad_()

    def run(x, w):
        return sw.matmul(x, w.t())

    with pytest.raises(Exception, match="matmul of bf16 has no wgrad of layout tn in this build, and b req") as caught:
        if way == "eager":
            run(x, w)
        elif way == "operator":
            torch.ops.stoneware.matmul(x, w.t(), None, None, False, None, None)
        elif way == "torch.func":
            torch.func.grad(lambda w: run(x, w).sum())(w.detach())
        else:
            torch._dynamo.reset()
            torch.compile(run, backend=way, fullgraph=True)(x, w)
    if way != "aot_eager":
        assert isinstance(caught.value, BackwardNotBuiltError) and isinstance(caught.value, ForwardOnlyError)
    with torch.no_grad():
        assert run(x, w).grad_fn is None


@pytest.mark.usefixtures("forward_only")
def test_a_bias_and_scales_need_no_matmul_of_a_gradient():
    x, w = torch.randn(8, 16).bfloat16(), torch.randn(24, 16).bfloat16()
    bias = torch.randn(24).bfloat16().requires_grad_()
    sw.matmul(x, w.t(), bias).sum().backward()
    scale = torch.ones((), requires_grad=True)
    x8, w8 = x.to(torch.float8_e4m3fn), torch.randn(32, 16).to(torch.float8_e4m3fn)
    sw.scaled_mm(x8, w8.t(), scale, torch.ones(())).sum().backward()
    assert bias.grad is not None and scale.grad is not None


@pytest.mark.usefixtures("forward_only")
def test_grouped_mm_refuses():
    a, weight = torch.randn(8, 16).bfloat16(), torch.randn(1, 24, 16).bfloat16().requires_grad_()
    with pytest.raises(BackwardNotBuiltError, match="grouped_mm of bf16 has no wgrad"):
        sw.grouped_mm(a, weight.mT, torch.tensor([8], dtype=torch.int32))


FORWARD_LAYOUTS = {"matmul": ("nt", "nn", "tt"), "grouped_mm": ("nt",), "scaled_mm": ("nt",)}
"""Layouts of the calls that kernels are built for. A call of matmul may have layout tn too, but the kernels of
that layout are there for the gradient of a weight."""


def served(op: str, a_dtype: str, b_dtype: str, layout: str) -> set[str]:
    """The roles of the matmuls that a kernel of these operands computes."""
    if op == "scaled_mm":
        # Gradients of a layer may be quantized to e5m2, activations and weights are not.
        forward, gradient = ("e4m3", "e4m3", "tensor"), (a_dtype, b_dtype, "tensor")
        both = frozenset("ab")
        calls = [
            needs.linear_matmuls(dtype="bf16", forward=forward, dgrad=gradient, wgrad=gradient, needs_input_grad=both)
        ]
    else:
        needed = frozenset("ab" if op == "matmul" else "")
        calls = [
            needs.matmuls(op, dtypes=(a_dtype, b_dtype, a_dtype), layout=forward_layout, needs_input_grad=needed)
            for forward_layout in FORWARD_LAYOUTS[op]
        ]
    return {
        matmul.role
        for matmul in itertools.chain(*calls)
        if (matmul.layout, matmul.a_dtype, matmul.b_dtype) == (layout, a_dtype, b_dtype)
    }


def test_kernels_of_this_build_serve_what_needs_says():
    """The build derives it in Starlark (served_matmuls), from the same facts."""
    found = manifest.installed()
    kernels = [*found.kernels.values(), *found.removed.values()] if found else []
    if not any(kernel.serves for kernel in kernels):
        pytest.skip("no manifest, or one of an older build")
    for kernel in kernels:
        if kernel.op not in FORWARD_LAYOUTS:  # sw.quantize, whose kernels compute operands
            names = ("_column", "_swiglu", "_grad_", "_t_triton")
            is_for_gradients = any(name in kernel.id for name in names)
            is_for_frozen = "_scaled_rows_" in kernel.id or "_transpose_" in kernel.id
            serves = {"dgrad", "wgrad"} if is_for_gradients else {"dgrad"} if is_for_frozen else {"forward"}
            assert set(kernel.serves) == serves, kernel.id
            continue
        config = kernel.config
        assert set(kernel.serves) == served(kernel.op, config["a"], config["b"], config.get("layout", "nt")), kernel.id
