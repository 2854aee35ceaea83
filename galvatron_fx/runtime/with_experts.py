"""What a compiled model tells of its experts, and how it deals them to ranks."""

from __future__ import annotations

from torch.optim import Optimizer

from galvatron_fx.ir.errors import InputError
from galvatron_fx.runtime.expert_loads import ExpertLoads
from galvatron_fx.runtime.on_mesh import OnMesh
from galvatron_fx.runtime.rebalance import ExpertMoves, move, propose, require_alone, restored

__all__ = ["WithExperts"]


class WithExperts(OnMesh):
    """The experts of a compiled model on the ranks of its mesh."""

    def expert_loads(self) -> ExpertLoads:
        """Return how many rows every expert had in the last :meth:`forward_backward`, and how many further rounds of
        exchange ran; every rank calls it, and waits for its device.

        ``plan(..., expert_imbalance=loads.room)`` has room for what was measured. A model without experts that
        tokens choose has no layers with loads. Raises InputError before the first step.
        """
        return (self._trained or self._compiled()).counts.loads()

    def rebalance_experts(self, *optimizers: Optimizer, dry_run: bool = True, moves: bool = True) -> ExpertMoves:
        """Return what it costs and gains to deal the experts to ranks by the rows that they had in the last
        :meth:`forward_backward`; with ``dry_run=False``, move them, too. Every rank calls it alike, between steps.

        Their weights and gradients move, and their states in ``optimizers``: give all that the model is trained with.
        Training goes on as if nothing had happened. But parameters then show experts in the order of ranks, so what
        saves, loads or copies the model, or states of its optimizers, raises InputError until :meth:`restore_experts`.
        Averages of parameters and the like that you keep yourself do not move.
        Under a plan with shadows (:class:`galvatron_fx.ir.plan.strategy.Strategy`) the experts with most rows get them,
        and only the others are dealt; with ``moves=False`` nothing else changes, which costs nothing.
        Raises InputError where no block plays role ``expert``, before the first step, under a plan with stages, beside
        a copy of the model, and for states that have not the shape of their parameter.
        """
        counts = (self._trained or self._compiled()).counts
        require_alone(self._orders, self._stages is not None)
        with self._watch.collectives():
            proposals = propose(counts, moves)
            orders = [(order, gain.held) for order, gain in proposals]
            cost = move(orders, self._held, optimizers, self._axes_of_dim, dry_run)
        if proposals and not dry_run:
            for order, gain in proposals:
                order.shadows = gain.shadows
            self._forget_loads()
        return ExpertMoves(tuple(gain for _, gain in proposals), *cost, done=not dry_run)

    def restore_experts(self, *optimizers: Optimizer) -> None:
        """Move the experts back to the model's own order, with their states in ``optimizers``; every rank calls it.

        Raises InputError as :meth:`rebalance_experts`.
        """
        self._compiled()
        if moved := restored(self._orders):
            with self._watch.collectives():
                move(moved, self._held, optimizers, self._axes_of_dim, dry_run=False)
            self._forget_loads()

    def _forget_loads(self) -> None:
        for program in self._programs:
            program.counts.forget()

    def require_own_order(self, what: str) -> None:
        if self._orders.shown:
            raise InputError(
                f"the model cannot be {what} while its experts are held in another order than its own: call "
                f"model.restore_experts(optimizer) before, and rebalance_experts again behind it"
            )
