"""Replace random operators by functions of a seed, a stream number and global positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen

from galvatron_fx.ir.errors import CaptureError
from galvatron_fx.ir.graph.metadata import (
    InputSpec,
    NodeMeta,
    TensorSpec,
    meta_of,
    ports,
    set_meta,
    set_signature,
    signature,
)
from galvatron_fx.ir.graph.rewrite import eliminate_dead_code, replace_outputs
from passes.frontend.random_draws import Draw, Streams, given
from passes.frontend.random_makers import MAKERS

aten = torch.ops.aten


@dataclass(frozen=True)
class FunctionalRandom:
    """Make every random operator counter-based, so that a plan draws exactly what one device draws.

    Replicas then agree, shards hold their slice of the global mask, and recomputation replays it. A graph with random
    operators gets one more placeholder, the seed (int64 scalar), behind the last that is not a tangent.

    Rewrite: ``y, mask = native_dropout(x, p, True)`` ->
    ``u = random_uniform(seed, stream, sizes, [arange, ...]); mask = u >= p; y = x * mask * (1 / (1 - p))``.
    Raises CaptureError for random operators that have no such form, naming the node, its module and the remedy.
    """

    @staticmethod
    def knows(target: Any) -> bool:
        """Tell whether a random operator has such a form."""
        return target in MAKERS

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it."""
        random_nodes = [node for node in graph.graph.nodes if _is_random(node)]
        if not random_nodes:
            return graph
        seed = _add_seed(graph)
        streams = Streams(seed)
        for node in random_nodes:
            maker = MAKERS.get(node.target)
            if maker is None:
                raise _refusal(node)
            with graph.graph.inserting_before(node):
                outputs = maker(Draw(graph.graph, node, streams), node)
            replace_outputs(graph, node, outputs)
        eliminate_dead_code(graph)
        graph.graph.set_codegen(CodeGen())  # the traced one unpacks (primals, tangents) and knows of no seed
        graph.recompile()
        return graph


def draws_numbers(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call draws random numbers; attention kernels do so only if they drop out."""
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    named = [argument.name for argument in target._schema.arguments]
    return "dropout_p" not in named or float(given(target, args, kwargs, "dropout_p")) > 0.0


def _is_random(node: fx.Node) -> bool:
    return node.op == "call_function" and draws_numbers(node.target, node.args, node.kwargs)


def _refusal(node: fx.Node) -> CaptureError:
    name = str(node.target).removeprefix("aten.")
    where = f"module '{meta_of(node).module}'" if meta_of(node).module else "the model"
    return CaptureError(
        f"'{node.name}' in {where} draws random numbers by {name}, which cannot be split over devices: draw it outside "
        f"of the model and pass it as an input"
    )


def _add_seed(graph: fx.GraphModule) -> fx.Node:
    """Append the seed to the placeholders, before the tangents."""
    given = ports(graph)
    kept = [port for port, _ in given if port.kind != "tangent"]
    last = [node for port, node in given if port.kind != "tangent"][-1]
    with graph.graph.inserting_after(last):
        seed = graph.graph.placeholder("seed")
    set_meta(seed, NodeMeta((TensorSpec((), torch.int64),)))
    tangents = signature(graph).inputs[len(kept) :]
    set_signature(graph, signature(graph).having(inputs=(*kept, InputSpec("seed", "seed"), *tangents)))
    return seed
