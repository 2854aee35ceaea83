"""How the values of a graph lie in memory: the graph is run on tensors without data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.bound_ops import finished
from galvatron_fx.ir.graph.chunked_collectives import CHUNKED
from galvatron_fx.ir.graph.folded_gradients import fold_gradient, left_of
from galvatron_fx.ir.graph.further_rounds import FurtherRounds
from galvatron_fx.ir.graph.host_copies import arrived
from galvatron_fx.ir.graph.metadata import meta_of
from passes.analysis.strided_values import StridedTensor, evaluate

_DENSE = {*c.COLLECTIVES, *c.RINGS, *c.RING_STEPS, *CHUNKED, c.shard, c.shard_mirrored}
_AS_THEY_LIE = {finished, arrived, c.local_index, c.only_first}


def infer_strides(graph: fx.GraphModule, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """What ``node`` makes of ``values``; what enters a graph is taken to be dense.

    ``graph``: holds the constants of ``node``, which is one of it or of a copy that is bound to a rank.
    """
    if node.op == "placeholder" or node.target in _DENSE:
        outputs = [None if spec is None else StridedTensor.empty(spec) for spec in meta_of(node).specs]
        return outputs if meta_of(node).multi_output else outputs[0]
    if node.op == "get_attr":
        return StridedTensor.like(getattr(graph, str(node.target)))
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: values[source])
    if isinstance(node.target, FurtherRounds):
        return node.target.sums_of(args)
    target = left_of if node.target is fold_gradient else node.target
    return args[0] if target in _AS_THEY_LIE else evaluate(target, args, kwargs)
