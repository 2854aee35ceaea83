"""An axis that splits the vocabulary, or heads, in some blocks is lowered before others that split rows there: these
have to split the rows of the local programs, too, and gather none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from galvatron_fx.ir.cluster.cluster import Axis
from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.layout import layout
from galvatron_fx.ir.graph.local_program import placements_of
from galvatron_fx.ir.graph.placement import Inside
from galvatron_fx.ir.plan.strategy import Strategy
from passes.analysis.blocks import num_blocks
from passes.lowering.lower_step import Lower
from passes.sharding.shard_graph import merge_axes
from tests.helpers import assert_exact, captured, cluster_for, one_device, simulate
from tests.models import zoo
from tests.models.language import WIDTH, language

_SIZES = (2, 2, 2)
_MODELS: dict[str, Callable[[], zoo.Case]] = {
    "mean": lambda: language(3),
    "tied": lambda: language(3, is_tied=True),
    "sum": lambda: (Weighed("sum"), language(3)[1]),
    "none": lambda: (Weighed("none"), language(3)[1]),
}


class Weighed(nn.Module):
    """A language model with the sum of losses, or with a weight for each."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.model, self.reduction = language(3)[0], reduction

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        scores = self.model(ids, labels)["logits"].flatten(0, 1)
        losses = F.cross_entropy(scores, labels.flatten(), reduction=self.reduction)
        return losses if not losses.dim() else (losses * torch.linspace(0, 1, len(losses))).sum()


class SharedHead(nn.Module):
    """Attention of four heads of queries that share one of keys, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.query, self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        heads = (part(y).unflatten(-1, (-1, 2)).transpose(1, 2) for part in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


def _attending() -> zoo.Case:
    model, inputs = language(3)
    model.layers = nn.ModuleList(SharedHead().double() for _ in range(3))
    return model, inputs


def _gathers_inside(graph: fx.GraphModule, strategies: Sequence[Strategy]) -> list[str]:
    """Gathers of what local programs make."""
    joint = Lower(strategies, cluster_for(_SIZES, strategies)).run(graph).joint
    columns = range(len(layout(joint).merged_axes))
    gathers = [node for node in joint.graph.nodes if node.target is c.all_gather and node.args[-1] in columns]
    placed = {node.name: placements_of(node.args[0]) for node in gathers}
    return [
        name for name, of_outputs in placed.items() if any(isinstance(p, Inside) for each in of_outputs for p in each)
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name, role", list(product(_MODELS, ["tensor", "tensor_sequence"])), ids=str)
def test_losses(name: str, role: str) -> None:
    """The last axis has the vocabulary at both ends, and rows in most blocks."""
    model, inputs = _MODELS[name]()
    graph = captured(model, inputs)
    ends, inside = Strategy(("zero", "zero", role)), Strategy((role, "zero", "zero"))
    strategies = [ends, *[inside] * (num_blocks(graph) - 2), ends]
    assert not _gathers_inside(graph, strategies)
    assert_exact(simulate(graph, model, inputs, _SIZES, strategies, {}), one_device(model, inputs))


def test_shared_heads() -> None:
    """The first axis splits queries in every other block."""
    model, inputs = _attending()
    graph = captured(model, inputs)
    even, odd = Strategy(("zero", "zero", "tensor")), Strategy(("tensor", "zero", "zero"))
    strategies = [odd if block % 2 else even for block in range(num_blocks(graph))]
    assert not _gathers_inside(graph, strategies)
    assert_exact(simulate(graph, model, inputs, _SIZES, strategies, {}), one_device(model, inputs))


def test_what_always_splits_rows_comes_first() -> None:
    ends, inside = Strategy(("zero", "data", "tensor")), Strategy(("data", "data", "zero"))
    axes = [Axis(f"a{i}", 2, 1e-5, 1e11) for i in range(3)]
    assert [column.axes for column in merge_axes([ends, inside, inside, ends], axes)] == [(0,), (1,), (2,)]
    assert [column.axes for column in merge_axes([ends, inside, inside, inside, ends], axes)] == [(0,), (1,), (2,)]
