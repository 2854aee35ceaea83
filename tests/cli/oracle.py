"""What a file means, from its JSON alone: whatever is read of it must be that, and nothing that no file may say.

None of it calls the readers that it judges: JSON by the library with its own hooks, form by jsonschema on the published
schemas, meaning by the rules as the documents state them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from importlib.resources import files
from itertools import pairwise
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.validators import extend

from galvatron_fx import Cluster, Plan, Strategy
from galvatron_fx.cli.model_config import ModelConfig

ROLES = {"data", "zero", "tensor", "tensor_sequence", "sequence", "pipeline"}
_INTEGERS = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)


def document(content: bytes) -> Any:
    """The JSON in a file. Raises AssertionError for repeated keys, NaN, infinities and what is no JSON."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in pairs}) == len(pairs), "a key stands twice"
        return dict(pairs)

    def constant(name: str) -> float:
        assert name != "NaN", "NaN was accepted"
        return float(name.replace("Infinity", "inf"))

    return json.loads(content.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)


def same(read: Any, told: Any) -> bool:
    """Whether two JSON values are equal; 1 and 1.0 are, True and 1 are not, order of keys does not matter.

    A whole number with more digits than a float keeps equals the float that it is read as.
    """
    if isinstance(read, dict) and isinstance(told, dict):
        return read.keys() == told.keys() and all(same(read[key], told[key]) for key in read)
    if isinstance(read, (list, tuple)) and isinstance(told, (list, tuple)):
        return len(read) == len(told) and all(map(same, read, told))
    if isinstance(read, float) and type(told) is int:
        told = float(told)
    return isinstance(read, bool) == isinstance(told, bool) and bool(read == told)


def check_schema(name: str, told: Any) -> None:
    schema = json.loads(files("galvatron_fx.ir").joinpath(name).read_text("utf-8"))
    error = next(extend(Draft202012Validator, type_checker=_INTEGERS)(schema).iter_errors(told), None)
    assert error is None, f"the schema refuses what was accepted: {error.json_path}: {error.message[:200]}"


def check_numbers(value: Any) -> None:
    """Raise AssertionError for a number that is not finite, anywhere inside."""
    assert not isinstance(value, float) or math.isfinite(value), f"{value} was accepted"
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in inside:
        check_numbers(item)


def is_prime(size: int) -> bool:
    return size > 1 and all(size % divisor for divisor in range(2, math.isqrt(size) + 1))


def check_plan(plan: Plan, content: bytes) -> None:
    """Raise AssertionError unless the file is a plan, and ``plan`` is what it says."""
    told = document(content)
    check_schema("plan_schema.json", told)
    check_numbers(told)
    axes, blocks, pipelining = told["axis_sizes"], told["blocks"], told["pipelining"]
    assert all(map(is_prime, axes)), f"axes of {axes}"
    roles = [block["strategy"]["roles"] for block in blocks]
    assert all(len(own) == len(axes) and set(own) <= ROLES for own in roles), roles
    staged = {tuple(axis for axis, role in enumerate(own) if role == "pipeline") for own in roles}
    assert len(staged) == 1, f"stages on other axes in other blocks: {staged}"
    ranks = math.prod(axes[axis] for axis in staged.pop())
    if any(block["name"] == "*" for block in blocks):
        assert len(blocks) == 1 and not blocks[0]["fingerprint"] and not told["graph_fingerprint"], "a wildcard is free"
    else:
        assert pipelining["num_stages"] <= len(blocks), "a stage without a block"
        assert all(first < len(blocks) for first in pipelining["first_blocks"]), "a stage without a block"
    check_pipelining(pipelining, ranks)
    for block in told["blocks"]:
        block["strategy"].setdefault("gather_late", False)
    assert same(json.loads(plan.to_json()), told), "the plan is not what the file says"
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.to_json() == plan.to_json(), "what was read and written reads otherwise"


def check_pipelining(told: dict[str, Any], ranks: int) -> None:
    stages, batches, schedule, first = (
        told[key] for key in ("num_stages", "num_microbatches", "schedule", "first_blocks")
    )
    if first:
        assert first[0] == 0 and len(first) == stages and all(a < b for a, b in pairwise(first)), f"stages at {first}"
    if schedule == "table":
        check_table(told, ranks)
        return
    assert not told["orders"], "orders of a schedule that has a name"
    per_rank = {"gpipe": 1, "1f1b": 1, "zb_h1": 1, "zbv": 2, "dualpipev": 2}
    if schedule in per_rank:
        assert stages == per_rank[schedule] * ranks, f"{stages} stages on {ranks} ranks under {schedule}"
        assert schedule != "dualpipev" or batches >= stages, "fewer micro-batches than stages"
    else:
        assert schedule == "interleaved_1f1b" and stages >= 2 * ranks and stages % ranks == 0, schedule
        assert batches % max(1, batches // ranks) == 0, f"{batches} micro-batches on {ranks} ranks"


def check_table(told: dict[str, Any], ranks: int) -> None:
    """Play the orders: every action once, on the rank of its stage, each after what it waits for."""
    stages, batches, owners = told["num_stages"], told["num_microbatches"], told["rank_of_stage"]
    assert len(told["orders"]) == ranks and len(owners) == stages and set(owners) == set(range(ranks)), owners
    orders = [[_action(text) for text in order] for order in told["orders"]]
    done: set[tuple[int, str, int]] = set()
    places = [0] * ranks
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order) and _may_run(order[places[rank]], done, stages):
                stage, kind, batch = order[places[rank]]
                assert owners[stage] == rank and batch < batches and (stage, kind, batch) not in done
                done.add((stage, kind, batch))
                places[rank] += 1
                progress = True
    assert all(place == len(order) for place, order in zip(places, orders, strict=True)), "the table never ends"
    for stage in range(stages):
        for batch in range(batches):
            kinds = {kind for kind in "FBIW" if (stage, kind, batch) in done}
            assert kinds in ({"F", "B"}, {"F", "I", "W"}), f"{kinds} of stage {stage}, micro-batch {batch}"


def _action(text: str) -> tuple[int, str, int]:
    kind = next(letter for letter in "FBIW" if letter in text)
    stage, batch = text.split(kind)
    assert f"{int(stage)}{kind}{int(batch)}" == text, text
    return int(stage), kind, int(batch)


def _may_run(action: tuple[int, str, int], done: set[tuple[int, str, int]], stages: int) -> bool:
    stage, kind, batch = action
    if kind == "F":
        return stage == 0 or (stage - 1, "F", batch) in done
    if kind == "W":
        return (stage, "I", batch) in done
    behind = stage == stages - 1 or bool({(stage + 1, "B", batch), (stage + 1, "I", batch)} & done)
    return (stage, "F", batch) in done and behind


def check_cluster(cluster: Cluster, content: bytes) -> None:
    """Raise AssertionError unless the file is a cluster, and ``cluster`` is what it says."""
    told = document(content)
    check_schema("cluster_schema.json", told)
    check_numbers(told)
    _check_positive(told)
    names = [axis["name"] for axis in told["axes"]]
    assert names and len(set(names)) == len(names), names
    assert all(axis["size"] == 1 or is_prime(axis["size"]) for axis in told["axes"]), told["axes"]
    device = told["device"]
    assert 0 < device["matmul_efficiency"] <= 1 and 0 < device["memory_efficiency"] <= 1
    kinds = [(curve["kind"], curve["dtype"]) for curve in device["curves"]]
    assert len(set(kinds)) == len(kinds), "two curves of a kind"
    curves = [*device["curves"], *(curve for axis in told["axes"] for curve in axis["curves"])]
    for points in (curve["points"] for curve in curves):
        assert points and min(points[0]) > 0 and all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(points)), points
    assert all(axis["name"] in curve["axes"] for axis in told["axes"] for curve in axis["curves"])
    assert same(_sorted(json.loads(cluster.to_json())), _sorted(told)), "the cluster is not what the file says"
    again = Cluster.from_json(cluster.to_json())
    assert again == cluster and again.to_json() == cluster.to_json(), "what was read and written reads otherwise"


_MAY_BE_ZERO = {"host_bandwidth_bytes_per_s", "host_memory_bytes", "disk_bandwidth_bytes_per_s"}  # not known
_MAY_BE_ZERO |= {"latency_s", "launch_overhead_s", "view_s", "late_s", "flop_s", "byte_s", "error", "points"}


def _check_positive(value: Any, key: str = "") -> None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        assert value > 0 or (value == 0 and key in _MAY_BE_ZERO), f"{key} of {value} was accepted"
    for name, item in value.items() if isinstance(value, dict) else ():
        _check_positive(item, name if key not in ("peak_flops", "calls", "sharing") else key)
    for item in value if isinstance(value, list) else ():
        _check_positive(item, key)


def _sorted(value: Any) -> Any:
    """A cluster with its curves, and the axes of each, in one order: neither says anything."""
    if isinstance(value, dict):
        ordered = {key: _sorted(item) for key, item in value.items()}
        if isinstance(ordered.get("curves"), list):
            ordered["curves"] = sorted(
                ordered["curves"], key=lambda curve: (curve["kind"], str(curve.get("axes")), str(curve.get("dtype")))
            )
        if ordered.get("axes") and isinstance(ordered["axes"][0], str):
            ordered["axes"] = sorted(ordered["axes"])
        return ordered
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def check_constraints(constraints: dict[str, Any], content: bytes) -> None:
    """Raise AssertionError unless ``constraints`` are what the file says."""
    told = document(content)
    assert isinstance(told, dict) and told.keys() == constraints.keys()
    for module, wanted in told.items():
        read = constraints[module]
        if isinstance(wanted, list):
            assert set(wanted) <= ROLES and isinstance(read, tuple) and same(read, wanted), (read, wanted)
            continue
        flags = ("recompute", "keep_gathered", "gather_late")
        assert isinstance(read, Strategy) and set(wanted) <= {"roles", *flags} and set(wanted["roles"]) <= ROLES
        assert same(read.roles, wanted["roles"]), (read, wanted)
        assert all(same(getattr(read, flag), wanted.get(flag, False)) for flag in flags), (read, wanted)


_NOT_TAKEN = {
    "architectures", "attn_implementation", "auto_map", "custom_pipelines", "dtype", "experts_implementation",
    "quantization_config", "torch_dtype", "transformers_version", "use_pretrained_backbone", "model_type", "use_cache",
}  # fmt: skip


def check_config(config: ModelConfig, content: bytes) -> None:
    """Raise AssertionError unless every plain setting of the file is in the configuration."""
    told = document(content)
    assert config.config.model_type == told["model_type"]
    for key, value in told.items():
        if key not in _NOT_TAKEN and not key.startswith("_") and isinstance(value, (bool, int, float)):
            read = getattr(config.config, key)
            assert same(read, value) or (value != value and read != read), f"{key} is {read!r}, the file says {value!r}"


ORACLES: dict[str, Callable[[Any, bytes], None]] = {
    "plan": check_plan, "cluster": check_cluster, "constraints": check_constraints, "config": check_config,
}  # fmt: skip
