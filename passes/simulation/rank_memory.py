"""The most bytes alive on one pipeline rank while it works through its order, replayed on the memory of its tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from galvatron_fx.ir.plan.prediction import ACTIVATIONS, GRADIENTS, HOST, ON_HOST, TRANSIENTS, Moment, Storage
from galvatron_fx.ir.plan.strategy import original_name
from galvatron_fx.ir.plan.transfers import Row
from passes.lowering.stages.split_stages import Stage
from passes.simulation.live_memory import LiveMemory
from passes.simulation.task_memory import StageMemory

# Parameters, inputs and whatever else stays alive beside the schedule: counted by whoever asks.
OUTSIDE = Storage(0)

Values = dict[str, Storage]


@dataclass
class StageReplay:
    """Does to live memory what :class:`galvatron_fx.runtime.stage_runner.StageRunner` does to tensors.

    ``stage`` and its ``memory``; ``place``: among the stages of the rank; values of the step, sums, results and what
    lives of each micro-batch are held.
    """

    stage: Stage
    memory: StageMemory
    live: LiveMemory
    place: int = 0
    step_values: Values = field(default_factory=dict)
    sums: Values = field(default_factory=dict)
    results: list[Storage] = field(default_factory=list)
    _live: dict[int, Values] = field(default_factory=dict)

    def start(self) -> None:
        """Make what stays for the whole step."""
        self.step_values = self._run("start", {})

    def forward(self, index: int, received: Sequence[Storage]) -> list[Storage]:
        """Run forward; takes over what was received, returns what is sent."""
        values = dict(zip(self.stage.receives, received, strict=True))
        values |= self._run("forward", values)
        sends = self._held(values, self.stage.sends)
        self.results += self._held(values, [name for _, name in self.stage.results])
        self._live[index] = self._only(values, self.stage.tasks["backward"].inputs)
        return sends

    def backward(self, index: int, received: Sequence[Storage], whole: bool) -> list[Storage]:
        """Run backward or its first half; takes over what was received, returns what is sent."""
        values = self._live.pop(index) | dict(zip(self.stage.receives_back, received, strict=True))
        values |= self._run("backward" if whole else "input_grad", values)
        sends = self._held(values, self.stage.sends_back)
        self.results += self._held(values, [name for _, name in self.stage.results_back])
        self._live[index] = self._only(values, () if whole else self.stage.tasks["weight_grad"].inputs)
        return sends

    def weight_grad(self, index: int) -> None:
        """Run what is left of backward."""
        values = self._live.pop(index)
        self._only(values | self._run("weight_grad", values), ())

    def end(self) -> None:
        """Let go of what all micro-batches shared."""
        self.live.drop(self.step_values.values())

    def finish(self) -> dict[str, Storage]:
        """The gradients by name of parameter, each held."""
        storages = self._run("finish", self.sums) | self.sums
        gradients = {gradient.port.name: storages[gradient.total] for gradient in self.stage.gradients}
        self.live.hold(gradients.values())
        self.live.drop(storages.values())
        return gradients

    def ready(self, names: Sequence[str], values: Sequence[Storage]) -> list[Storage]:
        """What is really sent of values that are held: of those that are not contiguous, copies."""
        strided = {name for effect in self.memory.tasks.values() for name in effect.strided}
        sizes = {name: self.stage.specs[name].size_bytes for name in names}
        ready = [Storage(sizes[n]) if n in strided else value for n, value in zip(names, values, strict=True)]
        self.live.hold(ready)
        self.live.drop(values)
        return ready

    def _run(self, name: str, values: Values) -> Values:
        """Run a task; what dies in it is taken out of ``values``, what it returns is held."""
        task = self.stage.tasks[name]
        if task.is_empty:
            return {}
        is_added = any(term in self.sums for term in task.sums)
        effect = self.memory.tasks[name, is_added]
        for block, peak in effect.peaks.items():
            self.live.moment = Moment((self.place, name, is_added), block)
            self.live.passing({kind: size for kind, size in peak.items() if kind != HOST}, peak[HOST])
        self.live.moment = Moment((self.place, name))
        fresh = [Storage(size, kind) for size, kind in effect.fresh]
        named = {**self.step_values, **values, **{f"sum {term}": total for term, total in self.sums.items()}}
        outputs = [fresh[key] if isinstance(key, int) else named.get(key, OUTSIDE) for key in effect.outputs]
        # What dies has died before the last output is there: the peak says what both came to.
        self.live.drop(values.pop(dead) for dead in task.dies)
        self.live.drop(self.sums.pop(term) for term in task.sums if term in self.sums)
        self.live.hold(outputs)
        count = len(task.outputs)
        self.sums |= dict(zip(task.sums, outputs[count:], strict=True))
        return dict(zip(task.outputs, outputs[:count], strict=True))

    def _held(self, values: Values, names: Sequence[str]) -> list[Storage]:
        storages = [values.get(name, self.step_values.get(name, OUTSIDE)) for name in names]
        self.live.hold(storages)
        return storages

    def _only(self, values: Values, names: Iterable[str]) -> Values:
        """Keep the named values and drop the others."""
        wanted = set(names)
        self.live.drop(value for name, value in values.items() if name not in wanted)
        return {name: value for name, value in values.items() if name in wanted}


@dataclass
class RankReplay:
    """Walks the order of one pipeline rank as :mod:`galvatron_fx.runtime.torch_pipeline` does.

    ``stages``: the rank's own, by number, in one live memory.
    """

    stages: Mapping[int, StageReplay]
    live: LiveMemory
    _activations: dict[tuple[int, int], list[Storage]] = field(default_factory=dict)
    _gradients: dict[tuple[int, int], list[Storage]] = field(default_factory=dict)
    _outgoing: dict[Row, list[Storage]] = field(default_factory=dict)
    _under_way: dict[tuple[int, str], list[Storage]] = field(default_factory=dict)
    _sent: set[Row] = field(default_factory=set)

    def run(self, order: Sequence[Row]) -> None:
        """Run all tasks but the last of each stage."""
        for stage in self.stages.values():
            stage.start()
        self._sent = {row for row in order if row[1].startswith("SEND")}
        for row in order:
            self._act(*row)
        for sent in self._under_way.values():
            self.live.drop(sent)
        for stage in self.stages.values():
            stage.end()

    def finish(self, shared: frozenset[str]) -> None:
        """Make the gradients, and add up those of parameters that several ranks hold copies of (``shared``)."""
        self.live.moment = Moment("finish")
        gradients: dict[str, Storage] = {}
        for stage in self.stages.values():
            for name, value in stage.finish().items():
                parameter = original_name(name)
                gradients[parameter] = self._replaced(gradients[parameter], value) if parameter in gradients else value
        for name in sorted(shared & gradients.keys()):
            gradients[name] = self._replaced(gradients[name])

    def _replaced(self, *old: Storage) -> Storage:
        """A new storage of the size, made of the old ones, which are dropped; from the host, one alone goes by way of
        the device.
        """
        on_host = old[0].kind in ON_HOST
        new = Storage(old[0].size_bytes, old[0].kind if on_host else GRADIENTS)
        if on_host and len(old) == 1:
            self.live.passing({GRADIENTS: new.size_bytes})
        self.live.hold([new])
        self.live.drop(old)
        return new

    def _act(self, index: int, kind: str, part: int) -> None:
        stage = self.stages[index]
        self.live.moment = Moment((stage.place, kind))
        if kind.startswith("RECV"):
            ahead = kind.endswith("F")
            names = stage.stage.receives if ahead else stage.stage.receives_back
            what = ACTIVATIONS if ahead else TRANSIENTS
            buffers = [Storage(stage.stage.specs[name].size_bytes, what) for name in names]
            self.live.hold(buffers)
            (self._activations if ahead else self._gradients)[index, part] = buffers
        elif kind.startswith("SEND"):
            names = stage.stage.sends if kind.endswith("F") else stage.stage.sends_back
            self.live.drop(self._under_way.pop((index, kind), []))
            self._under_way[index, kind] = stage.ready(names, self._outgoing.pop((index, kind, part)))
        elif kind == "F":
            sends = stage.forward(part, self._activations.pop((index, part), []))
            self._pass(self._activations, (index, "SEND_F", part), index + 1, sends)
        elif kind == "W":
            stage.weight_grad(part)
        else:
            sends = stage.backward(part, self._gradients.pop((index, part), []), whole=kind == "B")
            self._pass(self._gradients, (index, "SEND_B", part), index - 1, sends)

    def _pass(self, arrived: dict[tuple[int, int], list[Storage]], send: Row, to: int, values: list[Storage]) -> None:
        """To a neighbour on this rank at once, to another when it is sent; what is not sent is let go of."""
        if to in self.stages:
            arrived[to, send[2]] = values
        elif send in self._sent:
            self._outgoing[send] = values
        else:
            self.live.drop(values)
