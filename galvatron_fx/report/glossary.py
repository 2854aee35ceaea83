"""Words of the page that are not everybody's, explained where they stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["terms"]

_WORDS: Mapping[str, str] = {
    "zbv": "zero-bubble schedule in a V (Qi et al. 2024): each rank holds an early and a late stage, and gradients of "
    "weights, which nobody waits for, fill its waiting time",
    "zb_h1": "zero-bubble schedule (Qi et al. 2024): gradients of weights fill the time that a rank would wait",
    "1f1b": "one forward, one backward: each rank runs them by turns, which holds few micro-batches at once",
    "interleaved_1f1b": "1f1b with several stages a rank, which shortens the filling and draining of the pipeline",
    "micro-batches": "slices of the batch that run one after the other; their gradients are added up",
    "gathered kept": "parameters that zero splits are made whole once a step and kept until backward has used them",
    "gathered again": "parameters that zero splits are made whole for forward, dropped, and again for backward",
    "recompute": "forward's results are not kept: backward computes them again, which costs time and saves memory",
    "data": "ranks of the axis hold whole parameters and different samples (DDP)",
    "zero": "as data, with parameters, gradients and optimizer states split among the ranks (FSDP, ZeRO)",
    "tensor": "ranks of the axis split the matrices of a layer (Megatron)",
    "tensor_sequence": "as tensor, with activations between the layers split along the sequence",
    "sequence": "activations are split along the sequence, attention along its heads (Ulysses)",
    "context": "the sequence is split, attention included, whose keys and values go round a ring",
    "graph": "vertices of a graph are split, and edges or features where vertices are added up by edges",
    "expert": "ranks of the axis hold different experts, to which tokens are sent",
    "expert_sequence": "as expert, with tokens split along the sequence and not along the batch",
    "pipeline": "ranks of the axis hold different stages, one behind the other",
    "transients": "what operators make on the way and soon drop, gradients of activations included",
    "gathered parameters": "parameters made whole, or in another dtype, for use",
    "activations": "what forward keeps for backward",
    "copies to and from the host": "values that wait for backward in the host's memory go there and come back, beside "
    "computing; what is waited for counts",
    "copies of optimizer states": "states that live in the host's memory come to the device for their update and go "
    "back, behind backward",
    "hoisted": "moved from every micro-batch to the start of the step, since it is the same in all of them",
    "idle": "waiting for other stages: filling and draining of the pipeline, and stages that are not equally long",
    "gradient sums": "adding the gradients of a micro-batch to those of the ones before",
    "MFU": "model flops utilisation: flops of matrix products, attention and convolutions of forward and backward, "
    "without recomputation, over what all devices could do in the step at their datasheet's peak",
    "bound": "seconds that no plan beats by the search's prices, if all ranks are always busy",
    "all_gather": "every rank gets the parts of all: parameters that zero splits, or activations",
    "reduce_scatter": "gradients or activations are summed, and each rank keeps its part of the sum",
    "all_reduce": "all ranks get the sum, as of gradients under data",
    "all_to_all": "every rank sends another part to each: a change of what is split",
}


def terms(text: str, shown: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Return the words of the glossary that stand in ``text``, but for those ``shown`` before, with what they mean."""
    return [(word, meaning) for word, meaning in _WORDS.items() if word not in shown and _stands(word, text)]


def _stands(word: str, text: str) -> bool:
    """Whether the word stands there by itself, and not as a part of another."""
    padded = f" {text} "
    place = padded.find(word)
    while place >= 0:
        around = padded[place - 1] + padded[place + len(word)]
        if not any(letter.isalnum() or letter == "_" for letter in around):
            return True
        place = padded.find(word, place + 1)
    return False
