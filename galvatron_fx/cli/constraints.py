"""What blocks are pinned to on the command line: by flags, by a file, or by both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from galvatron_fx.cli.exits import UsageError
from galvatron_fx.cli.files import refuse
from galvatron_fx.ir.errors import PlanError
from galvatron_fx.ir.plan.strategy import Strategy
from galvatron_fx.ir.strict_json import read_object

__all__ = ["constraints_of", "parse_constraint"]

Wanted = Strategy | tuple[str, ...]


def parse_constraint(text: str) -> tuple[str, tuple[str, ...]]:
    """Read ``module=role,role``, with a role for every mesh axis. Raises ValueError for anything else."""
    module, equals, listed = text.partition("=")
    if not equals or not module or not listed:
        raise ValueError(f"{text[:80]!r} is no module=roles, such as model.layers.2=tensor,tensor")
    return module, _roles(name.strip() for name in listed.split(","))


def constraints_of(path: str | None, flags: Iterable[tuple[str, tuple[str, ...]]]) -> dict[str, Wanted]:
    """The constraints in the file at ``path``, if any, and in ``flags``, by module.

    Raises InputError and PlanError naming file and module, UsageError for a module that is named twice.
    """
    constraints = {} if path is None else _read(path)
    for module, roles in flags:
        if module in constraints:
            raise UsageError(f"module {module!r} is constrained twice: keep one of them")
        constraints[module] = roles
    return constraints


def _read(path: str) -> dict[str, Wanted]:
    constraints: dict[str, Wanted] = {}
    for module, wanted in read_object(path, "constraints").items():
        try:
            constraints[module] = _wanted(wanted)
        except PlanError as error:
            refuse(path, PlanError(f"constraint on module {module[:80]!r}: {error}"))
    return constraints


def _wanted(value: Any) -> Wanted:
    if isinstance(value, dict):
        return Strategy.from_dict(value)
    if isinstance(value, list):
        return _roles(value)
    raise PlanError('give a list of roles, or an object such as {"roles": ["data"], "recompute": true}')


def _roles(names: Iterable[Any]) -> tuple[str, ...]:
    return Strategy(tuple(names)).roles
