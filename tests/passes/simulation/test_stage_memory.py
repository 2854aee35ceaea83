"""Tasks of stages hold nothing longer than it is needed, and their predicted memory is what counting by hand gives."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from cost_models.optimizer import ADAM
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.graph.bound_ops import plus
from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.plan.prediction import ACTIVATIONS, GRADIENTS, TRANSIENTS, Storage
from galvatron_fx.ir.plan.schedule import Schedule, make_schedule
from galvatron_fx.ir.plan.strategy import Strategy
from galvatron_fx.ir.plan.transfers import with_transfers
from galvatron_fx.runtime.microbatches import hoisted_values
from passes.lowering.lower_stages import LoweredStages, LowerStages
from passes.lowering.stages.split_stages import SplitStages, Stage
from passes.simulation.live_memory import LiveMemory
from passes.simulation.persistent_memory import PersistentMemory
from passes.simulation.rank_memory import RankReplay, StageReplay
from passes.simulation.task_memory import StageMemory, TaskMemory
from tests.graphs import Builder
from tests.helpers import DEVICE, axes, captured, uniform
from tests.models import zoo
from tests.runtime.shared_captures import captured_once  # noqa: F401 (a fixture)

aten = torch.ops.aten
X, E, Y, V, W = 4 * 8 * 8, 4 * 6 * 8, 4 * 2 * 8, 8 * 6 * 8, 6 * 2 * 8  # bytes of x, exp(x v), its product with w, v, w


@pytest.fixture
def stages() -> tuple[Stage, ...]:
    """``sum(exp(exp(x @ v) @ w))`` in float64, cut behind the first exponential, and both gradients."""
    build = Builder()
    x, v, w = build.input("x", (4, 8)), build.input("v", (8, 6), "param"), build.input("w", (6, 2), "param")
    e = build.call(aten.exp.default, build.call(aten.mm.default, x, v))
    build.block = 1
    f = build.call(aten.exp.default, build.call(aten.mm.default, e, w))
    loss = build.call(aten.sum.default, f)
    build.phase = "backward"
    g = build.call(aten.mul.Tensor, f, build.input("tangent", (), "tangent"))
    grad_w = build.call(aten.mm.default, build.call(aten.t.default, e), g)
    grad_e = build.call(aten.mm.default, g, build.call(aten.t.default, w))
    build.block = 0
    h = build.call(aten.mul.Tensor, grad_e, e)
    grad_v = build.call(aten.mm.default, build.call(aten.t.default, x), h)
    graph = build.finish(("output", "0", loss), ("grad", "v", grad_v), ("grad", "w", grad_w), loss=0)
    return SplitStages((0, 1), [Strategy(("pipeline",))] * 2).run(graph)


def test_tasks_return_only_what_is_taken(stages: tuple[Stage, ...]) -> None:
    """The values between the halves of backward are no outputs of the whole."""
    first, last = (stage.tasks for stage in stages)
    assert (first["backward"].outputs, first["backward"].sums) == ((), ("mm_4",))
    assert (last["backward"].outputs, last["backward"].sums) == (("mm_3",), ("mm_2",))
    assert (last["input_grad"].outputs, last["input_grad"].sums) == (("mul", "mm_3"), ())
    assert (last["weight_grad"].outputs, last["weight_grad"].sums) == ((), ("mm_2",))


def test_what_dies(stages: tuple[Stage, ...]) -> None:
    """Inputs of the graph do not; the rest does in the last task that takes it."""
    tasks = stages[1].tasks
    assert tasks["forward"].dies == frozenset(), "backward takes what was received"
    assert tasks["backward"].dies == {"exp", "exp_1"}
    assert tasks["input_grad"].dies == {"exp_1"}
    assert tasks["weight_grad"].dies == {"exp", "mul"}


def test_terms_are_added_at_once(stages: tuple[Stage, ...]) -> None:
    names = [node.name for node in stages[1].tasks["backward"].graph.graph.nodes]
    assert names.index("plus") == names.index("mm_2") + 1 < names.index("mm_3")


def test_the_first_term_is_the_sum() -> None:
    term = torch.ones(2)
    assert plus(None, term) is term
    total = plus(term, term)
    assert total.tolist() == [2, 2] and term.tolist() == [1, 1], "another gradient may be the same tensor"


def most(task: TaskMemory) -> int:
    return max(sum(peak.values()) for peak in task.peaks.values())


def test_memory_of_tasks(stages: tuple[Stage, ...]) -> None:
    memory = StageMemory.of(stages[0], (), "FB")
    assert memory.port_bytes == {"x": X, "v": V}
    forward = memory.tasks["forward", False]
    assert (most(forward), forward.fresh, forward.outputs) == (2 * E, ((E, ACTIVATIONS),), (0,))
    # The gradient of v comes when those of e are gone; added up, it is there with both sums.
    before, before_more = 2 * E, 2 * E + V
    assert most(memory.tasks["backward", False]) == max(3 * E, E + V) - before
    assert most(memory.tasks["backward", True]) == 3 * V - before_more
    assert memory.tasks["backward", True].fresh == ((V, GRADIENTS),)


def peaks(stages: tuple[Stage, ...], schedule: Schedule) -> list[tuple[int, int]]:
    """(most bytes, bytes at the end) of every rank, beside parameters and inputs."""
    kinds = {action.kind for order in schedule.orders for action in order}
    found = []
    for rank, order in enumerate(with_transfers(schedule)):
        live = LiveMemory()
        own = {i: StageReplay(stages[i], StageMemory.of(stages[i], (), kinds), live) for i in schedule.stages_of(rank)}
        replay = RankReplay(own, live)
        replay.run(order)
        replay.finish(frozenset())
        found.append((sum(live.most.values()), sum(live.now.values())))
    return found


def test_memory_of_one_microbatch(stages: tuple[Stage, ...]) -> None:
    first, last = peaks(stages, make_schedule("1f1b", 2, 2, 1))
    # Backward: e, its gradient and what both make; then the gradient of v with that.
    assert first == (max(3 * E, E + V), V)
    # Backward: the gradients of w and e are made of the product with the tangent; e is gone by then; the loss stays.
    loss = 8
    assert last == (Y + W + E + loss, W + loss)


def test_memory_of_schedules(stages: tuple[Stage, ...]) -> None:
    """GPipe's first rank has every e when the first gradients arrive; 1F1B's has two of them."""
    parts = 6
    gpipe = peaks(stages, make_schedule("gpipe", 2, 2, parts))[0]
    eager = peaks(stages, make_schedule("1f1b", 2, 2, parts))[0]
    assert gpipe[1] == eager[1] == V
    assert gpipe[0] - eager[0] >= (parts - 3) * E
    assert gpipe[0] >= parts * E + 2 * E


def test_a_zero_bubble_schedule_keeps_what_weight_gradients_need(stages: tuple[Stage, ...]) -> None:
    whole = peaks(stages, make_schedule("1f1b", 2, 2, 4))[1]
    halved = peaks(stages, make_schedule("zb_h1", 2, 2, 4))[1]
    assert halved[1] == whole[1] and halved[0] > whole[0]


def test_values_that_share_memory_count_once() -> None:
    live, storage = LiveMemory(), Storage(10, ACTIVATIONS)

    def counted() -> tuple[int, int, int, int]:
        now, most = live.now, live.most
        return now[ACTIVATIONS], now[TRANSIENTS], most[ACTIVATIONS], most[TRANSIENTS]

    live.hold([storage, storage, Storage(5)])
    live.drop([storage])
    assert counted() == (10, 5, 10, 5)
    live.passing({TRANSIENTS: 3})
    live.drop([storage])
    assert counted() == (0, 5, 10, 8)


# ---- whole models ----------------------------------------------------------------------------------------------------


def lowered(graph: fx.GraphModule, parts: int, **options: bool) -> LoweredStages:
    strategies = uniform(graph, "pipeline", "zero", **options)
    cluster = Cluster(DEVICE, axes((2, 2)))
    return LowerStages(strategies, (0, len(strategies) // 2), parts, cluster, keep_outputs=False).run(graph)


def test_no_task_takes_all_outputs_of_an_operator() -> None:
    """BERT's blocks end in layer norms, of whose three outputs recomputation needs one."""
    for stage in lowered(captured(*zoo.bert(layers=1)), parts=2, recompute=True).stages:
        for task in stage.tasks.values():
            taken = task.graph.graph.find_nodes(op="placeholder")
            assert not [node.name for node in taken if meta_of(node).multi_output]


def test_what_is_held_beside_the_tasks() -> None:
    """Tied embeddings are on both ranks, the batch on all, and its slices for the micro-batches where they are used."""
    model, inputs = zoo.gpt2(layers=2)
    held = PersistentMemory.of(lowered(captured(model, inputs), parts=2), make_schedule("1f1b", 2, 2, 2), ADAM)
    tied = "transformer.wte.weight"
    assert held.shared == {tied} and all(tied in tensors for tensors in held.tensors)
    batch = sum(tensor.nbytes for tensor in inputs.values())
    assert held.batch_bytes == batch
    assert held.hoisted_bytes(0) == inputs["input_ids"].nbytes
    assert 0 < held.hoisted_bytes(1) <= batch
    trained = sum(p.numel() * 8 for p in model.parameters()) + model.get_parameter(tied).numel() * 8
    assert sum(sum(held.always(rank).values()) for rank in (0, 1)) >= 3 * trained / 2 + 2 * batch


def test_a_rank_cuts_only_what_its_stages_take_out_of_the_batch() -> None:
    """The first takes tokens, the last labels: what is held for a step is what is predicted."""
    model, inputs = zoo.gpt2(layers=2)
    split = lowered(captured(model, inputs), parts=2)
    held = PersistentMemory.of(split, make_schedule("1f1b", 2, 2, 2), ADAM)
    given = {str(i): tensor for i, tensor in enumerate(inputs.values())}
    for rank, stage in enumerate(split.stages):
        taken = {int(port.name) for port in stage.ports.values() if port.kind == "hoisted"}
        prologue = split.microbatched.prologue_for(taken)
        values = hoisted_values(split.microbatched, lambda port: given[port.name], prologue)
        assert {i for i, parts in enumerate(values) if parts[0] is not None} == taken
        storages = {part.untyped_storage() for parts in values for part in parts if part is not None}
        assert sum(storage.nbytes() for storage in storages) == held.hoisted_bytes(rank)
