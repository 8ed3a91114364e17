"""The epilogues that the build links, as users write them, and their texts.

    ./bazelw run //tools/linked_epilogues:epilogues

writes texts.json, so that the build needs no torch. tests/epilogue checks that it is up to date.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from stoneware.epilogue import source
from stoneware.ops import fused_problem

_M, _N = 24, 64
"""A size like any other: rows that are multiples of 16 bytes, more than one of them."""

_BIAS = torch.empty(_N, dtype=torch.bfloat16, device="meta")
_FULL = torch.empty(_M, _N, dtype=torch.bfloat16, device="meta")
_ROWS = torch.empty(_M, 1, device="meta")
_SCALAR = torch.empty((), device="meta")
_FP8 = torch.float8_e4m3fn


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    return functional.silu(x[..., 0::2]) * x[..., 1::2]


EPILOGUES: Mapping[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "relu": (torch.relu, ()),
    "square of relu": (lambda acc: torch.relu(acc) ** 2, ()),
    "gelu": (functional.gelu, ()),
    "gelu by tanh": (_gelu_tanh, ()),
    "silu": (functional.silu, ()),
    "sigmoid": (torch.sigmoid, ()),
    "tanh": (torch.tanh, ()),
    "bias, or a residual of one row": (lambda acc, b: acc + b, (_BIAS,)),
    "gelu of a bias": (lambda acc, b: functional.gelu(acc + b), (_BIAS,)),
    "gelu by tanh of a bias": (lambda acc, b: _gelu_tanh(acc + b), (_BIAS,)),
    "residual": (lambda acc, r: acc + r, (_FULL,)),
    "bias and residual": (lambda acc, b, r: acc + b + r, (_BIAS, _FULL)),
    "gelu and residual": (lambda acc, r: functional.gelu(acc) + r, (_FULL,)),
    "gelu of a bias, and residual": (lambda acc, b, r: functional.gelu(acc + b) + r, (_BIAS, _FULL)),
    "product": (lambda acc, g: acc * g, (_FULL,)),
    "silu times a tensor": (lambda acc, g: functional.silu(acc) * g, (_FULL,)),
    "silu times a row": (lambda acc, g: functional.silu(acc) * g, (_BIAS,)),
    "swiglu": (_swiglu, ()),
    "swiglu in fp8": (lambda acc, s: (_swiglu(acc) * s).to(_FP8), (_SCALAR,)),
    "scale": (lambda acc, s: acc * s, (_SCALAR,)),
    "scale to fp8": (lambda acc, s: (acc * s).to(_FP8), (_SCALAR,)),
    "scales of rows to fp8": (lambda acc, s: (acc * s).to(_FP8), (_ROWS,)),
    "row maximum": (lambda acc: (acc, acc.abs().amax(-1)), ()),
}
"""Name -> function, and its inputs."""


def texts() -> dict[str, str]:
    """The text of each epilogue, for a bf16 result."""
    written = {}
    for name, (function, inputs) in EPILOGUES.items():
        expression = fused_problem.traced(function, (_M, _N), torch.bfloat16, inputs, torch.device("cpu"))
        main = fused_problem.main_output(expression, torch.bfloat16)
        written[name] = source.write(expression, main=main, has_pairs=[True] * len(inputs)).text
    return written


def as_file() -> str:
    """The content of texts.json."""
    return json.dumps(texts(), indent=1) + "\n"


if __name__ == "__main__":
    folder = pathlib.Path(os.environ["BUILD_WORKSPACE_DIRECTORY"], "tools/linked_epilogues")
    (folder / "texts.json").write_text(as_file(), encoding="ascii")
