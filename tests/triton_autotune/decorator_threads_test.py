"""sw.autotune in threads: nobody waits for a measurement that another call needs."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest
import triton
from decorated_kernels import CONFIGS, bench_by, gpu, scale  # noqa: F401  (a fixture)
from fake_gpu import Tensor

import stoneware as sw
from stoneware.triton_autotune.decorator import autotune
from stoneware.tuning import policy

FAST_32 = {16: 2.0, 32: 1.0, 64: 3.0}
LIMIT_S = 10.0


class Pause:
    """A place in user code where a thread stops until it is let go on."""

    def __init__(self) -> None:
        self.is_on = False
        self.reached, self.let_go = threading.Event(), threading.Event()

    def __call__(self, *_, **__) -> None:
        if self.is_on:
            self.reached.set()
            assert self.let_go.wait(3 * LIMIT_S)


def call(kernel, n, x=None):
    kernel[(1,)](x or Tensor(), Tensor(), n, 5)


def in_thread(work):
    """Starts a thread; gives a function that waits for its end, and raises what it raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join() -> None:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "it waits"
        assert not errors, errors

    return join


def tune(kernel, n, x=None):
    with sw.tuning("on_miss"):
        call(kernel, n, x)


def kernel_with(pause, place):
    """A kernel whose user code pauses in one place."""

    def prune(configs, named, **_):
        pause()
        return configs

    bench = bench_by(FAST_32)
    options = {
        "do_bench": {"do_bench": lambda call, quantiles: (pause(), bench(call, quantiles))[1]},
        "pruning": {"prune_configs_by": {"early_config_prune": prune}},
        "pre_hook": {"pre_hook": pause},
        "post_hook": {"post_hook": pause},
        "config's hook": {"configs": [triton.Config(config.kwargs, pre_hook=pause) for config in CONFIGS]},
    }[place]
    return autotune(**{"configs": CONFIGS, "key": ["n"], "do_bench": bench, **options})(scale)


@pytest.mark.parametrize("place", ["do_bench", "pruning", "pre_hook", "post_hook", "config's hook"])
@pytest.mark.parametrize("mode", ["off", "on_miss"])
def test_a_known_key_is_launched_while_user_code_of_another_runs(gpu, place, mode):
    pause = Pause()
    kernel = kernel_with(pause, place)
    for _ in range(2):
        tune(kernel, 33)
        with sw.tuning(mode):
            call(kernel, 33)
    pause.is_on = True
    join_tune = in_thread(lambda: tune(kernel, 34))
    try:
        assert pause.reached.wait(LIMIT_S)
        pause.is_on = False
        policy.forget_plans()  # as when another kernel has got samples

        def launch() -> None:
            with sw.tuning(mode):
                call(kernel, 33)

        in_thread(launch)()
    finally:
        pause.let_go.set()
    join_tune()
    assert kernel.best_config.kwargs["BLOCK"] == 32


def test_a_key_that_two_threads_need_is_measured_once(gpu):
    pause, timed_blocks = Pause(), []
    pause.is_on = True
    bench = bench_by(FAST_32, timed_blocks)

    def paused(call, quantiles):
        pause()
        return bench(call, quantiles)

    kernel = autotune(configs=CONFIGS, key=["n"], do_bench=paused)(scale)
    joins = [in_thread(lambda: tune(kernel, 33)) for _ in range(2)]
    assert pause.reached.wait(LIMIT_S)
    pause.let_go.set()
    for join in joins:
        join()
    assert timed_blocks == [16, 32, 64]
    assert gpu.order.count("triton") + gpu.order.count("ours") == 3 + 2


def test_a_process_forked_during_a_measurement_measures_too(gpu):
    """The thread that measures, and would give a lock back, does not exist there."""
    pause = Pause()
    kernel = kernel_with(pause, "do_bench")
    tune(kernel, 32)
    pause.is_on = True
    join = in_thread(lambda: tune(kernel, 33))
    assert pause.reached.wait(LIMIT_S)
    child = os.fork()
    if child == 0:
        signal.alarm(int(LIMIT_S))
        pause.is_on = False
        try:
            tune(kernel, 33)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    pause.let_go.set()
    join()
    assert status == 0


def test_keys_that_are_measured_at_once_restore_their_own_tensors(gpu):
    """Copies of one measurement must not replace those of another."""
    pause, restored = Pause(), []

    class Copied(Tensor):
        def clone(self):
            return self

        def copy_(self, other):
            restored.append(self is other)

    kernel = autotune(configs=CONFIGS, key=["n"], restore_value=["x_ptr"], do_bench=bench_by(FAST_32))(scale)
    original = type(scale).run

    def paused_run(*args, **kwargs):
        pause()
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(scale), "run", paused_run)
        pause.is_on = True
        join = in_thread(lambda: tune(kernel, 33, Copied(4096)))
        assert pause.reached.wait(LIMIT_S)
        pause.is_on = False
        try:
            in_thread(lambda: tune(kernel, 34, Copied(8192)))()
        finally:
            pause.let_go.set()
        join()
    assert restored == [True] * 6


def test_every_key_that_was_tuned_stays_in_the_cache(gpu):
    kernel = autotune(configs=CONFIGS, key=["n"], do_bench=bench_by(FAST_32))(scale)
    for n in (33, 34, 35):
        tune(kernel, n)
    assert {key.values: config for key, config in kernel.cache.items()} == {(n,): CONFIGS[1] for n in (33, 34, 35)}


def test_what_was_measured_here_is_not_looked_up_again_when_samples_arrive(gpu, monkeypatch):
    kernel = autotune(configs=CONFIGS, key=["n"], do_bench=bench_by(FAST_32))(scale)
    tune(kernel, 33)
    policy.forget_plans()
    monkeypatch.setattr(kernel._chooser, "decide", None)
    tune(kernel, 33)
    assert kernel.best_config is CONFIGS[1]


def test_a_decision_that_new_samples_confirm_keeps_its_plan(gpu):
    """Nothing is compiled or read from disk again because another kernel was tuned."""
    kernel = autotune(configs=CONFIGS, key=["n"], cache_results=False)(scale)
    for _ in range(2):
        call(kernel, 33)
    (form,) = kernel._forms.values()
    plans = dict(form.plans)
    policy.forget_plans()
    call(kernel, 33)
    assert form.plans == plans and gpu.order == ["triton", "ours", "ours"]


def test_a_process_that_uses_the_wheel_alone_forgets_what_it_measured(gpu, monkeypatch):
    kernel = autotune(configs=CONFIGS, key=["n"], do_bench=bench_by(FAST_32))(scale)
    with sw.tuning("on_miss"):
        call(kernel, 33)
        monkeypatch.setattr(policy, "_is_wheel_only", True)
        policy.forget_plans()
        call(kernel, 33)
    assert kernel.best_config is CONFIGS[0]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
