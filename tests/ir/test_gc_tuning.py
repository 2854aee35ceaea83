"""What the garbage collector is told around capture, search and lowering."""

from __future__ import annotations

import gc
from unittest import mock

import pytest

from galvatron_fx.ir import gc_tuning
from galvatron_fx.ir.gc_tuning import fewer_collections


@pytest.mark.parametrize("frozen, counted", [(0, 3), (5, 1)])
def test_frozen_objects_of_others_stay_so_and_are_counted_once(frozen: int, counted: int) -> None:
    with (
        mock.patch.object(gc_tuning, "_frozen_by_others", False),
        mock.patch.object(gc, "get_freeze_count", return_value=frozen) as count,
        mock.patch.object(gc, "unfreeze") as thaw,
        mock.patch.object(gc, "freeze"),
    ):
        for _ in range(3):
            with fewer_collections(), fewer_collections():
                pass
    assert count.call_count == counted and thaw.called == (frozen == 0)
