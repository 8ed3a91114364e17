"""Stoneware's kernels for the linear of torchao's `Float8Tensor`, which quantizes x at each call.

    from stoneware.integrations import torchao as engine

    engine.register()       # torch.nn.functional.linear of a Float8Tensor then runs sw.scaled_mm
    engine.unregister()

`sw.nn.convert(model)` is the other way: it turns such layers into `Float8InferenceLinear`, with the same weights.
"""

from __future__ import annotations

from typing import Any

import torch

from stoneware.errors import UnsupportedError
from stoneware.integrations.hosts import unfit
from stoneware.nn import frozen_linear
from stoneware.nn.arguments import FLOATS
from stoneware.nn.published import find_torchao
from stoneware.nn.recipes import why_not

_replaced: dict[Any, Any] = {}
"""Functions of torch -> what torchao ran for them, while Stoneware's is registered."""


def register() -> None:
    """Registers Stoneware's linear for `Float8Tensor`, for this process; a second call does nothing.

    A weight or an x that it does not take goes to torchao's own linear: scales other than those of rows, of the tensor
    or of 128x128 elements, a fixed range of x (`activation_value_lb`), and sizes that are no multiples of 16 or 128.

    Raises:
      UnsupportedError: torchao is missing, or has other interfaces.
    """
    if _replaced:
        return
    try:
        functions, kind = _table()
        own = functions[torch.nn.functional.linear]
    except (ImportError, AttributeError, KeyError) as error:
        raise unfit("torchao", error) from error
    _replaced[torch.nn.functional.linear] = own

    @kind.implements_torch_function(torch.nn.functional.linear)
    def _linear(function: Any, types: Any, args: Any, kwargs: Any) -> torch.Tensor:
        x, weight = args[:2]
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        if isinstance(x, torch.Tensor) and x.dtype in FLOATS and type(weight) is kind:
            published = find_torchao(weight)
            if published is not None and why_not(published.recipe, *reversed(weight.shape)) is None:
                return frozen_linear.linear(x, published.weight, published.scale, bias, published.recipe)
        result: torch.Tensor = own(function, types, args, kwargs)
        return result


def unregister() -> None:
    """Puts torchao's own linear back.

    Raises:
      UnsupportedError: `register` was not called.
    """
    if not _replaced:
        raise UnsupportedError("unregister() must follow register(), which was not called; leave it out")
    functions, _ = _table()
    functions.update(_replaced)
    _replaced.clear()


def _table() -> tuple[Any, Any]:
    """The functions that `Float8Tensor` implements, and that class."""
    from torchao.quantization import Float8Tensor

    return Float8Tensor._TORCH_FN_TABLE[Float8Tensor], Float8Tensor
