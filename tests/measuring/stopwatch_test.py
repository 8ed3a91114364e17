"""How one call is timed, with events that are made up: a late host is noticed, a late call is said."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch

from stoneware.measuring import stopwatch
from stoneware.measuring.stopwatch import CudaStopwatch

FLUSH_S, CALL_S, POLL_S = 70e-6, 10e-6, 1e-3


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
        event = types.SimpleNamespace(passed_s=None)

        def record() -> None:
            event.passed_s = self.queue(0.0)

        def query() -> bool:
            has_passed = event.passed_s <= self.now_s
            if not has_passed:
                self.now_s += POLL_S if event.passed_s - self.now_s > POLL_S else 1e-6
            return has_passed

        event.record, event.query = record, query
        event.elapsed_time = lambda end: (end.passed_s - event.passed_s) * 1e3
        return event


@pytest.fixture
def make(monkeypatch):
    def make(gpu: Gpu) -> CudaStopwatch:
        monkeypatch.setattr(torch.cuda, "Event", gpu.make_event)
        monkeypatch.setattr(torch.cuda, "_sleep", gpu.sleep)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(stopwatch.time, "monotonic", lambda: gpu.now_s)
        made = CudaStopwatch.__new__(CudaStopwatch)
        made._device, made._sleep_cycles = torch.device("cuda", 0), {}
        made._flush = lambda: gpu.queue(FLUSH_S)
        made._last_said, made.is_careful = gpu.now_s, False
        made.said = []
        made.say_waiting = made.said.append
        return made

    return make


@pytest.mark.parametrize("is_dirty", (False, True))
def test_a_flush_reads_all_of_its_buffer_or_writes_all_of_it(is_dirty):
    made = CudaStopwatch.__new__(CudaStopwatch)
    made._is_dirty = is_dirty
    made._flush_rows, made._flush_sums = torch.ones(4, 8), torch.zeros(4)
    made._flush()
    assert made._flush_rows.eq(0 if is_dirty else 1).all()
    assert made._flush_sums.eq(0 if is_dirty else 8).all()


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
    assert gpu.sleeps == [800_000], "what was learnt about a call is forgotten"


def test_a_host_that_is_always_late_ends(make):
    gpu = Gpu(host_s=1.0)
    made = make(gpu)
    for _ in range(10):
        assert made.time_call("a", gpu.call) >= 10.0
    assert max(gpu.sleeps) == stopwatch._LONGEST_SLEEP_CYCLES, "the sleep grows from call to call"


def test_quick_calls_are_not_said(make):
    gpu = Gpu()
    made = make(gpu)
    for _ in range(100):
        made.time_call("a", gpu.call)
    assert made.said == []


def test_a_call_that_takes_long_is_said_while_it_is_waited_for(make):
    gpu = Gpu(call_s=0.5)
    made = make(gpu)
    made.warm_up("slow", gpu.call)
    assert made.said == ["slow", None]


def test_once_a_second_there_is_a_sign_of_life(make):
    gpu = Gpu(call_s=0.1)
    made = make(gpu)
    for _ in range(100):  # 10 s
        made.time_call("a", gpu.call)
    assert 8 <= made.said.count("a") <= 10


def test_a_careful_stopwatch_says_each_call_before_it_is_made(make):
    gpu = Gpu()
    made = make(gpu)
    made.is_careful = True
    order = []
    made.say_waiting = order.append
    made.time_call("a", lambda: (order.append("called"), gpu.call()))
    assert order == ["a", "called"]
