"""State of schedulers, loaders and generators as JSON: plain values, small tensors and arrays, and nothing that runs.

Values that JSON lacks are written as an object with one key that starts with "~": ``{"~tuple": [...]}``. Floats are
exact: JSON text of a float in Python reads back as the same float.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from galvatron_fx.ir.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}


def encode(value: Any, where: str) -> Any:
    """The JSON form of ``value``, which is found at ``where`` (for errors).

    Raises CheckpointError naming the place of a value that is neither plain nor a tensor nor an array.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic):
        return encode(value.item(), where)
    if isinstance(value, Tensor):
        return {"~tensor": _tensor_fields(value)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return {"~array": [value.dtype.str, list(value.shape), _text(value.tobytes())]}
    if isinstance(value, (bytes, bytearray)):
        return {"~bytes": _text(bytes(value))}
    if type(value) in (list, tuple, set, frozenset):
        return _encode_items(value, where)
    if isinstance(value, Counter):
        return {"~counter": _encode_pairs(value, where)}
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("~") for key in value):
            return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
        return {"~dict": _encode_pairs(value, where)}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}: checkpoints hold numbers, texts, bytes, lists, tuples, sets, dicts, "
        f"tensors and arrays, because nothing else can be read back without running code from the file"
    )


def decode(value: Any, where: str) -> Any:
    """The value that :func:`encode` made ``value`` of. Raises CheckpointError for text that it cannot have made."""
    if isinstance(value, list):
        return [decode(item, where) for item in value]
    if not isinstance(value, dict):
        return value
    tag, content = next(iter(value.items()), ("", None))
    if not tag.startswith("~"):
        return {key: decode(item, f"{where}.{key}") for key, item in value.items()}
    if tag not in _DECODERS or len(value) != 1:
        raise CheckpointError(f"{where} holds {tag!r}, which no checkpoint of this version writes")
    try:
        return _DECODERS[tag](content, where)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{where} holds a malformed {tag!r}: {error}") from error


def _encode_items(value: Any, where: str) -> Any:
    if isinstance(value, (set, frozenset)):
        return {"~set": [encode(item, where) for item in sorted(value, key=repr)]}
    items = [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    return items if isinstance(value, list) else {"~tuple": items}


def _encode_pairs(value: dict[Any, Any], where: str) -> list[Any]:
    return [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]


def _tensor_fields(tensor: Tensor) -> list[Any]:
    # NumPy has no bfloat16: pass the bytes.
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), _text(flat.numpy().tobytes())]


def _tensor(content: Any, _: str) -> Tensor:
    dtype, shape, text = content
    data = bytearray(_bytes(text))
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(DTYPES[dtype]).reshape(shape)


def _array(content: Any, _: str) -> Any:
    dtype, shape, text = content
    if np.dtype(dtype).kind not in "biufc":
        raise ValueError(f"arrays hold numbers, not {dtype}")
    return np.frombuffer(bytearray(_bytes(text)), dtype=dtype).reshape(shape)


def _pairs(content: Any, where: str) -> dict[Any, Any]:
    return {decode(key, where): decode(item, where) for key, item in content}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_DECODERS: dict[str, Callable[[Any, str], Any]] = {
    "~tensor": _tensor,
    "~array": _array,
    "~bytes": lambda content, _: _bytes(content),
    "~tuple": lambda content, where: tuple(decode(content, where)),
    "~set": lambda content, where: set(decode(content, where)),
    "~dict": _pairs,
    "~counter": lambda content, where: Counter(_pairs(content, where)),
}
