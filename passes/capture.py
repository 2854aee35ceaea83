"""Capture a model's training step as one joint forward-and-backward ATen graph on fake tensors."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias

import torch
import torch.nn.modules.module as module_hooks
from torch import fx, nn

from galvatron_fx.errors import CaptureError, InputError
from galvatron_fx.ir.annotations import (
    NodeFacts,
    Port,
    Signature,
    TensorSpec,
    facts,
    output_ports,
    ports,
    set_facts,
    set_signature,
    signature,
)
from galvatron_fx.ir.symbols import fit_symbols
from galvatron_fx.ir.torch_compat import (
    FakeTensorMode,
    annotate_module,
    export_joint,
    module_of,
    new_fake_mode,
    pytree,
)
from passes.clean_graph import CleanGraph

ExampleInputs: TypeAlias = "Mapping[str, Any] | Sequence[Any] | torch.Tensor | FlatInputs"
_ROOT = "module"


@dataclass(frozen=True)
class Capture:
    """Trace forward and backward of a model into one functional graph, without running it or holding weight memory.

    Rewrite: ``nn.Module`` -> ``fx.GraphModule`` whose placeholders are parameters, buffers, inputs and the tangents of
    the differentiable outputs, and whose outputs are updated buffers, the model's outputs and one gradient a parameter.

    ``symbolic``: trace a second time at other batch and sequence sizes, so that every shape is known as an expression
    in ``b`` and ``s`` (see :mod:`galvatron_fx.ir.symbols`).

    If the model returns a scalar that needs gradients (its loss), that scalar alone is differentiable, and the
    other outputs (logits, hidden states) are returned detached; a model without such a scalar keeps every floating
    output differentiable.
    """

    symbolic: bool = True

    def run(self, model: nn.Module, example_inputs: ExampleInputs) -> fx.GraphModule:
        """Capture ``model`` on ``example_inputs`` (a dict of keyword arguments, a tuple or one tensor; the global
        batch).

        Raises CaptureError where the model's control flow depends on tensor values, naming the user's line, and
        InputError where the inputs do not fit the model's forward.
        """
        inputs = FlatInputs.of(example_inputs)
        graph = _trace(model, inputs, inputs.shapes)
        if self.symbolic:
            fit_symbols(graph, inputs.shapes, inputs.dtypes, lambda shapes: _trace(model, inputs, shapes))
        return CleanGraph().run(graph)


@dataclass(frozen=True)
class FlatInputs:
    """Example inputs as a flat list of tensors, and how to build the call from them."""

    leaves: tuple[Any, ...]
    tree: Any
    names: tuple[str, ...]

    @classmethod
    def of(cls, example_inputs: ExampleInputs) -> FlatInputs:
        """Flatten a dict of keyword arguments, a tuple of positional ones or a single tensor."""
        if isinstance(example_inputs, FlatInputs):
            return example_inputs
        if isinstance(example_inputs, torch.Tensor):
            example_inputs = (example_inputs,)
        if isinstance(example_inputs, Mapping):
            return cls.of_call((), dict(example_inputs))
        if isinstance(example_inputs, Sequence) and not isinstance(example_inputs, str):
            return cls.of_call(tuple(example_inputs), {})
        raise InputError(
            f"example_inputs is a {type(example_inputs).__name__}: pass a dict of keyword arguments or a tuple"
        )

    @classmethod
    def of_call(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatInputs:
        """Flatten the arguments of a call. Raises InputError where there is no tensor among them."""
        paths, tree = pytree.tree_flatten_with_path((args, dict(sorted(kwargs.items()))))
        names = tuple(pytree.keystr(path[1:]) for path, _ in paths)
        leaves = tuple(leaf for _, leaf in paths)
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise InputError("example_inputs holds no tensor: pass the global batch that the model is trained on")
        return cls(leaves, tree, names)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensor leaves, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """How a person would write the place of every tensor leaf."""
        return tuple(name for name, leaf in zip(self.names, self.leaves, strict=True) if isinstance(leaf, torch.Tensor))

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the tensor leaves."""
        return [tuple(tensor.shape) for tensor in self.tensors]

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Dtypes of the tensor leaves."""
        return [tensor.dtype for tensor in self.tensors]

    def call(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Rebuild (args, kwargs) with ``tensors`` in place of the tensor leaves."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        return tuple(args), dict(kwargs)


class _Flat(nn.Module):
    """The model with flat tensors in and out; remembers how its outputs were nested."""

    def __init__(self, model: nn.Module, inputs: FlatInputs) -> None:
        super().__init__()
        self.module = model
        self._inputs = inputs
        self.output_spec: Any = None
        self.output_leaves: list[Any] = []
        self.loss: int | None = None

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self._inputs.call(tensors)
        leaves, self.output_spec = pytree.tree_flatten(self.module(*args, **kwargs))
        outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.output_leaves = [_plain(leaf) for leaf in leaves]
        self.loss = next((i for i, out in enumerate(outputs) if out.dim() == 0 and out.requires_grad), None)
        if self.loss is None:
            return tuple(outputs)
        return tuple(out if out.dim() == 0 else out.detach() for out in outputs)


def _plain(leaf: Any) -> tuple[bool, Any]:
    """(is a tensor, its value if it is a plain constant): objects that may hold traced tensors (caches) are dropped."""
    keep = leaf is None or isinstance(leaf, (bool, int, float, str))
    return isinstance(leaf, torch.Tensor), leaf if keep else None


def _trace(model: nn.Module, inputs: FlatInputs, shapes: Sequence[tuple[int, ...]]) -> fx.GraphModule:
    mode = new_fake_mode()
    flat = _Flat(model, inputs)
    with mode:
        args = [
            torch.empty(shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad)
            for shape, tensor in zip(shapes, inputs.tensors, strict=True)
        ]
    with _fake_weights(model, mode), _module_names(flat):
        try:
            graph = export_joint(flat, args, mode)
        except Exception as error:
            raise _explain(error, model) from error
    _record(graph, flat, inputs)
    _merge_tied(graph, model)
    return graph


def _explain(error: Exception, model: nn.Module) -> Exception:
    """Turn a tracing error into one that names the model's own line and what to do."""
    where = _user_line(error.__traceback__)
    name = type(error).__name__
    if "DataDependent" in name or "DynamicOutputShape" in name or "dynamic shape" in str(error):
        return CaptureError(
            f"{type(model).__name__} decides by the value of a tensor at {where}, so there is no one graph of it: "
            f"replace the branch by torch.where or a fixed choice ({name}: {_first_line(error)})"
        )
    if isinstance(error, (TypeError, RuntimeError, ValueError, IndexError, KeyError)):
        return InputError(
            f"the example inputs do not fit {type(model).__name__}, or it cannot be traced: at {where}: "
            f"{name}: {_first_line(error)}"
        )
    return CaptureError(f"{type(model).__name__} cannot be traced: at {where}: {name}: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else "no message"


def _user_line(trace: TracebackType | None) -> str:
    """The innermost frame that is neither torch's nor ours."""
    frames = traceback.extract_tb(trace)
    own = ("/torch/", "/passes/capture.py", "/galvatron_fx/ir/")
    users = [frame for frame in frames if not any(part in frame.filename.replace("\\", "/") for part in own)]
    frame = users[-1] if users else frames[-1]
    return f'File "{frame.filename}", line {frame.lineno}, in {frame.name}: {frame.line}'


@contextlib.contextmanager
def _fake_weights(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Put fake CPU tensors in place of the parameters and buffers, sharing what is shared, and put them back."""
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            with mode:
                empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
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
def _module_names(root: nn.Module) -> Iterator[None]:
    """Tag traced nodes with the qualified name of the module whose forward runs."""
    names = {id(module): name.removeprefix(_ROOT).removeprefix(".") for name, module in root.named_modules()}
    open_scopes: list[contextlib.AbstractContextManager[Any]] = []

    def enter(module: nn.Module, args: Any) -> None:
        scope = annotate_module(names.get(id(module), ""))
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


def _record(graph: fx.GraphModule, flat: _Flat, inputs: FlatInputs) -> None:
    """Attach facts to every node and a signature to the graph."""
    input_ports: list[Port] = []
    trained = {name for name, parameter in flat.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        set_facts(node, _node_facts(node))
        if node.op == "placeholder":
            input_ports.append(_input_port(node, trained))
    output = graph.graph.output_node()
    outputs = _flatten_outputs(output)
    descriptors = output.meta["desc"]
    set_signature(
        graph,
        Signature(
            inputs=tuple(input_ports),
            outputs=tuple(_output_port(desc, i) for i, desc in enumerate(descriptors)),
            input_names=inputs.tensor_names,
            loss=flat.loss,
            input_spec=inputs,
            output_spec=(flat.output_spec, tuple(flat.output_leaves)),
            input_specs=tuple(TensorSpec(tuple(t.shape), t.dtype) for t in inputs.tensors),
        ),
    )
    output.args = (tuple(outputs),)


def _flatten_outputs(output: fx.Node) -> list[fx.Node | None]:
    return list(pytree.arg_tree_leaves(*output.args))


def _merge_tied(graph: fx.GraphModule, model: nn.Module) -> None:
    """Make a parameter that is reached under several names one input, and its gradients one sum."""
    identity = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    found = signature(graph)
    output = graph.graph.output_node()
    nodes = {port.name: node for port, node in ports(graph) if port.kind == "param"}
    gradients = {port.name: node for port, node in output_ports(graph) if port.kind == "grad" and node is not None}
    first: dict[int, str] = {}
    dropped: set[str] = set()
    for name, node in nodes.items():
        keeper = first.setdefault(identity[name], name)
        if keeper == name:
            continue
        dropped.add(name)
        node.replace_all_uses_with(nodes[keeper])
        graph.graph.erase_node(node)
        total = _added(graph, output, gradients.get(keeper), gradients.pop(name, None), nodes[keeper])
        if total is not None:
            gradients[keeper] = total
    values = [
        gradients.get(port.name) if port.kind == "grad" and port.name in identity else value
        for port, value in zip(found.outputs, output.args[0], strict=True)  # type: ignore[arg-type]
    ]
    kept = [not (port.kind == "grad" and port.name in dropped) for port in found.outputs]
    output.args = (tuple(value for value, keep in zip(values, kept, strict=True) if keep),)
    inputs = tuple(port for port in found.inputs if not (port.kind == "param" and port.name in dropped))
    outputs = tuple(port for port, keep in zip(found.outputs, kept, strict=True) if keep)
    set_signature(graph, found.having(inputs=inputs, outputs=outputs))


def _added(
    graph: fx.GraphModule, output: fx.Node, first: fx.Node | None, second: fx.Node | None, parameter: fx.Node
) -> fx.Node | None:
    if first is None or second is None:
        return first if second is None else second
    with graph.graph.inserting_before(output):
        total = graph.graph.call_function(torch.ops.aten.add.Tensor, (first, second))
    set_facts(total, facts(parameter).having(phase="backward", module=""))
    return total


def _node_facts(node: fx.Node) -> NodeFacts:
    value = node.meta.get("val")
    multi = isinstance(value, (tuple, list))
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    specs = tuple(TensorSpec(tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else None for v in values)
    phase = "backward" if node.meta.get("partitioner_tag") == "is_backward" else "forward"
    return NodeFacts(specs=specs, phase=phase, module=module_of(node), multi_output=multi)


def _input_port(node: fx.Node, trained: set[str]) -> Port:
    descriptor = node.meta["desc"]
    kind = type(descriptor).__name__
    if kind in ("ParamAOTInput", "BufferAOTInput"):
        name = descriptor.target.removeprefix(f"{_ROOT}.")
        grad = descriptor.target in trained
        return Port("param" if kind == "ParamAOTInput" else "buffer", name, grad)
    if kind == "PlainAOTInput":
        return Port("input", str(descriptor.idx), bool(node.meta["val"].requires_grad))
    if kind == "TangentAOTInput":
        return Port("tangent", str(descriptor.output.idx))
    raise CaptureError(f"input '{node.name}' is of a kind that cannot be lowered ({descriptor})")


def _output_port(descriptor: Any, position: int) -> Port:
    kind = type(descriptor).__name__ if descriptor is not None else ""
    if kind == "PlainAOTOutput":
        return Port("output", str(descriptor.idx))
    if kind == "GradAOTOutput":
        source = descriptor.grad_of
        name = getattr(source, "target", None)
        return Port("grad", name.removeprefix(f"{_ROOT}.") if name else f"input {source.idx}")
    if kind == "InputMutationAOTOutput":
        source = descriptor.mutated_input
        if not hasattr(source, "target"):
            raise CaptureError(f"the model writes into its input {source.idx} in place: clone it first")
        return Port("buffer", source.target.removeprefix(f"{_ROOT}."))
    if descriptor is None:
        return Port("grad", f"none {position}")
    raise CaptureError(f"output {position} is of a kind that cannot be lowered ({descriptor})")
