"""Requests that a server gets, and files of them."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.plan.arguments import shown
from galvatron_fx.ir.strict_json import read_text

__all__ = ["Request", "checked_trace", "read_trace"]

_COLUMNS = ("arrival_s", "prompt", "output")
_MOST_TOKENS = 10_000_000  # of a request
_MOST_BYTES = 256_000_000  # some ten million requests


@dataclass(frozen=True, order=True)
class Request:
    """``arrival_s``: seconds since the trace began; ``prompt``, ``output``: tokens that come and that are made."""

    arrival_s: float
    prompt: int
    output: int

    def __post_init__(self) -> None:
        arrival = self.arrival_s
        if isinstance(arrival, bool) or not isinstance(arrival, (int, float)) or not isfinite(arrival) or arrival < 0:
            raise InputError(f"arrival_s of a request is {shown(arrival)}: give seconds of at least 0")
        for name in ("prompt", "output"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_TOKENS:
                raise InputError(f"{name} of a request is {shown(value)}: give tokens, from 1 to {_MOST_TOKENS}")

    @property
    def keys(self) -> int:
        """The longest that its cache gets: the last token that is made is not read again."""
        return self.prompt + self.output - 1


def read_trace(path: str | os.PathLike[str]) -> tuple[Request, ...]:
    """Read a CSV file whose first line names the columns arrival_s, prompt and output; other columns are left out.

    Raises InputError that names the line.
    """
    reader = csv.reader(io.StringIO(read_text(path, "a trace", _MOST_BYTES)))
    requests = []
    try:
        heading = [name.strip() for name in next(reader, [])]
        missing = [name for name in _COLUMNS if name not in heading]
        if missing:
            raise InputError(f"the first line names no column {missing[0]!r}: write {','.join(_COLUMNS)}")
        places = [heading.index(name) for name in _COLUMNS]
        for row in reader:
            if row:
                requests.append(_request(row, places))
    except (InputError, csv.Error) as error:
        raise InputError(f"{os.fspath(path)}, line {max(reader.line_num, 1)}: {error}") from None
    try:
        return checked_trace(requests)
    except InputError as error:
        raise InputError(f"{os.fspath(path)}: {error}") from None


def checked_trace(requests: Iterable[Request]) -> tuple[Request, ...]:
    """Return the requests in order of arrival; raises InputError for none, and for what is no request."""
    listed = list(requests)
    wrong = next((each for each in listed if not isinstance(each, Request)), None)
    if wrong is not None:
        raise InputError(f"the trace holds {shown(wrong)}: give Request(arrival_s, prompt, output)")
    if not listed:
        raise InputError("the trace has no requests: give one or more")
    return tuple(sorted(listed, key=lambda request: request.arrival_s))


def _request(row: Sequence[str], places: Sequence[int]) -> Request:
    if len(row) <= max(places):
        raise InputError(f"{len(row)} values, where the first line names more columns")
    arrival, prompt, output = (row[place].strip() for place in places)
    try:
        return Request(float(arrival), int(prompt), int(output))
    except InputError:
        raise
    except ValueError:
        raise InputError(
            f"{arrival[:40]!r}, {prompt[:40]!r}, {output[:40]!r} are no seconds and two numbers of tokens"
        ) from None
