"""Small joint graphs made by hand, and graphs as short text, for tests of single passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from galvatron_fx.ir.graph.metadata import (
    Dim,
    InputSpec,
    NodeMeta,
    OutputSpec,
    Signature,
    TensorSpec,
    meta_of,
    set_meta,
    set_signature,
)
from galvatron_fx.ir.torch_compat.tensors import pytree

Shape = tuple[int, ...]


class Builder:
    """Writes a joint graph node by node; specs come from running each operator on the meta device.

    ``phase`` and ``block`` are those of the nodes that follow.
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.phase, self.block = "forward", 0
        self._ports: list[InputSpec] = []

    def input(
        self,
        name: str,
        shape: Shape,
        kind: str = "input",
        dtype: torch.dtype = torch.float64,
        dims: tuple[Dim, ...] = (),
    ) -> fx.Node:
        node = self.graph.placeholder(name)
        set_meta(node, NodeMeta((TensorSpec(shape, dtype, dims),)))
        self._ports.append(InputSpec(kind, name, kind == "param"))
        return node

    def begin_backward(self) -> fx.Node:
        """The gradient of a scalar loss; the nodes that follow are of the backward phase."""
        self.phase = "backward"
        return self.input("tangent", (), "tangent")

    def constant(self, name: str, value: Tensor) -> fx.Node:
        self.root.register_buffer(name, value)
        node = self.graph.create_node("get_attr", name)
        set_meta(node, NodeMeta((_spec(value, ()),)))
        return node

    def call(self, target: Callable[..., Any], *args: Any, dims: tuple[Dim, ...] = (), **kwargs: Any) -> fx.Node:
        """An operator; ``dims`` are the symbolic sizes of its one output."""
        meta_args, meta_kwargs = fx.map_arg((args, kwargs), _meta)
        try:
            result = target(*meta_args, **meta_kwargs)
        except NotImplementedError:  # it knows no tensors without values
            result = target(*pytree.tree_map(_ones, meta_args), **meta_kwargs)
        several = isinstance(result, (tuple, list))
        specs = [_spec(value, dims) for value in (result if several else [result])]
        return self.write(target, *args, specs=specs, multi_output=several, **kwargs)

    def write(
        self,
        target: Callable[..., Any],
        *args: Any,
        specs: Sequence[TensorSpec | None],
        multi_output: bool = False,
        **kwargs: Any,
    ) -> fx.Node:
        """A node whose specs are given."""
        name = target.__name__.partition(".")[0]
        node = self.graph.create_node("call_function", target, args, kwargs, name)
        set_meta(node, NodeMeta(tuple(specs), self.phase, self.block, multi_output=multi_output))
        return node

    def finish(self, *outputs: tuple[str, str, fx.Node | None], loss: int | None = None) -> fx.GraphModule:
        """The graph with outputs of the given (kind, name, node)."""
        self.graph.output(tuple(node for _, _, node in outputs))
        graph = fx.GraphModule(self.root, self.graph)
        ports = tuple(OutputSpec(kind, name) for kind, name, _ in outputs)
        names = tuple(port.name for port in self._ports if port.kind == "input")
        set_signature(graph, Signature(tuple(self._ports), ports, names, loss))
        return graph


def _ones(value: Any) -> Any:
    return torch.ones_like(value, device="cpu") if isinstance(value, Tensor) else value


def _meta(node: fx.Node) -> Any:
    tensors = [torch.empty(s.shape, dtype=s.dtype, device="meta") if s else None for s in meta_of(node).specs]
    return tuple(tensors) if meta_of(node).multi_output else tensors[0]


def _spec(value: Tensor | None, dims: tuple[Dim, ...]) -> TensorSpec | None:
    return TensorSpec(tuple(value.shape), value.dtype, dims) if isinstance(value, Tensor) else None


def listing(graph: fx.GraphModule | fx.Graph) -> str:
    """One line a node: its name, call and shape; lines of backward nodes begin with a prime."""
    inner = graph.graph if isinstance(graph, fx.GraphModule) else graph
    return "\n".join(_line(node) for node in inner.nodes)


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {_text(node.args[0])}"
    if node.op == "placeholder":
        return f"{node.name}: {_shapes(node)}"
    if node.op == "get_attr":
        return f"{node.name} = constant: {_shapes(node)}"
    name = getattr(node.target, "__name__", str(node.target)).removesuffix(".default")
    words = [*map(_text, node.args), *(f"{key}={_text(value)}" for key, value in node.kwargs.items())]
    mark = "'" if meta_of(node).phase == "backward" else ""
    return f"{mark}{node.name} = {name}({', '.join(words)}): {_shapes(node)}"


def _text(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_text, value))}]"
    return str(value)


def _shapes(node: fx.Node) -> str:
    return ", ".join(str(list(s.shape)) if s is not None else "-" for s in meta_of(node).specs)
