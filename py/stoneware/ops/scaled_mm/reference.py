"""Backend in plain torch, on any device: right rather than fast.

    d = (float32(a) @ float32(b)) * scale_a * scale_b + bias, rounded once to the out dtype
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from stoneware.autotune.config import Config
from stoneware.ops.scaled_mm.problem import Problem
from stoneware.runtime.device import Device

NAME = "reference"
CONFIG = Config(backend=NAME, kernel="torch.matmul_float32")


def supports(problem: Problem, device: Device) -> str | None:
    """Always None: it runs every problem anywhere."""
    return None


def configs(problem: Problem, device: Device) -> list[Config]:
    return [CONFIG]


def plan(problem: Problem, config: Config, device: Device) -> Callable[..., None]:
    return _run


def _run(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scale_a: torch.Tensor,
    scale_b: torch.Tensor, bias: torch.Tensor | None,
) -> None:
    # An e4m3 has 4 significant bits, so that a product is exact even if torch multiplies float32 in
    # TF32; the scales are applied to the float32 sum.
    d = a.float() @ b.float()
    d *= scale_a
    d *= scale_b
    if bias is not None:
        d += bias
    out.copy_(d)
