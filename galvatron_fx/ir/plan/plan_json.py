"""The text of a plan: strict JSON in, byte-identical JSON out, and nothing evaluated on the way.

This file knows the form of a plan (``plan_schema.json``) and not what it means; ``plan.py`` does.
Whatever text comes in, the only error that comes out is a PlanError.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from pathlib import Path
from typing import Any

from galvatron_fx.ir import strict_json
from galvatron_fx.ir.errors import PlanError

__all__ = ["MAX_PLAN_BYTES", "PLAN_VERSION", "parse", "read", "serialize", "validate", "write"]

PLAN_VERSION = 2
MAX_PLAN_BYTES = strict_json.MOST_BYTES
"""The largest plan that is read, in bytes; a plan of a thousand blocks has about a fortieth of it."""

_FORMAT = strict_json.JsonFormat(
    name="plan",
    error=PlanError,
    schema_file="plan_schema.json",
    version=PLAN_VERSION,
    too_long="a plan of {size} characters; at most {most} are read: is it a plan at all?",
    non_finite="{found} in the plan, where a finite number was expected; price the plan again",
    other_version=f"plan version {{found}}, where {PLAN_VERSION} was expected: it was written by another release; "
    f"search the plan again with this one",
    misfit="malformed plan at {place}: {what}; mend it there, or write it with plan.save",
    nullable="a whole number of bytes",
)


def serialize(document: dict[str, Any]) -> str:
    """Return the JSON text of a plan: ASCII, sorted keys, indent of 2, newline at the end."""
    return json.dumps(document, sort_keys=True, indent=2, allow_nan=False) + "\n"


def parse(text: str) -> dict[str, Any]:
    """Return the plan in ``text``; raises PlanError for all that is no JSON, and that :func:`validate` refuses."""
    document = _FORMAT.parse(text, MAX_PLAN_BYTES)
    _refuse_non_finite(document, "$")
    return document


def validate(document: object) -> None:
    """Check the form of a plan against ``plan_schema.json``.

    Raises PlanError naming the place, what was found there and what was expected.
    """
    _FORMAT.check(document)
    _refuse_non_finite(document, "$")


def read(path: str | os.PathLike[str]) -> str:
    """Return the text of the file at ``path``; raises PlanError if it is unreadable, too large or not UTF-8."""
    return strict_json.read_text(path, "a plan", MAX_PLAN_BYTES, PlanError)


def write(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` to ``path`` so that a reader sees the old file or the new one; raises OSError."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _refuse_non_finite(value: object, place: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise PlanError(f"malformed plan at {place}: {value} is not a finite number; price the plan again")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        _refuse_non_finite(item, f"{place}.{key}")
