"""Compares the operations of a call on tensors with those of the module's trace."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from stoneware.nn.proofs import fx_nodes
from stoneware.nn.proofs.attribute_reads import Reads
from stoneware.nn.proofs.no_proof import NoProof
from stoneware.nn.proofs.tracer import Tracer


def operations(module: torch.nn.Module) -> list[str] | None:
    """The names of the tensor operations in the module's trace; None for torch.nn.RMSNorm, which has no trace."""
    if type(module) is torch.nn.RMSNorm:
        return None
    names = [_name_in_call(module, node) for node in Tracer("forward", Reads({}, {})).trace(module).nodes]
    return sorted(name for name in names if name is not None)


def checked_call(module: torch.nn.Module, x: torch.Tensor, expected: list[str] | None) -> torch.Tensor:
    """module(x), whose tensor operations must be those of its trace.

    Code that checks whether x is a tensor may compute something else with a proxy.

    Raises:
      NoProof: the operations differ.
    """
    with _Recorder() as recorder:
        y: torch.Tensor = module(x)
    if expected is not None and sorted(recorder.names) != expected:
        raise NoProof(f"called with a tensor it computes {', '.join(recorder.names)}, not {', '.join(expected)}")
    return y


class _Recorder(TorchFunctionMode):
    """The names of the operations of a call on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.mode = self._mode()

    def _mode(self) -> tuple[bool, ...]:
        kinds = ("cpu", "cuda")
        return (
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *map(torch.is_autocast_enabled, kinds)
        )  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name != "__get__":
            self.names.append(_plain_name(name))
        if self._mode() != self.mode:
            raise NoProof("its code changes the mode of gradients or of autocast")
        return func(*args, **(kwargs or {}))


def _plain_name(name: str) -> str:
    """The plain name of an operator, reflected or not: "mul" for "__rmul__"."""
    if name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
        return name[1:] if name in ("radd", "rmul", "rsub", "rpow", "rtruediv") else name
    return name


def _name_in_call(module: torch.nn.Module, node: torch.fx.Node) -> str | None:
    """The name of a node's operation on a tensor; None if it has none."""
    if node.op == "call_module":
        return "linear" if isinstance(module.get_submodule(str(node.target)), torch.nn.Linear) else "silu"
    if node.op not in ("call_method", "call_function") or node.target in (getattr, operator.getitem):
        return None
    return _plain_name(fx_nodes.name(node))
