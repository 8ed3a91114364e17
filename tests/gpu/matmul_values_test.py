"""Every matmul kernel that fits the GPU is right: all shapes, views, layouts, biases, dtypes."""

from __future__ import annotations

import dataclasses
import sys

import fitting_kernels
import pytest
import torch

import stoneware
from stoneware.measuring import operands
from stoneware.ops.matmul import api
from stoneware.ops.matmul.problem import Problem

KERNELS = fitting_kernels.of("matmul")


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem but for dtype and layout; pad_a, pad_b, pad_out: what rows skip, as views do."""

    m: int
    n: int
    k: int
    has_bias: bool = False
    pad_a: int = 0
    pad_b: int = 0
    pad_out: int = 32

    def problem(self, dtype: str, layout: str) -> Problem:
        dense = Problem.dense(
            m=self.m,
            n=self.n,
            k=self.k,
            dtype=dtype,
            out_dtype=dtype,
            layout=layout,
            has_bias=self.has_bias,
        )
        return dataclasses.replace(
            dense,
            lda=dense.lda + self.pad_a,
            ldb=dense.ldb + self.pad_b,
            ldd=dense.ldd + self.pad_out,
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
]


@pytest.mark.parametrize("kernel", KERNELS, ids=fitting_kernels.kernel_id)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_agrees_with_float64_and_writes_only_its_output(kernel, case, device):
    problem = case.problem(kernel.config["a"], kernel.config["layout"])
    tensors = operands.make(problem, "cuda", guarded=case.pad_out > 0)
    api.make_plan(problem, fitting_kernels.config(kernel), device)(*tensors.arguments)
    torch.cuda.synchronize()
    comparison = operands.compare(tensors.out, operands.reference(tensors), tensors.problem)
    assert comparison.is_right, str(comparison)
    assert tensors.is_guard_unharmed()


@pytest.mark.parametrize("backend", [None, "triton_aot", "vendor", "reference"])
@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_public_call_agrees_with_float64(dtype, layout, backend, device):
    problem = Problem.dense(
        m=300, n=1040, k=528, dtype=dtype, out_dtype=dtype, layout=layout, has_bias=True
    )
    if backend is not None:
        reason = api.OPERATION.backends[backend].supports(problem, device)
        if reason is not None:
            fitting = {(kernel.backend, kernel.config["layout"]) for kernel in KERNELS}
            assert (backend, layout) not in fitting, reason
            pytest.skip(reason)
    tensors = operands.make(problem, "cuda")
    result = stoneware.matmul(tensors.a, tensors.b, tensors.bias, backend=backend)
    comparison = operands.compare(result, operands.reference(tensors), tensors.problem)
    assert comparison.is_right, str(comparison)


def test_sizes_that_no_kernel_of_ours_takes_fall_to_the_vendor(device):
    problem = Problem.dense(m=3, n=7, k=5)
    tensors = operands.make(problem, "cuda")
    result = stoneware.matmul(tensors.a, tensors.b)
    comparison = operands.compare(result, operands.reference(tensors), tensors.problem)
    assert comparison.is_right, str(comparison)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-rs"]))
