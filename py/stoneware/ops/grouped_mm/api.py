"""grouped_mm: the call, and its plan cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stoneware.autotune import tuning
from stoneware.autotune.config import Config
from stoneware.ops import tensor_checks
from stoneware.ops.dispatch import Operation
from stoneware.ops.grouped_mm import cutlass_sm90, heuristic, reference, vendor
from stoneware.ops.grouped_mm.checks import POINTER_MULTIPLE, checked_plan, named
from stoneware.ops.grouped_mm.problem import OP, Problem
from stoneware.ops.plan_cache import PlanCache
from stoneware.runtime.device import Device

OPERATION = Operation(
    name=OP,
    backends={backend.NAME: backend for backend in (cutlass_sm90, vendor, reference)},
    preferred=heuristic.preferred,
    preferred_reason=heuristic.REASON,
)

_PLANS = PlanCache()
_is_grad_enabled = torch.is_grad_enabled
_tuning_state = tuning.state


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    out: torch.Tensor | None = None,
    backend: str | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Multiplies each group of rows of a by its own matrix, as the experts of a mixture are.

        out[m] = scale_a[m] * scale_b[g] * (a[m] @ b[g])  for offs[g - 1] <= m < offs[g]

    The arguments mean what they mean to torch._grouped_mm and torch._scaled_grouped_mm of a 2-D and
    a 3-D tensor. Offsets are read on the device: the call waits for nothing, and a CUDA graph of it
    serves any offsets. Groups may be empty, and begin and end at any row. Sliced views are computed
    in place.

    Args:
      a: [m, k] float8_e4m3fn or bfloat16, row-major, the rows of one group after those of the other;
        rows of whole units of 16 bytes, a.stride(0) too.
      b: [groups, k, n] of the same dtype, each group column-major (row-major weights [groups, n, k]
        as weights.mT); n in whole units of 16 bytes of it, strides too.
      offs: [groups] int32, the row after each group's last; never decreasing, at most m. That is
        not checked where it would wait for the device; what lies outside of it is cut off.
      scale_a: [m] float32, for fp8; else None.
      scale_b: [groups, n] float32, for fp8; else None.
      out_dtype: torch.bfloat16 or, for fp8, torch.float16; None for torch.bfloat16.
      out: [m, n] of the out dtype, row-major, out.stride(0) a multiple of 8; None allocates it. It
        must not share memory with an input; that is not checked, and the result would be undefined.
      backend: run this backend only: "cutlass_sm90", "vendor" or "reference".
      config: run this config; None takes what `stoneware.explain` shows.

    Returns:
      out. As with torch, its rows from offs[-1] on are undefined: "cutlass_sm90" and "reference" do
      not write them, "vendor" may.

    Raises:
      TypeError: an argument is no tensor, or has the wrong dtype.
      ValueError: a shape, stride, pointer or device breaks a rule.
      ForwardOnlyError: a gradient would be needed.
      UnsupportedError: nothing that was asked for can run the problem here.
      TuningMissError: the problem was not measured, inside `sw.tuning("error_on_miss")`.
      TableError: the tuning table of this installation is damaged.
      DriverError: the CUDA driver refuses.
    """
    # The fast path: everything that the checks and the plan depend on is the key, so that a hit
    # needs no check but the pointers'.
    try:
        a_shape = a.shape
        key = (
            a_shape, a.stride(), a.dtype, a.get_device(),
            b.shape, b.stride(), b.dtype, b.get_device(),
            offs.shape, offs.is_contiguous(), offs.dtype, offs.get_device(),
            None if scale_a is None else (
                scale_a.shape, scale_a.is_contiguous(), scale_a.dtype, scale_a.get_device()
            ),
            None if scale_b is None else (
                scale_b.shape, scale_b.is_contiguous(), scale_b.dtype, scale_b.get_device()
            ),
            None if out is None else (out.shape, out.stride(), out.dtype, out.get_device()),
            out_dtype, backend, config, _tuning_state(),
        )
        plan = _PLANS.get(key)
    except (AttributeError, TypeError, RuntimeError):
        # Not tensors, or without strides, or an unhashable argument; the checks say which.
        plan = key = None
    if plan is None:
        generation = tuning.generation()
        plan = checked_plan(
            OPERATION, a, b, offs, scale_a, scale_b, out_dtype, out, backend, config
        )
        if key is not None:
            _PLANS.add(key, plan, generation)
    if _is_grad_enabled() and (
        a.requires_grad or b.requires_grad
        or (scale_a is not None and scale_a.requires_grad)
        or (scale_b is not None and scale_b.requires_grad)
        or (out is not None and out.requires_grad)
    ):
        tensor_checks.raise_forward_only(OP, named(a, b, offs, scale_a, scale_b, out))
    if out is None:
        out = torch.empty(
            (a_shape[0], b.shape[2]), dtype=out_dtype or torch.bfloat16, device=a.device
        )
    if (a.data_ptr() | b.data_ptr() | out.data_ptr()) % POINTER_MULTIPLE:
        raise tensor_checks.misaligned((("a", a), ("b", b), ("out", out)), POINTER_MULTIPLE)
    plan(a, b, out, offs, scale_a, scale_b)
    return out


def candidates(problem: Problem, device: Device) -> list[Config]:
    """Every config that can run the problem, for tuners; the reference only if nothing else can."""
    return OPERATION.candidates(problem, device)


def make_plan(problem: Problem, config: Config, device: Device) -> Callable[..., None]:
    """The plan of one config: run(a, b, out, offs, scale_a, scale_b), without any check of them.

    Raises:
      UnsupportedError: the config cannot run the problem on the device.
    """
    return OPERATION.make_plan(problem, config, device)
