"""Lowered programs of one rank, run in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from galvatron_fx.ir.graph.metadata import InputSpec, meta_of, signature
from galvatron_fx.ir.kernels.select import Kernels
from galvatron_fx.runtime.program import Program
from passes.lowering.batch_rows import rows_read
from passes.lowering.codegen import Codegen
from passes.lowering.lower_step import Lowered


@contextmanager
def mesh_of_one() -> Iterator[DeviceMesh]:
    """A mesh over this process alone."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def inputs_of(lowered: Lowered) -> dict[InputSpec, Tensor]:
    """Tensors of ones for all inputs."""
    nodes = lowered.halves.forward.graph.find_nodes(op="placeholder")
    specs = {port: meta_of(node).spec for port, node in zip(lowered.halves.input_ports, nodes, strict=True)}
    return {port: torch.ones(spec.shape, dtype=spec.dtype) for port, spec in specs.items()}


def program_of(lowered: Lowered, kernels: Kernels | None = None) -> Program:
    """What runs, of torch's kernels if nothing is said; code is generated in place."""
    for half in lowered.halves.graphs().values():
        Codegen([], kernels or Kernels()).run(half)
    return Program(lowered.halves, lowered.layout, signature(lowered.joint), rows_read(lowered.joint, ()))
