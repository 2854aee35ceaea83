"""Checks of train_ranks.py: experts exchange rows, are moved between ranks, and their loads are told."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import galvatron_fx
from benchmarks.common.tensor_memory import TensorMemory, held_tensors
from galvatron_fx import Plan
from galvatron_fx.errors import InputError
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.plan.pipelining import Pipelining
from passes.lowering.apply_plan import lower
from passes.lowering.lower_step import Lowered
from passes.simulation.step import SimulateStep
from tests.models import zoo
from tests.models.mixtures import mixture
from tests.models.test_expert_loops import Hits
from tests.models.test_written_experts import written
from tests.passes.sharding.test_expert_rules import Mixture
from tests.runtime.beside_plain import MESH, compiled_by, one_step, same, same_parameters, saved_and_loaded, train
from tests.runtime.launch import runs
from tests.runtime.shared_lowerings import Compiled

mixtral = partial(mixture, "mixtral")


SAVED, LOADED = ("zero", "expert"), ("expert", "expert")
MOVED = Plan.uniform(MESH, ("expert", "data"), capacity=0.5, pipelining=Pipelining(1, 2, "1f1b"))
DENSE = Plan.uniform(MESH, ("data", "tensor"))
LISTED = Plan.uniform(MESH, ("expert", "zero"), capacity=0.5)
SHADOWED = Plan.uniform(MESH, ("expert", "expert"), capacity=0.5, shadows=1)
ROUNDS = Plan.uniform(MESH, ("expert", "expert"), capacity=0.5)
COUNTED = (
    Plan.uniform(MESH, ("data", "tensor"), capacity=0.5),
    Plan.uniform(MESH, ("expert", "tensor_sequence"), capacity=0.5, pipelining=Pipelining(1, 2, "1f1b")),
    Plan.uniform(MESH, ("zero", "expert"), capacity=0.5),
)


def samples(count: int = 8) -> Tensor:
    """As :class:`Mixture` takes them."""
    return torch.randn(count, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def compiled() -> Iterator[Compiled]:
    """What the checks below compile."""
    plans = [Plan.uniform(MESH, roles) for roles in (("expert", "tensor"), SAVED, LOADED)]
    if runs("experts"):
        yield mixtral(), zoo.tokens(), plans
    yield Mixture(nn.functional.silu, 8), (samples(),), (MOVED, DENSE, SHADOWED)
    if runs("listed_experts_move"):
        yield *written(Hits), (LISTED,)
    if runs("further_rounds"):
        yield Mixture(nn.functional.silu), (samples(16),), (ROUNDS, ROUNDS)
    yield Mixture(nn.functional.silu), (samples(),), (*COUNTED, COUNTED[-1])


def experts(folder: Path, mesh: DeviceMesh) -> None:
    """Exchanged between two and four ranks, and held by others after loading."""
    train(compiled_by(mixtral(), mesh, zoo.tokens(), ("expert", "tensor")), mixtral(), zoo.tokens(), steps=2)
    saved_and_loaded(folder, mesh, mixtral, SAVED, LOADED, _moved_and_back)


def _moved_and_back(compiled: Any, plain: nn.Module, inputs: dict[str, Any], optimizers: list[Any]) -> None:
    """A step while experts are held by other ranks: whatever would show their order is refused until they are back."""
    moves = compiled.rebalance_experts(optimizers[0], dry_run=False)
    assert moves.done and moves.layers and moves.seconds > 0 and "received by each rank" in str(moves)
    one_step(compiled, plain, inputs, optimizers)
    with torch.no_grad():
        same(compiled(**inputs)["loss"], plain(**inputs)["loss"], "loss of other programs")
    with pytest.raises(InputError, match="another order than its own"):
        compiled.state_dict()
    with pytest.raises(InputError, match="cannot be copied while its experts"):
        copy.deepcopy(compiled)
    with pytest.raises(InputError, match="cannot be gathered while its experts"):
        galvatron_fx.gather(compiled)
    with pytest.raises(InputError, match="states of optimizers are saved and loaded in the model's own order"):
        optimizers[0].state_dict()
    compiled.restore_experts(optimizers[0])
    same_parameters(compiled, plain, "experts that are back")


def experts_move(mesh: DeviceMesh) -> None:
    """Gradients of several batches add up over a move, the loads become what was promised, and who has to know of the
    move is asked for.
    """
    x = samples()
    plain = Mixture(nn.functional.silu, 8)
    with torch.no_grad():
        plain.router.bias[:2] += 3.0
    compiled = galvatron_fx.compile(copy.deepcopy(plain), mesh, (x,), plan=MOVED)
    with pytest.raises(InputError, match="no rows of experts are counted yet"):
        compiled.rebalance_experts()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (compiled, plain)]
    for dry_run in (True, False, True):
        same(compiled.forward_backward(x), plain(x), "loss")
        plain(x).backward()
        loads = compiled.expert_loads()
        moves = compiled.rebalance_experts(optimizers[0], dry_run=dry_run)
        if dry_run is False:
            before, promised = loads, moves.layers[0]
    assert not moves.layers and moves.received_bytes == 0, moves
    assert loads.layers[0].rows == before.layers[0].rows
    assert loads.imbalance(2) == promised.imbalance < 1.1 < promised.imbalance_before == before.imbalance(2)
    assert before.further_rounds - loads.further_rounds == promised.rounds_saved > 0, promised
    for optimizer in optimizers:
        optimizer.step()
    compiled.forward_backward(x)
    compiled.restore_experts()
    with pytest.raises(InputError, match="Give all optimizers of the model"):
        optimizers[0].step()
    dense = galvatron_fx.compile(plain, mesh, (x,), plan=DENSE)
    with pytest.raises(InputError, match="rebalance_experts is for plans with role 'expert'"):
        dense.rebalance_experts()
    assert compiled.get_parameter("router.bias").grad is not None
    assert all(parameter.grad is None for parameter in copy.deepcopy(compiled).parameters())
    with pytest.raises(InputError, match="a copy was made of this model"):
        compiled.rebalance_experts()


def listed_experts_move(mesh: DeviceMesh) -> None:
    """Experts that are modules of their own, with biases: only the order in which steps list them changes. Nothing is
    sent, and what is saved meanwhile is the model's own.
    """
    plain, inputs = written(Hits)
    with torch.no_grad():
        plain.get_parameter("embed.weight")[:, 0] = 3.0
        plain.get_parameter("experts.router.weight")[:2, 0] += 0.3  # the first rank's experts have most tokens
    compiled = galvatron_fx.compile(copy.deepcopy(plain), mesh, inputs, plan=LISTED)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (compiled, plain)]
    rows = _rows_of_a_step(compiled, plain, inputs, optimizers)
    moves = compiled.rebalance_experts(optimizers[0], dry_run=False)
    (layer,) = moves.layers
    assert layer.num_moved and layer.imbalance < layer.imbalance_before and moves.received_bytes == 0, moves
    for _ in range(2):
        moved = _rows_of_a_step(compiled, plain, inputs, optimizers)
        same_parameters(galvatron_fx.gather(compiled), plain, "gathered parameters")
    assert moved.imbalance(2) < rows.imbalance(2), (moved, rows)
    compiled.restore_experts()
    _rows_of_a_step(compiled, plain, inputs, optimizers)


def _rows_of_a_step(compiled: Any, plain: nn.Module, inputs: dict[str, Any], optimizers: list[Any]) -> Any:
    same(compiled.forward_backward(**inputs), plain(**inputs), "loss")
    plain(**inputs).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    same_parameters(compiled, plain, "parameters")
    return compiled.expert_loads()


def experts_have_shadows(mesh: DeviceMesh) -> None:
    """Those with most rows, as data that steps read: training goes on exactly, alone and along with moves."""
    x = samples()
    plain = Mixture(nn.functional.silu, 8)
    with torch.no_grad():
        plain.router.bias[4:] += torch.tensor([3.0, 6.0, 3.0, 3.0], dtype=torch.float64)
    compiled = galvatron_fx.compile(copy.deepcopy(plain), mesh, (x,), plan=SHADOWED)
    models = compiled, plain
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    _loads_of_a_step(compiled, plain, x, optimizers)
    told = compiled.rebalance_experts(optimizers[0])
    (layer,) = told.layers
    assert layer.imbalance <= min(layer.by_moves, layer.by_shadows) < layer.imbalance_before, told
    assert layer.shadows == (5,) and told.received_bytes > 0 and "shadows" in str(told)
    named = compiled.rebalance_experts(moves=False, dry_run=False)
    assert named.received_bytes == 0 and named.layers[0].num_moved == 0
    rounds = _loads_of_a_step(compiled, plain, x, optimizers).further_rounds
    assert compiled.expert_loads().layers[0].shadows == (5,)
    assert compiled.expert_loads().imbalance(4) < layer.imbalance_before
    assert not compiled.rebalance_experts(moves=False).layers
    compiled.state_dict()  # which experts have shadows is nothing that a checkpoint holds
    moved = compiled.rebalance_experts(optimizers[0], dry_run=False)
    after = _loads_of_a_step(compiled, plain, x, optimizers)
    assert moved.layers[0].num_moved and moved.received_bytes and after.further_rounds <= rounds
    compiled.restore_experts(optimizers[0])
    _loads_of_a_step(compiled, plain, x, optimizers)


def _loads_of_a_step(compiled: Any, plain: Any, x: Tensor, optimizers: list[Any]) -> Any:
    """Those of one more step, in which it does as the plain model."""
    rows = rows_of_experts(plain, x)
    same(compiled.forward_backward(x), plain(x), "loss")
    plain(x).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    loads = compiled.expert_loads()
    assert loads.layers[0].rows == rows, (loads, rows)
    return loads


def further_rounds(mesh: DeviceMesh) -> None:
    """Opposite routings take the same memory, as was predicted, and compute what one device does."""
    x, cluster = samples(16), Cluster.from_mesh(mesh)
    peaks = []
    for crowded in ([0, 1], [2, 3]):
        plain = Mixture(nn.functional.silu)
        with torch.no_grad():
            plain.router.weight.zero_()
            plain.router.bias.zero_()[crowded] = 50.0
        graph = galvatron_fx.capture(plain, (x,))
        compiled = galvatron_fx.compile(copy.deepcopy(plain), mesh, (x,), plan=ROUNDS, compare_batches=0)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (compiled, plain)]
        rows = rows_of_experts(plain, x)
        peaks_of_steps = []
        for _ in range(4):
            gc.collect()  # what compiling has left over is no part of a step
            with TensorMemory([*held_tensors(compiled, optimizers[0]), x]) as memory:
                loss = compiled.forward_backward(x)
            expected = plain(x)
            expected.backward()
            same(loss, expected, "loss")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            loads = compiled.expert_loads()
            assert loads.layers[0].rows == rows and loads.further_rounds >= 3, loads
            rows = rows_of_experts(plain, x)
            same_parameters(compiled, plain, "parameters")
            peaks_of_steps.append(memory.peak_bytes)
        # The first step makes the optimizer's states. In any, a thread of gloo may let go of a tensor a moment late.
        peaks.append(min(peaks_of_steps[1:]))
    lowered = lower(graph, ROUNDS, cluster)
    assert isinstance(lowered, Lowered)
    predicted = SimulateStep(cluster).run(lowered).peak_memory_bytes
    counted = sum(state["step"].nbytes for state in optimizers[0].state.values())  # on a GPU they are the host's
    seed, kept_loads = 8, 8 * len(rows)
    assert peaks == [predicted + counted + seed + kept_loads] * 2, (peaks, predicted, counted)


def rows_of_experts(model: Mixture, x: Tensor) -> tuple[int, ...]:
    """What the router of the plain model sends to each of its experts."""
    chosen = model.router(x.flatten(0, 1)).topk(2)[1]
    return tuple(chosen.flatten().bincount(minlength=len(model.up)).tolist())


def expert_loads(mesh: DeviceMesh) -> None:
    """Are the router's own counts, under plans that exchange rows and others; the module asks for them or never."""
    x = samples()
    model = Mixture(nn.functional.silu)
    expected = rows_of_experts(model, x)
    for plan in COUNTED:
        compiled = galvatron_fx.compile(copy.deepcopy(model), mesh, (x,), plan=plan)
        for _ in range(2):
            same(compiled.forward_backward(x), model(x), "loss")
        loads = compiled.expert_loads()
        assert [layer.rows for layer in loads.layers] == [expected], (plan, loads)
        assert loads.imbalance(4) == 4 * max(expected) / sum(expected) and "further rounds" in str(loads)
    fresh = galvatron_fx.compile(copy.deepcopy(model), mesh, (x,), plan=plan)
    try:
        fresh.expert_loads()
    except InputError as error:
        assert "no rows of experts are counted yet: call forward_backward" in str(error)
    else:
        raise AssertionError("loads before the first step")
