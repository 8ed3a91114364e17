"""Checks of tensor arguments that every op makes; each message has rule, value and remedy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from stoneware.errors import ForwardOnlyError, UnsupportedError, quoted
from stoneware.ops.backend import Plan
from stoneware.runtime.device import CPU, Device, cuda_device
from stoneware.runtime.dtypes import DTYPE_NAMES, TORCH_DTYPES
from stoneware.specs.op_spec import OpSpec
from stoneware.specs.problem import UNIT_BYTES, is_free_of_overlap

NamedTensors = Iterable[tuple[str, torch.Tensor | None]]


def check_tensors(spec: OpSpec, *tensors: object) -> list[tuple[str, torch.Tensor | None]]:
    """Returns a call's tensors, in the order of the operator, with their names.

    Raises:
      TypeError: one is neither a dense torch.Tensor nor an absent option.
    """
    named: list[tuple[str, torch.Tensor | None]] = []
    for name, tensor in zip(spec.tensors, tensors):
        if tensor is None:
            if spec.inputs.get(name) == "Tensor":
                raise TypeError(f"{name}=None of {spec.name} must be a torch.Tensor; pass one")
            named.append((name, None))
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{name} of {spec.name} must be a torch.Tensor, not {type(tensor).__name__}; "
                f"wrap it with torch.as_tensor(...)"
            )
        check_memory(name, tensor)
        named.append((name, tensor))
    return named


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """Raises TypeError for a tensor without strides."""
    if tensor.is_nested:
        raise TypeError(
            f"{name} must be one dense tensor, not a nested one; join its parts with torch.cat({name}.unbind())"
        )
    if tensor.layout != torch.strided:
        raise TypeError(f"{name}.layout={tensor.layout} must be torch.strided; copy it with {name}.to_dense()")


_is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_no_torch_dispatch = torch.Tensor.__torch_dispatch__


def is_traced(tensors: Sequence[object]) -> bool:
    """Whether a torch dispatch mode or a tensor's class intercepts operators: torch.export, FakeTensorMode,
    counters of operations, the transforms of torch.func. The checks refuse a nested tensor later."""
    if torch._C._len_torch_dispatch_stack() > 0:
        return True
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and (
            _is_functorch_wrapped(tensor)
            or (type(tensor).__torch_dispatch__ is not _no_torch_dispatch and not tensor.is_nested)
        ):
            return True
    return False


def check_one_device(tensors: NamedTensors) -> Device:
    """Returns the device of all tensors.

    Raises:
      ValueError: two tensors are on different devices.
      UnsupportedError: the device is neither a CPU nor a CUDA GPU.
    """
    present = [(name, tensor) for name, tensor in tensors if tensor is not None]
    first_name, first = present[0]
    for name, tensor in present[1:]:
        if tensor.device != first.device:
            raise ValueError(
                f"{name} is on {tensor.device} and {first_name} on {first.device}, all tensors "
                f"must be on one device; move it with {name}.to({str(first.device)!r})"
            )
    if first.device.type == "cpu":
        return CPU
    if first.device.type == "cuda":
        return cuda_device(first.device.index)
    raise UnsupportedError(
        f"{first_name} is on {first.device}, tensors must be on 'cuda' or 'cpu'; move them with .to('cuda')"
    )


def check_rank(name: str, tensor: torch.Tensor, rank: int, remedy: str) -> None:
    if tensor.ndim != rank:
        raise ValueError(f"{name}.shape={list(tensor.shape)} must have {rank} dimensions, not {tensor.ndim}; {remedy}")


def check_k(op: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Raises ValueError if the operands disagree in k. Sizes may be symbols of a trace."""
    k, b_k = a.shape[-1], b.shape[-2 if b.ndim > 1 else -1]

    def rule() -> str:
        weights = "weights [groups, n, k] as weights.mT" if b.ndim > 2 else "a weight [n, k] as weight.t()"
        return (
            f"a.shape={list(a.shape)} and b.shape={list(b.shape)} of {op} must agree in k, "
            f"{k} is not {b_k}; pass {weights}"
        )

    if not (isinstance(k, int) and isinstance(b_k, int)):
        torch._check_value(k == b_k, rule)
    elif k != b_k:  # not torch's check, which imports modules for tracing
        raise ValueError(rule())


def check_dtype(name: str, tensor: torch.Tensor, allowed: Iterable[str], remedy: str) -> str:
    """Returns the name of the dtype; raises TypeError if it is not in `allowed`."""
    dtypes = [TORCH_DTYPES[dtype] for dtype in allowed]
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}.dtype={tensor.dtype} must be {' or '.join(map(str, dtypes))}; {remedy}")
    return DTYPE_NAMES[tensor.dtype]


def dtype_texts(names: Iterable[str]) -> str:
    """ "torch.bfloat16 or torch.float32" """
    return " or ".join(str(TORCH_DTYPES[name]) for name in names)


def check_out_dtype(out_dtype: object, allowed: Collection[str], *, remedy: str = "cast the result") -> torch.dtype:
    """Returns the dtype if its name is in `allowed`; otherwise raises TypeError."""
    if isinstance(out_dtype, torch.dtype) and DTYPE_NAMES.get(out_dtype) in allowed:
        return out_dtype
    raise TypeError(f"out_dtype={quoted(out_dtype)} must be {dtype_texts(allowed)}; {remedy}")


def check_contiguous_along_k(a: torch.Tensor, b: torch.Tensor) -> None:
    """Raises ValueError unless a is row-major and b column-major."""
    if a.stride(-1) != 1:
        raise ValueError(f"a.stride()={a.stride()} must end in 1, row-major; copy it with a.contiguous()")
    if b.stride(-2) != 1:
        raise ValueError(
            f"b.stride()={b.stride()} must be 1 along k, column-major; pass row-major weights [..., n, k] "
            "as weights.mT, or copy it with b.mT.contiguous().mT"
        )


def check_bias(bias: torch.Tensor, n: int, out_dtype: torch.dtype) -> None:
    if bias.dtype != out_dtype:
        raise TypeError(
            f"bias.dtype={bias.dtype} must be the output's dtype {out_dtype}; cast it with bias.to({out_dtype})"
        )
    if tuple(bias.shape) != (n,):
        raise ValueError(f"bias.shape={list(bias.shape)} must be [n]=[{n}]; reshape it with bias.reshape({n})")


def check_out(out: torch.Tensor, shape: tuple[int, ...], out_dtype: torch.dtype, allowed: Collection[str]) -> None:
    """Raises TypeError or ValueError unless out can hold the result.

    Args:
      allowed: the dtypes that another out_dtype could select.
    """
    if out.dtype != out_dtype:
        is_allowed = DTYPE_NAMES.get(out.dtype) in allowed
        other = f"an out of {dtype_texts(allowed)}, its dtype as out_dtype"
        remedy = f"out_dtype={out.dtype}, or an out of {out_dtype}" if is_allowed else other
        raise TypeError(f"out.dtype={out.dtype} must be {out_dtype}; pass {remedy}")
    if tuple(out.shape) != shape:
        raise ValueError(f"out.shape={list(out.shape)} must be {list(shape)}, the result's; pass an out of this shape")
    if not out.numel():
        return
    if out.ndim and out.shape[-1] > 1 and out.stride(-1) != 1:
        raise ValueError(f"out.stride()={out.stride()} must end in 1, rows that are contiguous; pass a row-major out")
    if not is_free_of_overlap(out.shape, out.stride()):
        raise ValueError(
            f"out.stride()={out.stride()} must keep all elements of shape {list(shape)} apart, or "
            "they would overwrite one another; pass an out that is not expanded"
        )


def needs_gradient(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether autograd has to follow a call with these tensors."""
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors)


def refuse_gradients(op: str, tensors: NamedTensors, *, is_out: bool = False) -> None:
    """Raises ForwardOnlyError if the call needs a gradient: the op has none, or, if `is_out`, none with `out`."""
    if not torch.is_grad_enabled():
        return
    names = [name for name, tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
    if names:
        raise gradient_error(
            f"{op}{' with out=' if is_out else ''} has no backward",
            names,
            "call it under torch.no_grad()",
            "omit out, and copy or add the result to it" if is_out else None,
        )


def gradient_error(lack: str, names: Sequence[str], remedy: str, other: str | None = None) -> ForwardOnlyError:
    """The error of a call that lacks the gradients of some inputs, with a second remedy: `other`, or to detach them."""
    return ForwardOnlyError(
        f"{lack}, and {', '.join(names)} {'requires' if len(names) == 1 else 'require'} a gradient; {remedy}, or "
        + (other or f"pass {', '.join(f'{name}.detach()' for name in names)}")
    )


def refuse_tangents(op: str, tensors: NamedTensors) -> None:
    """Raises ForwardOnlyError if an input has a tangent of forward-mode AD."""
    # Outside of every dual level, the usual case, no tensor has a tangent.
    if forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled():
        names = [
            name
            for name, tensor in tensors
            if isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None
        ]
        if names:
            raise ForwardOnlyError(
                f"{op} has no forward-mode derivative, and {', '.join(names)} "
                f"{'has a tangent' if len(names) == 1 else 'have tangents'}; pass "
                + ", ".join(f"torch.autograd.forward_ad.unpack_dual({name}).primal" for name in names)
            )


def check_addresses(tensors: NamedTensors) -> None:
    """Raises ValueError for tensors whose address is not a multiple of UNIT_BYTES."""
    misaligned = [
        f"{name}.data_ptr()={tensor.data_ptr():#x}"
        for name, tensor in tensors
        if tensor is not None and tensor.data_ptr() % UNIT_BYTES
    ]
    if misaligned:
        raise ValueError(
            f"{', '.join(misaligned)} must be a multiple of {UNIT_BYTES}; copy the view with "
            f".clone(), or start it at an offset of a multiple of {UNIT_BYTES} bytes"
        )


def run_nothing(*tensors: torch.Tensor | None) -> None:
    """The plan for a result without elements."""


Copy = Callable[[torch.Tensor], torch.Tensor]


def strided(**tensors: torch.Tensor | None) -> dict[str, Copy]:
    """The copies that `with_copies` makes of tensors that are not contiguous, whose strides kernels do not
    support. A plan's key includes whether a tensor is contiguous."""
    names = [name for name, tensor in tensors.items() if tensor is not None and not tensor.is_contiguous()]
    return dict.fromkeys(names, torch.Tensor.contiguous)


def dense_like(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor that replaces an out with any strides."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def with_copies(spec: OpSpec, plan: Plan, copies: Mapping[str, Copy]) -> Plan:
    """The plan on copies of the tensors of these names; the copy of out is copied back."""
    if not copies:
        return plan
    copy_at = {spec.plan_order.index(name): copy for name, copy in copies.items()}
    out = spec.plan_order.index("out")

    def run(*tensors: torch.Tensor | None) -> None:
        arguments: list[Any] = list(tensors)
        for position, copy in copy_at.items():
            arguments[position] = copy(arguments[position])
        plan(*arguments)
        if out in copy_at:
            tensors[out].copy_(arguments[out])  # type: ignore[union-attr]

    return run
