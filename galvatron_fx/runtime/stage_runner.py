"""Run the tasks of one pipeline stage and keep its values between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from galvatron_fx.ir.annotations import Port
from passes.split_stages import Stage, Task


@dataclass(frozen=True)
class Machine:
    """How values are made: on one rank, tensors; in the simulation of many, lists of tensors.

    ``run(task, arguments)`` runs a task's graph; the list of arguments may be emptied. ``add(total, term)`` adds.
    """

    run: Callable[[Task, list[Any]], Sequence[Any]]
    add: Callable[[Any, Any], Any]


@dataclass
class StageRunner:
    """One stage during one step.

    ``step_values``: what all micro-batches share, by name (parameters, buffers, inputs); ``microbatch_values(i)``:
    what micro-batch ``i`` has of its own. ``sums`` holds gradients that still grow, ``results`` those outputs of the
    graph that are made here, by micro-batch.
    """

    stage: Stage
    machine: Machine
    step_values: dict[str, Any]
    microbatch_values: Callable[[int], Mapping[str, Any]]
    sums: dict[str, Any] = field(default_factory=dict)
    results: dict[int, dict[Port, Any]] = field(default_factory=dict)
    _live: dict[int, dict[str, Any]] = field(default_factory=dict)

    def start(self) -> None:
        """Make what stays for the whole step."""
        self.step_values.update(self._run("start", {}))

    def forward(self, index: int, received: Sequence[Any], keep: bool = True) -> list[Any]:
        """Run forward on micro-batch ``index``; returns what the next stage needs. ``keep`` values for backward."""
        values = {**self.microbatch_values(index), **dict(zip(self.stage.receives, received, strict=True))}
        values.update(self._run("forward", values))
        sends = [values[name] for name in self.stage.sends]
        self.results[index] = {port: self._value(name, values) for port, name in self.stage.results}
        if keep:
            wanted = {*self.stage.tasks["backward"].inputs}
            self._live[index] = {name: value for name, value in values.items() if name in wanted}
        return sends

    def backward(self, index: int, received: Sequence[Any], whole: bool = True) -> list[Any]:
        """Run backward on a micro-batch (all of it, or up to the gradients that the stage before waits for)."""
        values = self._live[index]
        values.update(zip(self.stage.receives_back, received, strict=True))
        values.update(self._run("backward" if whole else "input_grad", values))
        sends = [values[name] for name in self.stage.sends_back]
        self._collect(values)
        if whole:
            del self._live[index]
        return sends

    def weight_grad(self, index: int) -> None:
        """Run what is left of the backward of a micro-batch."""
        values = self._live.pop(index)
        values.update(self._run("weight_grad", values))
        self._collect(values)

    def finish(self) -> dict[str, Any]:
        """Return the gradients of the step, by name of parameter."""
        made = self._run("finish", self.sums)
        return {g.port.name: made.get(g.total, self.sums.get(g.term)) for g in self.stage.gradients}

    def _run(self, name: str, values: dict[str, Any]) -> dict[str, Any]:
        task = self.stage.tasks[name]
        if not task.outputs:
            return {}
        arguments = [self._value(n, values) for n in task.inputs]
        for dead in task.dies:
            values.pop(dead, None)
        return dict(zip(task.outputs, self.machine.run(task, arguments), strict=True))

    def _value(self, name: str, values: Mapping[str, Any]) -> Any:
        return values[name] if name in values else self.step_values[name]

    def _collect(self, values: dict[str, Any]) -> None:
        for name in {gradient.term for gradient in self.stage.gradients}:
            if name in values:
                term = values.pop(name)
                self.sums[name] = self.machine.add(self.sums[name], term) if name in self.sums else term
