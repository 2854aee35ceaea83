"""A folder of weights as transformers writes it: one safetensors file, or several with an index."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from galvatron_fx.checkpoint.model_state import dtype_name
from galvatron_fx.ir.errors import CheckpointError, InputError
from galvatron_fx.ir.regular_file import open_regular
from galvatron_fx.ir.strict_json import read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MOST_INDEX_BYTES = 200_000_000
SHARD = "model-{number:05d}-of-{count:05d}.safetensors"


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies, its shape, and its dtype such as "float32"."""

    file: str
    shape: list[int]
    dtype: str


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder by name, from the headers of its files.

    Raises CheckpointError naming the file that is missing, cut short, or at odds with the index.
    """
    if (folder / SINGLE).exists():
        return _header(folder, SINGLE)
    if not (folder / INDEX).exists():
        raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}: give a folder as save_pretrained makes it")
    weight_map = _weight_map(folder / INDEX)
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        tensors |= _header(folder, file)
    astray = [name for name in weight_map if name not in tensors or tensors[name].file != weight_map[name]]
    if astray:
        raise CheckpointError(f"{folder / weight_map[astray[0]]} does not hold {astray[0]}, which {INDEX} says it does")
    return {name: tensors[name] for name in weight_map}


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file, to read slices of. Raises CheckpointError naming it where it is missing or malformed."""
    try:
        open_regular(path).close()  # the library would wait for ever at a pipe
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path} is cut short or damaged: {error}") from error


def _header(folder: Path, name: str) -> dict[str, StoredTensor]:
    tensors = {}
    with opened(folder / name) as file:
        for key in file.keys():  # noqa: SIM118, since the file is no mapping
            part = file.get_slice(key)
            # An empty slice tells the dtype as torch names it.
            shape = part.get_shape()
            kind = part[:0].dtype if shape else file.get_tensor(key).dtype
            tensors[key] = StoredTensor(name, shape, dtype_name(kind))
    return tensors


def _weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = read_object(path, "an index of weights", _MOST_INDEX_BYTES)["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (InputError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is not an index of weights: {type(error).__name__}: {error}") from error
    outside = [file for file in files.values() if Path(file).name != file]
    if outside:
        raise CheckpointError(f"{path} names a file outside its folder: {outside[0]}")
    return files
