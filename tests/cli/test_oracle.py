"""The watch and the oracle of hostile files have teeth: readers that do what none may, or check less, are seen."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from galvatron_fx.ir import strict_json
from galvatron_fx.ir.cluster import cluster, curves, device
from galvatron_fx.ir.plan import pipelining, plan, strategy
from tests.cli.hostile import READERS, VALID, Watch, outcome

_WATCH = Watch([])


@pytest.fixture(scope="module", autouse=True)
def watch() -> Watch:
    _WATCH.install()
    return _WATCH


def changed(kind: str, which: int, path: str, value: Any) -> bytes:
    """A valid file with one value replaced; ``path``: keys and positions, joined by dots."""
    document = copy.deepcopy(json.loads(VALID[kind][which]))
    *split_factor, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
    holder = document
    for part in split_factor:
        holder = holder[part]
    holder[last] = value
    return json.dumps(document).encode()


def twice(kind: str, key: str) -> bytes:
    """A valid file with a key standing twice, first with another value."""
    return VALID[kind][0].replace("{", f'{{"{key}": 1, ', 1).encode()


TABLE = json.loads(VALID["plan"][3])["pipelining"]["orders"]
CURVE = {
    "kind": "all_reduce",
    "axes": ["x"],
    "points": [[1, 1]],
    "latency_s": 1,
    "bandwidth_bytes_per_s": 1,
    "error": 0,
}
WRONG: dict[str, tuple[str, bytes]] = {
    "a block without a name": ("plan", changed("plan", 1, "blocks.0.name", "")),
    "an unknown member": ("plan", changed("plan", 0, "comment", "x")),
    "a flag that is 1": ("plan", changed("plan", 0, "blocks.0.strategy.recompute", 1)),
    "a count that is 2.0": ("plan", changed("plan", 2, "pipelining.num_microbatches", 8.0)),
    "time below zero": ("plan", changed("plan", 0, "step_time_s", -1.0)),
    "time without end": ("plan", VALID["plan"][0].replace('"step_time_s": 0.0', '"step_time_s": 1e999').encode()),
    "time that is no number": ("plan", VALID["plan"][0].replace('"step_time_s": 0.0', '"step_time_s": NaN').encode()),
    "a key twice": ("plan", twice("plan", "step_time_s")),
    "an axis of 4": ("plan", changed("plan", 0, "axis_sizes.0", 4)),
    "an unknown role": ("plan", changed("plan", 0, "blocks.0.strategy.roles.0", "gpipe")),
    "a role too few": ("plan", changed("plan", 1, "blocks.1.strategy.roles", ["data"])),
    "a wildcard among blocks": ("plan", changed("plan", 1, "blocks.1.name", "*")),
    "a wildcard of one model": ("plan", changed("plan", 0, "graph_fingerprint", "abc")),
    "stages on other axes": ("plan", changed("plan", 3, "blocks.2.strategy.roles", ["data", "pipeline"])),
    "too few stages for the schedule": ("plan", changed("plan", 2, "pipelining.num_stages", 3)),
    "an unknown schedule": ("plan", changed("plan", 2, "pipelining.schedule", "fastest")),
    "stages in no order": ("plan", changed("plan", 3, "pipelining.first_blocks", [3, 0])),
    "a stage behind the last block": ("plan", changed("plan", 3, "pipelining.first_blocks", [0, 6])),
    "a table without an action": ("plan", changed("plan", 3, "pipelining.orders.0", TABLE[0][:-1])),
    "a table that never ends": ("plan", changed("plan", 3, "pipelining.orders.1", TABLE[1][::-1])),
    "a table of other ranks": ("plan", changed("plan", 3, "pipelining.rank_of_stage", [1, 0])),
    "an axis of 4 in a cluster": ("cluster", changed("cluster", 3, "axes.0.size", 4)),
    "an axis of True": ("cluster", changed("cluster", 3, "axes.0.size", True)),
    "axes of one name": ("cluster", changed("cluster", 3, "axes.0.name", "a1")),
    "no axes": ("cluster", changed("cluster", 0, "axes", [])),
    "a bandwidth of zero": ("cluster", changed("cluster", 0, "axes.0.bandwidth_bytes_per_s", 0)),
    "memory below zero": ("cluster", changed("cluster", 0, "device.memory_bytes", -1)),
    "an efficiency above one": ("cluster", changed("cluster", 0, "device.matmul_efficiency", 1.5)),
    "points that fall": ("cluster", changed("cluster", 3, "device.curves.0.points", [[1, 2], [2, 1]])),
    "a curve of other axes": ("cluster", changed("cluster", 0, "axes.0.curves", [CURVE])),
    "a cluster's key twice": ("cluster", twice("cluster", "axes")),
    "a number that is none": ("cluster", VALID["cluster"][3].replace('"growth": ', '"growth": NaN, "x": ').encode()),
    "a role in a constraint": ("constraints", b'{"a": ["gpipe"]}'),
    "a constraint's flag that is 1": ("constraints", b'{"a": {"roles": ["data"], "recompute": 1}}'),
    "a constraint twice": ("constraints", b'{"a": ["data"], "a": ["zero"]}'),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_no_file_may_say_is_refused(what: str, tmp_path: Path, watch: Watch) -> None:
    kind, content = WRONG[what]
    assert outcome(kind, tmp_path / "file.json", content, watch) != "read"


def _nothing(*_: Any, **__: Any) -> None:
    """A check that is gone."""


def _any_schema(_: str) -> Any:
    return SimpleNamespace(first_error=_nothing)


def _of_pairs(the: str, error: type, pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    return dict(pairs)


def _number(what: str, value: Any, zero: bool = False) -> float:
    return float(value)


def _without(kind: type, name: str) -> Callable[..., Any]:
    """A reader of ``kind`` that forgets one field."""
    real = kind.from_dict.__func__  # type: ignore[attr-defined]
    default = kind.__dataclass_fields__[name].default  # type: ignore[attr-defined]
    return classmethod(lambda cls, fields: real(cls, {**fields, name: default}))  # type: ignore[return-value]


REMOVED: dict[str, tuple[Any, str, Any, str]] = {
    "the schema of plans": (strict_json, "_schema", _any_schema, "time below zero"),
    "repeated keys in plans": (strict_json, "_unique_keys", _of_pairs, "a key twice"),
    "primes": (plan, "prime_factors", lambda size: (size,), "an axis of 4"),
    "roles": (strategy, "ROLES", (*strategy.ROLES, "gpipe"), "an unknown role"),
    "blocks": (plan, "_check_blocks", _nothing, "a wildcard of one model"),
    "wildcards": (plan, "_check_blocks", _nothing, "a role too few"),
    "stages": (plan, "_check_stages", _nothing, "stages on other axes"),
    "schedules": (plan, "legal", _nothing, "too few stages for the schedule"),
    "first blocks": (pipelining.Pipelining, "__post_init__", _nothing, "stages in no order"),
    "cuts": (pipelining.Pipelining, "cuts", _nothing, "a stage behind the last block"),
    "tables": (pipelining, "check_schedule", _nothing, "a table without an action"),
    "circles": (pipelining, "check_schedule", _nothing, "a table that never ends"),
    "roles of constraints": (strategy.Strategy, "__post_init__", _nothing, "a role in a constraint"),
    "the schema of clusters": (strict_json, "_schema", _any_schema, "an axis of True"),
    "repeated keys in clusters": (strict_json, "_unique_keys", _of_pairs, "a cluster's key twice"),
    "primes of clusters": (cluster.sympy, "isprime", lambda _: True, "an axis of 4 in a cluster"),
    "names of axes": (cluster.Cluster, "__post_init__", _nothing, "axes of one name"),
    "numbers of devices": (device, "checked_number", _number, "memory below zero"),
    "numbers of axes": (cluster, "checked_number", _number, "a bandwidth of zero"),
    "curves": (curves, "pairwise", lambda _: (), "points that fall"),
    "repeated keys elsewhere": (strict_json, "_unique_keys", _of_pairs, "a constraint twice"),
}  # fmt: skip


@pytest.mark.parametrize("check", REMOVED)
def test_a_check_that_is_removed_is_missed(
    check: str, tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, name, instead, what = REMOVED[check]
    monkeypatch.setattr(where, name, instead)
    kind, content = WRONG[what]
    with pytest.raises(AssertionError):
        outcome(kind, tmp_path / "file.json", content, watch)


@pytest.mark.parametrize(
    ("kind", "name", "which"),
    [
        (strategy.Strategy, "recompute", 0),
        (strategy.Strategy, "keep_gathered", 1),
        (pipelining.Pipelining, "rank_of_stage", 3),
    ],
)
def test_a_field_that_is_read_wrong_is_seen(
    kind: type, name: str, which: int, tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "from_dict", _without(kind, name))
    monkeypatch.setattr(plan, "_check_stages", _nothing)
    with pytest.raises(AssertionError, match="not what the file says"):
        outcome("plan", tmp_path / "file.json", VALID["plan"][which].encode(), watch)


def _overwrite(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    os.write(descriptor, b" ")
    os.close(descriptor)


@pytest.mark.parametrize(
    "act",
    [
        os.remove,
        _overwrite,
        lambda path: os.truncate(path, 1),
        lambda path: os.rename(path, path.with_suffix(".bak")),
        lambda path: os.chmod(path, 0o600),
        lambda path: os.symlink(path, path.with_suffix(".link")),
        lambda path: os.mkdir(path.with_suffix(".folder")),
    ],
)
@pytest.mark.parametrize("is_watched", [True, False])
def test_a_reader_that_harms_the_file_is_seen(
    act: Callable[[Path], None], is_watched: bool, tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = READERS["plan"]

    def reader(path: Path) -> object:
        value = real(path)
        act(path)
        return value

    monkeypatch.setitem(READERS, "plan", reader)
    deaf = Watch([])  # listens to nothing: the file itself tells
    with pytest.raises(AssertionError):
        outcome("plan", tmp_path / "file.json", VALID["plan"][0].encode(), watch if is_watched else deaf)
    watch.seen.clear()
