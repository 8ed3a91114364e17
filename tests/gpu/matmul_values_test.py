"""Every matmul kernel that fits the GPU is right: all shapes, views, layouts, batches, dtypes."""

from __future__ import annotations

import dataclasses
import math
import sys

import fitting_kernels
import pytest
import torch

import stoneware
from stoneware.errors import UnsupportedError
from stoneware.kernels import split_k
from stoneware.measuring import operands
from stoneware.ops.matmul import api
from stoneware.ops.tensor_checks import DTYPE_NAMES, TORCH_DTYPES
from stoneware.specs import tolerance
from stoneware.specs.matmul_problem import Problem

KERNELS = fitting_kernels.of("matmul")


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem without dtype and layout; pad_a, pad_b, pad_out: elements that rows skip, like in views."""

    m: int
    n: int
    k: int
    has_bias: bool = False
    pad_a: int = 0
    pad_b: int = 0
    pad_out: int = 32

    def problem(self, dtype: str, out_dtype: str, layout: str) -> Problem:
        dense = Problem.dense(
            # A column-major a is moved in units of 16 bytes along m.
            m=self.m if layout[0] == "n" else -(-self.m // 8) * 8,
            n=self.n,
            k=self.k,
            dtype=dtype,
            out_dtype=out_dtype,
            layout=layout,
            has_bias=self.has_bias,
        )
        return dataclasses.replace(
            dense, lda=dense.lda + self.pad_a, ldb=dense.ldb + self.pad_b, ldd=dense.ldd + self.pad_out
        )

    def __str__(self) -> str:
        bias = "-bias" if self.has_bias else ""
        return f"{self.m}x{self.n}x{self.k}{bias}-pad{self.pad_a}_{self.pad_b}_{self.pad_out}"


CASES = [
    Case(1, 16, 16),
    Case(1, 4096, 4096, has_bias=True, pad_out=0),
    Case(17, 2112, 7168, has_bias=True, pad_a=16, pad_b=48),
    Case(129, 144, 4112, pad_a=4096),
    Case(300, 1040, 272, has_bias=True, pad_b=16, pad_out=64),
    Case(2048, 4096, 1024, pad_out=0),
    Case(33, 33808, 144, has_bias=True),  # more tiles than blocks that an H200 holds at a time
    Case(401, 65600, 48, has_bias=True),  # a dozen tiles for each block, of one step of k
]


@pytest.mark.parametrize("kernel", KERNELS, ids=fitting_kernels.kernel_id)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_agrees_with_float64_and_writes_only_its_output(kernel, case, device):
    config = kernel.config
    problem = case.problem(config["a"], config["out"], config["layout"])
    tensors = operands.make(problem, "cuda")
    if case.pad_out:
        tensors = operands.guarded(tensors)
    api.OPERATION.make_plan(problem, fitting_kernels.config(kernel), device)(*tensors.arguments)
    torch.cuda.synchronize()
    comparison = operands.compare(tensors.out, operands.reference(tensors), tensors.problem)
    assert comparison.is_right, str(comparison)
    assert tensors.is_guard_unharmed()


K_OF_SPLITS = 2440  # 20 tiles of 128, the last of 8: shares that differ


@pytest.mark.parametrize("m", [1, 40, 203])
@pytest.mark.parametrize(
    ("kernel", "splits"),
    fitting_kernels.with_splits(KERNELS, 203, 1040, K_OF_SPLITS),
    ids=lambda value: value if isinstance(value, int) else value.id,
)
def test_blocks_that_share_k_agree_with_float64(kernel, splits, m, device):
    problem = Case(m, 1040, K_OF_SPLITS).problem(kernel.config["a"], kernel.config["out"], kernel.config["layout"])
    tensors = operands.guarded(operands.make(problem, "cuda"))
    api.OPERATION.make_plan(problem, fitting_kernels.config(kernel, splits), device)(*tensors.arguments)
    torch.cuda.synchronize()
    comparison = operands.compare(tensors.out, operands.reference(tensors), tensors.problem)
    assert comparison.is_right, str(comparison)
    assert tensors.is_guard_unharmed()


@pytest.mark.parametrize(
    ("kernel", "splits"),
    [(kernel, 1) for kernel in KERNELS] + fitting_kernels.with_splits(KERNELS, 200, 264, K_OF_SPLITS),
    ids=lambda value: value if isinstance(value, int) else value.id,
)
def test_an_element_has_the_same_bits_wherever_it_lies_in_a_tile(kernel, splits, device):
    """Tiles overlap at the ends of m and n, and rows of a batch lie at any place."""
    # Triton's kernels take multiples of 16.
    n, k = (272, K_OF_SPLITS + 8) if kernel.backend == "triton_aot" else (264, K_OF_SPLITS)
    problem = Case(200, n, k).problem(kernel.config["a"], kernel.config["out"], kernel.config["layout"])
    tensors = operands.make(problem, "cuda")
    tensors.a.copy_(tensors.a[:1].clone().expand_as(tensors.a))
    tensors.b.copy_(tensors.b[:, :1].clone().expand_as(tensors.b))
    api.OPERATION.make_plan(problem, fitting_kernels.config(kernel, splits), device)(*tensors.arguments)
    assert tensors.out.unique().numel() == 1


@pytest.mark.parametrize(
    "kernel", [kernel for kernel in KERNELS if kernel.config.get("pingpong")], ids=fitting_kernels.kernel_id
)
def test_tiles_of_both_warp_groups_have_the_same_bits(kernel, device):
    problem = Case(2000, 8200, K_OF_SPLITS).problem(kernel.config["a"], kernel.config["out"], kernel.config["layout"])
    tensors = operands.make(problem, "cuda")
    tensors.a.copy_(tensors.a[:1].clone().expand_as(tensors.a))
    tensors.b.copy_(tensors.b[:, :1].clone().expand_as(tensors.b))
    api.OPERATION.make_plan(problem, fitting_kernels.config(kernel), device)(*tensors.arguments)
    assert tensors.out.unique().numel() == 1


OF_GRID = [kernel for kernel in KERNELS if kernel.config.get("shares") == "grid"]


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("kernel", OF_GRID[::4], ids=fitting_kernels.kernel_id)
def test_clusters_that_share_k_may_run_on_two_streams(kernel, is_captured, device):
    # Few tiles, so that the kernels of both streams run at one time.
    problem = Case(96, 208, 16384).problem(kernel.config["a"], kernel.config["out"], kernel.config["layout"])
    plan = api.OPERATION.make_plan(problem, fitting_kernels.config(kernel, 8), device)
    drawn = [operands.make(problem, "cuda") for _ in range(2)]
    expected = []
    for tensors in drawn:
        plan(*tensors.arguments)
        expected.append(tensors.out.clone())
    streams = [torch.cuda.Stream() for _ in drawn]

    def run(tensors) -> None:
        for _ in range(20):
            plan(*tensors.arguments)

    graphs = [torch.cuda.CUDAGraph() for _ in drawn]
    if is_captured:
        for graph, tensors in zip(graphs, drawn):
            with torch.cuda.graph(graph, stream=streams[0]):
                run(tensors)
    torch.cuda.synchronize()
    for _ in range(50):
        for tensors in drawn:
            tensors.out.fill_(math.nan)
        torch.cuda.synchronize()
        for stream, graph, tensors in zip(streams, graphs, drawn):
            with torch.cuda.stream(stream):
                if is_captured:
                    graph.replay()
                else:
                    run(tensors)
        torch.cuda.synchronize()
        for tensors, wanted in zip(drawn, expected):
            assert torch.equal(tensors.out, wanted)


SM90 = [kernel for kernel in KERNELS if kernel.backend == "sm90"]
OF_BATCHES = [kernel for kernel in SM90 if not split_k.is_splitk_sm90(kernel)]


@pytest.mark.parametrize("kernel", OF_BATCHES, ids=fitting_kernels.kernel_id)
@pytest.mark.parametrize("shared", ["", "a", "b"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_kernel_computes_every_product_of_a_batch(kernel, shared, has_bias, device):
    batch, m, n, k = 3, 40, 208, 136
    dtype, out_dtype = (TORCH_DTYPES[kernel.config[name]] for name in ("a", "out"))
    a_is_row_major, b_is_row_major = (letter == "n" for letter in kernel.config["layout"])
    a = matrices(1 if shared == "a" else batch, m, k, a_is_row_major, dtype).expand(batch, m, k)
    b = matrices(1 if shared == "b" else batch, k, n, b_is_row_major, dtype).expand(batch, k, n)
    bias = torch.randn(n, device="cuda").mul(k**0.5).to(out_dtype) if has_bias else None
    base = torch.full((batch, m + 1, n + 8), math.nan, dtype=out_dtype, device="cuda")
    out = base[:, :m, :n]
    problem = Problem(
        m=m,
        n=n,
        k=k,
        a_dtype=kernel.config["a"],
        b_dtype=kernel.config["b"],
        out_dtype=kernel.config["out"],
        layout=kernel.config["layout"],
        has_bias=has_bias,
        lda=a.stride(1 if a_is_row_major else 2),
        ldb=b.stride(1 if b_is_row_major else 2),
        ldd=out.stride(1),
        batch=batch,
        batch_stride_a=a.stride(0),
        batch_stride_b=b.stride(0),
        batch_stride_d=out.stride(0),
    )
    api.OPERATION.make_plan(problem, fitting_kernels.config(kernel), device)(a, b, out, bias)
    expected = a.double() @ b.double() + (bias.double() if has_bias else 0)
    comparison = operands.compare(out, expected, problem)
    assert comparison.is_right, str(comparison)
    out.fill_(math.nan)
    assert base.isnan().all()


def matrices(batch: int, num_rows: int, num_columns: int, is_row_major: bool, dtype: torch.dtype) -> torch.Tensor:
    """Random views of one orientation; what they skip is NaN."""
    outer, inner = (num_rows, num_columns) if is_row_major else (num_columns, num_rows)
    base = torch.full((batch, outer + 1, inner + 16), math.nan, dtype=dtype, device="cuda")
    view = base[:, :outer, :inner]
    view.copy_(torch.randn(batch, outer, inner, device="cuda"))
    return view if is_row_major else view.mT


def test_kernel_sums_any_number_of_products_where_no_operand_is_contiguous_along_k(device):
    """A weight's gradient: k is the number of tokens, which is odd in the end."""
    problem = Problem.dense(m=256, n=512, k=1001, layout="tn", out_dtype="bf16")
    tensors = operands.make(problem, "cuda")
    for config in api.OPERATION.backends["sm90"].configs(problem, device):
        tensors.poison()
        api.OPERATION.make_plan(problem, config, device)(*tensors.arguments)
        comparison = operands.compare(tensors.out, operands.reference(tensors), problem)
        assert comparison.is_right, f"{config}: {comparison}"


SHAPES = {
    # shapes of a and b as they lie in memory, and what makes the operands of them
    "linear layer": ((4, 33, 256), (512, 256), lambda a, b: (a, b.mT)),
    "row": ((256,), (256, 512), lambda a, b: (a, b)),
    "column": ((512, 256), (256,), lambda a, b: (a, b)),
    "column for all": ((3, 512, 256), (256,), lambda a, b: (a, b)),
    "row for all": ((256,), (3, 256, 64), lambda a, b: (a, b)),
    "row and column": ((256,), (256,), lambda a, b: (a, b)),
    "batch": ((5, 64, 128), (5, 72, 128), lambda a, b: (a, b.mT)),
    "a for all": ((64, 128), (5, 128, 72), lambda a, b: (a, b)),
    "heads": ((2, 77, 4, 64), (2, 88, 4, 64), lambda a, b: (a.transpose(1, 2), b.permute(0, 2, 3, 1))),
    "b for some": ((2, 3, 16, 64), (3, 64, 40), lambda a, b: (a, b)),
    "odd sizes": ((3, 5), (5, 7), lambda a, b: (a, b)),
    "odd stride": ((64, 257), (256, 64), lambda a, b: (a[:, :256], b)),
    "unaligned": ((64, 264), (256, 64), lambda a, b: (a[:, 1:257], b)),
    "every other element": ((64, 512), (256, 64), lambda a, b: (a[:, ::2], b)),
}


@pytest.mark.parametrize("backend", [None, "sm90", "vendor", "reference"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", SHAPES)
def test_public_call_takes_what_torch_matmul_takes(name, out_dtype, backend, device):
    a_shape, b_shape, views = SHAPES[name]
    a, b = views(torch.randn(a_shape, device="cuda").bfloat16(), torch.randn(b_shape, device="cuda").bfloat16())
    try:
        result = stoneware.matmul(a, b, out_dtype=out_dtype, backend=backend)
    except UnsupportedError as error:
        assert backend == "sm90"
        pytest.skip(str(error))
    expected = a.double() @ b.double()
    assert result.shape == expected.shape
    assert result.dtype == out_dtype
    k = a.shape[-1]
    limit = tolerance.on_gpu("bf16", DTYPE_NAMES[out_dtype], k)
    # The products of a single element may cancel.
    of_products = torch.linalg.norm(a.double().abs() @ b.double().abs()) / k**0.5
    size = torch.maximum(torch.linalg.norm(expected), of_products)
    assert torch.linalg.norm(result.double() - expected) < limit * size


@pytest.mark.parametrize("backend", [None, "sm90", "triton_aot", "vendor", "reference"])
@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_public_call_agrees_with_float64(dtype, layout, backend, device):
    problem = Problem.dense(m=304, n=1040, k=528, dtype=dtype, out_dtype=dtype, layout=layout, has_bias=True)
    if backend is not None:
        reason = api.OPERATION.backends[backend].supports(problem, device)
        if reason is not None:
            fitting = {
                (kernel.backend, kernel.config["layout"], kernel.config["a"], kernel.config["out"])
                for kernel in KERNELS
            }
            assert (backend, layout, dtype, dtype) not in fitting, reason
            pytest.skip(reason)
    tensors = operands.make(problem, "cuda")
    result = stoneware.matmul(tensors.a, tensors.b, tensors.bias, backend=backend)
    comparison = operands.compare(result, operands.reference(tensors), tensors.problem)
    assert comparison.is_right, str(comparison)


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("m", "n"), [(200, 264), (2112, 2088)], ids=["a tile a block", "tiles after one another"])
def test_products_are_added_to_out(m, n, out_dtype, layout, device):
    """Once, whatever computes them: each tile, tails and splits included. Rows between those of out stay."""
    problem = Problem.dense(m=m, n=n, k=1032, out_dtype=DTYPE_NAMES[out_dtype], layout=layout)
    accumulating = dataclasses.replace(problem, ldd=problem.ldd + 32, accumulate=True)
    configs = [
        config
        for backend in api.OPERATION.backends.values()
        if backend.supports(accumulating, device) is None
        for config in backend.configs(accumulating, device)
    ]
    fitting = {
        kernel.config["layout"] for kernel in KERNELS if "splitk" in kernel.id and kernel.config["out"] == "fp32"
    }
    assert {"vendor", "reference"} <= {config.backend for config in configs}
    assert ("sm90" in {config.backend for config in configs}) == (out_dtype == torch.float32 and layout in fitting)
    tensors = operands.make(problem, "cuda")
    before = torch.randn(m, n + 32, device="cuda", dtype=out_dtype)
    expected = before[:, :n].double() + tensors.a.double() @ tensors.b.double()
    for config in configs:
        base = before.clone()
        out = base[:, :n]
        assert stoneware.matmul(tensors.a, tensors.b, out=out, accumulate=True, config=config) is out
        error = torch.linalg.norm(out.double() - expected) / torch.linalg.norm(expected)
        assert error < tolerance.on_gpu("bf16", DTYPE_NAMES[out_dtype], 1032), config
        assert torch.equal(base[:, n:], before[:, n:]), config


@pytest.mark.parametrize("b_shape", [(4, 528, 264), (528, 264), (528,)], ids=["batch", "shared", "vector"])
def test_products_of_a_batch_are_added_to_out(b_shape, device):
    a, b = (torch.randn(shape, device="cuda").bfloat16() for shape in ((4, 200, 528), b_shape))
    out = torch.randn(4, 200, *b_shape[-1:] * (len(b_shape) > 1), device="cuda")
    expected = out.double() + a.double() @ b.double()
    stoneware.matmul(a, b, out=out, accumulate=True)
    assert torch.linalg.norm(out.double() - expected) / torch.linalg.norm(expected) < 1e-5


@pytest.mark.parametrize("backend", ["sm90", "vendor"])
def test_a_graph_adds_to_out_at_each_replay(backend, device):
    dy, x = (torch.randn(2048, size, device="cuda").bfloat16() for size in (264, 528))
    weight_gradient = dy.t(), x
    out = torch.zeros(264, 528, device="cuda")
    if backend == "sm90" and not any(kernel.config["out"] == "fp32" and "splitk" in kernel.id for kernel in KERNELS):
        pytest.skip("this build has no kernel that adds to out")
    stoneware.matmul(*weight_gradient, out=out, accumulate=True, backend=backend)
    once = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stoneware.matmul(*weight_gradient, out=out, accumulate=True, backend=backend)
    graph.replay()
    graph.replay()
    assert torch.linalg.norm(out - 3 * once) / torch.linalg.norm(once) < 1e-5


def test_sizes_that_no_kernel_of_ours_takes_fall_to_the_vendor(device):
    problem = Problem.dense(m=3, n=7, k=5)
    tensors = operands.make(problem, "cuda")
    result = stoneware.matmul(tensors.a, tensors.b)
    comparison = operands.compare(result, operands.reference(tensors), tensors.problem)
    assert comparison.is_right, str(comparison)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-rs"]))
