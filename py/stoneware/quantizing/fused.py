"""Plans that quantize what they compute: rows of silu(gate) * up, of a norm, of a gradient times the scales of a
weight, and the gradients of silu(gate) * up; these without quantizing; and the transpose of fp8 values.

They round to the dtype of their inputs where torch does, and then to fp8 with a scale for each row, like
`sw.quantize`; silu(gate) * up also with one for each 1 x 128 elements. Each plan is one or several kernels, or plain
torch where no kernel runs.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch

from stoneware.ops import tensor_checks
from stoneware.quantizing import kernels, reference
from stoneware.runtime.device import Device

_DTYPE = torch.float8_e4m3fn


def silu_mul_plan(z: torch.Tensor, power_of_two: bool, scales: str = "row") -> Any:
    """plan(z, y8, scale): y = silu(z[:, :k]) * z[:, k:], each of the two rounded to z's dtype; or None.

    It is None where z has more rows than the kernel takes, and the ops, which have kernels, need less time and memory
    than plain torch.

    Args:
      z: [m, 2 k], like that of the calls.
      scales: "row" or "block", see `sw.quantize`; the scales have its layout.
    """

    def run(z: torch.Tensor, y8: torch.Tensor, scale: torch.Tensor) -> None:
        _store(silu_mul(z), power_of_two, y8, scale, scales=scales)

    if scales == "block":
        device = tensor_checks.check_one_device([("z", z)])
        if not _has_kernels(device, z) or z.shape[1] // 2 % kernels.MULTIPLE:
            return run
        return kernels.silu_mul_runs_plan(z, power_of_two, device) if len(z) <= kernels.MOST_TILE_ROWS else None
    k = z.shape[1] // 2
    return _rows_plan(functools.partial(kernels.rows_plan, "silu_mul", z, k, 3, [int(power_of_two)]), {"z": z}, k, run)


def silu_mul(z: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up [..., k] in torch, from z [..., 2 k]: gate, then up."""
    gate, up = z.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def activation_plan(gate: torch.Tensor, up: torch.Tensor) -> Any:
    """plan(gate, up, h): h = silu(gate) * up, each of the two rounded.

    Args:
      gate, up: [m, n] of one dtype, like those of the calls.
    """
    device = tensor_checks.check_one_device([("gate", gate), ("up", up)])
    if gate.stride() == up.stride() and _has_tiles(device, gate, up):
        return kernels.silu_mul_plan(gate, device)

    def run(gate: torch.Tensor, up: torch.Tensor, h: torch.Tensor) -> None:
        h.copy_(torch.nn.functional.silu(gate) * up)

    return run


def activation_grad_plan(gate: torch.Tensor, up: torch.Tensor, dh: torch.Tensor) -> Any:
    """plan(gate, up, dh, dgate, dup): the gradients of silu(gate) * up.

    Args:
      gate, up, dh: [m, n] of one dtype, like those of the calls.
    """
    device = tensor_checks.check_one_device([("gate", gate), ("up", up), ("dh", dh)])
    if gate.stride() == up.stride() and dh.is_contiguous() and _has_tiles(device, gate, up, dh):
        return kernels.silu_mul_grad_plan(gate, device)

    def run(gate: torch.Tensor, up: torch.Tensor, dh: torch.Tensor, dgate: torch.Tensor, dup: torch.Tensor) -> None:
        for output, gradient in zip((dgate, dup), _activation_grad(gate, up, dh)):
            output.copy_(gradient)

    return run


def _activation_grad(gate: torch.Tensor, up: torch.Tensor, dh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.aten.silu_backward(dh * up, gate), dh * torch.nn.functional.silu(gate)


def swiglu_grad_plan(z: torch.Tensor, dh: torch.Tensor, power_of_two: bool, factors: torch.Tensor | None = None) -> Any:
    """plan(z, dh, *factors, dz8, scale, dzt8, scale_t, ht8, scale_h, *partials): the gradient of z, and h, with
    h = silu(z[:, :n]) * z[:, n:].

    Args:
      z, dh: [m, 2 n] and [m, n], dense, like those of the calls.
      factors: [2 n, 1] float32, like that of the calls; dz8 is then that of the gradient times factors in float32.

    The outputs are [m, 2 n], [2 n, m] and [n, m] in e4m3 with scales of their rows [..., 1]; `partials` have the
    shapes `kernels.swiglu_partial_shapes`, int32.
    """
    device = tensor_checks.check_one_device([("z", z), ("dh", dh)])
    n = dh.shape[1]
    is_scaled = factors is not None
    is_plain = z.is_contiguous() and dh.is_contiguous() and len(z) % kernels.MULTIPLE == 0
    if is_plain and (factors is None or _are_aligned(factors)) and _has_kernels(device, z, dh):
        return kernels.swiglu_grad_plan(z, power_of_two, device, is_scaled=is_scaled)

    def run(z: torch.Tensor, dh: torch.Tensor, *others: torch.Tensor) -> None:
        gate, up, outputs = z[:, :n], z[:, n:], others[is_scaled:]
        dz = torch.cat(_activation_grad(gate, up, dh), 1)
        plain = dz.float() * others[0].reshape(1, -1) if is_scaled else dz
        for position, values in enumerate((plain, dz.t(), (torch.nn.functional.silu(gate) * up).t())):
            _store(values, power_of_two, *outputs[2 * position : 2 * position + 2])

    return run


def _has_tiles(device: Device, *tensors: torch.Tensor) -> bool:
    """Whether the kernels of the activation take these matrices in 16 bits."""
    return len(tensors[0]) <= kernels.MOST_TILE_ROWS and _has_kernels(device, *tensors)


def _has_kernels(device: Device, *tensors: torch.Tensor) -> bool:
    """Whether kernels take these matrices in 16 bits."""
    return all(
        tensor.numel() > 0
        and tensor.dtype == tensors[0].dtype
        and tensor.stride(1) == 1
        and tensor.shape[1] % kernels.MULTIPLE == 0
        and kernels.why_not(tensor, "row", "e4m3", False, device) is None
        for tensor in tensors
    )


def rms_norm_plan(x: torch.Tensor, weight: torch.Tensor, epsilon: float, power_of_two: bool) -> Any:
    """plan(x, weight, y, y8, scale): y = rms_norm(x) * weight, computed in float32 and rounded once.

    Args:
      x, weight: [m, k] and [k], like those of the calls.
    """
    k = x.shape[1]
    is_plain = weight.dtype == x.dtype and k <= kernels.ROW_BLOCKS[-1]

    def run(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, y8: torch.Tensor, scale: torch.Tensor) -> None:
        y.copy_(torch.nn.functional.rms_norm(x, (k,), weight, epsilon))
        _store(y, power_of_two, y8, scale)

    plan = functools.partial(kernels.rows_plan, "rms_norm", x, k, 5, [bits(epsilon), int(power_of_two)])
    return _rows_plan(plan, {"x": x, "weight": weight}, k, run, is_plain=is_plain)


def scaled_rows_plan(x: torch.Tensor, factors: torch.Tensor, power_of_two: bool) -> Any:
    """plan(x, factors, x8, scale): x * factors in float32, quantized with a scale for each row.

    Args:
      x, factors: like those of the calls, [m, k], and [k] float32 of any shape.
    """

    def run(x: torch.Tensor, factors: torch.Tensor, x8: torch.Tensor, scale: torch.Tensor) -> None:
        _store(x.float() * factors.reshape(1, -1), power_of_two, x8, scale)

    plan = functools.partial(kernels.scaled_rows_plan, x, power_of_two)
    return _rows_plan(plan, {"x": x, "factors": factors}, x.shape[1], run)


def transpose_plan(*parts: torch.Tensor) -> Any:
    """plan(*parts, xt8, ones): the transpose of the rows of the parts, dense, and 1 for each of its rows.

    Args:
      parts: [m, k] each, fp8, like those of the calls.
    """
    device = tensor_checks.check_one_device([("x8", part) for part in parts])
    if kernels.is_built(device) and all(
        part.is_contiguous()
        and part.numel()
        and not any(size % kernels.MULTIPLE for size in (*part.shape, part.data_ptr()))
        for part in parts
    ):
        return kernels.transpose_plan(parts, device)

    def run(*tensors: torch.Tensor) -> None:
        *parts, xt8, ones = tensors
        torch.cat([part.t() for part in parts], 1, out=xt8)
        ones.fill_(1)

    return run


def bits(number: float) -> int:
    """The bits of a number in float32, which is how a kernel takes it."""
    (value,) = struct.unpack("i", struct.pack("f", number))
    return int(value)


def _rows_plan(
    plan: Callable[[Device], Any],
    inputs: Mapping[str, torch.Tensor],
    k: int,
    run: Callable[..., None],
    *,
    is_plain: bool = True,
) -> Any:
    """The kernel's plan, or `run` if no kernel takes these inputs, x and factors of its k."""
    device = tensor_checks.check_one_device(inputs.items())
    x, *factors = inputs.values()
    is_plain &= _are_aligned(*factors)
    if (
        is_plain
        and x.numel()
        and x.stride(1) == 1
        and k % kernels.MULTIPLE == 0
        and kernels.why_not(x, "row", "e4m3", False, device) is None
    ):
        return plan(device)
    return run


def _are_aligned(*factors: torch.Tensor) -> bool:
    return all(factor.is_contiguous() and factor.data_ptr() % kernels.MULTIPLE == 0 for factor in factors)


def _store(y: torch.Tensor, power_of_two: bool, y8: torch.Tensor, scale: torch.Tensor, *, scales: str = "row") -> None:
    values, exact_scale = reference.quantize(y, scales, _DTYPE, power_of_two)
    y8.copy_(values)
    scale.copy_(exact_scale)
