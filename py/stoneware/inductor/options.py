"""The options of torch.compile that make Inductor use Stoneware."""

from __future__ import annotations

from typing import Any

from stoneware.inductor import candidates
from stoneware.inductor.fusion import EpilogueFusion


def options(*, fuse_epilogues: bool = True, matmul_candidates: bool = True) -> dict[str, Any]:
    """The options for torch.compile(model, options=...); they hold for that model alone.

        torch.compile(model, options=sw.inductor.options())
        torch.compile(model, options={"max_autotune": True, **sw.inductor.options()})

    Args:
      fuse_epilogues: a matmul by `sw.matmul`, `sw.scaled_mm` or `sw.grouped_mm` and the pointwise operators after it
        become one call where the tuning table predicts a gain (`EpilogueFusion`).
      matmul_candidates: Inductor times `sw.matmul` as a candidate of each aten.mm in bf16 or fp16. It does so also
        without max-autotune, against torch's kernel alone.

    Returns:
      Names and values of options in torch._inductor.config.
    """
    chosen: dict[str, Any] = {}
    if fuse_epilogues:
        chosen["post_grad_custom_pre_pass"] = EpilogueFusion()
    if matmul_candidates:
        candidates.register()
        chosen["external_matmul"] = [candidates.stoneware_mm]
    return chosen
