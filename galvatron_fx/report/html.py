"""The page of an explained plan: one HTML text, with its style, script and pictures inside."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from itertools import pairwise
from math import prod
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from galvatron_fx.ir.cluster.cluster_table import describe_devices
from galvatron_fx.ir.plan.strategy import ROLES
from galvatron_fx.ir.plan.units import format_bytes, format_seconds
from galvatron_fx.report import words
from galvatron_fx.report.bars import (
    alternatives_picture,
    memory_picture,
    modules_picture,
    roles_picture,
    shown_ranks,
    time_picture,
)
from galvatron_fx.report.collective_rows import CollectiveRow
from galvatron_fx.report.drawing import NARROW_WIDTH, WIDTH, Picture
from galvatron_fx.report.explained import Explained
from galvatron_fx.report.glossary import terms
from galvatron_fx.report.module_times import by_module
from galvatron_fx.report.palette import css_variables
from galvatron_fx.report.schedule_trace import schedule_trace
from galvatron_fx.report.step_trace import step_trace
from galvatron_fx.report.svg import inline_svg
from galvatron_fx.report.tables import block_rows, block_times, memory_table, module_table, time_table
from galvatron_fx.report.timelines import memory_timeline_picture, operators_picture, schedule_picture

__all__ = ["render"]

_TERMS = "<!-- terms -->"
_WORDS = re.compile(r"<[^>]*>|&[a-z]+;")  # what is no text
Both = tuple[Picture, Picture]
_MOST_AREAS, _MOST_MODULES = 8, 12
_TASKS = {
    "start": "before the first micro-batch",
    "input_grad": "input gradients",
    "weight_grad": "weight gradients",
    "finish": "after the last micro-batch",
}


def render(explained: Explained, model_name: str) -> str:
    """Return the page; equal arguments give equal pages."""
    style, script = _asset("page.css"), _asset("page.js")
    style = style.replace("LIGHT", css_variables(False)).replace("DARK", css_variables(True))
    style += "".join(f"td.{role} {{ background: var(--{role.replace('_', '-')}); }}\n" for role in ROLES)
    has_stages = explained.plan.pipelining.num_stages > 1
    blocks = block_rows(explained)
    text = explained.plan.to_json()
    page = _environment(explained).get_template("page.html").render(
        title=f"{model_name} on {describe_devices(explained.cluster)}",
        lead=words.lead(explained),
        sections=_sections(explained),
        cards=words.cards(explained),
        notes=[*words.decided(explained), *explained.plan.notes],
        has_stages=has_stages,
        has_schedule=explained.schedule is not None,
        pipeline_ranks=explained.plan.num_pipeline_ranks,
        rate_unit=explained.throughput.unit if explained.throughput is not None else "samples",
        axes=words.axes(explained),
        blocks=blocks.rows,
        codes=blocks.codes,
        collectives=blocks.collectives,
        pictures=_pictures(explained),
        time_table=time_table(explained),
        module_table=module_table(explained),
        block_times=block_times(explained),
        what_ifs=explained.what_ifs,
        what_if_words=words.what_ifs(explained),
        blocks_words=words.blocks(explained),
        memory_table=memory_table(explained),
        time_words=words.time(explained),
        memory_words=words.memory(explained),
        timeline_words=words.timeline(explained),
        step_words=words.step(explained),
        trace_base64=base64.b64encode(_trace(explained)).decode(),
        collective_words=words.collectives(explained),
        columns=words.columns(explained),
        alternatives=_alternatives(explained),
        plan_json=text,
        plan_base64=base64.b64encode(text.encode()).decode(),
        version=version("galvatron-fx"),
        style=Markup(style),
        script=Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
    )  # fmt: skip
    return _with_terms(page)


def _trace(explained: Explained) -> bytes:
    """The step for Perfetto, which opens compressed traces as they are; without the time of compressing."""
    if explained.schedule is not None:
        events = schedule_trace({"predicted": explained.schedule})
    else:
        events = step_trace(explained.operators, explained.memory[0])
    return gzip.compress(events.to_json().encode(), mtime=0)


def _with_terms(page: str) -> str:
    """The page with its words explained at the end of the section where each stands first."""
    parts, shown = page.split(_TERMS), list[str]()
    text = parts[0]
    for part, rest in pairwise(parts):
        said = terms(_WORDS.sub(" ", part.rpartition("<section")[2]), shown)
        shown += [word for word, _ in said]
        items = Markup("").join(Markup("<dt>{}</dt><dd>{}</dd>").format(word, meaning) for word, meaning in said)
        folded = Markup('<details class="terms"><summary>Words: {}</summary><dl>{}</dl></details>')
        text += (str(folded.format(", ".join(word for word, _ in said), items)) if said else "") + rest
    return text


def _sections(explained: Explained) -> list[tuple[str, str]]:
    timeline = "Pipeline timeline" if explained.schedule is not None else "Step timeline"
    return [
        ("glance", "At a glance"),
        ("blocks", "Blocks and axes"),
        ("time", "Where the time goes"),
        ("modules", "What computes"),
        ("memory", "Where the memory goes"),
        ("memory-timeline", "Memory over the step"),
        ("timeline", timeline),
        ("alternatives", "What lost"),
        ("what-if", "What if"),
        ("collectives", "Collectives"),
        ("code", "Lowered code"),
        ("plan", "Plan as JSON"),
    ]


def _pictures(explained: Explained) -> dict[str, Both]:
    budget = explained.plan.memory_budget_bytes
    schedule = explained.schedule
    areas = shown_ranks(explained.ranks, _MOST_AREAS)
    return {
        "roles": _both(lambda width: roles_picture(explained.plan, width, words.axis_names(explained))),
        "time": _both(lambda width: time_picture(explained.ranks, width)),
        "modules": _both(partial(modules_picture, by_module(explained.modules)[:_MOST_MODULES])),
        "memory": _both(lambda width: memory_picture(explained.ranks, budget, width)),
        "memory_timeline": _both(lambda width: memory_timeline_picture(explained.memory, areas, budget, width)),
        "timeline": _both(
            lambda width: (
                schedule_picture({"": schedule}, width)
                if schedule
                else operators_picture(explained.operators, explained.step_s, width)
            )
        ),
    }


def _both(draw: Callable[[float], Picture]) -> Both:
    """A picture for wide screens and one for narrow ones, of which style shows either."""
    return draw(WIDTH), draw(NARROW_WIDTH)


def _alternatives(explained: Explained) -> list[dict[str, Any]]:
    uniform = (explained.chosen, *explained.uniform)
    parts = (
        ("uniform-bars", "One strategy for all blocks", words.uniform(explained), uniform),
        ("pipeline-bars", "Other pipelines", words.pipelines(explained), explained.pipelines),
    )
    return [
        {
            "name": name,
            "heading": heading,
            "words": said,
            "rows": rows,
            "picture": _both(partial(alternatives_picture, rows))
            if any(row.time_s is not None for row in rows)
            else None,
        }
        for name, heading, said, rows in parts
    ]


def _environment(explained: Explained) -> Environment:
    environment = Environment(
        loader=FunctionLoader(_asset), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )

    def over(row: CollectiveRow) -> str:
        """The axes of a collective with their degree and, where the block has one role on them, that."""
        degree = prod(explained.cluster.axes[axis].size for axis in row.axes)
        roles = {row.label[1].roles[axis] for axis in row.axes} if row.label is not None else {"pipeline"}
        names = words.name_axes(row.axes, explained.cluster.given_names)
        return f"{names} · {roles.pop() if len(roles) == 1 else 'several roles'}, {degree} ranks"

    environment.filters |= {
        "svg": inline_svg,
        "seconds": lambda seconds: "-" if seconds is None else format_seconds(seconds),
        "bytes": lambda size: "-" if size is None else format_bytes(size),
        "counted": lambda number, name: f"{number} {name}{'' if number == 1 else 's'}",
        "shape": lambda sizes, dtype: f"{dtype} {'×'.join(map(str, sizes)) or 'scalar'}",
        "task": lambda task: _TASKS.get(task, task),
        "indent_of": lambda line: line[: len(line) - len(line.lstrip())],
        "over": over,
        "breakable": lambda text: Markup(".<wbr>").join(text.split(".")),
    }
    return environment


def _asset(name: str) -> str:
    return files("galvatron_fx.report").joinpath("templates", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return Markup("'sha256-{}'").format(base64.b64encode(hashlib.sha256(text.encode()).digest()).decode())
