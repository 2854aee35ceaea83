"""The module that users train: DTensor parameters outside, lowered graphs inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from galvatron_fx.errors import InputError
from galvatron_fx.ir.annotations import Port
from galvatron_fx.ir.placement import Placement, Shard, to_dtensor
from galvatron_fx.ir.plan import Plan
from galvatron_fx.ir.printer import readable
from galvatron_fx.ir.torch_compat import pytree
from galvatron_fx.runtime.program import Program
from passes.capture import FlatInputs

Compiler = Callable[[FlatInputs, bool], Program]


class DistributedGraphModule(nn.Module):
    """A model lowered to one rank of a mesh; trains exactly as the original on one device.

    Parameters are DTensors under the original names, so optimizers, ``clip_grad_norm_``, schedulers, ``state_dict``
    and ``torch.distributed.checkpoint`` work as with any module. Inputs are the global batch, the same on every rank.
    Outputs come as the model returns them: scalars and whole tensors as tensors, sharded ones as DTensors
    (``.full_tensor()`` gathers them); tensors other than the loss are detached.

    Made by :func:`galvatron_fx.compile`.
    """

    plan: Plan

    def __init__(self, mesh: DeviceMesh, plan: Plan, compiler: Compiler, seed: int) -> None:
        super().__init__()
        self.mesh = mesh
        self.plan = plan
        self._compiler = compiler
        self._programs: dict[Any, Program] = {}
        self._main: Program | None = None
        self._generator = torch.Generator().manual_seed(seed)

    # ---- training ----

    def forward_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward on the global batch, add to ``.grad`` of the parameters and return the outputs.

        Raises InputError where the model returns no loss (a scalar that needs gradients): call the module and
        ``backward()`` on a loss of your own instead.
        """
        program, flat = self._program(args, kwargs)
        if program.signature.loss is None:
            raise InputError(
                "the model returns no scalar loss, so forward_backward has nothing to differentiate: pass labels, or "
                "call the module and backward() on a loss computed from its outputs"
            )
        with torch.no_grad():
            results, saved = self._run_forward(program, flat)
            arguments = [*saved, *program.tangents(results)]
            del saved
            gradients = program.backward(arguments)
            self._accumulate(program, gradients)
        return self._outputs(program, results)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward on the global batch; under gradient mode the result can be differentiated with ``backward()``."""
        program, flat = self._program(args, kwargs)
        if torch.is_grad_enabled():
            parameters = [self._tensor(port) for port in self._gradient_inputs(program)]
            results = _Step.apply(self, program, flat, *parameters)
            return self._outputs(program, results)
        with torch.no_grad():
            results = list(program.inference(self._arguments(program, flat)))
            self._update_buffers(program, results)
            return self._outputs(program, results)

    # ---- reading ----

    @property
    def forward_graph(self) -> fx.GraphModule:
        """The lowered forward graph of this rank."""
        return self._compiled().halves.forward

    @property
    def backward_graph(self) -> fx.GraphModule:
        """The lowered backward graph of this rank."""
        return self._compiled().halves.backward

    def print_readable(self, print_output: bool = True) -> str:
        """Return (and print) the lowered program as Python."""
        text = "\n".join(readable(graph) for graph in (self.forward_graph, self.backward_graph))
        if print_output:
            print(text)
        return text

    def _compiled(self) -> Program:
        if self._main is None:
            raise InputError("nothing is compiled yet: pass example_inputs to compile, or call the module once")
        return self._main

    def extra_repr(self) -> str:
        return f"{len(list(self.parameters()))} parameters on {tuple(self.mesh.shape)} ranks"

    # ---- inside ----

    def adopt(self, inputs: FlatInputs, program: Program) -> None:
        """Take a program compiled for ``inputs`` as the module's main one."""
        self._programs[_key(inputs, True)] = program
        self._main = program

    def adopt_tensors(self, tensors: Mapping[str, Tensor | None], persistent: Mapping[str, bool]) -> None:
        """Register parameters and buffers under their original dotted names."""
        for name, tensor in tensors.items():
            owner = _submodule(self, name.rpartition(".")[0])
            leaf = name.rpartition(".")[2]
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(leaf, tensor)
            else:
                owner.register_buffer(leaf, tensor, persistent=persistent.get(name, True))

    def _program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Program, FlatInputs]:
        flat = FlatInputs.of_call(args, kwargs)
        key = _key(flat, self.training)
        if key not in self._programs:
            self._programs[key] = self._compiler(flat, self.training)
        return self._programs[key], flat

    def _tensor(self, port: Port) -> Tensor:
        owner, _, leaf = port.name.rpartition(".")
        tensor: Tensor = getattr(self.get_submodule(owner), leaf)
        return tensor

    def _arguments(self, program: Program, flat: FlatInputs) -> list[Any]:
        """Arguments of the forward graph on this rank."""
        inputs = flat.tensors
        device = self.mesh.device_type
        made: list[Any] = []
        for port in program.halves.input_ports:
            if port.kind == "input":
                tensor = inputs[int(port.name)].detach()
                made.append(tensor if tensor.device.type == device else tensor.to(device))
            elif port.kind == "seed":
                made.append(torch.randint(2**62, (), generator=self._generator).to(device))
            else:
                tensor = self._tensor(port)
                made.append(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
        return made

    def _run_forward(self, program: Program, flat: FlatInputs) -> tuple[list[Any], list[Any]]:
        out = list(program.forward(self._arguments(program, flat)))
        count = len(program.halves.result_ports)
        results, saved = out[:count], out[count:]
        self._update_buffers(program, results)
        return results, saved

    def _update_buffers(self, program: Program, results: list[Any]) -> None:
        for port, value in zip(program.halves.result_ports, results, strict=True):
            if port.kind == "buffer":
                self._tensor(port).copy_(value)

    def _gradient_inputs(self, program: Program) -> Iterator[Port]:
        return (port for port in program.halves.input_ports if port.kind == "param" and port.requires_grad)

    def _accumulate(self, program: Program, gradients: Any) -> None:
        ports = program.halves.gradient_ports
        for port, gradient in zip(ports, gradients, strict=True):
            if gradient is None or port.name.startswith(("none ", "input ")):
                continue
            parameter = self._tensor(port)
            if parameter.grad is None:
                parameter.grad = _like(parameter, gradient)
            else:
                held = parameter.grad
                (held.to_local() if isinstance(held, DTensor) else held).add_(gradient)

    def _outputs(self, program: Program, results: Any) -> Any:
        """Nest the outputs as the model does, sharded ones as DTensors."""
        made: dict[int, Any] = {}
        for port, value in zip(program.halves.result_ports, results, strict=True):
            if port.kind == "output":
                made[int(port.name)] = self._shown(value, program.result_placements(port))
        spec, plain = program.signature.output_spec
        tensors = iter(made[i] for i in sorted(made))
        leaves = [next(tensors) if is_tensor else value for is_tensor, value in plain]
        return pytree.tree_unflatten(leaves, spec)

    def _shown(self, value: Tensor, placements: tuple[Placement | None, ...]) -> Tensor:
        if not any(isinstance(p, Shard) for p in placements):
            return value
        return DTensor.from_local(
            value, self.mesh, [to_dtensor(p) for p in placements if p is not None], run_check=False
        )


class _Step(torch.autograd.Function):
    """Forward and backward graph as one autograd node, for callers of ``loss.backward()``."""

    @staticmethod
    def forward(
        ctx: Any, module: DistributedGraphModule, program: Program, flat: FlatInputs, *parameters: Tensor
    ) -> tuple[Any, ...]:
        results, ctx.saved = module._run_forward(program, flat)
        ctx.module, ctx.program, ctx.parameters = module, program, parameters
        differentiable = {port.name for port in program.halves.tangent_ports}
        ctx.positions = {
            port.name: i for i, port in enumerate(program.halves.result_ports) if port.name in differentiable
        }
        ctx.mark_non_differentiable(
            *(
                value
                for port, value in zip(program.halves.result_ports, results, strict=True)
                if not (port.kind == "output" and port.name in differentiable)
            )
        )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Any, ...]:
        if ctx.saved is None:
            raise InputError("backward() ran twice on one forward: run forward again")
        program: Program = ctx.program
        arguments = [*ctx.saved, *(tangents[ctx.positions[p.name]] for p in program.halves.tangent_ports)]
        ctx.saved = None
        by_name = {
            port.name: gradient
            for port, gradient in zip(program.halves.gradient_ports, program.backward(arguments), strict=True)
        }
        wanted = ctx.module._gradient_inputs(program)
        made = []
        for port, parameter in zip(wanted, ctx.parameters, strict=True):
            gradient = by_name.get(port.name)
            made.append(None if gradient is None else _like(parameter, gradient))
        return (None, None, None, *made)


def _key(flat: FlatInputs, training: bool) -> Any:
    plain = tuple(None if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in flat.leaves)
    return (flat.names, plain, tuple(flat.shapes), tuple(flat.dtypes), training)


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """A local gradient as the parameter lies."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _submodule(root: nn.Module, path: str) -> nn.Module:
    """The module at a dotted path, made of empty modules where there is none yet."""
    current = root
    for part in filter(None, path.split(".")):
        if part not in current._modules:
            current.add_module(part, nn.Module())
        current = current.get_submodule(part)
    return current
