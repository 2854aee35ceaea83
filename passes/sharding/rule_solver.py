"""The exact search inside a block: how it is solved rests on how much of the block hangs together."""

from __future__ import annotations

from passes.sharding.rule_elimination import Elimination
from passes.sharding.rule_ilp import IntegerProgram
from passes.sharding.rule_problem import Problem, Solution

__all__ = ["solve"]

_FEW = 2**14  # numbers for each item: they take less time than a linear program
_MOST = 2**23  # of a table: 64 MB
_MOST_TOGETHER = 2**28  # of all tables: some 3 s, and 128 MB that are held


def solve(problem: Problem) -> Solution:
    """Solve to optimality. Raises ShardingError naming the block's items where no assignment exists."""
    elimination = Elimination(problem, _MOST)
    if elimination.numbers <= _FEW * len(problem.items):
        return elimination.solution()
    program = IntegerProgram(problem)
    found = program.relaxed()
    if found is not None:
        return found
    return elimination.solution() if elimination.numbers <= _MOST_TOGETHER else program.solved()
