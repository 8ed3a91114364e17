"""How one call is timed, with events that are made up: a late host is noticed, calls are announced."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch

from stoneware.measuring import stopwatch
from stoneware.measuring.stopwatch import CudaStopwatch

FLUSH_S, CALL_S = 70e-6, 10e-6


class Gpu:
    """A queue in virtual time: what is queued starts when the GPU is free and the host has come."""

    def __init__(self, host_s: float = 0.0, call_s: float = CALL_S) -> None:
        self.now_s = 1000.0
        self.free_s = 0.0
        self.host_s, self.call_s = host_s, call_s
        self.sleeps: list[int] = []

    def queue(self, seconds: float) -> float:
        self.free_s = max(self.free_s, self.now_s) + seconds
        return self.free_s

    def sleep(self, cycles: int) -> None:
        self.sleeps.append(cycles)
        self.queue(cycles / 1980e6)

    def call(self) -> None:
        self.now_s += self.host_s
        self.queue(self.call_s)

    def make_event(self, enable_timing: bool = False) -> types.SimpleNamespace:
        event = types.SimpleNamespace(passed_s=0.0)

        def record() -> None:
            event.passed_s = self.queue(0.0)

        def query() -> bool:
            return event.passed_s <= self.now_s

        def synchronize() -> None:
            self.now_s = max(self.now_s, event.passed_s)

        event.record, event.query, event.synchronize = record, query, synchronize
        event.elapsed_time = lambda end: (end.passed_s - event.passed_s) * 1e3
        return event


@pytest.fixture
def make(monkeypatch):
    def make(gpu: Gpu) -> CudaStopwatch:
        monkeypatch.setattr(torch.cuda, "Event", gpu.make_event)
        monkeypatch.setattr(torch.cuda, "_sleep", gpu.sleep)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: gpu.make_event())
        made = CudaStopwatch.__new__(CudaStopwatch)
        made._device, made._sleep_cycles = torch.device("cuda", 0), {}
        made._flush = lambda: gpu.queue(FLUSH_S)
        made.announce = lambda name: None
        return made

    return make


@pytest.mark.parametrize(("l2", "rows", "sums"), [("clean", 1, 8), ("dirty", 0, 0), ("as_is", 1, 0)])
def test_a_flush_reads_all_of_its_buffer_writes_all_of_it_or_does_nothing(l2, rows, sums):
    made = CudaStopwatch.__new__(CudaStopwatch)
    made._l2 = l2
    made._flush_rows, made._flush_sums = torch.ones(4, 8), torch.zeros(4)
    made._flush()
    assert made._flush_rows.eq(rows).all()
    assert made._flush_sums.eq(sums).all()


def test_a_host_that_keeps_up_costs_no_sleep(make):
    gpu = Gpu(host_s=20e-6)
    assert make(gpu).time_call("a", gpu.call) == pytest.approx(10.0, abs=0.01)
    assert gpu.sleeps == []


def test_a_late_host_is_noticed_and_the_call_timed_again_behind_longer_sleeps(make):
    gpu = Gpu(host_s=300e-6)
    made = make(gpu)
    assert made.time_call("a", gpu.call) == pytest.approx(10.0, abs=0.01)
    assert gpu.sleeps == [100_000, 200_000, 400_000, 800_000]
    gpu.sleeps.clear()
    assert made.time_call("a", gpu.call) == pytest.approx(10.0, abs=0.01)
    assert gpu.sleeps == [800_000], "the estimate for a call is dropped"


def test_a_host_that_is_always_late_ends(make):
    gpu = Gpu(host_s=1.0)
    made = make(gpu)
    for _ in range(10):
        assert made.time_call("a", gpu.call) >= 10.0
    assert max(gpu.sleeps) == stopwatch._LONGEST_SLEEP_CYCLES, "the sleep grows from call to call"


def test_each_call_is_announced_before_it_is_made(make):
    gpu = Gpu()
    made, order = make(gpu), []
    made.announce = order.append
    graph = types.SimpleNamespace(replay=lambda: (order.append("replayed"), gpu.call()))
    made.warm_up("a", lambda: order.append("called"))
    made.time_call("b", lambda: (order.append("called"), gpu.call()))
    assert made.time_graph("c", graph) == pytest.approx(10.0, abs=0.01)
    assert order == ["a", "called", "called", "called", "b", "called", "c", "replayed"]
