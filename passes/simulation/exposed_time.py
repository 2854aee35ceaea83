"""Seconds by cause of what runs at once: what a step takes longer for each collective, and what is hidden of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cost_models.streams import Event, Start, StreamRun
from galvatron_fx.ir.cluster.overlap import Overlap
from galvatron_fx.ir.plan.prediction import Cause

__all__ = ["added", "exposed_and_hidden"]


def exposed_and_hidden(
    alone: Mapping[Cause, float], graphs: Iterable[Sequence[Event]], overlap: Overlap
) -> tuple[dict[Cause, float], dict[Cause, float]]:
    """Return (seconds, hidden) by cause where ``graphs`` run one after the other.

    ``alone``: seconds as if nothing ran at once; those of local causes stay, but where the events start them beside
    computing. What both hold of a collective adds up to these, unless computing beside it costs more than waiting for
    it would.
    """
    runs = [StreamRun.of(events, overlap) for events in graphs]
    exposed = added(run.exposed for run in runs)
    started = {event.cause for run in runs for event in run.events if isinstance(event, Start)}
    collectives = {cause: spent for cause, spent in alone.items() if cause in started or not cause.is_local}
    hidden = {cause: spent - exposed.get(cause, 0.0) for cause, spent in collectives.items()}
    seconds = {cause: exposed.get(cause, 0.0) if cause in collectives else spent for cause, spent in alone.items()}
    return seconds, {cause: spent for cause, spent in hidden.items() if spent > 1e-9 * collectives[cause]}


def added(parts: Iterable[Mapping[Cause, float]]) -> dict[Cause, float]:
    """Return the sums by cause."""
    total: dict[Cause, float] = {}
    for part in parts:
        for cause, spent in part.items():
            total[cause] = total.get(cause, 0.0) + spent
    return total
