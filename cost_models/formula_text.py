"""Formulas in batch ``b`` and sequence ``s`` as text, and what a node costs as a note behind its line."""

from __future__ import annotations

import operator
from typing import Any

import sympy
from torch import fx
from torch._ops import OpOverload

from cost_models.node_cost import shown_cost
from galvatron_fx.ir.graph.bound_ops import plus
from galvatron_fx.ir.graph.metadata import FREE, has_meta, meta_of
from galvatron_fx.ir.graph.precision import CASTS
from galvatron_fx.ir.graph.random_ops import random_uniform

__all__ = ["cost_note", "formula_text"]

_PRICED = (*CASTS, random_uniform, plus)
_COLLECTIVES = "_c10d_functional"


def formula_text(formula: Any) -> str:
    """Write a formula or number with the highest powers first and thousands apart: ``14*b*s**2 + 8,192*b*s``."""
    if isinstance(formula, int):
        return f"{formula:,}"
    terms = sympy.expand(formula).as_coefficients_dict()
    ordered = sorted(terms.items(), key=lambda term: (-_degree(term[0]), str(term[0])))
    texts = [_term(factors, count) for factors, count in ordered]
    return " + ".join(texts).replace("+ -", "- ")


def cost_note(node: fx.Node) -> str:
    """What a node costs and how its results lie on the mesh: ``2,048*b flops, 32*b B read, 32*b B written; S(0) R``.

    Empty for inputs and for what is known of neither; collectives cost no device anything.
    """
    if node.op != "call_function" or not has_meta(node) or node.target is operator.getitem:
        return ""
    placements = (" ".join(map(str, placed)) for placed in meta_of(node).placements)
    return "; ".join(text for text in (_cost_text(node), ", ".join(filter(None, placements))) if text)


def _cost_text(node: fx.Node) -> str:
    is_operator = isinstance(node.target, OpOverload) and node.target.namespace != _COLLECTIVES
    if not is_operator and node.target not in _PRICED:
        return ""
    cost = shown_cost(node)
    if cost == FREE:
        return "free"
    parts = {"flops": cost.flops, "B read": cost.read_bytes, "B written": cost.written_bytes}
    return ", ".join(f"{formula_text(amount)} {name}" for name, amount in parts.items() if amount != 0)


def _degree(factors: sympy.Expr) -> int:
    """How often batch or sequence stand in a product; a named count, as that of parameters, is first among equals."""
    return sum(int(power) for base, power in factors.as_powers_dict().items() if base.is_Symbol and power.is_Integer)


def _term(factors: sympy.Expr, count: sympy.Expr) -> str:
    number = f"{int(count):,}" if count.is_Integer else str(count)
    if factors == 1:
        return number
    return {"1": str(factors), "-1": f"-{factors}"}.get(number, f"{number}*{factors}")
