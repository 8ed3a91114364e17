"""Backend in plain torch, on any device: float32 products and sums, rounded once at the end."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stoneware.kernels.config import Config
from stoneware.ops.matmul import operand_views
from stoneware.ops.matmul.problem import Problem
from stoneware.runtime.device import Device

NAME = "reference"
CONFIG = Config(backend=NAME, kernel="torch.matmul_float32")


def supports(problem: Problem, device: Device) -> str | None:
    """Always None: it runs every problem anywhere."""
    return None


def configs(problem: Problem, device: Device) -> list[Config]:
    return [CONFIG]


def plan(problem: Problem, config: Config, device: Device) -> Callable[..., None]:
    views = operand_views.of(problem)

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        a, b, out = views(a, b, out)
        d = a.float() @ b.float()
        if bias is not None:
            d += bias
        out.copy_(d)

    return run
