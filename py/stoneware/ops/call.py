"""The plan cache of an op, as its spec says, and the op's operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from stoneware.ops.plan_cache import PlanCache, is_traced
from stoneware.ops.spec import OpSpec


class OpPlans(PlanCache):
    """Plans of one op; a subclass has `checked_plan` and `result`.

    Attributes:
      spec: of the op.
    """

    spec: ClassVar[OpSpec]

    def __init_subclass__(cls, spec: OpSpec | None = None) -> None:
        if spec is None:
            return  # a subclass of an op's, of the same op
        cls.spec, cls.op, cls.tensors = spec, spec.name, spec.tensors
        cls.objects = (*(name for name, _ in spec.arguments), "backend", "config")
        cls.optional = (*(one.name for one in spec.inputs if one.is_optional), "out")
        cls.aligned = (*(one.name for one in spec.inputs if one.is_aligned), "out")
        cls.must_be_aligned = spec.must_be_aligned
        cls.plan_order = spec.plan_order

    def operator(self, *arguments: Any) -> torch.Tensor:
        """The call as the implementation of the op's operator."""
        # Torch has shown the call to every mode by now, so it must not go there again.
        run = self.run if is_traced(arguments[: len(self.tensors)]) else self.call
        return run(*arguments)
