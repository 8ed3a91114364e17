"""What the calls of ops that multiply a by b have in common: the order of their checks, and what is known
of the result before it is computed."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch

from stoneware.ops import tensor_checks
from stoneware.ops.backend import Plan
from stoneware.ops.dispatch import Operation
from stoneware.ops.plan_cache import OpPlans
from stoneware.ops.product import Product


class Checked(NamedTuple):
    """Arguments that passed an op's checks.

    Attributes:
      problem: theirs.
      adapted: a plan of the problem -> the plan that takes the call's tensors.
    """

    problem: Product
    adapted: Callable[[Plan], Plan]


class ProductPlans(OpPlans):
    """OpPlans of an op with an argument out_dtype, which multiplies a by b.

    Attributes:
      operation: the op with its backends.
      default_dtype: of a result whose out_dtype is None; None for a's.
      checks: the op's module with
        shape(a, b), the shape of the result. Raises ValueError for operands that do not fit; their sizes
          may be symbols of a trace
        checked(*tensors with out, *the spec's other arguments), the problem, or the plan where there is
          no kernel to choose. Raises TypeError or ValueError for what breaks a rule
    """

    operation: Operation
    default_dtype: ClassVar[torch.dtype | None] = None
    checks: ModuleType

    def checked_plan(self, *arguments: Any) -> Plan:
        *given, backend, config = arguments
        tensors = tensor_checks.check_tensors(self.spec, *given)
        self.operation.check_argument(backend, config)
        device = tensor_checks.check_one_device(tensors)
        checked: Checked | Plan = self.checks.checked(*given)
        if not isinstance(checked, Checked):
            return checked
        return checked.adapted(self.operation.plan(checked.problem, device, backend=backend, config=config))

    def result(self, *arguments: Any) -> tuple[tuple[int, ...], torch.dtype]:
        a, b, out_dtype = arguments[0], arguments[1], arguments[len(self.spec.tensors)]
        return self.checks.shape(a, b), out_dtype or self.default_dtype or a.dtype

    @classmethod
    def fake(cls, *arguments: Any) -> torch.Tensor:
        a, b, out_dtype = arguments[0], arguments[1], arguments[len(cls.spec.inputs)]
        return a.new_empty(cls.checks.shape(a, b), dtype=out_dtype or cls.default_dtype or a.dtype)
