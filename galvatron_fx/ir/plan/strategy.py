"""What one block does with every axis of the mesh, and what it keeps for backward.

``ROLES`` lists what a mesh axis can do for a block:

=================== =============================================================================
role                what the ranks along the axis do
=================== =============================================================================
``data``            split the batch; parameters are replicated, gradients all-reduced
``zero``            split the batch; parameters, gradients and optimizer states are sharded, and
                    the parameters gathered for use
``tensor``          split the parameters, as the solver inside the block chooses; what crosses a
                    block boundary is replicated
``tensor_sequence`` as ``tensor``, but what crosses a block boundary is split along the sequence
                    (Megatron sequence parallelism)
``expert``          split the batch, and the experts of a mixture of experts: tokens travel to the
                    ranks that hold their experts and back; other parameters are replicated
``expert_sequence`` as ``expert``, but tokens are split along the sequence, and attention by heads
``sequence``        split the activations along the sequence, and attention by heads; parameters are
                    replicated (Ulysses)
``context``         split the activations along the sequence, attention too: keys and values travel
                    around a ring of the ranks; parameters are replicated (ring attention)
``graph``           split the vertices of a graph network, and its edges or features where vertices are
                    looked up and added up by edges; parameters are replicated
``pipeline``        hold different stages of the model: the same axes for all blocks
=================== =============================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, prod

from galvatron_fx.ir.errors import PlanError

__all__ = [
    "BATCH_ROLES",
    "CAPACITY",
    "CONTEXT",
    "EXPERT",
    "EXPERT_ROLES",
    "EXPERT_SEQUENCE",
    "GRAPH",
    "LOWERING_ORDER",
    "OFFLOADABLE",
    "PIPELINE",
    "ROLES",
    "Boundary",
    "RoleGroup",
    "Strategy",
    "batch_ranks",
    "batch_share",
    "boundary",
    "cache_key",
    "copy_name",
    "original_name",
    "stand_in_name",
    "stood_for_name",
]

PIPELINE = "pipeline"
EXPERT = "expert"
EXPERT_SEQUENCE = "expert_sequence"
CONTEXT = "context"
GRAPH = "graph"

ROLES: tuple[str, ...] = (
    "data",
    "zero",
    "tensor",
    "tensor_sequence",
    "sequence",
    CONTEXT,
    GRAPH,
    EXPERT,
    EXPERT_SEQUENCE,
    PIPELINE,
)

BATCH_ROLES = ("data", "zero", EXPERT)
"""Those that split the batch."""

EXPERT_ROLES = (EXPERT, EXPERT_SEQUENCE)
"""Those that split experts, to which tokens travel."""

LOWERING_ORDER: tuple[str, ...] = (
    "zero",
    "data",
    GRAPH,
    CONTEXT,
    "sequence",
    EXPERT,
    EXPERT_SEQUENCE,
    "tensor_sequence",
    "tensor",
)
"""The order in which lowering takes the roles, and in which :meth:`Strategy.groups` lists them; stages are cut last."""


Boundary = tuple[str, ...]
"""What each axis splits of what passes from one block to the next: "batch", "sequence", "context" (the sequence,
mirrored) or nothing."""

_SPLIT = {
    **dict.fromkeys((*BATCH_ROLES, GRAPH), "batch"),
    **dict.fromkeys(("tensor_sequence", "sequence", EXPERT_SEQUENCE), "sequence"),
    **{"tensor": "", CONTEXT: "context"},
}

_FLAGS = ("recompute", "keep_gathered", "gather_late")
_ENTERING, _STATES, _ON_DISK = "offload_entering", "offload_states", "states_on_disk"
_PARAMETERS = "offload_parameters"
_SLICES = "split_gathers"

OFFLOADABLE = ("activations", "states", "parameters")
"""What may live in the host's memory: values that wait for backward, optimizer states, parameters with their states."""

CAPACITY = 1.25
"""Room for rows on their way to experts, over what each pair of ranks sends in the mean, if nothing else is said."""


@dataclass(frozen=True, order=True)
class RoleGroup:
    """All the mesh axes that have one role: ``degree`` is the product of the sizes of ``axes`` (ascending)."""

    role: str
    axes: tuple[int, ...]
    degree: int


@lru_cache(maxsize=2**16)
def _groups(roles: tuple[str, ...], axis_sizes: tuple[int, ...]) -> tuple[RoleGroup, ...]:
    """Thousands of strategies of a search, and each of them many times, are of few combinations of roles."""
    groups = []
    for role in LOWERING_ORDER:
        axes = tuple(axis for axis, axis_role in enumerate(roles) if axis_role == role and axis_sizes[axis] > 1)
        if axes:
            groups.append(RoleGroup(role, axes, prod(axis_sizes[axis] for axis in axes)))
    return tuple(groups)


@dataclass(frozen=True, order=True)
class Strategy:
    """Say what one block does with every mesh axis, and what it keeps for backward.

    ``roles`` has one role of :data:`ROLES` per mesh axis, outermost first. ``recompute`` keeps only the
    inputs of the block and computes the rest again in backward, all but the values that it ``keeps``: their numbers,
    ascending, of the ``num_values`` that the block's backward needs (:mod:`passes.frontend.number_values`).
    ``offloads`` has the numbers of those kept values that wait for backward in the host's memory;
    ``offload_entering`` has what enters the block, and backward takes, wait there too; ``offload_states`` has the
    optimizer states of the block's parameters live there, which come to the device while it updates them, or, with
    ``states_on_disk``, on disk. ``offload_parameters`` has the parameters themselves live on the host, and their
    gradients, too: they come to the device for each block that uses them, in forward and in backward, and for updates.
    ``keep_gathered`` keeps the parameters
    that ``zero`` axes gathered, or mixed precision cast, in forward until backward (ZeRO-2-like);
    without it they are gathered again (ZeRO-3-like). With both, ``recompute`` of a whole block wins: the gathers are
    computed again as all else is. ``gather_late`` gathers right before use; without it, gathers start a
    block ahead where the cluster gains by that, and take memory for that long. ``split_gathers`` gathers parameters
    under ``zero`` in so many slices, as far as one operator takes them, each right before that uses it, and reduces
    their gradients so: no more than a slice is whole at a time. ``capacity``: under roles that split
    experts, each rank has room for so many times the rows that it sends to another in the mean, which bounds memory;
    what has no room is sent in further rounds, so no token is lost. Prices count on an expert's rank that has so many
    times the mean. ``shadows``: under such roles, so many experts are computed on every rank for its own tokens, with
    weights that their owners lend and gradients that these get back; which ones may change while the model trains.

    Raises PlanError for an unknown role, for values of a wrong type, and for values to keep that cannot be.
    """

    roles: tuple[str, ...]
    recompute: bool = False
    keep_gathered: bool = False
    gather_late: bool = False
    capacity: float = CAPACITY
    keeps: tuple[int, ...] = ()
    num_values: int = 0
    offloads: tuple[int, ...] = ()
    offload_entering: bool = False
    offload_states: bool = False
    split_gathers: int = 1
    shadows: int = 0
    states_on_disk: bool = False
    offload_parameters: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.roles, tuple):
            raise PlanError(
                f"roles is {self.roles!r:.80}, a {type(self.roles).__name__}, where a tuple with one role per mesh "
                f"axis was expected; write for example ('data', 'tensor')"
            )
        for axis, role in enumerate(self.roles):
            if role not in ROLES:
                raise PlanError(f"unknown role {role!r:.80} for mesh axis {axis}; use one of {', '.join(ROLES)}")
        for name in (*_FLAGS, _ENTERING, _STATES, _ON_DISK, _PARAMETERS):
            if not isinstance(value := getattr(self, name), bool):
                raise PlanError(f"{name} is {value!r:.80}, where a bool was expected; give True or False")
        if self.states_on_disk and not self.offload_states:
            raise PlanError("a strategy has states on disk and does not offload them: give offload_states=True as well")
        if self.offload_parameters and not self.offload_states:
            raise PlanError(
                "a strategy offloads parameters and has their optimizer states, which are larger, stay on the device: "
                "give offload_states=True as well"
            )
        self._check_slices()
        capacity = self.capacity
        if isinstance(capacity, bool) or not isinstance(capacity, (int, float)) or not 0 < capacity < inf:
            raise PlanError(
                f"capacity is {capacity!r:.80}, where a number above 0 was expected: room for the rows that a rank "
                f"sends to another, over their mean; write for example {CAPACITY}"
            )
        # Where nothing is exchanged it says nothing, and equal strategies are written alike.
        object.__setattr__(self, "capacity", float(capacity) if self.splits_experts else CAPACITY)
        if not _is_count(self.shadows):
            raise PlanError(
                f"shadows is {self.shadows!r:.80}, where a number of experts was expected; write 0 for none"
            )
        object.__setattr__(self, "shadows", self.shadows if self.splits_experts else 0)
        self._check_keeps()

    def _check_slices(self) -> None:
        if type(self.split_gathers) is not int or self.split_gathers < 1:
            raise PlanError(
                f"split_gathers is {self.split_gathers!r:.80}, where a number of slices was expected; give an int of "
                f"at least 1, which splits nothing"
            )
        if self.split_gathers > 1 and self.keep_gathered:
            raise PlanError(
                f"a strategy keeps what it gathered and splits gathers in {self.split_gathers} slices, of which one is "
                f"there at a time; give keep_gathered=True or split_gathers, not both"
            )

    def _check_keeps(self) -> None:
        for name in ("keeps", "offloads"):
            numbers = getattr(self, name)
            if not (isinstance(numbers, tuple) and all(map(_is_count, (*numbers, self.num_values)))):
                raise PlanError(
                    f"{name} is {numbers!r:.80} of num_values {self.num_values!r:.80}; give a tuple of the numbers of "
                    f"values, and how many there are in the block"
                )
            if list(numbers) != sorted(set(numbers)) or max(numbers, default=-1) >= max(self.num_values, 1):
                raise PlanError(
                    f"{name} is {numbers!r:.80}, where ascending numbers below num_values ({self.num_values}) were "
                    f"expected, each once"
                )
        if bool(self.keeps or self.offloads) != bool(self.num_values) or (self.keeps and not self.recompute):
            raise PlanError(
                f"a strategy with recompute={self.recompute} keeps {self.keeps!r:.80} and offloads "
                f"{self.offloads!r:.80} of {self.num_values} values: a block that recomputes may keep some of its "
                f"values, one that does not keeps all; give recompute=True with both keeps and num_values, or neither"
            )
        if self.recompute and not set(self.offloads) <= set(self.keeps):
            raise PlanError(
                f"a strategy that recomputes offloads {self.offloads!r:.80} and keeps {self.keeps!r:.80}: what is "
                f"computed again cannot wait on the host; add the numbers to keeps, or leave them out of offloads"
            )

    @property
    def splits_experts(self) -> bool:
        """Whether ranks of some axis hold unlike experts."""
        return any(role in EXPERT_ROLES for role in self.roles)

    @property
    def is_offloaded(self) -> bool:
        """Whether anything waits for backward on the host; optimizer states do not."""
        return bool(self.offloads) or self.offload_entering

    def without_offload(self) -> Strategy:
        """The same with everything that it keeps for backward on the device."""
        return replace(self, offloads=(), offload_entering=False, num_values=self.num_values if self.keeps else 0)

    @property
    def recomputes_all(self) -> bool:
        """Whether the whole block is computed again in backward."""
        return self.recompute and not self.keeps

    def groups(self, axis_sizes: Sequence[int]) -> tuple[RoleGroup, ...]:
        """Gather the mesh axes by role, in :data:`LOWERING_ORDER`, without axes of size 1.

        ``axis_sizes`` has the number of ranks along each mesh axis, outermost first. Raises PlanError
        when there are not as many of them as there are roles.
        """
        if len(axis_sizes) != len(self.roles):
            raise PlanError(
                f"strategy '{self}' has {len(self.roles)} roles for a mesh of {len(axis_sizes)} axes with sizes "
                f"{tuple(axis_sizes)}; give one role per mesh axis"
            )
        return _groups(self.roles, tuple(axis_sizes))

    def to_dict(self) -> dict[str, object]:
        """Return the strategy as plain JSON values; ``capacity``, ``keeps`` and the like where they say something."""
        fields: dict[str, object] = {"roles": list(self.roles), **{name: getattr(self, name) for name in _FLAGS}}
        if self.splits_experts:
            fields["capacity"] = self.capacity
        if self.shadows:
            fields["shadows"] = self.shadows
        if self.num_values:
            fields["num_values"] = self.num_values
        if self.split_gathers > 1:
            fields[_SLICES] = self.split_gathers
        numbers = {name: list(getattr(self, name)) for name in ("keeps", "offloads") if getattr(self, name)}
        flags = (_ENTERING, _STATES, _ON_DISK, _PARAMETERS)
        return fields | numbers | {name: True for name in flags if getattr(self, name)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, object]) -> Strategy:
        """Build a strategy from what :meth:`to_dict` returned; absent flags are False, an absent capacity is 1.25, and
        no values are kept or offloaded where none are named.

        Raises PlanError for unknown keys, missing roles and values of a wrong type.
        """
        others = ("capacity", "shadows", "keeps", "num_values", "offloads", _ENTERING, _STATES, _ON_DISK, _PARAMETERS)
        known = ("roles", *_FLAGS, *others, _SLICES)
        unknown = sorted(set(fields) - set(known), key=str)
        if unknown:
            raise PlanError(
                f"unknown keys {unknown!r:.80} in a strategy; the keys are {', '.join(known)}: remove others"
            )
        roles = fields.get("roles")
        if not isinstance(roles, (list, tuple)):
            raise PlanError(f"roles of a strategy is {roles!r:.80}; give a list with one role per mesh axis")
        numbers: dict[str, tuple[object, ...]] = {}
        for name in ("keeps", "offloads"):
            value = fields.get(name, ())
            if not isinstance(value, (list, tuple)):
                raise PlanError(f"{name} of a strategy is {value!r:.80}; give a list of the numbers of values")
            numbers[name] = tuple(value)
        # __post_init__ checks the types of the rest.
        rest = {"capacity": CAPACITY, "shadows": 0, **dict.fromkeys(_FLAGS, False), **fields}
        return cls(**{**rest, **numbers, "roles": tuple(roles)})  # type: ignore[arg-type]

    def __str__(self) -> str:
        """Return the roles, outermost axis first, the flags that are set, another capacity than the usual, and shadow
        experts: ``data zero expert +recompute capacity=2 shadows=1``.
        """
        flags = [f"+{name}" for name in _FLAGS if getattr(self, name)]
        if self.splits_experts and self.capacity != CAPACITY:
            flags.append(f"capacity={self.capacity:g}")
        if self.shadows:
            flags.append(f"shadows={self.shadows}")
        if self.keeps:
            flags.append(f"+keeps {','.join(map(str, self.keeps))} of {self.num_values}")
        if self.offloads:
            flags.append(f"+offloads {','.join(map(str, self.offloads))} of {self.num_values}")
        flags += [f"+{name}" for name in (_ENTERING, _STATES, _ON_DISK, _PARAMETERS) if getattr(self, name)]
        if self.split_gathers > 1:
            flags.append(f"+{_SLICES} {self.split_gathers}")
        return " ".join([*(self.roles or ("one device",)), *flags])


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def copy_name(name: str, stage: int) -> str:
    """The name of the copy of a parameter that pipeline stage ``stage`` holds beside an earlier stage's."""
    return f"{name}@{stage}"


def stand_in_name(name: str, number: int) -> str:
    """The name of a parameter in the ``number``-th stage that an equal stage stands for."""
    base, copy, stage = name.partition("@")
    return f"{base}~{number}{copy}{stage}" if number else name


def stood_for_name(name: str) -> str:
    """The name that :func:`stand_in_name` was given, without the copy's stage."""
    return original_name(name).partition("~")[0]


def original_name(name: str) -> str:
    """The model's own name of a parameter or of one of its copies."""
    return name.partition("@")[0]


def cache_key(name: str) -> str:
    """What a cache is called among parameters, one of which may have its name."""
    return f"cache {name}"


def boundary(strategy: Strategy) -> Boundary:
    """The boundary of blocks under a strategy; axes that hold stages are left out."""
    return tuple(_SPLIT[role] for role in strategy.roles if role != PIPELINE)


def batch_ranks(strategy: Strategy, axis_sizes: Sequence[int]) -> int:
    """Ranks among which a strategy splits the batch, or the vertices that stand for one."""
    sizes = [size for size in axis_sizes if size > 1] if len(strategy.roles) != len(axis_sizes) else axis_sizes
    return prod(size for role, size in zip(strategy.roles, sizes, strict=True) if role in (*BATCH_ROLES, GRAPH))


def batch_share(strategy: Strategy, num_microbatches: int, axis_sizes: Sequence[int]) -> float:
    """The share of the batch that a rank has of one of ``num_microbatches`` micro-batches."""
    return 1.0 / (num_microbatches * batch_ranks(strategy, axis_sizes))
