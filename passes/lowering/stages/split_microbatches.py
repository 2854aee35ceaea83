"""Split the batch over time: the graph of one micro-batch, and what all of them need of the whole batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from galvatron_fx.ir.cluster.cluster import Axis, Device
from galvatron_fx.ir.errors import PlanError
from galvatron_fx.ir.graph.collectives import COLLECTIVES, RANK_LOCAL, RING_STEPS, only_first
from galvatron_fx.ir.graph.layout import Layout, MergedAxis, drop_layout, lay_part, set_layout
from galvatron_fx.ir.graph.local_program import record_step
from galvatron_fx.ir.graph.metadata import (
    InputSpec,
    OutputSpec,
    meta_of,
    output_ports,
    ports,
    set_meta,
    set_signature,
    signature,
)
from galvatron_fx.ir.graph.op_call import input_nodes
from galvatron_fx.ir.graph.placement import PARTIAL, REPLICATE, Partial, Placement
from galvatron_fx.ir.graph.rewrite import copied, copy_node, eliminate_dead_code
from galvatron_fx.ir.graph.symbols import BATCH, ONE_BATCH
from galvatron_fx.ir.kernels.experts import route
from galvatron_fx.ir.plan.plan import prime_factors
from galvatron_fx.ir.torch_compat.graphs import graph_module
from passes.analysis.blocks import num_blocks
from passes.analysis.dataflow import input_only
from passes.sharding.assign_shardings import AssignShardings, SolvedBlocks
from passes.sharding.insert_collectives import AxisSharding, InsertCollectives
from passes.sharding.placed_calls import verify_placed
from passes.sharding.prices import Prices
from passes.sharding.roles import RoleRules

# Micro-batches cannot talk to each other: a message costs so much that the solver makes one only where it must.
_NO_LINK = (1.0, 1e9)  # seconds, bytes a second

_BALANCING = (
    " (a loss that balances experts multiplies two means over the batch: train without it, in transformers by "
    "output_router_logits=False, or balance by a bias of the router)"
)
_LOOKED_UP = (
    " (masked_scatter looks rows up sample by sample where its mask, of inputs whose values all ranks have, chooses as "
    "many places of each sample: give batches that are so, and with rows of each rank batch='gather')"
)


@dataclass(frozen=True)
class Microbatched:
    """A graph of one micro-batch.

    ``graph``: takes, beside the ports of the whole graph, one "hoisted" port for every value of the micro-batch that
    follows from the inputs alone (its slices of them, the count of labels in the *whole* batch); ``prologue``: makes
    these, for all micro-batches in lockstep on an axis of ``num_microbatches`` (run it with
    :class:`galvatron_fx.runtime.lockstep.Simulator`), its inputs being those of ``prologue_ports``;
    ``outputs``: how each of the model's outputs, and the gradient of each input, is made of the micro-batches', by
    name: summed, concatenated, or equal;
    ``epilogue``: makes the outputs ``epilogue_ports`` that need all samples but no gradient needs (a loss that must
    be summed in the order of one device, a buffer that follows the mean of the batch), from the outputs of kind "piece"
    of all micro-batches, also in lockstep.
    """

    graph: fx.GraphModule
    prologue: fx.GraphModule
    prologue_ports: tuple[InputSpec, ...]
    outputs: dict[str, Placement]
    epilogue: fx.GraphModule | None
    epilogue_ports: tuple[OutputSpec, ...]
    num_microbatches: int

    def prologue_for(self, positions: Collection[int]) -> fx.GraphModule:
        """The prologue that makes but the "hoisted" ports at ``positions``, and None for the others."""
        prologue = copied(self.prologue)
        output = prologue.graph.output_node()
        values: Sequence[fx.Node] = output.args[0]  # type: ignore[assignment]
        output.args = (tuple(value if i in positions else None for i, value in enumerate(values)),)
        eliminate_dead_code(prologue)
        prologue.recompile()
        return prologue

    def late_scalars(self) -> dict[OutputSpec, torch.dtype]:
        """Outputs of the epilogue that are numbers, with their dtypes."""
        if self.epilogue is None:
            return {}
        nodes = self.epilogue.graph.output_node().args[0]
        pairs = zip(self.epilogue_ports, nodes, strict=True)  # type: ignore[arg-type]
        specs = {port: meta_of(node).spec for port, node in pairs}
        return {port: spec.dtype for port, spec in specs.items() if not spec.shape}


@dataclass(frozen=True)
class SplitMicrobatches:
    """Run the batch in ``num_microbatches`` equal parts, one after the other, with the result of the whole.

    Time is treated as a mesh axis that splits the batch, so the rules that shard a batch over devices say what a
    micro-batch computes. Gradients and losses stay terms of a sum; values that need the whole batch but follow from
    the inputs alone (the number of counted labels) are computed before the first micro-batch. What does not depend on
    the batch (a penalty on weights, and its gradient) is shared out evenly.

    Rewrite: ``loss = sum(l(x)) / count(labels)`` -> ``loss_i = sum(l(x_i)) / hoisted_count``.

    ``keep_outputs``: also those of the model that are not numbers (with one micro-batch they always stay);
    ``cache``: solutions of blocks, shared between runs; ``verifies``: as of :class:`PassControl`.

    Raises PlanError where micro-batches do not divide the batch, where the model has no loss, and where an operator
    couples samples (batch statistics, contrastive losses), naming the node.
    """

    num_microbatches: int
    device: Device
    keep_outputs: bool = True
    cache: dict[bool, SolvedBlocks] = field(default_factory=dict)
    verifies: bool = True

    def run(self, graph: fx.GraphModule) -> Microbatched:
        """Return the micro-batch's graph; ``graph`` stays as it is."""
        count = self.num_microbatches
        if count == 1:
            return _one_microbatch(graph)
        sizes = graph.meta.get("symbols")
        if sizes is None:
            raise PlanError(ONE_BATCH)
        if sizes.batch % count:
            raise PlanError(
                f"{count} micro-batches do not divide a batch of {sizes.batch}: use a divisor of the batch, or another "
                f"batch"
            )
        _require_losses(graph, count)
        _refuse_caches(graph, count)
        if not self.keep_outputs:
            graph = _numbers_only(graph)
        try:
            return self._split(graph, narrow_terms=False)
        except PlanError:
            # Under autocast, products that gradients sum have fewer bits than parameters: they round as their dtype
            # does, as they would if a loop over micro-batches added up their gradients.
            return self._split(graph, narrow_terms=True)

    def _split(self, graph: fx.GraphModule, narrow_terms: bool) -> Microbatched:
        count, sizes = self.num_microbatches, graph.meta["symbols"]
        roles = [RoleRules("zero", count, sizes.batch)] * num_blocks(graph)
        axes = tuple(Axis(f"time_{i}", prime, *_NO_LINK) for i, prime in enumerate(prime_factors(count)))
        prices = Prices(self.device, axes)
        cache = self.cache.setdefault(narrow_terms, {})
        assign = AssignShardings(0, roles, prices, cache, outputs_as_terms=True, narrow_terms=narrow_terms)
        sharding = assign.run(graph)
        microbatch = InsertCollectives(sharding).run(graph)
        set_layout(microbatch, _time_layout(graph, sharding, roles))
        _share_equal_gradients(microbatch, sharding, count)
        merges = _merges(graph, sharding)
        free = input_only(microbatch)
        _share_equal_terms(microbatch, free, count)
        if self.verifies:
            verify_placed(microbatch, "scheduled", "SplitMicrobatches, all at once")
        late = self._epilogue_nodes(microbatch, free)
        epilogue, epilogue_ports = _cut_epilogue(microbatch, late) if late else (None, ())
        moves = [n for n in microbatch.graph.nodes if _moves(n)]
        prologue, prologue_ports = _prologue(microbatch, moves)
        _hoist(microbatch, moves)
        _lay_parts(microbatch, prologue, epilogue, self.verifies)
        microbatch.meta["symbols"] = replace(sizes, batch=sizes.batch // count)
        return Microbatched(microbatch, prologue, prologue_ports, merges, epilogue, epilogue_ports, count)

    def _epilogue_nodes(self, graph: fx.GraphModule, free: set[fx.Node]) -> list[fx.Node]:
        """Nodes that need all samples and follow from parameters, in order; refused where gradients need them."""
        late: dict[fx.Node, fx.Node] = {}
        for node in graph.graph.nodes:
            if node.op != "call_function" or node in free:
                continue
            cause = node if _moves(node) else next((late[n] for n in input_nodes(node) if n in late), None)
            if cause is not None:
                late[node] = cause
        wanted = [(port, node) for port, node in output_ports(graph) if node in late]
        for port, node in wanted:
            if port.kind == "grad":
                raise self._coupled(late[node])
        return list(late)

    def _coupled(self, node: fx.Node) -> PlanError:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        where = f"module '{meta_of(source).module}'" if meta_of(source).module else "the model"
        return PlanError(
            f"'{source.name}' ({source.target}) in {where} couples the samples of a batch, so the batch cannot be cut "
            f"into {self.num_microbatches} micro-batches with the same result: use num_microbatches=1, or a model "
            f"whose samples do not depend on each other{_LOOKED_UP if _looks_samples_up(node.graph) else ''}"
            f"{_BALANCING if _has_experts(node.graph) else ''}"
        )


def _has_experts(graph: fx.Graph) -> bool:
    return bool(graph.find_nodes(op="call_function", target=route))


def _looks_samples_up(graph: fx.Graph) -> bool:
    """Whether rows that samples make are looked up, whichever sample asks."""
    lookups = graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)
    tables = (input_nodes(node)[0] for node in lookups)
    return any(table.op == "call_function" and meta_of(table).spec.dim_of(BATCH) is not None for table in tables)


def _require_losses(graph: fx.GraphModule, count: int) -> None:
    """Raise PlanError where gradients start from outputs of all samples, as a loss outside of the model makes them."""
    for port, node in ports(graph):
        if port.kind == "tangent" and meta_of(node).spec.dim_of(BATCH) is not None:
            name = signature(graph).output_names[int(port.name)] or "result"
            raise PlanError(
                f"the model returns no loss: gradients start from output '{name}' of all samples, so backward of the "
                f"first of {count} micro-batches could not run before forward of the last: compute the loss inside of "
                f"forward, or use num_microbatches=1"
            )


def _refuse_caches(graph: fx.GraphModule, count: int) -> None:
    """Raise PlanError where forward changes caches, of which each micro-batch would write its own rows."""
    caches = [port.name for port in signature(graph).outputs if port.kind == "cache"]
    if caches:
        raise PlanError(
            f"forward changes the cache '{caches[0]}', which {count} micro-batches do not write one after the other: "
            f"use num_microbatches=1, and call the model for parts of the batch, each with a cache of its own"
        )


def _time_layout(graph: fx.GraphModule, sharding: AxisSharding, roles: Sequence[RoleRules]) -> Layout:
    """How the whole batch lies on the axis of micro-batches, of which gradients are sums."""
    column = MergedAxis((0,), tuple(role.role for role in roles), sharding.degree)
    inputs = tuple((sharding.inputs[node],) for _, node in ports(graph))
    shared = [
        PARTIAL if node is not None and _is_shared_out(port, placement) else placement
        for (port, node), placement in zip(output_ports(graph), sharding.outputs, strict=True)
    ]
    return Layout((column,), inputs, tuple((placement,) for placement in shared))


def _lay_parts(
    graph: fx.GraphModule, prologue: fx.GraphModule, epilogue: fx.GraphModule | None, verifies: bool
) -> None:
    """Lay out what the batch is cut into, and check it; the graph of one micro-batch has whole tensors from here on."""
    parts = {"the micro-batch": graph, "the prologue": prologue, "the epilogue": epilogue}
    for name, part in parts.items():
        if part is not None:
            lay_part(part, graph)
            if verifies:
                verify_placed(part, "scheduled", f"SplitMicrobatches, {name}")
    drop_layout(graph)


def _one_microbatch(graph: fx.GraphModule) -> Microbatched:
    """The whole batch at once: nothing is hoisted or merged."""
    copy = copied(graph)
    prologue, _ = _prologue(copy, [])
    returned = (port for port in signature(graph).outputs if port.kind == "output" or port.is_input_gradient)
    outputs: dict[str, Placement] = {port.name: REPLICATE for port in returned}
    return Microbatched(copy, prologue, (), outputs, None, (), 1)


def _numbers_only(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy without the model's outputs that have dims."""
    result = copied(graph)
    kept = [
        (port, node)
        for port, node in output_ports(result)
        if port.kind != "output" or node is None or not meta_of(node).spec.shape
    ]
    result.graph.output_node().args = (tuple(node for _, node in kept),)
    set_signature(result, signature(result).having(outputs=tuple(port for port, _ in kept)))
    eliminate_dead_code(result)
    return result


def _moves(node: fx.Node) -> bool:
    return node.target in COLLECTIVES or node.target in RANK_LOCAL or node.target in RING_STEPS


def _merges(graph: fx.GraphModule, sharding: AxisSharding) -> dict[str, Placement]:
    placed = zip(signature(graph).outputs, sharding.outputs, strict=True)
    return {
        port.name: place
        for port, place in placed
        if (port.kind == "output" or port.is_input_gradient) and place is not None
    }


def _is_shared_out(port: OutputSpec, placement: Placement | None) -> bool:
    """Whether micro-batches add up parts of what all of them have; gradients of inputs are put together as outputs."""
    return port.kind == "grad" and not port.is_input_gradient and placement in (REPLICATE, Partial("avg"))


def _share_equal_gradients(graph: fx.GraphModule, sharding: AxisSharding, count: int) -> None:
    """Divide by ``count`` the gradients of which every micro-batch adds all, as they do not depend on the batch, and
    those that are averages of what micro-batches make.
    """
    output = graph.graph.output_node()
    results: list[fx.Node | None] = []
    for (port, node), placement in zip(output_ports(graph), sharding.outputs, strict=True):
        if node is not None and _is_shared_out(port, placement):
            record = meta_of(node).having(specs=(meta_of(node).spec,), phase="backward", multi_output=False)
            with graph.graph.inserting_before(output):
                node = graph.graph.call_function(torch.ops.aten.div.Scalar, (node, count))
            set_meta(node, record.having(placements=((PARTIAL,),)))
            record_step(node, "share of an equal gradient", 1)
        results.append(node)
    output.args = (tuple(results),)


def _share_equal_terms(graph: fx.GraphModule, free: set[fx.Node], count: int) -> None:
    """Let every micro-batch add a part of what does not depend on the batch, where the first was to add all of it:
    parts are made without asking which one runs.
    """
    for node in graph.graph.find_nodes(op="call_function", target=only_first):
        if node not in free and meta_of(node).spec.dtype.is_floating_point:
            node.target, node.args = torch.ops.aten.div.Scalar, (node.args[0], count)
            record_step(node, "share of an equal term", 1)


def _cut_epilogue(graph: fx.GraphModule, late: Sequence[fx.Node]) -> tuple[fx.GraphModule, tuple[OutputSpec, ...]]:
    """Take ``late`` out of ``graph``, which returns what they need as outputs of kind "piece" instead."""
    inside = set(late)
    taken = list(dict.fromkeys(n for node in late for n in input_nodes(node) if n not in inside))
    pieces = [node for node in taken if node.op != "get_attr"]
    constants = [node for node in taken if node.op == "get_attr"]
    new = fx.Graph()
    copies = {node: new.placeholder(node.name) for node in pieces}
    for node, copy in copies.items():
        copy.meta.update(node.meta)
    for node in (*constants, *late):
        copies[node] = copy_node(new, node, lambda n: copies[n])
    results = [(port, node) for port, node in output_ports(graph) if node in inside]
    new.output(tuple(copies[node] for _, node in results if node is not None))
    kept = [(port, node) for port, node in output_ports(graph) if node not in inside]
    output = graph.graph.output_node()
    output.args = ((*(node for _, node in kept), *pieces),)
    outputs = (*(port for port, _ in kept), *(OutputSpec("piece", str(i)) for i in range(len(pieces))))
    set_signature(graph, signature(graph).having(outputs=outputs))
    for node in reversed(late):
        graph.graph.erase_node(node)
    return graph_module(graph, new, class_name="Epilogue"), tuple(port for port, _ in results)


def _prologue(graph: fx.GraphModule, moves: Sequence[fx.Node]) -> tuple[fx.GraphModule, tuple[InputSpec, ...]]:
    """The part of ``graph`` that makes ``moves``, with the ports it takes."""
    needed: set[fx.Node] = set()
    pending: list[fx.Node] = list(moves)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += input_nodes(node)
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        if node in needed:
            copies[node] = copy_node(new, node, lambda n: copies[n])
    new.output(tuple(copies[node] for node in moves))
    taken = tuple(port for port, node in ports(graph) if node in needed)
    return graph_module(graph, new, class_name="Prologue"), taken


def _hoist(graph: fx.GraphModule, moves: Sequence[fx.Node]) -> None:
    """Put a placeholder in place of each of ``moves``, behind the last that is not a tangent."""
    kept = [(port, node) for port, node in ports(graph) if port.kind != "tangent"]
    tangents = signature(graph).inputs[len(kept) :]
    added: list[InputSpec] = []
    after = kept[-1][1]
    for index, node in enumerate(moves):
        with graph.graph.inserting_after(after):
            after = graph.graph.placeholder(f"hoisted_{index}")
        set_meta(after, meta_of(node).having(block=-1))
        node.replace_all_uses_with(after)
        added.append(InputSpec("hoisted", str(index)))
    eliminate_dead_code(graph)
    inputs = (*(port for port, _ in kept), *added, *tangents)
    set_signature(graph, signature(graph).having(inputs=inputs))
    graph.recompile()
