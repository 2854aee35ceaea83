"""Which parameters hold experts along their first dim, and are read by them alone; or each the weight of one expert."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import fx

from galvatron_fx.ir.graph.collectives import all_gather, all_to_all, shard
from galvatron_fx.ir.graph.further_rounds import FurtherRounds
from galvatron_fx.ir.graph.metadata import meta_of, ports
from galvatron_fx.ir.graph.op_call import is_getitem
from galvatron_fx.ir.kernels.experts import (
    collect,
    gather_experts,
    in_round,
    lend,
    part_experts,
    place_by_rank,
    received_order,
    route,
    spread,
    with_shadows,
)
from galvatron_fx.ir.plan.strategy import original_name

__all__ = ["ROUTES", "ExpertWeights", "expert_weights"]

ROUTES = (route, place_by_rank)
"""What reads which expert each row has."""

_aten = torch.ops.aten
_SWAPS = (_aten.transpose.int, _aten.permute.default)
_KEEP = (_aten._to_copy.default, _aten.clone.default, _aten.detach.default, _aten.alias.default)
_KEEP_TOO = (all_gather, all_to_all, shard, with_shadows)


@dataclass(frozen=True)
class ExpertWeights:
    """Experts of one module: how many, ``ranks`` that hold equal runs of them (1: each holds all), and the names of the
    parameters that do; ``refusal``: why these cannot be put in another order, or nothing; ``shadows``: how many of them
    all ranks compute; ``are_listed``: whether others are weights of one expert each, which every step puts together.
    """

    experts: int
    ranks: int
    names: tuple[str, ...]
    refusal: str = ""
    shadows: int = 0
    are_listed: bool = False


def expert_weights(graph: fx.GraphModule) -> dict[str, ExpertWeights]:
    """The experts of a graph that is lowered and not yet bound, by the name of the module that chooses them."""
    names = {node: (port.kind, original_name(port.name)) for port, node in ports(graph)}
    layers: dict[str, ExpertWeights] = {}
    for node in graph.graph.nodes:
        if node.target in ROUTES and meta_of(node).phase == "forward":
            module = meta_of(node).module
            layer = _layer(node, names)
            if module in layers and layers[module] != layer:
                layer = replace(layer, refusal="several mixtures stand in one module")
            layers[module] = layer
    holders = Counter(name for layer in layers.values() for name in layer.names)
    for module, layer in layers.items():
        if layer.are_listed and (wrong := _other_list(graph, module, layer.experts)):
            layer = replace(layer, refusal=f"'{wrong.name}' of their module lists something else")
            layers[module] = layer
        shared = [name for name in layer.names if holders[name] > 1]
        if shared:
            layers[module] = replace(layer, refusal=f"'{shared[0]}' belongs to several modules")
    return layers


def _layer(node: fx.Node, names: Mapping[fx.Node, tuple[str, str]]) -> ExpertWeights:
    experts, ranks = node.args[1], node.args[2] if node.target is place_by_rank else 1
    assert isinstance(experts, int) and isinstance(ranks, int)
    weights: dict[str, None] = {}
    refusal, are_listed = "", False
    for reader in _readers(node):
        source = _source(_weight(reader))
        kind, name = names.get(source, ("", source.name))
        if source.target is gather_experts and not _other_reader(source):
            are_listed = True
            continue
        if kind != "param":
            refusal = f"'{source.name}', which its experts read, is no parameter that holds all of them"
        elif wrong := _other_reader(source):
            refusal = f"'{name}' is read by '{wrong.name}', too, which is no product of experts"
        weights[name] = None
    return ExpertWeights(experts, ranks, tuple(weights), refusal, _num_shadows(node), are_listed)


def _other_list(graph: fx.GraphModule, module: str, experts: int) -> fx.Node | None:
    """What lists something of a module, or takes it apart, that is no weight of each of its experts."""
    lists = [node for node in graph.graph.nodes if node.target in (gather_experts, part_experts)]
    for node in lists:
        listed = node.args[0] if node.target is gather_experts else meta_of(node).specs
        if meta_of(node).module == module and len(listed) != experts:
            return cast(fx.Node, node)
    return None


def _num_shadows(node: fx.Node) -> int:
    named = node.args[3] if len(node.args) > 3 else None
    return meta_of(named).spec.shape[0] if isinstance(named, fx.Node) else 0


def _readers(node: fx.Node) -> list[fx.Node]:
    """What reads, in the order of experts, where the rows of each end."""
    readers: dict[fx.Node, None] = {}
    pending = [user for user in node.users if user.args[1] == (2 if node.target is route else 1)]
    while pending:
        for user in pending.pop().users:
            if _weight(user) is not None:
                readers[user] = None
            elif user.target is received_order:
                pending += [end for end in user.users if end.args[1] == 1]
            elif user.target not in (in_round, collect) and not _is_grouped(user) and not _is_rounds(user):
                pending.append(user)
    return list(readers)


def _is_grouped(node: fx.Node) -> bool:
    return "grouped_mm" in str(node.target)


def _is_rounds(node: fx.Node) -> bool:
    return isinstance(node.target, FurtherRounds)


def _weight(node: fx.Node) -> fx.Node | None:
    """What a product of experts in forward, or what spreads their biases, has of each expert."""
    position = 0 if node.target is spread else 1
    is_reader = node.target is spread or (_is_grouped(node) and "backward" not in str(node.target))
    weight = node.args[position] if is_reader else None
    return weight if isinstance(weight, fx.Node) and meta_of(node).phase == "forward" else None


def _keeps_order(node: fx.Node) -> bool:
    """Whether the first dim of a result is the first of what it is made of."""
    if node.target in _SWAPS:
        dims = node.args[1] if isinstance(node.args[1], (list, tuple)) else node.args[1:3]
        rank = len(meta_of(node).spec.shape)
        places = [int(dim) % rank for dim in dims]  # type: ignore[arg-type]
        return places[0] == 0 if node.target is _aten.permute.default else 0 not in places
    return node.target in (*_KEEP, *_KEEP_TOO)


def _source(node: fx.Node | None) -> fx.Node:
    assert node is not None
    while _keeps_order(node):
        node = node.all_input_nodes[0]
    return node


def _other_reader(source: fx.Node) -> fx.Node | None:
    """What reads a weight otherwise than expert by expert."""
    pending = [source]
    while pending:
        for user in pending.pop().users:
            if _keeps_order(user) or is_getitem(user):
                pending.append(user)
            elif (
                user.op != "output"
                and user.target not in (spread, lend)
                and not _is_grouped(user)
                and not _is_rounds(user)
            ):
                return user
    return None
