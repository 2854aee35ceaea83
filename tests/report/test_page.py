"""The explain page: whole, linked, escaped, offline; its tables and pictures tell what was simulated."""

from __future__ import annotations

import base64
import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

import galvatron_fx
from galvatron_fx.errors import PlanError
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.report.page import write_page
from tests.passes.frontend.test_follow_batch import Words, batch
from tests.report.explained_models import CLUSTER, HOSTILE, Stack, inputs, one_stage, two_stages

_VOID = {"meta", "img", "br", "link", "wbr"}
SECTIONS = ("glance", "blocks", "time", "memory", "memory-timeline", "timeline", "modules", "alternatives", "what-if",
            "collectives", "code")  # fmt: skip


class Page(HTMLParser):
    """What stands in a page: ids, links, tags with their attributes, and the text of each section."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: dict[str, str] = {}
        self._open: list[str] = []
        self._sections: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)
        if tag == "section":
            self._sections.append(dict(attrs)["id"] or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag == "section":
            self._sections.pop()

    def handle_data(self, data: str) -> None:
        for section in self._sections:
            self.words[section] = self.words.get(section, "") + data

    def values(self, attribute: str) -> list[str]:
        """All values of an attribute."""
        return [found[attribute] or "" for _, found in self.tags if attribute in found]


@pytest.fixture(scope="module", params=["one stage", "two stages", pytest.param("searched", marks=pytest.mark.slow)])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, str]:
    """A plan and its page."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    given = {"one stage": one_stage(), "two stages": two_stages(), "searched": None}[request.param]
    options = {"roles": ("data", "zero", "pipeline"), "memory_budget": "1.1MB", "num_microbatches": 2}
    plan = write_page(path, Stack(layers=5), CLUSTER, inputs(), plan=given, **({} if given else options))
    assert given is None or plan == given
    assert [file.name for file in path.parent.iterdir()] == ["page.html"]
    return plan, path.read_text(encoding="utf-8")


@pytest.mark.slow
def test_values_that_decide_are_told(tmp_path: Path) -> None:
    ids, patches, sizes = batch()
    given = {"ids": ids, "patches": patches.float(), "sizes": sizes}
    with pytest.warns(UserWarning, match="turns values of 'sizes' into Python numbers"):
        write_page(tmp_path / "page.html", Words(), CLUSTER, given, plan=one_stage())
    said = Page((tmp_path / "page.html").read_text(encoding="utf-8")).words["glance"]
    assert re.search(r"Forward decides by values of 'sizes', \[2, 1, 3, 1\]: File .*patches.split", said)
    assert "The program is one of this batch alone" in said


@pytest.mark.sampled(2)
def test_every_section_is_there_and_every_link_leads_somewhere(written: tuple[Plan, str]) -> None:
    page = Page(written[1])
    ids = page.values("id")
    assert len(ids) == len(set(ids)) and set(SECTIONS) <= set(ids)
    links = [link for link in page.values("href") if not link.startswith("data:")]
    assert all(link.startswith("#") and link[1:] in ids for link in links)
    assert {f"#{section}" for section in SECTIONS} <= set(links)
    assert {link for link in links if link.startswith("#code-")} == {f"#{i}" for i in ids if i.startswith("code-")}
    assert all(len(page.words[section].split()) > 8 for section in SECTIONS)
    assert set(page.values("aria-labelledby")) <= set(ids)


def test_nothing_comes_from_elsewhere(written: tuple[Plan, str]) -> None:
    text = written[1]
    page = Page(text)
    assert not {tag for tag, _ in page.tags} & {"link", "img", "iframe", "object", "embed", "base", "form"}
    assert not page.values("src") and not page.values("style") and not page.values("onclick")
    read = re.sub(r"data:[a-z/]+;base64,[\w+/=]+", "", text)
    assert not re.search(r"https?:|//[a-z]|url\(|@import|fetch\(|XMLHttp", read)
    (policy,) = (a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert policy is not None and policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def test_names_of_modules_are_text(written: tuple[Plan, str]) -> None:
    text = written[1]
    page = Page(text)
    assert "<img" not in text and HOSTILE not in text
    assert HOSTILE in page.words["code"] + page.words["collectives"]


def test_one_of_a_sort_is_not_several(written: tuple[Plan, str]) -> None:
    assert not re.search(r"\b1 (kinds|lines|collectives)\b", written[1])


def test_the_plan_is_in_the_page(written: tuple[Plan, str]) -> None:
    plan, text = written
    page = Page(text)
    found = Plan.from_json(downloaded(page, "application/json").decode())
    assert found.axis_sizes == plan.axis_sizes and found.pipelining == plan.pipelining
    assert {block.strategy for block in found.blocks} == {block.strategy for block in plan.blocks}
    schema = json.loads(Path(galvatron_fx.__file__).with_name("ir").joinpath("plan_schema.json").read_text())
    Draft202012Validator(schema).validate(json.loads(found.to_json()))


def downloaded(page: Page, kind: str) -> bytes:
    """What the page's one link to data of that kind gives."""
    (link,) = (link for link in page.values("href") if link.startswith(f"data:{kind};base64,"))
    return base64.b64decode(link.partition(",")[2])


def test_the_trace_is_in_the_page(written: tuple[Plan, str]) -> None:
    plan, text = written
    events = json.loads(gzip.decompress(downloaded(Page(text), "application/gzip")))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    if plan.pipelining.num_microbatches > 1:
        stages = range(plan.pipelining.num_stages)
        assert {f"rank {stage}" for stage in stages} <= lanes
        assert {span["args"]["stage"] for span in spans} == set(stages)
    else:
        assert "operators" in lanes and max(span["args"]["block"] for span in spans) == 5
    what = "action" if plan.pipelining.num_microbatches > 1 else "operator and collective"
    assert f"Every {what} of it: download the trace" in Page(text).words["timeline"]


def test_alternatives(written: tuple[Plan, str]) -> None:
    plan, text = written
    words = Page(text).words["alternatives"]
    assert "zero×" in words and re.search(r"[+-]\d+\.\d%", words)
    if plan.report is None:
        assert "given and not searched" in words
    else:
        assert "chosen: " in words and len(plan.report.runners_up) > 0
        assert all(f"{c.num_stages} stages on" in words for c in plan.report.runners_up if c.num_stages > 1)
        assert "too large" in words


def test_computing_is_split_by_module_paths_and_words_are_explained(written: tuple[Plan, str]) -> None:
    page = Page(written[1])
    assert "layers.#.down" in page.words["modules"] and "layers.#.norm" in page.words["modules"]
    assert "computing" in page.words["modules"] and "100.0%" not in page.words["modules"]
    assert "Words:" in written[1] and "activations" in page.words["memory"]
    assert ("narrow" in page.values("class")) and len(page.values("viewBox")) % 2 == 0


def test_what_if_rows_are_estimates_of_one_kind(written: tuple[Plan, str]) -> None:
    words = Page(written[1]).words["what-if"]
    assert all(said in words for said in ("as it is", "half the memory budget", "8 devices", "2 devices"))


def test_rivals_have_the_names_that_people_know_and_a_reason(written: tuple[Plan, str]) -> None:
    words = Page(written[1]).words["alternatives"]
    assert re.search(r"(DDP|FSDP)-\d", words) and re.search(
        r"[+−]\d+(\.\d+)? [mu]?s|over the budget|about the same", words
    )


@pytest.mark.slow
def test_pages_of_equal_plans_are_equal(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_page(tmp_path / name, Stack(layers=2), CLUSTER, inputs(), plan=one_stage())
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_a_plan_for_another_mesh_is_refused_and_nothing_written(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"mesh with axes \(2,\)"):
        write_page(tmp_path / "page.html", Stack(), CLUSTER, inputs(), plan=Plan.uniform((2,), ["data"]))
    assert list(tmp_path.iterdir()) == []
