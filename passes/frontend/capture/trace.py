"""What was traced of a model, and how its graph is had from that at any size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import fx

from galvatron_fx.ir.errors import GalvatronError
from galvatron_fx.ir.graph.metadata import signature
from galvatron_fx.ir.graph.rewrite import copied
from galvatron_fx.ir.graph.symbols import InputDims, SecondTrace, Shapes, Sizes
from passes.frontend.capture.cleanup import CleanGraph
from passes.frontend.capture.compare_layers import UnlikeUnits
from passes.frontend.capture.find_repeats import Repeat
from passes.frontend.capture.flat_inputs import FlatInputs
from passes.frontend.capture.input_reads import has_values
from passes.frontend.capture.repeat_layers import RepeatLayers
from passes.frontend.capture.resize import Resize, refuse_difference
from passes.frontend.capture.size_expressions import OtherSizes, SizeExpressions, describe_sizes

__all__ = ["OtherSizes", "Trace"]

_LEAST_SEQUENCE = (
    4  # shorter ones cannot be made shorter still, so that a model traced there has no expressions in them
)
_ROOM = 4  # batches are held against a trace this many times as far away as is asked for: searches of them go on


@dataclass
class Trace:
    """A model's step as it was traced at the sizes of ``inputs``, a few of its equal layers standing for all.

    ``dims``: where the inputs have batch and sequence; ``graph``: the trace; ``whole``: its graph at these sizes,
    cleaned, with all layers; ``second``: the same trace at other sizes, None where these cannot change; ``again``:
    traces at given shapes of the inputs, one for each of ``inputs.shapes``.

    Expressions that hold at two sizes may hold by chance, and a model may take another path from some size on. So they
    are held against further traces, at the smallest and at the largest sizes that were asked for: what is equal
    there, at both ends, is taken to be equal between. Those traces are made when they are needed.
    """

    inputs: FlatInputs
    dims: InputDims
    repeats: tuple[Repeat, ...]
    graph: fx.GraphModule
    second: SecondTrace | None
    again: Callable[[Shapes], fx.GraphModule]
    whole: fx.GraphModule = field(init=False)
    _held: set[Sizes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.whole = self._whole(copied(self.graph))

    @property
    def sizes(self) -> Sizes:
        """Batch and sequence of the inputs; the latter 0 where there is none."""
        return self.dims.sizes(self.inputs.shapes)

    def at(self, inputs: FlatInputs) -> fx.GraphModule:
        """The graph for ``inputs``, as if it had been captured on them.

        Raises OtherSizes, saying why, where it has to be: where they are not the traced ones at another batch and
        sequence, and where a size in the graph is no expression of these.
        """
        sizes = self._sizes_of(inputs)
        self._check_inputs(inputs, sizes)
        self._check_decisions(inputs)
        if inputs.shapes == self.inputs.shapes:
            return self._whole(copied(self.graph))
        asked = self._known(sizes)
        self._hold(asked)
        try:
            return self._whole(Resize(self._expressions, asked, inputs).run(self.graph))
        except UnlikeUnits as unlike:
            raise OtherSizes(
                f"layers that are alike at {describe_sizes(self.sizes)} are not at {describe_sizes(sizes)}: {unlike}"
            ) from None

    def inputs_at(self, sizes: Sizes) -> FlatInputs:
        """The inputs at other sizes, without data; ``sizes.sequence`` of 0 leaves that as it is."""
        return self._resized(sizes)

    def hold(self, least: Sizes, most: Sizes) -> None:
        """Hold the expressions against traces at the ends of a range that is going to be asked for.

        Raises OtherSizes as :meth:`at` does.
        """
        for sizes in (least, most):
            self._hold(self._known(sizes))

    def _whole(self, graph: fx.GraphModule) -> fx.GraphModule:
        return RepeatLayers(self.repeats).run(CleanGraph().run(graph))

    def _check_inputs(self, inputs: FlatInputs, sizes: Sizes) -> None:
        """See that the inputs are the traced ones but for batch and sequence."""
        wanted = self._resized(sizes)
        if _described(inputs) != _described(wanted):
            raise OtherSizes(
                f"the inputs {_shapes(inputs)} are not those of the trace, {_shapes(self.inputs)}, at another batch "
                f"and sequence"
            )

    def _check_decisions(self, inputs: FlatInputs) -> None:
        """See that forward decides by values of the inputs as it did in the trace, where they have values."""
        named = zip(inputs.input_names, inputs.tensors, strict=True)
        given = {name: tensor for name, tensor in named if has_values(tensor)}
        for decision in signature(self.graph).decisions:
            if decision.computation.inputs <= given.keys() and not decision.is_as_of(given):
                raise OtherSizes(f"forward decides otherwise by values of inputs: {decision.line}")

    def _known(self, sizes: Sizes) -> Sizes:
        """The sizes as the expressions speak of them."""
        base = self._expressions.base
        if not base.sequence:
            if sizes.sequence != self.sizes.sequence:
                raise OtherSizes("the model's sizes are no expressions of the sequence")
            return replace(sizes, sequence=0)
        if sizes.sequence < _LEAST_SEQUENCE:
            raise OtherSizes(f"sequences shorter than {_LEAST_SEQUENCE} are traced as they are")
        return sizes

    @cached_property
    def _expressions(self) -> SizeExpressions:
        if self.second is None:
            raise OtherSizes("it is another program already at the next batch")
        return SizeExpressions.of(self.graph, self.second)

    def _sizes_of(self, inputs: FlatInputs) -> Sizes:
        alike = [len(shape) for shape in inputs.shapes] == [len(shape) for shape in self.inputs.shapes]
        return self.dims.sizes(inputs.shapes) if alike else self.sizes

    def _resized(self, sizes: Sizes) -> FlatInputs:
        shapes = iter(self.dims.resized(self.inputs.shapes, sizes))

        def at(leaf: torch.Tensor) -> torch.Tensor:
            shape = next(shapes)
            if shape == tuple(leaf.shape):
                return leaf
            return torch.empty(shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)

        leaves = (at(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.inputs.leaves)
        return replace(self.inputs, leaves=tuple(leaves))

    # ---- held against traces ----

    def _hold(self, sizes: Sizes) -> None:
        """See that the expressions hold at the ends of what was asked for so far and ``sizes``."""
        known = [self._expressions.base, *self._held]
        beyond = not min(each.batch for each in known) <= sizes.batch <= max(each.batch for each in known)
        for end in _ends([*known, sizes]):
            if end not in known:
                self._hold_at_best(_further(end, self._expressions.base) if beyond else end, end)

    def _hold_at_best(self, far: Sizes, near: Sizes) -> None:
        """Hold them further away than asked for, so that the next sizes need no trace, or near where that fails."""
        try:
            self._hold_at(far)
        except OtherSizes:
            if far == near:
                raise
            self._hold_at(near)

    def _hold_at(self, sizes: Sizes) -> None:
        inputs = self._resized(sizes)
        mine = Resize(self._expressions, sizes, inputs).run(self.graph)
        try:
            traced = self.again(inputs.shapes)
        except GalvatronError as error:
            raise OtherSizes(f"it cannot be traced at {describe_sizes(sizes)}: {error}") from None
        refuse_difference(mine, traced)
        self._held.add(sizes)


def _ends(sizes: list[Sizes]) -> list[Sizes]:
    """The least and the most of both sizes."""
    batches, sequences = [each.batch for each in sizes], [each.sequence for each in sizes]
    return [Sizes(end(batches), end(sequences)) for end in (min, max)]


def _further(end: Sizes, base: Sizes) -> Sizes:
    """Sizes whose batch is further from that of the trace; from 2 on, as batches of 1 are broadcast."""
    if end.batch > base.batch:
        return replace(end, batch=end.batch * _ROOM)
    return replace(end, batch=max(2, end.batch // _ROOM)) if 2 < end.batch < base.batch else end


def _described(inputs: FlatInputs) -> tuple[object, ...]:
    """All of the inputs but the elements of their tensors."""
    leaves = [
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in inputs.leaves
    ]
    return inputs.tree, inputs.names, leaves


def _shapes(inputs: FlatInputs) -> str:
    return ", ".join(str(list(shape)) for shape in inputs.shapes)
