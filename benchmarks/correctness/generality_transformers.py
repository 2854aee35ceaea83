"""Tiny models of every architecture in transformers, by what its configuration calls its sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto as auto

from tests.models import zoo

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("ffn_hidden_size", "d_inner", "hidden_dim", "mlp_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "global_head_dim", "linear_key_head_dim"), 8),
    **dict.fromkeys(("linear_value_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "vocab_size"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim", "embedding_size", "num_mel_bins"), 16),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window", "position_buckets", "patch_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop", "layerdrop"), 0.0),
    **{"rotary_dim": 4, "state_size": 4, "time_step_rank": 4, "word_embed_proj_dim": 32, "lru_width": 32},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "image_size": 32, "num_labels": 8, "use_cache": False},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}
_PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "attention_layers", "block_types")


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def _pairs() -> dict[str, Any]:
    pixels = zoo.images()["pixel_values"]
    return {"input_ids": zoo.tokens()["input_ids"], "pixel_values": pixels, "return_loss": True}


def _segments() -> dict[str, Any]:
    labels = torch.randint(8, (4, 32, 32), generator=torch.Generator().manual_seed(4))
    return {"pixel_values": zoo.images()["pixel_values"], "labels": labels}


def _videos() -> dict[str, Any]:
    return {"pixel_values": _noise(4, 4, 3, 32, 32), "labels": zoo.images()["labels"]}


def _waves() -> dict[str, Any]:
    labels = torch.randint(3, 64, (4, 3), generator=torch.Generator().manual_seed(4))
    return {"input_values": _noise(4, 4000), "labels": labels}


def _spectra() -> dict[str, Any]:
    return {"input_values": _noise(4, 4000), "labels": zoo.images()["labels"]}


def _answers() -> dict[str, Any]:
    ids = zoo.tokens()["input_ids"]
    return {"input_ids": ids, "start_positions": ids[:, 0] % 8, "end_positions": ids[:, 1] % 16}


def _sequences() -> dict[str, Any]:
    return {"input_ids": zoo.tokens()["input_ids"], "labels": zoo.images()["labels"]}


_TASKS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING", zoo.tokens),
    "masked": ("MODEL_FOR_MASKED_LM_MAPPING", zoo.masked_tokens),
    "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", zoo.tokens),
    "image": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", zoo.images),
    "contrastive": ("MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING", _pairs),
    "segmentation": ("MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING", _segments),
    "video": ("MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING", _videos),
    "speech": ("MODEL_FOR_CTC_MAPPING", _waves),
    "audio": ("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING", _spectra),
    "question": ("MODEL_FOR_QUESTION_ANSWERING_MAPPING", _answers),
    "sequence": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", _sequences),
    "text": ("MODEL_FOR_TEXT_ENCODING_MAPPING", lambda: {"input_ids": zoo.tokens()["input_ids"]}),
}
# What configurations need to be told before their sizes are: numbers of experts that are none by default.
_TOLD: dict[str, dict[str, Any]] = {
    "DeepseekV2Config": {"num_experts_per_tok": 2, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1},
    "Dots1Config": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "HunYuanMoEV1Config": {"num_experts": 4, "moe_topk": 2, "head_dim": 8, "num_key_value_heads": 2},
    "KimiLinearConfig": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "linear_head_dim": 8, "linear_num_heads": 4, "head_dim": 16,
    },
    "Lfm2MoeConfig": {
        "num_hidden_layers": 2, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "LongcatFlashConfig": {
        "num_layers": 1, "n_routed_experts": 4, "zero_expert_num": 2, "expert_ffn_hidden_size": 24, "moe_topk": 2,
        "num_key_value_heads": 4,
    },
    "PhimoeConfig": {"router_jitter_noise": 0.0},
}  # fmt: skip
# The same once they are, of sizes that hang together.
_SHRUNK: dict[str, dict[str, Any]] = {
    "Mamba2Config": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 2},
    "MarianConfig": {"is_encoder_decoder": False},
}
# Further heads on bodies that are there already: each counts once more, as its loss and its inputs are others.
_AGAIN = ("segmentation", "question")


def shrink(config: PretrainedConfig) -> PretrainedConfig:
    """Set every size that a configuration knows, in the configurations inside it too, and switch dropout off."""
    for key, value in list(vars(config).items()):
        name = key.lstrip("_")
        if isinstance(value, PretrainedConfig):
            shrink(value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, key, 0.0)
        elif name in _SIZES and not isinstance(value, (list, tuple, dict)) and (value is not None or "pad" in name):
            setattr(config, key, _SIZES[name])
        elif name in _PER_LAYER and isinstance(value, (list, tuple)) and len(value) > 2:
            kinds = list(dict.fromkeys(value))
            setattr(config, key, (kinds * 2)[:2])
    if hasattr(config, "id2label"):
        config.num_labels = 8
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    if hasattr(config, "kv_lora_rank") and hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = 4  # latent attention: as many as there are heads
    return config


def _made(config_class: Any, model_class: Any, inputs: Callable[[], dict[str, Any]]) -> zoo.Case:
    told = _TOLD.get(config_class.__name__, {})
    config = shrink(config_class(**told))
    if inputs is _answers:
        config.num_labels = 2  # where an answer begins, and where it ends
    for name, value in _SHRUNK.get(config_class.__name__, {}).items():
        setattr(config, name, value)
    model = zoo.build(lambda: model_class(config))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the other kernels know no float64; captured, all are the same
    return model, inputs()


def cases() -> dict[str, Callable[[], zoo.Case]]:
    """One model for each configuration class, of the first task that has one."""
    found: dict[str, Callable[[], zoo.Case]] = {}
    seen: set[Any] = set()
    for task, (table, inputs) in _TASKS.items():
        mapping = getattr(auto, table)
        for config_class in mapping:
            model_class = mapping[config_class]
            if config_class not in seen or task in _AGAIN:
                seen.add(config_class)
                first = model_class[0] if isinstance(model_class, (list, tuple)) else model_class
                name = config_class.__name__.removesuffix("Config")
                found[f"{task} {name}"] = partial(_made, config_class, first, inputs)
    return found
