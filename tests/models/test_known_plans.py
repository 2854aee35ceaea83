"""The solver finds the plans that people wrote by hand: Megatron's, its sequence-parallel form, and Ulysses'."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import fx
from transformers import LlamaConfig, LlamaForCausalLM

from galvatron_fx import Cluster, Strategy
from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.layout import layout
from galvatron_fx.ir.graph.metadata import meta_of, ports
from passes.analysis.blocks import num_blocks
from passes.frontend.pipeline import Frontend
from passes.sharding.shard_graph import ShardGraph

CLUSTER = Cluster.preset("8xA100-80GB")
VOCABULARY = 32000


@pytest.fixture(scope="module")
def graph() -> fx.GraphModule:
    """Two layers of the shape of LLaMA-7B's."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, use_cache=False)).to(torch.bfloat16)
    ids = torch.zeros(8, 2048, dtype=torch.long)
    return Frontend().run(model, {"input_ids": ids, "labels": ids})


def sharded(graph: fx.GraphModule, role: str) -> fx.GraphModule:
    strategies = [Strategy((role,) * 3)] * num_blocks(graph)
    return ShardGraph(strategies, CLUSTER.axes, CLUSTER.device).run(graph)


def collectives(graph: fx.GraphModule, block: int, phase: str, least_bytes: int = 10**6) -> Counter[str]:
    """Collectives of one block and phase that move more than scales and statistics."""
    return Counter(
        node.target.__name__
        for node in graph.graph.nodes
        if node.target in c.COLLECTIVES
        and meta_of(node).block == block
        and meta_of(node).phase == phase
        and meta_of(node).spec.size_bytes >= least_bytes
    )


def weight_dims(graph: fx.GraphModule) -> dict[str, int]:
    """The dim in which each weight matrix is split."""
    how = layout(graph)
    return {
        port.name: placed[0].dim
        for (port, node), placed in zip(ports(graph), how.inputs, strict=True)
        if port.kind == "param" and len(meta_of(node).spec.shape) == 2
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layer", [1, 2])
def test_tensor_is_megatron(graph: fx.GraphModule, layer: int) -> None:
    lowered = sharded(graph, "tensor")
    assert collectives(lowered, layer, "forward") == {"all_reduce": 2}
    assert collectives(lowered, layer, "backward") == {"all_reduce": 2}
    dims = weight_dims(lowered)
    for name, dim in dims.items():
        if ".layers." in name:
            assert dim == int(name.endswith(("o_proj.weight", "down_proj.weight"))), name


@pytest.mark.parametrize("layer", [1, 2])
def test_tensor_sequence_is_megatron_sequence_parallelism(graph: fx.GraphModule, layer: int) -> None:
    lowered = sharded(graph, "tensor_sequence")
    assert collectives(lowered, layer, "forward") == {"all_gather": 2, "reduce_scatter": 2}
    assert collectives(lowered, layer, "backward") == {"all_gather": 2, "reduce_scatter": 2}


@pytest.mark.parametrize("layer", [1, 2])
def test_sequence_is_ulysses(graph: fx.GraphModule, layer: int) -> None:
    lowered = sharded(graph, "sequence")
    assert collectives(lowered, layer, "forward") == {"all_to_all": 4}
    backward = collectives(lowered, layer, "backward")
    assert backward["all_to_all"] == 4
    assert set(backward) == {"all_to_all", "all_reduce"}  # the latter of weight gradients


@pytest.mark.parametrize("role", ["tensor", "tensor_sequence"])
def test_the_loss_does_not_gather_the_logits(graph: fx.GraphModule, role: str) -> None:
    lowered = sharded(graph, role)
    gathered = [
        node.name
        for node in lowered.graph.nodes
        if node.target in c.COLLECTIVES and VOCABULARY in meta_of(node).spec.shape and meta_of(node).phase == "forward"
    ]
    assert not gathered


def test_data_reduces_each_gradient_once(graph: fx.GraphModule) -> None:
    lowered = sharded(graph, "data")
    assert collectives(lowered, 1, "forward") == {}
    assert collectives(lowered, 1, "backward") == {"all_reduce": 7}  # four attention and three feed-forward weights
