"""From a model to a graph that can be planned: the passes before any decision, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import fx, nn

from passes.capture import Capture, ExampleInputs
from passes.decompose import Decompose
from passes.find_blocks import FindBlocks
from passes.fold_causal_masks import FoldCausalMasks
from passes.functional_random import FunctionalRandom
from passes.merge_duplicates import MergeDuplicates


class GraphPass(Protocol):
    """A pass over a graph: a frozen dataclass with its options as fields."""

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Return the rewritten graph."""
        ...


PASSES: tuple[GraphPass, ...] = (FunctionalRandom(), FoldCausalMasks(), Decompose(), FindBlocks(), MergeDuplicates())


@dataclass(frozen=True)
class Frontend:
    """Capture a model and prepare its graph for pricing and sharding; ``on_pass(name, graph)`` sees every stage."""

    on_pass: Callable[[str, fx.GraphModule], None] | None = None
    passes: tuple[GraphPass, ...] = PASSES

    def run(self, model: nn.Module, example_inputs: ExampleInputs) -> fx.GraphModule:
        """Return the blocked joint graph. Raises what :class:`passes.capture.Capture` raises."""
        graph = Capture().run(model, example_inputs)
        self._show("capture", graph)
        for step in self.passes:
            graph = step.run(graph)
            self._show(type(step).__name__, graph)
        return graph

    def _show(self, name: str, graph: fx.GraphModule) -> None:
        if self.on_pass is not None:
            self.on_pass(name, graph)
