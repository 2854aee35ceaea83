"""Decide one mesh axis: a sharding rule for every operator, block by block, each distinct block once."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from cost_models.ops import is_matmul
from galvatron_fx.ir.annotations import TensorSpec, facts, output_ports, ports, signature
from galvatron_fx.ir.placement import PARTIAL, REPLICATE, Partial, Placement, Shard, fits
from galvatron_fx.ir.strategy import original_name
from galvatron_fx.ir.symbols import BATCH
from passes.insert_collectives import AxisSharding
from passes.search.intra_block import Choice, Item, Problem, solve
from passes.sharding import collective_rules, own_rules, random_rules  # noqa: F401  (register rules)
from passes.sharding.op_call import OpCall, input_nodes, is_getitem, op_call
from passes.sharding.own_rules import VIEWS, view_rules
from passes.sharding.prices import Prices, is_free
from passes.sharding.roles import BATCH_ROLES, RoleRules
from passes.sharding.rules import OpRule, has_rule, op_rules, strided

# Price of what a role should not do, but must where an operator has no rule that suits it.
_UNWANTED_S = 1.0

# Per choice: a rule for an operator, a placement for an input, None for a sink.
Decision = OpRule | Placement | None


@dataclass(frozen=True)
class AssignShardings:
    """Choose the rules of one mesh axis for a whole graph.

    ``axis``: its index in the lowering; ``roles``: what the axis does in each block; ``prices``: times of operators and
    redistributions; ``fixed``: parameters, by name, whose placement is decided already. Blocks that are equal, and
    enter and leave equally, are solved once (``cache``). ``only``: just these blocks (for prices; such a decision
    cannot be lowered). ``outputs_as_terms``: outputs of the model may leave as terms of a sum.
    """

    axis: int
    roles: Sequence[RoleRules]
    prices: Prices
    cache: dict[Any, tuple[Decision, ...]] = field(default_factory=dict)
    fixed: Mapping[str, Placement] = field(default_factory=dict)
    only: frozenset[int] | None = None
    outputs_as_terms: bool = False

    def run(self, graph: fx.GraphModule) -> AxisSharding:
        """Return the decision for ``graph``, whose shapes are those left by the axes lowered before."""
        return _Assignment(self, graph).solve()


class _Assignment:
    def __init__(self, options: AssignShardings, graph: fx.GraphModule) -> None:
        self.options = options
        self.graph = graph
        self.degree = options.prices.degree
        self.inputs: dict[fx.Node, Placement] = {}
        self.rules: dict[fx.Node, OpRule] = {}
        self.exits: dict[fx.Node, Placement] = {}
        self.gradient_of = _gradient_parameters(graph)
        self.owner = _parameter_owners(graph)
        self.port_of = {node: port for port, node in ports(graph)}
        self.outputs: list[tuple[Any, fx.Node | None]] = output_ports(graph)
        self.parameters = {node for port, node in ports(graph) if port.kind == "param"}
        self.originals = _originals(graph)
        # Without a loss of its own, the model's caller computes one from whole outputs.
        self.outputs_stay = signature(graph).loss is not None
        dtypes = [facts(node).spec.dtype for port, node in ports(graph) if port.kind == "param"]
        self.parameter_itemsize = max((d.itemsize for d in dtypes if d.is_floating_point), default=0)
        self.sums = _sums_over_batch(graph) if options.outputs_as_terms else set()

    def solve(self) -> AxisSharding:
        for port, node in ports(self.graph):
            if port.kind == "param" and port.name in self.options.fixed and not self.leaves_terms(node):
                self.inputs[node] = self.options.fixed[port.name]
            elif port.kind != "param" or node not in self.owner:
                self.inputs[node] = REPLICATE
        for node in self.graph.graph.nodes:
            if node.op == "get_attr":
                self.inputs[node] = REPLICATE
        only = self.options.only
        for index, nodes in sorted(_block_nodes(self.graph).items()):
            if only is None or index in only:
                _Block(self, index, nodes).decide()
        if only is not None:
            return AxisSharding(self.options.axis, self.degree, self.rules, self.inputs, (), self.exits)
        return AxisSharding(
            axis=self.options.axis,
            degree=self.degree,
            rules=self.rules,
            inputs=self.inputs,
            outputs=tuple(self._output_placement(port, node) for port, node in self.outputs),
            boundaries=self.exits,
        )

    def role(self, block: int) -> RoleRules:
        return self.options.roles[max(block, 0)]

    def produced(self, node: fx.Node) -> Placement:
        if node in self.inputs:
            return self.inputs[node]
        if is_getitem(node):
            source, position = node.args
            return self.rules[source].outputs[position]  # type: ignore[index]
        return self.rules[node].outputs[0]

    def exit_placement(self, node: fx.Node) -> Placement:
        """How a value made in a block crosses to other blocks: by its maker's role, or as the parameter it is a
        gradient of.
        """
        if node not in self.exits:
            record = facts(node)
            parameter = self.gradient_of.get(node)
            if node in self.sums:
                self.exits[node] = PARTIAL
            elif parameter is not None and parameter in self.inputs:
                self.exits[node] = self.inputs[parameter]
            else:
                self.exits[node] = self.role(record.block).boundary(record.spec)
        return self.exits[node]

    def leaves_terms(self, parameter: fx.Node) -> bool:
        """Whether the gradient of ``parameter`` may leave the graph as terms: its owner's role reduces it later."""
        return parameter in self.owner and self.role(self.owner[parameter]).leaves_terms()

    def _output_placement(self, port: Any, node: fx.Node | None) -> Placement | None:
        if node is None:
            return None
        if port.kind == "grad":
            parameter = self.gradient_of.get(node)
            if parameter is not None and self.leaves_terms(parameter) and isinstance(self.produced(node), Partial):
                return self.produced(node)
            return self.inputs[parameter] if parameter is not None else REPLICATE
        if port.kind == "output" and self.options.outputs_as_terms and isinstance(self.produced(node), Partial):
            return self.produced(node)
        if port.kind == "output" and self.outputs_stay:
            return _free_output(self.exits.get(node, self.produced(node)))
        return REPLICATE


def _free_output(placement: Placement) -> Placement:
    """Outputs stay as they are made, as long as a DTensor can say how they lie."""
    return placement if isinstance(placement, Shard) and placement.outer == 1 else REPLICATE


def _block_nodes(graph: fx.GraphModule) -> dict[int, list[fx.Node]]:
    blocks: dict[int, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function":
            blocks.setdefault(max(facts(node).block, 0), []).append(node)
    return blocks


def _sums_over_batch(graph: fx.GraphModule) -> set[fx.Node]:
    """Backward values without a batch that are made of values with one: what each part of a batch adds to a sum."""
    free = input_only(graph)
    varies: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op == "call_function" and node not in free:
            carries = any(spec is not None and spec.dim_of(BATCH) is not None for spec in facts(node).specs)
            if carries or any(source in varies for source in input_nodes(node)):
                varies.add(node)
    return {
        node
        for node in varies
        if facts(node).phase == "backward" and not facts(node).multi_output and _is_batchless_float(facts(node).spec)
    }


def _is_batchless_float(spec: TensorSpec) -> bool:
    return spec.dim_of(BATCH) is None and spec.dtype.is_floating_point


def input_only(graph: fx.GraphModule) -> set[fx.Node]:
    """Nodes that follow from inputs and constants, not from parameters or gradients."""
    free = {node for port, node in ports(graph) if port.kind not in ("param", "tangent")}
    for node in graph.graph.nodes:
        if node.op == "get_attr" or (node.op == "call_function" and all(n in free for n in input_nodes(node))):
            free.add(node)
    return free


def _parameter_owners(graph: fx.GraphModule) -> dict[fx.Node, int]:
    """The block of each parameter: that of its first use; copies of it in other stages belong there too."""
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    owners = {}
    by_name: dict[str, int] = {}
    for port, node in ports(graph):
        users = [user for user in node.users if user.op == "call_function"]
        if port.kind == "param" and users:
            first = max(facts(min(users, key=order.__getitem__)).block, 0)
            owners[node] = by_name.setdefault(original_name(port.name), first)
    return owners


def _originals(graph: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Copies of parameters that later pipeline stages hold, each with the parameter: they lie alike."""
    by_name = {port.name: node for port, node in ports(graph) if port.kind == "param"}
    return {node: by_name[original_name(name)] for name, node in by_name.items() if original_name(name) != name}


def _gradient_parameters(graph: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Map every node that only adds up to a parameter's gradient to that parameter."""
    by_name = {port.name: node for port, node in ports(graph) if port.kind == "param"}
    found: dict[fx.Node, fx.Node] = {}
    for port, node in output_ports(graph):
        if port.kind != "grad" or node is None or port.name not in by_name:
            continue
        pending = [node]
        while pending:
            current = pending.pop()
            if current.op != "call_function" or facts(current).multi_output or current in found:
                continue
            if facts(current).spec.shape != facts(by_name[port.name]).spec.shape:
                continue
            found[current] = by_name[port.name]
            if str(current.target).startswith("aten.add"):
                pending += [n for n in input_nodes(current) if len(n.users) == 1]
    return found


@dataclass
class _Value:
    """A value of the block's problem: its index, spec and the placements it may come in."""

    index: int
    spec: TensorSpec
    candidates: dict[Placement, None]


class _Block:
    """One block's problem: built from its nodes, solved or recalled, and written back."""

    def __init__(self, whole: _Assignment, index: int, nodes: list[fx.Node]) -> None:
        self.whole = whole
        self.index = index
        self.nodes = nodes
        self.role = whole.role(index)
        self.degree = whole.degree
        self.prices = whole.options.prices
        self.inside = set(nodes)
        self.parameter_side = _made_of_parameters(nodes, whole.parameters)
        self.values: dict[fx.Node, _Value] = {}
        self.items: list[Item] = []
        self.decisions: list[list[Decision]] = []
        self.targets: list[fx.Node | None] = []
        self.problem = Problem()

    def decide(self) -> None:
        entries = self._entries()
        key = self._key(entries)
        cache = self.whole.options.cache
        if key not in cache:
            self._build(entries)
            chosen = solve(self.problem).choices
            picked = {t: self.decisions[i][chosen[i]] for i, t in enumerate(self.targets) if t is not None}
            cache[key] = tuple(picked.get(node) for node in [*entries, *self.nodes])
        for node, decision in zip([*entries, *self.nodes], cache[key], strict=True):
            if isinstance(decision, OpRule):
                self.whole.rules[node] = decision
            elif decision is not None and node in self.whole.owner:
                self.whole.inputs.setdefault(node, decision)

    # ---- what crosses ----

    def _entries(self) -> list[fx.Node]:
        """Values from outside, in order of first use."""
        seen: dict[fx.Node, None] = {}
        for node in self.nodes:
            for source in input_nodes(node):
                if source not in self.inside:
                    seen[source] = None
        return list(seen)

    def _entry_choices(self, node: fx.Node) -> list[Placement]:
        whole = self.whole
        original = whole.originals.get(node)
        if original in whole.inputs:
            return [whole.inputs[original]]
        if node in whole.owner and node not in whole.inputs:
            return self.role.parameter_choices(facts(node).spec)
        if node in whole.inputs:
            return [whole.inputs[node]]
        return [whole.exit_placement(node)]

    def _exit_choice(self, node: fx.Node) -> Placement | None:
        """The placement in which a value leaves the block, or None where no other block takes it."""
        source_block = max(facts(node).block, 0)
        crosses = any(u.op == "call_function" and max(facts(u).block, 0) != source_block for u in node.users)
        return self.whole.exit_placement(node) if crosses else None

    def _key(self, entries: list[fx.Node]) -> Any:
        """Everything the solution depends on: calls, wiring, entry and exit placements, role."""
        number = {node: i for i, node in enumerate([*entries, *self.nodes])}
        wires = tuple(tuple(number[n] for n in input_nodes(node)) for node in self.nodes)
        calls = tuple(_call_key(node) for node in self.nodes)
        enter = tuple((facts(n).specs, tuple(self._entry_choices(n)), n in self.whole.owner) for n in entries)
        leave = tuple((self._leave_key(n), self._graph_outputs(n, number)) for n in self.nodes)
        return (self.role, self.degree, wires, calls, enter, leave)

    def _leave_key(self, node: fx.Node) -> Any:
        return None if facts(node).multi_output else self._exit_choice(node)

    def _graph_outputs(self, node: fx.Node, number: dict[fx.Node, int]) -> tuple[Any, ...]:
        """How the graph's outputs take a node: as whose gradient (by number in the block), or freely."""
        taken: list[Any] = []
        if not any(user.op == "output" for user in node.users):
            return ()
        for port, out in self.whole.outputs:
            if out is node:
                parameter = self.whole.gradient_of.get(node)
                taken.append((port.kind, number.get(parameter) if parameter is not None else None))
        return tuple(taken)

    # ---- the problem ----

    def _build(self, entries: list[fx.Node]) -> None:
        for node in entries:
            self._add_entry(node)
        for node in self.nodes:
            if is_getitem(node):
                continue
            self._add_operator(node)
        for node in self.nodes:
            if not facts(node).multi_output:
                self._add_sinks(node)
        self.problem.items = self.items
        wanted: dict[int, dict[Placement, None]] = {}
        for item in self.items:
            for position, value in enumerate(item.inputs):
                for choice in item.choices:
                    wanted.setdefault(value, {})[choice.inputs[position]] = None
        for node, made in self.values.items():
            self.problem.change_s[made.index] = self._changes(node, made, list(wanted.get(made.index, ())))

    def _changes(
        self, node: fx.Node, value: _Value, wanted: list[Placement]
    ) -> dict[tuple[Placement, Placement], float]:
        pairs = {}
        parameter = node in self.parameter_side
        for have in value.candidates:
            for want in wanted:
                time_s = self.prices.redistribute_s(value.spec, have, want)
                if time_s is None:
                    continue
                may_change = self.role.may_change_parameter if parameter else self.role.may_change
                wanted_so = have == want or may_change(value.spec, have, want)
                pairs[have, want] = time_s + (0.0 if wanted_so else _UNWANTED_S)
        return pairs

    def _new_value(self, node: fx.Node, spec: TensorSpec, candidates: Sequence[Placement]) -> _Value:
        value = _Value(len(self.values), spec, dict.fromkeys(candidates))
        self.values[node] = value
        return value

    def _item(
        self,
        node: fx.Node | None,
        name: str,
        ins: list[int],
        outs: list[int],
        choices: list[Choice],
        what: list[Decision],
    ) -> None:
        self.items.append(Item(name, tuple(ins), tuple(outs), tuple(choices)))
        self.decisions.append(what)
        self.targets.append(node)

    def _add_entry(self, node: fx.Node) -> None:
        choices = self._entry_choices(node)
        value = self._new_value(node, facts(node).spec, choices)
        parameter = node in self.whole.owner and node not in self.whole.inputs
        spec = facts(node).spec
        costs = [self.prices.update_s(spec, p) if parameter else 0.0 for p in choices]
        if parameter and self.role.splits_parameters(spec):
            costs = [
                cost + (0.0 if isinstance(p, Shard) else _UNWANTED_S) for p, cost in zip(choices, costs, strict=True)
            ]
        made = [Choice((), (p,), cost) for p, cost in zip(choices, costs, strict=True)]
        self._item(node, node.name, [], [value.index], made, list(choices))

    def _add_operator(self, node: fx.Node) -> None:
        call = op_call(node)
        if not has_rule(node.target):
            warnings.warn(
                f"operator {node.target} has no sharding rule, so every rank computes all of it (node '{node.name}', "
                f"module "
                f"'{facts(node).module}'): register one, see docs/adding-an-op-rule.md",
                stacklevel=2,
            )
        sources = [self.values[n] for n in input_nodes(node)]
        rules = self._rules(call, sources)
        picks = {int(u.args[1]): u for u in node.users if is_getitem(u)} if facts(node).multi_output else {0: node}  # type: ignore[arg-type]
        outs = []
        positions = []
        for position, spec in enumerate(call.outputs):
            if position in picks and spec is not None:
                candidates = [rule.outputs[position] for rule in rules]
                outs.append(self._new_value(picks[position], spec, candidates).index)
                positions.append(position)
        choices = [
            Choice(rule.inputs, tuple(rule.outputs[p] for p in positions), self.prices.operator_s(call, rule))
            for rule in rules
        ]
        self._item(node, node.name, [s.index for s in sources], outs, choices, list(rules))

    def _rules(self, call: OpCall, sources: list[_Value]) -> list[OpRule]:
        base = list(op_rules(call, self.degree))
        offered = [p for source in sources for p in source.candidates]
        if call.target in VIEWS:
            base += view_rules(call, offered, self.degree)
        else:
            base += [instance for rule in base for instance in strided(rule, call, offered, self.degree)]
        allowed = [rule for rule in dict.fromkeys(base) if self._allowed(rule, call) and _has_terms(rule, sources)]
        splitting = [rule for rule in allowed if self._splits(rule, call)]
        return splitting if any(rule.splits_work for rule in splitting) else allowed

    def _allowed(self, rule: OpRule, call: OpCall) -> bool:
        pairs = [*zip(rule.outputs, call.outputs, strict=True), *zip(rule.inputs, call.inputs, strict=True)]
        fitting = all(
            spec is None or (fits(p, spec.shape, self.degree) and self.role.allows(spec, p)) for p, spec in pairs
        )
        return fitting and not self._sums_features(rule, call) and not self._rounds_otherwise(rule, call)

    def _rounds_otherwise(self, rule: OpRule, call: OpCall) -> bool:
        """Whether the rule adds up terms in a narrower dtype than the parameters have, or casts terms to a narrower
        one.

        Splitting a sum changes its last bits. In the dtype of the parameters that is the precision of training; in a
        narrower one (float32 statistics and losses of a float64 model) it would be visible in the result.
        """
        out = next((spec.dtype for spec in call.outputs if spec is not None), torch.int64)
        gathers = bool(rule.expansion) and rule.outputs[0] == REPLICATE
        if gathers:
            return out.itemsize >= self.whole.parameter_itemsize  # terms are cheaper, where they are allowed
        if not out.is_floating_point or not (rule.expansion or isinstance(rule.outputs[0], Partial)):
            return False
        casts = call.target is torch.ops.aten._to_copy.default and out.itemsize < call.inputs[0].dtype.itemsize
        return casts or out.itemsize < self.whole.parameter_itemsize

    def _sums_features(self, rule: OpRule, call: OpCall) -> bool:
        """Whether a mere reduction would leave terms of a feature dim: it costs more messages than the split saves
        work, and in models that compute statistics in a lower precision it would change their rounding."""
        if rule.expansion or is_matmul(call.target) or not isinstance(rule.outputs[0], Partial):
            return False
        return any(
            isinstance(p, Shard) and not getattr(spec.symbolic[p.dim], "free_symbols", ())
            for p, spec in zip(rule.inputs, call.inputs, strict=True)
        )

    def _splits(self, rule: OpRule, call: OpCall) -> bool:
        """Whether the rule splits what the role is there to split, as far as an output holds it (views are free)."""
        return (is_free(call) and self.role.role not in BATCH_ROLES) or all(
            spec is None or p != REPLICATE or not self.role.must_split(spec)
            for p, spec in zip(rule.outputs, call.outputs, strict=True)
        )

    def _add_sinks(self, node: fx.Node) -> None:
        value = self.values.get(node)
        if value is None:
            return
        leave = self._exit_choice(node)
        if leave is not None:
            self._item(None, f"exit of {node.name}", [value.index], [], [Choice((leave,), (), 0.0)], [None])
        for port, out in self.whole.outputs:
            if out is node:
                self._add_output_sink(port.kind, node, value)

    def _add_output_sink(self, kind: str, node: fx.Node, value: _Value) -> None:
        parameter = self.whole.gradient_of.get(node)
        if kind == "grad" and parameter is not None:
            placed = self.values.get(parameter)
            if placed is not None and parameter not in self.whole.inputs:
                choices = [Choice((p, p), (), 0.0) for p in placed.candidates]
                if self.whole.leaves_terms(parameter):
                    only = next(iter(placed.candidates))
                    choices = self._gradient_choices(parameter, value, only)
                    self._item(None, f"gradient {node.name}", [value.index], [], choices, [None] * len(choices))
                    return
                self._item(
                    None, f"gradient {node.name}", [value.index, placed.index], [], choices, [None] * len(choices)
                )
                return
            only = self.whole.inputs.get(parameter, self.whole.exit_placement(node))
            self._item(
                None,
                f"gradient {node.name}",
                [value.index],
                [],
                self._gradient_choices(parameter, value, only),
                [None] * 2,
            )
            return
        free: list[Placement] = [REPLICATE]
        if kind == "output" and self.whole.outputs_stay:
            free += [p for p in value.candidates if isinstance(p, Shard) and p.outer == 1]
        if kind == "output" and self.whole.options.outputs_as_terms:
            free += [p for p in value.candidates if isinstance(p, Partial)]
        self._item(
            None, f"output {node.name}", [value.index], [], [Choice((p,), (), 0.0) for p in free], [None] * len(free)
        )

    def _gradient_choices(self, parameter: fx.Node, value: _Value, placed: Placement) -> list[Choice]:
        """Reduced to the parameter's placement, or left as terms at the price of reducing them later."""
        choices = [Choice((placed,), (), 0.0)]
        if self.whole.leaves_terms(parameter):
            terms = [p for p in value.candidates if isinstance(p, Partial)]
            reduce_s = 0.0 if self.whole.options.outputs_as_terms else self.prices.reduce_s(value.spec)
            choices += [Choice((p,), (), reduce_s) for p in terms]
        return choices


def _has_terms(rule: OpRule, sources: Sequence[_Value]) -> bool:
    """Whether every Partial that the rule takes can be had: sums of terms from anything whole, others where they are
    made.
    """
    return all(
        not isinstance(p, Partial) or p in source.candidates or (p == PARTIAL and REPLICATE in source.candidates)
        for p, source in zip(rule.inputs, sources, strict=True)
    )


def _made_of_parameters(nodes: Sequence[fx.Node], parameters: set[fx.Node]) -> set[fx.Node]:
    """The parameters, and the nodes that depend on nothing else."""
    made = set(parameters)
    for node in nodes:
        sources = input_nodes(node)
        if sources and all(source in made for source in sources):
            made.add(node)
    return made


def _call_key(node: fx.Node) -> Any:
    return op_call(node) if not is_getitem(node) else node.args[1]
