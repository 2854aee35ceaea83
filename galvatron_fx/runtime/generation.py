"""``generate`` of transformers' models on a compiled one: their own loop, on whole logits that all ranks have."""

from __future__ import annotations

import copy
import functools
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.torch_compat.tensors import pytree
from galvatron_fx.runtime.checksums import checksum
from galvatron_fx.runtime.members import Members
from galvatron_fx.runtime.same_weights import gathered

__all__ = ["Generating", "generate"]

_WAYS = ("greedy_search", "sample")


class Generating(Protocol):
    """A compiled model, as generation takes it."""

    mesh: DeviceMesh
    _members: Members

    def on_all_ranks(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; each rank has all outputs."""
        ...


def generate(model: Generating, twin: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call ``generate`` of the class of ``twin``, which computes by ``model``. Every rank calls it alike, and has all
    that it returns.

    A cache of fixed length is the default. Raises InputError for encoders with decoders and for other ways than greedy
    search and sampling (beams, assistants, lookups in the prompt), which the ranks' parts of a cache do not serve, and
    where ranks would sample by other random numbers.
    """
    original: Any = twin
    settings = kwargs.get("generation_config") or original.generation_config
    _refuse_unfit(original, settings, kwargs)
    if kwargs.get("do_sample", settings.do_sample):
        _require_equal_draws(model.mesh.device_type, model._members)
    options = {"disable_compile": True, **kwargs}
    has_cache = kwargs.get("use_cache", settings.use_cache) is not False
    if has_cache and "past_key_values" not in kwargs and settings.cache_implementation is None:
        options.setdefault("cache_implementation", "static")
    view = _view(model, twin)
    return type(view).generate(view, *args, **options)


def _view(model: Generating, twin: nn.Module) -> Any:
    """A copy of ``twin`` without weights, whose forward is that of ``model``."""

    @functools.wraps(twin.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        returned = model.on_all_ranks(*args, **kwargs)
        return pytree.tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, returned)

    view = copy.copy(twin)
    original: Any = type(twin)
    view.__class__ = _kind(original, model.mesh.device_type)
    view.__dict__["forward"] = forward
    return view


@functools.cache
def _kind(original: Any, device_type: str) -> type:
    """The class of the original, on the device of the mesh: the copy has no weights that would tell."""

    def device(_: object) -> torch.device:
        return torch.empty(0, device=device_type).device

    return type(original.__name__, (original,), {"device": property(device)})


def _refuse_unfit(original: Any, settings: Any, given: dict[str, Any]) -> None:
    asked = copy.deepcopy(settings)
    asked.update(**given)
    way = str(asked.get_generation_mode(given.get("assistant_model")).value)
    cause = ""
    if getattr(original.config, "is_encoder_decoder", False):
        cause = "runs the encoder by itself, which is no part of the compiled program"
    elif way not in _WAYS or given.get("custom_generate") is not None:
        way = way if way not in _WAYS else "custom generate"
        cause = f"by {way.replace('_', ' ')} may move or cut what is in the cache, of which each rank has its part"
    if cause:
        raise InputError(
            f"generate() of a compiled model {cause}: write the loop with calls of the model (docs/inference.md), or "
            f"on all ranks call whole = galvatron_fx.gather(model), then whole.generate(...)"
        )


def _require_equal_draws(device_type: str, members: Members) -> None:
    if members.size == 1:
        return
    state: Tensor = (
        torch.get_rng_state() if device_type == "cpu" else torch.get_device_module(device_type).get_rng_state()
    )
    sums = gathered(checksum(state)[None], device_type, members)
    if bool((sums != sums[0]).any()):
        raise InputError(
            "generate() would sample by other random numbers on each rank: call torch.manual_seed(seed) with the same "
            "seed on all ranks before"
        )
