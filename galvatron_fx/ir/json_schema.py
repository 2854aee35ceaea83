"""Check JSON against a schema of this package: soon done for what fits, and naming the place where something does not.

The library jsonschema says what is wrong. It takes a millisecond for a block of a plan, so each schema is first turned
into plain functions for the keywords that ours consist of; what these refuse, or do not know, the library looks at, and
nothing around it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from typing import Any, NamedTuple

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend

__all__ = ["Schema"]

_SAYS_NOTHING = {"$schema", "$defs", "title", "description"}
_KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,), "null": (type(None),),
    "number": (int, float), "integer": (int,),
}  # fmt: skip
_SIZES = ("minLength", "minItems"), ("maxLength", "maxItems")


class _Flaw(NamedTuple):
    """Where in the document something may not fit: the place, what is there, and the schema of it."""

    path: tuple[str | int, ...]
    value: Any
    schema: Mapping[str, Any]


Check = Callable[[Any], _Flaw | None]


class Schema:
    """The JSON schema in a file of ``galvatron_fx/ir``, or the definition in it that ``#name`` behind it names; unlike
    JSON Schema itself it takes 2.0 for no integer.
    """

    def __init__(self, file_name: str) -> None:
        file_name, _, name = file_name.partition("#")
        document: dict[str, Any] = json.loads(files("galvatron_fx.ir").joinpath(file_name).read_text("utf-8"))
        own = document["$defs"][name] if name else {}
        self.document: dict[str, Any] = {"$defs": document["$defs"], **own} if name else document
        strict = Draft202012Validator.TYPE_CHECKER.redefine(
            "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool)
        )
        self._validator = extend(Draft202012Validator, type_checker=strict)(self.document)
        self._check = self._compiled(self.document)

    def first_error(self, document: object) -> ValidationError | None:
        """Return what is wrong at the first place where ``document`` does not fit, or None."""
        flaw = self._check(document)
        if flaw is None:
            return None
        error: ValidationError | None = next(self._errors(flaw.schema, flaw.value), None)
        if error is None:  # the functions are stricter than the library: its word counts
            return next(self._validator.iter_errors(document), None)
        error.relative_path.extendleft(reversed(flaw.path))
        return error

    def _errors(self, schema: Mapping[str, Any], value: Any) -> Iterator[ValidationError]:
        errors: Iterator[ValidationError] = self._validator.evolve(schema=schema).iter_errors(value)
        return errors

    def _compiled(self, schema: Mapping[str, Any]) -> Check:
        """A function that returns the first flaw of a value."""
        known = {"type", "minimum", "maximum", "required", "properties", "additionalProperties", "items", "not", "$ref"}
        known |= {name for names in _SIZES for name in names}
        plain_not = set(schema.get("not", {"pattern"})) == {"pattern"}
        if not plain_not or not schema.keys() <= known | _SAYS_NOTHING:
            return lambda value: None if next(self._errors(schema, value), None) is None else _Flaw((), value, schema)
        checks = [self._itself(schema)]
        if "$ref" in schema:
            checks.append(self._compiled(self.document["$defs"][schema["$ref"].removeprefix("#/$defs/")]))
        if "items" in schema:
            checks.append(_each_item(self._compiled(schema["items"])))
        if schema.get("type") == "object":
            of_key = {key: self._compiled(inner) for key, inner in schema.get("properties", {}).items()}
            others = schema.get("additionalProperties")
            checks.append(_each_value(of_key, self._compiled(others) if isinstance(others, Mapping) else None))
        return _all_of(checks)

    def _itself(self, schema: Mapping[str, Any]) -> Check:
        """Check a value without what is inside it."""
        kinds = _KINDS[schema["type"]] if "type" in schema else (object,)
        is_number = schema.get("type") in ("number", "integer")
        least, most = schema.get("minimum", float("-inf")), schema.get("maximum", float("inf"))
        fewest = max((schema[name] for name in _SIZES[0] if name in schema), default=0)
        longest = min((schema[name] for name in _SIZES[1] if name in schema), default=None)
        required = schema.get("required", ())
        closed = schema["properties"].keys() if schema.get("additionalProperties") is False else None
        forbidden = re.compile(schema["not"]["pattern"]).search if "not" in schema else None

        def check(value: Any) -> _Flaw | None:
            fits = isinstance(value, kinds)
            if is_number:
                fits = fits and not isinstance(value, bool) and least <= value <= most
            elif fits and isinstance(value, (str, list)):
                fits = len(value) >= fewest and (longest is None or len(value) <= longest)
                fits = fits and not (forbidden is not None and isinstance(value, str) and forbidden(value))
            elif fits and isinstance(value, dict):
                fits = all(key in value for key in required) and (closed is None or value.keys() <= closed)
            return None if fits else _Flaw((), value, schema)

        return check


def _all_of(checks: list[Check]) -> Check:
    def check(value: Any) -> _Flaw | None:
        for one in checks:
            flaw = one(value)
            if flaw is not None:
                return flaw
        return None

    return check


def _each_item(inner: Check) -> Check:
    def check(value: Any) -> _Flaw | None:
        for index, item in enumerate(value if isinstance(value, list) else ()):
            flaw = inner(item)
            if flaw is not None:
                return flaw._replace(path=(index, *flaw.path))
        return None

    return check


def _each_value(of_key: Mapping[str, Check], others: Check | None) -> Check:
    def check(value: Any) -> _Flaw | None:
        for key, item in value.items():
            inner = of_key.get(key, others)
            flaw = None if inner is None else inner(item)
            if flaw is not None:
                return flaw._replace(path=(key, *flaw.path))
        return None

    return check
