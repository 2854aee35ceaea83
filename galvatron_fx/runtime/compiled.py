"""What a compiled module is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from galvatron_fx.ir.cluster.cluster import Axis
from galvatron_fx.ir.graph.pass_pipeline import PassRun
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.runtime.batch_rows import Batch
from galvatron_fx.runtime.members import Members
from galvatron_fx.runtime.original import LateChanges
from galvatron_fx.runtime.program import Program
from galvatron_fx.runtime.staged_program import StagedProgram
from passes.frontend.capture.capture import FlatInputs

AnyProgram = Program | StagedProgram


@dataclass(frozen=True)
class StageCopies:
    """The process ``group`` that holds the stages, and the ``names`` of parameters and buffers here that are copies of
    an earlier stage's.
    """

    group: dist.ProcessGroup
    names: frozenset[str]


@dataclass(frozen=True)
class Compiled:
    """A model compiled for one rank, as :class:`galvatron_fx.runtime.module.DistributedGraphModule` takes it.

    ``members``: the ranks that train it together; ``inputs``: the global batch that ``program`` is for;
    ``compile_inputs``: makes the program of a model without weights for other inputs; ``skeleton``: such a model, as
    the original is; ``tensors``: parameters and buffers of this rank by original name;
    ``persistent``: whether each buffer belongs to the state dict; ``seed``: of dropout;
    ``late``: who notices what is done to the original from now on; ``batch``: which rows each rank brings;
    ``rows_elsewhere``: which input has its batch in another dim than the first, "" where none has;
    ``compare_batches``: how often ranks compare theirs; ``copies``: None without stages; ``pass_runs``:
    of all passes so far; ``axes_of_dim``: of the cluster, for each dim of ``mesh``; ``recipe``: what
    :func:`galvatron_fx.replan` makes it anew of.
    """

    mesh: DeviceMesh
    members: Members
    plan: Plan
    inputs: FlatInputs
    program: AnyProgram
    compile_inputs: Callable[[nn.Module, FlatInputs], AnyProgram]
    skeleton: nn.Module
    tensors: Mapping[str, Tensor | None]
    persistent: Mapping[str, bool]
    seed: int
    late: LateChanges
    batch: Batch
    rows_elsewhere: str
    compare_batches: int
    copies: StageCopies | None
    pass_runs: Sequence[PassRun]
    axes_of_dim: Sequence[Sequence[Axis]]
    recipe: object
