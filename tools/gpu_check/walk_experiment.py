"""A measuring program whose calls are made as a model makes them: each reads its weight from memory.

A case's calls are captured in a CUDA graph that makes one call with each of several copies of the weight, like
weight_walk.py does for the plans of a tune. The graphs of a case are timed against each other, interleaved.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from absl import flags

from stoneware.measuring.device_timer import DeviceTimer, Timing
from stoneware.measuring.stopwatch import CudaStopwatch
from stoneware.runtime.device import Device, cuda_device
from tools.gpu_check.checks import failures
from tools.gpu_check.experiment import Call, Experiment, Prepared, Row
from tools.gpu_check.weight_walk import num_copies

Walk = Callable[[Callable[[torch.Tensor], object], Sequence[torch.Tensor]], Call]
"""Takes a call and the copies of its weight; replays the call with each copy."""


def copies_of(weight: torch.Tensor) -> list[torch.Tensor]:
    """The weight and its copies, together several times as large as the L2."""
    count = num_copies(weight.numel() * weight.element_size())
    return [weight, *(weight.clone() for _ in range(count - 1))]


def replay(stopwatch: CudaStopwatch, call: Callable[[torch.Tensor], object], copies: Sequence[torch.Tensor]) -> Call:
    """Replays a CUDA graph of the call with each copy of its weight.

    Raises:
      RuntimeError: the call cannot be captured.
    """

    def run() -> None:
        for weight in copies:
            call(weight)

    graph = stopwatch.capture(run, 1)
    if graph is None:
        raise RuntimeError("the call cannot be captured in a CUDA graph")
    return graph.replay


def time_walks(
    replays: Mapping[str, Call], timer: DeviceTimer, num_copies: int, *, rounds: int, seconds: float
) -> dict[str, Timing]:
    """Times replays of `num_copies` calls against each other: what one call takes."""
    # Without graphs of the timer's own: a replay cannot be captured.
    timings = timer.time(replays, rounds=rounds, max_seconds=seconds, short_us=0)
    return {
        name: dataclasses.replace(
            timing, median_us=timing.median_us / num_copies, spread_us=timing.spread_us / num_copies
        )
        for name, timing in timings.items()
    }


def means(ratios: Mapping[str, float]) -> Row:
    """Geometric mean and least of the ratios of problems, and where it is least."""
    return {
        "geomean": round(statistics.geometric_mean(ratios.values()), 4),
        "least": round(min(ratios.values()), 4),
        "least_at": min(ratios, key=ratios.__getitem__),
        "num_problems": len(ratios),
    }


MEANS = ("geometric mean", "least", "at", "problems")
"""Columns of `means` on a page."""


def cells(item: Row) -> tuple[Any, ...]:
    """What a page shows of `means`."""
    return f"{item['geomean']:.3f}", f"{item['least']:.3f}", item["least_at"], item["num_problems"]


class WalkExperiment(Experiment):
    """A subclass has `prepare`, and calls `measure_walks`."""

    @property
    def ordinal(self) -> int | None:
        return self.values.device

    @property
    def seconds(self) -> float:
        return self.values.seconds

    def prepare(self, case: Row, device: Device, walk: Walk) -> Prepared:
        """As `experiment.Prepared`, of calls that `walk` made; the row has the number of "copies"."""
        raise NotImplementedError

    def figures(self, row: Row, timings: Mapping[str, Timing]) -> Row:
        """The figures of a row, of one call each."""
        return {name: timing.figures for name, timing in timings.items()}

    def measure_walks(self, cases: Sequence[Row]) -> None:
        """Measures the cases that have no good row, into "device_us"."""
        ordinal = self.values.device
        torch.cuda.set_device(ordinal)
        stopwatch = CudaStopwatch(ordinal, "as_is")
        device, timer = cuda_device(ordinal), DeviceTimer(ordinal, stopwatch)
        walk = functools.partial(replay, stopwatch)

        def time_calls(calls: Mapping[str, Call], seconds: float, row: Row) -> Row:
            timings = time_walks(calls, timer, row["copies"], rounds=self.values.rounds, seconds=seconds)
            return self.figures(row, timings)

        self.rows().measure(
            cases,
            functools.partial(self.prepare, device=device, walk=walk),
            time_calls,
            judge=failures,
            most_s=self.values.seconds_per_case,
            figures_as="device_us",
        )

    @classmethod
    def define_flags(cls) -> None:
        super().define_flags()
        flags.DEFINE_integer("device", 0, "Number of the GPU.")
        flags.DEFINE_integer("rounds", 11, "Timings of each call.", lower_bound=1)
        flags.DEFINE_float("seconds", 120.0, "For the whole run; timing takes the rest.")
        flags.DEFINE_float("seconds_per_case", 20.0, "For timing one at most.")
