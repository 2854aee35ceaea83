"""Whether a model is planned to train or to be run forward alone, where that is asked for, implied or contradicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from galvatron_fx.captured import Captured, is_forward_only
from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.search_settings import SearchSettings

__all__ = ["settled"]


def settled(settings: SearchSettings, model: Any, given: Plan | None = None) -> SearchSettings:
    """Return ``settings`` with ``forward_only`` decided.

    Where nothing is said, a given plan that was searched says it, else a captured model, else where the caller stands:
    a model in eval mode under ``torch.no_grad()`` is not going to be trained. Raises InputError for another answer than
    a captured model has.
    """
    asked = settings.forward_only
    if isinstance(model, Captured):
        if asked not in (None, model.forward_only):
            raise InputError(
                f"forward_only={asked} beside a model that was captured {_how(model.forward_only)}: give it to "
                f"Captured(model, inputs, forward_only={asked})"
            )
        return replace(settings, forward_only=model.forward_only)
    if asked is None and given is not None and (given.forward_only or given.is_tied):
        asked = given.forward_only
    return replace(settings, forward_only=is_forward_only(model, asked))


def _how(forward_only: bool) -> str:
    return "forward-only" if forward_only else "to train"
