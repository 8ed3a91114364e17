"""matmul: the problem that its arguments make, operands that stay in place, and the kernels that take it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from operands import H200

from stoneware.kernels import sm90_kernels
from stoneware.ops.matmul import layouts, sm90
from stoneware.ops.matmul.api import OPERATION
from stoneware.specs.matmul_problem import Problem

# What a problem has of the arguments: all in place where no dense copy is noted.
ARRANGEMENTS = {
    "linear layer": (
        lambda: (torch.empty(2, 3, 16), torch.empty(8, 16).t()),
        {"m": 6, "n": 8, "k": 16, "layout": "nt", "lda": 16, "ldb": 16, "ldd": 8, "batch": 1},
        {},
    ),
    "rows of a view": (
        lambda: (torch.empty(2, 3, 32)[..., :16], torch.empty(16, 8)),
        {"m": 6, "layout": "nn", "lda": 32, "ldb": 8, "batch": 1},
        {},
    ),
    "rows that one stride does not join": (
        lambda: (torch.empty(2, 4, 16)[:, :3], torch.empty(16, 8)),
        {"m": 3, "batch": 2, "batch_stride_a": 64, "batch_stride_b": 0, "batch_stride_d": 24},
        {},
    ),
    "batch": (
        lambda: (torch.empty(5, 3, 16), torch.empty(5, 8, 16).transpose(1, 2)),
        {"m": 3, "layout": "nt", "batch": 5, "batch_stride_a": 48, "batch_stride_b": 128, "batch_stride_d": 24},
        {},
    ),
    "a for all": (
        lambda: (torch.empty(3, 16), torch.empty(5, 16, 8)),
        {"m": 3, "layout": "nn", "batch": 5, "batch_stride_a": 0, "batch_stride_b": 128},
        {},
    ),
    "heads": (
        lambda: (torch.empty(2, 7, 4, 16).transpose(1, 2), torch.empty(2, 9, 4, 16).permute(0, 2, 3, 1)),
        {"m": 7, "n": 9, "layout": "nt", "lda": 16, "ldb": 16, "batch": 8},
        {"a": (2, 4, 7, 16), "b": (2, 4, 16, 9)},
    ),
    "b for some": (
        lambda: (torch.empty(2, 3, 4, 16), torch.empty(3, 16, 8)),
        {"m": 4, "batch": 6, "batch_stride_a": 64, "batch_stride_b": 128},
        {"b": (2, 3, 16, 8)},
    ),
    "gradient of a weight": (
        lambda: (torch.empty(30, 16).t(), torch.empty(30, 8)),
        {"m": 16, "n": 8, "k": 30, "layout": "tn", "lda": 16, "ldb": 8},
        {},
    ),
    "column": (  # a row times the matrix's transpose
        lambda: (torch.empty(24, 16), torch.empty(16)),
        {"m": 1, "n": 24, "k": 16, "layout": "nt", "ldb": 16},
        {},
    ),
    "column for all": (
        lambda: (torch.empty(5, 24, 16), torch.empty(16)),
        {"m": 1, "n": 120, "k": 16, "layout": "nt", "batch": 1},
        {},
    ),
    "row for all": (
        lambda: (torch.empty(16), torch.empty(5, 24, 16).transpose(1, 2)),
        {"m": 1, "n": 120, "k": 16, "layout": "nt", "batch": 1},
        {},
    ),
    "every other element": (lambda: (torch.empty(3, 32)[:, ::2], torch.empty(16, 8)), {"lda": 16}, {"a": (3, 16)}),
}


def test_what_adds_is_measured_as_what_overwrites():
    adding = Problem.dense(m=16, n=64, k=64, out_dtype="fp32", layout="tn")
    adding = replace(adding, accumulate=True)
    assert adding.representative == replace(adding, accumulate=False)
    assert adding.key == adding.representative.key
    assert sm90.BACKEND.fields(adding)["accumulate"]
    configs = [config.kernel for config in sm90.BACKEND.configs(adding, H200)]
    assert configs and not any("cooperative" in kernel for kernel in configs)
    narrow = replace(Problem.dense(m=16, n=64, k=64), accumulate=True)
    assert "add to an out of float32" in sm90.BACKEND.supports(narrow, H200)
    batch = replace(Problem.dense(m=16, n=64, k=64, out_dtype="fp32", layout="tn", batch=4), accumulate=True)
    assert "batch=4 must be 1 for its kernels that add" in sm90.BACKEND.supports(batch, H200)
    with pytest.raises(ValueError, match="accumulate=True must have no bias"):
        replace(adding, has_bias=True)


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_operands_stay_in_place_where_strides_allow(name):
    make, fields, copies = ARRANGEMENTS[name]
    a, b = make()
    found = layouts.arrangement(a, b, None, layouts.result_shape(a.shape, b.shape), has_bias=False)
    assert {field: getattr(found.problem, field) for field in fields} == fields
    assert {name: tuple(copy({"a": a, "b": b}[name]).shape) for name, copy in found.copies.items()} == copies


def test_a_bias_keeps_the_columns_of_matmuls_apart():
    a, b = torch.empty(16), torch.empty(5, 24, 16).transpose(1, 2)
    problem = layouts.arrangement(a, b, None, (5, 24), has_bias=True).problem
    assert (problem.n, problem.batch) == (24, 5)


DENSE = {"m": 64, "n": 128, "k": 256}
REFUSED = {
    "n": (Problem.dense(m=64, n=100, k=256), "n=100 must be a multiple of 8"),
    "k": (Problem.dense(m=64, n=128, k=250), "k=250 must be a multiple of 8"),
    "lda": (replace(Problem.dense(**DENSE), lda=257), "lda=257 must be a multiple of 8"),
    "batch stride": (
        replace(Problem.dense(**DENSE, batch=3), batch_stride_b=40004),
        "batch_stride_b=40004 must be a multiple of 8",
    ),
    "pointer": (replace(Problem.dense(**DENSE), is_aligned=False), "begin at multiples of 16"),
    "dtypes": (Problem.dense(**DENSE, dtype="fp16", out_dtype="fp32"), "no kernel fp16*fp16->fp32"),
    "stride": (replace(Problem.dense(**DENSE, batch=2), batch_stride_a=2**40), "must be below 549755813888"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_takes_is_refused_with_the_value(name):
    problem, part = REFUSED[name]
    assert part in (sm90.BACKEND.supports(problem, H200) or "no refusal")


def test_kernels_of_hopper_take_what_the_others_refuse():
    for problem in (
        Problem.dense(**DENSE),
        *(Problem.dense(**DENSE, batch=70000, layout=layout) for layout in ("nt", "nn", "tn")),
        replace(Problem.dense(**DENSE, batch=5), batch_stride_b=0),
        Problem.dense(m=64, n=128, k=251, layout="tn"),
        Problem.dense(m=1, n=8, k=8, has_bias=True),
    ):
        assert sm90.BACKEND.supports(problem, H200) is None, str(problem)
        configs = sm90.BACKEND.configs(problem, H200)
        assert configs
        assert len(set(configs)) == len(configs)
    # A block per matmul along z: the kernels that are not persistent cannot have that number.
    assert not any(
        "warpspecialized" in config.kernel for config in sm90.BACKEND.configs(Problem.dense(**DENSE, batch=70000), H200)
    )


def test_a_batch_is_refused_for_what_the_kernels_are_where_all_take_one_matmul():
    fp16 = {**DENSE, "dtype": "fp16", "out_dtype": "fp16"}
    assert sm90.BACKEND.supports(Problem.dense(**fp16), H200) is None
    reason = sm90.BACKEND.supports(Problem.dense(**fp16, batch=2), H200)
    assert "batch=2 must be 1" in reason and "which take one matmul" in reason


@pytest.mark.parametrize("batch", (1, 2, 70000))
def test_kernels_that_run_a_problem_are_those_of_its_configs(batch):
    problem = Problem.dense(**DENSE, batch=batch)
    listed = {config.kernel for config in sm90.BACKEND.configs(problem, H200)}
    kernels = sm90_kernels.kernels("matmul")
    assert listed and len(listed) < len(kernels)
    assert {kernel.id for kernel in kernels if sm90.BACKEND.runs(problem, kernel)} == listed


def test_the_time_of_one_matmul_does_not_answer_for_a_batch():
    shape = {"m": 16, "n": 4096, "k": 4096}
    one, batch = Problem.dense(**shape), Problem.dense(**shape, batch=3)
    assert OPERATION.decide(one, H200).step == "exact"
    assert OPERATION.decide(one, H200).config.backend == "sm90"
    assert OPERATION.decide(batch, H200).step == "heuristic"
    assert OPERATION.decide(batch, H200).config.kernel == "torch.mm"
    strided = replace(batch, batch_stride_a=0, lda=4104)
    assert batch.representative == strided.representative == batch
    # Of eight experts some m were measured; they answer for those nearby, and for no other shape.
    experts = {"n": 14336, "k": 4096, "batch": 8}
    for m, step in (
        (64, "exact"),
        (48, "nearest m"),
        (129, "nearest m"),
        (300, "nearest m"),
        (8, "nearest m"),
        (7, "heuristic"),
        (8192, "heuristic"),
    ):
        assert OPERATION.decide(Problem.dense(m=m, **experts), H200).step == step
    other = Problem.dense(m=64, n=4096, k=4096, batch=8)
    assert OPERATION.decide(other, H200).step == "heuristic"
    assert "batch=3" in str(batch) and "batch=3" in batch.key.shape


@pytest.mark.parametrize(
    ("change", "error", "part"),
    [
        ({"batch": 0}, ValueError, "batch=0 must be at least 1"),
        ({"batch": True}, TypeError, "batch=True must be an int"),
        ({"batch": -3}, ValueError, "batch=-3 must be at least 1"),
        ({"batch": 2**31}, ValueError, "batch=2147483648 must be at most 2**31-1"),
        ({"batch_stride_a": -8}, ValueError, "batch_stride_a=-8 must be at least 0"),
        ({"batch": 1}, ValueError, "must be 0 with batch=1"),
        ({"batch_stride_d": 127}, ValueError, "batch_stride_d=127 and ldd=128 must keep 2 matmuls"),
        ({"batch_stride_d": 128}, ValueError, "batch_stride_d=128 and ldd=128 must keep 2 matmuls"),
        ({"out_dtype": "fp16"}, ValueError, "out_dtype='fp16' must be one of bf16, fp32"),
    ],
)
def test_a_problem_states_its_rule(change, error, part):
    with pytest.raises(error, match=re.escape(part)):
        replace(Problem.dense(**DENSE, batch=2), **change)
