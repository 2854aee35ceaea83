"""Which output of a model one step of training differentiates."""

from __future__ import annotations

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.metadata import OutputSpec, Signature

__all__ = ["loss_port"]


def loss_port(signature: Signature, is_scheduled: bool) -> OutputSpec:
    """The output that is the loss.

    ``is_scheduled``: whether the plan has stages or micro-batches, under which nothing else is differentiated. Raises
    InputError where nothing trains, where the model returns no loss, or several scalars and none called so.
    """
    if signature.loss is not None:
        return OutputSpec("output", str(signature.loss))
    what = "a plan with stages or micro-batches" if is_scheduled else "forward_backward"
    trains = signature.scalars or signature.detached or any(port.kind == "grad" for port in signature.outputs)
    if not (trains or signature.forward_only):  # a call without labels is captured so under stages
        raise InputError(
            f"no output of the model depends on a parameter that trains, so {what} has nothing to differentiate, as "
            f"where all are frozen or adapters are merged: let some train (requires_grad_(), unmerge_adapter()), or "
            f"evaluate under torch.no_grad()"
        )
    if not signature.scalars:
        remedy = "evaluate under torch.no_grad()" if is_scheduled else (
            "call the module and backward() on a loss computed from its outputs"
        )  # fmt: skip
        raise InputError(
            f"the model returns no scalar loss, so {what} has nothing to differentiate: pass labels, or {remedy}"
        )
    names = ", ".join(f"'{signature.output_names[i]}'" for i in signature.scalars)
    remedy = "evaluate under torch.no_grad()" if is_scheduled else (
        "call the module and backward() on what you make of them"
    )  # fmt: skip
    raise InputError(
        f"the model returns several scalars that need gradients ({names}) and none is called 'loss', which {what} "
        f"differentiates: return their sum as 'loss' (and the terms detached), or {remedy}"
    )
