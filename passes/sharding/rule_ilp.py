"""The exact search inside a block as an integer linear program, solved by HiGHS through scipy: for blocks of which more
hangs together than :mod:`passes.sharding.rule_elimination` can write down.

For every operator ``v`` and rule ``r`` a binary
``x[v,r]``; for
every use ``e`` of a value ``u`` by an operator ``v``, ``g[e,q,p]`` says that ``u`` is produced in placement ``q``
and taken in
``p``; and ``f[u,q,p]`` that the change from ``q`` to ``p`` is made at all:

    minimise    sum work[v,r] x[v,r]  +  sum redistribute[u,q,p] f[u,q,p]
    subject to  sum_r x[v,r] = 1                                   one rule each
                sum_p g[e,q,p] = sum_{r makes u as q} x[u,r]       a use sees the placement that is produced
                sum_q g[e,q,p] = sum_{r takes e as p} x[v,r]       and gets the one that is taken
                g[e,q,p] <= f[u,q,p]                               a change is paid once, however many uses share it

Changes without meaning have no ``g``. Tying every use to both of its ends keeps the linear relaxation close to the
integers: with ``f`` alone, one block of Swin took 35 s instead of 0.2 s.
(Zheng et al. 2022, Alpa, section 4, and PyTorch's AutoParallel solve programs of this kind over whole graphs.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, linprog, milp
from scipy.sparse import coo_matrix, csr_matrix

from galvatron_fx.ir.arrays import Bools, Floats
from galvatron_fx.ir.graph.placement import Placement
from passes.sharding.rule_problem import Problem, Solution, Value

_FRACTION = 1e-6  # how far a number that is taken to be integral may be from it
_GAP = 2e-3  # by how much the least time of a block is above that of its relaxation, mostly
_WIDER = 4.0  # times that gap, where it was too small
_UNKNOWN = 4  # scipy's status of a program of which HiGHS knows neither the best solution nor that there is none


class _Program:
    """Rows and columns of the integer program under construction."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.integral: list[int] = []
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.entries: list[float] = []
        self.lower: list[float] = []
        self.upper: list[float] = []

    def variable(self, cost: float, integral: bool) -> int:
        self.costs.append(cost)
        self.integral.append(int(integral))
        return len(self.costs) - 1

    def constrain(self, terms: Sequence[tuple[int, float]], lower: float, upper: float) -> None:
        row = len(self.lower)
        for column, entry in terms:
            self.rows.append(row)
            self.columns.append(column)
            self.entries.append(entry)
        self.lower.append(lower)
        self.upper.append(upper)

    def model(self) -> _Model:
        """The program as arrays."""
        shape = len(self.lower), len(self.costs)
        matrix = coo_matrix((self.entries, (self.rows, self.columns)), shape=shape).tocsr()
        integral = np.array(self.integral, dtype=np.float64)
        return _Model(np.array(self.costs), integral, matrix, np.array(self.lower), np.array(self.upper))


@dataclass(frozen=True)
class _Model:
    """Minimise ``costs[C]`` of columns in [0, 1], with ``lower[R] <= matrix[R,C] columns <= upper[R]``; ``integral[C]``
    is one for those that are zero or one.
    """

    costs: Floats
    integral: Floats
    matrix: csr_matrix
    lower: Floats
    upper: Floats

    def only(self, kept: Bools) -> _Model:
        """The program in which all other columns are zero."""
        return _Model(self.costs[kept], self.integral[kept], self.matrix[:, kept], self.lower, self.upper)

    def solved(self, integrality: Floats, options: dict[str, Any]) -> OptimizeResult:
        """A best solution with columns that are integral where ``integrality[C]`` is one."""
        return milp(
            self.costs,
            integrality=integrality,
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(self.matrix, self.lower, self.upper),
            options=options,
        )

    def relaxed(self) -> OptimizeResult:
        """A best solution of the relaxation, a corner."""
        return _surely(lambda presolve: self.solved(np.zeros(len(self.costs)), {"presolve": presolve}))

    def reduced_costs(self) -> tuple[float, Floats]:
        """The least cost of the relaxation, and how much more it is for each unit of a column that is zero there;
        infinite, and nothing, where it has no solution.
        """
        equal = self.lower == self.upper
        result = _surely(
            lambda presolve: linprog(
                self.costs,
                A_eq=self.matrix[equal],
                b_eq=self.lower[equal],
                A_ub=self.matrix[~equal],
                b_ub=self.upper[~equal],
                bounds=(0, 1),
                method="highs-ds",
                options={"presolve": presolve},
            )
        )
        if result.x is None:
            return np.inf, np.zeros(len(self.costs))
        return float(result.fun), np.asarray(result.lower.marginals)


def _surely(solved: Callable[[bool], OptimizeResult]) -> OptimizeResult:
    """Presolve costs more time than it saves, but HiGHS gives up on a few programs without."""
    result = solved(False)
    return solved(True) if result.status == _UNKNOWN else result


class IntegerProgram:
    """The program of a problem, whose times are brought near one. Its methods raise ShardingError, naming the block's
    items, where no assignment exists.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem, self._scale = problem, _scale(problem)
        program = _Program()
        self._picks = [[program.variable(c.time_s * self._scale, True) for c in item.choices] for item in problem.items]
        for row in self._picks:
            program.constrain([(column, 1.0) for column in row], 1.0, 1.0)
        makers = _producers(problem, self._picks)
        for value, takers in _uses(problem, self._picks).items():
            _connect(program, problem.change_s.get(value, {}), makers[value], takers, self._scale)
        self._model = program.model()

    def relaxed(self) -> Solution | None:
        """The best corner of the linear relaxation, which mostly is integral: then it is what :meth:`solved` finds, in
        a third of the time (for Swin in a sixth). None where it is not.
        """
        result = self._model.relaxed()
        columns = result.x
        if columns is not None:
            fractions = np.abs(columns - columns.round())[self._model.integral > 0]
            if fractions.max(initial=0.0) > _FRACTION:
                return None
        return self._solution(result)

    def solved(self) -> Solution:
        """The best solution."""
        return self._solution(_integral(self._model))

    def _solution(self, result: OptimizeResult) -> Solution:
        if result.x is None:
            raise self._problem.has_none()
        chosen = tuple(int(np.argmax(result.x[row])) for row in self._picks)
        return Solution(chosen, float(np.dot(self._model.costs, result.x)) / self._scale)


def _scale(problem: Problem) -> float:
    """Bring times near one: HiGHS' tolerances are absolute."""
    times = [c.time_s for item in problem.items for c in item.choices if c.time_s > 0]
    times += [t for table in problem.change_s.values() for t in table.values() if t > 0]
    return 1.0 / float(np.median(times)) if times else 1.0


def _producers(problem: Problem, picks: list[list[int]]) -> dict[Value, dict[Placement, list[int]]]:
    """For every value and placement, the variables whose choice makes it so."""
    makers: dict[Value, dict[Placement, list[int]]] = {}
    for item, columns in zip(problem.items, picks, strict=True):
        for position, value in enumerate(item.outputs):
            table = makers.setdefault(value, {})
            for choice, column in zip(item.choices, columns, strict=True):
                table.setdefault(choice.outputs[position], []).append(column)
    return makers


def _uses(problem: Problem, picks: list[list[int]]) -> dict[Value, list[dict[Placement, list[int]]]]:
    """For every value its uses: by placement, the variables whose choice takes it so."""
    uses: dict[Value, list[dict[Placement, list[int]]]] = {}
    for item, columns in zip(problem.items, picks, strict=True):
        for position, value in enumerate(item.inputs):
            takers: dict[Placement, list[int]] = {}
            for choice, column in zip(item.choices, columns, strict=True):
                takers.setdefault(choice.inputs[position], []).append(column)
            uses.setdefault(value, []).append(takers)
    return uses


def _connect(
    program: _Program,
    changes: dict[tuple[Placement, Placement], float],
    makers: dict[Placement, list[int]],
    uses: list[dict[Placement, list[int]]],
    scale: float,
) -> None:
    """Tie all uses of one value to how it is produced, with ``g`` for each use and ``f`` shared between them."""
    shared: dict[tuple[Placement, Placement], int] = {}
    for takers in uses:
        leaving: dict[Placement, list[tuple[int, float]]] = {produced: [] for produced in makers}
        for wanted, columns in takers.items():
            arriving: list[tuple[int, float]] = []
            for produced in makers:
                cost = 0.0 if produced == wanted else changes.get((produced, wanted))
                if cost is None:
                    continue
                alone = len(uses) == 1
                flow = program.variable(cost * scale if alone else 0.0, False)
                arriving.append((flow, 1.0))
                leaving[produced].append((flow, 1.0))
                if cost and not alone:
                    key = (produced, wanted)
                    if key not in shared:
                        shared[key] = program.variable(cost * scale, False)
                    program.constrain([(flow, 1.0), (shared[key], -1.0)], -np.inf, 0.0)
            program.constrain([*arriving, *((column, -1.0) for column in columns)], 0.0, 0.0)
        for produced, flows in leaving.items():
            program.constrain([*flows, *((maker, -1.0) for maker in makers[produced])], 0.0, 0.0)


def _integral(model: _Model) -> OptimizeResult:
    """The integer program among the columns that may be in its solution, in a sixth of the time of all columns.

    A solution with column ``j`` costs at least the relaxation's least and the reduced cost of ``j`` (Wolsey 2020,
    Integer Programming, section 7.5). So what costs no more than some gap above that least has none of a higher
    reduced cost; where the gap was too small, a wider one is tried. Flows of a best solution are integral where its
    picks are; that HiGHS knows it, and so cuts and branches on flows too, is 5 to 12 times faster for loops over time.
    """
    least, reduced = model.reduced_costs()
    most = _GAP * max(least, 1.0)
    while True:
        kept = reduced <= most
        result = model.only(kept).solved(np.ones(int(kept.sum())), {"mip_rel_gap": 1e-6})
        if kept.all() or (result.x is not None and result.fun <= least + most):
            break
        most = most * _WIDER if result.x is None else result.fun - least
    if result.x is not None:
        whole = np.zeros(len(kept))
        whole[kept] = result.x
        result.x = whole
    return result
