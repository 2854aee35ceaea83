"""Traces are read as they stand, or refused by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from galvatron_fx import Request
from galvatron_fx.errors import InputError
from galvatron_fx.serving.requests import checked_trace, read_trace


def test_columns_may_stand_in_any_order_beside_others(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("output, kind, arrival_s, prompt\n7,chat,2.5,100\n\n3,code,0,20\n", encoding="utf-8")
    assert read_trace(path) == (Request(0.0, 20, 3), Request(2.5, 100, 7))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"line 1: the first line names no column 'arrival_s'"),
        ("arrival_s,prompt\n0,1\n", r"line 1: the first line names no column 'output'"),
        ("arrival_s,prompt,output\n", r"trace\.csv: the trace has no requests"),
        ("arrival_s,prompt,output\n0,1,1\n1,2\n", r"line 3: 2 values"),
        ("arrival_s,prompt,output\n0,many,1\n", r"line 2: '0', 'many', '1' are no seconds"),
        ("arrival_s,prompt,output\n0,0,1\n", r"line 2: prompt of a request is 0"),
        ("arrival_s,prompt,output\nnan,1,1\n", r"line 2: arrival_s of a request is nan"),
        ("arrival_s,prompt,output\n-1,1,1\n", r"line 2: arrival_s of a request is -1"),
        ("arrival_s,prompt,output\n0,1,99999999999\n", r"line 2: output of a request is 99999999999"),
    ],
)
def test_a_bad_file_is_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_trace(path)


def test_a_missing_file_and_other_things_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read a trace from"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(InputError, match="the trace holds 3: give Request"):
        checked_trace([Request(0.0, 1, 1), 3])  # type: ignore[list-item]
    with pytest.raises(InputError, match="output of a request is True"):
        Request(0.0, 1, True)
