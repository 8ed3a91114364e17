"""The names of torch's dtypes in keys, configs and samples."""

from __future__ import annotations

import torch

from stoneware.runtime import torch_interface

torch_interface.check(torch)

DTYPE_NAMES = {
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
