"""Read pretrained weights straight into the shards of a compiled model."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from galvatron_fx.checkpoint import model_state
from galvatron_fx.checkpoint.ranks import Ranks
from galvatron_fx.ir.plan.arguments import check_arguments
from galvatron_fx.runtime.dtensor_views import local_part
from galvatron_fx.weights.folder import StoredTensor, opened, stored_tensors


def load_weights(model: nn.Module, folder: str | PathLike[str], *, cast: bool = False) -> None:
    """Load a folder of safetensors, as transformers' save_pretrained writes it, into ``model`` in place.

    Every rank calls it and reads only the slices that it keeps, so that a model compiled from the meta device is never
    whole anywhere. A tied parameter is found under any of its names. ``cast``: convert floating point weights to the
    dtype of the model's instead of refusing.

    Raises CheckpointError on every rank, before any weight is changed, naming a file that is missing or cut short, and
    tensors that are missing, unknown to the model, or of another shape or dtype.
    """
    check_arguments(model=model, folder=folder, cast=cast)
    place = Path(folder)
    with Ranks.for_now(model) as ranks:
        stored = ranks.decide("read the headers of the weights", lambda: stored_tensors(place))
        wanted, known = _wanted(model, stored)
        everywhere = set().union(*ranks.gather("list its tensors", lambda: known))
        ranks.run("match the weights", lambda: _check(place, stored, wanted, everywhere, cast))
        ranks.run("read the weights", lambda: _read(place, stored, wanted))


def _wanted(model: nn.Module, stored: Mapping[str, StoredTensor]) -> tuple[dict[str, Tensor], set[str]]:
    """This rank's tensors by the name under which they are stored, and all names they go by."""
    held = model_state.tensors(model)
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    tied = {names[0]: names for names in aliases.values()}
    wanted = {}
    for name, tensor in held.items():
        wanted[next((alias for alias in tied.get(name, ()) if alias in stored), name)] = tensor
    return wanted, {*held, *(name for names in tied.values() for name in names)}


def _check(
    place: Path, stored: Mapping[str, StoredTensor], wanted: Mapping[str, Tensor], everywhere: set[str], cast: bool
) -> None:
    shapes = {name: (entry.shape, entry.dtype) for name, entry in stored.items()}
    if cast:
        for name, tensor in wanted.items():
            if name in stored and tensor.is_floating_point() and "float" in stored[name].dtype:
                shapes[name] = stored[name].shape, model_state.dtype_name(tensor.dtype)
    model_state.check_fit(str(place), shapes, wanted, everywhere)


def _read(place: Path, stored: Mapping[str, StoredTensor], wanted: Mapping[str, Tensor]) -> None:
    """Copy this rank's slices, file by file."""
    of_file: dict[str, list[str]] = {}
    for name in wanted:
        of_file.setdefault(stored[name].file, []).append(name)
    for file_name, names in sorted(of_file.items()):
        with opened(place / file_name) as file:
            for name in names:
                local_part(wanted[name]).detach().copy_(file.get_slice(name)[_slices(wanted[name])])


def _slices(tensor: Tensor) -> tuple[slice, ...]:
    """What this rank keeps of the whole tensor."""
    if not isinstance(tensor, DTensor):
        return (slice(None),) * tensor.dim()
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(slice(offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))
