"""Backward passes that run forward code again: they find the traced weights, or are refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, fx, nn

from galvatron_fx.ir.errors import CaptureError
from galvatron_fx.ir.graph.metadata import meta_of, output_ports
from galvatron_fx.ir.torch_compat.tracing import CHECKPOINT_GENERATOR, is_custom_backward
from galvatron_fx.ir.traced_values import traced_value
from passes.frontend.capture.module_state import quoted

REMEDY = "use torch.utils.checkpoint.checkpoint(..., use_reentrant=False) instead of a function of your own"


@dataclass
class Reruns:
    """What was seen of them in a trace.

    ``restored``: whether somebody set the state of random numbers; ``changed``: buffers that are changed inside of a
    checkpoint, which eager may change again when it runs that again in backward.
    """

    restored: bool = False
    changed: dict[str, None] = field(default_factory=dict)

    @contextlib.contextmanager
    def noted(self, model: nn.Module) -> Iterator[None]:
        """The inside of a checkpoint."""
        before = {name: (buffer, traced_value(buffer)) for name, buffer in model.named_buffers()}
        yield
        for name, buffer in model.named_buffers() if torch.is_grad_enabled() else ():
            held, value = before.get(name, (None, None))
            if held is not buffer or value is not traced_value(buffer):
                self.changed[name] = None


@contextlib.contextmanager
def reruns(model: nn.Module) -> Iterator[Reruns]:
    """While a model is traced: torch's reentrant checkpoints run plainly, and ``backward()`` inside is refused.

    What a reentrant checkpoint gives is what its body gives without one, unless none of its arguments needs gradients:
    then its weights get none. Gradients that ``backward()`` adds to weights, from inside of a backward or of forward,
    are not in the trace: CaptureError names these weights.
    """
    backward, set_state = torch.autograd.backward, torch.set_rng_state
    plain_checkpoint = getattr(torch_checkpoint, CHECKPOINT_GENERATOR)
    seen = Reruns()

    def refuse(tensors: Any, *args: Any, **kwargs: Any) -> None:
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        behind = set(nodes_behind(roots))
        leaves = {id(getattr(node, "variable", None)) for node in behind}
        names = [name for name, p in model.named_parameters() if p.grad_fn in behind or id(p) in leaves]
        weights = f" for {quoted(names)}" if names else ""
        raise CaptureError(
            f"backward() is called while the model is traced, in forward or in the backward of an autograd.Function, "
            f"and its gradients{weights} would be missing: {REMEDY}, or return the gradients from torch.autograd.grad"
        )

    def restore(new_state: Tensor) -> None:
        seen.restored = True
        set_state(new_state)

    def plainly(kind: Any, function: Callable[..., Any], *given: Any) -> Any:
        with seen.noted(model):
            return _plainly(kind, function, *given)

    def around(*args: Any, **kwargs: Any) -> Iterator[None]:
        with seen.noted(model):
            yield from plain_checkpoint(*args, **kwargs)

    torch_checkpoint.CheckpointFunction.apply = classmethod(plainly)  # type: ignore[method-assign, assignment]
    setattr(torch_checkpoint, CHECKPOINT_GENERATOR, around)
    torch.autograd.backward, torch.set_rng_state = refuse, restore
    try:
        yield seen
    finally:
        del torch_checkpoint.CheckpointFunction.apply
        setattr(torch_checkpoint, CHECKPOINT_GENERATOR, plain_checkpoint)
        torch.autograd.backward, torch.set_rng_state = backward, set_state


def _plainly(kind: Any, function: Callable[..., Any], *given: Any) -> Any:
    """The body of a reentrant checkpoint; functions that users derive from torch's stay what they are."""
    if kind is not torch_checkpoint.CheckpointFunction:
        return super(torch_checkpoint.CheckpointFunction, kind).apply(function, *given)
    _, *args = given
    trains = torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
    with torch.set_grad_enabled(trains):
        return function(*args)


def nodes_behind(tensors: Iterable[Tensor]) -> list[Any]:
    """Every function of the autograd graph behind some tensors."""
    pending = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = dict.fromkeys(pending)
    while pending:
        for source, _ in pending.pop().next_functions:
            if source is not None and source not in seen:
                seen[source] = None
                pending.append(source)
    return list(seen)


def keep_weights(model: nn.Module, outputs: Iterable[Tensor]) -> None:
    """Let what users' autograd functions run in backward find the weights that forward found, and assign no buffers.

    Torch has put others in their place by then; who traces puts back the model's own.
    """
    custom = [node for node in nodes_behind(outputs) if is_custom_backward(node)]
    if not custom:
        return
    tables = [table for module in model.modules() for table in (module._parameters, module._buffers)]
    held = [(table, dict(table)) for table in tables]

    def install(*_: Any) -> None:
        for table, tensors in held:
            table.update(tensors)  # type: ignore[arg-type]

    buffers = dict(model.named_buffers())

    def look(*_: Any) -> None:
        _refuse_changed([name for name, buffer in model.named_buffers() if buffer is not buffers.get(name)])

    for node in custom:
        node.register_prehook(install)
        node.register_hook(look)


def refuse_late_changes(graph: fx.GraphModule) -> None:
    """Raise CaptureError for buffers that backward changes, when the new value has been returned already."""
    _refuse_changed([port.name for port, node in output_ports(graph) if port.kind == "buffer" and is_backward(node)])


def _refuse_changed(buffers: Sequence[str]) -> None:
    if buffers:
        raise CaptureError(
            f"an autograd.Function changes {quoted(buffers)} in its backward, as where it runs code of forward again: "
            f"{REMEDY}, with which the compiled model changes it once a step"
        )


def is_backward(node: fx.Node | None) -> bool:
    """Whether a value is made in backward."""
    return node is not None and node.op == "call_function" and meta_of(node).phase == "backward"


def refuse_replays(graph: fx.GraphModule) -> None:
    """Raise CaptureError for random numbers in backward, which were to be those of forward again: naming the module."""
    for node in graph.graph.nodes:
        if is_backward(node) and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise CaptureError(
                f"an autograd.Function sets the state of random numbers in its backward, to draw again what forward of "
                f"'{meta_of(node).module or 'the model'}' drew ({node.name}), which a trace does not see: {REMEDY}"
            )
