"""What a gradient that is handed to an optimizer has to be: a result of backward, handed over once and used no more."""

from __future__ import annotations

from torch import fx

from galvatron_fx.ir.graph.folded_gradients import fold_gradient
from galvatron_fx.ir.graph.metadata import meta_of

__all__ = ["folded_gradient_problem"]


def folded_gradient_problem(node: fx.Node) -> str | None:
    """What is wrong with a ``fold_gradient``, None if nothing is."""
    gradient, name = node.args
    assert isinstance(gradient, fx.Node)
    record, given = meta_of(node), meta_of(gradient)
    if record.phase != "backward":
        return f"is of the {record.phase} phase, where gradients are of backward"
    # Sizes as expressions are left out: a gradient has those that its operators were traced with.
    kinds = [(meta.spec.shape, meta.spec.dtype) for meta in (record, given)]
    if kinds[0] != kinds[1] or record.placements != given.placements:
        return f"is recorded as {record.specs[0]}, and takes a gradient '{gradient.name}' of {given.specs[0]}"
    others = [user.name for user in (*gradient.users, *node.users) if user is not node and user.op != "output"]
    if others or gradient.target is fold_gradient:
        return f"hands over '{gradient.name}', of which {others or gradient.name} takes what is left"
    taken = node.graph.find_nodes(op="call_function", target=fold_gradient)
    same = [other.name for other in taken if other.args[1] == name and other is not node]
    return f"updates '{name}', and so does {same}" if same else None
