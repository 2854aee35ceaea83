"""Lowered programs of several kinds, and every way in which their collectives can be made wrong that we thought of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.bound_ops import BoundAxis, finished, from_ranks, to_ranks
from galvatron_fx.ir.graph.chunked_collectives import CHUNKED
from galvatron_fx.ir.graph.folded_gradients import fold_gradient
from galvatron_fx.ir.graph.host_copies import HOST_COPIES, arrived
from galvatron_fx.ir.graph.layout import layout
from galvatron_fx.ir.graph.metadata import has_meta, meta_of, set_meta
from galvatron_fx.ir.graph.op_call import input_nodes
from galvatron_fx.ir.graph.rewrite import copied, eliminate_dead_code, write_call
from galvatron_fx.ir.graph.verifier.moves import read_move
from galvatron_fx.ir.plan.strategy import Strategy
from passes.analysis.blocks import num_blocks
from passes.lowering.apply_plan import with_spread_ends
from passes.lowering.codegen import Codegen
from passes.lowering.lower_stages import LowerStages
from passes.lowering.lower_step import Lower
from tests.helpers import DEVICE, axes, captured, offloading, slow_products

MOVES = (*c.COLLECTIVES, *c.RANK_LOCAL)


class Layer(nn.Module):
    """A decoder layer as in LLaMA: attention and a gated product, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.gate = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        h = self.norms[0](x)
        q, k, v = (proj(h).view(batch, length, self.heads, -1).transpose(1, 2) for proj in self.qkv)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Embedding, layers, head and the loss over tokens that are not ignored."""

    def __init__(self, layers: int = 2, width: int = 16, vocabulary: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, 4) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten(), ignore_index=-100)


class Mlp(nn.Module):
    """Two products with biases and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(torch.relu(self.up(x))), y)


@cache
def graph_of(name: str) -> fx.GraphModule:
    """The captured graph of a model, in float64."""
    if name == "mlp":
        return captured(Mlp().double(), {"x": torch.randn(8, 8).double(), "y": torch.randn(8, 8).double()})
    ids = torch.randint(32, (8, 8))
    return captured(Llama().double(), {"ids": ids, "labels": ids.clone()})


@dataclass(frozen=True)
class Case:
    """A graph as a pass leaves it; ``stage``: of the verifier."""

    name: str
    graph: fx.GraphModule
    stage: str


def _strategies(graph: fx.GraphModule, *rows: tuple[str, ...], **options: Any) -> list[Strategy]:
    """Blocks take the rows in turn."""
    return [Strategy(rows[i % len(rows)], **options) for i in range(num_blocks(graph))]


def lowered(
    name: str,
    model: str,
    sizes: tuple[int, ...],
    *rows: tuple[str, ...],
    offload: bool = False,
    folds: bool = False,
    chunks: bool = False,
    **options: Any,
) -> list[Case]:
    """The joint graph and its two halves, scheduled and bound to the last rank."""
    graph = graph_of(model)
    strategies = _strategies(graph, *rows, **options)
    strategies = offloading(graph, strategies) if offload else strategies
    cluster = slow_products(sizes) if chunks else Cluster(DEVICE, axes(sizes))
    program = Lower(strategies, cluster, folds=folds).run(graph)
    shape = layout(program.joint).shape
    halves = {"forward": program.halves.forward, "backward": program.halves.backward}
    cases = [Case(f"{name}, joint", program.joint, "lowered")]
    cases += [Case(f"{name}, {phase}", half, "scheduled") for phase, half in halves.items()]
    groups = [BoundAxis(f"group {column}", degree, degree - 1) for column, degree in enumerate(shape)]
    for phase, half in halves.items():
        cases.append(Case(f"{name}, bound {phase}", Codegen(groups).run(copied(half)), "bound"))
    return cases


def staged(name: str, sizes: tuple[int, ...], *rows: tuple[str, ...], spread: bool = False) -> list[Case]:
    """The tasks of two stages of the LLaMA-like model, or of its spread ends and what is between, and what is computed
    before its two micro-batches.
    """
    graph = graph_of("llama")
    strategies = _strategies(graph, *rows)
    cuts: tuple[int, ...] = (0, len(strategies) // 2)
    if spread:
        strategies, cuts = with_spread_ends(strategies), (0, 1, len(strategies) - 1)
    program = LowerStages(strategies, cuts, 2, Cluster(DEVICE, axes(sizes))).run(graph)
    cases = [Case(f"{name}, prologue", program.microbatched.prologue, "scheduled")]
    for stage in program.stages:
        for task in ("forward", "backward", "weight_grad", "finish"):
            cases.append(Case(f"{name}, {task} of stage {stage.index}", stage.tasks[task].graph, "scheduled"))
    return cases


def cases() -> Iterator[Case]:
    """The programs that are mutated."""
    yield from lowered("mlp", "mlp", (2, 2), ("data", "tensor"))
    yield from lowered("zero", "mlp", (2,), ("zero",))
    yield from lowered("unlike neighbours", "llama", (2, 2), ("tensor", "sequence"), ("data", "zero"))
    yield from lowered("zero x tensor_sequence", "llama", (2, 2), ("zero", "tensor_sequence"))
    yield from lowered("recomputed", "llama", (2, 2), ("zero", "tensor"), recompute=True)
    yield from lowered("offloaded", "mlp", (2,), ("data",), offload=True)
    yield from lowered("in slices", "llama", (2,), ("zero",), split_gathers=2)
    yield from lowered("folded", "mlp", (2,), ("zero",), folds=True)
    yield from lowered("ring", "llama", (2,), ("context",), ("sequence",))
    yield from lowered("in chunks", "llama", (2, 2), ("data", "tensor_sequence"), ("data", "tensor"), chunks=True)
    yield from staged("stages", (2, 2), ("pipeline", "tensor_sequence"))
    yield from staged("spread ends", (2,), ("pipeline",), spread=True)


# ---- mutations -----------------------------------------------------------------------------------------------------

Mutation = Callable[[fx.Node, int], bool]


def drop(node: fx.Node, columns: int) -> bool:
    """Its users take what it takes."""
    node.replace_all_uses_with(input_nodes(node)[0])
    return True


def other_axis(node: fx.Node, columns: int) -> bool:
    """Over the ranks of another column, or of one that is not there."""
    column = int(node.args[-1])  # type: ignore[arg-type]
    node.update_arg(len(node.args) - 1, (column + 1) % columns if columns > 1 else column + 1)
    return True


def _other_op(op: str) -> Mutation:
    def mutate(node: fx.Node, columns: int) -> bool:
        if len(node.args) < 2 or not isinstance(node.args[1], str) or node.args[1] == op:
            return False
        node.update_arg(1, op)
        return True

    mutate.__name__ = f"reduce_by_{op}"
    return mutate


_DIMS: dict[Any, tuple[int, ...]] = {
    c.all_gather: (1,),
    c.reduce_scatter: (2,),
    c.shard: (1,),
    c.all_to_all: (1, 3),
    **dict.fromkeys((c.gather_mirrored, c.shard_mirrored, c.mirror, c.unmirror), (1,)),
}


def other_dim(node: fx.Node, columns: int) -> bool:
    """Another dim of the tensor."""
    rank = len(meta_of(input_nodes(node)[0]).spec.shape)
    if node.target not in _DIMS or rank < 2:
        return False
    position = _DIMS[node.target][-1]
    node.update_arg(position, (int(node.args[position]) + 1) % rank)  # type: ignore[arg-type]
    return True


def other_outer(node: fx.Node, columns: int) -> bool:
    """Shards of another number of runs."""
    if node.target not in _DIMS:
        return False
    position = _DIMS[node.target][-1] + 1
    node.update_arg(position, int(node.args[position]) + 1)  # type: ignore[arg-type]
    return True


def twice(node: fx.Node, columns: int) -> bool:
    """Once more, behind itself."""
    with node.graph.inserting_after(node):
        again = write_call(node.graph, node.target, (node, *node.args[1:]), node.kwargs)
    set_meta(again, meta_of(node))
    node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
    return True


def _instead(target: Any, *args: Any) -> Mutation:
    """Another collective over the same column, with the facts of the one that is replaced."""

    def mutate(node: fx.Node, columns: int) -> bool:
        if node.target is target:
            return False
        node.target, node.args = target, (node.args[0], *args, node.args[-1])
        return True

    mutate.__name__ = f"{target.__name__}_instead"
    return mutate


def extra_reduction(node: fx.Node, columns: int) -> bool:
    """What it takes is summed up first, over its column."""
    source = input_nodes(node)[0]
    with node.graph.inserting_before(node):
        extra = write_call(node.graph, c.all_reduce, (source, "sum", node.args[-1]))
    set_meta(extra, meta_of(source).having(step=None))
    node.replace_input_with(source, extra)
    return node.target is not c.all_reduce


def other_size(node: fx.Node, columns: int) -> bool:
    """Indices are shifted by one row too many."""
    if node.target is not c.local_index:
        return False
    node.update_arg(1, int(node.args[1]) + 1)  # type: ignore[arg-type]
    return True


def other_step(node: fx.Node, columns: int) -> bool:
    """A ring's step takes the keys for those of the next rank."""
    if node.target not in c.RING_STEPS:
        return False
    position = next(i for i, value in enumerate(node.args) if type(value) is int)
    node.update_arg(position, int(node.args[position]) + 1)  # type: ignore[arg-type]
    return True


def plain_instead(node: fx.Node, columns: int) -> bool:
    """In order of the ranks, where chunks are mirrored."""
    plain = {c.gather_mirrored: c.all_gather, c.shard_mirrored: c.shard, c.mirror: c.unmirror, c.unmirror: c.mirror}
    if node.target not in plain:
        return False
    node.target = plain[node.target]
    return True


def _recorded(mutation: Mutation) -> Mutation:
    """The same by a pass that records what it wrote: shape and placements are those that the new call would make."""

    def mutate(node: fx.Node, columns: int) -> bool:
        if not mutation(node, columns):
            return False
        source = meta_of(input_nodes(node)[0])
        move = read_move(node, columns)
        if isinstance(move, str) or move.want is None:
            return False
        placed = tuple((*p[: move.column], move.want, *p[move.column + 1 :]) for p in source.placements)
        set_meta(node, source.having(placements=placed, step=None, phase=meta_of(node).phase))
        return True

    mutate.__name__ = f"{mutation.__name__}, recorded"
    return mutate


ON_MOVES: tuple[Mutation, ...] = (
    drop,
    other_axis,
    *map(_other_op, ("sum", "max", "avg")),
    other_dim,
    other_outer,
    twice,
    _instead(c.all_reduce, "sum"),
    _instead(c.all_gather, 0, 1),
    _instead(c.reduce_scatter, "sum", 0, 1),
    _instead(c.shard, 0, 1),
    _instead(c.only_first),
    extra_reduction,
    other_size,
    plain_instead,
    *map(_recorded, (other_axis, other_dim, _other_op("max"), _instead(c.all_reduce, "sum"), _instead(c.only_first))),
)


def other_runs(node: fx.Node, columns: int) -> bool:
    """Rows in another number of runs, or chunks."""
    position = next(i for i, value in enumerate(node.args) if type(value) is int)
    node.update_arg(position, int(node.args[position]) + 1)  # type: ignore[arg-type]
    return True


def other_factor(node: fx.Node, columns: int) -> bool:
    """The first product is with another value that lies otherwise."""
    weights = list(node.args[1])  # type: ignore[arg-type]
    placements = meta_of(weights[0]).placements
    others = (n for n in node.graph.nodes if n < node and n.op != "output" and has_meta(n))
    weights[0] = next(n for n in others if meta_of(n).placements not in (placements, ()))
    node.update_arg(1, weights)
    return True


def a_bias(node: fx.Node, columns: int) -> bool:
    """A bias more: a row of what is there."""
    biases = [node.all_input_nodes[0], *node.args[2][1:]]  # type: ignore[index]
    node.update_arg(2, biases)
    return True


ON_RING_STEPS: tuple[Mutation, ...] = (other_axis, other_step)
ON_CHUNKED: tuple[Mutation, ...] = (other_axis, other_runs, other_factor, a_bias)


def other_source(node: fx.Node, columns: int) -> bool:
    """Another value like it is copied."""
    source = node.args[0]
    others = (n for n in node.graph.nodes if n.op == "call_function" and n < source and not meta_of(n).multi_output)
    other = next((n for n in others if meta_of(n).spec == meta_of(source).spec), None)
    if other is not None:
        node.update_arg(0, other)
    return other is not None


def other_phase(node: fx.Node, columns: int) -> bool:
    """It is said to be of the other half of the program."""
    set_meta(node, meta_of(node).having(phase="forward" if meta_of(node).phase == "backward" else "backward"))
    return node.target is not arrived


def unwaited(node: fx.Node, columns: int) -> bool:
    """What takes the copy does not wait for it."""
    for wait in [*node.users]:
        wait.replace_all_uses_with(node, delete_user_cb=lambda user, wait=wait: user is not wait)
    return node.target is not arrived


ON_HOST_COPIES: tuple[Mutation, ...] = (drop, other_source, other_phase, unwaited)


def other_name(node: fx.Node, columns: int) -> bool:
    """Another parameter is updated by the gradient."""
    names = [n.args[1] for n in node.graph.nodes if n.target is fold_gradient and n.args[1] != node.args[1]]
    node.update_arg(1, names[0])
    return True


def other_gradient(node: fx.Node, columns: int) -> bool:
    """Another value, whatever its shape, updates the parameter."""
    node.update_arg(0, next(n for n in node.graph.nodes if n.op == "call_function"))
    return True


ON_FOLDED: tuple[Mutation, ...] = (other_name, other_gradient, other_phase, twice)


def other_group(node: fx.Node, columns: int) -> bool:
    """Among other ranks."""
    places = [i for i, value in enumerate(node.args) if isinstance(value, str) and value.startswith("group")]
    if not places:
        return False
    node.update_arg(places[0], "group 7")
    return True


def other_number(node: fx.Node, columns: int) -> bool:
    """A dim, a number of runs or ranks, or this rank's coordinate is another."""
    places = [i for i, value in enumerate(node.args) if isinstance(value, int)]
    if not places:
        return False
    node.update_arg(places[-1], int(node.args[places[-1]]) + 1)  # type: ignore[arg-type]
    return True


ON_BOUND: tuple[Mutation, ...] = (drop, other_group, other_number, _other_op("max"), twice)


@dataclass(frozen=True)
class Row:
    """One mutation of the first node of a kind in a graph; ``make`` returns the mutated graph."""

    case: Case
    kind: str
    mutation: str
    make: Callable[[], fx.GraphModule | None]

    def __str__(self) -> str:
        return f"{self.mutation} of {self.kind} in {self.case.name}"


def rows(programs: int | None = None) -> Iterator[Row]:
    """Every mutation of every kind of node; ``programs``: in the first so many that have such a node, None for all."""
    times: Counter[tuple[str, str]] = Counter()
    for case in cases():
        seen: set[Any] = set()
        for node in case.graph.graph.nodes:
            kind = _kind(node)
            if case.stage == "bound" and node.target is fold_gradient:
                continue  # as it was before it was bound
            if kind is None or kind in seen:
                continue
            seen.add(kind)
            times[case.stage, kind] += 1
            if programs is not None and times[case.stage, kind] > programs:
                continue
            computes = ON_RING_STEPS if node.target in c.RING_STEPS else ON_MOVES
            computes = ON_CHUNKED if node.target in CHUNKED else computes
            computes = ON_HOST_COPIES if node.target in HOST_COPIES else computes
            computes = ON_FOLDED if node.target is fold_gradient else computes
            for mutation in ON_BOUND if case.stage == "bound" else computes:
                yield Row(case, kind, mutation.__name__, lambda c=case, n=node.name, m=mutation: _mutated(c, n, m))


def _kind(node: fx.Node) -> str | None:
    """What a row speaks of: a collective, in a local program or not; in bound graphs whatever stands for one."""
    if node.target in MOVES:
        part = "" if meta_of(node).step is None else f" of {meta_of(node).step.program.split()[0]}"  # type: ignore[union-attr]
        part = " of a slice" if meta_of(node).stays else part
        return f"{node.target.__name__}{part}"  # type: ignore[union-attr]
    if node.target in (*c.RING_STEPS, *CHUNKED, arrived, fold_gradient):
        return str(node.target.__name__)  # type: ignore[union-attr]
    if node.target in HOST_COPIES:
        return str(node.target)
    is_c10d = getattr(node.target, "namespace", "") == "_c10d_functional"
    if is_c10d or node.target in (finished, from_ranks, to_ranks, c.take_run):
        return str(getattr(node.target, "__name__", node.target))
    return None


def _mutated(case: Case, name: str, mutation: Mutation) -> fx.GraphModule | None:
    graph = copied(case.graph)
    node = next(node for node in graph.graph.nodes if node.name == name)
    if not mutation(node, len(layout(case.graph).merged_axes)):
        return None
    eliminate_dead_code(graph)
    return graph
