"""Tell whether every step of a model whose forward changes attributes is the step that was traced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from galvatron_fx.ir.errors import CaptureError, GalvatronError
from galvatron_fx.ir.torch_compat.tracing import TRACED, FakeTensor, export_joint, new_fake_mode
from passes.frontend.capture.fake_model import ROOT, FlatModel, fake_weights
from passes.frontend.capture.flat_inputs import flatten
from passes.frontend.capture.inner_state import InnerState, is_generator
from passes.frontend.capture.module_state import MISSING, Change, ModuleState, quoted
from passes.frontend.capture.trace_again import TraceAgain
from passes.frontend.capture.trace_errors import explained
from passes.frontend.capture.watched_numbers import watch
from passes.frontend.traceable_functions import traceable_functions

if TYPE_CHECKING:
    pass

aten = torch.ops.aten

_FAR = 10**6  # added to what counts: what depends on it shows then
_ONLY_THE_FIRST = ". Where only the first forward differs (it makes a cache, say), run the model once before compile"
_MOST_ELEMENTS = 2**20  # of constants that are compared by value
_ALIASES = (aten.detach.default, aten.alias.default, aten.clone.default, aten.lift_fresh_copy.default)
# What takes a shape, and no value, from a tensor.
_SHAPED = (
    *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default),
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default),
)


@dataclass(frozen=True)
class Steady:
    """What a model does to its attributes beside its buffers.

    ``carried``: plain attributes that a step takes as the step before left them, so that they have to be buffers;
    ``dropped``: what is stored or counted, and taken by no step; ``unknown``: what every step changes, and takes as far
    as these few steps show.
    """

    carried: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def steady_state(flat: FlatModel) -> Steady:
    """Trace some steps one after the other, each on the attributes that the one before left, and compare them.

    They are one program where they make the same of inputs, weights and the values that buffers have at their start. A
    cache is as good as what it is made of, unless that is an input, a weight or a random number. Raises CaptureError
    naming the attributes by which steps differ.
    """
    model, mode = flat.module, new_fake_mode()
    steps = _Steps(model, flat.inputs, flat.policy)
    steps.masked_because, steps.input_reads = flat.masked_because, flat.input_reads
    steps.is_told_eager, steps.answers_asks = flat.is_told_eager, flat.answers_asks
    with traceable_functions(), fake_weights(model, mode, flat.policy):
        try:
            graph = export_joint(steps, steps.fake_arguments(flat.inputs.shapes, mode), mode)
        except (TraceAgain, GalvatronError):
            raise
        except Exception as error:
            raise explained(error, model) from None
    return _Comparison(graph, steps).result()


@dataclass
class _Step:
    """What one step made and left, as positions among the outputs of the trace, by qualified name.

    ``slots``: buffers and parameters; ``others``: tensors that were not there at the start; ``changes``: by this step.
    """

    outputs: Sequence[int] = ()
    constants: list[Any] = field(default_factory=list)
    slots: dict[str, int] = field(default_factory=dict)
    others: dict[str, int] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)


class _Steps(FlatModel):
    """Runs the model two times, and a third one where something still moves."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.steps: list[_Step] = []
        self.asked: list[str] = []
        self._watched: dict[str, list[None]] = {}
        self._given: list[Tensor] = []
        with self.observed() as start:
            before = start
            for _ in range(2):
                before = self._step(tensors, start, before)
            if self.moving:
                self._push(self.moving)
                self._step(tensors, start, start.later())
        return tuple(self._given)

    @property
    def moving(self) -> list[Change]:
        """What is no tensor and was changed by the second step, too."""
        pairs = [(change, (change.before, change.after)) for change in self.steps[1].changes]
        return [change for change, pair in pairs if not any(isinstance(value, Tensor) for value in pair)]

    @property
    def counted(self) -> list[str]:
        """Numbers that every step changes."""
        return list(self._watched)

    @property
    def growing(self) -> list[str]:
        """Containers in which the second step put something more."""
        added = [c for c in self.steps[1].changes if c.before is MISSING and not c.place.is_attribute]
        return list(dict.fromkeys(c.path[: c.path.rindex(_way(c))] for c in added if not c.place.table))

    def _step(self, tensors: Sequence[Tensor], start: ModuleState, before: ModuleState) -> ModuleState:
        leaves, _ = flatten(self.called(tensors))
        self.asked = [path for path, times in self._watched.items() if times]
        step = _Step(self._give(leaf for leaf in leaves if isinstance(leaf, Tensor)))
        step.constants = [leaf for leaf in leaves if isinstance(leaf, (str, int, float))]
        now = start.later()
        step.changes = before.changes_to(now)
        new = {change.path for change in start.changes_to(now)}
        for path, (place, value) in now.values.items():
            if not isinstance(value, Tensor):
                continue
            if place.table == "_parameters":
                (step.slots[path],) = self._give([value])
            elif place.table == "_buffers" and _is_like(value, start.values.get(path)):
                (step.slots[path],) = self._give([value])
                place.put(self._given[-1].clone())
            elif path in new:
                (step.others[path],) = self._give([value])
                if not isinstance(place.holder, (tuple, set)):
                    place.put(self._given[-1].clone())
        self._aliases.follow()
        self.steps.append(step)
        return start.later()

    def _give(self, tensors: Iterable[Tensor]) -> range:
        first = len(self._given)
        self._given += [tensor.detach().clone() for tensor in tensors]
        return range(first, len(self._given))

    def _push(self, moving: Sequence[Change]) -> None:
        """Let numbers that count be far on, and watched."""
        for change in moving:
            if type(change.after) in (int, float) and not isinstance(change.place.holder, (tuple, set)):
                self._watched[change.path] = []
                change.place.put(watch(change.after + _FAR, self._watched[change.path]))


def _is_like(value: Tensor, start: Any) -> bool:
    other = start[1] if start is not None else None
    return isinstance(other, Tensor) and value.shape == other.shape and value.dtype == other.dtype


def _way(change: Change) -> str:
    """How the last step of a path into a container begins."""
    return next((mark for mark in (" with ", "[", ".") if mark in change.path[len(change.place.name) :]), change.path)


class _Comparison:
    """Numbers what each step computes of inputs, weights and the buffers at its start; equal for equal programs."""

    def __init__(self, graph: fx.GraphModule, steps: _Steps, sees_caches: bool = False) -> None:
        """``sees_caches``: whether buffers into which a step writes what is fixed are what was written, afterwards."""
        self._graph, self._sees_caches = graph, sees_caches
        self._nodes = list(graph.graph.nodes)
        self._position = {node: at for at, node in enumerate(self._nodes)}
        self._steps = steps
        self._values = _plain_outputs(graph)
        self._keys: dict[Any, int] = {}
        self._number: dict[fx.Node, int] = {}
        self._fixed: dict[fx.Node, bool] = {}
        self._writes: dict[tuple[int, Any], int] = {}
        self._read: dict[str, None] = {}
        first: dict[int, str] = {}
        self._first_name = {name: first.setdefault(id(x), name) for name, x in _tensors(steps.module)}

    def result(self) -> Steady:
        """What is carried and what is dropped; raises CaptureError where steps differ."""
        steps = self._steps.steps
        self._take_inputs()
        programs = []
        done = -1
        for at, step in enumerate(steps):
            left = (*step.outputs, *step.slots.values(), *step.others.values())
            border = max((self._position[self._values[i]] for i in left), default=done)
            self._number_nodes(self._nodes[done + 1 : border + 1], self._entering(steps[at - 1]) if at else {})
            programs.append([self._number[self._values[i]] for i in (*step.outputs, *step.slots.values())])
            done = border
        same = all(program == programs[0] for program in programs)
        if same and all(step.constants == steps[0].constants for step in steps):
            return self._steady()
        if not self._sees_caches and any(self._is_cache(self._values[i]) for i in steps[0].slots.values()):
            return _Comparison(self._graph, self._steps, sees_caches=True).result()
        return self._unsteady()

    # ---- numbers ----

    def _take_inputs(self) -> None:
        """Number placeholders; weights and buffers that no step changes, and that nobody trains, are fixed."""
        left = [(path, self._values[i]) for path, i in self._steps.steps[-1].slots.items()]
        changed = {self._first_name.get(path) for path, node in left if _source(node).op != "placeholder"}
        frozen = {self._first_name[name] for name, x in _tensors(self._steps.module) if not x.requires_grad}
        for node in self._graph.graph.find_nodes(op="placeholder"):
            target = getattr(node.meta["desc"], "target", None)
            name = target.removeprefix(f"{ROOT}.") if target else node.name
            name = self._first_name.get(name, name)
            self._number[node] = self._numbered(("placeholder", name))
            self._fixed[node] = name in frozen and name not in changed

    def _entering(self, before: _Step) -> dict[fx.Node, int]:
        """What a step finds of the one before, with the number of what lay there at the start."""
        numbers: dict[fx.Node, int] = {}
        for path, i in before.slots.items():
            is_cache = self._sees_caches and self._is_cache(self._values[i])
            for node in (self._values[i], _source(self._values[i])):
                if node.op != "placeholder" and not is_cache:
                    numbers[node] = self._numbered(("placeholder", self._first_name.get(path, path)))
        for path, i in before.others.items():
            for node in (self._values[i], _source(self._values[i])):
                if node not in numbers and not self._fixed[node]:
                    numbers[node] = self._numbered(("carried", path))
        return numbers

    def _number_nodes(self, nodes: Sequence[fx.Node], entering: dict[fx.Node, int]) -> None:
        carried = {self._keys[key]: key[1] for key in self._keys if key[0] == "carried"}
        random = count()
        for node in nodes:
            if node.op == "placeholder":
                continue
            number = {n: self._number_in(n, entering) for n in node.all_input_nodes}
            self._read |= dict.fromkeys(carried[n] for n in number.values() if n in carried)
            frozen = repr(fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}"))  # noqa: B023
            is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            key = (node.target, frozen, next(random) if is_random else None)
            if node.op == "get_attr":
                key = ("constant", *_constant(getattr(self._graph, str(node.target))))
            copied = _copied(node)
            alias = number[copied] if copied is not None else self._read_back(node, number)
            self._number[node] = self._numbered(key) if alias is None else alias
            if node.target is aten.slice_scatter.default:
                self._writes[self._number[node], node.args[2:]] = number[node.args[1]]  # type: ignore[index]
            free = node.op == "get_attr" or node.target in _SHAPED
            made_of = number if copied is None else [copied]
            self._fixed[node] = free or (not is_random and all(self._fixed[n] for n in made_of))

    def _is_cache(self, left: fx.Node) -> bool:
        """Whether what a step left in a buffer is that buffer with something fixed written into a part of it."""
        write = _source(left)
        return write.target is aten.slice_scatter.default and self._fixed[_source(write.args[1])]  # type: ignore[arg-type]

    def _read_back(self, node: fx.Node, number: dict[fx.Node, int]) -> int | None:
        """The number of what was written into a part of a tensor, where a node reads that part."""
        if node.target is not aten.slice.Tensor:
            return None
        return self._writes.get((number[node.args[0]], node.args[1:]))  # type: ignore[index]

    def _number_in(self, node: fx.Node, entering: dict[fx.Node, int]) -> int:
        """The number of a value in a step: of what it finds, or copies, of the step before, or of what it makes."""
        copied = node
        while copied not in entering and (source := _copied(copied)) is not None:
            copied = source
        return entering.get(copied, self._number[node])

    def _numbered(self, key: Any) -> int:
        return self._keys.setdefault(key, len(self._keys))

    # ---- what it means ----

    def _steady(self) -> Steady:
        if self._steps.growing:
            raise CaptureError(
                f"every forward puts more into {quoted(self._steps.growing)}, which the compiled model cannot follow: "
                f"return it from forward, or empty it at the start of forward"
            )
        if self._steps.asked:
            raise self._frozen(self._steps.asked)
        stored = [c.path for c in self._steps.steps[0].changes if isinstance(c.after, Tensor) and self._is_loose(c)]
        unknown = [change.path for change in self._steps.moving if change.path not in self._steps.counted]
        return Steady(dropped=(*stored, *self._steps.counted), unknown=tuple(unknown))

    def _is_loose(self, change: Change) -> bool:
        """Whether what a step stored is taken by nobody after it."""
        at = self._steps.steps[0].others.get(change.path)
        return at is not None and change.path not in self._read and not self._fixed[self._values[at]]

    def _unsteady(self) -> Steady:
        changes = {change.path: change for change in self._steps.steps[0].changes}
        read = [path for path in self._read if path in changes]
        if not read:
            read = [path for path, c in changes.items() if c.keeps_spec and c.place.is_attribute]
        if read and all(changes[path].keeps_spec and changes[path].place.is_attribute for path in read):
            return Steady(carried=tuple(read))
        if read:
            raise CaptureError(
                f"forward reads {quoted(read)} as the forward before left it, and the first finds something else "
                f"there: register a buffer that has its shape from the start (register_buffer(name, "
                f"torch.zeros(...), persistent=False)), or pass it as an input and return it{_ONLY_THE_FIRST}"
            )
        plain = [path for path, c in changes.items() if not isinstance(c.after, Tensor) and not _is_of_trace(path)]
        raise self._frozen([c.path for c in self._steps.moving] or plain or list(changes))

    def _frozen(self, paths: Sequence[str]) -> CaptureError:
        changes = {change.path: change for change in self._steps.steps[0].changes}
        change = changes.get(paths[0])
        if change is not None and isinstance(change.after, InnerState) and is_generator(change.after.value):
            return CaptureError(
                f"what forward computes depends on random numbers that it draws from {quoted(paths)}: tracing would "
                f"freeze them. Draw them from torch (torch.rand), pass them to forward as an input, or turn off what "
                f"draws them (config.apply_spec_augment = False of speech models)"
            )
        is_shown = change is not None and not isinstance(change.after, (Tensor, InnerState))
        values = f" ({_text(change)})" if change is not None and is_shown else ""
        return CaptureError(
            f"what forward computes depends on {quoted(paths)}, which forward itself changes{values}: tracing would "
            f"freeze it. Keep it in a buffer (register_buffer(name, torch.tensor(...)) in __init__, changed by "
            f"tensor operators), or pass it to forward as an input{_ONLY_THE_FIRST}"
        )


def _is_of_trace(path: str) -> bool:
    """Whether a library noted there what traced tensors are: it has an entry for each class of them."""
    return any(f"[{kind!r}]" in path for kind in TRACED if kind is not Tensor)


def _text(change: Change) -> str:
    before = "not there" if change.before is MISSING else repr(change.before)
    return f"{before} before the first, {change.after!r} after it"


def _plain_outputs(graph: fx.GraphModule) -> list[fx.Node]:
    """What the traced function returned, without the inputs that it changed."""
    output = graph.graph.output_node()
    pairs = zip(output.meta["desc"], output.args[0], strict=True)  # type: ignore[arg-type]
    plain = {desc.idx: node for desc, node in pairs if type(desc).__name__ == "PlainAOTOutput"}
    return [plain[i] for i in range(len(plain))]


def _copied(node: fx.Node) -> fx.Node | None:
    """What a node copies, or shows under another name or as a whole; None for others."""
    if node.target in _ALIASES or (node.target is aten.slice.Tensor and _is_whole(node)):
        return node.args[0]  # type: ignore[return-value]
    if node.target is aten.copy.default:
        value, source = node.meta["val"], node.args[1]
        alike = isinstance(source, fx.Node) and _is_like(source.meta["val"], (None, value))
        return source if alike else None  # type: ignore[return-value]
    return None


def _is_whole(part: fx.Node) -> bool:
    """Whether a slice has all of what it is taken from, in order."""
    source, step = part.args[0], part.args[4] if len(part.args) > 4 else 1
    is_all = isinstance(source, fx.Node) and step == 1 and source.meta["val"].shape == part.meta["val"].shape
    return bool(is_all)


def _source(node: fx.Node) -> fx.Node:
    """What a node is a copy of."""
    while (copied := _copied(node)) is not None:
        node = copied
    return node


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _constant(tensor: Tensor) -> tuple[Any, ...]:
    if isinstance(tensor, FakeTensor) or tensor.is_meta or tensor.numel() > _MOST_ELEMENTS:
        return (id(tensor),)
    return (tuple(tensor.shape), tensor.dtype, str(tensor.tolist()))
