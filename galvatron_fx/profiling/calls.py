"""Single calls of a model, timed at their own shapes: where a model is known, no curve is needed for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from cost_models.ops import is_free
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.chunked_collectives import CHUNKED
from galvatron_fx.ir.graph.metadata import TensorSpec, has_meta
from galvatron_fx.ir.graph.op_call import OpCall, call_key, is_getitem, op_call
from galvatron_fx.ir.kernels.ring_attention import RING_KERNELS
from galvatron_fx.ir.kernels.select import Kernels
from galvatron_fx.profiling.kernel_choice import fastest_kernels
from galvatron_fx.profiling.kernels import Kernel
from galvatron_fx.profiling.operators import timed
from galvatron_fx.profiling.ranks import Ranks
from galvatron_fx.profiling.tensors import Pool
from galvatron_fx.profiling.timing import slowdown_among_all

__all__ = ["measure_calls"]

# Operators whose time is so little that a curve will do: half of a launch's usual work.
_LEAST_BYTES = 2**14


def measure_calls(
    cluster: Cluster,
    mesh: DeviceMesh,
    graphs: Iterable[fx.GraphModule],
    *,
    seconds: float = 20.0,
    progress: Callable[[float], None] | None = None,
) -> Cluster:
    """Return ``cluster`` with the seconds of every distinct operator call of ``graphs`` at its shapes and dtypes.

    ``graphs``: captured or, better, lowered ones (of a plan that is considered; the calls are those of one rank); every
    rank of ``mesh`` gives the same and times them at once. About ``seconds``, one round of all calls at least;
    ``progress`` is told the share that is over. Calls that cannot be made from shapes alone keep the price of their
    curve, and so do views and very small ones.
    """
    ranks, pool, kernels = Ranks(mesh), Pool(mesh.device_type), fastest_kernels(mesh)
    asked = _distinct(graphs)
    with torch.no_grad():
        by_key = {key: kernel for key, call in asked.items() if (kernel := _runnable(pool, kernels, call)) is not None}
        clock = timed(ranks, list(by_key.values()), kernels, slowdown_among_all(dict(cluster.device.sharing)))
        times = clock.run(seconds, 1, progress or (lambda share: None)) if by_key else []
    calls = dict(cluster.device.calls) | dict(zip(by_key, times, strict=True))
    return replace(cluster, device=replace(cluster.device, calls=calls))


def _distinct(graphs: Iterable[fx.GraphModule]) -> dict[str, OpCall]:
    nodes = (node for graph in graphs for node in graph.graph.nodes)
    calls = (op_call(node) for node in nodes if node.op == "call_function" and has_meta(node) and not is_getitem(node))
    apart = (*c.COLLECTIVES, *c.RANK_LOCAL, *CHUNKED)
    kept = (call for call in calls if call.target not in apart and not is_free(call.target))
    by_key = {call_key(call): call for call in kept if _bytes(call) >= _LEAST_BYTES}
    return dict(sorted(by_key.items(), key=itemgetter(0)))  # calls have no order


def _bytes(call: OpCall) -> int:
    return sum(spec.size_bytes for spec in (*call.inputs, *call.outputs) if spec is not None)


def _runnable(pool: Pool, kernels: Kernels, call: OpCall) -> Kernel | None:
    """A kernel that makes this call, or None where it does not take made-up tensors."""
    sizes = [size for spec in call.inputs[:1] for size in spec.shape]
    most = max(1, min(sizes, default=1))
    target, args = _bound(call)

    def make(variant: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        places = iter(range(variant * 8, variant * 8 + 64))

        def real(value: Any) -> Any:
            if isinstance(value, TensorSpec):
                return pool.tensor(value.shape, value.dtype, next(places), most)
            return [real(item) for item in value] if isinstance(value, tuple) else value

        return tuple(map(real, args)), {name: real(value) for name, value in call.kwargs}

    kernel = Kernel(target, make, call_key(call), "")
    tensors, kwargs = make(0)
    try:
        kernels.of(target, call.inputs, kwargs)(*tensors, **kwargs)
    except (RuntimeError, TypeError, IndexError, ValueError):
        return None
    return kernel


def _bound(call: OpCall) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What runs on a rank: of a ring's step the first rank's, as all work equally much; how many there are tells which
    columns of a mask it takes.
    """
    if call.target not in RING_KERNELS:
        return call.target, call.args
    key, mask = (call.args[1], call.args[5]) if call.target is c.ring_step else (call.args[2], call.args[7])
    columns = mask.shape[-1] if isinstance(mask, TensorSpec) else 1
    ranks = columns // key.shape[2] if columns > 1 else 2
    return RING_KERNELS[call.target], (*call.args[:-1], 0, ranks)
