"""The ops under torch.compile and torch.export, as operators of torch's."""

from __future__ import annotations

import pytest
import torch
from operands import poisoned, random_fp8, scaled_operands

import stoneware as sw
from stoneware.kernels.config import Config
from stoneware.ops import registration
from stoneware.ops.scaled_mm import api

N, K = 48, 64
REFERENCE = Config(backend="reference", kernel="torch.matmul_float32", max_swizzle=1, raster="heuristic")


def grouped_operands(dtype: str, ends: list[int], rows: int = 0) -> tuple:
    """The tensors of grouped_mm: groups that end at these rows, and some rows after them."""
    m, groups = ends[-1] + rows, len(ends)
    a, weights = random_fp8(m, K), random_fp8(groups * N, K).view(groups, N, K)
    offs = torch.tensor(ends, dtype=torch.int32)
    if dtype == "bf16":
        return a.bfloat16(), weights.bfloat16().mT, offs, None, None
    return a, weights.mT, offs, torch.rand(m) + 0.5, torch.rand(groups, N) + 0.5


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


compilers = pytest.mark.parametrize("compiler", ["eager", "aot_eager"])


@compilers
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_scaled_mm_is_one_graph_for_every_m(compiler, dynamic):
    graphs = []

    def block(a, b, scale_a, scale_b, bias):
        return sw.scaled_mm(a, b, scale_a, scale_b, bias).relu()

    def counting(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(compiler)(graph, inputs)

    compiled = torch.compile(block, backend=counting, fullgraph=True, dynamic=dynamic)
    for m in (16, 17, 40):
        x = scaled_operands(m, N, K, bias_dtype=torch.bfloat16)
        arguments = x.a, x.b, x.scale_a, x.scale_b, x.bias
        assert torch.equal(compiled(*arguments), block(*arguments))
    assert len(graphs) == {None: 2, True: 1, False: 3}[dynamic]
    assert any("stoneware.scaled_mm" in str(node.target) for node in graphs[-1].graph.nodes)


@compilers
def test_out_is_written(compiler):
    def block(a, b, scale_a, scale_b, out):
        out.mul_(2)
        result = sw.scaled_mm(a, b, scale_a, scale_b, out=out)
        return result + 1

    x = scaled_operands(32, N, K)
    out = poisoned(32, N, torch.bfloat16)
    arguments = x.a, x.b, x.scale_a, x.scale_b
    result = torch.compile(block, backend=compiler, fullgraph=True)(*arguments, out)
    expected = sw.scaled_mm(*arguments)
    assert torch.equal(out, expected)
    assert torch.equal(result, expected + 1)


@compilers
def test_backend_and_config_reach_the_call(compiler, monkeypatch):
    x = scaled_operands(32, N, K)
    arguments = x.a, x.b, x.scale_a, x.scale_b
    seen = []
    whole = api._Plans.checked_plan

    def checked_plan(*values):
        seen.append(values)
        return whole(*values)

    monkeypatch.setattr(api, "_PLANS", type(api._PLANS)())
    monkeypatch.setattr(api._Plans, "checked_plan", checked_plan)

    def block(*tensors):
        return sw.scaled_mm(
            *tensors, out_dtype=torch.float16, use_fast_accum=False, backend="reference", config=REFERENCE
        )

    result = torch.compile(block, backend=compiler, fullgraph=True)(*arguments)
    assert result.dtype == torch.float16
    ((*_, use_fast_accum, backend, config),) = seen
    assert (backend, config) == ("reference", REFERENCE)
    assert use_fast_accum is False


@compilers
def test_matmul(compiler):
    def block(a, b, bias):
        return sw.matmul(a, b, bias, config=REFERENCE) * 2

    compiled = torch.compile(block, backend=compiler, fullgraph=True)
    for m in (8, 9, 31):
        a, b = torch.randn(m, 24).bfloat16(), torch.randn(24, 40).bfloat16()
        bias = torch.randn(40).bfloat16()
        assert torch.equal(compiled(a, b, bias), block(a, b, bias))


@compilers
def test_matmul_into_out(compiler):
    def block(a, b, out):
        sw.matmul(a, b, out=out)
        return out.sum()

    a, b, out = torch.randn(8, 24).half(), torch.randn(24, 40).half(), poisoned(8, 40, torch.half)
    torch.compile(block, backend=compiler, fullgraph=True)(a, b, out)
    assert torch.equal(out, sw.matmul(a, b))


@compilers
@pytest.mark.parametrize("dtype", ["e4m3", "bf16"])
def test_grouped_mm(compiler, dtype):
    def block(*tensors):
        return sw.grouped_mm(*tensors, backend="reference") * 2

    compiled = torch.compile(block, backend=compiler, fullgraph=True)
    for ends in ([3, 3, 16], [0, 17, 40], [16, 16, 16]):
        tensors = grouped_operands(dtype, ends)
        assert torch.equal(compiled(*tensors), block(*tensors))


@compilers
def test_grouped_mm_into_out(compiler):
    def block(tensors, out):
        sw.grouped_mm(*tensors, out=out)
        return out.sum()

    tensors, out = grouped_operands("e4m3", [5, 9, 32]), poisoned(32, N, torch.bfloat16)
    torch.compile(block, backend=compiler, fullgraph=True)(tensors, out)
    assert torch.equal(out, sw.grouped_mm(*tensors))


def test_gradient_is_refused_when_the_graph_is_made():
    tensors = grouped_operands("e4m3", [3, 8])
    tensors[3].requires_grad_()
    compiled = torch.compile(lambda *tensors: sw.grouped_mm(*tensors), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="grouped_mm has no backward in fp8, and scale_a requires a gradient"):
        compiled(*tensors)
    with torch.no_grad():
        assert torch.equal(compiled(*tensors), sw.grouped_mm(*tensors))


def test_shapes_that_do_not_fit_are_refused_when_the_graph_is_made():
    compiled = torch.compile(lambda a, b: sw.matmul(a, b), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="of matmul must agree in k"):
        compiled(torch.randn(8, 24).bfloat16(), torch.randn(16, 40).bfloat16())
    compiled = torch.compile(sw.grouped_mm, backend="aot_eager", fullgraph=True)
    a, weights, *rest = grouped_operands("bf16", [3, 8])
    with pytest.raises(Exception, match="of grouped_mm must agree in k"):
        compiled(a[:, :32], weights, *rest)


@pytest.mark.parametrize("strict", [True, False])
def test_export_with_a_symbolic_m(strict):
    class Block(torch.nn.Module):
        def forward(self, a, b, scale_a, scale_b):
            return sw.scaled_mm(a, b, scale_a, scale_b)

    x = scaled_operands(32, N, K)
    m = torch.export.Dim("m", min=2, max=4096)
    program = torch.export.export(
        Block(), (x.a, x.b, x.scale_a, x.scale_b), dynamic_shapes=({0: m}, None, {0: m}, None), strict=strict
    )
    y = scaled_operands(77, N, K)
    arguments = y.a, y.b, y.scale_a, y.scale_b
    assert torch.equal(program.module()(*arguments), sw.scaled_mm(*arguments))


@pytest.mark.parametrize("name", ["scaled_mm", "scaled_mm_out", "matmul", "matmul_out", "grouped_mm", "grouped_mm_out"])
def test_operator_passes_torch_s_own_checks(name):
    if name.startswith("scaled_mm"):
        x = scaled_operands(32, N, K, bias_dtype=torch.bfloat16)
        tensors = [x.a, x.b, x.scale_a, x.scale_b, x.bias]
        others = (torch.bfloat16, True, None, None)
    elif name.startswith("matmul"):
        tensors = [torch.randn(32, K).bfloat16(), torch.randn(K, N).bfloat16(), None]
        others = (None, name.endswith("_out"), "reference", None)
    else:
        tensors = [*grouped_operands("bf16", [4, 20, 32])]
        others = (None, "reference", None)
    if name.endswith("_out"):
        tensors.append(torch.zeros(32, N, dtype=torch.bfloat16))
    # test_schema multiplies the arguments, which torch cannot do with fp8.
    utils = ["test_faketensor", "test_aot_dispatch_dynamic"]
    utils += [] if name.startswith("scaled_mm") else ["test_schema"]
    torch.library.opcheck(getattr(torch.ops.stoneware, name), (*tensors, *others), test_utils=utils)


def test_config_goes_through_an_operator_unchanged():
    config = Config(backend="sm90", kernel="a'b", max_swizzle=4, raster="along_n")
    assert registration._config(registration._text(config)) == config
    assert registration._config(None) is None
