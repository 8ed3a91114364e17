"""What is in a linked cubin: exactly the matmuls that are needed, which is read from its machine code."""

from __future__ import annotations

import itertools
import logging
import time

import machine_code
import pytest
import tile_layer

import stoneware as sw
from stoneware.linking import cubins, toolchain
from stoneware.tile import source
from tools.bench import tile_bench

SETS = [frozenset(names) for num in (1, 2, 3) for names in itertools.combinations(("forward", "dA", "dB"), num)]
DESCRIPTIONS = {
    "wgmma": {"m": 128, "n": 96, "k": 64, "a": "bf16", "b": "bf16"},
    "wgmma, 256 threads": {"m": 128, "n": 192, "k": 64, "a": "fp16", "b": "fp16", "threads": 256},
    "wgmma, column-major": {"m": 64, "n": 128, "k": 64, "a": "bf16", "b": "bf16", "layouts": ("col", "col")},
    "mma on sm_80": {"m": 64, "n": 96, "k": 32, "a": "bf16", "b": "bf16", "arch": "sm_80"},
    "mma on sm_120": {"m": 64, "n": 32, "k": 48, "a": "fp16", "b": "fp16", "arch": "sm_120", "threads": 64},
    "tf32": {"m": 64, "n": 32, "k": 64, "a": "tf32", "b": "tf32", "layouts": ("row", "col")},
}


def instructions(mm, direction: str) -> dict[str, int]:
    """The instructions of a direction, by the names of nvdisasm."""
    plan = mm.plans[direction]
    name = {"bf16": "BF16", "fp16": "", "tf32": "TF32", "e4m3": "E4M3.E4M3"}[mm.a]
    suffix = f".F32.{name}" if name else ".F32"
    summed = 32 // plan.left.shape.element_bytes
    if plan.instruction == "wgmma":
        kind = "QGMMA" if mm.a == "e4m3" else "HGMMA"
        transposed = "" if plan.left.is_k_major else ".tnspA"
        transposed += "" if plan.right.is_k_major else ".tnspB"
        return {f"{kind}.64x{plan.instruction_columns}x{summed}{suffix}{transposed}": plan.num_instructions}
    return {f"{'QMMA' if mm.a == 'e4m3' else 'HMMA'}.168{summed}{suffix}": plan.num_instructions}


def sums(counts: list[dict[str, int]]) -> dict[str, int]:
    return {name: sum(count.get(name, 0) for count in counts) for name in {name for count in counts for name in count}}


@pytest.mark.parametrize("needs", SETS, ids=lambda names: "+".join(sorted(names)))
@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_a_cubin_has_exactly_the_matmuls_that_are_needed(name, needs):
    mm = sw.tile.matmul(**DESCRIPTIONS[name])
    linked = sw.tile.link(tile_layer.source(mm), [mm], needs=needs)
    assert {direction for _, direction in linked.matmuls} == needs
    expected = sums([instructions(mm, direction) for direction in needs])
    assert machine_code.matmul_instructions(linked.cubin) == expected
    # Everything is inlined: no function is left, and no name of one.
    assert machine_code.functions(linked.cubin) == ["layer"]
    assert source.NAMESPACE.encode() not in linked.cubin


@pytest.mark.parametrize("arch", ["sm_89", "sm_90a", "sm_120"])
def test_fp8_has_the_forward_matmul(arch):
    mm = sw.tile.matmul(m=64, n=64, k=128, a="e4m3", b="e4m3", layouts=("row", "col"), arch=arch)
    linked = sw.tile.link(tile_layer.source(mm), [mm])
    assert machine_code.matmul_instructions(linked.cubin) == instructions(mm, "forward")


def link_seconds(mm, needs, monkeypatch) -> float:
    """Of nvJitLink, on this process's clock; the least of three, since other processes share the caches."""
    times = []
    link = toolchain.link_with_log

    def timed(*arguments, **options):
        started = time.process_time()
        linked = link(*arguments, **options)
        times.append(time.process_time() - started)
        return linked

    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "link_with_log", timed)
        patch.setattr(cubins, "read", lambda name: None)
        for _ in range(3):
            sw.tile.link(tile_layer.source(mm), [mm], needs=needs)
    return min(times)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_the_forward_matmul_alone_is_half_as_large_and_links_faster(arch, monkeypatch):
    """The linker's start counts in both times."""
    mm = sw.tile.matmul(m=128, n=128, k=64, a="bf16", b="bf16", arch=arch)
    whole = sw.tile.link(tile_layer.source(mm), [mm])
    forward = sw.tile.link(tile_layer.source(mm), [mm], needs={"forward"})
    assert len(forward.cubin) <= 0.5 * len(whole.cubin)
    assert link_seconds(mm, {"forward"}, monkeypatch) <= 0.6 * link_seconds(mm, None, monkeypatch)


def test_needs_follow_the_calls_of_each_kernel():
    """Without `needs`, a kernel brings what it calls, through its functions too."""
    mm = sw.tile.matmul(m=64, n=64, k=64, a="bf16", b="bf16")
    text = """
__device__ __noinline__ void Gradient(mm::TileA* t, float* out) {
  mm::SumDA s; s.Clear(); mm::dA(s, *(mm::TileDC*)t, *(mm::TileB*)(t + 1)); s.Store(out, 64);
}
extern "C" __global__ void forward(mm::TileA* t, float* out) {
  mm::SumC s; s.Clear(); mm::forward(s, *t, *(mm::TileB*)(t + 1)); s.Store(out, 64);
}
extern "C" __global__ void backward(mm::TileA* t, float* out) { Gradient(t, out); }
extern "C" __global__ void neither(float* out) { *out = 1; }
"""
    module = sw.tile.Module(text, [mm])
    assert module.link("forward").matmuls == (("mm", "forward"),)
    assert module.link("backward").matmuls == (("mm", "dA"),)
    assert module.link("neither").matmuls == ()
    whole = module.link()
    assert whole.matmuls == (("mm", "dA"), ("mm", "forward"))
    assert set(whole.kernels) == {"forward", "backward", "neither"}
    assert machine_code.functions(module.link(["forward", "neither"]).cubin) == ["forward", "neither"]
    # A kernel that does not need the gradient may be linked although another calls it.
    assert module.link("forward", needs={"forward"}).matmuls == (("mm", "forward"),)
    with pytest.raises(ValueError, match="kernel backward calls mm::dA, which is not linked: needs={'forward'}"):
        module.link(needs={"forward"})


def test_a_source_may_include_the_header_itself():
    """For editors; it is there anyway."""
    mm = sw.tile.matmul(m=64, n=96, k=64, a="bf16", b="bf16")
    text = '#include "mm.h"\n#include "cc/tile/tile.cuh"\n' + tile_layer.source(mm)
    assert sw.tile.link(text, [mm]).matmuls == (("mm", "dA"), ("mm", "dB"), ("mm", "forward"))


def test_many_calls_are_all_inlined():
    mm = sw.tile.matmul(m=128, n=128, k=128, a="bf16", b="bf16")
    call = "mm::forward(s, *t, *(mm::TileB*)(t + 1)); __syncthreads(); "
    kernel = 'extern "C" __global__ void k%d(mm::TileA* t, float* out, int n) { mm::SumC s; s.Clear(); '
    body = 3 * call + f"\n#pragma unroll 1\nfor (int i = 0; i < n; ++i) {{ {call} }} s.Store(out, 128); }}\n"
    text = "".join(kernel % i + body for i in (1, 2))
    linked = sw.tile.link(text, [mm])
    assert machine_code.functions(linked.cubin) == ["k1", "k2"]
    assert sum(machine_code.matmul_instructions(linked.cubin).values()) == 8 * mm.plans["forward"].num_instructions


def test_the_signature_of_a_kernel_is_read_from_its_source():
    mm = sw.tile.matmul(m=64, n=64, k=64, a="bf16", b="bf16")
    text = """
struct Pair { int a, b; };
extern "C" __global__ void __launch_bounds__(96) numbers(float* p, int i, long long q, float f, unsigned u) {
  *p = i + q + f + u;
}
extern "C" __global__ void structure(float* p, Pair pair) { *p = pair.a; }
extern "C" __global__ void nothing() {}
"""
    kernels = sw.tile.link(text, [mm]).kernels
    assert {name: kernel.parameters for name, kernel in kernels.items()} == {
        "numbers": "PiPfi",
        "structure": "P?",
        "nothing": "",
    }
    assert kernels["numbers"].most_threads == 96
    assert kernels["nothing"].most_threads == 0
    linked = sw.tile.link(text, [mm])
    with pytest.raises(ValueError, match="parameter 1 of structure must be a pointer or a number"):
        sw.tile.Kernel(linked, "structure")
    with pytest.raises(ValueError, match="threads=128 must be at most 96, the __launch_bounds__ of numbers"):
        sw.tile.Kernel(linked, "numbers")
    with pytest.raises(ValueError, match="name=None must be one of the linked kernels"):
        sw.tile.Kernel(linked)


def test_a_cubin_on_disk_is_what_was_linked(monkeypatch):
    mm = sw.tile.matmul(m=64, n=48, k=64, a="bf16", b="bf16")
    with monkeypatch.context() as patch:
        patch.setattr(cubins, "read", lambda name: None)
        first, again = (sw.tile.link(tile_layer.source(mm), [mm]) for _ in range(2))
    assert first.cubin == again.cubin
    assert first.link_s > 0
    kept = sw.tile.link(tile_layer.source(mm), [mm])
    assert kept.link_s == 0
    for name in ("cubin", "arch", "kernels", "matmuls", "threads", "log"):
        assert getattr(kept, name) == getattr(first, name)
    # Needs, options and kernels make other cubins.
    assert sw.tile.link(tile_layer.source(mm), [mm], needs={"dA"}).cubin != first.cubin
    assert sw.tile.link(tile_layer.source(mm), [mm], options=["-DNAME=1"]).link_s > 0


@pytest.mark.parametrize(
    ("log", "level"),
    [
        ("INFO: one\nINFO: two", logging.INFO),
        ("INFO: one\nptxas info    : (C7508) Potential Performance Loss", logging.WARNING),
    ],
)
def test_what_the_linker_marks_as_information_is_no_warning(monkeypatch, caplog, log, level):
    mm = sw.tile.matmul(m=64, n=64, k=64, a="bf16", b="bf16")
    link = toolchain.link_with_log
    monkeypatch.setattr(
        toolchain, "link_with_log", lambda *arguments, **options: link(*arguments, **options)._replace(log=log)
    )
    monkeypatch.setattr(cubins, "read", lambda name: None)
    monkeypatch.setattr(cubins, "write", lambda name, data: None)
    with caplog.at_level(logging.INFO, "stoneware.tile"):
        assert sw.tile.link(tile_layer.source(mm), [mm]).log == log
    assert [(record.levelno, log in record.getMessage()) for record in caplog.records] == [(level, True)]


def test_instructions_that_ptxas_serializes_are_reported(caplog):
    """A loop that starts a matmul while the last one runs, of which none runs before the loop."""
    mm = sw.tile.matmul(m=128, n=256, k=64, a="bf16", b="bf16", threads=256)
    start = "mm::start_forward(s, *t, *(mm::TileB*)(t + 1)); "
    text = """extern "C" __global__ void __launch_bounds__(256) k(mm::TileA* t, float* out, int n) {
      mm::SumC s; s.Clear(); %s for (int i = 0; i < n; ++i) { %s stoneware::tile::WaitForMatmuls<1>(s); }
      stoneware::tile::WaitForMatmuls(s); s.Store(out, 256); }"""
    assert sw.tile.link(text % (start, start), [mm]).log == ""
    assert caplog.records == []
    linked = sw.tile.link(text % ("", start), [mm])
    assert "wgmma.mma_async instructions are serialized" in linked.log
    assert "nvJitLink says of k: " in caplog.text


@pytest.mark.parametrize("tile", tile_bench.TILES, ids=lambda tile: "x".join(map(str, tile)))
def test_a_loop_has_hardly_more_instructions_than_one_by_hand(tile):
    """Loads, descriptors and wgmma of the benchmark's kernels, which have the same stages."""
    loops = {}
    for name, (linked, _) in tile_bench.kernels(*tile).items():
        [loops[name]] = machine_code.matmul_loops(linked.cubin)
    assert any("HGMMA" in instruction for instruction in loops["by_hand"])
    assert len(loops["by_tile"]) <= 1.15 * len(loops["by_hand"])
