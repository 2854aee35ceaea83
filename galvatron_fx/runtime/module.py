"""The module that users train: DTensor parameters outside, lowered graphs inside."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from cost_models.formula_text import cost_note
from cost_models.schedule_time import ScheduleReport
from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.metadata import InputSpec, OutputSpec
from galvatron_fx.ir.graph.pass_pipeline import run_table
from galvatron_fx.ir.graph.printer import memory_note, readable
from galvatron_fx.ir.plan.arguments import check_arguments
from galvatron_fx.ir.plan.strategy import original_name
from galvatron_fx.ir.torch_compat.tensors import scale_all
from galvatron_fx.runtime.agreement import together
from galvatron_fx.runtime.batch_rows import unmarked
from galvatron_fx.runtime.caches import CallCaches
from galvatron_fx.runtime.call_key import call_key, described
from galvatron_fx.runtime.call_style import CallStyle
from galvatron_fx.runtime.compiled import AnyProgram, Compiled
from galvatron_fx.runtime.decided_inputs import require_whole
from galvatron_fx.runtime.detached import TRAIN_REMEDY, detached_output, forward_only_outputs
from galvatron_fx.runtime.dtensor_views import lie_like, local_part, shown, write_whole
from galvatron_fx.runtime.folding import FoldedUpdates, folding, refuse_folded
from galvatron_fx.runtime.gathered_batch import gathered_inputs
from galvatron_fx.runtime.generation import generate
from galvatron_fx.runtime.gradients import accumulate
from galvatron_fx.runtime.hooks import has_hooks, refuse_backward_hooks
from galvatron_fx.runtime.host_states import keep_like
from galvatron_fx.runtime.late_changes import MemoryOfParameters, refuse_changed_output, require_like
from galvatron_fx.runtime.local_updates import mark_for_local_updates
from galvatron_fx.runtime.lost_ranks import CHANGED_FLAGS
from galvatron_fx.runtime.modes import mark
from galvatron_fx.runtime.module_tree import ModuleTree
from galvatron_fx.runtime.nested_outputs import nested
from galvatron_fx.runtime.on_mesh import CompiledFor
from galvatron_fx.runtime.one_at_a_time import OneAtATime, refuse_autocast, refuse_transforms, without_autocast
from galvatron_fx.runtime.own_outputs import own_outputs
from galvatron_fx.runtime.program import Call
from galvatron_fx.runtime.programs import Known
from galvatron_fx.runtime.stage_tensors import mark_of_stage
from galvatron_fx.runtime.total_norm import total_norm
from galvatron_fx.runtime.untraced import untraced
from galvatron_fx.runtime.whole_inputs import whole_inputs
from galvatron_fx.runtime.with_experts import WithExperts
from passes.frontend.capture.capture import FlatInputs
from passes.frontend.capture.written_inputs import refuse_shared_memory


class DistributedGraphModule(WithExperts):
    """A model lowered to one rank of a mesh; trains exactly as the original on one device.

    It has the attributes, methods and class (to ``isinstance``) of the original, its modules with theirs, and its state
    dict. Parameters are DTensors under the original names, so optimizers, ``clip_grad_norm_``, schedulers,
    ``state_dict`` and ``torch.distributed.checkpoint`` work as with any module. Inputs are the global batch, the same
    on every rank, this rank's rows of it, marked by :func:`galvatron_fx.own_rows`, or each rank's own batch
    (``batch="local"``, ``batch="gather"``).
    Outputs come as the model returns them: scalars and whole tensors as tensors, sharded ones as DTensors
    (``.full_tensor()`` gathers them). Beside a loss, the others are detached: a gradient that arrives at one raises
    InputError.

    ``train()`` and ``eval()`` of the model or of modules inside of it, and ``requires_grad_`` of parameters, hold from
    the next step on, which is compiled for them if need be. Hooks of the model itself and of its parameters are called;
    InputError says which other changes come too late. One thread at a time may run it.

    Made by :func:`galvatron_fx.compile`.
    """

    def __init__(self, compiled: Compiled) -> None:
        super().__init__()
        self._tree = ModuleTree(compiled.skeleton)
        self._tree.fill(self)
        self._one = OneAtATime()
        self._in_step = False
        self._step_outputs: Any = None
        self._generator = torch.Generator().manual_seed(compiled.seed)
        self._late = compiled.late
        self._style = CallStyle(compiled.skeleton.forward, compiled.inputs)
        self._compiled_for = CompiledFor.of(compiled, self._tree)
        self._take(compiled)

    # ---- training ----

    def fold_gradients(self, *optimizers: Optimizer) -> None:
        """Have the ``optimizers`` update each parameter while backward computes, under a plan with ``fold_gradients``:
        call it once, before the first :meth:`forward_backward`. Under any other plan it does nothing.

        :meth:`forward_backward` then updates, with the settings that the optimizers have; ``step()`` ends the step, and
        ``zero_grad()`` lets go of what stands in ``.grad``. No gradient is kept, so that a norm of all, scaling,
        accumulation and closures raise InputError; hooks of parameters get each gradient. Raises InputError for
        optimizers that do not update each parameter by itself.
        """
        if self.plan.fold_gradients:
            self._folded = FoldedUpdates(optimizers)

    @untraced
    def forward_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward on the global batch, add to ``.grad`` of the parameters and return the outputs.

        Under a plan with stages, every rank gets the loss (and other outputs without dims); of the rest, ranks of other
        stages than the one that makes it (with several micro-batches: all) get what raises InputError when read.
        The loss is the output called ``loss``, or the only scalar that needs gradients. Raises LostRankError where
        other ranks are gone, or do not come within the timeout of the process group; and InputError where the model
        returns no loss, or several of other names: call the module and ``backward()`` on a loss of your own instead;
        or was compiled forward-only.
        """
        if not has_hooks(self):
            return self._train(args, kwargs)
        refuse_backward_hooks(self)
        self._in_step = True
        try:
            returned = self(*args, **kwargs)
        finally:
            self._in_step, outputs = False, self._step_outputs
            self._step_outputs = None
        refuse_changed_output(outputs, returned)
        return returned

    def _train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.plan.forward_only:
            raise InputError(f"forward_backward of a model that was compiled forward-only: {TRAIN_REMEDY}")
        refuse_autocast(self.mesh.device_type, self.plan.mixed_precision)
        refuse_transforms((args, kwargs))
        with self._alone():
            program, flat, row_positions = self._program(args, kwargs, trains=True)
            program.require_loss()
            self._trained = program
            with torch.no_grad(), self._watch.collectives(), folding(self._folded, program.folded, self._held):
                self._rows.complete(flat, row_positions, program.read)
                results, gradients = program.train(self._values(flat))
                program.counts.end_step()
                self._update_state(results)
                self._accumulate(gradients, program.folded)
                self._hand_back(program, flat, gradients)
        return self._outputs(program, results, program.signature.beside_loss)

    @untraced
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward on the global batch; under gradient mode the result can be differentiated with ``backward()``.

        Under a plan with stages or micro-batches, backward runs with forward: the gradients are held until
        ``backward()`` of the loss, which every rank gets and calls, and other outputs are detached. InputError says
        where the model returns no loss. Of a model that was compiled forward-only, ``backward()`` raises InputError.
        """
        if self._in_step:
            self._step_outputs = self._train(args, kwargs)
            return self._step_outputs
        return self._called(args, kwargs, everywhere=False)

    @untraced
    def on_all_ranks(self, *args: Any, **kwargs: Any) -> Any:
        """Call a model that was compiled forward-only; under a plan with stages, all ranks have all outputs."""
        return self._called(args, kwargs, everywhere=True)

    def __getattr__(self, name: str) -> Any:
        is_made = name == "generate" and self.__dict__.get("_main") is not None
        if is_made and self.plan.forward_only and hasattr(type(self._tree.twin), name):
            return partial(generate, self, self._tree.twin)
        return super().__getattr__(name)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any], everywhere: bool) -> Any:
        refuse_autocast(self.mesh.device_type, self.plan.mixed_precision)
        refuse_transforms((args, kwargs))
        with self._alone():
            program, flat, row_positions = self._program(args, kwargs, trains=torch.is_grad_enabled())
            if self.plan.forward_only or not torch.is_grad_enabled():
                caches = CallCaches(program, self._style.of(args, kwargs), flat, self.mesh, self._rows.batch)
                with torch.no_grad(), self._watch.collectives():
                    self._rows.complete(flat, row_positions, program.read)
                    results = program.evaluate(self._values(flat, caches))
                    self._update_state(results)
                    caches.update(results)
                    results = program.told(results) if everywhere else results
                outputs = self._own_outputs(program, self._outputs(program, results, caches=caches))
                return forward_only_outputs(outputs) if self.plan.forward_only else outputs
            refuse_folded(program.folded, "backward() may be one of several, whose gradients are summed up")
            tensors = [self._held_or_given(port, flat) for port in program.differentiated_ports]
            self._trained = program
            with self._watch.collectives():
                with torch.no_grad():
                    self._rows.complete(flat, row_positions, program.read)
                call = Call(self._values(flat), self._versions(flat), self._update_state, self._alone)
                results = program.differentiable(call, *tensors)
                program.counts.end_step()
        return self._own_outputs(program, self._outputs(program, results, program.undifferentiated))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their total norm is at most ``max_norm``; returns the norm before.

        As ``torch.nn.utils.clip_grad_norm_``, but over the parameters of all stages, each counted once.
        """
        self._require_member()
        check_arguments(max_norm=max_norm, norm_type=norm_type)
        refuse_folded(self._folded is not None, "their norm is known when the first updates are over")
        gradients = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        group = self._stages.group if self._stages is not None else None
        with self._watch.collectives():
            total = total_norm(gradients, norm_type, self.stage_copies, group)
            if gradients:
                factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # as torch's
                scale_all([local_part(gradient) for gradient in gradients.values()], factor)
        return total

    # ---- reading ----

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A model with weights, flags and modes of its own, on the same mesh and of the same programs.

        It has no gradients, as copies of any module have none.
        """
        self.require_own_order("copied")
        programs = (
            self._compile_inputs,
            self._programs,
            self._main,
            self._trained,
            self._rows,
            self._orders,
            self._folded,
        )
        compared = self._comparison, self._copies
        kept = self._watch, self._one, self._late, self._stages, self._recipe, self._compiled_for, self._groups
        shared = self.mesh, self.plan, self._members, *programs, *compared, *kept
        memo |= {id(value): value for value in shared}
        memo |= dict.fromkeys(id(parameter.grad) for parameter in self.parameters() if parameter.grad is not None)
        memo[id(self._generator)] = self._generator.clone_state()
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        new._memory, new._folded = MemoryOfParameters(new._held), None
        self._orders.shared = True
        self._has_copies = new._has_copies = True
        for name, parameter in new._held.items():
            mark_for_local_updates(parameter)
            keep_like(parameter, self._held[name])
            if new._stages is not None:
                mark_of_stage(parameter)
        return new

    def measured_schedule(self) -> ScheduleReport:
        """Return when the pipeline's ranks computed what in the last :meth:`forward_backward`; each of them calls it.

        What ``galvatron_fx.report.pictures.draw_timeline`` and ``galvatron_fx.report.schedule_trace.write_trace`` take.
        Raises InputError before the first step, for plans without stages and micro-batches, and where ranks are on
        several machines, whose clocks differ.
        """
        if self._trained is None:
            raise InputError("no step was measured yet: call forward_backward(...) before")
        return self._trained.measured()

    @property
    def forward_graph(self) -> fx.GraphModule:
        """The lowered forward graph of this rank (of its first stage)."""
        return self._graph("forward")

    @property
    def backward_graph(self) -> fx.GraphModule:
        """The lowered backward graph of this rank (of its first stage)."""
        return self._graph("backward")

    @property
    def stage_copies(self) -> frozenset[str]:
        """Names of parameters and buffers here that the ranks of an earlier stage hold, too: who holds them first saves
        and counts them."""
        return self._stages.names if self._stages is not None else frozenset()

    @property
    def batch_rows(self) -> tuple[int, ...]:
        """The rows of the global batch that this rank computes, ascending: what :func:`galvatron_fx.own_rows` is for.

        All of them where the plan does not split the batch; stages of one model share rows. With ``batch="local"``:
        what this rank brings. Of batches as large as the example inputs; InputError where they are not the first dim.
        """
        self._require_member()
        return self._rows.listed

    def rows_of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
        """The rows of the global batch that this rank brings to a call with these arguments, as many as the others."""
        self._require_member()
        return self._rows.brought(unmarked(*self._style.of(args, kwargs))[0])

    @property
    def has_loss(self) -> bool:
        """Whether the model returns a loss: a scalar that needs gradients."""
        return bool(self._compiled().signature.scalars)

    @property
    def dropout_generator(self) -> torch.Generator:
        """What every step's seed of dropout is drawn from; its state is the same on every rank."""
        return self._generator

    def _graph(self, task: str) -> fx.GraphModule:
        return next(graph for name, graph in self._compiled().graphs.items() if name.endswith(task))

    def print_readable(self, print_output: bool = True, *, costs: bool = False) -> str:
        """Return (and print) the lowered program as Python; ``costs``: with what each line costs this rank, and how its
        results lie on the mesh.
        """

        def note(node: fx.Node) -> str:
            return "; ".join(filter(None, (cost_note(node) if costs else "", memory_note(node))))

        text = "\n".join(f"# {name}\n{readable(graph, note)}" for name, graph in self._compiled().graphs.items())
        if print_output:
            print(text)
        return text

    def pass_table(self) -> str:
        """Return a table of the passes that made the program: runs, seconds with and without verifying, nodes."""
        self._compiled()
        return run_table(self._pass_runs)

    def extra_repr(self) -> str:
        return f"{len(list(self.parameters()))} parameters on {tuple(self.mesh.shape)} ranks"

    # ---- inside ----

    def _program(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], trains: bool
    ) -> tuple[AnyProgram, FlatInputs, list[int]]:
        """The program for a call, its inputs, and the positions of those of which this rank has but its own rows."""
        self._require_member()
        self._late.warn()
        given, marked = unmarked(*self._style.of(args, kwargs))
        with self._watch.collectives():
            given = whole_inputs(given, self._rows.batch, has_caches=self.plan.forward_only)
            if self._rows.batch == "gather" and not marked:
                given = gathered_inputs(given, self.mesh.device_type, self._members.size)
        self._memory.require_kept(self._held)
        flat, row_positions = self._rows.spread(given, marked)
        # Averages of weights freeze what they copied: without backward, stages need not know what is frozen.
        flags = self._trained_flags() if trains or self._stages is None else self._flags
        key = call_key(flat, trains and not self.plan.forward_only), self._tree.modes, flags
        with self._watch.collectives():
            known = self._programs.of_call(key, flat, row_positions)
        try:
            self._compare(key, known, given, row_positions)
        finally:  # after the others were told: they do not see these flags, and would wait
            if known is None:
                self._refuse_flags_of_stages(flags)
        program = self._new_program(key, flat if trains else flat.detached()) if known is None else known.program
        if decided_by := program.signature.decided_by:
            self._deciding.require_kept(decided_by, dict(self.named_buffers(remove_duplicate=False)))
        require_whole(program.signature.decisions, given, row_positions)
        refuse_shared_memory(program.signature.written, given)
        return program, flat, row_positions

    def _new_program(self, key: Any, inputs: FlatInputs) -> AnyProgram:
        _, _, flags = key
        self._tree.train_parameters(dict(zip(self._held, flags, strict=True)))
        program = together(lambda: self._compile_inputs(self._tree.twin, inputs), self._members)
        self._programs.add(key, program)
        return program

    def _compare(self, key: Any, known: Known | None, given: FlatInputs, row_positions: Collection[int]) -> None:
        """Tell the other ranks what this one brings to the step, and compare it now and then, and where it is new."""
        _, modes, flags = key
        description_key = key, bool(row_positions), known and known.decided_as
        if description_key not in self._descriptions:
            still = f"{CHANGED_FLAGS}, {sum(flags)} parameters still trained ({mark(flags)})"
            trained = "" if flags == self._flags else still
            rows = ", rows of its own" if row_positions else ""
            decided = f", values by which program {known.number} decides" if known and known.decided_as else ""
            self._descriptions[description_key] = f"{described(given)}{rows}{decided}, in {modes}{trained}"
        with self._watch.collectives():
            self._watch.begin(self._descriptions[description_key])
            is_due = self._comparison.is_due()
            # Ranks that agreed so far can part only where one of them takes another program than before.
            if is_due or known is None or known.is_another:
                self._watch.require_equal_batches()
            if is_due:
                self._comparison.require_equal(given, row_positions, self._rows.own)
                held = {**dict(self.named_parameters()), **dict(self.named_buffers())}
                self._copies.require_equal(held, self._comparison.calls)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """A call in one thread, in the program's own dtypes."""
        device = self.mesh.device_type
        with self._one.step(), without_autocast(device):
            yield

    def _refuse_flags_of_stages(self, flags: tuple[bool, ...]) -> None:
        """Other ranks do not see the flags of parameters that they do not hold."""
        names = [name for name, now, then in zip(self._held, flags, self._flags, strict=True) if now != then]
        if names and self._stages is not None:
            raise InputError(
                f"requires_grad of '{names[0]}' was changed after compile, under a plan with stages, whose other ranks "
                f"do not see it: set it before compile, and compile again"
            )

    def _tensor(self, port: InputSpec | OutputSpec) -> Tensor:
        table, leaf = self._places[original_name(port.name)]
        tensor: Tensor = table[leaf]
        return tensor

    def _held_or_given(self, port: InputSpec, flat: FlatInputs) -> Tensor:
        """What an input of the graph is to the module, or to its caller."""
        return flat.tensors[int(port.name)] if port.kind == "input" else self._tensor(port)

    def _values(self, flat: FlatInputs, caches: CallCaches | None = None) -> Callable[[InputSpec], Any]:
        """What every input of the graph is on this rank in this step."""
        device = self.mesh.device_type
        seed = torch.randint(2**62, (), generator=self._generator).to(device)

        def value_of(port: InputSpec) -> Any:
            if port.kind == "seed":
                return seed
            if port.kind == "cache":
                assert caches is not None, "caches are of what is forward alone"
                return caches.local(port)
            if port.kind != "input":
                tensor, name = self._tensor(port), original_name(port.name)
                if tensor is not self._held.get(name, tensor):
                    require_like(name, self._held[name], tensor)
                return local_part(tensor)
            tensor = flat.tensors[int(port.name)].detach()
            # Dense, as it was traced: compiled graphs rely on strides.
            return (tensor if tensor.device.type == device else tensor.to(device)).contiguous()

        return value_of

    def _versions(self, flat: FlatInputs) -> Callable[[InputSpec], int]:
        """How often every input of the graph was written to."""

        def version_of(port: InputSpec) -> int:
            if port.kind == "seed":
                return 0
            tensor = self._held_or_given(port, flat)
            # Of a DTensor the one counts what was called on it, the other what was called on its local part.
            return sum(0 if part.is_inference() else part._version for part in {tensor, local_part(tensor)})

        return version_of

    def _update_state(self, results: Mapping[OutputSpec, Any]) -> None:
        """Write what forward makes of buffers, and of parameters that it changes."""
        write_whole([(self._tensor(port), value) for port, value in results.items() if port.kind == "buffer"])

    def _accumulate(self, gradients: Iterable[tuple[OutputSpec, Any]], folded: Collection[str]) -> None:
        for port, gradient in gradients:
            if port.is_input_gradient or port.name.startswith("none "):
                continue
            take = self._folded.leave if self._folded is not None and port.name in folded else accumulate
            take(port.name, self._tensor(port), gradient)

    def _hand_back(self, program: AnyProgram, flat: FlatInputs, gradients: Iterable[tuple[OutputSpec, Any]]) -> None:
        """Give the gradients of inputs to those, and by way of them to what they were computed from."""
        by_name = {port.name: gradient for port, gradient in gradients if port.is_input_gradient}
        ports = [port for port in program.differentiated_ports if port.gradient in by_name]
        if ports:
            inputs = [self._held_or_given(port, flat) for port in ports]
            torch.autograd.backward(
                inputs, [lie_like(x, by_name[p.gradient]) for x, p in zip(inputs, ports, strict=True)]
            )

    def _own_outputs(self, program: AnyProgram, outputs: Any) -> Any:
        """Outputs of the rows that this rank brought, where the loss is computed of them."""
        if program.signature.scalars or self._rows.batch == "global":
            return outputs
        if self._rows.is_local:
            return own_outputs(outputs, program.signature, self._members)
        if torch.is_grad_enabled() and not self.plan.forward_only:
            raise InputError(
                "batch='gather' and a loss outside of the model, which would take outputs of the rows of all ranks: "
                "give the loss to galvatron_fx.with_loss(model, loss)"
            )
        return outputs

    def _outputs(
        self,
        program: AnyProgram,
        results: Mapping[OutputSpec, Any],
        detached: Collection[int] = (),
        caches: CallCaches | None = None,
    ) -> Any:
        """Nest the outputs as the model does, sharded ones as DTensors; those made elsewhere refuse to be read.

        ``detached``: positions of outputs at which no gradient may arrive; ``caches``: of the call, whose arguments the
        model may return.
        """
        padded = program.signature.padded
        values = {
            int(port.name): shown(value, self.mesh, program.result_placements(port), padded.get(port.name))
            for port, value in results.items()
            if port.kind == "output"
        }
        names = program.signature.output_names
        for position in detached:
            if values.get(position) is not None:
                values[position] = detached_output(values[position], names[position])
        return nested(program.signature, values, caches)
