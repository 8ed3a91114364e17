"""Finds the fp8 linear layers of checkpoints that other libraries loaded, whose weights `convert` keeps.

| layer | scales of the weight | recipe |
|---|---|---|
| `FP8Linear` of transformers | 128x128; one | "blockwise"; "rowwise" |
| `CompressedTensorsFP8Linear` of transformers | rows | "rowwise" |
| torch.nn.Linear of compressed-tensors | rows, one; 128x128 | "rowwise"; "blockwise" |
| torch.nn.Linear with a `Float8Tensor` of torchao | rows; one; 128x128 | "rowwise"; "tensorwise"; "blockwise" |
| `FP8Experts` of transformers | 128x128; one for each expert | "blockwise"; "rowwise" |

A layer is only taken if x gets the scales of the recipe there, too: at each call, one for a row, or for 128 elements
of a row, or for x. The libraries are not imported: a layer of theirs exists only where they were.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from stoneware.nn.recipes import BLOCK, why_not

_FINEGRAINED = "transformers.integrations.finegrained_fp8"
_E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class PublishedWeight:
    """The weight of a layer, like `Float8InferenceLinear` has it.

    Attributes:
      recipe: "tensorwise", "rowwise" or "blockwise".
      weight: [n, k] float8_e4m3fn.
      scale: float32, [1], [n, 1] or [n / 128, k / 128].
      dtype: of x and of y.
      attributes: names of what the library set on the layer, a forward of its own among them; `convert` removes it.
    """

    recipe: str
    weight: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype
    attributes: tuple[str, ...] = ()

    @property
    def has_forward(self) -> bool:
        return "forward" in self.attributes


def find(layer: Any) -> PublishedWeight | None:
    """The fp8 weight of a layer, or None if it has none in a format of `Float8InferenceLinear`."""
    place = (type(layer).__module__, type(layer).__name__)
    if place == (_FINEGRAINED, "FP8Linear"):
        published = _finegrained(layer)
    elif place == ("transformers.integrations.compressed_tensors", "CompressedTensorsFP8Linear"):
        published = _made("rowwise", layer.weight, layer.weight_scale, _dtype(layer, torch.bfloat16))
    elif type(layer) is torch.nn.Linear and hasattr(layer, "quantization_scheme"):
        published = _compressed(layer)
    elif type(layer) is torch.nn.Linear and _is_torchao(layer.weight):
        published = find_torchao(layer.weight)
    else:
        return None
    if published is None or published.weight.dtype != _E4M3 or type(published.weight.data) is not torch.Tensor:
        return None
    return published if why_not(published.recipe, layer.in_features, layer.out_features) is None else None


@dataclass(frozen=True, kw_only=True)
class ExpertsScales:
    """The scales of experts, like `FusedPublishedExperts` has them.

    Attributes:
      recipe: "rowwise" or "blockwise".
      scales: name of a parameter -> its value in float32, [experts, n] or [experts, n / 128, k / 128].
    """

    recipe: str
    scales: dict[str, torch.Tensor]


def is_experts(module: Any) -> bool:
    """Whether it is an `FP8Experts` of transformers."""
    return (type(module).__module__, type(module).__name__) == (_FINEGRAINED, "FP8Experts")


_EXPERTS_IMPLEMENTATIONS = (None, "eager", "batched_mm", "grouped_mm", "deepgemm")
"""Kernels of transformers that read the weights and scales of `FP8Experts` as the checkpoint has them."""


def find_experts(module: Any) -> ExpertsScales | str:
    """The scales of an `FP8Experts` with gate_up_proj and down_proj, or why they have no counterpart."""
    required = {
        "has_gate": True, "has_bias": False, "is_transposed": False, "_is_expert_parallel": False,
        "has_post_expert_norm": False, "activation_scheme": "dynamic",
    }  # fmt: skip
    for name, value in required.items():
        if getattr(module, name, value) != value:
            return f"{name} is {getattr(module, name)!r}, not {value!r}"
    implementation = getattr(module.config, "_experts_implementation", None)
    if implementation not in _EXPERTS_IMPLEMENTATIONS:
        return f"its experts implementation is {implementation!r}"
    blocks = module.block_size
    if blocks is not None and tuple(blocks) != (BLOCK, BLOCK):
        return f"its blocks are {tuple(blocks)}, not {(BLOCK, BLOCK)}"
    recipe = "rowwise" if blocks is None else "blockwise"
    scales = {}
    for name in ("gate_up_proj", "down_proj"):
        weight, scale = getattr(module, name), getattr(module, f"{name}_scale_inv")
        if weight.dtype != _E4M3 or weight.is_meta or type(weight.data) is not torch.Tensor:
            return f"{name} is a {type(weight.data).__name__} of {weight.dtype} on {weight.device}, not {_E4M3}"
        num_experts, n, k = weight.shape
        reason = why_not(recipe, k, n)
        if reason is not None:
            return f"in {name} {reason}"
        # Without blocks an expert has one scale, or one each for gate and up.
        shapes = [(n // BLOCK, k // BLOCK)] if recipe == "blockwise" else [(1, 1), (2, 1)]
        if tuple(scale.shape) not in [(num_experts, *shape) for shape in shapes]:
            return f"{name}_scale_inv has the shape {[*scale.shape]}"
        if scale.dtype != torch.float32:
            scale = scale.detach().float()
        if recipe == "rowwise":
            scale = scale.detach()[..., 0].repeat_interleave(n // scale.shape[1], 1)
        scales[f"{name}_scale_inv"] = scale
    return ExpertsScales(recipe=recipe, scales=scales)


def _made(
    recipe: str, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, attributes: tuple[str, ...] = ()
) -> PublishedWeight:
    """Brings the scales to float32 and to the shape of the recipe; one scale serves all rows."""
    if scale.dtype != torch.float32:
        scale = scale.detach().float()
    if recipe == "rowwise" and scale.shape != (weight.shape[0], 1):
        scale = scale.detach().reshape(-1, 1).expand(weight.shape[0], 1).contiguous()
    return PublishedWeight(recipe=recipe, weight=weight, scale=scale, dtype=dtype, attributes=attributes)


def _dtype(layer: Any, default: torch.dtype) -> torch.dtype:
    dtype: torch.dtype = default if layer.bias is None else layer.bias.dtype
    return dtype


def _finegrained(layer: Any) -> PublishedWeight | None:
    blocks = layer.block_size
    if layer.activation_scheme != "dynamic" or (blocks is not None and tuple(blocks) != (BLOCK, BLOCK)):
        return None
    recipe = "rowwise" if blocks is None else "blockwise"
    return _made(recipe, layer.weight, layer.weight_scale_inv, _dtype(layer, torch.bfloat16))


def _compressed(layer: Any) -> PublishedWeight | None:
    scheme, parameters = layer.quantization_scheme, {*layer._parameters}
    x, weight = getattr(scheme, "input_activations", None), getattr(scheme, "weights", None)
    if x is None or weight is None or scheme.output_activations is not None or not x.dynamic:
        return None
    if parameters - {"weight", "bias", "weight_scale"} or "weight_scale" not in parameters:
        return None
    if any((args.type, args.num_bits, args.symmetric) != ("float", 8, True) for args in (x, weight)):
        return None
    kinds = (x.strategy, weight.strategy)
    if kinds == ("group", "block") and (x.group_size, tuple(weight.block_structure)) == (BLOCK, (BLOCK, BLOCK)):
        recipe = "blockwise"
    elif kinds in (("token", "channel"), ("token", "tensor")):
        recipe = "rowwise"
    else:
        return None
    attributes = ["quantization_scheme", "quantization_status"]  # its model decompresses layers that have them
    function = getattr(vars(layer).get("forward"), "__func__", None)
    # Its __module__ is that of the forward that it wraps.
    if getattr(function, "__globals__", {}).get("__name__", "").startswith("compressed_tensors."):
        attributes.append("forward")
    scale = layer.weight_scale
    dtype = scale.dtype if scale.element_size() == 2 else torch.bfloat16
    return _made(recipe, layer.weight, scale, _dtype(layer, dtype), attributes=tuple(attributes))


def _is_torchao(weight: Any) -> bool:
    kind = type(weight)
    return kind.__name__ == "Float8Tensor" and kind.__module__.startswith("torchao.")


def find_torchao(weight: Any) -> PublishedWeight | None:
    """The weight in a `Float8Tensor` [n, k] of torchao, or None if its scales or those of x are others."""
    x = weight.act_quant_kwargs
    if x is None or x.float8_dtype != _E4M3 or x.hp_value_lb is not None or x.hp_value_ub is not None:
        return None
    n, k = weight.shape
    recipe = {
        ("PerRow", (1, k)): "rowwise",
        ("PerTensor", (n, k)): "tensorwise",
        ("PerBlock", (BLOCK, BLOCK)): "blockwise",
    }.get((type(x.granularity).__name__, tuple(weight.block_size)))
    if recipe is None or (recipe == "blockwise" and tuple(x.granularity.block_size) != (1, BLOCK)):
        return None
    scale = weight.scale.reshape(1) if recipe == "tensorwise" else weight.scale
    return _made(recipe, weight.qdata, scale, weight.dtype)
