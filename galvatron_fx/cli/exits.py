"""Exit codes of ``galvatron-fx``, and the errors that lead to them."""

from __future__ import annotations

from galvatron_fx.ir.errors import CaptureError, GalvatronError, TimeLimitError, VerifierError
from galvatron_fx.ir.plan.budget_error import BudgetError

__all__ = ["EXIT_CODES", "ModelError", "UsageError", "exit_code"]

OK, BUG, USAGE, BAD_INPUT, TOO_LARGE, NO_CAPTURE, NO_TIME, DIFFERENT, PIPE, INTERRUPTED = (*range(8), 141, 130)

EXIT_CODES = {
    OK: "done",
    BUG: "a bug of Galvatron-FX, or a plan that differs from one device (check): please report it, with --debug",
    USAGE: "the command line is wrong",
    BAD_INPUT: "an input is wrong: a file, a name, or a plan that does not fit model, batch or cluster",
    TOO_LARGE: "nothing fits the memory budget (estimate: the plan does not)",
    NO_CAPTURE: "the model cannot be built or captured",
    NO_TIME: "--search-seconds were over before there was any plan",
    DIFFERENT: "the plans differ (diff --exit-code)",
    INTERRUPTED: "interrupted with Ctrl-C",
}


class UsageError(GalvatronError):
    """Raised for a command line that cannot be meant."""


class ModelError(GalvatronError):
    """Raised when the model that a command line names cannot be built."""


def exit_code(error: BaseException) -> int:
    """Return the exit code that stands for ``error``."""
    kinds: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], int], ...] = (
        (KeyboardInterrupt, INTERRUPTED),
        (BrokenPipeError, PIPE),
        (VerifierError, BUG),
        (UsageError, USAGE),
        (BudgetError, TOO_LARGE),
        (TimeLimitError, NO_TIME),
        ((CaptureError, ModelError), NO_CAPTURE),
        ((GalvatronError, OSError), BAD_INPUT),
    )
    return next((code for kind, code in kinds if isinstance(error, kind)), BUG)
