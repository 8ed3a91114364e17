"""The options of torch.compile: Inductor takes them, its cache tells them apart, and without them nothing changes."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config
from torch._inductor.select_algorithm import extern_kernels
from torch._inductor.utils import run_and_get_code
from torch.nn import functional

import stoneware as sw
from stoneware.inductor import EpilogueFusion, candidates

M, N, K = 24, 64, 32


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def test_options_hold_for_one_model():
    before = config.post_grad_custom_pre_pass, list(config.external_matmul)
    options = sw.inductor.options()
    assert isinstance(options["post_grad_custom_pre_pass"], EpilogueFusion)
    torch.compile(torch.nn.Linear(2, 2), options={"max_autotune": True, **options})  # checks their names and types
    assert (config.post_grad_custom_pre_pass, config.external_matmul) == before


def test_each_option_can_be_left_out():
    assert list(sw.inductor.options(matmul_candidates=False)) == ["post_grad_custom_pre_pass"]
    assert list(sw.inductor.options(fuse_epilogues=False)) == ["external_matmul"]


def test_inductor_compiles_a_fused_graph():
    """All of the graph is one call, so that Inductor compiles no C++."""
    a, w, r = (torch.randn(shape).bfloat16() for shape in ((M, K), (N, K), (M, N)))

    def block(a, w, r):
        return functional.silu(sw.matmul(a, w.t())) * r

    fusion = EpilogueFusion(always=True)
    seen = []

    class Spy(EpilogueFusion):
        def __call__(self, graph):
            fusion(graph)
            seen.append([str(node.target) for node in graph.nodes])

    compiled = torch.compile(block, options={"post_grad_custom_pre_pass": Spy()}, fullgraph=True)
    with torch.no_grad():
        result = compiled(a, w, r)
    assert len(seen) == 1 and "stoneware.matmul_epilogue.default" in seen[0]
    expected = functional.silu(a.double() @ w.double().t()) * r.double()
    assert (result.double() - expected).norm() < 0.004 * expected.norm()


def test_the_key_of_inductor_s_cache_has_all_that_decides():
    uuid = EpilogueFusion().uuid()
    assert EpilogueFusion().uuid() == uuid
    assert EpilogueFusion(always=True).uuid() != uuid
    with sw.batch_invariant():
        assert EpilogueFusion().uuid() != uuid
    from torch._inductor.codecache import FxGraphHashDetails

    details = []
    for options in ({}, sw.inductor.options(matmul_candidates=False)):
        with config.patch(options):
            details.append(FxGraphHashDetails(torch.fx.symbolic_trace(torch.nn.Identity()), [], {}, []))
    assert details[0].post_grad_custom_pre_pass is None
    assert details[1].post_grad_custom_pre_pass == uuid


def test_inductor_runs_a_candidate():
    a, b = torch.randn(M, K).bfloat16(), torch.randn(N, K).bfloat16().t()
    # Without kernels of torch's the candidate is the only one.
    only = {"max_autotune": True, "max_autotune_gemm_backends": "NONE"}
    compiled = torch.compile(torch.mm, options={**only, **sw.inductor.options(fuse_epilogues=False)})
    with torch.no_grad():
        result, [code] = run_and_get_code(compiled, a, b)
    assert "extern_kernels.stoneware_mm(" in code
    assert torch.equal(result, sw.matmul(a, b))


def test_a_candidate_is_known_to_generated_code_and_takes_every_dtype():
    sw.inductor.options()
    assert extern_kernels.stoneware_mm is candidates.stoneware_mm
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        a, b = torch.randn(M, K).to(dtype), torch.randn(N, K).to(dtype).t()
        out = torch.full((M, N), float("nan"), dtype=dtype)
        assert extern_kernels.stoneware_mm(a, b, out=out) is out
        expected = a.double() @ b.double()
        assert (out.double() - expected).norm() < 0.004 * expected.norm()
