"""What explain prints: kernels in words, the chosen one marked, at most 80 columns, devices by name."""

from __future__ import annotations

import re
import types

import pytest
import torch

import stoneware as sw
from stoneware import explanation
from stoneware.kernels import manifest
from stoneware.kernels.config import Config
from stoneware.kernels.manifest import KernelRecord, Manifest
from stoneware.runtime.device import Device, DeviceFingerprint
from stoneware.specs.scaled_mm_problem import Problem
from stoneware.tuning.lookup import Decision, Grade, Refusal
from stoneware.tuning.table_entry import Choice

H200 = DeviceFingerprint(
    name="NVIDIA H200", compute_capability=(9, 0), num_sms=132, l2_bytes=62914560, memory_clock_khz=3201000
)
LONG_ID = "scaled_mm_block_sm90_e4m3_e4m3_bf16_64x16x256_1x1x1_splitk1x9_swap"
BUILT = {
    LONG_ID: {"tile": [64, 16, 256], "cluster": [1, 1, 1], "schedule": "splitk", "stages": 5, "swap_ab": True},
    "slow": {"tile": [128, 128, 64], "cluster": [2, 1, 1], "schedule": "pingpong", "accumulation": "slow"},
    "turns": {"tile": [128, 192, 64], "schedule": "persistent", "pingpong": True, "stages": 5, "swap_ab": True},
    "triton": {"tile": [16, 64, 128], "num_stages": 4, "num_warps": 8},
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    records = {
        name: KernelRecord(
            id=name, op="scaled_mm", backend="sm90", arch="sm_90a", config=built, sha256="", size_bytes=1
        )
        for name, built in BUILT.items()
    }
    monkeypatch.setattr(manifest, "installed", lambda: Manifest(records))


@pytest.mark.parametrize(
    ("kernel", "knobs", "words"),
    [
        (LONG_ID, {}, "tile 64x16x256, 5 stages, swap AB"),
        (LONG_ID, {"splits": 4}, "tile 64x16x256, 5 stages, swap AB, k split 4 ways"),
        (
            "slow",
            {"max_swizzle": 8, "raster": "along_m"},
            "tile 128x128x64, cluster 2x1, pingpong, float32 accumulation, swizzle 8, raster along m",
        ),
        ("turns", {}, "tile 128x192x64, pingpong, 5 stages, swap AB"),
        ("triton", {}, "tile 16x64x128, 4 stages, 8 warps"),
        ("torch._scaled_mm", {}, "torch._scaled_mm"),
    ],
)
def test_kernel_is_told_in_words(kernel, knobs, words):
    config = Config(backend="sm90", kernel=kernel, **knobs)
    assert explanation.kernel_in_words(config) == f"sm90: {words}"


def test_text_fits_a_terminal_and_marks_the_chosen_kernel():
    def choice(kernel, median_us):
        return Choice(
            config=Config(backend="sm90", kernel=kernel),
            median_us=median_us,
            spread_us=0.1,
            run="run-1",
            is_stale=False,
        )

    chosen = choice(LONG_ID, 10.0)
    text = str(
        explanation.Explanation(
            op="scaled_mm",
            problem=Problem.dense(m=16, n=4096, k=14336, scales="block", has_bias=True),
            device=Device(fingerprint=H200),
            decision=Decision(
                config=chosen.config,
                step=Grade.EXACT,
                source="wheel",
                grade=Grade.EXACT,
                reason="the preferred one of those that take at most 3% longer than the fastest, " * 3,
                chosen=chosen,
                runners_up=(choice("slow", 9.9), choice("triton", 123456.0)),
                refusals=(Refusal(what=f"sm90:{LONG_ID}", step=Grade.EXACT, reason="it is too long"),),
                run={
                    "date": "2026-11-23T05:55:41+00:00",
                    "driver": "580.1",
                    "cuda": "13.0",
                    "torch": "2.11",
                    "commit": "a",
                },
            ),
            sum_order="in one sum",
            batch_invariant=False,
            table_digest="0" * 64,
        )
    )
    lines = text.splitlines()
    assert max(map(len, lines)) <= explanation.COLUMNS
    assert LONG_ID in text
    times = [line for line in lines if " us " in line]
    assert [line.split()[0] for line in times] == ["9.90", ">", "123456.00"]
    assert "-1.0 %" in times[0] and "+1234460.0 %" in times[2]


def test_info_fits_a_terminal():
    assert max(map(len, str(sw.info()).splitlines())) <= explanation.COLUMNS


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("H200", ["NVIDIA H200"]),  # a whole name, though also a part of another
        ("nvidia h200 nvl", ["NVIDIA H200 NVL"]),
        ("nvl", ["NVIDIA H200 NVL"]),
        ("h100", ["NVIDIA H100 80GB HBM3"]),
        ("H100 80GB", ["NVIDIA H100 80GB HBM3"]),
        ("H20", []),
        ("h", []),
        ("B200", []),
        ("", []),
    ],
)
def test_device_is_found_by_a_part_of_its_name(name, found):
    names = ("NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3", "NVIDIA H200")
    known = [types.SimpleNamespace(names=[one], fingerprint=types.SimpleNamespace(name=one)) for one in names]
    assert [one.fingerprint.name for one in explanation.devices_named(name, known)] == found


def test_part_of_several_names_is_refused_with_all_of_them(monkeypatch):
    known = [
        types.SimpleNamespace(names=[one], fingerprint=types.SimpleNamespace(name=one)) for one in ("GPU 80", "GPU 40")
    ]
    source = types.SimpleNamespace(table=types.SimpleNamespace(devices=known))
    monkeypatch.setattr(explanation.sources, "sources", lambda op: [source])
    with pytest.raises(ValueError, match="device='gpu' is part of the names of 2 devices .* GPU 40, GPU 80; pass one"):
        sw.explain("matmul", m=1, n=16, k=16, device="gpu")


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("A100", "NVIDIA A100-SXM4-80GB"),
        ("sm_80", "NVIDIA A100-SXM4-80GB"),
        ("sm86", "NVIDIA A10"),
        ("rtx 4090", "NVIDIA GeForce RTX 4090"),
        ("RTX4090", "NVIDIA GeForce RTX 4090"),
        ("H100", "NVIDIA H100 80GB HBM3"),
        ("sm_90", "NVIDIA H100 80GB HBM3"),
        ("sm_90a", "NVIDIA H100 80GB HBM3"),
        ("H100 PCIe", "NVIDIA H100 PCIe"),
        ("b200", "NVIDIA B200"),
        ("sm_120", "NVIDIA GeForce RTX 5090"),
    ],
)
def test_a_gpu_is_explained_by_name_or_compute_capability(name, device):
    answer = sw.explain("matmul", m=16, n=4096, k=4096, device=name)
    assert answer.device.fingerprint.name == device
    assert answer.config.backend != "reference" and "no GPU is available" not in answer.hint


def test_the_name_of_a_measured_gpu_finds_the_measured_device():
    answers = [sw.explain("scaled_mm", m=16, n=6144, k=4096, device=name) for name in ("H100", "sm_90")]
    assert [answer.device.fingerprint.power_limit_w for answer in answers] == [700, 700]


def test_an_unknown_gpu_is_refused_with_the_known_names():
    for name in ("V100", "sm_70", "sm_8000"):
        with pytest.raises(ValueError, match=f"device='{name}' must name a GPU .*H200.*A100.*sm_80, sm_86") as caught:
            sw.explain("matmul", m=1, n=16, k=16, device=name)
        assert "pass one of those, 'cuda', 'cpu' or None" in str(caught.value)
        gpus = re.findall(r"\(([^()]+)\)", str(caught.value))[:2]
        names = ", ".join(gpus).split(", ")
        assert len(names) == len(set(names)) and {"H100", "H200", "A100", "RTX 4090"} < set(names)


def test_times_of_another_gpu_are_named_as_such():
    # The H200's measurement decides here, because this layer was not measured on an H100.
    answer = sw.explain("scaled_mm", m=16, n=6144, k=4096, device="H100")
    lines = str(answer).splitlines()
    assert answer.grade == "other device" and answer.as_dict()["measured_on"] == "NVIDIA H200"
    assert any("exact shape, measured on NVIDIA H200" in line for line in lines)
    assert "candidates on NVIDIA H200 (> is chosen)" in lines
    lines = str(sw.explain("scaled_mm", m=16, n=6144, k=4096, device="H200")).splitlines()
    assert "candidates (> is chosen)" in lines and not any("measured on" in line for line in lines)


def test_the_reason_without_measurements_is_that_of_the_chosen_backend():
    answers = {
        device: sw.explain("scaled_mm", m=16, n=6144, k=4096, device=device) for device in ("A100", "L4", "B200")
    }
    assert "Triton kernel with the smallest tile" in answers["A100"].decision.reason
    assert not answers["A100"].hint
    for device in ("L4", "B200"):
        assert "torch's own comes first" in answers[device].decision.reason
        assert answers[device].hint == "run `stoneware tune` on such a GPU to let Triton kernels compete"
    for answer in answers.values():
        assert "Hopper" not in answer.decision.reason
        reasons = [item.reason for item in answer.decision.refusals]
        assert len(reasons) == len(set(reasons))


@pytest.mark.parametrize(("op", "names"), [("scaled_mm", "e4m3, e5m2"), ("matmul", "bf16, fp16")])
def test_a_wrong_dtype_is_refused_under_the_name_of_its_argument(op, names):
    with pytest.raises(ValueError, match=f"^dtype='fp8' must be one of {names}; pass one of these"):
        sw.explain(op, m=16, n=4096, k=4096, dtype="fp8")
    with pytest.raises(ValueError, match="^dtype='fp8' must be one of e4m3, bf16"):
        sw.explain("grouped_mm", m=16, n=4096, k=4096, num_groups=4, dtype="fp8")


def test_triton_refuses_block_scales_by_name():
    answer = sw.explain("scaled_mm", m=16, n=6144, k=4096, scales="block", device="L4")
    assert "no scaled_mm kernel with block scales; quantize with row or tensor scales" in str(
        [item.reason for item in answer.decision.refusals if item.what == "triton_aot"]
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is the default")
def test_without_a_gpu_the_text_says_how_to_name_one():
    words = {
        device: " ".join(str(sw.explain("matmul", m=1, n=16, k=16, device=device)).split()) for device in (None, "cpu")
    }
    assert "no GPU is available here" in words[None] and "--device) with a name such as H200, A100" in words[None]
    assert "no GPU is available here" not in words["cpu"]
