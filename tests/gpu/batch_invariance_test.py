"""sw.batch_invariant: a row's bits are the same in any batch, whichever kernel runs."""

from __future__ import annotations

import pytest
import torch

import stoneware as sw
from stoneware.errors import UnsupportedError
from stoneware.kernels.config import Config
from stoneware.measuring import operands
from stoneware.ops import vendor_bits
from stoneware.ops.matmul import api as matmul_api
from stoneware.specs.matmul_problem import Problem

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="the order of sums is known of the kernels for compute capability 9.0 alone",
)

ROWS = 700
PARTS = ((0, 1), (17, 1), (3, 7), (37, 32), (5, 100), (256, 128), (77, 300), (0, ROWS))
FP8 = torch.float8_e4m3fn


def drawn(n, k, dtype):
    a, b = torch.randn(ROWS, k, device="cuda").to(dtype), torch.randn(n, k, device="cuda").to(dtype)
    vendor_bits.cancel(a, b.t())
    return a, b


def assert_rows_are_the_same(call):
    """`call` takes a slice of the rows."""
    whole = call(slice(0, ROWS)).view(torch.int16).clone()
    for begin, count in PARTS:
        part = call(slice(begin, begin + count)).view(torch.int16)
        assert torch.equal(part, whole[begin : begin + count]), f"rows {begin} to {begin + count}"


SHAPES = [(1024, 4096), (512, 14336), (4096, 1536), (272, 2064)]


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_matmul(n, k, has_bias, dtype):
    a, b = drawn(n, k, dtype)
    bias = torch.randn(n, device="cuda").to(dtype) if has_bias else None
    with sw.batch_invariant():
        assert_rows_are_the_same(lambda rows: sw.matmul(a[rows], b.t(), bias))


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("scales", ["row", "tensor", "block"])
def test_scaled_mm(n, k, scales, fast):
    if scales == "block":
        k = k // 128 * 128
    a, b = drawn(n, k, FP8)
    blocks, columns = k // 128, -(-n // 128)
    shapes = {"row": ((ROWS, 1), (1, n)), "tensor": ((1, 1), (1, 1)), "block": ((ROWS, blocks), (blocks, columns))}
    scale_a, scale_b = (torch.rand(shape, device="cuda") + 0.5 for shape in shapes[scales])

    def call(rows):
        of_rows = scale_a if scales == "tensor" else scale_a[rows]
        return sw.scaled_mm(a[rows], b.t(), of_rows, scale_b, use_fast_accum=fast)

    with sw.batch_invariant():
        assert_rows_are_the_same(call)


@pytest.mark.parametrize("scales", ["none", "row", "block"])
def test_grouped_mm_gives_a_row_the_same_bits_in_any_group(scales):
    n, k, groups = 1024, 2048, 4
    a, b = drawn(n, k, torch.bfloat16 if scales == "none" else FP8)
    weights = b.expand(groups, n, k).contiguous().mT
    shapes = {"none": (), "row": ((ROWS,), (n,)), "block": ((ROWS, k // 128), (k // 128, n // 128))}[scales]
    drawn_scales = [torch.rand(shape, device="cuda") + 0.5 for shape in shapes]
    if drawn_scales:
        drawn_scales[1] = drawn_scales[1].expand(groups, *shapes[1]).contiguous()
    results = []
    with sw.batch_invariant():
        for ends in ([0, 1, 5, ROWS], [ROWS // 2, ROWS // 2, ROWS - 1, ROWS], [ROWS, ROWS, ROWS, ROWS]):
            offs = torch.tensor(ends, device="cuda", dtype=torch.int32)
            results.append(sw.grouped_mm(a, weights, offs, *drawn_scales).view(torch.int16))
    assert all(torch.equal(result, results[0]) for result in results)


def test_it_holds_in_graphs_and_under_compile():
    a, b = drawn(1024, 4096, torch.bfloat16)
    compiled = torch.compile(lambda x: sw.matmul(x, b.t()), fullgraph=True, dynamic=True)
    with sw.batch_invariant():
        whole = sw.matmul(a, b.t()).view(torch.int16)
        for rows in (slice(0, 1), slice(3, 20), slice(100, 400)):
            assert torch.equal(compiled(a[rows]).view(torch.int16), whole[rows])
            graph, part = torch.cuda.CUDAGraph(), a[rows].clone()
            sw.matmul(part, b.t())
            with torch.cuda.graph(graph):
                out = sw.matmul(part, b.t())
            graph.replay()
            assert torch.equal(out.view(torch.int16), whole[rows])


def test_a_capture_without_a_call_before_it_has_the_same_bits():
    a, b = drawn(2048, 1024, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with sw.batch_invariant():
        with torch.cuda.graph(graph):
            out = sw.matmul(a[:600], b.t())
        graph.replay()
        assert torch.equal(out.view(torch.int16), sw.matmul(a, b.t())[:600].view(torch.int16))


def test_a_config_with_another_order_is_refused():
    a, b = drawn(1024, 4096, torch.bfloat16)
    for config in (
        Config(backend="sm90", kernel="matmul_sm90_bf16_bf16_bf16_64x16x128_1x1x1_splitk1x9_swap", splits=4),
        Config(backend="reference", kernel="torch.matmul_float32"),
    ):
        sw.matmul(a, b.t(), config=config)
        with sw.batch_invariant(), pytest.raises(UnsupportedError, match="batch invariant"):
            sw.matmul(a, b.t(), config=config)


@pytest.mark.parametrize(("m", "n", "k"), [(4096, 4096, 4096), (8, 4096, 14336), (2048, 512, 14336), (1, 1536, 8960)])
def test_the_vendor_is_taken_only_where_its_bits_are_ours(m, n, k, device):
    problem = Problem.dense(m=m, n=n, k=k)
    with sw.batch_invariant():
        state = torch.cuda.get_rng_state()
        config = matmul_api.OPERATION.backends["vendor"].config
        reason = vendor_bits.why_not(matmul_api.OPERATION, config, problem, device, may_run=True)
        assert torch.equal(state, torch.cuda.get_rng_state()), "the check drew from the user's random numbers"
        tensors = operands.make(problem, "cuda")
        vendor_bits.cancel(tensors.a, tensors.b)
        ours = sw.matmul(tensors.a, tensors.b, backend="sm90").view(torch.int16)
    torchs = torch.mm(tensors.a, tensors.b).view(torch.int16)
    assert torch.equal(ours, torchs) == (reason is None), reason


def test_measuring_on_a_miss_times_every_config(tmp_path, monkeypatch):
    monkeypatch.setenv("STONEWARE_CACHE_DIR", str(tmp_path))
    a, b = drawn(144, 4000, torch.bfloat16)
    with sw.batch_invariant(), sw.tuning("on_miss"):
        whole = sw.matmul(a[:20], b.t()).view(torch.int16)
        explained = sw.explain("matmul", m=20, n=144, k=4000)
    assert explained.step == "exact" and explained.sum_order.startswith("one sum")
    choices = [explained.decision.chosen, *explained.decision.runners_up]
    assert any(choice.config.splits > 1 for choice in choices), "split kernels were not timed"
    with sw.batch_invariant():
        assert torch.equal(whole, sw.matmul(a, b.t())[:20].view(torch.int16))
