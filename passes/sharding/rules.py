"""Sharding rules: in which ways an operator can run on one mesh axis.

Rules come from torch's registered DTensor strategies; ``own_rules`` adds those that torch lacks and those where our
strided shards or special local programs matter. An operator without any rule is replicated, and the caller is told.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from galvatron_fx.ir.errors import ShardingError
from galvatron_fx.ir.graph.metadata import TensorSpec
from galvatron_fx.ir.graph.op_call import COPYING, OpCall
from galvatron_fx.ir.graph.placement import (
    REPLICATE,
    Exchanged,
    Partial,
    Placement,
    Replicate,
    Runs,
    Shard,
    fits,
    is_routed,
    num_units,
)
from galvatron_fx.ir.torch_compat import dtensors as compat
from galvatron_fx.ir.torch_compat.dtensors import (
    DTensorSpec,
    OpSchema,
    OpSpec,
    OpStrategy,
    TensorMeta,
    TupleStrategy,
    multi_axis_rule,
    single_axis_rule,
)


@dataclass(frozen=True)
class OpRule:
    """One way to run an operator on one axis.

    ``outputs``: placement of every output (REPLICATE for an absent one); ``inputs``: of every tensor input;
    ``expansion``: the name of the local program in :mod:`passes.sharding.expansions` where it is not the operator
    itself.
    """

    outputs: tuple[Placement, ...]
    inputs: tuple[Placement, ...]
    expansion: str = ""

    def __str__(self) -> str:
        arrow = f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"
        return f"{arrow} [{self.expansion}]" if self.expansion else arrow

    def placed(self, call: OpCall) -> Iterator[tuple[Placement, TensorSpec | None]]:
        """What ``call`` takes and leaves, and where the rule places it."""
        yield from zip(self.outputs, call.outputs, strict=True)
        yield from zip(self.inputs, call.inputs, strict=True)

    @property
    def splits_work(self) -> bool:
        """Whether each rank does only its share: some tensor is sharded."""
        return any(isinstance(p, Shard) for p in (*self.inputs, *self.outputs))

    @property
    def routes(self) -> bool:
        """Whether it takes or leaves rows that each rank has sorted for itself."""
        return any(map(is_routed, (*self.inputs, *self.outputs)))

    @cached_property
    def exchanges(self) -> bool:
        """Whether it takes or leaves rows that ranks have exchanged with each other."""
        among_more = self.expansion.startswith(AMONG_MORE)
        return among_more or any(isinstance(p, Exchanged) for p in (*self.inputs, *self.outputs))


ROW_EXPANSIONS = ("row_nll_loss", "gathered_nll_loss")
"""Expansions that may be given any rows."""

MOVES = ("own_experts", "parts_of_all_experts")
"""Expansions that move numbers and add none up."""

AMONG_MORE = "among_more"
"""With what the names of expansions begin that let the ranks of one more axis take part in an exchange of rows."""

RuleMaker = Callable[[OpCall, int], list[OpRule]]
_OWN: dict[Any, RuleMaker] = {}

# What arguments that count dims are called, and the operators whose output has a dim more to count.
_DIMS = ("dim", "dims", "dim0", "dim1", "dim2")
_ADD_A_DIM = (
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.stack.default,
    torch.ops.aten.select_backward.default,
)


def register_rule(*targets: Any) -> Callable[[RuleMaker], RuleMaker]:
    """Register the maker of rules for operators; it takes the call and the axis' degree, and wins over torch's rule.

    An operator of a library that need not be there is given by its name ("library.operator.overload").
    """

    def register(maker: RuleMaker) -> RuleMaker:
        for target in targets:
            _OWN[target] = maker
        return maker

    return register


def replicate_rule(call: OpCall) -> OpRule:
    """The rule that every operator has: all ranks do everything."""
    return OpRule((REPLICATE,) * len(call.outputs), (REPLICATE,) * len(call.inputs))


def has_rule(target: Any) -> bool:
    """Tell whether anything but replication is known of an operator."""
    return _own_rule(target) is not None or single_axis_rule(target) is not None or multi_axis_rule(target) is not None


def _own_rule(target: Any) -> RuleMaker | None:
    return _OWN.get(target) or _OWN.get(str(target))


def torch_rules(call: OpCall, degree: int) -> list[OpRule]:
    """What torch's registered strategies say of ``call``; not all of them read dims that are counted from the back."""
    call = _counted_from_the_front(call)
    return _single_axis(call) or _multi_axis(call, degree)


@cache
def op_rules(call: OpCall, degree: int) -> tuple[OpRule, ...]:
    """List the ways to run ``call`` on an axis of ``degree`` ranks with unstrided shards, the replicated one first.

    Raises ShardingError where torch is so old that its rules may be wrong.
    """
    if not compat.has_sharding_rules():
        raise ShardingError(
            f"plans for several devices, and micro-batches, need torch 2.13 or later, as rules for sharding operators "
            f"were found to be wrong in 2.11; this is torch {torch.__version__}: upgrade it, or use one device and one "
            f"micro-batch"
        )
    call = replace(call, target=COPYING.get(call.target, call.target))
    rules_of = _own_rule(call.target)
    candidates = rules_of(call, degree) if rules_of else torch_rules(call, degree)
    rules = dict.fromkeys([replicate_rule(call), *candidates])
    return tuple(rule for rule in rules if _valid(rule, call, degree))


# The position of the weight among the inputs of grouped operators, and of their number of groups among the arguments.
_GROUPED = {
    torch.ops.aten.convolution.default: (1, 8),
    torch.ops.aten.convolution_backward.default: (2, 9),
}


def strided(rule: OpRule, call: OpCall, candidates: Iterable[Placement], degree: int) -> list[OpRule]:
    """Instances of ``rule`` with the runs of the ``candidates`` in place of its unstrided shards.

    A rule that lets a dim be sharded holds for any equal subset of its indices, in any order, as long as all tensors of
    the rule are split in the same way: for routed rows, too. A local program (expansion) counts indices and needs whole
    runs, but for those of losses, which take rows one by one; rules that speak of routed rows say themselves which
    those are. The channels of a group of a convolution stay together.
    """
    if not rule.splits_work or (rule.expansion and rule.expansion not in ROW_EXPANSIONS and not rule.exchanges):
        return []
    shards = [p for p in candidates if isinstance(p, Shard)]
    kinds = {(p.split_factor, p.routed and not rule.routes, p.mirrored) for p in shards} - {(1, False, False)}

    def stride(pair: tuple[Placement, TensorSpec | None], kind: tuple[Runs, bool, bool]) -> Placement:
        placement, spec = pair
        if not isinstance(placement, Shard) or (rule.exchanges and not counts_tokens(spec, placement)):
            return placement
        split_factor, routed, mirrored = kind
        return replace(placement, split_factor=split_factor, routed=placement.routed or routed, mirrored=mirrored)

    def instance(kind: tuple[Runs, bool, bool]) -> OpRule:
        placed = [stride(pair, kind) for pair in rule.placed(call)]
        return OpRule(tuple(placed[: len(call.outputs)]), tuple(placed[len(call.outputs) :]), rule.expansion)

    instances = [instance(kind) for kind in sorted(kinds, key=str) if not _cuts_groups(rule, call, kind, degree)]
    placements = {*rule.outputs, *rule.inputs}
    is_plain = placements <= {REPLICATE, *(Shard(p.dim) for p in placements if isinstance(p, Shard))}
    if is_plain and not rule.routes and not rule.expansion:
        instances += _of_exchanged(rule, candidates)
    return [instance for instance in instances if _valid(instance, call, degree)]


def _cuts_groups(rule: OpRule, call: OpCall, kind: tuple[Runs, bool, bool], degree: int) -> bool:
    """Whether runs have parts of the groups of a convolution, of several channels each."""
    place, at = _GROUPED.get(call.target, (0, 0))
    if not at or rule.inputs[place] != Shard(0) or call.args[at] == call.inputs[place].shape[0]:
        return False
    split_factor, routed, mirrored = kind
    return routed or mirrored or bool(call.args[at] % (num_units(split_factor) * degree))


def counts_tokens(spec: TensorSpec | None, placement: Shard) -> bool:
    """Whether the dim that is split has an index for each token, or copy of one, rather than for each expert."""
    return spec is not None and bool(getattr(spec.symbolic[placement.dim], "free_symbols", ()))


def _of_exchanged(rule: OpRule, candidates: Iterable[Placement]) -> list[OpRule]:
    """``rule`` for exchanged rows, which it must not add up: some of them are of no token."""
    if not any(isinstance(p, Exchanged) for p in candidates):
        return []

    def exchanged(side: tuple[Placement, ...]) -> tuple[Placement, ...]:
        return tuple(Exchanged(p.dim) if isinstance(p, Shard) else p for p in side)

    return [OpRule(exchanged(rule.outputs), exchanged(rule.inputs))]


def _valid(rule: OpRule, call: OpCall, degree: int) -> bool:
    return all(spec is None or fits(placement, spec.shape, degree) for placement, spec in rule.placed(call))


# ---- torch's rules -------------------------------------------------------------------------------------------------


def _counted_from_the_front(call: OpCall) -> OpCall:
    schema = getattr(call.target, "_schema", None)
    if schema is None or not call.inputs:
        return call
    ndim = len(call.inputs[0].shape) + (call.target in _ADD_A_DIM)
    names = [argument.name for argument in schema.arguments]
    given = zip(names, call.args, strict=False)
    args = tuple(_from_the_front(value, ndim) if name in _DIMS else value for name, value in given)
    at = compat.ALL_DIMS_AT.get(call.target)
    if at is not None and args[at : at + 1] == ((),):
        args = (*args[:at], tuple(range(ndim)), *args[at + 1 :])
    kwargs = tuple((name, _from_the_front(value, ndim) if name in _DIMS else value) for name, value in call.kwargs)
    return replace(call, args=args, kwargs=kwargs)


def _from_the_front(dims: Any, ndim: int) -> Any:
    if isinstance(dims, tuple):
        return tuple(_from_the_front(dim, ndim) for dim in dims)
    return dims + ndim if isinstance(dims, int) and -ndim <= dims < 0 else dims


def _tensor_meta(spec: TensorSpec) -> TensorMeta:
    return TensorMeta(torch.Size(spec.shape), _contiguous_stride(spec.shape), spec.dtype)


def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _thaw(value: Any, leaf: Callable[[TensorSpec], Any]) -> Any:
    """Frozen arguments back as torch's rules expect them: lists for tuples, ``leaf(spec)`` for tensors."""
    if isinstance(value, TensorSpec):
        return leaf(value)
    if isinstance(value, tuple):
        return [_thaw(item, leaf) for item in value]
    return value


def _single_axis(call: OpCall) -> list[OpRule]:
    """Rules from torch's strategies of one axis: lists of ``[outputs..., inputs...]``."""
    function = single_axis_rule(call.target)
    if function is None:
        return []
    args = tuple(_thaw(arg, _tensor_meta) for arg in call.args)
    kwargs = {key: _thaw(value, _tensor_meta) for key, value in call.kwargs}
    try:
        rows = function(call.target, args, kwargs)
    except (NotImplementedError, AssertionError, RuntimeError, ValueError, IndexError, TypeError) as error:
        warnings.warn(f"torch's rule for {call.target} refused {call.inputs}: {error}", stacklevel=2)
        return []
    rules = []
    for row in rows:
        placements = [_from_torch(item) for item in row if item is not None]
        outputs, inputs = _split_row(placements, call)
        if outputs is not None and inputs is not None:
            rules.append(OpRule(outputs, inputs))
    return rules


def _split_row(row: list[Placement | None], call: OpCall) -> tuple[Any, Any]:
    """Cut a row into outputs and inputs; (None, None) where it speaks of kinds of placement that we do not lower."""
    if any(item is None for item in row):
        return None, None
    present = [spec is not None for spec in call.outputs]
    count = len(row) - len(call.inputs)
    if count == len(call.outputs):
        return tuple(row[:count]), tuple(row[count:])
    if count == sum(present):
        rest = iter(row[:count])
        return tuple(next(rest) if here else REPLICATE for here in present), tuple(row[count:])
    return None, None


def _from_torch(item: Any) -> Placement | None:
    """Our placement for one of torch's (or for its placeholder of a shard); None for special subclasses."""
    kind = type(item)
    if kind is compat.Replicate:
        return REPLICATE
    if kind is compat.Partial and item.reduce_op in ("sum", "avg", "max", "min"):
        return Partial(item.reduce_op)
    if kind is compat.Shard or kind.__name__ == "_ShardingPlaceholder":
        return Shard(item.dim)
    return None


@cache
def _planning_mesh(degree: int) -> DeviceMesh:
    """A mesh that only describes: no process group behind it."""
    return DeviceMesh("cpu", list(range(degree)), _init_backend=False, _rank=0)


def _multi_axis(call: OpCall, degree: int) -> list[OpRule]:
    """Rules from torch's older strategies, asked once for every placement that the inputs could come in."""
    function = multi_axis_rule(call.target)
    if function is None:
        return []
    mesh = _planning_mesh(degree)
    ndim = max((len(spec.shape) for spec in call.inputs), default=0)
    offers: list[Placement] = [REPLICATE, Partial(), *(Shard(dim) for dim in range(ndim))]
    rules: dict[OpRule, None] = {}
    for offer in offers:
        try:
            answer = function(_schema(call, offer, mesh, degree))
        except (NotImplementedError, AssertionError, RuntimeError, ValueError, IndexError, TypeError, KeyError):
            continue  # torch's rule has no answer to this offer: other offers may have one
        for rule in _read_answer(answer, call):
            rules[rule] = None
    return list(rules)


def _schema(call: OpCall, offer: Placement, mesh: DeviceMesh, degree: int) -> OpSchema:
    def leaf(spec: TensorSpec) -> OpStrategy:
        placement = offer if fits(offer, spec.shape, degree) else REPLICATE
        dspec = DTensorSpec(mesh, (_to_torch(placement),), tensor_meta=_tensor_meta(spec))
        return OpStrategy([OpSpec(dspec)])

    def wrap(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return leaf(value)
        if isinstance(value, tuple) and value and all(isinstance(item, TensorSpec) for item in value):
            return TupleStrategy([leaf(item) for item in value])
        return _thaw(value, leaf)

    kwargs = {key: wrap(value) for key, value in call.kwargs}
    return OpSchema(call.target, tuple(wrap(arg) for arg in call.args), kwargs)


def _to_torch(placement: Placement) -> Any:
    if isinstance(placement, Shard):
        return compat.Shard(placement.dim)
    if isinstance(placement, Partial):
        return compat.Partial(placement.op)
    if isinstance(placement, Replicate):
        return compat.Replicate()
    raise TypeError(f"DTensor knows no placement {placement}")


def _read_answer(answer: Any, call: OpCall) -> list[OpRule]:
    """Rules in an ``OpStrategy``; a ``TupleStrategy`` (several outputs) is read output by output."""
    if isinstance(answer, TupleStrategy):
        children = [_read_strategy(child, call) for child in answer.children]  # type: ignore[arg-type]
        merged = []
        for rows in zip(*children, strict=True):
            outputs = tuple(row[0][0] for row in rows)
            merged.append((outputs, rows[0][1]))
        return [OpRule(o, i) for o, i in merged if None not in (*o, *i) and _counts_match(o, i, call)]
    return [OpRule(o, i) for o, i in _read_strategy(answer, call) if None not in (*o, *i) and _counts_match(o, i, call)]


def _counts_match(outputs: tuple[Any, ...], inputs: tuple[Any, ...], call: OpCall) -> bool:
    return len(outputs) == len(call.outputs) and len(inputs) == len(call.inputs)


def _read_strategy(strategy: OpStrategy, call: OpCall) -> list[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    rows = []
    for spec in strategy.strategies:
        outs = spec.output_specs if isinstance(spec.output_specs, (tuple, list)) else (spec.output_specs,)
        outputs = tuple(REPLICATE if out is None else _from_torch(out.placements[0]) for out in outs)
        if len(outputs) == 1 and len(call.outputs) > 1:
            outputs = outputs * len(call.outputs)
        ins = spec.input_specs if spec.input_specs is not None else (spec.output_specs,) * len(call.inputs)
        inputs = tuple(_from_torch(item.placements[0]) for item in ins if isinstance(item, DTensorSpec))
        rows.append((outputs, inputs))
    return rows
