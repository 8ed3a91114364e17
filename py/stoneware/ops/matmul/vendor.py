"""Backend of the vendor library: torch.mm and torch.addmm, which are cuBLAS on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stoneware.autotune.config import Config
from stoneware.ops.matmul.heuristic import VENDOR
from stoneware.ops.matmul.problem import Problem
from stoneware.runtime.device import Device

NAME = VENDOR.backend


def supports(problem: Problem, device: Device) -> str | None:
    """None on every GPU."""
    if device.kind != "cuda":
        return f"torch.mm is the vendor library on GPUs only, the device is {device}"
    return None


def configs(problem: Problem, device: Device) -> list[Config]:
    return [VENDOR]


def plan(problem: Problem, config: Config, device: Device) -> Callable[..., None]:
    return _run_with_bias if problem.has_bias else _run


def _run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: None) -> None:
    torch.mm(a, b, out=out)


def _run_with_bias(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor
) -> None:
    torch.addmm(bias, a, b, out=out)
