"""Graphs that were traced for CPUs run on GPUs once they are bound to them: seen on fake CUDA tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from galvatron_fx.ir.graph.random_ops import random_uniform
from galvatron_fx.ir.kernels.attention import attention, attention_backward
from galvatron_fx.ir.plan.strategy import Strategy
from tests.fake_gpu import bound_halves, differences
from tests.models import zoo
from tests.models.architectures import ARCHITECTURES

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


SMALLEST: dict[str, dict[str, Any]] = {name: {"layers": 1} for name in zoo.MODELS} | {"swin": {"depths": [2, 1]}}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", SMALLEST)
def test_whole_models(name: str) -> None:
    model, inputs = zoo.MODELS[name](**SMALLEST[name])
    for half in bound_halves(model.float(), _floats(inputs), Strategy(("tensor",), recompute=True), None):
        assert not differences(half)


def test_mixed_precision_takes_flash_attention() -> None:
    model, inputs = zoo.llama(layers=1)
    halves = bound_halves(model.float(), inputs, Strategy(("zero",)), BF16)
    for half in halves:
        assert not differences(half)
    called = [{node.target for node in half.graph.nodes} for half in halves]
    assert attention in called[0] and attention_backward in called[1]


class GroupedQueries(nn.Module):
    """Attention of four heads over two of keys and values, as its kernel has it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        heads = (project(x).unflatten(-1, (-1, 8)).transpose(1, 2) for project in (self.query, self.key, self.value))
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return attended.square().mean()


@pytest.mark.parametrize("policy", [None, BF16], ids=["float32", "bfloat16"])
def test_fewer_heads_of_keys_than_of_queries(policy: MixedPrecisionPolicy | None) -> None:
    halves = bound_halves(GroupedQueries(), {"x": torch.randn(4, 16, 32)}, Strategy(("data", "tensor")), policy)
    assert any(node.target is attention_backward for node in halves[1].graph.nodes)
    for half in halves:
        assert not differences(half)


def test_dropout_draws_on_the_gpu() -> None:
    model, inputs = zoo.gpt2(layers=1, resid_pdrop=0.1, attn_pdrop=0.1)
    halves = bound_halves(model.train().float(), inputs, Strategy(("data",)), None)
    assert any(node.target is random_uniform for node in halves[0].graph.nodes)
    for half in halves:
        assert not differences(half)


def _floats(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}


@pytest.mark.slow
def test_statistics_of_layer_norms_that_are_computed_again() -> None:
    model, inputs = ARCHITECTURES["bart"]()
    strategy = Strategy(("zero", "tensor_sequence"), recompute=True)
    for half in bound_halves(model.float(), inputs, strategy, BF16):
        assert not differences(half)
