"""Named workloads of grouped_mm, shared by tests, the tuner and benchmarks."""

from __future__ import annotations

import bisect
import itertools
import random

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
128 experts, hidden 2048, expert width 768. Gate and up projection are one product."""

ROWS_PER_GROUP = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Tokens an expert has on average: decoding up to a prefill."""

MAX_ROWS = 131072
"""Of all groups of a workload together: a prefill of 16384 tokens of which each goes to 8 experts,
as in DeepSeek-V3 and Qwen3 30B A3B. For more rows the largest that was measured answers."""

_LEAST_SHARE, _LARGEST_SHARE = 0.7, 1.3
"""Of a group, in units of the mean: as DeepGEMM draws its groups' rows (tests/generators.py)."""


def ragged(num_rows: int, num_groups: int) -> list[int]:
    """How many rows each group has where they are to be as uneven as a router leaves them.

    Each group draws its share, uniformly from 0.7 to 1.3 of the mean; then each row draws its group
    by the shares. So small groups vary as counts of rare events do (some are empty at a mean of
    few rows), and large ones by the shares. The seed is fixed: equal arguments give equal sizes, in
    every process and on every machine.

    Returns:
      `num_groups` counts; their sum is `num_rows`.
    """
    # random() alone: Python promises its sequence to every version, and no other draw's.
    draw = random.Random(0).random
    spread = _LARGEST_SHARE - _LEAST_SHARE
    ends = list(itertools.accumulate(_LEAST_SHARE + spread * draw() for _ in range(num_groups)))
    counts = [0] * num_groups
    for _ in range(num_rows):
        counts[bisect.bisect(ends, draw() * ends[-1], hi=num_groups - 1)] += 1
    return counts
