"""One compiled step: the lowered graphs bound to this rank, and how to call them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.bound_ops import finished
from galvatron_fx.ir.graph.host_copies import settle_all
from galvatron_fx.ir.graph.layout import Layout
from galvatron_fx.ir.graph.metadata import InputSpec, OutputSpec, Signature, TensorSpec
from galvatron_fx.ir.graph.placement import Placement
from galvatron_fx.ir.graph.rewrite import copy_graph
from galvatron_fx.ir.torch_compat.dtensors import whole_tensor
from galvatron_fx.ir.torch_compat.graphs import graph_module
from galvatron_fx.ir.torch_compat.tensors import keeps_graph
from galvatron_fx.runtime.backends import Backend, Boxed, Eager, compile_graph
from galvatron_fx.runtime.backward_refusals import Versions, refuse_higher_orders, refuse_second_backward
from galvatron_fx.runtime.dtensor_views import lie_like
from galvatron_fx.runtime.expert_loads import KeptCounts
from galvatron_fx.runtime.loss import loss_port
from galvatron_fx.runtime.untraced import untraced
from passes.lowering.batch_rows import RowsRead
from passes.lowering.split_forward_backward import ForwardBackward

ValueOf = Callable[[InputSpec], Any]


@dataclass(frozen=True)
class Call:
    """What a program asks of the module that calls it.

    ``value_of``: what an input is on this rank; ``version_of``: how often it was written to; ``update``: takes the
    results by port before they leave (for buffers); ``alone``: held while backward runs, as it is while forward does.
    """

    value_of: ValueOf
    version_of: Callable[[InputSpec], int]
    update: Callable[[dict[OutputSpec, Any]], None]
    alone: Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Program:
    """Forward and backward graphs of one input signature on this rank.

    ``halves``: the graphs, bound by code generation; ``layout``: how inputs and outputs lie on the lowering mesh;
    ``signature``: names of inputs and outputs and how they nest; ``read``: who reads which rows of the inputs;
    ``backend``: makes the graphs callable; ``sources``: of each gradient the tangents that it depends on, where there
    are several; ``counts``: rows of experts, as its graphs keep them.
    """

    halves: ForwardBackward
    layout: Layout
    signature: Signature
    read: RowsRead
    backend: Backend = field(default_factory=Eager)
    sources: Mapping[str, frozenset[str]] = field(default_factory=dict)
    counts: KeptCounts = field(default_factory=KeptCounts)

    @cached_property
    def forward(self) -> Boxed:
        """The forward graph taking one list, which it empties, so that every tensor dies at its last use."""
        return compile_graph(self.halves.forward, self.backend)

    @cached_property
    def backward(self) -> Boxed:
        """The backward graph, likewise."""
        return compile_graph(self.halves.backward, self.backend)

    @cached_property
    def inference(self) -> Boxed:
        """The forward graph without what is saved for backward."""
        graph = copy_graph(self.halves.forward.graph)
        output = graph.output_node()
        results: tuple[Any, ...] = tuple(output.args[0])  # type: ignore[arg-type]
        output.args = (results[: len(self.halves.result_ports)],)
        module = graph_module(self.halves.forward, graph, class_name="Inference")
        module.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
        module.recompile()
        return compile_graph(module, self.backend)

    @cached_property
    def folded(self) -> dict[str, None]:
        """Parameters that are updated while backward computes, in that order."""
        return dict.fromkeys(self.halves.folded)

    @property
    def graphs(self) -> dict[str, fx.GraphModule]:
        """The graphs by name."""
        return {"forward": self.halves.forward, "backward": self.halves.backward}

    def require_loss(self) -> None:
        """Raise InputError where ``train`` has nothing to differentiate."""
        loss_port(self.signature, is_scheduled=False)

    @property
    def undifferentiated(self) -> frozenset[int]:
        """Positions of outputs that need gradients, and get none in ``differentiable``."""
        return frozenset(self.signature.detached)

    @property
    def differentiated_ports(self) -> list[InputSpec]:
        """Parameters that are trained, and inputs that need gradients, in the order of the forward graph's inputs."""
        return [port for port in self.halves.input_ports if port.kind in ("param", "input") and port.requires_grad]

    def train(self, value_of: ValueOf) -> tuple[dict[OutputSpec, Any], list[tuple[OutputSpec, Any]]]:
        """Run forward and backward; returns outputs by port and the gradients of parameters and inputs."""
        results, saved = self.run_forward([value_of(port) for port in self.halves.input_ports])
        arguments = [*saved, *self.tangents(results), *(results[i] for i in self._open)]
        del saved
        gradients = self.gradients_of(self.run_backward(arguments), {str(self.signature.loss)})
        return dict(zip(self.halves.result_ports, results, strict=True)), gradients

    def evaluate(self, value_of: ValueOf) -> dict[OutputSpec, Any]:
        """Run forward only; returns outputs by port."""
        results = list(self.inference([value_of(port) for port in self.halves.input_ports]))
        self.finish_results(results)
        return dict(zip(self.halves.result_ports, results, strict=True))

    def run_forward(self, inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        """Run forward on ``inputs``, which it empties; returns its results, of which some may be on their way, and what
        is saved for backward.
        """
        out = list(self.forward(inputs))
        count = len(self.halves.result_ports)
        return out[:count], out[count:]

    def run_backward(self, arguments: list[Any]) -> list[tuple[OutputSpec, Any]]:
        """Run backward on what is saved, tangents, and results that are on their way; returns gradients by port."""
        ports = self.halves.gradient_ports
        gradients = self.backward(arguments)[: len(ports)]
        if self._gradients_on_host:
            settle_all()  # from here on the process reads them
        return [
            (port, value.cpu() if value is not None and port.name in self._gradients_on_host else value)
            for port, value in zip(ports, gradients, strict=True)
        ]

    def gradients_of(
        self, gradients: Iterable[tuple[OutputSpec, Any]], given: Collection[str]
    ) -> list[tuple[OutputSpec, Any]]:
        """The gradients that there are where only the tangents ``given`` are: of the others None, not zeros."""
        return [
            (port, self.signature.without_padding(port, value) if port.is_input_gradient else value)
            for port, value in gradients
            if value is not None and (port.name not in self.sources or not self.sources[port.name].isdisjoint(given))
        ]

    def finish_results(self, results: list[Any]) -> None:
        """Wait for those of forward's results that are on their way, if backward is not to run next."""
        for position in self._open:
            results[position] = finished(results[position])

    def nothing_open(self) -> list[Tensor]:
        """What backward takes for results that were waited for before."""
        return [torch.empty(0) for _ in self._open]

    @cached_property
    def _gradients_on_host(self) -> frozenset[str]:
        """Parameters whose gradients are on the host, as these are; of those that are folded nothing is left."""
        return frozenset(port.name for port in self.halves.input_ports if port.on_host) - self.folded.keys()

    @cached_property
    def _open(self) -> list[int]:
        return list(self.halves.open_results)

    def told(self, results: dict[OutputSpec, Any]) -> dict[OutputSpec, Any]:
        """The results, which all ranks have."""
        return results

    def measured(self) -> NoReturn:
        """Refuse what only plans with stages or micro-batches can do."""
        raise InputError(
            "the plan has no stages and no micro-batches, so nothing is scheduled: give num_stages or num_microbatches"
        )

    def differentiable(self, call: Call, *tensors: Tensor) -> dict[OutputSpec, Any]:
        """Run forward so that its results can be differentiated with ``backward()``, outputs by port.

        ``tensors``: as the module holds them, or its caller, in the order of ``differentiated_ports``.
        """
        results = Step.apply(self, call, *tensors)
        return dict(zip(self.halves.result_ports, results, strict=True))

    def placements(self, port: InputSpec) -> tuple[Placement, ...]:
        """How an input lies on the lowering mesh, one placement a column."""
        return self._input_placements[port]

    @property
    def absent_caches(self) -> dict[str, TensorSpec]:
        """Caches that this rank has nothing of: none."""
        return {}

    @property
    def stage_caches(self) -> frozenset[str]:
        """Caches that other ranks have nothing of: none."""
        return frozenset()

    def result_placements(self, port: OutputSpec) -> tuple[Placement | None, ...]:
        """How an output lies on the lowering mesh."""
        return self._result_placements[port]

    @cached_property
    def _input_placements(self) -> dict[InputSpec, tuple[Placement, ...]]:
        return dict(zip(self.signature.inputs, self.layout.inputs, strict=True))

    @cached_property
    def _result_placements(self) -> dict[OutputSpec, tuple[Placement | None, ...]]:
        return dict(zip(self.signature.outputs, self.layout.outputs, strict=True))

    def tangents(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the loss with respect to the differentiable outputs: one for the loss, zero for other
        scalars.
        """
        outputs = {p.name: i for i, p in enumerate(self.halves.result_ports) if p.kind == "output"}
        gradients = []
        for port in self.halves.tangent_ports:
            like = results[outputs[port.name]]
            is_loss = int(port.name) == self.signature.loss
            gradients.append(torch.ones_like(like) if is_loss else torch.zeros_like(like))
        return gradients


class Step(torch.autograd.Function):
    """Forward and backward graph as one autograd node, for callers of ``loss.backward()``."""

    @staticmethod
    def forward(ctx: Any, program: Program, call: Call, *tensors: Tensor) -> tuple[Any, ...]:
        inputs = program.halves.input_ports
        written = {port.name for port in program.halves.result_ports if port.kind == "buffer"}
        changed = [port.kind in ("param", "buffer") and port.name in written for port in inputs]
        read = sorted({place for place in program.halves.saved_inputs if place is not None and not changed[place]})
        ctx.versions = Versions([inputs[place] for place in read], call.version_of)
        ctx.call = call
        # Backward finds what forward changes as it was, though ``update`` writes into the module's own.
        given = [
            call.value_of(port).clone() if new else call.value_of(port)
            for port, new in zip(inputs, changed, strict=True)
        ]
        results, ctx.saved = program.run_forward(given)
        program.finish_results(results)
        ports = program.halves.result_ports
        call.update(dict(zip(ports, results, strict=True)))
        ctx.program, ctx.tensors = program, tensors
        wanted = {port.name for port in program.halves.tangent_ports}
        by_name = {p.name: (i, r) for i, (p, r) in enumerate(zip(ports, results, strict=True)) if p.kind == "output"}
        ctx.tangents = {name: (i, r.shape, r.dtype, r.device) for name, (i, r) in by_name.items() if name in wanted}
        taken = {place for place, *_ in ctx.tangents.values()}
        # People scale losses in place, which must change neither what backward reads nor a view of it.
        results = [r.clone() if i in taken and not r.ndim else r for i, r in enumerate(results)]
        ctx.mark_non_differentiable(*(result for i, result in enumerate(results) if i not in taken))
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @untraced
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        refuse_second_backward(ctx.saved is None)
        refuse_higher_orders()
        program: Program = ctx.program
        call: Call = ctx.call
        ctx.versions.require_kept(program.signature.input_names)
        given: dict[str, Tensor] = {}
        arguments = list(ctx.saved)
        if not keeps_graph():
            ctx.saved = ctx.call = ctx.versions = None
        for port in program.halves.tangent_ports:
            place, shape, dtype, device = ctx.tangents[port.name]
            tangent = tangents[place]
            if tangent is None:
                arguments.append(torch.zeros(shape, dtype=dtype, device=device))
                continue
            # A loss to which a script adds a penalty on parameters has the gradient of a DTensor.
            given[port.name] = whole_tensor(tangent)
            arguments.append(given[port.name].contiguous())
        arguments += program.nothing_open()
        with call.alone():
            computed = program.run_backward(arguments)
        by_name = {port.name: gradient for port, gradient in program.gradients_of(computed, given)}
        gradients = []
        for port, tensor in zip(program.differentiated_ports, ctx.tensors, strict=True):
            gradient = by_name.get(port.gradient)
            gradients.append(None if gradient is None else lie_like(tensor, gradient))
        return (None, None, *gradients)
