"""Grouped queries on more ranks than there are key heads: attention is split by heads all the same, and exact."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.functional import scaled_dot_product_attention

from galvatron_fx.ir.cluster.cluster import Axis, Cluster
from galvatron_fx.ir.graph.metadata import meta_of
from passes.lowering.lower_step import Lower
from tests.helpers import DEVICE, assert_exact, captured, one_device, simulate, uniform
from tests.models import zoo

_KERNELS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}


class Grouped(nn.Module):
    """Eight heads of queries, fewer of keys; causal, or under a mask."""

    def __init__(self, key_heads: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(zoo.VOCABULARY, 32), nn.Linear(32, zoo.VOCABULARY)
        self.out = nn.Linear(32, 32)
        self.query, self.key, self.value = nn.Linear(32, 32), nn.Linear(32, 4 * key_heads), nn.Linear(32, 4 * key_heads)

    def forward(self, ids: Tensor, labels: Tensor, keep: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        parts = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.query, self.key, self.value))
        mask = None if keep is None else keep[:, None, None, :]
        attended = scaled_dot_product_attention(*parts, attn_mask=mask, is_causal=keep is None, enable_gqa=True)
        logits = self.head(x + self.out(attended.transpose(1, 2).flatten(2)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@cache
def case(key_heads: int, is_masked: bool) -> tuple[nn.Module, dict[str, Any], fx.GraphModule, dict[str, Tensor]]:
    model, tokens = zoo.build(lambda: Grouped(key_heads)), zoo.tokens()
    inputs = {"ids": tokens["input_ids"], "labels": tokens["labels"]}
    if is_masked:
        inputs["keep"] = inputs["ids"] % 5 > 0
    return model, inputs, captured(model, inputs), one_device(model, inputs)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("key_heads, is_masked, ways, roles", [
    (1, False, 2, ("tensor",)), (1, True, 4, ("sequence", "sequence")), (2, False, 4, ("tensor", "tensor")),
    (2, True, 4, ("sequence", "sequence")), (2, False, 4, ("tensor_sequence", "tensor_sequence")),
    (4, False, 8, ("tensor",) * 3), (2, False, 2, ("data", "tensor", "sequence")),
    (1, False, 2, ("sequence", "tensor")),
], ids=str)  # fmt: skip
def test_heads_of_queries_are_split(key_heads: int, is_masked: bool, ways: int, roles: tuple[str, ...]) -> None:
    """``ways``: in how many parts attention is done; of two unlike roles the solver lets one split it here."""
    model, inputs, graph, expected = case(key_heads, is_masked)
    strategies = uniform(graph, *roles)
    sizes = (2,) * len(roles)
    links = tuple(Axis(f"a{i}", size, 1e-12, 1e18) for i, size in enumerate(sizes))
    slow = replace(DEVICE, launch_overhead_s=1e-12, peak_flops={name: 1e6 for name, _ in DEVICE.peak_flops})
    cluster = Cluster(slow, links)  # where all that counts is work
    lowered = Lower(strategies, cluster).run(graph)
    kernels = [node for node in lowered.joint.graph.nodes if node.target in _KERNELS]
    rows = [meta_of(node).specs[0].shape[1:3] for node in kernels]  # type: ignore[union-attr]
    assert [heads * length for heads, length in rows] == [8 * zoo.SEQUENCE // ways] * 2
    assert_exact(simulate(graph, model, inputs, sizes, strategies, {}, cluster), expected)
