"""Every sharding rule, run as it would be lowered on simulated ranks, gives what the operator gives on one device."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from galvatron_fx.errors import ShardingError
from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of, set_meta
from galvatron_fx.ir.graph.op_call import op_call
from galvatron_fx.ir.graph.placement import PARTIAL, REPLICATE, Partial, Placement, Shard
from galvatron_fx.runtime.lockstep import Simulator
from passes.sharding import assign_shardings  # noqa: F401  (register rules)
from passes.sharding import rules as rule_module
from passes.sharding.expand_rings import ExpandRings
from passes.sharding.expansions import EXPANSIONS
from passes.sharding.insert_collectives import AxisSharding, InsertCollectives
from passes.sharding.own_rules import FACTORIES, VIEWS, view_rules
from passes.sharding.rules import OpRule, op_rules, register_rule, replicate_rule, strided
from tests.graphs import Builder
from tests.helpers import collect, distribute
from tests.passes.sharding.rule_calls import (
    CALLS,
    GENERATOR,
    TORCH_CALLS,
    WITHOUT_VALUES,
    Call,
    In,
    aten,
    attention,
    convolutions,
    embeddings,
    f64,
    real,
)
from tests.passes.sharding.test_expert_rules import AMONG_MORE, EXCHANGING


def mapped(value: Any, leaf: Callable[[In], Any]) -> Any:
    if isinstance(value, In):
        return leaf(value)
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(item, leaf) for item in value)
    return value


def one_operator(call: Call) -> tuple[fx.GraphModule, fx.Node, list[Tensor]]:
    """A graph of one call and what picks its outputs, the node of the call, and the values of its inputs."""
    target, args, kwargs = call
    build = Builder()
    values: list[Tensor] = []

    def placeholder(tensor: In) -> fx.Node:
        values.append(tensor.value)
        return build.input(f"in{len(values)}", tuple(tensor.value.shape), dtype=tensor.value.dtype)

    arguments = mapped(args, placeholder)
    keywords = {key: mapped(value, placeholder) for key, value in kwargs.items()}
    node = build.call(target, *arguments, **keywords)
    outputs: list[fx.Node | None] = [node]
    if meta_of(node).multi_output:
        known = target(*mapped(args, _value), **{key: mapped(value, _value) for key, value in kwargs.items()})
        specs = tuple(TensorSpec(tuple(x.shape), x.dtype) if x is not None else None for x in known)
        set_meta(node, meta_of(node).having(specs=specs))  # some have other shapes on a device of their own, as meta is
        outputs = [build.call(operator.getitem, node, i) if spec else None for i, spec in enumerate(specs)]
    return build.finish(*(("output", str(i), out) for i, out in enumerate(outputs))), node, values


def _value(tensor: In) -> Tensor:
    return tensor.value


def placed(value: Tensor, placement: Placement, degree: int) -> list[Tensor]:
    """What each rank holds; terms differ from rank to rank."""
    if not isinstance(placement, Partial):
        return distribute(value, [placement], [degree])
    if placement.op in ("max", "min"):
        away = -1.0 if placement.op == "max" else 1.0
        return [value, *(value + away * rank for rank in range(1, degree))]
    terms = [torch.full_like(value, rank + 0.5) for rank in range(1, degree)]
    total = value * (degree if placement.op == "avg" else 1)
    return [total - torch.stack(terms).sum(0), *terms]


def together(held: list[Tensor], placement: Placement) -> Tensor:
    if not isinstance(placement, Partial):
        return collect(held, [placement], [len(held)])
    stacked = torch.stack(held)
    return {"sum": stacked.sum, "avg": stacked.mean, "max": stacked.amax, "min": stacked.amin}[placement.op](0)


def check(call: Call, rule: OpRule, degree: int = 2) -> None:
    graph, node, values = one_operator(call)
    expected = graph(*values)
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    read = [out is not None for out in graph.graph.output_node().args[0]]
    outputs = tuple(p if there else None for p, there in zip(rule.outputs, read, strict=True))
    sharding = AxisSharding(0, degree, {node: rule}, dict(zip(placeholders, rule.inputs, strict=True)), outputs)
    local = ExpandRings((degree,)).run(InsertCollectives(sharding).run(graph))
    fed = [placed(value, p, degree) for value, p in zip(values, rule.inputs, strict=True)]
    results = Simulator((degree,)).run(local, fed)
    for held, placement, want, out in zip(results, outputs, expected, local.graph.output_node().args[0], strict=True):
        if placement is None:
            continue
        assert {tuple(x.shape) for x in held} == {meta_of(out).spec.shape}, f"{rule}: not of the shape its facts say"
        close = 1e-10 if want.dtype == f64 else 1e-6
        torch.testing.assert_close(
            together(held, placement), want, rtol=close, atol=close, msg=lambda m: f"{rule}: {m}"
        )


def rules_of(call: Call, degree: int = 2) -> list[OpRule]:
    """All rules, and their instances with two runs; but for routed rows, whose whole tensor has another order (see
    test_expert_rules.py).
    """
    described = op_call(one_operator(call)[1])
    plain = [rule for rule in op_rules(described, degree) if not rule.routes]
    runs = [Shard(dim, 2, mirrored=mirrored) for dim in range(4) for mirrored in (False, described.target in VIEWS)]
    if described.target in VIEWS:
        return list(dict.fromkeys([*plain, *(r for r in view_rules(described, runs, degree) if fitting(r, described))]))
    return [*plain, *(instance for rule in plain for instance in strided(rule, described, runs, degree))]


def fitting(rule: OpRule, described: Any) -> bool:
    return rule_module._valid(rule, described, 2)


MASKS = (real(4, 1, 8, 8), real(4, 4, 8, 8))
ON_FOUR_RANKS = [*attention(True, None, 2), *(call for mask in MASKS for call in attention(False, mask, 2))]
SHARED_HEADS = {"shared_heads_attention", "shared_heads_attention_backward"}


def name(call: Call) -> str:
    return str(getattr(call[0], "__name__", call[0]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("call", [*CALLS, *TORCH_CALLS], ids=name)
def test_every_rule_gives_the_same(call: Call) -> None:
    found = rules_of(call)
    assert replicate_rule(op_call(one_operator(call)[1])) in found
    for rule in found:
        check(call, rule)


def test_embeddings_whose_gradient_is_scaled_by_frequency() -> None:
    """A rank that has some of the ids does not know how often each occurs."""
    for call in [*embeddings(-1, True), *embeddings(3, True)]:
        for rule in rules_of(call):
            check(call, rule)
    assert not any(isinstance(rule.inputs[1], Shard) for rule in rules_of(call)), "the ids stay whole"


def test_all_registered_operators_are_checked() -> None:
    aside = {*c.COLLECTIVES, *c.RANK_LOCAL, *c.RINGS, operator.getitem, *WITHOUT_VALUES}
    ours = {target for target in rule_module._OWN if getattr(target, "namespace", "aten") == "aten"} - aside
    assert {str(target) for target in ours} - {str(call[0]) for call in CALLS} == set()


@pytest.mark.parametrize("call", [*ON_FOUR_RANKS], ids=name)
def test_heads_that_two_ranks_share_give_the_same(call: Call) -> None:
    found = [rule for rule in rules_of(call, 4) if rule.expansion in SHARED_HEADS]
    assert len(found) == 1
    check(call, found[0], 4)


def test_all_expansions_are_checked() -> None:
    """Those of experts: see test_expert_rules.py."""
    used = {rule.expansion for call in CALLS for rule in rules_of(call)} | SHARED_HEADS
    assert set(EXPANSIONS) <= used | {*EXCHANGING, *AMONG_MORE}


def test_most_operators_split() -> None:
    """A rule that is dropped everywhere would pass the other tests."""
    idle = {name(call) for call in CALLS if not any(rule.splits_work for rule in rules_of(call))}
    assert idle == {f"{op.__name__}" for op in FACTORIES if op.__name__.partition(".")[0] in INDEXED}


# Factories whose elements depend on their position.
INDEXED = ("scalar_tensor", "arange", "linspace", "eye")


def test_memory_without_values_is_made_local() -> None:
    graph, node, _ = one_operator((aten.empty_like.default, (real(4, 8),), {}))
    rule = OpRule((Shard(1),), (Shard(1),))
    assert rule in op_rules(op_call(node), 2)
    (x,) = (n for n in graph.graph.nodes if n.op == "placeholder")
    local = InsertCollectives(AxisSharding(0, 2, {node: rule}, {x: Shard(1)}, (Shard(1),))).run(graph)
    assert local(torch.ones(4, 4))[0].shape == (4, 4)


# ---- collectives of axes that are lowered already ------------------------------------------------------------------


def collective_calls() -> list[tuple[Any, tuple[int, ...], tuple[int, ...], tuple[Any, ...]]]:
    """Over the first axis (of two ranks): target, shape before and after, arguments."""
    shape = (4, 8, 4)
    return [
        *((c.all_reduce, shape, shape, (op,)) for op in ("sum", "avg", "max", "min")),
        *((c.all_gather, shape, (4, 16, 4), (1, split_factor)) for split_factor in (1, 2)),
        *(
            (c.reduce_scatter, shape, (4, 4, 4), (op, 1, split_factor))
            for op, split_factor in itertools.product(("sum", "avg"), (1, 2))
        ),
        (c.all_to_all, shape, (8, 4, 4), (0, 2, 1, 1)),
        (c.shard, shape, (4, 4, 4), (1, 2)),
        (c.only_first, shape, shape, ()),
    ]


@pytest.mark.parametrize("case", collective_calls(), ids=lambda case: f"{case[0].__name__}{case[3]}")
def test_collectives_of_an_earlier_axis(case: tuple[Any, tuple[int, ...], tuple[int, ...], tuple[Any, ...]]) -> None:
    """Splitting a collective of axis 0 over axis 1: each of the two ranks of axis 0 has a tensor of its own."""
    target, before, after, args = case
    build = Builder()
    x = build.input("x", before)
    node = build.write(target, x, *args, 0, specs=[TensorSpec(after, f64)])
    graph = build.finish(("output", "0", node))
    tensors = [torch.randn(before, dtype=f64, generator=GENERATOR) for _ in range(2)]
    (expected,) = Simulator((2,)).run(graph, [tensors])
    found = [rule for rule in op_rules(op_call(node), 2) if not rule.routes]
    assert len(found) > 2
    for rule in found:
        placement = rule.outputs[0]
        local = InsertCollectives(AxisSharding(1, 2, {node: rule}, {x: rule.inputs[0]}, (placement,))).run(graph)
        fed = [part for tensor in tensors for part in placed(tensor, rule.inputs[0], 2)]
        (held,) = Simulator((2, 2)).run(local, [fed])
        for rank in range(2):
            got = together(held[2 * rank : 2 * rank + 2], placement)
            torch.testing.assert_close(got, expected[rank], msg=lambda m, rule=rule: f"{rule}: {m}")


def test_local_indices_of_an_earlier_axis() -> None:
    build = Builder()
    x = build.input("x", (4, 8), dtype=torch.int64)
    node = build.write(c.local_index, x, 5, 0, specs=[meta_of(x).spec])
    assert set(op_rules(op_call(node), 2)) == {
        OpRule((REPLICATE,), (REPLICATE,)),
        OpRule((Shard(0),), (Shard(0),)),
        OpRule((Shard(1),), (Shard(1),)),
    }, "terms of an index are no index"


# ---- how rules are kept ----------------------------------------------------------------------------------------------


def test_rules_that_do_not_divide_are_dropped() -> None:
    _, node, _ = one_operator((aten._softmax.default, (real(3, 4, 6), 2, False), {}))
    assert set(op_rules(op_call(node), 2)) == {OpRule((REPLICATE,), (REPLICATE,)), OpRule((Shard(1),), (Shard(1),))}
    assert [str(rule) for rule in op_rules(op_call(node), 5)] == ["R -> R"]


def test_an_expansion_has_no_strided_instances() -> None:
    _, node, _ = one_operator((aten._log_softmax.default, (real(8, 8), 1, False), {}))
    call = op_call(node)
    (split,) = (rule for rule in op_rules(call, 2) if rule.expansion)
    assert str(split) == "S(1) -> S(1) [vocabulary_log_softmax]"
    assert strided(split, call, [Shard(1, 2)], 2) == []
    plain = OpRule((Shard(0),), (Shard(0),))
    assert strided(plain, call, [Shard(1, 2), PARTIAL, Shard(0, 3)], 2) == [OpRule((Shard(0, 2),), (Shard(0, 2),))]


def test_our_rule_wins_over_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_module, "_OWN", dict(rule_module._OWN))
    _, node, _ = one_operator((aten.sinh.default, (real(4, 8, 12),), {}))
    call = op_call(node)
    assert OpRule((Shard(0),), (Shard(0),)) in op_rules(call, 2)
    register_rule(aten.sinh.default)(lambda call, degree: [OpRule((Shard(1),), (Shard(1),))])
    op_rules.cache_clear()
    assert [str(rule) for rule in op_rules(call, 2)] == ["R -> R", "S(1) -> S(1)"]
    op_rules.cache_clear()


def test_rules_of_an_older_torch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0+cpu")
    op_rules.cache_clear()
    with pytest.raises(ShardingError, match=r"need torch 2\.13 or later.*this is torch 2\.11\.0.*one device"):
        rules_of((aten.mm.default, (real(4, 4), real(4, 4)), {}))


@pytest.mark.parametrize("target", [aten.sum.dim_IntList, aten.mean.dim, aten.amax.default])
def test_an_empty_list_of_dims_is_all_of_them(target: Any) -> None:
    found = rules_of((target, (real(4, 8), []), {}))
    assert {rule.outputs for rule in found if rule.splits_work} == {
        (Partial({"sum": "sum", "mean": "avg"}.get(str(target).split(".")[1], "max")),)
    }


@pytest.mark.parametrize("transposed", [False, True])
def test_groups_of_convolutions_are_split_whole(transposed: bool) -> None:
    """Also those that are the samples of a batch, each with kernels of its own."""
    calls = {groups: convolutions(bias=False, transposed=transposed, groups=groups)[0] for groups in (1, 2, 4)}
    described = {groups: op_call(one_operator(call)[1]) for groups, call in calls.items()}
    by_groups = OpRule((Shard(1),), (Shard(1), Shard(0)))
    assert [by_groups in op_rules(described[groups], 2) for groups in calls] == [False, True, True]
    assert by_groups not in op_rules(described[2], 4)
    assert strided(by_groups, described[2], [Shard(1, 2)], 2) == []
    assert strided(by_groups, described[4], [Shard(1, 2)], 2) == [OpRule((Shard(1, 2),), (Shard(1, 2), Shard(0, 2)))]
