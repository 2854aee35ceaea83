"""What a step takes on some rank at least, whatever the plan."""

from __future__ import annotations

from torch import fx

from cost_models.optimizer import OptimizerModel, ParameterShard
from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of, output_ports, ports


def least_bytes(
    graph: fx.GraphModule,
    num_devices: int,
    optimizer: OptimizerModel,
    has_states: bool = True,
    has_gradients: bool = True,
    has_parameters: bool = True,
) -> float:
    """Bytes that the fullest rank holds at least: of parameters, optimizer states, and the more of gradients and
    inputs, split evenly.

    Gradients are there when the optimizer steps and inputs when forward begins, each on one rank or more;
    ``has_states``: but for states where these may be on the host, ``has_gradients``: but for gradients where these
    may be folded into updates, ``has_parameters``: but for all but inputs where parameters may be on the host.
    """
    inputs = sum(meta_of(node).spec.size_bytes for port, node in ports(graph) if port.kind == "input")
    if not has_parameters:
        return inputs / num_devices
    trained = {port.name for port, node in output_ports(graph) if port.kind == "grad" and node is not None}
    shards = [(port.name, _whole(meta_of(node).spec)) for port, node in ports(graph) if port.kind == "param"]
    held = sum(shard.size_bytes for _, shard in shards)
    updated = [shard for name, shard in shards if name in trained]
    gradients = sum(shard.size_bytes for shard in updated)
    passing = max(has_gradients * gradients, inputs)
    return (held + passing + has_states * optimizer.state_bytes(updated)) / num_devices


def _whole(spec: TensorSpec) -> ParameterShard:
    return ParameterShard(spec.shape, spec.size_bytes, spec.dtype.itemsize)
