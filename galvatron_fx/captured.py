"""A model captured once, for every batch and sequence: :class:`Captured`."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from torch import fx, nn

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.pass_dump import OnPass
from galvatron_fx.ir.graph.precision import checked_policy
from galvatron_fx.ir.graph.symbols import Sizes
from galvatron_fx.ir.plan.arguments import check_arguments
from galvatron_fx.pass_insertion import InsertedPasses, pass_control
from galvatron_fx.plain_model import plain_model
from passes.frontend.capture.capture import ExampleInputs, FlatInputs
from passes.frontend.capture.trace import OtherSizes, Trace
from passes.frontend.pipeline import FRONTEND, Frontend

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["Captured"]


class Captured:
    """A model's training step with its sizes as expressions: traced once, for plans at every batch and sequence.

    ``example_inputs``: a global batch as of :func:`galvatron_fx.capture`, of two samples or more;
    ``mixed_precision``, ``on_pass``, ``passes``: as there. Each graph is that of a capture at its sizes. Where a size
    in the model is no expression of batch and sequence (a constant of a fixed length, layers that depend on the length)
    the model is captured anew, with a warning that says which operator is why. The model must stay as it is meanwhile.
    Raises what :func:`galvatron_fx.capture` raises.
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: ExampleInputs,
        *,
        mixed_precision: MixedPrecisionPolicy | None = None,
        on_pass: OnPass | None = None,
        passes: InsertedPasses | None = None,
    ) -> None:
        self._model = plain_model(model)
        control = pass_control(on_pass, passes, [FRONTEND])
        self._frontend = Frontend(control, checked_policy(mixed_precision))
        self._trace: Trace = self._frontend.trace(self._model, example_inputs)
        self._anew: dict[str, None] = {}

    @property
    def sizes(self) -> tuple[int, int]:
        """Batch and sequence of the example inputs; the latter 0 where no input may have one."""
        return self._trace.sizes.batch, self._trace.sizes.sequence

    def graph(self, batch: int | None = None, sequence: int | None = None) -> fx.GraphModule:
        """Return the blocked joint graph, as of :func:`galvatron_fx.capture`, at other sizes than the example inputs'.

        Inputs whose first size is the batch get another one, and with it token ids [batch, sequence] and embeddings
        [batch, sequence, hidden] their sequence. Raises InputError for a sequence where no input has one.
        """
        check_arguments(batch=batch, sequence=sequence)
        sizes = self._trace.sizes
        if sequence is not None and not sizes.sequence:
            raise InputError(f"sequence is {sequence}, and no input is [batch, sequence]: give None")
        return self.graph_of(self._trace.inputs_at(Sizes(batch or sizes.batch, sequence or sizes.sequence)))

    def graph_of(self, example_inputs: ExampleInputs) -> fx.GraphModule:
        """Return the blocked joint graph of other example inputs, which need not have data."""
        inputs = FlatInputs.of(example_inputs)
        try:
            return self._frontend.resized(self._trace, inputs)
        except OtherSizes as reason:
            return self._captured_anew(inputs, str(reason))

    def _captured_anew(self, inputs: FlatInputs, reason: str) -> fx.GraphModule:
        if reason not in self._anew:
            self._anew[reason] = None
            shapes = ", ".join(str(list(shape)) for shape in inputs.shapes)
            warnings.warn(f"captured anew for inputs {shapes}: {reason}", stacklevel=3)
        return self._frontend.run(self._model, inputs)
