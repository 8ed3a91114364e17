"""Divides the tests among Bazel's shards, all of one architecture in one shard."""

from __future__ import annotations

import os
import pathlib

import pytest


def _architecture(item: pytest.Item) -> str:
    return item.callspec.params.get("name", "") if hasattr(item, "callspec") else ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps every n-th architecture (https://bazel.build/reference/test-encyclopedia, "Test sharding")."""
    if "TEST_SHARD_STATUS_FILE" in os.environ:
        pathlib.Path(os.environ["TEST_SHARD_STATUS_FILE"]).touch()
    num_shards, shard = int(os.environ.get("TEST_TOTAL_SHARDS", 1)), int(os.environ.get("TEST_SHARD_INDEX", 0))
    places: dict[str, int] = {}
    kept = []
    for item in items:
        place = places.setdefault(_architecture(item), len(places))
        if place % num_shards == shard:
            kept.append(item)
    # One after the other, so that each original is built once.
    items[:] = sorted(kept, key=lambda item: places[_architecture(item)])
