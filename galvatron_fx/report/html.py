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


def render(told: Explained, model_name: str) -> str:
    """Return the page; equal arguments give equal pages."""
    style, script = _asset("page.css"), _asset("page.js")
    style = style.replace("LIGHT", css_variables(False)).replace("DARK", css_variables(True))
    style += "".join(f"td.{role} {{ background: var(--{role.replace('_', '-')}); }}\n" for role in ROLES)
    has_stages = told.plan.pipelining.num_stages > 1
    blocks = block_rows(told)
    text = told.plan.to_json()
    return _environment(told).get_template("page.html").render(
        title=f"{model_name} on {told.cluster.num_devices} × {told.cluster.device.name}",
        lead=words.lead(told),
        sections=_sections(told),
        cards=words.cards(told),
        notes=told.plan.notes,
        has_stages=has_stages,
        axes=words.axes(told),
        blocks=blocks.rows,
        codes=blocks.codes,
        collectives=blocks.collectives,
        pictures=_pictures(told),
        time_table=time_table(told),
        memory_table=memory_table(told),
        time_words=words.time(told),
        memory_words=words.memory(told),
        timeline_words=words.timeline(told),
        step_words=words.step(told),
        collective_words=words.collectives(told),
        columns=words.columns(told),
        alternatives=_alternatives(told),
        plan_json=text,
        plan_base64=base64.b64encode(text.encode()).decode(),
        version=version("galvatron-fx"),
        style=Markup(style),
        script=Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
    )  # fmt: skip


def _sections(told: Explained) -> list[tuple[str, str]]:
    timeline = "Pipeline timeline" if told.schedule is not None else "Step timeline"
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


def _pictures(told: Explained) -> dict[str, Picture]:
    budget = told.plan.memory_budget_bytes
    schedule = told.schedule
    return {
        "roles": roles_picture(told.plan),
        "time": time_picture(told.ranks),
        "memory": memory_picture(told.ranks, budget),
        "memory_timeline": memory_timeline_picture(told.memory, shown_ranks(told.ranks, _MOST_AREAS), budget),
        "timeline": schedule_picture({"": schedule}) if schedule else operators_picture(told.operators, told.step_s),
    }


def _alternatives(told: Explained) -> list[dict[str, Any]]:
    uniform = (told.chosen, *told.uniform)
    return [
        {
            "name": name,
            "heading": heading,
            "words": said,
            "rows": rows,
            "picture": alternatives_picture(rows) if any(row.time_s is not None for row in rows) else None,
        }
        for name, heading, said, rows in (
            ("uniform-bars", "One strategy for all blocks", words.uniform(told), uniform),
            ("pipeline-bars", "Other pipelines", words.pipelines(told), told.pipelines),
        )
    ]


def _environment(told: Explained) -> Environment:
    environment = Environment(
        loader=FunctionLoader(_asset), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )

    def over(row: CollectiveRow) -> str:
        """The axes of a collective with their degree and, where the block has one role on them, that."""
        degree = prod(told.cluster.axes[axis].size for axis in row.axes)
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
