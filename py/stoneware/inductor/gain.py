"""Whether the tuning table predicts that a matmul is faster with an epilogue than with a kernel after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stoneware.errors import UnsupportedError
from stoneware.inductor.operators import plans_of
from stoneware.ops.fused_lead import KERNEL_US, lead_us
from stoneware.ops.fused_problem import problem_of
from stoneware.runtime.device import cuda_device


def saved_us(
    op: str, tensors: Sequence[torch.Tensor | None], arguments: Sequence[Any], device: torch.device, *, saved_bytes: int
) -> float | None:
    """The predicted time that a fused call saves; negative if it takes longer.

    It compares the table's times of the fastest kernel and of the fastest one that can have an epilogue, and adds the
    kernel that is saved.

    Args:
      op: of the matmul.
      tensors: of the op, without memory.
      arguments: its other arguments, without backend and config.
      device: of the call.
      saved_bytes: that a kernel after the matmul would read and write in addition.

    Returns:
      Microseconds; None if the call cannot be fused, or if nothing is predicted.
    """
    if device.type != "cuda":
        return None
    try:
        problem = problem_of(plans_of(op), tensors, arguments)
    except (TypeError, ValueError):  # the call raises it when it runs
        return None
    if isinstance(problem, str):
        return None
    from torch._inductor.utils import get_gpu_dram_gbps

    ordinal = torch.cuda.current_device() if device.index is None else device.index
    try:
        lead = lead_us(plans_of(op).operation, problem, cuda_device(ordinal))
    except UnsupportedError:
        return None
    if lead is None:
        return None
    return saved_bytes / (get_gpu_dram_gbps() * 1e3) + KERNEL_US - lead
