"""Kernels of which everything is known: their models, samples that these give, and a look-up among them."""

from __future__ import annotations

import itertools

import small_package as small

from stoneware.kernels import candidate
from stoneware.kernels.tile_rule import is_near
from stoneware.tuning import lookup
from stoneware.tuning.sources import Source
from stoneware.tuning.time_model import TimeModel

BIG, TINY, SMALL = (small.sm90(name) for name in (small.BIG, small.TINY, small.SMALL))

_FP8 = {"a_bytes": 1, "b_bytes": 1, "out_bytes": 2, "splits": 1, "max_swizzle": 1}
TRUTH = {
    BIG: TimeModel(
        tile_m=128,
        tile_n=128,
        tile_k=128,
        cluster_m=2,
        cluster_n=1,
        slots=120,
        largest_m=1 << 13,
        **_FP8,
        launch_us=4.0,
        wave_us=1.0,
        step_us=0.3,
        work_us=0.0004,
        unfilled_us=0.0002,
        byte_us=2e-7,
    ),
    TINY: TimeModel(
        tile_m=16,
        tile_n=64,
        tile_k=256,
        cluster_m=1,
        cluster_n=1,
        slots=264,
        largest_m=1 << 13,
        **_FP8,
        launch_us=3.0,
        wave_us=2.0,
        step_us=0.4,
        work_us=0.0009,
        unfilled_us=0.0,
        byte_us=1e-7,
    ),
    SMALL: TimeModel(
        tile_m=64,
        tile_n=64,
        tile_k=256,
        cluster_m=1,
        cluster_n=1,
        slots=132,
        largest_m=1 << 13,
        **_FP8,
        launch_us=3.5,
        wave_us=3.0,
        step_us=0.35,
        work_us=0.001,
        unfilled_us=0.0003,
        byte_us=1e-7,
    ),
    small.VENDOR: TimeModel(
        tile_m=128,
        tile_n=128,
        tile_k=128,
        cluster_m=1,
        cluster_n=1,
        slots=132,
        largest_m=1 << 13,
        **_FP8,
        launch_us=8.0,
        wave_us=2.0,
        step_us=0.4,
        work_us=0.0005,
        unfilled_us=0.0,
        byte_us=2e-7,
    ),
}
WEIGHTS = (
    (2048, 2048),
    (2048, 8192),
    (4096, 4096),
    (4096, 14336),
    (6144, 4096),
    (8192, 8192),
    (28672, 4096),
    (24576, 1536),
)
M_VALUES = (1, 16, 32, 64, 96, 128, 256, 512, 2048)
BETWEEN = tuple(itertools.product((8, 24, 48, 80, 112, 200, 400, 1000), (2560, 5120, 7168, 14336), (3072, 7168, 10240)))
"""m, n and k that were not measured."""


def near_enough(m):
    """The configs that are raced at m."""
    return [
        config
        for config, model in TRUTH.items()
        if config == small.VENDOR or is_near(model.tile_m, model.tile_n, 128, m, 8192)
    ]


def true_us(config, m, n, k):
    return TRUTH[config].at(m, n, k)[0]


def samples(weights=WEIGHTS, m_values=M_VALUES, configs=tuple(TRUTH), **changes):
    return [
        small.sample(config, true_us(config, m, n, k), m=m, n=n, k=k, **changes)
        for n, k in weights
        for m in m_values
        for config in configs
    ]


def candidate_of(config):
    """The candidate of a config with row scales."""
    return candidate.candidate_of(config, small.key())


CONFIGS = {candidate_of(config): config for config in TRUTH}


def find(*tables, m, n, k, device=small.H200, **family):
    sources = [Source(f"source {position}", one) for position, one in enumerate(tables)]
    return lookup.find(small.key(m=m, n=n, k=k, **family), device, sources, kernels=small.manifest())
