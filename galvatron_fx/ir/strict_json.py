"""JSON that others have written: read once, from a regular file of bounded size, strictly, and checked by a schema.

Strict: every key stands once in its object, and there is no NaN. Whatever comes in, the only error that comes out is
the one that its reader names.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NoReturn, cast

from galvatron_fx.ir.errors import GalvatronError, InputError
from galvatron_fx.ir.json_schema import Schema
from galvatron_fx.ir.regular_file import open_regular

__all__ = ["MOST_BYTES", "JsonFormat", "parse_object", "read_bytes", "read_object", "read_text"]

MOST_BYTES = 16_000_000
"""The largest file that is read where nothing else is said."""

_MOST_SHOWN = 200
_MOST_DEPTH = 100  # of objects and lists in each other; plans, profiles and model configs have below 10


@dataclass(frozen=True)
class JsonFormat:
    """A kind of document, "plan" for ``name``, and what is said of text that is none.

    ``schema_file``: in ``galvatron_fx/ir``, with ``#name`` for one of its definitions.

    Names in braces in ``too_long``, ``non_finite``, ``other_version`` and ``misfit`` stand for what was found;
    ``nullable``: what may be there instead of null.
    """

    name: str
    error: type[GalvatronError]
    schema_file: str
    version: int
    too_long: str
    non_finite: str
    other_version: str
    misfit: str
    nullable: str

    def parse(self, text: str, most_characters: int) -> dict[str, Any]:
        """Return the document in ``text``; raises ``error`` for everything that is none."""
        document = self.load(text, most_characters)
        try:
            self.check(document)
        except RecursionError:
            raise self._too_deep() from None
        return cast(dict[str, Any], document)

    def load(self, text: str, most_characters: int) -> object:
        """Return the JSON in ``text``, whatever it is about; raises ``error`` for what is none, or repeats keys."""
        if not isinstance(text, str):
            raise self.error(f"a {self.name} is JSON text of at most {most_characters} characters, no {type(text)}")
        if len(text) > most_characters:
            raise self.error(self.too_long.format(size=len(text), most=most_characters))
        try:
            return _load(text, f"the {self.name}", self.error, self._refuse_constant)
        except RecursionError:
            raise self._too_deep() from None

    def _too_deep(self) -> GalvatronError:
        return self.error(f"the {self.name} is not JSON that is read: it is nested too deeply")

    def check(self, document: object) -> None:
        """Raise ``error`` unless ``document`` fits the schema, naming the place, what is there and what may be."""
        if isinstance(document, dict) and (version := document.get("version", self.version)) != self.version:
            raise self.error(self.other_version.format(found=_shorten(repr(version))))
        flaw = _schema(self.schema_file).first_error(document)
        if flaw is not None:
            instance, what = _shorten(repr(flaw.instance)), _shorten(flaw.message)
            if flaw.validator == "not":  # the library's words are a regular expression
                what = f"{instance} holds characters that are not allowed there"
            elif flaw.validator == "anyOf":
                what = f"{instance} is neither null nor {self.nullable}"
            raise self.error(self.misfit.format(place=_shorten(flaw.json_path), what=what))

    def _refuse_constant(self, constant: str) -> NoReturn:
        raise self.error(self.non_finite.format(found=constant))


def read_bytes(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Return what a file holds, or one byte more than ``most_bytes`` of it; raises OSError for what is no file."""
    with open_regular(path) as file:
        return file.read(most_bytes + 1)


def read_text(
    path: str | os.PathLike[str], what: str, most_bytes: int = MOST_BYTES, error: type[GalvatronError] = InputError
) -> str:
    """Return the text of a file, "a plan" for ``what``.

    Raises ``error`` for what is missing, unreadable, no regular file, over ``most_bytes`` or not UTF-8.
    """
    try:
        content = read_bytes(path, most_bytes)
    except OSError as problem:
        raise error(f"cannot read {what} from {path}: {problem.strerror}; give the path of {what}") from problem
    except ValueError as problem:
        raise error(f"cannot read {what} from {_shorten(str(path))!r}: {problem}") from None
    if len(content) > most_bytes:
        raise error(f"{path} has over {most_bytes} bytes: is it {what} at all?")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise error(f"{path} is not UTF-8 at byte {problem.start}: give the path of {what}") from None


def read_object(path: str | os.PathLike[str], what: str, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Read a JSON object of any content; raises InputError that begins with the path."""
    text = read_text(path, what, most_bytes)
    try:
        return parse_object(text)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def parse_object(text: str) -> dict[str, Any]:
    """Return the JSON object in ``text``; raises InputError for other JSON, repeated keys, NaN and deep nesting."""
    try:
        document = _load(text, "the text", InputError, _infinity)
    except RecursionError:
        raise InputError("the JSON is nested too deeply") from None
    if not isinstance(document, dict):
        raise InputError(f"a JSON object was expected, and this is {type(document).__name__}")
    if _is_deeper(document, _MOST_DEPTH):
        raise InputError(f"the JSON is nested more than {_MOST_DEPTH} deep")
    return document


def _shorten(text: str) -> str:
    """The beginning of a text that may be long."""
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def _load(text: str, the: str, error: type[GalvatronError], constant: Callable[[str], Any]) -> Any:
    """The one call of the parser; ``the``: "the plan"; ``constant``: of NaN, Infinity and -Infinity."""
    try:
        return json.loads(text, object_pairs_hook=partial(_unique_keys, the, error), parse_constant=constant)
    except GalvatronError:
        raise
    except ValueError as problem:
        raise error(f"{the} is not JSON: {_shorten(str(problem))}; write it again") from None


def _unique_keys(the: str, error: type[GalvatronError], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object, refusing a repeated key, of which JSON would keep the last in silence."""
    members = dict(pairs)
    if len(members) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise error(f"{the} repeats a key: key {_shorten(repr(key))} stands twice in one object; keep one of them")
    return members


def _infinity(name: str) -> float:
    if name == "NaN":
        raise InputError("NaN stands where a number was expected")
    return float(name.replace("Infinity", "inf"))


def _is_deeper(value: object, depth: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(depth == 0 or _is_deeper(item, depth - 1) for item in inside)


@cache
def _schema(file_name: str) -> Schema:
    return Schema(file_name)
