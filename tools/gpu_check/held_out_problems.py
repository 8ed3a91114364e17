"""Problems that no table was tuned for, half of them with an (n, k) of the wheel's table.

A set interleaves two endless sequences, which depend on the seed, the set's name and the table alone. `draw`
has layers of models that are kept apart from the tuned ones, and random sizes, both with an (n, k) that the
table lacks. `draw_of_table` has the table's (n, k) with an m that was not measured there. Free of torch.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stoneware.kernels.key import Key
from stoneware.sessions import model
from stoneware.sessions.model import Layer
from stoneware.specs import spec_of
from stoneware.specs.problem import AnyProblem
from stoneware.tuning import table_file

TENSOR_PARALLEL = (1, 2, 4, 8)

MOST_M_LOG2 = 13
"""Tokens of a batch, which are m except of a mixture and of the gradient of a weight: 1 to 8192, log-uniform."""

N_LOG2, K_LOG2 = (6.0, 16.0), (7.0, 15.0)
"""Of random weights: n from 64 to 65536, k from 128 to 32768, log-uniform."""

MOST_WEIGHT_LOG2, MOST_EXPERTS_LOG2 = 29, 32
"""Elements of a random weight, and of all experts together: GPT-3 175B has 2**29.2, and 4 GB of experts
in fp8 leave room for their copies."""

NUM_EXPERTS, PER_TOKEN = (8, 16, 32, 64, 128, 256), (1, 2, 4, 8)
"""Of random mixtures."""


def _decoder(
    hidden: int, heads: int, kv_heads: int, width: int, vocabulary: int, head_dim: int = 0, **more: int
) -> dict[str, int]:
    """A config.json, as far as `stoneware.sessions.model` reads it."""
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": width,
        "vocab_size": vocabulary,
        "head_dim": head_dim,
        **more,
    }


MODELS: dict[str, Mapping[str, int]] = {
    "gemma3_27b": _decoder(5376, 32, 16, 21504, 262208, 128),
    "gemma2_9b": _decoder(3584, 16, 8, 14336, 256000, 256),
    "command_r_plus": _decoder(12288, 96, 8, 33792, 256000),
    "qwen1_5_110b": _decoder(8192, 64, 8, 49152, 152064),
    "olmo2_32b": _decoder(5120, 40, 8, 27648, 100352),
    "glm4_9b": _decoder(4096, 32, 2, 13696, 151552),
    "yi_6b": _decoder(4096, 32, 4, 11008, 64000),
    "phi3_mini": _decoder(3072, 32, 32, 8192, 32064),
    "phi4": _decoder(5120, 40, 10, 17920, 100352),
    "granite3_8b": _decoder(4096, 32, 8, 12800, 49155),
    "falcon3_10b": _decoder(3072, 12, 4, 23040, 131072, 256),
    "dbrx": _decoder(6144, 48, 8, 10752, 100352, num_local_experts=16, num_experts_per_tok=4),
    "llama4_scout": _decoder(5120, 40, 8, 8192, 202048, 128, num_local_experts=16, num_experts_per_tok=1),
    "minimax_m1": _decoder(6144, 64, 8, 9216, 200064, 128, num_local_experts=32, num_experts_per_tok=2),
    "phi3_5_moe": _decoder(4096, 32, 8, 6400, 32064, num_local_experts=16, num_experts_per_tok=2),
    "olmoe_7b": _decoder(2048, 16, 16, 1024, 50304, num_experts=64, num_experts_per_tok=8),
    "qwen2_57b_a14b": _decoder(
        3584,
        28,
        4,
        18944,
        151936,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=2560,
        shared_expert_intermediate_size=20480,
    ),
    "glm4_5_air": _decoder(
        4096,
        96,
        8,
        10944,
        151552,
        128,
        n_routed_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1408,
        n_shared_experts=1,
        first_k_dense_replace=1,
    ),
    "deepseek_v2_lite": _decoder(
        2048,
        16,
        16,
        10944,
        102400,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=64,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        n_shared_experts=2,
        first_k_dense_replace=1,
    ),
}
"""Sizes from the models' config.json. No layer is tuned for its sake: leave these models out of
`specs/*.py`, and of every list of models that are sampled."""


@dataclass(frozen=True, kw_only=True)
class ProblemSet:
    """Problems of one kind.

    Attributes:
      op: name of the op.
      options: further arguments of its `make_problem`.
      n_unit, k_unit: what n and k of a random layer are multiples of.
      product: of a layer with the weight [n, k] and some tokens: "forward", x @ weight.t();
        "dgrad", dy @ weight; or "wgrad", dy.t() @ x.
    """

    op: str
    options: Mapping[str, Any] = field(default_factory=dict)
    n_unit: int = 16
    k_unit: int = 16
    product: str = "forward"

    @property
    def is_grouped(self) -> bool:
        return self.op == "grouped_mm"

    def has(self, layer: Layer) -> bool:
        """Whether it draws this layer; heads and routers stay in 16 bits."""
        if self.is_grouped or layer.num_experts:
            return self.is_grouped and layer.num_experts > 0
        return self.op == "matmul" or layer.name not in ("lm_head", "router")

    def sizes(self, layer: Layer, tokens: int) -> dict[str, int]:
        """m, n and k of the product, and the groups of experts, whose rows are as even as a key has them."""
        if groups := layer.num_experts:
            rows = max(1, tokens * layer.per_token // groups) * groups
            return {"m": rows, "n": layer.n, "k": layer.k, "num_groups": groups}
        if self.product == "dgrad":
            return {"m": tokens, "n": layer.k, "k": layer.n}
        if self.product == "wgrad":  # of a batch that is padded, as kernels want their k
            return {"m": layer.n, "n": layer.k, "k": _multiple(self.k_unit, tokens)}
        return {"m": tokens, "n": layer.n, "k": layer.k}


SETS: dict[str, ProblemSet] = {
    "fp8_row": ProblemSet(op="scaled_mm", options={"scales": "row"}),
    "fp8_block": ProblemSet(op="scaled_mm", options={"scales": "block"}, k_unit=128),
    "fp8_tensor": ProblemSet(op="scaled_mm", options={"scales": "tensor"}),
    "bf16_nt": ProblemSet(op="matmul", options={"layout": "nt"}, n_unit=8, k_unit=8),
    "bf16_nn": ProblemSet(op="matmul", options={"layout": "nn"}, n_unit=8, k_unit=8, product="dgrad"),
    "bf16_tn": ProblemSet(op="matmul", options={"layout": "tn"}, n_unit=8, k_unit=8, product="wgrad"),
    "grouped_fp8": ProblemSet(op="grouped_mm", options={"dtype": "e4m3"}),
    "grouped_block": ProblemSet(op="grouped_mm", options={"dtype": "e4m3", "scales": "block"}, k_unit=128),
    "grouped_bf16": ProblemSet(op="grouped_mm", options={"dtype": "bf16"}, n_unit=8, k_unit=8),
}


def draw(name: str, seed: int) -> Iterator[AnyProblem]:
    """The problems of a set, without end; layers of models and random sizes take turns."""
    rng, problem_set = random.Random(f"{seed} {name}"), SETS[name]
    layers = [layer for layer in _layers() if problem_set.has(layer)]
    for is_random in itertools.cycle((False, True)):
        layer = _random_layer(rng, problem_set) if is_random else rng.choice(layers)
        tokens = round(2 ** rng.uniform(0, MOST_M_LOG2))
        try:
            yield spec_of(problem_set.op).make_problem(**problem_set.sizes(layer, tokens), **problem_set.options)
        except ValueError:
            continue  # a layer whose sizes the op does not take


def draw_of_table(name: str, seed: int, weights: Sequence[Key]) -> Iterator[AnyProblem]:
    """Problems with the (n, k) of some keys and any m, without end; those of users lie between the measured m."""
    rng, problem_set = random.Random(f"{seed} {name} table"), SETS[name]
    is_wgrad = problem_set.product == "wgrad"
    while weights:
        key = rng.choice(weights)
        m = round(2 ** (rng.uniform(*N_LOG2) if is_wgrad else rng.uniform(0, MOST_M_LOG2)))
        sizes = {"m": _multiple(problem_set.n_unit, m) if is_wgrad else m, "n": key.n, "k": key.k}
        if key.num_groups:
            sizes |= {"m": max(1, m // key.num_groups) * key.num_groups, "num_groups": key.num_groups}
        yield spec_of(problem_set.op).make_problem(**sizes, **problem_set.options)


def take(name: str, seed: int, count: int, measured: Callable[[str], frozenset[Key]] | None = None) -> list[AnyProblem]:
    """The first `count` problems of a set that were not measured in their family, none twice.

    Args:
      measured: op -> keys of what was; None reads the wheel's table.
    """
    keys = (measured or measured_keys)(SETS[name].op)
    weights = {_without_m(key) for key in keys}
    apart = (problem for problem in draw(name, seed) if _without_m(problem.key) not in weights)
    kind = next(draw(name, seed)).key.kind
    of_table = draw_of_table(name, seed, sorted(key for key in weights if key.kind == kind))
    mixed = (problem for pair in itertools.zip_longest(apart, of_table) for problem in pair if problem is not None)
    chosen: dict[Key, AnyProblem] = {}
    while len(chosen) < count:
        problem = next(mixed)
        if problem.key not in keys:
            chosen.setdefault(problem.key, problem)
    return list(chosen.values())


def shapes(name: str, seed: int, count: int) -> list[str]:
    """The same as MxNxK, for `stoneware tune --shapes`."""
    return [f"{problem.m}x{problem.n}x{problem.k}" for problem in take(name, seed, count)]


def interleaved(of_sets: Sequence[Sequence[AnyProblem]]) -> list[AnyProblem]:
    """One of each set in turn, so that whatever is cut off at the end is of all sets."""
    turns = itertools.zip_longest(*of_sets)
    return [problem for turn in turns for problem in turn if problem is not None]


@functools.cache
def measured_keys(op: str) -> frozenset[Key]:
    """The keys of the wheel's table.

    Raises:
      TableError: the table is damaged.
    """
    table = table_file.packaged(op)
    devices = () if table is None else table.devices
    return frozenset(entry.key for device in devices for entry in device.entries())


def _without_m(key: Key) -> Key:
    return key.with_sizes((*key.sizes[:-1], 0))


@functools.cache
def _layers() -> tuple[Layer, ...]:
    """Those of all models, whole and cut for tensor parallelism, each shape once."""
    by_shape: dict[tuple[int, ...], Layer] = {}
    for config, ranks in itertools.product(MODELS.values(), TENSOR_PARALLEL):
        try:
            layers = model.layers(config, ranks)
        except ValueError:
            continue  # heads or widths that these GPUs cannot share
        for layer in layers:
            by_shape.setdefault((layer.n, layer.k, layer.num_experts), layer)
    return tuple(by_shape.values())


def _random_layer(rng: random.Random, problem_set: ProblemSet) -> Layer:
    while True:
        n = _multiple(problem_set.n_unit, 2 ** rng.uniform(*N_LOG2))
        k = _multiple(problem_set.k_unit, 2 ** rng.uniform(*K_LOG2))
        experts = rng.choice(NUM_EXPERTS) if problem_set.is_grouped else 0
        most = 2**MOST_EXPERTS_LOG2 if experts else 2**MOST_WEIGHT_LOG2
        if n * k * max(1, experts) <= most:
            return Layer("random", n, k, experts, rng.choice(PER_TOKEN) if experts else 0)


def _multiple(unit: int, size: float) -> int:
    return max(1, round(size / unit)) * unit
