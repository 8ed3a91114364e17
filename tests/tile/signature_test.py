"""A call with another signature than the matmul's is an error before the link, with rule, value and remedy."""

from __future__ import annotations

import pytest

import stoneware as sw
from stoneware.linking import toolchain
from stoneware.tile import source

MM = sw.tile.matmul(m=64, n=96, k=32, a="bf16", b="bf16")
_KERNEL = """
extern "C" __global__ void k(float* out) {
  __shared__ mm::TileA a;
  __shared__ mm::TileB b;
  __shared__ mm::TileDC dc;
  mm::SumC c;
  mm::SumDA da;
  mm::SumDB db;
  %s
  c.Store(out, 96); da.Store(out, 32); db.Store(out, 96);
}
"""


@pytest.fixture(autouse=True)
def _no_link(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("nothing may be linked")

    monkeypatch.setattr(toolchain, "link_with_log", refuse)


@pytest.mark.parametrize(
    ("call", "rule", "value"),
    [
        ("mm::forward(da, a, b)", r"c of forward\(c, a, b\) must be SumC, sums \[64, 96\] in registers", "SumDA"),
        ("mm::forward(c, b, b)", r"a of forward\(c, a, b\) must be TileA, a tile \[64, 32\] of bf16", "Left=.*TileB"),
        ("mm::forward(c, a, dc)", r"b of forward\(c, a, b\) must be TileB, a tile \[32, 96\]", "Right=.*TileDC"),
        ("mm::dA(da, a, b)", r"dc of dA\(da, dc, b\) must be TileDC, a tile \[64, 96\] of bf16", "Left=.*TileA"),
        ("mm::dB(db, dc, a)", r"a of dB\(db, a, dc\) must be TileA", "Left=.*TileDC"),
        ("mm::start_dB(db, a, b)", r"dc of dB\(db, a, dc\) must be TileDC", "Right=.*TileB"),
        ("mm::dA(out, dc, b)", r"da of dA\(da, dc, b\) must be SumDA, sums \[64, 32\]", r"SumType=float \*"),
    ],
)
def test_a_wrong_operand(call, rule, value):
    with pytest.raises(ValueError, match=rule) as caught:
        sw.tile.link(_KERNEL % f"{call};", [MM])
    message = str(caught.value)
    assert "pass that" in message
    import re

    assert re.search(value, message)


def test_a_function_that_the_user_declares_with_another_signature():
    inner = source.namespace(MM)
    own = f"namespace {inner} {{ namespace linked {{ __device__ void forward(SumC&, const TileB&, const TileA&); }} }}"
    with pytest.raises(ValueError, match="kernel k calls .*linked7forward.* no function with this signature; call"):
        sw.tile.link(own + _KERNEL % f"{inner}::linked::forward(c, b, a);", [MM])


def test_a_function_of_another_matmul():
    other = sw.tile.matmul(m=64, n=96, k=64, a="bf16", b="bf16", name="other")
    call = "__shared__ other::TileA oa; __shared__ other::TileB ob; other::forward(*(other::SumC*)&c, oa, ob);"
    text = f"{other.header}\n" + _KERNEL % call
    with pytest.raises(ValueError, match="the matmuls mm have no function with this signature"):
        sw.tile.link(text, [MM])
    with pytest.raises(ValueError, match="a of forward"):
        sw.tile.link(_KERNEL % "__shared__ other::TileA oa; mm::forward(c, oa, b);", [MM, other])


def test_a_gradient_that_the_matmul_lacks():
    fp8 = sw.tile.matmul(m=64, n=64, k=64, a="e4m3", b="e4m3", layouts=("row", "col"))
    text = """extern "C" __global__ void k(float* out) {
      __shared__ mm::TileDC dc; __shared__ mm::TileB b; mm::SumC c; mm::dA(c, dc, b); c.Store(out, 64); }"""
    with pytest.raises(ValueError, match="dA must have operands of 16 or 32 bits, and they are fp8"):
        sw.tile.link(text, [fp8])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__device__ int f;", "the source must define a kernel"),
        ("this is no C++", "the source must compile; correct it: NVRTC cannot compile source.cu for sm_90a"),
    ],
)
def test_a_source_without_a_kernel(text, message):
    with pytest.raises(ValueError, match=message):
        sw.tile.link(text, [MM])


def test_a_kernel_that_is_not_in_the_source():
    with pytest.raises(ValueError, match="kernel 'other' must be in the source, whose kernels are k; correct the name"):
        sw.tile.link(_KERNEL % "", [MM], kernels="other")


def test_a_kernel_whose_name_is_part_of_another():
    text = 'extern "C" __global__ void layer() {} extern "C" __global__ void layer_2() {}'
    with pytest.raises(ValueError, match="kernel 'layer' must not be part of the name of 'layer_2', since nvJitLink"):
        sw.tile.link(text, [MM], kernels="layer")


@pytest.mark.parametrize(
    ("matmuls", "error", "message"),
    [
        ([], ValueError, r"matmuls=\[\] must have at least one matmul"),
        (["mm"], TypeError, "matmuls has 'mm', which must be a TileMatmul"),
        ([MM, MM], ValueError, "name='mm' must be the name of one matmul of the module, and is that of 2"),
        (
            [MM, sw.tile.matmul(m=64, n=64, k=64, a="bf16", b="bf16", name="o", threads=256)],
            ValueError,
            "the matmuls of a module must have one threads, and have 128, 256",
        ),
        (
            [MM, sw.tile.matmul(m=64, n=64, k=64, a="bf16", b="bf16", name="o", arch="sm_80")],
            ValueError,
            "must have one arch, and have sm_80, sm_90a",
        ),
    ],
)
def test_matmuls_that_do_not_go_together(matmuls, error, message):
    with pytest.raises(error, match=message):
        sw.tile.Module(_KERNEL, matmuls)
