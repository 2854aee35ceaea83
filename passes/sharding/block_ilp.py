"""One block of one mesh axis as a problem for the solver: built from its nodes, solved or recalled, written back."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from cost_models.node_cost import node_cost
from galvatron_fx.ir.graph.metadata import OutputSpec, TensorSpec, meta_of
from galvatron_fx.ir.graph.op_call import OpCall, input_nodes, is_getitem
from galvatron_fx.ir.graph.placement import REPLICATE, Partial, Placement, Shard, shown_as
from passes.sharding.allowed_rules import AllowedRules
from passes.sharding.axis_decisions import AxisDecisions
from passes.sharding.fused_rules import feature_runs
from passes.sharding.rule_problem import Choice, Item, Problem
from passes.sharding.rule_solver import solve
from passes.sharding.rules import OpRule, has_rule

# Price of what a role should not do, but must where an operator has no rule that suits it.
_UNWANTED_S = 1.0
# Times a reduction in front of a view of a gradient, or of its reduction over another axis: behind these, it takes as
# long, and other axes may take their share first. Of equal prices the solver takes any, in equal blocks another one; by
# less than this it tells no prices apart where other operators take far longer.
_EARLY = 1 + 1e-4

# Per choice: a rule for an operator, a placement for an input, None for a sink.
Decision = OpRule | Placement | None

_Changes = dict[tuple[Placement, Placement], float]


@dataclass
class _Value:
    """A value of the block's problem: its index, spec and the placements it may come in."""

    index: int
    spec: TensorSpec
    candidates: dict[Placement, None]


class BlockProblem:
    """A block's problem; its solution is added to the decisions of the axis."""

    def __init__(self, decided: AxisDecisions, index: int, nodes: list[fx.Node]) -> None:
        self.decided = decided
        self.index = index
        self.nodes = nodes
        self.role = decided.role(index)
        if self.role.role in ("tensor", "tensor_sequence"):
            self.role = replace(self.role, runs=feature_runs(nodes))
        self.degree = decided.degree
        self.prices = decided.prices
        narrowest = 0 if decided.narrow_terms else decided.values.parameter_itemsize
        self.allowed = AllowedRules(self.role, decided.degree, narrowest)
        self.allowed_before_cast = AllowedRules(self.role, decided.degree, 0)
        self.inside = set(nodes)
        self.placed = set(decided.inputs)
        self.parameter_side = _made_of_parameters(nodes, decided.values.parameters)
        self.values: dict[fx.Node, _Value] = {}
        self.items: list[Item] = []
        self.decisions: list[list[Decision]] = []
        self.targets: list[fx.Node | None] = []
        self.problem = Problem()
        self.changes: dict[object, _Changes] = {}
        self.choices: dict[object, tuple[tuple[OpRule, ...], tuple[Choice, ...]]] = {}

    def decide(self, cache: dict[Any, tuple[Decision, ...]]) -> None:
        """Choose the block's rules and the placements of its parameters, or recall them from an equal block."""
        entries = self._entries()
        key = self._key(entries)
        if key not in cache:
            self._build(entries)
            chosen = solve(self.problem).choices
            picked = {t: self.decisions[i][chosen[i]] for i, t in enumerate(self.targets) if t is not None}
            cache[key] = tuple(picked.get(node) for node in [*entries, *self.nodes])
        for node, decision in zip([*entries, *self.nodes], cache[key], strict=True):
            if isinstance(decision, OpRule):
                self.decided.rules[node] = decision
            elif decision is not None and (node in self.decided.values.owner or self._is_cache(node)):
                self.decided.inputs.setdefault(node, decision)
            elif decision is not None and self._followed(node) is not None:
                self.decided.exits[node] = decision

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
        decided = self.decided
        original, followed = decided.values.originals.get(node), self._followed(node)
        if followed is not None:
            return decided.parameter_choices(self.role, followed)
        if self._is_cache(node) and node not in decided.inputs:
            return self.role.cache_choices(meta_of(node).spec)
        if original in decided.inputs:
            return [decided.inputs[original]]
        if node in decided.values.owner and node not in decided.inputs:
            return decided.parameter_choices(self.role, node)
        if node in decided.inputs:
            return [decided.inputs[node]]
        return [decided.exit_placement(node)]

    def _is_cache(self, node: fx.Node) -> bool:
        return node in self.decided.values.cache_owner

    def _followed(self, node: fx.Node) -> fx.Node | None:
        """The parameter of this block that a later block's term of its gradient lies as: which way is decided here."""
        parameter = self.decided.values.gradient_of.get(node)
        if parameter is None or parameter in self.placed or node in self.inside or node in self.decided.exits:
            return None
        choices = self.decided.parameter_choices(self.role, parameter)
        return parameter if choices != [REPLICATE] and not self.inside.isdisjoint(parameter.users) else None

    def _exit_choice(self, node: fx.Node) -> Placement | None:
        """The placement in which a value leaves the block, or None where no other block takes it."""
        source_block = max(meta_of(node).block, 0)
        crosses = any(u.op == "call_function" and max(meta_of(u).block, 0) != source_block for u in node.users)
        return self.decided.exit_placement(node) if crosses else None

    def _key(self, entries: list[fx.Node]) -> Any:
        """Everything the solution depends on: calls, wiring, entry and exit placements, role."""
        number = {node: i for i, node in enumerate([*entries, *self.nodes])}
        wires = tuple(tuple(number[n] for n in input_nodes(node)) for node in self.nodes)
        calls = tuple(self._call_key(node) for node in self.nodes)
        enter = tuple(
            (
                meta_of(n).specs,
                tuple(self._entry_choices(n)),
                (n in self.decided.values.owner, n in self.decided.values.tables, self._is_cache(n)),
                number.get(self._followed(n)),  # type: ignore[arg-type]
            )
            for n in entries
        )
        late = self.decided.values.unreduced
        leave = tuple((self._leave_key(n), self._graph_outputs(n, number), n in late) for n in self.nodes)
        return (self.role, self.degree, wires, calls, enter, leave)

    def _call_key(self, node: fx.Node) -> Any:
        return node.args[1] if is_getitem(node) else self.decided.values.kind(node)

    def _leave_key(self, node: fx.Node) -> Any:
        return None if meta_of(node).multi_output else self._exit_choice(node)

    def _graph_outputs(self, node: fx.Node, number: dict[fx.Node, int]) -> tuple[Any, ...]:
        """How the graph's outputs take a node: as whose gradient, as which cache (by number in the block, and as that
        lies), or freely.
        """
        values = self.decided.values
        taken = [
            (port.kind, values.parameter_of(port) or values.cache_of(port))
            for port in values.output_ports_of.get(node, ())
        ]
        return tuple(
            (kind, source and number.get(source), kind == "cache" and self.decided.inputs.get(source))  # type: ignore[arg-type]
            for kind, source in taken
        )

    # ---- the problem ----

    def _build(self, entries: list[fx.Node]) -> None:
        for node in entries:
            self._add_entry(node)
        for node in self.nodes:
            if is_getitem(node):
                continue
            self._add_operator(node)
        for node in self.nodes:
            if not meta_of(node).multi_output:
                self._add_sinks(node)
        for node in entries:
            followed = self._followed(node)
            if followed is not None:
                self._tie(f"term {node.name}", node, followed)
        self.problem.items = self.items
        wanted: dict[int, dict[Placement, None]] = {}
        for item in self.items:
            for position, value in enumerate(item.inputs):
                for choice in item.choices:
                    wanted.setdefault(value, {})[choice.inputs[position]] = None
        for node, node_value in self.values.items():
            self.problem.change_s[node_value.index] = self._changes(
                node, node_value, list(wanted.get(node_value.index, ()))
            )

    def _changes(self, node: fx.Node, value: _Value, wanted: list[Placement]) -> _Changes:
        """Seconds of each change that has a meaning, read once for all values that are alike."""
        parameter, late = node in self.parameter_side, node in self.decided.values.unreduced
        early = node in self.decided.values.unfinished_gradients
        alike = value.spec, tuple(value.candidates), tuple(wanted), parameter, late, early
        if alike not in self.changes:
            self.changes[alike] = self._priced_changes(value, wanted, parameter, late, early)
        return self.changes[alike]

    def _priced_changes(
        self, value: _Value, wanted: list[Placement], parameter: bool, late: bool, early: bool
    ) -> _Changes:
        pairs = {}
        for have in value.candidates:
            for want in wanted:
                time_s = self.prices.redistribute_s(value.spec, have, want)
                if time_s is None:
                    continue
                may_change = self.role.may_change_parameter if parameter else self.role.may_change
                too_early = late and isinstance(have, Partial)
                wanted_so = have == want or (may_change(value.spec, have, want) and not too_early)
                times = _EARLY if early and isinstance(have, Partial) else 1.0
                pairs[have, want] = time_s * times + (0.0 if wanted_so else _UNWANTED_S)
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
        choices: Sequence[Choice],
        what: list[Decision],
    ) -> None:
        self.items.append(Item(name, tuple(ins), tuple(outs), tuple(choices)))
        self.decisions.append(what)
        self.targets.append(node)

    def _add_entry(self, node: fx.Node) -> None:
        choices = self._entry_choices(node)
        value = self._new_value(node, meta_of(node).spec, choices)
        parameter = node in self.decided.values.owner and node not in self.decided.inputs
        spec = meta_of(node).spec
        is_table = parameter and node in self.decided.values.tables
        price = self.prices.keep_s if is_table else self.prices.update_s
        costs = [price(spec, p) if parameter else 0.0 for p in choices]
        if parameter and not is_table and self.role.splits_parameters(spec):
            costs = [
                cost + (0.0 if isinstance(p, Shard) else _UNWANTED_S) for p, cost in zip(choices, costs, strict=True)
            ]
        options = [Choice((), (p,), cost) for p, cost in zip(choices, costs, strict=True)]
        self._item(node, node.name, [], [value.index], options, list(choices))

    def _add_operator(self, node: fx.Node) -> None:
        call = self.decided.values.call(node)
        if not has_rule(node.target):
            warnings.warn(
                f"operator {node.target} has no sharding rule, so every rank computes all of it (node '{node.name}', "
                f"module "
                f"'{meta_of(node).module}'): register one, see docs/adding-an-op-rule.md",
                stacklevel=2,
            )
        sources = [self.values[n] for n in input_nodes(node)]
        allowed = self.allowed_before_cast if node in self.decided.values.unreduced else self.allowed
        rules = allowed.of(call, [source.candidates for source in sources])
        picks = {int(u.args[1]): u for u in node.users if is_getitem(u)} if meta_of(node).multi_output else {0: node}  # type: ignore[arg-type]
        outs = []
        positions = []
        for position, spec in enumerate(call.outputs):
            if position in picks and spec is not None:
                candidates = [rule.outputs[position] for rule in rules]
                outs.append(self._new_value(picks[position], spec, candidates).index)
                positions.append(position)
        choices = self._choices(node, call, rules, tuple(positions))
        self._item(node, node.name, [s.index for s in sources], outs, choices, list(rules))

    def _choices(
        self, node: fx.Node, call: OpCall, rules: tuple[OpRule, ...], positions: tuple[int, ...]
    ) -> tuple[Choice, ...]:
        """What each rule takes, makes at the ``positions`` that are used, and costs: read once for calls that are
        alike.
        """
        cost = node_cost(node, self.decided.values.sizes)
        alike = call, id(rules), positions, cost
        if alike not in self.choices:
            unwanted = [_UNWANTED_S * self.role.avoids(call.target, rule) for rule in rules]
            costs_s = [self.prices.operator_s(call, cost, r) + more for r, more in zip(rules, unwanted, strict=True)]
            choices = tuple(
                Choice(rule.inputs, tuple(rule.outputs[p] for p in positions), cost_s)
                for rule, cost_s in zip(rules, costs_s, strict=True)
            )
            self.choices[alike] = rules, choices  # (kept, so that no others get their id)
        return self.choices[alike][1]

    def _add_sinks(self, node: fx.Node) -> None:
        value = self.values.get(node)
        if value is None:
            return
        leave = self._exit_choice(node)
        if leave is not None:
            self._add_sink(f"exit of {node.name}", [value.index], [Choice((leave,), (), 0.0)])
        for port in self.decided.values.output_ports_of.get(node, ()):
            self._add_output_sink(port, node, value)

    def _add_output_sink(self, port: OutputSpec, node: fx.Node, value: _Value) -> None:
        parameter = self.decided.values.parameter_of(port)
        if parameter is not None:
            self._add_gradient_sink(node, parameter, value)
            return
        if port.kind == "cache":
            self._add_cache_sink(node, self.decided.values.cache_of(port), value)
            return
        free: list[Placement] = [REPLICATE]
        if port.kind == "output" and self.decided.values.outputs_stay:
            free += dict.fromkeys(p for have in value.candidates if isinstance(p := shown_as(have), Shard))
        if port.kind == "output" and self.decided.outputs_as_terms:
            free += [p for p in value.candidates if isinstance(p, Partial)]
        self._add_sink(f"output {node.name}", [value.index], [Choice((p,), (), 0.0) for p in free])

    def _add_gradient_sink(self, node: fx.Node, parameter: fx.Node, value: _Value) -> None:
        """A gradient leaves as its parameter lies, or as terms that are reduced later."""
        name = f"gradient {node.name}"
        placed = self.values.get(parameter)
        if placed is None or parameter in self.decided.inputs:
            lies = self.decided.inputs.get(parameter, self.decided.exit_placement(node))
            self._add_sink(name, [value.index], self._gradient_choices(parameter, value, lies))
        elif self.decided.leaves_terms(parameter):
            lies = next(iter(placed.candidates))
            self._add_sink(name, [value.index], self._gradient_choices(parameter, value, lies))
        else:
            self._tie(name, node, parameter)

    def _add_cache_sink(self, node: fx.Node, cache: fx.Node | None, value: _Value) -> None:
        """The new value of a cache lies as the old one; a new cache as it may where there was none."""
        name = f"cache {node.name}"
        if cache is None:
            places = self.role.cache_choices(value.spec)
            self._add_sink(name, [value.index], [Choice((p,), (), 0.0) for p in places])
        elif cache in self.values and cache not in self.decided.inputs:
            self._tie(name, node, cache)
        else:
            self._add_sink(name, [value.index], [Choice((self.decided.inputs.get(cache, REPLICATE),), (), 0.0)])

    def _tie(self, name: str, node: fx.Node, parameter: fx.Node) -> None:
        """Let a value lie as a parameter does, whichever way that is."""
        value, placed = self.values[node], self.values[parameter]
        self._add_sink(name, [value.index, placed.index], [Choice((p, p), (), 0.0) for p in placed.candidates])

    def _add_sink(self, name: str, ins: list[int], choices: list[Choice]) -> None:
        """Something that takes values as one of ``choices`` says and makes none."""
        self._item(None, name, ins, [], choices, [None] * len(choices))

    def _gradient_choices(self, parameter: fx.Node, value: _Value, placed: Placement) -> list[Choice]:
        """Reduced to the parameter's placement, or left as terms at the price of reducing them later."""
        choices = [Choice((placed,), (), 0.0)]
        if self.decided.leaves_terms(parameter):
            terms = [p for p in value.candidates if isinstance(p, Partial)]
            reduce_s = 0.0 if self.decided.outputs_as_terms else self.prices.reduce_s(value.spec)
            choices += [Choice((p,), (), reduce_s) for p in terms]
        return choices


def _made_of_parameters(nodes: Sequence[fx.Node], parameters: set[fx.Node]) -> set[fx.Node]:
    """The parameters, and the nodes that depend on nothing else."""
    parameter_values = set(parameters)
    for node in nodes:
        sources = input_nodes(node)
        if sources and all(source in parameter_values for source in sources):
            parameter_values.add(node)
    return parameter_values
