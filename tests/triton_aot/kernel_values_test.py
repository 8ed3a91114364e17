"""The Triton kernels' values against float64, on the CPU, by Triton's interpreter.

What the interpreter cannot show (layouts, pipelining, the tensor cores) tests/gpu shows.
"""

from __future__ import annotations

import os

# Triton chooses between compiler and interpreter when it decorates, so before the kernels' import.
os.environ["TRITON_INTERPRET"] = "1"

import importlib.util
import pathlib
import sys

import pytest
import torch

OPS = pathlib.Path(__file__).parents[2] / "py" / "stoneware" / "ops"


def load_kernel(op: str):
    """The @triton.jit function `op`, straight from its file: no package around it is imported."""
    spec = importlib.util.spec_from_file_location(f"{op}_kernel", OPS / op / "triton_kernel.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, op)


def poisoned(m: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(base, view): view is [m, n] inside base with a guard of one row and 16 columns each way."""
    base = torch.full((m + 2, n + 32), float("nan"), dtype=dtype)
    return base, base[1 : m + 1, 16 : n + 16]


def assert_close_and_guarded(base, view, reference):
    error = (view.double() - reference).norm() / reference.norm()
    assert error < 5e-3
    guard = torch.ones_like(base, dtype=torch.bool)
    guard[1 : view.shape[0] + 1, 16 : view.shape[1] + 16] = False
    assert base[guard].isnan().all()


@pytest.mark.parametrize("codes", [False, True], ids=["e4m3", "uint8"])
@pytest.mark.parametrize("swap", [0, 1], ids=["", "swap"])
@pytest.mark.parametrize(
    ("m", "n", "k", "scales", "has_bias", "padding"),
    [
        (1, 48, 80, "rr", True, 0),
        (17, 80, 144, "rt", False, 16),
        (35, 64, 64, "tr", True, 32),
        (16, 16, 16, "tt", False, 0),
    ],
)
def test_scaled_mm(codes, swap, m, n, k, scales, has_bias, padding):
    kernel = load_kernel("scaled_mm")
    e4m3 = torch.float8_e4m3fn
    # The padding is NaN: a read past k would show.
    a = torch.full((m, k + padding), float("nan")).to(e4m3)
    b = torch.full((n, k + padding), float("nan")).to(e4m3)
    a[:, :k] = torch.randn(m, k).to(e4m3)
    b[:, :k] = torch.randn(n, k).to(e4m3)
    scale_a = torch.rand(m if scales[0] == "r" else 1) + 0.5
    scale_b = torch.rand(n if scales[1] == "r" else 1) + 0.5
    bias = torch.randn(n, dtype=torch.float16) * 8
    base, out = poisoned(m, n, torch.float16)
    as_passed = torch.uint8 if codes else e4m3
    tile_m, tile_n, tile_k = 16, 32, 64
    kernel[(-(-m // tile_m) * -(-n // tile_n),)](
        a.view(as_passed),
        b.view(as_passed),
        out,
        scale_a,
        scale_b,
        bias,
        m,
        n,
        k,
        a.stride(0),
        b.stride(0),
        out.stride(0),
        int(scales[0] == "r"),
        int(scales[1] == "r"),
        int(has_bias),
        tile_m,
        tile_n,
        tile_k,
        2,
        swap,
    )
    reference = a[:, :k].double() @ b[:, :k].double().t()
    reference = reference * scale_a[:, None].double() * scale_b[None, :].double()
    if has_bias:
        reference += bias.double()
    assert_close_and_guarded(base, out, reference)


def test_every_e4m3_code_widens_exactly():
    """Each of the 256 codes times one is the code's value; 0x7f and 0xff are NaN."""
    kernel = load_kernel("scaled_mm")
    codes = torch.zeros(256, 16, dtype=torch.uint8)
    codes[:, 0] = torch.arange(256)
    ones = torch.zeros(16, 16, dtype=torch.uint8)
    ones[:, 0] = 0x38  # 1.0
    out = torch.zeros(256, 16, dtype=torch.float16)
    one = torch.ones(1)
    kernel[(8,)](codes, ones, out, one, one, out, 256, 16, 16, 16, 16, 16, 0, 0, 0, 32, 32, 32, 1, 0)
    expected = codes[:, :1].view(torch.float8_e4m3fn).half().expand(256, 16)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize(
    ("m", "n", "k", "has_bias", "padding"), [(1, 48, 80, True, 0), (35, 80, 144, False, 16), (64, 64, 64, True, 0)]
)
def test_matmul(layout, m, n, k, has_bias, padding):
    dtype = torch.float16  # the interpreter multiplies the bit patterns of bf16, numpy having none
    kernel = load_kernel("matmul")
    a = torch.full((m, k + padding), float("nan"), dtype=dtype)
    a[:, :k] = torch.randn(m, k).to(dtype)
    rows, columns = (n, k) if layout == "nt" else (k, n)
    b = torch.full((rows, columns + padding), float("nan"), dtype=dtype)
    b[:, :columns] = torch.randn(rows, columns).to(dtype)
    bias = torch.randn(n).to(dtype) * 8
    base, out = poisoned(m, n, dtype)
    tile_m, tile_n, tile_k = 16, 32, 64
    kernel[(-(-m // tile_m) * -(-n // tile_n),)](
        a,
        b,
        out,
        bias,
        m,
        n,
        k,
        a.stride(0),
        b.stride(0),
        out.stride(0),
        int(has_bias),
        tile_m,
        tile_n,
        tile_k,
        2,
        int(layout == "nt"),
    )
    right = b[:, :columns].double()
    reference = a[:, :k].double() @ (right.t() if layout == "nt" else right)
    if has_bias:
        reference += bias.double()
    assert_close_and_guarded(base, out, reference)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
