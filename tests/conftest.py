"""Settings for every test: one torch thread, torch's default dtype, and the same hypothesis examples in every run."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
gc.set_threshold(100_000, 20, 100)  # collections took a twelfth of the time of all tests
settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start processes come first: one of a minute that came last would leave all other workers idle."""
    starting = ("launched", "subprocess", "on_forks")
    items.sort(key=lambda item: not any(hasattr(getattr(item, "module", None), name) for name in starting))


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
