"""Rows of a table as CSV and JSON."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, fields
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Row = TypeVar("Row", bound=DataclassInstance)

__all__ = ["csv_text", "json_text", "save_table"]


def csv_text(kind: type[Row], rows: Iterable[Row]) -> str:
    """A line of names, and one for each row; what is unknown is empty."""
    stream = StringIO()
    writer = csv.DictWriter(stream, [field.name for field in fields(kind)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return stream.getvalue()


def json_text(rows: Iterable[Row]) -> str:
    """The rows as a JSON list of objects; what is unknown is null."""
    return json.dumps([asdict(row) for row in rows], indent=1, allow_nan=False) + "\n"


def save_table(path: str | os.PathLike[str], kind: type[Row], rows: Iterable[Row]) -> None:
    """Write JSON where ``path`` ends in .json, else CSV; raises OSError."""
    text = json_text(rows) if os.fspath(path).endswith(".json") else csv_text(kind, rows)
    Path(path).write_text(text, encoding="utf-8")
