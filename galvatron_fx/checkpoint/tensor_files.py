"""Tensors of all ranks to files and back, resharded on the way: torch.distributed.checkpoint, on safetensors files.

Its safetensors storage keeps no pickle, unlike its default one, whose metadata file is one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from galvatron_fx.checkpoint import plain
from galvatron_fx.checkpoint.model_state import Shapes
from galvatron_fx.checkpoint.ranks import Ranks
from galvatron_fx.ir.errors import CheckpointError

FILE_BYTES = 2**30
"""About what one rank writes into one file: torch builds a file in memory before it writes it."""


def host_copy(name: str, tensor: Tensor) -> Tensor:
    """A copy of what this rank holds, on the CPU. Raises CheckpointError for a DTensor of unreduced terms."""
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(f"{name} is placed as {tensor.placements}: reduce it before it is saved")
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def write(folder: Path, tensors: dict[str, Tensor], saved: Shapes, ranks: Ranks) -> None:
    """Write every rank's ``tensors``, each part of one once; ``saved``: all ranks' tensors.

    :func:`written_by` brings it to the disk. Raises CheckpointError on every rank where it fails on any.
    """
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=_file_of(saved, ranks.size), save_distributed=True
    )
    writer.sync_files = False  # torch 2.13 syncs before it has handed over what Python still buffers
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    alone = ranks.group is None
    _together(
        "write tensors",
        lambda: save(tensors, storage_writer=writer, planner=planner, process_group=ranks.group, no_dist=alone),
    )


def written_by(folder: Path, rank: int) -> list[Path]:
    """The files that ``rank`` wrote, all on the disk when this returns."""
    paths = sorted(folder.glob(f"shard-{rank + 1:05d}-*.safetensors"))
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    return paths


def read(folder: Path, files: Collection[str], targets: dict[str, Tensor], ranks: Ranks) -> None:
    """Fill ``targets`` in place, each with what this rank keeps of the tensor of that name, from ``files`` alone.

    Raises CheckpointError on every rank where it fails on any.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = HuggingFaceStorageReader(str(folder))
    reader.fs = _Listed(files)
    alone = ranks.group is None
    _together(
        "read tensors",
        lambda: load(targets, storage_reader=reader, planner=planner, process_group=ranks.group, no_dist=alone),
    )


class _Listed(FileSystem):
    """The files of a checkpoint, whatever else lies in its folder: the reader takes every file that it sees."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return [name for name in super().ls(path) if os.path.basename(name) in self._names]


def _file_of(saved: Shapes, num_ranks: int) -> dict[str, int]:
    """For every tensor the number of its file, from 1: in each, a rank writes about :data:`FILE_BYTES`."""
    numbers: dict[str, int] = {}
    total_bytes = 0
    for name, (shape, dtype) in sorted(saved.items()):
        numbers[name] = 1 + total_bytes // (FILE_BYTES * num_ranks)
        total_bytes += prod(shape) * plain.DTYPES[dtype].itemsize
    return numbers


def _together(what: str, work: Callable[[], object]) -> None:
    """Run a collective of torch.distributed.checkpoint, which raises on all ranks what fails on any; raise as we do."""
    try:
        work()
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"rank {rank} could not {what}: {type(cause).__name__}: {cause}") from cause
