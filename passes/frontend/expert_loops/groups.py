"""Rows that lie in groups behind each other, taken apart by a list of how many each group has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from traceback import FrameSummary
from typing import Any, NoReturn

import torch
from torch import Tensor

from passes.frontend.capture.trace_errors import PickedRows
from passes.frontend.chosen_rows.choice import RowCount
from passes.frontend.expert_loops.picked import LoopChoice, Part, Picked

__all__ = ["Group", "counted", "groups_of", "joined_ends", "parts_of", "sliced"]


@dataclass(eq=False)
class Group(LoopChoice):
    """Group ``place`` of those that ``counts`` [groups] counts, which were asked for at ``frame``."""

    counts: Tensor
    place: int
    frame: FrameSummary
    rows: int = 0

    @property
    def tensor(self) -> Tensor:
        """What says how many rows it has."""
        return self.counts

    def refuse(self, what: str = "") -> NoReturn:
        """Raise PickedRows, at the model's own line."""
        raise PickedRows("aten._local_scalar_dense.default", self.frame)


class GroupCount(RowCount):
    """How many rows a group has; added to those of the groups before it, where it ends."""

    choice: Group

    def __radd__(self, other: Any) -> Any:
        if (type(other) is int and other == self.choice.place == 0) or (
            isinstance(other, GroupEnd) and _follows(self.choice, other.group)
        ):
            return GroupEnd(self.choice)
        self.choice.refuse()


@dataclass(frozen=True, eq=False)
class GroupEnd:
    """How many rows a group and those before it have."""

    group: Group

    def __index__(self) -> int:
        self.group.refuse()


def counted(counts: Tensor, frame: FrameSummary) -> list[RowCount]:
    """What ``counts.tolist()`` gives: numbers that no trace knows."""
    return [GroupCount(Group(counts, place, frame)) for place in range(counts.shape[0])]


def sliced(table: Tensor, index: Any) -> Picked | None:
    """``table[end of the group before:end of a group]``; None where the index is no such slice."""
    ends = [index.start, index.stop] if isinstance(index, slice) else []
    if not any(isinstance(end, (GroupEnd, GroupCount)) for end in ends):
        return None
    start, stop = ends
    if isinstance(start, GroupEnd) and not isinstance(stop, GroupEnd):
        start.group.refuse()
    group = stop.group if isinstance(stop, GroupEnd) else stop.choice
    begins = group.place == 0 if start in (None, 0) else isinstance(start, GroupEnd) and _follows(group, start.group)
    if not begins or index.step is not None or group.rows not in (0, len(table)):
        group.refuse()
    group.rows = len(table)
    return Picked.of(group, Part(table), tuple(table.shape), table.dtype)


def groups_of(leaves: Sequence[Any]) -> list[Group]:
    """The groups whose numbers of rows are among the arguments of a call."""
    return [leaf.choice for leaf in leaves if isinstance(leaf, RowCount) and isinstance(leaf.choice, Group)]


def parts_of(table: Tensor, groups: Sequence[Group], dim: int) -> tuple[Picked, ...]:
    """``table.split([rows of each group])``."""
    are_all = _are_all(groups)
    for group in groups:
        if not are_all or dim not in (0, -table.dim()) or group.rows not in (0, len(table)):
            group.refuse()
        group.rows = len(table)
    return tuple(Picked.of(group, Part(table), tuple(table.shape), table.dtype) for group in groups)


def joined_ends(parts: Sequence[Any], dim: int) -> Tensor:
    """Where the rows of each group end in ``torch.cat(parts)``, which are all groups in order. That these are all rows,
    as ``split`` sees, an index out of range says in the step.
    """
    groups = [part.choice for part in parts if isinstance(part, Picked) and isinstance(part.choice, Group)]
    if len(groups) < len(parts) or not _are_all(groups) or dim not in (0, -parts[0].dim()):
        groups[0].refuse()
    ends = groups[0].counts.cumsum(0)
    return (ends + ends.new_zeros(1)[(ends[-1:] != groups[0].rows).long()]).to(torch.int32)


def _follows(group: Group, other: Group) -> bool:
    return group.counts is other.counts and group.place == other.place + 1


def _are_all(groups: Sequence[Group]) -> bool:
    counts = groups[0].counts
    return [group.place for group in groups] == list(range(len(counts))) and all(g.counts is counts for g in groups)
