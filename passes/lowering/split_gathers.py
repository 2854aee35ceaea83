"""Use a gathered parameter slice by slice, so that it is never whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import fx

from galvatron_fx.ir.graph.collectives import all_gather, all_reduce, reduce_scatter
from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of, output_ports, set_meta
from galvatron_fx.ir.graph.op_call import OpCall, input_nodes, is_getitem, op_call
from galvatron_fx.ir.graph.placement import PARTIAL, REPLICATE, Partial, Placement, Shard
from galvatron_fx.ir.graph.precision import cast_gradient, cast_parameter
from galvatron_fx.ir.graph.rewrite import eliminate_dead_code, set_output, write_call
from galvatron_fx.ir.plan.strategy import Strategy
from passes.analysis.storages import is_view
from passes.sharding.local_args import localize_args, map_inputs
from passes.sharding.rules import OpRule, op_rules

aten = torch.ops.aten

_TO_PARTS = (all_gather, cast_parameter, aten._to_copy.default)
_TO_GRADIENTS = (reduce_scatter, all_reduce, cast_gradient, aten._to_copy.default)


@dataclass(frozen=True)
class SplitGathers:
    """Gather a parameter in slices, and reduce its gradient so, in blocks whose strategy has ``split_gathers``.

    OSDP's operator splitting (Jiang et al. 2023, section 3.3), for any operator whose sharding rules say what a slice
    of a weight makes: a slice of the result, or a term of it. A gather and its operator become as many of each as there
    are slices, one behind the other; so does an operator that makes a gradient, and its reduction. Slices are along a
    dim that no mesh axis splits; they are as many as that divides of those asked for. What several operators take stays
    whole.

    Rewrite: ``y = mm(x, t(all_gather(w)))`` -> ``y = mm(x[:, :h], t(all_gather(w[:, :h]))); y = addmm(y, x[:, h:],
    t(all_gather(w[:, h:])))``, and ``g = reduce_scatter(mm(dy, x))`` ->
    ``g = cat([reduce_scatter(mm(dy, x[:, :h])), reduce_scatter(mm(dy, x[:, h:]))], 1)``.

    ``strategies``: one per block.
    """

    strategies: Sequence[Strategy]

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it."""
        if all(strategy.split_gathers == 1 for strategy in self.strategies):
            return graph
        for node in list(graph.graph.nodes):
            if node.target is all_gather and self._asked(node) > 1:
                _split_use(node, self._asked(node))
        for position, (port, node) in enumerate(output_ports(graph)):
            if port.kind == "grad" and node is not None and node.op == "call_function" and self._asked(node) > 1:
                _split_gradient(graph, position, node, self._asked(node))
        eliminate_dead_code(graph)
        return graph

    def _asked(self, node: fx.Node) -> int:
        return self.strategies[max(meta_of(node).block, 0)].split_gathers


@dataclass(frozen=True)
class _Cut:
    """An operator in ``count`` slices, by a rule as if so many ranks ran it; those of views in front or behind."""

    node: fx.Node
    rule: OpRule
    count: int

    def argument(self, graph: fx.Graph, source: fx.Node, placement: Placement, index: int) -> fx.Node:
        """Slice ``index`` of what it takes."""
        return _slice(graph, source, placement.dim, index, self) if isinstance(placement, Shard) else source

    def write(self, graph: fx.Graph, sources: list[fx.Node], start: fx.Node | None = None) -> fx.Node:
        """The operator on slices, as a term on top of ``start`` if there is one."""
        (spec,) = meta_of(self.node).specs
        assert spec is not None
        placement = self.rule.outputs[0]
        local = _part(spec, placement.dim, self.count) if isinstance(placement, Shard) else spec
        target, args = self.node.target, self.node.args
        if start is not None and target in (aten.mm.default, aten.addmm.default):
            new = write_call(graph, aten.addmm.default, (start, *sources[-2:]))
        else:
            new = write_call(graph, target, localize_args(target, map_inputs(args, sources), (local,)))
            new.kwargs = self.node.kwargs
        set_meta(new, meta_of(self.node).having(specs=(local,)))
        if start is None or new.target is aten.addmm.default:
            return new
        total = write_call(graph, aten.add.Tensor, (start, new))
        set_meta(total, meta_of(self.node).having(specs=(local,)))
        return total


def _split_use(gather: fx.Node, asked: int) -> None:
    """Split what takes a gathered parameter, if one operator does."""
    above, below = _made_of(gather), _up_to_product(gather)
    if above is None or below is None:
        return
    *views, product = below
    gathered_dims = {node.args[1] for node in above if node.target is all_gather}
    cuts = [
        cut
        for dim, count in _free_dims(gather, asked)
        if dim not in gathered_dims and (cut := _cut_use(views, product, dim, count, gather)) is not None
    ]
    if not cuts:
        return
    dim, path = min(cuts, key=lambda cut: isinstance(cut[1][-1].rule.outputs[0], Partial))
    last = path[-1]
    graph, parts = product.graph, []
    end: fx.Node | None = None
    with graph.inserting_before(product):
        for index in range(last.count):
            part = _slice(graph, input_nodes(above[0])[0], dim, index, last)
            for node in above:
                part = _on_slice(graph, node, part, dim, last.count)
            for view in path[:-1]:
                part = view.write(graph, [part])
            below_view = views[-1] if views else gather
            sources = [
                part if source is below_view else last.argument(graph, source, placement, index)
                for source, placement in zip(input_nodes(product), last.rule.inputs, strict=True)
            ]
            is_term = isinstance(last.rule.outputs[0], Partial)
            end = last.write(graph, sources, end if is_term else None)
            parts.append(end)
        whole = end if isinstance(last.rule.outputs[0], Partial) else _joined(graph, parts, last, product)
    assert whole is not None
    product.replace_all_uses_with(whole)


def _split_gradient(graph: fx.GraphModule, position: int, result: fx.Node, asked: int) -> None:
    """Split what makes a gradient whose sum over ranks is scattered."""
    behind = _made_by_product(result)
    if behind is None or all(node.target is not reduce_scatter for node in behind):
        return
    product, *tail = behind
    for dim, count in _free_dims(result, asked):
        path = _cut_gradient(product, tail, dim, count)
        if path is None:
            continue
        first, parts = path[-1], []
        along = _dims_along(tail, path, dim)
        if any(node.target is reduce_scatter and node.args[2] == along[node] for node in tail):
            continue
        cut_of = {cut.node: cut for cut in path}
        with graph.graph.inserting_before(product.next):
            for index in range(count):
                sources = [
                    first.argument(graph.graph, source, placement, index)
                    for source, placement in zip(input_nodes(product), first.rule.inputs, strict=True)
                ]
                part = first.write(graph.graph, sources)
                for node in tail:
                    is_cut = node in cut_of
                    part = (
                        cut_of[node].write(graph.graph, [part])
                        if is_cut
                        else _on_slice(graph.graph, node, part, along[node], count)
                    )
                parts.append(part)
            whole = write_call(graph.graph, aten.cat.default, (parts, dim))
            set_meta(whole, meta_of(result).having(specs=meta_of(result).specs))
        set_output(graph, position, whole)
        return


def _dims_along(tail: Sequence[fx.Node], path: Sequence[_Cut], dim: int) -> dict[fx.Node, int]:
    """The dim that slices are along at each node behind a product: views behind it say so."""
    cut_of, along = {cut.node: cut for cut in path}, {}
    for node in reversed(tail):
        along[node] = dim
        if node in cut_of:
            (placement,) = cut_of[node].rule.inputs
            assert isinstance(placement, Shard)
            dim = placement.dim
    return along


def _made_of(gather: fx.Node) -> list[fx.Node] | None:
    """What leads from a parameter to its last gather, in order; None where something else does."""
    if any(user.target is all_gather for user in gather.users):
        return None  # the next one is the last
    chain = [gather]
    while (source := input_nodes(chain[0])[0]).op != "placeholder":
        if source.target not in _TO_PARTS or len(source.users) > 1:
            return None
        chain.insert(0, source)
    return chain


def _up_to_product(gather: fx.Node) -> list[fx.Node] | None:
    """Views of what was gathered, and the one operator that takes the last of them."""
    path, node = [], gather
    while len(node.users) == 1:
        (node,) = node.users
        if node.op != "call_function" or meta_of(node).multi_output or meta_of(node).step is not None:
            return None
        path.append(node)
        if not is_view(node) or len(input_nodes(node)) != 1:
            return path
    return None


def _made_by_product(result: fx.Node) -> list[fx.Node] | None:
    """The operator that makes a gradient, and what is done with that up to the ``result``."""
    path = [result]
    while path[0].target in _TO_GRADIENTS or is_view(path[0]):
        source = input_nodes(path[0])[0]
        alone = (
            source.op == "call_function" and len(source.users) == 1 and meta_of(source).block == meta_of(result).block
        )
        if not alone or meta_of(source).multi_output or meta_of(source).step is not None:
            return None
        path.insert(0, source)
    return path if len(path) > 1 else None


def _free_dims(node: fx.Node, asked: int) -> Iterator[tuple[int, int]]:
    """Dims that no mesh axis splits, and into how many equal slices each can be cut."""
    record = meta_of(node)
    for dim, size in enumerate(record.spec.shape):
        if (count := gcd(size, asked)) > 1 and _is_whole(node, dim):
            yield dim, count


def _is_whole(node: fx.Node, dim: int) -> bool:
    return all(not isinstance(p, Shard) or p.dim != dim for placed in meta_of(node).placements for p in placed)


def _cut_use(
    views: Sequence[fx.Node], product: fx.Node, dim: int, count: int, gather: fx.Node
) -> tuple[int, list[_Cut]] | None:
    """How views and a product are cut where a parameter is, along ``dim``; None where no rule says."""
    path, placement, source = [], Shard(dim), gather
    for view in views:
        rule = next((r for r in op_rules(op_call(view), count) if r.inputs == (placement,)), None)
        if rule is None or not isinstance(rule.outputs[0], Shard) or not rule.outputs[0].is_plain:
            return None
        path.append(_Cut(view, rule, count))
        placement, source = rule.outputs[0], view
    places = [i for i, each in enumerate(input_nodes(product)) if each is source]
    if len(places) != 1 or not _has_tensors(product):
        return None
    rules = [
        rule
        for rule in [*op_rules(op_call(product), count), *_terms_on_bias(product, count)]
        if rule.inputs[places[0]] == placement and _is_plain(rule) and _may_slice(product, rule)
    ]
    rules.sort(key=lambda rule: isinstance(rule.outputs[0], Partial))
    return (dim, [*path, _Cut(product, rules[0], count)]) if rules else None


def _has_tensors(product: fx.Node) -> bool:
    """Whether an operator makes one tensor of some, which are its arguments."""
    sources = [product, *input_nodes(product)]
    given = any(isinstance(value, fx.Node) for value in product.kwargs.values())
    return not given and not is_getitem(product) and all(not meta_of(node).multi_output for node in sources)


def _terms_on_bias(product: fx.Node, count: int) -> list[OpRule]:
    """Rules by which a product with a bias is a sum of terms, of which the first takes the bias."""
    if product.target is not aten.addmm.default or product.kwargs:
        return []
    call = op_call(product)
    terms = op_rules(OpCall(aten.mm.default, call.args[1:], (), call.inputs[1:], call.outputs), count)
    return [OpRule(rule.outputs, (REPLICATE, *rule.inputs)) for rule in terms if rule.outputs == (PARTIAL,)]


def _cut_gradient(product: fx.Node, tail: Sequence[fx.Node], dim: int, count: int) -> list[_Cut] | None:
    """How a product, and views behind it, are cut so that its gradient is along ``dim``; None where no rule says."""
    path: list[_Cut] = []
    placement = Shard(dim)
    for view in reversed([node for node in tail if is_view(node)]):
        rule = next((r for r in op_rules(op_call(view), count) if r.outputs == (placement,)), None)
        if rule is None or not isinstance(rule.inputs[0], Shard) or not rule.inputs[0].is_plain:
            return None
        path.append(_Cut(view, rule, count))
        placement = rule.inputs[0]
    if not _has_tensors(product):
        return None
    rules = [r for r in op_rules(op_call(product), count) if r.outputs == (placement,) and _is_plain(r)]
    rule = next((r for r in rules if _may_slice(product, r)), None)
    return None if rule is None else [*path, _Cut(product, rule, count)]


def _is_plain(rule: OpRule) -> bool:
    """Whether the operator itself runs on slices, and makes a slice or a term of a sum."""
    plain = all(p == REPLICATE or (isinstance(p, Shard) and p.is_plain) for p in rule.inputs)
    (out, *more) = rule.outputs
    return plain and not more and not rule.expansion and (out == PARTIAL or (isinstance(out, Shard) and out.is_plain))


def _may_slice(product: fx.Node, rule: OpRule) -> bool:
    """Whether no mesh axis splits the dims that are sliced."""
    sides = [*zip(input_nodes(product), rule.inputs, strict=True), (product, rule.outputs[0])]
    return all(_is_whole(node, p.dim) for node, p in sides if isinstance(p, Shard))


def _on_slice(graph: fx.Graph, node: fx.Node, part: fx.Node, dim: int, count: int) -> fx.Node:
    """A gather, reduction or cast of a slice."""
    new = write_call(graph, node.target, (part, *node.args[1:]), node.kwargs)
    set_meta(new, meta_of(node).having(specs=(_part(meta_of(node).spec, dim, count),), stays=True))
    return new


def _slice(graph: fx.Graph, node: fx.Node, dim: int, index: int, cut: _Cut) -> fx.Node:
    """Slice ``index`` of what an operator that is cut takes."""
    size, taker = meta_of(node).spec.shape[dim] // cut.count, meta_of(cut.node)
    new = write_call(graph, aten.slice.Tensor, (node, dim, index * size, (index + 1) * size))
    specs, placed = (_part(meta_of(node).spec, dim, cut.count),), meta_of(node).placements
    set_meta(new, taker.having(specs=specs, placements=placed, value=-1))
    return new


def _part(spec: TensorSpec, dim: int, count: int) -> TensorSpec:
    shape = list(spec.shape)
    shape[dim] //= count
    return TensorSpec(tuple(shape), spec.dtype)


def _joined(graph: fx.Graph, parts: list[fx.Node], cut: _Cut, whole: fx.Node) -> fx.Node:
    placement = cut.rule.outputs[0]
    assert isinstance(placement, Shard)
    new = write_call(graph, aten.cat.default, (parts, placement.dim))
    set_meta(new, meta_of(whole).having(specs=meta_of(whole).specs))
    return new
