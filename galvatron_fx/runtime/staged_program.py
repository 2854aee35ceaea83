"""One compiled step of a plan with stages or micro-batches: this rank's stages, and what joins them."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from cost_models.schedule_time import ScheduleReport, Span
from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.host_copies import settle_all, to_host
from galvatron_fx.ir.graph.metadata import (
    InputSpec,
    OutputSpec,
    Signature,
    TensorSpec,
    meta_of,
    output_ports,
    ports,
    signature,
)
from galvatron_fx.ir.graph.placement import Placement, Shard
from galvatron_fx.ir.plan.schedule import SPREAD, Schedule
from galvatron_fx.ir.plan.strategy import original_name
from galvatron_fx.runtime.backends import Backend, Boxed, Eager, compile_graph
from galvatron_fx.runtime.backward_refusals import Versions
from galvatron_fx.runtime.expert_loads import KeptCounts
from galvatron_fx.runtime.loss import loss_port
from galvatron_fx.runtime.microbatches import hoisted_values, merge_outputs
from galvatron_fx.runtime.program import Call
from galvatron_fx.runtime.scheduled_loss import Differentiated, scheduled_loss
from galvatron_fx.runtime.stage_runner import RunTask, StageRunner
from galvatron_fx.runtime.torch_pipeline import RunningStage, TorchPipeline
from passes.analysis.gradient_sources import gradient_sources
from passes.lowering.batch_rows import RowsRead
from passes.lowering.lower_stages import LoweredStages
from passes.lowering.stages.split_stages import Stage
from passes.lowering.stages.stage_tasks import Task

ValueOf = Callable[[InputSpec], Any]


@dataclass(frozen=True)
class PipelineGroup:
    """The ranks that hold the stages of one set of coordinates, as this rank sees them.

    ``rank``: this one's place among them; ``peers``: their global ranks, in order; ``group``: their process group,
    None for one rank; ``shared``: for each parameter that several of them hold a copy of, the group of these.
    """

    rank: int
    peers: tuple[int, ...]
    group: dist.ProcessGroup | None
    shared: Mapping[str, dist.ProcessGroup]


@dataclass(frozen=True)
class StagedProgram:
    """Stages, bound to this rank by code generation, with their schedule.

    ``lowered``: all stages, of which this rank runs those that ``schedule`` gives to its pipeline rank; ``signature``:
    names of the model's inputs and outputs and how they nest; ``read``: who reads which rows of the inputs;
    ``backend``: makes the graphs callable; ``counts``: rows of experts, as its graphs keep them; ``unused``: the
    pipeline rank of each tensor that no stage takes; ``last_spans``: when this rank computed what in the last step of
    training, in order, in seconds of ``time.perf_counter``.
    """

    lowered: LoweredStages
    schedule: Schedule
    pipeline: PipelineGroup
    signature: Signature
    read: RowsRead
    device: str
    backend: Backend = field(default_factory=Eager)
    counts: KeptCounts = field(default_factory=KeptCounts)
    unused: Mapping[str, int] = field(default_factory=dict)
    last_spans: list[Span] = field(default_factory=list, compare=False, repr=False)

    @property
    def stages(self) -> list[Stage]:
        """This rank's stages, in order."""
        return [self.lowered.stages[index] for index in self.schedule.stages_of(self.pipeline.rank)]

    @property
    def graphs(self) -> dict[str, fx.GraphModule]:
        """The graphs of this rank's stages by name, such as "stage 0 forward"."""
        return {
            f"stage {stage.index} {name}": task.graph
            for stage in self.stages
            for name, task in stage.tasks.items()
            if not task.is_empty
        }

    @property
    def differentiated_ports(self) -> list[InputSpec]:
        """Parameters that this rank holds and trains, by their original names, and inputs that need gradients."""
        held = {original_name(p.name): p for stage in self.stages for p in stage.ports.values() if p.kind == "param"}
        inputs = [port for port in self.signature.inputs if port.kind == "input" and port.requires_grad]
        return [*(replace(port, name=name) for name, port in held.items() if port.requires_grad), *inputs]

    def train(self, value_of: ValueOf) -> tuple[dict[OutputSpec, Any], list[tuple[OutputSpec, Any]]]:
        """Run one step; returns outputs of the whole batch by port, and gradients of this rank's parameters and of
        inputs.
        """
        runners = self._run(value_of, forward_only=False)
        gradients: dict[str, tuple[OutputSpec, Any]] = {}
        for runner in runners:
            ports_by_name = {gradient.port.name: gradient.port for gradient in runner.stage.gradients}
            for name, value in self._finished(runner).items():
                parameter = original_name(name)
                known = gradients.get(parameter)
                gradients[parameter] = (ports_by_name[name], value if known is None else known[1] + value)
        self._add_copies(gradients, value_of)
        results = self._outputs(runners)
        for port in [port for port in results if port.is_input_gradient]:
            gradients[port.name] = port, results.pop(port)
        return results, [entry for name, entry in gradients.items() if name not in self._unreached]

    def evaluate(self, value_of: ValueOf) -> dict[OutputSpec, Any]:
        """Run forward only; returns outputs of the whole batch by port."""
        return self._outputs(self._run(value_of, forward_only=True))

    def told(self, results: dict[OutputSpec, Any]) -> dict[OutputSpec, Any]:
        """The results of one micro-batch with the outputs of other stages; every rank calls it.

        Raises InputError where there are several micro-batches.
        """
        count = self.lowered.microbatched.num_microbatches
        if count > 1:
            raise InputError(
                f"{count} micro-batches go through stages, and generate() takes whole batches: plan with "
                f"num_microbatches=1"
            )
        told = dict(results)
        for stage in self.lowered.stages if self.pipeline.group is not None else ():
            maker = self.schedule.rank_of_stage[stage.index]
            for port, name in stage.results:
                if port.kind == "output" and stage.specs[name].shape and maker != SPREAD:
                    spec = stage.specs[name]
                    value = results.get(port, torch.empty(spec.shape, dtype=spec.dtype, device=self.device))
                    told[port] = value.contiguous()
                    dist.broadcast(told[port], src=self.pipeline.peers[maker], group=self.pipeline.group)
        return told

    def measured(self) -> ScheduleReport:
        """Return when all ranks of the pipeline computed what in the last step; each of them calls it alike.

        Their clocks are compared as they are. Raises InputError before the first step and where the ranks are on
        several machines, whose clocks differ.
        """
        record = platform.node(), self.last_spans
        gathered: list[Any] = [record]
        if self.pipeline.group is not None:
            gathered = [None] * len(self.pipeline.peers)
            dist.all_gather_object(gathered, record, group=self.pipeline.group)
        machines = sorted({machine for machine, _ in gathered})
        if len(machines) > 1:
            raise InputError(
                f"the ranks of the pipeline are on machines {', '.join(machines)}, whose clocks cannot be compared: "
                f"measure with all of them on one"
            )
        spans = [span for _, spans in gathered for span in spans]
        if not spans:
            raise InputError("no step was measured yet: call forward_backward(...) before")
        return ScheduleReport.from_spans(self.schedule, spans)

    def require_loss(self) -> None:
        """Raise InputError where there is nothing to differentiate."""
        loss_port(self.signature, is_scheduled=True)

    @property
    def folded(self) -> dict[str, None]:
        """No parameter is updated while backward computes: its gradient is a sum over micro-batches."""
        return {}

    @property
    def undifferentiated(self) -> frozenset[int]:
        """Positions of outputs that need gradients, and get none in ``differentiable``: all but the loss."""
        return self.signature.beside_loss

    def differentiable(self, call: Call, *tensors: Tensor) -> dict[OutputSpec, Any]:
        """Run the step so that ``backward()`` of its loss hands over its gradients; returns outputs by port.

        ``tensors``: as the module holds them, or its caller, in the order of ``differentiated_ports``. Where none is
        differentiated on any rank, forward runs alone. Raises InputError where the model returns no loss.
        """
        is_differentiated = any(
            port.kind in ("param", "input") and port.requires_grad for port in self.signature.inputs
        )
        if not is_differentiated and not self.signature.forward_only:
            with torch.no_grad():
                results = self.evaluate(call.value_of)
                call.update(results)
            return results
        loss = loss_port(self.signature, is_scheduled=True)
        versions = Versions(self._read_by_backward, call.version_of)
        with torch.no_grad():
            results, gradients = self.train(call.value_of)
            call.update(results)
        by_name = {original_name(port.name): gradient for port, gradient in gradients}
        step = Differentiated(results[loss], by_name, partial(versions.require_kept, self.signature.input_names))
        results[loss] = scheduled_loss(step, [port.gradient for port in self.differentiated_ports], tensors)
        return results

    def placements(self, port: InputSpec) -> tuple[Placement, ...]:
        """How an input lies on the mesh of its stage, one placement a column."""
        return self.lowered.layout.inputs[signature(self.lowered.joint).inputs.index(port)]

    @cached_property
    def absent_caches(self) -> dict[str, TensorSpec]:
        """Caches that other stages have, by name, whole."""
        joint, layout = self.lowered.joint, self.lowered.layout
        held = {name for name, ranks in self._cache_holders.items() if self.pipeline.rank in ranks}
        absent: dict[str, TensorSpec] = {}
        for (port, node), placed in zip(ports(joint), layout.inputs, strict=True):
            if port.kind == "cache" and port.name not in held:
                absent[port.name] = _whole(meta_of(node).spec, placed, layout.shape)
        for (result, value), lies in zip(output_ports(joint), layout.outputs, strict=True):
            if result.kind == "cache" and value is not None and result.name not in held:
                absent[result.name] = _whole(meta_of(value).spec, lies, layout.shape)
        return absent

    @cached_property
    def stage_caches(self) -> frozenset[str]:
        """Caches that some ranks of the pipeline have nothing of."""
        count = len(self.pipeline.peers)
        return frozenset(name for name, ranks in self._cache_holders.items() if len(ranks) < count)

    @cached_property
    def _cache_holders(self) -> dict[str, set[int]]:
        """The pipeline ranks that have each cache: those of its layer; all, of a number, by which callers count."""
        joint = self.lowered.joint
        numbers = {port.name for port, node in ports(joint) if port.kind == "cache" and not meta_of(node).spec.shape}
        holders = {name: set(range(len(self.pipeline.peers))) for name in numbers}
        for stage in self.lowered.stages:
            names = {port.name for port in stage.ports.values() if port.kind == "cache"}
            names |= {port.name for port, _ in stage.results if port.kind == "cache"}
            for name in names:
                holders.setdefault(name, set()).update(self.schedule.ranks_of(stage.index))
        return holders

    def result_placements(self, port: OutputSpec) -> tuple[Placement | None, ...]:
        """How an output lies on the mesh of a stage: where ranks and micro-batches cut one dim, a rank has rows of each
        micro-batch.
        """
        placed = zip(signature(self.lowered.joint).outputs, self.lowered.layout.outputs, strict=True)
        joined, count = self.lowered.microbatched.outputs.get(port.name), self.lowered.microbatched.num_microbatches
        return tuple(
            replace(place, split_factor=count)
            if isinstance(place, Shard) and isinstance(joined, Shard) and place.dim == joined.dim
            else place
            for place in dict(placed).get(port, ())
        )

    # ---- inside ----

    def _run(self, value_of: ValueOf, forward_only: bool) -> list[StageRunner]:
        hoisted = dict(enumerate(hoisted_values(self.lowered.microbatched, value_of, self._prologue)))
        runners = []
        for stage in self.stages:
            shared = {name: self._value(port, value_of) for name, port in stage.ports.items() if port.kind != "hoisted"}
            positions = {name: int(port.name) for name, port in stage.ports.items() if port.kind == "hoisted"}
            runners.append(StageRunner(stage, self._run_task, shared, partial(_of_microbatch, hoisted, positions)))
        pipeline = self.pipeline
        ranks = pipeline.rank, pipeline.peers, pipeline.group
        running = [RunningStage(runner, self.schedule, *ranks, self.device) for runner in runners]
        for runner in runners:
            runner.start()
        TorchPipeline(running, self.schedule, forward_only).run()
        for runner in runners:
            runner.end()
        if not forward_only:
            spans = (span for stage in running for span in stage.spans)
            self.last_spans[:] = sorted(spans, key=lambda span: span.start_s)
        return runners

    @cached_property
    def _prologue(self) -> fx.GraphModule:
        """Cuts what this rank's stages take out of the batch, and nothing that only other ranks take."""
        taken = {int(port.name) for stage in self.stages for port in stage.ports.values() if port.kind == "hoisted"}
        return self.lowered.microbatched.prologue_for(taken)

    def _value(self, port: InputSpec, value_of: ValueOf) -> Any:
        if port.kind != "tangent":
            return value_of(port)
        like = self._dtypes[port]
        is_loss = int(port.name) == self.signature.loss
        return (torch.ones if is_loss else torch.zeros)((), dtype=like, device=self.device)

    @cached_property
    def _read_by_backward(self) -> list[InputSpec]:
        """Parameters and buffers that backward reads as they are, and forward leaves so."""
        changed = {original_name(port.name) for port in self._state}
        taken = (stage.ports.get(name) for stage in self.stages for name in stage.tasks["backward"].inputs)
        held = [port for port in taken if port is not None and port.kind in ("param", "buffer")]
        return [port for port in held if original_name(port.name) not in changed]

    @cached_property
    def _unreached(self) -> set[str]:
        """Parameters and inputs that the loss does not depend on, though other outputs do: they get no gradient."""
        sources = gradient_sources(self.lowered.joint)
        reached = {original_name(name) for name, losses in sources.items() if str(self.signature.loss) in losses}
        return {original_name(name) for name in sources} - reached

    @cached_property
    def _on_host(self) -> frozenset[str]:
        """Parameters of this rank that live on the host, and so do their gradients."""
        return frozenset(port.name for port in self.differentiated_ports if port.on_host)

    @cached_property
    def _dtypes(self) -> dict[InputSpec, torch.dtype]:
        return {port: meta_of(node).spec.dtype for port, node in ports(self.lowered.joint)}

    @cached_property
    def _run_task(self) -> RunTask:
        calls: dict[int, Boxed] = {}

        def run(task: Task, arguments: list[Any]) -> Sequence[Any]:
            if id(task) not in calls:
                calls[id(task)] = compile_graph(task.graph, self.backend)
            return calls[id(task)](arguments)

        return run

    def _finished(self, runner: StageRunner) -> dict[str, Any]:
        """The gradients of a stage, by name of its parameters; this process may read those on the host."""
        gradients = runner.finish()
        if self._on_host:
            settle_all()
        for name in gradients:
            if original_name(name) in self._on_host:
                gradients[name] = gradients[name].cpu()
        return gradients

    def _add_copies(self, gradients: dict[str, tuple[OutputSpec, Any]], value_of: ValueOf) -> None:
        """Add up the gradients of a parameter over all ranks that hold a copy, in place."""
        for name, group in self.pipeline.shared.items():
            if name not in gradients:
                parameter = value_of(InputSpec("param", name, True))
                gradients[name] = OutputSpec("grad", name), torch.zeros_like(parameter)
            port, value = gradients[name]
            total = value.to(self.device, copy=True, memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=group)
            gradients[name] = port, to_host(total) if name in self._on_host else total
        if self._on_host:
            settle_all()

    def _outputs(self, runners: Sequence[StageRunner]) -> dict[OutputSpec, Any]:
        """Outputs made on this rank; numbers (losses) are told to all stages, which have those of spread ones."""
        count = self.lowered.microbatched.num_microbatches
        by_microbatch: list[dict[OutputSpec, Any]] = [{} for _ in range(count)]
        for runner in runners:
            for index, results in runner.results.items():
                by_microbatch[index] |= results
        self._tell_pieces(by_microbatch)
        merged = merge_outputs(self.lowered.microbatched, by_microbatch)
        for port in [port for port in merged if port.is_input_gradient]:
            merged[port] = self.signature.without_padding(port, merged[port])
        if self.pipeline.group is not None:
            for port, (rank, dtype) in self._scalars.items():
                value = merged.get(port, torch.empty((), dtype=dtype, device=self.device)).contiguous()
                dist.broadcast(value, src=self.pipeline.peers[rank], group=self.pipeline.group)
                merged[port] = value
            self._tell_state(merged)
            self._tell_input_gradients(merged)
        return merged

    def _tell_input_gradients(self, merged: dict[OutputSpec, Any]) -> None:
        """Give the gradients of inputs to all ranks, as all of them hold the inputs."""
        for port, (maker, spec) in self._input_gradients.items():
            if port not in merged:
                merged[port] = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
            merged[port] = merged[port].contiguous()
            dist.broadcast(merged[port], src=self.pipeline.peers[maker], group=self.pipeline.group)

    @cached_property
    def _input_gradients(self) -> dict[OutputSpec, tuple[int, TensorSpec]]:
        """Gradients of inputs that one pipeline rank makes: this rank, and the specs of the inputs."""
        specs = self.signature.input_specs
        of = {port.gradient: specs[int(port.name)] for port in self.signature.inputs if port.kind == "input"}
        made = [(port, stage.index) for stage in self.lowered.stages for port, _ in stage.results_back]
        makers = {
            port: self.schedule.rank_of_stage[index] for port, index in sorted(made, key=lambda pair: pair[0].name)
        }
        return {port: (maker, of[port.name]) for port, maker in makers.items() if maker != SPREAD}

    def _tell_state(self, merged: dict[OutputSpec, Any]) -> None:
        """Give new values of buffers, parameters and caches to all ranks that hold them, and to no others."""
        for (maker, dtype), numbers in self._told_numbers.items():
            row = torch.empty(len(numbers), dtype=dtype, device=self.device)
            if maker == self.pipeline.rank:
                row = torch.stack([merged[port] for port in numbers])
            dist.broadcast(row, src=self.pipeline.peers[maker], group=self.pipeline.group)
            merged.update(zip(numbers, row.unbind(), strict=True))
        for port, (maker, holders, spec) in self._state.items():
            if spec.shape and holders != {maker} and maker != SPREAD:
                value = merged.get(port, torch.empty(spec.shape, dtype=spec.dtype, device=self.device)).contiguous()
                dist.broadcast(value, src=self.pipeline.peers[maker], group=self.pipeline.group)
                merged[port] = value
            if self.pipeline.rank not in holders:
                merged.pop(port, None)

    @cached_property
    def _told_numbers(self) -> dict[tuple[int, torch.dtype], list[OutputSpec]]:
        """What has no dims of what is told, by its maker and dtype: one message for all."""
        numbers: dict[tuple[int, torch.dtype], list[OutputSpec]] = {}
        for port, (maker, holders, spec) in self._state.items():
            if not spec.shape and holders != {maker} and maker != SPREAD:
                numbers.setdefault((maker, spec.dtype), []).append(port)
        return numbers

    @cached_property
    def _state(self) -> dict[OutputSpec, tuple[int, set[int], TensorSpec]]:
        """What forward changes: the pipeline rank that makes its new value, those that hold it, and its spec."""
        ranks = self.schedule.rank_of_stage
        holders: dict[str, set[int]] = {}
        makers: dict[OutputSpec, tuple[int, TensorSpec]] = {}
        for stage in self.lowered.stages:
            for port in stage.ports.values():
                if port.kind in ("param", "buffer"):
                    holders.setdefault(original_name(port.name), set()).update(self.schedule.ranks_of(stage.index))
            for output, name in stage.results:
                if output.kind in ("buffer", "cache"):
                    makers[output] = ranks[stage.index], stage.specs[name]
        held = {("buffer", name): ranks for name, ranks in holders.items()}
        held |= {("cache", original_name(name)): ranks for name, ranks in self._cache_holders.items()}
        pairs = sorted(makers.items(), key=lambda item: (item[0].kind, item[0].name))

        def holders_of(out: OutputSpec) -> set[int]:
            name = original_name(out.name)
            return held.get((out.kind, name)) or {self.unused.get(name, 0)}

        return {out: (rank, holders_of(out), spec) for out, (rank, spec) in pairs}

    def _tell_pieces(self, by_microbatch: Sequence[dict[OutputSpec, Any]]) -> None:
        """Give every rank the pieces of the epilogue where stages of several ranks make some."""
        if self.pipeline.group is None or len({rank for rank, _ in self._pieces.values()}) < 2:
            return
        for port, (rank, spec) in self._pieces.items():
            if rank == SPREAD:
                continue
            for results in by_microbatch:
                value = results.get(port)
                value = torch.empty(spec.shape, dtype=spec.dtype, device=self.device) if value is None else value
                results[port] = value.contiguous()
                dist.broadcast(results[port], src=self.pipeline.peers[rank], group=self.pipeline.group)

    @cached_property
    def _pieces(self) -> dict[OutputSpec, tuple[int, TensorSpec]]:
        """What the epilogue takes of every micro-batch: the pipeline rank that makes it, and its shape and dtype."""
        pieces = {
            port: (self.schedule.rank_of_stage[stage.index], stage.specs[name])
            for stage in self.lowered.stages
            for port, name in stage.results
            if port.kind == "piece"
        }
        return dict(sorted(pieces.items(), key=lambda item: int(item[0].name)))

    @cached_property
    def _scalars(self) -> dict[OutputSpec, tuple[int, torch.dtype]]:
        """Outputs without dims that one pipeline rank makes: this rank, and the dtype."""
        split = self.lowered.microbatched
        scalars: dict[OutputSpec, tuple[int, torch.dtype]] = {}
        for stage in self.lowered.stages:
            rank = self.schedule.rank_of_stage[stage.index]
            for port, name in stage.results:
                spec = stage.specs[name]
                if port.kind == "output" and not spec.shape:
                    scalars[port] = rank, spec.dtype
                if port.kind == "piece":
                    scalars |= {late: (rank, dtype) for late, dtype in split.late_scalars().items()}
        scalars = {port: made for port, made in scalars.items() if made[0] != SPREAD}
        return dict(sorted(scalars.items(), key=lambda item: item[0].name))


def _whole(spec: TensorSpec, placements: Sequence[Placement | None], degrees: Sequence[int]) -> TensorSpec:
    shape = list(spec.shape)
    for placement, degree in zip(placements, degrees, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] *= degree
    return TensorSpec(tuple(shape), spec.dtype)


def _of_microbatch(hoisted: Mapping[int, list[Tensor]], positions: Mapping[str, int], index: int) -> dict[str, Tensor]:
    return {name: hoisted[position][index] for name, position in positions.items()}
