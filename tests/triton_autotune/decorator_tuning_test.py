"""Which config sw.autotune runs, what it measures, and what it keeps; in each mode of tuning."""

from __future__ import annotations

import logging
import sys

import pytest
import triton
from decorated_kernels import (  # noqa: F401  (a fixture)
    CONFIGS,
    FAST_32,
    OP,
    bench_by,
    call,
    decorate,
    explained,
    gpu,
    keep,
    run_of,
    sample,
    stored,
)
from fake_gpu import FINGERPRINT, Tensor
from triton.runtime.errors import OutOfResources

import stoneware as sw
from stoneware.errors import TuningMissError
from stoneware.tuning import policy, sources, store


def test_off_measures_nothing_and_runs_the_first_with_one_line_of_advice(gpu, caplog):
    timed_blocks = []
    kernel = decorate(do_bench=bench_by(FAST_32, timed_blocks))
    with caplog.at_level(logging.WARNING):
        assert [call(kernel), call(kernel, 40), call(kernel)] == [16, 16, 16]
    assert timed_blocks == [] and not store.user_store().samples()
    assert len(caplog.records) == 1 and 'stoneware.tuning("on_miss")' in caplog.text


def test_on_miss_measures_once_and_keeps_it_for_the_next_process(gpu):
    timed_blocks = []
    with sw.tuning("on_miss"):
        kernel = decorate(do_bench=bench_by(FAST_32, timed_blocks))
        assert [call(kernel), call(kernel)] == [32, 32]
        assert timed_blocks == [16, 32, 64]
        assert call(decorate(do_bench=bench_by(FAST_32, timed_blocks))) == 32
    assert timed_blocks == [16, 32, 64]
    assert call(decorate()) == 32
    assert stored() == {(16, "ok"), (32, "ok"), (64, "ok")}


def test_another_key_is_measured_and_the_nearest_serves_until_then(gpu):
    timed_blocks = []
    kernel = decorate(do_bench=bench_by(FAST_32, timed_blocks))
    with sw.tuning("on_miss"):
        call(kernel, 33)
    assert call(kernel, 34) == 32 and len(timed_blocks) == 3
    assert explained(kernel, 34).step == "nearest shape"
    with sw.tuning("on_miss"):
        call(kernel, 34)
    assert len(timed_blocks) == 6
    assert explained(kernel, 34).step == "exact"


def test_a_plan_of_mode_off_is_made_anew_once_the_key_is_measured(gpu):
    kernel = decorate(do_bench=bench_by(FAST_32))
    assert call(kernel) == 16
    with sw.tuning("on_miss"):
        call(kernel)
    kernel.best_config = None
    kernel[(1,)](Tensor(), Tensor(), 33, 5)
    assert kernel.best_config.kwargs["BLOCK"] == 32


def test_editing_the_list_keeps_the_timings_of_the_configs_that_stay(gpu):
    timed_blocks = []
    bench = bench_by({**FAST_32, 128: 0.5}, timed_blocks)
    with sw.tuning("on_miss"):
        assert call(decorate(do_bench=bench)) == 32
        timed_blocks.clear()
        added = [*CONFIGS[1:], triton.Config({"BLOCK": 128})]
        assert call(decorate(configs=added, do_bench=bench)) == 128
        assert timed_blocks == [128, 32]  # and what it has to beat
        timed_blocks.clear()
        assert call(decorate(configs=added[:-1], do_bench=bench)) == 32
        assert timed_blocks == []


def test_a_config_that_left_the_list_is_not_run(gpu):
    keep(sample(32, 1.0), sample(64, 2.0), sample(16, 3.0))
    assert call(decorate()) == 32
    assert call(decorate(configs=[CONFIGS[0], CONFIGS[2]])) == 64
    others = [triton.Config({"BLOCK": block}) for block in (128, 256)]
    assert call(decorate(configs=others)) == 128


def test_near_ties_go_to_the_config_that_stands_first(gpu):
    """Noise would pick another each time, and on each rank."""
    keep(sample(16, 10.1, spread_us=0.4), sample(32, 10.0, spread_us=0.4), sample(64, 12.0))
    assert call(decorate()) == 16
    assert call(decorate(configs=[CONFIGS[1], CONFIGS[0], CONFIGS[2]])) == 32
    with sw.tuning("on_miss"):
        assert call(decorate(do_bench=bench_by({16: 1.001, 32: 1.0, 64: 2.0}))) == 16


def test_timings_of_an_edited_kernel_are_stale(gpu):
    keep(sample(32, 1.0, sha256="0" * 64))
    kernel, timed_blocks = decorate(do_bench=None), []
    assert call(kernel) == 32 and explained(kernel).grade == "stale kernel"
    with sw.tuning("error_on_miss"), pytest.raises(TuningMissError, match="stale kernel"):
        call(decorate())
    with sw.tuning("on_miss"):
        assert call(decorate(do_bench=bench_by({16: 1, 32: 2, 64: 3}, timed_blocks))) == 16
    assert timed_blocks == [16, 32, 64]


def test_timings_of_another_device_are_not_exact(gpu, monkeypatch):
    import dataclasses

    from stoneware.triton_autotune import decorator

    keep(sample(32, 1.0))
    other = dataclasses.replace(FINGERPRINT, name="Other", memory_clock_khz=2_619_000)
    monkeypatch.setattr(decorator, "_fingerprint", lambda ordinal: other)
    kernel = decorate()
    assert call(kernel) == 32 and explained(kernel).grade == "other device"
    with sw.tuning("error_on_miss"), pytest.raises(TuningMissError):
        call(decorate())


def test_error_on_miss_says_what_to_do_and_lets_exact_keys_run(gpu):
    keep(sample(32, 1.0))
    with sw.tuning("error_on_miss"):
        assert call(decorate()) == 32
        with pytest.raises(TuningMissError, match="n=34.*nearest.*on_miss"):
            call(decorate(), 34)


def test_a_config_that_fails_is_kept_as_failed_and_not_tried_again(gpu):
    timed_blocks = []

    def bench(candidate, quantiles):
        timed_blocks.append(candidate.arguments["BLOCK"])
        if timed_blocks[-1] == 32:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return {16: 3.0, 64: 2.0}[timed_blocks[-1]]

    with sw.tuning("on_miss"):
        for _ in range(2):
            assert call(decorate(do_bench=bench)) == 64
    assert timed_blocks == [16, 32, 64]
    assert stored() == {(16, "ok"), (32, "failed"), (64, "ok")}
    failed = next(item for _, item in store.user_store().samples(OP) if item.status == "failed")
    assert "shared memory" in failed.detail


def test_an_error_propagates_and_what_was_measured_stays(gpu):
    def bench(candidate, quantiles):
        if candidate.arguments["BLOCK"] == 64:
            raise RuntimeError("an illegal memory access")
        return 1.0

    with sw.tuning("on_miss"), pytest.raises(RuntimeError, match="illegal memory access"):
        call(decorate(do_bench=bench))
    assert stored() == {(16, "ok"), (32, "ok")}


def test_a_killed_tune_goes_on_where_it_stopped(gpu):
    timed_blocks = []

    def killed(candidate, quantiles):
        if candidate.arguments["BLOCK"] == 32:
            raise KeyboardInterrupt
        return bench_by(FAST_32, timed_blocks)(candidate, quantiles)

    with sw.tuning("on_miss"):
        with pytest.raises(KeyboardInterrupt):
            call(decorate(do_bench=killed))
        assert call(decorate(do_bench=bench_by(FAST_32, timed_blocks))) == 32
    assert timed_blocks == [16, 32, 64, 16]


def warmed_up(times_ms, timed_blocks=None):
    """As on a GPU that is three times as slow in this run as it was in the last."""
    return bench_by({block: 3 * time_ms for block, time_ms in times_ms.items()}, timed_blocks)


def test_a_new_config_meets_the_default_and_the_best_in_one_run(gpu):
    """Medians of other runs are not comparable: clocks and temperature differ."""
    slow_run = {16: 2.0, 32: 1.0, 64: 1.5}
    with sw.tuning("on_miss"):
        assert call(decorate(do_bench=bench_by(slow_run))) == 32
        timed_blocks = []
        added = [*CONFIGS, triton.Config({"BLOCK": 128})]
        # 128 is faster than 32, and takes longer now than 32, 64 and 16 took then.
        bench = warmed_up({**slow_run, 128: 0.8}, timed_blocks)
        assert call(decorate(configs=added, do_bench=bench)) == 128
        assert timed_blocks == [128, 32, 16]
        assert call(decorate(configs=added, do_bench=bench)) == 128
    assert call(decorate(configs=added)) == 128
    assert len(explained(decorate(configs=added)).choices) == 3


def test_a_new_config_that_a_cool_run_flatters_does_not_win(gpu):
    with sw.tuning("on_miss"):
        assert call(decorate(do_bench=warmed_up(FAST_32))) == 32
        added = [*CONFIGS, triton.Config({"BLOCK": 128})]
        bench = bench_by({**FAST_32, 128: 2.5})
        assert call(decorate(configs=added, do_bench=bench)) == 32
    assert call(decorate(configs=added)) == 32


def test_what_an_older_run_timed_as_faster_is_raced_again(gpu):
    """When what beat it has left the list, it was never compared with the rest of the newer run."""
    keep(sample(16, 3.0), sample(64, 2.0), sample(32, 1.0))
    keep(sample(16, 6.0, run=1), sample(32, 2.0, run=1))
    timed_blocks = []
    with sw.tuning("on_miss"):
        kernel = decorate(configs=[CONFIGS[0], CONFIGS[2]], do_bench=bench_by({16: 6.0, 64: 4.0}, timed_blocks))
        assert call(kernel) == 64
    assert timed_blocks == [64, 16]


def test_a_decision_names_where_its_timing_is_from(gpu, tmp_path, monkeypatch):
    def source(**options):
        return explained(decorate(do_bench=bench_by(FAST_32), **options)).source

    with sw.tuning("on_miss"):
        kernel = decorate(do_bench=bench_by(FAST_32))
        call(kernel)
        assert explained(kernel).source == "measured"
        assert source() == "user's store"
        saved = tmp_path / "overlay.sqlite3"
        store.Store(saved).add(run_of(7), [sample(block, us, run=7) for block, us in ((16, 1.0), (32, 2.0), (64, 3.0))])
    with sw.tuning("on_miss", overlay=saved):
        assert source() == "overlay" and call(decorate(do_bench=bench_by(FAST_32))) == 16
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STONEWARE_CACHE_DIR", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(policy, "_memory", [])
    with sw.tuning("on_miss"):
        call(decorate(do_bench=bench_by(FAST_32)), 34)
        assert explained(decorate(), 34).source == "memory"
    sources.forget()
    policy.forget_plans()


def test_in_mode_off_an_overlay_decides_alone_even_without_the_default(gpu, tmp_path):
    keep(sample(16, 3.0), sample(32, 1.0), sample(64, 2.0))
    saved = tmp_path / "overlay.sqlite3"
    store.Store(saved).add(run_of(7), [sample(64, 5.0, run=7)])
    with sw.tuning("off", overlay=saved):
        assert call(decorate()) == 64
    assert call(decorate()) == 32


def test_under_on_miss_samples_decide_where_an_overlay_lacks_the_default(gpu, tmp_path):
    keep(sample(16, 3.0), sample(32, 1.0), sample(64, 2.0))
    saved = tmp_path / "overlay.sqlite3"
    store.Store(saved).add(run_of(7), [sample(64, 0.5, run=7)])
    timed_blocks = []
    with sw.tuning("on_miss", overlay=saved):
        assert call(decorate(do_bench=bench_by(FAST_32, timed_blocks))) == 32
    assert timed_blocks == []


def test_if_every_config_fails_the_first_runs_and_none_is_tried_again(gpu):
    timed_blocks = []

    def bench(launch, quantiles):
        timed_blocks.append(launch.arguments["BLOCK"])
        raise OutOfResources(300_000, 232_448, "shared memory")

    with sw.tuning("on_miss"):
        for _ in range(2):
            assert call(decorate(do_bench=bench)) == 16
        assert "every config of the list failed: " in explained(decorate(do_bench=bench)).reason
    assert timed_blocks == [16, 32, 64]


def test_devices_that_differ_in_their_power_limit_are_told_apart(gpu, monkeypatch):
    """Like for the ops: once samples of two limits exist, this GPU's limit is read."""
    import dataclasses

    for number, watts, fast in ((1, 500, 64), (2, 700, 32)):
        device = dataclasses.replace(FINGERPRINT, power_limit_w=watts)
        samples = [sample(block, 1.0 if block == fast else 2.0, run=number) for block in (16, 32, 64)]
        store.user_store().add(dataclasses.replace(run_of(number), device=device), samples)
    policy.forget_plans()
    for watts, block in ((500, 64), (700, 32)):
        for module in ("stoneware.measuring.machine", "stoneware.runtime.nvml"):
            monkeypatch.setattr(f"{module}.power_limit_w", lambda ordinal: watts)
        assert call(decorate()) == block
        with sw.tuning("on_miss"):
            assert call(decorate(do_bench=bench_by(FAST_32, timed_blocks := []))) == block
        assert timed_blocks == []


def test_a_store_with_failures_is_read_once_for_many_keys_and_without_never(gpu, monkeypatch):
    keep(*(sample(block, us, n=n) for n in range(40, 50) for block, us in FAST_32.items()))
    keep(*(sample(16, 1.0, n=n) for n in (50, 51)), *(sample(32, 1.0, n=n, status="failed") for n in (50, 51)))
    read, read_samples = [], store.Store.samples
    monkeypatch.setattr(store.Store, "samples", lambda self, op=None: (read.append(op), read_samples(self, op))[1])
    with sw.tuning("on_miss"):
        kernel = decorate(do_bench=bench_by(FAST_32))
        assert {call(kernel, n) for n in range(40, 50)} == {32}
        assert read == []
        kernel = decorate(configs=CONFIGS[:2], do_bench=bench_by(FAST_32))
        assert [call(kernel, n) for n in (50, 51)] == [16, 16]
    assert read == [OP]


def test_nothing_is_measured_while_a_graph_is_captured(gpu, monkeypatch, caplog):
    timed_blocks = []
    kernel = decorate(do_bench=bench_by(FAST_32, timed_blocks))
    with sw.tuning("on_miss"), caplog.at_level(logging.WARNING):
        monkeypatch.setattr(policy, "is_capturing", lambda: True)
        assert [call(kernel), call(kernel)] == [16, 16]
        assert timed_blocks == []
        assert sum("captured" in record.message for record in caplog.records) == 1
        monkeypatch.setattr(policy, "is_capturing", lambda: False)
        assert call(kernel) == 32  # and afterwards it is
    assert timed_blocks == [16, 32, 64]


def test_a_damaged_store_stops_no_launch(gpu, tmp_path):
    keep(sample(32, 1.0))
    (tmp_path / "tuning" / store.FILE_NAME).write_bytes(b"not a database" * 1000)
    for name in ("-wal", "-shm"):
        (tmp_path / "tuning" / (store.FILE_NAME + name)).unlink(missing_ok=True)
    policy.forget_plans()
    assert call(decorate()) in (16, 32)
    with sw.tuning("on_miss"):
        assert call(decorate(do_bench=bench_by(FAST_32))) == 32


def test_a_store_that_cannot_be_written_keeps_samples_in_memory(gpu, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STONEWARE_CACHE_DIR", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(policy, "_memory", [])
    policy._say_not_stored.cache_clear()
    timed_blocks = []
    with caplog.at_level(logging.WARNING):
        for n in (33, 34):
            with sw.tuning("on_miss"):
                assert call(decorate(do_bench=bench_by(FAST_32, timed_blocks)), n) == 32
                assert call(decorate(do_bench=bench_by(FAST_32, timed_blocks)), n) == 32
        assert call(decorate()) == 32
    assert timed_blocks == [16, 32, 64] * 2
    assert sum("in memory" in record.message for record in caplog.records) == 1
    policy.forget_plans()


def test_without_cache_results_timings_stay_in_memory(gpu, tmp_path):
    keep(sample(64, 0.1))
    timed_blocks = []
    kernel = decorate(do_bench=bench_by(FAST_32, timed_blocks), cache_results=False)
    assert call(kernel) == 16
    with sw.tuning("on_miss"):
        assert [call(kernel), call(kernel)] == [32, 32]
    assert timed_blocks == [16, 32, 64]
    kernel.best_config = None
    assert call(kernel) == 32  # decided anew, though mode off knew the key before
    assert stored() == {(64, "ok")}


def test_timings_of_another_vendors_gpu_stay_in_the_process(gpu, monkeypatch):
    import dataclasses

    from stoneware.triton_autotune import choice, decorator

    other = dataclasses.replace(FINGERPRINT, name="AMD Instinct", compute_capability=choice.OTHER)
    monkeypatch.setattr(decorator, "_fingerprint", lambda ordinal: other)
    timed_blocks = []
    kernel = decorate(do_bench=bench_by(FAST_32, timed_blocks))
    with sw.tuning("on_miss"):
        assert [call(kernel), call(kernel)] == [32, 32]
    assert call(kernel) == 32
    assert timed_blocks == [16, 32, 64] and not stored()


def test_of_many_configs_each_is_measured_once(gpu):
    """As under triton.autotune; `prune_configs_by` leaves fewer."""
    timed_blocks = []
    configs = [
        triton.Config({"BLOCK": 16}, num_warps=warps, num_stages=stages)
        for warps in (1, 2, 4, 8)
        for stages in range(1, 90)
    ]

    def bench(candidate, quantiles):
        timed_blocks.append(1)
        return 1.0

    with sw.tuning("on_miss"):
        for _ in range(2):
            call(decorate(configs=configs, do_bench=bench))
    assert len(timed_blocks) == len(configs) == 356


def test_explain_measures_and_launches_nothing(gpu):
    keep(sample(32, 1.0), sample(16, 2.0))
    timed_blocks = []
    kernel = decorate(do_bench=bench_by(FAST_32, timed_blocks))
    explanation = explained(kernel)
    assert (explanation.config, explanation.source) == (CONFIGS[1], "user's store")
    assert explanation.key.values == (33,)
    call(kernel)
    with sw.tuning("on_miss"):
        assert "1 of 3 configs would be timed" in explained(kernel).reason
    assert timed_blocks == [] and gpu.order == ["triton"]
    text = str(explanation)
    assert "1.00 us" in text and "user's store" in text and "BLOCK=32" in text


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
