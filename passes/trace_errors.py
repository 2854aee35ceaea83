"""Say in the user's terms why a model could not be traced."""

from __future__ import annotations

import traceback
from types import TracebackType

from torch import nn

from galvatron_fx.errors import CaptureError, InputError


def explained(error: Exception, model: nn.Module) -> Exception:
    """Turn a tracing error into one that names the model's own line and what to do."""
    where = _user_line(error.__traceback__)
    name = type(error).__name__
    if "DataDependent" in name or "DynamicOutputShape" in name or "dynamic shape" in str(error):
        return CaptureError(
            f"{type(model).__name__} decides by the value of a tensor at {where}, so there is no one graph of it: "
            f"replace the branch by torch.where or a fixed choice ({name}: {_first_line(error)})"
        )
    if isinstance(error, (TypeError, RuntimeError, ValueError, IndexError, KeyError)):
        return InputError(
            f"the example inputs do not fit {type(model).__name__}, or it cannot be traced: at {where}: "
            f"{name}: {_first_line(error)}"
        )
    return CaptureError(f"{type(model).__name__} cannot be traced: at {where}: {name}: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else "no message"


def _user_line(trace: TracebackType | None) -> str:
    """The innermost frame that is neither torch's nor ours."""
    frames = traceback.extract_tb(trace)
    own = ("/torch/", "/passes/capture.py", "/passes/fake_model.py", "/galvatron_fx/ir/")
    users = [frame for frame in frames if not any(part in frame.filename.replace("\\", "/") for part in own)]
    frame = users[-1] if users else frames[-1]
    return f'File "{frame.filename}", line {frame.lineno}, in {frame.name}: {frame.line}'
