"""What runs a rank's graphs: their Python code as it is, or kernels compiled by inductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, fx

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.kernels.bindings import with_fast_calls
from galvatron_fx.ir.torch_compat.graphs import (
    box_arguments,
    compile_functional,
    missing_compiler,
    without_autograd,
    written,
)
from galvatron_fx.runtime.profiled import when_profiled, with_ranges
from galvatron_fx.runtime.regions import Region, split_regions

# Takes its arguments in one list, which it empties, so that every tensor dies at its last use.
Boxed = Callable[[list[Any]], Sequence[Any]]

# Operators: a shorter region gains nothing from being compiled.
_LEAST_OPERATORS = 6


class Backend(Protocol):
    """Makes the graphs of one module callable; ``fuses``: whether operators that go through their elements one by one
    are computed in the kernels of those before or behind them.
    """

    fuses: ClassVar[bool]

    def compile(self, graph: fx.GraphModule) -> Boxed:
        """Return ``graph`` as something to call."""
        ...


@dataclass(frozen=True)
class Eager:
    """Runs a graph's operators one by one; in the traces of a profiler, by blocks and collectives."""

    fuses: ClassVar[bool] = False

    def compile(self, graph: fx.GraphModule) -> Boxed:
        """Return generated Python code."""

        def code(of: fx.GraphModule) -> Boxed:
            return without_autograd(box_arguments(with_fast_calls(of)))

        return when_profiled(code(graph), lambda: code(with_ranges(graph)))


@dataclass(frozen=True)
class Inductor:
    """Compiles each distinct region of the graphs once, when it is first called and the strides of inputs are known.

    Regions are what one layer block does in one go, so compiling takes as long for many equal layers as for one, and
    equal stages share what they run. Inductor fuses inside of them.
    """

    fuses: ClassVar[bool] = True
    compiled: dict[Any, Boxed] = field(default_factory=dict)

    def compile(self, graph: fx.GraphModule) -> Boxed:
        """Return a function that runs the regions in order."""
        return _Regions(graph, self.compiled)


BACKENDS: dict[str, Callable[[], Backend]] = {"eager": Eager, "inductor": Inductor}


def new_backend(name: str, device_type: str) -> Backend:
    """Return the backend called ``name``. Raises InputError for others, and where it lacks a compiler."""
    if not isinstance(name, str) or name not in BACKENDS:
        raise InputError(f"backend is {name!r}: use one of {', '.join(map(repr, BACKENDS))}")
    missing = missing_compiler(device_type) if name == "inductor" else None
    if missing is not None:
        raise InputError(f"backend='inductor' needs {missing} for {device_type}: install it, or use backend='eager'")
    return BACKENDS[name]()


def compile_graph(graph: fx.GraphModule, backend: Backend) -> Boxed:
    """Make a bound graph callable: it takes its arguments in one list, which it empties."""
    return backend.compile(graph)


@dataclass(frozen=True)
class _Step:
    """One region: where its inputs lie among the values, which of them die there, and where its outputs go."""

    call: Boxed
    inputs: tuple[int, ...]
    dies: tuple[int, ...]
    outputs: tuple[int, ...]


class _Regions:
    """The regions of a graph, called in order; every value has a place and is dropped at its last use."""

    def __init__(self, graph: fx.GraphModule, compiled: dict[Any, Boxed]) -> None:
        regions = split_regions(graph)
        place = {node: i for i, node in enumerate(graph.graph.nodes)}
        self._size = len(place)
        self._given = [place[node] for node in graph.graph.find_nodes(op="placeholder")]
        constants = graph.graph.find_nodes(op="get_attr")
        self._constants = [(place[node], getattr(graph, str(node.target))) for node in constants]
        returned: list[Any] = list(graph.graph.output_node().args[0])  # type: ignore[arg-type]
        self._returned = [place[node] if isinstance(node, fx.Node) else None for node in returned]
        last = {node: i for i, region in enumerate(regions) for node in region.inputs}
        leaves = {node for node in returned if isinstance(node, fx.Node)}
        self._unused = [place[n] for n in graph.graph.find_nodes(op="placeholder") if n not in last and n not in leaves]
        self._steps = [
            _Step(
                _boxed(region, compiled),
                tuple(place[node] for node in region.inputs),
                tuple(place[node] for node in region.inputs if last[node] == i and node not in leaves),
                tuple(place[node] for node in region.outputs),
            )
            for i, region in enumerate(regions)
        ]

    def __call__(self, arguments: list[Any]) -> list[Any]:
        values: list[Any] = [None] * self._size
        for position, argument in zip(self._given, arguments, strict=True):
            values[position] = argument
        arguments.clear()
        argument = None
        for position in self._unused:
            values[position] = None
        for position, constant in self._constants:
            values[position] = constant
        for step in self._steps:
            taken = [values[position] for position in step.inputs]
            for position in step.dies:
                values[position] = None
            for position, output in zip(step.outputs, step.call(taken), strict=True):
                values[position] = output
            output = None
        return [None if position is None else values[position] for position in self._returned]


def _boxed(region: Region, compiled: dict[Any, Boxed]) -> Boxed:
    as_it_is = region.num_operators < _LEAST_OPERATORS or region.stays_as_it_is or region.has_tuples
    return Eager().compile(region.graph) if as_it_is else _Lazy(region, compiled)


class _Lazy:
    """A region that is compiled, or found compiled, when it is first called."""

    def __init__(self, region: Region, compiled: dict[Any, Boxed]) -> None:
        self._region = region
        self._compiled = compiled
        # By which arguments are there: sums of gradients are not before the first micro-batch.
        self._calls: dict[tuple[bool, ...], Boxed] = {}

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        given = tuple(argument is not None for argument in arguments)
        call = self._calls.get(given)
        if call is None:
            call = self._calls[given] = self._compiled_for(given, arguments)
        if not all(given):
            arguments[:] = [argument for argument in arguments if argument is not None]
        return call(arguments)

    def _compiled_for(self, given: tuple[bool, ...], arguments: Sequence[Tensor | None]) -> Boxed:
        tensors = [argument for argument in arguments if argument is not None]
        layouts = tuple((t.dtype, tuple(t.shape), t.stride(), t.device) for t in tensors)
        key = self._region.structure, given, layouts
        if key not in self._compiled:
            self._compiled[key] = compile_functional(_filled(self._region.graph, given), tensors)
        return self._compiled[key]


def _filled(graph: fx.GraphModule, given: Sequence[bool]) -> Callable[..., Sequence[Any]]:
    """``graph`` as a function of the arguments that are ``given``; the others are None."""

    code = written(graph)

    def call(*tensors: torch.Tensor) -> Sequence[Any]:
        rest = iter(tensors)
        return code(*(next(rest) if here else None for here in given))

    return call
