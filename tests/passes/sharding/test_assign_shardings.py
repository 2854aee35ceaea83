"""What the solver finds inside a block: Megatron's split of a perceptron, the batch's, and what cannot be split."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from typing import Any

import expecttest
import pytest
import torch
from torch import Tensor, fx, nn
from torch.testing import FileCheck

from galvatron_fx.api import capture
from galvatron_fx.ir.cluster.cluster import Axis
from galvatron_fx.ir.graph.collectives import all_reduce
from galvatron_fx.ir.graph.metadata import meta_of, output_ports, ports
from galvatron_fx.ir.graph.op_call import input_nodes
from galvatron_fx.ir.graph.placement import PARTIAL, REPLICATE, Placement, Shard
from passes.analysis.blocks import num_blocks
from passes.analysis.storages import is_view
from passes.sharding.assign_shardings import AssignShardings
from passes.sharding.insert_collectives import AxisSharding, InsertCollectives
from passes.sharding.prices import Prices
from passes.sharding.roles import RoleRules
from tests.graphs import listing
from tests.helpers import DEVICE, captured

aten = torch.ops.aten
ROLES = ("data", "zero", "tensor", "tensor_sequence", "sequence")
BATCH, SEQUENCE, WIDTH, HIDDEN = 64, 128, 512, 2048


class Perceptron(nn.Module):
    """Two matrices and an activation, over [batch, sequence, width], or [batch, width]."""

    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN, bias: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias), nn.Linear(hidden, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def graph_of(model: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    """Captured as one block; on the meta device, as sizes are those at which splitting pays."""
    graph = captured(model, inputs)
    assert num_blocks(graph) == 1
    return graph


@pytest.fixture(scope="module")
def rows() -> fx.GraphModule:
    with torch.device("meta"):
        return graph_of(Perceptron(), torch.empty(BATCH * SEQUENCE, WIDTH))


@pytest.fixture(scope="module")
def sequences() -> fx.GraphModule:
    with torch.device("meta"):
        return graph_of(Perceptron(), torch.empty(BATCH, SEQUENCE, WIDTH))


def assigned(
    graph: fx.GraphModule, role: str, degree: int = 2, cache: dict[Any, Any] | None = None, **options: Any
) -> AxisSharding:
    symbols = graph.meta["symbols"]
    rules = [RoleRules(role, degree, symbols.batch if symbols else 1)] * num_blocks(graph)
    prices = Prices(DEVICE, (Axis("a", degree, 1e-6, 3e11),))
    return AssignShardings(0, rules, prices, {} if cache is None else cache, **options).run(graph)


def parameters(graph: fx.GraphModule, sharding: AxisSharding) -> dict[str, Placement]:
    return {port.name: sharding.inputs[node] for port, node in ports(graph) if port.kind == "param"}


def forward_program(graph: fx.GraphModule, sharding: AxisSharding) -> str:
    """The forward part of the lowered graph."""
    lines = listing(InsertCollectives(sharding).run(graph)).splitlines()
    return "\n".join(line for line in lines if not line.startswith(("'", "return", "tangent")))


class TestForward(expecttest.TestCase):
    @pytest.fixture(autouse=True)
    def given(self, rows: fx.GraphModule, sequences: fx.GraphModule) -> None:
        self.rows, self.sequences = rows, sequences

    def program(self, graph: fx.GraphModule, role: str) -> str:
        return forward_program(graph, assigned(graph, role))

    def test_tensor(self) -> None:
        """Columns, then rows, and one all-reduce behind them (Megatron-LM)."""
        self.assertExpectedInline(
            self.program(self.rows, "tensor"),
            """\
primals_1: [1024, 512]
primals_2: [512, 1024]
primals_3: [8192, 512]
t = t(primals_1): [512, 1024]
mm = mm(primals_3, t): [8192, 1024]
relu = relu(mm): [8192, 1024]
t_1 = t(primals_2): [1024, 512]
mm_1 = mm(relu, t_1): [8192, 512]
all_reduce = all_reduce(mm_1, sum, 0): [8192, 512]
pow_1 = pow.Tensor_Scalar(all_reduce, 2): [8192, 512]
mean = mean(pow_1): []""",
        )

    def test_data(self) -> None:
        self.assertExpectedInline(
            self.program(self.rows, "data"),
            """\
primals_1: [2048, 512]
primals_2: [512, 2048]
primals_3: [8192, 512]
t = t(primals_1): [512, 2048]
shard = shard(primals_3, 0, 1, 0): [4096, 512]
mm = mm(shard, t): [4096, 2048]
relu = relu(mm): [4096, 2048]
t_1 = t(primals_2): [2048, 512]
mm_1 = mm(relu, t_1): [4096, 512]
pow_1 = pow.Tensor_Scalar(mm_1, 2): [4096, 512]
mean = mean(pow_1): []
all_reduce = all_reduce(mean, avg, 0): []""",
        )

    def test_sequence(self) -> None:
        """Whole parameters; the view of [batch, sequence] as rows makes runs of the sequence."""
        self.assertExpectedInline(
            self.program(self.sequences, "sequence"),
            """\
primals_1: [2048, 512]
primals_2: [512, 2048]
primals_3: [64, 128, 512]
t = t(primals_1): [512, 2048]
shard = shard(primals_3, 1, 1, 0): [64, 64, 512]
view = reshape(shard, [4096, 512]): [4096, 512]
mm = mm(view, t): [4096, 2048]
_unsafe_view = reshape(mm, [64, 64, 2048]): [64, 64, 2048]
relu = relu(_unsafe_view): [64, 64, 2048]
t_1 = t(primals_2): [2048, 512]
view_1 = reshape(relu, [4096, 2048]): [4096, 2048]
mm_1 = mm(view_1, t_1): [4096, 512]
_unsafe_view_1 = reshape(mm_1, [64, 64, 512]): [64, 64, 512]
pow_1 = pow.Tensor_Scalar(_unsafe_view_1, 2): [64, 64, 512]
mean = mean(pow_1): []
all_reduce = all_reduce(mean, avg, 0): []""",
        )

    def test_tensor_sequence(self) -> None:
        """Megatron's sequence parallelism: the sum behind the rows is scattered along the sequence."""
        self.assertExpectedInline(
            self.program(self.sequences, "tensor_sequence"),
            """\
primals_1: [1024, 512]
primals_2: [512, 1024]
primals_3: [64, 128, 512]
t = t(primals_1): [512, 1024]
view = reshape(primals_3, [8192, 512]): [8192, 512]
mm = mm(view, t): [8192, 1024]
_unsafe_view = reshape(mm, [64, 128, 1024]): [64, 128, 1024]
relu = relu(_unsafe_view): [64, 128, 1024]
t_1 = t(primals_2): [1024, 512]
view_1 = reshape(relu, [8192, 1024]): [8192, 1024]
mm_1 = mm(view_1, t_1): [8192, 512]
reduce_scatter = reduce_scatter(mm_1, sum, 0, 64, 0): [4096, 512]
_unsafe_view_1 = reshape(reduce_scatter, [64, 64, 512]): [64, 64, 512]
pow_1 = pow.Tensor_Scalar(_unsafe_view_1, 2): [64, 64, 512]
mean = mean(pow_1): []
all_reduce = all_reduce(mean, avg, 0): []""",
        )


def test_parameters_of_the_tensor_role(rows: fx.GraphModule) -> None:
    """[out, in]: the first matrix by its outputs, the second by its inputs, in both directions of the step."""
    sharding = assigned(rows, "tensor")
    assert parameters(rows, sharding) == {"up.weight": Shard(0), "down.weight": Shard(1)}
    gradients = [
        p for port, p in zip(rows.meta["galvatron"].outputs, sharding.outputs, strict=True) if port.kind == "grad"
    ]
    assert gradients[:2] == [Shard(0), Shard(1)]


@pytest.mark.parametrize("role", ["data", "zero", "sequence"])
def test_other_roles_keep_parameters_whole(sequences: fx.GraphModule, role: str) -> None:
    assert set(parameters(sequences, assigned(sequences, role)).values()) == {REPLICATE}


def test_zero_leaves_terms_of_gradients(rows: fx.GraphModule) -> None:
    """Its gradients are reduced and scattered later; those of plain data parallelism are reduced here."""
    kinds = [port.kind for port in rows.meta["galvatron"].outputs]
    data, zero = (
        {p for p, kind in zip(assigned(rows, role).outputs, kinds, strict=True) if kind == "grad" and p is not None}
        for role in ("data", "zero")
    )
    assert data == {REPLICATE} and PARTIAL in zero


def test_no_activation_is_gathered_by_data(rows: fx.GraphModule) -> None:
    lowered = InsertCollectives(assigned(rows, "data")).run(rows)
    FileCheck().check_not("all_gather").check_not("all_to_all").run(listing(lowered))


def test_biases() -> None:
    """The bias behind the columns is split with them; the one behind the rows stays whole and is added once."""
    with torch.device("meta"):
        graph = graph_of(Perceptron(bias=True), torch.empty(BATCH * SEQUENCE, WIDTH))
    placed = parameters(graph, assigned(graph, "tensor"))
    assert placed == {
        "up.weight": Shard(0),
        "up.bias": Shard(0),
        "down.weight": Shard(1),
        "down.bias": REPLICATE,
    }


def test_a_parameter_that_no_rank_count_divides_stays_whole() -> None:
    with torch.device("meta"):
        graph = graph_of(Perceptron(width=WIDTH - 1, hidden=HIDDEN - 1), torch.empty(BATCH * SEQUENCE, WIDTH - 1))
    sharding = assigned(graph, "tensor")
    assert set(parameters(graph, sharding).values()) == {REPLICATE}
    lowered = listing(InsertCollectives(sharding).run(graph))
    assert not re.search("all_reduce|all_gather|reduce_scatter|all_to_all", lowered)


def test_one_dim_that_divides_is_taken() -> None:
    """511 inputs cannot be split over two ranks, the 2048 hidden features can."""
    with torch.device("meta"):
        graph = graph_of(Perceptron(width=WIDTH - 1), torch.empty(BATCH * SEQUENCE, WIDTH - 1))
    assert parameters(graph, assigned(graph, "tensor")) == {"up.weight": Shard(0), "down.weight": Shard(1)}


def test_a_batch_that_does_not_divide_stays_whole() -> None:
    with torch.device("meta"):
        graph = graph_of(Perceptron(8, 12), torch.empty(3, 8))
    sharding = assigned(graph, "data")
    assert not any(rule.splits_work for rule in sharding.rules.values())


@pytest.mark.parametrize("role", ROLES)
def test_rules_and_placements_are_complete(sequences: fx.GraphModule, role: str) -> None:
    """Every operator has a rule that fits its inputs and outputs, every input a placement, every output one or None."""
    sharding = assigned(sequences, role)
    for node in sequences.graph.nodes:
        if node.op == "placeholder":
            assert node in sharding.inputs
        elif node.op == "call_function" and not meta_of(node).multi_output:
            rule = sharding.rules[node]
            assert len(rule.inputs) == len(input_nodes(node)) and len(rule.outputs) == 1
    assert len(sharding.outputs) == len(sequences.graph.output_node().args[0])
    InsertCollectives(sharding).run(sequences).graph.lint()


def test_fixed_parameters_are_obeyed(rows: fx.GraphModule) -> None:
    fixed = {"up.weight": Shard(1), "down.weight": Shard(0)}
    sharding = assigned(rows, "tensor", fixed=fixed)
    assert parameters(rows, sharding) == fixed
    lowered = InsertCollectives(sharding).run(rows)
    shapes = {port.name: meta_of(node).spec.shape for port, node in ports(lowered)}
    assert shapes["up.weight"] == (HIDDEN, WIDTH // 2) and shapes["down.weight"] == (WIDTH // 2, HIDDEN)


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def test_equal_blocks_are_solved_once() -> None:
    solved: list[int] = []
    for count in (4, 8):
        with torch.device("meta"):
            layers = nn.Sequential(*(Layer() for _ in range(count)), nn.Linear(64, 1))
            graph = captured(layers, (torch.empty(64, 32, 64),))
        cache: dict[Any, Any] = {}
        sharding = assigned(graph, "tensor", cache=cache)
        assert num_blocks(graph) >= count
        solved.append(len(cache))
        up = {placement for name, placement in parameters(graph, sharding).items() if name.endswith("up.weight")}
        assert len(up) == 1, "equal layers lie alike"
        before = dict(cache)
        assigned(graph, "tensor", cache=cache)
        assert cache == before, "a second run solves nothing"
        assigned(graph, "data", cache=cache)
        assert len(cache) > len(before), "another role is another problem"
    assert solved[0] == solved[1] < 6


class Scaled(nn.Module):
    """A perceptron of what is scaled: the gradient of the scale is a view of a sum over rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.perceptron = nn.Parameter(torch.ones(width)), Perceptron(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        return self.perceptron(x * self.scale)


@pytest.mark.parametrize("width", [512, 4096])
@pytest.mark.parametrize("roles", [("data", "tensor_sequence"), ("sequence", "data")])
def test_equal_prices_let_gradients_be_reduced_last(width: int, roles: tuple[str, str]) -> None:
    """Behind views, and behind their reductions over other axes; also where other operators take far longer."""
    with torch.device("meta"):
        graph = graph_of(Scaled(width), torch.empty(16, width // 2, width))
    for axis, role in enumerate(roles):
        graph = InsertCollectives(replace(assigned(graph, role), axis=axis)).run(graph)
    (gradient,) = (node for port, node in output_ports(graph) if port.name == "scale" and port.kind == "grad")
    assert gradient is not None
    chain = [gradient, *input_nodes(gradient), *input_nodes(input_nodes(gradient)[0])]
    assert [node.target for node in chain[:2]] == [all_reduce] * 2
    assert [node.args[-1] for node in chain[:2]] == [1, 0]
    assert is_view(chain[2])


def test_only_some_blocks() -> None:
    with torch.device("meta"):
        graph = captured(nn.Sequential(*(Layer() for _ in range(4)), nn.Linear(64, 1)), (torch.empty(64, 32, 64),))
    sharding = assigned(graph, "tensor", only=frozenset({1}))
    assert {meta_of(node).block for node in sharding.rules} == {1}
    assert sharding.outputs == ()


class Distances(nn.Module):
    """An operator without any rule."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pdist(self.linear(x)).mean()


def test_an_operator_without_a_rule_is_computed_whole_with_one_warning() -> None:
    graph = captured(Distances(), (torch.ones(4, 8),))
    cache: dict[Any, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sharding = assigned(graph, "data", cache=cache)
        assigned(graph, "data", cache=cache)
    found = [str(w.message) for w in caught if "has no sharding rule" in str(w.message)]
    for target in (aten._pdist_forward.default, aten._pdist_backward.default):
        (node,) = graph.graph.find_nodes(op="call_function", target=target)
        (text,) = (text for text in found if f"operator {target} has no sharding rule" in text)
        assert f"node '{node.name}'" in text and "see docs/adding-an-op-rule.md" in text
        assert set((*sharding.rules[node].inputs, *sharding.rules[node].outputs)) == {REPLICATE}
    assert len(found) == 2


class Words(nn.Module):
    """Looks words up, and a perceptron on these."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(count, WIDTH), Perceptron()

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(self.table(ids))


@pytest.mark.parametrize(
    ("count", "forward_only", "placement"),
    [(8_000, True, REPLICATE), (8_000_000, True, Shard(1)), (8_000, False, Shard(0))],
    ids=["small", "large", "trained"],
)
def test_tables_are_whole_where_nothing_updates_them_and_they_are_cheap_to_hold(
    count: int, forward_only: bool, placement: Placement
) -> None:
    with torch.device("meta"):
        graph = capture(Words(count), (torch.zeros(8, dtype=torch.int64),), forward_only=forward_only)
        assert parameters(graph, assigned(graph, "tensor"))["table.weight"] == placement
