"""What copies between device and host have to be: the same tensor in other memory, waited for before it is taken."""

from __future__ import annotations

from torch import fx

from galvatron_fx.ir.graph.host_copies import HOST_MOVES, arrived, from_host, is_parameter, to_host
from galvatron_fx.ir.graph.metadata import meta_of

__all__ = ["host_copy_problem"]

_PHASES = {to_host: "forward", from_host: "backward"}  # of values that wait for backward


def host_copy_problem(node: fx.Node) -> str | None:
    """What is wrong with a host copy or with the wait for one, None if nothing is."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    record, given = meta_of(node), meta_of(source)
    # Sizes as expressions are left out, which code generation leaves out of what it writes.
    if (record.spec.shape, record.spec.dtype) != (given.spec.shape, given.spec.dtype):
        return f"is a copy of {given.specs[0]} and is recorded as {record.specs[0]}"
    if record.placements != given.placements:
        return f"lies otherwise than '{source.name}', which it is a copy of"
    if node.target is arrived:
        if source.target not in HOST_MOVES or node.args[1] is not source.args[0]:
            return f"waits for '{source.name}', which is no copy of '{node.args[1]}'"
        return None
    is_kept = is_parameter(source) if node.target is from_host else _is_result(node)
    if record.phase != _PHASES[node.target] and not is_kept:  # type: ignore[index]
        return f"is of the {record.phase} phase, where copies of the {_PHASES[node.target]} phase were expected"  # type: ignore[index]
    untimely = [user.name for user in node.users if user.target is not arrived]
    return f"is taken by {untimely} before it has arrived" if untimely or not node.users else None


def _is_result(copy: fx.Node) -> bool:
    """Whether nothing but the results of a graph takes a copy to the host, as of a gradient."""
    return all(user.op == "output" for wait in copy.users for user in wait.users)
