"""A plan on a graph: whether it fits, a strategy for each block, and the graphs that it gives."""

from __future__ import annotations

import warnings
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import lcm, prod
from typing import Any

from torch import fx

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.errors import PlanError
from galvatron_fx.ir.graph.metadata import meta_of, ports, signature
from galvatron_fx.ir.graph.pass_pipeline import PassControl
from galvatron_fx.ir.graph.placement import Placement
from galvatron_fx.ir.graph.precision import policy_of
from galvatron_fx.ir.kernels.experts import route
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.strategy import (
    CONTEXT,
    EXPERT,
    EXPERT_ROLES,
    EXPERT_SEQUENCE,
    PIPELINE,
    Strategy,
    batch_ranks,
)
from passes.analysis.block_names import named_block
from passes.analysis.blocks import fingerprints, graph_fingerprint, num_blocks, num_values
from passes.analysis.fused_values import fused_again
from passes.lowering.lower_stages import LoweredStages, LowerStages
from passes.lowering.lower_step import Lower, Lowered
from passes.lowering.pad_batch import CoupledSamplesError
from passes.lowering.padded_batch import padded, padded_size

__all__ = [
    "check_batch",
    "check_plan",
    "computed_batch",
    "divided",
    "expand",
    "in_order",
    "lower",
    "strategies_on",
    "warn_uneven_batch",
    "warn_uneven_vocabulary",
    "warn_untrained_ranks",
    "warn_without_experts",
    "warn_without_sequence",
    "with_spread_ends",
]


def check_plan(plan: Plan, graph: fx.GraphModule, cluster: Cluster) -> None:
    """Refuse a plan for another model, mesh, batch or precision. Raises PlanError naming what differs, and ClusterError
    where devices of several kinds would share a stage.
    """
    block_fingerprints = fingerprints(graph)
    forward_only = signature(graph).forward_only
    mark = graph_fingerprint(graph, block_fingerprints)
    plan.check(mark, block_fingerprints, cluster.shape, policy_of(graph), forward_only)
    in_order(cluster, plan).parts(len(plan.pipeline_axes))
    _check_keeps(plan, graph)
    check_batch(plan, graph)
    _check_sequence(plan, graph)


def _check_sequence(plan: Plan, graph: fx.GraphModule) -> None:
    """Refuse a ring of ranks whose chunks do not divide the sequence. Raises PlanError naming the block."""
    symbols = graph.meta.get("symbols")
    if symbols is None or not symbols.sequence:
        return
    for index, strategy in enumerate(expand(plan, num_blocks(graph))):
        chunks = 2 * prod(size for role, size in zip(strategy.roles, plan.axis_sizes, strict=True) if role == CONTEXT)
        if chunks > 2 and symbols.sequence % chunks:
            whole = -(-symbols.sequence // chunks) * chunks
            raise PlanError(
                f"{named_block(graph, index)} ({strategy}) cuts a sequence of {symbols.sequence} tokens into {chunks} "
                f"chunks, two a rank of its ring, which do not divide it: pad it to {whole} tokens (labels of -100, "
                f"and an attention mask that hides them where attention is not causal), or give fewer axes the role "
                f"'context'"
            )


def _check_keeps(plan: Plan, graph: fx.GraphModule) -> None:
    counts = num_values(graph)
    for index, strategy in enumerate(expand(plan, len(counts))):
        if strategy.num_values not in (0, counts[index]):
            what = f"keeps {len(strategy.keeps)}" if strategy.keeps else f"offloads {len(strategy.offloads)}"
            raise PlanError(
                f"{named_block(graph, index)} of the plan {what} of {strategy.num_values} values for backward, and in "
                f"this model that block has {counts[index]}: the model changed since, or the plan is of another "
                f"release; search the plan again, or write a strategy without keeps and offloads"
            )


def warn_without_sequence(plan: Plan, graph: fx.GraphModule) -> None:
    """Tell of roles in a plan that somebody gave that have nothing to split; :mod:`galvatron_fx.ir.graph.symbols` says
    where a graph has no sequence.
    """
    symbols = graph.meta.get("symbols")
    if symbols is not None and symbols.sequence:
        return
    same = "its ranks all compute the same"
    for role, stays in (
        ("sequence", same),
        (CONTEXT, same),
        (EXPERT_SEQUENCE, same),
        ("tensor_sequence", "it is as 'tensor'"),
    ):
        if any(role in block.strategy.roles for block in plan.blocks):
            warnings.warn(
                f"role '{role}' splits no sequence in this model, so {stays}: the model fixes the length, or takes no "
                f"inputs of [batch, sequence]. Let positions follow the inputs' length, or give other roles",
                stacklevel=3,
            )


def warn_without_experts(plan: Plan, graph: fx.GraphModule) -> None:
    """Tell of roles for experts, in a plan that somebody gave, that find none, or too odd a number of them."""
    counts = sorted({int(node.args[1]) for node in graph.graph.nodes if node.target is route})
    for strategy in dict.fromkeys(block.strategy for block in plan.blocks):
        ranks = prod(size for role, size in zip(strategy.roles, plan.axis_sizes, strict=True) if role in EXPERT_ROLES)
        odd = [count for count in counts if count % ranks]
        if strategy.splits_experts and (odd or not counts):
            found = (
                f"its {odd[0]} experts over {ranks} ranks do not divide" if odd else "it has none that tokens choose"
            )
            role, alike = ("expert", "data") if EXPERT in strategy.roles else (EXPERT_SEQUENCE, "sequence")
            warnings.warn(
                f"role '{role}' ({strategy}) splits no experts in this model, so it is as '{alike}': {found}. Give the "
                f"axis another role, or a size that divides the experts",
                stacklevel=3,
            )
            return


def warn_uneven_vocabulary(plan: Plan, graph: fx.GraphModule) -> None:
    """Tell of a weight of the head, in a plan that spreads it, of which ranks cannot hold equal parts of the rows."""
    ranks, last = plan.num_pipeline_ranks, num_blocks(graph) - 1
    for port, node in ports(graph) if plan.pipelining.is_spread else ():
        shape = meta_of(node).spec.shape
        is_weight = port.kind == "param" and len(shape) > 1
        calls = [user for user in node.users if user.op == "call_function"]
        if is_weight and max(shape) % ranks and any(meta_of(call).block == last for call in calls):
            warnings.warn(
                f"'{port.name}' is to be spread over {ranks} pipeline ranks, which do not divide its {max(shape)} "
                f"rows: it is split otherwise or not at all, and every rank computes more than its part. Pad it to "
                f"{-(-max(shape) // ranks) * ranks} rows (in transformers "
                f"resize_token_embeddings(pad_to_multiple_of={ranks})), or use vocabulary='ends'",
                stacklevel=3,
            )
            return


def warn_untrained_ranks(plan: Plan, graph: fx.GraphModule) -> None:
    """Tell of pipeline ranks without a parameter that trains: torch's optimizers refuse an empty list there."""
    if plan.pipelining.num_stages == 1 or signature(graph).forward_only:
        return
    try:
        cuts, schedule = plan.pipelining.cuts(num_blocks(graph)), plan.pipelining.table(plan.num_pipeline_ranks)
    except PlanError:  # lowering refuses it, after ranks have compared their plans
        return
    train: set[int] = set()
    for port, node in ports(graph):
        if port.kind == "param" and port.requires_grad:
            blocks = {max(meta_of(user).block, 0) for user in node.users if user.op == "call_function"}
            train.update(rank for block in blocks for rank in schedule.ranks_of(bisect(cuts, block) - 1))
    idle = sorted(set(range(schedule.num_ranks)) - train)
    if train and idle:
        warnings.warn(
            f"no parameter of pipeline rank {', '.join(map(str, idle))} trains: an optimizer that is given those that "
            f"do finds none there, and torch refuses an empty list. Give it all of model.parameters() (frozen ones "
            f"stay as they are), or let stages begin at other blocks, where a rank has no parameter at all",
            stacklevel=4,
        )


def warn_uneven_batch(plan: Plan, graph: fx.GraphModule) -> None:
    """Tell of a batch that ranks and micro-batches do not divide: what is computed beyond it, and which one would."""
    symbols = graph.meta.get("symbols")
    if symbols is None or computed_batch(plan, graph) == symbols.batch:
        return
    rows = computed_batch(plan, graph)
    parts = plan.pipelining.num_microbatches
    ranks = lcm(*(batch_ranks(strategy, plan.axis_sizes) for strategy in expand(plan, num_blocks(graph))))
    of = f"{ranks} ranks" if parts == 1 else f"{ranks} ranks and {parts} micro-batches"
    try:
        padded(graph, rows)
    except CoupledSamplesError as error:
        warnings.warn(
            f"a batch of {symbols.batch} is not divided by {of}, and it cannot be padded: {error}. So ranks compute "
            f"rows that others compute, too: give a batch that is a multiple of {ranks * parts}",
            stacklevel=4,
        )
        return
    warnings.warn(
        f"a batch of {symbols.batch} is not divided by {of}, so {rows - symbols.batch} of {rows} rows are padding, "
        f"which is computed and counts for nothing: a batch that is a multiple of {ranks * parts} has none",
        stacklevel=4,
    )


def check_batch(plan: Plan, graph: fx.GraphModule) -> None:
    """Refuse a plan whose micro-batches do not divide the batch, or that gives a rank no sample of one, where the batch
    cannot be padded. Raises PlanError, naming the block where it is one that does.
    """
    symbols = graph.meta.get("symbols")
    if symbols is None:
        return
    parts = plan.pipelining.num_microbatches
    if symbols.batch % parts:
        try:
            padded(graph, computed_batch(plan, graph))
        except CoupledSamplesError as error:
            raise PlanError(
                f"{parts} micro-batches do not divide a batch of {symbols.batch}, and it cannot be padded: {error}. "
                f"Give a batch that they divide, if samples do not depend on each other, or use num_microbatches=1"
            ) from None
    for index, strategy in enumerate(expand(plan, num_blocks(graph))):
        ranks = batch_ranks(strategy, plan.axis_sizes)
        if ranks > symbols.batch // parts:
            try:
                padded(graph, computed_batch(plan, graph))
            except CoupledSamplesError as error:
                raise PlanError(
                    f"{named_block(graph, index)} ({strategy}) splits a batch of {symbols.batch} in {parts} "
                    f"micro-batches over {ranks} ranks, so some have no sample, and it cannot be padded: {error}. Give "
                    f"a batch of at least {ranks * parts}, use fewer micro-batches, or let some axes be tensor or "
                    f"sequence"
                ) from None
            return


def divided(graph: fx.GraphModule, plan: Plan, control: PassControl | None = None) -> fx.GraphModule:
    """The graph that a plan computes: of a batch that its ranks and micro-batches divide, padded if need be.

    ``graph`` itself where samples depend on each other: then axes that do not divide the batch do not split it.
    """
    try:
        return padded(graph, computed_batch(plan, graph), control)
    except CoupledSamplesError:
        return graph


def computed_batch(plan: Plan, graph: fx.GraphModule) -> int:
    """Samples of a step, those of padding among them, if samples do not depend on each other; 0 of unknown sizes."""
    symbols = graph.meta.get("symbols")
    strategies = expand(plan, num_blocks(graph))
    parts = plan.pipelining.num_microbatches
    return padded_size(symbols.batch, strategies, plan.axis_sizes, parts) if symbols is not None else 0


def expand(plan: Plan, count: int) -> list[Strategy]:
    """A strategy for each of ``count`` blocks; another number of blocks than planned (evaluation) is met by
    position. Where the vocabulary is spread, axes that hold stages are ``tensor`` to the first and the last block.
    """
    planned = 1 if plan.is_wildcard else len(plan.blocks)
    if plan.is_wildcard or planned == count:
        strategies = [plan.strategy_of(i, count) for i in range(count)]
    else:
        strategies = [plan.strategy_of(i * planned // count, planned) for i in range(count)]
    return with_spread_ends(strategies) if plan.pipelining.is_spread else strategies


def with_spread_ends(strategies: Sequence[Strategy]) -> list[Strategy]:
    """Strategies of which the first and the last give the role ``tensor`` to the axes that hold stages."""

    def spread(strategy: Strategy) -> Strategy:
        return replace(strategy, roles=tuple("tensor" if role == PIPELINE else role for role in strategy.roles))

    return [spread(strategies[0]), *strategies[1:-1], spread(strategies[-1])]


def strategies_on(plan: Plan, cluster: Cluster, count: int) -> list[Strategy]:
    """A strategy for each of ``count`` blocks, with a role for every axis of the cluster."""
    return [_on_cluster(strategy, cluster) for strategy in expand(plan, count)]


def _on_cluster(strategy: Strategy, cluster: Cluster) -> Strategy:
    """The strategy with a role for axes of one rank as well, which plans leave out."""
    if len(strategy.roles) == len(cluster.axes):
        return strategy
    rest = iter(strategy.roles)
    return replace(strategy, roles=tuple(next(rest) if axis.size > 1 else "data" for axis in cluster.axes))


def _kept_of(strategy: Strategy, num_values: int) -> Strategy:
    """The strategy for a block of another graph of the model (another mode, say): where that has other values than the
    planned one, all are computed again, or kept where none were, on the device.
    """
    fits = strategy.num_values in (0, num_values)
    return strategy if fits else replace(strategy, keeps=(), offloads=(), num_values=0)


def in_order(cluster: Cluster, plan: Plan) -> Cluster:
    """The cluster with its devices where the plan has them."""
    if cluster.nodes is None:
        return cluster
    return cluster.ordered(plan.rank_order or range(cluster.num_devices))


def lower(
    graph: fx.GraphModule,
    plan: Plan,
    cluster: Cluster,
    cache: dict[Any, Any] | None = None,
    fixed: Mapping[str, tuple[Placement, ...]] | None = None,
    control: PassControl | None = None,
    training: bool = True,
) -> Lowered | LoweredStages:
    """Lower a captured graph by a plan: forward and backward, or the tasks of every stage."""
    counts, cluster = num_values(graph), in_order(cluster, plan)
    blocks = len(counts)
    strategies = [
        _kept_of(strategy, count) for strategy, count in zip(strategies_on(plan, cluster, blocks), counts, strict=True)
    ]
    held = {} if cache is None else cache
    asked = PassControl() if control is None else control
    if asked.fuses:
        strategies = fused_again(strategies, graph)
    graph = divided(graph, plan, asked)
    if plan.pipelining.is_trivial:
        return Lower(strategies, cluster, held, fixed or {}, asked, plan.fold_gradients).run(graph)
    planned = blocks if plan.is_wildcard else len(plan.blocks)
    cuts = [first * blocks // planned for first in plan.pipelining.cuts(planned)]
    if plan.pipelining.is_spread:
        cuts[-1] = blocks - 1
    count = plan.pipelining.num_microbatches
    stages = LowerStages(strategies, cuts, count, cluster, held, fixed or {}, asked, keep_outputs=not training)
    return stages.run(graph)
