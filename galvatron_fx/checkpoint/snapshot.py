"""What one save writes, copied from the training run, and what one load gives back to it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from galvatron_fx.checkpoint import generators, manifest, model_state, optimizer_state, plain, tensor_files
from galvatron_fx.checkpoint.model_state import Shapes
from galvatron_fx.checkpoint.ranks import Ranks
from galvatron_fx.checkpoint.training import HasState, Training
from galvatron_fx.checkpoint.undo import Undo
from galvatron_fx.ir.errors import CheckpointError
from galvatron_fx.runtime.module import DistributedGraphModule

STATE = "state.json"
FORMAT = 1
_MODEL = "model."


@dataclass(frozen=True)
class Snapshot:
    """Copies of this rank's ``tensors``, on the CPU, and the JSON ``record`` of all ranks."""

    tensors: dict[str, Tensor]
    record: dict[str, Any]

    @property
    def saved(self) -> Shapes:
        """Shapes and dtypes of all ranks' tensors."""
        shapes: Shapes = self.record["tensors"]
        return shapes


def take(training: Training, step: int, extra: Mapping[str, Any], ranks: Ranks) -> Snapshot:
    """Copy the state of this moment. Every rank calls it; raises CheckpointError on all where it fails on any."""
    tensors: dict[str, Tensor] = {}

    def own_record() -> dict[str, Any]:
        copies = model_state.copies(training.model)
        sources = {_MODEL + n: t for n, t in model_state.tensors(training.model).items() if n not in copies}
        optimizer = None
        if training.optimizer is not None:
            state, optimizer = optimizer_state.take(training.model, training.optimizer, copies)
            sources |= state
        tensors.update({name: tensor_files.host_copy(name, tensor) for name, tensor in sources.items()})
        return {
            "step": step,
            "tensors": {name: model_state.shape_of(tensor) for name, tensor in tensors.items()},
            "optimizer": optimizer,
            "scheduler": _state_of(training.scheduler, "scheduler"),
            "dropout": plain.encode(_dropout(training.model), "dropout"),
            "loader": _state_of(training.loader, "loader"),
            "generators": plain.encode(generators.states(), "generators"),
            "extra": plain.encode(dict(extra), "extra"),
        }

    records = ranks.gather(f"copy the state of step {step}", own_record)
    record = ranks.run(f"put together the state of step {step}", lambda: _merged(records))
    return Snapshot(tensors, record)


def _merged(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of all ranks: what differs between ranks as a list, the rest as rank 0 has it."""
    first = records[0]
    for rank, record in enumerate(records):
        if record["step"] != first["step"] or (record["optimizer"] is None) != (first["optimizer"] is None):
            raise CheckpointError(f"rank {rank} saves step {record['step']}, rank 0 step {first['step']}: save alike")
    optimizer = None
    if first["optimizer"] is not None:
        optimizer = optimizer_state.merge([record["optimizer"] for record in records])
    return {
        "format": FORMAT,
        **first,
        "tensors": {name: shape for record in records for name, shape in record["tensors"].items()},
        "optimizer": optimizer,
        "loader": [record["loader"] for record in records],
        "generators": [record["generators"] for record in records],
    }


def write_record(folder: Path, record: Mapping[str, Any]) -> Path:
    """Write the JSON of a checkpoint; it is on the disk when this returns."""
    path = folder / STATE
    with open(path, "x", encoding="utf-8") as out:
        json.dump(record, out)
        out.flush()
        os.fsync(out.fileno())
    return path


def read_record(folder: Path) -> dict[str, Any]:
    """Read the JSON of a checkpoint that was verified. Raises CheckpointError for one of another version."""
    record: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
    if record.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder / STATE} is of format {record.get('format')}, this version of Galvatron-FX reads {FORMAT}"
        )
    return record


def restore(training: Training, folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Load a verified checkpoint into the objects, and return the ``extra`` saved with it. Every rank calls it.

    Raises CheckpointError on all ranks where something fails on any; everything is then as it was.
    """
    record = ranks.run("read the state", lambda: read_record(folder))
    files = ranks.run("read the manifest", lambda: manifest.parse(folder).files)
    held = {_MODEL + name: tensor for name, tensor in model_state.tensors(training.model).items()}
    targets = dict(ranks.run("match the state", lambda: _optimizer_targets(training, record)))
    everywhere = set().union(*ranks.gather("list its tensors", lambda: {*held, *targets}))
    ignored = () if training.optimizer is not None else (optimizer_state.PREFIX,)
    saved = {name: shape for name, shape in record["tensors"].items() if not name.startswith(ignored)}
    ranks.run("match the model", lambda: model_state.check_fit(str(folder), saved, held | targets, everywhere))
    ranks.run("match the state", lambda: _check_given(training, record, ranks))
    states = ranks.run("decode the state", lambda: _States.of(training, record, ranks))
    undo = ranks.run("copy the state that is to be replaced", lambda: Undo.of(training, held.values()))
    with undo.unless_done():
        tensor_files.read(folder, files.keys(), held | targets, ranks)
        ranks.run("take the state", lambda: _give(training, record, targets, states))
    return states.extra


@dataclass(frozen=True)
class _States:
    """What this rank's scheduler, loader, dropout and generators go on with, None for what is not there; and extra."""

    scheduler: Any
    loader: Any
    dropout: Tensor | None
    generators: dict[str, Any]
    extra: dict[str, Any]

    @classmethod
    def of(cls, training: Training, record: Mapping[str, Any], ranks: Ranks) -> _States:
        has_dropout = isinstance(training.model, DistributedGraphModule)
        loader = _of_rank(record["loader"], ranks) if training.loader is not None else None
        return cls(
            plain.decode(record["scheduler"], "scheduler") if training.scheduler is not None else None,
            plain.decode(loader, "loader"),
            plain.decode(record["dropout"], "dropout") if has_dropout else None,
            plain.decode(_of_rank(record["generators"], ranks), "generators"),
            plain.decode(record["extra"], "extra"),
        )


def _optimizer_targets(training: Training, record: Mapping[str, Any]) -> dict[str, Tensor]:
    if training.optimizer is None:
        return {}
    if record["optimizer"] is None:
        raise CheckpointError("the checkpoint holds no optimizer: load it without one")
    found = optimizer_state.targets(training.model, training.optimizer, record["optimizer"], record["tensors"])
    return {name: target.empty() for name, target in found.items()}


def _check_given(training: Training, record: Mapping[str, Any], ranks: Ranks) -> None:
    if training.scheduler is not None and record["scheduler"] is None:
        raise CheckpointError("the checkpoint holds no scheduler: load it without one")
    states = record["loader"]
    if training.loader is not None and states[0] is None:
        raise CheckpointError("the checkpoint holds no loader: load it without one")
    if training.loader is not None and len(states) != ranks.size and any(state != states[0] for state in states):
        raise CheckpointError(
            f"the loaders of {len(states)} ranks were at unlike positions, which {ranks.size} ranks cannot take over: "
            f"give every rank the same global batch, or load without the loader"
        )


def _give(training: Training, record: Mapping[str, Any], loaded: Mapping[str, Tensor], states: _States) -> None:
    """Set all that is not a tensor of the model; generators last, since the others may draw from them."""
    if training.optimizer is not None:
        optimizer_state.restore(training.model, training.optimizer, record["optimizer"], loaded)
    if training.scheduler is not None:
        training.scheduler.load_state_dict(states.scheduler)
    if training.loader is not None:
        training.loader.load_state_dict(states.loader)
    if isinstance(training.model, DistributedGraphModule) and states.dropout is not None:
        training.model.dropout_generator.set_state(states.dropout)
    generators.restore(states.generators)


def _of_rank(states: list[Any], ranks: Ranks) -> Any:
    """The state that this rank goes on with: its own, or on more ranks than there were, one of theirs in turn."""
    return states[ranks.rank % len(states)]


def _state_of(thing: HasState | None, where: str) -> Any:
    return None if thing is None else plain.encode(thing.state_dict(), where)


def _dropout(model: nn.Module) -> Tensor | None:
    return model.dropout_generator.get_state() if isinstance(model, DistributedGraphModule) else None
