"""Every grouped_mm kernel that fits the GPU is right: ragged groups, views, offsets that change."""

from __future__ import annotations

import math
import sys

import fitting_kernels
import pytest
import torch

import stoneware
from stoneware.ops.grouped_mm import api
from stoneware.ops.tensor_checks import TORCH_DTYPES
from stoneware.specs import tolerance
from stoneware.specs.grouped_mm_problem import Problem
from stoneware.specs.problem import unit
from stoneware.specs.scaled_mm_problem import BLOCK

KERNELS = fitting_kernels.of("grouped_mm")
every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=fitting_kernels.kernel_id)

GUARD = 8  # columns of 16 bits on each side of out: 16 bytes, so that it is aligned

CASES = {
    "one row": ([1], 16, 16),
    "short and long": ([0, 1, 17, 300, 0, 64, 65], 528, 1040),
    "a row each": ([1] * 16, 7168, 2048),
    "empty ends": ([0] * 20 + [33, 90, 1] + [0] * 20, 1552, 272),
    "one group of many": ([0] * 700 + [513] + [0] * 323, 512, 528),
    "many rows": ([2000, 1, 3001], 2064, 4112),
    "ends of tiles": ([255, 256, 257, 129, 128, 127, 385], 400, 384),
    "eight blocks of k": ([300, 90, 257], 400, 1024),
    "no rows": ([0, 0, 0], 512, 512),
}


class Tensors:
    """The tensors of one grouped matmul; elements that views skip, and the rows after the last group, are NaN."""

    def __init__(self, kernel, counts: list[int], n: int, k: int, rows_after: int, pad: int):
        dtype = TORCH_DTYPES[kernel.config["a"]]
        if kernel.config.get("scales") == "block":
            k = -(-k // BLOCK) * BLOCK
        self.counts = counts
        self.used = sum(counts)
        m, groups = self.used + rows_after, len(counts)
        padding = pad * unit(kernel.config["a"])
        self.a = _padded((m, k), padding, dtype)
        self.a[self.used :] = torch.full((rows_after, k), math.nan, device="cuda").to(dtype)
        self.b = _padded((groups, n, k), padding, dtype).mT
        self.base = torch.full(
            (m + 2, n + 2 * GUARD), math.nan, device="cuda", dtype=TORCH_DTYPES[kernel.config["out"]]
        )
        self.out = self.base[1 : m + 1, GUARD : GUARD + n]
        self.offs = torch.tensor(counts).cumsum(0).to(torch.int32).cuda()
        self.scale_a = self.scale_b = None
        strides = {}
        if kernel.config.get("scales") == "block":
            # Row-major of a, which quantize does not write, and column-major of b.
            self.scale_a = (torch.rand(m, k // BLOCK + 4, device="cuda") + 0.5)[:, : k // BLOCK]
            self.scale_b = torch.rand(groups, -(-n // BLOCK), k // BLOCK, device="cuda").mT + 0.5
            strides = {
                "has_block_scales": True,
                "scale_a_stride_m": self.scale_a.stride(0),
                "ld_scale_a": self.scale_a.stride(1),
                "group_stride_scale_b": self.scale_b.stride(0),
                "ld_scale_b": self.scale_b.stride(1),
                "scale_b_stride_n": self.scale_b.stride(2),
            }
        elif kernel.config["a"] == "e4m3":
            self.scale_a = torch.rand(m, device="cuda") + 0.5
            self.scale_b = torch.rand(groups, n, device="cuda") + 0.5
        self.problem = Problem(
            m=m,
            n=n,
            k=k,
            num_groups=groups,
            a_dtype=kernel.config["a"],
            b_dtype=kernel.config["a"],
            out_dtype=kernel.config["out"],
            lda=self.a.stride(0),
            ldb=self.b.stride(2),
            ldd=self.out.stride(0),
            group_stride_b=self.b.stride(0),
            **strides,
        )

    def run(self, kernel, device) -> None:
        plan = api.OPERATION.make_plan(self.problem, fitting_kernels.config(kernel), device)
        plan(self.a, self.b, self.out, self.offs, self.scale_a, self.scale_b)
        torch.cuda.synchronize()

    def check(self) -> None:
        """Every group is right, and nothing else was written."""
        limit = tolerance.on_gpu(self.problem.a_dtype, self.problem.out_dtype, self.problem.k)
        begin = 0
        for group, count in enumerate(self.counts):
            rows = slice(begin, begin + count)
            begin += count
            if not count:
                continue
            a, b = self.a[rows].float().double(), self.b[group].float().double()
            if self.problem.has_block_scales:
                a *= self.scale_a[rows].repeat_interleave(BLOCK, 1)
                b *= self.scale_b[group].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:, : self.problem.n]
            want = a @ b
            if self.problem.scales == "row":
                want *= self.scale_a[rows, None].double() * self.scale_b[group].double()
            error = (self.out[rows].double() - want).norm() / want.norm()
            assert error.item() < limit, f"group {group} of {count} rows"
        self.out[: self.used] = math.nan
        assert self.base.isnan().all()


def _scales(kernel) -> str:
    return kernel.config.get("scales") or ("row" if kernel.config["a"] == "e4m3" else "none")


def _padded(shape: tuple[int, ...], pad: int, dtype: torch.dtype) -> torch.Tensor:
    base = torch.full((*shape[:-1], shape[-1] + pad), math.nan, device="cuda").to(dtype)
    base[..., : shape[-1]] = torch.randn(*shape, device="cuda").to(dtype)
    return base[..., : shape[-1]]


@every_kernel
@pytest.mark.parametrize("pad", [0, 3], ids=["dense", "views"])
@pytest.mark.parametrize("case", CASES)
def test_kernel_agrees_with_float64_and_writes_only_its_rows(kernel, case, pad, device):
    tensors = Tensors(kernel, *CASES[case], rows_after=5, pad=pad)
    tensors.run(kernel, device)
    tensors.check()


@every_kernel
def test_groups_do_not_depend_on_the_rows_beside_them(kernel, device):
    """A NaN in one group's row spoils that row of the result and no other."""
    tensors = Tensors(kernel, [3, 2, 40, 1], 256, 512, rows_after=0, pad=0)
    tensors.run(kernel, device)
    expected = tensors.out.clone()
    tensors.a[4] = math.nan
    tensors.run(kernel, device)
    assert tensors.out[4].isnan().all()
    others = [row for row in range(46) if row != 4]
    assert torch.equal(tensors.out[others], expected[others])


@every_kernel
def test_an_element_has_the_same_bits_wherever_it_lies_in_a_tile(kernel, device):
    """Tiles begin at any row of a group, and overlap at its end and at that of n."""
    tensors = Tensors(kernel, [3, 200, 0, 129, 64], 272, 2432, rows_after=0, pad=0)
    tensors.a.copy_(tensors.a[:1].clone().expand_as(tensors.a))
    tensors.b.copy_(tensors.b[:1, :, :1].clone().expand_as(tensors.b))
    for scale in (tensors.scale_a, tensors.scale_b):
        if scale is not None:
            scale.fill_(0.7)
    tensors.run(kernel, device)
    assert tensors.out.unique().numel() == 1


@every_kernel
@pytest.mark.parametrize("offs", [[5, 3, 9, 9], [-4, 2, 90, 7], [100, 0, 100, 100]], ids=str)
def test_offsets_that_break_their_promise_write_nothing_beyond_out(kernel, offs, device):
    tensors = Tensors(kernel, [3, 2, 40, 1], 256, 512, rows_after=0, pad=0)
    tensors.offs.copy_(torch.tensor(offs, dtype=torch.int32))
    tensors.run(kernel, device)
    tensors.out.fill_(math.nan)
    assert tensors.base.isnan().all()


@pytest.mark.parametrize("scales", ["row", "block", "none"])
def test_a_graph_of_the_call_serves_other_offsets(scales, device):
    kernel = next((kernel for kernel in KERNELS if _scales(kernel) == scales), None)
    if kernel is None:
        pytest.skip(f"no kernel of {scales} scales fits {device}")
    tensors = Tensors(kernel, [10, 20, 30, 40], 512, 512, rows_after=0, pad=0)

    def call() -> None:
        stoneware.grouped_mm(
            tensors.a, tensors.b, tensors.offs, tensors.scale_a, tensors.scale_b, tensors.out.dtype, out=tensors.out
        )

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for counts in ([0, 0, 0, 100], [1, 2, 3, 4], [60, 0, 39, 1]):
        tensors.counts, tensors.used = counts, sum(counts)
        tensors.offs.copy_(torch.tensor(counts).cumsum(0).to(torch.int32))
        tensors.base.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        tensors.check()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-rs"]))
