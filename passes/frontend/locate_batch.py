"""Find where the batch lies inside dims that hold it together with something else."""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy
from torch import fx

from galvatron_fx.ir.graph.metadata import (
    TensorSpec,
    meta_of,
    output_ports,
    set_meta,
    set_signature,
    signature,
)
from galvatron_fx.ir.graph.op_call import input_nodes
from galvatron_fx.ir.graph.placement import Shard, through_view
from galvatron_fx.ir.graph.symbols import BATCH
from passes.sharding.own_rules import VIEWS


@dataclass(frozen=True)
class LocateBatch:
    """Say of every dim how many runs lie before the batch, so that roles can tell batch from sequence in it.

    Models that put the sequence first (torch's own multi-head attention does) flatten ``[sequence, batch, hidden]`` to
    ``[sequence * batch, hidden]``, whose size alone is that of ``[batch * sequence, hidden]``. Views say which it is;
    other operators keep the order of an input dim of the same size.

    Rewrite: ``batch_split_factors=()`` -> ``batch_split_factors=(s, 1)`` on ``[sequence * batch, hidden]``; the graph
    is unchanged. The signature says where the batch lies in the model's outputs.
    """

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Annotate ``graph`` in place and return it; without symbolic sizes nothing is known, and nothing changes."""
        sizes = graph.meta.get("symbols")
        if sizes is not None:
            for node in graph.graph.nodes:
                if node.op == "call_function":
                    _annotate(node, sizes.batch)
            set_signature(graph, signature(graph).having(batch_dims=_of_outputs(graph)))
        return graph


def _of_outputs(graph: fx.GraphModule) -> dict[str, tuple[int, int]]:
    """The dim of each output that has the batch, and in how many runs, by the output's name."""
    places = {}
    for port, node in output_ports(graph):
        spec = meta_of(node).spec if port.kind == "output" and node is not None else None
        dim = None if spec is None else spec.dim_of(BATCH)
        if spec is not None and dim is not None:
            places[port.name] = dim, spec.batch_split_factor(dim)
    return places


def _annotate(node: fx.Node, batch: int) -> None:
    record = meta_of(node)
    sources = [meta_of(n).spec for n in input_nodes(node) if not meta_of(n).multi_output]
    specs = tuple(spec and _located(spec, sources, node.target in VIEWS, batch) for spec in record.specs)
    if specs != record.specs:
        set_meta(node, record.having(specs=specs))


def _located(spec: TensorSpec, sources: list[TensorSpec], is_view: bool, batch: int) -> TensorSpec:
    runs = [1] * len(spec.shape)
    for dim, size in enumerate(spec.dims):
        if isinstance(size, sympy.Expr) and BATCH in size.free_symbols and size != BATCH:
            runs[dim] = _through_view(spec, dim, sources[0], batch) if is_view else _kept(size, sources)
    return replace(spec, batch_split_factors=tuple(runs)) if max(runs, default=1) > 1 else spec


def _through_view(spec: TensorSpec, dim: int, source: TensorSpec, batch: int) -> int:
    """Where the batch of ``source`` lies in ``dim`` after a reshape: it is followed as if it were split completely."""
    before = source.dim_of(BATCH)
    if before is None:
        return 1
    after = through_view(Shard(before, source.batch_split_factor(before)), source.shape, spec.shape, batch)
    return after.num_runs if after is not None and after.dim == dim else 1


def _kept(size: sympy.Expr, sources: list[TensorSpec]) -> int:
    same = (s.batch_split_factor(dim) for s in sources for dim, other in enumerate(s.dims) if other == size)
    return max(same, default=1)
