"""Fresh plans of scaled_mm, and calls by them."""

from __future__ import annotations

import pytest
import torch

import stoneware as sw
from stoneware.ops.scaled_mm import api

M, N, K = 32, 48, 64


@pytest.fixture(autouse=True)
def plans(monkeypatch):
    """Fresh plans of scaled_mm, with the native module."""
    fresh = type(api._PLANS)()
    assert fresh.fast is not None, fresh.why_not_fast
    monkeypatch.setattr(api, "_PLANS", fresh)
    return fresh


def counts(plans) -> tuple[int, int, int]:
    return plans.fast.num_hits, plans.fast.num_made, plans.fast.num_slow


def call(x, **options):
    return sw.scaled_mm(x.a, x.b, x.scale_a, x.scale_b, x.bias, **options)


def in_python(plans, x, out_dtype=torch.bfloat16, use_fast_accum=True):
    """The whole call in Python, with plans of its own."""
    return type(plans)().run(x.a, x.b, x.scale_a, x.scale_b, x.bias, None, out_dtype, use_fast_accum, None, None)
