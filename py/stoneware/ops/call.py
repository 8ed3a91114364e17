"""The plan cache of an op, as its spec says, and the op's operator."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from stoneware.ops import registration
from stoneware.ops.plan_cache import PlanCache, is_traced
from stoneware.ops.spec import OpSpec


class OpPlans(PlanCache):
    """Plans of one op. A subclass is made in the op's `api.py`, registers the op's operator, and has
    its one instance there as `_PLANS`.

    Attributes:
      spec: of the op.
      operator: the call by the op's operator, for tracers.
    """

    spec: ClassVar[OpSpec]
    operator: ClassVar[Callable[..., torch.Tensor]]

    def __init_subclass__(cls, spec: OpSpec | None = None) -> None:
        if spec is None:
            return  # a subclass of an op's, of the same op
        cls.spec, cls.op, cls.tensors = spec, spec.name, spec.tensors
        cls.objects = (*(name for name, _ in spec.arguments), "backend", "config")
        cls.optional = (*(one.name for one in spec.inputs if one.is_optional), "out")
        cls.aligned = (*(one.name for one in spec.inputs if one.is_aligned), "out")
        cls.must_be_aligned = spec.must_be_aligned
        cls.plan_order = spec.plan_order
        api = sys.modules[cls.__module__]
        cls.operator = staticmethod(
            registration.register(spec, cls.fake, lambda *arguments: api._PLANS.eager(*arguments))
        )

    @staticmethod
    def fake(*arguments: Any) -> torch.Tensor:
        """The result for tracers, of the arguments without out: a tensor without memory. Refuses
        what a shape cannot be inferred from."""
        raise NotImplementedError

    def eager(self, *arguments: Any) -> torch.Tensor:
        """The call as the operator's implementation."""
        # Torch has shown the call to every mode by now, so it must not go there again.
        run = self.run if is_traced(arguments[: len(self.tensors)]) else self.call
        return run(*arguments)

    def traced(self, *arguments: Any) -> torch.Tensor:
        return self.operator(*arguments)
