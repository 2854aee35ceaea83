"""Pad the batch to a size that ranks and micro-batches divide, with rows that count for nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from cost_models.node_cost import call_formula
from galvatron_fx.ir.errors import GalvatronError
from galvatron_fx.ir.graph.metadata import (
    NodeMeta,
    PaddedDim,
    TensorSpec,
    meta_of,
    output_ports,
    ports,
    set_meta,
    set_signature,
    signature,
)
from galvatron_fx.ir.graph.op_call import OpCall, input_nodes, is_getitem, op_call
from galvatron_fx.ir.graph.placement import PARTIAL, REPLICATE, ROUTED_ENDS, Partial, Placement, Shard
from galvatron_fx.ir.graph.random_ops import random_uniform
from galvatron_fx.ir.graph.rewrite import copy_node, inherited_meta, write_call
from galvatron_fx.ir.graph.symbols import BATCH, Sizes
from galvatron_fx.ir.torch_compat.graphs import graph_module
from passes.analysis.neighbours import reads_along, writes_along
from passes.lowering.padding_rules import (
    LOSS_GRADIENTS,
    MEANS,
    counted_inputs,
    ignored_labels,
    stays_zero,
)
from passes.lowering.padding_writer import PaddingWriter, makes_what_it_says
from passes.sharding.allowed_rules import AllowedRules
from passes.sharding.local_args import localize_args, map_inputs
from passes.sharding.roles import RoleRules
from passes.sharding.rules import OpRule

__all__ = ["CoupledSamplesError", "PadBatch"]

aten = torch.ops.aten


class CoupledSamplesError(GalvatronError):
    """Says why a batch cannot be padded: which operator takes samples together otherwise than by a sum."""


@dataclass(frozen=True)
class PadBatch:
    """Compute ``rows`` samples, of which those behind the batch are copies of its last one and count for nothing.

    The sharding rules say what is done to each sample by itself: that is done to rows of padding as well. Where
    samples are summed, their rows are zero; a mean divides by the samples that there are, and their labels are those
    that a loss leaves out. Gradients are zero there from the loss on. Random numbers of the samples stay as they were.

    Rows that are looked up, or written, at places that are data (neighbours in a graph) are those of the batch alone.

    Rewrite, of 5 samples to 6: ``loss = mean(f(x))`` -> ``y = f(index_select(x, 0, [0, 1, 2, 3, 4, 4]));
    loss = sum(masked_fill(y, [5:], 0)) / 5``.
    Raises CoupledSamplesError where an operator takes samples together otherwise.
    """

    rows: int

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Return the padded graph; ``graph`` stays as it is."""
        sizes: Sizes = graph.meta["symbols"]
        if sizes.batch < 2:
            raise CoupledSamplesError("a batch of one sample has nothing to share out")
        kept = [port.name for port, node in ports(graph) if port.kind == "cache" and _has_rows(meta_of(node).spec)]
        if kept:
            raise CoupledSamplesError(f"the cache '{kept[0]}' has the rows that it was made with")
        padding = _Padding(PaddingWriter(fx.Graph(), sizes, self.rows))
        kinds = {node: port.kind for port, node in ports(graph)}
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                padding.add_input(node, is_gradient=kinds[node] == "tangent")
            else:
                padding.add(node)
        result = graph_module(graph, padding.write.graph)
        result.meta.update(graph.meta)
        result.meta["symbols"] = replace(sizes, batch=self.rows)
        set_signature(result, signature(graph).having(padded=_padded_outputs(graph, padding)))
        return result


def _padded_outputs(graph: fx.GraphModule, padding: _Padding) -> dict[str, PaddedDim]:
    padded: dict[str, PaddedDim] = {}
    for port, node in output_ports(graph):
        shard = padding.shards.get(node) if node is not None else None
        if node is None or shard is None:
            continue
        if port.kind == "cache":
            raise CoupledSamplesError(f"the cache '{port.name}' would have more rows than the batch")
        if shard.is_strided or not (port.kind == "output" or port.is_input_gradient):
            raise _refusal(node)
        spec = meta_of(node).spec
        padded[port.name] = PaddedDim(shard.dim, spec.shape[shard.dim], padding.grown(node, spec).shape[shard.dim])
    return padded


class _Padding:
    """State of one run; nodes of the old graph are the keys.

    ``shards``: of each value with rows, where these lie: as the batch would be split; ``zero``: values whose rows of
    padding are zero; ``copies``: those where they are what the last sample is; ``gradients``: what tangents make.
    """

    def __init__(self, write: PaddingWriter) -> None:
        self.write = write
        batch = write.sizes.batch
        self._rules = AllowedRules(RoleRules("zero", batch, batch), batch, 0)
        self.shards: dict[fx.Node, Shard] = {}
        self.zero: set[fx.Node] = set()
        self.copies: set[fx.Node] = set()
        self.gradients: set[fx.Node] = set()
        self._placed: dict[fx.Node, tuple[Placement, ...]] = {}
        self._new: dict[fx.Node, Any] = {}
        self._unpadded: set[fx.Node] = set()

    def add_input(self, node: fx.Node, is_gradient: bool) -> None:
        """Take an input as it comes: the gradients of outputs with rows of padding, all else without."""
        spec = meta_of(node).spec
        self._new[node] = new = copy_node(self.write.graph, node)
        if is_gradient:
            self.gradients.add(node)
        if not _has_rows(spec):
            return
        if is_gradient:
            self.shards[node] = _batch_of(spec)
            set_meta(new, meta_of(node).having(specs=(self.grown(node, spec),)))
        else:
            self._leave_unpadded(node, new)

    def add(self, node: fx.Node) -> None:
        """Write what the node is in the padded graph."""
        if node.op == "output":
            self.write.graph.output(fx.map_arg(node.args[0], self._new.__getitem__)).meta.update(node.meta)
        elif node.op == "get_attr":
            self._new[node] = copy_node(self.write.graph, node)
        elif is_getitem(node):
            self._add_getitem(node)
        else:
            self._add_call(node)

    def grown(self, node: fx.Node, spec: TensorSpec) -> TensorSpec:
        """The spec with rows of padding."""
        grown = self.write.grown(spec)
        if grown is None:
            raise _refusal(node)
        return grown

    # ---- nodes ----

    def _add_getitem(self, node: fx.Node) -> None:
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        self._new[node] = new = copy_node(self.write.graph, node, self._new.__getitem__)
        self._place(node, self._placed.get(source, (REPLICATE,) * (index + 1))[index : index + 1])
        record = meta_of(node)
        set_meta(new, record.having(specs=(meta_of(self._new[source]).specs[index],), cost=record.cost))
        self._settle(node, source in self.zero)
        if source in self.copies and node not in self.zero:
            self.copies.add(node)

    def _add_call(self, node: fx.Node) -> None:
        record = meta_of(node)
        with_rows = [source for source in input_nodes(node) if source in self.shards]
        if any(along(node) is not None for along in (reads_along, writes_along)) and with_rows == [node.args[0]]:
            self._add_lookup(node)
            return
        rule = None
        if with_rows or any(map(_has_rows, record.specs)):
            rule = self._rule(node)
            if rule is None and with_rows:
                raise _refusal(node)
        if rule is None:
            self._new[node] = new = copy_node(self.write.graph, node, self._new.__getitem__)
            if any(map(_has_rows, record.specs)):
                self._leave_unpadded(node, new)  # made of sizes alone: the numbers of the samples
            self._settle(node, False)
            return
        self._place(node, rule.outputs)
        self._write_call(node, rule)
        self._settle(node, stays_zero(node, self.zero) or node.target in LOSS_GRADIENTS)
        are_copies = node not in self.zero and all(source in self.copies for source in with_rows)
        if node.target is not random_uniform and are_copies:
            self.copies.add(node)

    def _add_lookup(self, node: fx.Node) -> None:
        """Let rows be read, or written, of the batch alone: no place is one of padding."""
        table, dim = node.args[0], self.shards[node.args[0]].dim  # type: ignore[index]
        is_write = writes_along(node) is not None
        target = self._without_padding(table, dim, meta_of(node)) if is_write else self._new[table]  # type: ignore[arg-type, index]
        new = copy_node(self.write.graph, node, lambda source: target if source is table else self._new[source])
        if is_write:
            self._leave_unpadded(node, new)
        elif any(map(_has_rows, meta_of(node).specs)):
            raise _refusal(node)
        self._new[node] = new
        self._settle(node, False)

    def _without_padding(self, node: fx.Node, dim: int, beside: NodeMeta) -> fx.Node:
        value: fx.Node = self._new[node]
        if node in self._unpadded:
            return value
        spec = _alone(meta_of(node).spec, dim)
        return self.write.emit(aten.slice.Tensor, (value, dim, 0, spec.shape[dim]), spec, beside)

    def _settle(self, node: fx.Node, is_zero: bool) -> None:
        """Let rows of padding be zero in gradients, from the first on: most operators leave them so."""
        if any(source in self.gradients for source in input_nodes(node)):
            self.gradients.add(node)
        if not is_zero and node in self.gradients and node in self.shards and not meta_of(node).multi_output:
            self._new[node] = self._filled(node, 0, meta_of(node))
            self._unpadded.discard(node)
            is_zero = True
        if is_zero and (node in self.shards or meta_of(node).multi_output):  # what has no rows may make some
            self.zero.add(node)

    def _rule(self, node: fx.Node) -> OpRule | None:
        """The rule by which each sample is computed alone, and sums are added up over samples."""
        call = op_call(node)
        offers: list[tuple[Placement, ...]] = [
            ((ROUTED_ENDS if self._placed.get(source) == (ROUTED_ENDS,) else self.shards.get(source, REPLICATE)),)
            for source in input_nodes(node)
        ]
        return next((rule for rule in self._rules.of(call, offers) if self._fits(rule, call, offers, node)), None)

    def _fits(self, rule: OpRule, call: OpCall, offers: Sequence[tuple[Placement, ...]], node: fx.Node) -> bool:
        if rule.expansion.startswith("vocabulary_"):  # one computation along all of the dim that it splits
            return False
        taken = zip(rule.inputs, offers, strict=True)
        if not all((place,) == offer or (place == PARTIAL and offer == (REPLICATE,)) for place, offer in taken):
            return False
        leaves_labels_out = ignored_labels(node) is not None
        return all(
            spec is None
            or (isinstance(place, Shard) if _has_rows(spec) else isinstance(place, Partial) or leaves_labels_out)
            for place, spec in zip(rule.outputs, call.outputs, strict=True)
        )

    def _place(self, node: fx.Node, outputs: tuple[Placement, ...]) -> None:
        self._placed[node] = outputs
        if isinstance(outputs[0], Shard) and not meta_of(node).multi_output:
            self.shards[node] = outputs[0]

    def _write_call(self, node: fx.Node, rule: OpRule) -> None:
        record, target = meta_of(node), node.target
        specs = tuple(
            self.grown(node, spec) if spec is not None and isinstance(place, Shard) else spec
            for spec, place in zip(record.specs, rule.outputs, strict=True)
        )
        filled = self._filled_inputs(node, rule)
        sources = [filled.get(source) or self._padded(source, record) for source in input_nodes(node)]
        args, kwargs = map_inputs((localize_args(target, self._sliced(node), specs), dict(node.kwargs)), sources)
        is_mean = target in MEANS and not isinstance(rule.outputs[0], Shard)
        new = write_call(self.write.graph, MEANS[target] if is_mean else target, args, kwargs, node.name)
        new.meta.update(inherited_meta(node))
        set_meta(new, record.having(specs=specs, cost=record.cost))
        if not makes_what_it_says(new):
            raise _refusal(node)
        if is_mean:
            set_meta(new, meta_of(new).having(cost=call_formula(op_call(new))))
            count = meta_of(input_nodes(node)[0]).spec.numel // record.spec.numel
            new = self.write.emit(aten.div.Scalar, (new, count), record.spec, record)
        self._new[node] = new

    def _sliced(self, node: fx.Node) -> tuple[Any, ...]:
        """The arguments, of a slice that takes the whole batch without saying how many samples these are."""
        args = node.args
        if node.target is not aten.slice.Tensor or len(args) < 4 or input_nodes(node)[0] not in self.shards:
            return args
        dim = int(args[1]) % len(meta_of(node).spec.shape)  # type: ignore[arg-type]
        is_batch = self.shards[input_nodes(node)[0]].dim == dim
        return (*args[:3], sys.maxsize, *args[4:]) if is_batch else args

    # ---- values ----

    def _filled_inputs(self, node: fx.Node, rule: OpRule) -> dict[fx.Node, fx.Node]:
        """What stands for inputs whose rows of padding would count."""
        record = meta_of(node)
        labels = ignored_labels(node)
        if labels is not None:
            target, label = labels
            sums = node.target in LOSS_GRADIENTS or not any(isinstance(place, Shard) for place in rule.outputs)
            return {target: self._filled(target, label, record)} if sums and target in self.shards else {}
        sums_by = {place.op for place in rule.outputs if isinstance(place, Partial) and place != ROUTED_ENDS}
        if not sums_by:
            return {}
        with_rows = [source for source in input_nodes(node) if source in self.shards]
        if sums_by <= {"max", "min"} and all(source in self.copies for source in with_rows):
            return {}
        counted = counted_inputs(node, self.shards, self.zero)
        if counted is None or not sums_by <= {"sum", "avg"} or ("avg" in sums_by and node.target not in MEANS):
            raise _refusal(node)
        return {source: self._filled(source, 0, record) for source in counted if source not in self.zero}

    def _filled(self, source: fx.Node, fill: int, beside: NodeMeta) -> fx.Node:
        """``source`` with ``fill`` in its rows of padding."""
        shard = self.shards[source]
        if shard.routed:
            raise _refusal(source)
        key = source, fill, beside.block, beside.phase
        return self.write.once(key, lambda: self.write.filled(self._padded(source, beside), shard, fill, beside))

    def _padded(self, node: fx.Node, beside: NodeMeta) -> fx.Node:
        """The new value of a node, with rows of padding if it has rows."""
        value: fx.Node = self._new[node]
        if node not in self._unpadded:
            return value
        dim, spec = self.shards[node].dim, self.grown(node, meta_of(node).spec)
        return self.write.once(("padded", node), lambda: self.write.with_padding(value, dim, spec, beside))

    def _leave_unpadded(self, node: fx.Node, new: fx.Node) -> None:
        """Let a value have the samples alone, until something takes it."""
        record = meta_of(node)
        spec = record.spec
        shard = self.shards[node] = _batch_of(spec)
        if spec.symbolic[shard.dim] != BATCH:
            raise _refusal(node)
        set_meta(new, record.having(specs=(_alone(spec, shard.dim),), cost=record.cost))
        self._unpadded.add(node)
        self.copies.add(node)


def _refusal(node: fx.Node) -> CoupledSamplesError:
    module = f" in module '{meta_of(node).module}'" if meta_of(node).module else ""
    return CoupledSamplesError(f"'{node.name}' ({node.target}){module} takes the samples of a batch together")


def _batch_of(spec: TensorSpec) -> Shard:
    dim = spec.dim_of(BATCH)
    assert dim is not None
    return Shard(dim, spec.batch_split_factor(dim))


def _alone(spec: TensorSpec, dim: int) -> TensorSpec:
    """The spec of the samples without padding, which lie in ``dim``: their number is one, whatever the batch."""
    dims = tuple(spec.shape[at] if at == dim else size for at, size in enumerate(spec.symbolic))
    return TensorSpec(spec.shape, spec.dtype, dims)


def _has_rows(spec: TensorSpec | None) -> bool:
    return spec is not None and spec.dim_of(BATCH) is not None
