"""Steps of training, whoever computes them: what each leaves behind, by kind and name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from galvatron_fx.checking.same_draws import SameDraws
from galvatron_fx.checking.simulated import Results, ValueOf
from galvatron_fx.checking.wide_floats import WideFloats
from galvatron_fx.ir.graph.metadata import InputSpec, OutputSpec, Signature, meta_of, ports, signature
from galvatron_fx.ir.graph.precision import computed_in
from galvatron_fx.ir.plan.strategy import original_name
from galvatron_fx.ir.torch_compat.dtensors import whole_tensor
from galvatron_fx.ir.torch_compat.tensors import pytree
from galvatron_fx.ir.torch_compat.tracing import composites_in_python
from galvatron_fx.runtime.absent_cache import AbsentCache
from galvatron_fx.runtime.module import DistributedGraphModule
from passes.frontend.capture.flat_inputs import FlatInputs, flatten
from passes.frontend.capture.held_objects import ArgumentAt, ArgumentsLeft, Slot, containers_of
from passes.frontend.capture.raw_contents import copied_containers

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["Eager", "Key", "OnRanks", "Simulated", "Step", "StepRunner", "train"]

Key = tuple[str, str]
"""Kind ("loss", "output", "gradient", "buffer" or "parameter") and name."""

OptimizerOf = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Step:
    """Whole tensors after one step; ``spread``: the largest difference between replicas of one."""

    values: dict[Key, Tensor]
    spread: dict[Key, float] = field(default_factory=dict)


class StepRunner(Protocol):
    """Computes steps of ``module``: adds to ``.grad`` of its parameters and writes its buffers."""

    spread: dict[Key, float]
    inputs: FlatInputs

    @property
    def module(self) -> nn.Module:
        """What is trained."""
        ...

    def run(self, seed: Tensor) -> Any:
        """Run forward and backward and return the outputs as the model nests them; ``seed``: of what it draws."""
        ...


def train(runner: StepRunner, steps: int, optimizer_of: OptimizerOf, seed: int) -> list[Step]:
    """Run ``steps`` steps, each from a seed that the compiled module would draw; under ``no_grad`` they train none."""
    learns = torch.is_grad_enabled()
    trained = [parameter for parameter in runner.module.parameters() if learns and parameter.requires_grad]
    optimizer = optimizer_of(trained) if trained else None
    generator = torch.Generator().manual_seed(seed)
    history = []
    for _ in range(steps):
        outputs = runner.run(torch.randint(2**62, (), generator=generator))
        values = {_key(name, value): _whole(value) for name, value in named_tensors(outputs)}
        for name, parameter in runner.module.named_parameters():
            if parameter.grad is not None:
                values["gradient", name] = _whole(parameter.grad)
        values |= _input_gradients(runner.inputs)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        values |= {
            ("parameter", name): _whole(p) for name, p in runner.module.named_parameters() if learns and p.requires_grad
        }
        values |= {("buffer", name): _whole(buffer) for name, buffer in runner.module.named_buffers()}
        history.append(Step(values, dict(runner.spread)))
    return history


def _input_gradients(inputs: FlatInputs) -> dict[Key, Tensor]:
    """Take the gradients of inputs that need some."""
    gradients: dict[Key, Tensor] = {}
    for name, tensor in zip(inputs.input_names, inputs.tensors, strict=True):
        if tensor.grad is not None:
            gradients["gradient", f"input {name}"], tensor.grad = _whole(tensor.grad), None
    return gradients


def named_tensors(outputs: Any) -> list[tuple[str, Tensor]]:
    """The tensors that a model returned, by their places; without caches that other ranks hold."""
    flatten(outputs)  # makes dataclasses known
    paths, _ = pytree.tree_flatten_with_path(outputs)
    here = [(path, leaf) for path, leaf in paths if isinstance(leaf, Tensor) and not isinstance(leaf, AbsentCache)]
    named = [(pytree.keystr(path).strip("[]'."), leaf) for path, leaf in here]
    return [(name or "result", leaf) for name, leaf in named]


def _key(name: str, value: Tensor) -> Key:
    return ("loss" if value.dim() == 0 and value.is_floating_point() else "output"), name


def _whole(value: Tensor) -> Tensor:
    whole = whole_tensor(value)
    dense = whole.to_dense() if whole.is_sparse else whole  # of Embedding(sparse=True); compiled ones are dense
    return dense.detach().clone()


def _weights(outputs: list[Tensor], trained: int | None = None) -> dict[int, Tensor]:
    """What outputs are multiplied by before they are added up: losses by one; without one, all by random numbers.

    Sums of plain outputs would not do: that of a softmax is constant. ``trained``: the one loss that counts.
    """
    if trained is not None:
        return {trained: torch.ones_like(outputs[trained])}
    losses = [at for at, out in enumerate(outputs) if out.dim() == 0 and out.requires_grad]
    weighted = losses or [at for at, out in enumerate(outputs) if out.requires_grad]
    return {at: _weight(at, outputs[at].shape, outputs[at].dtype) for at in weighted}


def _weight(position: int, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    sizes = tuple(shape)
    if not sizes:
        return torch.ones((), dtype=dtype)
    return torch.randn(sizes, generator=torch.Generator().manual_seed(position), dtype=torch.float64).to(dtype)


# ---- one device ------------------------------------------------------------------------------------------------------


@dataclass
class Eager:
    """The model as it is, on one device.

    ``policy``: parameters and inputs are cast as it says, as mixed precision casts them; ``is_wide``: everything in
    float64; ``trained``: the output that is the loss, None for the sum of all; ``shapes``: of the numbers that the
    captured graph draws, in order. ``unlike``: why eager could not be handed the same, empty where it was.
    """

    module: nn.Module
    inputs: FlatInputs
    policy: MixedPrecisionPolicy | None = None
    is_wide: bool = False
    trained: int | None = None
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    unlike: str = ""
    spread: dict[Key, float] = field(default_factory=dict)

    def run(self, seed: Tensor) -> Any:
        """Run forward and ``backward()``."""
        draws = SameDraws(seed)
        with self._as_captured(draws):
            result = self._forward()
        outputs = [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]
        weights = _weights(outputs, self.trained)  # drawn outside: these are none of the model's numbers
        if weights:
            with self._as_captured(draws):
                torch.autograd.backward([outputs[at] for at in weights], list(weights.values()))
        if draws.unknown or draws.shapes != self.shapes:
            self.unlike = draws.unknown or f"{len(draws.shapes)} draws where the captured graph has {len(self.shapes)}"
        return result

    @contextmanager
    def _as_captured(self, draws: SameDraws) -> Iterator[None]:
        """Compute with the captured graph's dtypes and random numbers."""
        with ExitStack() as scopes:
            if self.is_wide:
                scopes.enter_context(WideFloats())
            if self.shapes:
                scopes.enter_context(composites_in_python())
                scopes.enter_context(draws)
            yield

    def _forward(self) -> Any:
        policy, tensors = self.policy, self.inputs.tensors
        if policy is None:
            args, kwargs = self.inputs.call([tensor.clone() for tensor in tensors])
            return self.module(*args, **kwargs)
        inputs_as = policy.param_dtype if policy.cast_forward_inputs else None
        args, kwargs = self.inputs.call([_cast(tensor.clone(), inputs_as) for tensor in tensors])
        parameters = {name: _cast(p, computed_in(policy, p.dtype)) for name, p in self.module.named_parameters()}
        result = functional_call(self.module, parameters, args, kwargs)
        return pytree.tree_map(lambda leaf: _cast(leaf, policy.output_dtype), result)


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    floats = dtype is not None and isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if floats else value


# ---- simulated ranks -------------------------------------------------------------------------------------------------


@dataclass
class Simulated:
    """A lowered program on simulated ranks, with the weights of ``module``.

    ``program``: runs a step, given the values of the inputs of ``graph``, the captured one; ``is_wide``, ``trained``:
    as of :class:`Eager`.
    """

    module: nn.Module
    inputs: FlatInputs
    graph: fx.GraphModule
    program: Callable[[ValueOf], Results]
    is_wide: bool = False
    trained: int | None = None
    spread: dict[Key, float] = field(default_factory=dict)

    def run(self, seed: Tensor) -> Any:
        """Run forward and backward on all ranks."""
        specs = {port: meta_of(node).spec for port, node in ports(self.graph)}

        def value_of(port: InputSpec) -> Tensor:
            if port.kind == "seed":
                return seed
            if port.kind == "tangent":
                at, like = int(port.name), specs[port]
                counts = self.trained in (None, at)
                return _weight(at, like.shape, like.dtype) if counts else torch.zeros(like.shape, dtype=like.dtype)
            if port.kind == "cache":  # as it is given, in every step
                return self.inputs.tensors[self.inputs.input_names.index(port.name)]
            tensor = self.inputs.tensors[int(port.name)] if port.kind == "input" else self._tensor(port.name)
            return tensor.detach()

        scope: AbstractContextManager[Any] = WideFloats() if self.is_wide else nullcontext()
        with torch.no_grad(), scope:
            results = self.program(value_of)
        for port, whole in results.items():
            if port.kind == "buffer":
                self._tensor(port.name).detach().copy_(whole.value)
                self.spread["buffer", original_name(port.name)] = whole.spread
            elif port.is_input_gradient:
                place = next(p for p in specs if p.kind == "input" and p.gradient == port.name)
                self.inputs.tensors[int(place.name)].grad = whole.value
            elif port.kind == "grad" and not port.name.startswith("none "):
                parameter = self._tensor(port.name)
                parameter.grad = whole.value.to(parameter.dtype)
                if id(parameter) in self._names:  # not of a buffer that forward lets need gradients
                    self.spread["gradient", self._names[id(parameter)]] = whole.spread
        return self._outputs(signature(self.graph), results)

    def _outputs(self, known: Signature, results: Results) -> Any:
        spec, plain = known.output_spec
        leaves: list[Any] = []
        position = 0
        marks = [value if isinstance(value, ArgumentAt) else None for _, value in plain]
        for is_tensor, value in plain:
            whole = results.get(OutputSpec("output", str(position))) if is_tensor else None
            is_made = whole is None and (is_tensor or isinstance(value, ArgumentAt))
            leaves.append(whole.value if whole is not None else None if is_made else value)
            position += is_tensor
        nested = pytree.tree_unflatten(leaves, spec)
        spreads = [whole for at in range(position) if (whole := results.get(OutputSpec("output", str(at)))) is not None]
        for (name, value), whole in zip(named_tensors(nested), spreads, strict=True):
            self.spread[_key(name, value)] = whole.spread
        if not any(marks):
            return nested
        given = self._arguments(known, results)
        leaves = [leaf if mark is None else given[mark.path] for leaf, mark in zip(leaves, marks, strict=True)]
        return pytree.tree_unflatten(leaves, spec)

    def _arguments(self, known: Signature, results: Results) -> dict[str, Any]:
        """The containers among the arguments as the step leaves them, by the way to each."""
        tensors = dict(zip(self.inputs.input_names, self.inputs.tensors, strict=True))
        tensors |= {port.name: whole.value for port, whole in results.items() if port.kind == "cache"}
        left: ArgumentsLeft | None = known.arguments
        if left is None:
            return dict(containers_of(self.inputs.call([tensors[name] for name in self.inputs.input_names])))
        value = copied_containers(left.value, lambda leaf: tensors[leaf.name] if isinstance(leaf, Slot) else leaf)
        return dict(containers_of(value))

    def _tensor(self, name: str) -> Tensor:
        owner, _, leaf = original_name(name).rpartition(".")
        tensor: Tensor = getattr(self.module.get_submodule(owner), leaf)
        return tensor

    @property
    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.module.named_parameters()}


# ---- real ranks ------------------------------------------------------------------------------------------------------


@dataclass
class OnRanks:
    """The compiled module, on this rank; ``has_loss``: whether it returns what ``forward_backward`` differentiates."""

    module: DistributedGraphModule
    inputs: FlatInputs
    has_loss: bool
    spread: dict[Key, float] = field(default_factory=dict)

    def run(self, seed: Tensor) -> Any:
        """Run ``forward_backward``, or forward and ``backward()`` where there is no loss, or several."""
        args, kwargs = self.inputs.call(self.inputs.tensors)
        if self.has_loss:
            return self.module.forward_backward(*args, **kwargs)
        result = self.module(*args, **kwargs)
        outputs = [whole_tensor(leaf) for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]
        weights = _weights(outputs)
        if weights:
            torch.autograd.backward([outputs[at] for at in weights], list(weights.values()))
        return result
