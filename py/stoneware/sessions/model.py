"""The matmuls of a model, from a torch module or a Hugging Face config.json; and `sw.tune`.

A config gives the linears like Hugging Face builds them (separate q, k, v, gate and up) and like serving engines
fuse them (qkv, gate_up), each once. Tensor parallelism shards the projections out of the hidden size along n, and
those back to it along k, like Megatron-LM (https://arxiv.org/abs/1909.08053, section 3).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from stoneware.errors import StoreError, UnsupportedError, quoted
from stoneware.runtime import regular_file
from stoneware.runtime.canonical import printable
from stoneware.runtime.device import DeviceFingerprint
from stoneware.specs import spec_of
from stoneware.tuning import lookup, sources, store_table, table_file
from stoneware.tuning.choose import is_vendor
from stoneware.tuning.sources import Source

if TYPE_CHECKING:
    import torch

    from stoneware.specs.problem import AnyProblem
    from stoneware.tuning.store import Store

_SCALES = {"fp8": "row", "fp8_block": "block", "fp8_tensor": "tensor"}

DTYPES = ("bf16", "fp16", *_SCALES)
"""Dtypes of operands: matmul's two; e4m3 with a scale for each row and column, with block scales, or with one scale."""

_DTYPE_OF_RECIPE = {"blockwise": "fp8_block", "tensorwise": "fp8_tensor"}
"""The dtype of a frozen layer; with any other recipe, and without one, it is "fp8"."""

MAX_CONFIG_BYTES = 16 << 20
"""The longest config.json that is read. Most have a few KiB; names of labels can add some MiB."""


@dataclass(frozen=True)
class Layer:
    """A weight [n, k], or the weights [num_experts, n, k] of experts, `per_token` of which get each token."""

    name: str
    n: int
    k: int
    num_experts: int = 0
    per_token: int = 0


def read_config(path: str) -> dict[str, Any]:
    """A model's config.json, or that in a folder.

    Raises:
      ValueError: it is missing, not a regular file, longer than MAX_CONFIG_BYTES, nested too deeply for Python's
        parser, or not a JSON object.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        config = json.loads(regular_file.read(file, MAX_CONFIG_BYTES).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = "its JSON is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(
            f"model={quoted(path)} must be a Hugging Face config.json, or a folder with one: {reason}; pass its path"
        ) from error
    if not isinstance(config, dict):
        raise ValueError(
            f"model={quoted(path)} must hold a JSON object, not a {type(config).__name__}; pass a config.json"
        )
    # A model of several kinds of input has its language model's config inside.
    inside = config.get("text_config") or {}
    if not isinstance(inside, dict):
        raise ValueError(
            f"text_config={quoted(inside)} of the model's config must be a JSON object; correct the config"
        )
    return {**config, **inside}


class _Fields:
    """A config's numbers, and their shares under tensor parallelism."""

    def __init__(self, config: Mapping[str, Any], tensor_parallel: int) -> None:
        self._config, self.ranks = config, tensor_parallel

    def maybe(self, *names: str) -> int:
        """The first that is there; 0 if none is."""
        found = next((self._config[name] for name in names if self._config.get(name)), 0)
        if type(found) is not int or found < 0:
            raise ValueError(
                f"{names[0]}={quoted(found)} of the model's config must be an int >= 0; correct the config"
            )
        return found

    def of(self, name: str) -> int:
        found = self.maybe(name)
        if not found:
            raise ValueError(f"the model's config must have {name}, and lacks it; pass that of a decoder model")
        return found

    def share(self, name: str, value: int) -> int:
        if value % self.ranks:
            raise ValueError(f"tensor_parallel={self.ranks} must divide {name}={value}; pass a divisor of it")
        return value // self.ranks


def layers(config: Mapping[str, Any], tensor_parallel: int = 1) -> list[Layer]:
    """The layers of a model on one of `tensor_parallel` GPUs: each shape once, under its first name.

    Raises:
      ValueError: the config lacks a size, or a size is not a multiple of `tensor_parallel`.
    """
    if tensor_parallel < 1:
        raise ValueError(f"tensor_parallel={tensor_parallel} must be at least 1; pass how many GPUs share a layer")
    fields = _Fields(config, tensor_parallel)
    found: dict[tuple[int, ...], Layer] = {}
    for layer in (*_attention(fields), *_mlp(fields), _head(fields)):
        found.setdefault((layer.num_experts, layer.n, layer.k), layer)
    return list(found.values())


def _attention(fields: _Fields) -> Iterator[Layer]:
    hidden, all_heads = fields.of("hidden_size"), fields.of("num_attention_heads")
    heads = fields.share("num_attention_heads", all_heads)
    if rank := fields.maybe("kv_lora_rank"):  # latent attention, as of DeepSeek-V3
        nope, rope, value = (fields.of(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        down = rank + rope
        if q_rank := fields.maybe("q_lora_rank"):
            yield Layer("q_a", q_rank, hidden)
            yield Layer("q_b", heads * (nope + rope), q_rank)
            yield Layer("q_kv_a", q_rank + down, hidden)
        else:
            yield Layer("q", heads * (nope + rope), hidden)
        yield Layer("kv_a", down, hidden)
        yield Layer("kv_b", heads * (nope + value), rank)
        yield Layer("o", hidden, heads * value)
        return
    head = fields.maybe("head_dim") or hidden // all_heads
    all_kv = fields.maybe("num_key_value_heads") or all_heads
    # With more ranks than heads each rank has a copy of one.
    kv = 1 if all_kv < fields.ranks else fields.share("num_key_value_heads", all_kv)
    yield Layer("q", heads * head, hidden)
    yield Layer("kv", kv * head, hidden)
    yield Layer("qkv", (heads + 2 * kv) * head, hidden)
    yield Layer("o", hidden, heads * head)


def _mlp(fields: _Fields) -> Iterator[Layer]:
    hidden = fields.of("hidden_size")
    num_experts = fields.maybe("num_local_experts", "num_experts", "n_routed_experts")
    width = fields.maybe("moe_intermediate_size") or fields.of("intermediate_size")
    if num_experts:
        per_token = fields.of("num_experts_per_tok")
        part = fields.share("the width of an expert", width)
        yield Layer("router", num_experts, hidden)
        yield Layer("experts_gate_up", 2 * part, hidden, num_experts, per_token)
        yield Layer("experts_down", hidden, part, num_experts, per_token)
    shared = fields.maybe("shared_expert_intermediate_size") or width * fields.maybe("n_shared_experts")
    # A mixture may begin with dense layers.
    dense = fields.of("intermediate_size") if not num_experts or fields.maybe("first_k_dense_replace") else 0
    for name, size in (("", dense), ("shared_", shared)):
        if size:
            part = fields.share("intermediate_size", size)
            yield Layer(f"{name}gate", part, hidden)
            yield Layer(f"{name}gate_up", 2 * part, hidden)
            yield Layer(f"{name}down", hidden, part)


def _head(fields: _Fields) -> Layer:
    # Vocabularies are padded to a multiple of the ranks.
    return Layer("lm_head", -(-fields.of("vocab_size") // fields.ranks), fields.of("hidden_size"))


def tokens_up_to(most: int) -> list[int]:
    """1, 2, 4, ... tokens, up to the most."""
    if most < 1:
        raise ValueError(f"max_batch_tokens={most} must be at least 1; pass the most tokens of a batch")
    tokens = [1 << power for power in range(most.bit_length())]
    return tokens if tokens[-1] == most else [*tokens, most]


def problems(
    found: Sequence[Layer], tokens: Sequence[int], dtypes: Sequence[str] = ("bf16", "fp8")
) -> tuple[list[AnyProblem], list[str]]:
    """What to measure: each layer at each number of tokens, in each dtype.

    A language model's head and a router stay in 16 bits. Of experts the tokens are spread evenly.

    Returns:
      The problems, none twice; and of each layer that cannot run in a dtype, why not.

    Raises:
      ValueError: a dtype is unknown.
    """
    unknown = sorted(set(dtypes) - set(DTYPES))
    if unknown or not dtypes:
        raise ValueError(f"dtypes={','.join(unknown)} must be among {', '.join(DTYPES)}; name some of them")
    taken: dict[AnyProblem, None] = {}
    skipped: list[str] = []
    for layer in found:
        for dtype in dtypes:
            if dtype.startswith("fp8") and layer.name in ("lm_head", "router"):
                continue
            try:
                taken.update(dict.fromkeys(_of_layer(layer, dtype, tokens)))
            except ValueError as error:
                skipped.append(f"{printable(layer.name)} in {dtype}: {error}")
    return list(taken), skipped


def _of_layer(layer: Layer, dtype: str, tokens: Sequence[int]) -> Iterator[AnyProblem]:
    sizes: dict[str, Any] = {"n": layer.n, "k": layer.k}
    if layer.num_experts:
        if dtype == "fp16":
            raise ValueError(f"grouped_mm takes bf16 or fp8, not {dtype}; name one of these")
        make = spec_of("grouped_mm").make_problem
        groups = layer.num_experts
        if dtype == "fp8_tensor":
            raise ValueError(
                "grouped_mm takes fp8 with a scale per row or for blocks, not fp8_tensor; name one of these"
            )
        if dtype in _SCALES:
            sizes |= {"dtype": "e4m3", "scales": _SCALES[dtype]}
        else:
            sizes["dtype"] = dtype
        for rows in dict.fromkeys(max(1, one * layer.per_token // groups) * groups for one in tokens):
            yield make(m=rows, num_groups=groups, **sizes)
        return
    for m in tokens:
        if dtype in _SCALES:
            yield spec_of("scaled_mm").make_problem(m=m, scales=_SCALES[dtype], **sizes)
        else:
            yield spec_of("matmul").make_problem(m=m, dtype=dtype, **sizes)


@dataclass(frozen=True)
class Gain:
    """What measuring brought, over the problems that have what is compared.

    Attributes:
      num_problems: that were measured.
      over_torch: torch's time over that of the choice now, geometric mean; 0 if torch ran none.
      over_wheel: the same for the choices of the wheel's table; 0 if it has no entry here.
      num_changed: problems that choose another kernel than by the wheel's table.
    """

    num_problems: int
    over_torch: float
    over_wheel: float
    num_changed: int

    def __str__(self) -> str:
        parts = [f"{self.num_problems} problems"]
        if self.over_torch:
            parts.append(f"{self.over_torch:.3f} times as fast as torch")
        if self.over_wheel:
            parts.append(f"{self.over_wheel:.3f} times as fast as the wheel's table")
        return (
            ", ".join(parts) + f" (geometric means); {self.num_changed} choose another kernel than by the wheel's table"
        )


def gain(measured: Sequence[AnyProblem], store: Store, device: DeviceFingerprint) -> Gain:
    """Compares the choices by a store's samples with torch and with the wheel's table, at these problems.

    Args:
      measured: the problems.
      store: has their samples.
      device: where they were taken.
    """
    over_torch: list[float] = []
    over_wheel: list[float] = []
    num_problems = num_changed = 0
    for op in dict.fromkeys(problem.key.op for problem in measured):
        own = [Source(sources.STORE, table) for table in store_table.tables(store.path, op)]
        wheel = table_file.packaged(op)
        for key in dict.fromkeys(problem.key for problem in measured if problem.key.op == op):
            found = lookup.find(key, device, own)
            if found is None or found.step is not lookup.Grade.EXACT:
                continue
            num_problems += 1
            chosen, times = found.choice, {choice.config: choice.median_us for choice in found.entry.choices}
            over_torch += [us / chosen.median_us for config, us in times.items() if is_vendor(config)]
            before = lookup.find(key, device, [Source(sources.WHEEL, wheel)]) if wheel is not None else None
            if before is not None and before.choice.config in times:
                over_wheel.append(times[before.choice.config] / chosen.median_us)
                num_changed += before.choice.config != chosen.config
    return Gain(
        num_problems=num_problems,
        over_torch=round(geometric_mean(over_torch), 4) if over_torch else 0.0,
        over_wheel=round(geometric_mean(over_wheel), 4) if over_wheel else 0.0,
        num_changed=num_changed,
    )


def layers_of_module(module: torch.nn.Module) -> dict[str, list[Layer]]:
    """dtype of DTYPES -> the weights [n, k] of a module's linears: of nn.Linear in 16 bits, and of any
    module whose `weight` is an e4m3 matrix. Gate and up of a feed-forward that `convert` fused are one weight.

    Raises:
      ValueError: a layer trains in fp8, with several matmuls of other scales and sizes.
    """
    import torch

    from stoneware.nn import fused_blocks
    from stoneware.nn.linear import Float8Linear

    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8"}
    found: dict[str, dict[tuple[int, int], Layer]] = {}
    joined: set[int] = set()

    def add(name: str, part: torch.nn.Module, weight: torch.Tensor) -> None:
        n, k = weight.shape
        dtype = names[weight.dtype]
        if dtype == "fp8":
            dtype = _DTYPE_OF_RECIPE.get(getattr(part, "recipe", ""), dtype)
        found.setdefault(dtype, {}).setdefault((n, k), Layer(name or "weight", n, k))

    for name, part in module.named_modules():
        if isinstance(part, fused_blocks.FusedSwiGLU) and (gate_up := fused_blocks.joined(part)) is not None:
            layers, whole = gate_up
            joined.update(map(id, layers))
            add(f"{name}.gate_up", layers[0], whole)
        weight = getattr(part, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or weight.dtype not in names:
            continue
        if isinstance(part, Float8Linear):
            raise ValueError(
                f"module must not have layers that train in fp8, and {printable(name) or 'it'} is a "
                f'{type(part).__name__}; run a training step under sw.tuning("on_miss")'
            )
        if id(part) not in joined and (isinstance(part, torch.nn.Linear) or weight.dtype == torch.float8_e4m3fn):
            add(name, part, weight)
    return {dtype: list(of_dtype.values()) for dtype, of_dtype in found.items()}


def tune(
    module: torch.nn.Module,
    tokens: Sequence[int] = (1, 16, 64, 256, 1024, 4096),
    *,
    rounds: int = 16,
    fastest: int | None = None,
) -> Gain:
    """Measures the matmuls of a module's linears on its GPU; later calls use the fastest kernels.

    Each sample is stored immediately in the user's store, and stored problems are not measured again,
    so an interrupted call continues where it stopped. Progress and the time left are logged to
    "stoneware.measuring". Another process measures, so the GPU needs room for one layer in addition
    to the module.

    Args:
      module: with nn.Linear in bf16 or fp16, or modules with a `weight` [n, k] in float8_e4m3fn: those of
        `sw.nn` are measured with the scales of their recipe, others with a scale per row. Experts are not measured,
        nor the matmuls of backward.
      tokens: numbers of input rows to measure.
      rounds: timings of each candidate.
      fastest: the most candidates besides the vendor's kernels, those that the tables expect to be the fastest;
        None measures all.

    Returns:
      The gain in speed; print it.

    Raises:
      TypeError: `module` is not a torch.nn.Module.
      ValueError: the module has no such linear, or one that trains in fp8, or an argument breaks its rule.
      UnsupportedError: its weights are not on one GPU.
      StoreError: samples cannot be stored.
    """
    import torch

    from stoneware.measuring.progress import Reporter
    from stoneware.measuring.settings import Settings
    from stoneware.runtime.device import cuda_device
    from stoneware.sessions import session
    from stoneware.tuning import policy
    from stoneware.tuning.store import user_store

    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"module={quoted(module)} must be a torch.nn.Module, not {type(module).__name__}; pass the model, or use "
            "`stoneware tune` for shapes"
        )
    by_dtype = layers_of_module(module)
    if not by_dtype:
        raise ValueError(
            "module must have an nn.Linear in bf16 or fp16, or a weight in float8_e4m3fn; pass such a model"
        )
    if not isinstance(tokens, Sequence) or not tokens or any(type(one) is not int or one < 1 for one in tokens):
        raise ValueError(f"tokens={quoted(tokens)} must be integers >= 1; pass for example [1, 16, 512]")
    ordinal = _ordinal(module)
    reporter, wanted = Reporter(), []
    for dtype, found in by_dtype.items():
        taken, skipped = problems(found, tokens, [dtype])
        wanted += taken
        for reason in skipped:
            reporter.note(f"left out: {reason}")
    store = user_store()
    if store is None:
        raise StoreError("the user's store needs a folder, and this user has no home folder; set STONEWARE_CACHE_DIR")
    settings = Settings(rounds=rounds, fastest=fastest, command="sw.tune")
    session.tune(wanted, store, ordinal, settings, reporter, ranks=session.Ranks())
    policy.forget_plans()
    device = cuda_device(ordinal).fingerprint
    assert device is not None  # a GPU has one
    return gain(wanted, store, device)


def _ordinal(module: torch.nn.Module) -> int:
    """The GPU that a module is on."""
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        raise UnsupportedError(
            f"tune needs a module on one GPU, and this one is on {', '.join(sorted(map(str, devices)))}; "
            "move it with .to('cuda'), or use `stoneware tune --model`"
        )
    return next(iter(devices)).index or 0
