"""From a model to a graph that can be planned: the passes before any decision, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import fx, nn

from galvatron_fx.ir.errors import CaptureError, InputError
from galvatron_fx.ir.gc_tuning import fewer_collections
from galvatron_fx.ir.graph.verifier import verify
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


class GraphPass(Protocol):
    """A pass over a graph: a frozen dataclass with its options as fields."""

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Return the rewritten graph."""
        ...


# Each pass with the stage that the graph is in after it.
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


@dataclass(frozen=True)
class Frontend:
    """Capture a model and prepare its graph for pricing and sharding; ``on_pass(name, graph)`` sees every stage.

    ``policy``: of mixed precision; None computes in the dtypes of the parameters.
    """

    on_pass: Callable[[str, fx.GraphModule], None] | None = None
    passes: tuple[tuple[GraphPass, str], ...] = PASSES
    policy: MixedPrecisionPolicy | None = None

    @fewer_collections()
    def run(self, model: nn.Module, example_inputs: ExampleInputs) -> fx.GraphModule:
        """Return the blocked joint graph. Raises what :class:`passes.frontend.capture.capture.Capture` raises."""
        try:
            graph = Capture(policy=self.policy).run(model, example_inputs)
        except (CaptureError, InputError) as error:
            # The model is at fault: where in the capture it was noticed says nothing to the user.
            raise error.with_traceback(None) from error.__cause__
        self._done("Capture", "captured", graph)
        for step, stage in self.passes:
            graph = step.run(graph)
            self._done(type(step).__name__, stage, graph)
        return graph

    def _done(self, name: str, stage: str, graph: fx.GraphModule) -> None:
        verify(graph, stage, name)
        if self.on_pass is not None:
            self.on_pass(name, graph)
