"""The options that say what plan to search, as they are given to :func:`galvatron_fx.plan` and its kin."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from galvatron_fx.arguments import check_cluster
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.cluster.device import Device
from galvatron_fx.ir.errors import InputError, PlanError
from galvatron_fx.ir.plan.arguments import check_arguments, shown
from galvatron_fx.ir.plan.optimizers import ADAM, check_optimizer
from galvatron_fx.ir.plan.pipelining import SPREAD_ENDS
from galvatron_fx.ir.plan.schedule import FORWARD_ONLY_SCHEDULE, SEARCH
from galvatron_fx.ir.plan.strategy import CAPACITY, ROLES, Strategy
from galvatron_fx.ir.plan.units import parse_bytes
from passes.search.configurations import Pins
from passes.search.cost_table.offload_levels import Offload
from passes.search.plan_search import SearchOptions

__all__ = ["Constraints", "SearchSettings"]

Constraints = Mapping[str, Strategy | Sequence[str] | Mapping[str, str] | str]


@dataclass(frozen=True)
class SearchSettings:
    """See :func:`galvatron_fx.plan`, which has the same defaults."""

    memory_budget: str | int | None = None
    roles: Sequence[str] = ROLES
    recompute: str | bool = "auto"
    constraints: Constraints | None = None
    num_stages: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    vocabulary: str | None = None
    search_seconds: float | None = None
    optimizer: str = ADAM
    expert_imbalance: float = CAPACITY
    offload: Sequence[str] = ()
    host_memory: str | int | None = None
    fold_gradients: bool = False
    storage: str | os.PathLike[str] | None = None
    forward_only: bool | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> SearchSettings:
        """Those among the ``arguments`` of a function that takes them all, by their names."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})

    def on_mesh(self, mesh: DeviceMesh) -> SearchSettings:
        """Leave out constraints on dims of ``mesh`` that have one rank: every role is alike there."""
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
        if not isinstance(self.constraints, Mapping) or 1 not in sizes.values():
            return self

        def searched(roles: Mapping[str, Any]) -> dict[str, Any]:
            return {name: role for name, role in roles.items() if role not in ROLES or sizes.get(name) != 1}

        by_name = {
            name: searched(wanted) if isinstance(wanted, Mapping) else wanted
            for name, wanted in self.constraints.items()
        }
        return replace(self, constraints=searched(by_name))

    def on(self, cluster: Cluster) -> SearchOptions:
        """What to search on ``cluster``; raises InputError and PlanError for what no search can use."""
        check_cluster(cluster)
        checked_elsewhere = ("memory_budget", "optimizer", "host_memory")
        check_arguments(**{name: value for name, value in vars(self).items() if name not in checked_elsewhere})
        check_optimizer(self.optimizer)
        budget = self.budget_bytes
        unknown = [role for role in self.roles if role not in ROLES]
        if unknown or not self.roles:
            raise PlanError(f"unknown role(s) {unknown or list(self.roles)}: use some of {', '.join(ROLES)}")
        if self.vocabulary == SPREAD_ENDS and self.schedule == SEARCH:
            raise PlanError(
                f"schedule={SEARCH!r} searches tables whose first and last block are of the first and the last stage, "
                f"and vocabulary={SPREAD_ENDS!r}: leave out one of them"
            )
        if self.forward_only:
            self._refuse_of_training()
        pins = Pins(self.num_stages, self.num_microbatches, self.schedule, self.vocabulary)
        return SearchOptions(
            max(kind.memory_bytes for kind in cluster.kinds) if budget is None else budget,
            tuple(self.roles),
            self.recompute,
            dict(self.constraints or {}),
            pins,
            self.search_seconds,
            self.optimizer,
            capacity=self.expert_imbalance,
            offload=Offload(
                tuple(dict.fromkeys(self.offload)), self._host_bytes(cluster.device), self.storage is not None
            ),
            fold_gradients=self.fold_gradients,
        )

    def check_storage(self, device: Device) -> None:
        """Refuse a folder for states that a search cannot place there. Raises InputError and PlanError."""
        if self.storage is None:
            return
        if not {"states", "parameters"} & set(self.offload):
            raise InputError(
                f"storage={shown(self.storage)} is given and no states are offloaded: give offload=('states',) as "
                f"well, or leave it out"
            )
        if not device.disk_bandwidth_bytes_per_s:
            raise PlanError(
                f"storage={shown(self.storage)}, and nothing is known of the disk of '{device.name}': give "
                f"Cluster.having(disk_bytes_per_s=3e9) (--disk-bandwidth 3GB/s), what each device's process reads or "
                f"writes, measure it (galvatron-fx profile --storage), or leave out storage"
            )

    def _refuse_of_training(self) -> None:
        """Raise InputError for what only backward and the optimizer have a use for."""
        useless = {
            "recompute": self.recompute not in ("auto", False),
            "offload": bool(self.offload),
            "fold_gradients": self.fold_gradients,
            "optimizer": self.optimizer != ADAM,
            "schedule": self.schedule not in (None, FORWARD_ONLY_SCHEDULE),
        }
        for name, is_given in useless.items():
            if is_given:
                raise InputError(
                    f"{name}={shown(getattr(self, name))} is of training, and forward_only=True has no backward and no "
                    f"optimizer: leave out {name}="
                )

    def _host_bytes(self, device: Device) -> float:
        """Bytes of the host's memory that a rank may offload to: what was given, else the device's share, if it is
        known.
        """
        if not self.offload:
            if self.host_memory is not None:
                raise InputError(
                    f"host_memory={shown(self.host_memory)} is given and nothing is offloaded: give "
                    f"offload=('activations',), ('states',), ('parameters',) or several as well, or leave it out"
                )
            return 0.0
        if not device.host_bandwidth_bytes_per_s:
            raise PlanError(
                f"offload={shown(self.offload)}, and nothing is known of the link between '{device.name}' and its "
                f"host: give Cluster.having(host_bytes_per_s=24e9), or leave out offload"
            )
        given = _bytes("host_memory", self.host_memory)
        return float(given if given is not None else device.host_memory_bytes or inf)

    @property
    def budget_bytes(self) -> int | None:
        """The memory budget in bytes, None where none was given; raises InputError for what is no size."""
        return _bytes("memory_budget", self.memory_budget)

    def refuse_beside_a_plan(self) -> None:
        """Raise PlanError where something was given that a given plan has decided, all but budget and storage."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("memory_budget", "storage", "forward_only") and (value or None) != (
                field.default or None
            ):
                raise PlanError(
                    f"{field.name}={shown(value)} is given beside plan=, which has decided that already: leave out "
                    f"{field.name}=, or leave out plan= to search one with it"
                )


def _bytes(name: str, size: str | int | None) -> int | None:
    try:
        return None if size is None else parse_bytes(size)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
