"""The spec of scaled_mm, its heuristic and its named layers. Imports without torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from stoneware.kernels.config import VENDOR as VENDOR_BACKEND
from stoneware.kernels.config import Config
from stoneware.kernels.key import ACCUMULATIONS, Key
from stoneware.kernels.manifest import Manifest
from stoneware.kernels.tile_rule import LARGEST_SPLIT_M, by_tile_m
from stoneware.specs.op_spec import SHAPE_FORM, OpSpec
from stoneware.specs.scaled_mm_problem import IN_DTYPES, OP, OUT_DTYPES, SCALES, Problem

VENDOR = Config(backend=VENDOR_BACKEND, kernel="torch._scaled_mm")

BENCH_WEIGHTS: dict[str, tuple[int, int]] = {
    "llama3_8b_o": (4096, 4096),
    "llama3_8b_qkv": (6144, 4096),
    "llama3_8b_gate_up": (28672, 4096),
    "llama3_8b_down": (4096, 14336),
    "llama3_70b_o": (8192, 8192),
    "llama3_70b_gate_up": (57344, 8192),
    "llama3_70b_down": (8192, 28672),
    "deepseek_v3_q_kv_down": (2112, 7168),
    "deepseek_v3_q_up": (24576, 1536),
    "deepseek_v3_o": (7168, 16384),
    "deepseek_v3_expert_down": (7168, 2048),
}
"""Layer -> (n, k) of its weight, for benchmarks. From the models' config.json: Llama 3 8B has hidden
4096, 32 heads and 8 key-value heads of 128, intermediate 14336; 70B has hidden 8192, intermediate
28672; DeepSeek-V3 has hidden 7168, q_lora_rank 1536, kv_lora_rank 512 + 64, 128 heads of 128 + 64,
expert width 2048."""

WEIGHTS: dict[str, tuple[int, int]] = {
    **BENCH_WEIGHTS,
    "llama3_70b_qkv": (10240, 8192),
    "deepseek_v3_kv_up": (32768, 512),
    "deepseek_v3_expert_gate_up": (4096, 7168),
    "deepseek_v3_dense_gate_up": (36864, 7168),
    "deepseek_v3_dense_down": (7168, 18432),
    "qwen3_8b_gate_up": (24576, 4096),
    "qwen3_8b_down": (4096, 12288),
    "qwen3_32b_qkv": (10240, 5120),
    "qwen3_32b_o": (5120, 8192),
    "qwen3_32b_gate_up": (51200, 5120),
    "qwen3_32b_down": (5120, 25600),
    "mixtral_8x22b_qkv": (8192, 6144),
    "mixtral_8x22b_o": (6144, 6144),
    "mixtral_8x22b_gate_up": (32768, 6144),
    "mixtral_8x22b_down": (6144, 16384),
    "gpt_oss_120b_qkv": (5120, 2880),
    "gpt_oss_120b_o": (2880, 4096),
    "gpt_oss_120b_expert_gate_up": (5760, 2880),
    "gpt_oss_120b_expert_down": (2880, 2880),
    "llama2_13b_o": (5120, 5120),
    "llama2_13b_gate_up": (27648, 5120),
    "llama2_13b_down": (5120, 13824),
    "llama3_1b_o": (2048, 2048),
    "llama3_1b_gate_up": (16384, 2048),
    "llama3_1b_down": (2048, 8192),
    "qwen2_7b_o": (3584, 3584),
    "qwen2_7b_gate_up": (37888, 3584),
    "qwen2_7b_down": (3584, 18944),
    "qwen2_72b_gate_up": (59136, 8192),
    "qwen2_72b_down": (8192, 29568),
    "qwen3_14b_gate_up": (34816, 5120),
    "qwen3_14b_down": (5120, 17408),
    "mistral_small_o": (5120, 4096),
    "mistral_small_gate_up": (65536, 5120),
    "mistral_small_down": (5120, 32768),
    "falcon_40b_up": (32768, 8192),
    "falcon_40b_down": (8192, 32768),
    "gpt3_175b_o": (12288, 12288),
    "gpt3_175b_up": (49152, 12288),
    "gpt3_175b_down": (12288, 49152),
}
"""The layers that are tuned: those of the benchmarks, and from the models' config.json DeepSeek-V3
with dense intermediate 18432; Qwen3 8B (hidden 4096, intermediate 12288) and 32B (hidden 5120, 64
heads and 8 key-value heads of 128, intermediate 25600); Mixtral 8x22B (hidden 6144, 48 heads and 8
key-value heads of 128, intermediate 16384); GPT-OSS 120B (hidden 2880, 64 heads and 8 key-value heads
of 64, intermediate 2880); Llama 2 13B (hidden 5120, intermediate 13824); Llama 3.2 1B (hidden 2048,
intermediate 8192); Qwen 2.5 7B (hidden 3584, intermediate 18944) and 72B (hidden 8192, intermediate
29568); Qwen3 14B (hidden 5120, intermediate 17408); Mistral Small 24B (hidden 5120, 32 heads of 128,
intermediate 32768); Falcon 40B (hidden 8192, up 32768); GPT-3 175B (hidden 12288, up 49152; its paper,
table 2.1). Layers of other models with the same weights are left out. The weights also
cover the range between the smallest and the largest, because a weight that is not here uses the entry of
the nearest one."""

M_VALUES = (
    1,
    8,
    16,
    24,
    32,
    48,
    64,
    80,
    96,
    112,
    128,
    160,
    192,
    256,
    264,
    320,
    336,
    384,
    416,
    448,
    512,
    560,
    640,
    704,
    768,
    896,
    1024,
    1152,
    1280,
    1536,
    1792,
    2048,
    3072,
    4096,
    8192,
)
"""The m that are tuned. The fastest kernel for one m is seldom the fastest for twice as many rows, so
the values are dense from 64 to 2048, where tiles change. Not all are multiples of 64: just past a
multiple the last tile is nearly empty."""


def preferred(key: Key, compute_capability: tuple[int, int], manifest: Manifest) -> list[Config]:
    """The configs to try without a measurement, best first; the first is the canonical config.

    Measured on an H200, untuned, against torch's rowwise kernels: up to m = 128 ours were 1.1 to 2 times
    as fast, and those of e5m2 1.02 to 2.03 times (7 shapes). Above, ours took 1.08 to 1.28 times as long
    (e5m2, 7 shapes, m of 512 to 14336). The best of them was, with slow accumulation of e4m3, 0.96 to 1.62 times as
    fast as torch's kernel (134 problems, m of 256 to 28672), of e5m2 0.50 to 1.23 times (92 problems), and with
    block scales 0.98 to 2.35 times (117 problems, m of 100 to 8192). The vendor library comes before Triton because
    it has kernels for every arch and size.
    """
    ours, triton = (
        by_tile_m(key, compute_capability, manifest.select(op=key.op, backend=backend))
        for backend in ("sm90", "triton_aot")
    )
    if key.accumulation == "slow":
        is_ours_first = key.m > LARGEST_SPLIT_M and key.a_dtype == "e4m3"
    else:
        is_ours_first = key.m <= LARGEST_SPLIT_M or key.scales == "block"
    return [*ours, VENDOR, *triton] if is_ours_first else [VENDOR, *ours, *triton]


def _problems(
    sizes: Sequence[int],
    *,
    scales: Sequence[str],
    out_dtypes: Sequence[str],
    a_dtypes: Sequence[str],
    accumulations: Sequence[str],
) -> Iterator[Problem]:
    m, n, k = sizes
    for out_dtype, kind, a_dtype in itertools.product(out_dtypes, scales, a_dtypes):
        # Block scales leave no choice of accumulation.
        for accumulation in ("fast",) if "block" in kind else accumulations:
            yield Problem.dense(
                m=m,
                n=n,
                k=k,
                dtype=a_dtype,
                b_dtype="e4m3",
                out_dtype=out_dtype,
                scales=kind,
                use_fast_accum=accumulation == "fast",
            )


SPEC = OpSpec(
    name=OP,
    inputs={"a": "Tensor", "b": "Tensor", "scale_a": "Tensor", "scale_b": "Tensor", "bias": "Tensor?"},
    arguments=(("out_dtype", "ScalarType"), ("use_fast_accum", "bool")),
    problem=Problem,
    make_problem=Problem.dense,
    takes=("scales", "has_bias"),
    preferred=preferred,
    preferred_reason={
        "sm90": "no measurement applies; the Hopper kernel with the smallest tile that covers m",
        VENDOR_BACKEND: "no measurement applies; of the kernels that run here torch's own comes first",
        "triton_aot": "no measurement applies; the Triton kernel with the smallest tile that covers m",
    },
    forms={3: SHAPE_FORM},
    layers=WEIGHTS,
    m_values=lambda sizes: M_VALUES,
    choices={"scales": SCALES, "out_dtypes": OUT_DTYPES, "a_dtypes": IN_DTYPES, "accumulations": ACCUMULATIONS},
    problems=_problems,
)
