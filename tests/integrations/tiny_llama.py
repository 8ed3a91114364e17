"""A tiny Llama that has learned a text by heart, with fp8 weights, and the tokens that it generates.

Random models hesitate between tokens, so rounding x to fp8 in another order changes what they generate. A trained one
does not hesitate, so tokens can be compared. A token of the text follows from several before it, so each layer counts.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedModel

from stoneware import nn, quantize

SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
TEXT = torch.randint(1, 9, (32,), generator=torch.Generator().manual_seed(0)).tolist()
PROMPT, CONTINUATION = TEXT[:8], TEXT[8:]

_NUM_STEPS = 60
"""Of training, which takes seconds; the least probability of a token of the text is then above 0.95."""


@functools.cache
def _weights(kind: type, **sizes: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**SIZES, **sizes), dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    tokens = torch.tensor([TEXT])
    for _ in range(_NUM_STEPS):
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
    with torch.no_grad():
        probability = model(tokens).logits[0, :-1].softmax(-1).gather(1, tokens[0, 1:, None])
    assert probability[len(PROMPT) - 1 :].min() > 0.95, probability
    return model.state_dict()


def build(kind: type = LlamaConfig, **sizes: Any) -> PreTrainedModel:
    """A new copy of the model in bfloat16."""
    model = AutoModelForCausalLM.from_config(kind(**SIZES, **sizes), dtype=torch.bfloat16)
    model.load_state_dict(_weights(kind, **sizes))
    return model.eval().requires_grad_(False)


def save_fp8(folder) -> None:
    """Writes the checkpoint, with 128x128 scales, like transformers and vLLM load it."""
    model = build()
    nn.convert(model, "blockwise")
    model.save_pretrained(folder)


def save_mixtral(folder) -> None:
    """Writes a checkpoint with experts in bfloat16."""
    build(MixtralConfig, num_local_experts=4).save_pretrained(folder)


def save_mixtral_fp8(folder) -> None:
    """Writes a checkpoint in fp8 with 128x128 scales, each expert under its own names, like those on the Hub."""
    save_mixtral(folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[name] = tensor
        if ".experts." in name or name.endswith("_proj.weight"):
            tensors[name], tensors[f"{name}_scale_inv"] = quantize(tensor, "block_2d", power_of_two=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "gate"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings))


def generate(model) -> list[int]:
    """The tokens after PROMPT: CONTINUATION, if the layers compute what they should."""
    prompt = torch.tensor([PROMPT], device=model.device)
    with torch.no_grad():
        tokens = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=len(CONTINUATION), do_sample=False
        )
    return tokens[0, len(PROMPT) :].tolist()
