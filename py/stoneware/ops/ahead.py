"""Links epilogues ahead of time: for a device that need not be here, from sizes and dtypes without tensors."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from stoneware.epilogue import linked, source
from stoneware.errors import UnsupportedError
from stoneware.kernels.sm90_kernels import BACKEND as SM90
from stoneware.ops import fused_problem, operation_of
from stoneware.runtime.device import Device
from stoneware.runtime.dtypes import TORCH_DTYPES


class Link(NamedTuple):
    """A kernel, and the text of an epilogue that is linked into it."""

    kernel: str
    text: str

    @property
    def is_kept(self) -> bool:
        """Whether the wheel or the disk has the linked cubin."""
        return linked.kept(*self) is not None

    def make(self) -> None:
        """Links it and keeps the cubin on the disk; raises what `linked.now` raises."""
        linked.cubin(*self)


def function_of(name: str) -> fused_problem.Epilogue:
    """The function that "module:function" names.

    Raises:
      ValueError: the module cannot be imported, or has no such function.
    """
    module_name, separator, attribute = name.partition(":")
    if not separator or not module_name or not attribute:
        raise ValueError(f"{name!r} must be an epilogue as module:function; pass for example mypackage.epilogues:gelu")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"the module of {name!r} must be importable, and {error.name} is not found; install it, or add its folder "
            "to PYTHONPATH"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"{name!r} must name a function, and {module_name} has no function {attribute}; correct it")
    return function


def link_of(
    op: str,
    function: fused_problem.Epilogue,
    inputs: Sequence[torch.Tensor],
    device: Device,
    *,
    out_dtype: str,
    has_gradients: bool = False,
    **sizes: Any,
) -> Link:
    """What a call of the op on a device links.

    Args:
      op: its name.
      function: the epilogue.
      inputs: of the epilogue; tensors on the device "meta" are enough. Their addresses are taken to be aligned.
      device: that runs it.
      out_dtype: of the call, "bf16", "fp16" or "fp32".
      has_gradients: whether the call needs gradients.
      **sizes: m, n, k, and what else `OpSpec.make_problem` takes.

    Raises:
      What the call raises, and
      UnsupportedError: the call would not be fused.
    """
    dtype = TORCH_DTYPES[out_dtype]
    operation = operation_of(op)
    narrow = {"out_dtype": "bf16" if out_dtype == "fp32" else out_dtype}
    problem = operation.spec.make_problem(**sizes, **narrow)
    if getattr(problem, "batch", 1) != 1:
        raise UnsupportedError(f"{problem} must be one matmul to be fused, and is a batch; leave batch out")
    if has_gradients:
        function = fused_problem.with_sums(function, TORCH_DTYPES[narrow["out_dtype"]])
    expression = fused_problem.traced(function, (problem.m, problem.n), dtype, inputs, torch.device("cpu"))
    decision = operation.decide(problem, device, backend=SM90, lists_refusals=False, only_open=True)
    main = fused_problem.main_output(expression, TORCH_DTYPES[problem.out_dtype])
    text = source.write(expression, main=main, has_pairs=[True] * len(inputs)).text
    return Link(decision.config.kernel, text)
