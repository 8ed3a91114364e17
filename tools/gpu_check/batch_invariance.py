"""Proves `sw.batch_invariant` on this GPU, and measures what it costs.

    python -m tools.gpu_check.batch_invariance --out DIR [--pairs 20000] [--seed 1] [--cost_seconds 60]

Bits: draws products, and runs each with every config that may run in this mode, and with the one that
is chosen, on all rows and on parts of them. A pair is one such run; every row must have the bits that
it has in the first run. The operands make rounding visible (vendor_bits.py). `digest` is over all
operands and results: two GPUs of a capability that draw alike give the same one.

Cost: the config that is chosen in this mode next to the free choice and torch's own kernel,
interleaved, with a cold L2, at the shapes of the benchmark and at others that no table has. Every
result is compared with float64 first.

The exit code is 1 if a row differed or a value was wrong. experiment.py has the rest.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from absl import flags

import stoneware as sw
from stoneware.errors import UnsupportedError
from stoneware.kernels import sm90_kernels
from stoneware.kernels.config import Config
from stoneware.measuring import operands
from stoneware.measuring.device_timer import DeviceTimer
from stoneware.ops import operation_of, vendor_bits
from stoneware.runtime.device import Device, cuda_device
from stoneware.specs import spec_of
from tools.gpu_check import bench_cases
from tools.gpu_check.experiment import Call, Experiment, Prepared, Row

ROWS = 640
PARTS = ((0, 1), (17, 1), (3, 7), (37, 32), (5, 100), (256, 128), (77, 300), (0, ROWS))
"""First row and number of rows of the runs."""

KINDS: dict[str, dict[str, Any]] = {
    "bf16 nt": {"op": "matmul", "dtype": "bf16"},
    "bf16 nt bias": {"op": "matmul", "dtype": "bf16", "has_bias": True},
    "fp16 nt": {"op": "matmul", "dtype": "fp16"},
    "bf16 nn": {"op": "matmul", "dtype": "bf16", "layout": "nn"},
    "fp8 row": {"op": "scaled_mm"},
    "fp8 row bias": {"op": "scaled_mm", "has_bias": True},
    "fp8 row fp16": {"op": "scaled_mm", "out_dtype": "fp16"},
    "fp8 tensor": {"op": "scaled_mm", "scales": "tensor"},
    "fp8 row slow": {"op": "scaled_mm", "use_fast_accum": False},
    "fp8 block": {"op": "scaled_mm", "scales": "block"},
    "bf16 grouped": {"op": "grouped_mm", "dtype": "bf16"},
    "fp8 grouped": {"op": "grouped_mm"},
    "fp8 block grouped": {"op": "grouped_mm", "scales": "block"},
}

RowsCall = Callable[[slice, Config | None], torch.Tensor]


def _drawn_sizes(rng: random.Random, kind: str) -> tuple[int, int]:
    unit = 128 if KINDS[kind].get("scales") == "block" else 16
    n = 16 * round(2 ** rng.uniform(4, 8.5))
    return n, max(unit, unit * round(2 ** rng.uniform(8, 13.5) / unit))


def _call(kind: str, n: int, k: int) -> tuple[RowsCall, list[torch.Tensor]]:
    """A call on rows of operands that are drawn here, and the operands."""
    described = KINDS[kind]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(described.get("dtype", ""), torch.float8_e4m3fn)
    out_dtype = torch.float16 if "fp16" in kind else torch.bfloat16
    a, b = torch.randn(ROWS, k, device="cuda").to(dtype), torch.randn(n, k, device="cuda").to(dtype)
    vendor_bits.cancel(a, b.t())
    scale_a, scale_b = (torch.rand(size, device="cuda") + 0.5 for size in (ROWS, n))
    bias = torch.randn(n, device="cuda").to(out_dtype) if described.get("has_bias") else None
    tensors = [a, b, scale_a, scale_b] + ([bias] if bias is not None else [])

    def poisoned(rows: slice) -> torch.Tensor:
        return torch.full((rows.stop - rows.start, n), math.nan, device="cuda", dtype=out_dtype)

    def matmul(rows: slice, config: Config | None) -> torch.Tensor:
        weight = b.t().contiguous() if described.get("layout") == "nn" else b.t()
        return sw.matmul(a[rows], weight, bias, out=poisoned(rows), config=config)

    def block_scales(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        blocks, columns = k // 128, -(-n // 128)
        # As torch wants them: columns of scale_a, padded rows of scale_b.
        drawn_a = (scale_a[:, None] * (1 + torch.arange(blocks, device="cuda") % 7)).t()[:, rows].contiguous()
        drawn_b = torch.ones(columns, -(-blocks // 4) * 4, device="cuda") * scale_b[:columns, None]
        return drawn_a.t(), drawn_b.t()

    def scaled_mm(rows: slice, config: Config | None) -> torch.Tensor:
        scales = scale_a[rows, None], scale_b[None]
        if described.get("scales") == "tensor":
            scales = scale_a[:1], scale_b[:1]
        if described.get("scales") == "block":
            scales = block_scales(rows)
        fast = described.get("use_fast_accum", True)
        return sw.scaled_mm(
            a[rows], b.t(), *scales, bias, out_dtype, out=poisoned(rows), config=config, use_fast_accum=fast
        )

    def grouped_mm(rows: slice, config: Config | None) -> torch.Tensor:
        count = rows.stop - rows.start
        # All groups have one matrix, so that a row is the same in whatever group it is.
        ends = [count // 3, count // 3, count // 2, count]
        offs = torch.tensor(ends, device="cuda", dtype=torch.int32)
        weights = b.expand(len(ends), n, k).contiguous().mT
        scales: tuple[torch.Tensor, ...] = ()
        if described.get("scales") == "block":
            of_a, of_b = block_scales(rows)
            scales = of_a, of_b[: k // 128].expand(len(ends), -1, -1)
        elif dtype != torch.bfloat16:
            scales = scale_a[rows], scale_b.expand(len(ends), n).contiguous()
        return sw.grouped_mm(a[rows], weights, offs, *scales, out=poisoned(rows), config=config)

    return {"matmul": matmul, "scaled_mm": scaled_mm, "grouped_mm": grouped_mm}[described["op"]], tensors


def _configs(op: str) -> list[Config]:
    """Every config of ours that may have the order; a call refuses those of other dtypes."""
    configs = []
    for record in sm90_kernels.kernels(op):
        assert record.config.get("sum_chunk") is not None, f"{record.id} states no order of its sums"
        configs.append(Config(backend=record.backend, kernel=record.id))
        if op != "grouped_mm" and record.config["schedule"] in sm90_kernels.TILE_SCHEDULED:
            configs.append(Config(backend=record.backend, kernel=record.id, max_swizzle=4))
    return configs


def bits(pairs: int, seed: int) -> dict[str, Any]:
    """Compares rows of all kinds in turn until there are this many pairs."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    digest = hashlib.sha256()
    by_kind: dict[str, dict[str, int]] = {
        kind: {"products": 0, "pairs": 0, "rows": 0, "rows_that_differ": 0, "configs": 0} for kind in KINDS
    }
    differing = []
    while sum(counts["pairs"] for counts in by_kind.values()) < pairs:
        for kind, counts in by_kind.items():
            n, k = _drawn_sizes(rng, kind)
            call, tensors = _call(kind, n, k)
            for tensor in tensors:
                digest.update(tensor.view(torch.uint8).cpu().numpy().tobytes())
            expected: torch.Tensor | None = None
            counts["products"] += 1
            num_configs = 0
            for config in [*_configs(KINDS[kind]["op"]), None]:
                try:
                    whole = _bits(call(slice(0, ROWS), config))
                except UnsupportedError as error:
                    if config is None:
                        raise AssertionError(f"{kind} n={n} k={k} runs no kernel") from error
                    continue
                num_configs += 1
                expected = whole if expected is None else expected
                for begin, count in PARTS:
                    part = whole if count == ROWS else _bits(call(slice(begin, begin + count), config))
                    wrong = int((part != expected[begin : begin + count]).any(1).sum())
                    counts["pairs"] += 1
                    counts["rows"] += count
                    counts["rows_that_differ"] += wrong
                    if wrong:
                        differing.append(f"{kind} n={n} k={k} rows {begin}+{count} {config}: {wrong} rows")
            assert expected is not None
            digest.update(expected.cpu().numpy().tobytes())
            counts["configs"] = max(counts["configs"], num_configs)
    return {"by_kind": by_kind, "digest": digest.hexdigest(), "differing": differing[:100]}


def _bits(out: torch.Tensor) -> torch.Tensor:
    return out.view(torch.int16)


LAYERS = {  # n, k of layers that no table has, apart and cut for tensor parallelism
    "gemma2_9b": [(4096, 3584), (2048, 3584), (3584, 4096), (14336, 3584), (3584, 14336)],
    "mistral_small": [(4096, 5120), (1024, 5120), (5120, 4096), (32768, 5120), (5120, 32768)],
    "phi4": [(5120, 5120), (1280, 5120), (17920, 5120), (5120, 17920)],
    "qwen3_32b_tp2": [(4096, 5120), (512, 5120), (5120, 4096), (12800, 5120), (5120, 12800)],
}
COST_ROWS = (1, 16, 64, 128, 300, 512, 1024, 2048, 4096)


def cost_cases(seed: int) -> list[Row]:
    """Shapes of the benchmark, of layers that no table has and random ones, in random order: whatever is cut off at
    the end is of all groups."""
    rng, cases = random.Random(seed), []
    for name, kind in (("matmul", "bf16 nt"), ("scaled_mm", "fp8 row"), ("scaled_mm_block", "fp8 block")):
        sizes = [("benchmark", w.m, w.n, w.k) for w in bench_cases.FAMILIES[name].workloads("bench")]
        sizes += [("layers", m, n, k) for layers in LAYERS.values() for n, k in layers for m in COST_ROWS]
        for _ in range(120):
            n, k = (128 * round(2 ** rng.uniform(3, 7.8)) for _ in range(2))
            sizes.append(("random", round(2 ** rng.uniform(0, 13)), n, k))
        for group, m, n, k in sizes:
            # torch takes block scales of rows in fours.
            m = -(-m // 4) * 4 if kind == "fp8 block" else m
            cases.append({"kind": kind, "group": group, "m": m, "n": n, "k": k})
    random.Random(seed).shuffle(cases)
    return cases


def prepare(case: Row, device: Device) -> Prepared:
    """The free and the invariant choice of a problem, and torch's kernel; no calls if one of ours is wrong."""
    described = {name: value for name, value in KINDS[case["kind"]].items() if name not in ("op", "use_fast_accum")}
    spec = spec_of(KINDS[case["kind"]]["op"])
    problem = spec.make_problem(**{name: case[name] for name in ("m", "n", "k")}, **described)
    operation = operation_of(spec.name)
    tensors = operands.make(problem, "cuda")
    with sw.batch_invariant():
        invariant = operation.plan(problem, device)
        chosen = operation.decide(problem, device, checks_vendor=True).config
    free = operation.decide(problem, device).config
    plans = {"invariant": invariant, "free": operation.make_plan(problem, free, device)}
    expected, wrong = operands.reference(tensors), []
    for name, plan in plans.items():
        tensors.out.fill_(math.nan)
        plan(*tensors.arguments)
        comparison = operands.compare(tensors.out, expected, problem)
        wrong += [] if comparison.is_right else [f"{name}: {comparison}"]
    with contextlib.suppress(UnsupportedError):
        plans["torch"] = operation.plan(problem, device, backend="vendor")
    calls = {name: functools.partial(plan, *tensors.arguments) for name, plan in plans.items()}
    for call in calls.values():
        call()
    return {"config": str(chosen), "free": str(free), "wrong": wrong}, {} if wrong else calls


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Geometric means by kind and group: the cost, torch's time over ours, and the cost by m."""
    means: dict[str, dict[str, Any]] = {}
    for kind in sorted({row["kind"] for row in rows}):
        for group in ("benchmark", "layers", "random", "all"):
            some = [row for row in rows if row["kind"] == kind and group in (row["group"], "all")]
            if not some:
                continue
            by_m = defaultdict(list)
            for row in some:
                by_m[1 << (row["m"].bit_length() - 1)].append(row["us"]["invariant"] / row["us"]["free"])
            means[f"{kind}, {group}"] = {
                "problems": len(some),
                "cost": _mean([row["us"]["invariant"] / row["us"]["free"] for row in some]),
                "torch_over_ours": _mean(
                    [row["us"]["torch"] / row["us"]["invariant"] for row in some if "torch" in row["us"]]
                ),
                "vendor": sum(row["config"].startswith("vendor") for row in some),
                "cost_by_m": {m: _mean(ratios) for m, ratios in sorted(by_m.items())},
            }
    return means


def _mean(ratios: list[float]) -> float | None:
    return round(statistics.geometric_mean(ratios), 4) if ratios else None


class BatchInvariance(Experiment):
    name = "batch_invariance"
    page_suffix = ".txt"

    def settings(self) -> Row:
        return {"pairs": self.values.pairs, "seed": self.values.seed}

    def measure(self) -> None:
        torch.cuda.init()
        if "bits" not in self.report:
            begin = self.now()
            with sw.batch_invariant():
                self.report["bits"] = bits(self.values.pairs, self.values.seed)
            self.report["bits_seconds"] = round(self.now() - begin, 1)
        self.save()  # whoever stops the timing keeps the bits
        if self.values.cost_seconds:
            device, timer, cases = cuda_device(0), DeviceTimer(0), cost_cases(self.values.seed)

            def time_calls(calls: Mapping[str, Call], seconds: float, row: Row) -> dict[str, float]:
                timings = timer.time(calls, rounds=12, max_seconds=seconds)
                return {name: round(timing.median_us, 3) for name, timing in timings.items()}

            self.rows(self.values.cost_seconds).measure(
                cases,
                functools.partial(prepare, device=device),
                time_calls,
                judge=lambda row: row["wrong"],
                most_s=0.6,
                figures_as="us",
                is_sample=True,
            )
            rows = [row for row in self.report["rows"] if "us" in row]
            self.report["cost"] = {"of_problems": len(cases), "summary": summary(rows)}

    def problems(self) -> list[str]:
        return super().problems() + [f"differs: {where}" for where in self.report["bits"]["differing"]]

    def page(self) -> str:
        compared = self.report["bits"]
        total = {
            name: sum(kind[name] for kind in compared["by_kind"].values())
            for name in ("pairs", "rows", "rows_that_differ")
        }
        lines = [f"{name:22} {means}" for name, means in self.report.get("cost", {}).get("summary", {}).items()]
        lines.insert(0, f"bits: {', '.join(f'{count} {name}' for name, count in total.items())}; {compared['digest']}")
        return "\n".join(lines) + "\n"

    @classmethod
    def define_flags(cls) -> None:
        super().define_flags()
        flags.DEFINE_integer("pairs", 20000, "Runs to compare, at least.")
        flags.DEFINE_integer("seed", 1, "Of products, operands and shapes.")
        flags.DEFINE_float("cost_seconds", 90.0, "For timing; 0 leaves it out.")


if __name__ == "__main__":
    BatchInvariance.start()
