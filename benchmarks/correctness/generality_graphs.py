"""Networks of PyTorch Geometric's layers on one full graph, with lone vertices and a hub."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn

from tests.models import zoo

WIDTH, VERTICES, EDGES = 8, 24, 80

Layer = Callable[[], nn.Module]


class Network(nn.Module):
    """Two layers that may take weights or features of edges, and the loss of the vertices with a label."""

    def __init__(self, layer: Layer, edges: str = "") -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layer() for _ in range(2)), nn.Linear(WIDTH, 4)
        self.edges = edges

    def forward(self, x: Tensor, edge_index: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        given = {"": (), "weights": (weights[:, 0],), "features": (weights,)}[self.edges]
        for layer in self.layers:
            x = torch.tanh(layer(x, edge_index, *given))
        return F.cross_entropy(self.head(x), labels)


def _inputs() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    pairs = torch.randint(2 * VERTICES // 3, (2, EDGES), generator=random)
    pairs[1, : EDGES // 3] = 1
    labels = torch.randint(4, (VERTICES,), generator=random)
    labels[::5] = -100
    x = torch.randn(VERTICES, WIDTH, generator=random, dtype=torch.float64)
    weights = torch.rand(EDGES, 2, generator=random, dtype=torch.float64)
    return {"x": x, "edge_index": pairs, "labels": labels, "weights": weights}


def _mlp(inputs: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def _wide(name: str, *args: Any, **kwargs: Any) -> Layer:
    return lambda: getattr(pyg, name)(WIDTH, WIDTH, *args, **kwargs)


def _layers() -> dict[str, tuple[Layer, str]]:
    loops = {"add_self_loops": False}
    plain = ("SAGEConv", "GraphConv", "LEConv", "ClusterGCNConv", "GENConv", "FiLMConv", "ResGatedGraphConv", "MFConv")
    degrees = torch.tensor([8, 4, 2, 1])
    return {
        **{name: (_wide(name), "") for name in (*plain, "GeneralConv", "HypergraphConv")},
        "GCNConv": (_wide("GCNConv", **loops), ""),
        "GCNConv, weights": (_wide("GCNConv", **loops), "weights"),
        "GCNConv, its own loops": (_wide("GCNConv"), ""),
        "GATConv": (_wide("GATConv", **loops), ""),
        "GATConv, heads": (lambda: pyg.GATConv(WIDTH, 4, heads=2, **loops), ""),
        "GATConv, features": (_wide("GATConv", edge_dim=2, **loops), "features"),
        "GATConv, its own loops": (_wide("GATConv"), ""),
        "GATv2Conv": (lambda: pyg.GATv2Conv(WIDTH, 4, heads=2, **loops), ""),
        "TransformerConv": (lambda: pyg.TransformerConv(WIDTH, 4, heads=2, edge_dim=2), "features"),
        "GINConv": (lambda: pyg.GINConv(_mlp(), train_eps=True), ""),
        "GINEConv": (lambda: pyg.GINEConv(_mlp(), edge_dim=2), "features"),
        "EdgeConv": (lambda: pyg.EdgeConv(_mlp(2 * WIDTH)), ""),
        "NNConv": (lambda: pyg.NNConv(WIDTH, WIDTH, nn.Linear(2, WIDTH * WIDTH)), "features"),
        "CGConv": (lambda: pyg.CGConv(WIDTH, 2), "features"),
        "GMMConv": (lambda: pyg.GMMConv(WIDTH, WIDTH, 2, 3), "features"),
        "SAGEConv, max": (_wide("SAGEConv", aggr="max"), ""),
        "SAGEConv, several": (_wide("SAGEConv", aggr=["mean", "max", "std"]), ""),
        "SAGEConv, softmax": (_wide("SAGEConv", aggr="softmax"), ""),
        "SAGEConv, median": (_wide("SAGEConv", aggr="median"), ""),
        "PNAConv": (_wide("PNAConv", ["mean", "max", "std"], ["identity", "amplification"], degrees), ""),
        "TAGConv": (_wide("TAGConv", K=2), ""),
        "SGConv": (_wide("SGConv", K=2, **loops), ""),
        "SSGConv": (_wide("SSGConv", 0.1, K=2, **loops), ""),
        "ARMAConv": (_wide("ARMAConv", num_stacks=2), ""),
        "ChebConv": (_wide("ChebConv", K=2), ""),
        "APPNP": (lambda: pyg.APPNP(2, 0.1, **loops), ""),
        "GatedGraphConv": (lambda: pyg.GatedGraphConv(WIDTH, 2), ""),
        "AGNNConv": (lambda: pyg.AGNNConv(**loops), ""),
        "PDNConv": (_wide("PDNConv", 2, 4, **loops), "features"),
        "SimpleConv": (lambda: pyg.SimpleConv("mean"), ""),
        "AntiSymmetricConv": (lambda: pyg.AntiSymmetricConv(WIDTH), ""),
        "EGConv": (_wide("EGConv", num_heads=2, num_bases=2, **loops), ""),
        "SuperGATConv": (_wide("SuperGATConv", **loops), ""),
        "GPSConv": (lambda: pyg.GPSConv(WIDTH, pyg.GINConv(_mlp()), heads=2), ""),
        "models.GIN": (lambda: pyg.models.GIN(WIDTH, WIDTH, 2), ""),
        "models.GraphSAGE": (lambda: pyg.models.GraphSAGE(WIDTH, WIDTH, 2, jk="cat"), ""),
        "models.GAT": (lambda: pyg.models.GAT(WIDTH, WIDTH, 2, **loops), ""),
    }


def _made(layer: Layer, edges: str) -> zoo.Case:
    return zoo.build(lambda: Network(layer, edges)), _inputs()


def cases() -> dict[str, Callable[[], zoo.Case]]:
    """Models by name."""
    return {f"pyg {name}": partial(_made, *layer) for name, layer in _layers().items()}
