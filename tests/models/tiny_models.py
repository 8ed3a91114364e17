"""Architectures of transformers at tiny sizes, with random weights, and inputs for them.

A config is the class's own default, with the sizes of `SIZES` for the fields that it has, also in nested configs, and
with what `CONFIG` changes for an architecture. Sizes are multiples of 128, the block of recipe "blockwise", where a
linear layer has them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

HIDDEN, INTERMEDIATE, LAYERS, HEADS, TOKENS, BATCH = 128, 256, 2, 4, 16, 2


def _fields(names: str, value: object) -> dict[str, object]:
    return dict.fromkeys(names.split(), value)


SIZES: dict[str, Any] = {
    **_fields("hidden_size d_model n_embd dim embed_dim embedding_size emb_dim", HIDDEN),
    **_fields("decoder_hidden_size encoder_hidden_size out_hidden_size projection_dim lru_width", HIDDEN),
    **_fields("kv_lora_rank q_lora_rank o_lora_rank time_step_rank mamba_dt_rank", HIDDEN),
    **_fields("intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner ffn_hidden_size", INTERMEDIATE),
    **_fields("mlp_dim hidden_dim ff_dim dense_intermediate_size feed_forward_hidden_size", INTERMEDIATE),
    **_fields("decoder_intermediate_size encoder_intermediate_size intermediate_dim d_inner", INTERMEDIATE),
    **_fields("moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size", HIDDEN),
    **_fields("moe_shared_expert_intermediate_size expert_ffn_hidden_size moe_shared_intermediate_size", HIDDEN),
    **_fields("shared_experts_intermediate_size", HIDDEN),
    **_fields("num_hidden_layers num_layers encoder_layers decoder_layers n_layer n_layers layers depth", LAYERS),
    **_fields("num_decoder_layers num_encoder_layers decoder_num_hidden_layers num_blocks", LAYERS),
    **_fields("num_attention_heads num_heads n_head n_heads encoder_attention_heads attention_heads", HEADS),
    **_fields("decoder_attention_heads decoder_num_attention_heads encoder_num_attention_heads", HEADS),
    **_fields("linear_num_heads linear_num_value_heads", HEADS),
    **_fields("num_key_value_heads linear_num_key_heads index_n_heads n_mamba_heads", 2),
    **_fields("head_dim attention_head_dim d_kv d_head kv_channels global_head_dim linear_head_dim", HIDDEN // HEADS),
    **_fields("qk_rope_head_dim qk_nope_head_dim v_head_dim rope_head_dim index_head_dim", HIDDEN // HEADS),
    **_fields("linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim", HIDDEN // HEADS),
    **_fields("mamba_n_heads mamba_num_heads", 2 * HEADS),
    **_fields("mamba_d_state ssm_state_size state_size rotary_dim", 16),
    **_fields("chunk_size mamba_chunk_size index_topk sliding_window", 8),
    **_fields("attention_window_size max_source_positions", 16),
    **_fields("vocab_size vocab_size_per_layer_input", 128),
    **_fields("max_position_embeddings n_positions seq_length max_seq_len n_ctx max_target_positions", 64),
    **_fields("num_experts n_routed_experts num_local_experts moe_num_experts", 4),
    **_fields("num_experts_per_tok moe_k moe_topk top_k_experts mamba_expand type_vocab_size", 2),
    **_fields("n_shared_experts n_group topk_group num_expert_group moe_num_shared_experts", 1),
    **_fields("first_k_dense_replace bos_token_id decoder_start_token_id", 1),
    **_fields("image_size num_mel_bins", 32),
    **_fields("patch_size num_conv_pos_embeddings", 8),
    **_fields("num_frames num_conv_pos_embedding_groups", 4),
    **_fields("num_channels", 3),
    **_fields("conv_kernel", (4, 4)),
    **_fields("conv_stride", (2, 2)),
    **_fields("conv_dim", (HIDDEN, HIDDEN)),
    **_fields("num_feat_extract_layers eos_token_id", 2),
    **_fields("num_position_embeddings", 64),
    **_fields("qk_head_dim", 64),
    **_fields("hidden_size_per_layer_input", 32),
    **_fields("pad_token_id", 0),
}

_LINEAR_THEN_FULL = {"layer_types": ["linear_attention", "full_attention"]}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
_HALF_MROPE = {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}
_SWIN = {"num_heads": [2, 4, 4, 4], "depths": [1, 1, 1, 1], "embed_dim": 32, "window_size": 2, "patch_size": 2}
_FORECAST = {"prediction_length": 4, "context_length": 12, "lags_sequence": [1, 2], "num_time_features": 1}

CONFIG: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _LINEAR_THEN_FULL,
    "bamba": {"attn_layer_indices": [1]},
    "beit": {"out_indices": [2]},
    "cosmos3_edge_text": {"rope_parameters": _MROPE},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": INTERMEDIATE, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": HIDDEN},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    },
    "decision_transformer": {"state_dim": 17},
    "dots3_note_text": {"layer_types": ["full_attention"] * 2, "sliding_window": 8},
    "esmc": {"num_key_value_heads": HEADS},
    "falcon_h1": {"mamba_d_ssm": 256},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "laurel_rank": 16,
        "activation_sparsity_pattern": [0.95, 0.0],
    },
    "glm4v_moe_text": {"rope_parameters": _HALF_MROPE},
    "glm4v_text": {"rope_parameters": _MROPE},
    "glm5_next_text": {
        "num_key_value_heads": HEADS,
        "qk_rope_head_dim": 0,
        "head_dim": 0,
        "index_kpool": 2,
        **_LINEAR_THEN_FULL,
        "indexer_types": ["full", "full"],
    },
    "glm_image_text": {"rope_parameters": _MROPE},
    "glm_ocr_text": {"rope_parameters": _MROPE},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_vl_text": {"rope_parameters": {**_MROPE, "mrope_section": [8, 8]}},
    "informer": _FORECAST,
    "time_series_transformer": _FORECAST,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _LINEAR_THEN_FULL,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 16, "head_dim": 16},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe", "mlp"], "num_hidden_layers": 4},
    "qwen2_5_vl_text": {"rope_parameters": _MROPE},
    "qwen2_vl_text": {"rope_parameters": _MROPE},
    "qwen3_5_text": _LINEAR_THEN_FULL,
    "qwen3_5_moe_text": _LINEAR_THEN_FULL,
    "qwen3_next": _LINEAR_THEN_FULL,
    "qwen4_exp_text": {
        **_LINEAR_THEN_FULL,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
        "num_hidden_layers": 2,
        "attention_head_size": 32,
        "num_buckets": 2,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
    "yolos": {"image_size": [32, 32], "num_detection_tokens": 4},
    "luke": {"entity_vocab_size": 64, "entity_emb_size": 32},
    "perceiver": {
        "num_latents": 8,
        "d_latents": HIDDEN,
        "num_self_attends_per_block": 1,
        "num_self_attention_heads": 2,
        "num_cross_attention_heads": 2,
    },
    "dinov3_convnext": {"hidden_sizes": [32, 64, 128, 128], "depths": [1, 1, 1, 1]},
    "focalnet": {"embed_dim": 32, "depths": [1, 1, 1, 1], "patch_size": 2},
    "hiera": {"embed_dim": 32, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 8], "image_size": [64, 64]},
    "levit": {"image_size": 64, "patch_size": 16},
    "hy_v4_vl_text": {"rope_parameters": {**_MROPE, "mrope_section": [6, 5, 5]}},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {**_MROPE, "mrope_section": [6, 5, 5]} for kind in ("full_attention", "sliding_attention")
        }
    },
    "swin": _SWIN,
    "swinv2": _SWIN,
    "donut-swin": _SWIN,
    "maskformer-swin": _SWIN,
    "convnext": {"hidden_sizes": [32, 64, 128, 128], "depths": [1, 1, 1, 1], "patch_size": 2},
    "convnextv2": {"hidden_sizes": [32, 64, 128, 128], "depths": [1, 1, 1, 1], "patch_size": 2},
    "layoutlmv3": {"coordinate_size": 24, "shape_size": 16, "input_size": 32},
    "lilt": {"hidden_size": 384},
    "wav2vec2-bert": {"feature_projection_input_dim": 32},
    "speech_to_text": {"input_feat_per_channel": 32, "conv_channels": 64},
    "patchtst": {"context_length": 16, "num_input_channels": HIDDEN},
    "patchtsmixer": {"context_length": 16, "num_input_channels": HIDDEN},
}

_BOTH_TOWERS = ("aimv2", "altclip", "blip", "bridgetower", "chinese_clip", "clip", "clipseg", "groupvit")
_BOTH_TOWERS += ("metaclip_2", "owlv2", "owlvit", "siglip", "vilt", "vision-text-dual-encoder")
"""Architectures whose forward refuses ids without an image."""

_MONO = ("omniasr_audio", "omniasr_ctc")
"""Architectures whose audio has a dimension of channels."""

_GRID = torch.tensor([[1, 4, 4]])
"""One image of 4x4 patches."""


def _config_value(config: Any, name: str, default: Any) -> Any:
    for part in (config, *(getattr(config, one, None) for one in ("vision_config", "audio_config", "encoder_config"))):
        if getattr(part, name, None) is not None:
            return getattr(part, name)
    return default


def _ids(config: Any, length: int = TOKENS) -> torch.Tensor:
    largest = min(_config_value(config.get_text_config(), "vocab_size", 100), 100)
    return torch.randint(3, largest, (BATCH, length))


def _image(config: Any, *leading: int) -> torch.Tensor:
    size = _config_value(config, "image_size", 32)
    size = (
        (size, size) if isinstance(size, int) else (size["height"], size["width"]) if isinstance(size, dict) else size
    )
    return torch.randn(BATCH, *leading, _config_value(config, "num_channels", 3), *size)


def _patches(config: Any) -> torch.Tensor:
    """The patches of `_GRID`, flat."""
    channels = getattr(config, "in_channels", getattr(config, "num_channels", 3))
    frames = getattr(config, "temporal_patch_size", 1)
    return torch.randn(int(_GRID.prod()), channels * frames * config.patch_size**2)


def _series(config: Any) -> dict[str, torch.Tensor]:
    past = config.context_length + max(config.lags_sequence)
    return {
        "past_values": torch.randn(BATCH, past), "past_time_features": torch.randn(BATCH, past, 1),
        "past_observed_mask": torch.ones(BATCH, past), "future_values": torch.randn(BATCH, config.prediction_length),
        "future_time_features": torch.randn(BATCH, config.prediction_length, 1),
    }  # fmt: skip


INPUTS: dict[str, Callable[[Any], dict[str, torch.Tensor]]] = {
    "audio-spectrogram-transformer": lambda config: {"input_values": torch.randn(BATCH, config.max_length, 32)},
    "blip_2_qformer": lambda config: {
        "query_embeds": torch.randn(BATCH, 8, HIDDEN), "encoder_hidden_states": torch.randn(BATCH, 8, HIDDEN)
    },
    "bros": lambda config: {"input_ids": _ids(config), "bbox": torch.rand(BATCH, TOKENS, 8)},
    "decision_transformer": lambda config: {
        "states": torch.randn(BATCH, TOKENS, 17), "actions": torch.randn(BATCH, TOKENS, config.act_dim),
        "rewards": torch.randn(BATCH, TOKENS, 1), "returns_to_go": torch.randn(BATCH, TOKENS, 1),
        "timesteps": torch.arange(TOKENS).expand(BATCH, -1), "attention_mask": torch.ones(BATCH, TOKENS),
    },
    "lxmert": lambda config: {
        "input_ids": _ids(config), "visual_feats": torch.randn(BATCH, 4, config.visual_feat_dim),
        "visual_pos": torch.rand(BATCH, 4, 4),
    },
    "siglip2_vision_model": lambda config: {
        "pixel_values": torch.randn(BATCH, 16, 3 * config.patch_size**2),
        "pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * BATCH),
    },
    "speecht5": lambda config: {
        "input_values": torch.randn(BATCH, 8, HIDDEN), "decoder_input_values": torch.randn(BATCH, 4, HIDDEN)
    },
    "udop": lambda config: {
        "input_ids": _ids(config), "bbox": torch.rand(BATCH, TOKENS, 4), "decoder_input_ids": _ids(config, 8)
    },
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), _series),
    **dict.fromkeys(
        ("timesformer", "videomae", "vivit"), lambda config: {"pixel_values": _image(config, config.num_frames)}
    ),
    "videoprism_vision_model": lambda config: {"pixel_values_videos": _image(config, config.num_frames)},
}  # fmt: skip


_MODELS = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_MAPPING_NAMES,
)
"""Names of model classes by model type: the one with a language model's head comes before the base model."""


def model_types() -> set[str]:
    """Of this version of transformers."""
    return {name for table in _MODELS for name in table}


def _model_class(name: str) -> Any:
    entry = next(table[name] for table in _MODELS if name in table)
    return getattr(transformers, entry if isinstance(entry, str) else entry[0])


def _arguments(kind: Any, changed: dict[str, Any], depth: int = 0) -> dict[str, Any]:
    """Arguments of a config class: `SIZES` where the field has a default of that kind, then `changed`."""
    arguments: dict[str, Any] = {}
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    for name, value in SIZES.items():
        is_list = isinstance(fields.get(name), (list, tuple))
        if name in fields and is_list == isinstance(value, tuple):
            arguments[name] = value
    if "kv_lora_rank" in fields:  # latent attention has as many keys as queries
        arguments["num_key_value_heads"] = HEADS
    for name, part in (getattr(kind, "sub_configs", None) or {}).items():
        if name in changed or depth > 2:
            continue
        if part is transformers.AutoConfig:
            default = _default_part(kind, name)
            if default is not None:
                own = CONFIG.get(default.model_type, {})
                arguments[name] = {**_arguments(type(default), own, depth + 1), "model_type": default.model_type}
        elif inspect.isclass(part):
            arguments[name] = _arguments(part, CONFIG.get(part.model_type, {}), depth + 1)
    return arguments | changed


def _default_part(kind: Any, name: str) -> Any:
    try:
        return getattr(kind(), name, None)
    except Exception:  # a config without defaults
        return None


@functools.cache
def config_of(name: str) -> Any:
    kind = CONFIG_MAPPING[name]
    return kind(**_arguments(kind, CONFIG.get(name, {})))


def seed(value: int) -> None:
    """torch.manual_seed for the CPU alone: for GPUs it formats the stack, which takes longer than a tiny layer."""
    torch.default_generator.manual_seed(value)


def build(name: str) -> torch.nn.Module:
    """The architecture in bfloat16 and eval mode, with weights that are the same at each call.

    Weights are drawn so that activations keep their magnitude, as training leaves them: with the initial 0.02 each MLP
    would add a hundredth of the residual, less than rounding.
    """
    seed(0)
    model = _model_class(name)(config_of(name))
    with torch.no_grad():
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if not parameter.is_floating_point():
                    continue
                if isinstance(module, torch.nn.Embedding):
                    parameter.normal_()
                elif parameter.ndim > 1:
                    parameter.normal_(
                        std=(parameter[0].numel() if parameter.ndim != 3 else parameter.shape[-1]) ** -0.5
                    )
                else:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.eval().bfloat16()
    kept = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for path, parameter in model.named_parameters():
        if any(part in path for part in kept):
            parameter.data = parameter.data.float()
    return model


def inputs_of(name: str, model: Any) -> dict[str, torch.Tensor]:
    """Arguments of a call, the same each time; floating point ones in bfloat16."""
    seed(1)
    return {
        key: value.bfloat16() if value.is_floating_point() else value for key, value in _inputs(name, model).items()
    }


def _inputs(name: str, model: Any) -> dict[str, torch.Tensor]:
    config, main = model.config, model.main_input_name
    accepted = inspect.signature(model.forward).parameters
    if name in INPUTS:
        return INPUTS[name](config)
    if "grid_thw" in accepted:
        return {"pixel_values" if "pixel_values" in accepted else "hidden_states": _patches(config), "grid_thw": _GRID}
    found: dict[str, torch.Tensor] = {}
    if main == "input_ids":
        found["input_ids"] = _ids(config)
    if main == "pixel_values" or name in _BOTH_TOWERS or ("input_ids" not in accepted and "pixel_values" in accepted):
        found["pixel_values"] = _image(config)
    if main == "input_values":
        is_mono = name in _MONO
        found[main] = torch.randn(BATCH, 1, 1600) if is_mono else torch.randn(BATCH, 1600)
    if main == "input_features":
        found[main] = torch.randn(BATCH, _config_value(config, "num_mel_bins", 32), 32)
    if getattr(config, "is_encoder_decoder", False) or (main != "input_ids" and "decoder_input_ids" in accepted):
        found["decoder_input_ids"] = _ids(config, 8)
    if not found:
        found[main] = torch.randn(BATCH, TOKENS, HIDDEN)
    return found
