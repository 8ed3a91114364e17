"""One cold call on a GPU, timed on the device: alone between events, or in a CUDA graph.

Cold: before each call a buffer of four times the L2 is read, so that what the call reads comes from
memory. triton.testing.do_bench and NVBench's measure_cold write a buffer instead, which leaves the
L2 full of lines that must go to memory before a weight can take their place; no decoder does that.
`l2="dirty"` writes too, for figures to compare with theirs.

Between events: the flush keeps the GPU busy while the host queues event, call and event, so the
host's time is not in the figure. If the first event has passed when the last one is queued, the host
may have been late, and the call is timed again behind a longer sleep. The figure includes a few
microseconds for the events and the launch, the same for each call.

In a graph: several pairs of flush and call, less a graph of as many flushes alone, divided by their
number (tritonbench's _do_bench_cudagraph_with_cache_clear). This is what one more call costs a busy
stream: no event stands between flush and call.

docs/design/measuring.md has the measurements behind these choices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal

import torch

from stoneware.runtime import nvml

Call = Callable[[], object]

_FLUSH_BYTES_PER_L2_BYTE = 4
_LEAST_FLUSH_BYTES = 256 << 20
_FLUSH_ROWS = 4096

_FIRST_SLEEP_CYCLES = 100_000
"""Sleep before a call whose timing started too late, about 50 us on an H200; doubled each time."""

_LONGEST_SLEEP_CYCLES = _FIRST_SLEEP_CYCLES << 6
"""About 3 ms. The figure includes a host that needs longer, or whose call waits for the GPU."""

_WARM_UP_CALLS = 3


class CudaStopwatch:
    """Times calls on one GPU; holds the buffer that flushes its L2.

    Args:
      ordinal: torch's number of the GPU.
      l2: what a flush leaves there: "clean" lines that were read, or "dirty" ones that were written;
        with "as_is" nothing is flushed.

    Attributes:
      announce: called with a call's name before the call, so that a parent process knows which
        one hangs or faults.
    """

    def __init__(self, ordinal: int, l2: Literal["clean", "dirty", "as_is"] = "clean") -> None:
        self._ordinal = ordinal
        self._device = torch.device("cuda", ordinal)
        l2_bytes = torch.cuda.get_device_properties(ordinal).L2_cache_size
        num_bytes = max(_LEAST_FLUSH_BYTES, _FLUSH_BYTES_PER_L2_BYTE * l2_bytes)
        self._l2 = l2
        if l2 != "as_is":
            # Rows, so that torch needs no memory for their sums except the result.
            self._flush_rows = torch.zeros(_FLUSH_ROWS, num_bytes // 4 // _FLUSH_ROWS, device=self._device)
            self._flush_sums = torch.zeros(_FLUSH_ROWS, device=self._device)
        self._sleep_cycles: dict[Any, int] = {}  # by name: a call would keep its tensors alive
        self._capture_stream = torch.cuda.Stream(self._device)
        self.announce: Callable[[Any], None] = lambda name: None

    def sm_clock_mhz(self) -> int:
        """Clock of the SMs now; 0 if unknown."""
        return nvml.sm_clock_mhz(self._ordinal)

    def warm_up(self, name: Any, call: Call) -> None:
        """Runs a call a few times, so that it loads and allocates nothing while it is timed."""
        with torch.cuda.device(self._device):
            self.announce(name)
            for _ in range(_WARM_UP_CALLS):
                call()
            torch.cuda.current_stream().synchronize()

    def time_call(self, name: Any, call: Call) -> float:
        """Microseconds of one call between two events, after a flush."""
        with torch.cuda.device(self._device):
            self.announce(name)
            while True:
                begin, end = _timing_events()
                cycles = self._sleep_cycles.get(name, 0)
                if cycles:
                    torch.cuda._sleep(cycles)
                self._flush()
                begin.record()
                call()
                end.record()
                is_late = begin.query()
                end.synchronize()
                if not is_late or cycles >= _LONGEST_SLEEP_CYCLES:
                    return begin.elapsed_time(end) * 1e3
                self._sleep_cycles[name] = cycles * 2 or _FIRST_SLEEP_CYCLES

    def capture(self, call: Call | None, num_pairs: int) -> torch.cuda.CUDAGraph | None:
        """A graph of `num_pairs` flushes, each followed by the call, if there is one; None if the
        call cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph: it collects garbage and empties torch's cache at each capture.
        # "thread_local": other threads of a user's process may go on using CUDA.
        self._capture_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(self._capture_stream):
            try:
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    for _ in range(num_pairs):
                        self._flush()
                        if call is not None:
                            call()
                finally:
                    graph.capture_end()
            except Exception:  # whatever a call does that may not be captured
                torch.cuda.synchronize(self._device)  # raises if more than the capture is lost
                _leave_pool(self._device.index, graph)
                return None
        return graph

    def time_graph(self, name: Any, graph: torch.cuda.CUDAGraph) -> float:
        """Microseconds of one replay between two events."""
        with torch.cuda.device(self._device):
            self.announce(name)
            begin, end = _timing_events()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) * 1e3

    def _flush(self) -> None:
        if self._l2 == "dirty":
            self._flush_rows.zero_()
        elif self._l2 == "clean":
            torch.sum(self._flush_rows, dim=1, out=self._flush_sums)


def _leave_pool(ordinal: int, graph: torch.cuda.CUDAGraph) -> None:
    """Makes torch's allocator leave the pool of a failed capture.

    CUDAGraph.capture_end skips that if ending the capture fails (torch 2.11,
    aten/src/ATen/cuda/CUDAGraph.cpp), and the allocator would never empty its cache again.
    """
    leave = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if leave is not None:
        with contextlib.suppress(RuntimeError):  # it has left the pool already
            leave(ordinal, graph.pool())


def _timing_events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
