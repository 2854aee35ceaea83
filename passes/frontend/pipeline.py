"""From a model to a graph that can be planned: the passes before any decision, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import fx, nn

from galvatron_fx.ir.errors import CaptureError, InputError
from galvatron_fx.ir.gc_tuning import fewer_collections
from galvatron_fx.ir.graph.decisions import NOTHING_READ, MayRead
from galvatron_fx.ir.graph.pass_pipeline import GraphPass, PassControl, PassPipeline
from galvatron_fx.ir.torch_compat.tracing import on_cpu
from passes.frontend.annotate_costs import AnnotateCosts
from passes.frontend.batched_indexing import BatchedIndexing
from passes.frontend.capture.batch_dims import BatchDim
from passes.frontend.capture.capture import Capture, ExampleInputs, FlatInputs
from passes.frontend.capture.trace import Trace
from passes.frontend.decompose import Decompose
from passes.frontend.eliminate_common_subexpressions import EliminateCommonSubexpressions
from passes.frontend.expert_masks import ProveMasks
from passes.frontend.find_blocks import FindBlocks
from passes.frontend.find_experts import FindExperts
from passes.frontend.fold_causal_masks import FoldCausalMasks
from passes.frontend.follow_batch import FollowBatch
from passes.frontend.functional_random import FunctionalRandom
from passes.frontend.join_slices import JoinSlices
from passes.frontend.locate_batch import LocateBatch
from passes.frontend.mixed_precision import MixedPrecision
from passes.frontend.number_values import NumberValues

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


PASSES: tuple[tuple[GraphPass, str], ...] = (
    (FunctionalRandom(), "captured"),
    (FoldCausalMasks(), "captured"),
    (ProveMasks(), "captured"),
    (FindExperts(), "captured"),
    (BatchedIndexing(), "captured"),
    (Decompose(), "captured"),
    (JoinSlices(), "captured"),
    (FollowBatch(), "captured"),
    (LocateBatch(), "captured"),
    (FindBlocks(), "blocked"),
    (MixedPrecision(), "blocked"),
    (EliminateCommonSubexpressions(), "blocked"),
    (NumberValues(), "blocked"),
    (AnnotateCosts(), "annotated"),
)

FRONTEND = PassPipeline("front end", {Capture: "captured", **{type(step): stage for step, stage in PASSES}})


@dataclass(frozen=True)
class Frontend:
    """Capture a model and prepare its graph for pricing and sharding.

    ``control``: who sees the graph after each pass, and what else runs; ``policy``: of mixed precision; None computes
    in the dtypes of the parameters; ``batch_dim``: which dim of the inputs is the batch, found where None;
    ``forward_only``: graphs without backward; ``may_read``,
    ``tells_samples_apart``, ``symbolic``: as of :class:`passes.frontend.capture.capture.Capture`.
    """

    control: PassControl = field(default_factory=PassControl)
    policy: MixedPrecisionPolicy | None = None
    batch_dim: BatchDim = None
    forward_only: bool = False
    may_read: MayRead = NOTHING_READ
    tells_samples_apart: bool = True
    symbolic: bool = True

    def run(self, model: nn.Module, example_inputs: ExampleInputs) -> fx.GraphModule:
        """Return the blocked joint graph. Raises what :class:`passes.frontend.capture.capture.Capture` raises."""
        return self._finished(lambda: self._capture.trace(model, example_inputs).whole)

    @fewer_collections()
    def trace(self, model: nn.Module, example_inputs: ExampleInputs) -> Trace:
        """Trace a model for :meth:`resized`; raises as :meth:`run` does."""
        try:
            with on_cpu():
                return self._capture.trace(model, example_inputs)
        except (CaptureError, InputError) as error:
            raise error.with_traceback(None) from error.__cause__

    def resized(self, trace: Trace, inputs: FlatInputs) -> fx.GraphModule:
        """Return the blocked joint graph for other inputs. Raises OtherSizes where they need a capture of their own."""
        return self._finished(lambda: trace.at(inputs))

    @property
    def _capture(self) -> Capture:
        return Capture(
            symbolic=self.symbolic,
            policy=self.policy,
            batch_dim=self.batch_dim,
            forward_only=self.forward_only,
            may_read=self.may_read,
            tells_samples_apart=self.tells_samples_apart,
        )

    @fewer_collections()
    def _finished(self, capture: Callable[[], fx.GraphModule]) -> fx.GraphModule:
        apply = FRONTEND.under(self.control)
        with on_cpu():
            try:
                graph = apply.first(self._capture, capture)
            except (CaptureError, InputError) as error:
                # The model is at fault: where in the capture it was noticed says nothing to the user.
                raise error.with_traceback(None) from error.__cause__
            for step, _ in PASSES:
                graph = apply(step, graph)
        return graph
