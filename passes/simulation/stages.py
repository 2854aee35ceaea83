"""Predict lowered stages: the time of a step from tasks and schedule, the memory of every pipeline rank."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from cost_models.collectives import broadcast_s, collective_s
from cost_models.optimizer import ADAM, OptimizerModel, ParameterShard
from cost_models.schedule_time import ScheduleReport, simulate_schedule
from cost_models.shared_cores import simulate_sharing, slowdown_of
from cost_models.streams import Event
from galvatron_fx.ir.cluster.cluster import Axis, Cluster
from galvatron_fx.ir.graph.metadata import TensorSpec, ports
from galvatron_fx.ir.plan.prediction import BATCH, HOST, IDLE, TRANSFER, TRANSIENTS, Cause, MemoryUse, RankUse
from galvatron_fx.ir.plan.schedule import SPREAD, Schedule
from galvatron_fx.ir.plan.strategy import stood_for_name
from galvatron_fx.ir.plan.transfers import with_transfers
from passes.lowering.lower_stages import LoweredStages
from passes.lowering.stages.split_stages import Stage
from passes.simulation.events import GraphEvents
from passes.simulation.exposed_time import exposed_and_hidden
from passes.simulation.live_memory import LiveMemory
from passes.simulation.persistent_memory import PersistentMemory
from passes.simulation.rank_memory import RankReplay, StageReplay
from passes.simulation.step import SimulateStep, shard_of
from passes.simulation.task_memory import StageMemory

StageTimes = Mapping[tuple[str, Cause], float]
"""Seconds of one stage by task and cause; the tasks "send" and "send_back" pass on what forward and backward made."""

StageEvents = Mapping[str, GraphEvents]
"""What a rank does in each task of a stage."""

Replay = TypeVar("Replay", bound=RankReplay)

_ROUNDING = 1e-12  # of a step
_PER_MICROBATCH = ("forward", "input_grad", "weight_grad")
_ONCE = ("start", "finish")
_SENDS_AFTER = {"send": ("forward",), "send_back": ("input_grad", "weight_grad")}
_UPDATE = "update"  # the optimizer's, behind the schedule


@dataclass(frozen=True)
class StagesReport:
    """One training step of all stages: when everything runs, and by pipeline rank what takes time and memory.

    ``hidden``: what collectives take beyond ``times``, beside computing; ``sharing``: the device's, where ranks
    share cores and are faster while others wait.
    """

    schedule: Schedule
    times: tuple[StageTimes, ...]
    hidden: tuple[StageTimes, ...]
    updates_s: tuple[float, ...]
    memory: tuple[MemoryUse, ...]
    sharing: tuple[tuple[int, float], ...] = ()

    @cached_property
    def spans(self) -> ScheduleReport:
        """When every action of the schedule runs."""
        return self._simulated(sends=1.0)

    @property
    def step_time_s(self) -> float:
        """Seconds of the schedule, and of what the slowest rank does once a step, the optimizer's update included."""
        return self.spans.step_s + self._once_s

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most bytes on each rank."""
        return tuple(use.peak_bytes for use in self.memory)

    @property
    def peak_memory_bytes(self) -> int:
        """The most bytes on any rank."""
        return max(self.peak_bytes)

    @property
    def host_bytes(self) -> int:
        """The most bytes on the host of any rank."""
        return max(use.host_bytes for use in self.memory)

    def ranks(self) -> tuple[RankUse, ...]:
        """The step by pipeline rank. What a rank waits for counts as transfer as far as faster links would spare it."""
        transfer_s = max(0.0, self.spans.step_s - self._simulated(sends=0.0).step_s)
        uses = []
        for rank, use in enumerate(self.memory):
            seconds = self._seconds(rank)
            waits_s = self.step_time_s - sum(seconds.values())
            waits_s = waits_s if waits_s > _ROUNDING * self.step_time_s else 0.0
            seconds[Cause(TRANSFER)] = min(transfer_s, waits_s)
            seconds[Cause(IDLE)] = waits_s - seconds[Cause(TRANSFER)]
            hidden = self._by_cause(rank, self.hidden, 1.0)
            uses.append(RankUse(self.schedule.stages_of(rank), seconds, use.at_peak, hidden, use.host_bytes))
        return tuple(uses)

    def _seconds(self, rank: int) -> dict[Cause, float]:
        """What a rank does in a step."""
        seconds: dict[Cause, float] = {}
        stages, count = self.schedule.stages_of(rank), self.schedule.num_microbatches
        among_all_s = count * sum(_task_s(self.times[stage], task) for stage in stages for task in _PER_MICROBATCH)
        faster = self.spans.busy_s[rank] / among_all_s if self.sharing and among_all_s else 1.0
        for cause, spent in self._by_cause(rank, self.times, faster).items():
            seconds[cause] = seconds.get(cause, 0.0) + spent
        return seconds

    def _by_cause(self, rank: int, times: Sequence[StageTimes], faster: float) -> dict[Cause, float]:
        """Seconds of a rank's tasks in a step, of which those of every micro-batch take ``faster`` of their time."""
        seconds: dict[Cause, float] = {}
        for stage in self.schedule.stages_of(rank):
            for (task, cause), spent in times[stage].items():
                once = float(task in (*_ONCE, _UPDATE))
                runs = self.schedule.num_microbatches * faster if task in _PER_MICROBATCH else once
                if runs:
                    seconds[cause] = seconds.get(cause, 0.0) + runs * spent
        return seconds

    def once_s(self, rank: int, task: str) -> float:
        """Seconds that a rank takes once a step for "start", "finish" or "update"."""
        if task == "update":
            return self.updates_s[rank]
        return sum(_task_s(self.times[stage], task) for stage in self.schedule.stages_of(rank))

    @property
    def _once_s(self) -> float:
        ranks = range(self.schedule.num_ranks)
        return max(sum(self.once_s(rank, task) for task in (*_ONCE, "update")) for rank in ranks)

    def task_s(self, task: str) -> list[float]:
        """Seconds that each stage takes for one run of ``task``."""
        return [_task_s(times, task) for times in self.times]

    def _simulated(self, sends: float) -> ScheduleReport:
        """The schedule, with the times of transfers multiplied by ``sends``."""
        ahead = [sends * seconds for seconds in self.task_s("send")[:-1]]
        back = [sends * seconds for seconds in self.task_s("send_back")[1:]]
        forward, input_grad, weight_grad = map(self.task_s, _PER_MICROBATCH)
        amounts = forward, input_grad, weight_grad, ahead, back
        if not self.sharing:
            return simulate_schedule(self.schedule, *amounts)
        return simulate_sharing(self.schedule, *amounts, slowdown_of(self.sharing, self.schedule.num_ranks))


@dataclass(frozen=True)
class MeasuredTasks:
    """What was measured of the tasks of lowered stages, by the tasks, which have to outlive it: their events on a
    cluster, and their memory under schedules with actions of some kinds.
    """

    events: dict[tuple[int, Cluster], StageEvents] = field(default_factory=dict)
    memory: dict[tuple[int, frozenset[str]], StageMemory] = field(default_factory=dict)


@dataclass(frozen=True)
class SimulateStages:
    """Simulate ``schedule`` with the tasks of lowered stages; ``pipeline_axes``: the axes that hold the stages;
    ``optimizer``: what updates the parameters. Each pipeline rank has its own devices and links of the cluster.
    ``measured``: of the same stages, under whichever schedules they were simulated before.

    What is done once a step (gathers kept for it, reductions of gradients, the optimizer's update) comes before and
    after the schedule, as it does when it runs.
    """

    cluster: Cluster
    schedule: Schedule
    pipeline_axes: Sequence[Axis]
    optimizer: OptimizerModel = ADAM
    measured: MeasuredTasks = field(default_factory=MeasuredTasks)
    _simulators: dict[Cluster, SimulateStep] = field(init=False, default_factory=dict)

    def run(self, lowered: LoweredStages) -> StagesReport:
        """Return the prediction. Raises VerifierError where a node's shape is not the one its facts say."""
        events = self.events(lowered)
        alone, memory = self.alone(lowered, events), self.memory(lowered)
        return self.report(alone, [{name: task.all for name, task in stage.items()} for stage in events], memory)

    def events(self, lowered: LoweredStages) -> list[StageEvents]:
        """What a rank does in the tasks of every stage."""
        known = self.measured.events
        for stage in lowered.stages:
            simulator, tasks = self._simulator(stage.index), stage.tasks
            if (id(tasks), simulator.cluster) not in known:
                known[id(tasks), simulator.cluster] = {
                    name: simulator.graph_events(tasks[name].graph, lowered.layout)
                    for name in (*_PER_MICROBATCH, *_ONCE)
                }
        return [known[id(stage.tasks), self._part(stage.index)] for stage in lowered.stages]

    def alone(self, lowered: LoweredStages, events: Sequence[StageEvents]) -> list[StageTimes]:
        """Seconds of every stage, as if nothing ran at once."""
        degrees = lowered.layout.shape
        shards = {p.name: shard_of(p, node, degrees) for p, node in ports(lowered.joint) if p.kind == "param"}
        times: dict[Hashable, StageTimes] = {}
        for stage, stage_events in zip(lowered.stages, events, strict=True):
            if (key := self._key(stage)) not in times:
                times[key] = self._alone(stage, stage_events, shards)
        return [times[self._key(stage)] for stage in lowered.stages]

    def report(
        self,
        alone: Sequence[StageTimes],
        events: Sequence[Mapping[str, Sequence[Event]]],
        memory: Sequence[MemoryUse],
    ) -> StagesReport:
        """Put the stages' times and the ranks' memory together; ``events``: of every stage's tasks, which overlap."""
        times, hidden = zip(*map(self._overlapped, alone, events), strict=True)
        updates = tuple(
            sum(_task_s(times[stage], _UPDATE) for stage in self.schedule.stages_of(rank))
            for rank in range(len(memory))
        )
        sharing = tuple(dict(self.cluster.device.sharing).items())
        return StagesReport(self.schedule, times, hidden, updates, tuple(memory), sharing)

    def _overlapped(
        self, alone: StageTimes, events: Mapping[str, Sequence[Event]]
    ) -> tuple[dict[tuple[str, Cause], float], dict[tuple[str, Cause], float]]:
        """Seconds by task and cause of a stage, and those that are hidden; who receives waits as in a collective."""
        times = dict(alone)
        hidden: dict[tuple[str, Cause], float] = {}
        for task, task_events in events.items():
            spent = {cause: seconds for (name, cause), seconds in alone.items() if name == task}
            both = exposed_and_hidden(spent, [task_events], self.cluster.overlap)
            for table, seconds in zip((times, hidden), both, strict=True):
                table |= {(task, cause): s for cause, s in seconds.items()}
        for send, tasks in _SENDS_AFTER.items():
            if times[send, Cause(TRANSFER)]:
                computed_s = sum(_task_s(times, task) for task in tasks)
                times[send, Cause(TRANSFER)] += self.cluster.overlap.skew.seconds(computed_s)
        return times, hidden

    def memory(self, lowered: LoweredStages) -> list[MemoryUse]:
        """Bytes on every pipeline rank."""
        held = PersistentMemory.of(lowered, self.schedule, self.optimizer)
        uses = []
        for rank, replay in enumerate(self.replays(lowered, held, RankReplay)):
            always, behind = held.always(rank), {TRANSIENTS: held.update(rank).most_bytes}
            meanwhile = {**always, HOST: held.on_host(rank)}, {BATCH: held.hoisted_bytes(rank)}
            moments = {moment: with_bytes(alive, *meanwhile) for moment, alive in replay.live.moments.items()}
            uses.append(MemoryUse.of(moments, with_bytes(replay.live.now, always, behind)))
        return uses

    def replays(self, lowered: LoweredStages, held: PersistentMemory, kind: type[Replay]) -> list[Replay]:
        """The step of every pipeline rank as its live memory saw it, from the first task to the gradients."""
        kinds = frozenset(action.kind for order in self.schedule.orders for action in order)
        known = self.measured.memory
        for stage in distinct_stages(lowered):
            if (id(stage.tasks), kinds) not in known:
                known[id(stage.tasks), kinds] = StageMemory.of(stage, lowered.layout.shape, kinds)
        memory = [known[id(stage.tasks), kinds] for stage in lowered.stages]
        replays = []
        for rank, order in enumerate(with_transfers(self.schedule)):
            live = LiveMemory()
            numbers = self.schedule.stages_of(rank)
            stages = {i: StageReplay(lowered.stages[i], memory[i], live, at) for at, i in enumerate(numbers)}
            replay = kind(stages, live)
            replay.run(order)
            replay.finish(held.shared)
            replays.append(replay)
        return replays

    def _alone(self, stage: Stage, events: StageEvents, shards: Mapping[str, ParameterShard]) -> StageTimes:
        here = self._taker(stage.index)
        ahead, back = (self._taker(stage.index + step) for step in (1, -1))
        times = {("send", Cause(TRANSFER)): self._send_s(stage.specs, stage.sends, here, ahead)}
        times["send_back", Cause(TRANSFER)] = self._send_s(stage.specs, stage.sends_back, here, back)
        params = [port for port in stage.ports.values() if port.kind == "param" and port.requires_grad]
        trained = [shards[stood_for_name(port.name)] for port in params]
        times |= {(_UPDATE, cause): spent for cause, spent in self._simulator(stage.index).update_s(trained).items()}
        for name, task_events in events.items():
            times |= {(name, cause): spent for cause, spent in task_events.seconds.items()}
        return times

    def _part(self, stage: int) -> Cluster:
        """The devices that compute a stage; those of all ranks, at the pace of the slowest, where it is spread."""
        if self.cluster.nodes is None or not self.pipeline_axes or self._taker(stage) == SPREAD:
            return self.cluster
        return self.cluster.parts(len(self.pipeline_axes))[self.schedule.rank_of_stage[stage]]

    def _simulator(self, stage: int) -> SimulateStep:
        part = self._part(stage)
        if part not in self._simulators:
            self._simulators[part] = SimulateStep(part, self.optimizer)
        return self._simulators[part]

    def _taker(self, stage: int) -> int | None:
        """The rank of a stage, None beyond the ends."""
        return self.schedule.rank_of_stage[stage] if 0 <= stage < self.schedule.num_stages else None

    def _key(self, stage: Stage) -> Hashable:
        """What the times of a stage rest on: stages with equal tasks may pass their values to one rank or to all."""
        beside = [self._taker(stage.index + step) for step in (1, -1)]
        links = [self._hop(self._taker(stage.index), other) for other in beside] if self.pipeline_axes else []
        return id(stage.tasks), self._part(stage.index), *links, *(other == SPREAD for other in beside)

    def _hop(self, here: int | None, there: int | None) -> Axis:
        """The link between the ranks of two stages; the slowest there is where one has none of its own."""
        if here is None or there is None or here == there or SPREAD in (here, there):
            return self.pipeline_axes[0]
        return self.cluster.hop(len(self.pipeline_axes), here, there)

    def _send_s(self, specs: dict[str, TensorSpec], names: Sequence[str], here: int | None, taker: int | None) -> float:
        """Seconds to send values to a neighbouring stage; to a spread one, all its ranks are told."""
        if not names or not self.pipeline_axes:
            return 0.0
        sizes = [float(specs[name].size_bytes) for name in names]
        if taker == SPREAD:
            return sum(broadcast_s(size, self.pipeline_axes) for size in sizes)
        return sum(float(collective_s("send_recv", size, [self._hop(here, taker)])) for size in sizes)


def _task_s(times: StageTimes, task: str) -> float:
    return sum(spent for (name, _), spent in times.items() if name == task)


def with_bytes(held: Mapping[str, int], *more: Mapping[str, int]) -> dict[str, int]:
    """What is held with ``more`` of the same kinds."""
    return {kind: size + sum(other.get(kind, 0) for other in more) for kind, size in held.items()}


def distinct_stages(lowered: LoweredStages) -> list[Stage]:
    """The stages that were lowered, without those that another stands for."""
    return list({id(stage.tasks): stage for stage in lowered.stages}.values())
