"""The module that users train: DTensor parameters outside, lowered graphs inside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cost_models.schedule_time import ScheduleReport
from galvatron_fx.errors import InputError
from galvatron_fx.ir.annotations import Port
from galvatron_fx.ir.placement import Placement, Shard, to_dtensor
from galvatron_fx.ir.plan import Plan
from galvatron_fx.ir.printer import readable
from galvatron_fx.ir.strategy import original_name
from galvatron_fx.ir.torch_compat import pytree
from galvatron_fx.runtime.agreement import together
from galvatron_fx.runtime.batch_rows import BatchRows, unmarked
from galvatron_fx.runtime.dtensors import lie_like, local_part
from galvatron_fx.runtime.lost_ranks import StepWatch
from galvatron_fx.runtime.program import Program
from galvatron_fx.runtime.staged_program import StagedProgram
from passes.capture import FlatInputs

AnyProgram = Program | StagedProgram
Compiler = Callable[[FlatInputs, bool], AnyProgram]


class DistributedGraphModule(nn.Module):
    """A model lowered to one rank of a mesh; trains exactly as the original on one device.

    Parameters are DTensors under the original names, so optimizers, ``clip_grad_norm_``, schedulers, ``state_dict``
    and ``torch.distributed.checkpoint`` work as with any module. Inputs are the global batch, the same on every rank,
    or this rank's rows of it, marked by :func:`galvatron_fx.own_rows`.
    Outputs come as the model returns them: scalars and whole tensors as tensors, sharded ones as DTensors
    (``.full_tensor()`` gathers them); tensors other than the loss are detached.

    Made by :func:`galvatron_fx.compile`.
    """

    plan: Plan
    _rows: BatchRows
    _trained: AnyProgram | None = None

    def __init__(self, mesh: DeviceMesh, plan: Plan, compiler: Compiler, seed: int) -> None:
        super().__init__()
        self.mesh = mesh
        self.plan = plan
        self._compiler = compiler
        self._programs: dict[Any, AnyProgram] = {}
        self._main: AnyProgram | None = None
        self._generator = torch.Generator().manual_seed(seed)
        self._watch = StepWatch()
        self._stage_group: dist.ProcessGroup | None = None
        self._elsewhere: frozenset[str] = frozenset()

    # ---- training ----

    def forward_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward on the global batch, add to ``.grad`` of the parameters and return the outputs.

        Under a plan with stages, every rank gets the loss (and other outputs without dims); the rest is None but on the
        ranks of the stage that makes it, and with several micro-batches everywhere.
        Raises LostRankError where other ranks are gone, or do not come within the timeout of the process group; and
        InputError where the model returns no loss (a scalar that needs gradients): call the module and
        ``backward()`` on a loss of your own instead.
        """
        program, flat, own = self._program(args, kwargs)
        if program.signature.loss is None:
            raise InputError(
                "the model returns no scalar loss, so forward_backward has nothing to differentiate: pass labels, or "
                "call the module and backward() on a loss computed from its outputs"
            )
        self._trained = program
        with torch.no_grad(), self._watch.step():
            self._rows.complete(flat, own, program.read)
            results, gradients = program.train(self._values(flat))
            self._update_buffers(results)
            self._accumulate(gradients)
        return self._outputs(program, results)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward on the global batch; under gradient mode the result can be differentiated with ``backward()``.

        A plan with stages or micro-batches only evaluates so; InputError under gradient mode says what to call.
        """
        program, flat, own = self._program(args, kwargs)
        if torch.is_grad_enabled():
            parameters = [self._tensor(port) for port in program.trained_ports]
            with self._watch.step():
                self._rows.complete(flat, own, program.read)
                results = program.differentiable(self._values(flat), self._update_buffers, *parameters)
            return self._outputs(program, results)
        with torch.no_grad(), self._watch.step():
            self._rows.complete(flat, own, program.read)
            results = program.evaluate(self._values(flat))
            self._update_buffers(results)
            return self._outputs(program, results)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their total norm is at most ``max_norm``; returns the norm before.

        As ``torch.nn.utils.clip_grad_norm_``, but over the parameters of all stages, each counted once.
        """
        trained = [p for p in self.parameters() if p.grad is not None]
        counted = [p.grad for name, p in self.named_parameters() if p.grad is not None and name not in self._elsewhere]
        with self._watch.collectives():
            norm = torch.nn.utils.get_total_norm(counted, norm_type)
            total = norm.full_tensor() if isinstance(norm, DTensor) else norm
            if self._stage_group is not None:
                total = _norm_over(total, norm_type, self._stage_group)
            torch.nn.utils.clip_grads_with_norm_(trained, max_norm, total)
        return total

    # ---- reading ----

    def measured_schedule(self) -> ScheduleReport:
        """Return when the pipeline's ranks computed what in the last :meth:`forward_backward`; each of them calls it.

        What :func:`galvatron_fx.report.timeline.draw_timeline` and ``write_trace`` take. Raises InputError before the
        first step, for plans without stages and micro-batches, and where ranks are on several machines, whose clocks
        differ.
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
        return self._elsewhere

    @property
    def batch_rows(self) -> tuple[int, ...]:
        """The rows of the global batch that this rank computes, ascending: what :func:`galvatron_fx.own_rows` is for.

        All of them where the plan does not split the batch; stages of one model share rows. They are those of batches
        as large as the example inputs.
        """
        return self._rows.own

    @property
    def dropout_generator(self) -> torch.Generator:
        """What every step's seed of dropout is drawn from; its state is the same on every rank."""
        return self._generator

    def _graph(self, task: str) -> fx.GraphModule:
        return next(graph for name, graph in self._compiled().graphs.items() if name.endswith(task))

    def print_readable(self, print_output: bool = True) -> str:
        """Return (and print) the lowered program as Python."""
        text = "\n".join(f"# {name}\n{readable(graph)}" for name, graph in self._compiled().graphs.items())
        if print_output:
            print(text)
        return text

    def _compiled(self) -> AnyProgram:
        if self._main is None:
            raise InputError("nothing is compiled yet: pass example_inputs to compile, or call the module once")
        return self._main

    def extra_repr(self) -> str:
        return f"{len(list(self.parameters()))} parameters on {tuple(self.mesh.shape)} ranks"

    # ---- inside ----

    def adopt(self, inputs: FlatInputs, program: AnyProgram) -> None:
        """Take a program compiled for ``inputs`` as the module's main one."""
        self._programs[_key(inputs, True)] = program
        self._main = program
        self._rows = BatchRows(self.mesh, program.read, inputs.tensor_names)

    def adopt_tensors(self, tensors: Mapping[str, Tensor | None], persistent: Mapping[str, bool]) -> None:
        """Register parameters and buffers under their original dotted names."""
        for name, tensor in tensors.items():
            owner = _submodule(self, name.rpartition(".")[0])
            leaf = name.rpartition(".")[2]
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(leaf, tensor)
            else:
                owner.register_buffer(leaf, tensor, persistent=persistent.get(name, True))

    def adopt_stages(self, group: dist.ProcessGroup, elsewhere: frozenset[str]) -> None:
        """Say that ``group`` holds the stages, and which parameters here are copies of an earlier stage's."""
        self._stage_group = group
        self._elsewhere = elsewhere

    def _program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[AnyProgram, FlatInputs, list[int]]:
        """The program for a call, its inputs, and the positions of those of which this rank has but its own rows."""
        flat, marked = unmarked(args, kwargs)
        flat, own = self._rows.spread(flat, marked)
        key = _key(flat, self.training)
        if key not in self._programs:
            self._programs[key] = together(lambda: self._compiler(flat, self.training))
        return self._programs[key], flat, own

    def _tensor(self, port: Port) -> Tensor:
        owner, _, leaf = original_name(port.name).rpartition(".")
        tensor: Tensor = getattr(self.get_submodule(owner), leaf)
        return tensor

    def _values(self, flat: FlatInputs) -> Callable[[Port], Any]:
        """What every input of the graph is on this rank in this step."""
        device = self.mesh.device_type
        seed = torch.randint(2**62, (), generator=self._generator).to(device)

        def value_of(port: Port) -> Any:
            if port.kind == "seed":
                return seed
            if port.kind != "input":
                return local_part(self._tensor(port))
            tensor = flat.tensors[int(port.name)].detach()
            # Dense, as it was traced: compiled graphs rely on strides.
            return (tensor if tensor.device.type == device else tensor.to(device)).contiguous()

        return value_of

    def _update_buffers(self, results: Mapping[Port, Any]) -> None:
        for port, value in results.items():
            if port.kind == "buffer":
                self._tensor(port).copy_(value)

    def _accumulate(self, gradients: Iterable[tuple[Port, Any]]) -> None:
        for port, gradient in gradients:
            if port.name.startswith(("none ", "input ")):
                continue
            parameter = self._tensor(port)
            if parameter.grad is None:
                parameter.grad = lie_like(parameter, gradient)
            else:
                local_part(parameter.grad).add_(gradient)

    def _outputs(self, program: AnyProgram, results: Mapping[Port, Any]) -> Any:
        """Nest the outputs as the model does, sharded ones as DTensors; those made elsewhere are None."""
        made = {
            int(port.name): self._shown(value, program.result_placements(port))
            for port, value in results.items()
            if port.kind == "output"
        }
        spec, plain = program.signature.output_spec
        leaves: list[Any] = []
        position = 0
        for is_tensor, value in plain:
            leaves.append(made.get(position) if is_tensor else value)
            position += is_tensor
        return pytree.tree_unflatten(leaves, spec)

    def _shown(self, value: Tensor, placements: tuple[Placement | None, ...]) -> Tensor:
        if not any(isinstance(p, Shard) for p in placements):
            return value
        return DTensor.from_local(
            value, self.mesh, [to_dtensor(p) for p in placements if p is not None], run_check=False
        )


def _norm_over(norm: Tensor, norm_type: float, group: dist.ProcessGroup) -> Tensor:
    """The norm of all stages' gradients from each stage's."""
    if norm_type == float("inf"):
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
        return norm
    power = norm**norm_type
    dist.all_reduce(power, group=group)
    total: Tensor = power ** (1.0 / norm_type)
    return total


def _key(flat: FlatInputs, training: bool) -> Any:
    plain = tuple(None if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in flat.leaves)
    return (flat.names, plain, tuple(flat.shapes), tuple(flat.dtypes), training)


def _submodule(root: nn.Module, path: str) -> nn.Module:
    """The module at a dotted path, made of empty modules where there is none yet."""
    current = root
    for part in filter(None, path.split(".")):
        if part not in current._modules:
            current.add_module(part, nn.Module())
        current = current.get_submodule(part)
    return current
