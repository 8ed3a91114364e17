"""The measuring process with candidates that misbehave: argv says how, and in whose place.

    python tuning_child.py KIND BACKEND [CALLS]

The first candidate of BACKEND behaves as KIND says after CALLS calls (default 0: at once):
    never_ends   a kernel that spins for days
    out_of_bounds  our kernel writes where nothing is allocated; for backends of ours
    asserts      a device-side assertion
    wrong        a result of zeros
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch

from stoneware.ops import operation_of
from stoneware.sessions import child

_DAYS_CYCLES = 1 << 50


class Nowhere:
    """Stands for a tensor far outside of what is allocated."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._pointer = tensor.data_ptr() + (1 << 42)

    def data_ptr(self) -> int:
        return self._pointer


def misbehave(kind: str, plan: Any, a: Any, b: Any, out: torch.Tensor, rest: Any) -> None:
    if kind == "never_ends":
        torch.cuda._sleep(_DAYS_CYCLES)
    elif kind == "out_of_bounds":
        plan(a, b, Nowhere(out), *rest)
    elif kind == "asserts":
        torch.zeros(4, device=out.device)[torch.full((1,), 1 << 20, device=out.device)]
    elif kind == "wrong":
        out.zero_()


def main(kind: str, backend: str, first_bad_call: str = "0") -> int:
    num_calls = 0

    def make_plan(problem: Any, config: Any, device: Any) -> Any:
        operation = operation_of(problem.key.op)
        plan = operation.make_plan(problem, config, device)
        # Of all candidates: after a restart the process is given those that are left.
        plain = dataclasses.replace(problem, has_bias=False)
        found = operation.candidates(plain, device)
        if config != next(other for other in found if other.backend == backend):
            return plan

        def bad_plan(a: Any, b: Any, out: torch.Tensor, *rest: Any) -> None:
            nonlocal num_calls
            num_calls += 1
            if num_calls > int(first_bad_call):
                misbehave(kind, plan, a, b, out, rest)
            else:
                plan(a, b, out, *rest)

        return bad_plan

    return child.main(make_plan)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
