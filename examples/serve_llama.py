"""Generates tokens with a Llama of transformers whose linears are fp8, and in bf16 with torch's.

    python examples/serve_llama.py [--recipe rowwise] [--batch 16] [--tokens 128] [--checkpoint FOLDER]

Weights are random, of Llama 3 8B's sizes, or those of --checkpoint. Prints the bytes of the linears'
weights and the tokens/s of both, eager and, on a GPU, in CUDA graphs over a static cache. Needs transformers
5.x. Runs anywhere; on a CPU fp8 is emulated, and slow: make the model small there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import transformers

import stoneware as sw


def build(options: argparse.Namespace) -> torch.nn.Module:
    """The model in bf16, for inference."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.checkpoint:
        model = transformers.LlamaForCausalLM.from_pretrained(options.checkpoint, dtype=torch.bfloat16).to(device)
        return model.eval().requires_grad_(False)
    config = transformers.LlamaConfig(
        hidden_size=options.width,
        intermediate_size=options.inner,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        vocab_size=options.vocabulary,
        max_position_embeddings=8192,
        dtype=torch.bfloat16,
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)


def graphed(step: Callable[[], None]) -> Callable[[], None]:
    """Replays a step that was warmed up; capturing does not run it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@torch.no_grad()
def generate(
    model: torch.nn.Module, prompt: torch.Tensor, num_tokens: int, in_graph: bool
) -> tuple[torch.Tensor, float]:
    """The likeliest tokens after the prompt [batch, length], [batch, num_tokens], and how many of them a second."""
    length = prompt.shape[1]
    cache = transformers.StaticCache(config=model.config, max_cache_len=length + num_tokens)
    token = torch.empty(prompt.shape[0], 1, dtype=prompt.dtype, device=prompt.device)

    def read(ids: torch.Tensor) -> None:
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        token.copy_(logits[:, -1:].argmax(-1))

    def step() -> None:
        read(token)

    read(prompt)  # makes the cache's tensors, and the step below warms up
    step()
    run = graphed(step) if in_graph else step
    cache.reset()
    read(prompt)
    tokens = [token.clone()]
    begin = _now()
    for _ in range(num_tokens - 1):
        run()
        tokens.append(token.clone())
    return torch.cat(tokens, 1), prompt.shape[0] * (num_tokens - 1) / (_now() - begin)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="rowwise", help="of sw.nn.convert")
    parser.add_argument("--checkpoint", help="a folder of transformers; without it weights are random")
    sizes = {"layers": 32, "width": 4096, "inner": 14336, "heads": 32, "kv_heads": 8, "vocabulary": 128256}
    for name, default in {**sizes, "batch": 16, "length": 128, "tokens": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Tokens/s by kind of linear and mode."""
    options = parse(arguments)
    source = options.checkpoint or f"{options.layers} layers of width {options.width} with random weights"
    print(f"makes a Llama: {source}", flush=True)
    model = build(options)
    device = next(model.parameters()).device
    prompt = torch.randint(model.config.vocab_size, (options.batch, options.length), device=device)
    rates = {}
    for kind in ("torch", options.recipe):
        if kind != "torch":
            print(sw.nn.convert(model, options.recipe, frozen=True))
        layers = [layer for layer in model.model.modules() if isinstance(layer, torch.nn.Linear)]
        num_bytes = sum(one.numel() * one.element_size() for layer in layers for one in layer.parameters())
        print(f"{kind}: linears of {num_bytes / 1e6:.1f} MB")
        for in_graph in (False, True) if device.type == "cuda" else (False,):
            mode = f"{kind}, {'CUDA graph' if in_graph else 'eager'}"
            print(f"{mode}: generates {options.tokens} tokens for each of {options.batch} prompts", flush=True)
            _, rates[mode] = generate(model, prompt, options.tokens, in_graph)
            print(f"{mode}: {rates[mode]:.0f} tokens/s")
    return rates


if __name__ == "__main__":
    main()
