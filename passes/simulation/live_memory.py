"""Count the bytes alive while a lowered program runs, by running it on tensors without data.

The graphs are bound to a rank as code generation binds them. What stands for tensors has shapes, strides and buffers:
views share theirs and collectives copy as they do in a real run, so nothing is estimated but what operators allocate
inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from galvatron_fx.ir.errors import VerifierError
from galvatron_fx.ir.graph.bound_ops import BoundAxis, finished
from galvatron_fx.ir.graph.folded_gradients import fold_gradient, left_of
from galvatron_fx.ir.graph.further_rounds import FurtherRounds
from galvatron_fx.ir.graph.host_copies import arrived, from_host, to_host
from galvatron_fx.ir.graph.metadata import InputSpec, has_meta, meta_of
from galvatron_fx.ir.graph.op_call import target_run
from galvatron_fx.ir.graph.rewrite import copy_graph
from galvatron_fx.ir.plan.prediction import (
    ACTIVATIONS,
    BATCH,
    GATHERED,
    GRADIENTS,
    HOST,
    ON_HOST,
    PARAMETERS,
    PARAMETERS_ON_HOST,
    TRANSIENTS,
    MemoryUse,
    Moment,
    Storage,
    by_kind,
)
from passes.analysis.strided_values import Buffer, StridedTensor, evaluate
from passes.lowering.codegen import Codegen
from passes.lowering.lower_step import Lowered

_WEIGHTS = {PARAMETERS, GATHERED, PARAMETERS_ON_HOST}


def kind_of_port(port: InputSpec) -> str:
    """What the memory of a graph's input is."""
    if port.on_host:
        return PARAMETERS_ON_HOST
    return PARAMETERS if port.kind in ("param", "buffer") else BATCH


@dataclass(frozen=True)
class UpdateBytes:
    """What updates take of the device's memory where an optimizer is handed gradients, by name of their parameter.

    ``takes``: temporary bytes; ``comes``: bytes that come to the device: states, and the parameter where it lives on
    the host; ``groups``: of parameters in the order of their updates, those for which something comes, by which it
    comes at once.
    """

    takes: Callable[[str], int]
    comes: Callable[[str], int]
    groups: Callable[[Iterable[str]], list[list[str]]]


@dataclass
class _Peak:
    """The most bytes at a moment: those of what is ``alive``, and ``beside``; and the most on the host."""

    size_bytes: int = 0
    alive: Sequence[Storage] = ()
    beside: Mapping[str, int] = field(default_factory=dict)
    host_bytes: int = 0

    @property
    def by_kind(self) -> dict[str, int]:
        return {kind: size + self.beside.get(kind, 0) for kind, size in by_kind(self.alive).items()}


class LiveMemory:
    """Counts the bytes of storages as long as anyone holds them: by kind, now and when they were most, at each
    ``moment``, which is for the caller to tell.

    A storage may turn out later to be of another kind: what is counted says so then, also of the moment of the most.
    The host's memory is counted apart: it is most at another time.
    """

    def __init__(self) -> None:
        self.moment = Moment("")
        self._holders: Counter[Storage] = Counter()
        self._bytes = 0
        self._peaks: dict[Moment, _Peak] = {}
        self.host_bytes = 0

    @property
    def now(self) -> dict[str, int]:
        """Bytes alive."""
        return by_kind(self._holders)

    @property
    def most(self) -> dict[str, int]:
        """Bytes when most was alive."""
        return max(self._peaks.values(), key=lambda peak: peak.size_bytes, default=_Peak()).by_kind

    @property
    def moments(self) -> dict[Moment, dict[str, int]]:
        """Bytes when most was alive at each moment, and the most on the host by then."""
        return {moment: {**peak.by_kind, HOST: peak.host_bytes} for moment, peak in self._peaks.items()}

    def begin(self) -> list[Storage]:
        """Return what is alive, and look for the most that is from here on."""
        alive = list(self._holders)
        self._peaks = {self.moment: _Peak(self._bytes, alive, {}, self.host_bytes)}
        return alive

    def hold(self, storages: Iterable[Storage]) -> None:
        """Count one holder more of each."""
        for storage in storages:
            self._holders[storage] += 1
            if self._holders[storage] == 1:
                self._came(storage)

    def drop(self, storages: Iterable[Storage]) -> None:
        """Count one holder less of each."""
        for storage in storages:
            self._holders[storage] -= 1
            if not self._holders[storage]:
                del self._holders[storage]
                self._went(storage)

    def passing(self, more: Mapping[str, int], more_on_host: int = 0) -> None:
        """Note that so much more (or less) of each kind, and on the host, is alive for a moment than what is held."""
        peak = self._peaks.get(self.moment)
        if peak is None:
            peak = self._peaks[self.moment] = _Peak()
        peak.host_bytes = max(peak.host_bytes, self.host_bytes + more_on_host)
        total = self._bytes + sum(more.values())
        if total > peak.size_bytes:
            peak.size_bytes, peak.alive, peak.beside = total, list(self._holders), more

    def _came(self, storage: Storage) -> None:
        self._count(storage, storage.size_bytes)
        self.passing({})

    def _went(self, storage: Storage) -> None:
        self._count(storage, -storage.size_bytes)

    def _count(self, storage: Storage, size_bytes: int) -> None:
        if storage.kind in ON_HOST:
            self.host_bytes += size_bytes
        else:
            self._bytes += size_bytes


class GraphMemory(LiveMemory):
    """Runs lowered graphs on tensors without data; ``degrees``: ranks along each column of their layout;
    ``update_bytes``: of an optimizer that is handed gradients; while what came for some updates goes, the next comes.
    """

    def __init__(self, degrees: Sequence[int], update_bytes: UpdateBytes | None = None) -> None:
        super().__init__()
        self._degrees = degrees
        self._update_bytes = update_bytes
        self._states: list[Storage] = []  # that came, the last for the updates at hand
        self._started = ""  # the first parameter that the last of them came for
        self._coming: list[tuple[str, Storage]] = []  # the first last, with the first parameter that it comes for
        self._last: set[str] = set()  # of those that something comes for at once
        self._storages: dict[Buffer, Storage] = {}

    def use(self, lowered: Lowered) -> MemoryUse:
        """The most bytes alive beside what the optimizer has: parameters, inputs, gradients and outputs included; and
        what is alive when it updates, of which backward left the gradients.
        """
        halves = lowered.halves
        count = len(halves.result_ports)
        inputs = [StridedTensor.empty(meta_of(node).spec) for node in _placeholders(halves.forward)]
        for value, port in zip(inputs, halves.input_ports, strict=True):
            self.hold_values(value, kind_of_port(port))
        self.moment = Moment("forward")
        results = self.run(halves.forward, inputs, owned=set())
        self.label(results, ACTIVATIONS)
        saved, produced = results[count:], set(map(id, results[:count]))
        tangents = [StridedTensor.empty(meta_of(node).spec) for node in _placeholders(halves.backward)[len(saved) :]]
        self.moment = Moment("backward")
        self.hold_values([*tangents, *(value for value in saved if id(value) in produced)])
        borrowed = {i for i, source in enumerate(halves.saved_inputs) if source is not None}
        owned = set(range(len(saved) + len(tangents))) - borrowed
        self.label(self.run(halves.backward, [*saved, *tangents], owned), GRADIENTS)
        return MemoryUse.of(self.moments, self.now)

    def hold_values(self, value: Any, kind: str = TRANSIENTS) -> None:
        """Count one holder more of each tensor's storage, which is of ``kind`` if it is new."""
        for tensor in _tensors(value):
            new = Storage(tensor.buffer.size_bytes, kind)
            self.hold([self._storages.setdefault(tensor.buffer, new)])

    def drop_values(self, value: Any) -> None:
        """Count one holder less of each tensor's storage, of those that are held."""
        for tensor in _tensors(value):
            storage = self._storages.get(tensor.buffer)
            if storage is not None:
                self.drop([storage])
                if storage not in self._holders:
                    del self._storages[tensor.buffer]

    def label(self, value: Any, kind: str) -> None:
        """Say what new storages turned out to be: what outlives a graph is no transient."""
        for tensor in _tensors(value):
            storage = self._storages.get(tensor.buffer)
            if storage is not None and storage.kind == TRANSIENTS:
                storage.kind = kind

    def kind_of(self, tensor: StridedTensor) -> str:
        """The kind of a storage that is held."""
        return self._storages[tensor.buffer].kind

    def run(self, graph: fx.GraphModule, inputs: list[Any], owned: set[int]) -> list[Any]:
        """Run one graph; inputs in ``owned`` (already held) are dropped at their last use, outputs stay held."""
        values: dict[fx.Node, Any] = {}
        bound = self._bound(graph)
        folds = self._plan_updates(bound)
        last = _last_uses(bound)
        held: set[fx.Node] = set()
        for i, node in enumerate(bound.find_nodes(op="placeholder")):
            values[node] = inputs[i]
            if i in owned:
                held.add(node)
                if node not in last:
                    self.drop_values(values[node])
        for node in bound.nodes:
            if node.op == "placeholder":
                continue
            if has_meta(node):
                self.moment = Moment(self.moment.part, max(meta_of(node).block, 0))
            if node.op == "output":
                if folds:
                    self.drop(self._states)
                    self._states = []
                outs = node.args[0]
                return [values[n] if isinstance(n, fx.Node) else None for n in outs]
            if isinstance(node.target, FurtherRounds):
                values[node] = self._further_rounds(node, values)
            else:
                values[node] = self._evaluate(graph, node, values)
            if node.target is fold_gradient:
                self._update(str(node.args[1]))
            self.hold_values(values[node], self._new_kind(node, values))
            held.add(node)
            for used in {*node.all_input_nodes, node}:
                if used in held and last.get(used, node) is node:
                    self.drop_values(values.pop(used))
                    held.discard(used)
        raise AssertionError("the graph has no output")

    def _plan_updates(self, graph: fx.Graph) -> bool:
        """Look for what comes to the device while a graph runs; returns whether it updates anything."""
        names = [str(node.args[1]) for node in graph.nodes if node.target is fold_gradient]
        if self._update_bytes is not None and names:
            groups, comes = self._update_bytes.groups(names), self._update_bytes.comes
            self._coming = [(group[0], Storage(sum(map(comes, group)))) for group in reversed(groups)]
            self._last = {group[-1] for group in groups}
        return bool(names)

    def _update(self, name: str) -> None:
        """Update a parameter: where something came for that, what came for those before is gone then, and behind the
        last that it came for the next comes.
        """
        if not self._states and self._coming and self._coming[-1][0] == name:
            self._come()
        if self._started == name:
            self.drop(self._states[:-1])
            self._states = self._states[-1:]
        if self._update_bytes is not None:
            self.passing({TRANSIENTS: self._update_bytes.takes(name)})
        if name in self._last and self._coming:
            self._come()

    def _come(self) -> None:
        self._started, storage = self._coming.pop()
        self.hold([storage])
        self._states.append(storage)

    def _further_rounds(self, node: fx.Node, values: dict[fx.Node, Any]) -> list[Any]:
        """Run one round more, as any step may, and return the sums, to which it adds."""
        rounds: FurtherRounds = node.target  # type: ignore[assignment]
        inputs = [values[source] for source in rounds.inputs_of(node.args)]
        start = StridedTensor.empty(meta_of(_placeholders(rounds.body)[0]).spec)
        self.hold_values(start)
        self.drop_values([*self.run(rounds.body, [start, *inputs], owned=set()), start])
        return [values[total] for total in rounds.sums_of(node.args)]

    def _new_kind(self, node: fx.Node, values: dict[fx.Node, Any]) -> str:
        """On the host, if it is copied there; gathered, if it is made of parameters alone."""
        if node.target is to_host:
            return HOST
        keys = [tensor.buffer for used in node.all_input_nodes for tensor in _tensors(values[used])]
        from_weights = [key in self._storages and self._storages[key].kind in _WEIGHTS for key in keys]
        return GATHERED if from_weights and all(from_weights) else TRANSIENTS

    def _bound(self, graph: fx.GraphModule) -> fx.Graph:
        """A copy as the last rank of every axis runs it: collectives copy what their buffers need."""
        bound = copy_graph(graph.graph)
        Codegen([BoundAxis("", degree, degree - 1) for degree in self._degrees]).bind(bound)
        return bound

    def _evaluate(self, graph: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        if node.op == "get_attr":
            return StridedTensor.like(getattr(graph, str(node.target)))
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
        if node.target in (finished, arrived):
            return args[0]  # as they do; traced, they would make another
        if node.target is from_host and args[0] is None:
            return None  # a sum before its first term
        value = evaluate(left_of if node.target is fold_gradient else target_run(node), args, kwargs)
        _check(node, value)
        return value


def _check(node: fx.Node, value: Any) -> None:
    """Thunder's habit: recompute every shape after a transformation and compare."""
    if not has_meta(node):
        return
    shapes = [v.shape if isinstance(v, StridedTensor) else None for v in _outputs(value)]
    said = [spec.shape if spec is not None else None for spec in meta_of(node).specs]
    for position, (have, want) in enumerate(zip(shapes, said, strict=False)):
        if want is not None and have is not None and have != want:
            raise VerifierError(
                f"node '{node.name}' ({node.target}) makes shape {have} as output {position}, its facts say {want}: "
                f"the rule "
                f"that placed it, or its sizes in passes/sharding/local_args.py, is wrong"
            )


def _outputs(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _tensors(value: Any) -> list[StridedTensor]:
    return [v for v in _outputs(value) if isinstance(v, StridedTensor)]


def _placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _last_uses(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for used in node.all_input_nodes:
            last[used] = node
    return last
