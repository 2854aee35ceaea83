"""The plan: one strategy for every layer block, over the prime axes of one mesh, and what it is predicted to cost.

Search writes plans and lowering reads them; they meet nowhere else. A plan is searched, or written by
hand with :meth:`Plan.uniform` and :meth:`Plan.from_roles`, and kept as JSON.
"""

from __future__ import annotations

import copy
import hashlib
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

from galvatron_fx.ir.errors import PlanError
from galvatron_fx.ir.plan import plan_json, plan_table, report_json
from galvatron_fx.ir.plan.arguments import check_arguments, shown
from galvatron_fx.ir.plan.optimizers import ADAM, check_optimizer
from galvatron_fx.ir.plan.pipelining import BY_HAND, ENDS, ONE_STAGE, SPREAD_ENDS, Pipelining
from galvatron_fx.ir.plan.precision_policy import describe_policy, policy_from_dict, policy_to_dict
from galvatron_fx.ir.plan.schedule import legal
from galvatron_fx.ir.plan.search_report import SearchReport
from galvatron_fx.ir.plan.strategy import CAPACITY, PIPELINE, Strategy
from galvatron_fx.ir.plan.throughput import Throughput

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["WILDCARD", "BlockPlan", "Plan", "prime_factors"]

WILDCARD = "*"
"""The name of a block plan that stands alone and applies to any number of blocks."""

_MAX_AXIS_SIZE = 2**20

_CHANGED = (
    "the model, its inputs, or values of these by which forward decides changed since; search the plan again, on such "
    "inputs as those that it is for"
)


@dataclass(frozen=True)
class BlockPlan:
    """The decision for one layer block.

    ``fingerprint`` is that of the block in the captured graph, or "" for a plan tied to no model;
    ``time_s`` is the predicted share of the step in seconds, ``memory_bytes`` of the memory per rank
    in bytes; both are 0 where the plan was not priced.
    """

    name: str
    strategy: Strategy
    fingerprint: str
    time_s: float
    memory_bytes: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "time_s", _as_float(self.time_s))


@dataclass(frozen=True)
class Plan:
    """A strategy for every block of a model on a mesh, with the predictions it was chosen by.

    ``axis_sizes`` has the ranks along each mesh axis, outermost first, each a prime; it is () for one
    device. ``graph_fingerprint`` is that of the captured graph, or "" for a plan that fits any model.
    ``step_time_s`` is the simulated seconds of a step, ``peak_memory_bytes`` and ``memory_budget_bytes`` bytes per rank
    (0 where not priced, None for no budget). ``optimizer`` is the one of OPTIMIZERS whose states and update they count.
    ``axis_names`` has what the user calls the axes, nothing where they have no names; it is for people alone.
    ``forward_only`` is of a plan without backward, gradients and optimizer. ``pipelining`` has the stages and
    micro-batches; the axes whose role is ``pipeline``, the same in every block, hold the stages. ``mixed_precision`` is
    the policy that the plan was priced with; ``throughput`` what a step trains, None where not priced. ``rank_order``
    has the rank at each position of the mesh, row by row, nothing where they are in their own order.
    ``device_kinds`` has the kind of device of each pipeline rank, nothing where all are of one; it is for people alone.
    ``fold_gradients``: whether each parameter is updated as soon as backward has its gradient. ``report`` says why a
    search chose the plan; it is no part of the plan, and lies in a file of its own: plans that were written by hand or
    changed have None.

    Raises PlanError when the parts do not fit each other or ``plan_schema.json``.
    """

    axis_sizes: tuple[int, ...]
    blocks: tuple[BlockPlan, ...]
    graph_fingerprint: str
    step_time_s: float
    peak_memory_bytes: int
    memory_budget_bytes: int | None
    optimizer: str = ADAM
    notes: tuple[str, ...] = ()
    pipelining: Pipelining = ONE_STAGE
    mixed_precision: MixedPrecisionPolicy | None = None
    throughput: Throughput | None = None
    axis_names: tuple[str, ...] = ()
    rank_order: tuple[int, ...] = ()
    fold_gradients: bool = False
    forward_only: bool = False
    device_kinds: tuple[str, ...] = ()
    report: SearchReport | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "step_time_s", _as_float(self.step_time_s))
        if not isinstance(self.pipelining, Pipelining):
            raise PlanError(f"pipelining of a plan is {shown(self.pipelining)}; give a Pipelining(...)")
        for name in ("axis_sizes", "axis_names", "blocks", "notes", "rank_order", "device_kinds"):
            if not isinstance(getattr(self, name), tuple):
                raise PlanError(f"{name} of a plan is a {type(getattr(self, name)).__name__}; give a tuple")
        plan_json.validate(_to_document(self))
        check_optimizer(self.optimizer)
        if self.fold_gradients and not self.pipelining.is_trivial:
            raise PlanError(
                f"a plan with {self.pipelining.num_stages} stages and {self.pipelining.num_microbatches} micro-batches "
                f"folds gradients into updates: they are sums over micro-batches, complete at the end of the step; use "
                f"one stage and one micro-batch, or fold_gradients=False"
            )
        for axis, size in enumerate(self.axis_sizes):
            if prime_factors(size) != (size,):
                raise PlanError(
                    f"mesh axis {axis} of the plan has size {size}, where a prime was expected; split it into "
                    f"{prime_factors(size)} and give each its role, or build the plan with Plan.from_roles"
                )
        if self.axis_names and len(self.axis_names) != len(self.axis_sizes):
            raise PlanError(
                f"a plan for axes {self.axis_sizes} names {len(self.axis_names)} of them: {self.axis_names}; give a "
                f"name for each, or none"
            )
        if self.device_kinds and len(self.device_kinds) != self.num_pipeline_ranks:
            raise PlanError(
                f"a plan of {self.num_pipeline_ranks} pipeline ranks names the devices of {len(self.device_kinds)}; "
                f"name those of each, or none"
            )
        _check_order(self)
        _check_blocks(self)
        _check_stages(self)

    @classmethod
    def uniform(
        cls,
        axis_sizes: Sequence[int],
        roles: Sequence[str],
        *,
        recompute: bool = False,
        keep_gathered: bool = False,
        gather_late: bool = False,
        capacity: float = CAPACITY,
        shadows: int = 0,
        offload_states: bool = False,
        offload_parameters: bool = False,
        split_gathers: int = 1,
        num_blocks: int | None = None,
        pipelining: Pipelining = ONE_STAGE,
        fold_gradients: bool = False,
    ) -> Plan:
        """Write a plan by hand that treats every block alike.

        ``axis_sizes`` has the ranks along each mesh axis and ``roles`` the role of each, outermost
        first; every prime factor of an axis gets its role, and axes of size 1 vanish. With
        ``num_blocks`` the plan fits models of so many blocks, without it any. Raises PlanError for
        unknown roles, and when there are not as many roles as axes.
        """
        check_arguments(axis_sizes=axis_sizes, roles=roles, num_blocks=num_blocks)
        strategy = Strategy(
            tuple(roles),
            recompute,
            keep_gathered,
            gather_late,
            capacity,
            offload_states=offload_states,
            offload_parameters=offload_parameters,
            split_gathers=split_gathers,
            shadows=shadows,
        )
        if num_blocks is not None:
            plan = cls.from_roles(axis_sizes, [strategy] * num_blocks, pipelining)
            return replace(plan, fold_gradients=fold_gradients)
        split = _split_roles(strategy, tuple(axis_sizes), [prime_factors(size) for size in axis_sizes])
        primes = tuple(prime for size in axis_sizes for prime in prime_factors(size))
        blocks = (BlockPlan(WILDCARD, split, "", 0.0, 0),)
        return cls(primes, blocks, "", 0.0, 0, None, pipelining=pipelining, fold_gradients=fold_gradients)

    @classmethod
    def from_roles(
        cls, axis_sizes: Sequence[int], strategies: Sequence[Strategy], pipelining: Pipelining = ONE_STAGE
    ) -> Plan:
        """Write a plan by hand with one strategy per block, in the order of the blocks.

        The axes are split into primes as in :meth:`uniform`. Raises PlanError for no strategies, and
        for one with not as many roles as axes.
        """
        check_arguments(axis_sizes=axis_sizes, strategies=strategies)
        sizes = tuple(axis_sizes)
        factors = [prime_factors(size) for size in sizes]
        blocks = tuple(
            BlockPlan(f"block_{index}", _split_roles(strategy, sizes, factors), "", 0.0, 0)
            for index, strategy in enumerate(strategies)
        )
        primes = tuple(prime for primes in factors for prime in primes)
        return cls(primes, blocks, "", 0.0, 0, None, pipelining=pipelining)

    @property
    def pipeline_axes(self) -> tuple[int, ...]:
        """The mesh axes that hold the stages."""
        return tuple(axis for axis, role in enumerate(self.blocks[0].strategy.roles) if role == PIPELINE)

    @property
    def num_pipeline_ranks(self) -> int:
        """The product of the sizes of the pipeline axes."""
        return prod(self.axis_sizes[axis] for axis in self.pipeline_axes)

    @property
    def is_wildcard(self) -> bool:
        """Whether the plan has one strategy for any number of blocks."""
        return len(self.blocks) == 1 and self.blocks[0].name == WILDCARD

    @property
    def is_tied(self) -> bool:
        """Whether the plan is of one model: it was searched, and not written by hand."""
        return bool(self.graph_fingerprint) or any(block.fingerprint for block in self.blocks)

    def strategy_of(self, block_index: int, num_blocks: int) -> Strategy:
        """Return the strategy of block ``block_index`` (from 0) of a model with ``num_blocks`` blocks.

        Raises PlanError when the plan has another number of blocks, and when there is no such block.
        """
        self._check_count(num_blocks)
        if not 0 <= block_index < num_blocks:
            raise PlanError(f"block {block_index} of a model with {num_blocks} blocks; give 0 to {num_blocks - 1}")
        return self.blocks[0 if self.is_wildcard else block_index].strategy

    def check(
        self,
        graph_fingerprint: str,
        block_fingerprints: Sequence[str],
        axis_sizes: Sequence[int],
        mixed_precision: MixedPrecisionPolicy | None = None,
        forward_only: bool = False,
    ) -> None:
        """Raise PlanError, naming what differs and the remedy, unless the plan fits this model, mesh and precision.

        ``block_fingerprints`` has one entry per block; ``axis_sizes`` is compared prime by prime, so
        that a mesh of (8,) fits a plan for (2, 2, 2). A fingerprint of "" in the plan fits any; a plan with no
        fingerprints and no policy of its own fits any precision, and trains or is ``forward_only``.
        """
        if self.with_forward_only(forward_only).forward_only != forward_only:
            mine, this = ("forward alone", "training") if self.forward_only else ("training", "forward alone")
            raise PlanError(
                f"the plan was made for {mine} and this is {this}; pass forward_only={self.forward_only}, or search a "
                f"plan with forward_only={forward_only}"
            )
        if self.with_precision(mixed_precision).mixed_precision != mixed_precision:
            raise PlanError(
                f"the plan was made for mixed precision '{describe_policy(self.mixed_precision)}' and this is "
                f"'{describe_policy(mixed_precision)}'; pass mixed_precision=plan.mixed_precision, or search the plan "
                f"again"
            )
        primes = tuple(prime for size in axis_sizes for prime in prime_factors(size))
        if primes != self.axis_sizes:
            raise PlanError(
                f"the plan is for a mesh with axes {self.axis_sizes} and this mesh has {primes}; "
                f"run on the mesh of the plan, or search a plan for this one"
            )
        self._check_count(len(block_fingerprints))
        for index, (block, fingerprint) in enumerate(zip(self.blocks, block_fingerprints, strict=False)):
            if block.fingerprint not in ("", fingerprint):
                raise PlanError(
                    f"block {index} ('{block.name}') of the plan has fingerprint {block.fingerprint} and that of the "
                    f"model {fingerprint}: {_CHANGED}"
                )
        if not self.is_of(graph_fingerprint):
            raise PlanError(
                f"the plan was made for graph {self.graph_fingerprint} and this is graph {graph_fingerprint}, though "
                f"the blocks agree: {_CHANGED}"
            )

    def is_of(self, graph_fingerprint: str) -> bool:
        """Whether it was made for a graph with this fingerprint, or for any."""
        return self.graph_fingerprint in ("", graph_fingerprint)

    def with_precision(self, policy: MixedPrecisionPolicy | None) -> Plan:
        """Return a plan that is tied to no model, and says nothing of precision, with ``policy``; others unchanged."""
        if self.is_tied or self.mixed_precision is not None or policy is None:
            return self
        return replace(self, mixed_precision=policy)

    def with_forward_only(self, forward_only: bool) -> Plan:
        """Return a plan that is tied to no model, and says nothing of it, as one of forward alone; others unchanged."""
        return self if self.is_tied or not forward_only else replace(self, forward_only=True)

    def to_json(self) -> str:
        """Return the plan as JSON text, byte-identical for equal plans."""
        return plan_json.serialize(_to_document(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what :meth:`to_json` wrote; raises PlanError, and nothing else, for any other text."""
        document = plan_json.parse(text)
        del document["version"]
        blocks = tuple(
            BlockPlan(**{**fields, "strategy": Strategy.from_dict(fields["strategy"])})
            for fields in document.pop("blocks")
        )
        axis_sizes, notes = tuple(document.pop("axis_sizes")), tuple(document.pop("notes"))
        axis_names, rank_order = tuple(document.pop("axis_names", ())), tuple(document.pop("rank_order", ()))
        pipelining = Pipelining.from_dict(document.pop("pipelining"))
        policy = policy_from_dict(document.pop("mixed_precision", None))
        throughput = Throughput.from_dict(document.pop("throughput", None))
        return cls(
            axis_sizes=axis_sizes,
            blocks=blocks,
            notes=notes,
            pipelining=pipelining,
            mixed_precision=policy,
            throughput=throughput,
            axis_names=axis_names,
            rank_order=rank_order,
            device_kinds=tuple(document.pop("device_kinds", ())),
            **document,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to ``path``, all at once or not at all, and its report, if it has one, beside it: that of
        ``plan.json`` is ``plan.report.json``. Raises OSError.
        """
        check_arguments(path=path)
        plan_json.write(path, self.to_json())
        if self.report is not None:
            plan_json.write(report_json.report_path(path), report_json.write_report(self.report, self.digest()))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read the plan at ``path``, with the report beside it if that is its own (a malformed one is warned of).

        Raises PlanError naming the path for a missing or malformed file.
        """
        check_arguments(path=path)
        text = plan_json.read(path)
        try:
            plan = cls.from_json(text)
        except PlanError as error:
            raise PlanError(f"{os.fspath(path)}: {error}") from error
        return plan.with_report_beside(path)

    def with_report_beside(self, path: str | os.PathLike[str]) -> Plan:
        """Return the plan, read from ``path``, with the report that :meth:`save` wrote beside it, if there is one."""
        try:
            report = report_json.read_report(path, self.digest())
        except PlanError as error:
            warnings.warn(f"{error}; the plan is read without its reasons", stacklevel=3)
            return self
        return self if report is None else self.with_report(report)

    def with_report(self, report: SearchReport) -> Plan:
        """Return the plan with the report of the search that chose it."""
        plan = copy.copy(self)
        object.__setattr__(plan, "report", report)
        return plan

    def digest(self) -> str:
        """Return the SHA-256 of the JSON text, in hexadecimal, for ranks to compare."""
        return hashlib.sha256(self.to_json().encode("ascii")).hexdigest()

    def __str__(self) -> str:
        """Return the plan as a table of plain text."""
        return plan_table.render(self)

    def _check_count(self, num_blocks: int) -> None:
        if not self.is_wildcard and num_blocks != len(self.blocks):
            raise PlanError(
                f"the plan has {len(self.blocks)} blocks and the model {num_blocks}; search a plan for this model, "
                f"or write one for any number of blocks with Plan.uniform"
            )


def prime_factors(size: int) -> tuple[int, ...]:
    """Return the prime factors of the size of a mesh axis, ascending: 12 -> (2, 2, 3), 1 -> ().

    Raises PlanError unless ``size`` is an int from 1 to 2**20.
    """
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= _MAX_AXIS_SIZE:
        raise PlanError(
            f"a mesh axis has size {size!r}, where an int from 1 to {_MAX_AXIS_SIZE} was expected; "
            f"give the number of ranks along it"
        )
    factors, divisor = [], 2
    while divisor * divisor <= size:
        while size % divisor == 0:
            factors.append(divisor)
            size //= divisor
        divisor += 1
    return (*factors, size) if size > 1 else tuple(factors)


def _split_roles(strategy: Strategy, sizes: tuple[int, ...], factors: list[tuple[int, ...]]) -> Strategy:
    """Give every prime factor of an axis the role of the axis; raises PlanError for a wrong number of roles."""
    if len(strategy.roles) != len(sizes):
        raise PlanError(
            f"strategy '{strategy}' has {len(strategy.roles)} roles for a mesh with axes {sizes}; give one role per "
            f"axis, or name the prime axes {tuple(prime for primes in factors for prime in primes)} to tell them apart"
        )
    roles = (role for role, primes in zip(strategy.roles, factors, strict=True) for _ in primes)
    return replace(strategy, roles=tuple(roles))


def _check_order(plan: Plan) -> None:
    """Raise PlanError for an order that does not name every rank once; one that changes nothing is left out."""
    if not plan.rank_order:
        return
    ranks = list(range(prod(plan.axis_sizes)))
    if sorted(plan.rank_order) != ranks:
        raise PlanError(
            f"rank_order of the plan is {str(list(plan.rank_order))[:80]}; name each of the {len(ranks)} ranks of axes "
            f"{plan.axis_sizes} once, or leave it out"
        )
    if list(plan.rank_order) == ranks:
        object.__setattr__(plan, "rank_order", ())


def _check_blocks(plan: Plan) -> None:
    """Raise PlanError for a strategy of another mesh, and for a wildcard that is not alone and free."""
    for index, block in enumerate(plan.blocks):
        if len(block.strategy.roles) != len(plan.axis_sizes):
            raise PlanError(
                f"block {index} ('{block.name}') has strategy '{block.strategy}' with {len(block.strategy.roles)} "
                f"roles for a mesh with axes {plan.axis_sizes}; give one role per axis"
            )
        if block.name == WILDCARD and (len(plan.blocks) > 1 or block.fingerprint or plan.graph_fingerprint):
            raise PlanError(
                f"block {index} is named '{WILDCARD}', which stands for all blocks of any model, in a plan with "
                f"{len(plan.blocks)} blocks and graph fingerprint '{plan.graph_fingerprint}'; name the block"
            )


def _check_stages(plan: Plan) -> None:
    """Raise PlanError for stages that the blocks, the axes or the schedule do not allow."""
    for index, block in enumerate(plan.blocks):
        stage_axes = tuple(axis for axis, role in enumerate(block.strategy.roles) if role == PIPELINE)
        if stage_axes != plan.pipeline_axes:
            raise PlanError(
                f"block {index} ('{block.name}') gives the role {PIPELINE} to axes {stage_axes} and block 0 to axes "
                f"{plan.pipeline_axes}; give it to the same axes in every block"
            )
    if not plan.is_wildcard:
        plan.pipelining.cuts(len(plan.blocks))
    ranks = plan.num_pipeline_ranks
    if plan.pipelining.is_spread and ranks == 1:
        raise PlanError(
            f"vocabulary={SPREAD_ENDS!r} spreads embedding and head over pipeline ranks, and the plan has no axis of "
            f"role '{PIPELINE}': give some axis that role, or vocabulary={ENDS!r}"
        )
    if plan.pipelining.schedule == BY_HAND:
        plan.pipelining.table(ranks)
        return
    reason = legal(plan.pipelining.schedule, ranks, plan.pipelining.num_stages, plan.pipelining.num_microbatches)
    if reason is not None:
        raise PlanError(f"{reason} (the plan has {ranks} pipeline ranks and {plan.pipelining.num_stages} stages)")


def _to_document(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain JSON values, unchecked; without a policy there is no word of mixed precision."""
    policy = policy_to_dict(plan.mixed_precision)
    return {
        "version": plan_json.PLAN_VERSION,
        "axis_sizes": list(plan.axis_sizes),
        "blocks": [{**vars(block), "strategy": block.strategy.to_dict()} for block in plan.blocks],
        "graph_fingerprint": plan.graph_fingerprint,
        "step_time_s": plan.step_time_s,
        "peak_memory_bytes": plan.peak_memory_bytes,
        "memory_budget_bytes": plan.memory_budget_bytes,
        "optimizer": plan.optimizer,
        "notes": list(plan.notes),
        "pipelining": plan.pipelining.to_dict(),
        **({} if policy is None else {"mixed_precision": policy}),
        **({"fold_gradients": True} if plan.fold_gradients else {}),
        **({} if plan.throughput is None else {"throughput": plan.throughput.to_dict()}),
        **({"axis_names": list(plan.axis_names)} if plan.axis_names else {}),
        **({"rank_order": list(plan.rank_order)} if plan.rank_order else {}),
        **({"forward_only": True} if plan.forward_only else {}),
        **({"device_kinds": list(plan.device_kinds)} if plan.device_kinds else {}),
    }


def _as_float(value: float) -> float:
    """Turn a time given as a small int into the float it equals, so that equal plans have equal text."""
    return float(value) if type(value) is int and abs(value) < 2**53 else value
