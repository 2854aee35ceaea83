"""What a whole step costs, as formulas that a person can read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import sympy
from torch import fx

from cost_models.formula_text import formula_text
from cost_models.node_cost import cost_at, shown_cost
from cost_models.operator_time import dtype_name
from cost_models.ops import is_free, is_matmul
from galvatron_fx.ir.cluster.cluster import Cluster, Device
from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.metadata import FREE, OpCost, meta_of, ports
from galvatron_fx.ir.graph.op_call import is_getitem, op_call
from galvatron_fx.ir.graph.precision import cast_parameter
from galvatron_fx.ir.graph.symbols import BATCH, SEQUENCE, Sizes
from galvatron_fx.ir.plan.throughput import Throughput

__all__ = ["GraphCost", "graph_cost", "model_seconds", "throughput"]

_PARAMETERS = sympy.Symbol("P", positive=True, integer=True)
# Of 2 flops a parameter and token in forward and 4 in backward (Kaplan et al. 2020, section 2.1), what may be missing
# or come on top for the sum still to be told in parameters: a first layer whose input needs no gradient.
_FLOPS_PER_PARAMETER = 6
_MOST_REST = 1


@dataclass(frozen=True)
class GraphCost:
    """Flops and bytes of one step, as expressions in batch ``b`` and sequence ``s``, or numbers.

    ``products``: the flops of matrix products, attention and convolutions among ``flops``; ``parameters``: how many
    the model has, ``multiplied`` of them in matrix products. Communication and the optimizer's update are no part.
    """

    flops: Any
    products: Any
    read_bytes: Any
    written_bytes: Any
    parameters: int
    multiplied: int

    def at(self, batch: int, sequence: int = 0) -> GraphCost:
        """Return the numbers at a size. Raises InputError where the formula needs a sequence and there is none."""
        sizes = Sizes(batch, sequence)
        every, products = OpCost(self.flops, self.read_bytes, self.written_bytes), OpCost(self.products, 0, 0)
        numbers = cost_at(every, sizes)
        return replace(
            self,
            flops=numbers.flops,
            products=cost_at(products, sizes).flops,
            read_bytes=numbers.read_bytes,
            written_bytes=numbers.written_bytes,
        )

    def __str__(self) -> str:
        """Return a table of plain text; ``P`` stands for the parameters in matrix products."""
        rows = {
            "flops": f"{formula_text(self._in_parameters())} in matrix products and attention",
            "": f"{formula_text(self.flops - self.products)} elsewhere",
            "bytes read": formula_text(self.read_bytes),
            "bytes written": formula_text(self.written_bytes),
            "parameters": f"{self.parameters:,}, of which P = {self.multiplied:,} in matrix products",
        }
        return "\n".join(f"{name:<13} {text}" for name, text in rows.items())

    def _in_parameters(self) -> Any:
        """The flops of products with ``6*P*b*s`` taken out, where the term in ``b*s`` is about as large."""
        if isinstance(self.products, int):
            return self.products
        tokens = sympy.expand(self.products).coeff(BATCH, 1).coeff(SEQUENCE, 1)
        rest = tokens - _FLOPS_PER_PARAMETER * self.multiplied
        if not self.multiplied or abs(rest) > _MOST_REST * self.multiplied:
            return self.products
        term = _FLOPS_PER_PARAMETER * _PARAMETERS + rest
        return sympy.expand(self.products - tokens * BATCH * SEQUENCE) + sympy.expand(term * BATCH * SEQUENCE)


def graph_cost(graph: fx.GraphModule) -> GraphCost:
    """Return the cost of all operators of a graph of :func:`galvatron_fx.capture`: of one step without recomputation.

    Of a lowered graph, it is what one rank does, in numbers.
    """
    counts = Counter((shown_cost(node), is_matmul(node.target)) for node in _operators(graph))  # type: ignore[arg-type]
    times = [(cost, is_product, number) for (cost, is_product), number in counts.items() if cost != FREE]
    named = {node: meta_of(node).spec.numel for port, node in ports(graph) if port.kind == "param"}
    return GraphCost(
        _sum(number * cost.flops for cost, _, number in times),
        _sum(number * cost.flops for cost, is_product, number in times if is_product),
        _sum(number * cost.read_bytes for cost, _, number in times),
        _sum(number * cost.written_bytes for cost, _, number in times),
        sum(named.values()),
        sum(size for node, size in named.items() if _is_multiplied(node)),
    )


def model_seconds(graph: fx.GraphModule, device: Device) -> float:
    """Return the seconds that one device would take for the products of a captured step, all at its peak rates.

    These are the model's flops: matrix products, attention and convolutions in forward and backward, each in the dtype
    that it computes in, as :func:`graph_cost` counts them (of causal attention half, with the scores that its backward
    computes again).
    """
    counts: Counter[tuple[OpCost, str]] = Counter()
    for node in _operators(graph):
        if is_matmul(node.target):  # type: ignore[arg-type]
            counts[shown_cost(node), dtype_name(op_call(node))] += 1
    sizes = graph.meta.get("symbols")
    return sum(
        float(cost_at(cost, sizes).flops) * number / device.flops_per_s(dtype)
        for (cost, dtype), number in counts.items()
    )


def throughput(graph: fx.GraphModule, cluster: Cluster, alone_s: float | None = None) -> Throughput | None:
    """Return what a step of a captured graph trains on a cluster; None where its batch is not known.

    ``alone_s``: :func:`model_seconds` of the cluster's device, where they are known.
    """
    sizes = graph.meta.get("symbols")
    if sizes is None or sizes.batch < 1:
        return None
    if alone_s is None:
        alone_s = model_seconds(graph, cluster.device)
    peak_s = alone_s / cluster.num_devices
    return Throughput(sizes.batch, sizes.batch * (sizes.sequence or 0), peak_s)


def _operators(graph: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes that cost a device something."""
    apart = (*c.COLLECTIVES, *c.RANK_LOCAL)
    for node in graph.graph.nodes:
        if node.op == "call_function" and not is_getitem(node) and node.target not in apart:
            yield node


def _is_multiplied(parameter: fx.Node) -> bool:
    """Whether a parameter, or a view or cast of it, is a matrix of a product in forward."""
    pending = list(parameter.users)
    while pending:
        user = pending.pop()
        if user.op != "call_function" or meta_of(user).phase != "forward":
            continue
        if is_matmul(user.target):  # type: ignore[arg-type]
            return len(meta_of(parameter).spec.shape) > 1
        if is_free(user.target) or user.target is cast_parameter:  # type: ignore[arg-type]
            pending += list(user.users)
    return False


def _sum(amounts: Iterator[Any]) -> Any:
    """The sum, as an int where all are."""
    listed = list(amounts)
    if all(isinstance(amount, int) for amount in listed):
        return sum(listed)
    return sympy.Add(*listed)
