"""Write the weights of a compiled model as transformers does: files that ``from_pretrained`` reads."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from galvatron_fx.checkpoint import model_state
from galvatron_fx.checkpoint.ranks import Ranks
from galvatron_fx.checkpoint.steps import sync_directory
from galvatron_fx.ir.errors import CheckpointError
from galvatron_fx.ir.plan.arguments import check_arguments
from galvatron_fx.ir.plan.units import parse_bytes
from galvatron_fx.weights.folder import INDEX, SHARD, SINGLE
from galvatron_fx.weights.whole import Whole, gathered, whole_tensors

_CONFIG = "config.json"
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja")


def save_weights(
    model: nn.Module,
    folder: str | PathLike[str],
    *,
    like: str | PathLike[str] | None = None,
    max_shard_size: str | int = "50GB",
) -> None:
    """Write the weights of ``model`` as safetensors that ``from_pretrained`` of transformers loads bit for bit.

    Every rank calls it. Tensors are gathered one at a time, and files written by the ranks in turn: a rank holds one
    file's tensors, and one more, in memory. ``like``: a folder whose config and tokenizer files are copied, with the
    dtype of the weights entered in config.json; ``max_shard_size``: bytes of tensors in one file, a number or a text
    like "5GB" (the default is transformers').

    The folder appears whole or not at all. Raises CheckpointError on every rank where it is there already and not
    empty, or where writing fails on any rank.
    """
    check_arguments(model=model, folder=folder, like=like)
    limit_bytes = parse_bytes(max_shard_size)
    place = Path(folder)
    with Ranks.for_now(model) as ranks:
        held = model_state.tensors(model)
        copies = model_state.copies(model)
        table = whole_tensors({name: tensor for name, tensor in held.items() if name not in copies}, ranks)
        files = _files(table, limit_bytes)
        written = ranks.decide("make the folder", lambda: _begin(place, like))
        with ThreadPoolExecutor(1) as pool:
            done = _write_files(written, files, table, held, ranks, pool)
            ranks.run("write the weights", lambda: [future.result() for future in done])
        ranks.decide("complete the folder", lambda: _complete(written, place, files, table, like))


def _files(table: Mapping[str, Whole], limit_bytes: int) -> dict[str, list[str]]:
    """The names of the tensors in every file; one that is larger than the limit has a file of its own."""
    groups: list[list[str]] = [[]]
    filled_bytes = 0
    for name, whole in table.items():
        if groups[-1] and filled_bytes + whole.size_bytes > limit_bytes:
            groups.append([])
            filled_bytes = 0
        groups[-1].append(name)
        filled_bytes += whole.size_bytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {SHARD.format(number=number, count=len(groups)): names for number, names in enumerate(groups, start=1)}


def _begin(place: Path, like: str | PathLike[str] | None) -> Path:
    if like is not None and not (Path(like) / _CONFIG).exists():
        raise CheckpointError(f"{like} holds no {_CONFIG} to copy")
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise CheckpointError(f"{place} is there already: give a new or an empty folder")
    place.parent.mkdir(parents=True, exist_ok=True)
    written = place.parent / f".writing-{place.name}-{secrets.token_hex(4)}"
    written.mkdir()
    return written


def _write_files(
    folder: Path,
    files: Mapping[str, Sequence[str]],
    table: Mapping[str, Whole],
    held: Mapping[str, Tensor],
    ranks: Ranks,
    pool: ThreadPoolExecutor,
) -> list[Future[None]]:
    """Gather the tensors, file by file, to the ranks in turn, which write them beside; returns this rank's writes."""
    done: list[Future[None]] = []
    for index, (file, names) in enumerate(files.items()):
        writer = index % ranks.size
        if writer == ranks.rank and done:
            done[-1].exception()  # one file in memory at a time; an error is told at the end, to all
        tensors = {}
        for name in names:
            whole = gathered(table[name], held.get(name), writer, ranks)
            if whole is not None:
                tensors[name] = whole
        if writer == ranks.rank:
            done.append(pool.submit(_write, folder / file, tensors))
    return done


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    _sync(path)


def _sync(path: Path) -> None:
    """Bring what a file holds to the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _complete(
    written: Path,
    place: Path,
    files: Mapping[str, Sequence[str]],
    table: Mapping[str, Whole],
    like: str | PathLike[str] | None,
) -> None:
    """Write the index and the files to copy, and let the folder appear."""
    if like is not None:
        _copy(Path(like), written, {whole.dtype for whole in table.values() if "float" in whole.dtype})
    if SINGLE not in files:
        totals = {
            "total_parameters": sum(prod(whole.shape) for whole in table.values()),
            "total_size": sum(whole.size_bytes for whole in table.values()),
        }
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": totals, "weight_map": dict(sorted(weight_map.items()))}
        (written / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for path in sorted(written.iterdir()):
        if path.name not in files:  # those were synced as they were written
            _sync(path)
    sync_directory(written)
    written.rename(place)
    sync_directory(place.parent)


def _copy(source: Path, target: Path, dtypes: set[str]) -> None:
    """Copy config and tokenizer files; config.json says what dtype ``from_pretrained`` makes of the weights."""
    for path in sorted(path for pattern in _COPIED for path in source.glob(pattern)):
        if not path.name.endswith(".index.json"):
            shutil.copyfile(path, target / path.name)
    config = target / _CONFIG
    settings: dict[str, Any] = json.loads(config.read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in settings else "dtype"
    if len(dtypes) == 1 and settings.get(key) not in dtypes:
        settings[key] = dtypes.pop()
        config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
