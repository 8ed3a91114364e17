"""Bad arguments of scaled_mm: the error states rule, value and remedy."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from operands import H200, random_fp8, scaled_operands

import stoneware as sw
from stoneware.errors import ForwardOnlyError, UnsupportedError
from stoneware.kernels import sm90_kernels
from stoneware.kernels.config import Config
from stoneware.ops.scaled_mm import sm90
from stoneware.specs.scaled_mm_problem import Problem

M, N, K = 32, 48, 64


def call(**changes):
    """scaled_mm with valid arguments except `changes`."""
    good = dataclasses.asdict(scaled_operands(M, N, K))
    return sw.scaled_mm(**{**good, **changes})


def shifted(matrix: torch.Tensor) -> torch.Tensor:
    """The same values, beginning one element past an aligned address."""
    base = torch.empty(matrix.numel() + 1, dtype=matrix.dtype)
    return base[1:].view(matrix.shape).copy_(matrix)


BAD = {
    "a is a list": (lambda: {"a": [[1.0]]}, TypeError, ["a of scaled_mm", "list", "as_tensor"]),
    "scale is a number": (lambda: {"scale_a": 1.0}, TypeError, ["scale_a", "float", "as_tensor"]),
    "a is None": (lambda: {"a": None}, TypeError, ["a=None of scaled_mm", "pass one"]),
    "scale is None": (lambda: {"scale_b": None}, TypeError, ["scale_b=None", "pass one"]),
    "scale in csr": (
        lambda: {"scale_a": torch.ones(M, 1).to_sparse_csr()},
        TypeError,
        ["scale_a.layout=torch.sparse_csr", "scale_a.to_dense()"],
    ),
    "scale in coo": (
        lambda: {"scale_a": torch.ones(M, 1).to_sparse()},
        TypeError,
        ["scale_a.layout=torch.sparse_coo", "scale_a.to_dense()"],
    ),
    "scale in mkldnn": (
        lambda: {"scale_a": torch.ones(M, 1).to_mkldnn()},
        TypeError,
        ["scale_a.layout=torch._mkldnn", "scale_a.to_dense()"],
    ),
    "scale nested": (
        lambda: {"scale_a": torch.nested.nested_tensor([torch.ones(M)])},
        TypeError,
        ["scale_a", "nested", "torch.cat(scale_a.unbind())"],
    ),
    "out_dtype unhashable": (lambda: {"out_dtype": []}, TypeError, ["out_dtype=[]", "bfloat16"]),
    "backend unhashable": (
        lambda: {"backend": ["vendor"]},
        TypeError,
        ["backend=['vendor']", "must be a str", "sm90", "leave it out"],
    ),
    "backend unknown where nothing is computed": (
        lambda: {"a": random_fp8(0, K), "scale_a": torch.ones(1), "backend": "cublas"},
        ValueError,
        ["backend='cublas'", "sm90", "leave it out"],
    ),
    "out of a dtype that cannot be": (
        lambda: {"out": torch.empty(M, N).double()},
        TypeError,
        ["out.dtype=torch.float64", "an out of torch.bfloat16 or torch.float16 or torch.float32"],
    ),
    "a in bf16": (
        lambda: {"a": torch.zeros(M, K, dtype=torch.bfloat16)},
        TypeError,
        ["a.dtype=torch.bfloat16", "float8_e4m3fn", "quantize it with sw.quantize(a)"],
    ),
    "b in e4m3 of another format": (
        lambda: {"b": torch.zeros(N, K).to(torch.float8_e4m3fnuz).t()},
        TypeError,
        ["b.dtype=torch.float8_e4m3fnuz", "float8_e4m3fn or torch.float8_e5m2"],
    ),
    "a of rank 3": (lambda: {"a": random_fp8(M, K)[None]}, ValueError, ["[1, 32, 64]", "2 dim", "flatten"]),
    "b of rank 1": (lambda: {"b": random_fp8(1, K)[0]}, ValueError, ["b.shape=[64]", "2 dim"]),
    "k differs": (lambda: {"b": random_fp8(N, 80).t()}, ValueError, ["64 is not 80", "weight.t()"]),
    "k misaligned": (
        lambda: {"a": random_fp8(M, 72), "b": random_fp8(N, 72).t()},
        ValueError,
        ["k=72", "multiple of 16", "pad"],
    ),
    "n misaligned": (
        lambda: {"b": random_fp8(40, K).t(), "scale_b": torch.ones(1, 40)},
        ValueError,
        ["n=40", "multiple of 16", "pad"],
    ),
    "k no multiple, with scales of the k before": (
        lambda: {
            "a": random_fp8(M, 100),
            "b": random_fp8(N, 100).t(),
            "scale_a": torch.ones(M, 4),
            "scale_b": torch.ones(4, 4),
        },
        ValueError,
        ["k=100", "multiple of 16", "pad"],
    ),
    "lda misaligned": (lambda: {"a": random_fp8(M, 72)[:, :K]}, ValueError, ["lda=72", "multiple of 16", "copy"]),
    "ldb misaligned": (lambda: {"b": random_fp8(N, 72)[:, :K].t()}, ValueError, ["ldb=72", "multiple of 16"]),
    "a expanded": (lambda: {"a": random_fp8(1, K).expand(M, K)}, ValueError, ["lda=0", "k=64", "copy"]),
    "a column-major": (lambda: {"a": random_fp8(K, M).t()}, ValueError, ["row-major", "(1, 32)", "contiguous()"]),
    "b row-major": (lambda: {"b": random_fp8(K, N)}, ValueError, ["column-major", "(48, 1)", "weight"]),
    "a pointer misaligned": (
        lambda: {"a": shifted(random_fp8(M, K))},
        ValueError,
        ["a.data_ptr()=0x", "multiple of 16", "clone()"],
    ),
    "scale_a of wrong length": (lambda: {"scale_a": torch.ones(M + 1, 1)}, ValueError, ["[33, 1]", "[m, 1]=[32, 1]"]),
    "scale_a flat": (lambda: {"scale_a": torch.ones(M)}, ValueError, ["[32]", "scale_a[:, None]"]),
    "scale_b transposed": (lambda: {"scale_b": torch.ones(N, 1)}, ValueError, ["[48, 1]", "[1, n]=[1, 48]"]),
    "scale_a in bf16": (
        lambda: {"scale_a": torch.ones(M, 1).bfloat16()},
        TypeError,
        ["scale_a.dtype=torch.bfloat16", "float32", "scale_a.float()"],
    ),
    "bias of other dtype": (
        lambda: {"bias": torch.zeros(N, dtype=torch.float16)},
        TypeError,
        ["bias.dtype=torch.float16", "bfloat16", "bias.to"],
    ),
    "bias of other length": (
        lambda: {"bias": torch.zeros(N + 16, dtype=torch.bfloat16)},
        ValueError,
        ["bias.shape=[64]", "[n]=[48]"],
    ),
    "out_dtype of fp64": (lambda: {"out_dtype": torch.float64}, TypeError, ["out_dtype=torch.float64", "float32"]),
    "use_fast_accum of no bool": (
        lambda: {"use_fast_accum": "no"},
        TypeError,
        ["use_fast_accum='no'", "True or False"],
    ),
    "block scales of a k that has no whole blocks": (
        lambda: {
            "a": random_fp8(M, 192),
            "b": random_fp8(N, 192).t(),
            "scale_a": torch.ones(M, 2),
            "scale_b": torch.ones(2, 1),
        },
        ValueError,
        ["k=192", "multiple of 128", "zeros"],
    ),
    "block scales of a with row scales of b": (
        lambda: {"a": random_fp8(M, 256), "b": random_fp8(N, 256).t(), "scale_a": torch.ones(M, 2)},
        ValueError,
        ["scale_b.shape=[1, 48]", "[2, 1]", "[4, 1]", "[2, 48]", "128 x 128"],
    ),
    "block scales of b that are not transposed": (
        lambda: {
            "a": random_fp8(M, 512),
            "b": random_fp8(256, 512).t(),
            "scale_a": torch.ones(M, 4),
            "scale_b": torch.ones(2, 4),
        },
        ValueError,
        ["scale_b.shape=[2, 4]", "[k/128, n/128]=[4, 2], rounded up", "pass scale_b.t()"],
    ),
    "block scales of b with one scale of a": (
        lambda: {
            "a": random_fp8(M, 256),
            "b": random_fp8(N, 256).t(),
            "scale_a": torch.ones(1),
            "scale_b": torch.ones(2, 1),
        },
        ValueError,
        ["scale_a.shape=[1]", "[32, 2]", "1 x 128"],
    ),
    "out of other shape": (
        lambda: {"out": torch.empty(N, M, dtype=torch.bfloat16)},
        ValueError,
        ["out.shape=[48, 32]", "[32, 48]"],
    ),
    "out of other dtype": (
        lambda: {"out": torch.empty(M, N, dtype=torch.float16)},
        TypeError,
        ["out.dtype=torch.float16", "pass out_dtype=torch.float16"],
    ),
    "out column-major": (
        lambda: {"out": torch.empty(N, M, dtype=torch.bfloat16).t()},
        ValueError,
        ["out.stride()=(1, 32)", "row-major"],
    ),
    "ldd misaligned": (
        lambda: {"out": torch.empty(M, N + 4, dtype=torch.bfloat16)[:, :N]},
        ValueError,
        ["ldd=52", "multiple of 8"],
    ),
    "scale on another device": (
        lambda: {"scale_b": torch.ones(1, N, device="meta")},
        ValueError,
        ["scale_b is on meta", "a on cpu", "scale_b.to('cpu')"],
    ),
    "all on a device without backend": (
        lambda: {
            "a": torch.empty(M, K, dtype=torch.float8_e4m3fn, device="meta"),
            "b": torch.empty(N, K, dtype=torch.float8_e4m3fn, device="meta").t(),
            "scale_a": torch.ones(M, 1, device="meta"),
            "scale_b": torch.ones(1, N, device="meta"),
        },
        UnsupportedError,
        ["meta", "'cuda' or 'cpu'", ".to('cuda')"],
    ),
    "unknown backend": (lambda: {"backend": "cublas"}, ValueError, ["backend='cublas'", "sm90", "vendor"]),
    "backend that cannot": (lambda: {"backend": "sm90"}, UnsupportedError, ["compute capability 9.0", "CPU"]),
    "config as a dict": (
        lambda: {"config": {"backend": "vendor"}},
        TypeError,
        ["config=", "Config", "dict", "stoneware.explain(...).config", "leave it out"],
    ),
    "config against backend": (
        lambda: {"backend": "vendor", "config": Config(backend="reference", kernel="x")},
        ValueError,
        ["'vendor'", "'reference'", "leave backend out"],
    ),
    "config of an unknown kernel": (
        lambda: {"config": Config(backend="reference", kernel="x")},
        UnsupportedError,
        ["kernel 'x'", "torch.matmul_float32", "leave config out"],
    ),
    "config of an unknown backend": (
        lambda: {"config": Config(backend="rocm", kernel="x")},
        UnsupportedError,
        ["no backend 'rocm'", "sm90"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_error_states_rule_value_and_remedy(name):
    changes, error, parts = BAD[name]
    for _ in range(2):  # a refusal must not leave a plan behind that lets the second call pass
        with pytest.raises(error) as caught:
            call(**changes())
        for part in parts:
            assert part in str(caught.value)


def test_layout_is_checked_on_a_cached_plan_too():
    x = scaled_operands(M, N, K)
    sw.scaled_mm(x.a, x.b, x.scale_a, x.scale_b)
    with pytest.raises(TypeError, match="scale_a.layout=torch._mkldnn"):
        sw.scaled_mm(x.a, x.b, x.scale_a.to_mkldnn(), x.scale_b)


def test_gradients_of_fp8_are_refused_after_a_plan_was_made_too():
    x = scaled_operands(M, N, K)
    sw.scaled_mm(x.a, x.b, x.scale_a, x.scale_b)
    x.a.requires_grad_()
    with pytest.raises(ForwardOnlyError):
        sw.scaled_mm(x.a, x.b, x.scale_a, x.scale_b)
    with torch.no_grad():
        sw.scaled_mm(x.a, x.b, x.scale_a, x.scale_b)


def test_pointers_are_checked_on_a_cached_plan_too():
    x = scaled_operands(M, N, K)
    sw.scaled_mm(x.a, x.b, x.scale_a, x.scale_b)
    with pytest.raises(ValueError, match="multiple of 16"):
        sw.scaled_mm(shifted(x.a), x.b, x.scale_a, x.scale_b)


@pytest.mark.parametrize("scales", ["row", "tensor", "block"])
@pytest.mark.parametrize("m", [1, 300])
def test_kernels_that_run_a_problem_are_those_of_its_configs(m, scales):
    problem = Problem.dense(m=m, n=256, k=512, scales=scales)
    listed = {config.kernel for config in sm90.BACKEND.configs(problem, H200)}
    kernels = sm90_kernels.kernels("scaled_mm")
    assert listed and len(listed) < len(kernels)
    assert {kernel.id for kernel in kernels if sm90.BACKEND.runs(problem, kernel)} == listed
