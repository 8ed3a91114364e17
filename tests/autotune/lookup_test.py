"""The look-up, as `explain` and `scaled_mm` use it: which step answers, with which grade."""

from __future__ import annotations

import json

import pytest
import small_package as small
import torch

import stoneware as sw
from stoneware.errors import TableError, UnsupportedError
from stoneware.ops.scaled_mm.api import OPERATION
from stoneware.runtime.device import CPU, Device
from stoneware.specs.matmul_problem import Problem as MatmulProblem
from stoneware.specs.scaled_mm_problem import Problem
from stoneware.tuning import nearest, table_file
from stoneware.tuning.bake import bake
from stoneware.tuning.sources import Place
from stoneware.tuning.table import Block

BIG, TINY = small.sm90(small.BIG), small.sm90(small.TINY)
H200 = Device(fingerprint=small.H200)


def decide(device=H200, *, m=16, n=4096, k=4096, **changes):
    problem = {**vars(Problem.dense(m=m, n=n, k=k)), **changes}
    return OPERATION.decide(Problem(**problem), device)


@pytest.mark.parametrize(
    ("changes", "error", "parts"),
    [
        ({"m": True}, TypeError, ["m=True", "must be an int", "bool", "int(m)"]),
        ({"n": 4096.0}, TypeError, ["n=4096.0", "float"]),
        ({"k": "64"}, TypeError, ["k='64'", "str"]),
        ({"k": torch.tensor(64)}, TypeError, ["k=tensor(64)", "Tensor"]),
        ({"m": None}, TypeError, ["m=None", "NoneType"]),
        ({"m": 2**31}, ValueError, [f"m={2**31}", "2**31-1", "split"]),
        ({"n": 2**40}, ValueError, [f"n={2**40}", "2**31-1"]),
        ({"dtype": ""}, ValueError, ["dtype=''", "must be one of"]),
        ({"out_dtype": ""}, ValueError, ["out_dtype=''", "must be one of"]),
        ({"device": 0}, TypeError, ["device=0", "str, a torch.device or None", "'cuda:1'"]),
        ({"device": ""}, ValueError, ["device='' must name a GPU in the tuning tables", "'cuda', 'cpu' or None"]),
        ({"device": "cuda"}, ValueError, ["device='cuda'", "finds none", "'cpu'"]),
        ({"device": torch.device("cuda", 1)}, ValueError, ["device='cuda:1'", "finds none"]),
        ({"device": "cuda:abc"}, ValueError, ["device='cuda:abc'", "'cuda:1'"]),
        ({"device": "cuda:-1"}, ValueError, ["device='cuda:-1'", "'cuda:1'"]),
        ({"device": torch.device("meta")}, ValueError, ["meta", "'cuda' or 'cpu'"]),
    ],
)
@pytest.mark.parametrize("op", ["scaled_mm", "matmul"])
def test_explain_refuses_bad_arguments_with_rule_value_and_remedy(package, op, changes, error, parts):
    with pytest.raises(error) as caught:
        sw.explain(op, **{"m": 16, "n": 64, "k": 64, **changes})
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), torch.device("cpu", 0), None])
def test_explain_takes_a_device_by_name_and_as_torch_has_it(package, device):
    assert sw.explain("matmul", m=8, n=8, k=8, device=device).device == CPU


@pytest.mark.parametrize("name", ["lda", "ldb", "ldd"])
@pytest.mark.parametrize(("value", "error"), [(64.0, TypeError), (2**31, ValueError)])
@pytest.mark.parametrize("problem", [Problem, MatmulProblem])
def test_leading_dimension_must_be_an_int_of_32_bits(problem, name, value, error):
    with pytest.raises(error, match=f"{name}={value}"):
        problem(**{"m": 16, "n": 64, "k": 64, "lda": 64, "ldb": 64, "ldd": 64, name: value})


def test_backend_that_was_asked_for_is_named_with_its_reason_alone(package):
    with pytest.raises(UnsupportedError) as caught:
        OPERATION.decide(Problem.dense(m=16, n=64, k=64), CPU, backend="vendor")
    message = str(caught.value)
    assert message.startswith("backend='vendor' cannot run scaled_mm m=16 n=64 k=64 on CPU: torch.")
    assert message.endswith("; leave backend out to let another one run")
    assert "sm90" not in message
    with pytest.raises(UnsupportedError) as caught:
        OPERATION.decide(Problem(m=16, n=4096, k=4096, lda=4096, ldb=4096, ldd=4104), H200, backend="triton_aot")
    assert "ldd=4104" in str(caught.value)
    assert "was requested" not in str(caught.value)


def test_deeply_nested_table_is_a_damaged_one():
    with pytest.raises(TableError, match="t.table: expected a header in JSON"):
        table_file.decode(b"[" * 200_000, "t.table", "scaled_mm")


def test_exact_shape_is_answered_by_its_entry(package):
    decision = decide()
    assert (decision.config, decision.step, decision.grade) == (TINY, "exact", "exact")
    assert decision.reason.startswith("10.00 us on NVIDIA H200, run run-1")
    assert [choice.median_us for choice in decision.runners_up] == [14.0, 16.0, 20.0]
    assert decision.refusals == ()


def test_vendor_is_chosen_where_it_measured_faster(package):
    assert decide(m=512).config == small.VENDOR


@pytest.mark.parametrize(("m", "measured_m"), [(1, 16), (15, 16), (17, 512), (511, 512), (9999, 512)])
def test_same_weight_is_answered_by_the_next_larger_m_and_past_the_last_by_the_last(package, m, measured_m):
    decision = decide(m=m)
    assert (decision.step, decision.grade) == ("nearest m", "nearest m")
    assert f"m={measured_m} n=4096 k=4096" in decision.reason


def test_other_weight_is_answered_by_the_nearest_shape(package):
    decision = decide(m=12, n=6144)
    assert (decision.config, decision.step, decision.grade) == (TINY, "nearest shape", "nearest shape")


def test_other_16_bit_output_is_answered_with_its_own_kernel_and_says_what_was_measured(package):
    decision = decide(out_dtype="fp16")
    assert decision.config == small.sm90(small.TINY, "fp16")
    assert (decision.step, decision.grade) == ("exact", "exact")
    assert "measured with e4m3*e4m3->bf16, e4m3*e4m3->fp16 asked" in decision.reason


def test_h100_takes_entries_of_the_h200_with_a_lower_grade_only(package):
    decision = decide(Device(fingerprint=small.H100))
    assert (decision.config, decision.step, decision.grade) == (TINY, "exact", "other device")
    assert "the nearest device that was measured" in decision.reason


def test_device_of_another_capability_gets_the_heuristic(package):
    decision = decide(Device(fingerprint=small.L40))
    assert (decision.config, decision.step) == (small.VENDOR, "heuristic")


def test_scales_without_measurement_get_the_heuristic(package):
    # The package has row scales only.
    for m, config in ((1, TINY), (33, small.sm90(small.SMALL)), (65, BIG), (128, BIG), (129, small.VENDOR)):
        decision = decide(m=m, scale_a="tensor", scale_b="tensor")
        assert (decision.config, decision.step) == (config, "heuristic")
    slow = decide(m=1, scale_a="tensor", scale_b="tensor", use_fast_accum=False)
    assert (slow.config, slow.step) == (small.VENDOR, "heuristic")


def test_refused_choice_is_kept_and_the_next_one_runs(package):
    # One scale of each kind: torch._scaled_mm, the choice at m=512, does not take them.
    decision = decide(m=512, scale_a="tensor", scale_b="row")
    assert (decision.config, decision.step) == (BIG, "exact")
    refusals = {item.what: item.reason for item in decision.refusals}
    assert "scale_a=tensor and scale_b=row" in refusals["vendor"]
    assert any("vendor:torch._scaled_mm (exact)" in str(item) for item in decision.refusals)


def test_stale_kernel_lowers_the_grade(tmp_path, monkeypatch):
    samples = [small.sample(TINY, 10.0, kernel_sha256="0" * 64)]
    files = small.write_device(tmp_path / "samples", samples)
    small.install(tmp_path, {"scaled_mm": bake("scaled_mm", files, small.manifest())}, monkeypatch)
    decision = decide()
    assert (decision.step, decision.grade) == ("exact", "stale kernel")
    assert "rebuilt with other bytes" in decision.reason
    assert "run `stoneware tune --stale`" in sw.explain("scaled_mm", m=16, n=4096, k=4096, device="H200").hint


def test_cpu_needs_no_table(tmp_path, monkeypatch):
    small.install(tmp_path, {}, monkeypatch)
    assert decide(CPU).config.backend == "reference"
    with pytest.raises(TableError, match="scaled_mm.table: expected the tuning table"):
        decide(H200)


def test_arguments_come_before_the_table(package):
    problem = Problem.dense(m=16, n=4096, k=4096)
    decision = OPERATION.decide(problem, H200, config=BIG)
    assert (decision.config, decision.step) == (BIG, "argument")
    decision = OPERATION.decide(problem, H200, backend="vendor")
    assert (decision.config, decision.step) == (small.VENDOR, "exact")
    assert OPERATION.decide(problem, H200, backend="reference").config.backend == "reference"
    with pytest.raises(UnsupportedError, match="has for this problem"):
        OPERATION.decide(problem, H200, config=small.sm90(small.BIG, "fp16"))


def test_error_lists_every_refusal(package):
    problem = Problem.dense(m=16, n=4096, k=4096)
    ancient = small.DeviceFingerprint(
        name="Old GPU", compute_capability=(7, 0), num_sms=80, l2_bytes=1, memory_clock_khz=1
    )
    device = Device(fingerprint=ancient)
    with pytest.raises(UnsupportedError) as caught:
        OPERATION.decide(problem, device, backend="vendor")
    assert "needs compute capability 8.9" in str(caught.value)
    decision = OPERATION.decide(problem, device)
    assert decision.config.backend == "reference"
    assert {item.what for item in decision.refusals if not item.step} == {"sm90", "triton_aot", "vendor"}


def test_candidates_are_every_backends_but_the_reference(package):
    large = OPERATION.candidates(Problem.dense(m=8192, n=8192, k=8192), H200)
    assert large[0] == BIG
    assert [config.max_swizzle for config in large if config.kernel == BIG.kernel] == [1, 2, 4, 8]
    assert {config.backend for config in large} == {"sm90", "triton_aot", "vendor"}
    # The first of each backend's tiles that are far from m is included.
    assert OPERATION.candidates(Problem.dense(m=1, n=4096, k=4096), H200) == [TINY, small.triton(), small.VENDOR]
    assert OPERATION.candidates(Problem.dense(m=24, n=4096, k=4096), H200) == [
        small.sm90(small.SMALL),
        TINY,
        small.triton(),
        small.VENDOR,
    ]
    on_cpu = OPERATION.candidates(Problem.dense(m=1, n=16, k=16), CPU)
    assert [config.backend for config in on_cpu] == ["reference"]


@pytest.mark.parametrize("name", ["NVIDIA H200", "h200", "H200-SXM", "nvidia_h200"])
def test_explain_answers_for_a_device_that_is_not_here(package, name):
    explanation = sw.explain("scaled_mm", m=16, n=4096, k=4096, dtype="e4m3", device=name)
    assert explanation.config == TINY
    text = str(explanation)
    for part in (
        "scaled_mm m=16 n=4096 k=4096",
        "NVIDIA H200",
        TINY.kernel,
        "exact",
        "10.00 us",
        "the fastest of 4",
        "+60.0 %",
        "driver 580.95",
        table_file.packaged("scaled_mm").digest,
    ):
        assert part in text
    plain = json.loads(json.dumps(explanation.as_dict()))
    assert plain["step"] == "exact"
    assert plain["config"] == TINY.to_json()
    assert plain["run"]["torch"] == "2.11.0"


def test_explain_of_an_unknown_device_lists_those_it_knows(package):
    with pytest.raises(ValueError) as caught:
        sw.explain("scaled_mm", m=16, n=4096, k=4096, device="H800")
    assert "device='H800'" in str(caught.value)
    assert "the tuning tables (H200), another GPU model (A100, " in str(caught.value)


def test_explain_without_a_gpu_explains_the_reference(package):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    explanation = sw.explain("scaled_mm", m=16, n=4096, k=4096)
    assert explanation.config.backend == "reference"
    assert "sm90: " in str(explanation)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"op": "conv"}, "op='conv' must be one of scaled_mm, matmul"),
        ({"k": 100}, "k=100 must be a positive multiple of 16; pad"),
        ({"m": 0}, "m=0 must be at least 1"),
        ({"dtype": "int8"}, "dtype='int8' must be one of e4m3"),
        ({"scales": "column"}, "scales='column' must be one of tensor, row, block, block_1d, or two as tensor/row"),
    ],
)
def test_explain_refuses_bad_arguments(package, changes, part):
    arguments = {"op": "scaled_mm", "m": 16, "n": 4096, "k": 4096, "device": "h200", **changes}
    with pytest.raises(ValueError) as caught:
        sw.explain(arguments.pop("op"), **arguments)
    assert part in str(caught.value)


def test_matmul_goes_to_the_vendor_library_without_measurements(package):
    explanation = sw.explain("matmul", m=16, n=4096, k=4096, dtype="fp16", device="cpu")
    assert explanation.config.backend == "reference"
    from stoneware.ops.matmul.api import OPERATION as matmul_operation

    problem = sw.explain("matmul", m=16, n=4096, k=4096, device="cpu").problem
    assert matmul_operation.decide(problem, H200).config.kernel == "torch.mm"


def test_info_tells_kernels_and_tables(package):
    information = sw.info()
    assert information.kernels["scaled_mm sm90 sm_90a"] == 8
    assert "2 entries of NVIDIA H200" in information.tables["scaled_mm"]
    assert table_file.packaged("scaled_mm").digest in str(information)
    json.dumps(information.as_dict())


def test_info_reports_a_damaged_table_in_its_place(package):
    path = package / "tables" / "scaled_mm.table"
    path.write_bytes(path.read_bytes().replace(b"10.0", b"11.0"))
    small.forget()
    assert "reinstall the stoneware wheel" in sw.info().tables["scaled_mm"]


@pytest.mark.parametrize(("k", "element_bytes", "nearest_k"), [(4224, 1, 4128), (4200, 2, 4112)])
def test_near_weights_are_those_whose_rows_are_aligned_alike(k, element_bytes, nearest_k):
    """Of 4000, 4016, 4112 and 4128 elements, rows of 32 and 16 bytes more than a multiple of 64."""
    block = Block()
    block.first_sizes = [(4096, near_k) for near_k in (4000, 4016, 4112, 4128)]
    place = Place(None, 0, None, block, 0.0)
    b_dtype = {1: "e4m3", 2: "bf16"}[element_bytes]
    _, (_, near_k) = nearest.near_weights(small.key(n=4096, k=k, b_dtype=b_dtype), [place])[0]
    assert near_k == nearest_k


def test_in_layouts_nn_and_tn_these_are_rows_of_n():
    for layout in ("nn", "tn"):
        block = Block()
        block.first_sizes = [(near_n, 4112) for near_n in (4000, 4016, 4112, 4128)]
        key = small.key(op="matmul", n=4200, k=4096, a_dtype="bf16", b_dtype="bf16", scales="none", layout=layout)
        _, (near_n, _) = nearest.near_weights(key, [Place(None, 0, None, block, 0.0)])[0]
        assert near_n == 4112
