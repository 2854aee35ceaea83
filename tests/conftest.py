"""Settings for every test: one torch thread, torch's default dtype, and the same hypothesis examples in every run."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
gc.set_threshold(100_000, 20, 100)  # collections took a twelfth of the time of all tests
settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", action="store_true", help="leave out what is slow, and most of what is sampled")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that start processes come first: one of a minute that came last would leave all other workers idle."""
    starting = ("launched", "subprocess", "on_forks")
    items.sort(key=lambda item: not any(hasattr(getattr(item, "module", None), name) for name in starting))
    if config.getoption("--sample"):
        config.hook.pytest_deselected(items=leave_out(items))


def leave_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Take out of ``items`` those marked ``slow``, and of each test marked ``sampled(n)`` all but every ``n``-th."""
    counts: Counter[tuple[Path, str]] = Counter()
    kept, left_out = [], []
    for item in items:
        sampled = item.get_closest_marker("sampled")
        test = item.path, getattr(item, "originalname", item.name)
        number = counts[test]
        counts[test] += 1
        is_kept = not item.get_closest_marker("slow") and not (sampled and number % sampled.args[0])
        (kept if is_kept else left_out).append(item)
    items[:] = kept
    return left_out


@pytest.fixture(autouse=True, scope="module")
def own_default_dtype() -> Iterator[None]:
    """Every module starts with torch's default dtype, whatever those before it in the process have set."""
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def quick_collections() -> Iterator[None]:
    """What modules hold for good is not looked through each time that a test collects what is left over."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def without_remedies() -> Iterator[None]:
    """Where nothing fits, what would help is not searched for, which takes as long again for each option."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("galvatron_fx.planning_session.with_remedies", lambda error, *_: error)
        yield
