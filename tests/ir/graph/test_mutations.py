"""The verifier sees every wrong collective before anything runs (``pytest -s`` prints the table).

``tests.ir.graph.mutations.rows()`` has each mutation in every program that it can be made in, 3,746 in all.
"""

from __future__ import annotations

import re

from galvatron_fx.errors import VerifierError
from passes.sharding.placed_calls import verify_placed
from tests.ir.graph.mutations import Row, cases, rows


def refusal(row: Row) -> str | None:
    """What the verifier says of a mutated graph; None where the mutation says nothing else than before."""
    graph = row.make()
    if graph is None:
        return None
    try:
        verify_placed(graph, row.case.stage, "MyPass")
    except VerifierError as error:
        return str(error)
    return ""


def test_every_mutation_is_seen() -> None:
    seen: dict[str, str] = {}
    for row in rows(programs=1):
        message = refusal(row)
        if message is not None:
            seen[str(row)] = message
    print(*(f"{name:90} {re.sub('^after MyPass: ', '', message)[:110]}" for name, message in seen.items()), sep="\n")
    print(f"{len(seen)} mutations, {sum(map(bool, seen.values()))} seen")
    assert len(seen) >= 79
    assert not [name for name, message in seen.items() if not message]


def test_the_programs_themselves_pass() -> None:
    for case in cases():
        verify_placed(case.graph, case.stage, "MyPass")
