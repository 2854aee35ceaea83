"""Specs of what a lowered graph returns: losses, outputs, buffers and gradients, or what its other parts take."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from galvatron_fx.ir.graph.layout import layout, placement_of
from galvatron_fx.ir.graph.metadata import meta_of, output_ports, ports, signature
from galvatron_fx.ir.graph.placement import Inside, Partial, Replicate


def result_problems(graph: fx.GraphModule, whole: bool) -> Iterator[tuple[str, str]]:
    """What is wrong with the results of ``graph``; ``whole``: it has a signature."""
    graph_layout = layout(graph)
    if not graph_layout.merged_axes:
        return
    values = graph.graph.output_node().args[0]
    if len(values) != len(graph_layout.outputs):  # type: ignore[arg-type]
        yield "the graph", f"returns {len(values)} values, where its layout has {len(graph_layout.outputs)}"  # type: ignore[arg-type]
        return
    for position, (value, wanted) in enumerate(zip(values, graph_layout.outputs, strict=True)):  # type: ignore[arg-type]
        placements = placement_of(value)
        absent = all(placed is None for placed in wanted)
        if placements != wanted and not (absent and value is None):
            words = " ".join(map(str, placements)) or "nothing"
            yield f"output {position} ({value})", f"lies as {words}, where {' '.join(map(str, wanted))} is asked for"
    if whole:
        yield from _signature_problems(graph)


def _signature_problems(graph: fx.GraphModule) -> Iterator[tuple[str, str]]:
    graph_layout = layout(graph)
    inputs = dict(zip(((p.kind, p.name) for p, _ in ports(graph)), graph_layout.inputs, strict=True))
    specs = {(port.kind, port.name): meta_of(node).spec for port, node in ports(graph)}
    for (port, node), placed in zip(output_ports(graph), graph_layout.outputs, strict=True):
        if node is None:
            continue
        subject = f"{port.kind} '{port.name}' ({node.name})"
        parameter = ("param", port.name)
        if port.kind == "grad" and parameter in inputs:
            if placed != inputs[parameter]:
                lies = " ".join(map(str, placed))
                yield subject, f"lies as {lies}, its parameter as {' '.join(map(str, inputs[parameter]))}"
            if meta_of(node).spec.shape != specs[parameter].shape or meta_of(node).spec.dtype != specs[parameter].dtype:
                yield subject, f"is {meta_of(node).spec}, its parameter {specs[parameter]}"
        elif port.kind == "cache" and ("cache", port.name) in inputs:
            if placed != inputs["cache", port.name]:
                lies = " ".join(map(str, placed))
                yield subject, f"lies as {lies}, the cache before as {' '.join(map(str, inputs['cache', port.name]))}"
        elif port.kind == "buffer" or (port.kind == "output" and _is_loss(graph, port.name)):
            if not all(isinstance(placement, Replicate) for placement in placed):
                yield subject, f"lies as {' '.join(map(str, placed))}, where every rank needs all of it"
        elif any(isinstance(placement, (Partial, Inside)) for placement in placed):
            yield subject, f"lies as {' '.join(map(str, placed))}: ranks would be given terms of it"


def _is_loss(graph: fx.GraphModule, name: str) -> bool:
    return signature(graph).loss is not None and name == str(signature(graph).loss)
