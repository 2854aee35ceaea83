"""Whether a plan trains as one device does: :func:`check`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from galvatron_fx.api import compile
from galvatron_fx.arguments import refuse_captured
from galvatron_fx.checking.blocks import block_names
from galvatron_fx.checking.comparison import exact_rows, merged, missing_rows, rounded_rows
from galvatron_fx.checking.report import CheckReport, CheckRow
from galvatron_fx.checking.same_draws import drawn_shapes
from galvatron_fx.checking.simulated import Results, ValueOf, run_stages, run_step
from galvatron_fx.checking.steps import Eager, Key, OnRanks, OptimizerOf, Simulated, Step, StepRunner, train
from galvatron_fx.checking.subject import Subject, same_generators
from galvatron_fx.checking.wide_floats import NARROW, wide_modules, widened
from galvatron_fx.forward_only import settled
from galvatron_fx.ir.cluster.cluster import Axis, Cluster
from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.metadata import meta_of, signature
from galvatron_fx.ir.graph.pass_pipeline import PassControl
from galvatron_fx.ir.graph.precision import checked_policy
from galvatron_fx.ir.plan.arguments import check_arguments
from galvatron_fx.ir.plan.plan import Plan, prime_factors
from galvatron_fx.pass_insertion import InsertedPasses, pass_control, require_all_ran
from galvatron_fx.plain_model import plain_model
from galvatron_fx.planning_session import PlanningSession
from galvatron_fx.search_settings import SearchSettings
from passes.frontend.capture.capture import ExampleInputs, FlatInputs
from passes.frontend.capture.module_state import quoted
from passes.lowering.apply_plan import lower
from passes.lowering.lower_stages import LoweredStages

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["check", "cluster_of"]

TOLERANCE = 1e-10
FACTOR = 4.0
_LINK = (1e-5, 1e11)  # seconds, bytes a second: of ranks that are only counted
_NARROW_INSIDE = (
    "the model casts to float32 or below inside, which real ranks do as well: held against the rounding of eager; "
    "simulated ranks compare exactly"
)
_ZEROS = (
    "eager has no gradient for {}, and the plan has zeros, as for experts without a token: optimizers that decay "
    "weights or keep momentum move these by the plan, and leave them alone in eager"
)
_NO_NUMBERS = (
    "{} of eager are no numbers (nan), and count as equal where the plan has none either: give weights and a batch of "
    "which all is finite"
)
_BY_GRAPH = "{}: the plan was compared with the captured graph on one device instead"


def check(
    model: nn.Module,
    ranks: DeviceMesh | Cluster | int | Sequence[int],
    batch: ExampleInputs,
    plan: Plan | None = None,
    *,
    steps: int = 1,
    exact: bool = True,
    tolerance: float = TOLERANCE,
    factor: float = FACTOR,
    mixed_precision: MixedPrecisionPolicy | None = None,
    optimizer: OptimizerOf | None = None,
    seed: int = 0,
    passes: InsertedPasses | None = None,
    forward_only: bool | None = None,
) -> CheckReport:
    """Train ``steps`` steps by ``plan`` and, eager, on one device, and report where the two differ most.

    ``ranks``: a DeviceMesh, whose ranks all call this alike and get equal reports; or ranks that are simulated in this
    process: a Cluster, their number, or the sizes of the mesh axes; ``batch``: the global batch; ``plan``: searched
    where None; ``optimizer``: makes one of parameters (default: SGD with momentum); ``passes``: your own, as of
    :func:`galvatron_fx.compile`, of which the plan's program is made and eager knows nothing; ``forward_only``: as of
    :func:`galvatron_fx.compile`: then outputs and buffers of so many calls are compared, and nothing is trained.

    ``exact``: both compute in float64, also what the model casts to float32 inside and whatever ``mixed_precision``
    says, so that a difference above ``tolerance`` (relative to the largest element) is a fault and no rounding.
    Otherwise both compute in the model's own dtypes and the policy's, and the plan may be off from float64 ``factor``
    times as far as eager is (root mean squares).

    Several losses are added up (on a DeviceMesh, the one that ``forward_backward`` differentiates is taken); without
    one, outputs are weighted by random numbers. What draws random numbers draws the same
    in both. A model on the meta device is initialised from ``seed``. The model, its gradients and the generators are
    as before. Raises what :func:`galvatron_fx.compile` raises.
    """
    refuse_captured(model, "give the model it was made of, and galvatron_fx.plan(captured, ...) as the plan")
    model = plain_model(model)
    if steps < 1:
        raise InputError(f"steps is {steps!r}: give at least 1")
    mesh = ranks if isinstance(ranks, DeviceMesh) else None
    cluster = Cluster.from_mesh(ranks) if isinstance(ranks, DeviceMesh) else cluster_of(ranks)
    policy = checked_policy(mixed_precision)
    limits = Limits(exact, tolerance, factor)
    check_arguments(forward_only=forward_only)
    settings = settled(SearchSettings(forward_only=forward_only), model, plan)
    with same_generators(), torch.set_grad_enabled(not settings.forward_only):
        subject = Subject.of(model, FlatInputs.of(batch), mesh, seed)
        control = pass_control(None, passes)
        optimizer_of = optimizer or _descent
        return _Check(subject, cluster, policy, limits, steps, optimizer_of, seed, control, settings).run(plan)


def cluster_of(ranks: Cluster | int | Sequence[int]) -> Cluster:
    """So many ranks as a cluster of prime axes, on devices like any; a Cluster as it is."""
    if isinstance(ranks, Cluster):
        return ranks
    sizes = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    primes = [prime for size in sizes for prime in reversed(prime_factors(size))] or [1]
    device = Cluster.preset("8xA100-80GB").device
    return Cluster(device, tuple(Axis(f"a{at}", size, *_LINK) for at, size in enumerate(primes)))


@dataclass(frozen=True)
class Limits:
    """How far a plan may be off; see :func:`check`."""

    exact: bool
    tolerance: float
    factor: float


@dataclass(frozen=True)
class _Check:
    """One check, from capture to report."""

    subject: Subject
    cluster: Cluster
    policy: MixedPrecisionPolicy | None
    limits: Limits
    steps: int
    optimizer: OptimizerOf
    seed: int
    control: PassControl
    settings: SearchSettings

    def run(self, plan: Plan | None) -> CheckReport:
        """Compare; ``plan`` is searched where None."""
        subject, exact = self.subject, self.limits.exact
        is_narrow = self.policy is not None or subject.is_narrow
        with nullcontext() if is_narrow or not exact else wide_modules():
            graph = self._captured(subject.model, subject.inputs, self.policy)
        chosen = self._planned(graph, plan)
        with wide_modules() if exact else nullcontext():
            if exact and is_narrow:
                # The plan is for the graph in its own dtypes; the same blocks have other fingerprints in float64.
                graph = self._captured(*subject.copy(widened), None)
                chosen = _of_no_model(chosen)
            history = self._by_plan(graph, chosen)
            expected, reason = self._on_one_device(graph, is_wide=True)
        names = block_names(graph, [key for key in expected[0].values if key[0] in ("loss", "output")])
        is_exact = self._is_exact(graph)
        if is_exact:
            rows = exact_rows(history, expected, self.limits.tolerance, names)
        else:
            eager, other = self._on_one_device(graph, is_wide=False, by_graph=bool(reason))
            reason = reason or other
            rows = rounded_rows(history, eager, expected, self.limits.factor, names)
        notes = [_BY_GRAPH.format(reason)] if reason else []
        if self.limits.exact and not is_exact:
            notes.append(_NARROW_INSIDE)
        held, zeros = _held(history, expected)
        if zeros:
            notes.append(_ZEROS.format(quoted(zeros)))
        if no_numbers := _no_numbers(expected):
            notes.append(_NO_NUMBERS.format(quoted(no_numbers)))
        rows, unseen = self._of_all_ranks(rows, held, expected, names, chosen)
        if unseen:
            notes.append(f"not compared, as stages keep them to themselves: {', '.join(unseen)}")
        count = self.cluster.num_devices
        ranks = f"{count} {'simulated ' if subject.mesh is None else ''}rank{'s' * (count > 1)}"
        return CheckReport(tuple(rows), ranks, self.steps, is_exact, tuple(notes))

    # ---- what runs ----

    def _captured(self, model: nn.Module, inputs: FlatInputs, policy: MixedPrecisionPolicy | None) -> fx.GraphModule:
        return PlanningSession(self.cluster, self.settings, policy=policy, control=self.control).capture(model, inputs)

    def _planned(self, graph: fx.GraphModule, plan: Plan | None) -> Plan:
        session = PlanningSession(self.cluster, self.settings, given=plan, policy=self.policy)
        chosen = session.choose(graph)
        session.check(graph, chosen)
        return chosen

    def _by_plan(self, graph: fx.GraphModule, plan: Plan) -> list[Step]:
        """The steps by the plan, on real ranks or simulated ones."""
        model, inputs = self.subject.copy(widened if self.limits.exact else _unchanged)
        if self.subject.mesh is None:
            program = _program(graph, plan, self.cluster, self.control)
            require_all_ran(self.control)
            return self._train(Simulated(model, inputs, graph, program, self.limits.exact))
        policy = None if self.limits.exact else self.policy
        compiled = compile(
            model,
            self.subject.mesh,
            inputs,
            plan=plan,
            mixed_precision=policy,
            seed=self.seed,
            passes=self.control.inserted,
            forward_only=self.settings.forward_only,
        )
        return self._train(OnRanks(compiled, inputs, has_loss=signature(graph).loss is not None))

    def _on_one_device(self, graph: fx.GraphModule, *, is_wide: bool, by_graph: bool = False) -> tuple[list[Step], str]:
        """The steps of the model itself; of its graph where eager cannot do the same, and why it cannot."""
        keeps = self.limits.exact or is_wide
        change, reason = widened if keeps else _unchanged, ""
        trained = signature(graph).loss if self.subject.mesh is not None else None
        if not by_graph:
            policy = None if keeps else self.policy
            eager = Eager(*self.subject.copy(change), policy, is_wide, trained, drawn_shapes(graph))
            try:
                steps = self._train(eager)
            except RuntimeError as error:
                if eager.policy is None:
                    raise
                reason = f"eager does not run in this precision ({str(error).splitlines()[0]})"
            else:
                reason = eager.unlike and f"eager cannot be handed the same random numbers ({eager.unlike})"
                if not reason:
                    return steps, ""
        alone = _program(graph, Plan.uniform((), ()), cluster_of(1), PassControl())
        model, inputs = self.subject.copy(change)
        return self._train(Simulated(model, inputs, graph, alone, is_wide, trained)), reason

    def _is_exact(self, graph: fx.GraphModule) -> bool:
        """Whether both compute in float64 alone: on real ranks a model may cast to float32 inside."""
        if not self.limits.exact or self.subject.mesh is None:
            return self.limits.exact
        calls = (node for node in graph.graph.nodes if node.op == "call_function")
        return not any(spec.dtype in NARROW for node in calls for spec in meta_of(node).specs if spec is not None)

    def _train(self, runner: StepRunner) -> list[Step]:
        return train(runner, self.steps, self.optimizer, self.seed)

    # ---- what is reported ----

    def _of_all_ranks(
        self, rows: list[CheckRow], held: list[set[Key]], expected: list[Step], names: dict[Key, str], plan: Plan
    ) -> tuple[list[CheckRow], list[str]]:
        """Rows of every rank, with those of values that nobody has; and the outputs that stages do not tell."""
        heard = [(rows, held)]
        if self.subject.mesh is not None:
            heard = [(rows, held)] * dist.get_world_size()
            dist.all_gather_object(heard, (rows, held))
        together = [set().union(*(held[step] for _, held in heard)) for step in range(self.steps)]
        lost = set().union(*(known.values.keys() - keys for known, keys in zip(expected, together, strict=True)))
        unseen: list[str] = []
        if self.subject.mesh is not None and not plan.pipelining.is_trivial:
            unseen = sorted(name for kind, name in lost if kind == "output")
        lost -= {("output", name) for name in unseen}
        more = set().union(*(keys - known.values.keys() for known, keys in zip(expected, together, strict=True)))
        all_rows = [row for rank_rows, _ in heard for row in rank_rows]
        return merged([*all_rows, *missing_rows(lost, more, names)]), unseen


def _program(graph: fx.GraphModule, plan: Plan, cluster: Cluster, control: PassControl) -> Callable[[ValueOf], Results]:
    """A step of ``plan`` on simulated ranks, with all outputs kept."""
    plain = replace(plan, fold_gradients=False)  # where gradients are taken changes none of them
    lowered = lower(graph, plain, cluster, control=control, training=False)
    if isinstance(lowered, LoweredStages):
        stages, schedule = lowered, plan.pipelining.table(plan.num_pipeline_ranks)
        return lambda value_of: run_stages(stages, schedule, value_of)
    whole = lowered
    return lambda value_of: run_step(whole, value_of)


def _held(history: list[Step], expected: list[Step]) -> tuple[list[set[Key]], list[str]]:
    """What each step has; and, left out of that, whose gradients are zeros and were never made by eager."""
    held: list[set[Key]] = []
    zeros: dict[str, None] = {}
    for step, known in zip(history, expected, strict=True):
        more = [key for key in step.values if key[0] == "gradient" and key not in known.values]
        none = {key for key in more if not step.values[key].any()}
        zeros |= {name: None for _, name in more if ("gradient", name) in none}
        held.append(set(step.values) - none)
    return held, list(zeros)


def _no_numbers(expected: list[Step]) -> list[str]:
    """The losses and gradients that are nan on one device, in any step."""
    values = [(*key, value) for step in expected for key, value in step.values.items()]
    names = (name for kind, name, value in values if kind in ("loss", "gradient") and value.isnan().any())
    return list(dict.fromkeys(names))


def _of_no_model(plan: Plan) -> Plan:
    """The same decisions for a graph with other fingerprints."""
    blocks = tuple(replace(block, fingerprint="") for block in plan.blocks)
    return replace(plan, graph_fingerprint="", blocks=blocks, mixed_precision=None)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _descent(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)
