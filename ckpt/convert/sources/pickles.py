"""Read pickles without running them: plain values and records of known names, nothing else.

A pickle is a program for a small machine. The machine here has the instructions that build values,
and every name in a program is looked up in a table of our own functions: no module is imported, no
class of anybody is made, no method called. What the table does not know becomes an `Opaque` that
only remembers its name, so that one strange entry does not cost the others.

Memory is bounded by the length of the program: each instruction makes at most one small object,
strings, bytes and integers are cut out of the program itself, and what our functions copy is
counted. What is shared so often that walking it would cost far more is refused. The module `pickle`
has no part in it (its C machine allocates by numbers that a program names).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from ckpt.convert.sources.extent import check_extent
from ckpt.errors import Corrupt, UnsupportedFormat

PICKLE_NBYTES_MAX = 1 << 30
INT_NBYTES_MAX = 1024
KEY_DEPTH_MAX = 4
COST_MAX = 24 << 20  # bytes that a short program may make; a longer one may make more
COST_PER_BYTE = 48
MADE_NBYTES = 80  # of a container or record, about
ITEM_NBYTES = 32  # of what is copied from one to another
KEY_ITEMS_MAX = 64

Maker: TypeAlias = Callable[..., Any]


class Opaque:
    """Stands for something of a name that is not known; nothing of its content is kept."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}>"


class Record:
    """An object of a known class: its name, its arguments, and the state that it was given."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...] = ()) -> None:
        self.name = name
        self.args = args
        self.state: Any = None

    def field(self, name: str, default: Any = None) -> Any:
        """A field of the object's state; `default` when it has none of that name."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default

    def __repr__(self) -> str:
        return f"<{self.name}>"


def read_pickle(
    data: bytes | memoryview,
    known: Mapping[str, Maker | str],
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """The value that the pickle `data` builds.

    `known` maps dotted names to functions of ours, which get the arguments that the pickle has for
    the class or function of that name, or to a str: then a `Record` of that name is made.
    `persistent` turns the ids of what is stored outside of the pickle into values. Raises Corrupt
    when `data` is no pickle, UnsupportedFormat for one of a protocol below 2 or beyond the limits:
    nested too deep, containing itself, or building far more than a program of its length should.
    """
    if len(data) > PICKLE_NBYTES_MAX:
        raise UnsupportedFormat(f"a pickle of {len(data)} bytes; at most {PICKLE_NBYTES_MAX}")
    machine = _Machine(memoryview(data), known, persistent)
    try:
        value = machine.run()
    except (
        IndexError,
        ValueError,
        TypeError,
        KeyError,
        struct.error,
        OverflowError,
        RecursionError,
    ) as error:
        raise Corrupt(
            f"no readable pickle: {type(error).__name__} {error!s:.200} at byte {machine.at}"
        ) from error
    check_extent(value, _parts, len(data))
    return value


def _parts(thing: Any) -> Iterator[tuple[Any, Any]] | None:
    """What stands in a container or record, by its keys."""
    if isinstance(thing, dict):
        return iter(thing.items())
    if isinstance(thing, (list, tuple)):
        return enumerate(thing) if type(thing) in (list, tuple) else None
    if isinstance(thing, Record):
        return enumerate((thing.args, thing.state))
    return None


class _Mark:
    """Where a run of items begins on the stack."""


_MARK = _Mark()


class _Name(str):
    """A name of the table, as it stands on the stack before it is called."""

    __slots__ = ()


class _Machine:
    def __init__(
        self,
        data: memoryview,
        known: Mapping[str, Maker | str],
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        self.data = data
        self.known = known
        self.persistent = persistent
        self.at = 0
        self.cost_left = COST_MAX + COST_PER_BYTE * len(data)
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, steps = self.data, _STEPS
        if len(data) < 2 or data[0] != 0x80:
            raise UnsupportedFormat(
                "no pickle of protocol 2 or later; save it anew with torch.save of this decade"
            )
        stack, memo = self.stack, self.memo
        while True:
            at = self.at
            code = data[at]
            # The commonest first, without a call each: they are two thirds of most programs.
            if code == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
                self.at = at + 1
                continue
            if code == 0x68:  # BINGET
                stack.append(memo[data[at + 1]])
                self.at = at + 2
                continue
            if code == 0x6A:  # LONG_BINGET
                stack.append(memo[int.from_bytes(data[at + 1 : at + 5], "little")])
                self.at = at + 5
                continue
            self.at = at + 1
            if code == 0x2E:  # STOP
                return self._result()
            step = steps[code]
            if step is None:
                raise Corrupt(f"no readable pickle: instruction {code:#x} at byte {self.at - 1}")
            step(self)

    def _result(self) -> Any:
        value = self.pop()
        if isinstance(value, _Mark):
            raise ValueError("nothing was built")
        return Opaque(str(value)) if isinstance(value, _Name) else value

    # Reading the program

    def take(self, nbytes: int) -> memoryview:
        start = self.at
        if nbytes > len(self.data) - start:
            raise ValueError(f"{nbytes} bytes are wanted where {len(self.data) - start} are left")
        self.at = start + nbytes
        return self.data[start : self.at]

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def line(self) -> str:
        for stop in range(self.at, min(self.at + 1000, len(self.data))):
            if self.data[stop] == 0x0A:
                text = bytes(self.data[self.at : stop]).decode()
                self.at = stop + 1
                return text
        raise ValueError("a name does not end")

    # The stack

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        return self.stack.pop()

    def items(self) -> list[Any]:
        """What was pushed since the last mark."""
        stack = self.stack
        at = len(stack) - 1
        while not isinstance(stack[at], _Mark):
            at -= 1
            if at < 0:
                raise ValueError("no mark on the stack")
        found = stack[at + 1 :]
        del stack[at:]
        return [_settled(item) for item in found]

    def made_one(self, copied: int = 0) -> None:
        self.cost_left -= MADE_NBYTES + ITEM_NBYTES * copied
        if self.cost_left < 0:
            raise UnsupportedFormat(f"a pickle of {len(self.data)} bytes that builds far more")

    def push_made(self, value: Any) -> None:
        self.made_one()
        self.stack.append(value)

    # Names and calls

    def push_name(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise ValueError("a name that is no text")
        self.push(_Name(f"{module}.{name}"))

    def call(self, callee: Any, args: Any) -> Any:
        sized = args if isinstance(args, tuple) else ()
        self.made_one(
            sum(len(one) for one in sized if isinstance(one, (str, bytes, dict, list, tuple)))
        )
        if isinstance(callee, Opaque):
            return Opaque(callee.name)
        if not isinstance(callee, _Name) or not isinstance(args, tuple):
            raise ValueError("a call of what is no name")
        maker = self.known.get(callee)
        if maker is None:
            return Opaque(str(callee))
        if isinstance(maker, str):
            return Record(maker, args)
        return maker(*args)

    def build(self, target: Any, state: Any) -> None:
        """Give `target` its state. Only records keep it."""
        if isinstance(target, Record):
            if isinstance(state, tuple) and len(state) == 2 and state[0] is None:
                state = state[1]  # slots
            target.state = state
        elif not isinstance(target, (Opaque, dict)):
            raise ValueError(f"a {type(target).__name__} is given a state")


def _settled(value: Any) -> Any:
    """A name that is not called stands for a class or a function: `Opaque` as a value."""
    return Opaque(str(value)) if isinstance(value, _Name) else value


def _appended(target: Any, items: list[Any]) -> None:
    if isinstance(target, list):
        target.extend(items)
    elif not isinstance(target, Opaque):
        raise ValueError(f"items for a {type(target).__name__}")


def _set_items(target: Any, items: list[Any]) -> None:
    if isinstance(target, Opaque):
        return
    if not isinstance(target, dict) or len(items) % 2:
        raise ValueError(f"pairs for a {type(target).__name__}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        _check_key(key)
        target[key] = value


def _check_key(key: Any, depth: int = 0) -> None:
    """Keys are hashed by a recursion in C that no limit protects: only flat ones get there.

    And short ones: a shared part of a key is hashed each time that it is named.
    """
    if isinstance(key, tuple) and depth < KEY_DEPTH_MAX and len(key) <= KEY_ITEMS_MAX:
        for item in key:
            _check_key(item, depth + 1)
    elif not (key is None or isinstance(key, (str, int, float, bytes, Record, Opaque))):
        raise ValueError(f"a key of type {type(key).__name__}")


def _long(machine: _Machine, width: int) -> None:
    nbytes = machine.number(width)
    if nbytes > INT_NBYTES_MAX:
        raise UnsupportedFormat(f"an integer of {nbytes} bytes; at most {INT_NBYTES_MAX}")
    machine.push(int.from_bytes(machine.take(nbytes), "little", signed=True))


def _text(machine: _Machine, width: int) -> None:
    machine.push(bytes(machine.take(machine.number(width))).decode("utf-8", "surrogatepass"))


def _blob(machine: _Machine, width: int) -> None:
    machine.push(bytes(machine.take(machine.number(width))))


def _put(machine: _Machine, width: int) -> None:
    machine.memo[machine.number(width)] = machine.stack[-1]


def _frozen(machine: _Machine) -> None:
    machine.items()
    machine.push(Opaque("builtins.frozenset"))


def _tuple(machine: _Machine, count: int) -> None:
    stack = machine.stack
    if len(stack) < count or any(isinstance(item, _Mark) for item in stack[len(stack) - count :]):
        raise ValueError("too few items on the stack")
    items = tuple(_settled(item) for item in stack[len(stack) - count :])
    del stack[len(stack) - count :]
    machine.push_made(items)


def _reduce(machine: _Machine) -> None:
    args, callee = machine.pop(), machine.pop()
    machine.push(machine.call(callee, args))


def _new_with_names(machine: _Machine) -> None:
    names, args, callee = machine.pop(), machine.pop(), machine.pop()
    made = machine.call(callee, args)
    machine.push(made if not names else Opaque(str(callee)))


def _build(machine: _Machine) -> None:
    state = _settled(machine.pop())
    machine.build(machine.stack[-1], state)


def _append(machine: _Machine) -> None:
    value = _settled(machine.pop())
    _appended(machine.stack[-1], [value])


def _appends(machine: _Machine) -> None:
    items = machine.items()
    _appended(machine.stack[-1], items)


def _set_item(machine: _Machine) -> None:
    value, key = _settled(machine.pop()), _settled(machine.pop())
    _set_items(machine.stack[-1], [key, value])


def _set_many(machine: _Machine) -> None:
    items = machine.items()
    _set_items(machine.stack[-1], items)


def _persistent(machine: _Machine) -> None:
    if machine.persistent is None:
        raise Corrupt("a pickle that refers to storage outside of it, where there is none")
    machine.push(machine.persistent(machine.pop()))


def _stack_name(machine: _Machine) -> None:
    name, module = machine.pop(), machine.pop()
    machine.push_name(module, name)


def _pop_mark(machine: _Machine) -> None:
    machine.items()


# The instructions of protocols 2 to 5 that values need (names as in the module pickletools).
_INSTRUCTIONS: dict[int, Callable[[_Machine], Any]] = {
    0x80: lambda m: m.take(1),  # PROTO
    0x95: lambda m: m.take(8),  # FRAME
    0x28: lambda m: m.push(_MARK),  # MARK
    0x30: lambda m: m.pop(),  # POP
    0x31: _pop_mark,  # POP_MARK
    0x4E: lambda m: m.push(None),  # NONE
    0x88: lambda m: m.push(True),  # NEWTRUE
    0x89: lambda m: m.push(False),  # NEWFALSE
    0x4A: lambda m: m.push(int.from_bytes(m.take(4), "little", signed=True)),  # BININT
    0x4B: lambda m: m.push(m.number(1)),  # BININT1
    0x4D: lambda m: m.push(m.number(2)),  # BININT2
    0x8A: lambda m: _long(m, 1),  # LONG1
    0x8B: lambda m: _long(m, 4),  # LONG4
    0x47: lambda m: m.push(struct.unpack(">d", m.take(8))[0]),  # BINFLOAT
    0x8C: lambda m: _text(m, 1),  # SHORT_BINUNICODE
    0x58: lambda m: _text(m, 4),  # BINUNICODE
    0x8D: lambda m: _text(m, 8),  # BINUNICODE8
    0x43: lambda m: _blob(m, 1),  # SHORT_BINBYTES
    0x42: lambda m: _blob(m, 4),  # BINBYTES
    0x8E: lambda m: _blob(m, 8),  # BINBYTES8
    0x5D: lambda m: m.push_made([]),  # EMPTY_LIST
    0x61: _append,  # APPEND
    0x65: _appends,  # APPENDS
    0x29: lambda m: m.push_made(()),  # EMPTY_TUPLE
    0x74: lambda m: m.push_made(tuple(m.items())),  # TUPLE
    0x85: lambda m: _tuple(m, 1),  # TUPLE1
    0x86: lambda m: _tuple(m, 2),  # TUPLE2
    0x87: lambda m: _tuple(m, 3),  # TUPLE3
    0x7D: lambda m: m.push_made({}),  # EMPTY_DICT
    0x73: _set_item,  # SETITEM
    0x75: _set_many,  # SETITEMS
    0x8F: lambda m: m.push(Opaque("builtins.set")),  # EMPTY_SET
    0x90: _appends,  # ADDITEMS
    0x91: _frozen,  # FROZENSET
    0x63: lambda m: m.push_name(m.line(), m.line()),  # GLOBAL
    0x93: _stack_name,  # STACK_GLOBAL
    0x52: _reduce,  # REDUCE
    0x81: _reduce,  # NEWOBJ: what a class and a function make of arguments is told by the table
    0x92: _new_with_names,  # NEWOBJ_EX
    0x62: _build,  # BUILD
    0x71: lambda m: _put(m, 1),  # BINPUT
    0x72: lambda m: _put(m, 4),  # LONG_BINPUT
    0x51: _persistent,  # BINPERSID
}
_STEPS = [_INSTRUCTIONS.get(code) for code in range(256)]
