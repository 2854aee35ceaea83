"""Symbolic sizes from two concrete traces.

Tracing with symbolic sizes costs nearly four times a concrete trace (LLaMA-7B, 32 layers: 22.5 s against 6.0 s on one
core), so every shape is traced concretely at two different (batch, sequence) sizes and each size is matched to the
simplest expression ``c * b**i * s**j + k``, ``b**i * (s + k)`` or ``c * b**i * (s +- 1)`` that holds at both. The
concrete trace stays the truth: expressions serve prices, and other sizes where a further trace confirms them.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import sympy
import torch
from torch import fx

from galvatron_fx.ir.errors import GalvatronError, InputError
from galvatron_fx.ir.graph.metadata import Dim, TensorSpec, meta_of, set_meta
from galvatron_fx.ir.torch_compat.tracing import failures_unlogged

BATCH = sympy.Symbol("b", positive=True, integer=True)
SEQUENCE = sympy.Symbol("s", positive=True, integer=True)

Shapes = list[tuple[int, ...]]

# (i, j) of b**i * s**j, simplest first; attention needs s**2, pairwise losses b**2.
_MONOMIALS = ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 0))
_OFFSETS = (0, 1, -1)
ONE_BATCH = (
    "the model could be traced with as many samples as the example inputs have, and with no other number of them (it "
    "loops over samples, has their number as a constant, or decides by values of inputs), so they are not split: "
    "compute on all samples at once, name their dim by batch_dim= where it is not the first, or use one micro-batch "
    "and roles tensor and sequence"
)
"""Why a program whose batch has no symbol has no plans that split it, and what to do."""

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
_MANY = 27720  # samples, of which many numbers divide
_SHORT = 4  # a sequence that is traced soon where a program may loop over it


@dataclass(frozen=True)
class Sizes:
    """Batch and sequence size of a trace; ``sequence`` is 0 where the model has no sequence that can vary.

    ``is_fixed``: the program is one of this batch alone, so that it is not made for others.
    """

    batch: int
    sequence: int
    is_fixed: bool = False


@dataclass(frozen=True)
class InputDims:
    """Which dim of each input is the batch, and which the sequence; None where it has none."""

    batch: tuple[int | None, ...]
    sequence: tuple[int | None, ...]

    @classmethod
    def of(
        cls,
        shapes: Shapes,
        dtypes: Sequence[torch.dtype],
        batch_dims: Sequence[int] = (),
        caches: frozenset[int] = frozenset(),
    ) -> InputDims:
        """Where inputs have their batch: ``batch_dims`` of each, 0 where not given.

        The batch is the commonest size there; inputs that have another size there have it first, or not at all (labels
        [batch] beside [sequence, batch]). The sequence is the commonest size of the dim beside the batch, of inputs
        that may have one. Those at the positions ``caches`` say nothing of either: they have the batch in the first dim
        of its size.
        """
        wanted = batch_dims or (0,) * len(shapes)
        firsts = [(shape, at) for i, (shape, at) in enumerate(zip(shapes, wanted, strict=True)) if i not in caches]
        batch = _commonest(shape[at] for shape, at in firsts if at < len(shape))
        tried = ((at, *range(len(shapes[i]))) if i in caches else (at, 0) for i, at in enumerate(wanted))
        batched = tuple(
            next((dim for dim in dims if dim < len(shape) and shape[dim] == batch), None)
            for shape, dims in zip(shapes, tried, strict=True)
        )
        beside = tuple(
            int(at != 1) if i not in caches and _may_have_sequence(shape, dtype) and at in (0, 1, None) else None
            for i, (shape, dtype, at) in enumerate(zip(shapes, dtypes, batched, strict=True))
        )
        length = _commonest(shape[at] for shape, at in zip(shapes, beside, strict=True) if at is not None)
        sequence = (
            at if at is not None and shape[at] == length else None for shape, at in zip(shapes, beside, strict=True)
        )
        return cls(batched, tuple(sequence))

    def sizes(self, shapes: Shapes) -> Sizes:
        """Batch and sequence of inputs; 0 for what they have not."""
        batch, sequence = (_commonest(_sizes_at(shapes, dims)) for dims in (self.batch, self.sequence))
        return Sizes(batch, sequence)

    def resized(self, shapes: Shapes, other: Sizes) -> Shapes:
        """Shapes of inputs at other sizes: the batch changes, and the sequence unless ``other.sequence`` is 0."""
        resized = []
        for shape, batch, sequence in zip(shapes, self.batch, self.sequence, strict=True):
            sizes = list(shape)
            if batch is not None:
                sizes[batch] = other.batch
            if sequence is not None and other.sequence:
                sizes[sequence] = other.sequence
            resized.append(tuple(sizes))
        return resized


@dataclass(frozen=True)
class SecondTrace:
    """The same program as a first trace, at other ``sizes``; their ``sequence`` is 0 where only the batch varies."""

    sizes: Sizes
    graph: fx.GraphModule


def fit_symbols(
    graph: fx.GraphModule, shapes: Shapes, dims: InputDims, retrace: Callable[[Shapes], fx.GraphModule]
) -> SecondTrace | None:
    """Give every node's spec its symbolic ``dims``, by tracing again at other sizes; return that trace.

    ``shapes``: of the inputs, of which ``dims`` say where they have batch and sequence. Where the model cannot be
    traced at another sequence size (convolutions over images, fixed windows), only the batch varies; where it cannot be
    at another batch size either, shapes stay concrete, there is no second trace, and the graph says so in
    ``graph.meta["symbols"]``, the :class:`Sizes` of the trace or None (then FollowBatch may find the batch yet). Where
    the program is longer or shorter with a size (a loop over steps), no more of its sizes are tried.
    """
    known = dims.sizes(shapes)
    graph.meta["symbols"] = None
    loops_over_sequence, loops_over_batch = _loops_over_sequence(graph, shapes, dims, retrace), False
    for other in other_sizes(known.batch, known.sequence):
        if loops_over_sequence if other.sequence else loops_over_batch:
            continue
        second = _traced(retrace, dims.resized(shapes, other))
        if second is None:
            continue
        base = Sizes(known.batch, known.sequence if other.sequence else 0)
        if annotate(graph, second, base, other):
            graph.meta["symbols"] = base
            return _telling(graph, base, SecondTrace(other, second), shapes, dims, retrace)
        loops_over_sequence |= len(second.graph.nodes) < len(graph.graph.nodes)  # it is traced at fewer steps
        loops_over_batch |= not other.sequence and len(second.graph.nodes) > len(graph.graph.nodes)
    return None


def _telling(
    graph: fx.GraphModule,
    base: Sizes,
    found: SecondTrace,
    shapes: Shapes,
    dims: InputDims,
    retrace: Callable[[Shapes], fx.GraphModule],
) -> SecondTrace:
    """``found``, or a trace of more samples where a product of sizes is in it what it was, as of 4 samples with 5
    places each and 5 samples with 4: then one that is viewed otherwise seems to have no samples.
    """
    if _views_agree(graph, base):
        return found
    for more in (1, 2):
        larger = replace(found.sizes, batch=found.sizes.batch + more)
        second = _traced(retrace, dims.resized(shapes, larger)) if _tells(base, larger) else None
        if second is not None and annotate(graph, second, base, larger) and _views_agree(graph, base):
            return SecondTrace(larger, second)
    annotate(graph, found.graph, base, found.sizes)
    return found


def _views_agree(graph: fx.GraphModule, base: Sizes) -> bool:
    """Whether what is viewed otherwise has as many elements as before, also where there are more samples."""
    more = replace(base, batch=_MANY)
    views = [node for node in graph.graph.nodes if node.target in _VIEWS]
    return all(_elements(node, more) == _elements(node.args[0], more) for node in views)


def _elements(node: fx.Node, sizes: Sizes) -> int:
    return prod(dim if isinstance(dim, int) else _value_at(dim, sizes) or 0 for dim in meta_of(node).spec.dims)


def _traced(retrace: Callable[[Shapes], fx.GraphModule], shapes: Shapes) -> fx.GraphModule | None:
    """The trace at other sizes; what the model has to say of these is nothing to whoever gave others."""
    try:
        with failures_unlogged(), warnings.catch_warnings(action="ignore"):
            return retrace(shapes)
    except GalvatronError:
        return None


def _loops_over_sequence(
    graph: fx.GraphModule, shapes: Shapes, dims: InputDims, retrace: Callable[[Shapes], fx.GraphModule]
) -> bool:
    """Whether a program that takes a value apart into as many as the sequence is long does less on a short one, which
    is traced sooner than one that is about as long.
    """
    sizes = dims.sizes(shapes)
    if sizes.sequence <= 2 * _SHORT or not any(_parts(node) >= sizes.sequence for node in graph.graph.nodes):
        return False
    short = _traced(retrace, dims.resized(shapes, Sizes(sizes.batch, _SHORT)))
    return short is not None and len(short.graph.nodes) < len(graph.graph.nodes)


def _parts(node: fx.Node) -> int:
    """Into how many values a node is taken apart."""
    if node.op == "output":
        return 0
    selected = sum(user.target is torch.ops.aten.select.int for user in node.users)
    return max(len(meta_of(node).specs), selected)


def value_at(dim: Dim, sizes: Sizes) -> int:
    """The number that an expression is at ``sizes``.

    Raises InputError where it is none, as halves of odd sizes and sequences of models without one.
    """
    if isinstance(dim, int):
        return dim
    value = _value_at(dim, sizes)
    if value is None:
        raise InputError(f"{dim} is no whole number at a batch of {sizes.batch} and a sequence of {sizes.sequence}")
    return value


@lru_cache(maxsize=65536)
def _value_at(dim: sympy.Expr, sizes: Sizes) -> int | None:
    known = {BATCH: sympy.Integer(sizes.batch)}
    if sizes.sequence:
        known[SEQUENCE] = sympy.Integer(sizes.sequence)
    value = dim.xreplace(known)
    return int(value) if isinstance(value, sympy.Integer) else None


def batch_size(firsts: Sequence[int]) -> int:
    """The batch of inputs with these first sizes: the commonest; 0 where there is none."""
    return _commonest(firsts)


def _commonest(sizes: Iterable[int]) -> int:
    counted = Counter(sizes).most_common(1)
    return counted[0][0] if counted else 0


def _sizes_at(shapes: Shapes, dims: Sequence[int | None]) -> Iterator[int]:
    return (shape[dim] for shape, dim in zip(shapes, dims, strict=True) if dim is not None)


def _may_have_sequence(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Token ids, labels and masks are [batch, sequence]; embeddings are [batch, sequence, hidden]."""
    return (len(shape) == 2 and not dtype.is_floating_point) or (len(shape) == 3 and dtype.is_floating_point)


def other_sizes(batch: int, sequence: int) -> list[Sizes]:
    """Sizes to try: batch up and sequence down, so that offsets of one cannot be taken for the other.

    No product of powers may stay what it was, as ``b * s`` does from 6 x 7 to 7 x 6: it would be taken for a constant;
    nor may a sequence without its last token seem a multiple of it, as ``b * (s - 1)`` seems ``6 * s`` from 8 x 4 to
    9 x 3.
    """
    tries: list[Sizes] = []
    if batch and sequence > 3:
        lengths = (sequence - 1, sequence - 2, sequence // 2)
        base = Sizes(batch, sequence)
        larger = [[Sizes(batch + more, length) for more in (1, 2, 3)] for length in lengths]
        telling = [
            other_size
            for sizes in larger
            if (other_size := next((other for other in sizes if _tells(base, other)), None))
        ]
        tries += dict.fromkeys((*telling[:1], *telling[-1:]))
    if batch:
        tries += [Sizes(batch + 1, 0), Sizes(2 * batch, 0)]
    return tries


def _all_change(base: tuple[int, int], other: tuple[int, int]) -> bool:
    products = ((base[0] ** i * base[1] ** j, other[0] ** i * other[1] ** j) for i, j in _MONOMIALS if i or j)
    return all(first != second for first, second in products)


def _tells(base: Sizes, other: Sizes) -> bool:
    if not _all_change((base.batch, base.sequence), (other.batch, other.sequence)):
        return False
    read = {
        more: fit(*(size.batch * (size.sequence + more) for size in (base, other)), base, other) for more in (-1, 1)
    }
    return read == {more: BATCH * (SEQUENCE + more) for more in (-1, 1)}


def annotate(graph: fx.GraphModule, second: fx.GraphModule, base: Sizes, other: Sizes) -> bool:
    """Match the two traces node by node; False where they are not the same program."""
    pairs = list(zip(graph.graph.nodes, second.graph.nodes, strict=False))
    if len(graph.graph.nodes) != len(second.graph.nodes):
        return False
    if any(a.op != b.op or (a.op == "call_function" and a.target is not b.target) for a, b in pairs):
        return False
    for first_node, second_node in pairs:
        if first_node.op == "output":
            continue
        mine, theirs = meta_of(first_node), meta_of(second_node)
        specs = tuple(_symbolic(a, b, base, other) for a, b in zip(mine.specs, theirs.specs, strict=True))
        set_meta(first_node, mine.having(specs=specs))
    return True


def _symbolic(first: TensorSpec | None, second: TensorSpec | None, base: Sizes, other: Sizes) -> TensorSpec | None:
    if first is None or second is None or len(first.shape) != len(second.shape):
        return first
    dims = tuple(fit(a, b, base, other) for a, b in zip(first.shape, second.shape, strict=True))
    return replace(first, dims=dims)


@lru_cache(maxsize=65536)
def fit(first: int, second: int, base: Sizes, other: Sizes) -> Dim:
    """The simplest expression that is ``first`` at ``base`` and ``second`` at ``other`` (the first size if none)."""
    for offset in _OFFSETS:
        for i, j in _MONOMIALS:
            if j and not base.sequence:
                continue
            at_base = base.batch**i * base.sequence**j
            at_other = other.batch**i * other.sequence**j
            factor, rest = divmod(first - offset, at_base)
            if not rest and (factor or not offset) and factor * at_other + offset == second:
                return factor * BATCH**i * SEQUENCE**j + offset if i or j else first
    return _shifted(first, second, base, other) if base.sequence else _divided(first, second, base, other)


def _divided(first: int, second: int, base: Sizes, other: Sizes) -> Dim:
    """As :func:`fit`, for a number of windows or chunks: a product of sizes over how long each of them is."""
    for i, j in _MONOMIALS:
        at_base, at_other = (sizes.batch**i * sizes.sequence**j for sizes in (base, other))
        if (i or j) and at_base and first and first * at_other == second * at_base:
            return sympy.Rational(first, at_base) * BATCH**i * SEQUENCE**j
    return first


def _shifted(first: int, second: int, base: Sizes, other: Sizes) -> Dim:
    """As :func:`fit`, for a sequence that is longer or shorter by a few tokens, also times a number.

    Losses drop the last token, convolutions pad, prompts come before: of two readings, that nearer to the sequence.
    """
    shifts: list[tuple[int, int]] = []
    for i in (0, 1):
        (length, rest), (other_length, other_rest) = divmod(first, base.batch**i), divmod(second, other.batch**i)
        longer = length - base.sequence
        if not rest and not other_rest and other_length - other.sequence == longer:
            shifts.append((i, longer))
    if shifts:
        i, longer = min(shifts, key=lambda shift: abs(shift[1]))
        return BATCH**i * (SEQUENCE + longer)
    for i in (0, 1):
        for longer in (-1, 1):
            factor, rest = divmod(first, base.batch**i * (base.sequence + longer))
            if factor and not rest and factor * other.batch**i * (other.sequence + longer) == second:
                return factor * BATCH**i * (SEQUENCE + longer)
    return _divided(first, second, base, other)
