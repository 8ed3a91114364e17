"""The spec of grouped_mm, its heuristic and its named layers. Imports without torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from stoneware.kernels.config import VENDOR as VENDOR_BACKEND
from stoneware.kernels.config import Config
from stoneware.kernels.key import Key
from stoneware.kernels.manifest import Manifest
from stoneware.kernels.tile_rule import by_tile_m
from stoneware.specs.grouped_mm_problem import IN_DTYPES, OP, OUT_DTYPES, SCALES, Problem
from stoneware.specs.op_spec import OpSpec

VENDOR = Config(backend=VENDOR_BACKEND, kernel="torch._grouped_mm")

EXPERTS: dict[str, tuple[int, int, int]] = {
    "mixtral_8x7b_gate_up": (8, 28672, 4096),
    "mixtral_8x7b_down": (8, 4096, 14336),
    "deepseek_v3_gate_up": (256, 4096, 7168),
    "deepseek_v3_down": (256, 7168, 2048),
    "deepseek_v3_gate_up_ep8": (32, 4096, 7168),
    "deepseek_v3_down_ep8": (32, 7168, 2048),
    "gpt_oss_20b_gate_up": (32, 5760, 2880),
    "gpt_oss_20b_down": (32, 2880, 2880),
    "gpt_oss_120b_gate_up": (128, 5760, 2880),
    "gpt_oss_120b_down": (128, 2880, 2880),
    "qwen3_30b_a3b_gate_up": (128, 1536, 2048),
    "qwen3_30b_a3b_down": (128, 2048, 768),
}
"""Layer -> (groups, n, k). From the models' config.json: Mixtral 8x7B has 8 experts, hidden 4096,
intermediate 14336; DeepSeek-V3 256 experts, hidden 7168, expert width 2048, here all on one GPU and
on one of eight; GPT-OSS 32 (20B) or 128 (120B) experts, hidden and intermediate 2880; Qwen3 30B A3B
128 experts, hidden 2048, expert width 768. Gate and up projection are one matmul."""

ROWS_PER_GROUP = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Mean number of tokens of an expert: from decoding to a prefill."""

MAX_ROWS = 131072
"""The most rows that are tuned, over all groups: a prefill of 16384 tokens with 8 experts each, like in
DeepSeek-V3 and Qwen3 30B A3B. More rows use the entry of the largest measured problem."""


def preferred(key: Key, compute_capability: tuple[int, int], manifest: Manifest) -> list[Config]:
    """The configs to try without a measurement, best first; the first is the canonical config."""
    return [*by_tile_m(key, compute_capability, manifest.select(op=key.op, backend="sm90")), VENDOR]


def _problems(
    sizes: Sequence[int], *, dtypes: Sequence[str], out_dtypes: Sequence[str], scales: Sequence[str]
) -> Iterator[Problem]:
    num_groups, m, n, k = sizes
    for out_dtype, dtype in itertools.product(out_dtypes, dtypes):
        if out_dtype not in OUT_DTYPES[dtype]:
            continue
        # bf16 has no scales to choose from.
        for kind in ("row",) if dtype == "bf16" else (one for one in scales if one in SCALES):
            yield Problem.dense(
                m=m * num_groups, n=n, k=k, num_groups=num_groups, dtype=dtype, out_dtype=out_dtype, scales=kind
            )


SPEC = OpSpec(
    name=OP,
    inputs={"a": "Tensor", "b": "Tensor", "offs": "Tensor", "scale_a": "Tensor?", "scale_b": "Tensor?"},
    arguments=(("out_dtype", "ScalarType?"),),
    problem=Problem,
    make_problem=Problem.dense,
    takes=("num_groups", "scales"),
    needs={"num_groups": "pass --num-groups 8, with -m the rows of all groups together"},
    preferred=preferred,
    preferred_reason={
        "sm90": "no measurement applies; the Hopper kernel with the smallest tile that covers the mean rows of a group",
        VENDOR.backend: "no measurement applies; of the kernels that run here torch's own comes first",
    },
    forms={4: "GxMxNxK, G groups of M rows on average, such as 8x16x4096x14336"},
    layers=EXPERTS,
    m_values=lambda sizes: [m for m in ROWS_PER_GROUP if m * sizes[0] <= MAX_ROWS],
    choices={"dtypes": IN_DTYPES, "out_dtypes": OUT_DTYPES["e4m3"], "scales": SCALES},
    out_dtypes_of=OUT_DTYPES,
    problems=_problems,
    m_title="m, the mean rows of a group",
)
