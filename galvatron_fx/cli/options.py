"""The flags that several subcommands share, and what they mean."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from galvatron_fx.cli import files
from galvatron_fx.cli.constraints import constraints_of, parse_constraint
from galvatron_fx.cli.model_config import parse_override
from galvatron_fx.cli.model_tasks import TASKS
from galvatron_fx.cli.models import DTYPES
from galvatron_fx.ir.errors import GalvatronError
from galvatron_fx.ir.plan.arguments import check_arguments
from galvatron_fx.ir.plan.optimizers import ADAM, OPTIMIZERS
from galvatron_fx.ir.plan.pipelining import VOCABULARIES
from galvatron_fx.ir.plan.schedule import SCHEDULES, SEARCH
from galvatron_fx.ir.plan.strategy import CAPACITY, OFFLOADABLE, PIPELINE, ROLES
from galvatron_fx.ir.plan.units import parse_bandwidth, parse_bytes

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from galvatron_fx.ir.cluster.cluster import Cluster
    from galvatron_fx.ir.plan.plan import Plan

__all__ = [
    "add_cluster",
    "add_configuration",
    "add_disk",
    "add_model",
    "add_search",
    "add_space",
    "batches",
    "cluster_named",
    "cluster_of",
    "counts",
    "follow",
    "names",
    "policy_of",
    "positive",
    "recompute_of",
    "roles_of",
    "search_of",
    "size",
    "typed",
]

_RECOMPUTE: dict[str, str | bool] = {"auto": "auto", "selective": "selective", "always": True, "never": False}

Parsed = TypeVar("Parsed")

_MOST_DEVICES = 1 << 20


def typed(parse: Callable[[str], Parsed]) -> Callable[[str], Parsed]:
    """Make a type for argparse of a function that raises one of our errors or ValueError."""

    def convert(text: str) -> Parsed:
        try:
            return parse(text)
        except (GalvatronError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def positive(kind: Callable[[str], Any], what: str) -> Callable[[str], Any]:
    """A type for argparse: a number above 0, "seconds" for ``what``."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < float("inf"):
            raise ValueError(f"{text[:80]!r} is no number of {what}: give one above 0")
        return value

    return typed(parse)


def add_model(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add the flags that name a model and its batch."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        required=required,
        metavar="MODEL",
        help="a config.json of transformers or a folder with one; a model type (llama) or configuration class "
        "(LlamaConfig) of transformers; or module:function, which returns (model, example_inputs)",
    )
    add_configuration(group)
    group.add_argument(
        "--batch-size", type=positive(int, "samples"), metavar="N", help="global samples a step (default: 64)"
    )
    group.add_argument(
        "--sequence-length",
        type=positive(int, "tokens"),
        metavar="N",
        help="tokens a sample (default: 2048, or what the model has positions for)",
    )
    group.add_argument(
        "--forward-only",
        action="store_true",
        help="inference: in eval mode, without labels, backward and optimizer (of a plan that is: implied)",
    )


def add_configuration(group: argparse._ArgumentGroup) -> None:
    """Add the flags that change a configuration."""
    group.add_argument(
        "--set",
        action="append",
        default=[],
        type=typed(parse_override),
        metavar="KEY=VALUE",
        help="change the configuration; VALUE is JSON, or text; KEY may be a.b (repeatable)",
    )
    group.add_argument("--task", choices=TASKS, help="what to train for (default: as the configuration says)")
    group.add_argument("--dtype", choices=DTYPES, help="of the parameters (default: the configuration's, or bfloat16)")


def add_cluster(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add the flag that names a cluster."""
    group = parser.add_argument_group("cluster")
    group.add_argument(
        "--cluster",
        required=required,
        metavar="CLUSTER",
        help="a count and a device, such as 64xA100-80GB, which need not be here; or a file: a profile, unlike nodes",
    )
    add_disk(group)


def add_disk(group: argparse._ArgumentGroup) -> None:
    """Add the flag that says what disks do, which presets do not know."""
    group.add_argument(
        "--disk-bandwidth",
        type=typed(parse_bandwidth),
        metavar="SPEED",
        help="what each device's process reads from or writes to disk while others do, for --storage: 3GB/s",
    )


def add_search(parser: argparse.ArgumentParser) -> None:
    """Add the options of a search."""
    group = parser.add_argument_group("search")
    group.add_argument(
        "--memory-budget",
        type=typed(size),
        metavar="SIZE",
        help="per device, such as 40GiB (default: the device's memory)",
    )
    add_space(group)
    group.add_argument("--num-stages", type=positive(int, "stages"), metavar="N", help="default: searched")
    group.add_argument("--num-microbatches", type=positive(int, "micro-batches"), metavar="N", help="default: searched")
    group.add_argument(
        "--schedule", choices=(*SCHEDULES, SEARCH), help=f"default: the best of them; {SEARCH}: also tables of its own"
    )
    group.add_argument(
        "--vocabulary",
        choices=VOCABULARIES,
        help="embedding and head on all pipeline ranks together, or on the first and the last (default: searched)",
    )
    group.add_argument(
        "--constrain",
        action="append",
        default=[],
        type=typed(parse_constraint),
        metavar="MODULE=ROLE,ROLE",
        help="pin the blocks that hold a module to roles, one a mesh axis (repeatable)",
    )
    group.add_argument(
        "--constraints",
        metavar="FILE.json",
        help='the same from a file: {"model.layers.0": ["tensor", "data"], "lm_head": {"roles": [...], "recompute": '
        "true}}",
    )
    group.add_argument(
        "--search-seconds",
        type=positive(float, "seconds"),
        metavar="S",
        help="take the best plan found by then, counted from the end of capture",
    )


def add_space(group: argparse._ArgumentGroup) -> None:
    """Add the options that say what plans may do, and what they train with."""
    group.add_argument(
        "--roles", type=typed(_roles), metavar="A,B", help=f"what mesh axes may do (default: {','.join(ROLES)})"
    )
    group.add_argument(
        "--pipeline",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="whether pipeline is among the roles (default: yes, or as --roles says)",
    )
    group.add_argument(
        "--recompute",
        choices=_RECOMPUTE,
        default="auto",
        help="activations again in backward: of blocks as a whole (always), of these or of parts (selective), of none "
        "(never); default: what is fastest for each block",
    )
    group.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default=ADAM,
        help="whose states and update the memory and time hold for (default: %(default)s)",
    )
    group.add_argument(
        "--expert-imbalance",
        type=typed(_imbalance),
        default=CAPACITY,
        metavar="X",
        help="rows of the busiest rank's experts, over the mean (default: %(default)s)",
    )
    group.add_argument(
        "--mixed-precision",
        type=typed(_precision),
        metavar="DTYPE[,DTYPE]",
        help="compute in the first, reduce gradients in the second (default: the first); parameters are then float32 "
        "where --dtype says nothing",
    )
    group.add_argument(
        "--offload",
        choices=OFFLOADABLE,
        action="append",
        default=[],
        help="let activations wait, or optimizer states, or parameters with their states, live in the host's memory "
        "where that pays; may be repeated",
    )
    group.add_argument(
        "--host-memory",
        type=typed(size),
        metavar="SIZE",
        help="of the host, per device, for --offload (default: the device's share, as far as it is known)",
    )
    group.add_argument(
        "--storage",
        metavar="FOLDER",
        help="where optimizer states that --offload states takes off the device live, on a disk instead of the host",
    )
    group.add_argument(
        "--fold-gradients",
        action="store_true",
        help="let plans of one stage and one micro-batch update each parameter as soon as its gradient is complete",
    )


def search_of(options: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of :func:`galvatron_fx.plan` that the flags of :func:`add_search` stand for.

    Raises InputError, PlanError and UsageError for constraints that cannot be read.
    """
    return {
        "memory_budget": options.memory_budget,
        "roles": roles_of(options),
        "recompute": recompute_of(options),
        "num_stages": options.num_stages,
        "num_microbatches": options.num_microbatches,
        "schedule": options.schedule,
        "vocabulary": options.vocabulary,
        "constraints": constraints_of(options.constraints, options.constrain),
        "search_seconds": options.search_seconds,
        "optimizer": options.optimizer,
        "expert_imbalance": options.expert_imbalance,
        "offload": tuple(options.offload),
        "host_memory": options.host_memory,
        "storage": options.storage,
        "fold_gradients": options.fold_gradients,
        "mixed_precision": policy_of(options),
        "forward_only": options.forward_only,
    }


def roles_of(options: argparse.Namespace) -> tuple[str, ...]:
    """What mesh axes may do."""
    roles: tuple[str, ...] = options.roles or ROLES
    if options.pipeline is not None:
        roles = tuple(role for role in roles if role != PIPELINE) + (PIPELINE,) * options.pipeline
    return roles


def recompute_of(options: argparse.Namespace) -> str | bool:
    """Whether backward computes again."""
    return _RECOMPUTE[options.recompute]


def follow(options: argparse.Namespace, plan: Plan | None) -> None:
    """Take models as a plan that was made for inference has them."""
    options.forward_only |= plan is not None and plan.forward_only


def policy_of(options: argparse.Namespace) -> MixedPrecisionPolicy | None:
    """The policy of mixed precision, None where there is none."""
    if options.mixed_precision is None:
        return None
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    dtypes = [getattr(torch, name) for name in options.mixed_precision]
    return MixedPrecisionPolicy(param_dtype=dtypes[0], reduce_dtype=dtypes[-1])


def cluster_of(options: argparse.Namespace) -> Cluster:
    """The cluster that ``--cluster`` names, a file or a preset; raises ClusterError and InputError."""
    return cluster_named(options.cluster).having(disk_bytes_per_s=options.disk_bandwidth)


def cluster_named(text: str) -> Cluster:
    """The cluster of a file or a preset; raises ClusterError and InputError."""
    from galvatron_fx.ir.cluster.cluster import Cluster

    if text.endswith(".json") or Path(text).is_file():
        return files.read_cluster(text)
    return Cluster.preset(text)


def size(text: str) -> int:
    """Read a number of bytes above 0, "40GiB"; raises ValueError for anything else."""
    num_bytes = parse_bytes(text)
    if num_bytes == 0:
        raise ValueError("a size of 0 bytes: give one such as 40GiB")
    return num_bytes


def batches(text: str) -> tuple[int, ...]:
    """Read numbers of samples, "64,96"; raises ValueError for anything else."""
    numbers = text.split(",")
    if not all(number.strip().isdecimal() and int(number) > 0 for number in numbers):
        raise ValueError(f"{text[:80]!r} is no list of batches: give numbers of samples above 0, such as 64,96,128")
    return tuple(map(int, numbers))


def names(text: str) -> tuple[str, ...]:
    """Read names, "a,b", each once."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def counts(text: str) -> tuple[int, ...]:
    """Read numbers of devices, "1-8,16,32"; raises ValueError for anything else."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = (half.strip() for half in part.partition("-"))
        ends = [first, last if dash else first]
        if not all(end.isdecimal() for end in ends) or not 0 < int(ends[0]) <= int(ends[1]) <= _MOST_DEVICES:
            raise ValueError(
                f"{text[:80]!r} is no list of devices: give numbers from 1 to {_MOST_DEVICES}, or runs of them, as in "
                f"1-8,16,32"
            )
        found += range(int(ends[0]), int(ends[1]) + 1)
    return tuple(dict.fromkeys(found))


def _imbalance(text: str) -> float:
    check_arguments(expert_imbalance=float(text))
    return float(text)


def _precision(text: str) -> tuple[str, ...]:
    dtypes = names(text)
    if len(dtypes) > 2 or not set(dtypes) <= set(DTYPES):
        raise ValueError(f"{text[:80]!r} is not one or two of {', '.join(DTYPES)}")
    return dtypes


def _roles(text: str) -> tuple[str, ...]:
    roles = names(text)
    unknown = [role for role in roles if role not in ROLES]
    if unknown:
        raise ValueError(f"unknown role {unknown[0]!r}: use some of {', '.join(ROLES)}")
    return roles
