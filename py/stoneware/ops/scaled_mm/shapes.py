"""Named workloads of scaled_mm, shared by tests, the tuner and benchmarks."""

from __future__ import annotations

WEIGHTS: dict[str, tuple[int, int]] = {
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
"""Layer -> (n, k) of its weight. From the models' config.json: Llama 3 8B has hidden 4096, 32 heads
and 8 key-value heads of 128, intermediate 14336; 70B has hidden 8192, intermediate 28672;
DeepSeek-V3 has hidden 7168, q_lora_rank 1536, kv_lora_rank 512 + 64, 128 heads of 128 + 64, expert
width 2048."""

M_VALUES = (1, 16, 64, 128, 512, 2048, 8192)
"""Tokens at once: decoding one by one and in batches, up to a prefill."""
