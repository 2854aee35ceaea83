"""A model captured once, for every batch and sequence: :class:`Captured`."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import fx, nn

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.pass_dump import OnPass
from galvatron_fx.ir.graph.precision import checked_policy
from galvatron_fx.ir.graph.symbols import Sizes
from galvatron_fx.ir.plan.arguments import check_arguments
from galvatron_fx.pass_insertion import InsertedPasses, pass_control
from galvatron_fx.plain_model import plain_model
from passes.frontend.capture.batch_dims import BatchDim
from passes.frontend.capture.capture import ExampleInputs, FlatInputs
from passes.frontend.capture.trace import OtherSizes, Trace
from passes.frontend.pipeline import FRONTEND, Frontend

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["Captured", "is_forward_only"]


class Captured:
    """A model's training step with its sizes as expressions: traced once, for plans at every batch and sequence.

    ``example_inputs``: a global batch as of :func:`galvatron_fx.capture`, of two samples or more, traced when the first
    graph is asked for; ``mixed_precision``, ``on_pass``, ``passes``, ``batch_dim``, ``forward_only``: as there.

    Each graph is that of a capture at its sizes. Where a size in the model is no expression of batch and sequence
    (a constant of a fixed length, layers that depend on the length), the model is captured anew, with a warning that
    says which operator is why. The model must stay as it is meanwhile.
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: ExampleInputs,
        *,
        mixed_precision: MixedPrecisionPolicy | None = None,
        on_pass: OnPass | None = None,
        passes: InsertedPasses | None = None,
        batch_dim: BatchDim = None,
        forward_only: bool | None = None,
    ) -> None:
        self._model = plain_model(model)
        self._inputs = FlatInputs.of(example_inputs)
        check_arguments(batch_dim=batch_dim, forward_only=forward_only)
        control = pass_control(on_pass, passes, [FRONTEND])
        self.forward_only = is_forward_only(self._model, forward_only)
        self._frontend = Frontend(control, checked_policy(mixed_precision), batch_dim, self.forward_only)
        self._anew: dict[str, None] = {}

    def graph(self, batch: int | None = None, sequence: int | None = None) -> fx.GraphModule:
        """Return the blocked joint graph, as of :func:`galvatron_fx.capture`, at a batch and sequence.

        ``batch``, ``sequence``: None for those of the example inputs. Inputs whose first size is the batch change it,
        and with it token ids [batch, sequence] and embeddings [batch, sequence, hidden] their sequence.

        Raises InputError for a sequence where no input has one, and what :func:`galvatron_fx.capture` raises.
        """
        check_arguments(batch=batch, sequence=sequence)
        sizes = self._trace.sizes
        if sequence is not None and not sizes.sequence:
            raise InputError(f"sequence is {sequence}, and no input is [batch, sequence]: give None")
        return self.graph_of(self._trace.inputs_at(Sizes(batch or sizes.batch, sequence or sizes.sequence)))

    def graph_of(self, example_inputs: ExampleInputs) -> fx.GraphModule:
        """Return the blocked joint graph of other example inputs, which need not have data; raises as :meth:`graph`."""
        inputs = FlatInputs.of(example_inputs)
        try:
            return self._frontend.resized(self._trace, inputs)
        except OtherSizes as reason:
            self._tell(inputs, str(reason))
            return self._frontend.run(self._model, inputs)

    def shown_to(self, on_pass: OnPass) -> Captured:
        """The same capture, of whose graphs ``on_pass`` sees the passes as well."""

        def show(name: str, graph: fx.GraphModule) -> None:
            if own is not None:
                own(name, graph)
            on_pass(name, graph)

        own = self._frontend.control.on_pass
        twin = Captured.__new__(Captured)
        twin.__dict__.update(vars(self), _trace=self._trace)
        twin._frontend = replace(self._frontend, control=replace(self._frontend.control, on_pass=show))
        return twin

    @property
    def name(self) -> str:
        """The name of the model's class."""
        return type(self._model).__name__

    def hold(self, batches: tuple[int, int], sequences: tuple[int, int] | None = None) -> None:
        """Hold the expressions against traces at the least and the most of the sizes that will be asked for.

        Not needed: each graph sees to it. But sizes between two that were held need no trace, so a sweep that says
        first how far it goes has two. Where they do not hold, that is said when a graph is asked for.
        """
        size = self._trace.sizes.sequence
        least, most = (Sizes(batch, length) for batch, length in zip(batches, sequences or (size, size), strict=True))
        try:
            self._trace.hold(least, most)
        except OtherSizes:
            return

    @cached_property
    def _trace(self) -> Trace:
        return self._frontend.trace(self._model, self._inputs)

    def _tell(self, inputs: FlatInputs, reason: str) -> None:
        """Warn of a reason the first time it is met."""
        if reason not in self._anew:
            self._anew[reason] = None
            shapes = ", ".join(str(list(shape)) for shape in inputs.shapes)
            warnings.warn(f"captured anew for inputs {shapes}: {reason}", stacklevel=4)


def is_forward_only(model: nn.Module, asked: bool | None) -> bool:
    """What was asked for, else whether the model is in eval mode and the caller under ``torch.no_grad()``."""
    return not (model.training or torch.is_grad_enabled()) if asked is None else asked
