"""Times matmuls with block scales next to DeepGEMM's: python -m tools.gpu_check.deep_gemm_bench --out DIR

    dense    a [m, k] times one matrix, next to fp8_gemm_nt. Ours is also timed with row-major scale_a
    grouped  groups of rows, each by its own matrix, next to m_grouped_fp8_gemm_nt_contiguous, which wants each group
             padded to 128 rows, and m_grouped_fp8_gemm_nt_masked, which wants all padded to the longest

DeepGEMM is imported as deep_gemm. It compiles a kernel by nvcc at its first call and keeps it in DG_JIT_CACHE_DIR;
some processes make these calls first, all at once. Its operands are padded, and their scales laid out, before anything
is timed.

Values are first compared with float64, over an output of NaN. walk_experiment.py has the rest.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib
import math
import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

import torch
from absl import flags

import stoneware as sw
from stoneware.measuring import operands
from stoneware.measuring.operands import Operands
from stoneware.ops import operation_of
from stoneware.runtime.device import Device
from stoneware.specs import spec_of, tolerance
from stoneware.specs.scaled_mm_problem import num_blocks
from tools.gpu_check import document
from tools.gpu_check.checks import Check
from tools.gpu_check.experiment import Prepared, Row
from tools.gpu_check.walk_experiment import MEANS, Walk, WalkExperiment, cells, copies_of, means

OURS, ROW_MAJOR = "stoneware", "stoneware, row-major scale_a"
KINDS = "dense", "grouped"
DENSE, CONTIGUOUS, MASKED = "DeepGEMM", "DeepGEMM, contiguous", "DeepGEMM, masked"

WEIGHTS = (
    (2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048), (6144, 4096),
    (28672, 4096), (4096, 14336),
    (5120, 3072), (9728, 2560), (3200, 8704), (3584, 4096), (3584, 14336), (7680, 5120), (4096, 13696),
    (22016, 4096), (10752, 6144),
)  # fmt: skip
"""(n, k): nine of DeepSeek-V3 and Llama 3 8B, which the wheel's table has, and nine that it lacks."""

TOKENS = (96, 131, 200, 300, 512, 700, 1024, 1500, 2048, 3001, 4096, 8192)

EXPERTS = (
    (8, 28672, 4096), (8, 4096, 14336), (32, 4096, 7168), (32, 7168, 2048), (64, 2816, 2048), (128, 1536, 2048),
    (128, 2048, 768), (256, 512, 7168),
)  # fmt: skip
"""(groups, n, k)."""

TOKENS_PER_EXPERT = (4, 32, 128, 256, 512, 1024, 2048)
MOST_ROWS = 1 << 17
"""Of all groups together."""

MOST_MASKED = 256
"""Rows of a group: the masked kernel is for decoding."""

_ALIGNMENT = 128
"""Rows that each group is padded to: DeepGEMM's get_theoretical_mk_alignment_for_contiguous_layout() on Hopper."""

_EXPECTED_ROWS = 1.2
"""What the masked kernel is prepared for, in mean rows of a group, like in DeepGEMM's tests."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """A way to compute a problem.

    Attributes:
      call: takes the weight, [n, k] or [groups, n, k].
      out: where the result is then.
      rows: which rows of `out` are the result; None: all.
    """

    call: Callable[[torch.Tensor], object]
    out: torch.Tensor
    rows: torch.Tensor | None = None

    @property
    def result(self) -> torch.Tensor:
        return self.out if self.rows is None else self.out.flatten(0, -2)[self.rows]


def cases(kinds: Sequence[str]) -> list[Row]:
    """The labels of all problems: of grouped ones, m is the mean number of rows of a group."""
    rows = {
        "dense": [{"groups": 0, "m": m, "n": n, "k": k} for n, k in WEIGHTS for m in TOKENS],
        "grouped": [
            {"groups": groups, "m": m, "n": n, "k": k}
            for groups, n, k in EXPERTS
            for m in TOKENS_PER_EXPERT
            if groups * m <= MOST_ROWS
        ],
    }
    return [{"kind": kind, **row} for kind in kinds for row in rows[kind]]


def problem_of(case: Row) -> Any:
    sizes = {"n": case["n"], "k": case["k"], "dtype": "e4m3", "scales": "block"}
    if case["groups"]:
        sizes |= {"m": case["groups"] * case["m"], "num_groups": case["groups"]}
        return spec_of("grouped_mm").make_problem(**sizes)
    return spec_of("scaled_mm").make_problem(m=case["m"], **sizes)


def contenders(tensors: Operands) -> dict[str, Contender]:
    """Ours first.

    Raises:
      ImportError: DeepGEMM is missing.
    """
    return _dense(tensors) if tensors.problem.key.op == "scaled_mm" else _grouped(tensors)


def _dense(tensors: Operands) -> dict[str, Contender]:
    deep_gemm = importlib.import_module("deep_gemm")
    a, scale_a, scale_b, out = tensors.a, tensors.scale_a, tensors.scale_b, tensors.out
    row_major = scale_a.contiguous()
    peer_a = a, deep_gemm.get_mn_major_tma_aligned_tensor(row_major)
    peer_scale_b = scale_b[: num_blocks(tensors.problem.k)].t().contiguous()
    calls = {
        OURS: lambda weight: sw.scaled_mm(a, weight.t(), scale_a, scale_b, out=out),
        ROW_MAJOR: lambda weight: sw.scaled_mm(a, weight.t(), row_major, scale_b, out=out),
        DENSE: lambda weight: deep_gemm.fp8_gemm_nt(peer_a, (weight, peer_scale_b), out, disable_ue8m0_cast=True),
    }
    return {name: Contender(call, out) for name, call in calls.items()}


def _grouped(tensors: Operands) -> dict[str, Contender]:
    deep_gemm = importlib.import_module("deep_gemm")
    a, scale_a, scale_b, offs, out = tensors.a, tensors.scale_a, tensors.scale_b, tensors.offs, tensors.out
    num_groups, peer_scale_b = len(offs), scale_b.mT.contiguous()
    counts = offs.diff(prepend=offs.new_zeros(1)).to(torch.int32)
    aligned = -(-counts // _ALIGNMENT) * _ALIGNMENT

    # Each group begins where the one before ends.
    ends = aligned.cumsum(0)
    dense_a, dense_scales, dense_rows = _padded(tensors, counts, ends - aligned, int(ends[-1]))
    dense_scales = deep_gemm.get_mn_major_tma_aligned_tensor(dense_scales)
    group_of_row = torch.full((len(dense_a),), -1, dtype=torch.int32, device=a.device)
    group_of_row[dense_rows] = torch.arange(num_groups, device=a.device, dtype=torch.int32).repeat_interleave(counts)
    dense_out = torch.empty(len(dense_a), tensors.problem.n, dtype=out.dtype, device=a.device)
    result = {
        OURS: Contender(
            lambda weight: sw.grouped_mm(a, weight.mT, offs, scale_a, scale_b, out_dtype=out.dtype, out=out), out
        ),
        CONTIGUOUS: Contender(
            lambda weight: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
                (dense_a, dense_scales), (weight, peer_scale_b), dense_out, group_of_row, disable_ue8m0_cast=True
            ),
            dense_out,
            dense_rows,
        ),
    }
    mean = len(a) / num_groups
    if mean > MOST_MASKED:
        return result

    # Each group has as many rows as the longest.
    most, expected = int(aligned.max()), max(1, int(_EXPECTED_ROWS * mean))
    begins = torch.arange(num_groups, device=a.device) * most
    masked_a, masked_scales, masked_rows = _padded(tensors, counts, begins, num_groups * most)
    masked_a = masked_a.unflatten(0, (num_groups, most))
    masked_scales = deep_gemm.get_mn_major_tma_aligned_tensor(masked_scales.unflatten(0, (num_groups, most)))
    masked_out = torch.empty(num_groups, most, tensors.problem.n, dtype=out.dtype, device=a.device)
    result[MASKED] = Contender(
        lambda weight: deep_gemm.m_grouped_fp8_gemm_nt_masked(
            (masked_a, masked_scales), (weight, peer_scale_b), masked_out, counts, expected, disable_ue8m0_cast=True
        ),
        masked_out,
        masked_rows,
    )
    return result


def _padded(
    tensors: Operands, counts: torch.Tensor, begins: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a and scale_a in `num_rows` rows, the rows of each group from its beginning on; and where these rows are."""
    a, scale_a = tensors.a, tensors.scale_a
    rows = torch.arange(len(a), device=a.device) + (begins - (tensors.offs - counts)).repeat_interleave(counts)
    padded = torch.zeros(num_rows, a.shape[1], dtype=torch.uint8, device=a.device)  # fp8 lacks index_put
    padded[rows] = a.view(torch.uint8)
    scales = torch.ones(num_rows, scale_a.shape[1], device=a.device)
    scales[rows] = scale_a
    return padded.view(a.dtype), scales, rows


def compile_kernels(case: Row) -> list[str]:
    """Has DeepGEMM compile the kernels of a problem; what it refuses, which `prepare` meets again."""
    tensors, check = operands.make(problem_of(case), "cuda"), Check()
    for name, contender in contenders(tensors).items():
        if name in (DENSE, CONTIGUOUS, MASKED):
            with check.refusals():
                contender.call(tensors.b.mT)
    torch.cuda.synchronize()
    return check.wrong


def prepare(case: Row, device: Device, walk: Walk) -> Prepared:
    """The choice and the checks of a problem, and its right calls."""
    problem = problem_of(case)
    tensors = operands.make(problem, "cpu" if device.kind == "cpu" else f"cuda:{device.ordinal}")
    expected, weight = operands.reference(tensors), tensors.b.mT
    limit = tolerance.on_gpu("e4m3", "bf16", problem.k)
    checks, right = {}, {}
    for name, contender in contenders(tensors).items():
        check = Check()
        with check.refusals():
            contender.out.fill_(math.nan)
            contender.call(weight)
            check.product(name, contender.result, expected, limit, tolerance.MAX_ELEMENT_ERROR)
        checks[name] = check.to_json()
        if not check.wrong:
            right[name] = contender
    copies = copies_of(weight)
    calls = {name: walk(contender.call, copies) for name, contender in right.items()}
    decision = operation_of(problem.key.op).decide(problem, device, lists_refusals=False)
    row = {"config": str(decision.config), "grade": decision.grade, "copies": len(copies), "checks": checks}
    return row, calls if OURS in calls else {}


def ratios(rows: Sequence[Row]) -> list[Row]:
    """The time of each peer over ours, by kind and m."""
    groups: dict[tuple[str, int, str], dict[str, float]] = {}
    for row in rows:
        times = {name: figures["median_us"] for name, figures in row.get("device_us", {}).items()}
        shape = "x".join(str(row[name]) for name in ("groups", "n", "k") if row[name])
        for peer in times.keys() - {OURS}:
            groups.setdefault((row["kind"], row["m"], peer), {})[shape] = times[peer] / times[OURS]
    return [{"kind": kind, "m": m, "peer": peer, **means(group)} for (kind, m, peer), group in sorted(groups.items())]


class DeepGemmBench(WalkExperiment):
    name = "deep_gemm"

    def settings(self) -> Row:
        return {"rounds": self.values.rounds}

    def measure(self) -> None:
        try:
            deep_gemm = importlib.import_module("deep_gemm")
        except ImportError as error:
            raise SystemExit(
                f"deep_gemm must be importable by this Python: {error}; build DeepGEMM for it, and set PYTHONPATH"
            ) from error
        self.report["deep_gemm"] = deep_gemm.__version__
        chosen, num_processes = cases(self.values.kinds), self.values.compile_processes
        if num_processes:
            context = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(num_processes, context) as pool:
                for num_done, refusals in enumerate(pool.map(compile_kernels, chosen), 1):
                    said = "; ".join([f"{num_done} of {len(chosen)} problems", *refusals])
                    print(f"DeepGEMM compiles kernels: {said}", flush=True)
        self.measure_walks(chosen)
        self.report["summary"] = ratios(self.report["rows"])

    def prepare(self, case: Row, device: Device, walk: Walk) -> Prepared:
        return prepare(case, device, walk)

    def page(self) -> str:
        lines = document.heading(f"Block scales next to DeepGEMM {self.report['deep_gemm']}", self.report)
        lines += ["DeepGEMM's time, or ours with row-major scale_a, over ours; above 1 ours is faster.", ""]
        table = [(item["kind"], item["m"], item["peer"], *cells(item)) for item in self.report["summary"]]
        return "\n".join([*lines, *document.table(("kind", "m", "next to", *MEANS), table), ""])

    @classmethod
    def define_flags(cls) -> None:
        super().define_flags()
        flags.DEFINE_list("kinds", list(KINDS), f"Which of {', '.join(KINDS)}.")
        flags.register_validator(
            "kinds", set(KINDS).issuperset, f"--kinds must be of {', '.join(KINDS)}; name some of these"
        )
        flags.DEFINE_integer(
            "compile_processes", 8, "Have DeepGEMM compile its kernels before; 0: at each first call.", lower_bound=0
        )


if __name__ == "__main__":
    DeepGemmBench.start()
