"""The pairs of model and plan whose steps are predicted and then measured: listed here before anything is run."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.common.small_models import Size, Sized, bert, gpt2, llama, t5, vit
from galvatron_fx.ir.plan.pipelining import Pipelining
from galvatron_fx.ir.plan.plan import Plan

MODELS: dict[str, Sized] = {
    "gpt2": (gpt2, Size(256, 4, 4, 4096, 8, 128)),
    "gpt2 wide": (gpt2, Size(512, 2, 8, 2048, 8, 64)),
    "llama": (llama, Size(256, 4, 8, 256, 16, 128)),
    "llama long": (llama, Size(128, 4, 4, 1024, 8, 256)),
    "bert": (bert, Size(256, 4, 4, 4096, 8, 128)),
    "t5": (t5, Size(256, 4, 4, 4096, 8, 128)),
    "vit": (vit, Size(256, 4, 4, 128, 16, 64)),
}


@dataclass(frozen=True)
class Pair:
    """A model under a plan: roles by axis (outermost first), recomputation, stages."""

    model: str
    roles: tuple[str, ...]
    recompute: bool = False
    stages: int = 1

    @property
    def ranks(self) -> int:
        """Processes: every axis has two."""
        return 2 ** len(self.roles)

    @property
    def name(self) -> str:
        """In words."""
        more = ", recompute" * self.recompute + f", {self.stages} stages" * (self.stages > 1)
        return f"{self.model}, {'·'.join(self.roles) or 'one rank'}{more}"

    def plan(self) -> Plan:
        """As the compiler takes it."""
        pipelining = Pipelining(num_stages=self.stages, num_microbatches=4) if self.stages > 1 else Pipelining()
        axes = (2,) * len(self.roles) or (1,)
        return Plan.uniform(axes, self.roles or ("data",), recompute=self.recompute, pipelining=pipelining)


_ONE = [Pair(model, ()) for model in MODELS] + [Pair(model, (), recompute=True) for model in ("gpt2", "llama", "bert")]
_TWO = [Pair(model, (role,)) for model in MODELS for role in ("data", "zero", "tensor")]
_TWO += [Pair(model, ("pipeline",), stages=2) for model in ("gpt2", "llama")]
_TWO += [Pair("llama", ("zero",), recompute=True)]
_FOUR = [
    Pair(model, roles)
    for model in ("gpt2", "llama", "bert")
    for roles in (("data", "data"), ("zero", "zero"), ("data", "tensor"), ("zero", "tensor_sequence"))
]
_FOUR += [Pair(model, roles) for model in ("t5", "vit") for roles in (("data", "data"), ("zero", "tensor_sequence"))]
_FOUR += [Pair(model, ("pipeline", "data"), stages=2) for model in ("gpt2", "llama", "llama long")]
_FOUR += [Pair("t5", ("data", "data"), recompute=True)]

PAIRS: tuple[Pair, ...] = (*_ONE, *_TWO, *_FOUR)


def first_pairs(count: int) -> list[Pair]:
    """So many of :data:`PAIRS`, spread evenly over the list."""
    count = min(count, len(PAIRS))
    return [PAIRS[i * len(PAIRS) // count] for i in range(count)]
