"""What the compiler knows of a node: one frozen record under one key of ``node.meta``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import sympy
import torch
from torch import fx

from galvatron_fx.ir.graph.decisions import NOTHING_READ, Decision, MayRead
from galvatron_fx.ir.graph.placement import ValuePlacement

_KEY = "galvatron"

Dim: TypeAlias = int | sympy.Expr

Placements = tuple[tuple[ValuePlacement, ...], ...]


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor; ``dims`` are the same sizes as expressions in batch ``b`` and sequence ``s``.

    ``batch_split_factors``: for each dim, the number of equal runs inside which the batch is outermost: sequence x
    batch, flattened, is as many runs as the sequence is long. Empty where that is 1 for all dims.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dims: tuple[Dim, ...] = ()
    batch_split_factors: tuple[int, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Specs are looked up far more often than made, and their expressions take long to hash."""
        return hash((self.shape, self.dtype, self.dims, self.batch_split_factors))

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def size_bytes(self) -> int:
        """Bytes of a dense tensor of this shape."""
        return self.numel * self.dtype.itemsize

    @property
    def symbolic(self) -> tuple[Dim, ...]:
        """The symbolic shape where it is known, else the concrete one."""
        return self.dims or self.shape

    def resized(self, dim: int, size: int) -> TensorSpec:
        """The same with another size of ``dim``."""
        at = dim % len(self.shape)
        return self._spliced(at, at + 1, size)

    def unsqueezed(self, dim: int) -> TensorSpec:
        """The same with one more dim, of size 1."""
        at = dim % (len(self.shape) + 1)
        return self._spliced(at, at, 1)

    def _spliced(self, start: int, end: int, size: int) -> TensorSpec:
        shape = (*self.shape[:start], size, *self.shape[end:])
        dims = self.dims and (*self.dims[:start], size, *self.dims[end:])
        runs = self.batch_split_factors and (*self.batch_split_factors[:start], 1, *self.batch_split_factors[end:])
        return TensorSpec(shape, self.dtype, dims, runs)

    def batch_split_factor(self, dim: int) -> int:
        """The entry of ``batch_split_factors`` for ``dim``."""
        return self.batch_split_factors[dim] if self.batch_split_factors else 1

    def dim_of(self, symbol: sympy.Symbol) -> int | None:
        """The first dim whose size holds ``symbol``, or None."""
        for dim, size in enumerate(self.dims):
            if isinstance(size, sympy.Expr) and symbol in size.free_symbols:
                return dim
        return None


@dataclass(frozen=True)
class OpCost:
    """Floating-point operations, and bytes read and written, of one operator.

    Ints or sympy expressions from :func:`cost_models.ops.op_cost`; numbers or arrays of one shape once evaluated.
    """

    flops: Any
    read_bytes: Any
    written_bytes: Any


FREE = OpCost(0, 0, 0)
"""The cost of what moves no data: views, sizes, taking one of several outputs."""


@dataclass(frozen=True)
class Step:
    """One node of a local program.

    ``columns``: how many mesh columns it speaks of, the first ones; ``target`` and ``literals``: the call without its
    tensors; ``inputs``: the placements of each of its tensors on those columns.
    """

    program: str
    columns: int
    target: Any
    literals: tuple[Any, ...]
    inputs: tuple[Placements, ...]


@dataclass(frozen=True)
class NodeMeta:
    """Facts of one node.

    ``specs`` has one entry per output tensor (None where an output is absent); ``phase`` is "forward" or "backward";
    ``block`` the index of the layer block, -1 before blocks are found; ``module`` the qualified module name, which
    is for people and for pinning, never for decisions; ``cost`` what the node costs, None before it is annotated and
    where it was written or given other specs since (:func:`cost_models.node_cost.node_cost` fills it in);
    ``again``: whether backward repeats here what forward did and did not keep; ``bundles``: names of the collectives
    that this one takes the place of; ``open``: whether the graph leaves this collective for another to wait for;
    ``placements``: of every output, one for each mesh column that is lowered; ``step``: what the node has to be, where
    it is part of a program that several operators make up (:mod:`galvatron_fx.ir.graph.local_program`);
    ``filled``: the share of its work that is due in the mean, where its rows may be of no token;
    ``stays``: whether this collective starts where it stands, as it sends one slice of several;
    ``value``: which of the values that its block's backward needs it is, or is only another view of, -1 for none
    (:mod:`passes.frontend.number_values`);
    ``in_place``: whether the node writes into a cache that the graph is given, and copies nothing when it runs.
    """

    specs: tuple[TensorSpec | None, ...]
    phase: str = "forward"
    block: int = -1
    module: str = ""
    multi_output: bool = False
    cost: OpCost | None = None
    again: bool = False
    bundles: tuple[str, ...] = ()
    open: bool = False
    placements: Placements = ()
    step: Step | None = None
    filled: float = 1.0
    value: int = -1
    stays: bool = False
    in_place: bool = False

    @property
    def spec(self) -> TensorSpec:
        """The spec of a node with one output tensor."""
        first = self.specs[0]
        if first is None or self.multi_output:
            raise AssertionError("this node does not have exactly one output tensor")
        return first

    def having(self, **changes: Any) -> NodeMeta:
        """Return a copy with some fields changed; with other ``specs`` it has no cost, unless one is given."""
        if "specs" in changes:
            changes.setdefault("cost", None)
        if not changes.keys() <= vars(self).keys():
            return replace(self, **changes)  # which names the unknown field
        record = object.__new__(NodeMeta)  # passes copy records far more often than they make any
        vars(record).update(vars(self), **changes)
        return record


def meta_of(node: fx.Node) -> NodeMeta:
    """Return the record of ``node``; every node but the output has one once captured."""
    record = node.meta.get(_KEY)
    if not isinstance(record, NodeMeta):
        raise AssertionError(f"node '{node.name}' ({node.target}) has no facts: was a pass run before capture?")
    return record


def has_meta(node: fx.Node) -> bool:
    """Tell whether ``node`` carries a record."""
    return isinstance(node.meta.get(_KEY), NodeMeta)


def set_meta(node: fx.Node, record: NodeMeta) -> None:
    """Attach ``record`` to ``node``."""
    node.meta[_KEY] = record


_OF_INPUT = "input "

InputKind: TypeAlias = Literal["param", "buffer", "input", "cache", "hoisted", "seed", "tangent"]
OutputKind: TypeAlias = Literal["output", "buffer", "cache", "grad", "piece"]


@dataclass(frozen=True)
class InputSpec:
    """One input of a graph.

    ``kind``: among others "cache" (a tensor among the arguments that forward changes, as caches of keys and values),
    "hoisted" (what a micro-batch takes from the prologue), "seed" (of random numbers) and "tangent" (the gradient of an
    output); ``name``: of the parameter or buffer, of the cache among the arguments, else the position as text;
    ``states_on_host``: whether the optimizer states of a parameter live in the host's memory; ``states_on_disk``:
    whether they live on disk; ``on_host``: whether the parameter itself does, and its gradient.
    """

    kind: InputKind
    name: str
    requires_grad: bool = False
    states_on_host: bool = False
    states_on_disk: bool = False
    on_host: bool = False

    @property
    def gradient(self) -> str:
        """The name of the port of its gradient."""
        return f"{_OF_INPUT}{self.name}" if self.kind == "input" else self.name


@dataclass(frozen=True)
class OutputSpec:
    """One output of a graph.

    ``kind``: "output" of the model, "buffer" (its new value, or that of a parameter that forward changes), "cache" (the
    new value of one, or a new one), "grad" or "piece" (what a micro-batch gives to the epilogue); ``name``: as of
    :class:`InputSpec`, of a gradient what that calls so.
    """

    kind: OutputKind
    name: str

    @property
    def is_input_gradient(self) -> bool:
        """Whether it is the gradient of an input, which callers take whole."""
        return self.kind == "grad" and self.name.startswith(_OF_INPUT)


@dataclass(frozen=True)
class PaddedDim:
    """A dim with rows of padding behind those of the batch: ``size`` without them, ``padded_size`` with them."""

    dim: int
    size: int
    padded_size: int

    def unpadded(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the rows of the batch."""
        return whole.narrow(self.dim, 0, self.size)

    def padded(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the rows of the batch, and zeros."""
        shape = list(whole.shape)
        shape[self.dim] = self.padded_size - self.size
        return torch.cat([whole, whole.new_zeros(shape)], self.dim)


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of a joint graph, in the order of its placeholders and of its output tuple.

    Of the model's outputs, by position: ``loss`` is what one step of training differentiates; ``scalars`` are those
    without dims that need gradients, the loss among them; ``detached`` need gradients and get none; ``output_names``
    say where each is in what the model returns; ``padded``: the dim of outputs, and of gradients of inputs, that has
    rows of padding, by name;
    ``batch_dims``: the dim of outputs that has the batch, and in how many runs, by name, None where that is not known;
    ``forward_only``: whether the graph was captured to be run without backward: nothing in it needs gradients;
    ``arguments``: what a call leaves of its arguments where it puts something else into them
    (:class:`passes.frontend.capture.held_objects.ArgumentsLeft`), else None; ``decided_by``: buffers by whose values
    forward decided, as lists of numbers, by name: no step changes them, and nobody else may; ``decisions``:
    what forward decided by values of inputs, as every call has to; ``may_read``: what it was allowed to decide by;
    ``written``: names of inputs into copies of which forward writes, in training.
    """

    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    input_names: tuple[str, ...]
    loss: int | None
    input_spec: Any = None
    output_spec: Any = None
    input_specs: tuple[TensorSpec, ...] = ()
    scalars: tuple[int, ...] = ()
    detached: tuple[int, ...] = ()
    output_names: tuple[str, ...] = ()
    padded: Mapping[str, PaddedDim] = field(default_factory=dict)
    batch_dims: Mapping[str, tuple[int, int]] | None = None
    forward_only: bool = False
    arguments: Any = None
    decided_by: Mapping[str, Any] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()
    may_read: MayRead = NOTHING_READ
    written: tuple[str, ...] = ()

    @property
    def beside_loss(self) -> frozenset[int]:
        """Positions of outputs that need gradients, and get none where the loss alone is differentiated."""
        return frozenset({*self.detached, *self.scalars} - {self.loss})

    def without_padding(self, port: OutputSpec, whole: torch.Tensor) -> torch.Tensor:
        """What an output or a gradient that ranks hold whole is of the batch itself."""
        return self.padded[port.name].unpadded(whole) if port.name in self.padded else whole

    def having(self, **changes: Any) -> Signature:
        """Return a copy with some fields changed."""
        return replace(self, **changes)


def signature(graph: fx.GraphModule) -> Signature:
    """Return the signature that capture left on the graph."""
    graph_signature = graph.meta.get(_KEY)
    if not isinstance(graph_signature, Signature):
        raise AssertionError("this GraphModule has no signature: capture it with passes.frontend.capture.capture first")
    return graph_signature


def set_signature(graph: fx.GraphModule, value: Signature) -> None:
    """Attach a signature to the graph."""
    graph.meta[_KEY] = value


def ports(graph: fx.GraphModule) -> list[tuple[InputSpec, fx.Node]]:
    """Pair every placeholder with its port."""
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return list(zip(signature(graph).inputs, nodes, strict=True))


def output_ports(graph: fx.GraphModule) -> list[tuple[OutputSpec, fx.Node | None]]:
    """Pair every output with the node that makes it (None for an absent gradient)."""
    return list(zip(signature(graph).outputs, graph.graph.output_node().args[0], strict=True))  # type: ignore[arg-type]
