"""What the benchmark times: families of matmuls, each with its workloads, operands, ours and peers.

Imports torch alone: Stoneware is imported by `Call.load`, so that first_call.py can time that.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

OURS = "stoneware"
BLOCK = 128
"""Elements of k, and columns of b, that share a block scale."""

TOKENS = (1, 16, 64, 128, 512, 2048, 8192)
"""The m of dense products: decoding one by one and in batches, up to a prefill."""

TOKENS_PER_EXPERT = (1, 16, 128, 1024)
MAX_ROUTED_TOKENS = 65536
"""Rows of a grouped product at most: more take seconds and tell nothing new."""

Run = Callable[[torch.Tensor | None], torch.Tensor]
"""Makes the product into the tensor given, or into one that it allocates."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One product: a [m, k] times b [k, n] or, with groups, [groups, k, n]; m is of all groups."""

    layer: str
    m: int
    n: int
    k: int
    groups: int = 0


FIRST = Workload(layer="first", m=16, n=4096, k=4096)
"""Of first calls and of host time: so small that the host is what takes time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One way to make the product.

    Attributes:
      load: imports what is needed and gives the call.
      scales: (scale_a, scale_b) that it multiplies by, or empty.
      takes_out: whether it can write to a given tensor.
    """

    load: Callable[[], Run]
    scales: tuple[torch.Tensor, ...] = ()
    takes_out: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Operands of one workload and the calls, ours first.

    Attributes:
      a: [m, k] row-major.
      b: [k, n] or [groups, k, n], column-major.
      ends: the row after each group's last; empty without groups.
      out: [m, n] bfloat16.
      calls: by name.
    """

    a: torch.Tensor
    b: torch.Tensor
    ends: Sequence[int]
    out: torch.Tensor
    calls: Mapping[str, Call]

    @property
    def weight_bytes(self) -> int:
        """Bytes of b, without the groups that have no row."""
        if self.b.dim() == 2:
            return self.b.numel() * self.b.element_size()
        begins = [0, *self.ends[:-1]]
        used = sum(begin < end for begin, end in zip(begins, self.ends))
        return used * self.b[0].numel() * self.b.element_size()

    @property
    def num_bytes(self) -> int:
        """Bytes of a, b and out, each once."""
        of_a = self.a.numel() * self.a.element_size()
        return of_a + self.weight_bytes + self.out.numel() * self.out.element_size()

    def expected(self, call: Call) -> torch.Tensor:
        """[m, n] float32: the product in float64 arithmetic with the scales of `call`."""
        from stoneware.measuring.operands import multiply

        result = torch.empty(self.out.shape, dtype=torch.float32, device=self.out.device)
        if self.b.dim() == 2:
            multiply(result, self.a, self.b, *call.scales, block=BLOCK)
            return result
        for group, (begin, end) in enumerate(zip([0, *self.ends[:-1]], self.ends)):
            if begin < end:
                rows = slice(begin, end)
                of_group = (call.scales[0][rows, None], call.scales[1][group][None]) if call.scales else ()
                multiply(result[rows], self.a[rows], self.b[group], *of_group)
        return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of matmul.

    Attributes:
      name, title: for flags, and for people.
      op: of Stoneware.
      dtype: of a and b, as Stoneware names it; the result is bf16.
      make: draws operands.
      rival: the peer whose first call is timed too.
      workloads: the workloads for weights of "bench" or "all".
      problem: what the op's `make_problem` wants besides the sizes.
      first: the workload of first calls and of host time.
    """

    name: str
    title: str
    op: str
    dtype: str
    make: Callable[[Workload, torch.device], Case]
    rival: str
    workloads: Callable[[str], list[Workload]]
    problem: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    first: Workload = FIRST


def _row_scales(workload: Workload, device: torch.device) -> Case:
    m, n = workload.m, workload.n
    a, b = _dense(workload, torch.float8_e4m3fn, device)
    row = (_scale(m, 1, device), _scale(1, n, device))
    tensor = (_scale(1, 1, device), _scale(1, 1, device))

    def torch_scaled_mm(scale_a: torch.Tensor, scale_b: torch.Tensor) -> Run:
        return lambda out: torch._scaled_mm(
            a, b, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True, out=out
        )

    calls = {
        OURS: Call(load=_scaled_mm(a, b, *row), scales=row),
        "torch_row": Call(load=lambda: torch_scaled_mm(*row), scales=row),
        "torch_tensor": Call(load=lambda: torch_scaled_mm(*tensor), scales=tensor),
    }
    return _case(a, b, calls)


def _block_scales(workload: Workload, device: torch.device) -> Case:
    m, n, k = workload.m, workload.n, workload.k
    a, b = _dense(workload, torch.float8_e4m3fn, device)
    # The layouts that torch asks for: both "outer-dimension-major", the rows of scale_b in fours.
    num_blocks = k // BLOCK
    scale_a = _scale(num_blocks, m, device).t()
    padded_b = _scale(-(-n // BLOCK), -(-num_blocks // 4) * 4, device).t()
    scales = (scale_a, padded_b[:num_blocks])
    of_a, of_b = [4], [5]  # BlockWise1x128, BlockWise128x128 of torch.nn.functional.ScalingType

    def run_torch(out: torch.Tensor | None) -> torch.Tensor:
        # What torch.nn.functional.scaled_mm calls, which takes no out.
        return torch._scaled_mm_v2(
            a, b, [scale_a], of_a, [], [padded_b], of_b, [], None, torch.bfloat16, [], False, out=out
        )

    calls = {
        OURS: Call(load=_scaled_mm(a, b, *scales), scales=scales),
        "torch_block": Call(load=lambda: run_torch, scales=scales),
    }
    return _case(a, b, calls)


def _dense_bf16(workload: Workload, device: torch.device) -> Case:
    a, b = _dense(workload, torch.bfloat16, device)
    ours = _ours("matmul", lambda matmul: lambda out: matmul(a, b, out=out))
    calls = {OURS: Call(load=ours), "torch_mm": Call(load=lambda: lambda out: torch.mm(a, b, out=out))}
    return _case(a, b, calls)


def _grouped_bf16(workload: Workload, device: torch.device) -> Case:
    a, b, ends, offs = _routed(workload, torch.bfloat16, device)
    ours = _ours("grouped_mm", lambda grouped_mm: lambda out: grouped_mm(a, b, offs, out=out))

    def run_torch(out: torch.Tensor | None) -> torch.Tensor:
        return torch._grouped_mm(a, b, offs=offs)

    calls = {OURS: Call(load=ours), "torch_grouped": Call(load=lambda: run_torch, takes_out=False)}
    return _case(a, b, calls, ends)


def _grouped_fp8(workload: Workload, device: torch.device) -> Case:
    a, b, ends, offs = _routed(workload, torch.float8_e4m3fn, device)
    scales = scale_a, scale_b = _scale(1, workload.m, device)[0], _scale(workload.groups, workload.n, device)
    ours = _ours(
        "grouped_mm",
        lambda grouped_mm: lambda out: grouped_mm(a, b, offs, scale_a, scale_b, out_dtype=torch.bfloat16, out=out),
    )

    def run_torch(out: torch.Tensor | None) -> torch.Tensor:
        return torch._scaled_grouped_mm(
            a, b, scale_a, scale_b, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    calls = {
        OURS: Call(load=ours, scales=scales),
        "torch_grouped": Call(load=lambda: run_torch, scales=scales, takes_out=False),
    }
    return _case(a, b, calls, ends)


def _ours(op: str, bind: Callable[[Callable[..., torch.Tensor]], Run]) -> Callable[[], Run]:
    """Imports the op of Stoneware, and binds operands to it."""
    return lambda: bind(getattr(importlib.import_module("stoneware"), op))


def _scaled_mm(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> Callable[[], Run]:
    return _ours(
        "scaled_mm", lambda scaled_mm: lambda out: scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16, out=out)
    )


def _case(a: torch.Tensor, b: torch.Tensor, calls: Mapping[str, Call], ends: Sequence[int] = ()) -> Case:
    out = torch.empty(a.shape[0], b.shape[-1], dtype=torch.bfloat16, device=a.device)
    return Case(a=a, b=b, ends=ends, out=out, calls=calls)


def _dense(workload: Workload, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = (_random(rows, workload.k, dtype, device) for rows in (workload.m, workload.n))
    return a, b.t()


def _random(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, columns, device=device).to(dtype)


def _scale(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """float32 in [0.5, 1.5)."""
    return torch.rand(rows, columns, device=device) + 0.5


def _routed(
    workload: Workload, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, list[int], torch.Tensor]:
    """a, b, the groups' ends on the host and on the device; each token's expert drawn uniformly."""
    m, n, k, groups = workload.m, workload.n, workload.k, workload.groups
    counts = torch.bincount(torch.randint(groups, (m,)), minlength=groups)
    ends = counts.cumsum(0).tolist()
    weights = torch.empty(groups, n, k, dtype=dtype, device=device)
    for group in range(groups):
        weights[group] = _random(n, k, dtype, device)  # one at a time: float32 takes four times fp8
    offs = torch.tensor(ends, dtype=torch.int32, device=device)
    return _random(m, k, dtype, device), weights.mT, ends, offs


def _dense_workloads(weights: str, k_multiple: int = 16) -> list[Workload]:
    shapes = importlib.import_module("stoneware.specs.scaled_mm")
    chosen = shapes.WEIGHTS if weights == "all" else shapes.BENCH_WEIGHTS
    return [
        Workload(layer=layer, m=m, n=n, k=k) for layer, (n, k) in chosen.items() if k % k_multiple == 0 for m in TOKENS
    ]


def _expert_workloads(weights: str) -> list[Workload]:
    shapes = importlib.import_module("stoneware.specs.grouped_mm")
    return [
        Workload(layer=layer, m=groups * tokens, n=n, k=k, groups=groups)
        for layer, (groups, n, k) in shapes.EXPERTS.items()
        for tokens in TOKENS_PER_EXPERT
        if groups * tokens <= MAX_ROUTED_TOKENS
    ]


_FIRST_GROUPED = Workload(layer="first", m=128, n=2048, k=768, groups=8)

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="scaled_mm",
            title="scaled_mm, fp8 with row scales",
            op="scaled_mm",
            dtype="e4m3",
            workloads=_dense_workloads,
            make=_row_scales,
            rival="torch_row",
        ),
        Family(
            name="scaled_mm_block",
            title="scaled_mm, fp8 with block scales 1x128 and 128x128",
            op="scaled_mm",
            dtype="e4m3",
            problem={"scales": "block"},
            workloads=lambda weights: _dense_workloads(weights, BLOCK),
            make=_block_scales,
            rival="torch_block",
        ),
        Family(
            name="matmul",
            title="matmul, bf16",
            op="matmul",
            dtype="bf16",
            workloads=_dense_workloads,
            make=_dense_bf16,
            rival="torch_mm",
        ),
        Family(
            name="grouped_mm",
            title="grouped_mm, bf16",
            op="grouped_mm",
            dtype="bf16",
            problem={"dtype": "bf16"},
            workloads=_expert_workloads,
            make=_grouped_bf16,
            rival="torch_grouped",
            first=_FIRST_GROUPED,
        ),
        Family(
            name="grouped_mm_fp8",
            title="grouped_mm, fp8 with row scales",
            op="grouped_mm",
            dtype="e4m3",
            problem={"dtype": "e4m3"},
            workloads=_expert_workloads,
            make=_grouped_fp8,
            rival="torch_grouped",
            first=_FIRST_GROUPED,
        ),
    )
}
"""In the order of the report."""
