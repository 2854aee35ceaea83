"""Rings of ranks are searched where sequences are long, and priced by what their products do not hide."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from galvatron_fx.ir.graph.symbols import Sizes
from galvatron_fx.ir.plan.strategy import ROLES
from passes.search.candidates import candidates
from passes.search.configurations import Pins
from passes.search.open_configurations import OpenConfigurations
from tests.helpers import cluster_for


def useless(sequence: int, roles: tuple[str, ...]) -> set[str]:
    graph: Any = SimpleNamespace(meta={"symbols": Sizes(2, sequence)}, graph=SimpleNamespace(nodes=()))
    pricer: Any = SimpleNamespace(graph=graph)
    return OpenConfigurations(pricer, roles, "auto", Pins())._useless_roles


@pytest.mark.parametrize("sequence, roles, offered", [
    (4096, ROLES, False), (16_384, ROLES, True), (4096, ("data", "context"), True),
])  # fmt: skip
def test_when_rings_are_searched(sequence: int, roles: tuple[str, ...], offered: bool) -> None:
    assert ("context" not in useless(sequence, roles)) == offered


def test_rings_go_around_heads() -> None:
    """On meshes of many axes, heads and parameters are split on the faster ones."""
    cluster = cluster_for((2, 2, 2, 2), [])
    tables = {strategy.roles for strategy in candidates(cluster, ("data", "context", "sequence", "tensor"), False)}
    assert ("data", "context", "context", "sequence") in tables
    assert ("data", "data", "context", "tensor") in tables
    assert ("data", "data", "sequence", "context") not in tables
