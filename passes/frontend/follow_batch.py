"""Tell where the batch lies in a program that could be traced at one batch size alone: operators' rules say it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from galvatron_fx.ir.graph.metadata import Dim, TensorSpec, meta_of, ports, set_meta, signature
from galvatron_fx.ir.graph.op_call import OpCall, input_nodes, is_getitem, op_call
from galvatron_fx.ir.graph.placement import Placement, Shard, fits
from galvatron_fx.ir.graph.symbols import BATCH, InputDims, Sizes
from passes.analysis.sample_work import is_mostly_of_samples
from passes.sharding.own_rules import VIEWS, view_rules
from passes.sharding.rules import OpRule, op_rules, strided

__all__ = ["FollowBatch"]

_MOST_ROUNDS = 8

_Value = tuple[fx.Node, int]
"""One output of an operator."""


@dataclass(frozen=True)
class FollowBatch:
    """Give values their batch where no second trace does: as if each sample were on a rank of its own.

    A program that loops over images, or decides otherwise by the values of other samples, is another one at another
    batch size, and yet most of it does with each sample what it does with all. From the inputs on, each operator's
    rules say in which dim its output has the samples where its inputs have them in theirs; what meets such values and
    has as many rows (positions, masks) is followed back to where it was made.

    Rewrite: ``dims=()`` -> ``dims=(b, 16, 64)``, and ``graph.meta["symbols"]`` says that the sizes are fixed; the graph
    is unchanged. Where less than half of the work has samples to be told apart, all stays as it was.
    """

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Annotate ``graph`` in place and return it."""
        dims: InputDims | None = graph.meta.get("input_dims")
        if graph.meta.get("symbols") is not None or dims is None:
            return graph
        batch = dims.sizes([spec.shape for spec in signature(graph).input_specs]).batch
        if batch > 1:
            tangents = [node for port, node in ports(graph) if port.kind == "tangent"]
            found = {(node, 0): Shard(dim) for node, dim in _inputs(graph, dims) if dim is not None}
            _Following(batch, frozenset(tangents), found).run(graph)
            if is_mostly_of_samples(graph, lambda node: _value(node) in found):
                graph.meta["symbols"] = Sizes(batch, 0, is_fixed=True)
                for node in graph.graph.nodes:
                    if node.op != "output":
                        _set_dims(node, found, batch)
        return graph


def _inputs(graph: fx.GraphModule, dims: InputDims) -> Iterator[tuple[fx.Node, int | None]]:
    """The inputs, caches among them, and where they have the batch."""
    names = list(signature(graph).input_spec.input_names)
    for port, node in ports(graph):
        if port.kind in ("input", "cache"):
            yield node, dims.batch[int(port.name) if port.kind == "input" else names.index(port.name)]


@dataclass(frozen=True)
class _Following:
    """Adds the other values with samples to ``found``; of placeholders, ``tangents`` alone may have any."""

    batch: int
    tangents: frozenset[fx.Node]
    found: dict[_Value, Shard]

    def run(self, graph: fx.GraphModule) -> None:
        calls = [node for node in graph.graph.nodes if node.op == "call_function" and not is_getitem(node)]
        for _ in range(_MOST_ROUNDS):
            before = len(self.found)
            for node in calls:
                self._forward(node)
            for node in reversed(calls):
                self._backward(node)
            if len(self.found) == before:
                return

    def _forward(self, node: fx.Node) -> None:
        """Where the outputs have the samples that inputs have, and the inputs that these meet."""
        known = [self.found.get(_value(source)) for source in input_nodes(node)]
        if any(known):
            rules = [
                rule
                for rule in self._rules(op_call(node), [shard for shard in known if shard is not None])
                if all(shard in (None, placed) for shard, placed in zip(known, rule.inputs, strict=True))
            ]
            if rules:
                self._note(node, max(rules, key=_keeps_samples))

    def _backward(self, node: fx.Node) -> None:
        """Where the inputs have the samples that the output has, if none is known to have them."""
        wanted = self.found.get((node, 0))
        if wanted is not None and not any(_value(source) in self.found for source in input_nodes(node)):
            for rule in self._rules(op_call(node), [wanted]):
                if rule.outputs[0] == wanted and any(isinstance(placed, Shard) for placed in rule.inputs):
                    self._note(node, rule)
                    return

    def _rules(self, call: OpCall, shards: Sequence[Shard]) -> Iterator[OpRule]:
        """The ways to run an operator with a sample on each of as many ranks."""
        offered: list[Placement] = [*shards]
        rules = [*op_rules(call, self.batch)]
        if call.target in VIEWS:
            rules += view_rules(call, offered, self.batch)
        else:
            rules += [instance for rule in rules for instance in strided(rule, call, offered, self.batch)]
        for rule in dict.fromkeys(rules):
            fitting = all(spec is None or fits(p, spec.shape, self.batch) for p, spec in rule.placed(call))
            if fitting and not rule.routes:
                yield rule

    def _note(self, node: fx.Node, rule: OpRule) -> None:
        sources = zip(input_nodes(node), rule.inputs, strict=True)
        taken = [(_value(n), placed) for n, placed in sources if n.op == "call_function" or n in self.tangents]
        made = [((node, at), placed) for at, placed in enumerate(rule.outputs)]
        for value, placed in [*made, *taken]:
            if isinstance(placed, Shard):
                self.found.setdefault(value, placed)


def _keeps_samples(rule: OpRule) -> bool:
    return any(isinstance(placed, Shard) for placed in rule.outputs)


def _value(node: fx.Node) -> _Value:
    return (node.args[0], int(node.args[1])) if is_getitem(node) else (node, 0)  # type: ignore[arg-type,return-value]


def _set_dims(node: fx.Node, found: Mapping[_Value, Shard], batch: int) -> None:
    record = meta_of(node)
    values = [_value(node)] if is_getitem(node) else [(node, at) for at in range(len(record.specs))]
    shards = map(found.get, values)
    specs = tuple(spec and _with_batch(spec, shard, batch) for spec, shard in zip(record.specs, shards, strict=True))
    set_meta(node, record.having(specs=specs))


def _with_batch(spec: TensorSpec, shard: Shard | None, batch: int) -> TensorSpec:
    if shard is None:
        return spec
    dims: list[Dim] = list(spec.shape)
    dims[shard.dim] = spec.shape[shard.dim] // batch * BATCH
    runs = tuple(shard.num_runs if dim == shard.dim else 1 for dim in range(len(dims)))
    return replace(spec, dims=tuple(dims), batch_split_factors=runs if shard.is_strided else ())
