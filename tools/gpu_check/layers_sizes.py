"""What the parts of `layers` share: the names of what is compared, and how large the problems are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TORCH, OURS, OURS_BF16, OURS_BLOCKWISE = "torch bf16", "stoneware rowwise", "stoneware bf16", "stoneware blockwise"

MODES = ("eager", "graph")
"""Of `inference`, behind a name."""

LLAMA_3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
"""Arguments of transformers.LlamaConfig, except the number of blocks."""

_LLAMA_1B = LLAMA_3_8B | {"hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 32000}

_LLAMA_1024 = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}

_TINY_LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of all parts: Llama 3 8B's, or tiny ones that run anywhere.

    Attributes:
      name: by which a flag chooses them.
      linears: name -> (in_features, out_features) of one block's layers, as `linear` measures them.
      linear_tokens: rows of x in `linear`.
      llama: arguments of transformers.LlamaConfig, except the number of layers.
      inference_layers, inference_tokens: of `inference`.
      models, models_layers, models_tokens: of `models`: a class of transformers -> arguments of its config; how many
        blocks; and tokens of a pass.
      train_model: arguments of examples/llama_model.py's Llama.
      train_batch, train_steps, train_mean_steps: of `train`; the mean is of the last train_mean_steps losses.
      step_models: of `steps`: a model's size -> arguments of its config, how many blocks, and (batch, length) of steps.
      lora_layers, lora_tokens, lora_rank: of `lora`.
      rounds: blocks of steps that are timed of each call.
    """

    name: str = "full"
    linears: Mapping[str, tuple[int, int]] = field(
        default_factory=lambda: {
            "qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)
        }
    )  # fmt: skip
    linear_tokens: tuple[int, ...] = (8192, 2048)
    llama: Mapping[str, int] = field(default_factory=lambda: LLAMA_3_8B)
    inference_layers: int = 32
    inference_tokens: tuple[int, ...] = (1, 16, 64, 128, 256, 512, 1024, 4096)
    models: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: {
            "LlamaForCausalLM": LLAMA_3_8B,
            "Qwen2ForCausalLM": {
                "hidden_size": 3584,
                "intermediate_size": 18944,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
                "vocab_size": 152064,
                "max_position_embeddings": 8192,
            },
            "MixtralForCausalLM": LLAMA_3_8B | {"vocab_size": 32000, "experts_implementation": "grouped_mm"},
        }
    )
    models_layers: int = 4
    models_tokens: tuple[int, ...] = (1, 16, 64, 128, 512, 4096)
    train_model: Mapping[str, int] = field(default_factory=lambda: {"layers": 12, "width": 768, "length": 512})
    train_batch: int = 8
    train_steps: int = 1000
    train_mean_steps: int = 50
    step_models: Mapping[str, tuple[Mapping[str, int], int, tuple[tuple[int, int], ...]]] = field(
        default_factory=lambda: {
            "8B": (LLAMA_3_8B | {"vocab_size": 32000}, 4, ((4, 2048),)),
            "1B": (_LLAMA_1B, 8, ((4, 2048), (1, 2048))),
            "hidden 1024": (_LLAMA_1024, 12, ((2, 2048),)),
        }
    )
    lora_layers: int = 4
    lora_tokens: int = 4096
    lora_rank: int = 16
    rounds: int = 12


TINY = Sizes(
    name="tiny",
    linears={"qkv": (256, 384), "down": (512, 256)},
    linear_tokens=(128, 64),
    llama=_TINY_LLAMA,
    inference_layers=1,
    inference_tokens=(16,),
    models={"Qwen2ForCausalLM": _TINY_LLAMA, "MixtralForCausalLM": _TINY_LLAMA},
    models_layers=1,
    models_tokens=(16,),
    train_model={"layers": 1, "width": 128, "length": 64},
    train_batch=2,
    train_steps=8,
    train_mean_steps=4,
    step_models={"tiny": (_TINY_LLAMA, 1, ((1, 32),))},
    lora_layers=1,
    lora_tokens=32,
    lora_rank=4,
    rounds=2,
)

_SIZES_1B = Sizes(
    name="1b", linears={"qkv": (2048, 3072), "o": (2048, 2048), "gate_up": (2048, 16384), "down": (8192, 2048)}
)
"""Llama 3.2 1B's layers, for the part `linear` alone."""

BY_NAME = {sizes.name: sizes for sizes in (Sizes(), _SIZES_1B, TINY)}
