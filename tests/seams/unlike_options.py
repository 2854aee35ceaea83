"""Ranks that come with unlike flags, options, passes and meshes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import galvatron_fx
from galvatron_fx.errors import InputError, PlanError
from galvatron_fx.ir.graph.metadata import meta_of, set_meta
from tests.seams.unlike_model import CLASSES, WIDTH, batch, model_of, refused, trains_as, uniform

aten = torch.ops.aten


class Linears(nn.Module):
    """For the meta device: all its modules have an initialisation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(WIDTH, 12, dtype=torch.float64), nn.Linear(12, CLASSES, dtype=torch.float64)

    def forward(self, x: Tensor, labels: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        return {"loss": nn.functional.cross_entropy(self.head(self.up(x).relu()) * scale, labels)}


class Constant(Linears):
    """A tensor that is no buffer and differs by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(CLASSES, dtype=torch.float64) + dist.get_rank()

    def forward(self, x: Tensor, labels: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        return {"loss": nn.functional.cross_entropy(self.head(self.up(x).relu()) * scale + self.table, labels)}


def unlike_options(mesh: DeviceMesh) -> None:
    """What differs is named, on all ranks, before anything is traced."""
    odd = dist.get_rank() == 1
    with torch.device("meta"):
        meta = Linears()
    frozen, mode = model_of(), model_of()
    frozen.head.bias.requires_grad_(not odd)
    mode.layers[1].train(not odd)
    wider = model_of()
    wider.register_buffer("more", torch.zeros(2 + odd))
    cases: list[tuple[str, nn.Module, dict[str, Any]]] = [
        (r"another seed than rank 0 \(1, and 0\)", meta, {"seed": int(odd)}),
        (r"another requires_grad than rank 0 \(head\.bias: False, and head\.bias: True\)", frozen, {}),
        (r"another mode than rank 0 \(layers\.1: eval, and layers\.1: train\)", mode, {}),
        (r"another parameter or buffer than rank 0 \(more \(3,\)", wider, {}),
        (
            r"another backend than rank 0 \(inductor, and eager\)",
            model_of(),
            {"backend": "inductor" if odd else "eager"},
        ),
        (r"another search_seconds than rank 0 \(5, and None\)", model_of(), {"search_seconds": 5 if odd else None}),
        (r"another optimizer than rank 0 \('adamw', and 'sgd'\)", model_of(), {"optimizer": "adamw" if odd else "sgd"}),
        (r"another memory_budget than rank 0", model_of(), {"memory_budget": "1GB" if odd else "2GB"}),
        (r"another constant tensor than rank 0 \(.*\(5,\)", Constant(), {"plan": uniform("data", mesh)}),
    ]
    for message, model, options in cases:
        with refused(PlanError, message):
            galvatron_fx.compile(model, mesh, batch(), **options)


def part_of_the_ranks(mesh: DeviceMesh) -> None:
    half = init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("dp", "tp"))["dp"]
    for use in (
        lambda: galvatron_fx.compile(model_of(), half, batch()),
        lambda: galvatron_fx.compile(model_of(), half),
        lambda: galvatron_fx.measure_cluster(half, seconds=1),
    ):
        with refused(InputError, r"the mesh has the ranks \[\d, \d\], 2 of 4: pass the mesh over all ranks"):
            use()


@dataclass(frozen=True)
class SpellOutGradientOfRelu:
    """``threshold_backward(dy, y, 0)`` -> ``where(y <= 0, 0, dy)``, in a layer's own block."""

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it."""
        for node in graph.graph.find_nodes(op="call_function", target=aten.threshold_backward.default):
            gradient, kept, _ = node.args
            like = meta_of(node)
            with graph.graph.inserting_before(node):
                sign = graph.graph.call_function(aten.le.Scalar, (kept, 0))
                set_meta(sign, like.having(specs=(replace(like.spec, dtype=torch.bool),)))
                zero = graph.graph.call_function(aten.zeros_like.default, (gradient,))
                set_meta(zero, like)
            node.target, node.args = aten.where.self, (sign, zero, gradient)
        return graph


def passes_of_the_users(mesh: DeviceMesh) -> None:
    """An inserted pass runs on every rank, exactly; one on some ranks alone is refused."""
    passes = {"Decompose": SpellOutGradientOfRelu()}
    for role in ("zero", "tensor"):
        compiled = galvatron_fx.compile(model_of(), mesh, batch(), plan=uniform(role, mesh), passes=passes)
        assert "SpellOutGradientOfRelu" in compiled.pass_table()
        assert "aten.threshold_backward" not in compiled.print_readable(print_output=False)
        assert " flops, " in compiled.print_readable(print_output=False, costs=True)
        trains_as(compiled, model_of())
    with refused(PlanError, r"another passes than rank 0 .*SpellOutGradientOfRelu\(\) behind Decompose"):
        mine = passes if dist.get_rank() == 0 else None
        galvatron_fx.compile(model_of(), mesh, batch(), plan=uniform("zero", mesh), passes=mine)
