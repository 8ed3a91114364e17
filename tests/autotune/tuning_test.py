"""sw.tuning: what a miss does, for whom it holds, and that no plan leaks in or out of it."""

from __future__ import annotations

import contextvars
import logging
import os
import signal
import sys
import threading
import types

import pytest
import small_package as small
import torch

import stoneware as sw
from stoneware.errors import TableError, TuningMissError
from stoneware.ops import dispatch, tensor_checks
from stoneware.ops.scaled_mm import api, sm90, vendor
from stoneware.runtime.device import Device
from stoneware.tuning import policy
from stoneware.tuning.store import user_store

BIG, TINY, SMALL = (small.sm90(suffix) for suffix in (small.BIG, small.TINY, small.SMALL))


@pytest.fixture
def ran(package, monkeypatch):
    """Makes CPU tensors count as an H200's; the list of the configs that ran."""
    configs = []

    def plan(problem, config, device):
        return lambda *tensors: configs.append(config)

    for module in (sm90, vendor):
        monkeypatch.setattr(module.BACKEND, "plan", plan)
    monkeypatch.setattr(tensor_checks, "CPU", Device(fingerprint=small.H200))
    monkeypatch.setattr(api, "_PLANS", type(api._PLANS)())
    monkeypatch.setattr(dispatch, "_subjects", set())
    return configs


@pytest.fixture
def session(monkeypatch):
    """A stand-in for stoneware.measuring.candidates: every problem is fastest with SMALL."""
    module = types.ModuleType("stoneware.measuring.candidates")
    module.tuned = []

    def tune_on_miss(operation, problem, device, *, measures_all):
        module.measured_all = measures_all
        module.tuned.append((operation, problem.m))
        user_store().add(small.run("run-2"), [small.sample(SMALL, 1.0, m=problem.m, run="run-2")])
        policy.forget_plans()

    module.tune_on_miss = tune_on_miss
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def call(m=16, **options):
    a = torch.zeros(m, 4096, dtype=torch.float8_e4m3fn)
    b = torch.zeros(4096, 4096, dtype=torch.float8_e4m3fn).t()
    sw.scaled_mm(a, b, torch.ones(m, 1), torch.ones(1, 4096), **options)


def test_unknown_mode_and_overlay_are_refused(package, tmp_path):
    with pytest.raises(ValueError, match="mode='always' must be one of off, on_miss, error_on_m"):
        with sw.tuning("always"):
            pass
    for overlay in (tmp_path / "gone", package, str(tmp_path / "gone.table")):
        with pytest.raises(ValueError, match="overlay=.* must be a folder of samples"):
            with sw.tuning("off", overlay=overlay):
                pass
    with pytest.raises(TypeError, match="overlay=7 must be a Table or a path, not int"):
        with sw.tuning("off", overlay=7):
            pass
    (tmp_path / "t.table").write_text("{}")
    with pytest.raises(TableError, match="t.table: expected"), sw.tuning("off", overlay=tmp_path / "t.table"):
        pass
    assert policy.current_mode() == "off"


def test_mode_holds_inside_and_the_one_before_comes_back(package):
    with sw.tuning("on_miss"):
        with pytest.raises(KeyError), sw.tuning("error_on_miss"):
            assert policy.current_mode() == "error_on_miss"
            raise KeyError
        assert policy.current_mode() == "on_miss"
    assert policy.current_mode() == "off"


def in_scope(scope):
    """A generator that holds a scope open from its first step to its end."""
    with scope:
        yield


def test_scopes_of_interleaved_generators_end_with_their_generators(package):
    outside = policy.state()
    first, second = in_scope(sw.tuning("on_miss")), in_scope(sw.batch_invariant())
    next(first)
    next(second)
    assert (policy.current_mode(), policy.is_batch_invariant()) == ("on_miss", True)
    first.close()
    assert (policy.current_mode(), policy.is_batch_invariant()) == ("off", True)
    second.close()
    assert policy.state() is outside


def test_scope_that_is_left_in_another_context_changes_nothing_there(package):
    generator = in_scope(sw.tuning("on_miss"))
    contextvars.copy_context().run(next, generator)
    with sw.tuning("error_on_miss"):
        generator.close()
        assert policy.current_mode() == "error_on_miss"
    assert policy.current_mode() == "off"


def test_scope_is_open_once_at_a_time(package):
    scope = sw.tuning("on_miss")
    for _ in range(2):
        with scope:
            assert policy.current_mode() == "on_miss"
            with pytest.raises(RuntimeError, match="open already, and a scope can be open only once; call sw.tuning"):
                with scope:
                    pass
        assert policy.current_mode() == "off"


def test_environment_gives_the_mode_outside(package, monkeypatch):
    monkeypatch.setenv("STONEWARE_TUNING", "error_on_miss")
    assert policy.current_mode() == "error_on_miss"
    with sw.tuning("off"):
        assert policy.current_mode() == "off"


def test_environment_with_an_unknown_mode_is_told_rule_value_and_remedy(package, monkeypatch):
    monkeypatch.setenv("STONEWARE_TUNING", "always")
    with pytest.raises(
        ValueError,
        match="STONEWARE_TUNING='always' must be one of off, on_miss, error_on_miss; set it to one, or unset it",
    ):
        policy.current_mode()


def test_overlay_of_the_tuning_around_holds_inside(ran, tmp_path):
    overlay = small.bake_samples(tmp_path / "o", [small.sample(BIG, 1.0)])
    with sw.tuning("off", overlay=overlay), sw.tuning("error_on_miss"):
        call()
    assert ran == [BIG]


def test_mode_does_not_hold_in_another_thread(package):
    seen = []
    with sw.tuning("on_miss"):
        thread = threading.Thread(target=lambda: seen.append(policy.current_mode()))
        thread.start()
        thread.join()
    assert seen == ["off"]


def test_miss_is_an_error_with_rule_value_and_remedy(ran):
    with sw.tuning("error_on_miss"):
        call(m=16)
        call(m=15, config=BIG)
        with pytest.raises(TuningMissError) as caught:
            call(m=15)
    message = str(caught.value)
    for part in ("m=15 n=4096 k=4096", "must have been measured", "'nearest m'", "stoneware tune"):
        assert part in message
    assert ran == [TINY, BIG]


def test_stale_entries_are_misses_and_those_with_another_dtype_of_the_width_are_not(ran, package, tmp_path):
    stale = small.sample(BIG, 1.0, m=40, kernel_sha256="0" * 64)
    fp16 = small.sample(small.sm90(small.BIG, "fp16"), 1.0, m=41, out_dtype="fp16")
    overlay = small.bake_samples(tmp_path / "o", [stale, fp16])
    with sw.tuning("error_on_miss", overlay=overlay):
        call(m=41)
        with pytest.raises(TuningMissError):
            call(m=40)
    assert ran == [BIG]


def test_entries_of_another_device_are_misses(ran, monkeypatch):
    monkeypatch.setattr(tensor_checks, "CPU", Device(fingerprint=small.H100))
    with sw.tuning("error_on_miss"), pytest.raises(TuningMissError, match="other device"):
        call(m=16)


def test_nothing_is_a_miss_on_a_cpu(package):
    with sw.tuning("error_on_miss"):
        call(m=2)


@pytest.mark.parametrize("is_inside_first", [True, False])
def test_plan_made_outside_is_not_used_inside_nor_the_other_way_round(ran, tmp_path, is_inside_first):
    overlay = small.bake_samples(tmp_path / "o", [small.sample(BIG, 1.0)])

    def inside():
        with sw.tuning("off", overlay=overlay):
            call()

    first, second = (inside, call) if is_inside_first else (call, inside)
    for _ in range(2):
        first()
        second()
    assert ran == ([BIG, TINY] if is_inside_first else [TINY, BIG]) * 2


def test_plan_of_a_miss_that_was_made_outside_is_still_an_error_inside(ran):
    call(m=15)
    with sw.tuning("error_on_miss"), pytest.raises(TuningMissError):
        call(m=15)
    call(m=15)
    assert ran == [TINY, TINY]


def test_plans_of_a_tuning_are_found_again_in_the_next_of_its_kind(ran, tmp_path, monkeypatch):
    overlay = small.bake_samples(tmp_path / "o", [small.sample(BIG, 1.0)])
    made = []
    whole = api._Plans.checked_plan
    monkeypatch.setattr(api._Plans, "checked_plan", lambda *arguments: made.append(1) or whole(*arguments))
    for _ in range(3):
        with sw.tuning("off", overlay=overlay):
            call()
    assert len(made) == 1


def test_plan_of_a_miss_made_outside_is_forgotten_when_the_miss_is_measured(ran, session):
    call(m=15)
    with sw.tuning("on_miss"):
        call(m=15)
    call(m=15)
    assert ran == [TINY, SMALL, SMALL]


def test_miss_is_measured_once_and_then_known(ran, session):
    with sw.tuning("on_miss"):
        call(m=16)
        assert session.tuned == [], "measured before"
        call(m=15)
        call(m=15)
    assert session.tuned == [(api.OPERATION, 15)]
    call(m=15)
    assert ran == [TINY, SMALL, SMALL, SMALL]


def test_a_call_that_may_refuse_the_fastest_measures_all_candidates(ran, session):
    with sw.tuning("on_miss"):
        call(m=15)
        assert session.measured_all is False
        call(m=14, backend="sm90")
        assert session.measured_all is True
        call(m=13)
        assert session.measured_all is False
        with sw.batch_invariant():
            call(m=12)
        assert session.measured_all is True
    assert [m for _, m in session.tuned] == [15, 14, 13, 12]


def test_problem_that_could_not_be_measured_runs_as_usual_and_is_not_tried_again(ran, session):
    session.tune_on_miss = lambda operation, problem, device, **_: session.tuned.append(problem.m)
    with sw.tuning("on_miss"):
        call(m=15)
        call(m=15)
    assert session.tuned == [15]
    assert ran == [TINY, TINY]


@pytest.mark.parametrize("m", [15, 14])
def test_two_threads_measure_one_after_the_other_and_a_problem_once(ran, session, m):
    tune_on_miss, events = session.tune_on_miss, []
    is_measuring, is_second_in = threading.Event(), threading.Event()

    def slow_tune_on_miss(operation, problem, device, **options):
        events.append(("begin", problem.m))
        if is_measuring.is_set():
            is_second_in.set()
        is_measuring.set()
        is_second_in.wait(1)  # a thread that waits for its turn does not end it
        tune_on_miss(operation, problem, device, **options)
        events.append(("end", problem.m))

    session.tune_on_miss = slow_tune_on_miss

    def work(m):
        with sw.tuning("on_miss"):
            call(m=m)

    threads = [threading.Thread(target=work, args=(m,)) for m in (15, m)]
    threads[0].start()
    assert is_measuring.wait(30)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert events == [(event, m) for m in dict.fromkeys([15, m]) for event in ("begin", "end")]
    assert ran == [SMALL, SMALL]


def test_what_is_measured_may_miss_itself(ran, session):
    tune_on_miss = session.tune_on_miss

    def nested_tune_on_miss(operation, problem, device, **options):
        if problem.m == 15:
            call(m=14)
        tune_on_miss(operation, problem, device, **options)

    session.tune_on_miss = nested_tune_on_miss
    with sw.tuning("on_miss"):
        call(m=15)
    assert [m for _, m in session.tuned] == [14, 15]


def test_nothing_is_measured_during_capture_but_at_the_next_call(ran, session, monkeypatch, caplog):
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    with sw.tuning("on_miss"):
        call(m=15)
        call(m=14)
        assert session.tuned == []
        assert ran == [TINY, TINY]
        [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert "a CUDA graph is being captured" in record.getMessage()
        assert "m=15" in record.getMessage()
        capturing[0] = False
        call(m=15)
    assert session.tuned == [(api.OPERATION, 15)]
    assert ran[-1] == SMALL


def test_new_samples_make_every_plan_anew(ran):
    call(m=15)
    user_store().add(small.run("run-2"), [small.sample(SMALL, 1.0, m=15, run="run-2")])
    call(m=15)
    epoch = policy.EPOCH[0]
    policy.forget_plans()
    assert policy.EPOCH[0] != epoch
    call(m=15)
    assert ran == [TINY, TINY, SMALL]


def test_plan_that_was_decided_before_new_samples_came_is_not_kept(ran, monkeypatch):
    whole = api._Plans.checked_plan

    def slow(*arguments):
        plan = whole(*arguments)
        user_store().add(small.run("run-2"), [small.sample(SMALL, 1.0, m=15, run="run-2")])
        policy.forget_plans()
        return plan

    monkeypatch.setattr(api._Plans, "checked_plan", slow)
    call(m=15)
    monkeypatch.setattr(api._Plans, "checked_plan", whole)
    call(m=15)
    assert ran == [TINY, SMALL]


def test_samples_that_the_store_cannot_take_hold_in_this_process(ran):
    call(m=15)
    policy.add_to_memory(small.run("run-2"), [small.sample(SMALL, 1.0, m=15, run="run-2")])
    call(m=15)
    assert ran == [TINY, SMALL]


def test_process_that_uses_the_wheel_alone_leaves_the_rest_and_measures_nothing(ran, session, tmp_path, monkeypatch):
    overlay = small.bake_samples(tmp_path / "o", [small.sample(BIG, 1.0)])
    user_store().add(small.run("run-2"), [small.sample(SMALL, 1.0, run="run-2")])
    with sw.tuning("on_miss", overlay=overlay):
        call()
        monkeypatch.setattr(policy, "_is_wheel_only", False)
        policy.use_wheel_only()
        call()
        call(m=15)
    call()
    assert ran == [BIG, TINY, TINY, TINY]
    assert session.tuned == []


def test_child_of_a_fork_during_another_threads_tuning_can_tune(package):
    """A lock that a thread held at the fork would stay held in the child, where that thread is not."""
    may_go = threading.Event()

    def enter() -> None:
        while not may_go.is_set():
            for mode in ("on_miss", "off"):
                with sw.tuning(mode):
                    policy.forget_plans()

    thread = threading.Thread(target=enter)
    thread.start()
    for _ in range(20):
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # ends a child that hangs
            try:
                with sw.tuning("on_miss"):
                    policy.forget_plans()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    may_go.set()
    thread.join()
