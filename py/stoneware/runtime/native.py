"""Native modules, loaded at first use; a missing module is a reason to print, not an import error."""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from stoneware.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

CALL_MODULE = "stoneware.ops._call"
"""The native module that repeats a call without Python (`stoneware.ops.plan_cache`)."""


@functools.cache
def _try_import(name: str) -> tuple[ModuleType | None, str]:
    try:
        return importlib.import_module(name), ""
    except Exception as error:  # a broken module raises whatever its initialisation does
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return None, (
            f"module {name} is not usable in this Python {version}: "
            f"{type(error).__name__}: {error}; "
            "install the stoneware wheel that is built for this Python"
        )


def why_missing(name: str) -> str | None:
    """Why the native module `name` cannot be imported and what to do; None if it can."""
    return _try_import(name)[1] or None


def load(name: str) -> ModuleType:
    """Imports the native module `name`.

    Raises:
      UnsupportedError: it is not in this installation, or does not fit this Python.
    """
    module, reason = _try_import(name)
    if module is None:
        raise UnsupportedError(reason)
    return module


def plan(launch: Any, ordinal: int) -> Any:
    """A plan (`ops.backend.Plan`) from a native module's, on torch's current stream of its device."""
    import torch
    from torch._C import _cuda_getCurrentRawStream as current_stream

    num_bytes = launch.workspace_bytes

    def run(*tensors: torch.Tensor | None) -> None:
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        if num_bytes:
            # Later work on this stream may have the memory.
            workspace = torch.empty(num_bytes, dtype=torch.uint8, device=torch.device("cuda", ordinal))
            addresses.append(workspace.data_ptr())
        launch(current_stream(ordinal), addresses)

    # fast_call.cc gets it from a plan.
    run.native_launch = launch.native_launch()  # type: ignore[attr-defined]
    return run
