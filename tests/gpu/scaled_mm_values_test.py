"""Every scaled_mm kernel that fits the GPU is right: all shapes, views, scales, biases, dtypes."""

from __future__ import annotations

import dataclasses
import sys

import fitting_kernels
import pytest
import torch

import stoneware
from stoneware.measuring import operands
from stoneware.ops.scaled_mm import api
from stoneware.ops.scaled_mm.problem import Problem

KERNELS = fitting_kernels.of("scaled_mm")
every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=fitting_kernels.kernel_id)


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem but for its dtypes; pad_a, pad_b, pad_out: what rows skip, as views do."""

    m: int
    n: int
    k: int
    scale_a: str = "row"
    scale_b: str = "row"
    has_bias: bool = False
    pad_a: int = 0
    pad_b: int = 0
    pad_out: int = 32

    def problem(self, out_dtype: str) -> Problem:
        return Problem(
            m=self.m,
            n=self.n,
            k=self.k,
            out_dtype=out_dtype,
            scale_a=self.scale_a,
            scale_b=self.scale_b,
            has_bias=self.has_bias,
            lda=self.k + self.pad_a,
            ldb=self.k + self.pad_b,
            ldd=self.n + self.pad_out,
        )

    def __str__(self) -> str:
        bias = "-bias" if self.has_bias else ""
        pads = f"-pad{self.pad_a}_{self.pad_b}_{self.pad_out}"
        return f"{self.m}x{self.n}x{self.k}-{self.scale_a}_{self.scale_b}{bias}{pads}"


CASES = [
    Case(1, 16, 16),
    Case(1, 4096, 4096, has_bias=True),
    Case(1, 4096, 4096, "tensor", "tensor", pad_out=0),
    Case(17, 2112, 7168, has_bias=True, pad_a=16, pad_b=48),
    Case(17, 528, 1040, "tensor", "row", has_bias=True),
    Case(17, 528, 1040, "row", "tensor"),
    Case(16, 48, 16, "tensor", "tensor", has_bias=True),
    Case(64, 6144, 4096, pad_out=0),
    Case(128, 8192, 8192, pad_b=16),
    Case(129, 144, 4112, pad_a=4096, has_bias=True),
    Case(300, 4096, 14336, "tensor", "tensor"),
    Case(300, 1040, 272, has_bias=True, pad_a=16, pad_b=16, pad_out=64),
    Case(513, 2064, 2064, "row", "row", pad_out=0),
    Case(2048, 7168, 2048, has_bias=True),
]


@every_kernel
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_agrees_with_float64_and_writes_only_its_output(kernel, case, device):
    problem = case.problem(kernel.config["out"])
    tensors = operands.make(problem, "cuda", guarded=case.pad_out > 0)
    plan = api.make_plan(problem, fitting_kernels.config(kernel), device)
    plan(*tensors.arguments)
    torch.cuda.synchronize()
    comparison = operands.compare(tensors.out, operands.reference(tensors), tensors.problem)
    assert comparison.is_right, str(comparison)
    assert tensors.is_guard_unharmed()


@every_kernel
def test_every_e4m3_code_times_one_is_its_value(kernel, device):
    """Zeros, subnormals, the largest and NaN: each of the 256 codes in column 0 of a."""
    a = torch.zeros(256, 64, dtype=torch.uint8, device="cuda")
    a[:, 0] = torch.arange(256, device="cuda")
    a = a.view(torch.float8_e4m3fn)
    b = torch.zeros(64, 64, device="cuda")
    b[:, 0] = 1.0
    b = b.to(torch.float8_e4m3fn).t()
    one = torch.ones(1, device="cuda")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[kernel.config["out"]]
    result = stoneware.scaled_mm(
        a, b, one, one, out_dtype=dtype, config=fitting_kernels.config(kernel)
    )
    expected = a[:, :1].float().to(dtype).expand(256, 64)
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.nan_to_num(), expected.nan_to_num())


@every_kernel
def test_rows_do_not_depend_on_the_rows_beside_them(kernel, device):
    """A NaN in one row of a spoils that row of the result and no other."""
    problem = Problem.dense(m=40, n=256, k=512, out_dtype=kernel.config["out"])
    tensors = operands.make(problem, "cuda")
    expected = operands.reference(tensors)
    tensors.a[7] = float("nan")
    api.make_plan(problem, fitting_kernels.config(kernel), device)(*tensors.arguments)
    assert tensors.out[7].isnan().all()
    others = [row for row in range(40) if row != 7]
    comparison = operands.compare(tensors.out[others], expected[others], problem)
    assert comparison.is_right, str(comparison)


@pytest.mark.parametrize("out_dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("m", [1, 17, 300])
def test_candidates_name_every_kernel_that_fits(m, out_dtype, device):
    problem = Problem.dense(m=m, n=4096, k=4096, out_dtype=out_dtype)
    named = {config.kernel for config in api.candidates(problem, device)}
    assert named >= {kernel.id for kernel in KERNELS if kernel.config["out"] == out_dtype}


@pytest.mark.parametrize("backend", [None, "cutlass_sm90", "triton_aot", "vendor", "reference"])
@pytest.mark.parametrize("scales", ["row", "tensor"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("m", [1, 17, 300])
def test_public_call_agrees_with_float64(m, has_bias, scales, backend, device):
    problem = Problem.dense(m=m, n=4096, k=1024, scales=scales, has_bias=has_bias)
    if backend is not None:
        reason = api.OPERATION.backends[backend].supports(problem, device)
        if reason is not None:
            # Ours must take what it has kernels for; only the others may have restrictions.
            assert not any(kernel.backend == backend for kernel in KERNELS), reason
            pytest.skip(reason)
    tensors = operands.make(problem, "cuda")
    result = stoneware.scaled_mm(
        tensors.a, tensors.b, *tensors.scales, tensors.bias, backend=backend
    )
    assert result.shape == (m, 4096) and result.dtype == torch.bfloat16
    comparison = operands.compare(result, operands.reference(tensors), tensors.problem)
    assert comparison.is_right, str(comparison)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_one_scale_may_have_any_shape(shape, device):
    problem = Problem.dense(m=33, n=256, k=256, scales="tensor")
    tensors = operands.make(problem, "cuda")
    scale_a, scale_b = (scale.reshape(shape) for scale in tensors.scales)
    result = stoneware.scaled_mm(tensors.a, tensors.b, scale_a, scale_b)
    comparison = operands.compare(result, operands.reference(tensors), tensors.problem)
    assert comparison.is_right, str(comparison)


def test_scales_and_bias_may_be_strided_views(device):
    problem = Problem.dense(m=33, n=256, k=256, has_bias=True)
    tensors = operands.make(problem, "cuda")

    def strided(tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor, torch.full_like(tensor, float("nan"))], dim=-1)[..., 0]

    scale_a, scale_b = map(strided, tensors.scales)
    result = stoneware.scaled_mm(tensors.a, tensors.b, scale_a, scale_b, strided(tensors.bias))
    comparison = operands.compare(result, operands.reference(tensors), tensors.problem)
    assert comparison.is_right, str(comparison)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-rs"]))
