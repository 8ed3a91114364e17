"""toy_add: the call, its backends, and its plan cache."""

from __future__ import annotations

import torch

from stoneware.ops.backend import Backend, reference
from stoneware.ops.dispatch import Operation
from stoneware.ops.plan_cache import OpPlans
from toy_op import checks
from toy_op.spec import ADD, ADDCMUL, SPEC


class _Torch(Backend):
    name = "vendor"

    def supports(self, problem, device):
        return None

    def configs(self, problem, device):
        return [ADD, ADDCMUL]

    def plan(self, problem, config, device):
        if config == ADD:
            return lambda a, b, out: torch.add(a, b, alpha=2, out=out)
        two = torch.full((), 2.0)
        return lambda a, b, out: torch.addcmul(a, b, two, out=out)


OPERATION = Operation(SPEC, _Torch(), reference(lambda problem: lambda a, b, out: out.copy_(a + 2 * b)))


def toy_add(a, b, *, out=None, backend=None, config=None):
    """a + 2 * b of two float32 matrices."""
    if torch.compiler.is_dynamo_compiling():
        return _traced(a, b, out, backend, config)
    return _PLANS.call(a, b, out, backend, config)


class _Plans(OpPlans):
    operation = OPERATION
    checks = checks


_PLANS = _Plans()
_traced = _Plans.operator
