"""sw.batch_invariant: which configs a look-up may choose, and how the mode is set; without a GPU."""

from __future__ import annotations

import asyncio
import inspect

import pytest
import small_package as small
import torch

import stoneware as sw
from stoneware.errors import UnsupportedError
from stoneware.kernels import manifest, sum_order
from stoneware.kernels.config import Config
from stoneware.kernels.key import Key
from stoneware.ops.scaled_mm.api import OPERATION
from stoneware.runtime.device import Device
from stoneware.specs.scaled_mm_problem import Problem
from stoneware.tuning import policy

H200 = Device(fingerprint=small.H200)


def decide(**changes):
    return OPERATION.decide(Problem.dense(**{"m": 16, "n": 4096, "k": 4096, **changes}), H200)


def test_only_kernels_whose_order_is_known_run(package):
    free = decide()
    with sw.batch_invariant():
        found = decide()
    assert free.config.backend in ("sm90", "vendor", "triton_aot")
    assert found.config.backend == "sm90" and found.config.splits == 1
    refused = {item.what: item.reason for item in found.refusals}
    assert all("batch invariant" in refused[what] for what in refused if what.startswith(("vendor", "triton_aot")))


def test_a_kernel_that_states_no_order_is_refused(package, monkeypatch):
    assert decide().config
    for record in manifest.packaged().kernels.values():
        monkeypatch.delitem(record.config, "sum_chunk", raising=False)
    with sw.batch_invariant(), pytest.raises(UnsupportedError, match="the order of its sums is not known"):
        decide()


@pytest.mark.parametrize(
    ("chunk", "splits", "key", "part"),
    [
        (None, 1, {}, "is not known"),
        (0, 1, {}, None),
        (0, 4, {}, "splits=4"),
        (128, 1, {}, "chunks of 128, not 0"),
        (128, 1, {"accumulation": "slow"}, None),
        (128, 1, {"scales": "block"}, None),
        (0, 1, {"scales": "block"}, "chunks of 0, not 128"),
    ],
)
def test_one_order_for_a_problem(chunk, splits, key, part):
    record = next(one for one in small.kernel_records() if one.backend == "sm90")
    stated = {name: value for name, value in record.config.items() if name != "sum_chunk"}
    object.__setattr__(record, "config", stated if chunk is None else {**stated, "sum_chunk": chunk})
    problem = {"op": "scaled_mm", "a_dtype": "e4m3", "b_dtype": "e4m3", "out_dtype": "bf16", "scales": "row"}
    config = Config(backend="sm90", kernel=record.id, splits=splits)
    reason = sum_order.why_not_invariant(
        record, config, Key(**{**problem, "layout": "nt", "n": 64, "k": 256, "m": 1, **key})
    )
    assert reason is None if part is None else part in reason


def test_modes_nest_and_the_innermost_holds(monkeypatch):
    assert not policy.is_batch_invariant()
    with sw.batch_invariant():
        assert policy.is_batch_invariant()
        with sw.tuning("error_on_miss"):
            assert policy.is_batch_invariant() and policy.current_mode() == "error_on_miss"
        with sw.tuning("off", batch_invariant=False):
            assert not policy.is_batch_invariant()
        with sw.batch_invariant(False):
            assert not policy.is_batch_invariant()
        assert policy.is_batch_invariant()
    with sw.tuning("on_miss"), sw.batch_invariant():
        assert policy.current_mode() == "on_miss" and policy.is_batch_invariant()
    monkeypatch.setenv("STONEWARE_BATCH_INVARIANT", "1")
    assert policy.is_batch_invariant()
    with sw.tuning("off"):
        assert policy.is_batch_invariant()


def test_it_is_a_decorator_too():
    @sw.batch_invariant()
    def inside():
        return policy.is_batch_invariant()

    assert (inside(), policy.is_batch_invariant(), inside()) == (True, False, True)


def test_decorated_generator_has_the_mode_in_its_body_alone():
    @sw.batch_invariant()
    def generate(first, *, last):
        """Documented."""
        value = first
        while value != last:
            assert policy.is_batch_invariant()
            try:
                value = yield value
            except KeyError as error:
                assert policy.is_batch_invariant()
                value = error
        return "ended"

    assert inspect.isgeneratorfunction(generate) and generate.__doc__ == "Documented."
    assert [*inspect.signature(generate).parameters] == ["first", "last"]

    def delegate():
        assert (yield from generate("a", last="z")) == "ended"

    generator = delegate()
    assert next(generator) == "a" and not policy.is_batch_invariant()
    assert generator.send("b") == "b" and not policy.is_batch_invariant()
    error = KeyError()
    assert generator.throw(error) is error and not policy.is_batch_invariant()
    with pytest.raises(StopIteration):
        generator.send("z")
    with pytest.raises(ZeroDivisionError):
        generator = generate("a", last="z")
        next(generator)
        generator.throw(ZeroDivisionError)
    assert policy.state() is None


def test_closed_generator_cleans_up_in_the_mode():
    closed = []

    @sw.batch_invariant()
    def generate():
        try:
            yield
        finally:
            closed.append(policy.is_batch_invariant())

    generator = generate()
    next(generator)
    generator.close()
    assert closed == [True] and policy.state() is None


def test_scopes_that_a_decorated_generator_opens_are_its_own():
    @sw.batch_invariant()
    def generate():
        with sw.batch_invariant(False), sw.tuning("on_miss"):
            for _ in range(2):
                yield policy.is_batch_invariant(), policy.current_mode()
        yield policy.is_batch_invariant(), policy.current_mode()

    generators = generate(), generate()
    for expected in ((False, "on_miss"), (False, "on_miss"), (True, "off")):
        for generator in generators:
            assert next(generator) == expected
            assert policy.state() is None


def test_decorated_coroutine_has_the_mode_after_every_await_and_its_caller_does_not():
    @sw.batch_invariant()
    async def wait(value):
        assert policy.is_batch_invariant()
        await asyncio.sleep(0)
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 0.001)
        except TimeoutError:
            assert policy.is_batch_invariant()
        return value

    assert inspect.iscoroutinefunction(wait)

    async def main():
        values = await asyncio.gather(wait(1), wait(2))
        assert not policy.is_batch_invariant()
        return values

    assert asyncio.run(main()) == [1, 2]
    coroutine = wait(1)
    coroutine.send(None)
    assert policy.state() is None
    coroutine.close()


def test_cancelled_coroutine_cleans_up_in_the_mode():
    seen = []

    @sw.batch_invariant()
    async def wait():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append(policy.is_batch_invariant())
            raise

    async def main():
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert seen == [True]


def test_decorated_async_generator_has_the_mode_in_its_body_alone():
    closed = []

    @sw.batch_invariant()
    async def generate(value):
        try:
            while value != "z":
                assert policy.is_batch_invariant()
                await asyncio.sleep(0)
                assert policy.is_batch_invariant()
                try:
                    value = yield value
                except KeyError as error:
                    value = error
        finally:
            await asyncio.sleep(0)
            closed.append(policy.is_batch_invariant())

    assert inspect.isasyncgenfunction(generate)

    async def main():
        generator = generate("a")
        assert await anext(generator) == "a" and policy.state() is None
        assert await generator.asend("b") == "b" and policy.state() is None
        error = KeyError()
        assert await generator.athrow(error) is error and policy.state() is None
        with pytest.raises(StopAsyncIteration):
            await generator.asend("z")
        generator = generate("a")
        assert await anext(generator) == "a"
        await generator.aclose()
        assert [item async for item in generate("z")] == []

    asyncio.run(main())
    assert closed == [True] * 3


def test_methods_of_every_kind_are_decorated():
    class Layer:
        @sw.batch_invariant()
        def forward(self):
            return policy.is_batch_invariant()

        @sw.batch_invariant()
        @staticmethod
        def generate():
            yield policy.is_batch_invariant()

        @sw.batch_invariant()
        @classmethod
        def make(cls):
            return policy.is_batch_invariant()

    assert Layer().forward() and next(Layer.generate()) and Layer.make()


def test_class_is_not_decorated():
    with pytest.raises(TypeError, match="must be a function to be decorated, not type; decorate its methods"):
        sw.batch_invariant()(torch.nn.Linear)


def test_plans_of_the_two_modes_are_kept_apart():
    states = []
    for enabled in (False, True, False, True):
        with sw.batch_invariant(enabled):
            states.append(policy.state())
    assert states[0] is states[2] and states[1] is states[3] and states[0] is not states[1]


@pytest.mark.parametrize(
    "wrong",
    [lambda: sw.batch_invariant("yes"), lambda: sw.tuning("off", batch_invariant=1), lambda: sw.batch_invariant(None)],
)
def test_only_a_bool_is_taken(wrong):
    with pytest.raises(TypeError, match="must be a bool, not .*; pass True or False"), wrong():
        pass


def test_the_variable_is_0_or_1(monkeypatch):
    monkeypatch.setenv("STONEWARE_BATCH_INVARIANT", "true")
    with pytest.raises(ValueError, match="STONEWARE_BATCH_INVARIANT='true' must be 0 or 1"):
        policy.is_batch_invariant()
    assert "must be 0 or 1" in sw.info().batch_invariant


def test_explain_says_the_order(package):
    with sw.batch_invariant():
        explained = sw.explain("scaled_mm", m=16, n=4096, k=4096, device="NVIDIA H200")
    assert explained.batch_invariant and explained.sum_order == "one sum along k"
    assert "one sum along k (asked to be batch invariant)" in str(explained)
    assert not sw.explain("scaled_mm", m=16, n=4096, k=4096, device="NVIDIA H200").as_dict()["batch_invariant"]


def test_on_a_cpu_it_says_once_that_nothing_is_promised(caplog):
    from stoneware.ops import dispatch

    dispatch._subjects.clear()
    a, b = torch.randn(4, 32).bfloat16(), torch.randn(32, 16).bfloat16()
    with sw.batch_invariant():
        for _ in range(2):
            assert sw.matmul(a, b).shape == (4, 16)
            assert sw.matmul(a[:2], b).shape == (2, 16)
    assert sum("batch invariance is not promised" in record.message for record in caplog.records) == 1
