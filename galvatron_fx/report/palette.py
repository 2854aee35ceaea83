"""Colours by what they stand for, for a light and a dark page; the pictures on paper have the light ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from galvatron_fx.ir.plan.prediction import (
    ACCUMULATE,
    ACTIVATIONS,
    BATCH,
    COMPUTE,
    GATHERED,
    GRADIENTS,
    HOST_COPIES,
    IDLE,
    PARAMETERS,
    RECOMPUTE,
    STATE_COPIES,
    STATES,
    TRANSFER,
    TRANSIENTS,
    UPDATE,
)

__all__ = ["COLOURS", "css_name", "css_variables", "kind_colours"]

COLOURS: Mapping[str, tuple[str, str]] = {
    # What pictures are written and ruled with.
    "ink": ("#1a202c", "#e2e8f0"),
    "muted": ("#5a6577", "#a0aec0"),
    "rule": ("#d5dbe4", "#3b4657"),
    "paper": ("#ffffff", "#161b24"),
    "on colour": ("#ffffff", "#ffffff"),
    "on light": ("#1a202c", "#1a202c"),
    "limit": ("#c53030", "#fc8181"),
    # Roles of axes.
    "data": ("#2b6cb0", "#2c69a8"),
    "zero": ("#2f855a", "#2b7a52"),
    "tensor": ("#b7600b", "#a95a0d"),
    "tensor_sequence": ("#c53030", "#b83232"),
    "sequence": ("#6b46c1", "#6b4fbb"),
    "context": ("#97266d", "#8f2b68"),
    "graph": ("#744210", "#7b5a1e"),
    "expert": ("#2c7a7b", "#297273"),
    "expert_sequence": ("#5f7016", "#62731a"),
    "pipeline": ("#4a5568", "#566377"),
    # Kinds of device, in the order of their first pipeline rank; further ones begin again.
    "device kind 0": ("#285e8e", "#2c6aa0"),
    "device kind 1": ("#b7600b", "#a95a0d"),
    "device kind 2": ("#2f855a", "#2b7a52"),
    "device kind 3": ("#6b46c1", "#6b4fbb"),
    "device kind 4": ("#97266d", "#8f2b68"),
    "device kind 5": ("#5f7016", "#62731a"),
    # Causes of time.
    COMPUTE: ("#2b6cb0", "#3d7fc4"),
    RECOMPUTE: ("#76b3e8", "#8fc4f2"),
    ACCUMULATE: ("#805ad5", "#9a7be0"),
    UPDATE: ("#718096", "#8593a8"),
    "all_gather": ("#2f855a", "#3c9d6d"),
    "all_reduce": ("#c53030", "#dd5c5c"),
    "reduce_scatter": ("#dd6b20", "#e8833f"),
    "all_to_all": ("#b83280", "#cf5b9b"),
    "rotate": ("#319795", "#4fb3b0"),
    HOST_COPIES: ("#975a16", "#b7791f"),
    STATE_COPIES: ("#744210", "#a0703a"),
    TRANSFER: ("#b7791f", "#d09a3d"),
    IDLE: ("#e2e8f0", "#2f3a4a"),
    # Kinds of memory.
    PARAMETERS: ("#2b6cb0", "#3d7fc4"),
    GRADIENTS: ("#dd6b20", "#e8833f"),
    STATES: ("#805ad5", "#9a7be0"),
    GATHERED: ("#2f855a", "#3c9d6d"),
    ACTIVATIONS: ("#c53030", "#dd5c5c"),
    TRANSIENTS: ("#d69e2e", "#dfb154"),
    BATCH: ("#718096", "#8593a8"),
    # What a pipeline rank does, the same for its later stages, and for stages that all ranks compute together.
    "forward": ("#2b6cb0", "#3d7fc4"),
    "backward": ("#2f855a", "#3c9d6d"),
    "input gradients": ("#dd6b20", "#e8833f"),
    "weight gradients": ("#805ad5", "#9a7be0"),
    "forward, later stage": ("#90bde6", "#86b4e0"),
    "backward, later stage": ("#8cc7a8", "#86c7a6"),
    "input gradients, later stage": ("#f2b78f", "#f0b48c"),
    "weight gradients, later stage": ("#c3b0ec", "#c4b2ea"),
    "forward, all ranks": ("#b83280", "#c94f96"),
    "backward, all ranks": ("#702459", "#8f3d78"),
    "input gradients, all ranks": ("#d53f8c", "#de66a4"),
    "weight gradients, all ranks": ("#97266d", "#ab4585"),
    # The chosen plan and the others.
    "chosen": ("#2b6cb0", "#3d7fc4"),
    "other": ("#a3b1c4", "#6b7a90"),
    "too large": ("#e8b4b4", "#8a4a4a"),
}


def kind_colours(kinds: Iterable[str]) -> dict[str, str]:
    """A colour for each kind of device, by its name."""
    colours = [name for name in COLOURS if name.startswith("device kind")]
    return {kind: colours[number % len(colours)] for number, kind in enumerate(dict.fromkeys(kinds))}


def css_name(colour: str) -> str:
    """The name of a colour as a CSS variable: "gathered parameters" is ``--gathered-parameters``."""
    return "--" + colour.replace(",", "").replace(" ", "-").replace("_", "-")


def css_variables(dark: bool) -> str:
    """All colours as CSS declarations."""
    return "".join(f"{css_name(name)}: {pair[dark]}; " for name, pair in COLOURS.items())
