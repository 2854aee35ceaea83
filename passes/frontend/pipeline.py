"""From a model to a graph that can be planned: the passes before any decision, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import fx, nn

from galvatron_fx.ir.errors import CaptureError, InputError
from galvatron_fx.ir.gc_tuning import fewer_collections
from galvatron_fx.ir.graph.pass_pipeline import GraphPass, PassControl, PassPipeline
from passes.frontend.annotate_costs import AnnotateCosts
from passes.frontend.batched_indexing import BatchedIndexing
from passes.frontend.capture.capture import Capture, ExampleInputs
from passes.frontend.decompose import Decompose
from passes.frontend.eliminate_common_subexpressions import EliminateCommonSubexpressions
from passes.frontend.find_blocks import FindBlocks
from passes.frontend.fold_causal_masks import FoldCausalMasks
from passes.frontend.functional_random import FunctionalRandom
from passes.frontend.locate_batch import LocateBatch
from passes.frontend.mixed_precision import MixedPrecision

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


PASSES: tuple[tuple[GraphPass, str], ...] = (
    (FunctionalRandom(), "captured"),
    (FoldCausalMasks(), "captured"),
    (BatchedIndexing(), "captured"),
    (Decompose(), "captured"),
    (LocateBatch(), "captured"),
    (FindBlocks(), "blocked"),
    (MixedPrecision(), "blocked"),
    (EliminateCommonSubexpressions(), "blocked"),
    (AnnotateCosts(), "annotated"),
)

FRONTEND = PassPipeline("front end", {Capture: "captured", **{type(step): stage for step, stage in PASSES}})


@dataclass(frozen=True)
class Frontend:
    """Capture a model and prepare its graph for pricing and sharding.

    ``control``: who sees the graph after each pass, and what else runs; ``policy``: of mixed precision; None computes
    in the dtypes of the parameters.
    """

    control: PassControl = field(default_factory=PassControl)
    policy: MixedPrecisionPolicy | None = None

    @fewer_collections()
    def run(self, model: nn.Module, example_inputs: ExampleInputs) -> fx.GraphModule:
        """Return the blocked joint graph. Raises what :class:`passes.frontend.capture.capture.Capture` raises."""
        apply = FRONTEND.under(self.control)
        try:
            graph = apply.first(capture := Capture(policy=self.policy), lambda: capture.run(model, example_inputs))
        except (CaptureError, InputError) as error:
            # The model is at fault: where in the capture it was noticed says nothing to the user.
            raise error.with_traceback(None) from error.__cause__
        for step, _ in PASSES:
            graph = apply(step, graph)
        return graph
