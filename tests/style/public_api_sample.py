"""A program on the whole public API, for `mypy --strict` against the installed wheel; nobody runs it."""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
import triton.language as tl

import stoneware as sw
from stoneware.errors import (
    DriverError,
    ForwardOnlyError,
    StonewareError,
    StoreError,
    TableError,
    TuningMismatchError,
    TuningMissError,
    UnsupportedError,
)
from stoneware.kernels.config import Config


def products(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = sw.scaled_mm(a, b, scale, scale, out_dtype=torch.float16, use_fast_accum=False)
    out = sw.matmul(a, b, backend="vendor", out=out)
    out = sw.dropout(out, 0.1, seed=1, offset=torch.tensor(2))
    config: Config = sw.explain("matmul", m=16, n=4096, k=4096).config
    out = sw.matmul(a, b, config=config)
    return sw.grouped_mm(a, b, offs, scale, scale, out_dtype=torch.bfloat16)


def reasons() -> str:
    explanation = sw.explain("scaled_mm", m=16, n=4096, k=7168, scales="block", device="NVIDIA H200")
    plain: dict[str, Any] = explanation.as_dict()
    info = sw.info()
    return f"{json.dumps(plain)} {explanation.step} {explanation.source} {explanation.grade} {info}"


def tuned(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    try:
        with sw.tuning("on_miss", overlay="measured/"):
            return sw.matmul(a, b)
    except TuningMissError as error:
        print(error)
    except DriverError as error:
        call: str = error.call
        code: int = error.code
        print(call, code, error.code_name)
    except (UnsupportedError, ForwardOnlyError, TableError, StoreError, TuningMismatchError) as error:
        base: StonewareError = error
        print(base)
    return None


def tiles(source: str, a: torch.Tensor) -> tuple[tuple[str, str], ...]:
    mm = sw.tile.matmul(m=64, n=64, k=64, a="bf16", b="bf16", enable_backward={"dA"})
    linked = sw.tile.link(source, [mm], needs=sw.tile.needs_of(mm, ["a"]))
    kernel = sw.tile.Kernel(linked, shared_bytes=mm.tile_bytes["A"])
    kernel(a, 1, 0.5, grid=(2, 2))
    with sw.tile.enable_backward(False):
        sw.tile.Module(source, [mm]).kernel("layer", needs={"mm": {"forward"}})(a, 1, 0.5, grid=(1,))
    return linked.matmuls


def compiled(model: torch.nn.Module) -> Any:
    options: dict[str, Any] = sw.inductor.options(matmul_candidates=False)
    return torch.compile(
        model, options={**options, "post_grad_custom_pre_pass": sw.inductor.EpilogueFusion(always=True)}
    )


def ranks(group: torch.distributed.ProcessGroup | None) -> str:
    return sw.distributed.assert_same_tuning(group)


@sw.autotune(configs=[triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})], key=["n"])
@triton.jit  # type: ignore[untyped-decorator]  # Triton's, which has no annotations
def add_one(x: Any, n: Any, BLOCK: tl.constexpr) -> None:
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + idx, tl.load(x + idx, mask=idx < n) + 1, mask=idx < n)


def launch(x: torch.Tensor) -> None:
    add_one[(triton.cdiv(x.numel(), 256),)](x, x.numel())
    print(add_one.best_config)
