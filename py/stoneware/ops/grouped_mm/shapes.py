"""Named workloads of grouped_mm, shared by tests, the tuner and benchmarks."""

from __future__ import annotations

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
