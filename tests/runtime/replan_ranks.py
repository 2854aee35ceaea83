"""Run by test_replan.py: a model goes on on other ranks of four, and trains as if nothing had happened."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import ExponentialLR

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.errors import BudgetError, CheckpointError, InputError, PlanError
from galvatron_fx.ir.plan.pipelining import Pipelining
from galvatron_fx.ir.torch_compat.processes import process_groups
from galvatron_fx.replanning.redistribution import Chunk, pieces
from tests.runtime.beside_plain import full
from tests.runtime.launch import Check, fork_checks
from tests.runtime.shared_lowerings import compile_before_the_fork

FOLDER = Path(sys.argv[1] if __name__ == "__main__" else ".")
ZERO_TENSOR = Plan.uniform((2, 2), ("zero", "tensor"))
STAGES = Plan.uniform((2, 2), ("pipeline", "data"), pipelining=Pipelining(2, 2))
DATA = Plan.uniform((3,), ("data",))
ZERO = Plan.uniform((3,), ("zero",))


class Network(nn.Module):
    """Tied, frozen and odd-sized weights, a count of calls outside the state dict, dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(21, 10)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(10, 14), nn.GELU(), nn.Linear(14, 10)) for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.full((10,), 0.5), requires_grad=False)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        self.calls.add_(1.0)
        hidden = self.embedding(tokens) * (1 + 0.01 * self.calls)
        for layer in self.layers:
            hidden = hidden + self.dropout(layer(hidden)) * self.scale
        logits = F.linear(hidden[:, :-1], self.embedding.weight)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())}


class Run:
    """A model in training, with two groups of parameters and a falling learning rate."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = [{"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1}]
        self.optimizer = AdamW([*groups, {"params": [p for p in trained if p.dim() == 1]}], lr=0.02)
        self.scheduler = ExponentialLR(self.optimizer, 0.9)
        self.losses: list[float] = []

    def train(self, batches: list[Tensor]) -> None:
        for batch in batches:
            if isinstance(self.model, galvatron_fx.DistributedGraphModule):
                loss = self.model.forward_backward(batch)["loss"]
            else:
                loss = self.model(batch)["loss"]
                loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.losses.append(float(loss.detach()))

    def replan(self, mesh: DeviceMesh, **options: Any) -> galvatron_fx.Replanned:
        return galvatron_fx.replan(self.model, mesh, optimizer=self.optimizer, scheduler=self.scheduler, **options)


def network(dropout: float = 0.0) -> Network:
    torch.manual_seed(1)
    return Network(dropout).double()


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return list(torch.randint(21, (count, 6, 5), generator=generator))


def part(mesh: DeviceMesh, ranks: list[int]) -> DeviceMesh:
    """A mesh over some ranks; all make it."""
    return DeviceMesh(mesh.device_type, ranks)


def close(got: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(
        *(torch.tensor(values, dtype=torch.float64) for values in (got, expected)), rtol=1e-10, atol=0
    )


def four_three_four(mesh: DeviceMesh) -> None:
    """Losses and weights are one device's, under unlike plans, given and searched, on the ranks in any order."""
    data, here = batches(8), dist.get_rank()
    plain = Run(network())
    plain.train(data)
    run = Run(galvatron_fx.compile(network(), mesh, (data[0],), plan=ZERO_TENSOR))
    kept = run.model
    meshes = [
        (part(mesh, [2, 0, 1]), {"plan": DATA}),
        (part(mesh, [0, 3]), {}),
        (part(mesh, [3, 1, 0, 2]), {"plan": STAGES}),
    ]
    run.train(data[:2])
    expected = plain.losses[:2]
    for number, (ranks, options) in enumerate(meshes, 1):
        result = run.replan(ranks, **options)
        assert run.model is kept and result.is_member == (here in ranks.mesh)
        assert result.seconds < 60 and ("s to plan" in str(result))
        if result.is_member:
            run.train(data[2 * number : 2 * number + 2])
            expected += plain.losses[2 * number : 2 * number + 2]
    close(run.losses, expected)
    another = part(mesh, [0, 3, 1, 2])
    left = len(process_groups())
    run.replan(another, plan=STAGES)
    assert len(process_groups()) == left
    for name, parameter in run.model.named_parameters():
        torch.testing.assert_close(full(parameter), plain.model.get_parameter(name), rtol=1e-10, atol=1e-12)
    assert float(run.model.calls) == 8
    assert run.optimizer.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"]
    assert int(next(iter(run.optimizer.state.values()))["step"]) == 8


def dropout_goes_on(mesh: DeviceMesh) -> None:
    """Masks are those of a run that was never moved; what was frozen or switched since compile stays so."""
    data = batches(6)
    still, run = (Run(galvatron_fx.compile(network(0.5), mesh, (data[0],), plan=ZERO_TENSOR, seed=3)) for _ in range(2))
    still.train(data)
    run.train(data[:2])
    for parameter in run.model.layers[1].parameters():
        parameter.requires_grad_(False)
    for parameter in run.model.layers[1].parameters():
        parameter.requires_grad_(True)
    expected = still.losses[:2]
    if run.replan(part(mesh, [0, 2, 3]), plan=ZERO).is_member:
        run.train(data[2:4])
        expected += still.losses[2:4]
        run.model.eval()
    run.replan(part(mesh, [0, 1, 2, 3]), plan=STAGES)
    assert not run.model.training and not run.model.layers[0].training
    run.model.train()
    run.train(data[4:])
    close(run.losses, expected + still.losses[4:])


def checkpoints_on_some(mesh: DeviceMesh) -> None:
    """Ranks that train alone save, load and gather alone."""
    data = batches(4)
    run = Run(galvatron_fx.compile(network(), mesh, (data[0],), plan=ZERO_TENSOR))
    checkpoints = galvatron_fx.Checkpointer(FOLDER / "checkpoints", asynchronous=True)
    run.train(data[:1])
    checkpoints.save(1, model=run.model, optimizer=run.optimizer)
    state = {"model": run.model, "optimizer": run.optimizer}
    if run.replan(part(mesh, [0, 1, 3]), plan=ZERO).is_member:
        run.train(data[1:2])
        checkpoints.save(2, **state)
        whole = galvatron_fx.gather(run.model, rank=2)
        assert (whole is not None) == (dist.get_rank() == 3)
        run.train(data[2:3])
        run.model.calls.sub_(1)  # no part of checkpoints
        restored = checkpoints.load(**state)
        assert restored is not None and restored.step == 2
        run.train(data[2:3])
        close(run.losses[-1:], run.losses[-2:-1])
    else:
        with pytest.raises(InputError, match=r"the model is on ranks \[0, 1, 3\], and this is rank 2"):
            checkpoints.save(2, **state)
    run.replan(part(mesh, [1, 2, 3]), plan=ZERO)
    if dist.get_rank():
        with pytest.raises(CheckpointError, match="ranks without rank 0, which writes the checkpoints"):
            checkpoints.save(3, **state)
    run.replan(part(mesh, [0, 1, 2, 3]), plan=ZERO_TENSOR)
    checkpoints.save(3, **state)


def refusals(mesh: DeviceMesh) -> None:
    """What cannot move is refused on all ranks, and training goes on as if nothing had been asked."""
    data = batches(4)
    plain = Run(network())
    plain.train(data)
    run = Run(galvatron_fx.compile(network(), mesh, (data[0],), plan=ZERO_TENSOR))
    stale = AdamW(run.model.parameters())
    three = part(mesh, [0, 1, 2])
    with pytest.raises(InputError, match=r"model is a Network: give what galvatron_fx.compile returned"):
        galvatron_fx.replan(network(), three)
    with pytest.raises(InputError, match="not compiled yet"):
        galvatron_fx.replan(galvatron_fx.compile(network(), mesh), three)
    local = galvatron_fx.compile(network(), mesh, (data[0],), batch="local", plan=ZERO_TENSOR)
    with pytest.raises(InputError, match="batch='local': the global batch would be another"):
        galvatron_fx.replan(local, three)
    with pytest.raises(TypeError, match=r"replan\(\) has no option 'budget'"):
        run.replan(three, budget=1)
    with pytest.raises(PlanError, match="hold another mesh than rank 0"):
        run.replan(three if dist.get_rank() else mesh)
    with pytest.raises(PlanError, match="hold another optimizer than rank 0"):
        galvatron_fx.replan(run.model, three, optimizer=run.optimizer if dist.get_rank() else None)
    with pytest.raises(PlanError, match="beside plan="):
        run.replan(three, plan=DATA, roles=("data",))
    with pytest.raises(PlanError):
        run.replan(three, plan=ZERO_TENSOR)
    with pytest.raises(BudgetError):
        run.replan(three, memory_budget=1000)
    run.model.forward_backward(data[0])
    with pytest.raises(InputError, match=r"has a gradient, and gradients do not move.*\n?.*optimizer.zero_grad\(\)"):
        run.replan(three, plan=DATA)
    run.optimizer.zero_grad()
    handle = run.model.embedding.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(InputError, match="has a hook, which the new parameter would not have"):
        run.replan(three, plan=DATA)
    handle.remove()
    run.model.calls.zero_()
    run.train(data[:2])
    if run.replan(three, plan=DATA).is_member:
        run.train(data[2:])
        close(run.losses, plain.losses)
        with pytest.raises(InputError, match="holds parameters that the model had on another mesh"):
            stale.step()
    else:
        for call in (
            lambda: run.model.forward_backward(data[2]),
            lambda: run.model.clip_grad_norm_(1.0),
            lambda: run.model.batch_rows,
            lambda: run.model.expert_loads(),
            lambda: galvatron_fx.gather(run.model),
        ):
            with pytest.raises(InputError, match=r"the model is on ranks \[0, 1, 2\], and this is rank 3: train on"):
                call()
        assert not list(run.model.parameters())
    if dist.get_rank() < 2:
        dist.new_group([0, 1], use_local_synchronization=False)
    with pytest.raises(PlanError, match="another number of process groups made so far"):
        run.replan(mesh)


def pieces_cover(mesh: DeviceMesh) -> None:
    """A rank takes its own copy of what it wants, and else that of the ranks that hold it, in turn."""
    left, right, whole = Chunk((0, 0), (2, 3)), Chunk((2, 0), (1, 3)), Chunk((0, 0), (3, 3))
    moved = pieces([left, right, left, None], [whole, whole, None, left])
    assert [(piece.sender, piece.receiver, piece.chunk) for piece in moved] == [
        (0, 0, left),
        (1, 0, right),
        (2, 1, left),
        (1, 1, right),
        (2, 3, left),
    ]
    with pytest.raises(AssertionError, match="makes up the whole"):
        pieces([left, None], [None, whole])


CHECKS: dict[str, Check] = {
    check.__name__: check for check in (four_three_four, dropout_goes_on, checkpoints_on_some, refusals, pieces_cover)
}


def prepare() -> None:
    inputs = (batches(1)[0],)
    compile_before_the_fork((4,), [(network(), inputs, [ZERO_TENSOR] * 4), (network(0.5), inputs, [ZERO_TENSOR] * 2)])


if __name__ == "__main__":
    fork_checks((4,), CHECKS, sys.argv[2:], prepare)
