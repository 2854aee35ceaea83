"""Run the tasks of one pipeline stage and keep its values between them, each until its last use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from galvatron_fx.ir.graph.metadata import OutputSpec
from passes.lowering.stages.split_stages import Stage
from passes.lowering.stages.stage_tasks import Task

# Runs a task's graph on values, emptying the list: tensors on one rank, lists of tensors in the simulation of many.
RunTask = Callable[[Task, list[Any]], Sequence[Any]]


@dataclass
class StageRunner:
    """One stage during one step.

    ``step_values``: what all micro-batches share, by name (parameters, buffers, inputs); ``microbatch_values(i)``:
    what micro-batch ``i`` has of its own. ``sums`` holds gradients that still grow, ``results`` those outputs of the
    graph that are made here, by micro-batch.

    Lists of values that are received are emptied, so that their tensors die at their last use.
    """

    stage: Stage
    run_task: RunTask
    step_values: dict[str, Any]
    microbatch_values: Callable[[int], Mapping[str, Any]]
    sums: dict[str, Any] = field(default_factory=dict)
    results: dict[int, dict[OutputSpec, Any]] = field(default_factory=dict)
    _live: dict[int, dict[str, Any]] = field(default_factory=dict)

    def start(self) -> None:
        """Make what stays for the whole step."""
        self.step_values.update(self._run("start", {}))

    def forward(self, index: int, received: list[Any], keep: bool = True) -> list[Any]:
        """Run forward on micro-batch ``index``; returns what the next stage needs. ``keep`` values for backward."""
        values = {**self.microbatch_values(index), **_taken(self.stage.receives, received)}
        values.update(self._run("forward", values))
        sends = [values[name] for name in self.stage.sends]
        self.results[index] = {port: self._value(name, values) for port, name in self.stage.results}
        if keep:
            self._live[index] = _only(values, self.stage.tasks["backward"].inputs)
        return sends

    def backward(self, index: int, received: list[Any], whole: bool = True) -> list[Any]:
        """Run backward on a micro-batch (all of it, or up to the gradients that the stage before waits for)."""
        values = self._live.pop(index)
        values.update(_taken(self.stage.receives_back, received))
        values.update(self._run("backward" if whole else "input_grad", values))
        if not whole:
            self._live[index] = _only(values, self.stage.tasks["weight_grad"].inputs)
        self.results[index] |= {port: values[name] for port, name in self.stage.results_back}
        return [values[name] for name in self.stage.sends_back]

    def weight_grad(self, index: int) -> None:
        """Run what is left of the backward of a micro-batch."""
        self._run("weight_grad", self._live.pop(index))

    def end(self) -> None:
        """Let go of what all micro-batches shared."""
        self.step_values.clear()

    def finish(self) -> dict[str, Any]:
        """Return the gradients of the step, by name of parameter."""
        totals = self._run("finish", self.sums) | self.sums
        self.sums.clear()
        return {gradient.port.name: totals[gradient.total] for gradient in self.stage.gradients}

    def _run(self, name: str, values: dict[str, Any]) -> dict[str, Any]:
        task = self.stage.tasks[name]
        if task.is_empty:
            return {}
        arguments = [self._value(n, values) for n in task.inputs]
        arguments += [self.sums.pop(term, None) for term in task.sums]
        for dead in task.dies:
            del values[dead]
        results = list(self.run_task(task, arguments))
        count = len(task.outputs)
        self.sums.update(zip(task.sums, results[count:], strict=True))
        return dict(zip(task.outputs, results[:count], strict=True))

    def _value(self, name: str, values: Mapping[str, Any]) -> Any:
        return values[name] if name in values else self.step_values[name]


def _taken(names: Sequence[str], received: list[Any]) -> dict[str, Any]:
    """What was received, by name, taken out of its list."""
    values = dict(zip(names, received, strict=True))
    received.clear()
    return values


def _only(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}
