from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_fx.checkpoint.plain import decode, encode
from galvatron_fx.errors import CheckpointError

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.sampled_from(["~tuple", "~tensor"]), inner)
        | st.sets(st.integers())
    ),
    max_leaves=10,
)


def through_json(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value, "value"))), "value")


@settings(max_examples=40)
@given(VALUES)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    found = through_json(value)
    assert found == value
    assert repr(found) == repr(value) or isinstance(value, (set, dict, list, tuple))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.int8, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.randn(shape).to(dtype)
    found = through_json({"here": [value]})["here"][0]
    assert found.dtype == dtype and found.shape == value.shape and torch.equal(found, value)


def test_arrays_and_counters_come_back() -> None:
    value = np.arange(6, dtype=np.uint32).reshape(2, 3)
    found = through_json(value)
    assert found.dtype == value.dtype and (found == value).all()
    found[0, 0] = 1  # generators write into theirs
    counter = through_json(Counter([1, 1, 5]))
    assert type(counter) is Counter and counter[1] == 2 and counter[9] == 0
    assert through_json(np.int64(3)) == 3


@pytest.mark.parametrize("value", [object(), lambda: 1, torch.float32, np.array(["a"]), np.array([object()])])
def test_what_needs_code_to_come_back_is_refused_by_its_place(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"state\.a\[1\] is a "):
        encode({"a": [0, value]}, "state")


@pytest.mark.parametrize(
    "text",
    [
        '{"~object": 1}', '{"~tensor": ["load", [], ""]}', '{"~tensor": ["float32", [2], "AAAA"]}',
        '{"~array": ["O", [], "AAAA"]}', '{"~tuple": [], "b": 1}', '{"~bytes": "?"}', '{"~dict": [[[], 1]]}',
    ],
)  # fmt: skip
def test_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="state"):
        decode(json.loads(text), "state")
