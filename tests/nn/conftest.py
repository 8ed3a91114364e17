"""Two ranks, for the tests of layers on several."""

from __future__ import annotations

import concurrent.futures
import multiprocessing

import pytest
from ranks import SECONDS, join


@pytest.fixture(scope="module")
def on_both(tmp_path_factory):
    """on_both(case, *arguments) runs case(*arguments) on two ranks, and raises what it raises."""
    spawn = multiprocessing.get_context("spawn")
    file = str(tmp_path_factory.mktemp("gloo") / "store")
    ranks = [
        concurrent.futures.ProcessPoolExecutor(1, spawn, initializer=join, initargs=(rank, file)) for rank in range(2)
    ]

    def run(case, *arguments):
        for future in [rank.submit(case, *arguments) for rank in ranks]:
            future.result(2 * SECONDS)

    yield run
    for rank in ranks:
        rank.shutdown()
