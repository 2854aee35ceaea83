"""The page in a real browser: no errors, no requests, every section drawn, no text over another or cut off."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from galvatron_fx.report.page import write_page
from tests.report.explained_models import CLUSTER, Stack, inputs, one_stage, two_stages

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-features=NetworkTimeServiceQuerying", "--no-first-run", "--no-default-browser-check",
    "--window-size=1280,900",
]  # fmt: skip

# What a person would see: heights of sections, what is wider than the window, labels that touch or leave their picture.
PROBE = """
<script>
// What a pointer in the middle of the step reads, and how much of the step is shown when a fifth was dragged over.
const looks = () => ["memory-areas", "step-lanes"].map((name) => {
  const picture = document.querySelector(`svg[aria-labelledby=${name}-title]`), frame = picture.getBoundingClientRect();
  const says = picture.nextElementSibling.lastChild, view = picture.querySelector("svg.time"), read = [];
  const point = (kind, x, y) => picture.dispatchEvent(new PointerEvent(kind, {
    clientX: frame.left + frame.width * x, clientY: frame.top + y, bubbles: true }));
  picture.setPointerCapture = () => {};
  for (let y = 4; y < frame.height; y += 4) {
    point("pointermove", 0.5, y);
    read.push(says.textContent);
  }
  point("pointerdown", 0.4, 40);
  point("pointerup", 0.6, 40);
  const shown = view.viewBox.baseVal.width / Number(view.getAttribute("width"));
  picture.dispatchEvent(new MouseEvent("dblclick"));
  return { read, shown, again: view.viewBox.baseVal.width === Number(view.getAttribute("width")) };
});
window.addEventListener("load", () => {
  const boxes = (svg) => Array.from(svg.querySelectorAll("text"), (t) => [t.textContent, t.getBoundingClientRect()]);
  const touching = [], outside = [];
  for (const svg of document.querySelectorAll("svg")) {
    const frame = svg.getBoundingClientRect(), texts = boxes(svg);
    texts.forEach(([text, a], i) => {
      if (a.left < frame.left - 1 || a.right > frame.right + 1 || a.bottom > frame.bottom + 1) outside.push(text);
      for (const [other, b] of texts.slice(i + 1)) {
        const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (x > 1 && y > 4) touching.push([text, other]);
      }
    });
  }
  const sections = Array.from(document.querySelectorAll("main > section"), (s) => [s.id, s.offsetHeight]);
  const wide = Array.from(document.querySelectorAll("main *:not(svg *)")).filter(
    (e) => e.getBoundingClientRect().right > innerWidth && !e.closest(".scroll, pre"));
  const scrolled = Array.from(document.querySelectorAll(".scroll")).filter((e) => e.scrollWidth > e.clientWidth + 1);
  const found = { sections: Object.fromEntries(sections), touching, outside, wide: wide.length,
    scrolled: scrolled.length, open: scrolled.filter((e) => !e.closest("details")).map((e) => e.closest("section").id),
    sideways: Math.max(0, document.documentElement.scrollWidth - innerWidth),
    buttons: document.querySelectorAll("th button").length, read: looks() };
  document.title = "found " + JSON.stringify(found);
});
</script>
"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module", params=["one stage", "two stages"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("browser") / "page.html"
    plan = one_stage() if request.param == "one stage" else two_stages()
    write_page(path, Stack(layers=4), CLUSTER, inputs(), plan=plan)
    return path


def browse(page: Path, *more: str) -> subprocess.CompletedProcess[str]:
    folder = page.with_suffix(".profile")
    command = [str(CHROMIUM), *QUIET, f"--user-data-dir={folder}", *more, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def requests(page: Path, log: Path) -> set[str]:
    """What a page asks the network for; the browser's own requests, for updates and the time, have no origin."""
    browse(page, f"--log-net-log={log}", f"--screenshot={log.with_suffix('.png')}")
    events = json.loads(log.read_text(encoding="utf-8"))["events"]
    asked = [event["params"] for event in events if "initiator" in event.get("params", {})]
    return {found["url"] for found in asked if "url" in found and found["initiator"] != "not an origin"}


def test_no_errors(page: Path) -> None:
    done = browse(page, "--enable-logging=stderr", "--dump-dom")
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_no_requests(page: Path, tmp_path: Path) -> None:
    assert {url for url in requests(page, tmp_path / "net.json") if not url.startswith(("file:", "data:"))} == set()
    assert (tmp_path / "net.png").stat().st_size > 20_000


def test_requests_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "other.html"
    page.write_text('<!doctype html><img src="http://example.invalid/x.png">')
    assert "http://example.invalid/x.png" in requests(page, tmp_path / "net.json")


def probed(page: Path, *flags: str) -> dict[str, Any]:
    """What PROBE finds in a window of that size."""
    copy = page.with_name(f"probed-{page.name}")
    text = re.sub(r"<meta http-equiv=[^>]*>", "", page.read_text(encoding="utf-8"))
    copy.write_text(text.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    dumped = re.search(r"<title>found (.*?)</title>", browse(copy, *flags, "--dump-dom").stdout, re.DOTALL)
    assert dumped is not None
    found: dict[str, Any] = json.loads(html.unescape(dumped[1]))
    return found


def test_everything_is_drawn_and_nothing_overlaps(page: Path) -> None:
    found = probed(page)
    assert len(found["sections"]) == 12 and min(found["sections"].values()) > 60
    assert (found["touching"], found["outside"]) == ([], [])
    assert (found["wide"], found["scrolled"], found["sideways"]) == (0, 0, 0)
    assert found["buttons"] > 8
    memory, lanes = found["read"]
    assert any(re.fullmatch(r"\d+ us · parameters: [\d.]+ kB", said) for said in memory["read"]), memory["read"]
    working = r"\d+ us · (rank 0, (forward|weight gradients)|operators, compute): [\d.]+ us, from [\d.]+ us on"
    assert any(re.fullmatch(working, said) for said in lanes["read"]), lanes["read"]
    assert all(0.2 < seen["shown"] < 0.3 and seen["again"] for seen in (memory, lanes))


def test_no_table_is_cut_off_on_a_narrow_screen(page: Path) -> None:
    """But for those that are folded away; 500 pixels are the least that this browser has."""
    found = probed(page, "--window-size=500,900")
    assert (found["wide"], found["open"], found["sideways"]) == (0, [], 0)
