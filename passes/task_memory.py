"""Memory of one pipeline stage, found by running its tasks on fake tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from galvatron_fx.ir.annotations import TensorSpec, facts
from galvatron_fx.ir.torch_compat import new_fake_mode
from passes.simulate_step import MemoryMeter
from passes.split_stages import Stage


@dataclass(frozen=True)
class TaskMemory:
    """Bytes on one rank of a stage.

    ``fixed_bytes``: parameters, inputs and what is made once and kept for a step; ``trained_bytes``: of trained
    parameters, ``largest_bytes``: of the largest; ``gradient_bytes``: sums that grow over micro-batches;
    ``saved_bytes``: kept for each micro-batch in flight; ``transient_bytes``: the most beside these while a task runs.
    """

    fixed_bytes: int
    trained_bytes: int
    largest_bytes: int
    gradient_bytes: int
    saved_bytes: int
    transient_bytes: int

    @classmethod
    def of(cls, stage: Stage, degrees: Sequence[int], splits_backward: bool, parts: int) -> TaskMemory:
        """Measure ``stage`` under schedules that split backward or do not; ``parts``: micro-batches;
        ``degrees``: ranks along each column of the layout.

        Raises VerifierError where a node's shape is not the one its facts say.
        """
        return _Measurement(stage, degrees).run(splits_backward, parts)


class _Measurement:
    def __init__(self, stage: Stage, degrees: Sequence[int]) -> None:
        self.stage = stage
        self.meter = MemoryMeter(degrees)
        self.values: dict[str, Any] = {}
        self.specs = _input_specs(stage)

    def run(self, splits_backward: bool, parts: int) -> TaskMemory:
        stage = self.stage
        kinds = {name: port for name, port in stage.ports.items() if name in self.specs}
        trained = [
            self.specs[name].size_bytes for name, port in kinds.items() if port.kind == "param" and port.requires_grad
        ]
        with new_fake_mode():
            self.values = {name: _fake(self.specs[name]) for name in kinds}
            self.meter.hold(list(self.values.values()))
            self._task("start", frozenset())
            fixed = self.meter.bytes
            saved, peak = self._microbatch(splits_backward)
            terms = {gradient.term for gradient in stage.gradients}
            gradients = sum(_size(self.values[name]) for name in terms if name in self.values)
        # The first micro-batch's gradients are the sums themselves.
        sums = gradients if parts > 1 else 0
        return TaskMemory(fixed, sum(trained), max(trained, default=0), sums, saved, max(peak - fixed - saved, 0))

    def _microbatch(self, splits_backward: bool) -> tuple[int, int]:
        """(bytes kept in flight, peak) of one micro-batch run through."""
        stage = self.stage
        before = self.meter.bytes
        names = [*stage.receives, *stage.receives_back]
        self.values |= {name: _fake(stage.specs[name]) for name in names}
        self.meter.hold([self.values[name] for name in stage.receives])
        wanted = frozenset(stage.tasks["backward"].inputs)
        self._task("forward", wanted)
        self._forget([name for name in stage.receives if name not in wanted])
        saved = self.meter.bytes - before
        self.meter.hold([self.values[name] for name in stage.receives_back])
        if not splits_backward:
            self._task("backward", frozenset(g.term for g in stage.gradients))
            return saved, self.meter.most_bytes
        terms = frozenset(g.term for g in stage.gradients)
        self._task("input_grad", terms | frozenset(stage.tasks["weight_grad"].inputs))
        saved = max(saved, self.meter.bytes - before)
        self._task("weight_grad", terms)
        return saved, self.meter.most_bytes

    def _task(self, name: str, keep: frozenset[str]) -> None:
        """Run a task; its outputs that nobody keeps, and its inputs that die, are let go."""
        task = self.stage.tasks[name]
        if not task.outputs:
            return
        owned = {i for i, value in enumerate(task.inputs) if value in task.dies and value not in self.stage.ports}
        made = self.meter.run(task.graph, [self.values[value] for value in task.inputs], owned)
        self.values |= dict(zip(task.outputs, made, strict=True))
        if name != "start":
            self._forget([value for value in task.outputs if value not in keep])

    def _forget(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self.values and name not in self.stage.ports:
                self.meter.drop([self.values.pop(name)])


def _input_specs(stage: Stage) -> dict[str, TensorSpec]:
    """Local specs of the graph's inputs that the stage's tasks take."""
    found: dict[str, TensorSpec] = {}
    for task in stage.tasks.values():
        for node in task.graph.graph.nodes:
            if node.op == "placeholder" and node.name in stage.ports:
                found[node.name] = facts(node).spec
    return found


def _fake(spec: TensorSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype)


def _size(value: Any) -> int:
    return int(value.untyped_storage().nbytes())
