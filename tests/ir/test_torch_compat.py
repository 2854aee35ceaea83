"""What stands between us and faults of torch."""

from __future__ import annotations

import re
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.profiler import profile

from galvatron_fx.ir.torch_compat.processes import all_gather_rows
from galvatron_fx.ir.torch_compat.tensors import num_holders
from galvatron_fx.ir.torch_compat.tracing import compiling
from galvatron_fx.ir.torch_compat.versions import NEWEST_TESTED, OLDEST_TESTED, warn_of_an_untested_version


@pytest.fixture
def group_name() -> Iterator[str]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def test_an_all_gather_is_not_one_that_damages_the_heap(group_name: str) -> None:
    """With coalesced ones, ``for y in [gather(x, 1, group) for _ in range(50)]: wait(y)`` in a loop dies in seconds."""
    x = torch.arange(12.0).reshape(3, 4)
    with profile() as profiler:
        gathered = torch.ops._c10d_functional.wait_tensor(all_gather_rows(x, 1, group_name))
    names = {event.name for event in profiler.events()}
    assert "c10d::_allgather_base_" in names and not any("coalesced" in name for name in names)
    torch.testing.assert_close(gathered, x)


def test_a_view_of_what_nobody_else_has_is_held_once() -> None:
    with torch.no_grad():
        made = torch.ones(4, 4)
        held = [num_holders(made), num_holders(made.add(1).view(2, 8)), num_holders(made.add(1)[1:].view(12))]
        others = [made.view(16), made.detach()]
        assert held == [1, 1, 1]
        assert num_holders(others[0]) == len(others)


def test_distributions_do_not_look_at_values_while_a_model_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    # Dynamo turns the check off for good when it is first used, perhaps by another test.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    spread = torch.tensor(-1.0)
    with compiling():
        torch.distributions.Normal(0.0, spread)
    with pytest.raises(ValueError, match="GreaterThan"):
        torch.distributions.Normal(0.0, spread)


def test_versions_that_were_not_tested_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (major, oldest), (_, newest) = OLDEST_TESTED, NEWEST_TESTED
    assert f"torch>={major}.{oldest},<{major}.{newest + 1}" in project["dependencies"]
    with warnings.catch_warnings(action="error"):
        warn_of_an_untested_version()
    for version in ("2.12.1+cpu", f"{major}.{newest + 1}.0.dev20270101"):
        monkeypatch.setattr(torch, "__version__", version)
        with pytest.warns(UserWarning, match=rf"torch 2\.13 to 2\.15, and this is torch {re.escape(version)}: hold"):
            warn_of_an_untested_version()
