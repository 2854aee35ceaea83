"""Lightning on two ranks, beside a loop on one device."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, DistributedSampler

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.integrations.lightning import GalvatronStrategy
from tests.integrations.hugging_face_checks import ACCUMULATE, CLIP, RATE, STAGES, Rows, language_model, refused, same
from tests.runtime.launch import Check

FOLDER = Path(".")  # the script that runs the checks says it
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(LightningModule):
    """As people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = language_model()

    def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], number: int) -> None:
        self.log("validated", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.0)


class Other(Module):
    """Trains a parameter outside of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Averaged(Module):
    """Has a callback that copies it."""

    def configure_callbacks(self) -> WeightAveraging:
        return WeightAveraging()


def fit(module: LightningModule, plan: Plan, epochs: int, **given: Any) -> Trainer:
    """``epochs`` of one step each; rows of the global batch in order, two of four to a rank."""
    os.environ["RANK"] = str(dist.get_rank())  # as torchrun says it
    trainer = Trainer(
        accelerator="cpu", devices=2, num_nodes=1, strategy=GalvatronStrategy(galvatron={"plan": plan}),
        max_epochs=epochs, accumulate_grad_batches=ACCUMULATE, gradient_clip_val=CLIP, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    rows = Rows(4 * ACCUMULATE)
    trainer.fit(module, DataLoader(rows, 2, sampler=DistributedSampler(rows, shuffle=False)), **given)
    return trainer


def on_one_device(epochs: int) -> nn.Module:
    """A plain loop. A distributed sampler deals rows in turn, so that each part has four rows in order."""
    model, rows = language_model(), Rows(4 * ACCUMULATE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    for part in list(range(ACCUMULATE)) * epochs:
        (model(**rows[4 * part : 4 * part + 4]).loss / ACCUMULATE).backward()
        if part == ACCUMULATE - 1:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return model


def lightning_fits_and_goes_on(mesh: DeviceMesh) -> None:
    """A checkpoint of a plan without stages is gone on from in stages, and is read without a strategy."""
    plain, place = on_one_device(2), str(FOLDER / "lightning.ckpt")
    first = fit(Module(), Plan.uniform((2,), ("zero",)), 1)
    first.save_checkpoint(place)
    first.validate(first.lightning_module, DataLoader(Rows(4), 2), verbose=False)
    loss = on_one_device(1)(**Rows(4)[:]).loss.item()
    assert abs(first.callback_metrics["validated"].item() - loss) < 1e-5  # Lightning logs in float32
    halfway = Module()
    halfway.load_state_dict(torch.load(place, weights_only=True)["state_dict"])
    for name, parameter in on_one_device(1).named_parameters():
        same(halfway.model.get_parameter(name), parameter)
    module = Module()
    fit(module, STAGES, 2, ckpt_path=place)
    assert isinstance(module.model, galvatron_fx.DistributedGraphModule)
    for name, parameter in module.model.named_parameters():
        same(parameter, plain.get_parameter(name))
    state = halfway.state_dict()
    module.load_state_dict(state)  # whole tensors into shards, from a module around them
    for name, parameter in module.model.named_parameters():
        same(parameter, state[f"model.{name}"])
    first.strategy.remove_checkpoint(place)
    dist.barrier()
    assert not any(FOLDER.glob("lightning.ckpt*"))


def lightning_refuses(mesh: DeviceMesh) -> None:
    """What the compiled module does not see."""
    plan = Plan.uniform((2,), ("data",))
    refused(lambda: fit(Other(), plan, 1), "'scale' is trained outside of 'model'")
    refused(lambda: fit(Averaged(), plan, 1), "WeightAveraging copies the module before it is compiled")


CHECKS: dict[str, Check] = {check.__name__: check for check in (lightning_fits_and_goes_on, lightning_refuses)}
