"""The pairs of model and plan whose steps are predicted and then measured: listed here before anything is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from galvatron_fx.ir.pipelining import Pipelining
from galvatron_fx.ir.plan import Plan

SEED = 0
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Size:
    """Width, layers, heads, words, samples and words a sample."""

    width: int
    layers: int
    heads: int
    words: int
    batch: int
    sequence: int


def gpt2(size: Size) -> nn.Module:
    """GPT-2 (Radford et al. 2019), without dropout."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=size.words, n_embd=size.width, n_head=size.heads, n_layer=size.layers, n_positions=size.sequence,
            use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLMLoss",
        )
    )  # fmt: skip


def llama(size: Size) -> nn.Module:
    """LLaMA (Touvron et al. 2023)."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size.words, hidden_size=size.width, intermediate_size=11 * size.width // 4,
            num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.heads,
            max_position_embeddings=size.sequence, use_cache=False,
        )
    )  # fmt: skip


def bert(size: Size) -> nn.Module:
    """BERT (Devlin et al. 2019), with its dropout."""
    return BertForMaskedLM(
        BertConfig(
            vocab_size=size.words, hidden_size=size.width, num_hidden_layers=size.layers,
            num_attention_heads=size.heads, intermediate_size=4 * size.width, max_position_embeddings=size.sequence,
        )
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[Size], nn.Module], Size]] = {
    "gpt2": (gpt2, Size(256, 4, 4, 4096, 8, 128)),
    "gpt2 wide": (gpt2, Size(512, 2, 8, 2048, 8, 64)),
    "llama": (llama, Size(256, 4, 8, 256, 16, 128)),
    "llama long": (llama, Size(128, 4, 4, 1024, 8, 256)),
    "bert": (bert, Size(256, 4, 4, 4096, 8, 128)),
}


def build(name: str) -> tuple[nn.Module, Batch]:
    """A model with fresh weights and a batch, the same in every process."""
    torch.manual_seed(SEED)
    make, size = MODELS[name]
    ids = torch.randint(size.words, (size.batch, size.sequence))
    return make(size), {"input_ids": ids, "labels": ids.clone()}


@dataclass(frozen=True)
class Pair:
    """A model under a plan: roles by axis (outermost first), recomputation, stages."""

    model: str
    roles: tuple[str, ...]
    recompute: bool = False
    stages: int = 1

    @property
    def ranks(self) -> int:
        """Processes: every axis has two."""
        return 2 ** len(self.roles)

    @property
    def name(self) -> str:
        """In words."""
        more = ", recompute" * self.recompute + f", {self.stages} stages" * (self.stages > 1)
        return f"{self.model}, {'·'.join(self.roles) or 'one rank'}{more}"

    def plan(self) -> Plan:
        """As the compiler takes it."""
        pipelining = Pipelining(num_stages=self.stages, num_microbatches=4) if self.stages > 1 else Pipelining()
        axes = (2,) * len(self.roles) or (1,)
        return Plan.uniform(axes, self.roles or ("data",), recompute=self.recompute, pipelining=pipelining)


_ONE = [Pair(model, ()) for model in MODELS] + [Pair(model, (), recompute=True) for model in ("gpt2", "llama", "bert")]
_TWO = [Pair(model, (role,)) for model in MODELS for role in ("data", "zero", "tensor")]
_TWO += [Pair(model, ("pipeline",), stages=2) for model in ("gpt2", "llama")]
_FOUR = [
    Pair(model, roles)
    for model in ("gpt2", "llama", "bert")
    for roles in (("data", "data"), ("zero", "zero"), ("data", "tensor"), ("zero", "tensor_sequence"))
]
_FOUR += [Pair(model, ("pipeline", "data"), stages=2) for model in ("gpt2", "llama", "llama long")]

PAIRS: tuple[Pair, ...] = (*_ONE, *_TWO, *_FOUR)


def first_pairs(count: int) -> list[Pair]:
    """So many of :data:`PAIRS`, spread evenly over the list."""
    count = min(count, len(PAIRS))
    return [PAIRS[i * len(PAIRS) // count] for i in range(count)]
