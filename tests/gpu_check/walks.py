"""Doubles for programs that walk over copies of a weight, without a GPU."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable

import pytest
import torch

from stoneware.measuring.device_timer import Timing
from stoneware.runtime.device import CPU
from tools.gpu_check import walk_experiment

NUM_COPIES = 2


class Stopwatch:
    """A graph of it makes the calls again."""

    def __init__(self, ordinal: int, l2: str) -> None:
        pass

    def capture(self, run: Callable[[], object], num_pairs: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(replay=run)


walk = functools.partial(walk_experiment.replay, Stopwatch(0, "as_is"))


def replace(monkeypatch: pytest.MonkeyPatch, us_of: Callable[[str], float]) -> None:
    """Has a call of each name take these microseconds."""

    class Timer:
        def __init__(self, ordinal: int, stopwatch: Stopwatch) -> None:
            pass

        def time(self, calls, *, rounds: int, max_seconds: float, short_us: float) -> dict[str, Timing]:
            return {name: Timing(NUM_COPIES * us_of(name), 0.2, rounds) for name in calls}

    monkeypatch.setattr(walk_experiment, "DeviceTimer", Timer)
    monkeypatch.setattr(walk_experiment, "CudaStopwatch", Stopwatch)
    monkeypatch.setattr(walk_experiment, "cuda_device", lambda ordinal: CPU)
    monkeypatch.setattr(walk_experiment, "num_copies", lambda num_bytes: NUM_COPIES)
    monkeypatch.setattr(walk_experiment.WalkExperiment, "ordinal", None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda ordinal: None)
