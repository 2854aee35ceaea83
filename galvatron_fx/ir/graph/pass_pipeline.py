"""Passes in order: each is run, verified, timed and shown, with passes of the user's between them.

A :class:`PassPipeline` says which passes there are and what a graph is after each; :class:`PassControl` is what one
compilation asks of all pipelines that it goes through.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol, TypeVar

from torch import fx

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.pass_dump import OnPass
from galvatron_fx.ir.graph.verifier import verify
from galvatron_fx.ir.plan.text_table import render

__all__ = ["GraphPass", "PassControl", "PassPipeline", "PassRun", "run_table"]

T = TypeVar("T")
Verify = Callable[[fx.GraphModule, str, str], None]
Parts = Mapping[str, fx.GraphModule]


class GraphPass(Protocol):
    """A pass over a graph: a frozen dataclass with its options as fields."""

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Return the rewritten graph."""
        ...


@dataclass(frozen=True)
class PassRun:
    """One run of a pass: ``seconds`` of its own, ``verify_s`` of the check behind it, and how many nodes there were.

    ``name``: that of the pass, and of the part of the program it ran on: "BundleCollectives.forward".
    """

    name: str
    seconds: float
    verify_s: float
    nodes_before: int
    nodes_after: int


@dataclass(frozen=True)
class PassControl:
    """What a compilation asks of every pipeline.

    ``on_pass``: sees the name of each pass and its graph; ``inserted``: passes to run behind the pass of a name;
    ``runs``: what has run so far; ``verifies``: whether graphs are checked, which what only predicts leaves to what
    runs; ``fuses``: whether what runs the graphs fuses operators (:mod:`passes.analysis.fused_values`).
    """

    on_pass: OnPass | None = None
    inserted: Mapping[str, tuple[GraphPass, ...]] = field(default_factory=dict)
    runs: list[PassRun] = field(default_factory=list, compare=False, repr=False)
    verifies: bool = True
    fuses: bool = False


@dataclass(frozen=True)
class PassPipeline:
    """A list of passes: ``stages`` has what the graph is after each (a key of ``verifier.STAGES``), in order.

    A stage of None is that of a pass that decides something and leaves the graph alone. ``verify`` checks the graph
    after every other one.
    """

    name: str
    stages: Mapping[type, str | None]
    verify: Verify = verify

    @property
    def names(self) -> list[str]:
        """The passes behind which others can be inserted: those that leave a graph, but for the one that prices it."""
        return [cls.__name__ for cls, stage in self.stages.items() if stage not in (None, "annotated")]

    def under(self, control: PassControl, part: str = "") -> PipelineRun:
        """Begin a run of the pipeline; ``part``: which part of the program it is of, if not the whole."""
        return PipelineRun(self, control, part)

    def __str__(self) -> str:
        """Return a table of plain text: what each pass rewrites, as its docstring says, and the stage after it."""
        rows = [(cls.__name__, _rewrite_of(cls), stage or "") for cls, stage in self.stages.items()]
        return "\n".join([self.name, *render(["pass", "before -> after", "stage"], rows, numbers_from=3)])


@dataclass(frozen=True)
class PipelineRun:
    """A run of ``pipeline`` over the ``part`` of a program."""

    pipeline: PassPipeline
    control: PassControl
    part: str = ""

    def __call__(self, step: GraphPass, graph: fx.GraphModule) -> fx.GraphModule:
        """Return what ``step``, a pass of the pipeline, makes of ``graph``, and what inserted passes make of that.

        Raises VerifierError where the result is not well formed.
        """
        return self.first(step, lambda: step.run(graph), len(graph.graph.nodes))

    def first(self, step: Any, run: Callable[[], fx.GraphModule], nodes_before: int = 0) -> fx.GraphModule:
        """As a call, for a pass that makes the graph out of something else: ``run`` is its."""
        graph = self.make(step, run, _whole, nodes_before)
        for extra in self.control.inserted.get(type(step).__name__, ()):
            graph = self._insert(extra, type(step), graph)
        return graph

    def cut(self, step: Any, graph: fx.GraphModule, parts_of: Callable[[Any], Parts]) -> Any:
        """Return what ``step`` makes of ``graph``: several graphs, which ``parts_of`` finds by name in the result.

        Inserted passes run on each of them, and have to rewrite it in place.
        """
        return self.cut_by(step, lambda: step.run(graph), parts_of, len(graph.graph.nodes))

    def cut_by(self, step: Any, run: Callable[[], T], parts_of: Callable[[T], Parts], nodes_before: int = 0) -> T:
        """As :meth:`cut`, for a pass that makes some of the graphs at a time: ``run`` is its."""
        result = self.make(step, run, parts_of, nodes_before)
        for extra in self.control.inserted.get(type(step).__name__, ()):
            for part, piece in parts_of(result).items():
                self.pipeline.under(self.control, _joined(self.part, part)).rewrite(extra, type(step), piece)
        return result

    def in_place(self, step: GraphPass, graph: fx.GraphModule) -> None:
        """Run ``step`` on a graph that is held elsewhere, and so has to be rewritten in place."""
        self.make(step, lambda: step.run(graph), _whole, len(graph.graph.nodes))
        for extra in self.control.inserted.get(type(step).__name__, ()):
            self.rewrite(extra, type(step), graph)

    def rewrite(self, step: GraphPass, after: type, graph: fx.GraphModule) -> None:
        """Run an inserted pass likewise. Raises InputError where it returns another graph."""
        if self._insert(step, after, graph) is not graph:
            raise InputError(
                f"pass {_title(step)} returned another graph: behind {after.__name__} a pass has to rewrite the graph "
                f"it is given and return that"
            )

    def decide(self, step: Any, graph: fx.GraphModule) -> Any:
        """Return what ``step``, which leaves ``graph`` alone, decides about it."""
        return self.make(step, lambda: step.run(graph), lambda _: {}, len(graph.graph.nodes))

    def make(self, step: Any, run: Callable[[], T], parts_of: Callable[[T], Parts], nodes_before: int = 0) -> T:
        """Return what ``run``, which is ``step``'s, returns; each graph in it is verified and shown."""
        began = perf_counter()
        result = run()
        seconds = perf_counter() - began
        self._done(type(step), self.pipeline.stages[type(step)], parts_of(result), seconds, nodes_before)
        return result

    def _insert(self, step: GraphPass, after: type, graph: fx.GraphModule) -> fx.GraphModule:
        before = len(graph.graph.nodes)
        began = perf_counter()
        try:
            result = step.run(graph)
        except Exception as error:
            error.add_note(f"in pass {_title(step)}, which was inserted behind {after.__name__}")
            raise
        seconds = perf_counter() - began
        if not isinstance(result, fx.GraphModule):
            raise InputError(f"pass {_title(step)} returned {result!r}: let run(graph) return the graph")
        self._done(type(step), self.pipeline.stages[after], {"": result}, seconds, before)
        return result

    def _done(self, cls: type, stage: str | None, parts: Parts, seconds: float, nodes_before: int) -> None:
        began = perf_counter()
        for part, graph in parts.items() if stage is not None and self.control.verifies else ():
            self.pipeline.verify(graph, stage, _joined(cls.__name__, self.part, part))  # type: ignore[arg-type]
        verify_s = perf_counter() - began
        nodes_after = sum(len(graph.graph.nodes) for graph in parts.values()) or nodes_before
        name = _joined(cls.__name__, self.part)
        self.control.runs.append(PassRun(name, seconds, verify_s, nodes_before, nodes_after))
        if self.control.on_pass is not None:
            for part, graph in parts.items():
                self.control.on_pass(_joined(cls.__name__, self.part, part), graph)


def run_table(runs: Iterable[PassRun]) -> str:
    """Return a table of plain text: each pass in the order of its first run, all of its runs summed up."""
    totals: dict[str, list[PassRun]] = {}
    for run in runs:
        totals.setdefault(run.name.partition(".")[0], []).append(run)
    rows = [
        (
            name,
            str(len(each)),
            f"{sum(run.seconds for run in each):.3f}",
            f"{sum(run.verify_s for run in each):.3f}",
            str(sum(run.nodes_before for run in each)),
            str(sum(run.nodes_after for run in each)),
        )
        for name, each in totals.items()
    ]
    headings = ["pass", "runs", "seconds", "verifying", "nodes before", "after"]
    return "\n".join(render(headings, rows, numbers_from=1))


def _whole(graph: fx.GraphModule) -> Parts:
    return {"": graph}


def _joined(*names: str) -> str:
    return ".".join(name for name in names if name)


def _title(step: object) -> str:
    return type(step).__name__


def _rewrite_of(cls: type) -> str:
    """The first sentence behind "Rewrite:" in the docstring of a pass, else its first line."""
    text = (cls.__doc__ or "").split("Rewrite:")
    paragraph = text[1].split("\n\n")[0] if len(text) > 1 else text[0].partition("\n")[0]
    sentence = re.split(r"\.\s+(?=[A-Z])", re.sub(r"\s+", " ", paragraph).strip())[0]
    return re.sub(r":\w+:`(\w+)`", r"\1", sentence).replace("``", "").removesuffix(".")
