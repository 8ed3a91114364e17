"""Times calls against each other, many steps between two events, and what of that is CUDA's.

A step of a model in eager PyTorch is often bound by the host. Between two events around one step the
host's time would be hidden or counted by chance, so each timing is of a block of steps, divided by
their number: what one more step costs a busy program.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from tools.gpu_check.document import text_of
from tools.gpu_check.experiment import Call, Row, figures, interleaved

BLOCK_MS = 25.0
"""A block has as many steps as take this long, so that its first launch does not count."""

_LEAST_STEPS, _MOST_STEPS = 3, 50
_WARM_UP_STEPS = 3


class Clock:
    """Time, graphs and memory of the current CUDA device."""

    device = torch.device("cuda")

    def block_ms(self, call: Call, num_steps: int) -> float:
        """Milliseconds of some steps in a row, between two events."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(num_steps):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def graphed(self, call: Call) -> Call:
        """Replays what the call launched.

        Raises:
          RuntimeError: the call cannot be captured.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_STEPS):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
        return graph.replay

    def peak_bytes(self, call: Call) -> int:
        """Most memory that torch held during the call, beyond what it held before."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


class HostClock(Clock):
    """The same on a CPU, where nothing is asynchronous; graphs are calls, and memory is not counted."""

    device = torch.device("cpu")

    def block_ms(self, call: Call, num_steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(num_steps):
            call()
        return (time.perf_counter() - begin) * 1e3

    def graphed(self, call: Call) -> Call:
        return call

    def peak_bytes(self, call: Call) -> int:
        call()
        return 0


def compare(calls: Mapping[str, Call], clock: Clock, *, rounds: int, seconds: float) -> dict[str, Any]:
    """Times calls in rounds of random order.

    Args:
      calls: name -> a step; it returns nothing that must live.
      rounds: blocks of each call.
      seconds: see `experiment.interleaved`.

    Returns:
      name -> `experiment.figures` of the blocks and "steps_in_block", or {"failure": text} for a call that raised.
    """
    results: dict[str, Any] = {}
    num_steps: dict[str, int] = {}
    for name, call in calls.items():
        try:
            clock.block_ms(call, _WARM_UP_STEPS)
            ms = clock.block_ms(call, _LEAST_STEPS) / _LEAST_STEPS
        except Exception as error:  # a peer may refuse; the others keep their figures
            results[name] = {"failure": text_of(error)}
            continue
        num_steps[name] = min(max(math.ceil(BLOCK_MS / ms), _LEAST_STEPS), _MOST_STEPS)

    def step_ms(name: str) -> list[float]:
        return [clock.block_ms(calls[name], num_steps[name]) / num_steps[name]]

    blocks_ms = interleaved({name: partial(step_ms, name) for name in num_steps}, rounds, seconds=seconds)
    for name, samples_ms in blocks_ms.items():
        results[name] = {**figures(samples_ms, "ms"), "steps_in_block": num_steps[name]}
    return {name: results[name] for name in calls}


def timing(clock: Clock, rounds: int) -> Callable[[Mapping[str, Call], float, Row], dict[str, Any]]:
    """`compare`, as `experiment.Part` calls it."""
    return lambda calls, seconds, row: compare(calls, clock, rounds=rounds, seconds=seconds)
