"""Stoneware's timer on the configs of a kernel: interleaved, hooks outside of the timed interval, no loss."""

from __future__ import annotations

import itertools
import sys
import threading
import time

import pytest
import torch
import triton
from triton.runtime.errors import OutOfResources

from stoneware.kernels.config import KernelConfig
from stoneware.measuring.device_timer import DeviceTimer
from stoneware.triton_autotune import tuner
from stoneware.triton_autotune.signature import Form, Launch
from stoneware.triton_autotune.tuner import Hooks, TimedLaunch

NO_VALUES = Form(names=(), options=(), defaults={}, is_valued=())


class Kernel:
    """In the place of a JITFunction; notes what runs, and fails where it is told to."""

    def __init__(self, failures=()) -> None:
        self.log: list[str] = []
        self._failures = dict(failures)

    def run(self, *args, grid, warmup, BLOCK, **options):
        self.log.append(f"kernel {BLOCK}")
        if BLOCK in self._failures:
            raise self._failures[BLOCK]


class Stopwatch:
    """A call takes as many microseconds as its BLOCK says; notes begin and end of each timing."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def sm_clock_mhz(self) -> int:
        return 1980

    def warm_up(self, name, call) -> None:
        call()

    def time_call(self, name, call) -> float:
        self._log.append("begin")
        call()
        self._log.append("end")
        return float(dict(name.kwargs)["BLOCK"])

    def capture(self, call, num_pairs):
        return None

    def time_graph(self, name, graph) -> float:
        raise AssertionError


def candidates(kernel, hooks=Hooks(), blocks=(16, 32, 64), **arguments):
    return {
        KernelConfig(kwargs=(("BLOCK", block),)): TimedLaunch(
            kernel, triton.Config({"BLOCK": block}), Launch(NO_VALUES, (), (1,), (), arguments), hooks
        )
        for block in blocks
    }


@pytest.fixture
def timed(monkeypatch):
    """Measures candidates with Stoneware's timer and the fake stopwatch, batch by batch."""

    def measure(kernel, launches, batch_size=32):
        monkeypatch.setattr(tuner, "BATCH_SIZE", batch_size)

        def timer(ordinal):
            stopwatch = tuner._BetweenHooks(Stopwatch(kernel.log))
            ticks = itertools.count()
            return DeviceTimer(ordinal, stopwatch=stopwatch, now=lambda: next(ticks) / 1e6)

        monkeypatch.setattr(tuner, "_timer", timer)
        for batch in tuner.measure(launches, 0):
            yield {dict(config.kwargs)["BLOCK"]: result for config, result in batch.items()}

    return measure


def test_every_config_is_timed_by_turns(timed):
    kernel = Kernel()
    (batch,) = timed(kernel, candidates(kernel, blocks=(16, 20, 22)))
    assert {block: result.median_us for block, result in batch.items()} == {16: 16, 20: 20, 22: 22}
    assert all(result.count == tuner.ROUNDS for result in batch.values())
    timings = [kernel.log[idx + 1] for idx, entry in enumerate(kernel.log) if entry == "begin"]
    for start in range(0, len(timings), 3):
        assert sorted(timings[start : start + 3]) == ["kernel 16", "kernel 20", "kernel 22"]


def test_hopeless_configs_are_dropped_early_and_keep_their_times(timed):
    kernel = Kernel()
    (batch,) = timed(kernel, candidates(kernel, blocks=(16, 1600)))
    assert batch[1600].count == tuner.ROUNDS_BEFORE_DROP < batch[16].count
    assert batch[1600].median_us == 1600


def test_hooks_run_around_each_timing_and_not_in_it(timed):
    kernel = Kernel()
    hooks = Hooks(
        pre_hook=lambda arguments: kernel.log.append("pre"),
        post_hook=lambda arguments, exception: kernel.log.append("post"),
    )
    (batch,) = timed(kernel, candidates(kernel, hooks, blocks=(16,)))
    text = " ".join(kernel.log)
    assert text.count("pre begin kernel 16 end post") == batch[16].count
    assert kernel.log.count("pre") == kernel.log.count("post")


def test_tensors_are_as_before_after_measuring(timed):
    x, y = torch.ones(3), torch.ones(3)

    class Adds(Kernel):
        def run(self, *args, **kwargs):
            super().run(*args, **kwargs)
            assert torch.equal(y, torch.zeros(3))
            y.add_(1), x.add_(1)

    kernel = Adds()
    hooks = Hooks(reset_to_zero=("y",), restore_value=("x",))
    list(timed(kernel, candidates(kernel, hooks, x=x, y=y)))
    assert torch.equal(x, torch.ones(3))


def test_a_none_among_tensors_to_reset_is_left_alone(timed):
    kernel = Kernel()
    hooks = Hooks(reset_to_zero=("y",), restore_value=("x",))
    assert list(timed(kernel, candidates(kernel, hooks, x=None, y=None)))


def test_a_config_that_does_not_fit_is_a_result_and_the_others_are_timed(timed):
    kernel = Kernel({32: OutOfResources(300_000, 232_448, "shared memory")})
    first, rest = timed(kernel, candidates(kernel))
    assert "shared memory" in str(first[32]) and sorted(rest) == [16, 64]


def test_another_error_propagates_after_what_was_timed_before(timed):
    kernel = Kernel({64: RuntimeError("an illegal memory access")})
    batches = timed(kernel, candidates(kernel), batch_size=2)
    assert sorted(next(batches)) == [16, 32]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        next(batches)


def test_measurements_of_two_threads_take_turns(monkeypatch):
    """Two at once would time each other."""
    running, at_once = [], []

    class Timer:
        def time(self, launches, **_):
            running.append(1)
            at_once.append(len(running))
            time.sleep(0.05)
            running.pop()
            return {}

    monkeypatch.setattr(tuner, "_timer", lambda ordinal: Timer())
    threads = [threading.Thread(target=lambda: list(tuner.measure(candidates(Kernel()), 0))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert at_once == [1] * 4


def test_an_error_reaches_the_post_hook(timed):
    error, seen = RuntimeError("broken"), []
    kernel = Kernel({16: error})
    hooks = Hooks(post_hook=lambda arguments, exception: seen.append(exception))
    with pytest.raises(RuntimeError, match="broken"):
        list(timed(kernel, candidates(kernel, hooks)))
    assert seen == [error]


@pytest.mark.parametrize(
    "result, median_us, spread_us",
    [(2.0, 2000, 0), ([2.0], 2000, 0), ([2.0, 1.5, 2.75], 2000, 1250), ((2, 1, 4), 2000, 3000)],
)
def test_what_a_do_bench_gives_is_in_milliseconds(result, median_us, spread_us):
    kernel = Kernel()
    seen = []

    def do_bench(call, quantiles):
        seen.append(quantiles)
        return result

    launches = candidates(kernel, blocks=(16,))
    ((_, timing),) = next(tuner.measure(launches, do_bench)).items()
    assert (timing.median_us, timing.spread_us, timing.count) == (median_us, spread_us, 1)
    assert seen == [(0.5, 0.25, 0.75)]


@pytest.mark.parametrize("time_ms", [float("inf"), 0.0, float("nan"), -1.0])
def test_a_time_that_cannot_be_is_a_failure(time_ms):
    from decorated_kernels import run_of

    from stoneware.kernels.key import KernelKey

    key = KernelKey(op="module:kernel", names=(), values=(), dtypes=())
    timing = tuner._with_do_bench(lambda: None, lambda call, quantiles: time_ms)
    sample = tuner.sample_of(key, KernelConfig(), timing, "", run_of().id)
    assert sample.status == "failed" and "must be positive" in sample.detail


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
