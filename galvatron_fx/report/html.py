"""The page of an explained plan: one HTML text, with its style, script and pictures inside."""

from __future__ import annotations

import base64
import hashlib
from importlib.metadata import version
from importlib.resources import files
from math import prod
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from galvatron_fx.ir.plan.strategy import ROLES
from galvatron_fx.ir.plan.units import format_bytes, format_seconds
from galvatron_fx.report import words
from galvatron_fx.report.bars import alternatives_picture, memory_picture, roles_picture, shown_ranks, time_picture
from galvatron_fx.report.collective_rows import CollectiveRow
from galvatron_fx.report.drawing import Picture
from galvatron_fx.report.explained import Explained
from galvatron_fx.report.palette import css_variables
from galvatron_fx.report.svg import inline_svg
from galvatron_fx.report.tables import block_rows, memory_table, time_table
from galvatron_fx.report.timelines import memory_timeline_picture, operators_picture, schedule_picture

__all__ = ["render"]

_MOST_AREAS = 8
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
    return _environment(explained).get_template("page.html").render(
        title=f"{model_name} on {explained.cluster.num_devices} × {explained.cluster.device.name}",
        lead=words.lead(explained),
        sections=_sections(explained),
        cards=words.cards(explained),
        notes=explained.plan.notes,
        has_stages=has_stages,
        axes=words.axes(explained),
        blocks=blocks.rows,
        codes=blocks.codes,
        collectives=blocks.collectives,
        pictures=_pictures(explained),
        time_table=time_table(explained),
        memory_table=memory_table(explained),
        time_words=words.time(explained),
        memory_words=words.memory(explained),
        timeline_words=words.timeline(explained),
        step_words=words.step(explained),
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


def _sections(explained: Explained) -> list[tuple[str, str]]:
    timeline = "Pipeline timeline" if explained.schedule is not None else "Step timeline"
    return [
        ("glance", "At a glance"),
        ("blocks", "Blocks and axes"),
        ("time", "Where the time goes"),
        ("memory", "Where the memory goes"),
        ("memory-timeline", "Memory over the step"),
        ("timeline", timeline),
        ("alternatives", "What lost"),
        ("collectives", "Collectives"),
        ("code", "Lowered code"),
        ("plan", "Plan as JSON"),
    ]


def _pictures(explained: Explained) -> dict[str, Picture]:
    budget = explained.plan.memory_budget_bytes
    schedule = explained.schedule
    return {
        "roles": roles_picture(explained.plan),
        "time": time_picture(explained.ranks),
        "memory": memory_picture(explained.ranks, budget),
        "memory_timeline": memory_timeline_picture(explained.memory, shown_ranks(explained.ranks, _MOST_AREAS), budget),
        "timeline": schedule_picture({"": schedule})
        if schedule
        else operators_picture(explained.operators, explained.step_s),
    }


def _alternatives(explained: Explained) -> list[dict[str, Any]]:
    uniform = (explained.chosen, *explained.uniform)
    return [
        {
            "name": name,
            "heading": heading,
            "words": said,
            "rows": rows,
            "picture": alternatives_picture(rows) if any(row.time_s is not None for row in rows) else None,
        }
        for name, heading, said, rows in (
            ("uniform-bars", "One strategy for all blocks", words.uniform(explained), uniform),
            ("pipeline-bars", "Other pipelines", words.pipelines(explained), explained.pipelines),
        )
    ]


def _environment(explained: Explained) -> Environment:
    environment = Environment(
        loader=FunctionLoader(_asset), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )

    def over(row: CollectiveRow) -> str:
        """The axes of a collective with their degree and, where the block has one role on them, that."""
        degree = prod(explained.cluster.axes[axis].size for axis in row.axes)
        roles = {row.label[1].roles[axis] for axis in row.axes} if row.label is not None else {"pipeline"}
        return f"{words.name_axes(row.axes)} · {roles.pop() if len(roles) == 1 else 'several roles'}, {degree} ranks"

    environment.filters |= {
        "svg": inline_svg,
        "seconds": lambda seconds: "-" if seconds is None else format_seconds(seconds),
        "bytes": lambda size: "-" if size is None else format_bytes(size),
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
