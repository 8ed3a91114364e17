"""The search finds a good config among many with few trials, and measures all where it cannot."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import sys

import pytest

from stoneware.kernels.config import KernelConfig
from stoneware.measuring import search

needs_optuna = pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="optuna is not installed")

MANY = [
    KernelConfig(
        kwargs=(("BLOCK_M", block_m), ("BLOCK_N", block_n), ("BLOCK_K", block_k)),
        num_warps=num_warps,
        num_stages=num_stages,
    )
    for block_m, block_n, block_k, num_warps, num_stages in itertools.product(
        (16, 32, 64, 128), (32, 64, 128, 256), (32, 64, 128), (2, 4, 8), (2, 3, 4, 5)
    )
    # No full product, as in practice: what needs too much shared memory is not there.
    if (block_m + block_n) * block_k * num_stages < 100_000
]
DEFAULT = MANY[0]


def true_us(config: KernelConfig) -> float | None:
    at = dict(config.kwargs)
    if at["BLOCK_M"] * at["BLOCK_N"] > 128 * 128 and config.num_warps < 8:
        return None  # too many registers
    return (
        10.0
        + 5.0 * abs(at["BLOCK_M"] - 64) / 64
        + 3.0 * abs(at["BLOCK_N"] - 128) / 128
        + 2.0 * abs(at["BLOCK_K"] - 64) / 64
        + abs(config.num_warps - 4)
        + 0.5 * abs(config.num_stages - 4)
    )


class Gpu:
    """Times configs; its clock halves early in the search."""

    def __init__(self) -> None:
        self.batches: list[list[KernelConfig]] = []

    def measure(self, configs):
        self.batches.append(list(configs))
        slowdown = 2.0 if len(self.batches) > 8 else 1.0
        return {config: None if true_us(config) is None else slowdown * true_us(config) for config in configs}


def test_up_to_the_limit_all_are_timed_against_each_other():
    gpu = Gpu()
    found = search.run(MANY[: search.EXHAUSTIVE_LIMIT], gpu.measure, always=[DEFAULT])
    assert gpu.batches == [MANY[: search.EXHAUSTIVE_LIMIT]]
    assert len(found) == search.EXHAUSTIVE_LIMIT


def test_without_optuna_all_are_measured_and_the_remedy_is_named(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "optuna", None)
    gpu = Gpu()
    assert len(search.run(MANY, gpu.measure)) == len(MANY) > search.EXHAUSTIVE_LIMIT
    assert "pip install 'stoneware[search]'" in caplog.text


@needs_optuna
def test_a_search_comes_near_the_best_with_a_fraction_of_the_configs_whatever_the_clock_does():
    gpu = Gpu()
    found = search.run(MANY, gpu.measure, always=[DEFAULT], most_trials=100)
    best_us = min(us for us in map(true_us, MANY) if us is not None)
    winner = min((c for c in found if found[c]), key=true_us)
    assert len(found) == 101 and len(MANY) > 400
    assert true_us(winner) <= 1.1 * best_us


@needs_optuna
def test_each_trial_races_against_the_default_and_the_best_so_far():
    gpu = Gpu()
    search.run(MANY, gpu.measure, always=[DEFAULT], most_trials=80)  # the clock halves meanwhile
    assert gpu.batches[0] == [DEFAULT]
    best = DEFAULT
    for batch in gpu.batches[1:]:
        assert set(batch[1:]) == {DEFAULT, best}
        if true_us(batch[0]) is not None and true_us(batch[0]) < true_us(best):
            best = batch[0]


@needs_optuna
def test_no_config_is_tried_twice_and_what_is_known_is_not_tried():
    gpu = Gpu()
    known = {config: true_us(config) for config in MANY[1:50]}
    search.run(MANY, gpu.measure, always=[DEFAULT], known=known, most_trials=60)
    tried = [batch[0] for batch in gpu.batches[1:]]
    assert len(set(tried)) == len(tried) == 60
    assert not set(tried) & {*known, DEFAULT}


@needs_optuna
def test_equal_timings_give_equal_trials_and_optuna_is_left_as_it_was():
    import optuna

    before = optuna.logging.INFO
    optuna.logging.set_verbosity(before)
    gpus = [Gpu(), Gpu()]
    for gpu in gpus:
        search.run(MANY, gpu.measure, always=[DEFAULT], most_trials=30)
    assert gpus[0].batches == gpus[1].batches
    assert optuna.logging.get_verbosity() == before
    assert logging.getLogger("optuna").level == before


@needs_optuna
def test_a_default_that_does_not_run_does_not_stop_the_search():
    gpu = Gpu()
    broken = next(config for config in MANY if true_us(config) is None)
    found = search.run(MANY, gpu.measure, always=[broken], most_trials=20)
    assert len(found) == 21 and found[broken] is None


@needs_optuna
def test_more_trials_than_configs_measure_each_once():
    gpu = Gpu()
    assert set(search.run(MANY[:301], gpu.measure, most_trials=1000)) == set(MANY[:301])


def test_configs_are_flat_and_categorical():
    assert search.parameters(KernelConfig(kwargs=(("BLOCK_M", 64), ("FAST", True)))) == {
        "kwargs.BLOCK_M": "64",
        "kwargs.FAST": "True",
        "num_warps": "4",
        "num_stages": "3",
        "num_ctas": "1",
        "maxnreg": "0",
    }
