"""Numbers of devices of a sweep, and throughput by them."""

from __future__ import annotations

from pathlib import Path

import pytest

from galvatron_fx.cli.main import main

MODEL = ["sweep", "--model", "tests.cli.tiny:build", "--roles", "data", "--kinds", "H100"]


def test_throughput_is_written_by_devices_which_may_leave_a_node_half_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = tmp_path / "rates.csv"
    priced = ["--price", "H100=2", "--tokens", "1e9"]
    assert main([*MODEL, "--devices", "1-2,12", "--by-devices", str(rates), *priced]) == 0
    printed = capsys.readouterr().out
    assert "on H100-80GB" in printed and "$/Mtoken" in printed
    assert "     12 " in printed and f"throughput by devices written to {rates}" in printed
    rows = [row.split(",") for row in rates.read_text().splitlines()[1:]]
    assert [row[5] for row in rows] == [str(devices) for devices in range(1, 13)]
    assert {row[6] for row in rows} <= {"1", "2", "12"}


@pytest.mark.parametrize("devices", ["3-1", "0", "2-", "1-9999999", "two"])
def test_numbers_that_are_none_are_refused(devices: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MODEL, "--devices", devices]) == 2
    assert "is no list of devices: give numbers from 1" in capsys.readouterr().err
