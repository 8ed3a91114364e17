"""How long plans are kept: until something that they depend on changes, or there are too many."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import weakref

import pytest
import torch
from fresh_plans import K, M, N, call, counts, in_python, plans  # noqa: F401
from operands import random_fp8, scaled_operands

import stoneware as sw
from stoneware.kernels.config import Config
from stoneware.ops import native_call
from stoneware.ops.scaled_mm import api
from stoneware.tuning import policy


def test_refused_call_leaves_no_plan(plans):
    x = scaled_operands(M, N, K)
    for _ in range(2):
        with pytest.raises(ValueError, match="n=40"):
            sw.scaled_mm(x.a, random_fp8(40, K).t(), x.scale_a, torch.ones(1, 40))
    assert len(plans.fast) == 0
    assert plans.fast.num_made == 2


def test_plans_are_made_anew_when_new_samples_come(monkeypatch):
    made, whole = [], api._Plans.checked_plan
    monkeypatch.setattr(api._Plans, "checked_plan", lambda *x: made.append(x) or whole(*x))
    x = scaled_operands(M, N, K)
    for _ in range(2):
        call(x)
        call(x)
        policy.forget_plans()
    assert len(made) == 2


def test_plan_that_becomes_stale_while_it_is_made_serves_no_later_call(monkeypatch, plans):
    made, whole = [], api._Plans.checked_plan

    def checked_plan(*arguments):
        plan = whole(*arguments)
        if not made:
            policy.forget_plans()
        made.append(plan)
        return plan

    monkeypatch.setattr(api._Plans, "checked_plan", checked_plan)
    x = scaled_operands(M, N, K)
    expected = in_python(plans, x)
    made.clear()
    for num_made in (1, 2, 2):
        assert torch.equal(call(x), expected)
        assert len(made) == num_made


def test_plan_may_forget_itself_while_it_runs(plans, monkeypatch):
    def checked_plan(*arguments):
        def plan(a, b, out, scale_a, scale_b, bias):
            policy.forget_plans()
            gc.collect()
            out.fill_(7)

        return plan

    monkeypatch.setattr(api._Plans, "checked_plan", checked_plan)
    x = scaled_operands(M, N, K)
    for _ in range(3):
        assert call(x).eq(7).all()


def test_objects_go_with_the_plans_that_have_them(monkeypatch):
    class Config2(Config):
        def __eq__(self, other):
            return self is other

        def __hash__(self):
            return id(self)

    monkeypatch.setattr(native_call, "MAX_PLANS", 4)
    plans = type(api._PLANS)()
    monkeypatch.setattr(api, "_PLANS", plans)
    x = scaled_operands(M, N, K)
    alive = []
    for _ in range(8):
        config = Config2(backend="reference", kernel="torch.matmul_float32")
        alive.append(weakref.ref(config))
        call(x, config=config)
        call(x, config=config)
        del config
    gc.collect()
    assert [reference() is not None for reference in alive] == [False] * 4 + [True] * 4
    assert counts(plans) == (8, 8, 0)


def test_a_full_table_starts_anew(monkeypatch):
    monkeypatch.setattr(native_call, "MAX_PLANS", 4)
    plans = type(api._PLANS)()
    monkeypatch.setattr(api, "_PLANS", plans)
    for m in range(1, 9):
        call(scaled_operands(m, N, K))
    assert len(plans.fast) == 4
    call(scaled_operands(8, N, K))
    assert counts(plans) == (1, 8, 0)


def test_error_of_a_plan_is_the_call_s(plans, monkeypatch):
    def checked_plan(*arguments):
        def plan(*tensors):
            raise ZeroDivisionError("of the plan")

        return plan

    monkeypatch.setattr(api._Plans, "checked_plan", checked_plan)
    x = scaled_operands(M, N, K)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="of the plan"):
            call(x)


def without_module(monkeypatch):
    monkeypatch.setattr(native_call.native, "_try_import", lambda name: (None, "it is not there"))


def test_without_the_module_calls_are_the_same(monkeypatch):
    without_module(monkeypatch)
    plans = type(api._PLANS)()
    monkeypatch.setattr(api, "_PLANS", plans)
    assert plans.fast is None and "it is not there" in plans.why_not_fast
    for m in (1, 1, 2):
        x = scaled_operands(m, N, K)
        assert torch.equal(call(x), in_python(plans, x))
    with pytest.raises(TypeError, match="out_dtype=\\[\\]"):
        call(scaled_operands(1, N, K), out_dtype=[])


def test_without_the_exchange_api_calls_are_the_same(monkeypatch):
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    plans = type(api._PLANS)()
    monkeypatch.setattr(api, "_PLANS", plans)
    assert plans.fast is None and "DLPack exchange API" in plans.why_not_fast
    x = scaled_operands(M, N, K)
    assert torch.equal(call(x), call(x))


def test_threads_make_and_forget_plans_at_once(plans):
    cases = [scaled_operands(m, N, K) for m in range(1, 9)]
    expected = [in_python(plans, x) for x in cases]
    failures = []
    stop = threading.Event()

    def body(offset):
        try:
            for i in range(300):
                j = (i + offset) % len(cases)
                if not torch.equal(call(cases[j]), expected[j]):
                    failures.append(j)
        except BaseException as error:
            failures.append(error)

    def forget():
        while not stop.wait(0.001):
            policy.forget_plans()

    threads = [threading.Thread(target=body, args=(i,)) for i in range(8)]
    forgetting = threading.Thread(target=forget)
    forgetting.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    stop.set()
    forgetting.join(timeout=10)
    assert failures == []
    assert plans.fast.num_hits > 0


@pytest.mark.parametrize("has_module", [True, False])
def test_child_forked_while_a_thread_ends_plans_can_call(monkeypatch, has_module):
    """A lock that another thread holds at a fork is never released in the child."""
    if not has_module:
        without_module(monkeypatch)
    monkeypatch.setattr(native_call, "MAX_PLANS", 1)
    monkeypatch.setattr(api, "_PLANS", type(api._PLANS)())
    is_ending, may_end = threading.Event(), threading.Event()
    ending = []

    class Plan:
        def __call__(self, *tensors):
            pass

        def __del__(self):
            if threading.current_thread() in ending:
                is_ending.set()
                may_end.wait(60)

    monkeypatch.setattr(api._Plans, "checked_plan", lambda *arguments: Plan())
    first, second, third = (scaled_operands(m, N, K) for m in (1, 2, 3))

    def end_plans():
        call(first)
        policy.forget_plans()
        call(second)

    thread = threading.Thread(target=end_plans)
    ending.append(thread)
    thread.start()
    try:
        assert is_ending.wait(60)
        child = os.fork()
        if child == 0:
            policy.forget_plans()
            call(third)
            os._exit(0)
        deadline = time.monotonic() + 20
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.005)
        if ended[0] == 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert ended == (child, 0), "the child hangs, or failed"
    finally:
        may_end.set()
        thread.join(timeout=60)


def test_an_instance_whose_constructor_did_not_run_is_garbage_too():
    cls = type(api._PLANS.fast)

    def drop(count):
        for _ in range(count):
            unready = cls.__new__(cls)
            cycle = [unready]
            cycle.append(cycle)
            with pytest.raises(TypeError, match="must be made by FastCall"):
                _ = unready.call
            del unready, cycle
        gc.collect()

    drop(100)
    before = sys.getallocatedblocks()
    drop(1000)
    # Clearing one would make the dict that a FastCall has, in memory that nothing frees.
    assert sys.getallocatedblocks() - before < 500


def test_plans_are_garbage_like_other_objects():
    class Counted(type(api._PLANS)):
        pass

    plans = Counted()
    x = scaled_operands(M, N, K)
    plans.call(x.a, x.b, x.scale_a, x.scale_b, None, None, torch.bfloat16, True, None, None)
    del plans
    gc.collect()
    assert [item for item in gc.get_objects() if isinstance(item, Counted)] == []
