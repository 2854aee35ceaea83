"""Bytes that a pipeline rank holds beside what its tasks make: parameters, optimizer states, the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cost_models.host_states import OptimizerStep
from cost_models.optimizer import OptimizerModel, ParameterShard
from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.metadata import InputSpec, meta_of, ports
from galvatron_fx.ir.plan.prediction import BATCH, PARAMETERS, STATES
from galvatron_fx.ir.plan.schedule import SPREAD, Schedule
from galvatron_fx.ir.plan.strategy import original_name, stood_for_name
from passes.lowering.lower_stages import LoweredStages
from passes.lowering.stages.split_microbatches import Microbatched
from passes.simulation.step import shard_of


@dataclass(frozen=True)
class PersistentMemory:
    """What every pipeline rank holds.

    ``optimizer``: what updates the parameters; ``tensors``: for each rank its parameters and buffers, by original
    name; ``trained``: parameters that get gradients; ``shared``: those of which several ranks hold copies;
    ``batch_bytes``: the whole batch, which the caller has on every rank; ``hoisted``: for each rank what it takes of
    the batch before the first micro-batch.
    """

    optimizer: OptimizerModel
    tensors: Sequence[Mapping[str, ParameterShard]]
    trained: frozenset[str]
    shared: frozenset[str]
    batch_bytes: int
    hoisted: Sequence[int]

    @classmethod
    def of(cls, lowered: LoweredStages, schedule: Schedule, optimizer: OptimizerModel) -> PersistentMemory:
        """Look at the ports of all stages."""
        degrees = lowered.layout.shape
        shards = {original_name(p.name): shard_of(p, n, degrees) for p, n in ports(lowered.joint) if _is_tensor(p)}
        tensors: list[dict[str, ParameterShard]] = []
        hoisted = []
        pieces = _hoisted_bytes(lowered.microbatched)
        for rank in range(schedule.num_ranks):
            rank_ports = [port for i in schedule.stages_of(rank) for port in lowered.stages[i].ports.values()]
            names = dict.fromkeys(original_name(port.name) for port in rank_ports if _is_tensor(port))
            tensors.append({name: shards[stood_for_name(name)] for name in names})
            hoisted.append(sum(pieces[i] for i in {int(port.name) for port in rank_ports if port.kind == "hoisted"}))
        everywhere = {name for held in tensors for name in held}
        tensors[0] |= {name: shard for name, shard in shards.items() if name not in everywhere}
        trained = frozenset(original_name(g.port.name) for stage in lowered.stages for g in stage.gradients)
        spread = {
            original_name(port.name)
            for stage in lowered.stages
            if schedule.rank_of_stage[stage.index] == SPREAD
            for port in stage.ports.values()
            if _is_tensor(port)
        }
        shared = frozenset(name for name in trained - spread if sum(name in held for held in tensors) > 1)
        batch = sum(meta_of(n).spec.size_bytes for p, n in ports(lowered.microbatched.graph) if p.kind == "input")
        return cls(optimizer, tensors, trained, shared, batch, hoisted)

    def always(self, rank: int) -> dict[str, int]:
        """Bytes held through the whole step, by kind: parameters, buffers, optimizer states and the batch."""
        held = sum(shard.size_bytes for shard in self.tensors[rank].values() if not shard.on_host)
        return {PARAMETERS: held, STATES: self.update(rank).device_bytes, BATCH: self.batch_bytes}

    def on_host(self, rank: int) -> int:
        """Bytes on the host through the whole step: parameters and optimizer states."""
        held = sum(shard.size_bytes for shard in self.tensors[rank].values() if shard.on_host)
        return held + self.update(rank).host_bytes

    def update(self, rank: int) -> OptimizerStep:
        """What the optimizer does on a rank."""
        return OptimizerStep(self.optimizer, self._trained(rank))

    def hoisted_bytes(self, rank: int) -> int:
        """Held from the start of the step until all gradients are there."""
        return self.hoisted[rank]

    def _trained(self, rank: int) -> list[ParameterShard]:
        return [shard for name, shard in self.tensors[rank].items() if name in self.trained]


def _is_tensor(port: InputSpec) -> bool:
    return port.kind in ("param", "buffer", "cache")


def _hoisted_bytes(split: Microbatched) -> list[int]:
    """Of all micro-batches' values of every "hoisted" port: slices are copies, what is equal for all is there once."""
    outputs = split.prologue.graph.output_node().args[0]
    copies = [split.num_microbatches if node.target is c.shard else 1 for node in outputs]  # type: ignore[union-attr]
    return [n * meta_of(node).spec.size_bytes for n, node in zip(copies, outputs, strict=True)]  # type: ignore[arg-type]
