"""Run a model on fake tensors: weights without memory, nodes tagged with modules, repeated layers passed through."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.modules.module as module_hooks
from torch import nn

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.precision import computed_in
from galvatron_fx.ir.torch_compat.tensors import pytree
from galvatron_fx.ir.torch_compat.tracing import (
    DynamicOutputShapeException,
    FakeTensorMode,
    annotate_module,
    leave_modules,
    not_compiling,
)
from passes.frontend.capture.aliases import Aliases, View
from passes.frontend.capture.attribute_writes import AttributeWrites
from passes.frontend.capture.counted_rows import CountedRows
from passes.frontend.capture.flat_inputs import FlatInputs, flatten
from passes.frontend.capture.flat_outputs import FlatOutputs, flat_outputs
from passes.frontend.capture.held_objects import Arguments, ArgumentsLeft
from passes.frontend.capture.input_reads import InputReads
from passes.frontend.capture.known_reads import KnownReads
from passes.frontend.capture.module_state import Change, ModuleState
from passes.frontend.capture.outside_state import OutsideState
from passes.frontend.capture.raw_contents import copied_containers
from passes.frontend.capture.reruns import keep_weights
from passes.frontend.capture.swallowed_errors import SwallowedErrors
from passes.frontend.capture.trace_again import MasksNeeded
from passes.frontend.capture.trace_errors import PickedRows, explained
from passes.frontend.capture.traced_parameters import TracedParameters
from passes.frontend.chosen_rows.choice import RowCount, RowTensor
from passes.frontend.expert_loops.loops import ExpertLoops
from passes.frontend.expert_loops.picked import OPERATOR
from passes.frontend.finite_values import FiniteValues
from passes.frontend.masked_rows.mode import MaskedRows, counted_lengths
from passes.frontend.masked_rows.selection import RowsUnknown
from passes.frontend.masked_scatter import dense_scatters
from passes.frontend.masked_writes import MaskedWrites
from passes.frontend.packed_sequences import packed_sequences
from passes.frontend.routed_experts import routed_experts
from passes.frontend.value_checks import ValueChecks

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

ROOT = "module"


class FlatModel(nn.Module):
    """The model with flat tensors in and out, cast as ``policy`` says; remembers how its outputs were nested.

    ``forward_only``: nothing needs gradients, whatever parameters and inputs say.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: FlatInputs,
        policy: MixedPrecisionPolicy | None = None,
        forward_only: bool = False,
    ) -> None:
        super().__init__()
        self.module = model
        self._outside = OutsideState(model)
        self._aliases = Aliases(model, self._outside)
        self.inputs = inputs
        self.policy = policy
        self.forward_only = forward_only
        self._inputs_as = policy.param_dtype if policy is not None and policy.cast_forward_inputs else None
        self._outputs_as = policy.output_dtype if policy is not None else None
        self._outputs: FlatOutputs | None = None
        self._copies: list[tuple[str, torch.Tensor, int]] = []
        self._changes: dict[str, Change] = {}
        self.rebound: tuple[str, ...] = ()
        self.left: tuple[str, ...] = ()
        self.arguments: ArgumentsLeft | None = None
        self.changed_in_checkpoints: dict[str, None] = {}
        self.viewed: list[View] = []
        self.masked_because: Exception | None = None
        self.copies_constants = False
        self.written: tuple[str, ...] = ()
        self.written_weights: tuple[str, ...] = ()
        self.is_told_eager = False
        self.answers_asks = True
        self.decided_by: dict[str, Any] = {}
        self.input_reads = InputReads()
        self._checks = ValueChecks()
        self.finite = FiniteValues(self._checks.failures)
        self._buffers_now = dict(model.named_buffers(remove_duplicate=False))
        self._weights_now: dict[str, torch.Tensor] = {}
        self.masked_lines: dict[str, None] = {}
        self.asked_lines: dict[str, None] = {}

    @property
    def outputs(self) -> FlatOutputs:
        """What the model returned when it was last traced."""
        assert self._outputs is not None, "the model was not traced yet"
        return self._outputs

    @property
    def changes(self) -> list[Change]:
        """What any run of the model changed of its attributes; all of it was put back."""
        return list(self._changes.values())

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the model; see :class:`passes.frontend.capture.capture.Capture` for which outputs stay differentiable.

        Behind the outputs come the new values of buffers that the model assigned (``rebound``), and tensors that it put
        into its arguments (``left``), which are then as ``arguments`` says, or None where nothing is in another place.
        """
        with self.observed() as state:
            arguments = self._arguments(tensors)
            returned = self._returned(arguments)
            self._refuse_lost_writes()
            changes = state.changes()
            keep_weights(self.module, (leaf for leaf in flatten(returned)[0] if isinstance(leaf, torch.Tensor)))
        self._changes |= {change.path: change for change in changes}
        rebound = {c.path: c.after for c in changes if c.place.table == "_buffers" and c.keeps_spec}
        rebound |= self._weights_now
        self.rebound = tuple(rebound)
        self._outputs, outputs = flat_outputs(returned, lambda leaf: self._checks.told(_cast(leaf, self._outputs_as)))
        self.arguments, left = arguments.left() if self.forward_only else (None, {})
        self.left = tuple(left)
        return (*outputs, *(value.detach().clone() for value in (*rebound.values(), *left.values())))

    @contextlib.contextmanager
    def observed(self) -> Iterator[ModuleState]:
        """Let the model run inside, and undo what it does to its attributes, and to what its code names elsewhere."""
        parameters = TracedParameters(self.module, self.written_weights)
        with self._aliases.tied(), self._outside.without_cache(), parameters:
            state = ModuleState(self.module, self._outside)
            try:
                traced = dict(self.module.named_buffers(remove_duplicate=False))
                with (
                    KnownReads(traced, self._buffers_now, self.decided_by, self.input_reads) as self._known,
                    AttributeWrites(state.constants, self._aliases.views, self.copies_constants) as writes,
                ):
                    self._weights_now = parameters.new
                    yield state
                    self.viewed += writes.viewed
            finally:
                state.restore()

    def called(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the model returns."""
        return self._returned(self._arguments(tensors))

    def _arguments(self, tensors: Sequence[torch.Tensor]) -> Arguments:
        """What the model is called with; devices that objects name are those of the trace."""
        copied = [name in self.written for name in self.inputs.input_names]
        given = [tensor.clone() if copy else tensor for tensor, copy in zip(tensors, copied, strict=True)]
        given = [_cast(tensor, self._inputs_as) for tensor in given]
        pairs = zip(self.inputs.input_names, tensors, given, strict=True)
        self._copies = [(name, copy, copy._version) for name, tensor, copy in pairs if copy is not tensor]
        examples = self.inputs.tensors
        self.input_reads.start(all(t.shape == e.shape for t, e in zip(given, examples, strict=True)))
        for name, tensor, example in zip(self.inputs.input_names, given, examples, strict=True):
            self._known.add_input(name, tensor, example)
        args, kwargs = copied_containers(self.inputs.call(given), _on_cpu)
        names = {id(tensor): name for tensor, name in zip(given, self.inputs.input_names, strict=True)}
        return Arguments(args, kwargs, names)

    def _returned(self, arguments: Arguments) -> Any:
        args, kwargs = arguments.value
        writes, checks = MaskedWrites(self._known.knows_mask), self._checks.kept(self._known.refutes)
        scatters = dense_scatters(self._known.chooses_of_each)
        told = not_compiling() if self.is_told_eager else contextlib.nullcontext()
        packed, swallowed = packed_sequences(), SwallowedErrors()
        with routed_experts(), packed, scatters, writes, self._rows_of_masks(), checks, self.finite.assumed(), told:
            with swallowed:
                returned = self.module(*args, **kwargs)
            swallowed.raise_first()
            for leaf in flatten(returned)[0]:
                if isinstance(leaf, (RowTensor, RowCount)):
                    leaf.choice.refuse("returns rows that a mask chose, or their number")
        return arguments.marked(returned) if self.forward_only else returned

    def _refuse_lost_writes(self) -> None:
        """See that nothing was written into the copy, in the dtype to compute in, of what an argument holds."""
        held = [copy for copy in self._copies if "." in copy[0] or "[" in copy[0]]
        written = [(name, copy.dtype) for name, copy, version in held if copy._version != version]
        if written and self.forward_only:
            raise InputError(
                f"forward writes into {', '.join(name for name, _ in written[:3])}, which mixed_precision casts to "
                f"{written[0][1]} for it, so what it writes would be lost: give one of {written[0][1]}, or a policy "
                f"with cast_forward_inputs=False"
            )

    @contextlib.contextmanager
    def _rows_of_masks(self) -> Iterator[None]:
        """Write loops over experts down, as products of groups of rows, and where masks choose other rows
        (``masked_because``) keep all of them.

        Raises MasksNeeded where it cannot, and, of one that cannot either way, what says so.
        """
        if self.masked_because is None:
            loops = ExpertLoops(self.module.parameters(), self._may_ask)
            try:
                with loops:
                    yield
            except (DynamicOutputShapeException, PickedRows) as error:
                raise MasksNeeded(error) from error
            except TypeError as error:  # as torch says of a number of rows where it wants a size
                if loops.asked_at is None:
                    raise
                raise MasksNeeded(PickedRows(OPERATOR, loops.asked_at)) from error
            return
        keeps_all = MaskedRows(self._known.knows_mask, self._may_ask, self._checks.failures)
        counts = CountedRows(self._known, self.input_reads)
        with counted_lengths(), keeps_all as masked, counts:
            try:
                yield
            except (RowsUnknown, TypeError) as error:
                if isinstance(error, TypeError) and RowCount.__name__ not in str(error):
                    raise
                self._ask_for_counts(masked, error)
                why = f"gives a number of rows to what takes none: {error}" if isinstance(error, TypeError) else error
                raise explained(self.masked_because, self.module, f"; with all rows kept, it {why}") from None
        self.masked_lines |= masked.lines
        self.asked_lines |= masked.asked_lines

    def _may_ask(self, mask: torch.Tensor) -> bool:
        """Whether code that asks if a mask chooses rows may go on as if it does; of masks of inputs it decides."""
        decides = self._known.knows_mask(mask) and not self._known.is_of_floats(mask)
        return self.answers_asks and not decides

    def _ask_for_counts(self, masked: MaskedRows, error: Exception) -> None:
        """Note at which lines it helps to know how many rows a mask chooses, where inputs say so."""
        choice = error.choice if isinstance(error, RowsUnknown) else None
        with torch._C.DisableTorchFunction():  # the modes of this trace have failed
            for selection in (choice,) if choice is not None else masked.selections:
                if self._known.knows_mask(selection.source):
                    self.input_reads.uncounted[selection.line] = None

    def fake_arguments(self, shapes: Sequence[tuple[int, ...]], mode: FakeTensorMode) -> list[torch.Tensor]:
        """Inputs of the given shapes without memory."""
        with mode:
            return [
                torch.empty(shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad and not self.forward_only)
                for shape, tensor in zip(shapes, self.inputs.tensors, strict=True)
            ]


def _on_cpu(leaf: Any) -> Any:
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """``value`` in ``dtype`` if it is a tensor of floating-point numbers."""
    floats = dtype is not None and isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if floats else value


@dataclass(frozen=True)
class PassThrough:
    """What a module returns in place of its layer: each leaf of its result is a leaf of its arguments or a constant.

    ``leaves``: (position among the argument leaves or None, constant), one per leaf of the result.
    """

    leaves: tuple[tuple[int | None, Any], ...]
    tree: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given, _ = flatten((args, kwargs))
        return pytree.tree_unflatten([c if at is None else given[at] for at, c in self.leaves], self.tree)


@contextlib.contextmanager
def passing_through(cut: Mapping[nn.Module, PassThrough]) -> Iterator[None]:
    """Let modules return what they were given, without their own computation."""
    forwards = {module: module.__dict__.get("forward") for module in cut}
    try:
        for module, forward in cut.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, before in forwards.items():
            del module.__dict__["forward"]
            if before is not None:
                module.__dict__["forward"] = before


@contextlib.contextmanager
def fake_weights(
    model: nn.Module, mode: FakeTensorMode, policy: MixedPrecisionPolicy | None = None, forward_only: bool = False
) -> Iterator[None]:
    """Put fake CPU tensors in place of the parameters and buffers, sharing what is shared, and put them back.

    Parameters have the dtype that ``policy`` computes in, and with ``forward_only`` need no gradients; buffers stay as
    they are.
    """
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            is_parameter = isinstance(tensor, nn.Parameter)
            dtype = computed_in(policy, tensor.dtype) if is_parameter else tensor.dtype
            with mode:
                empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
            if is_parameter:
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad and not forward_only)
            fakes[id(tensor)] = empty
        return fakes[id(tensor)]

    saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                saved.append((table, dict(table)))
                for name, tensor in table.items():
                    if tensor is not None:
                        table[name] = fake(tensor)  # type: ignore[assignment]
        yield
    finally:
        for table, original in saved:
            table.clear()
            table.update(original)


@contextlib.contextmanager
def module_names(root: nn.Module, units: Mapping[nn.Module, tuple[int, int]]) -> Iterator[None]:
    """Tag traced nodes with the qualified name of the module whose forward runs, and with its unit if it has one."""
    names = {id(module): name.removeprefix(ROOT).removeprefix(".") for name, module in root.named_modules()}
    open_scopes: list[contextlib.AbstractContextManager[Any]] = []

    def enter(module: nn.Module, args: Any) -> None:
        scope = annotate_module(names.get(id(module), ""), units.get(module))
        scope.__enter__()
        open_scopes.append(scope)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        open_scopes.pop().__exit__(None, None, None)

    handles = [
        module_hooks.register_module_forward_pre_hook(enter),
        module_hooks.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        leave_modules(open_scopes)
