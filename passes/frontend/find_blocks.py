"""Find layer blocks by graph structure: repeats in the forward pass, cut where the least crosses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np
from torch import fx

from galvatron_fx.ir.graph.metadata import meta_of, ports, set_meta
from galvatron_fx.ir.graph.op_call import input_nodes, is_getitem
from galvatron_fx.ir.kernels.experts import route
from passes.frontend.expert_blocks import expert_spans, with_expert_cuts

_LEAST_PERIOD = 6  # operators: shorter repeats are parts of a layer
_LEAST_SHARE = 0.08  # of the forward operators: smaller repeats are parts of a layer (its equal projections)
_LEAST_PLAIN_PERIOD = 2  # of models without such a repeat: a product and an activation
_LEAST_PLAIN_SHARE = 0.5  # most of the model is in its plain layers
_LEAST_PLAIN_LAYERS = 3  # two may be alike by chance
_LONGEST_LAYER = 2000  # operators: a longer one is a loop over time, whose steps are blocks where they repeat
_LEAST_LOOP_SHARE = 0.5  # of such a layer's operators are in its loop
_LEAST_STEPS = 8
_IRREGULAR_LENGTH = 40  # operators of a block where no layer says how long one is
_LONG_LAYER = 300  # operators: a longer one, such as a module of many convolutions, is several blocks
_LONGEST_PIECE = 200  # operators, where it can be cut so: the time to find rules grows faster than a block
_WIDER = 4.0  # times the narrowest place behind the last cut: a place for no cut, where a narrower one lies ahead
_AHEAD = 10  # times a piece: how far


@dataclass(frozen=True)
class FindBlocks:
    """Give every compute node the index of its layer block.

    A stack of equal layers shows as a repeat in the sequence of forward operators (names play no part), of layers of a
    few operators only where these are most of the model. Each repeat is cut where the fewest bytes of activations
    cross. The steps of a loop over time in a very long layer are blocks of their own, and so are experts, from the
    residual in front of the router on. What lies before, between and after the stacks becomes blocks too, split where
    the least crosses, as long layers are. Backward nodes join the block of the forward node they differentiate.

    Rewrite: facts with ``block=-1`` -> facts with ``block=0 .. n-1`` in forward order; the graph is unchanged.
    """

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Annotate ``graph`` in place and return it."""
        forward = [n for n in graph.graph.nodes if n.op == "call_function" and meta_of(n).phase == "forward"]
        inputs = {node for port, node in ports(graph) if port.kind == "input"}
        crossing = _crossing_bytes(graph, forward)
        spans = expert_spans(forward, crossing)
        for first, end in spans:
            crossing[first + 1 : end] = np.inf
        cuts = _cuts(forward, inputs, crossing)
        if spans:
            cuts = with_expert_cuts(cuts, spans, len(forward), lambda start, end: _holds_weight(forward, start, end))
        blocks = np.searchsorted(np.array(cuts), np.arange(len(forward)), side="right") if cuts else [0] * len(forward)
        for node, block in zip(forward, blocks, strict=True):
            source = node.args[0] if is_getitem(node) else node
            block_number = meta_of(source).block if is_getitem(node) else int(block)
            set_meta(node, meta_of(node).having(block=block_number))
        _place_backward(graph)
        return graph


# ---- where to cut --------------------------------------------------------------------------------------------------


def _crossing_bytes(graph: fx.GraphModule, forward: list[fx.Node]) -> np.ndarray:
    """``crossing[i]``: bytes of activations made before operator ``i`` and used by it or a later one.

    Activations depend on an input and on a parameter; masks, position tables and weights cross everywhere for free.
    """
    position = {node: i for i, node in enumerate(forward)}
    from_param = _reachable(graph, "param")
    from_input = _reachable(graph, "input")
    delta = np.zeros(len(forward) + 1)
    for node, i in position.items():
        if node not in from_param or node not in from_input or meta_of(node).multi_output:
            continue
        uses = [position[user] for user in node.users if user in position]
        if uses:
            size = meta_of(node).spec.size_bytes
            delta[i + 1] += size
            delta[max(uses) + 1] -= size
    crossing: np.ndarray = np.cumsum(delta)[: len(forward)]
    crossing[[is_getitem(node) for node in forward]] = np.inf  # an operator and its outputs stay together
    for node, i in position.items():
        if node.target is route:  # tokens that are on their way to experts cannot be moved otherwise
            order = next(user for user in node.users if is_getitem(user) and user.args[1] == 0)
            crossing[i + 1 : max((position[user] for user in order.users if user in position), default=i) + 1] = np.inf
    return crossing


def _reachable(graph: fx.GraphModule, kind: str) -> set[fx.Node]:
    """Forward nodes that depend on a placeholder of ``kind``."""
    flow = nx.DiGraph()
    for node in graph.graph.nodes:
        if node.op == "call_function" and meta_of(node).phase == "forward":
            flow.add_edges_from((source, node) for source in input_nodes(node))
    sources = [node for port, node in ports(graph) if port.kind == kind and node in flow]
    reachable: set[fx.Node] = set()
    for distance_layer in nx.bfs_layers(flow, sources) if sources else ():
        reachable.update(distance_layer)
    return reachable


def _cuts(forward: list[fx.Node], inputs: set[fx.Node], crossing: np.ndarray) -> list[int]:
    """Positions before which a new block begins."""
    labels = _labels(forward, set())
    cuts: list[int] = []
    stacks = [stack for stack in _stacks(labels, 0, len(labels), _LEAST_PERIOD) if _is_layers(forward, *stack)]
    typical = min(max((period for _, _, period in stacks), default=_IRREGULAR_LENGTH), _LONGEST_PIECE // 2)
    is_plain = not stacks
    if is_plain:
        plain = _stacks(_labels(forward, inputs), 0, len(labels), _LEAST_PLAIN_PERIOD)
        stacks = [stack for stack in plain if _is_plain_stack(forward, *stack)]
    edge = 0
    for start, end, period in stacks:
        first, count = _align(crossing, start, end, period, np.max if is_plain else np.mean)
        cuts += _irregular_cuts(forward, crossing, edge, first, typical)
        inner = _inner_cuts(forward, labels, crossing, first, period)
        cuts += [first + k * period + offset for k in range(count) for offset in (0, *inner)]
        cuts.append(first + count * period)
        edge = first + count * period
    cuts += _irregular_cuts(forward, crossing, edge, len(forward), typical)
    return sorted({cut for cut in cuts if 0 < cut < len(forward)})


def _inner_cuts(forward: list[fx.Node], labels: np.ndarray, crossing: np.ndarray, first: int, period: int) -> list[int]:
    """Where blocks begin inside the layer at ``first``, counted from there: the steps of a loop, or pieces."""
    steps = _step_cuts(labels, crossing, first, period)
    if steps or period <= _LONG_LAYER:
        return steps
    return [cut - first for cut in _irregular_cuts(forward, crossing, first, first + period, _LONGEST_PIECE // 2)]


def _step_cuts(labels: np.ndarray, crossing: np.ndarray, first: int, period: int) -> list[int]:
    """Where the steps of a loop begin and end in the layer at ``first``, counted from there; none in short layers."""
    repeat = _longest_repeat(labels[first : first + period], _LEAST_PERIOD) if period > _LONGEST_LAYER else None
    if repeat is None:
        return []
    low, high, step = repeat
    if high - low < max(_LEAST_LOOP_SHARE * period, _LEAST_STEPS * step):
        return []
    begin, count = _align(crossing, first + low, first + high, step, np.mean)
    return [begin - first + k * step for k in range(count + 1)]


def _labels(forward: list[fx.Node], computed: set[fx.Node]) -> np.ndarray:
    """A number per operator: equal for equal kinds of calls, whatever the sizes; ``computed``: placeholders that count
    as what an operator made, as the first of few layers takes an input.
    """
    index: dict[Any, int] = {}
    labels = []
    for node in forward:
        key = (
            str(node.target),
            tuple(len(s.shape) if s is not None else -1 for s in meta_of(node).specs),
            tuple("call_function" if n in computed else n.op for n in input_nodes(node)),
        )
        labels.append(index.setdefault(key, len(index)))
    return np.array(labels, dtype=np.int64)


def _stacks(labels: np.ndarray, start: int, end: int, least_period: int) -> list[tuple[int, int, int]]:
    """Repeats in ``labels[start:end]`` as (start, end, period), the longest first found, then those beside it."""
    best = _longest_repeat(labels[start:end], least_period)
    if best is None:
        return []
    low, high, period = best[0] + start, best[1] + start, best[2]
    before, after = _stacks(labels, start, low, least_period), _stacks(labels, high, end, least_period)
    return [*before, (low, high, period), *after]


def _longest_repeat(labels: np.ndarray, least_period: int) -> tuple[int, int, int] | None:
    """The repeat that covers most; of those that cover nearly as much, the one with the shortest period."""
    repeats: list[tuple[int, int, int]] = []
    for period in range(least_period, len(labels) // 2 + 1):
        same = labels[:-period] == labels[period:]
        if not same.any():
            continue
        edges = np.flatnonzero(np.diff(np.concatenate(([0], same.view(np.int8), [0]))))
        starts, ends = edges[::2], edges[1::2]
        longest = int(np.argmax(ends - starts))
        if ends[longest] - starts[longest] >= period:
            repeats.append((int(starts[longest]), int(ends[longest]) + period, period))
    if not repeats:
        return None
    most = max(high - low for low, high, _ in repeats)
    return next((low, high, period) for low, high, period in repeats if high - low >= 0.8 * most)


def _is_layers(forward: list[fx.Node], start: int, end: int, period: int) -> bool:
    """Whether a repeat is a stack of layers: each holds a weight, and the stack is a fair part of the model."""
    return _holds_weight(forward, start, start + period) and end - start >= max(
        _LEAST_SHARE * len(forward), 4 * _LEAST_PERIOD
    )


def _is_plain_stack(forward: list[fx.Node], start: int, end: int, period: int) -> bool:
    """Whether a repeat of few operators is a stack of layers: each holds a weight, and they are most of the model."""
    length = end - start
    is_most = length >= max(_LEAST_PLAIN_SHARE * len(forward), _LEAST_PLAIN_LAYERS * period)
    return is_most and _holds_weight(forward, start, start + period)


def _holds_weight(forward: list[fx.Node], start: int, end: int) -> bool:
    sources = (source for place in range(start, end) for source in input_nodes(forward[place]))
    return any(source.op == "placeholder" and len(meta_of(source).spec.shape) >= 2 for source in sources)


def _align(
    crossing: np.ndarray, start: int, end: int, period: int, of_all: Callable[[np.ndarray], Any]
) -> tuple[int, int]:
    """Where the first whole block of a stack begins and how many follow: cut where the fewest bytes cross, ``of_all``
    cuts taken together.

    On average for long stacks. The most for plain ones, where the first cut, or the last, would tip the scales.
    """
    best: tuple[float, int, int, int] | None = None
    for offset in range(min(period, end - start)):
        count = (end - start - offset) // period
        if count < 1:
            continue
        positions = start + offset + period * np.arange(count + 1)
        inside = positions[positions < len(crossing)]
        inside = inside[inside > 0]
        key = (float(of_all(crossing[inside])) if len(inside) else 0.0, -count, start + offset, count)
        best = key if best is None or key < best else best
    assert best is not None
    return best[2], best[3]


def _irregular_cuts(forward: list[fx.Node], crossing: np.ndarray, start: int, end: int, least_length: int) -> list[int]:
    """Cut a part that does not repeat where a narrow cut exists, into pieces about as long as a layer."""
    cuts: list[int] = []
    edge = start
    while end - edge >= 2 * least_length:
        ahead = crossing[edge + least_length : min(edge + _AHEAD * least_length, end - least_length + 1)]
        skipped = _skipped(crossing[edge : edge + least_length], ahead, least_length)
        window = ahead[skipped : skipped + least_length]
        if not np.isfinite(window).any():
            break
        edge += least_length + skipped + int(np.argmin(window))
        cuts.append(edge)
    return cuts


def _skipped(before: np.ndarray, ahead: np.ndarray, length: int) -> int:
    """How many places ``ahead`` are much wider than the narrowest one ``before``, none if all are or fewer than
    ``length``: what crosses inside of chunks of linear attention would be put together again at each cut.
    """
    least = before[before > 0].min(initial=np.inf)
    first = int(np.argmax(ahead <= _WIDER * least)) if np.isfinite(least) else 0
    return first if first >= length else 0


def _place_backward(graph: fx.GraphModule) -> None:
    """Backward nodes belong to the block of the forward node with the same autograd sequence number.

    That is the first one: what needs no gradient, such as views of frozen parameters, has the number of what is before.
    """
    block_of: dict[Any, int] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and meta_of(node).phase == "forward":
            block_of.setdefault(node.meta.get("seq_nr"), meta_of(node).block)
    unknown: dict[fx.Node, None] = {}
    for node in graph.graph.nodes:
        if node.op != "call_function" or meta_of(node).phase != "backward":
            continue
        number = node.meta.get("seq_nr")
        sources = [n for n in input_nodes(node) if n.op == "call_function" and n not in unknown]
        accumulates = str(node.target).startswith("aten.add.Tensor") and not meta_of(node).module
        if is_getitem(node) and node.args[0] not in unknown:
            block = meta_of(node.args[0]).block
        elif number in block_of and not accumulates:
            block = block_of[number]
        elif not sources:
            unknown[node] = None
            continue
        else:
            backward = [n for n in sources if meta_of(n).phase == "backward"]
            block = min(meta_of(n).block for n in backward or sources)
        set_meta(node, meta_of(node).having(block=block))
    for node in reversed(unknown):  # made of nothing, as zeros: where they are used first
        users = [meta_of(user).block for user in node.users if user.op == "call_function"]
        set_meta(node, meta_of(node).having(block=max(users, default=0)))
