"""The measuring process that times calls as a model makes them: python -m tools.gpu_check.weight_walk

As stoneware.sessions.child, with its values checked against float64 first, its rounds and its
protocol. But a call is timed in one CUDA graph that calls it once with each of several copies of the
weight. No flush stands between two calls, each reads its weight from memory, and the activation may
still be in L2 from the call before. The gradient of a weight is written to memory of its own likewise.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch

from stoneware.kernels.config import Config
from stoneware.measuring.device_timer import DeviceTimer
from stoneware.measuring.stopwatch import Call, CudaStopwatch
from stoneware.ops import operation_of
from stoneware.ops.backend import Plan
from stoneware.runtime.device import Device
from stoneware.sessions import child
from stoneware.specs import spec_of
from stoneware.tuning import policy

COMMAND = (sys.executable, "-P", "-m", "tools.gpu_check.weight_walk")

COPIES_BYTES = 300 << 20
"""Of all copies of a weight: several times the L2 of any GPU, of 50 to 126 MB."""

MOST_COPIES = 512
"""The most copies of a weight, so that a walk takes milliseconds. A weight below a 500th of the L2 stays there."""


def num_copies(weight_bytes: int) -> int:
    return min(MOST_COPIES, -(-COPIES_BYTES // weight_bytes))


class WeightWalk:
    """The copies of what each layer of a model has for itself, of the problem that is measured now.

    That is the weight, b. In the gradient of a weight, layout tn, it is the activation b, saved since forward,
    and the gradient, out.
    """

    def __init__(self) -> None:
        self._copies: dict[str, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    @property
    def of_weight(self) -> list[torch.Tensor]:
        """As many as a walk has calls."""
        return self._copies["b"][1]

    def make_plan(self, problem: Any, config: Config, device: Device) -> Plan:
        """The op's plan, each captured call of which takes the next copies of the tensors that it is given."""
        spec = spec_of(problem.key.op)
        plan = operation_of(spec.name).make_plan(problem, config, device)
        names = ("b", "out") if problem.key.layout == "tn" else ("b",)
        positions = {name: spec.plan_order.index(name) for name in names}
        calls = itertools.count()

        def run(*arguments: Any) -> None:
            copies = {position: self._copies_of(name, arguments[position]) for name, position in positions.items()}
            if not policy.is_capturing():  # values are compared in the caller's own out
                plan(*arguments)
                return
            call = next(calls)
            plan(*(
                copies[position][call % len(copies[position])] if position in copies else argument
                for position, argument in enumerate(arguments)
            ))  # fmt: skip

        return run

    def _copies_of(self, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        of, copies = self._copies.get(name, (None, []))
        if of is not tensor:
            copies.clear()  # before there are others
            count = num_copies(tensor.numel() * tensor.element_size())
            copies = [tensor, *(tensor.clone() for _ in range(count - 1))]
            self._copies[name] = tensor, copies
        return copies


class WalkStopwatch(CudaStopwatch):
    """Times a call by a graph of as many calls as there are copies of the weight."""

    def __init__(self, ordinal: int, walk: WeightWalk) -> None:
        super().__init__(ordinal, l2="as_is")
        self._walk = walk
        self._copies: list[torch.Tensor] = []
        self._graphs: dict[Any, torch.cuda.CUDAGraph] = {}

    def warm_up(self, name: Any, call: Call) -> None:
        super().warm_up(name, call)
        if self._copies is not self._walk.of_weight:
            self._graphs.clear()  # of another problem; a graph holds memory
            self._copies = self._walk.of_weight
        graph = super().capture(call, len(self._copies))
        if graph is None:
            raise RuntimeError("the call cannot be captured in a CUDA graph")
        self._graphs[name] = graph
        self.time_graph(name, graph)  # uploads it

    def time_call(self, name: Any, call: Call) -> float:
        return self.time_graph(name, self._graphs[name]) / len(self._copies)

    def capture(self, call: Call | None, num_pairs: int) -> None:
        """Has DeviceTimer keep to `time_call`: the calls are in graphs already."""


def main(run: Callable[..., int] = child.main) -> int:
    walk = WeightWalk()
    return run(walk.make_plan, lambda ordinal: DeviceTimer(ordinal, WalkStopwatch(ordinal, walk)))


if __name__ == "__main__":
    sys.exit(main())
