"""Which strategies the constraints of a search leave to each block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from torch import fx

from galvatron_fx.ir.arrays import Bools
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.errors import PlanError
from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.plan.strategy import ROLES, Strategy

__all__ = ["Constrained"]


@dataclass(frozen=True)
class Constrained:
    """Constraints on a graph and a cluster.

    ``modules``: by the name that was given, the wanted strategy, roles, or roles by the numbers of mesh axes, and the
    blocks that hold operators of the module; ``axes``: roles by the numbers of mesh axes, for all blocks, called
    ``axis_names``.
    """

    modules: Mapping[str, tuple[Any, set[int]]]
    axes: Mapping[int, str]
    axis_names: tuple[str, ...]

    @classmethod
    def of(cls, graph: fx.GraphModule, cluster: Cluster, constraints: Mapping[str, Any]) -> Constrained:
        """Read ``constraints``: a role is that of a mesh axis; ``*`` in the name of a module stands for any text.

        Raises PlanError for names of modules and axes that are not there, and for unknown roles.
        """
        axes = _roles_by_axis({name: role for name, role in constraints.items() if isinstance(role, str)}, cluster)
        modules = {}
        for name, value in constraints.items():
            if not isinstance(value, str):
                wanted = _roles_by_axis(value, cluster) if isinstance(value, Mapping) else value
                _check_count(name, value, cluster)
                modules[name] = wanted, _blocks_of(graph, name)
        return cls(modules, axes, cluster.axis_names)

    def allowed(self, strategies: Sequence[Strategy], chosen: Sequence[Sequence[bool]]) -> Bools:
        """Whether each block may take each strategy. ``chosen[block][strategy]``: whether that keeps some values of the
        block or offloads any; one that was given means neither. Raises PlanError where none is left to a block.
        """
        on_axes = np.array([_matches(s, self.axes) for s in strategies])
        if not on_axes.any():
            raise PlanError(f"no searched strategy gives mesh axis {self._named(self.axes)}; check roles")
        allowed = np.repeat(on_axes[np.newaxis], len(chosen), axis=0)
        for name, (wanted, members) in self.modules.items():
            if isinstance(wanted, Strategy) and (wanted.keeps or wanted.is_offloaded or wanted.offload_states):
                raise PlanError(
                    f"constraint {wanted} on module {name!r} names values to keep or to offload, which a search "
                    f"chooses: leave out keeps, offloads, offload_entering, offload_states and num_values, or write "
                    f"the plan by hand"
                )
            fits = np.array([_matches(s, wanted) for s in strategies])
            if not fits.any():
                said = self._named(wanted) if isinstance(wanted, Mapping) else wanted
                raise PlanError(
                    f"constraint {said} on module {name!r}: no searched strategy is like it; check roles and axes"
                )
            for block in members:
                allowed[block] &= fits
                if isinstance(wanted, Strategy):
                    allowed[block] &= ~np.array(chosen[block])
                if not allowed[block].any():
                    raise PlanError(f"the constraints on block {block} (module {name!r}) contradict each other")
        return allowed

    def _named(self, axes: Mapping[int, str]) -> str:
        return ", ".join(f"{self.axis_names[axis]} the role {role}" for axis, role in sorted(axes.items()))


def _check_count(name: str, value: Any, cluster: Cluster) -> None:
    roles = value.roles if isinstance(value, Strategy) else value
    if not isinstance(roles, Mapping) and len(roles) != len(cluster.shape):
        sizes = "×".join(map(str, cluster.shape))
        raise PlanError(
            f"constraint {tuple(roles)} on module {name!r} has {len(roles)} roles, and the mesh of {sizes} has "
            f"{len(cluster.shape)} axes of several ranks: give a role for each, or roles by the names of axes, as "
            f"{{{cluster.axis_names[0]!r}: {roles[0]!r}}}"
        )


def _roles_by_axis(roles: Mapping[str, str], cluster: Cluster) -> dict[int, str]:
    return {axis: role for name, role in roles.items() for axis in _axes_called(name, role, cluster)}


def _axes_called(name: str, role: str, cluster: Cluster) -> list[int]:
    """The axes that a dim of the user's mesh has become: "dp", or "dp.0" and "dp.1"."""
    axes = [axis for axis, known in enumerate(cluster.axis_names) if known == name or known.partition(".")[0] == name]
    if role not in ROLES:
        raise PlanError(f"constraint {role!r} on {name!r}: use one of the roles {', '.join(ROLES)}, or a list of them")
    if not axes:
        known = ", ".join(dict.fromkeys(known.partition(".")[0] for known in cluster.axis_names))
        raise PlanError(
            f"constraint {role!r} on {name!r}: the mesh has no such axis of several ranks; it has {known}. For a "
            f"module give a role for each axis, as a list"
        )
    return axes


def _blocks_of(graph: fx.GraphModule, pattern: str) -> set[int]:
    modules = {(meta_of(n).module, meta_of(n).block) for n in graph.graph.nodes if n.op == "call_function"}
    blocks = {block for module, block in modules if _is_in(module, pattern)}
    if not blocks:
        raise PlanError(f"constraint on module {pattern!r}: the model has no such module that computes anything")
    return blocks


def _is_in(module: str, pattern: str) -> bool:
    """Whether a module, or one that it is in, is called so."""
    parts = module.split(".")
    return any(fnmatchcase(".".join(parts[:depth]), pattern) for depth in range(1, len(parts) + 1))


def _matches(strategy: Strategy, wanted: Any) -> bool:
    if isinstance(wanted, Strategy):
        return strategy == wanted
    if isinstance(wanted, Mapping):
        return all(strategy.roles[axis] == role for axis, role in wanted.items())
    return sorted(strategy.roles) == sorted(wanted)
