"""What local programs are written with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from galvatron_fx.ir.graph.collectives import all_reduce
from galvatron_fx.ir.graph.metadata import NodeMeta, TensorSpec, meta_of, set_meta
from galvatron_fx.ir.graph.placement import NO_EXCHANGE, Exchange
from galvatron_fx.ir.graph.rewrite import write_call
from passes.sharding.rules import OpRule


@dataclass(frozen=True)
class Emitter:
    """Writes nodes with facts like those of the node being expanded by ``rule``; ``exchange``: the room for rows of
    experts; ``written``: all of the nodes, in order.
    """

    graph: fx.Graph
    like: NodeMeta
    axis: int
    degree: int
    rule: OpRule
    exchange: Exchange = NO_EXCHANGE
    written: list[fx.Node] = field(default_factory=list)

    def emit(self, target: Any, args: tuple[Any, ...], spec: TensorSpec | None, **kwargs: Any) -> fx.Node:
        """Append a call whose one output is ``spec``."""
        node = write_call(self.graph, target, args, kwargs)
        set_meta(node, self.like.having(specs=(spec,), multi_output=False))
        self.written.append(node)
        return node

    def emit_multi(
        self, target: Any, args: tuple[Any, ...], specs: Sequence[TensorSpec | None], **kwargs: Any
    ) -> fx.Node:
        """Append a call with several outputs."""
        node = write_call(self.graph, target, args, kwargs)
        set_meta(node, self.like.having(specs=tuple(specs), multi_output=True))
        self.written.append(node)
        return node

    def reduced(self, node: fx.Node, op: str = "sum") -> fx.Node:
        """Append the all-reduce of ``node`` over the axis."""
        return self.emit(all_reduce, (node, op, self.axis), meta_of(node).spec)


Outputs = list[fx.Node]
Builder = Callable[[Emitter, fx.Node, list[fx.Node], tuple[TensorSpec | None, ...]], Outputs]
