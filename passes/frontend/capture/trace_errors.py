"""Say in the user's terms why a model could not be traced."""

from __future__ import annotations

import copy
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from functools import lru_cache
from traceback import FrameSummary
from types import FrameType

import torch
from torch import nn

import galvatron_fx.ir
import passes
from galvatron_fx.ir.errors import CaptureError, GalvatronError, InputError
from passes.frontend.capture.value_reads import remedy_for_read, remedy_for_shape

_LOG = logging.getLogger("galvatron_fx.capture")

# What a traced tensor cannot do, by words of torch's message or the name of its error: what the code does, and what to
# do instead.
_UNTRACEABLE = {
    ".numpy() is not supported": (
        "leaves PyTorch for NumPy",
        "use the function of torch, or compute it where batches are made and pass it as an input",
    ),
    "Unsupported": (
        "calls an operator of control flow (torch.cond, while_loop, scan, map), whose functions torch traces by itself",
        "compute both branches and take one by torch.where, or write a Python loop of a fixed number of steps",
    ),
    "data pointer": (
        "asks for the memory of a tensor, which has none while it is traced",
        "save and print outside of forward; make a custom kernel known by torch.library.custom_op",
    ),
    "self.shape_env must not be None": (
        "makes a nested tensor, whose rows are as long as values say",
        "pad all rows to one length, and leave out what is too long by a mask",
    ),
    **dict.fromkeys(
        ("Sparse CSR", "SparseCoo"),
        (
            "uses a sparse tensor, which a trace cannot follow",
            "keep a dense one, or its entries, and add them up by index_add",
        ),
    ),
    "support the deepcopy protocol": (
        "copies a parameter, or a module with some (copy.deepcopy)",
        "make the copy in __init__, or call the module with other weights: torch.func.functional_call(module, "
        "{name: parameter.detach() for name, parameter in module.named_parameters()}, x)",
    ),
    "unsupported format string": (
        "prints the value of a tensor",
        "return the tensor as one more output and print it after the step",
    ),
    "Unexpected fake buffer": (
        "uses a tensor that an earlier run of forward made, and kept where no module holds it",
        "make it in __init__ and keep it on the module, or make it in every forward",
    ),
}
_CONSTANT_WRITTEN = ("mutating a non-functional tensor", "expected to have an entirely functional graph")
_UNTRACEABLE |= dict.fromkeys(
    _CONSTANT_WRITTEN,
    (
        "writes into a tensor that is made of one which no module holds",
        "keep that one in a buffer (register_buffer in __init__), or make it inside of forward",
    ),
)
_MOST_SHOWN = 200  # characters of torch's message
# Frames of these are not the user's.
_FOLDERS = tuple(
    os.path.join(os.path.dirname(os.path.abspath(file)), "")
    for file in (torch.__file__, passes.__file__, os.path.dirname(galvatron_fx.ir.__file__))
)
_FOLDERS += (os.path.abspath(copy.__file__),)


class PickedRows(Exception):
    """Raised for rows that a mask picks, which are as many as values say: ``operator`` asked for them, at ``frame``."""

    def __init__(self, operator: str, frame: FrameSummary) -> None:
        super().__init__(operator)
        self.operator, self.frame = operator, frame


def explained(error: Exception, model: nn.Module, tried: str = "") -> GalvatronError:
    """Turn a tracing error into one that names the model's own line and what to do.

    ``tried``: what was tried beside it. Torch's own error stays its ``__context__``, and is logged in full with
    ``TORCH_LOGS="+galvatron_fx"``.
    """
    if isinstance(error, GalvatronError):
        return error
    _LOG.debug("tracing %s failed", type(model).__name__, exc_info=error)
    frame = error.frame if isinstance(error, PickedRows) else user_frame(traceback.extract_tb(error.__traceback__))
    where = described_frame(frame)
    name, text = type(error).__name__, _first_line(error)
    refusal = _refusal(error, name, frame)
    if refusal is not None:
        what, remedy = refusal
        reason = f"{type(model).__name__} {what}, so there is no one graph of it"
        return CaptureError(f"{reason}:\n  {where}\n{remedy} ({name}: {text}{tried})")
    if _in_own_backward(error):
        return CaptureError(
            f"the backward of an autograd.Function cannot be traced: at {where}: {name}: {text}. A trace runs backward "
            f"behind forward, when attributes that forward set on modules are as they were before it, and follows no "
            f".backward() inside (reversible layers): keep what backward needs on ctx, take gradients there by "
            f"torch.autograd.grad, or leave the function out and let the plan recompute (recompute=True)"
        )
    if isinstance(error, (TypeError, RuntimeError, ValueError, IndexError, KeyError)):
        return InputError(
            f"the example inputs do not fit {type(model).__name__}, or it cannot be traced: at {where}: {name}: {text}"
        )
    return CaptureError(f"{type(model).__name__} cannot be traced: at {where}: {name}: {text}")


def writes_into_constants(error: Exception) -> bool:
    """Whether torch says that code writes into what is made of constants, of which a trace follows no writes."""
    return any(words in str(error) for words in _CONSTANT_WRITTEN)


def _in_own_backward(error: Exception) -> bool:
    """Whether it was raised by what the user's own autograd function does in backward."""
    frames = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(code.co_qualname == "BackwardCFunction.apply" for code in frames)


def _refusal(error: Exception, name: str, frame: FrameSummary) -> tuple[str, str] | None:
    """What the code does that no graph can say, and what to do instead; None where that is not known."""
    text = str(error)
    if isinstance(error, PickedRows):
        reads = "local_scalar" in error.operator
        return remedy_for_read(frame) if reads else remedy_for_shape(error.operator, frame)
    if "DynamicOutputShape" in name or "dynamic shape" in text:
        return remedy_for_shape(_first_line(error), frame)
    if "DataDependent" in name:
        return remedy_for_read(frame)
    return next((reason for words, reason in _UNTRACEABLE.items() if words in text or words == name), None)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:_MOST_SHOWN] if text else "no message"


def user_frame(frames: Sequence[FrameSummary]) -> FrameSummary:
    """The innermost frame that is neither torch's nor ours."""
    users = [frame for frame in frames if is_users(frame.filename)]
    return users[-1] if users else frames[-1]


@lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Whether code in a file is neither torch's nor ours."""
    return not os.path.abspath(filename).startswith(_FOLDERS)


def running_frame() -> FrameType:
    """The innermost such frame of the code that runs now."""
    stack = [frame for frame, _ in traceback.walk_stack(sys._getframe().f_back)]
    return next((frame for frame in stack if is_users(frame.f_code.co_filename)), stack[0])


def calling_frame() -> FrameSummary:
    """The innermost such frame of the code that runs now, and what it runs."""
    return summary_of(running_frame())


def summary_of(frame: FrameType) -> FrameSummary:
    """What a frame runs now."""
    code = frame.f_code
    _, end_line, column, end_column = list(code.co_positions())[frame.f_lasti // 2]
    return FrameSummary(
        code.co_filename, frame.f_lineno, code.co_name, end_lineno=end_line, colno=column, end_colno=end_column
    )


def described_frame(frame: FrameSummary) -> str:
    """A line of code and where it is."""
    return f'File "{frame.filename}", line {frame.lineno}, in {frame.name}: {frame.line}'
