"""A Llama whose logits do not depend on the batch: linears by Stoneware under sw.batch_invariant.

    python examples/batch_invariant_llama.py [--layers 32] [--fp8] [--compile] [--without]

Makes a Llama 3 8B of transformers with random weights, replaces its linears, and compares the logits of
one prompt, bit for bit, in batches of 1, 2, 7 and 32 and at another place in a longer batch. What else
the model computes must not depend on the batch either: attention is PyTorch's flash kernel, which works
on one sequence and head at a time, and the norms are torch.nn.functional.rms_norm, a row at a time.

Needs a GPU of compute capability 9.0, and transformers. Exits with 1 if a bit differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys

import torch
import torch._inductor.config
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.llama import modeling_llama

import stoneware as sw

BATCHES = (1, 2, 7, 32)
TOKENS = 37


class Linear(torch.nn.Module):
    """x @ weight.t() in bf16."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sw.matmul(x.flatten(0, -2), self.weight.t()).unflatten(0, x.shape[:-1])


class Float8Linear(torch.nn.Module):
    """The same in fp8, with a scale for each row of x and of the weight."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.weight, self.scale = quantized(linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x8, scale = quantized(x.flatten(0, -2))
        return sw.scaled_mm(x8, self.weight.t(), scale, self.scale.t()).unflatten(0, x.shape[:-1])


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as float8_e4m3fn, and their scales [rows, 1]; a maximum does not depend on any order."""
    scale = x.abs().amax(dim=1, keepdim=True).float().clamp_min(1e-12) / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """PyTorch's flash kernel, causal; transformers would pass a mask during a capture."""
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register("causal_sdpa", attention)
transformers.AttentionMaskInterface.register("causal_sdpa", lambda *args, **kwargs: None)


class RmsNorm(torch.nn.Module):
    """One row at a time."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.weight, self.epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


def make_model(layers: int, linear: type[torch.nn.Module] | None) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        rope_theta=500000.0,
        attn_implementation="causal_sdpa",
        use_cache=False,
    )
    with torch.device("cuda"), default_dtype(torch.bfloat16):
        model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear) and linear is not None:
                setattr(module, name, linear(child))
            elif isinstance(child, modeling_llama.LlamaRMSNorm):
                setattr(module, name, RmsNorm(child))
    return model


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def logits_in_graph(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    model(tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model(tokens).logits
    graph.replay()
    return logits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--fp8", action="store_true", help="fp8 linears instead of bf16")
    parser.add_argument("--compile", action="store_true", help="compare the compiled model too")
    parser.add_argument("--torch", action="store_true", help="torch's own linears, to see the difference")
    parser.add_argument("--without", action="store_true", help="without sw.batch_invariant, to see the difference")
    flags = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        parser.error("this example needs a GPU of compute capability 9.0, and PyTorch has none here; run it on one")
    torch.manual_seed(0)
    model = make_model(flags.layers, None if flags.torch else Float8Linear if flags.fp8 else Linear)
    prompt = torch.randint(0, 128256, (1, TOKENS), device="cuda")
    others = torch.randint(0, 128256, (max(BATCHES), TOKENS), device="cuda")
    ways = {"eager": lambda tokens: model(tokens).logits, "graph": lambda tokens: logits_in_graph(model, tokens)}
    if flags.compile:
        # Else inductor rounds between fused steps in one graph and not in another.
        torch._inductor.config.emulate_precision_casts = True
        compiled = torch.compile(model, dynamic=True)
        ways["compiled"] = lambda tokens: compiled(tokens).logits
    differing: dict[str, int] = {}
    with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION), sw.batch_invariant(not flags.without):
        for name, way in ways.items():
            expected = way(prompt)[0].clone()
            for batch in BATCHES:
                for place in sorted({0, batch // 2, batch - 1}):
                    tokens = others[:batch].clone()
                    tokens[place] = prompt[0]
                    found = way(tokens)[place]
                    differing[f"{name}, batch {batch}, place {place}"] = int((found != expected).sum())
    print(json.dumps({"layers": flags.layers, "logits": TOKENS * 128256, "logits_that_differ": differing}, indent=1))
    return int(any(differing.values()))


if __name__ == "__main__":
    sys.exit(main())
