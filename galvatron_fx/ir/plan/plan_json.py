"""The text of a plan: strict JSON in, byte-identical JSON out, and nothing evaluated on the way.

This file knows the form of a plan (``plan_schema.json``) and not what it means; ``plan.py`` does.
Whatever text comes in, the only error that comes out is a PlanError.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from jsonschema.exceptions import ValidationError

from galvatron_fx.ir.errors import PlanError
from galvatron_fx.ir.json_schema import Schema
from galvatron_fx.ir.regular_file import open_regular

__all__ = ["MAX_PLAN_BYTES", "PLAN_VERSION", "parse", "read", "serialize", "validate", "write"]

PLAN_VERSION = 2
MAX_PLAN_BYTES = 16_000_000
"""The largest plan that is read, in bytes; a plan of a thousand blocks has about a fortieth of it."""

_MAX_SHOWN = 200


def serialize(document: dict[str, Any]) -> str:
    """Return the JSON text of a plan: ASCII, sorted keys, indent of 2, newline at the end."""
    return json.dumps(document, sort_keys=True, indent=2, allow_nan=False) + "\n"


def parse(text: str) -> dict[str, Any]:
    """Return the JSON object in ``text``, checked against the schema.

    Raises PlanError for text over MAX_PLAN_BYTES characters, bad or too deeply nested JSON, repeated
    keys, NaN and infinities, and everything that :func:`validate` refuses.
    """
    if not isinstance(text, str):
        raise PlanError(f"a plan is read from str, and this is {type(text).__name__}; decode it as UTF-8 first")
    if len(text) > MAX_PLAN_BYTES:
        raise PlanError(f"a plan of {len(text)} characters; at most {MAX_PLAN_BYTES} are read: is it a plan at all?")
    try:
        document = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
        validate(document)
    except PlanError:
        raise
    except RecursionError:
        raise PlanError("the plan is nested too deeply to be a plan; write it again with plan.save") from None
    except ValueError as error:
        raise PlanError(f"the plan is not JSON: {_shorten(str(error))}; write it again with plan.save") from None
    return document  # type: ignore[no-any-return]


def validate(document: object) -> None:
    """Check the form of a plan against ``plan_schema.json``.

    Raises PlanError naming the place, what was found there and what was expected.
    """
    if isinstance(document, dict) and (version := document.get("version", PLAN_VERSION)) != PLAN_VERSION:
        raise PlanError(
            f"plan version {_shorten(repr(version))}, where {PLAN_VERSION} was expected: it was written by another "
            f"release; search the plan again with this one"
        )
    error = _schema().first_error(document)
    if error is not None:
        place = _shorten(error.json_path)
        raise PlanError(f"malformed plan at {place}: {_explain(error)}; mend it there, or write it with plan.save")
    _refuse_non_finite(document, "$")


def read(path: str | os.PathLike[str]) -> str:
    """Return the text of the file at ``path``; raises PlanError if it is unreadable, too large or not UTF-8."""
    try:
        with open_regular(path) as file:
            content = file.read(MAX_PLAN_BYTES + 1)
        if len(content) > MAX_PLAN_BYTES:
            raise PlanError(f"{path} has over {MAX_PLAN_BYTES} bytes; a plan has fewer: is it a plan at all?")
        return content.decode("utf-8")
    except OSError as error:
        raise PlanError(f"cannot read a plan from {path}: {error.strerror}; give the path of a saved plan") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{path} is not UTF-8 at byte {error.start}; give the path of a saved plan") from None


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


@cache
def _schema() -> Schema:
    return Schema("plan_schema.json")


def _explain(error: ValidationError) -> str:
    """Say in words what a schema error found and expected; regular expressions are left out."""
    found = _shorten(repr(error.instance))
    if error.validator == "not":
        return f"{found} holds characters that are not allowed there"
    if error.validator == "anyOf":
        return f"{found} is neither null nor a whole number of bytes"
    return _shorten(error.message)


def _refuse_non_finite(value: object, place: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise PlanError(f"malformed plan at {place}: {value} is not a finite number; price the plan again")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        _refuse_non_finite(item, f"{place}.{key}")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise PlanError(f"key {_shorten(repr(key))} stands twice in one object of the plan; keep one of them")
        fields[key] = value
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise PlanError(f"{name} in the plan, where a finite number was expected; price the plan again")


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
