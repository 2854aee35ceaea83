"""Whether other work had the processors while a profile was taken."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from galvatron_fx.profiling import waiting
from galvatron_fx.profiling.ranks import Ranks
from galvatron_fx.profiling.waiting import Waiting
from tests.profiling.test_measure import alone


@pytest.fixture
def times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the system says of the thread: nanoseconds that it ran and waited, and how often."""
    path = tmp_path / "schedstat"
    path.write_text("1000 500 3\n")
    monkeypatch.setattr(waiting, "_TIMES", path)
    return path


def test_much_waiting_is_told(times: Path) -> None:
    since = Waiting()
    times.write_text("8000 3500 9\n")
    assert since.share == 0.3
    with pytest.warns(UserWarning, match="other work had the processors for 30% of the time .* a quiet machine"):
        since.warn(Ranks(alone()))


@pytest.mark.parametrize("text", ["101000 1500 9\n", "", None])
def test_little_waiting_and_systems_that_do_not_tell_are_silent(times: Path, text: str | None) -> None:
    since = Waiting()
    times.unlink() if text is None else times.write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        since.warn(Ranks(alone()))
