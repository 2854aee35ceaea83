"""Which requests a server takes into its next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.plan.arguments import shown

__all__ = ["POLICIES", "Policy", "make_policies"]

PREFILL_FIRST, MIXED, CHUNKED = "prefill_first", "mixed", "chunked"
POLICIES = (PREFILL_FIRST, MIXED, CHUNKED)


@dataclass(frozen=True)
class Policy:
    """How steps are put together, anew for every step (Yu et al. 2022, Orca: iteration-level scheduling).

    ``prefill_first``: prompts that wait, whole, in steps of their own, before any request gets its next token (Kwon et
    al. 2023, vLLM); ``mixed``: whole prompts beside the next tokens of all others (Orca); ``chunked``: the same with
    prompts in parts, so that no step has over ``most_tokens`` (Agrawal et al. 2023, SARATHI). ``most_tokens``: new
    tokens of a step, which one longer prompt that is whole may exceed. ``halves``: each step as two half-batches of
    which one computes while the other communicates, where that is faster (Zhu et al. 2024, NanoFlow).
    """

    name: str
    most_tokens: float = inf
    halves: bool = False

    def __post_init__(self) -> None:
        if self.name not in POLICIES:
            raise InputError(f"policy is {shown(self.name)}: give one of {', '.join(POLICIES)}")
        if isinstance(self.most_tokens, bool) or not self.most_tokens >= 1:
            raise InputError(f"most_tokens of a policy is {shown(self.most_tokens)}: give tokens of a step, from 1")

    @property
    def mixes(self) -> bool:
        """Whether prompts and next tokens share steps."""
        return self.name != PREFILL_FIRST

    @property
    def splits(self) -> bool:
        """Whether prompts come in parts."""
        return self.name == CHUNKED

    def most_in_step(self, longest_prompt: int, most_requests: int) -> float:
        """The most new tokens that any step has."""
        prompts = self.most_tokens if self.splits else max(self.most_tokens, longest_prompt)
        return max(prompts, most_requests) if not self.mixes or self.splits else prompts + most_requests

    def __str__(self) -> str:
        """Return the name with its chunk, and whether half-batches overlap."""
        name = f"{self.name} {self.most_tokens:g}" if self.splits else self.name
        return f"{name}, halves" if self.halves else name


def make_policies(
    names: Sequence[str], chunks: Sequence[int], most_tokens: int, halves: Sequence[bool]
) -> tuple[Policy, ...]:
    """All policies of such names: ``chunked`` one of each of ``chunks``; raises InputError for none, or a wrong one."""
    if not names or not halves or (CHUNKED in names and not chunks):
        raise InputError("no policies to compare: give one or more, and chunks for 'chunked'")
    return tuple(
        Policy(name, limit, half)
        for name in names
        for limit in (chunks if name == CHUNKED else (most_tokens,))
        for half in halves
    )
