"""Tools that count other processes than the group has are refused: each of these would train on the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from galvatron_fx.errors import InputError
from galvatron_fx.integrations.accelerate import Accelerator
from galvatron_fx.integrations.transformers import Trainer

ROWS = [{"x": torch.ones(3)}] * 4


@pytest.fixture(autouse=True)
def two_processes_of_which_accelerate_counts_one() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate() -> None:
    accelerator = Accelerator()
    assert accelerator.num_processes == 1
    with pytest.raises(InputError, match=r"has 2 processes, and Accelerate counts 1.*Accelerator\(cpu=True"):
        accelerator.prepare(nn.Linear(3, 1), DataLoader(ROWS))


def test_trainer(tmp_path: Path) -> None:
    trainer = Trainer(model=nn.Linear(3, 1), args=TrainingArguments(str(tmp_path)), train_dataset=ROWS)
    with pytest.raises(
        InputError, match=r"has 2 processes, and Accelerate counts 1.*TrainingArguments\(use_cpu=True\)"
    ):
        trainer.train()
