"""Whatever stands in a file, reading it ends soon, safely and with one clear message."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from galvatron_fx import Cluster, Plan
from galvatron_fx.cli.model_config import config_from_name
from galvatron_fx.errors import InputError, PlanError
from galvatron_fx.ir.strict_json import parse_object, read_text
from tests.cli.hostile import BY_HAND, READERS, VALID, Watch, damaged, outcome

_WATCH = Watch([])


@pytest.fixture(scope="module", autouse=True)
def watch() -> Watch:
    """Listens for what reading a file should not do; transformers is imported before the clock runs."""
    config_from_name("llama")
    _WATCH.install()
    return _WATCH


@pytest.mark.parametrize("kind", READERS)
def test_valid_files_are_read(kind: str, tmp_path: Path, watch: Watch) -> None:
    assert [outcome(kind, tmp_path / "file.json", text.encode(), watch) for text in VALID[kind]] == ["read"] * len(
        VALID[kind]
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", BY_HAND)
@pytest.mark.parametrize("kind", READERS)
def test_made_to_do_harm(kind: str, what: str, tmp_path: Path, watch: Watch) -> None:
    # Of these, what could do harm is left out; a model without layers is no harm.
    left = ("a class", "remote code", "a hub kernel", "a dtype that is a function", "fewer than no layers")
    found = outcome(kind, tmp_path / "file.json", BY_HAND[what], watch)
    assert (found == "read") == (kind == "config" and what in left)


def test_a_large_plan_is_refused_soon() -> None:
    document = json.loads(VALID["plan"][1])
    document["blocks"] = [{**document["blocks"][0], "name": f"block_{index}"} for index in range(40_000)]
    document["blocks"][-1]["time_s"] = -1
    text = json.dumps(document)
    assert len(text) > 7_000_000
    began = time.process_time()
    with pytest.raises(PlanError, match=r"at \$\.blocks\[39999\]\.time_s: -1 is less than the minimum of 0"):
        Plan.from_json(text)
    assert time.process_time() - began < 3  # 10 s with jsonschema alone


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", READERS)
def test_damaged(kind: str, tmp_path: Path, watch: Watch) -> None:
    @settings(max_examples=100, suppress_health_check=list(HealthCheck))
    @given(damaged(kind))
    def check(content: bytes) -> None:
        outcome(kind, tmp_path / "file.json", content, watch)

    check()


def test_the_watch_sees_what_reading_should_not_do(tmp_path: Path, watch: Watch) -> None:
    watch.active = True
    try:
        subprocess.run([sys.executable, "-c", ""], check=True)
        (tmp_path / "file").write_text("x")
    finally:
        watch.active = False
    seen, watch.seen = watch.seen, []
    assert any(event.startswith("subprocess.Popen") for event in seen) and any(e.startswith("open") for e in seen)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(InputError, match=f"cannot read a plan from {path}: it is no regular file"):
            read_text(path, "a plan")
    with pytest.raises(PlanError, match="it is no regular file"):
        Plan.load(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is no regular file"):
        Cluster.load(tmp_path / "pipe")
    with pytest.raises(PlanError, match="null byte"):
        Plan.load("a\0b")
    with pytest.raises(InputError, match=r"cannot read a plan from .*: Is a directory"):
        read_text(tmp_path, "a plan")
    with pytest.raises(InputError, match=r"cannot read a plan from .*null byte"):
        read_text("a\0b", "a plan")
    (tmp_path / "big").write_bytes(b"x" * 11)
    with pytest.raises(InputError, match="has over 10 bytes: is it a plan at all"):
        read_text(tmp_path / "big", "a plan", 10)
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    with pytest.raises(InputError, match="is not UTF-8 at byte 2"):
        read_text(tmp_path / "bytes", "a plan")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON: Expecting property name"),
        ("[]", "a JSON object was expected, and this is list"),
        ('{"a": 1, "a": 2}', "key 'a' stands twice"),
        ('{"a": NaN}', "NaN stands where a number was expected"),
        ('{"a": ' + "[" * 150 + "]" * 150 + "}", "nested more than 100 deep"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
    ],
)
def test_objects_that_are_none(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_object(text)
