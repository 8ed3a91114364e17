"""Times calls on the GPU: cold L2, calls interleaved, device time only.

Method: a buffer much larger than the L2 is written, then the call runs between two CUDA events;
this is the method of triton.testing.do_bench. The GPU is kept behind the host by a sleep at the
start of each round and by the flushes, so that the time of the host is not in the figures. The
calls of a round are timed one after another in an order that is drawn anew for each round, so that
a change of clock or temperature meets all of them alike.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping

import torch

_FLUSH_BYTES_PER_L2_BYTE = 4
_LEAST_FLUSH_BYTES = 256 << 20

_SLEEP_CYCLES = 400_000
"""Some 200 us: longer than the host takes to queue the first few calls of a round."""

_WARM_UP_CALLS = 3


@dataclasses.dataclass(frozen=True)
class Timing:
    """Timings of one call, in microseconds.

    Attributes:
      median_us: median.
      spread_us: interquartile range.
      count: how many timings.
    """

    median_us: float
    spread_us: float
    count: int

    @classmethod
    def of(cls, samples_us: list[float]) -> Timing:
        if len(samples_us) < 2:
            return cls(statistics.median(samples_us), 0.0, len(samples_us))
        first, _, third = statistics.quantiles(samples_us, n=4, method="inclusive")
        return cls(statistics.median(samples_us), third - first, len(samples_us))


class DeviceTimer:
    """Times calls on one GPU; holds the buffer that flushes its L2."""

    def __init__(self, ordinal: int) -> None:
        self._device = torch.device("cuda", ordinal)
        l2_bytes = torch.cuda.get_device_properties(ordinal).L2_cache_size
        num_bytes = max(_LEAST_FLUSH_BYTES, _FLUSH_BYTES_PER_L2_BYTE * l2_bytes)
        self._flush_buffer = torch.empty(num_bytes, dtype=torch.int8, device=self._device)
        self._order = random.Random(0)

    def time(
        self,
        calls: Mapping[Hashable, Callable[[], None]],
        *,
        rounds: int,
        max_seconds: float,
        rounds_before_drop: int = 0,
        drop_ratio: float = 2.0,
    ) -> dict[Hashable, Timing]:
        """Times every call once a round.

        Args:
          calls: what to time, by any name. They must have run once without error.
          rounds: how many rounds.
          max_seconds: stop after the round in which this has passed.
          rounds_before_drop: after so many rounds calls slower than `drop_ratio` times the fastest
            are dropped, and keep the timings they have; 0 drops none.
          drop_ratio: see above.

        Returns:
          Timings by name, of at least one round.
        """
        with torch.cuda.device(self._device):
            for call in calls.values():
                for _ in range(_WARM_UP_CALLS):
                    call()
            torch.cuda.synchronize()
            samples: dict[Hashable, list[float]] = {name: [] for name in calls}
            active = list(calls)
            start = time.monotonic()
            for round_idx in range(rounds):
                self._order.shuffle(active)
                for name, elapsed_us in self._time_round(calls, active):
                    samples[name].append(elapsed_us)
                if round_idx + 1 == rounds_before_drop:
                    medians = {name: statistics.median(samples[name]) for name in active}
                    limit = drop_ratio * min(medians.values())
                    active = [name for name in active if medians[name] <= limit]
                if time.monotonic() - start > max_seconds:
                    break
        return {name: Timing.of(values) for name, values in samples.items()}

    def _time_round(
        self, calls: Mapping[Hashable, Callable[[], None]], order: list[Hashable]
    ) -> list[tuple[Hashable, float]]:
        torch.cuda._sleep(_SLEEP_CYCLES)
        events = []
        for name in order:
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            self._flush_buffer.zero_()
            begin.record()
            calls[name]()
            end.record()
            events.append((name, begin, end))
        torch.cuda.synchronize()
        return [(name, begin.elapsed_time(end) * 1e3) for name, begin, end in events]


def host_time(call: Callable[[], None], count: int = 100) -> Timing:
    """The host's time per call, in microseconds; the GPU is idle at the start and never waited for.

    `count` stays far below the 1024 launches that a stream queues before the host must wait.
    """
    for _ in range(_WARM_UP_CALLS):
        call()
    torch.cuda.synchronize()
    samples_us = []
    for _ in range(count):
        begin = time.perf_counter_ns()
        call()
        samples_us.append((time.perf_counter_ns() - begin) / 1e3)
    torch.cuda.synchronize()
    return Timing.of(samples_us)
