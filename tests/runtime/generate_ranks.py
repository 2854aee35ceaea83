"""``generate`` of compiled models on real ranks: run by ``test_generate.py``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import T5Config, T5ForConditionalGeneration

import galvatron_fx
from galvatron_fx import Pipelining, Plan
from galvatron_fx.errors import InputError
from tests.runtime.cache_ranks import plan_of, static
from tests.runtime.cached_models import llama, prompts, whole
from tests.runtime.launch import Check, fork_checks
from tests.runtime.shared_lowerings import Compiled, compile_before_the_fork

LEFT_PADDED = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1], [0, 0, 0, 1, 1]])
OPTIONS = {"attention_mask": LEFT_PADDED, "max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}


def first_call(model: Any) -> dict[str, Any]:
    return {"input_ids": prompts(4, 5), "past_key_values": static(model, 4)}


def llama_of(role: str, seed: int = 0) -> Any:
    return llama(seed, layers=2 if role == "pipeline" else 1)


def compiled_llama(mesh: DeviceMesh, role: str, seed: int = 0) -> tuple[Any, Any]:
    model, plan = llama_of(role, seed), plan_of(role)
    return model, galvatron_fx.compile(model, mesh, first_call(model), plan=plan, forward_only=True)


def generates(role: str) -> Check:
    """Greedy and sampled tokens of prompts of unequal lengths are those of one device, from one seed."""

    def check(mesh: DeviceMesh) -> None:
        model, compiled = compiled_llama(mesh, role)
        ids = prompts(4, 5)
        for options in ({}, {"do_sample": True, "top_k": 8, "temperature": 1.3}):
            tokens = []
            for each in (model, compiled):
                torch.manual_seed(3)
                tokens.append(each.generate(ids, cache_implementation="static", **OPTIONS, **options))
            assert torch.equal(*tokens) and tokens[0].shape == (4, 11)
        assert len(compiled._programs) == 3  # the example, prompts with masks, one more token

    return check


@torch.no_grad()
def greedy_rest(model: Any, ids: Tensor, cache: Any) -> Tensor:
    return whole(model(input_ids=ids, past_key_values=cache).logits)[0].argmax(-1)


def back_to(cache: Any, length: int) -> None:
    for layer in cache.layers:
        layer.cumulative_length.fill_(length)


def speculated(draft: Any, target: Any, caches: list[Any], prompt: Tensor, count: int, ahead: int = 3) -> list[int]:
    """Tokens of ``target``, of which ``draft`` proposes ``ahead`` at a time (Leviathan et al. 2023, greedy)."""
    tokens = prompt[0].tolist()
    for model, cache in zip((draft, target), caches, strict=True):
        greedy_rest(model, prompt[:, :-1], cache)
    while len(tokens) < prompt.shape[1] + count:
        known, proposed = len(tokens), list(tokens)
        for _ in range(ahead):
            back_to(caches[0], len(proposed) - 1)
            proposed.append(int(greedy_rest(draft, torch.tensor([proposed[-1:]]), caches[0])[-1]))
        back_to(caches[1], known - 1)
        found = greedy_rest(target, torch.tensor([proposed[known - 1 :]]), caches[1]).tolist()
        right = next((at for at in range(ahead) if found[at] != proposed[known + at]), ahead)
        for at in range(right):  # the draft knows them but for the last one where all are right
            back_to(caches[0], known + at)
            greedy_rest(draft, torch.tensor([[proposed[known + at]]]), caches[0])
        tokens += found[: right + 1]
    return tokens[: prompt.shape[1] + count]


def draft_and_target(mesh: DeviceMesh) -> None:
    """Two compiled models on one mesh, under unlike plans: the tokens are those that the target decodes alone."""
    (draft, compiled_draft), (target, compiled_target) = (
        compiled_llama(mesh, role, seed) for role, seed in (("tensor", 1), ("tensor_sequence", 0))
    )
    prompt = prompts(1, 5)
    alone = target.generate(prompt, max_new_tokens=7, pad_token_id=0, eos_token_id=None)[0].tolist()
    caches = [static(draft, 1, 20), static(target, 1, 20)]
    assert speculated(compiled_draft, compiled_target, caches, prompt, 7) == alone


def refusals(mesh: DeviceMesh) -> None:
    """What ranks cannot do to parts of a cache is refused; so are unlike random numbers."""
    model, compiled = compiled_llama(mesh, "tensor")
    ids = prompts(4, 5)
    with pytest.raises(InputError, match=r"by beam search may move .*gather\(model\), then who"):
        compiled.generate(ids, num_beams=2)
    for options in ({"assistant_model": model}, {"prompt_lookup_num_tokens": 2}):
        with pytest.raises(InputError, match=r"by assisted generation may move or cut what is in the cache"):
            compiled.generate(ids, **options)
    torch.manual_seed(mesh.get_rank())
    with pytest.raises(InputError, match=r"other random numbers on each rank: call torch.manual_seed\(seed\) with the"):
        compiled.generate(ids, do_sample=True)
    parts = Plan.uniform((2,), ("pipeline",), pipelining=Pipelining(2, 2, "gpipe"))
    model = llama_of("pipeline")
    compiled = galvatron_fx.compile(model, mesh, {"input_ids": ids}, plan=parts, forward_only=True)
    with pytest.raises(InputError, match=r"2 micro-batches go through stages, and generate\(\) takes whole batches"):
        compiled.generate(ids, use_cache=False, max_new_tokens=1)
    sizes = {"num_layers": 1, "num_heads": 2, "vocab_size": 20, "decoder_start_token_id": 0}
    encoder = T5ForConditionalGeneration(T5Config(d_model=8, d_kv=4, d_ff=12, **sizes)).eval()
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.long), "decoder_input_ids": torch.ones(2, 2, dtype=torch.long)}
    compiled = galvatron_fx.compile(encoder, mesh, batch, plan=plan_of("tensor"), forward_only=True)
    with pytest.raises(InputError, match=r"generate\(\) of a compiled model runs the encoder by itself"):
        compiled.generate(batch["input_ids"])


CHECKS: dict[str, Check] = {
    "tensor": generates("tensor"),
    "stages": generates("pipeline"),
    "draft_and_target": draft_and_target,
    "refusals": refusals,
}


def compiled() -> Iterator[Compiled]:
    """What the checks compile."""
    for role in ("tensor", "tensor", "tensor", "tensor_sequence", "pipeline"):
        model = llama_of(role)
        yield model, first_call(model), [plan_of(role)]


def prepare() -> None:
    """Capture and lower for both ranks."""
    compile_before_the_fork((2,), compiled(), forward_only=True)


if __name__ == "__main__":
    fork_checks((2,), CHECKS, sys.argv[1:], prepare)
