"""Ways to serve a model on a cluster: replicas of it, each in stages, whose ranks split every operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, prod

from cost_models.request_costs import Load
from galvatron_fx.ir.cluster.cluster import Axis, Cluster
from galvatron_fx.ir.plan.pipelining import Pipelining
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.strategy import PIPELINE, Strategy
from galvatron_fx.serving.step_times import StepTimes
from passes.search.solvers.cuts import balanced
from passes.simulation.request_steps import RequestSteps

__all__ = ["Layout", "Memory", "layouts"]

_TENSOR = "tensor"
_TYPICAL = Load.of([(512, 1)] * 32)  # by which stages are balanced: most steps make one token of each request


@dataclass(frozen=True)
class Layout:
    """Which mesh axes hold replicas (the outermost), stages, and parts of every operator (the innermost)."""

    replica_axes: tuple[Axis, ...]
    stage_axes: tuple[Axis, ...]
    tensor_axes: tuple[Axis, ...]

    @property
    def replicas(self) -> int:
        """Copies of the model, which share out the requests."""
        return prod(axis.size for axis in self.replica_axes)

    @property
    def stages(self) -> int:
        """Stages of each replica."""
        return prod(axis.size for axis in self.stage_axes)

    @property
    def tensor(self) -> int:
        """Ranks of each stage."""
        return prod(axis.size for axis in self.tensor_axes)

    def __str__(self) -> str:
        """Return it in words."""
        parts = [
            f"{self.replicas} replicas" if self.replicas > 1 else "",
            f"{self.stages} stages" if self.stages > 1 else "",
            f"tensor {self.tensor}" if self.tensor > 1 else "",
        ]
        return ", ".join(part for part in parts if part) or "one device"

    def part(self, cluster: Cluster) -> tuple[Cluster, Strategy]:
        """The devices of one stage, and what each block does there."""
        axes = self.tensor_axes or (replace(cluster.axes[-1], size=1, curves=()),)
        return replace(cluster, axes=axes), Strategy((_TENSOR,) * len(axes))

    def plan(self, cuts: tuple[int, ...]) -> Plan:
        """The plan of one replica, as :func:`galvatron_fx.compile` takes it for a mesh of its devices."""
        axes = (*self.stage_axes, *self.tensor_axes)
        roles = (PIPELINE,) * len(self.stage_axes) + (_TENSOR,) * len(self.tensor_axes)
        pipelining = Pipelining(len(cuts), 1, "gpipe", cuts) if len(cuts) > 1 else Pipelining()
        if not axes:
            return Plan.uniform((1,), (_TENSOR,))
        return Plan.uniform(tuple(axis.size for axis in axes), roles, pipelining=pipelining)

    def times(self, steps: RequestSteps, cluster: Cluster) -> StepTimes:
        """Seconds of steps, with stages cut so that the slowest is as fast as can be."""
        cuts = balanced(steps.block_seconds(_TYPICAL), self.stages) if self.stages > 1 else (0,)
        return StepTimes(steps, cuts, self.stage_axes, cluster.overlap)


@dataclass(frozen=True)
class Memory:
    """What the ranks of a replica have room for: ``tokens`` of requests' keys and values; ``held_bytes``: of parameters
    on the fullest rank; ``stages``: for each stage the bytes that it takes without requests, and for each key.
    """

    tokens: float
    held_bytes: int
    stages: tuple[tuple[float, float], ...]

    def needed_bytes(self, keys: int) -> int:
        """What the fullest rank takes with so many keys in the cache."""
        return ceil(max(fixed + keys * per_key for fixed, per_key in self.stages))

    @classmethod
    def of(cls, times: StepTimes, budget_bytes: int, most_tokens: float, most_requests: int) -> Memory:
        """The room on the fullest stage beside parameters, what a step of ``most_tokens`` makes on its way, and what
        ``most_requests`` hold however long they are.
        """
        steps = times.steps
        tokens, most_held, stages = inf, 0, []
        for first, end in zip(times.cuts, [*times.cuts[1:], steps.num_blocks], strict=True):
            held = steps.held_bytes(first, end, ("param", "buffer"))[0]
            always, per_request, _, per_key, _ = steps.held_bytes(first, end, ("cache",)).tolist()
            passing = most_tokens * steps.passing_bytes_per_token
            fixed = held + passing + always + most_requests * per_request
            stages.append((fixed, per_key))
            left = budget_bytes - fixed
            most_held = max(most_held, ceil(held))
            tokens = min(tokens, left / per_key if per_key else inf if left >= 0 else -1.0)
        return cls(tokens, most_held, tuple(stages))


def layouts(axes: Sequence[Axis], num_blocks: int) -> Iterator[Layout]:
    """All of a cluster, those of the largest replicas last."""
    real = [axis for axis in axes if axis.size > 1]
    for first in range(len(real), -1, -1):
        for second in range(len(real), first - 1, -1):
            layout = Layout(tuple(real[:first]), tuple(real[first:second]), tuple(real[second:]))
            if layout.stages <= num_blocks:
                yield layout
