"""Make a program that shows a fault shorter, as long as it shows a fault of the same kind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from tests.fuzz.plans import simpler
from tests.fuzz.runner import Outcome, Prepared, run_plan
from tests.fuzz.source import Function, Program

_NAME = re.compile(r"[A-Za-z_]\w*")


def shrunk(outcome: Outcome, tries: int = 200) -> Outcome:
    """The same fault in fewer lines and under a simpler plan, as far as so many tries get."""
    best, left = outcome, tries
    moved = True
    while moved and left > 0 and best.plan is not None:
        moved = False
        for candidate in _candidates(best):
            left -= 1
            if left <= 0:
                break
            if candidate.is_fault and candidate.kind == outcome.kind:
                best, moved = candidate, True
                break
    return best


def _candidates(best: Outcome) -> Iterator[Outcome]:
    """Smaller programs under the same plan, those that run on one device; then the program under simpler plans."""
    assert best.plan is not None
    for program in smaller(best.program):
        try:
            prepared = Prepared(program)
            if not prepared.is_defined:
                continue
        except Exception:  # shapes that no longer fit: no program
            continue
        yield _planned(prepared, best)
    for plan in simpler(best.plan):
        if plan != best.plan:
            yield _planned(Prepared(best.program), replace(best, plan=plan))


def _planned(prepared: Prepared, like: Outcome) -> Outcome:
    assert like.plan is not None
    return run_plan(prepared, like.plan)


def smaller(program: Program) -> Iterator[Program]:
    """The program without a line: what used its value takes another that went into it instead."""
    for index, function in reversed(list(enumerate(program.functions))):
        for changed in _shorter(function):
            functions = (*program.functions[:index], changed, *program.functions[index + 1 :])
            yield replace(program, functions=functions)


def _shorter(function: Function) -> Iterator[Function]:
    for at in reversed(range(len(function.lines))):
        targets, _, expression = function.lines[at].partition(" = ")
        earlier = _names(function, at)
        rest = [*function.lines[at + 1 :], function.result]
        used = set(_NAME.findall(" ".join(rest)))
        names = targets.split(", ")
        if not used & set(names):
            yield _without(function, at, rest)
            continue
        for source in dict.fromkeys(name for name in _NAME.findall(expression) if name in earlier):
            swapped = rest
            for name in names:
                swapped = [re.sub(rf"\b{name}\b", source, line) for line in swapped]
            yield _without(function, at, swapped)


def _names(function: Function, until: int) -> set[str]:
    assigned = (name for line in function.lines[:until] for name in line.partition(" = ")[0].split(", "))
    return {*function.arguments, *assigned}


def _without(function: Function, at: int, rest: list[str]) -> Function:
    return replace(function, lines=(*function.lines[:at], *rest[:-1]), result=rest[-1])
