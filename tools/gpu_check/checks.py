"""What programs compare before they time anything: values within limits of their relative errors."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from stoneware.measuring import operands
from tools.gpu_check.document import text_of

BF16_LIMIT = 0.005
"""Relative error in the Frobenius norm: rounding the result to bf16 makes 0.0017."""

E4M3_LIMIT = 0.06
"""Two operands with 3 bits of mantissa make 0.037 together; few rows scatter about it."""

E5M2_LIMIT = 0.08
"""Operands with 2 and 3 bits of mantissa make 0.058 together."""

ELEMENT_LIMITS = 10
"""Limit of one element's error over its row's rms, in limits of the relative error; a missing one is off by more."""


class Check:
    """The relative errors of one contender, and what of them is wrong."""

    def __init__(self) -> None:
        self.errors: dict[str, float | None] = {}
        self.wrong: list[str] = []

    def product(
        self, name: str, result: torch.Tensor, want: torch.Tensor, limit: float, element_limit: float | None = None
    ) -> None:
        """Compares a result, which must be bfloat16, with what it is in 32 or 64 bits.

        Args:
          limit: of the relative error.
          element_limit: of an element's error over its row's root mean square; None: ELEMENT_LIMITS * limit.
        """
        if result.shape != want.shape or result.dtype != torch.bfloat16:
            self.wrong.append(
                f"{name}: gave {result.dtype} {list(result.shape)}, and must give bfloat16 {list(want.shape)}"
            )
            return
        element_limit = element_limit or ELEMENT_LIMITS * limit
        comparison = operands.compare_within(result, want, limit)
        self.errors[name] = float(f"{comparison.error:.3g}") if comparison.error < 1e9 else None
        if comparison.error >= limit or comparison.element_error >= element_limit:
            self.wrong.append(
                f"{name}: relative error {comparison.error:.3g} must be below {limit:.3g}, worst element "
                f"{comparison.element_error:.3g} of its row's rms below {element_limit:g}"
            )

    def error(self, name: str, error: float, limit: float) -> None:
        self.errors[name] = float(f"{error:.3g}")
        if not error < limit:
            self.wrong.append(f"{name}: relative error {error:.3g} must be below {limit:.3g}")

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """What is raised is wrong: a peer may refuse; ours is reported by the caller."""
        try:
            yield
        except Exception as error:
            self.wrong.append(text_of(error))

    def to_json(self) -> dict[str, Any]:
        return {"is_right": not self.wrong, "errors": self.errors, "detail": "; ".join(self.wrong)}


def failures(row: Mapping[str, Any], counted: Collection[str] | None = None) -> list[str]:
    """Why what was compared or timed in a row has no figure.

    Args:
      counted: names of those that matter; None: all.
    """
    why = {name: check["detail"] for name, check in row.get("checks", {}).items() if not check["is_right"]}
    why |= {name: figures["failure"] for name, figures in row.get("step", {}).items() if "failure" in figures}
    return [f"{name}: {detail}" for name, detail in why.items() if counted is None or name in counted]
