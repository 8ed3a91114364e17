"""Finds the fp8 linear layers of checkpoints that other libraries loaded, whose weights `convert` keeps.

| layer | scales of the weight | recipe |
|---|---|---|
| `FP8Linear` of transformers | 128x128, or smaller blocks (`folded_scales`); one | "blockwise"; "rowwise" |
| `CompressedTensorsFP8Linear` of transformers | rows | "rowwise" |
| torch.nn.Linear of compressed-tensors | rows, one; 128x128 | "rowwise"; "blockwise" |
| torch.nn.Linear with a `Float8Tensor` of torchao | rows; one; 128x128 | "rowwise"; "tensorwise"; "blockwise" |
| `FP8Experts` of transformers | 128x128, or smaller blocks; one for each expert | "blockwise"; "rowwise" |

A layer is only taken if x gets the scales of the recipe there, too: at each call, one for a row, or for 128 elements
of a row, or for x. Where x has a power of two for 32 elements there, it gets a float32 scale for 128, whose error is
smaller for most inputs. The libraries are not imported: a layer of theirs exists only where they were.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from stoneware.nn import folded_scales
from stoneware.nn.inference import dequantize
from stoneware.nn.recipes import BLOCK, why_not

_FINEGRAINED = "transformers.integrations.finegrained_fp8"
_E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class PublishedWeight:
    """The weight of a layer, like `Float8InferenceLinear` has it.

    Attributes:
      recipe: "tensorwise", "rowwise" or "blockwise".
      weight: [n, k] float8_e4m3fn.
      scale: float32, [1], [n, 1] or [n / 128, k / 128]; of smaller blocks if they are to be folded.
      dtype: of x and of y.
      attributes: names of what the library set on the layer, a forward of its own among them; `convert` removes it.
      folding: which blocks become those of 128x128, and what that rounds, for the report; empty if none do.
    """

    recipe: str
    weight: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype
    attributes: tuple[str, ...] = ()
    folding: str = ""

    @property
    def has_forward(self) -> bool:
        return "forward" in self.attributes

    def dequantized(self) -> torch.Tensor:
        """The weight [n, k] of `dtype`."""
        return dequantize(self.weight.detach(), self.scale.detach(), self.dtype)


def find(layer: Any) -> PublishedWeight | str | None:
    """The fp8 weight of a layer; None if it has none in a format of `Float8InferenceLinear`, or a reason why not."""
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
    if published is None or isinstance(published, str):
        return published
    if published.weight.dtype != _E4M3 or type(published.weight.data) is not torch.Tensor:
        return None
    return published if why_not(published.recipe, layer.in_features, layer.out_features) is None else None


@dataclass(frozen=True, kw_only=True)
class ExpertsScales:
    """The scales of experts, like `FusedPublishedExperts` has them.

    Attributes:
      recipe: "rowwise" or "blockwise".
      scales: name of a parameter -> its value in float32, [experts, n] or [experts, n / 128, k / 128]; of smaller
        blocks if they are to be folded.
      folding: as in `PublishedWeight`.
    """

    recipe: str
    scales: dict[str, torch.Tensor]
    folding: str = ""


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
    recipe = "rowwise" if blocks is None else "blockwise"
    scales, losses = {}, []
    for name in ("gate_up_proj", "down_proj"):
        weight, scale = getattr(module, name), getattr(module, f"{name}_scale_inv")
        if weight.dtype != _E4M3 or weight.is_meta or type(weight.data) is not torch.Tensor:
            return f"{name} is a {type(weight.data).__name__} of {weight.dtype} on {weight.device}, not {_E4M3}"
        num_experts, n, k = weight.shape
        reason = why_not(recipe, k, n)
        if reason is not None:
            return f"in {name} {reason}"
        # Without blocks an expert has one scale, or one each for gate and up.
        rows, columns = blocks or (BLOCK, BLOCK)
        shapes = [(n // rows, k // columns)] if recipe == "blockwise" else [(1, 1), (2, 1)]
        if tuple(scale.shape) not in [(num_experts, *shape) for shape in shapes]:
            return f"{name}_scale_inv has the shape {[*scale.shape]}"
        if scale.dtype != torch.float32:
            scale = scale.detach().float()
        if recipe == "rowwise":
            scale = scale.detach()[..., 0].repeat_interleave(n // scale.shape[1], 1)
        elif (rows, columns) != (BLOCK, BLOCK):
            loss = folded_scales.loss(weight, scale)
            if isinstance(loss, str):
                return f"in {name} {loss}"
            losses.append(loss)
        scales[f"{name}_scale_inv"] = scale
    folding = _folding(blocks, max(loss.share_rounded for loss in losses)) if losses else ""
    return ExpertsScales(recipe=recipe, scales=scales, folding=folding)


def _folding(blocks: tuple[int, int], share_rounded: float) -> str:
    """The blocks and the share, rounded up to a power of ten, so that most layers of a model have one text."""
    rows, columns = blocks
    limit = next((limit for limit in ("0.01", "0.1", "1", "10") if 100 * share_rounded <= float(limit)), "100")
    return f"{rows}x{columns} scales folded, " + (f"at most {limit} % rounded" if share_rounded else "exact")


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


def _finegrained(layer: Any) -> PublishedWeight | str | None:
    blocks, dtype = layer.block_size, _dtype(layer, torch.bfloat16)
    if layer.activation_scheme != "dynamic":
        return None
    if blocks is None or tuple(blocks) == (BLOCK, BLOCK):
        return _made("rowwise" if blocks is None else "blockwise", layer.weight, layer.weight_scale_inv, dtype)
    if layer.weight.dtype != _E4M3 or layer.weight.is_meta or type(layer.weight.data) is not torch.Tensor:
        return None
    reason = why_not("blockwise", layer.in_features, layer.out_features)
    if reason is not None:
        return reason
    scale = layer.weight_scale_inv.detach().float()
    loss = folded_scales.loss(layer.weight, scale)
    if isinstance(loss, str):
        return loss
    folding = _folding(blocks, loss.share_rounded)
    return PublishedWeight(recipe="blockwise", weight=layer.weight, scale=scale, dtype=dtype, folding=folding)


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
