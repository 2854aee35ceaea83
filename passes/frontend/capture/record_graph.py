"""What a traced graph says of itself: facts of every node, and a signature of its inputs and outputs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import fx, nn

from galvatron_fx.ir.errors import CaptureError
from galvatron_fx.ir.graph.metadata import (
    InputSpec,
    NodeMeta,
    OutputSpec,
    Signature,
    TensorSpec,
    meta_of,
    output_ports,
    ports,
    set_meta,
    set_signature,
    signature,
)
from galvatron_fx.ir.graph.rewrite import write_call
from galvatron_fx.ir.torch_compat.dtensors import DTensor
from galvatron_fx.ir.torch_compat.tensors import pytree
from galvatron_fx.ir.torch_compat.tracing import module_of
from passes.frontend.capture.fake_model import ROOT, FlatModel
from passes.frontend.capture.trace_again import InputsWritten, WeightsWritten

__all__ = ["merge_tied", "record_graph"]

_CHANGED = ("buffer", "cache")


def record_graph(graph: fx.GraphModule, flat: FlatModel) -> None:
    """Attach facts to every node and a signature to the graph."""
    inputs = flat.inputs
    _refuse_written_weights(graph, flat)
    input_ports: list[InputSpec] = []
    parameters = [] if flat.forward_only else flat.named_parameters(remove_duplicate=False)
    trained = {name for name, parameter in parameters if parameter.requires_grad}
    needing = () if flat.forward_only else (i for i, tensor in enumerate(inputs.tensors) if tensor.requires_grad)
    trained_inputs, caches = set(needing), _caches(graph, flat)
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        set_meta(node, _node_facts(node))
        if node.op == "placeholder":
            input_ports.append(_input_port(node, trained, trained_inputs, caches))
    output = graph.graph.output_node()
    pairs = _outputs(output, flat)
    set_signature(
        graph,
        Signature(
            inputs=tuple(input_ports),
            outputs=tuple(port for port, _ in pairs),
            input_names=inputs.tensor_names,
            loss=flat.outputs.loss,
            input_spec=inputs.without_data(list(caches)),
            output_spec=(flat.outputs.tree, flat.outputs.leaves),
            input_specs=tuple(TensorSpec(tuple(t.shape), t.dtype) for t in inputs.tensors),
            scalars=flat.outputs.scalars,
            detached=flat.outputs.detached,
            output_names=flat.outputs.names,
            forward_only=flat.forward_only,
            arguments=flat.arguments,
            decided_by=dict(flat.decided_by),
            decisions=tuple(flat.input_reads.decisions),
            may_read=flat.input_reads.may_read,
            written=flat.written,
        ),
    )
    output.args = (tuple(node for _, node in pairs),)


def _refuse_written_weights(graph: fx.GraphModule, flat: FlatModel) -> None:
    """Raise WeightsWritten for parameters that are trained and that forward writes into, CaptureError where it writes
    in another way than into a copy of one.
    """
    descriptors = [node.meta["desc"] for node in graph.graph.find_nodes(op="placeholder")]
    outputs = (getattr(descriptor, "output", None) for descriptor in descriptors)
    targets = (getattr(getattr(output, "mutated_input", None), "target", None) for output in outputs)
    names = [target.removeprefix(f"{ROOT}.") for target in targets if target is not None]
    again = [name for name in names if name in flat.written_weights]
    if again:
        raise CaptureError(
            f"forward writes into '{again[0]}', which needs gradients: write into it under torch.no_grad() after the "
            f"step"
        )
    if names:
        raise WeightsWritten(names)


def _caches(graph: fx.GraphModule, flat: FlatModel) -> dict[int, str]:
    """Inputs, by position, that forward writes into or puts others in the place of, and those that are split already.

    Raises InputsWritten where a step of training would do so.
    """
    names = flat.inputs.input_names
    sources = [getattr(desc, "mutated_input", None) for desc in graph.graph.output_node().meta["desc"]]
    written = {source.idx for source in sources if source is not None and not hasattr(source, "target")}
    if written and not flat.forward_only:
        raise InputsWritten([names[position] for position in sorted(written)])
    if not flat.forward_only:
        return {}
    written |= {names.index(name) for name in flat.left if name in names}
    written |= {i for i, tensor in enumerate(flat.inputs.tensors) if isinstance(tensor, DTensor)}
    return {position: names[position] for position in sorted(written)}


def _outputs(output: fx.Node, flat: FlatModel) -> list[tuple[OutputSpec, fx.Node | None]]:
    """What the graph returns with its ports, what it changes first; what was assigned counts as assigned."""
    absent = count()
    num_outputs = len(flat.outputs.names)
    rebound = [OutputSpec("buffer", name) for name in flat.rebound] + [OutputSpec("cache", name) for name in flat.left]
    assigned: list[tuple[OutputSpec, fx.Node | None]] = []
    others: list[tuple[OutputSpec, fx.Node | None]] = []
    for desc, node in zip(output.meta["desc"], pytree.arg_tree_leaves(*output.args), strict=True):
        port = _output_port(desc, absent, flat.inputs.input_names)
        if port.kind == "output" and int(port.name) >= num_outputs:
            assigned.append((rebound[int(port.name) - num_outputs], node))
        elif port not in rebound:
            others.append((port, node))
    changed = [*(pair for pair in others if pair[0].kind in _CHANGED), *assigned]
    return changed + [pair for pair in others if pair[0].kind not in _CHANGED]


def merge_tied(graph: fx.GraphModule, model: nn.Module) -> None:
    """Make a parameter that is reached under several names one input, and its gradients one sum."""
    identity = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    graph_signature = signature(graph)
    output = graph.graph.output_node()
    nodes = {port.name: node for port, node in ports(graph) if port.kind == "param"}
    gradients = {port.name: node for port, node in output_ports(graph) if port.kind == "grad" and node is not None}
    first: dict[int, str] = {}
    dropped: set[str] = set()
    for name, node in nodes.items():
        keeper = first.setdefault(identity[name], name)
        if keeper == name:
            continue
        dropped.add(name)
        node.replace_all_uses_with(nodes[keeper])
        graph.graph.erase_node(node)
        total = _added(graph, output, gradients.get(keeper), gradients.pop(name, None), nodes[keeper])
        if total is not None:
            gradients[keeper] = total
    values = [
        gradients.get(port.name) if port.kind == "grad" and port.name in identity else value
        for port, value in zip(graph_signature.outputs, output.args[0], strict=True)  # type: ignore[arg-type]
    ]
    kept = [not (port.kind == "grad" and port.name in dropped) for port in graph_signature.outputs]
    output.args = (tuple(value for value, keep in zip(values, kept, strict=True) if keep),)
    inputs = tuple(port for port in graph_signature.inputs if not (port.kind == "param" and port.name in dropped))
    outputs = tuple(port for port, keep in zip(graph_signature.outputs, kept, strict=True) if keep)
    set_signature(graph, graph_signature.having(inputs=inputs, outputs=outputs))


def _added(
    graph: fx.GraphModule, output: fx.Node, first: fx.Node | None, second: fx.Node | None, parameter: fx.Node
) -> fx.Node | None:
    if first is None or second is None:
        return first if second is None else second
    with graph.graph.inserting_before(output):
        total = write_call(graph.graph, torch.ops.aten.add.Tensor, (first, second))
    set_meta(total, meta_of(parameter).having(phase="backward", module=""))
    return total


def _node_facts(node: fx.Node) -> NodeMeta:
    value = node.meta.get("val")
    multi = isinstance(value, (tuple, list))
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    specs = tuple(TensorSpec(tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else None for v in values)
    phase = "backward" if node.meta.get("partitioner_tag") == "is_backward" else "forward"
    return NodeMeta(specs=specs, phase=phase, module=module_of(node), multi_output=multi)


def _input_port(
    node: fx.Node, trained: Collection[str], trained_inputs: Collection[int], caches: Mapping[int, str]
) -> InputSpec:
    descriptor = node.meta["desc"]
    kind = type(descriptor).__name__
    if kind in ("ParamAOTInput", "BufferAOTInput"):
        name = descriptor.target.removeprefix(f"{ROOT}.")
        grad = descriptor.target in trained
        return InputSpec("param" if kind == "ParamAOTInput" else "buffer", name, grad)
    if kind == "PlainAOTInput" and descriptor.idx in caches:
        return InputSpec("cache", caches[descriptor.idx])
    if kind == "PlainAOTInput":
        return InputSpec("input", str(descriptor.idx), descriptor.idx in trained_inputs)
    if kind == "TangentAOTInput":
        return InputSpec("tangent", str(descriptor.output.idx))
    raise CaptureError(f"input '{node.name}' is of a kind that cannot be lowered ({descriptor})")


def _output_port(descriptor: Any, absent: Iterator[int], input_names: Sequence[str]) -> OutputSpec:
    kind = type(descriptor).__name__ if descriptor is not None else ""
    if kind == "PlainAOTOutput":
        return OutputSpec("output", str(descriptor.idx))
    if kind == "GradAOTOutput":
        source = descriptor.grad_of
        name = getattr(source, "target", None)
        return OutputSpec(
            "grad", name.removeprefix(f"{ROOT}.") if name else InputSpec("input", str(source.idx)).gradient
        )
    if kind == "InputMutationAOTOutput":
        source = descriptor.mutated_input
        if not hasattr(source, "target"):
            return OutputSpec("cache", input_names[source.idx])
        return OutputSpec("buffer", source.target.removeprefix(f"{ROOT}."))
    if descriptor is None:
        return OutputSpec("grad", f"none {next(absent)}")
    raise CaptureError(f"an output is of a kind that cannot be lowered ({descriptor})")
