"""Small mixtures of experts of transformers, one a family."""

from __future__ import annotations

from typing import Any

import transformers as hf
from torch import nn

from tests.models import zoo

__all__ = ["FAMILIES", "mixture"]

_COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "use_cache": False,
}  # fmt: skip
_DEEPSEEK = {
    "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "first_k_dense_replace": 1,
}  # fmt: skip
_QWEN = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3": ("Qwen3Moe", {**_QWEN, "output_router_logits": True}),
    "deepseek": ("DeepseekV3", _DEEPSEEK),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "eos_token_id": 1}),
}


def mixture(family: str, **changes: Any) -> nn.Module:
    """With experts that know float64: the library's eager ones, which alone could not be traced."""
    name, settings = FAMILIES[family]
    config = getattr(hf, f"{name}Config")(**{**_COMMON, **settings, **changes})
    model = zoo.build(lambda: getattr(hf, f"{name}ForCausalLM")(config))
    model.set_experts_implementation("eager")
    return model
