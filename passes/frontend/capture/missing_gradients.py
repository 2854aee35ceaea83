"""See that no weight which the losses depend on goes without its gradient."""

from __future__ import annotations

import torch
from torch import fx

from galvatron_fx.ir.errors import CaptureError
from galvatron_fx.ir.graph.metadata import meta_of, output_ports, ports
from galvatron_fx.ir.graph.op_call import input_nodes
from galvatron_fx.ir.torch_compat.tracing import compiling, new_fake_mode
from passes.frontend.capture.fake_model import FlatModel, fake_weights
from passes.frontend.capture.module_state import quoted
from passes.frontend.capture.reruns import REMEDY


def check_gradients(graph: fx.GraphModule, flat: FlatModel) -> None:
    """Raise CaptureError for weights that the losses depend on, that have no gradient in ``graph``, and that would get
    one without compiling, as a run on fake tensors shows.
    """
    suspects = _without_gradient(graph)
    if not suspects:
        return
    mode = new_fake_mode()
    with fake_weights(flat.module, mode, flat.policy), compiling(), mode, torch.enable_grad():
        outputs = flat(*flat.fake_arguments(flat.inputs.shapes, mode))
        torch.autograd.backward([out.sum() for out in outputs if out.requires_grad])
        trained = {name for name, p in flat.module.named_parameters(remove_duplicate=False) if p.grad is not None}
    missing = [name for name in suspects if name in trained]
    if missing:
        raise CaptureError(
            f"the gradients of {quoted(missing)} are missing in the trace: an autograd.Function makes them in a way "
            f"that tracing does not see. {REMEDY[0].upper()}{REMEDY[1:]}"
        )


def _without_gradient(graph: fx.GraphModule) -> list[str]:
    """Trained parameters that the graph's outputs are made of, and that have no gradient."""
    with_gradient = {port.name for port, node in output_ports(graph) if port.kind == "grad" and node is not None}
    silent = {
        node: p.name
        for p, node in ports(graph)
        if p.kind == "param" and p.requires_grad and p.name not in with_gradient
    }
    if not silent:
        return []
    pending = [node for port, node in output_ports(graph) if port.kind == "output" and node is not None]
    seen = set(pending)
    while pending:
        for source in input_nodes(pending.pop()):
            if source not in seen and meta_of(source).phase == "forward":
                seen.add(source)
                pending.append(source)
    return [name for node, name in silent.items() if node in seen]
