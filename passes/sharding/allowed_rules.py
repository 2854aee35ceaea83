"""Which rules of an operator suit the role of a mesh axis and the placements that its inputs may come in."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from cost_models.ops import is_free, is_matmul
from galvatron_fx.ir.graph.op_call import OpCall
from galvatron_fx.ir.graph.placement import PARTIAL, REPLICATE, Partial, Placement, Shard, fits, is_routed
from galvatron_fx.ir.graph.precision import cast_gradient
from galvatron_fx.ir.plan.strategy import BATCH_ROLES
from passes.sharding import (  # noqa: F401  (register rules)
    attention_rules,
    batched_rules,
    collective_rules,
    expert_rules,
    lookup_rules,
    own_rules,
    random_rules,
)
from passes.sharding.fused_rules import JOINS, fused_rules, is_of_features
from passes.sharding.own_rules import VIEWS, view_rules
from passes.sharding.roles import RoleRules
from passes.sharding.rules import MOVES, OpRule, op_rules, strided

# The placements that a value may come in.
Offers = Collection[Placement]


@dataclass(frozen=True)
class AllowedRules:
    """The rules that ``role`` allows on an axis of ``degree`` ranks.

    ``parameter_itemsize``: bytes of an element of the widest floating parameters as they are computed with; 0 if there
    are none, or terms may be rounded to any dtype.
    """

    role: RoleRules
    degree: int
    parameter_itemsize: int

    def of(self, call: OpCall, offers: Sequence[Offers]) -> tuple[OpRule, ...]:
        """List the rules of ``call``, whose inputs may come in as ``offers`` say; those that split what the role is
        there to split, where there are such.
        """
        return _rules(self, call, tuple(map(tuple, offers)))

    def find(self, call: OpCall, offers: tuple[tuple[Placement, ...], ...]) -> tuple[OpRule, ...]:
        """The same, found anew."""
        base = list(op_rules(call, self.degree))
        offered = [*(placement for offer in offers for placement in offer), *self.role.ways_to_split]
        if call.target in VIEWS:
            base += view_rules(call, offered, self.degree)
        else:
            base += [
                *(instance for rule in base for instance in strided(rule, call, offered, self.degree)),
                *(rule for rule in self._in_runs(base, call) if rule not in base),
            ]
        if call.target in JOINS and self.role.runs:
            base += fused_rules(call, offered)
        allowed = [rule for rule in dict.fromkeys(base) if self._allowed(rule, call) and _can_be_had(rule, offers)]
        if any(rule.routes for rule in allowed):
            # Rows as routed cannot be moved: where something on their way has no rule for them, all stay whole.
            return tuple(allowed)
        splitting = [rule for rule in allowed if self._splits(rule, call)]
        return tuple(splitting if any(rule.splits_work for rule in splitting) else allowed)

    def _in_runs(self, base: Sequence[OpRule], call: OpCall) -> Iterator[OpRule]:
        """Rules by which each run of the features is split, though no input comes in so: weights can be had so."""
        runs = [Shard(0, count) for count in self.role.runs]
        for rule in (each for plain in base for each in strided(plain, call, runs, self.degree)):
            if all(
                not isinstance(p, Shard) or spec is None or is_of_features(spec, p.dim) for p, spec in rule.placed(call)
            ):
                yield rule

    def _allowed(self, rule: OpRule, call: OpCall) -> bool:
        if rule.exchanges:
            return self.role.allows_exchange(rule, call)
        fitting = all(
            spec is None or (fits(p, spec.shape, self.degree) and self.role.allows(spec, p, rule.expansion in MOVES))
            for p, spec in rule.placed(call)
        )
        return (
            fitting
            and not self.role.mixes_weights(rule, call)
            and not self._sums_features(rule, call)
            and not self._rounds_otherwise(rule, call)
        )

    def _rounds_otherwise(self, rule: OpRule, call: OpCall) -> bool:
        """Whether the rule adds up terms in a narrower dtype than the parameters have, or casts terms to a narrower
        one.

        Splitting a sum changes its last bits. In the dtype of the parameters that is the precision of training; in a
        narrower one (float32 statistics and losses of a float64 model) it would be visible in the result. A gradient
        is reduced in the dtype that the user's policy asks for.
        """
        out = next((spec.dtype for spec in call.outputs if spec is not None), torch.int64)
        gathers = bool(rule.expansion) and rule.outputs[0] == REPLICATE
        if gathers:
            return out.itemsize >= self.parameter_itemsize  # terms are cheaper, where they are allowed
        sums = (rule.expansion and rule.expansion not in MOVES) or isinstance(rule.outputs[0], Partial)
        if not out.is_floating_point or not sums or call.target is cast_gradient:
            return False
        if not self.parameter_itemsize:
            return False
        casts = call.target is torch.ops.aten._to_copy.default and out.itemsize < call.inputs[0].dtype.itemsize
        return casts or out.itemsize < self.parameter_itemsize

    def _sums_features(self, rule: OpRule, call: OpCall) -> bool:
        """Whether a mere reduction would leave terms of a feature dim: it costs more messages than the split saves
        work, and in models that compute statistics in a lower precision it would change their rounding."""
        if rule.expansion or is_matmul(call.target) or not isinstance(rule.outputs[0], Partial):
            return False
        return any(
            isinstance(p, Shard) and not getattr(spec.symbolic[p.dim], "free_symbols", ())
            for p, spec in zip(rule.inputs, call.inputs, strict=True)
        )

    def _splits(self, rule: OpRule, call: OpCall) -> bool:
        """Whether the rule splits what the role is there to split, as far as an output holds it (views are free)."""
        return (is_free(call.target) and self.role.role not in BATCH_ROLES) or all(
            spec is None or p != REPLICATE or not self.role.must_split(spec)
            for p, spec in zip(rule.outputs, call.outputs, strict=True)
        )


@lru_cache(maxsize=1 << 16)
def _rules(allowed: AllowedRules, call: OpCall, offers: tuple[tuple[Placement, ...], ...]) -> tuple[OpRule, ...]:
    """Equal operators are asked for again at every share of the batch."""
    return allowed.find(call, offers)


def _can_be_had(rule: OpRule, offers: Sequence[Offers]) -> bool:
    """Whether all that the rule takes can be had: rows as routed where they are made; sums of terms from anything whole
    and from averages, other terms where they are made.
    """
    return all(
        p in offer
        or not (is_routed(p) or isinstance(p, Partial))
        or (p == PARTIAL and (REPLICATE in offer or Partial("avg") in offer))
        for p, offer in zip(rule.inputs, offers, strict=True)
    )
