"""Tuning on a GPU: every candidate gets a sample, also one that hangs or faults, and the timings
are those of a cold cache and of the device alone."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

import pytest
import torch

import stoneware
from stoneware.measuring import candidates, machine, operands, workloads
from stoneware.measuring.device_timer import DeviceTimer
from stoneware.measuring.progress import Reporter
from stoneware.measuring.settings import Settings
from stoneware.ops import operation_of
from stoneware.ops.grouped_mm import api as grouped_mm_api
from stoneware.ops.scaled_mm import api
from stoneware.sessions import session
from stoneware.sessions.session import Ranks
from stoneware.specs.scaled_mm_problem import Problem
from stoneware.tuning.store import Store, user_store

PROBLEM = Problem.dense(m=48, n=512, k=1024)
QUICK = Settings(rounds=5, rounds_before_drop=2, hang_limit_s=10.0)


def tuned(store: Store, *child: str, settings: Settings = QUICK) -> session.Summary:
    options = {}
    if child:
        program = Path(__file__).with_name("tuning_child.py")
        options["command"] = (sys.executable, str(program), *child)
    return session.tune([PROBLEM], store, 0, settings, Reporter(), ranks=Ranks(), **options)


def statuses(store: Store) -> dict[str, str]:
    return {str(sample.config): sample.status for _, sample in store.samples()}


def assert_gpu_works() -> None:
    tensors = operands.make(PROBLEM, "cuda")
    result = stoneware.scaled_mm(tensors.a, tensors.b, *tensors.scales)
    comparison = operands.compare(result, operands.reference(tensors), PROBLEM)
    assert comparison.is_right, str(comparison)


def our_backend(device) -> str:
    """A backend whose kernels are ours, so that it can be told to write out of bounds."""
    found = {config.backend for config in api.OPERATION.candidates(PROBLEM, device)}
    ours = sorted(found & {"sm90", "triton_aot"})
    if not ours:
        pytest.skip("the wheel has no kernel for this GPU")
    return ours[0]


def test_every_candidate_is_right_and_a_second_start_measures_nothing(device, tmp_path):
    store = Store(tmp_path / "samples.sqlite3")
    problems = workloads.problems(shapes=["48x512x1024", "1x512x1024", "4x12x512x1024"], scales=["row"])
    settings = dataclasses.replace(QUICK, seconds_per_problem=10.0)
    summary = session.tune(problems, store, 0, settings, Reporter(), ranks=Ranks())
    assert (summary.num_measured, summary.failures) == (7, [])
    assert set(summary.statuses) == {"ok"}, statuses(store)
    for problem in problems:
        operation = operation_of(problem.key.op)
        measured = {s.config for _, s in store.samples() if s.key == problem.key}
        assert measured == set(operation.candidates(problem, device))
    again = session.tune(problems, store, 0, settings, Reporter(), ranks=Ranks())
    assert (again.num_known, again.num_samples) == (7, 0)


def test_a_run_records_clocks_and_power_limit(device, tmp_path):
    pytest.importorskip("pynvml")
    store = Store(tmp_path / "samples.sqlite3")
    tuned(store)
    for run, sample in store.samples():
        assert run.device.same_hardware(device.fingerprint) and run.device.power_limit_w > 0
        assert run.sm_clock_mhz_before and run.sm_clock_mhz_after and run.memory_clock_mhz_after
        assert sample.sm_clock_mhz_before and sample.sm_clock_mhz_after


@pytest.mark.parametrize("first_bad_call", ["0", "4"], ids=["at its first call", "when timed"])
@pytest.mark.parametrize(
    ("kind", "status"), [("never_ends", "hung"), ("asserts", "failed"), ("out_of_bounds", "failed")]
)
def test_a_candidate_that_takes_the_gpu_along_is_recorded_and_the_others_measured(
    device, tmp_path, kind, status, first_bad_call
):
    backend = our_backend(device) if kind == "out_of_bounds" else "vendor"
    store = Store(tmp_path / "samples.sqlite3")
    summary = tuned(store, kind, backend, first_bad_call)
    found = statuses(store)
    assert len(found) == len(api.OPERATION.candidates(PROBLEM, device))
    bad = {name: found[name] for name in found if found[name] != "ok"}
    assert list(bad.values()) == [status] and next(iter(bad)).startswith(f"{backend}:"), found
    assert summary.failures == []
    assert_gpu_works()


def test_a_wrong_candidate_is_not_timed(device, tmp_path):
    store = Store(tmp_path / "samples.sqlite3")
    tuned(store, "wrong", "vendor")
    [vendor] = [s for _, s in store.samples() if s.config.backend == "vendor"]
    assert (vendor.status, vendor.median_us, vendor.count) == ("wrong", 0.0, 0)
    assert set(statuses(store).values()) == {"ok", "wrong"}


@pytest.mark.parametrize(
    "op_api, problem",
    [(api, PROBLEM), (grouped_mm_api, grouped_mm_api.Problem.dense(m=48, n=512, k=1024, num_groups=4))],
    ids=["scaled_mm", "grouped_mm"],
)
def test_a_miss_is_measured_in_this_process_without_a_trace(device, tmp_path, monkeypatch, op_api, problem):
    monkeypatch.setenv("STONEWARE_CACHE_DIR", str(tmp_path))
    torch.manual_seed(7)
    torch.cuda.manual_seed(7)
    expected = torch.randn(3), torch.randn(3, device="cuda").cpu()
    torch.manual_seed(7)
    torch.cuda.manual_seed(7)
    candidates.tune_on_miss(op_api.OPERATION, problem, device)
    found = torch.randn(3), torch.randn(3, device="cuda").cpu()
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert set(statuses(user_store()).values()) == {"ok"}


@pytest.fixture(scope="module")
def timer() -> DeviceTimer:
    return DeviceTimer(0)


def sleeping(cycles: int):
    return lambda: torch.cuda._sleep(cycles)


@pytest.mark.parametrize("short_us", [0.0, 1e9], ids=["between events", "in graphs"])
def test_a_kernel_of_a_known_length_takes_that_long(device, timer, short_us):
    """A kernel that counts clock cycles: what two lengths differ by is known."""
    timings = timer.time(
        {cycles: sleeping(cycles) for cycles in (20_000, 60_000)}, rounds=20, max_seconds=10.0, short_us=short_us
    )
    clock_mhz = timings[60_000].sm_clock_mhz_after
    if not clock_mhz:
        pytest.skip("the clock is unknown without nvidia-ml-py")
    print(timings)
    difference_us = timings[60_000].median_us - timings[20_000].median_us
    assert difference_us == pytest.approx(40_000 / clock_mhz, rel=0.1)


def test_graphs_leave_out_what_events_cost(device, timer):
    """Both methods on a kernel of 5 us; prints what the events cost here."""
    calls = {"a": sleeping(10_000)}
    by_event = timer.time(calls, rounds=30, max_seconds=10.0, short_us=0.0)["a"]
    by_graph = timer.time(calls, rounds=30, max_seconds=10.0, short_us=1e9)["a"]
    print(f"between events {by_event}, in graphs {by_graph}")
    assert 0 < by_graph.median_us < by_event.median_us


@pytest.mark.parametrize("short_us", [0.0, 1e9], ids=["between events", "in graphs"])
def test_a_cold_call_reads_no_faster_than_memory_delivers(device, timer, short_us):
    """24 MiB fit in the L2 of an H200, from which they come about twice as fast."""
    properties = torch.cuda.get_device_properties(0)
    bus_bits = getattr(properties, "memory_bus_width", 0)
    if not bus_bits:
        pytest.skip("this torch does not tell the width of the memory bus")
    peak_bytes_per_us = 2 * device.fingerprint.memory_clock_khz * 1e3 * bus_bits / 8 / 1e6
    values = torch.randint(0, 9, (24 << 20,), dtype=torch.int8, device="cuda").view(torch.int32)
    out = torch.empty((), dtype=torch.int32, device="cuda")
    call = lambda: torch.amax(values, dim=0, out=out)  # noqa: E731
    timing = timer.time({"read": call}, rounds=30, max_seconds=10.0, short_us=short_us)["read"]
    print(f"{timing}, {values.nbytes / timing.median_us / peak_bytes_per_us:.0%} of the peak")
    assert timing.median_us > values.nbytes / peak_bytes_per_us


def test_the_time_of_a_slow_host_is_not_in_the_figure(device, timer):
    def slow_to_launch() -> None:
        time.sleep(3e-4)  # as a launcher in Python may take
        torch.cuda._sleep(60_000)

    timing = timer.time({"a": slow_to_launch}, rounds=15, max_seconds=10.0, short_us=0.0)["a"]
    quick = timer.time({"b": sleeping(60_000)}, rounds=15, max_seconds=10.0, short_us=0.0)["b"]
    print(timing, quick)
    assert timing.median_us == pytest.approx(quick.median_us, rel=0.1)


def test_a_call_that_cannot_be_captured_is_timed_between_events(device, timer):
    def synchronising() -> None:
        torch.cuda._sleep(10_000)
        torch.cuda.synchronize()

    timing = timer.time({"a": synchronising}, rounds=10, max_seconds=10.0, short_us=1e9)["a"]
    assert timing.count == 10 and timing.median_us > 0
    # A capture that failed must leave neither torch's allocator nor the next capture behind broken.
    torch.cuda.empty_cache()
    assert timer.stopwatch.capture(sleeping(1000), 2) is not None
    assert_gpu_works()


def test_nvml_agrees_with_the_gpu_that_torch_counts(device):
    pytest.importorskip("pynvml")
    assert machine.power_limit_w(0) > 0
    torch.cuda._sleep(200_000_000)
    busy_mhz = machine.sm_clock_mhz(0)
    torch.cuda.synchronize()
    assert busy_mhz > 0
    memory_mhz = device.fingerprint.memory_clock_khz / 1000
    assert machine.memory_clock_mhz(0) <= memory_mhz


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-rs"]))
