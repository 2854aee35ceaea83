"""Whether an operator may be run on tensors as they are placed: what the verifier asks the sharding rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from galvatron_fx.ir.graph.metadata import TensorSpec
from galvatron_fx.ir.graph.op_call import OpCall
from galvatron_fx.ir.graph.placement import (
    ROUTED_ENDS,
    Exchanged,
    Inside,
    Placement,
    Replicate,
    Shard,
    fits,
    kept_by_view,
    through_view,
)
from galvatron_fx.ir.graph.verifier import Local, PlacedCall, verify
from passes.sharding import attention_rules, batched_rules, collective_rules, expert_rules, own_rules, random_rules  # noqa: F401  (register rules)  # noqa: F401  (likewise)
from passes.sharding.fused_rules import JOINS, fused_rules
from passes.sharding.local_args import localize_args
from passes.sharding.own_rules import VIEWS
from passes.sharding.rules import OpRule, op_rules, strided


def verify_placed(graph: fx.GraphModule, stage: str, after: str) -> None:
    """Check a lowered graph, or a part of one, by the sharding rules of its operators. Raises VerifierError."""
    verify(graph, stage, after, placement_problem)


def placement_problem(call: PlacedCall) -> str | None:
    """What is wrong with the placements of ``call``, None if some rule of its operator allows them on every column."""
    for column in range(call.first, len(call.degrees)):
        inputs = tuple(placed[column] for placed in call.inputs)
        outputs = tuple(placed[column] for placed in call.outputs)
        if all(isinstance(placement, Replicate) for placement in (*inputs, *outputs)):
            continue
        if any(isinstance(placement, Inside) for placement in (*inputs, *outputs)):
            return f"is no part of a local program, and takes {_text(inputs)} and leaves {_text(outputs)}"
        if not _has_rule(_seen_from(call, column), OpRule(outputs, inputs), call.degrees[column]):  # type: ignore[arg-type]
            return f"takes {_text(inputs)} and leaves {_text(outputs)} on mesh column {column}: it has no such rule"
    return None


def _text(placements: Sequence[Any]) -> str:
    return ", ".join(map(str, placements)) or "nothing"


def _seen_from(call: PlacedCall, column: int) -> OpCall:
    """The call as it was when ``column`` was lowered: local to the columns before, whole to it and those after."""

    def whole(local: Local, placed: Sequence[Any]) -> TensorSpec:
        sizes = list(local.shape)
        for degree, placement in zip(call.degrees[column:], placed[column:], strict=True):
            if isinstance(placement, Shard) and placement.dim < len(sizes):
                sizes[placement.dim] *= degree
        return TensorSpec(tuple(sizes), local.dtype)

    placed = iter(call.inputs)
    inputs: list[TensorSpec] = []

    def thaw(value: Any) -> Any:
        if isinstance(value, Local):
            inputs.append(whole(value, next(placed)))
            return inputs[-1]
        return tuple(map(thaw, value)) if isinstance(value, tuple) else value

    args = tuple(map(thaw, call.args))
    kwargs = tuple(sorted((name, thaw(value)) for name, value in call.kwargs))
    outputs = tuple(
        None if local is None else whole(local, places) for local, places in zip(call.locals, call.outputs, strict=True)
    )
    return OpCall(call.target, _as_tuples(localize_args(call.target, args, outputs)), kwargs, tuple(inputs), outputs)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, (list, tuple)) else value


def _has_rule(call: OpCall, rule: OpRule, degree: int) -> bool:
    if not _fits(rule, call, degree):
        rule = _of_sorted_rows(rule)
        if not _fits(rule, call, degree):
            return False
    if rule in op_rules(call, degree):
        return True
    if call.target in JOINS and rule in fused_rules(call, (*rule.inputs, *rule.outputs)):
        return True
    if call.target in VIEWS:
        return _views(rule.inputs[0], rule.outputs[0], call, degree)
    if rule.exchanges:
        placed = (*rule.inputs, *rule.outputs)
        return any(rule in strided(plain, call, placed, degree) for plain in op_rules(call, degree))
    shards = [placement for placement in (*rule.inputs, *rule.outputs) if isinstance(placement, Shard)]
    if len({(shard.split_factor, shard.mirrored) for shard in shards}) != 1:
        return False
    if _unstrided(rule, keep_routed=True) in op_rules(call, degree):
        return True
    return len({shard.routed for shard in shards}) == 1 and _unstrided(rule) in op_rules(call, degree)


def _fits(rule: OpRule, call: OpCall, degree: int) -> bool:
    return all(spec is None or fits(placement, spec.shape, degree) for placement, spec in rule.placed(call))


def _of_sorted_rows(rule: OpRule) -> OpRule:
    """The rule for rows that a later axis has exchanged: the runs that they came from are none of theirs any more."""

    def sorted_rows(side: Sequence[Placement]) -> tuple[Placement, ...]:
        return tuple(Shard(p.dim, routed=True) if isinstance(p, Shard) and p.routed else p for p in side)

    return OpRule(sorted_rows(rule.outputs), sorted_rows(rule.inputs))


def _views(have: Placement, want: Placement, call: OpCall, degree: int) -> bool:
    """Whether a reshape carries a shard on as it says, seen from either side."""
    if isinstance(have, Exchanged):
        return kept_by_view(have, call.inputs[0].shape, call.output.shape) == want
    if not isinstance(have, Shard) or not isinstance(want, Shard):
        return have == want == ROUTED_ENDS
    source, target = call.inputs[0].shape, call.output.shape
    forth = through_view(have, source, target, degree) == want
    return forth or through_view(want, target, source, degree) == have


def _unstrided(rule: OpRule, keep_routed: bool = False) -> OpRule:
    """The rule with plain shards: it holds for any equal subset of indices that all of its tensors are split in."""

    def plain(side: Sequence[Placement]) -> tuple[Placement, ...]:
        return tuple(Shard(p.dim, routed=p.routed and keep_routed) if isinstance(p, Shard) else p for p in side)

    return OpRule(plain(rule.outputs), plain(rule.inputs))
