"""Every scaled_mm kernel that fits the GPU is right: all shapes, views, scales, biases, dtypes."""

from __future__ import annotations

import dataclasses
import sys

import fitting_kernels
import pytest
import torch

import stoneware
from stoneware.kernels import tile_rule
from stoneware.kernels.manifest import KernelRecord
from stoneware.measuring import operands
from stoneware.ops.scaled_mm import api
from stoneware.ops.tensor_checks import TORCH_DTYPES
from stoneware.specs.scaled_mm_problem import Problem, num_blocks, padded_num_blocks

KERNELS = fitting_kernels.of("scaled_mm")
BLOCK_KERNELS = [kernel for kernel in KERNELS if kernel.config.get("scales") == "block"]
OTHER_KERNELS = [kernel for kernel in KERNELS if kernel not in BLOCK_KERNELS]
every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=fitting_kernels.kernel_id)
every_block_kernel = pytest.mark.parametrize("kernel", BLOCK_KERNELS, ids=fitting_kernels.kernel_id)
every_other_kernel = pytest.mark.parametrize("kernel", OTHER_KERNELS, ids=fitting_kernels.kernel_id)


def of_kernel(kernel: KernelRecord) -> dict[str, object]:
    """The fields of a Problem that a kernel is built for."""
    config = kernel.config
    return {
        "a_dtype": config["a"],
        "b_dtype": config["b"],
        "out_dtype": config["out"],
        "use_fast_accum": config.get("accumulation") != "slow",
    }


def dense_of_kernel(kernel: KernelRecord, *, m: int, n: int, k: int) -> Problem:
    scales = "block" if kernel in BLOCK_KERNELS else "row"
    return dataclasses.replace(Problem.dense(m=m, n=n, k=k, scales=scales), **of_kernel(kernel))


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem without its dtypes; pad_a, pad_b, pad_out: elements that rows skip, like in views."""

    m: int
    n: int
    k: int
    scale_a: str = "row"
    scale_b: str = "row"
    has_bias: bool = False
    pad_a: int = 0
    pad_b: int = 0
    pad_out: int = 32

    def problem(self, kernel: KernelRecord) -> Problem:
        return Problem(
            **of_kernel(kernel),
            m=self.m,
            n=self.n,
            k=self.k,
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
    Case(33, 33808, 272, has_bias=True),  # more tiles than blocks that an H200 holds at a time
    Case(401, 65600, 80, "tensor", "row"),  # a dozen tiles for each block, of one step of k
    Case(2048, 7168, 2048, has_bias=True),
]


@every_other_kernel
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_agrees_with_float64_and_writes_only_its_output(kernel, case, device):
    assert_right(kernel, case.problem(kernel), device, is_guarded=case.pad_out > 0)


BLOCK_CASES = [
    (1, 16, 128),
    (1, 2112, 7168),
    (7, 144, 384),
    (16, 7168, 2048),
    (17, 528, 640),
    (63, 4096, 512),
    (65, 272, 256),
    (127, 2112, 1536),
    (129, 144, 896),
    (300, 1552, 640),
    (513, 2064, 2048),
    (2049, 7168, 2048),
    (33, 33808, 384),
]


K_OF_SPLITS = 2432  # 19, 10 or 5 tiles: shares that differ


@pytest.mark.parametrize("m", [1, 40, 203])
@pytest.mark.parametrize(
    ("kernel", "splits"),
    fitting_kernels.with_splits(KERNELS, 203, 1040, K_OF_SPLITS),
    ids=lambda value: value.id if isinstance(value, KernelRecord) else str(value),
)
def test_blocks_that_share_k_agree_with_float64(kernel, splits, m, device):
    dense = dense_of_kernel(kernel, m=m, n=1040, k=K_OF_SPLITS)
    problem = dataclasses.replace(dense, ldd=dense.ldd + 32)
    assert_right(kernel, problem, device, is_guarded=True, splits=splits)


@pytest.mark.parametrize(
    ("kernel", "splits"),
    [(kernel, 1) for kernel in KERNELS] + fitting_kernels.with_splits(KERNELS, 200, 272, K_OF_SPLITS),
    ids=lambda value: value.id if isinstance(value, KernelRecord) else str(value),
)
def test_an_element_has_the_same_bits_wherever_it_lies_in_a_tile(kernel, splits, device):
    """Tiles overlap at the ends of m and n, and rows of a batch lie at any place."""
    tensors = operands.make(dense_of_kernel(kernel, m=200, n=272, k=K_OF_SPLITS), "cuda")
    tensors.a.copy_(tensors.a[:1].clone().expand_as(tensors.a))
    tensors.b.copy_(tensors.b[:, :1].clone().expand_as(tensors.b))
    tensors.scale_a.fill_(0.7)
    tensors.scale_b.fill_(1.3)
    api.OPERATION.make_plan(tensors.problem, fitting_kernels.config(kernel, splits), device)(*tensors.arguments)
    assert tensors.out.unique().numel() == 1


def layouts_of_scales(m: int, n: int, k: int, is_1d: bool = False) -> dict[str, dict[str, int]]:
    """Strides of block scales: torch's own; with rows padded to 16 bytes; row-major; views that
    skip elements."""
    blocks, columns, rows = num_blocks(k), n if is_1d else num_blocks(n), padded_num_blocks(k)

    def strides(a_m: int, a_k: int, b_k: int, b_n: int, is_padded: bool = False):
        return {
            "scale_a_stride_m": a_m,
            "ld_scale_a": a_k,
            "ld_scale_b": b_k,
            "scale_b_stride_n": b_n,
            "is_scale_b_padded": is_padded,
        }

    return {
        "torch": strides(1, m, n, 1) if is_1d else strides(1, m, 1, rows, True),
        "padded": strides(1, -(-m // 4) * 4, 1, rows),
        "dense": strides(blocks, 1, columns, 1),
        "skipping": strides(3 * blocks, 2, 2 * columns + 1, 2),
    }


@every_block_kernel
@pytest.mark.parametrize("layout", ["torch", "padded", "dense", "skipping"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("m", "n", "k"), BLOCK_CASES)
def test_kernel_with_block_scales_of_any_layout_agrees_with_float64(kernel, m, n, k, has_bias, layout, device):
    problem = Problem(
        **of_kernel(kernel),
        m=m,
        n=n,
        k=k,
        scale_a="block_1x128",
        scale_b="block_128x128",
        has_bias=has_bias,
        lda=k + 16,
        ldb=k + 32,
        ldd=n + 32,
        **layouts_of_scales(m, n, k)[layout],
    )
    assert_right(kernel, problem, device, is_guarded=True)


@every_block_kernel
@pytest.mark.parametrize(("m", "k"), [(200, 1024), (1, 640)])
def test_row_major_scales_may_begin_at_any_element(kernel, m, k, device):
    """A kernel may read 2 or 4 neighbouring scales at once, but only if the address is aligned to all of them."""
    ld = 12
    dense = dense_of_kernel(kernel, m=m, n=272, k=k)
    problem = dataclasses.replace(dense, scale_a_stride_m=ld, ld_scale_a=1)
    tensors = operands.make(problem, "cuda")
    plan = api.OPERATION.make_plan(problem, fitting_kernels.config(kernel), device)
    plan(*tensors.arguments)
    comparison = operands.compare(tensors.out, operands.reference(tensors), problem)
    assert comparison.is_right, str(comparison)
    expected = tensors.out.clone()
    for first in range(1, 4):
        size = (m - 1) * ld + num_blocks(k)  # it ends with the last scale, for memcheck
        moved = torch.empty(first + size, device="cuda")[first:].as_strided((m, num_blocks(k)), (ld, 1))
        moved.copy_(tensors.scale_a)
        tensors.out.fill_(float("nan"))
        plan(*(moved if argument is tensors.scale_a else argument for argument in tensors.arguments))
        assert torch.equal(tensors.out, expected), first


@pytest.mark.parametrize("layout", ["torch", "padded", "dense", "skipping"])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(64, 1040, 640), (132, 256, 1024), (1029, 256, 640), (2047, 1040, 1024), (1029, 112, 128), (64, 112, 128)],
)
@pytest.mark.parametrize(("scales", "out_dtype"), [("block", "bf16"), ("block_1d", "bf16"), ("block_1d", "fp32")])
def test_torchs_kernel_with_block_scales_of_any_layout_agrees_with_float64(m, n, k, layout, scales, out_dtype, device):
    dense = Problem.dense(m=m, n=n, k=k, scales=scales, out_dtype=out_dtype)
    problem = dataclasses.replace(dense, **layouts_of_scales(m, n, k, scales == "block_1d")[layout])
    if (reason := api.OPERATION.backends["vendor"].supports(problem, device)) is not None:
        pytest.skip(reason)
    tensors = operands.make(problem, "cuda")
    api.OPERATION.plan(problem, device, backend="vendor")(*tensors.arguments)
    comparison = operands.compare(tensors.out, operands.reference(tensors), problem)
    assert comparison.is_right, str(comparison)


def assert_right(kernel: KernelRecord, problem: Problem, device, *, is_guarded: bool, splits: int = 1) -> None:
    tensors = operands.make(problem, "cuda")
    if is_guarded:
        tensors = operands.guarded(tensors)
    plan = api.OPERATION.make_plan(problem, fitting_kernels.config(kernel, splits), device)
    plan(*tensors.arguments)
    torch.cuda.synchronize()
    comparison = operands.compare(tensors.out, operands.reference(tensors), tensors.problem)
    assert comparison.is_right, str(comparison)
    assert tensors.is_guard_unharmed()


@every_kernel
def test_every_code_times_one_is_its_value(kernel, device):
    """Zeros, subnormals, the largest, infinities and NaN: each of the 256 codes in column 0 of a."""
    a = torch.zeros(256, 256, dtype=torch.uint8, device="cuda")
    a[:, 0] = torch.arange(256, device="cuda")
    a = a.view(TORCH_DTYPES[kernel.config["a"]])
    b = torch.zeros(64, 256, device="cuda")
    b[:, 0] = 1.0
    b = b.to(TORCH_DTYPES[kernel.config["b"]]).t()
    is_block = kernel in BLOCK_KERNELS
    dtype = TORCH_DTYPES[kernel.config["out"]]
    result = stoneware.scaled_mm(
        a,
        b,
        torch.ones((256, 2) if is_block else (1,), device="cuda"),
        torch.ones((2, 1) if is_block else (1,), device="cuda"),
        out_dtype=dtype,
        config=fitting_kernels.config(kernel),
        use_fast_accum=kernel.config.get("accumulation") != "slow",
    )
    expected = a[:, :1].float().to(dtype).expand(256, 64)
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.nan_to_num(), expected.nan_to_num())


@every_kernel
def test_rows_do_not_depend_on_the_rows_beside_them(kernel, device):
    """A NaN in one row of a spoils that row of the result and no other."""
    problem = dense_of_kernel(kernel, m=40, n=256, k=512)
    tensors = operands.make(problem, "cuda")
    expected = operands.reference(tensors)
    tensors.a[7] = float("nan")
    api.OPERATION.make_plan(problem, fitting_kernels.config(kernel), device)(*tensors.arguments)
    assert tensors.out[7].isnan().all()
    others = [row for row in range(40) if row != 7]
    comparison = operands.compare(tensors.out[others], expected[others], problem)
    assert comparison.is_right, str(comparison)


@every_kernel
@pytest.mark.parametrize("m", [1, 17, 300])
def test_kernel_is_a_candidate_for_what_it_is_built_for(kernel, m, device):
    problem = dense_of_kernel(kernel, m=m, n=4096, k=4096)
    backend = api.OPERATION.backends[kernel.backend]
    configs = backend.configs(problem, device)
    assert kernel.id in {config.kernel for config in configs}
    is_raced = kernel.id in {config.kernel for config in api.OPERATION.candidates(problem, device)}
    is_first = configs[0].kernel == kernel.id
    fitting = [one for one in KERNELS if tile_rule.fits(one, problem.key, device.compute_capability)]
    largest = max(map(tile_rule.tile_m, fitting))
    assert is_raced == (tile_rule.is_worth_timing(kernel, problem.key, largest) or is_first)


@pytest.mark.parametrize("backend", [None, "sm90", "triton_aot", "vendor", "reference"])
@pytest.mark.parametrize("scales", ["row", "tensor", "block"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("m", [1, 17, 300])
def test_public_call_agrees_with_float64(m, has_bias, scales, backend, device):
    problem = Problem.dense(m=m, n=4096, k=1024, scales=scales, has_bias=has_bias)
    if backend is not None:
        reason = api.OPERATION.backends[backend].supports(problem, device)
        if reason is not None:
            # Ours must take what it has kernels for; only the others may have restrictions.
            fitting = BLOCK_KERNELS if scales == "block" else OTHER_KERNELS
            assert not any(kernel.backend == backend for kernel in fitting), reason
            pytest.skip(reason)
    tensors = operands.make(problem, "cuda")
    result = stoneware.scaled_mm(tensors.a, tensors.b, *tensors.scales, tensors.bias, backend=backend)
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
