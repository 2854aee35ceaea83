"""Predict lowered stages: the time of a step from tasks and schedule, the memory of every pipeline rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cost_models.schedule_time import ScheduleReport, simulate_schedule
from galvatron_fx.ir.annotations import TensorSpec
from galvatron_fx.ir.cluster import Axis, Cluster
from galvatron_fx.ir.schedule import Schedule
from passes.lower_stages import LoweredStages
from passes.simulate_step import MOMENTS, UPDATE_COPIES, SimulateStep
from passes.split_stages import Stage
from passes.task_memory import TaskMemory


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
        axes = [[self.cluster.axes[i] for i in column.axes] for column in lowered.layout.columns]
        times = [self._times(stage, axes) for stage in lowered.stages]
        sends = [self._send_s(stage.specs, stage.sends) for stage in lowered.stages[:-1]]
        backs = [self._send_s(stage.specs, stage.sends_back) for stage in lowered.stages[1:]]
        report = simulate_schedule(
            self.schedule,
            [t["forward"] for t in times],
            [t["input_grad"] for t in times],
            [t["weight_grad"] for t in times],
            sends,
            backs,
        )
        once = [0.0] * self.schedule.num_ranks
        for stage, time in zip(lowered.stages, times, strict=True):
            once[self.schedule.rank_of_stage[stage.index]] += time["start"] + time["finish"]
        parts = self.schedule.num_microbatches
        degrees, splits = lowered.layout.shape, self.schedule.splits_backward
        memory = [TaskMemory.of(stage, degrees, splits, parts) for stage in lowered.stages]
        held = report.peak_bytes([m.saved_bytes for m in memory])
        peaks = []
        for rank in range(self.schedule.num_ranks):
            own = [memory[index] for index in self.schedule.stages_of(rank)]
            fixed = sum(m.fixed_bytes + MOMENTS * m.trained_bytes + m.gradient_bytes for m in own)
            step = fixed + held[rank] + max(m.transient_bytes for m in own)
            update = sum(m.fixed_bytes + (MOMENTS + 1) * m.trained_bytes for m in own)
            update += UPDATE_COPIES * max(m.largest_bytes for m in own)
            peaks.append(int(max(step, update)))
        return StagesReport(report, report.step_s + max(once), tuple(peaks))

    def _times(self, stage: Stage, axes: Sequence[Sequence[Axis]]) -> dict[str, float]:
        simulator = SimulateStep(self.cluster)
        return {name: sum(simulator.times(list(task.graph.graph.nodes), axes)) for name, task in stage.tasks.items()}

    def _send_s(self, specs: dict[str, TensorSpec], names: Sequence[str]) -> float:
        """Seconds to send values to a neighbouring stage."""
        if not names or not self.pipeline_axes:
            return 0.0
        link = self.pipeline_axes[0]
        size = sum(specs[name].size_bytes for name in names)
        return len(names) * link.latency_s + size / link.bandwidth_bytes_per_s
