"""The state encoding gives back exactly what it was given, or refuses and says where."""

import json
import math
import struct
import time
from collections import Counter, OrderedDict, defaultdict, deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_core import CheckpointError
from checkpoint_core.encoding import decode_state, encode_state

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]

surrogates = st.text(st.characters(min_codepoint=0xD7F0, max_codepoint=0xE010))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=2**500, max_value=2**600),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(),
    surrogates,
    st.binary(max_size=40),
)
keys = st.one_of(scalars.filter(lambda value: value == value), st.tuples(st.integers(), st.text()))
tensors = st.builds(
    lambda shape, dtype: torch.arange(math.prod(shape)).reshape(shape).to(dtype),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from(DTYPES),
)
states = st.recursive(
    st.one_of(scalars, tensors),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(st.sampled_from(["$", "a", "a.b", ""]), inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(st.integers(), st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=20,
)


def same(left: object, right: object) -> bool:
    """Equality that knows types, bits of floats, and order of dictionaries."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, float):
        return struct.pack(">d", left) == struct.pack(">d", right)
    if isinstance(left, dict):
        pairs = zip(left.items(), right.items(), strict=True)
        return len(left) == len(right) and all(same(list(a), list(b)) for a, b in pairs)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@settings(max_examples=400, deadline=None)
@given(states)
def test_round_trip(state: object) -> None:
    encoded = encode_state(state)
    text = json.dumps(encoded.document, allow_nan=False)
    assert same(decode_state(json.loads(text), encoded.tensors.__getitem__), state)


@pytest.mark.parametrize(
    "bits", ["7ff8000000000000", "fff8000000000001", "7ff0000000000000", "8000000000000000"]
)
def test_floats_keep_every_bit(bits: str) -> None:
    value = struct.unpack(">d", bytes.fromhex(bits))[0]
    document = json.loads(json.dumps(encode_state([value]).document, allow_nan=False))
    (back,) = decode_state(document, {}.__getitem__)
    assert struct.pack(">d", back).hex() == bits


def test_shared_tensor_is_stored_once_and_shared_again() -> None:
    tensor = torch.randn(3, 4)
    encoded = encode_state({"a": tensor, "b": [tensor, tensor[1:], tensor.t()]})
    assert len(encoded.tensors) == 3
    back = decode_state(encoded.document, encoded.tensors.__getitem__)
    assert back["a"] is back["b"][0]
    assert torch.equal(back["b"][1], tensor[1:])


def test_names_of_tensors_do_not_collide() -> None:
    state = {
        "a.b": torch.tensor(1),
        "a": {"b": torch.tensor(2)},
        "": torch.tensor(3),
        "\ud800": torch.tensor(4),
    }
    encoded = encode_state(state)
    assert len(encoded.tensors) == 4
    assert same(decode_state(encoded.document, encoded.tensors.__getitem__), state)


def test_many_tensors_of_one_name_take_no_longer_each_than_a_few() -> None:
    began = time.process_time()
    tensors = encode_state({"\x00": [torch.empty(0)] * 50_000}).tensors
    assert list(tensors)[:3] == ["tensor", "tensor#2", "tensor#3"]
    assert len(tensors) == 50_000
    # A second or two; with the square of their number it was some minutes.
    assert time.process_time() - began < 30


class Custom:
    pass


@pytest.mark.parametrize(
    "value",
    [
        Custom(),
        {1, 2},
        lambda: 0,
        defaultdict(int),
        deque([1]),
        torch.float32,
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_refuses_with_the_place(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"outer\.1\.inner"):
        encode_state({"outer": [0, {"inner": value}]})


def test_refuses_cycles_and_depth() -> None:
    cycle: list[object] = []
    cycle.append({"again": cycle})
    with pytest.raises(CheckpointError, match="contains itself"):
        encode_state({"x": cycle})
    deep: list[object] = []
    for _ in range(150):
        deep = [deep]
    with pytest.raises(CheckpointError, match="nested deeper"):
        encode_state(deep)


def test_the_same_list_twice_is_no_cycle() -> None:
    row = [1, 2]
    assert decode_state(encode_state([row, row]).document, {}.__getitem__) == [[1, 2], [1, 2]]


@pytest.mark.parametrize(
    "document",
    [
        {"$": "pickle", "data": "x"},
        {"$": "tuple"},
        {"$": "tuple", "items": 3},
        {"$": "dict", "items": [[1]]},
        {"$": "dict", "items": [[[1], 2]]},
        {"$": "bytes", "base64": "*"},
        {"$": "float", "bits": "00"},
        {"$": ["tuple"], "items": []},
    ],
)
def test_malformed_documents_are_errors(document: object) -> None:
    with pytest.raises(CheckpointError):
        decode_state({"x": document}, {}.__getitem__)
