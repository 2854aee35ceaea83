"""Caches are written in place where nothing else takes what they held."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from galvatron_fx.ir.graph.metadata import InputSpec, OutputSpec
from passes.lowering.write_caches import WriteCachesInPlace

aten = torch.ops.aten


def once(k: Tensor, i: Tensor, new: Tensor) -> list[Tensor]:
    return [aten.index_put.default(k, [None, i], new)]


def twice(k: Tensor, i: Tensor, new: Tensor) -> list[Tensor]:
    return [aten.index_copy.default(aten.index_put.default(k, [None, i], new), 1, i + 1, new)]


def read_before(k: Tensor, i: Tensor, new: Tensor) -> list[Tensor]:
    return [aten.index_put.default(k, [None, i], new), k.sum(1)]


def of_itself(k: Tensor, i: Tensor, new: Tensor) -> list[Tensor]:
    return [aten.index_put.default(k, [None, torch.arange(3)], k)]


def computed(k: Tensor, i: Tensor, new: Tensor) -> list[Tensor]:
    return [aten.index_put.default(k * 2, [None, i], new)]


@pytest.mark.parametrize(("forward", "count"), [(once, 1), (twice, 2), (read_before, 0), (of_itself, 0), (computed, 0)])
def test_writes(forward: Callable[..., list[Tensor]], count: int) -> None:
    given = torch.arange(6.0).reshape(2, 3), torch.tensor([1]), torch.ones(2, 1)
    expected = [value.clone() for value in forward(*given)]
    graph = make_fx(forward)(*given)
    graph.graph.output_node().args = (tuple(graph.graph.output_node().args[0]),)  # type: ignore[arg-type]
    inputs = [InputSpec("cache", "k"), InputSpec("input", "0"), InputSpec("input", "1")]
    WriteCachesInPlace(inputs, [OutputSpec("cache", "k"), OutputSpec("output", "0")]).run(graph)
    assert in_place(graph) == count
    cache = given[0].clone()
    found = graph(cache, *given[1:])
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert found[0].is_set_to(cache) == (count > 0)


def in_place(graph: fx.GraphModule) -> int:
    return sum(node.target in (aten.index_put_.default, aten.index_copy_.default) for node in graph.graph.nodes)
