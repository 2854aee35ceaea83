"""Run by test_batch_rows.py: ranks that are given their own rows of the batch, beside the plain model."""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import galvatron_fx
from galvatron_fx import Pipelining, Plan, Strategy, own_rows
from galvatron_fx.errors import InputError
from passes.analysis.blocks import num_blocks
from tests.models import zoo
from tests.passes.frontend.test_masked_scatter import SeesAndReads
from tests.runtime.beside_plain import same, same_parameters
from tests.runtime.launch import Check, fork_checks, runs
from tests.runtime.shared_lowerings import compile_before_the_fork
from tests.seams.test_rows_of_samples import even_batch

BATCH = 8
# By the number of ranks and the name of the check: model, mesh, roles, the number of micro-batches, rows of each rank.
PLANS: dict[int, dict[str, tuple[str, tuple[int, ...], tuple[str, ...], int, int]]] = {
    2: {
        "data": ("llama", (2,), ("data",), 1, 4),
        "zero_in_parts": ("bert", (2,), ("zero",), 2, 4),
        "tensor": ("llama", (2,), ("tensor",), 1, 8),
        "pipeline": ("llama", (2,), ("pipeline",), 4, 8),
    },
    4: {
        "zero_and_tensor": ("bert", (2, 2), ("zero", "tensor"), 1, 4),
        "data_and_zero_in_parts": ("llama", (2, 2), ("data", "zero"), 2, 2),
        "pipeline_and_data": ("llama", (2, 2), ("pipeline", "data"), 4, 4),
    },
}
MODELS = {"llama": zoo.llama, "bert": zoo.bert}


def batch(like: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    """Rows that all differ; the first ones count nearly all of their labels, the last ones hardly any."""
    generator = torch.Generator().manual_seed(number)
    shape = BATCH, like["input_ids"].shape[1]
    ids = torch.randint(0, 40, shape, generator=generator)
    made = {name: torch.ones(shape, dtype=value.dtype) for name, value in like.items()}
    labels = ids.clone()
    for row in range(BATCH):
        labels[row, shape[1] - 2 * row :] = -100
        if "attention_mask" in made:
            made["attention_mask"][row, shape[1] - row :] = 0
    return {**made, "input_ids": ids, "labels": labels}


def trains_alike(model: nn.Module, inputs: dict[str, Tensor], plan: Plan, rows: int) -> None:
    """Steps and evaluation on own rows alone are those of one process on the whole batch."""
    mesh = init_device_mesh("cpu", plan.axis_sizes)
    compiled = galvatron_fx.compile(copy.deepcopy(model), mesh, batch(inputs, 0), plan=plan)
    plain = copy.deepcopy(model)
    own = list(compiled.batch_rows)
    assert len(own) == rows and own == sorted(set(own)), own
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    assert set().union(*every) == set(range(BATCH)), every
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (compiled, plain)]
    for step in range(2):
        whole = batch(inputs, step)
        local = {name: value[own] for name, value in whole.items()}
        expected = plain(**whole).loss
        expected.backward()
        same(compiled.forward_backward(**own_rows(local)).loss, expected, f"loss of step {step}")
        same(compiled.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(plain.parameters(), 0.5), f"norm of step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same_parameters(compiled, plain, f"step {step}")
    if dist.get_world_size() > 2:
        return  # compiling again takes long on many processes
    compiled.eval()
    plain.eval()
    with torch.no_grad():
        same(compiled(**own_rows(local)).loss, plain(**whole).loss, "loss of evaluation")


def plan_of(mesh: tuple[int, ...], roles: tuple[str, ...], parts: int) -> Plan:
    """One of PLANS."""
    stages = mesh[0] if "pipeline" in roles else 1
    pipelining = Pipelining(stages, parts, "zb_h1" if parts == 4 else "1f1b") if parts > 1 else Pipelining()
    return Plan.uniform(mesh, roles, pipelining=pipelining)


def planned(model: str, mesh: tuple[int, ...], roles: tuple[str, ...], parts: int, rows: int, _: DeviceMesh) -> None:
    trains_alike(*MODELS[model](layers=1), plan_of(mesh, roles, parts), rows)


UNLIKE = {"the_first_block_is_whole": ("tensor", "data"), "the_last_blocks_are_whole": ("zero", "tensor")}


def unlike_plan(first: str, second: str) -> Plan:
    """Of two ranks, for LLaMA."""
    model, inputs = zoo.llama(layers=1)
    blocks = num_blocks(galvatron_fx.capture(model, batch(inputs, 0)))
    return Plan.from_roles((2,), [Strategy((first,))] + [Strategy((second,))] * (blocks - 1))


def unlike_blocks(roles: tuple[str, str], _: DeviceMesh) -> None:
    """Where the first block does not split the batch, its inputs are fetched; where the last does not, labels are."""
    trains_alike(*zoo.llama(layers=1), unlike_plan(*roles), BATCH // 2)


def refusals(mesh: DeviceMesh) -> None:
    """What are not the own rows of an example input is refused before anything is sent."""
    model, inputs = zoo.llama(layers=1)
    size = mesh.size()
    compiled = galvatron_fx.compile(model, mesh, batch(inputs, 0), plan=Plan.uniform((size,), ("data",)))
    whole = batch(inputs, 0)
    local = {name: value[: BATCH // size] for name, value in whole.items()}
    for given, said in [
        (whole, f"input_ids has shape (8, 16), and this rank computes {BATCH // size} rows of a global batch of 8"),
        ({**local, "position_ids": local["labels"]}, "position_ids is not among the example inputs input_ids, labels"),
    ]:
        try:
            compiled.forward_backward(**own_rows(given))
        except InputError as error:
            assert said in str(error), error
        else:
            raise AssertionError("other rows were taken")
    lazy = galvatron_fx.compile(model, mesh, plan=Plan.uniform((size,), ("data",)))
    for ask in (lambda: lazy.batch_rows, lambda: lazy.forward_backward(**own_rows(whole))):
        try:
            ask()
        except InputError as error:
            assert "example_inputs" in str(error)
        else:
            raise AssertionError("rows were taken before there is a plan")


class Tagger(nn.Module):
    """Layers without a loss: outputs with the batch first, flattened with the sequence, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(40, 12), nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.head, self.scale = nn.Linear(12, 6), nn.Parameter(torch.ones(3))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return {"tags": self.head(x).transpose(1, 2), "flat": x.flatten(0, 1), "scale": self.scale * 2}


def _rows(mesh: DeviceMesh) -> tuple[Tensor, Tensor, slice]:
    ids = torch.randint(40, (BATCH, 5), generator=torch.Generator().manual_seed(3))
    count = BATCH // mesh.size()
    return ids, ids % 6, slice(count * mesh.get_rank(), count * (mesh.get_rank() + 1))


def loss_outside(mesh: DeviceMesh) -> None:
    """A script's own loss of its rows' outputs, as under DistributedDataParallel; outputs that it leaves out give no
    gradients, where no rank reads them.
    """
    ids, targets, own = _rows(mesh)
    for role in ("zero", "tensor"):
        torch.manual_seed(0)
        plain = Tagger().double()
        plan = Plan.uniform((mesh.size(),), (role,))
        compiled = galvatron_fx.compile(copy.deepcopy(plain), mesh, (ids[own],), plan=plan, batch="local")
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (compiled, plain)]
        for step in range(2):
            for model, rows in ((compiled, own), (plain, slice(None))):
                outputs = model(ids[rows])
                loss = nn.functional.cross_entropy(outputs["tags"], targets[rows]) + outputs["flat"].square().mean()
                if step:
                    loss = loss + outputs["scale"].sum() * loss
                loss.backward()
            assert (compiled.scale.grad is None) == (plain.scale.grad is None) == (step == 0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            same_parameters(compiled, plain, f"{role}, step {step}")
        with torch.no_grad():
            same(compiled(ids[own])["tags"], plain(ids)["tags"][own], "tags of own rows")


def loss_inside(mesh: DeviceMesh) -> None:
    """The same script's loss inside of the model, over two stages and micro-batches; weights come out as they were."""
    ids, targets, own = _rows(mesh)
    plain = Tagger().double()
    inside = galvatron_fx.with_loss(plain, lambda outputs, aims: nn.functional.cross_entropy(outputs["tags"], aims))
    plan = Plan.uniform((2,), ("pipeline",), pipelining=Pipelining(2, 2))
    compiled = galvatron_fx.compile(inside, mesh, (ids[own], targets[own]), plan=plan, batch="local")
    found = compiled.forward_backward(ids[own], targets[own])
    expected = nn.functional.cross_entropy(plain(ids)["tags"], targets)
    expected.backward()
    same(found.loss, expected, "loss")
    gradients = {name: parameter.grad for name, parameter in compiled.named_parameters() if name != "scale"}
    for name, gradient in gradients.items():
        same(gradient, plain.get_parameter(name).grad, name)
    with torch.no_grad():
        for parameter in compiled.parameters():
            parameter.mul_(2)
        for parameter in plain.parameters():
            parameter.mul_(2)
        same(
            galvatron_fx.gather(compiled)(ids, targets).loss,
            inside(ids, labels=targets).loss,
            "loss of gathered weights",
        )


def samples_look_up_their_own(mesh: DeviceMesh) -> None:
    """Own rows tell whether each of their samples is as the program has it."""
    model, inputs = zoo.build(SeesAndReads), even_batch()
    compiled = galvatron_fx.compile(copy.deepcopy(model), mesh, inputs, plan=Plan.uniform((2,), ("data",)))

    def own(whole: dict[str, Tensor]) -> dict[str, Tensor]:
        return own_rows({name: tensor[list(compiled.batch_rows)] for name, tensor in whole.items()})

    same(compiled.forward_backward(**own(inputs))["loss"], model(**inputs)["loss"], "loss of own rows")
    with pytest.raises(InputError, match="a mask of 'ids' chooses 3 places, and a rank's own rows have others"):
        compiled.forward_backward(**own({**inputs, "ids": torch.full_like(inputs["ids"], 7)}))


def rows_are_put_together_for_stages(mesh: DeviceMesh) -> None:
    """Ranks of unlike stages bring unlike numbers of rows, which samples look their own pictures up for."""
    model, inputs = zoo.build(SeesAndReads), even_batch(BATCH)
    own = {name: tensor[slice(3) if mesh.get_rank() == 0 else slice(3, None)] for name, tensor in inputs.items()}
    plan = Plan.uniform((2,), ("pipeline",), pipelining=Pipelining(2, 2))
    compiled = galvatron_fx.compile(copy.deepcopy(model), mesh, own, plan=plan, batch="gather")
    expected = model(**inputs)["loss"]
    expected.backward()
    same(compiled.forward_backward(**own)["loss"], expected, "loss")
    for name, parameter in compiled.named_parameters():
        same(parameter.grad, model.get_parameter(name).grad, name)


OTHERS: dict[str, Check] = {
    "loss_outside": loss_outside,
    "loss_inside": loss_inside,
    **{name: partial(unlike_blocks, roles) for name, roles in UNLIKE.items()},
    "samples_look_up_their_own": samples_look_up_their_own,
    "rows_are_put_together_for_stages": rows_are_put_together_for_stages,
    "refusals": refusals,
}


def checks_of(ranks: int) -> dict[str, Check]:
    """The checks of so many ranks, by name."""
    plans: dict[str, Check] = {name: partial(planned, *given) for name, given in PLANS[ranks].items()}
    return plans | (OTHERS if ranks == 2 else {})


def prepare(ranks: int) -> None:
    """Lower for training, and capture for evaluation."""
    for name, mesh, roles, parts, _ in (plan for check, plan in PLANS[ranks].items() if runs(check)):
        model, inputs = MODELS[name](layers=1)
        compile_before_the_fork(mesh, [(model, batch(inputs, 0), [plan_of(mesh, roles, parts)])])
    if ranks == 2:
        for make in MODELS.values():
            model, inputs = make(layers=1)
            galvatron_fx.capture(model.eval(), batch(inputs, 0))
        plans = [*(unlike_plan(*roles) for roles in UNLIKE.values()), *[Plan.uniform((2,), ("data",))] * 2]
        model, inputs = zoo.llama(layers=1)
        compile_before_the_fork((2,), [(model, batch(inputs, 0), plans)])


def main() -> None:
    """Run the checks of every number of ranks, or those named."""
    for ranks in PLANS:
        fork_checks((ranks,), checks_of(ranks), sys.argv[1:], partial(prepare, ranks))


if __name__ == "__main__":
    main()
