"""grouped_mm on a CPU: values for ragged groups, and bad arguments with rule, value and remedy."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from operands import poisoned, random_fp8, relative_error

import stoneware as sw
from stoneware.specs.grouped_mm_problem import Problem
from stoneware.specs.scaled_mm_problem import BLOCK
from stoneware.specs.tolerance import tolerance

G, N, K = 4, 48, 64
BLOCK_N, BLOCK_K = 144, 384


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Of grouped_mm; `weights` are [groups, n, k]."""

    a: torch.Tensor
    weights: torch.Tensor
    offs: torch.Tensor
    scale_a: torch.Tensor | None
    scale_b: torch.Tensor | None

    def expected(self) -> torch.Tensor:
        """The rows before the last offset, in float64."""
        a, weights = self.a.double(), self.weights.double()
        if self.has_block_scales:
            a = a * self.scale_a.double().repeat_interleave(BLOCK, 1)
            of_weights = self.scale_b.mT.double().repeat_interleave(BLOCK, 1)[:, : weights.shape[1]]
            weights = weights * of_weights.repeat_interleave(BLOCK, 2)
        d = torch.cat([rows @ weight.t() for rows, weight in zip(self.groups(a), weights)])
        if self.scale_a is None or self.has_block_scales:
            return d
        scale_b = torch.cat([row.expand(len(rows), -1) for rows, row in zip(self.groups(self.a), self.scale_b)])
        return d * self.scale_a[: len(d), None].double() * scale_b.double()

    @property
    def has_block_scales(self) -> bool:
        return self.scale_a is not None and self.scale_a.ndim == 2

    def groups(self, rows: torch.Tensor) -> list[torch.Tensor]:
        ends = self.offs.tolist()
        return [rows[begin:end] for begin, end in zip([0, *ends], ends)]

    def call(self, **changes: object) -> torch.Tensor:
        good = {"a": self.a, "b": self.weights.mT, "offs": self.offs, "scale_a": self.scale_a, "scale_b": self.scale_b}
        return sw.grouped_mm(**{**good, **changes})


def arguments(kind: str, ends: list[int], rows_after: int = 0) -> Arguments:
    """Of bf16, of e4m3 with row scales, or of "block", which is e4m3 too."""
    m, groups = ends[-1] + rows_after, len(ends)
    n, k = (BLOCK_N, BLOCK_K) if kind == "block" else (N, K)
    is_fp8 = kind != "bf16"
    a = random_fp8(m, k) if is_fp8 else torch.randn(m, k).bfloat16()
    weights = random_fp8(groups * n, k) if is_fp8 else torch.randn(groups * n, k).bfloat16()
    scale_a = scale_b = None
    if kind == "block":
        scale_a, scale_b = torch.rand(m, k // BLOCK) + 0.5, (torch.rand(groups, -(-n // BLOCK), k // BLOCK) + 0.5).mT
    elif is_fp8:
        scale_a, scale_b = torch.rand(m) + 0.5, torch.rand(groups, n) + 0.5
    return Arguments(
        a=a,
        weights=weights.view(groups, n, k),
        offs=torch.tensor(ends, dtype=torch.int32),
        scale_a=scale_a,
        scale_b=scale_b,
    )


@pytest.mark.parametrize("dtype", ["e4m3", "bf16", "block"])
@pytest.mark.parametrize(
    "ends", [[5], [0, 3, 3, 10], [1, 2, 3, 4], [0, 0, 0, 7], [7, 7, 7, 7], [17, 18, 50, 51]], ids=str
)
def test_result_agrees_with_float64(dtype, ends):
    given = arguments(dtype, ends)
    result = given.call()
    n, k = given.weights.shape[1:]
    assert result.dtype == torch.bfloat16 and result.shape == (ends[-1], n)
    assert relative_error(result, given.expected()) < tolerance("bf16", k)


@pytest.mark.parametrize("dtype", ["e4m3", "bf16"])
def test_rows_after_the_last_offset_are_not_read_and_not_written(dtype):
    given = arguments(dtype, [2, 2, 9, 13], rows_after=5)
    given.a[13:] = float("nan")
    out = poisoned(18, N, torch.bfloat16, ldd=N + 8)
    assert given.call(out=out) is out
    assert relative_error(out[:13], given.expected()) < tolerance("bf16", K)
    assert out[13:].isnan().all()


def test_fp16_result_of_fp8():
    given = arguments("e4m3", [3, 8])
    result = given.call(out_dtype=torch.float16)
    assert result.dtype == torch.float16
    assert relative_error(result, given.expected()) < tolerance("fp16", K)


def test_views_are_computed_in_place():
    given = arguments("bf16", [0, 3, 4, 11])
    wide = torch.full((11, K + 24), float("nan")).bfloat16()
    wide[:, 8 : 8 + K] = given.a
    tall = torch.full((G, N + 16, K + 8), float("nan")).bfloat16()
    tall[:, :N, :K] = given.weights
    result = given.call(a=wide[:, 8 : 8 + K], b=tall[:, :N, :K].mT)
    assert relative_error(result, given.expected()) < tolerance("bf16", K)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no _grouped_mm")
def test_arguments_mean_what_they_mean_to_torch():
    given = arguments("bf16", [0, 3, 4, 11])
    expected = torch._grouped_mm(given.a, given.weights.mT, offs=given.offs)
    assert relative_error(given.call(), expected.double()) < 2 * tolerance("bf16", K)


@pytest.mark.parametrize("ends", [[0, 0], [0]], ids=str)
def test_groups_without_any_rows_give_nothing(ends):
    given = arguments("bf16", ends)
    assert given.call().shape == (0, N)


GOOD = arguments("e4m3", [0, 3, 4, 11])
PLAIN = arguments("bf16", [0, 3, 4, 11])
BLOCKS = arguments("block", [0, 3, 4, 11])

BAD = {
    "offs int64": (GOOD, {"offs": GOOD.offs.long()}, TypeError, ["offs.dtype=torch.int64", "int32"]),
    "offs of other groups": (GOOD, {"offs": GOOD.offs[1:]}, ValueError, ["[3]", "[4]", "empty"]),
    "offs 2-D": (GOOD, {"offs": GOOD.offs[None]}, ValueError, ["offs.shape=[1, 4]", "end row"]),
    "offs decrease": (
        PLAIN,
        {"offs": torch.tensor([3, 2, 4, 11], dtype=torch.int32)},
        ValueError,
        ["offs[1]=2", "before it, 3", "end row"],
    ),
    "offs past a": (
        PLAIN,
        {"offs": torch.tensor([3, 4, 5, 12], dtype=torch.int32)},
        ValueError,
        ["offs[3]=12", "a's rows, 11"],
    ),
    "b 2-D": (GOOD, {"b": GOOD.weights[0].t()}, ValueError, ["b.shape=[64, 48]", "mT"]),
    "b row-major": (GOOD, {"b": GOOD.weights.mT.contiguous()}, ValueError, ["b.stride()", "column-major"]),
    "k differs": (GOOD, {"a": random_fp8(11, 32)}, ValueError, ["agree in k, 32 is not 64"]),
    "dtypes differ": (GOOD, {"a": PLAIN.a}, TypeError, ["b.dtype", "bfloat16"]),
    "fp32": (PLAIN, {"a": PLAIN.a.float()}, TypeError, ["a.dtype=torch.float32", "quantize it with sw.quantize(a)"]),
    "no scale": (GOOD, {"scale_b": None}, TypeError, ["scale_b=None", "pass one"]),
    "scale of bf16": (PLAIN, {"scale_a": torch.ones(11)}, ValueError, ["scale_a", "must be None"]),
    "scale of a column": (GOOD, {"scale_a": torch.ones(11, 1)}, ValueError, ["scale_a.shape=[11, 1]", "[m]=[11]"]),
    "scale of one group": (GOOD, {"scale_b": torch.ones(N)}, ValueError, ["scale_b.shape=[48]", "[4, 48]"]),
    "block scales of rows": (GOOD, {"scale_a": torch.ones(11, 2)}, ValueError, ["scale_a.shape=[11, 2]", "[m, k/128]"]),
    "row scales of blocks": (BLOCKS, {"scale_a": torch.ones(11)}, ValueError, ["scale_a.shape=[11]", "[11, 3]", "[m]"]),
    "block scale of rows of b": (
        BLOCKS,
        {"scale_b": torch.ones(G, BLOCK_N)},
        ValueError,
        ["scale_a.shape=[11, 3]", "[m]=[11]", "scale_b [groups, k/128, n/128]=[4, 3, 2]"],
    ),
    "block scales of other groups": (
        BLOCKS,
        {"scale_b": torch.ones(G - 1, 3, 2)},
        ValueError,
        ["scale_b.shape=[3, 3, 2]", "[groups, k/128, n/128]=[4, 3, 2]", "scale_b [groups, n]=[4, 144]"],
    ),
    "block scales of part of k": (
        arguments("e4m3", [0, 3, 4, 11]),
        {"scale_a": torch.ones(11, 1), "scale_b": torch.ones(G, 1, 1)},
        ValueError,
        ["k=64 must be a positive multiple of 128"],
    ),
    "out dtype": (PLAIN, {"out_dtype": torch.float16}, TypeError, ["float16", "torch.bfloat16"]),
    "out shape": (PLAIN, {"out": torch.empty(12, N).bfloat16()}, ValueError, ["out.shape=[12, 48]", "[11, 48]"]),
    "backend": (GOOD, {"backend": "triton_aot"}, ValueError, ["triton_aot", "sm90"]),
    "a is a list": (GOOD, {"a": [[1.0]]}, TypeError, ["a of grouped_mm", "list"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_told_rule_value_and_remedy(name):
    given, changes, error, parts = BAD[name]
    with pytest.raises(error) as caught:
        given.call(**changes)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "changes, parts",
    [
        ({"n": 24}, ["n=24", "multiple of 16"]),
        ({"k": 40}, ["k=40", "multiple of 16"]),
        ({"num_groups": 0}, ["num_groups=0", "at least 1"]),
        ({"m": 0}, ["m=0", "at least 1"]),
        ({"out_dtype": "fp32"}, ["out_dtype='fp32'", "bf16, fp16"]),
    ],
    ids=str,
)
def test_a_problem_refuses_what_no_kernel_takes(changes, parts):
    with pytest.raises(ValueError) as caught:
        Problem.dense(**{"m": 16, "n": 32, "k": 64, "num_groups": 2, **changes})
    for part in parts:
        assert part in str(caught.value)


def test_the_key_has_the_mean_rows_of_a_group():
    key = Problem.dense(m=33, n=32, k=64, num_groups=8).key
    assert (key.m, key.num_groups, key.scales) == (5, 8, "row")
    assert key.to_json()["num_groups"] == 8


def test_a_miss_is_measured_at_the_whole_mean_and_without_views():
    problem = Problem(m=33, n=32, k=64, num_groups=8, lda=80, ldb=96, ldd=48, group_stride_b=33 * 96)
    measured = problem.representative
    assert measured == Problem.dense(m=40, n=32, k=64, num_groups=8)
    assert measured.key == problem.key


@pytest.mark.parametrize("kind", [{"dtype": "bf16"}, {"dtype": "e4m3"}, {"scales": "block"}], ids=str)
def test_what_is_measured_has_the_key_of_the_call(kind):
    problem = Problem.dense(m=33, n=32, k=128, num_groups=8, **kind)
    assert problem.representative == Problem.dense(m=40, n=32, k=128, num_groups=8, **kind)
    assert problem.representative.key == problem.key


@pytest.mark.parametrize(("dtype", "name"), [("bf16", "torch._grouped_mm"), ("e4m3", "torch._scaled_grouped_mm")])
def test_a_refusal_names_the_function_of_torch(dtype, name):
    answer = sw.explain("grouped_mm", m=64, n=256, k=512, num_groups=4, dtype=dtype, device="L40S")
    [reason] = [refusal.reason for refusal in answer.decision.refusals if refusal.what == "vendor"]
    assert reason.startswith(f"{name} has kernels of its own for compute capability 9.0 only")


def test_explain_names_the_groups():
    explanation = sw.explain("grouped_mm", m=33, n=32, k=64, num_groups=8, device="cpu")
    assert explanation.config.backend == "reference"
    assert "groups=8" in str(explanation)
    with pytest.raises(ValueError, match="num_groups=0 must be at least 1"):
        sw.explain("grouped_mm", m=33, n=32, k=64, device="cpu")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
