"""Blocks are called by the modules whose weights they compute with, and by nothing else."""

from __future__ import annotations

import torch
from torch import nn

import galvatron_fx
from galvatron_fx.ir.plan.plan_table import describe_blocks
from passes.analysis.block_names import block_names, named_block


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Layers between an embedding and a head that has its weight; ``shared``: one layer, run four times."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(32, 8), nn.LayerNorm(8), nn.Linear(8, 32, bias=False)
        layers = [Layer(8)] * 4 if shared else [Layer(8) for _ in range(4)]
        self.layers = nn.ModuleList(layers)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


IDS = torch.zeros(4, 6, dtype=torch.long)


def test_blocks_are_called_by_their_outermost_own_module() -> None:
    graph = galvatron_fx.capture(Model(), (IDS,))
    assert block_names(graph) == ("embed", "layers.0", "layers.1", "layers.2", "layers.3", "head")  # no norm, no tie
    assert named_block(graph, 5) == "block 5 ('head')"


def test_blocks_that_share_their_modules_have_these_in_common() -> None:
    assert set(block_names(galvatron_fx.capture(Model(shared=True), (IDS,)))) == {"embed", "layers.0", "head"}


def test_names_of_modules_are_one_line() -> None:
    model = nn.ModuleDict({"a\nb": nn.Linear(4, 4)})
    model.forward = lambda x: model["a\nb"](x).sum()  # type: ignore[method-assign]
    assert block_names(galvatron_fx.capture(model, (torch.zeros(2, 4),))) == ("a?b",)


def test_a_row_of_blocks() -> None:
    names = [f"model.layers.{i}.mlp" for i in range(80)]
    assert describe_blocks(range(1, 161, 2), names) == "1, 3 .. 159 model.layers.0-79.mlp"
    assert (
        describe_blocks(range(2, 4), ["encoder.3, decoder.0", "decoder.1"]) == "2-3 encoder.3, decoder.0 .. decoder.1"
    )
    assert describe_blocks(range(2, 4), ["block 2", "block_3"]) == "2-3 (2x)"
    assert describe_blocks(range(7, 8), ["block 7"]) == "7"
