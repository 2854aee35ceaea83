"""One price: the formula in a node's record is what its numbers would cost, in whole graphs and in lowered ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from cost_models.node_cost import call_formula, cost_at, moved_bytes, node_cost
from cost_models.ops import TensorFacts, is_free, op_cost
from galvatron_fx.errors import InputError
from galvatron_fx.ir.graph.metadata import FREE, NodeMeta, OpCost, TensorSpec, meta_of, set_meta
from galvatron_fx.ir.graph.op_call import OpCall, is_getitem, op_call
from galvatron_fx.ir.graph.symbols import BATCH, SEQUENCE, Sizes
from passes.lowering.lower_stages import LowerStages
from passes.lowering.lower_step import Lower
from tests.helpers import captured, cluster_for, uniform
from tests.models import zoo
from tests.runtime.shared_captures import captured_once  # noqa: F401 (a fixture)

b, s = BATCH, SEQUENCE


def by_numbers(node: fx.Node) -> OpCost:
    """The cost at the node's shapes, without its record."""
    call = op_call(node)

    def facts(value: object) -> object:
        if isinstance(value, TensorSpec):
            return TensorFacts(value.shape, value.dtype)
        return tuple(map(facts, value)) if isinstance(value, tuple) else value

    inputs, outputs = facts(call.inputs), facts(tuple(spec for spec in call.outputs if spec is not None))
    return op_cost(call.target, facts(call.args), dict(facts(call.kwargs)), inputs, outputs)  # type: ignore[arg-type, call-overload]


def check(graph: fx.GraphModule, sizes: Sizes | None) -> None:
    for node in graph.graph.nodes:
        if node.op == "call_function" and not is_getitem(node):
            cost = node_cost(node, sizes)
            assert cost == by_numbers(node), node.name
            assert all(type(part) is int for part in (cost.flops, cost.read_bytes, cost.written_bytes)), node.name
            assert is_free(node.target) == (cost == FREE), node.name  # type: ignore[arg-type]
            assert cost == FREE or sum(moved_bytes(op_call(node))) == cost.read_bytes + cost.written_bytes, node.name


@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_formulas_are_the_numbers_of_the_graph(name: str) -> None:
    graph = captured(*getattr(zoo, name)(layers=1))
    for node in graph.graph.nodes:
        assert node.op != "call_function" or meta_of(node).cost is not None
    check(graph, graph.meta["symbols"])


def test_lowered_nodes_cost_what_their_local_shapes_do() -> None:
    graph = captured(*zoo.llama(layers=2))
    strategies = uniform(graph, "zero", "tensor_sequence", recompute=True)
    lowered = Lower(strategies, cluster_for((2, 2), strategies)).run(graph)
    for part in (lowered.joint, lowered.halves.forward, lowered.halves.backward):
        check(part, None)
    strategies = uniform(graph, "pipeline", "tensor")
    stages = LowerStages(strategies, (0, 2), 2, cluster_for((2, 2), strategies)).run(graph)
    for stage in stages.stages:
        for task in stage.tasks.values():
            check(task.graph, None)


def test_a_plan_on_one_device_keeps_the_numbers_of_the_formulas() -> None:
    graph = captured(*zoo.gpt2(layers=1))
    strategies = uniform(graph, "data")
    check(Lower(strategies, cluster_for((1,), strategies)).run(graph).joint, None)


def test_other_specs_need_another_cost() -> None:
    graph = fx.Graph()
    node = graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),))
    for each in graph.nodes:
        set_meta(each, meta_like((4, 8)))
    assert node_cost(node).flops == 32 and meta_of(node).cost is not None
    set_meta(node, meta_of(node).having(specs=meta_like((4, 2)).specs))
    assert meta_of(node).cost is None
    assert node_cost(node).flops == 8


def meta_like(shape: tuple[int, ...]) -> NodeMeta:
    return NodeMeta((TensorSpec(shape, torch.float32),))


def test_formulas_are_exact_beyond_floats() -> None:
    spec = TensorSpec((2**20, 2**20), torch.float32, (b, s))
    cost = call_formula(OpCall(torch.ops.aten.relu.default, (spec,), (), (spec,), (spec,)))
    assert cost == OpCost(b * s, 4 * b * s, 4 * b * s)
    assert cost_at(cost, Sizes(2**30 + 1, 2**31 + 1)).flops == (2**30 + 1) * (2**31 + 1)


def test_formulas_without_sizes_have_no_numbers() -> None:
    with pytest.raises(InputError, match="no whole number at a batch of 3"):
        cost_at(OpCost(b * s, 0, b / 2), Sizes(3, 2))


def test_bytes_of_each_tensor() -> None:
    """A lookup reads of its table what comes out; an output that is absent moves nothing."""
    table, ids, out = (
        TensorSpec((100, 8), torch.float32),
        TensorSpec((4,), torch.int64),
        TensorSpec((4, 8), torch.float32),
    )
    lookup = OpCall(torch.ops.aten.embedding.default, (table, ids), (), (table, ids), (out,))
    assert moved_bytes(lookup) == (0, 4 * 8, 2 * 4 * 8 * 4)
    norm = torch.ops.aten.native_layer_norm_backward.default
    assert moved_bytes(OpCall(norm, (out, out), (), (out, out), (out, None, None))) == (128, 128, 128, 0, 0)


@pytest.mark.parametrize(
    ("target", "index"), [(torch.ops.aten.index_put_.default, 0), (torch.ops.aten.index_copy_.default, 1)]
)
def test_writes_in_place_cost_the_rows_written(target: Any, index: int) -> None:
    cache, at, rows = (
        TensorSpec((2, 512), torch.float32),
        TensorSpec((1,), torch.int64),
        TensorSpec((2, 1), torch.float32),
    )
    args = (cache, (None, at), rows) if index == 0 else (cache, 1, at, rows)
    call = OpCall(target, args, (), (cache, at, rows), (cache,))
    assert moved_bytes(call) == (0, 8, 16, 0)
    assert call_formula(call) == OpCost(0, 16, 8)
