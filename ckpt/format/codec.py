"""Values (hyperparameters, counters, random states) as bytes, exactly and without pickle.

None, bool, int of any size, float bit for bit, str, bytes, list, tuple and dict, nothing else: not
even subclasses, because they would come back as something else. One value has one encoding.
"""

from __future__ import annotations

import struct
from typing import Any

from ckpt.errors import Corrupt

VERSION = 1
# Values with one of these keys, which say of what tensors consist, or what a leaf was: readers of
# version 1 alone would hand them out as dicts.
VERSION_OF_TYPED = 2
TYPED_KEYS = frozenset({"$tensor_type", "$fields", "$data"})
DEPTH_MAX = 100
# An empty list takes 2 bytes here and 64 in memory: without a limit a file could exhaust memory.
CONTAINERS_MAX = 1 << 20

_FLOAT = struct.Struct("<d")


def encode_values(value: Any) -> bytes:
    """`value` as bytes. Two dicts in different orders are different values.

    Raises TypeError naming the path of the first leaf that cannot be stored, ValueError when the
    value is nested deeper than DEPTH_MAX (or in itself) or has more than CONTAINERS_MAX containers.
    """
    encoder = _Encoder()
    encoder.put(value, (), 0)
    return bytes([VERSION_OF_TYPED if encoder.is_typed else VERSION]) + encoder.out


def decode_values(data: bytes) -> Any:
    """The value that `data` was encoded from, equal and of the same types throughout.

    Raises Corrupt unless `data` is exactly what `encode_values` returns for a value.
    """
    decoder = _Decoder(bytes(data))
    version = decoder.take(1)[0]
    if version not in (VERSION, VERSION_OF_TYPED):
        raise Corrupt(f"encoded values have version {version}, known are 1 and 2")
    value = decoder.get(0)
    # A dict of the user's may have had such a key, before there was a version 2.
    if version == VERSION_OF_TYPED and not decoder.is_typed:
        raise Corrupt("encoded values have version 2, and nothing that needs it")
    if decoder.offset != len(decoder.data):
        raise Corrupt(f"encoded values end at byte {decoder.offset} of {len(decoder.data)}")
    return value


class _Encoder:
    def __init__(self) -> None:
        self.out = bytearray()
        self.containers = 0
        self.is_typed = False

    def put(self, value: Any, path: tuple[Any, ...], depth: int) -> None:
        # The exact type: a bool is an int too, and a subclass would come back as its base.
        kind = type(value)
        if value is None:
            self.out += b"N"
        elif kind is bool:
            self.out += b"T" if value else b"F"
        elif kind is int:
            self.sized(b"i", _int_bytes(value))
        elif kind is float:
            self.out += b"f" + _FLOAT.pack(value)
        elif kind is str:
            self.sized(b"s", _utf8(value, path))
        elif kind is bytes:
            self.sized(b"b", value)
        elif kind is list or kind is tuple or kind is dict:
            self.container(value, path, depth)
        else:
            raise TypeError(
                f"{_show(path)}: a {kind.__module__}.{kind.__qualname__} cannot be stored; "
                f"convert it to "
                "None, bool, int, float, str, bytes, list, tuple or dict"
            )

    def sized(self, tag: bytes, payload: bytes) -> None:
        self.out += tag
        self.out += _varint(len(payload))
        self.out += payload

    def container(self, value: Any, path: tuple[Any, ...], depth: int) -> None:
        self.containers += 1
        if depth >= DEPTH_MAX:
            raise ValueError(f"{_show(path[:5])}...: nested deeper than {DEPTH_MAX} levels")
        if self.containers > CONTAINERS_MAX:
            raise ValueError(f"more than {CONTAINERS_MAX} lists, tuples and dicts in one value")
        if type(value) is dict:
            self.out += b"d" + _varint(len(value))
            self.is_typed = self.is_typed or not TYPED_KEYS.isdisjoint(value)
            for key, item in value.items():
                if not _is_key(key):
                    raise TypeError(
                        f"{_show(path)}: key {key!r:.100} of type {type(key).__name__} cannot be "
                        "stored; keys are str, int, bool, None, float or tuples of those"
                    )
                self.put(key, (*path, key), depth + 1)
                self.put(item, (*path, key), depth + 1)
            return
        self.out += (b"l" if type(value) is list else b"t") + _varint(len(value))
        for index, item in enumerate(value):
            self.put(item, (*path, index), depth + 1)


class _Decoder:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.offset = 0
        self.containers = 0
        self.is_typed = False

    def take(self, nbytes: int) -> bytes:
        taken = self.data[self.offset : self.offset + nbytes]
        if len(taken) != nbytes:
            raise Corrupt(f"encoded values are cut short at byte {len(self.data)}")
        self.offset += nbytes
        return taken

    def varint(self) -> int:
        number = shift = 0
        while True:
            byte = self.take(1)[0]
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
            if shift > 56:
                raise Corrupt(f"encoded values: length beyond 2^63 at byte {self.offset}")
        # One value has one encoding, so leading zeros are refused, here and for integers.
        if shift > 7 and byte == 0:
            raise Corrupt(f"encoded values: overlong length at byte {self.offset}")
        return number

    def get(self, depth: int) -> Any:
        tag = self.take(1)
        if tag == b"N":
            return None
        if tag in b"TF":
            return tag == b"T"
        if tag == b"f":
            return _FLOAT.unpack(self.take(8))[0]
        if tag in b"ltd":
            return self.container(tag, depth)
        if tag not in b"isb":
            raise Corrupt(f"encoded values: unknown tag 0x{tag.hex()} at byte {self.offset - 1}")
        payload = self.take(self.varint())
        if tag == b"b":
            return payload
        if tag == b"i":
            number = int.from_bytes(payload, "little", signed=True)
            if _int_bytes(number) != payload:
                raise Corrupt(f"encoded values: overlong integer before byte {self.offset}")
            return number
        try:
            return payload.decode("utf-8")
        except UnicodeDecodeError as error:
            raise Corrupt(f"encoded values: string before byte {self.offset}: {error}") from error

    def container(self, tag: bytes, depth: int) -> Any:
        self.containers += 1
        if depth >= DEPTH_MAX or self.containers > CONTAINERS_MAX:
            raise Corrupt(
                f"encoded values: nested too deeply, or too many lists, at byte {self.offset}"
            )
        count = self.varint()
        # An item takes a byte at least: a hostile count must not reserve memory.
        if count * (2 if tag == b"d" else 1) > len(self.data) - self.offset:
            raise Corrupt(f"encoded values: {count} items do not fit after byte {self.offset}")
        if tag != b"d":
            items = [self.get(depth + 1) for _ in range(count)]
            return items if tag == b"l" else tuple(items)
        result: dict[Any, Any] = {}
        for _ in range(count):
            key = self.get(depth + 1)
            if not _is_key(key):
                raise Corrupt(
                    f"encoded values: a {type(key).__name__} as key before byte {self.offset}"
                )
            # Python takes 1, 1.0 and True for one key; what was saved had one of them.
            if key in result:
                raise Corrupt(f"encoded values: key {key!r:.100} twice, before byte {self.offset}")
            result[key] = self.get(depth + 1)
        self.is_typed = self.is_typed or not TYPED_KEYS.isdisjoint(result)
        return result


def _int_bytes(number: int) -> bytes:
    if number == 0:
        return b""
    magnitude = number if number >= 0 else ~number
    # One bit more than the magnitude has, for the sign.
    return number.to_bytes(magnitude.bit_length() // 8 + 1, "little", signed=True)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _utf8(text: str, path: tuple[Any, ...]) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TypeError(f"{_show(path)}: a str that is not valid unicode: {error}") from error


def _is_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(_is_key(item) for item in key)
    return key is None or type(key) in (bool, int, float, str)


def _show(path: tuple[Any, ...]) -> str:
    return "value" + "".join(f"[{key!r:.60}]" for key in path)
