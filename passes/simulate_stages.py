"""Predict lowered stages: the time of a step from tasks and schedule, the memory of every pipeline rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cost_models.schedule_time import ScheduleReport, simulate_schedule
from galvatron_fx.ir.annotations import TensorSpec
from galvatron_fx.ir.cluster import Axis, Cluster
from galvatron_fx.ir.schedule import Schedule
from galvatron_fx.ir.torch_compat import orders_with_transfers
from passes.held_bytes import HeldBytes
from passes.lower_stages import LoweredStages
from passes.rank_memory import Ledger, RankReplay, StageReplay
from passes.simulate_step import UPDATE_COPIES, SimulateStep
from passes.split_stages import Stage
from passes.task_memory import StageMemory


@dataclass(frozen=True)
class StagesReport:
    """One training step of all stages: what the schedule makes of it, and bytes on each pipeline rank."""

    schedule: ScheduleReport
    step_time_s: float
    peak_bytes: tuple[int, ...]

    @property
    def peak_memory_bytes(self) -> int:
        """The most bytes on any rank."""
        return max(self.peak_bytes)


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one stage: of its tasks (``once``: start and finish), and of sending on and back what it makes."""

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    once_s: float
    send_s: float
    send_back_s: float


@dataclass(frozen=True)
class SimulateStages:
    """Simulate ``schedule`` with the tasks of lowered stages; ``pipeline_axes``: the axes that hold the stages.

    What is done once a step (gathers kept for it, reductions of gradients, the optimizer's update) comes before and
    after the schedule, as it does when it runs.
    """

    cluster: Cluster
    schedule: Schedule
    pipeline_axes: Sequence[Axis]

    def run(self, lowered: LoweredStages) -> StagesReport:
        """Return the prediction. Raises VerifierError where a node's shape is not the one its facts say."""
        return self.report(self.times(lowered), self.peaks(lowered))

    def times(self, lowered: LoweredStages) -> list[StageTimes]:
        """Seconds of every stage."""
        axes = [[self.cluster.axes[i] for i in column.axes] for column in lowered.layout.columns]
        simulator = SimulateStep(self.cluster)
        return [self._times(simulator, stage, axes) for stage in lowered.stages]

    def report(self, times: Sequence[StageTimes], peaks: Sequence[int]) -> StagesReport:
        """Put the stages' times and the ranks' peaks together."""
        report = simulate_schedule(
            self.schedule,
            [t.forward_s for t in times],
            [t.input_grad_s for t in times],
            [t.weight_grad_s for t in times],
            [t.send_s for t in times[:-1]],
            [t.send_back_s for t in times[1:]],
        )
        once = [0.0] * self.schedule.num_ranks
        for rank, time in zip(self.schedule.rank_of_stage, times, strict=True):
            once[rank] += time.once_s
        return StagesReport(report, report.step_s + max(once), tuple(peaks))

    def peaks(self, lowered: LoweredStages) -> tuple[int, ...]:
        """Bytes on every pipeline rank."""
        kinds = {action.kind for order in self.schedule.orders for action in order}
        stages = {id(stage.tasks): stage for stage in lowered.stages}
        measured = {key: StageMemory.of(stage, lowered.layout.shape, kinds) for key, stage in stages.items()}
        memory = [measured[id(stage.tasks)] for stage in lowered.stages]
        rows = [[(a.stage, a.kind, a.microbatch) for a in order] for order in self.schedule.orders]
        held = HeldBytes.of(lowered, self.schedule)
        peaks = []
        for rank, order in enumerate(orders_with_transfers(rows, self.schedule.rank_of_stage)):
            ledger = Ledger()
            own = {i: StageReplay(lowered.stages[i], memory[i], ledger) for i in self.schedule.stages_of(rank)}
            replay = RankReplay(own, ledger)
            replay.run(order)
            replay.finish(held.shared)
            always = held.always_bytes(rank)
            step = always + held.hoisted_bytes(rank) + ledger.most_bytes
            update = always + ledger.bytes + UPDATE_COPIES * held.largest_bytes(rank)
            peaks.append(max(step, update))
        return tuple(peaks)

    def _times(self, simulator: SimulateStep, stage: Stage, axes: Sequence[Sequence[Axis]]) -> StageTimes:
        tasks = {name: sum(simulator.times(list(t.graph.graph.nodes), axes)) for name, t in stage.tasks.items()}
        return StageTimes(
            tasks["forward"],
            tasks["input_grad"],
            tasks["weight_grad"],
            tasks["start"] + tasks["finish"],
            self._send_s(stage.specs, stage.sends),
            self._send_s(stage.specs, stage.sends_back),
        )

    def _send_s(self, specs: dict[str, TensorSpec], names: Sequence[str]) -> float:
        """Seconds to send values to a neighbouring stage."""
        if not names or not self.pipeline_axes:
            return 0.0
        link = self.pipeline_axes[0]
        size = sum(specs[name].size_bytes for name in names)
        return len(names) * link.latency_s + size / link.bandwidth_bytes_per_s
