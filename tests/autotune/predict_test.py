"""Predictions: in range, in order, the same everywhere, and strict about what they are given."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from stoneware.kernels.key import Key
from stoneware.kernels.manifest import KernelRecord
from stoneware.tuning.predict import PREDICTED_DEVICES, DeviceFacts, predict

DEVICES = {device.fingerprint.name: device for device in PREDICTED_DEVICES}
H200 = DEVICES["NVIDIA H200"]
A100 = DEVICES["NVIDIA A100-SXM4-80GB"]

TFLOPS = {
    "NVIDIA A100-SXM4-80GB": (312, 0), "NVIDIA L4": (121, 242.5), "NVIDIA L40S": (362, 733),
    "NVIDIA GeForce RTX 4090": (165.2, 330.3), "NVIDIA H100 80GB HBM3": (989.4, 1978.9),
    "NVIDIA H100 PCIe": (756, 1513), "NVIDIA H200": (989, 1979), "NVIDIA B200": (2250, 4500),
    "NVIDIA GeForce RTX 5090": (209.5, 419),
}
"""Dense bf16 and fp8 with fp32 accumulation, as each device's `source` quotes them."""


def key(**changes) -> Key:
    base = Key(
        op="scaled_mm", a_dtype="e4m3", b_dtype="e4m3", out_dtype="bf16", scales="row",
        layout="nt", n=4096, k=4096, m=16,
    )
    return replace(base, **changes)


def kernel(name: str, tile: tuple[int, int, int], arch: str = "sm_90", **config) -> KernelRecord:
    return KernelRecord(
        id=name, op=config.pop("op", "scaled_mm"),
        backend="cutlass_sm90" if "schedule" in config else "triton_aot", arch=arch,
        sha256="0" * 64, size_bytes=1,
        config={"a": "e4m3", "b": "e4m3", "out": "bf16", "tile": list(tile), **config},
    )


def triton_kernels(arch: str) -> list[KernelRecord]:
    return [
        kernel("short", (16, 64, 128), arch, layout="nt", num_stages=5),
        kernel("square", (128, 128, 128), arch, layout="nt", num_stages=4),
    ]


SHORT, SQUARE = triton_kernels("sm_90")
PINGPONG = kernel(
    "pingpong", (128, 128, 128), "sm_90a", cluster=[2, 1, 1], schedule="pingpong", swap_ab=False
)
SWAPPED = kernel(
    "swapped", (64, 16, 256), "sm_90a", cluster=[1, 1, 1], schedule="warpspecialized", swap_ab=True
)
KERNELS = [SHORT, SQUARE, PINGPONG, SWAPPED]


def arch_of(device) -> str:
    major, minor = device.fingerprint.compute_capability
    return f"sm_{major}{minor}"


def times(problem: Key, device=H200, kernels=KERNELS) -> dict[str, float]:
    return {config.kernel: time_us for config, time_us in predict(problem, device, kernels)}


def test_predictions_are_sorted_and_no_faster_than_dram_and_tensor_cores():
    for m in (1, 64, 1000, 8192):
        problem = key(m=m)
        predicted = predict(problem, H200, KERNELS)
        assert [time_us for _, time_us in predicted] == sorted(time_us for _, time_us in predicted)
        read_us = (problem.m + problem.n) * problem.k / (H200.facts.memory_gbytes_per_s * 1e3)
        multiply_us = 2 * problem.m * problem.n * problem.k / (TFLOPS["NVIDIA H200"][1] * 1e6)
        assert predicted[0][1] > max(read_us, multiply_us)
        assert predicted[-1][1] < 100 * max(read_us, multiply_us, 1.0)


def test_every_device_prefers_the_short_tile_at_small_m_and_the_square_one_at_large_m():
    for device in PREDICTED_DEVICES:
        kernels = triton_kernels(arch_of(device))
        for m, expected in ((1, "short"), (16, "short"), (8192, "square")):
            config, _ = predict(key(m=m, n=8192, k=8192), device, kernels)[0]
            assert config.kernel == expected, (device.fingerprint.name, m)


@pytest.mark.parametrize("axis", ["m", "n", "k"])
def test_more_work_is_never_faster(axis):
    for _ in range(300):
        device = random.choice(PREDICTED_DEVICES)
        # From 128 on, that no tile is taller or wider than the problem: below, Triton's kernels
        # load rows again, and fewer rows do take longer.
        problem = key(
            m=random.randint(128, 9000), n=16 * random.randint(8, 4000),
            k=128 * random.randint(1, 200),
        )
        more = replace(problem, **{axis: random.choice((2, 3)) * getattr(problem, axis)})
        kernels = [*triton_kernels(arch_of(device)), PINGPONG, SWAPPED]
        before, after = times(problem, device, kernels), times(more, device, kernels)
        for name, time_us in before.items():
            assert after[name] >= time_us, (device.fingerprint.name, name, problem, more)


def test_more_groups_are_never_faster_and_read_each_matrix():
    kernels = [
        kernel("swapped", (128, 32, 128), "sm_90a", op="grouped_mm", schedule="cooperative",
               swap_ab=True),
        kernel("square", (128, 128, 128), "sm_90a", op="grouped_mm", schedule="pingpong"),
    ]
    for m in (1, 16, 100, 2048):
        last = {"swapped": 0.0, "square": 0.0}
        for num_groups in (1, 2, 8, 128):
            problem = key(op="grouped_mm", m=m, num_groups=num_groups)
            found = times(problem, H200, kernels)
            read_us = num_groups * problem.n * problem.k / (H200.facts.memory_gbytes_per_s * 1e3)
            for name, time_us in found.items():
                assert time_us >= max(last[name], read_us), (m, num_groups, name)
            last = found
        assert min(last, key=last.get) == ("swapped" if m <= 16 else "square")


def test_more_bandwidth_and_more_sms_are_never_slower():
    facts = H200.facts
    better = [
        replace(H200, facts=replace(facts, memory_gbytes_per_s=2 * facts.memory_gbytes_per_s)),
        replace(H200, facts=replace(facts, mma_8bit_per_clock=2 * facts.mma_8bit_per_clock)),
        replace(H200, facts=replace(facts, l2_bytes_per_clock=2 * facts.l2_bytes_per_clock)),
        replace(H200, fingerprint=replace(H200.fingerprint, num_sms=264)),
    ]
    for m in (1, 128, 512, 8192):
        now = times(key(m=m))
        for device in better:
            then = times(key(m=m), device)
            assert all(then[name] <= time_us for name, time_us in now.items())


def test_a_tile_more_costs_a_wave():
    # 2 x 66 tiles for 132 SMs, then one column of tiles more.
    one_wave = times(key(m=256, n=66 * 128, k=8192), kernels=[PINGPONG])["pingpong"]
    two_waves = times(key(m=256, n=67 * 128, k=8192), kernels=[PINGPONG])["pingpong"]
    assert two_waves > 1.7 * one_wave


def test_swapped_operands_are_the_same_tile_turned():
    upright = kernel("upright", (16, 64, 256), "sm_90a", cluster=[1, 2, 1], schedule="cooperative")
    turned = kernel(
        "turned", (64, 16, 256), "sm_90a", cluster=[2, 1, 1], schedule="cooperative", swap_ab=True
    )
    for m in (1, 100, 4096):
        predicted = times(key(m=m), kernels=[upright, turned])
        assert predicted["upright"] == predicted["turned"]


def test_widening_e4m3_costs_time_on_a_gpu_without_fp8():
    free = replace(A100, facts=replace(A100.facts, mma_8bit_per_clock=1024))
    problem, kernels = key(m=8192), triton_kernels("sm_80")
    with_widening, without = times(problem, A100, kernels), times(problem, free, kernels)
    assert all(with_widening[name] > without[name] for name in without)


def test_kernels_of_another_op_arch_dtype_layout_accumulation_or_scales_are_left_out():
    others = [
        kernel("other_op", (128, 128, 64), op="matmul"),
        kernel("other_arch", (128, 128, 128), "sm_89"),
        kernel("other_out", (128, 128, 128), out="fp16"),
        kernel("other_operand", (128, 128, 128), a="e5m2"),
        kernel("other_layout", (128, 128, 128), layout="nn"),
        kernel("other_accumulation", (128, 128, 128), accumulation="slow"),
        kernel("other_scales", (128, 128, 128), scales="block"),
    ]
    assert predict(key(), H200, others) == []
    assert set(times(key(), kernels=[*others, SHORT])) == {"short"}
    assert predict(key(), H200, []) == []
    slow, block = replace(key(), accumulation="slow"), replace(key(), scales="block")
    assert set(times(slow, kernels=[*others, SHORT])) == {"other_accumulation"}
    assert set(times(block, kernels=[*others, SHORT])) == {"other_scales"}


def test_ties_go_to_the_first_config_and_the_order_of_the_kernels_is_nothing():
    twins = [replace(SHORT, id=f"twin_{idx}") for idx in range(6)]
    expected = predict(key(), H200, twins)
    assert [config.kernel for config, _ in expected] == [twin.id for twin in twins]
    for _ in range(5):
        random.shuffle(twins)
        assert predict(key(), H200, twins) == expected


def test_an_iterator_of_kernels_will_do():
    assert predict(key(), H200, iter(KERNELS)) == predict(key(), H200, KERNELS)


def test_predictions_do_not_depend_on_process_hash_seed_or_locale():
    program = (
        "import json, predict_test as t; print(json.dumps([[c.kernel, u.hex()] "
        "for d in t.PREDICTED_DEVICES for m in (1, 77, 4096) for c, u in "
        "t.predict(t.key(m=m), d, [*t.triton_kernels(t.arch_of(d)), t.PINGPONG, t.SWAPPED])]))"
    )
    outputs = set()
    for seed, language in (("0", "C"), ("7", "de_DE.UTF-8")):
        environment = {
            **os.environ, "PYTHONHASHSEED": seed, "LC_ALL": language,
            "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path]),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        outputs.add(subprocess.run(
            [sys.executable, "-c", program], env=environment, check=True, capture_output=True,
        ).stdout)
    assert len(outputs) == 1 and len(json.loads(outputs.pop())) > 50


def test_the_model_imports_nothing_that_differs_between_machines():
    program = (
        "import sys, stoneware.tuning.predict; "
        "print(*sorted({'torch', 'numpy', 'triton'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True,
    ).stdout
    assert output.strip() == b""


@pytest.mark.parametrize("name, value", [("m", 0), ("n", -1), ("k", 0), ("m", 1.5), ("k", True)])
def test_a_size_that_is_no_positive_integer_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r} of a problem must be an int >= 1"):
        predict(key(**{name: value}), H200, KERNELS)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="a_dtype='int4' must be one of e4m3"):
        predict(key(a_dtype="int4"), H200, KERNELS)


@pytest.mark.parametrize("config, message", [
    ({"tile": None}, "tile=None of kernel 'short' must be three integers >= 1"),
    ({"tile": [16, 64]}, r"tile=\[16, 64\] of kernel"),
    ({"tile": [16, 0, 128]}, r"tile=\[16, 0, 128\] of kernel"),
    ({"tile": [16, 64, "128"]}, "of kernel 'short' must be three integers"),
    ({"cluster": [2, 0, 1]}, r"cluster=\[2, 0, 1\] of kernel"),
    ({"num_stages": "4"}, "num_stages='4' of kernel 'short' must be an int >= 1"),
    ({"num_stages": 0}, "num_stages=0 of kernel 'short' must be an int >= 1"),
])
def test_a_damaged_kernel_is_refused_by_name(config, message):
    damaged = replace(SHORT, config={**SHORT.config, **config})
    with pytest.raises(ValueError, match=message):
        predict(key(), H200, [damaged])


@pytest.mark.parametrize("name, value", [
    ("sm_clock_mhz", 0), ("memory_gbytes_per_s", 4.8), ("mma_16bit_per_clock", 0),
    ("mma_8bit_per_clock", -1), ("l2_bytes_per_clock", 0), ("shared_memory_bytes", None),
])
def test_impossible_facts_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r} of device facts"):
        replace(H200.facts, **{name: value})
    assert isinstance(H200.facts, DeviceFacts)


def test_every_predicted_device_is_one_device_and_says_where_it_is_from():
    for idx, device in enumerate(PREDICTED_DEVICES):
        assert device.source and device.aliases
        for other in PREDICTED_DEVICES[:idx]:
            assert not device.fingerprint.same_hardware(other.fingerprint)
            assert not set(device.aliases) & set(other.aliases)


def test_the_facts_give_the_quoted_tensor_core_rates():
    assert set(TFLOPS) == set(DEVICES)
    for name, (bf16, fp8) in TFLOPS.items():
        device = DEVICES[name]
        flops = 2 * device.fingerprint.num_sms * device.facts.sm_clock_mhz / 1e6
        assert flops * device.facts.mma_16bit_per_clock == pytest.approx(bf16, rel=0.02)
        assert flops * device.facts.mma_8bit_per_clock == pytest.approx(fp8, rel=0.02)
