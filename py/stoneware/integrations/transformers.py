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

from stoneware.errors import quoted
from stoneware.integrations.hosts import unfit
from stoneware.nn.convert import convert
from stoneware.nn.experts import routed
from stoneware.nn.recipes import RECIPES
from stoneware.ops.grouped_mm.api import grouped_mm

METHOD = "stoneware"
"""The `quant_method` of the quantizer."""

KERNEL = "kernels-community/finegrained-fp8"
"""The kernel package of `FP8Linear` and `FP8Experts`."""

_FOLDER = Path(__file__).with_name("hf_kernels")


def config(recipe: str = "rowwise", modules_to_not_convert: tuple[str, ...] | list[str] | None = None) -> Any:
    """A `quantization_config` for `from_pretrained`: the 16-bit weights of a checkpoint are quantized once loaded.

    The model is that of `sw.nn.convert(model, recipe, frozen=True)`. Registers the quantizer in transformers.

    Args:
      recipe: "tensorwise", "rowwise" or "blockwise".
      modules_to_not_convert: last names or full names of layers that stay in 16 bits; None keeps heads and routers.

    Raises:
      ValueError: an unknown recipe.
      UnsupportedError: transformers is missing, or has other interfaces.
    """
    if recipe not in RECIPES:
        raise ValueError(f"recipe={quoted(recipe)} must be one of {', '.join(RECIPES)}; pass one of these")
    return register()(recipe=recipe, modules_to_not_convert=modules_to_not_convert)


@functools.cache
def register() -> Any:
    """Registers the quantizer "stoneware" in transformers, once, and returns the class of its configs.

    Raises:
      UnsupportedError: transformers is missing, or has other interfaces.
    """
    try:
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

    @register_quantizer(METHOD)
    class StonewareQuantizer(HfQuantizer):
        """Converts a model after its weights are loaded."""

        requires_calibration = False

        def validate_environment(self, *_: Any, **__: Any) -> None:
            if self.pre_quantized:
                raise ValueError(
                    'quant_method="stoneware" in a checkpoint: weights are quantized when they are loaded, and a '
                    "checkpoint has none of this method; remove quantization_config from its config.json"
                )

        def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
            kept = self.quantization_config.modules_to_not_convert
            names = None if kept is None else frozenset(kept)
            model.stoneware_conversion = convert(
                model,
                self.quantization_config.recipe,
                None if names is None else lambda name, _: not {name, name.rpartition(".")[2]} & names,
                frozen=True,
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
        raise unfit("transformers", error) from error
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
