"""Role ``context``: whole models whose attention runs around a ring of ranks equal one device."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, fx, nn
from torch.nn.functional import scaled_dot_product_attention

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.errors import PlanError
from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.kernels import ring_attention
from galvatron_fx.ir.kernels.cpu_attention import attention_on_cpu
from galvatron_fx.ir.plan.schedule import make_schedule
from galvatron_fx.ir.plan.strategy import Strategy
from passes.analysis.blocks import num_blocks, num_values
from passes.lowering.lower_step import Lower
from tests.helpers import assert_exact, captured, cluster_for, one_device, simulate, simulate_stages, uniform
from tests.models import zoo

C = "context"
_KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class CrossAttention(nn.Module):
    """Queries of one sequence see another; the mask hides keys, by -inf and by finite numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.memory, self.out = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
        query, key = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in (self.query(x), self.memory(memory)))
        mask = keep.clamp(0).to(x.dtype).log().masked_fill(keep < 0, torch.finfo(x.dtype).min)
        attended = scaled_dot_product_attention(query, key, key, attn_mask=mask[:, None, None, :])
        return self.out(attended.transpose(1, 2).flatten(2)).square().mean()


def cross_attention(keys: int = 16) -> zoo.Case:
    keep = torch.ones(3, keys, dtype=torch.int64)
    keep[0], keep[1, 5:9], keep[2] = 0, 0, -1  # all keys are hidden from the first sample and from the last
    generator = torch.Generator().manual_seed(3)
    x, memory = (torch.randn(3, length, 16, dtype=torch.float64, generator=generator) for length in (16, keys))
    return zoo.build(CrossAttention), {"x": x, "memory": memory, "keep": keep}


class Packed(nn.Module):
    """Documents in one row, each of which sees itself alone; their borders are anywhere in chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(zoo.VOCABULARY, 16), nn.Embedding(16, 16)
        self.query, self.key, self.head = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, zoo.VOCABULARY)

    def forward(self, ids: Tensor, document: Tensor, position: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions(position)
        query = self.query(x).unflatten(-1, (4, 4)).transpose(1, 2)
        key = self.key(x).unflatten(-1, (2, 4)).transpose(1, 2)
        order = torch.arange(ids.shape[1], device=ids.device)
        sees = (document[:, :, None] == document[:, None, :]) & (order[:, None] >= order)
        attended = scaled_dot_product_attention(query, key, key, attn_mask=sees[:, None], enable_gqa=True)
        logits = self.head(x + attended.transpose(1, 2).flatten(2))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def packed() -> zoo.Case:
    inputs = zoo.tokens()
    ids = inputs["input_ids"]
    document, position = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, borders in enumerate([(3, 4, 11), (7,), (), (1, 14)][: len(ids)]):
        starts = [0, *borders, ids.shape[1]]
        for number, (begin, end) in enumerate(pairwise(starts)):
            document[row, begin:end], position[row, begin:end] = number, torch.arange(end - begin)
    labels = ids.masked_fill(position == 0, -100)  # no document foretells the next one's first token
    return zoo.build(Packed), {"ids": ids, "document": document, "position": position, "labels": labels}


def padded() -> zoo.Case:
    """Padding on the left of one sample and on the right of another: rows there see nothing."""
    model, inputs = zoo.llama(layers=1)
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, :5], mask[1, 9:] = 0, 0
    return model, {**inputs, "attention_mask": mask}


def ignored() -> zoo.Case:
    """All labels of the chunks that the first rank of four holds are ignored."""
    model, inputs = zoo.gpt2(layers=1)
    inputs["labels"][:, :3], inputs["labels"][:, 14:] = -100, -100
    return model, inputs


def windowed() -> zoo.Case:
    settings = {"sliding_window": 5, "vocab_size": zoo.VOCABULARY, "hidden_size": zoo.HIDDEN, "num_hidden_layers": 1}
    settings |= {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 1}
    config = hf.MistralConfig(**settings)
    return zoo.build(lambda: hf.MistralForCausalLM(config)), zoo.tokens()


CASES = {
    "llama": lambda: zoo.llama(layers=2),
    "bert": lambda: zoo.bert(layers=1),
    "t5": lambda: zoo.t5(layers=1),
    "cross": cross_attention,
    "cross, more keys": lambda: cross_attention(24),
    "packed": packed,
    "padded": padded,
    "ignored": ignored,
    "windowed": windowed,
}


@cache
def case(name: str) -> tuple[nn.Module, dict[str, Any], fx.GraphModule, dict[str, Tensor]]:
    model, inputs = CASES[name]()
    return model, inputs, captured(model, inputs), one_device(model, inputs)


ROLES = [
    ("llama", (C, C, C)), ("llama", ("data", C)), ("llama", ("tensor", C)),
    ("llama", ("tensor_sequence", C)), ("llama", (C, "sequence")), ("bert", (C, C)), ("bert", (C, "sequence")),
    ("t5", (C,)), ("cross", (C, C)), ("padded", (C, C, C)),
    ("ignored", (C, C)), ("windowed", (C, C)), ("cross, more keys", (C, C)), ("packed", (C, C, C)),
    ("packed", ("zero", C)),
]  # fmt: skip


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name, roles", ROLES, ids=str)
def test_exact(name: str, roles: tuple[str, ...]) -> None:
    model, inputs, graph, expected = case(name)
    strategies = uniform(graph, *roles, recompute=len(roles) == 2)
    assert_exact(simulate(graph, model, inputs, (2,) * len(roles), strategies, {}), expected)


def test_neighbours_are_unlike() -> None:
    """What is mirrored is put in order, or split otherwise, and back."""
    model, inputs, graph, expected = case("llama")
    roles = [(C, "data"), ("sequence", C), ("tensor_sequence", C), (C, C), ("data", "sequence"), (C, "tensor")]
    for first in range(0, len(roles), 2):
        strategies = [Strategy(roles[(first + i) % len(roles)], recompute=i % 2 == 1) for i in range(num_blocks(graph))]
        assert_exact(simulate(graph, model, inputs, (2, 2), strategies, {}), expected)


def test_stages_and_microbatches() -> None:
    model, inputs, graph, expected = case("llama")
    strategies, first = uniform(graph, "pipeline", C), (0, num_blocks(graph) // 2)
    schedule = make_schedule("1f1b", 2, 2, 2)
    assert_exact(simulate_stages(graph, model, inputs, (2, 2), strategies, first, schedule), expected)


def test_each_rank_holds_less_of_attention() -> None:
    """What attention keeps for backward falls as one over the ranks."""
    graph = case("llama")[2]

    def kept_bytes(degree: int) -> int:
        strategies = uniform(graph, *([C] * (degree.bit_length() - 1) or ["data"]))
        cluster = cluster_for([2] * (degree.bit_length() - 1) or [1], strategies)
        lowered = Lower(strategies, cluster).run(graph).joint.graph.nodes
        steps = [node for node in lowered if node.target in (c.ring_step_backward, _KERNEL_BACKWARD)]
        taken = {x for x in steps[0].args[:6] if isinstance(x, fx.Node)}
        return sum(meta_of(x).spec.size_bytes for x in taken)

    assert kept_bytes(4) * 4 == kept_bytes(2) * 2 < kept_bytes(1), "heads that the model repeats are kept once"


def attended(block: int, graph: fx.GraphModule) -> tuple[int, ...]:
    """Numbers of what attention leaves in a block."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    nodes = [node for node in graph.graph.nodes if node.op == "call_function" and meta_of(node).block == block]
    return tuple(meta_of(node).value for node in nodes if node.args and getattr(node.args[0], "target", 0) is attention)


@pytest.mark.parametrize("roles", [(C, C), (C, "sequence")], ids=str)
def test_what_is_kept_of_attention_is_not_computed_again(roles: tuple[str, ...]) -> None:
    model, inputs, graph, expected = case("llama")
    kept = [(attended(block, graph), count) for block, count in enumerate(num_values(graph))]
    strategies = [Strategy(roles, True, keeps=keeps, num_values=count if keeps else 0) for keeps, count in kept]
    lowered = Lower(strategies, cluster_for((2, 2), strategies)).run(graph).joint.graph.nodes
    assert any(meta_of(node).again for node in lowered if node.op == "call_function")
    assert not any(meta_of(node).again for node in lowered if node.target is c.ring_step)
    assert_exact(simulate(graph, model, inputs, (2, 2), strategies, {}), expected)


@pytest.mark.parametrize("rank, rows", [(0, (4, 8)), (3, (8, 4))])
def test_a_causal_step_is_one_product(rank: int, rows: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """All queries see the front half of what comes from before, and the back half all of what comes from behind."""
    query, key, value = torch.randn(3, 1, 2, 8, 4, dtype=torch.float64).unbind()
    out, sums = ring_attention.ring_step(query, key, value, None, None, None, 0, False, True, None, rank, 4)
    calls: list[tuple[int, int]] = []

    def counted(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        calls.append((query.shape[2], key.shape[2]))
        return attention_on_cpu(query, key, *args, **kwargs)

    monkeypatch.setattr(ring_attention, "attention_on_cpu", counted)
    ring_attention.ring_step(query, key, value, out, sums, None, 1, False, True, None, rank, 4)
    assert calls == [rows]


def test_heads_that_were_exchanged_travel_once() -> None:
    """Each of two ranks that exchange heads has one of two key heads, which two query heads share."""
    strategies = uniform(case("llama")[2], C, "sequence")
    lowered = Lower(strategies, cluster_for((2, 2), strategies)).run(case("llama")[2]).joint.graph.nodes
    assert {meta_of(node).spec.shape[1] for node in lowered if node.target is c.rotate} == {1}


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    model, inputs = zoo.gpt2(layers=1)
    inputs = {name: value[:, :12] for name, value in inputs.items()}
    cluster = cluster_for((2, 2), [])
    with pytest.raises(PlanError, match=r"12 tokens into 8 chunks.*pad it to 16 tokens"):
        galvatron_fx.explain(model, cluster, inputs, plan=Plan.uniform((2, 2), (C, C)))
