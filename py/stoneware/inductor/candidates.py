"""Stoneware's matmuls as external candidates of Inductor's max-autotune (torch._inductor.config.external_matmul)."""

from __future__ import annotations

import torch

from stoneware.ops.matmul.api import matmul


def stoneware_mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """a @ b, by `sw.matmul`, which takes the config that the table chooses; other dtypes by torch.mm.

    Args:
      a: [m, k].
      b: [k, n] of the same dtype.
      out: [m, n] of that dtype, which is written and returned.
    """
    if a.dtype not in (torch.bfloat16, torch.float16):  # Inductor offers a candidate every product
        return torch.mm(a, b, out=out)
    return matmul(a, b, out=out)


def register() -> None:
    """Makes the candidate known to Inductor's generated code, also to code that another process has generated."""
    from torch._inductor.kernel import mm

    mm.lazy_register_extern_choice(stoneware_mm)
