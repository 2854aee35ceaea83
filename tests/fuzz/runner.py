"""Run random programs under random plans on simulated ranks and hold them against one device."""

from __future__ import annotations

import copy
import linecache
import re
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import isnan
from random import Random
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from galvatron_fx.errors import CaptureError, GalvatronError, VerifierError
from passes.analysis.blocks import num_blocks
from tests.fuzz.picking import picked_rules
from tests.fuzz.plans import PlanDraw, draw_plan
from tests.fuzz.programs import draw_program
from tests.fuzz.source import Program
from tests.helpers import assert_exact, captured, one_device, relative_errors, simulate, simulate_stages

TOLERANCE = 1e-9
EXACT, REFUSED, UNTRACED, UNDEFINED, SENSITIVE = "exact", "refused", "refused by capture", "undefined", "sensitive"
WRONG, CRASHED = "wrong", "crashed"
FAULTS = (WRONG, CRASHED)
_NUDGE = 1e-13


def _nudge(value: Tensor) -> Tensor:
    return value * (1 + _NUDGE * torch.randn_like(value))


class _Nudging(TorchDispatchMode):
    """Every operator's result is off by little more than it is rounded (Parker 1997, Monte Carlo arithmetic)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator; what is a view of something, or is written in place, stays."""
        result = func(*args, **(kwargs or {}))
        if func.is_view or func._schema.is_mutable:
            return result
        return tree_map_only(Tensor, lambda value: _nudge(value) if value.is_floating_point() else value, result)


class Prepared:
    """A program as a module, with its inputs, its graph and what one device makes of it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        name = f"<program {program.seed}>"
        source = str(program)
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        space: dict[str, Any] = {"__name__": f"fuzz_program_{program.seed}"}
        exec(compile(source, name, "exec"), space)
        self.model: nn.Module = space["model"]
        self.inputs: dict[str, Tensor] = space["inputs"]
        if program.seed % 2:
            for value in self.inputs.values():
                value.requires_grad_(value.is_floating_point())
        self._keep_buffers()

    def _keep_buffers(self) -> None:
        self._buffers = {name: value.clone() for name, value in self.model.named_buffers()}

    def _restore_buffers(self) -> None:
        with torch.no_grad():
            for name, value in self.model.named_buffers():
                value.copy_(self._buffers[name])

    @classmethod
    def of(cls, model: nn.Module, inputs: dict[str, Tensor]) -> Prepared:
        """A model that is there already."""
        prepared = cls.__new__(cls)
        prepared.model, prepared.inputs = model, inputs
        prepared._keep_buffers()
        return prepared

    @cached_property
    def expected(self) -> dict[str, Tensor]:
        """Loss, outputs and gradients on one device."""
        return self.run(self.inputs)

    @cached_property
    def graph(self) -> fx.GraphModule:
        """The graph that the compiler makes."""
        return captured(self.model, self.inputs)

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same for other inputs; leaves the model's buffers as they were."""
        named = one_device(self.model, inputs)
        after = {f"buffer {name}": value.clone() for name, value in self.model.named_buffers()}
        self._restore_buffers()
        changed = {n: v for n, v in after.items() if not torch.equal(v, self._buffers[n.removeprefix("buffer ")])}
        return named | changed

    @property
    def is_defined(self) -> bool:
        """Whether there is a finite loss and are finite gradients, some at all."""
        learns = any(result.requires_grad for result in tree_leaves(self.model(**self.inputs)))
        self._restore_buffers()
        if not learns:
            return False
        return all(bool(value.isfinite().all()) for value in self.expected.values())

    def is_sensitive(self, name: str, error: float) -> bool:
        """Whether a value moves by a tenth of ``error`` where what goes in and comes out of operators moves by little
        more than it is rounded.

        A gradient that is zero but for rounding (of a bias before a norm) has no digit that a plan could keep; nor has
        what becomes nan by that little.
        """
        moved = [relative_errors(self._nudged(seed), self.expected)[name] for seed in range(3)]
        return any(by > error / 10 or (isnan(by) and not isnan(error)) for by in moved)

    def _nudged(self, seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        nudged = {n: _nudge(v) if v.is_floating_point() else v for n, v in self.inputs.items()}
        parameters = copy.deepcopy(self.model.state_dict())
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(_nudge(parameter))
        try:
            with _Nudging():
                return self.run(nudged)
        except RuntimeError:  # pushed out of what an operator takes: a target of 1 that is more now
            return {name: torch.full_like(value, torch.nan) for name, value in self.expected.items()}
        finally:
            self.model.load_state_dict(parameters)

    def check(self, plan: PlanDraw) -> None:
        """Run a plan; raises what the compiler raises, and AssertionError where a value differs."""
        blocks = num_blocks(self.graph)
        strategies = plan.dealt(blocks)
        with picked_rules(plan.rules):
            if plan.has_stages:
                first, table = plan.first_blocks(blocks), plan.table(blocks)
                got = simulate_stages(self.graph, self.model, self.inputs, plan.sizes, strategies, first, table)
            else:
                got = simulate(self.graph, self.model, self.inputs, plan.sizes, strategies, {})
        assert_exact(got, self.expected, tolerance=TOLERANCE)


@dataclass(frozen=True)
class Outcome:
    """What became of a program under a plan (None: it was never planned)."""

    program: Program
    plan: PlanDraw | None
    kind: str
    error: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether the compiler is at fault."""
        return self.kind in FAULTS

    @property
    def reason(self) -> str:
        """The type of a refusal and what it says first, without names."""
        return re.sub(r"'[^']*'|\d+", "_", self.error.partition(":")[2] or self.error)[:60].strip()

    def __str__(self) -> str:
        """A program that can be pasted."""
        return f"{self.kind}: {self.error}\n{pasted(self.program, self.plan)}"


def pasted(program: Program, plan: PlanDraw | None) -> str:
    """The program and its plan as Python that shows the fault when it is run in the repository."""
    lines = [str(program), ""]
    if plan is not None:
        lines += [
            "from galvatron_fx.ir.plan.strategy import Strategy",
            "from tests.fuzz.plans import PlanDraw",
            "from tests.fuzz.runner import check_plan",
            "",
            f"check_plan(model, inputs, {plan!r})",
        ]
    return "\n".join(lines)


def check_plan(model: nn.Module, inputs: dict[str, Tensor], plan: PlanDraw) -> None:
    """Hold a plan against one device; raises what :meth:`Prepared.check` raises."""
    Prepared.of(model, inputs).check(plan)


def run_program(program: Program | Prepared, plans: int) -> Iterator[Outcome]:
    """Run a program under so many plans, drawn by its seed."""
    given, program = program, program.program if isinstance(program, Prepared) else program
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            prepared = given if isinstance(given, Prepared) else Prepared(given)
            if not prepared.is_defined:
                yield Outcome(program, None, UNDEFINED)
                return
            blocks = num_blocks(prepared.graph)
        except CaptureError as error:
            yield Outcome(program, None, UNTRACED, str(error))
            return
        except Exception:
            yield Outcome(program, None, CRASHED, traceback.format_exc(limit=-4))
            return
        random = Random(f"plans {program.seed}")
        batch = next(iter(prepared.inputs.values())).shape[0]
        for _ in range(plans):
            yield run_plan(prepared, draw_plan(random, blocks, batch))


def run_plan(prepared: Prepared, plan: PlanDraw) -> Outcome:
    """Run a prepared program under one plan, whatever comes of it."""
    kind, error = EXACT, ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            prepared.check(plan)
        except VerifierError as broken:
            kind, error = CRASHED, str(broken)
        except GalvatronError as refusal:
            kind, error = REFUSED, f"{type(refusal).__name__}: {refusal}"
        except AssertionError as difference:
            kind, error = CRASHED, traceback.format_exc(limit=-3)
            if found := re.search(r": (.*) differs by (\S+)$", str(difference)):
                error = str(difference)
                kind = SENSITIVE if prepared.is_sensitive(found[1], float(found[2])) else WRONG
        except Exception:
            kind, error = CRASHED, traceback.format_exc(limit=-4)
    return Outcome(prepared.program, plan, kind, error)


def run_seed(seed: int, plans: int) -> list[Outcome]:
    """Run the program of a seed under so many plans."""
    return list(run_program(draw_program(seed), plans))
