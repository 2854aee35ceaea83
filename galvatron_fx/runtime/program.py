"""One compiled step: the lowered graphs bound to this rank, and how to call them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from galvatron_fx.ir.annotations import Port, Signature
from galvatron_fx.ir.layout import Layout
from galvatron_fx.ir.placement import Placement
from galvatron_fx.ir.torch_compat import box_arguments
from passes.partition import Halves

Boxed = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Program:
    """Forward and backward graphs of one input signature on this rank.

    ``halves``: the graphs, bound by code generation; ``layout``: how inputs and outputs lie on the lowering mesh;
    ``signature``: names of inputs and outputs and how they nest.
    """

    halves: Halves
    layout: Layout
    signature: Signature

    @cached_property
    def forward(self) -> Boxed:
        """The forward graph taking one list, which it empties, so that every tensor dies at its last use."""
        return box_arguments(self.halves.forward)

    @cached_property
    def backward(self) -> Boxed:
        """The backward graph, likewise."""
        return box_arguments(self.halves.backward)

    @cached_property
    def inference(self) -> Boxed:
        """The forward graph without what is saved for backward."""
        count = len(self.halves.result_ports)
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.graph_copy(self.halves.forward.graph, copies)
        output = self.halves.forward.graph.output_node()
        results: list[Any] = list(output.args[0])[:count]  # type: ignore[arg-type]
        kept = [copies[n] if isinstance(n, fx.Node) else n for n in results]
        graph.output(tuple(kept))
        module = fx.GraphModule(self.halves.forward, graph, class_name="Inference")
        module.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
        module.recompile()
        return box_arguments(module)

    def placements(self, port: Port) -> tuple[Placement, ...]:
        """How an input lies on the lowering mesh, one placement a column."""
        return self.layout.inputs[self.signature.inputs.index(port)]

    def result_placements(self, port: Port) -> tuple[Placement | None, ...]:
        """How an output lies on the lowering mesh."""
        return self.layout.outputs[self.signature.outputs.index(port)]

    def tangents(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the loss with respect to the differentiable outputs: one for the loss, zero for other
        scalars.
        """
        outputs = {p.name: i for i, p in enumerate(self.halves.result_ports) if p.kind == "output"}
        made = []
        for port in self.halves.tangent_ports:
            like = results[outputs[port.name]]
            is_loss = int(port.name) == self.signature.loss
            made.append(torch.ones_like(like) if is_loss else torch.zeros_like(like))
        return made
