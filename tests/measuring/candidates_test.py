"""One problem's candidates on a CPU: only what is right is timed, the rest is written down."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from pathlib import Path

import pytest
import torch
from fake_stopwatch import FakeStopwatch

from stoneware.errors import UnsupportedError
from stoneware.kernels.config import Config
from stoneware.kernels.key import Key
from stoneware.kernels.manifest import KernelRecord, Manifest
from stoneware.measuring import candidates, operands, workloads
from stoneware.measuring.device_timer import DeviceTimer
from stoneware.measuring.grouped_mm_operands import ragged
from stoneware.measuring.settings import Settings
from stoneware.ops.grouped_mm import reference as grouped_reference
from stoneware.ops.matmul import reference as matmul_reference
from stoneware.ops.scaled_mm import reference
from stoneware.ops.tensor_checks import TORCH_DTYPES
from stoneware.runtime.device import CPU, Device, DeviceFingerprint
from stoneware.specs import tolerance
from stoneware.specs.grouped_mm import EXPERTS, MAX_ROWS
from stoneware.specs.grouped_mm_problem import Problem as GroupedMmProblem
from stoneware.specs.matmul_problem import Problem as MatmulProblem
from stoneware.specs.scaled_mm_problem import Problem
from stoneware.tuning.samples import decode, lines_of

PROBLEM = Problem.dense(m=24, n=64, k=128)
REFERENCES = {"scaled_mm": reference, "matmul": matmul_reference, "grouped_mm": grouped_reference}
SHA256 = "ab" * 32


def config(kernel: str, backend: str = "triton_aot") -> Config:
    return Config(backend=backend, kernel=kernel)


class Stopwatch(FakeStopwatch):
    """Calls take the time in their kernel's name, as in "right_300"."""

    def time_call(self, name, call):
        call()
        if name.kernel == "fails_timed":
            raise RuntimeError("an illegal memory access")
        return self._spent(name, float(name.kernel.partition("_")[2]))

    def warm_up(self, name, call):
        self.announce(name)
        call()


def make_plan(problem, config, device):
    """A plan of the reference with the fault that the kernel's name specifies."""
    kind = config.kernel.partition("_")[0]
    if kind == "nobias" and problem.has_bias:
        raise UnsupportedError("no bias")
    right = REFERENCES[problem.key.op].BACKEND.plan(problem, config, device)

    def plan(a, b, out, *rest):
        if kind == "raises":
            raise RuntimeError("misaligned address")
        if kind == "idle":
            return
        if kind == "even":
            m, num_groups = a.shape[0], b.shape[0]
            ends = torch.arange(1, num_groups + 1) * m // num_groups
            rest = (ends.to(torch.int32), *rest[1:])
        right(a, b, out, *rest)
        if kind == "wrong":
            out[..., 3, 5] += 10 * out.float().std()
        elif kind == "biasless" and rest[-1] is not None:
            right(a, b, out, *rest[:-1], None)
        elif kind == "hole":
            out[..., -1, -1] = math.nan

    return plan


@pytest.fixture(autouse=True)
def _manifest(monkeypatch):
    record = KernelRecord(
        id="right_300", op="scaled_mm", backend="triton_aot", arch="sm_90", config={}, sha256=SHA256, size_bytes=1
    )
    monkeypatch.setattr(candidates.manifest, "packaged", lambda: Manifest({"right_300": record}))


def measure(kernels, problem=PROBLEM, **options):
    stopwatch = Stopwatch(iter([1980]))
    samples = []
    race = candidates.Race(
        problem=problem,
        device=CPU,
        timer=DeviceTimer(0, stopwatch=stopwatch, now=stopwatch.now),
        settings=Settings(rounds=9),
        run_id="run-1",
        make_plan=make_plan,
        **{"emit": samples.extend, **options},
    )
    race.run([config(kernel) for kernel in kernels])
    return samples


@pytest.mark.parametrize(
    "problem",
    [
        PROBLEM,
        Problem.dense(m=24, n=64, k=128, has_bias=True, scales="tensor"),
        Problem(m=24, n=64, k=128, lda=144, ldb=160, ldd=72),
        MatmulProblem.dense(m=24, n=64, k=128, layout="tn"),
        MatmulProblem.dense(m=24, n=64, k=128, dtype="fp16", out_dtype="fp16"),
        MatmulProblem.dense(m=24, n=64, k=128, batch=3),
    ],
    ids=str,
)
def test_only_what_is_right_is_timed(problem):
    # idle_1 after a right one, whose result it would be given credit for.
    kernels = ["right_300", "idle_1", "wrong_1", "raises_1", "hole_1", "biasless_1", "right_400"]
    samples = {s.config.kernel: s for s in measure(kernels, problem)}
    assert {name: sample.status for name, sample in samples.items()} == {
        "right_300": "ok",
        "right_400": "ok",
        "wrong_1": "wrong",
        "raises_1": "failed",
        "idle_1": "wrong",
        "hole_1": "wrong",
        "biasless_1": "wrong",
    }
    right = samples["right_300"]
    assert (right.median_us, right.count, right.key) == (300.0, 9, problem.key)
    assert right.sm_clock_mhz_before == right.sm_clock_mhz_after == 1980
    assert 0 < right.error < 5e-3
    assert samples["wrong_1"].median_us == samples["wrong_1"].count == 0
    assert "RuntimeError: misaligned address" in samples["raises_1"].detail
    assert samples["biasless_1"].detail.startswith("with bias: relative error")


@pytest.mark.parametrize(
    "problem",
    [
        GroupedMmProblem.dense(m=40, n=32, k=64, num_groups=4, dtype="e4m3"),
        GroupedMmProblem.dense(m=40, n=32, k=64, num_groups=4, dtype="bf16"),
        GroupedMmProblem(m=40, n=32, k=64, num_groups=4, lda=80, ldb=96, ldd=48, group_stride_b=33 * 96),
    ],
    ids=str,
)
def test_of_grouped_products_only_what_is_right_in_ragged_groups_is_timed(problem):
    kernels = ["right_300", "idle_1", "wrong_1", "raises_1", "hole_1", "even_1", "right_400"]
    samples = {s.config.kernel: s for s in measure(kernels, problem)}
    assert {name: sample.status for name, sample in samples.items()} == {
        "right_300": "ok",
        "right_400": "ok",
        "wrong_1": "wrong",
        "raises_1": "failed",
        "idle_1": "wrong",
        "hole_1": "wrong",
        "even_1": "wrong",
    }
    right = samples["right_300"]
    assert (right.median_us, right.count, right.key) == (300.0, 9, problem.key)
    assert (right.key.m, right.key.num_groups) == (10, 4)
    assert samples["even_1"].detail.startswith("without bias: relative error")


@pytest.mark.parametrize("dtype", ["e4m3", "bf16"])
def test_a_grouped_result_may_have_a_guard_and_its_weights_strides(dtype):
    problem = GroupedMmProblem(
        m=21, n=32, k=64, num_groups=3, a_dtype=dtype, b_dtype=dtype, lda=80, ldb=96, ldd=48, group_stride_b=33 * 96
    )
    tensors = operands.guarded(operands.make(problem, "cpu"))
    assert tensors.a.stride() == (80, 1) and tensors.b.stride() == (33 * 96, 1, 96)
    grouped_reference.BACKEND.plan(problem, config("right_1"), CPU)(*tensors.arguments)
    assert operands.compare(tensors.out, operands.reference(tensors), problem).is_right
    assert tensors.is_guard_unharmed()
    tensors.out_base[0, 0] = 1
    assert not tensors.is_guard_unharmed()


@pytest.mark.parametrize(
    "strides",
    [
        {"batch_stride_a": 24 * 72, "lda": 72},
        {"batch_stride_a": 0, "batch_stride_b": 0},
        {"batch_stride_a": 64, "lda": 5 * 64, "batch_stride_d": 32, "ldd": 5 * 32},  # interleaved
    ],
    ids=lambda strides: "_".join(strides),
)
@pytest.mark.parametrize("layout", ["nt", "nn"])
def test_a_batch_has_its_strides_and_each_product_is_compared(strides, layout):
    problem = MatmulProblem.dense(m=24, n=32, k=64, layout=layout, batch=5)
    problem = dataclasses.replace(problem, **strides)
    tensors = operands.make(problem, "cpu")
    assert tensors.a.shape == (5, 24, 64) and tensors.b.shape == (5, 64, 32)
    assert tensors.a.stride()[:2] == (problem.batch_stride_a, problem.lda)
    assert tensors.out.stride() == (problem.batch_stride_d, problem.ldd, 1)
    matmul_reference.BACKEND.plan(problem, config("right_1"), CPU)(*tensors.arguments)
    expected = operands.reference(tensors)
    assert torch.allclose(expected, torch.bmm(tensors.a.float(), tensors.b.float()), atol=1e-3)
    assert operands.compare(tensors.out, expected, problem).is_right
    assert tensors.is_guard_unharmed()
    tensors.out[4].copy_(tensors.out[3])
    are_all_the_same = not problem.batch_stride_a and not problem.batch_stride_b
    assert operands.compare(tensors.out, expected, problem).is_right == are_all_the_same


def test_a_batch_has_no_guard():
    with pytest.raises(ValueError, match=r"shape \[2, 8, 16\] must be one matrix"):
        operands.guarded(operands.make(MatmulProblem.dense(m=8, n=16, k=16, batch=2), "cpu"))


@pytest.mark.parametrize(("a_dtype", "b_dtype"), [("e5m2", "e4m3"), ("e4m3", "e5m2")])
def test_each_operand_has_a_dtype_of_its_own(a_dtype, b_dtype):
    problem = dataclasses.replace(PROBLEM, a_dtype=a_dtype, b_dtype=b_dtype)
    tensors = operands.make(problem, "cpu")
    assert (tensors.a.dtype, tensors.b.dtype) == (TORCH_DTYPES[a_dtype], TORCH_DTYPES[b_dtype])


def test_groups_are_ragged_and_the_same_everywhere():
    assert ragged(64, 8) == [5, 8, 6, 9, 12, 5, 9, 10]
    for num_rows, num_groups in ((0, 3), (1, 1), (7, 128), (128, 128), (65536, 32)):
        counts = ragged(num_rows, num_groups)
        assert (sum(counts), len(counts)) == (num_rows, num_groups) and min(counts) >= 0
    assert 0 in ragged(128, 128), "at a mean of one row some groups are empty"
    many = ragged(65536, 32)
    assert 1.2 < max(many) / min(many) < 2.2


def test_a_candidate_may_refuse_a_bias_unless_the_problem_has_one():
    assert [s.status for s in measure(["nobias_300"])] == ["ok"]
    biased = Problem.dense(m=24, n=64, k=128, has_bias=True)
    assert [s.status for s in measure(["nobias_300"], biased)] == ["failed"]


def test_a_candidate_that_fails_while_it_is_timed_leaves_the_others_their_timings():
    statuses = {s.config.kernel: s.status for s in measure(["right_300", "fails_timed", "right_310"])}
    assert statuses == {"right_300": "ok", "right_310": "ok", "fails_timed": "failed"}


def test_samples_carry_the_digest_of_kernels_of_ours():
    digests = {s.config.kernel: s.kernel_sha256 for s in measure(["right_300", "right_310"])}
    assert digests == {"right_300": SHA256, "right_310": ""}


def test_each_candidate_is_announced_before_it_runs_and_emitted_as_soon_as_it_is_final():
    said = []
    measure(
        ["right_300", "wrong_1", "right_310"],
        announce=lambda config: said.append(config and config.kernel),
        emit=lambda samples: said.append([s.config.kernel for s in samples]),
    )
    assert said == [
        "right_300",
        "wrong_1",
        ["wrong_1"],
        "right_310",
        "right_300",
        "right_310",
        ["right_300", "right_310"],
    ]


def test_samples_go_through_their_lines_unchanged():
    samples = measure(["right_300", "wrong_1", "hole_1"])
    lines = enumerate(line.text.encode() for line in lines_of(samples))
    assert {sample for _, sample in decode(Path(), lines).samples} == set(samples)


def test_the_default_and_the_vendor_come_first_among_the_candidates():
    found = [config("a"), config("torch.mm", "vendor"), config("b"), config("c")]

    class Operation:
        def candidates(self, problem, device):
            return found

        def preferred(self, key, compute_capability, manifest):
            return [config("not there"), config("b"), config("a")]

    assert candidates.of_problem(Operation(), PROBLEM, CPU) == (
        [config("b"), config("torch.mm", "vendor")],
        [config("a"), config("c")],
    )


GPU = Device(
    ordinal=0,
    fingerprint=DeviceFingerprint(
        name="NVIDIA H200", compute_capability=(9, 0), num_sms=132, l2_bytes=1, memory_clock_khz=1
    ),
)


class FourKernels:
    """An op of four kernels and a vendor's, whose look-ups answer with some kernels, one list a step."""

    def __init__(self, *steps):
        self.steps = steps

    def candidates(self, problem, device):
        return [config("torch.mm", "vendor"), *map(config, "abcd")]

    def preferred(self, key, compute_capability, manifest):
        return []

    def answers(self, key, device, most_choices):
        for kernels in self.steps:
            choices = [types.SimpleNamespace(config=one) for one in kernels[:most_choices]]
            yield types.SimpleNamespace(entry=types.SimpleNamespace(choices=choices))


def test_the_expected_fastest_take_turns_between_what_was_measured_and_what_is_modelled():
    vendor = [config("torch.mm", "vendor")]
    op = FourKernels([config("a"), config("b")], [*vendor, config("c"), config("gone")])
    assert candidates.of_problem(op, PROBLEM, GPU, 2) == (vendor, [config("a"), config("b")])
    assert candidates.of_problem(op, PROBLEM, GPU, 3) == (vendor, [config("a"), config("b"), config("c")])
    op = FourKernels([config("a"), config("b")], [config("c")])
    assert candidates.of_problem(op, PROBLEM, GPU, 2) == (vendor, [config("a"), config("c")])


def test_as_many_are_measured_as_were_asked_for_if_the_vendor_is_among_the_choices():
    op = FourKernels([config("torch.mm", "vendor"), *map(config, "dcba")])
    assert candidates.of_problem(op, PROBLEM, GPU, 2)[1] == [config("d"), config("c")]


@pytest.mark.parametrize("steps", [[], [[config("gone")]]])
def test_where_the_tables_expect_nothing_all_are_measured(steps):
    assert candidates.of_problem(FourKernels(*steps), PROBLEM, GPU, 2)[1] == list(map(config, "abcd"))


@pytest.mark.parametrize("k", [16, 4096, 16384])
def test_tolerance_grows_with_k_and_stays_under_the_limit(k):
    for out_dtype in ("bf16", "fp16"):
        exact, truncated, fast = (
            tolerance.tolerance(out_dtype, k, accumulator=name) for name in ("fp32", "truncated", "fast")
        )
        least = tolerance.OUTPUT_ROUNDING[out_dtype]
        assert least <= exact < truncated < fast <= tolerance.MAX_ERROR
        for a_dtype, allowed in {"e4m3": fast, "e5m2": fast, "bf16": truncated, "fp16": truncated}.items():
            assert tolerance.on_gpu(a_dtype, out_dtype, k) == allowed
    assert tolerance.tolerance("fp16", 4096, accumulator="fast") > tolerance.tolerance("fp16", 4096)


def test_the_committed_samples_of_fp8_are_within_the_tolerance():
    """Relative errors seen on an H200 (tuning_data/nvidia_h200, and with 5 rows at k = 20176), by k."""
    for k, error in {1536: 1.81e-3, 4096: 2.16e-3, 14336: 3.34e-3, 20176: 5.08e-3, 28672: 4.70e-3}.items():
        assert error < tolerance.on_gpu("e4m3", "bf16", k)


def test_float32_results_of_16_bit_operands_that_an_h200_shows_are_within_the_tolerance():
    """Relative errors by k, of torch.mm and of our kernels alike."""
    for k, error in {16: 3.4e-8, 392: 3.63e-7, 8040: 8.96e-6, 13656: 1.55e-5, 36864: 4.25e-5}.items():
        assert error < tolerance.on_gpu("bf16", "fp32", k)
    assert tolerance.on_gpu("bf16", "fp32", 36864) < 2 * 4.25e-5  # and no more than that


def test_an_error_of_one_element_is_seen_beside_many_right_ones():
    expected = torch.randn(256, 8192)
    out = expected.to(torch.bfloat16)
    problem = MatmulProblem.dense(m=256, n=8192, k=64)
    assert operands.compare(out, expected, problem).is_right
    out[5, 7] += 3
    assert not operands.compare(out, expected, problem).is_right


def test_problems_are_every_combination_in_a_fixed_order_and_none_twice():
    made = workloads.problems(weights=["llama3_8b_o"], m_values=[1, 16, 1], shapes=["16x4096x4096", "3x32x48"])
    assert [(p.key.op, p.key.scales, p.m, p.n, p.k) for p in made] == [
        *(("scaled_mm", scales, m, 4096, 4096) for m in (1, 16) for scales in ("row", "tensor")),
        *(("scaled_mm", scales, 3, 32, 48) for scales in ("row", "tensor")),
        ("matmul", "none", 1, 4096, 4096),
        ("matmul", "none", 16, 4096, 4096),
        ("matmul", "none", 3, 32, 48),
    ]
    for problem in made:
        assert type(problem)(**json.loads(json.dumps(dataclasses.asdict(problem)))) == problem
        assert isinstance(problem.key, Key)


def test_grouped_problems_have_their_own_layers_and_rows_a_group():
    made = workloads.problems(
        ops=["scaled_mm", "grouped_mm"],
        weights=["llama3_8b_o", "mixtral_8x7b_down"],
        m_values=[1, 16],
        scales=["row"],
        shapes=["4x3x32x48", "3x32x48"],
    )
    assert [(p.key.op, p.key.a_dtype, p.key.num_groups, p.m, p.key.m, p.n, p.k) for p in made] == [
        *(("scaled_mm", "e4m3", 0, m, m, 4096, 4096) for m in (1, 16)),
        ("scaled_mm", "e4m3", 0, 3, 3, 32, 48),
        *(("grouped_mm", dtype, 8, 8 * m, m, 4096, 14336) for m in (1, 16) for dtype in ("e4m3", "bf16")),
        *(("grouped_mm", dtype, 4, 12, 3, 32, 48) for dtype in ("e4m3", "bf16")),
    ]
    for problem in made:
        assert type(problem)(**json.loads(json.dumps(dataclasses.asdict(problem)))) == problem


def test_grouped_problems_are_all_layers_as_far_as_their_rows_go():
    made = workloads.problems(ops=["grouped_mm"])
    assert {(p.num_groups, p.n, p.k) for p in made} == set(EXPERTS.values())
    assert {p.a_dtype for p in made} == {"e4m3", "bf16"}
    assert max(p.m for p in made) == MAX_ROWS and min(p.key.m for p in made) == 1
    halves = workloads.problems(ops=["grouped_mm"], out_dtypes=["fp16"], dtypes=["e4m3", "bf16"])
    assert {(p.a_dtype, p.out_dtype) for p in halves} == {("e4m3", "fp16")}


def test_gradients_have_slow_accumulation_and_another_dtype_of_a():
    made = workloads.problems(
        ops=["scaled_mm"], shapes=["512x128x256"], scales=["tensor", "block"], a_dtypes=["e5m2"], accumulations=["slow"]
    )
    assert [(p.a_dtype, p.b_dtype, p.scales, p.accumulation) for p in made] == [
        ("e5m2", "e4m3", "tensor", "slow"),
        ("e5m2", "e4m3", "block", "fast"),
    ]
    assert workloads.problems(ops=["scaled_mm"], shapes=["512x128x256"], scales=["row"]) == [
        Problem.dense(m=512, n=128, k=256)
    ]


def test_results_of_matmul_in_float32_are_those_of_bf16_operands():
    made = workloads.problems(ops=["matmul"], shapes=["16x64x32"], out_dtypes=["fp32", "fp16"], layouts=["tn"])
    assert [(problem.a_dtype, problem.out_dtype, problem.layout) for problem in made] == [
        ("bf16", "fp32", "tn"),
        ("fp16", "fp16", "tn"),
    ]


def test_a_shape_of_four_sizes_is_a_batch_of_matmul():
    [problem] = workloads.problems(ops=["matmul"], shapes=["8x16x64x32"])
    assert problem == MatmulProblem.dense(m=16, n=64, k=32, batch=8)
    assert MatmulProblem(**dataclasses.asdict(problem)) == problem


def test_all_layers_are_taken_unless_shapes_are_given():
    assert len(workloads.problems(shapes=["16x4096x4096"])) == 3
    assert len(workloads.problems(ops=["matmul"])) > 500


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ({"ops": ["conv"]}, "ops=conv must be among scaled_mm, matmul"),
        ({"weights": ["gpt9"]}, "weights=gpt9 must be among llama3_8b_o"),
        ({"shapes": ["16x4096"]}, "shapes='16x4096' must be of the form that scaled_mm or .* takes: MxNxK"),
        ({"shapes": ["16x4096x100"]}, "k=100 must be a positive multiple of 16"),
        ({"scales": ["none"]}, "scales=none must be among"),
        ({"out_dtypes": ["fp64"]}, "out_dtypes=fp64 must be among bf16, fp16, fp32"),
        ({"accumulations": ["exact"]}, "accumulations=exact must be among fast, slow"),
        ({"layouts": ["xy"]}, "layouts=xy must be among nt"),
        ({"dtypes": ["fp8"]}, "dtypes=fp8 must be among e4m3, bf16"),
        ({"ops": ["matmul"], "weights": ["gpt_oss_20b_down"]}, "weights=gpt_oss_20b_down must be"),
        ({"ops": ["grouped_mm"], "weights": ["llama3_8b_o"]}, "weights=llama3_8b_o must be among"),
        (
            {"ops": ["grouped_mm"], "shapes": ["16x4096x4096"]},
            "shapes='16x4096x4096' must be of the form that grouped_mm takes: GxMxNxK",
        ),
        ({"ops": ["scaled_mm"], "shapes": ["8x16x64x64"]}, "that scaled_mm takes: MxNxK, such"),
        (
            {"ops": ["grouped_mm"], "dtypes": ["bf16"], "out_dtypes": ["fp16"]},
            "out_dtypes=fp16 must be among those that grouped_mm has for dtypes=bf16 .bf16 has bf16",
        ),
        ({"shapes": ["8x16x4096x100"]}, "k=100 must be a positive multiple of 16"),
    ],
)
def test_a_selection_that_names_nothing_is_refused(selection, message):
    with pytest.raises(ValueError, match=message):
        workloads.problems(**selection)
