"""Whole-model exactness: a plan's loss, gradients and buffers against the plain model on one device."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from galvatron_fx.checking import whole_tensors
from galvatron_fx.checking.simulated import Results, ValueOf, run_stages, run_step
from galvatron_fx.checking.whole_tensors import distribute
from galvatron_fx.ir.cluster.cluster import Axis, Cluster
from galvatron_fx.ir.cluster.overlap import Overlap
from galvatron_fx.ir.graph.metadata import InputSpec, meta_of, ports, signature
from galvatron_fx.ir.graph.placement import Placement
from galvatron_fx.ir.graph.rewrite import copied
from galvatron_fx.ir.plan.schedule import Schedule
from galvatron_fx.ir.plan.strategy import Strategy, original_name
from passes.analysis.blocks import num_blocks, num_values
from passes.frontend.capture.capture import FlatInputs
from passes.frontend.pipeline import Frontend
from passes.lowering.lower_stages import LowerStages
from passes.lowering.lower_step import Lower

__all__ = ["assert_exact", "axes", "captured", "cluster_for", "collect", "distribute", "one_device"]
__all__ += ["offloading", "relative_errors", "simulate", "simulate_stages", "slow_products", "uniform"]

DEVICE = Cluster.preset("8xA100-80GB").device
SEED = 20


def axes(sizes: Sequence[int]) -> tuple[Axis, ...]:
    """Mesh axes of the given sizes with NVLink-like links."""
    return tuple(Axis(f"a{i}", size, 1e-5, 1e11) for i, size in enumerate(sizes))


def cluster_for(sizes: Sequence[int], strategies: Sequence[Strategy]) -> Cluster:
    """Mesh axes of the given sizes with NVLink-like links; for a third of all plans on devices that gain nothing by
    communicating early, for another on such that send in chunks what stands beside products.
    """
    links = axes(sizes)
    kinds = Cluster(DEVICE, links, Overlap(2.0, 2.0)), Cluster(DEVICE, links), slow_products(sizes)
    return kinds[zlib.crc32(repr(strategies).encode()) % len(kinds)]


def slow_products(sizes: Sequence[int]) -> Cluster:
    """Mesh axes on which products and messages take about as long as each other, and starting either nothing, so that
    collectives travel in chunks.
    """
    rates = tuple((name, 1e7) for name, _ in DEVICE.peak_flops)
    links = tuple(Axis(f"a{i}", size, 1e-12, 1e6) for i, size in enumerate(sizes))
    return Cluster(replace(DEVICE, launch_overhead_s=0.0, peak_flops=rates), links, Overlap(chunks=True))


def captured(model: nn.Module, inputs: Any) -> fx.GraphModule:
    """Capture and find blocks."""
    return Frontend().run(model, inputs)


def collect(held: Sequence[torch.Tensor], placements: Sequence[Placement], shape: Sequence[int]) -> torch.Tensor:
    """Put together what the ranks hold, checking that replicas agree."""
    whole = whole_tensors.collect(held, placements, shape)
    assert whole.spread == 0, f"replicas differ by {whole.spread:.2e}"
    return whole.value


def simulate(
    graph: fx.GraphModule,
    model: nn.Module,
    inputs: Any,
    sizes: Sequence[int],
    strategies: Sequence[Strategy],
    cache: Any,
    cluster: Cluster | None = None,
) -> dict[str, torch.Tensor]:
    """Lower ``graph`` by a plan, run one step on all ranks, and return outputs, buffers and gradients by name."""
    lowered = Lower(strategies, cluster or cluster_for(sizes, strategies), cache).run(graph)
    return _named(run_step(lowered, _values(graph, model, inputs)))


def simulate_stages(
    graph: fx.GraphModule,
    model: nn.Module,
    inputs: Any,
    sizes: Sequence[int],
    strategies: Sequence[Strategy],
    first_blocks: Sequence[int],
    schedule: Schedule,
    cache: Any = None,
) -> dict[str, torch.Tensor]:
    """As :func:`simulate`, for a plan with stages and micro-batches, in the order of ``schedule``."""
    solved = {} if cache is None else cache
    lower = LowerStages(strategies, first_blocks, schedule.num_microbatches, cluster_for(sizes, strategies), solved)
    # How a batch is cut rests on no strategy; stages untie the weights of a copy.
    key = "cut", id(graph), schedule.num_microbatches
    if key not in solved:
        solved[key] = lower.split(graph)
    split = replace(solved[key], graph=copied(solved[key].graph))
    lowered = lower.lower(split, signature(graph))
    return _named(run_stages(lowered, schedule, _values(graph, model, inputs)))


def _values(graph: fx.GraphModule, model: nn.Module, inputs: Any) -> ValueOf:
    """Weights, buffers and inputs as they are, one seed, and tangents of ones."""
    flat = FlatInputs.of(inputs)
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    tangents = {port: meta_of(node).spec for port, node in ports(graph) if port.kind == "tangent"}

    def value_of(port: InputSpec) -> torch.Tensor:
        if port.kind == "tangent":
            return torch.ones(tangents[port].shape, dtype=tangents[port].dtype)
        if port.kind == "seed":
            return torch.tensor(SEED)
        return (flat.tensors[int(port.name)] if port.kind == "input" else tensors[original_name(port.name)]).detach()

    return value_of


def _named(results: Results) -> dict[str, torch.Tensor]:
    for port, whole in results.items():
        assert whole.spread == 0, f"replicas of {port.kind} {port.name} differ by {whole.spread:.2e}"
    return {f"{port.kind} {port.name}": whole.value for port, whole in results.items()}


def one_device(model: nn.Module, inputs: Any) -> dict[str, torch.Tensor]:
    """The same names from plain eager training."""
    flat = FlatInputs.of(inputs).as_leaves()
    args, kwargs = flat.call(flat.tensors)
    model.zero_grad()
    result = model(*args, **kwargs)
    leaves = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
    scalars = [x for x in leaves if x.dim() == 0 and x.requires_grad]
    sum(scalars).backward() if scalars else sum(x.sum() for x in leaves if x.requires_grad).backward()
    named = {f"output {i}": x.detach() for i, x in enumerate(leaves)}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            named[f"grad {name}"] = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad.clone()
    return named | {f"grad input {i}": x.grad for i, x in enumerate(flat.tensors) if x.grad is not None}


def assert_exact(
    got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], context: str = "", tolerance: float = 1e-10
) -> None:
    """Every expected value is there and equal to ``tolerance``, as :func:`relative_errors` has it."""
    for name in expected:
        if name not in got:
            raise AssertionError(f"{context}: no value for {name}; there are {sorted(got)[:5]} ...")
    for name, error in relative_errors(got, expected).items():
        assert error < tolerance, f"{context}: {name} differs by {error:.2e}"


def relative_errors(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest difference of every value, relative to its largest element.

    Some gradients are zero but for rounding (an attention key's bias moves no softmax), or all are (the loss of means
    of what an instance norm returns), so a value counts as at least a millionth of the largest gradient or loss.
    """
    said = (float(v.abs().max()) for n, v in expected.items() if n.startswith("grad") or not v.dim())
    largest = max(said, default=1.0)
    scales = {name: max(float(value.abs().max()), 1e-6 * largest) or 1.0 for name, value in expected.items()}
    return {name: float((got[name] - value).abs().max()) / scales[name] for name, value in expected.items()}


def offloading(graph: fx.GraphModule, strategies: Sequence[Strategy]) -> list[Strategy]:
    """The same with all that is kept waiting on the host."""
    return [
        replace(
            strategy,
            offload_entering=True,
            offloads=strategy.keeps if strategy.recompute else tuple(range(count)),
            num_values=strategy.num_values if strategy.recompute else count,
        )
        for strategy, count in zip(strategies, num_values(graph), strict=True)
    ]


def uniform(graph: fx.GraphModule, *roles: str, **options: Any) -> list[Strategy]:
    """One strategy for every block."""
    return [Strategy(tuple(roles), **options)] * num_blocks(graph)
