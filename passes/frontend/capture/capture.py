"""Capture a model's training step as one joint forward-and-backward ATen graph on fake tensors."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx, nn

from galvatron_fx.ir.errors import CaptureError, GalvatronError, InputError
from galvatron_fx.ir.graph.decisions import NOTHING_READ, MayRead
from galvatron_fx.ir.graph.metadata import (
    output_ports,
    signature,
)
from galvatron_fx.ir.graph.precision import Precision, computed_in, set_precision
from galvatron_fx.ir.graph.symbols import InputDims
from galvatron_fx.ir.torch_compat.tracing import export_joint, failures_unlogged, new_fake_mode
from passes.frontend.capture.attribute_writes import refuse_view
from passes.frontend.capture.batch_dims import BatchDim, fit_sizes
from passes.frontend.capture.compare_layers import UnlikeUnits
from passes.frontend.capture.effect_tokens import drop_tokens
from passes.frontend.capture.fake_model import FlatModel, fake_weights, module_names, passing_through
from passes.frontend.capture.find_repeats import Repeat, find_repeats
from passes.frontend.capture.flat_inputs import ExampleInputs, FlatInputs
from passes.frontend.capture.input_reads import InputReads
from passes.frontend.capture.join_pieces import join_pieces
from passes.frontend.capture.known_reads import refuse_changed_reads
from passes.frontend.capture.missing_gradients import check_gradients
from passes.frontend.capture.module_state import as_buffers, quoted, refuse_new_weights
from passes.frontend.capture.record_graph import merge_tied, record_graph
from passes.frontend.capture.reruns import refuse_late_changes, refuse_replays, reruns
from passes.frontend.capture.sparse_tensors import refuse_sparse_values, refuse_sparse_weights
from passes.frontend.capture.steady_state import steady_state
from passes.frontend.capture.trace import Trace
from passes.frontend.capture.trace_again import (
    ConstantsCopied,
    InputsWritten,
    MasksNeeded,
    NotAsCompiled,
    RowsNotTaken,
    RowsOfAll,
    StateWritten,
    TraceAgain,
    WeightsWritten,
)
from passes.frontend.capture.trace_errors import explained, writes_into_constants
from passes.frontend.capture.traced_layouts import in_order
from passes.frontend.capture.written_inputs import tell_of_written_inputs
from passes.frontend.expert_masks import refuse_shared_rows
from passes.frontend.traceable_functions import traceable_functions

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["Capture", "ExampleInputs", "FlatInputs"]


@dataclass(frozen=True)
class Capture:
    """Trace forward and backward of a model into one functional graph, without running it or holding weight memory.

    Rewrite: ``nn.Module`` -> ``fx.GraphModule`` whose placeholders are parameters, buffers, inputs and the tangents of
    the differentiable outputs, and whose outputs are updated buffers, the model's outputs and one gradient a parameter.

    ``symbolic``: trace a second time at other batch and sequence sizes, so that every shape is known as an expression
    in ``b`` and ``s`` (see :mod:`galvatron_fx.ir.graph.symbols`).
    ``share_layers``: trace a few of a stack of equal layers and copy them, which gives the graph of the whole trace
    in a fraction of its time (see :mod:`passes.frontend.capture.find_repeats` and
    :mod:`passes.frontend.capture.repeat_layers`). ``policy``: the model sees parameters and inputs in the dtype that it
    is to compute in, as if they had been cast before its forward;
    :class:`passes.frontend.mixed_precision.MixedPrecision` writes the casts of parameters down. ``batch_dim``: which
    dim of the inputs is the batch (:mod:`passes.frontend.capture.batch_dims`). ``forward_only``: no backward: the graph
    is that of the model under ``torch.no_grad()``, without tangents and gradients. ``may_read``: what an earlier
    capture of the model was allowed to decide by (:class:`galvatron_fx.ir.graph.metadata.Signature`): this one need not
    find out that it has to. ``tells_samples_apart``: where a mask of inputs chooses as many rows of each sample, the
    graph is for batches in which it does.

    If the model returns scalars that need gradients (its losses), they alone are differentiable, and the other outputs
    (logits, hidden states) are returned detached; a model without such a scalar keeps every floating output
    differentiable. The loss of a step is the output called ``loss``, or the only such scalar.
    """

    symbolic: bool = True
    share_layers: bool = True
    policy: MixedPrecisionPolicy | None = None
    batch_dim: BatchDim = None
    forward_only: bool = False
    may_read: MayRead = NOTHING_READ
    tells_samples_apart: bool = True

    def run(self, model: nn.Module, example_inputs: ExampleInputs) -> fx.GraphModule:
        """Capture ``model`` on ``example_inputs`` (a dict of keyword arguments, a tuple or one tensor; the global
        batch).

        Raises CaptureError where the model's control flow depends on tensor values, naming the user's line, and
        InputError where the inputs do not fit the model's forward.
        """
        return self.trace(model, example_inputs).whole

    def trace(self, model: nn.Module, example_inputs: ExampleInputs) -> Trace:
        """Trace as :meth:`run` does, and keep what the graph at other sizes is made of; raises the same."""
        inputs = FlatInputs.of(example_inputs)
        for name, tensor in zip(inputs.tensor_names, inputs.tensors, strict=True):
            if tensor.is_nested or tensor.layout != torch.strided:
                kind = "nested" if tensor.is_nested else "sparse"
                raise InputError(f"input {name} is {kind}: give a dense tensor, padded, with a mask of what counts")
        refuse_sparse_weights(model)
        with failures_unlogged():
            return self._run(model, inputs)

    def _run(self, model: nn.Module, inputs: FlatInputs) -> Trace:
        """Trace, and where that fails as forward asks for values of inputs, with those of the example."""
        reads = InputReads(self.may_read, self.tells_samples_apart)
        while True:
            try:
                return self._with_values(model, inputs, reads)
            except GalvatronError:
                if not reads.allow_refused():
                    raise

    def _with_values(self, model: nn.Module, inputs: FlatInputs, reads: InputReads) -> Trace:
        held: tuple[str, ...] = ()
        masked_because: Exception | None = None
        copies_constants = False
        written: tuple[str, ...] = ()
        written_weights: tuple[str, ...] = ()
        as_compiled: GalvatronError | None = None
        answers_asks = True
        while True:
            try:
                with as_buffers(model, held):
                    flat = FlatModel(model, inputs, self.policy, self.forward_only)
                    flat.masked_because, flat.copies_constants = masked_because, copies_constants
                    flat.written, flat.written_weights = written, written_weights
                    flat.input_reads, flat.is_told_eager = reads, as_compiled is not None
                    flat.answers_asks = answers_asks
                    trace = self._once(flat, held)
                    if masked_because is None:
                        _require_rows_apart(trace)
                    _check_state(flat)
                    _check_views(flat, trace.whole)
                    refuse_changed_reads(flat.decided_by, trace.whole)
                    check_gradients(trace.whole, flat)
                    _tell_of_masked_rows(flat)
                    _tell_of_finite_values(flat)
                    _tell_of_read_inputs(reads)
                    tell_of_written_inputs(signature(trace.whole).written, inputs)
                    return trace
            except StateWritten as attributes:
                held = (*held, *attributes.names)
            except MasksNeeded as needed:
                masked_because = needed.because
            except InputsWritten as inputs_written:
                written = (*written, *inputs_written.names)
            except WeightsWritten as weights:
                written_weights = (*written_weights, *weights.names)
            except ConstantsCopied:
                copies_constants = True
            except RowsNotTaken:
                answers_asks = False
            except NotAsCompiled as failed:
                as_compiled = failed.error
            except GalvatronError as error:
                if as_compiled is not None and str(error) != str(as_compiled):
                    error.add_note(f"Where torch.compiler.is_compiling() says yes: {as_compiled}")
                raise
            except RowsOfAll:
                reads.may_tell_samples_apart = False

    def _once(self, flat: FlatModel, held: Sequence[str]) -> Trace:
        unshared: Exception | None = None
        if self.share_layers:
            try:
                repeats = find_repeats(flat)
                if repeats:
                    return self._with_shared_layers(flat, repeats, held)
            except TraceAgain:
                raise
            except Exception as error:
                # Whatever it is. If the model is at fault, the whole trace raises too, and says so; if it does not, the
                # fault is ours, and costs time alone.
                unshared = error
        trace = self._captured(flat, (), held)
        if unshared is not None:
            warnings.warn(
                f"equal layers of {type(flat.module).__name__} were traced one by one, which takes longer: tracing "
                f"them once failed with {type(unshared).__name__}: {unshared}",
                stacklevel=2,
            )
        return trace

    def _with_shared_layers(self, flat: FlatModel, repeats: tuple[Repeat, ...], held: Sequence[str]) -> Trace:
        """Trace each stack of equal layers once; again with shorter stacks where the traced layers turn out unlike."""
        while True:
            try:
                trace = self._captured(flat, repeats, held)
                # Layers that are left out would leave their caches as they are.
                return self._captured(flat, (), held) if repeats and _has_caches(trace.graph) else trace
            except UnlikeUnits as unlike:
                tried = ((r.shorter if r is unlike.repeat else r) for r in repeats)
                repeats = tuple(repeat for repeat in tried if repeat is not None)

    def _captured(self, flat: FlatModel, repeats: tuple[Repeat, ...], held: Sequence[str]) -> Trace:
        def trace(shapes: Sequence[tuple[int, ...]]) -> fx.GraphModule:
            return _trace(flat, shapes, repeats)

        inputs = flat.inputs
        graph = trace(inputs.shapes)
        caches = _cache_positions(graph)
        if self.symbolic:
            dims, second = fit_sizes(graph, inputs, trace, self.batch_dim, caches)
        else:
            dims, second = InputDims.of(inputs.shapes, inputs.dtypes, caches=caches), None
        graph.meta["input_dims"] = dims
        if self.policy is not None:
            parameters = dict(flat.module.named_parameters(remove_duplicate=False))
            dtypes = {name: p.dtype for name, p in parameters.items() if p.is_floating_point()}
            _refuse_rounded_updates(graph, parameters, self.policy)
            set_precision(graph, Precision(self.policy, dtypes))
        return Trace(inputs, dims, repeats, graph, second, lambda shapes: _trace_again(flat, shapes, repeats, held))


def _require_rows_apart(trace: Trace) -> None:
    """Raise MasksNeeded where experts of a loop may share rows, which cannot be put in their order then."""
    try:
        refuse_shared_rows(trace.graph)
    except CaptureError as error:
        raise MasksNeeded(error) from error


def _has_caches(graph: fx.GraphModule) -> bool:
    return any(port.kind == "cache" for port in signature(graph).outputs)


def _cache_positions(graph: fx.GraphModule) -> frozenset[int]:
    names = list(signature(graph).input_spec.input_names)
    return frozenset(names.index(port.name) for port in signature(graph).inputs if port.kind == "cache")


def _trace_again(
    flat: FlatModel, shapes: Sequence[tuple[int, ...]], repeats: tuple[Repeat, ...], held: Sequence[str]
) -> fx.GraphModule:
    """Trace once more, when the capture is long done; raises CaptureError where the model cannot be traced so."""
    with failures_unlogged(), as_buffers(flat.module, held):
        try:
            return _trace(flat, shapes, repeats)
        except StateWritten as attributes:
            raise CaptureError(f"forward writes into {attributes} at the shapes {list(shapes)}") from None
        except RowsOfAll as rows:
            raise CaptureError(f"at the shapes {list(shapes)}, {rows}") from None


def _refuse_rounded_updates(
    graph: fx.GraphModule, parameters: Mapping[str, nn.Parameter], policy: MixedPrecisionPolicy
) -> None:
    """See that forward changes no parameter that it is given in a narrower dtype: small changes would be lost."""
    written = [port.name for port, _ in output_ports(graph) if port.kind == "buffer" and port.name in parameters]
    rounded = [name for name in written if computed_in(policy, parameters[name].dtype) != parameters[name].dtype]
    if rounded:
        raise CaptureError(
            f"forward changes {quoted(rounded)}, of {parameters[rounded[0]].dtype}, and under mixed_precision computes "
            f"with it in {policy.param_dtype}, which loses small changes: let what follows other weights be a buffer "
            f"(register_buffer), update it after the optimizer's step, or leave mixed_precision out"
        )


def _check_state(flat: FlatModel) -> None:
    """See that every step is the one that was traced, whatever forward does to attributes beside its buffers."""
    refuse_new_weights(flat.changes)
    if flat.changed_in_checkpoints:
        warnings.warn(
            f"forward changes {quoted(list(flat.changed_in_checkpoints))} inside of torch.utils.checkpoint: the "
            f"compiled model changes it once a step, and eager may do so again in the rerun of backward. "
            f"To have both alike, change it outside of the checkpoint",
            stacklevel=2,
        )
    if all(change.place.table == "_buffers" and change.keeps_spec for change in flat.changes):
        return
    steady = steady_state(flat)
    if steady.carried:
        raise StateWritten(steady.carried)
    if steady.unknown:
        warnings.warn(
            f"forward changes {quoted(steady.unknown)} in every step, and the compiled model does not: what it decides "
            f"by that stays as it was traced. Draw random numbers from torch, and keep in buffers what steps change",
            stacklevel=2,
        )
    if steady.dropped:
        warnings.warn(
            f"forward stores {quoted(steady.dropped)} on the model and does not read it again: the compiled model does "
            f"not keep it. Return it from forward to have it",
            stacklevel=2,
        )


def _tell_of_masked_rows(flat: FlatModel) -> None:
    if flat.masked_lines:
        warnings.warn(
            f"rows that a mask chooses at {', '.join(list(flat.masked_lines)[:3])} are computed for all places of the "
            f"mask, and those that it does not choose are left out of sums, losses and writes: right, but as much work "
            f"as if it chose all. A loop over experts does so for each of them: to compute each token once, sort rows "
            f"by expert and multiply them in groups (torch.nn.functional.grouped_mm). Code that asks whether any were "
            f"chosen goes on as if some were: where none are, sums and means over them are zero",
            stacklevel=2,
        )
    if flat.asked_lines:
        warnings.warn(
            f"code asks at {', '.join(list(flat.asked_lines)[:3])} whether a mask chooses rows, and may do what is not "
            f"known where it chooses none: the compiled model goes on as if it chooses some, and outputs of a step in "
            f"which it does not are nan. Let what is done there add or write what is computed of those rows alone "
            f"(loss = loss + x[mask].sum()), or leave the question out",
            stacklevel=2,
        )


def _tell_of_finite_values(flat: FlatModel) -> None:
    if flat.finite.lines:
        warnings.warn(
            f"whether values are finite, which code asks at {', '.join(list(flat.finite.lines)[:3])}, decides nothing "
            f"in the compiled model: it goes on as if they are, and outputs of a step in which some are not are nan. "
            f"To replace those in any case, use torch.nan_to_num or clamp without asking",
            stacklevel=2,
        )


def _tell_of_read_inputs(reads: InputReads) -> None:
    counted = ("rows", "each") if reads.may_read.lines else ()  # else rows are looked up whichever a mask chooses
    for kinds, does, instead in (
        (
            ("number",),
            "turns values of {} into Python numbers",
            "let forward compute with tensors (torch.where, masks)",
        ),
        (counted, "takes as many rows as a mask of {} chooses", "keep all rows and leave some out of the loss"),
    ):
        decisions = [decision for decision in reads.decisions if decision.kind in kinds]
        if decisions:
            names = sorted(frozenset[str]().union(*(decision.computation.inputs for decision in decisions)))
            lines = dict.fromkeys(decision.line for decision in decisions)
            warnings.warn(
                f"forward {does.format(quoted(names))} at {', '.join(list(lines)[:3])}: the program is for those of "
                f"the example inputs, and for a batch in which they are others it is traced and lowered anew. Batches "
                f"that are made alike (resized, padded, as many rows of each sample) have the same; where each batch "
                f"has others, {instead}",
                stacklevel=2,
            )


def _check_views(flat: FlatModel, graph: fx.GraphModule) -> None:
    """See that no constant is a view of a buffer that steps change."""
    written = {port.name for port, _ in output_ports(graph) if port.kind == "buffer"}
    for view in flat.viewed:
        if view.weight in written:
            refuse_view(view)


def _trace(flat: FlatModel, shapes: Sequence[tuple[int, ...]], repeats: tuple[Repeat, ...]) -> fx.GraphModule:
    model, mode = flat.module, new_fake_mode()
    args = flat.fake_arguments(shapes, mode)
    cut = {module: forward for repeat in repeats for module, forward in repeat.cut.items()}
    units = {
        call.module: (number, at)
        for number, repeat in enumerate(repeats)
        for at, unit in enumerate(repeat.kept)
        for call in unit
    }
    with (
        traceable_functions(),
        torch.inference_mode(False),
        torch.set_grad_enabled(not flat.forward_only),  # also at a first call for evaluation
        fake_weights(model, mode, flat.policy, flat.forward_only),
        module_names(flat, units),
        passing_through(cut),
        reruns(model) as rerun,
    ):
        try:
            graph = export_joint(flat, args, mode)
        except (TraceAgain, GalvatronError):
            raise
        except Exception as error:
            if writes_into_constants(error) and not flat.copies_constants:
                raise ConstantsCopied from error
            lacks_a_value = isinstance(error, (AttributeError, TypeError)) and shapes == flat.inputs.shapes
            if lacks_a_value and not flat.is_told_eager:
                raise NotAsCompiled(explained(error, model)) from error
            raise explained(error, model) from None  # torch's hundred lines more are its context
    refuse_sparse_values(graph)
    drop_tokens(graph)
    in_order(graph)
    join_pieces(graph)
    record_graph(graph, flat)
    flat.changed_in_checkpoints |= rerun.changed
    refuse_late_changes(graph)
    if rerun.restored:
        refuse_replays(graph)
    merge_tied(graph, model)
    return graph
