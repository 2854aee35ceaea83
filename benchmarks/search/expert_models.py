"""Published mixtures of experts, without weights, and the settings that Megatron trains them at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)


def mixtral_8x7b() -> nn.Module:
    """Mixtral 8x7B (Jiang et al. 2024, table 1)."""
    config = MixtralConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def mixtral_8x22b() -> nn.Module:
    """Mixtral 8x22B (Mistral AI 2024, the model's config.json)."""
    config = MixtralConfig(
        vocab_size=32768, hidden_size=6144, intermediate_size=16384, num_hidden_layers=56, num_attention_heads=48,
        num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def qwen2_57b() -> nn.Module:
    """Qwen2-57B-A14B (Qwen Team 2024, the model's config.json): 64 experts and one that all tokens take."""
    config = Qwen2MoeConfig(
        vocab_size=151936, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, num_experts=64, num_experts_per_tok=8, moe_intermediate_size=2560,
        shared_expert_intermediate_size=20480, use_cache=False,
    )  # fmt: skip
    return Qwen2MoeForCausalLM(config)


def deepseek_v3() -> nn.Module:
    """DeepSeek-V3 (DeepSeek-AI 2024, section 4.2), without its multi-token prediction."""
    return DeepseekV3ForCausalLM(DeepseekV3Config(use_cache=False))


@dataclass(frozen=True)
class Mapping:
    """A plan as people write it: ``attention`` and ``experts`` are the roles of the axes inside the ``stages`` ranks of
    a pipeline, outermost first; ``rounds`` are the stages of each rank.
    """

    attention: tuple[str, ...]
    experts: tuple[str, ...]
    stages: int
    rounds: int
    microbatches: int
    source: str


@dataclass(frozen=True)
class Setting:
    """A model on a cluster with a global batch of sequences, and how others run it; ``published_mfu``: of the best of
    Liu et al. 2025 (MoE Parallel Folding), on the same devices.
    """

    build: Callable[[], nn.Module]
    cluster: str
    batch: int
    mappings: dict[str, Mapping]
    published_mfu: float | None = None
    sequence: int = 4096

    def model(self) -> nn.Module:
        """The model without weights."""
        with torch.device("meta"):
            return self.build()

    def inputs(self) -> dict[str, torch.Tensor]:
        """Token ids and labels, [batch, sequence]."""
        ids = torch.zeros(self.batch, self.sequence, dtype=torch.long, device="meta")
        return {"input_ids": ids, "labels": ids}


_README = "Megatron Core, README of its mixture of experts"
_ZOO = "Megatron MoE model zoo, benchmarking configurations"

SETTINGS = {
    "Mixtral 8x7B": Setting(
        mixtral_8x7b,
        "64xH100-80GB",
        256,
        {"TP1 EP8 PP4 VP8": Mapping(("zero",) * 4, ("zero", *("expert",) * 3), 4, 8, 16, _ZOO)},
    ),
    "Mixtral 8x22B": Setting(
        mixtral_8x22b,
        "128xH100-80GB",
        256,
        {
            "TP4 EP2 PP8 VP7": Mapping(
                ("zero", "zero", "tensor_sequence", "tensor_sequence"),
                ("zero", "expert", "tensor", "tensor"),
                8,
                7,
                64,
                _README,
            ),
            "TP2 EP8 PP8 folded": Mapping(
                ("zero", "zero", "zero", "tensor_sequence"), ("zero", "expert", "expert", "expert"), 8, 1, 16, _ZOO
            ),
        },
        published_mfu=0.493,
    ),
    "Qwen2-57B-A14B": Setting(qwen2_57b, "64xH100-80GB", 256, {}, published_mfu=0.390),
    "DeepSeek-V3": Setting(deepseek_v3, "2048xH100-80GB", 15360, {}),
}
