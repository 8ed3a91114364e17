"""Stoneware's experts for vLLM, on `sw.grouped_mm`; `register` puts them before vLLM's own.

    16 bits                                        Qwen3 and Mixtral as published
    fp8, 1x128 of x and 128x128 of the weight      DeepSeek-V3 and Qwen3 FP8
    fp8, rows of x and of the weight               compressed-tensors FP8_DYNAMIC
    MXFP8 weights, folded into 128x128             see `vllm_mxfp8`; x has scales of 1x128

vLLM asks a function for the classes of each backend, and takes the first that supports a layer. Stoneware's class is
the first one of the backend "triton", whose weights have the layout of the checkpoint, and "triton" comes first where
Stoneware's class fits. For MXFP8 it always does: there vLLM's own class of that backend is for AMD alone. Layers that
Stoneware's class refuses, LoRA and an explicit --moe-backend stay with vLLM.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from stoneware.integrations import vllm_mxfp8
from stoneware.integrations.hosts import unfit
from stoneware.nn.experts import frozen_matmul, routed
from stoneware.nn.recipes import BLOCK, UNIT
from stoneware.ops.grouped_mm.api import grouped_mm


@functools.cache
def register(why_not_here: Callable[[], str | None]) -> None:
    """Puts the experts before vLLM's own; once in a process.

    Args:
      why_not_here: says why the kernels do not run on vLLM's platform, or None.

    Raises:
      UnsupportedError: vLLM is missing, or has other interfaces.
    """
    try:
        from vllm.config import get_current_vllm_config_or_none as current_config
        from vllm.model_executor.layers.fused_moe.oracle import fp8, mxfp8, unquantized
        from vllm.platforms import current_platform

        experts = _experts(why_not_here)
        modules = [(fp8, fp8.Fp8MoeBackend.TRITON), (unquantized, unquantized.UnquantizedMoeBackend.TRITON)]
        own_functions = [(module._get_priority_backends, module.backend_to_kernel_cls) for module, _ in modules]
        own_mxfp8, mxfp8_backends = mxfp8._mxfp8_backend_to_kernel_cls, mxfp8._SUPPORTED_BACKENDS
        mxfp8_backend = fp8.Fp8MoeBackend.TRITON_MXFP8
    except (ImportError, AttributeError) as error:
        raise unfit("vllm", error) from error
    for (module, backend), functions in zip(modules, own_functions):
        _wrap(module, backend, experts, current_config, *functions)
    if current_platform.is_cuda() or current_platform.is_cpu():
        mxfp8._SUPPORTED_BACKENDS = (mxfp8_backend, *(other for other in mxfp8_backends if other != mxfp8_backend))
        mxfp8._mxfp8_backend_to_kernel_cls = _with_experts(mxfp8_backend, experts, current_config, own_mxfp8)


def _wrap(module: Any, backend: Any, experts: Any, current_config: Any, own_priority: Any, own_classes: Any) -> None:
    @functools.wraps(own_priority)
    def priority(moe_config: Any, weight_key: Any = None, activation_key: Any = None, *args: Any) -> list[Any]:
        keys = (weight_key, activation_key)
        backends: list[Any] = own_priority(moe_config, *(keys if module.__name__.endswith("fp8") else ()), *args)
        fits, _ = experts.is_supported_config(experts, moe_config, *keys, experts.activation_format())
        return [backend, *(other for other in backends if other != backend)] if fits else backends

    module._get_priority_backends = priority
    module.backend_to_kernel_cls = _with_experts(backend, experts, current_config, own_classes)


def _with_experts(backend: Any, experts: Any, current_config: Any, own_classes: Any) -> Callable[[Any], list[Any]]:
    """vLLM's function from a backend to its classes, with Stoneware's first."""

    @functools.wraps(own_classes)
    def classes(requested: Any) -> list[Any]:
        own: list[Any] = own_classes(requested)
        config = current_config()
        # For LoRA vLLM takes the first class without asking it.
        is_asked = config is not None and config.lora_config is None
        return [experts, *own] if requested == backend and is_asked else own

    return classes


def why_not_config(moe_config: Any, weight_key: Any) -> str | None:
    """Why the experts of vLLM's FusedMoEConfig stay with vLLM, or None."""
    if moe_config.moe_backend != "auto":
        return f"--moe-backend={moe_config.moe_backend} was chosen"
    if moe_config.has_bias or not moe_config.is_act_and_mul:
        return "takes gated experts without biases"
    if moe_config.in_dtype != torch.bfloat16:
        return f"takes bfloat16, not {moe_config.in_dtype}"
    unit = UNIT if weight_key is None or weight_key.scale.group_shape.is_per_channel() else BLOCK
    sizes = (moe_config.hidden_dim, moe_config.intermediate_size_per_partition)
    return f"requires sizes that are multiples of {unit}, not {sizes}" if any(size % unit for size in sizes) else None


@functools.cache
def _experts(why_not_here: Callable[[], str | None]) -> Any:
    """The class; its base is vLLM's."""
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
    from vllm.model_executor.layers.quantization.utils import quant_utils

    schemes = (
        (None, None),
        (quant_utils.kFp8Static128BlockSym, quant_utils.kFp8Dynamic128Sym),
        (quant_utils.kFp8StaticChannelSym, quant_utils.kFp8DynamicTokenSym),
        (quant_utils.kMxfp8Static, quant_utils.kMxfp8Dynamic),
    )
    activations = (
        MoEActivation.SILU,
        MoEActivation.GELU,
        MoEActivation.GELU_TANH,
        MoEActivation.SWIGLUOAI_UNINTERLEAVE,
    )
    standard = modular_kernel.FusedMoEActivationFormat.Standard

    class StonewareExperts(modular_kernel.FusedMoEExpertsModular):
        """Sorts the tokens by expert, and runs two grouped matmuls; x and h are quantized here."""

        expects_unquantized_inputs = True
        folded: tuple[torch.Tensor | None, torch.Tensor | None] | None = None
        """The scales of MXFP8 weights after the first call, which folds them; vLLM makes it before it serves."""

        @staticmethod
        def is_supported_config(
            cls: Any, moe_config: Any, weight_key: Any, activation_key: Any, activation_format: Any
        ) -> tuple[bool, str | None]:
            fits, reason = modular_kernel.FusedMoEExperts.is_supported_config(
                cls, moe_config, weight_key, activation_key, activation_format
            )
            if fits:
                reason = why_not_config(moe_config, weight_key)
            return reason is None, reason

        @staticmethod
        def activation_format() -> Any:
            return standard

        @staticmethod
        def _supports_current_device() -> bool:
            return why_not_here() is None

        @staticmethod
        def _supports_no_act_and_mul() -> bool:
            return False

        @staticmethod
        def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
            return (weight_key, activation_key) in schemes

        @staticmethod
        def _supports_activation(activation: Any) -> bool:
            return activation in activations

        @staticmethod
        def _supports_parallel_config(moe_parallel_config: Any) -> bool:
            """Tensor parallel plans; an expert parallel one has tokens of experts that are elsewhere."""
            return not moe_parallel_config.use_ep and not moe_parallel_config.use_all2all_kernels

        def finalize_weight_and_reduce_impl(self) -> Any:
            return TopKWeightAndReduceNoOP()

        def workspace_shapes(
            self, M: int, N: int, K: int, *_: Any
        ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
            return (0,), (0,), (M, K)

        def apply(
            self,
            output: torch.Tensor,
            hidden_states: torch.Tensor,
            w1: torch.Tensor,
            w2: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            activation: Any,
            *_: Any,
            apply_router_weight_on_input: bool = False,
            **__: Any,
        ) -> None:
            """hidden_states [m, k] in 16 bits; w1 [experts, 2 n, k] and w2 [experts, k, n] like in the checkpoint."""
            scales = self.scales(w1, w2)

            def feed_forward(rows: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
                gate_up = self.matmul(rows, w1, scales[0], offs)
                h = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
                self.activation(activation, h, gate_up)
                return self.matmul(h, w2, scales[1], offs)

            # vLLM multiplied the input then.
            weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
            output.copy_(routed(hidden_states, topk_ids, weights, w1.shape[0], feed_forward))

        def scales(self, w1: Any, w2: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
            """Those of w1 and w2; None of weights in 16 bits."""
            if self.quant_dtype != "mxfp8":
                return self.w1_scale, self.w2_scale
            if self.folded is None:
                self.folded = (
                    vllm_mxfp8.fold(w1, self.w1_scale, "the first matmul of experts"),
                    vllm_mxfp8.fold(w2, self.w2_scale, "the second matmul of experts"),
                )
            return self.folded

        def matmul(
            self, rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, offs: torch.Tensor
        ) -> torch.Tensor:
            if scale is None:
                return grouped_mm(rows, weight.mT, offs)
            if self.block_shape is None:
                scale = scale.reshape(weight.shape[:2])
            return frozen_matmul(rows, weight, scale, offs)

    return StonewareExperts
