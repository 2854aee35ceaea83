"""What micro-batches take from the whole batch before a step, and how their outputs become the whole batch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from galvatron_fx.ir.graph.collectives import join_runs
from galvatron_fx.ir.graph.metadata import InputSpec, OutputSpec
from galvatron_fx.ir.graph.placement import Partial, Placement, Shard
from galvatron_fx.runtime.lockstep import Simulator
from passes.lowering.stages.split_microbatches import Microbatched


def hoisted_values(
    split: Microbatched, value_of: Callable[[InputSpec], Any], prologue: fx.GraphModule | None = None
) -> list[list[Tensor]]:
    """Run the prologue on the whole batch; returns ``values[i][microbatch]`` of the "hoisted" port ``i``.

    ``prologue``: one of :meth:`Microbatched.prologue_for`, where not all ports are wanted.
    """
    count = split.num_microbatches
    given = [[value_of(port)] * count for port in split.prologue_ports]
    return Simulator((count,)).run(prologue or split.prologue, given)


def merge_outputs(split: Microbatched, made: Sequence[Mapping[OutputSpec, Any]]) -> dict[OutputSpec, Any]:
    """Outputs of the whole batch from those of each micro-batch (by port).

    Terms of a sum are added, parts of a batch concatenated, updated buffers and caches taken from the last; outputs
    that need all samples are computed here, from the "piece" ports. Gradients of inputs are put together as outputs.
    """
    merged: dict[OutputSpec, Any] = {}
    for port in made[0]:
        values = [results[port] for results in made]
        if port.name in split.outputs and port.kind in ("output", "grad"):
            merged[port] = _merged(split.outputs[port.name], values)
        elif port.kind in ("buffer", "cache"):
            merged[port] = values[-1]
    pieces = sorted((port for port in made[0] if port.kind == "piece"), key=lambda port: int(port.name))
    if split.epilogue is not None and pieces:
        out = Simulator((len(made),)).run(split.epilogue, [[results[port] for results in made] for port in pieces])
        for port, values in zip(split.epilogue_ports, out, strict=True):
            merged[port] = values[-1] if port.kind == "buffer" else _merged(split.outputs[port.name], values)
    return merged


def _merged(placement: Placement, values: list[Tensor]) -> Tensor:
    if isinstance(placement, Shard):
        return join_runs(values, placement.dim, placement.split_factor)
    if not isinstance(placement, Partial):
        return values[-1]
    stacked = torch.stack(values)
    if placement.op == "sum":
        return stacked.any(dim=0) if stacked.dtype == torch.bool else stacked.sum(dim=0, dtype=stacked.dtype)
    if placement.op == "avg":
        return stacked.mean(dim=0)
    return stacked.amax(dim=0) if placement.op == "max" else stacked.amin(dim=0)
