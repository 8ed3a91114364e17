"""Backend of matmul's Triton kernels: bf16 and fp16."""

from __future__ import annotations

from stoneware.ops.matmul.spec import SPEC
from stoneware.ops.triton_aot import TritonAot

BACKEND = TritonAot(SPEC)
