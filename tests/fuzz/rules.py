"""Every sharding rule of every call of a program, with the program's own values, against the call on one device."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from galvatron_fx.errors import GalvatronError
from galvatron_fx.ir.graph.metadata import (
    InputSpec,
    NodeMeta,
    OutputSpec,
    Signature,
    meta_of,
    ports,
    set_meta,
    set_signature,
)
from galvatron_fx.ir.graph.op_call import OpCall, input_nodes, is_getitem, op_call
from galvatron_fx.ir.graph.placement import Partial, Placement, Shard
from galvatron_fx.ir.torch_compat.graphs import graph_module
from galvatron_fx.runtime.lockstep import Simulator
from passes.frontend.capture.flat_inputs import FlatInputs
from passes.sharding.allowed_rules import AllowedRules  # noqa: F401  (registers rules)
from passes.sharding.expand_rings import ExpandRings
from passes.sharding.insert_collectives import AxisSharding, InsertCollectives
from passes.sharding.local_args import DENSE_ARGUMENTS, lowered_target
from passes.sharding.own_rules import VIEWS, view_rules
from passes.sharding.rules import OpRule, _valid, op_rules, strided
from tests.fuzz.runner import Prepared
from tests.helpers import SEED, collect, distribute

DEGREES = (2, 3, 4)


@dataclass(frozen=True)
class BadRule:
    """A rule that gives something else than the operator does."""

    call: OpCall
    rule: OpRule
    degree: int
    error: str

    def __str__(self) -> str:
        shapes = ", ".join(f"{spec.dtype} {spec.shape}".removeprefix("torch.") for spec in self.call.inputs)
        return f"{self.call.target} of {shapes} by '{self.rule}' on {self.degree} ranks: {self.error}"


def node_values(prepared: Prepared) -> dict[fx.Node, Any]:
    """What every node of the captured graph computes on one device."""
    graph = prepared.graph
    tensors = {
        **dict(prepared.model.named_parameters(remove_duplicate=False)),
        **dict(prepared.model.named_buffers(remove_duplicate=False)),
    }
    given = FlatInputs.of(prepared.inputs).tensors
    values: dict[fx.Node, Any] = {}
    for port, node in ports(graph):
        if port.kind == "tangent":
            values[node] = torch.ones(meta_of(node).spec.shape, dtype=meta_of(node).spec.dtype)
        elif port.kind == "seed":
            values[node] = torch.tensor(SEED)
        else:
            values[node] = given[int(port.name)] if port.kind == "input" else tensors[port.name].detach()
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            values[node] = getattr(graph, str(node.target))
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), partial(_given, values, node))
            values[node] = lowered_target(node.target)(*args, **kwargs)
    return values


@dataclass
class Known:
    """What has been checked: distinct calls, and how often each rule of each operator; no more than ``often``."""

    often: int
    calls: set[Any] = field(default_factory=set)
    rules: Counter[Any] = field(default_factory=Counter)

    def new(self, call: OpCall, degree: int) -> list[OpRule]:
        """The rules of a call that have not been checked often; counts them."""
        kind = call.target, tuple(len(spec.shape) for spec in call.inputs), degree
        left = [rule for rule in dict.fromkeys(all_rules(call, degree)) if self.rules[kind, rule] < self.often]
        self.rules.update((kind, rule) for rule in left)
        return left


def _given(values: dict[fx.Node, Any], node: fx.Node, source: fx.Node) -> Any:
    """What ``node`` gets of ``source``: dense where its kernel reads memory in order, as lowering sees to."""
    return values[source].contiguous() if node.target in DENSE_ARGUMENTS else values[source]


def bad_rules(prepared: Prepared, known: Known) -> Iterator[BadRule]:
    """Check the rules of all calls that are not ``known`` yet, and add them to those; needs no plan."""
    values = node_values(prepared)
    for node in prepared.graph.graph.nodes:
        if node.op != "call_function" or is_getitem(node):
            continue
        call = op_call(node)
        given = [_given(values, node, source) for source in input_nodes(node)]
        key = (
            call.target,
            call.args,
            call.kwargs,
            tuple(bool(x.isfinite().all()) for x in given if x.is_floating_point()),
        )
        if key not in known.calls:
            known.calls.add(key)
            yield from _bad_rules(node, call, known, given, values[node])


def _bad_rules(node: fx.Node, call: OpCall, known: Known, given: list[Tensor], expected: Any) -> Iterator[BadRule]:
    graph, one = _alone(node)
    is_huge = any(_is_huge(value) for value in given)
    for degree in DEGREES:
        for rule in known.new(call, degree):
            if is_huge and any(isinstance(placement, Partial) for placement in (*rule.inputs, *rule.outputs)):
                continue  # a sum of such terms overflows wherever it is taken
            try:
                error = _difference(graph, one, rule, degree, given, expected)
            except GalvatronError:
                raise
            except Exception as crash:
                error = f"{type(crash).__name__}: {crash}"
            if error:
                yield BadRule(call, rule, degree, error)


def _is_huge(value: Tensor) -> bool:
    """Whether it holds finite numbers near the largest of its dtype, as masks do."""
    if not value.is_floating_point():
        return False
    return bool((value.abs() > torch.finfo(value.dtype).max / 100).logical_and(value.isfinite()).any())


def all_rules(call: OpCall, degree: int) -> list[OpRule]:
    """The rules that an operator has, and their instances with two and three runs; but for routed rows, whose whole
    tensor has another order.
    """
    plain = [rule for rule in op_rules(call, degree) if not rule.routes]
    dims = range(max((len(spec.shape) for spec in call.inputs), default=0))
    runs = [Shard(dim, split_factor) for dim in dims for split_factor in (2, 3, 4)]
    if call.target in VIEWS:
        return [*plain, *(rule for rule in view_rules(call, runs, degree) if _valid(rule, call, degree))]
    return [*plain, *(instance for rule in plain for instance in strided(rule, call, runs, degree))]


def _difference(
    graph: fx.GraphModule, one: fx.Node, rule: OpRule, degree: int, given: list[Tensor], expected: Any
) -> str:
    specs = meta_of(one).specs
    outputs = tuple(p if spec is not None else None for p, spec in zip(rule.outputs, specs, strict=True))
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    sharding = AxisSharding(0, degree, {one: rule}, dict(zip(placeholders, rule.inputs, strict=True)), outputs)
    local = ExpandRings((degree,)).run(InsertCollectives(sharding).run(graph))
    fed = [terms(value, p, degree) for value, p in zip(given, rule.inputs, strict=True)]
    results = Simulator((degree,)).run(local, fed)
    wanted = expected if meta_of(one).multi_output else [expected]
    # Terms in a narrow dtype round one by one; where a plan may have them is AllowedRules' to say.
    dtypes = {value.dtype for value in (*given, *wanted) if value is not None and value.is_floating_point()}
    tolerance = 1e-9 if dtypes <= {torch.float64} else 1e-6
    largest = max([1.0, *map(_largest, given)])
    for held, placement, want in zip(results, outputs, wanted, strict=True):
        if placement is None or want is None or want.numel() == 0:
            continue
        got = together(held, placement)
        # A small sum of large terms has fewer digits than they have.
        allowed = tolerance * max([largest, *map(_largest, held)])
        if not torch.allclose(got.double(), want.double(), rtol=tolerance, atol=allowed, equal_nan=True):
            return f"differs by {float((got.double() - want.double()).abs().max()):.2e}"
    return ""


def _largest(value: Tensor) -> float:
    """The largest finite number, 0 for none."""
    finite = value.double()[value.isfinite()].abs()
    return float(finite.max()) if len(finite) else 0.0


def _alone(node: fx.Node) -> tuple[fx.GraphModule, fx.Node]:
    """A graph of one call, and what picks its outputs."""
    graph = fx.Graph()
    made: list[fx.Node] = []

    def placeholder(source: fx.Node) -> fx.Node:
        made.append(graph.placeholder(f"in{len(made)}"))
        set_meta(made[-1], meta_of(source).having(phase="forward"))
        return made[-1]

    args, kwargs = fx.map_arg((node.args, node.kwargs), placeholder)
    one = graph.create_node("call_function", node.target, args, kwargs)
    set_meta(one, meta_of(node))
    outputs: list[fx.Node | None] = [one]
    if meta_of(node).multi_output:
        outputs = []
        for index, spec in enumerate(meta_of(node).specs):
            picked = graph.call_function(operator.getitem, (one, index)) if spec is not None else None
            if picked is not None:
                set_meta(picked, NodeMeta((spec,)))
            outputs.append(picked)
    graph.output(tuple(outputs))
    module = graph_module(torch.nn.Module(), graph)
    inputs = tuple(InputSpec("input", str(i)) for i in range(len(made)))
    set_signature(module, Signature(inputs, tuple(OutputSpec("output", str(i)) for i in range(len(outputs))), (), None))
    return module, one


def terms(value: Tensor, placement: Placement, degree: int) -> list[Tensor]:
    """What each rank holds; terms differ from rank to rank, infinities are terms of all."""
    if not isinstance(placement, Partial):
        return distribute(value, [placement], [degree])
    if value.dtype is torch.bool:
        return [value, *([torch.zeros_like(value) if placement.op == "sum" else value] * (degree - 1))]
    if placement.op in ("max", "min"):
        away = -1.0 if placement.op == "max" else 1.0
        return [value, *((value + away * rank).to(value.dtype) for rank in range(1, degree))]
    finite = torch.where(value.isfinite(), 1.0, 0.0) if value.is_floating_point() else torch.ones_like(value)
    others = [finite * (rank + 0.5) if value.is_floating_point() else finite for rank in range(1, degree)]
    total = value * (degree if placement.op == "avg" else 1)
    return [
        (total - sum(others)).to(value.dtype),
        *(torch.where(finite.bool(), x, value).to(value.dtype) for x in others),
    ]


def together(held: list[Tensor], placement: Placement) -> Tensor:
    """The tensor that the ranks hold."""
    if not isinstance(placement, Partial):
        return collect(held, [placement], [len(held)])
    stacked = torch.stack(held)
    return {
        "sum": stacked.sum,
        "avg": lambda dim: stacked.sum(dim) / len(held),
        "max": stacked.amax,
        "min": stacked.amin,
    }[placement.op](0)
