"""The batch that a plan computes: as it is, or padded where ranks and micro-batches do not divide it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import lcm, prod

from torch import fx

from galvatron_fx.ir.graph.pass_pipeline import PassControl, PassPipeline
from galvatron_fx.ir.plan.strategy import Strategy, batch_ranks
from passes.lowering.pad_batch import CoupledSamplesError, PadBatch

__all__ = ["PADDING", "larger_batches", "padded", "padded_size"]

PADDING = PassPipeline("padding", {PadBatch: "annotated"})


def padded_size(batch: int, strategies: Iterable[Strategy], axis_sizes: Sequence[int], num_microbatches: int) -> int:
    """The least batch from ``batch`` on that micro-batches and, in all blocks, ranks divide."""
    ranks = lcm(*(batch_ranks(strategy, axis_sizes) for strategy in set(strategies)))
    return _multiple(batch, ranks * num_microbatches)


def padded(graph: fx.GraphModule, rows: int, control: PassControl | None = None) -> fx.GraphModule:
    """``graph`` for a batch of ``rows``, of which those beyond its own count for nothing; itself where it has as many.

    Raises CoupledSamplesError where the samples depend on each other, so that it cannot be padded.
    """
    sizes = graph.meta.get("symbols")
    if sizes is not None and rows == sizes.batch:
        return graph
    if sizes is None or sizes.is_fixed:
        raise CoupledSamplesError("the model runs at one batch size alone")
    return PADDING.under(control or PassControl())(PadBatch(rows), graph)


def larger_batches(batch: int, axis_sizes: Sequence[int], num_microbatches: int = 1) -> list[int]:
    """The sizes to which padding a batch may gain time, ascending: for each share of a rank, the least.

    ``num_microbatches``: those that divide all of them.
    """
    outer = (prod(axis_sizes[:at]) for at in range(len(axis_sizes) + 1))
    inner = (prod(axis_sizes[at:]) for at in range(len(axis_sizes)))
    by_share: dict[int, int] = {}
    for ranks in sorted({*outer, *inner}):
        parts = ranks * num_microbatches
        size = _multiple(batch, parts)
        by_share.setdefault(size // parts, size)
    return sorted({size for size in by_share.values() if size > batch})


def _multiple(batch: int, of: int) -> int:
    return -(-batch // of) * of
