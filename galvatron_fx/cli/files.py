"""Files that the command line names: read once, in bounded size, checked, and never run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from galvatron_fx.ir.errors import ClusterError, GalvatronError, InputError, PlanError
from galvatron_fx.ir.plan.plan_json import MAX_PLAN_BYTES
from galvatron_fx.ir.regular_file import open_regular

if TYPE_CHECKING:
    from galvatron_fx.ir.cluster.cluster import Cluster
    from galvatron_fx.ir.plan.plan import Plan

__all__ = ["parse_object", "read_cluster", "read_object", "read_plan", "read_text", "refuse"]

_MOST_SHOWN = 200
_MOST_DEPTH = 100  # of objects and lists in each other; plans, profiles and model configs have below 10

Read = TypeVar("Read")


def read_text(path: str | Path, what: str, most_bytes: int = MAX_PLAN_BYTES) -> str:
    """Return the text of a file, "a plan" for ``what``.

    Raises InputError for what is missing, unreadable, no regular file, over ``most_bytes`` or not UTF-8.
    """
    try:
        with open_regular(path) as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise InputError(f"cannot read {what} from {path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"cannot read {what} from {str(path)[:_MOST_SHOWN]!r}: {error}") from None
    if len(content) > most_bytes:
        raise InputError(f"{path} has over {most_bytes} bytes: is it {what} at all?")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 at byte {error.start}: give the path of {what}") from None


def read_plan(path: str | Path) -> Plan:
    """Read a plan; raises PlanError, or InputError for a file that cannot be read."""
    from galvatron_fx.ir.plan.plan import Plan

    return _read(path, "a plan", Plan.from_json, PlanError)


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster or a profile; raises ClusterError, or InputError for a file that cannot be read."""
    from galvatron_fx.ir.cluster.cluster import Cluster

    return _read(path, "a cluster", Cluster.from_json, ClusterError)


def read_object(path: str | Path, what: str, most_bytes: int = MAX_PLAN_BYTES) -> dict[str, Any]:
    """Read a JSON object, of any content; raises InputError."""
    try:
        return parse_object(read_text(path, what, most_bytes))
    except InputError as error:
        raise InputError(_placed(path, error)) from None


def parse_object(text: str) -> dict[str, Any]:
    """Return the JSON object in ``text``; raises InputError for other JSON, repeated keys, NaN and deep nesting."""
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_constant)
    except InputError:
        raise
    except RecursionError:
        raise InputError("the JSON is nested too deeply") from None
    except ValueError as error:
        raise InputError(f"not JSON: {str(error)[:_MOST_SHOWN]}") from None
    if not isinstance(found, dict):
        raise InputError(f"a JSON object was expected, and this is {type(found).__name__}")
    if _is_deeper(found, _MOST_DEPTH):
        raise InputError(f"the JSON is nested more than {_MOST_DEPTH} deep")
    return found


def refuse(path: str | Path, error: GalvatronError) -> NoReturn:
    """Raise an error of the same kind that begins with the path."""
    raise type(error)(_placed(path, error)) from None


def _read(path: str | Path, what: str, parse: Callable[[str], Read], kind: type[GalvatronError]) -> Read:
    text = read_text(path, what)
    try:
        return parse(text)
    except kind as error:
        refuse(path, error)


def _placed(path: str | Path, error: GalvatronError) -> str:
    return str(error) if str(path) in str(error) else f"{path}: {error}"


def _is_deeper(value: object, depth: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(depth == 0 or _is_deeper(item, depth - 1) for item in inside)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise InputError(f"key {key[:_MOST_SHOWN]!r} stands twice in one object: keep one of them")
        found[key] = value
    return found


def _constant(name: str) -> float:
    if name == "NaN":
        raise InputError("NaN stands where a number was expected")
    return float(name.replace("Infinity", "inf"))
