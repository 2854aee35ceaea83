"""Caches of keys and values on real ranks: run by ``test_caches.py``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import DynamicCache, StaticCache

import galvatron_fx
from galvatron_fx import Pipelining, Plan
from galvatron_fx.errors import InputError
from galvatron_fx.runtime.absent_cache import AbsentCache
from tests.runtime.cached_models import Kept, decoder, greedy, llama, prompts, whole
from tests.runtime.launch import Check, fork_checks, runs
from tests.runtime.shared_lowerings import Compiled, compile_before_the_fork

STAGES = Plan.uniform((2,), ("pipeline",), pipelining=Pipelining(2, 1, "gpipe"))
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def plan_of(role: str) -> Plan:
    return STAGES if role == "pipeline" else Plan.uniform((2,), (role,))


def static(model: Any, batch: int, longest: int = 13) -> StaticCache:
    """A cache that is longer than prompt and answer, and made whole on every rank."""
    cache = StaticCache(model.config, max_cache_len=longest)
    cache.early_initialization(batch, model.config.num_key_value_heads, 8, torch.float64, torch.device("cpu"))
    return cache


@dataclass(frozen=True)
class Decodes:
    """A check: the tokens are those of one device; a second request takes the same programs."""

    role: str
    new_cache: Callable[[Any, int], Any]
    batch: int = 4
    padded: bool = False
    steps: int = 4
    layers: int = 1

    @property
    def model(self) -> Any:
        return llama(layers=self.layers)

    @property
    def mask(self) -> Tensor | None:
        return (torch.arange(13) >= torch.arange(self.batch)[:, None] % 3).long() if self.padded else None

    @property
    def first_call(self) -> dict[str, Any]:
        given = {"input_ids": prompts(self.batch, 5), "past_key_values": self.new_cache(self.model, self.batch)}
        return given if self.mask is None else {**given, "attention_mask": self.mask}

    def __call__(self, mesh: DeviceMesh) -> None:
        model, ids, role = self.model, prompts(self.batch, 5), self.role
        tokens, scores = greedy(model, ids, self.new_cache(model, self.batch), self.steps, self.mask)
        compiled: Any = galvatron_fx.compile(model, mesh, self.first_call, plan=plan_of(role), forward_only=True)
        for _ in range(2):
            cache = self.new_cache(model, self.batch)
            found, found_scores = greedy(compiled, ids, cache, self.steps, self.mask, 1 if role == "pipeline" else None)
            torch.testing.assert_close(found_scores, scores, **EXACT)
            assert torch.equal(found, tokens)
        check_lies(cache, role, mesh.get_rank(), self.batch)


def check_lies(cache: Any, role: str, rank: int, batch: int) -> None:
    """Each rank has its part of the cache, which reads as a whole."""
    first, last = cache.layers[0].keys, cache.layers[-1].keys
    assert first.shape == last.shape and first.shape[:2] == (batch, 2)
    if role == "pipeline":
        here, elsewhere = (first, last) if rank == 0 else (last, first)
        assert here.to_local().shape == here.shape and isinstance(elsewhere, AbsentCache)
        with pytest.raises(InputError, match=r"cache 'past_key_values.layers\[\d\].keys' is not on this rank: under"):
            elsewhere.sum()
        assert "which is not on this rank" in repr(elsewhere)
        cache.reset()
    elif batch > 1 or role == "tensor":
        assert (
            first.placements == (Shard(1 if role == "tensor" else 0),) and first.to_local().numel() * 2 == first.numel()
        )


def lazy(model: Any, batch: int) -> StaticCache:
    return StaticCache(model.config, max_cache_len=13)


def dynamic(model: Any, batch: int) -> DynamicCache:
    return DynamicCache(config=model.config)


def own_cache(mesh: DeviceMesh) -> None:
    """An object of the user's own, whose number moves on, keeps its lists and dicts."""
    model, ids = decoder(), prompts(4, 5)
    compiled: Any = galvatron_fx.compile(
        model, mesh, (ids, Kept(3, 4, 4, 9, 4)), plan=plan_of("tensor"), forward_only=True
    )
    expected, found = Kept(3, 4, 4, 9, 4), Kept(3, 4, 4, 9, 4)
    layers = list(found.layers)
    for given in (ids, ids[:, :2]):
        want, have = model(given, expected), compiled(given, found)
        torch.testing.assert_close(whole(have["logits"]), want["logits"], **EXACT)
        assert have["cache"] is found and found.length == expected.length
        assert all(before is after for before, after in zip(layers, found.layers, strict=True))
    for mine, theirs in zip(found.layers, expected.layers, strict=True):
        assert isinstance(mine["keys"], DTensor)
        torch.testing.assert_close(whole(mine["values"]), theirs["values"], **EXACT)


def kept(batch: int, longest: int = 9) -> list[dict[str, Tensor]]:
    return Kept(3, batch, 4, longest, 4).layers


def lists(mesh: DeviceMesh) -> None:
    """Tensors in a list of dicts; positions are a tensor, so that decoding is one program; odd batches are whole."""
    model, start = decoder(), torch.tensor(0)
    for role, batch in (("tensor", 3), ("data", 3), ("data", 4)):
        ids = prompts(batch, 4)
        compiled: Any = galvatron_fx.compile(
            model, mesh, (ids, kept(batch), start), plan=plan_of(role), forward_only=True
        )
        expected, found = kept(batch), kept(batch)
        for at in range(0, 8, 4):
            want, have = model(ids, expected, start + at), compiled(ids, found, start + at)
            torch.testing.assert_close(whole(have["logits"]), want["logits"], **EXACT)
        assert len(compiled._programs) == 1
        torch.testing.assert_close(whole(found[2]["keys"]), expected[2]["keys"], **EXACT)
        assert isinstance(found[2]["keys"], DTensor) == (batch % 2 == 0 or role == "tensor")


class Direct(nn.Module):
    """Adds to a tensor that is an argument itself."""

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        return cache.add_(x).sum(1)


def direct() -> dict[str, Tensor]:
    return {"x": torch.ones(4, 3), "cache": torch.zeros(4, 3)}


def refusals(mesh: DeviceMesh) -> None:
    """What cannot be kept is refused by name."""
    model, ids, start = decoder(), prompts(4, 4), torch.tensor(0)
    compiled: Any = galvatron_fx.compile(model, mesh, (ids, kept(4), start), plan=plan_of("tensor"), forward_only=True)
    one = kept(4)
    one[0]["values"] = one[0]["keys"]
    with pytest.raises(InputError, match=r"1\[0\]\['values'\] and 1\[0\]\['keys'\] are one tensor, which forward chan"):
        compiled(ids, one, start)
    itself: Any = galvatron_fx.compile(Direct(), mesh, direct(), plan=plan_of("data"), forward_only=True)
    with pytest.raises(InputError, match=r"splits the cache 'cache' over its ranks, .* give caches in a list"):
        itself(**direct())
    local = galvatron_fx.compile(
        model, mesh, (ids, kept(4), start), plan=plan_of("tensor"), forward_only=True, batch="local"
    )
    with pytest.raises(InputError, match=r"forward changes the cache '1\[0\]\['keys'\]', of which each rank"):
        local(ids, kept(4), start)


CHECKS: dict[str, Check] = {
    "tensor": Decodes("tensor", static, layers=2),
    "data": Decodes("data", static, layers=2),
    "stages": Decodes("pipeline", static, layers=2),
    "lazy": Decodes("tensor", lazy),
    "padded": Decodes("tensor", static, padded=True),
    "one_request": Decodes("tensor", static, batch=1, layers=2),
    "dynamic": Decodes("tensor", dynamic, steps=2),
    "own_cache": own_cache,
    "lists": lists,
    "refusals": refusals,
}


def compiled() -> Iterator[Compiled]:
    """What the checks compile."""
    for name, check in CHECKS.items():
        if isinstance(check, Decodes) and runs(name):
            yield check.model, check.first_call, [plan_of(check.role)]
    model, start = decoder(), torch.tensor(0)
    yield model, (prompts(4, 5), Kept(3, 4, 4, 9, 4)), [plan_of("tensor")]
    yield model, (prompts(3, 4), kept(3), start), [plan_of("tensor"), plan_of("data")]
    yield model, (prompts(4, 4), kept(4), start), [plan_of("data"), plan_of("tensor")]


def prepare() -> None:
    """Capture and lower for both ranks."""
    compile_before_the_fork((2,), compiled(), forward_only=True)


if __name__ == "__main__":
    fork_checks((2,), CHECKS, sys.argv[1:], prepare)
