"""Higher thresholds of Python's garbage collector, for capture, search and lowering."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (100_000, 50, 1000)  # new objects until a collection, collections until one of older objects, and of all
_frozen_by_others = False


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Collect young objects seldom and old ones hardly ever.

    Imported libraries and graphs are millions of objects that stay. With Python's own thresholds a quarter of the time
    of capture and search went into looking at them; memory is about the same without. What was made meanwhile counts as
    old afterwards, or the first new object would have all of it looked at. Inside of another it changes nothing.
    """
    before = gc.get_threshold()
    if before == _THRESHOLDS:
        yield
        return
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        _count_as_old()
        gc.set_threshold(*before)


def _count_as_old() -> None:
    """Move all objects to the oldest, unless somebody else has frozen some, which would be thawed."""
    global _frozen_by_others
    # Counting walks through all that are frozen, a tenth of a second for a million: those who freeze keep it so.
    _frozen_by_others = _frozen_by_others or gc.get_freeze_count() > 0
    if not _frozen_by_others:
        gc.freeze()
        gc.unfreeze()
