"""Stoneware in transformers: a quantizer for `from_pretrained`, and the kernels of its own fp8 layers.

    from stoneware.integrations import transformers as engine

    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=engine.config("rowwise"))
    engine.use_kernels()    # before the first call of an FP8Linear
    model.set_experts_implementation(engine.register_experts())

docs/engines.md has all three.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stoneware.integrations.hosts import unfit
from stoneware.nn.changes import LoadedWeight
from stoneware.nn.convert import convert_loaded, loadable
from stoneware.nn.experts import routed
from stoneware.nn.inference import Float8InferenceLinear
from stoneware.nn.recipes import RECIPES
from stoneware.ops.grouped_mm.api import grouped_mm
from stoneware.specs.problem import check_choice

METHOD = "stoneware"
"""The `quant_method` of the quantizer."""

KERNEL = "kernels-community/finegrained-fp8"
"""The kernel package of `FP8Linear` and `FP8Experts`."""

_SCALE = "weight_scale_inv"

_FOLDER = Path(__file__).with_name("hf_kernels")


def config(recipe: str = "rowwise", modules_to_not_convert: tuple[str, ...] | list[str] | None = None) -> Any:
    """A `quantization_config` for `from_pretrained`: the 16-bit weights of a checkpoint are quantized on load.

    Each weight of a linear layer is quantized when it is read, so the 16-bit model never is in memory. Experts, and all
    layers in a process group or with a device_map that offloads, are quantized after all are loaded; layers that are
    offloaded stay in 16 bits. The model is that of `sw.nn.convert(model, recipe, frozen=True)`. Registers the quantizer
    in transformers.

    Args:
      recipe: "tensorwise", "rowwise" or "blockwise".
      modules_to_not_convert: last names or full names of layers that stay in 16 bits; None keeps heads and routers.

    Raises:
      ValueError: an unknown recipe.
      UnsupportedError: transformers is missing, or has other interfaces.
    """
    check_choice("recipe", recipe, RECIPES)
    return register()(recipe=recipe, modules_to_not_convert=modules_to_not_convert)


@functools.cache
def register() -> Any:
    """Registers the quantizer "stoneware" in transformers, once, and returns the class of its configs.

    Raises:
      UnsupportedError: transformers is missing, or has other interfaces.
    """
    try:
        from transformers.core_model_loading import ConversionOps
        from transformers.integrations.accelerate import infer_auto_device_map
        from transformers.quantizers.auto import register_quantization_config, register_quantizer
        from transformers.quantizers.base import HfQuantizer
        from transformers.utils.quantization_config import QuantizationConfigMixin
    except ImportError as error:
        raise unfit("transformers", error) from error

    @register_quantization_config(METHOD)
    class StonewareConfig(QuantizationConfigMixin):
        """The arguments of `config`."""

        def __init__(self, recipe: str = "rowwise", modules_to_not_convert: Any = None, **_: Any) -> None:
            self.quant_method = METHOD
            self.recipe = recipe
            self.modules_to_not_convert = modules_to_not_convert

    class Quantize(ConversionOps):
        """A weight of a layer -> its fp8 values and their scales."""

        def __init__(self, quantizer: Any) -> None:
            self.quantizer = quantizer

        def convert(self, input_dict: dict[str, Any], *_: Any, **__: Any) -> dict[str, torch.Tensor]:
            results: dict[str, torch.Tensor] = {}
            for key, value in input_dict.items():
                weight = value[0] if isinstance(value, list) else value
                name = key.rpartition(".")[0]
                layer, recipe = self.quantizer.layers[name], self.quantizer.quantization_config.recipe
                if weight.shape != layer.weight.shape:
                    raise ValueError(
                        f"{key} has the shape {list(weight.shape)} in the checkpoint, it must be "
                        f"{list(layer.weight.shape)}; load the checkpoint with its own config"
                    )
                values, scale = Float8InferenceLinear.quantized(weight.to(layer.weight.dtype), recipe)
                results |= {key: values, f"{name}.{_SCALE}": scale}
            return results

    @register_quantizer(METHOD)
    class StonewareQuantizer(HfQuantizer):
        """Quantizes weights while they are loaded, and converts the model afterwards."""

        requires_calibration = False

        def __init__(self, quantization_config: Any, **keywords: Any) -> None:
            super().__init__(quantization_config, **keywords)
            # Layers whose weights are quantized while they are loaded; they have a parameter for the scales then.
            self.layers: dict[str, torch.nn.Linear] = {}
            self.model: Any = None
            self.dtypes: dict[torch.nn.Linear, torch.dtype] = {}

        @property
        def names_filter(self) -> Callable[[str, torch.nn.Module], bool] | None:
            kept = self.quantization_config.modules_to_not_convert
            if kept is None:
                return None
            names = frozenset(kept)
            return lambda name, _: not {name, name.rpartition(".")[2]} & names

        @property
        def quantized_element_size(self) -> float | None:
            return 1

        def _process_model_before_weight_loading(self, model: Any, device_map: Any = None, **_: Any) -> None:
            if isinstance(device_map, dict) and _offloads(device_map):
                return
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                return
            layers = loadable(model, self.quantization_config.recipe, self.names_filter)
            pairs: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
            tied = {*pairs, *pairs.values()}
            self.layers = {name: layer for name, layer in layers.items() if f"{name}.weight" not in tied}
            self.dtypes = {layer: layer.weight.dtype for layer in self.layers.values()}
            for layer in self.layers.values():
                layer.register_parameter(_SCALE, torch.nn.Parameter(torch.empty(0, device="meta"), False))
            self.model = model

        def adjust_max_memory(self, max_memory: Any) -> Any:
            """The same; if device_map="auto" and the like offload, all layers are quantized afterwards."""
            if self.layers:
                whole = getattr(self.model, "_no_split_modules", None)
                device_map = infer_auto_device_map(
                    self.model, max_memory=max_memory, no_split_module_classes=whole, hf_quantizer=self
                )
                if _offloads(device_map):
                    for layer in self.layers.values():
                        del layer._parameters[_SCALE]
                    self.layers, self.dtypes = {}, {}
            return max_memory

        def param_needs_quantization(self, model: Any, param_name: str, **keywords: Any) -> bool:
            name, _, parameter = param_name.rpartition(".")
            return parameter in ("weight", _SCALE) and name in self.layers

        def get_quantize_ops(self) -> Any:
            return Quantize(self)

        def validate_environment(self, *_: Any, **__: Any) -> None:
            if self.pre_quantized:
                raise ValueError(
                    'quant_method="stoneware" in a checkpoint: weights are quantized when they are loaded, and a '
                    "checkpoint has none of this method; remove quantization_config from its config.json"
                )

        def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
            weights = {}
            for name, layer in self.layers.items():
                weight, scale = layer.weight, layer._parameters.pop(_SCALE)
                if weight.is_meta:
                    raise ValueError(
                        f"device_map offloads {name}, whose weight was quantized while it was loaded; pass a "
                        'device_map without "cpu" and "disk", or call sw.nn.convert after from_pretrained'
                    )
                if scale is not None and weight.dtype == torch.float8_e4m3fn:  # it was in the checkpoint
                    weights[layer] = LoadedWeight(weight.detach(), scale.detach())
                    empty = torch.empty(weight.shape, dtype=self.dtypes[layer], device="meta")
                    layer.weight = torch.nn.Parameter(empty)
            self.layers, self.dtypes, self.model = {}, {}, None
            model.stoneware_conversion = convert_loaded(
                model, self.quantization_config.recipe, self.names_filter, weights
            )
            # The config of the layers belongs to save_pretrained, which `convert` replaced.
            del model.config.quantization_config
            return model

        def is_serializable(self) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            """Adapters train over frozen weights."""
            return True

        @property
        def is_compileable(self) -> bool:
            return True

    return StonewareConfig


def _offloads(device_map: dict[str, Any]) -> bool:
    """Whether weights are on the disk, or on the host while other weights are on a device."""
    places = {str(place) for place in device_map.values()}
    return "disk" in places or (len(places) > 1 and "cpu" in places)


@functools.cache
def register_experts() -> str:
    """Registers Stoneware's grouped matmuls as an implementation of experts, for training and for inference.

    Pass its name to `model.set_experts_implementation` or `from_pretrained(..., experts_implementation=)`. Experts with
    biases, transposed weights, no gate or a norm of their results, those of expert parallel plans, and weights that are
    not bfloat16 run as "grouped_mm" of transformers. `sw.nn.convert` is the faster way for experts that it can prove.

    Returns:
      "stoneware".

    Raises:
      UnsupportedError: transformers is missing, or has other interfaces.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        own = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
        ALL_EXPERTS_FUNCTIONS.register(METHOD, functools.partial(experts_forward, own))
    except (ImportError, AttributeError, KeyError) as error:
        raise unfit("transformers", error) from error
    return METHOD


def experts_forward(
    own: Callable[..., torch.Tensor],
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The sum of each token's experts, with the gate of the module, or by `own` where the module is of another form.

    Args:
      own: an implementation of transformers.
      module: experts of transformers, with gate_up_proj [experts, 2 * n, k] and down_proj [experts, k, n].
      hidden_states: [tokens, k] bfloat16.
      top_k_index, top_k_weights: [tokens, top_k].
    """
    # An older transformers does not say whether experts are parallel, whose tokens may have none of these experts.
    is_parallel = getattr(module, "_is_expert_parallel", True)
    has_norm = getattr(module, "has_post_expert_norm", False)
    is_plain = module.has_gate and not (module.has_bias or module.is_transposed or is_parallel or has_norm)
    if not is_plain or {hidden_states.dtype, module.gate_up_proj.dtype, module.down_proj.dtype} != {torch.bfloat16}:
        return own(module, hidden_states, top_k_index, top_k_weights)

    def feed_forward(rows: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        gate_up = grouped_mm(rows, module.gate_up_proj.mT, offs)
        return grouped_mm(module._apply_gate(gate_up), module.down_proj.mT, offs)

    return routed(hidden_states, top_k_index, top_k_weights, module.num_experts, feed_forward)


def use_kernels() -> None:
    """Lets `FP8Linear` and `FP8Experts` of transformers load Stoneware's kernels in this process and its children.

    Adds an entry to the environment variable LOCAL_KERNELS, which the package `kernels` reads at its first kernel.
    Where transformers would prefer DeepGEMM (nvcc is installed), it is turned off for linear layers.

    Raises:
      UnsupportedError: transformers or kernels is missing, or has other interfaces.
      RuntimeError: transformers loaded other kernels before.
    """
    try:
        from transformers.integrations import finegrained_fp8, hub_kernels
        from transformers.utils import import_utils

        loaded, repository = finegrained_fp8._FINEGRAINED_FP8, hub_kernels._HUB_KERNEL_MAPPING["finegrained-fp8"]
        if repository["repo_id"] != KERNEL:
            raise AttributeError(f"FP8Linear loads {repository['repo_id']} instead of {KERNEL}")
    except (ImportError, AttributeError, KeyError) as error:
        raise unfit("kernels", error) from error
    if not import_utils.is_kernels_available():
        lowest, beyond = import_utils.KERNELS_MIN_VERSION, import_utils.KERNELS_MAX_VERSION
        raise unfit("kernels", ImportError(f"this transformers takes kernels from {lowest} on, below {beyond}"))
    if loaded is not None and not loaded.matmul.__module__.startswith("stoneware."):
        raise RuntimeError(
            f"{KERNEL} was loaded from {loaded.matmul.__module__} before; call use_kernels() before the first call "
            "of an FP8Linear"
        )
    entries = [entry for entry in os.environ.get("LOCAL_KERNELS", "").split(":") if entry]
    os.environ["LOCAL_KERNELS"] = ":".join(
        [*(entry for entry in entries if not entry.startswith(f"{KERNEL}=")), f"{KERNEL}={_FOLDER}"]
    )
    os.environ["TRANSFORMERS_DISABLE_DEEPGEMM_LINEAR"] = "1"
