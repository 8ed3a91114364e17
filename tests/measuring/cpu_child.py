"""The real measuring process on a CPU: the reference computes, and a fake stopwatch times."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from fake_stopwatch import FakeStopwatch

from stoneware import ops, specs
from stoneware.kernels.manifest import Manifest
from stoneware.measuring import candidates, device_timer, operands
from stoneware.ops import operation_of
from stoneware.runtime import device
from stoneware.sessions import child

specs.OPS["toy_add"] = "toy_op.spec"
ops.APIS["toy_add"] = "toy_op.api"
operands.OPERANDS["toy_add"] = "toy_op.operands"
make_timer = device_timer.DeviceTimer


class Stopwatch(FakeStopwatch):
    def warm_up(self, name, call):
        call()

    def time_call(self, name, call):
        call()
        return self._spent(name, float(name.kernel.partition("_")[2]))


def make_plan(problem, config, where):
    kind = config.kernel.partition("_")[0]
    backends = operation_of(problem.key.op).backends
    right = backends["reference"].plan(problem, config, where)

    def plan(a, b, out, *rest):
        print("a library prints this on stdout")
        os.write(1, b"and this past Python\n")
        if kind == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "hang":
            signal.pause()
        elif kind == "lost":
            torch.cuda.synchronize = lost
            candidates.Race._synchronize = lost
            raise RuntimeError("an illegal memory access")
        right(a, b, out, *rest)
        if kind == "wrong":
            out[0, 0] += 100 * out.float().std()

    return plan


def lost(*_: object) -> None:
    raise RuntimeError("the context is lost")


torch.cuda.set_device = lambda ordinal: None
torch.cuda.empty_cache = lambda: None
device.cuda_device = lambda ordinal: device.CPU
candidates.manifest.packaged = lambda: Manifest({})
device_timer.DeviceTimer = lambda ordinal: make_timer(ordinal, Stopwatch(iter([1980])))
sys.exit(child.main(make_plan))
