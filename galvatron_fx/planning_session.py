"""From a model to a plan that fits it: capture, search or take the given plan, check."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import fx, nn

from galvatron_fx.arguments import refuse_sizes
from galvatron_fx.captured import Captured
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.metadata import signature
from galvatron_fx.ir.graph.pass_pipeline import PassControl
from galvatron_fx.ir.graph.precision import policy_of
from galvatron_fx.ir.plan.budget_error import BudgetError
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.progress import CAPTURE, LOWERING, Observer
from galvatron_fx.plain_model import plain_model
from galvatron_fx.plan_fit import check_budget
from galvatron_fx.search_settings import SearchSettings
from passes.analysis.blocks import graph_fingerprint
from passes.frontend.capture.batch_dims import BatchDim
from passes.frontend.capture.capture import ExampleInputs, FlatInputs
from passes.frontend.pipeline import Frontend
from passes.lowering.apply_plan import (
    check_plan,
    lower,
    warn_uneven_batch,
    warn_uneven_vocabulary,
    warn_untrained_ranks,
    warn_without_experts,
    warn_without_sequence,
)
from passes.lowering.lower_stages import LoweredStages
from passes.lowering.lower_step import Lowered
from passes.search.plan_search import SearchOptions, search_plans
from passes.search.record import Watch
from passes.search.remedies import with_remedies

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["PlanningSession"]


@dataclass(frozen=True)
class PlanningSession:
    """What :func:`galvatron_fx.plan`, ``compile``, ``explain`` and the page have in common.

    ``settings``: what to search; ``given``: a plan to take instead; ``policy``: of mixed precision, None computes in
    the dtypes of the parameters; ``control``: of all passes; ``batch_dim``: of the inputs, found where None;
    ``simulate_runners_up``: so that the report says what other plans would have cost. Made
    before anything is traced, it refuses settings that no search can use, or that the given plan has decided:
    InputError, PlanError, ClusterError.
    """

    cluster: Cluster
    settings: SearchSettings = field(default_factory=SearchSettings)
    given: Plan | None = None
    policy: MixedPrecisionPolicy | None = None
    control: PassControl = field(default_factory=PassControl)
    progress: Observer | None = None
    batch_dim: BatchDim = None
    simulate_runners_up: bool = False
    watch: Watch = field(init=False)
    options: SearchOptions = field(init=False)

    def __post_init__(self) -> None:
        options = replace(self.settings.on(self.cluster), simulate_runners_up=self.simulate_runners_up)
        object.__setattr__(self, "options", options)
        object.__setattr__(self, "watch", Watch(self.progress))
        if self.given is not None:
            self.settings.refuse_beside_a_plan()
        else:
            self.settings.check_storage(self.cluster.device)

    @property
    def frontend(self) -> Frontend:
        """What captures models for it."""
        return Frontend(self.control, self.policy, self.batch_dim, bool(self.settings.forward_only))

    def capture(
        self,
        model: nn.Module | Captured,
        inputs: ExampleInputs | FlatInputs | None,
        batch: int | None = None,
        sequence: int | None = None,
    ) -> fx.GraphModule:
        """Return the graph that is planned, of a model or of one that is captured already.

        ``inputs``: None for those that were captured, then at ``batch`` and ``sequence``. Raises CaptureError and
        InputError, also for sizes beside inputs or beside a model that is not captured.
        """
        with self.watch.phase(CAPTURE):
            if not isinstance(model, Captured):
                refuse_sizes(batch=batch, sequence=sequence)
                flat = FlatInputs.of(inputs)  # type: ignore[arg-type]
                graph = self.frontend.run(plain_model(model), flat)
                if self._was_given_for_any_values(graph):
                    graph = replace(self.frontend, tells_samples_apart=False).run(plain_model(model), flat)
                return graph
            if inputs is None:
                return model.graph(batch, sequence)
            if batch is not None or sequence is not None:
                raise InputError(
                    "batch and sequence say the sizes of the captured inputs: give no example_inputs beside them"
                )
            return model.graph_of(inputs)

    def _was_given_for_any_values(self, graph: fx.GraphModule) -> bool:
        """Whether the given plan is of another graph than this one, which may tell samples apart by values of inputs:
        those that the plan was searched for may have had none, as on the meta device.
        """
        decides = bool(signature(graph).decisions)
        return decides and self.given is not None and not self.given.is_of(graph_fingerprint(graph))

    def choose(self, graph: fx.GraphModule) -> Plan:
        """The given plan, or the best there is. Raises BudgetError, PlanError and TimeLimitError."""
        return self.shortlist(graph, 1)[0]

    def shortlist(self, graph: fx.GraphModule, most: int) -> tuple[Plan, ...]:
        """The given plan, or the best ones there are; raises likewise."""
        if self.given is not None:
            return (self.given.with_precision(policy_of(graph)).with_forward_only(signature(graph).forward_only),)
        try:
            return search_plans(graph, self.cluster, self.options, self.watch, most=most)
        except BudgetError as error:
            raise with_remedies(error, graph, self.cluster, self.options) from None

    def check(self, graph: fx.GraphModule, plan: Plan) -> None:
        """Refuse a plan that fits neither model, mesh nor budget. Raises PlanError and BudgetError."""
        check_plan(plan, graph, self.cluster)
        warn_uneven_batch(plan, graph)
        warn_untrained_ranks(plan, graph)
        if self.given is not None:
            warn_without_sequence(plan, graph)
            warn_without_experts(plan, graph)
            warn_uneven_vocabulary(plan, graph)
            check_budget(plan, graph, self.cluster, self.settings.budget_bytes)

    def run(
        self, model: nn.Module | Captured, inputs: ExampleInputs | None, batch: int | None, sequence: int | None
    ) -> tuple[Plan, fx.GraphModule]:
        """The plan, checked, and the graph it is of; arguments as of :meth:`capture`."""
        graph = self.capture(model, inputs, batch, sequence)
        plan = self.choose(graph)
        self.check(graph, plan)
        return plan, graph

    def lower(self, graph: fx.GraphModule, plan: Plan) -> Lowered | LoweredStages:
        """The graphs of all ranks."""
        with self.watch.phase(LOWERING):
            return lower(graph, plan, self.cluster, control=self.control)
