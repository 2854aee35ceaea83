"""Imports run one way, typing and lazy ones included; what is below knows nothing of what is above."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).resolve().parents[1]

# Each may import from those of a lower floor and from itself; the longest name that fits a module counts.
FLOORS = {
    "galvatron_fx.ir": 0,
    "galvatron_fx.ir.plan": 1,
    "galvatron_fx.ir.cluster": 2,
    "galvatron_fx.ir.graph": 2,
    "galvatron_fx.ir.kernels": 3,
    "cost_models": 4,
    "passes": 4,
    "passes.analysis": 5,
    "passes.sharding": 6,
    "passes.frontend": 7,
    "passes.lowering": 7,
    "passes.simulation": 8,
    "passes.search": 9,
    "galvatron_fx": 10,
    "galvatron_fx.integrations": 11,
}

# A class and its table or its JSON.
PAIRS = [
    {"galvatron_fx.ir.cluster.cluster", "galvatron_fx.ir.cluster.cluster_json"},
    {"galvatron_fx.ir.cluster.cluster", "galvatron_fx.ir.cluster.cluster_table"},
    {"galvatron_fx.ir.plan.plan", "galvatron_fx.ir.plan.plan_table"},
    {"galvatron_fx.ir.plan.search_report", "galvatron_fx.ir.plan.search_report_table"},
]


def modules() -> dict[str, Path]:
    """Every module of the three packages."""
    found = {}
    for package in ("galvatron_fx", "cost_models", "passes"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(name: str) -> Iterator[str]:
    """The modules of ours that a module imports, anywhere in it, and the packages that they are in and it is not."""
    for module in named(name):
        yield module
        packages = {module.rsplit(".", depth)[0] for depth in range(1, module.count(".") + 1)} - {"galvatron_fx"}
        yield from (package for package in packages if package in MODULES and not f"{name}.".startswith(f"{package}."))


def named(name: str) -> Iterator[str]:
    """The modules of ours that a module's imports name."""
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else node.module


IMPORTS = {name: sorted(set(imported(name)) - {name}) for name in MODULES}


def room(name: str) -> str:
    """The entry of FLOORS that a module belongs to."""
    return max((floor for floor in FLOORS if f"{name}.".startswith(f"{floor}.")), key=len)


def test_imports_run_downwards() -> None:
    upward = [
        f"{name} imports {other}"
        for name, others in IMPORTS.items()
        for other in others
        if room(name) != room(other) and FLOORS[room(other)] >= FLOORS[room(name)]
    ]
    assert not upward, "\n".join(upward)


def test_no_rings_of_imports() -> None:
    graph = nx.DiGraph((name, other) for name, others in IMPORTS.items() if name != "galvatron_fx" for other in others)
    graph.remove_edges_from([(a, b) for pair in PAIRS for a in pair for b in pair])
    rings = [sorted(ring) for ring in nx.strongly_connected_components(graph) if len(ring) > 1]
    assert not rings, "\n".join(map(str, rings))


def test_every_folder_of_passes_says_what_goes_in_and_out() -> None:
    folders = {path.parent for path in (ROOT / "passes").rglob("*.py")}
    silent = [folder for folder in folders if not _says_what_it_is(folder / "__init__.py")]
    assert not silent, silent


def _says_what_it_is(path: Path) -> bool:
    return path.is_file() and bool(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))))
