"""Values come back exactly, and nothing but their one encoding is accepted."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import Corrupt
from ckpt.format import codec
from ckpt.format.codec import DEPTH_MAX, decode_values, encode_values

KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    """Equal with equal types throughout, floats by their bits, dicts in their order."""
    if type(a) is not type(b):
        return False
    if type(a) is float:
        return struct.pack("<d", a) == struct.pack("<d", b)
    if type(a) in (list, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if type(a) is dict:
        return same(list(a.items()), list(b.items()))
    return bool(a == b)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(VALUES)
def test_values_come_back_exactly(value: Any) -> None:
    """Generated values of all types: decode(encode(v)) is v, and encoding it again gives the same
    bytes.
    """
    data = encode_values(value)
    decoded = decode_values(data)
    assert same(decoded, value)
    assert encode_values(decoded) == data


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.binary(max_size=40))
def test_random_bytes_decode_to_their_only_value_or_raise(data: bytes) -> None:
    """Arbitrary bytes behind the version byte: either Corrupt, or the very encoding of what came
    out.
    """
    data = b"\x01" + data
    try:
        value = decode_values(data)
    except Corrupt:
        return
    assert encode_values(value) == data


def test_encoding_is_the_documented_bytes() -> None:
    """One value of each type against literal bytes."""
    value = {"a": [None, True, False, -1, 300, 1.0], (1,): ("é", b"\x00")}
    assert encode_values(value) == bytes.fromhex(
        "01 64 02"
        "73 01 61"
        "6c 06 4e 54 46 69 01 ff 69 02 2c 01 66 000000000000f03f"
        "74 01 69 01 01"
        "74 02 73 02 c3a9 62 01 00"
    )


@pytest.mark.parametrize(
    ("count", "length"),
    [(127, "7f"), (128, "8001"), (16_383, "ff7f"), (16_384, "808001"), (300_000, "e0a712")],
)
def test_lengths_are_written_in_groups_of_seven_bits(count: int, length: str) -> None:
    data = bytes.fromhex("0162" + length) + b"x" * count
    assert encode_values(b"x" * count) == data
    assert decode_values(data) == b"x" * count


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: (x,), lambda x: {"k": x}])
def test_values_nest_to_the_limit_and_no_deeper(wrap: Any) -> None:
    value: Any = None
    for _ in range(DEPTH_MAX):
        value = wrap(value)
    data = encode_values(value)
    assert same(decode_values(data), value)
    with pytest.raises(ValueError, match="nested deeper"):
        encode_values(wrap(value))
    one_more = b"\x01" + encode_values(wrap(None))[1:-1] + data[1:]
    with pytest.raises(Corrupt, match="too deeply"):
        decode_values(one_more)


def test_nan_payload_and_negative_zero_survive() -> None:
    nan = struct.unpack("<d", bytes.fromhex("010000000000f87f"))[0]
    assert struct.pack("<d", decode_values(encode_values(nan))).hex() == "010000000000f87f"
    assert math.copysign(1, decode_values(encode_values(-0.0))) == -1


class Sub(int):
    pass


@pytest.mark.parametrize("bad", [object(), {1}, Sub(3), bytearray(b"x"), 1j, "\ud800", {b"k": 1}])
def test_anything_else_is_refused_by_path(bad: Any) -> None:
    """A leaf that is no plain value raises TypeError naming where it is."""
    with pytest.raises(TypeError, match=r"value\['x'\]\[1\]"):
        encode_values({"x": [0, bad]})


def test_a_value_nested_in_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="nested deeper"):
        encode_values(loop)


@pytest.mark.parametrize(
    "name, data",
    {
        "empty": b"",
        "version": b"\x02N",
        "no value": b"\x01",
        "trailing": b"\x01NN",
        "unknown tag": b"\x01Z",
        "cut float": b"\x01f1234567",
        "cut string": b"\x01s\x05ab",
        "bad utf8": b"\x01s\x01\xff",
        "overlong int": b"\x01i\x02\x01\x00",
        "zero with a byte": b"\x01i\x01\x00",
        "overlong length": b"\x01s\x80\x00",
        "endless length": b"\x01s" + b"\xff" * 20,
        "huge count": b"\x01l\xff\xff\xff\xff\x7f",
        "duplicate key": b"\x01d\x02s\x01aNs\x01aN",
        "equal keys": b"\x01d\x02TNi\x01\x01N",
        "list as key": b"\x01d\x01l\x00N",
        "bytes as key": b"\x01d\x01b\x00N",
        "list in key": b"\x01d\x01t\x01l\x00N",
        "too deep": b"\x01" + b"l\x01" * (DEPTH_MAX + 1) + b"N",
    }.items(),
)
def test_hostile_values_raise(name: str, data: bytes) -> None:
    with pytest.raises(Corrupt):
        decode_values(data)


def test_the_number_of_containers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty list takes 2 bytes in a file and 64 in memory."""
    monkeypatch.setattr(codec, "CONTAINERS_MAX", 10)
    assert decode_values(encode_values([[]] * 9)) == [[]] * 9
    with pytest.raises(ValueError, match="more than 10"):
        encode_values([[]] * 10)
    with pytest.raises(Corrupt):
        decode_values(b"\x01l\x0a" + b"l\x00" * 10)
