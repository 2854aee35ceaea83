"""Run by test_mixed_precision_ranks.py: mixed precision on real processes, beside FSDP2 and compiled.

Prints ``ok <check>`` once for each check that holds on every rank, ``FAILED <check>`` and the errors otherwise.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import galvatron_fx
from benchmarks.common.tensor_memory import TensorMemory, held_tensors
from galvatron_fx import Plan
from galvatron_fx.api import capture
from galvatron_fx.errors import PlanError
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.cluster.overlap import Overlap
from passes.lowering.apply_plan import lower
from passes.lowering.lower_step import Lowered
from passes.simulation.step import SimulateStep
from tests.runtime.launch import Check, fork_checks

RANKS, WIDTH, BATCH, STEPS = 2, 64, 512, 3
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PLAN = Plan.uniform((RANKS,), ("zero",))


class Net(nn.Module):
    """Linear layers with normalisation between, and a loss."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        make = lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))  # noqa: E731
        self.blocks = nn.ModuleList(make() for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = x + block(norm(x))
        return x.to(torch.promote_types(x.dtype, torch.float32)).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))


def whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def network(layers: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return Net(layers)


def equals_fsdp2(mesh: DeviceMesh) -> None:
    """The same casts at the same places: losses, gradients and trained weights differ by the order of sums alone."""
    theirs = copy.deepcopy(network())
    fully_shard(theirs, mesh=mesh, mp_policy=POLICY)
    ours = galvatron_fx.compile(network(), mesh, (batch(0),), plan=PLAN, mixed_precision=POLICY)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (ours, theirs)]
    for step in range(STEPS):
        loss = ours.forward_backward(batch(step))
        own = theirs(batch(step).chunk(RANKS)[dist.get_rank()])
        own.backward()
        dist.all_reduce(own.detach())
        torch.testing.assert_close(loss, own.detach() / RANKS, rtol=1e-6, atol=0)
        gradients = dict(theirs.named_parameters())
        for name, parameter in ours.named_parameters():
            assert parameter.dtype == parameter.grad.dtype == torch.float32, name  # type: ignore[union-attr]
            expected = whole(gradients[name].grad)
            error = float((whole(parameter.grad) - expected).abs().max() / expected.abs().max())
            assert error < 1e-5, f"step {step}: gradient of {name} differs by {error:.2e}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def predicted_peak_is_measured(mesh: DeviceMesh) -> None:
    """Float32 parameters and moments, bfloat16 copies of them."""
    cluster = Cluster.from_mesh(mesh)
    for plan in (PLAN, Plan.uniform((RANKS,), ("data",)), Plan.uniform((RANKS,), ("data",), keep_gathered=True)):
        x = batch(0)
        lowered = lower(capture(network(), (x,), mixed_precision=POLICY), plan, cluster)
        assert isinstance(lowered, Lowered)
        predicted = SimulateStep(cluster).run(lowered).peak_memory_bytes
        # Comparing batches takes 64 KiB in some steps, much beside this model.
        compiled = galvatron_fx.compile(network(), mesh, (x,), plan=plan, mixed_precision=POLICY, compare_batches=0)
        optimizer = torch.optim.AdamW(compiled.parameters(), foreach=False)
        for _ in range(2):
            compiled.forward_backward(x)
            optimizer.step()
            optimizer.zero_grad()
        with TensorMemory([*held_tensors(compiled, optimizer), x]) as memory:
            compiled.forward_backward(x)
            optimizer.step()
        assert abs(predicted / memory.peak_bytes - 1) < 0.03, f"{plan}: {predicted} and {memory.peak_bytes}"


def compiled_graphs_communicate(mesh: DeviceMesh) -> None:
    """Inductor knows the collectives that stand among the operators, also a block ahead, and casts; float64 computes
    alike.
    """
    cluster = replace(Cluster.from_mesh(mesh), overlap=Overlap(1.0, 1.0))  # so that gathers run beside computing
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
    eager, fast = (
        galvatron_fx.compile(
            network(2), mesh, (batch(0),), plan=PLAN, cluster=cluster, mixed_precision=policy, backend=backend
        )
        for backend in ("eager", "inductor")
    )
    losses = [module.forward_backward(batch(0)) for module in (eager, fast)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
    gradients = dict(eager.named_parameters())
    for name, parameter in fast.named_parameters():
        torch.testing.assert_close(whole(parameter.grad), whole(gradients[name].grad), rtol=2e-7, atol=1e-9, msg=name)


def ranks_agree_on_the_policy(mesh: DeviceMesh) -> None:
    """A rank with another policy starts none of them."""
    policy = POLICY if dist.get_rank() else MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    try:
        galvatron_fx.compile(network(), mesh, (batch(0),), plan=PLAN, mixed_precision=policy)
    except PlanError as error:
        assert "hold another mixed precision than rank 0" in str(error), error
    else:
        raise AssertionError("ranks with different policies were let go")


CHECKS: tuple[Check, ...] = (
    equals_fsdp2,
    predicted_peak_is_measured,
    ranks_agree_on_the_policy,
    compiled_graphs_communicate,
)


def main() -> None:
    prepare = partial(galvatron_fx.capture, network(), (batch(0),), mixed_precision=POLICY)
    fork_checks((RANKS,), {check.__name__: check for check in CHECKS}, sys.argv[1:], prepare)


if __name__ == "__main__":
    main()
