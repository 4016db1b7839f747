"""Read pickles without running them: plain values and records of known names, nothing else.

A pickle is a program for a small machine. The machine here has the instructions that build values,
and every name in a program is looked up in a table of our own functions: no module is imported, no
foreign class is instantiated, no method is called. A name that the table lacks becomes an `Opaque`,
which only keeps that name, so that one unknown entry does not make the others unreadable.

Memory is bounded: every object that an instruction makes is charged to a budget before the next
instruction runs, and what it costs to work on what was built is charged before anything walks it.
A tree whose parts are shared so often that walking it would cost far more is refused. The module
`pickle` is not used: its C machine allocates memory by numbers that the program contains.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ckpt.convert.sources.budget import Account, MemoryBudget, check_extent
from ckpt.errors import Corrupt, UnsupportedFormat

PICKLE_NBYTES_MAX = 1 << 30
# The text of an int takes time that grows with the square of its length.
INT_NBYTES_MAX = 1024
NAME_LENGTH_MAX = 1000
LONG_TEXT_NBYTES = 1 << 20
KEY_DEPTH_MAX = 4
KEY_ITEMS_MAX = 64  # of one key, with those of the tuples in it

# Entries of stack and memo are charged so many at once: each by itself would cost too much time.
# An entry takes 8 bytes, 9 with room to grow; what is taken off the stack is there twice.
SLOTS_STEP = 1 << 13
SLOT_NBYTES = 18

# About what CPython takes for them.
LIST_NBYTES = 64
LIST_FILLED_NBYTES = 40  # more, once it has an item
LIST_ITEM_NBYTES = 10
DICT_NBYTES = 72
DICT_FILLED_NBYTES = 120
DICT_ITEM_NBYTES = 48
OBJECT_NBYTES = 72
HEADER_NBYTES = 16  # of a container, for the garbage collector; and what is lost to alignment
RESULT_NBYTES = 320  # of a call of a function of ours, which makes no more than a view of a tensor
MEMO_ENTRY_NBYTES = 120  # of an index out of order
# A container that grows is there twice for a moment, which counts only where it is a large one; and
# the table of a dict has room for thrice its entries then.
LARGE_ITEMS = 1000
LARGE_LIST_ITEM_NBYTES = 20
LARGE_DICT_ITEM_NBYTES = 96
ARGUMENTS_MAX = 64  # of a function of ours

# What a broken program raises: an unknown instruction, or a stack that does not fit it.
_UNREADABLE = (IndexError, ValueError, TypeError, KeyError, OverflowError, RecursionError)

Maker: TypeAlias = Callable[..., Any]


class Opaque:
    """Stands for something of a name that is not known; nothing of its content is kept."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}>"


class PickledObject:
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
    data: bytes | bytearray,
    known: Mapping[str, Maker | str],
    persistent: Callable[[Any], Any] | None = None,
    account: Account | None = None,
) -> Any:
    """The value that the pickle `data` builds.

    `known` maps dotted names to functions of ours, which get the arguments that the pickle has for
    the class or function of that name, or to a str: then a `PickledObject` of that name is made.
    `persistent` turns the ids of what is stored outside of the pickle into values. What the value
    costs until it is stored is charged to `account`, by default to one of its own. Raises Corrupt
    when `data` is no pickle, UnsupportedFormat for one of a protocol below 2 or beyond the limits:
    nested too deep, containing itself, or building more than the budget of `account` has left.
    """
    if len(data) > PICKLE_NBYTES_MAX:
        raise UnsupportedFormat(f"a pickle of {len(data)} bytes; at most {PICKLE_NBYTES_MAX}")
    account = Account(MemoryBudget()) if account is None else account
    # Memory of the stack, the memo and unused values is released.
    building = Account(account.budget)
    machine = _Machine(memoryview(data), known, persistent, building)
    try:
        value = machine.run()
    except (*_UNREADABLE, struct.error) as error:
        raise Corrupt(
            f"no readable pickle: {type(error).__name__} {error!s:.200} at byte {machine.position}"
        ) from error
    finally:
        building.close()
    check_extent(value, _parts, len(data), account)
    return value


def _parts(thing: Any) -> Iterator[tuple[Any, Any]] | None:
    """What stands in a container or record, by its keys."""
    if isinstance(thing, dict):
        return iter(thing.items())
    if isinstance(thing, (list, tuple)):
        return enumerate(thing) if type(thing) in (list, tuple) else None
    if isinstance(thing, PickledObject):
        return enumerate((thing.args, thing.state))
    return iter(()) if isinstance(thing, Opaque) else None


_MARK = object()  # where a run of items begins on the stack


class _Name(str):
    """A name of the table, as it stands on the stack before it is called.

    `opaque` is what it is as a value, one for all mentions of it.
    """

    __slots__ = ("opaque",)

    def __init__(self, text: str) -> None:
        self.opaque = Opaque(text)


class _Machine:
    def __init__(
        self,
        data: memoryview,
        known: Mapping[str, Maker | str],
        persistent: Callable[[Any], Any] | None,
        account: Account,
    ) -> None:
        self.data = data
        self.known = known
        self.persistent = persistent
        self.account, self.charge = account, account.spend
        self.position = 0
        self.slots_max = 0
        self.stack: list[Any] = []
        # Indexes follow each other in what picklers write: a list takes a tenth of a dict.
        self.memo: list[Any] = []
        self.sparse_memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, steps = self.data, _STEPS
        if len(data) < 2 or data[0] != 0x80:
            raise UnsupportedFormat(
                "no pickle of protocol 2 or later; save it again with a recent torch.save"
            )
        stack, memo = self.stack, self.memo
        while True:
            position = self.position
            code = data[position]
            if len(stack) + len(memo) > self.slots_max:
                self.account.charge(SLOTS_STEP * SLOT_NBYTES)
                self.slots_max += SLOTS_STEP
            # The commonest first, without a call each: they are two thirds of most programs.
            if code == 0x94:  # MEMOIZE
                memo.append(stack[-1])
                self.position = position + 1
                continue
            if code == 0x68:  # BINGET
                self.fetch(data[position + 1])
                self.position = position + 2
                continue
            if code == 0x6A:  # LONG_BINGET
                self.fetch(int.from_bytes(data[position + 1 : position + 5], "little"))
                self.position = position + 5
                continue
            self.position = position + 1
            if code == 0x2E:  # STOP
                value = self.stack.pop()
                if value is _MARK:
                    raise ValueError("nothing was built")
                return _settled(value)
            step = steps[code]
            if step is None:
                raise Corrupt(f"no readable pickle: instruction {code:#x} at byte {position}")
            step(self)

    # Reading the program

    def take(self, nbytes: int) -> memoryview:
        start = self.position
        if nbytes > len(self.data) - start:
            raise ValueError(f"{nbytes} bytes are wanted where {len(self.data) - start} are left")
        self.position = start + nbytes
        return self.data[start : self.position]

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def line(self) -> str:
        data = bytes(self.data[self.position : self.position + NAME_LENGTH_MAX])
        text, newline, _ = data.partition(b"\n")
        if not newline:
            raise ValueError("a name does not end")
        self.position += len(text) + 1
        return text.decode()

    # The memo

    def fetch(self, index: int) -> None:
        memo = self.memo
        self.stack.append(memo[index] if index < len(memo) else self.sparse_memo[index])

    def memorize(self, index: int) -> None:
        memo = self.memo
        if index == len(memo) and index not in self.sparse_memo:
            memo.append(self.stack[-1])
        elif index < len(memo):
            memo[index] = self.stack[-1]
        else:
            self.charge(MEMO_ENTRY_NBYTES)
            self.sparse_memo[index] = self.stack[-1]

    # The stack

    def popped(self, count: int) -> list[Any]:
        """The last items, in the order in which they were pushed."""
        return [self.stack.pop() for _ in range(count)][::-1]

    def items(self) -> list[Any]:
        """What was pushed since the last mark."""
        stack = self.stack
        mark = len(stack) - 1
        while stack[mark] is not _MARK:
            mark -= 1
            if mark < 0:
                raise ValueError("no mark on the stack")
        pushed = stack[mark + 1 :]
        del stack[mark:]
        if any(type(item) is _Name for item in pushed):
            pushed = [_settled(item) for item in pushed]
        return pushed

    def push_made(self, value: Any, nbytes: int) -> None:
        self.charge(nbytes)
        self.stack.append(value)

    def push_scalar(self, value: Any) -> None:
        self.push_made(value, sys.getsizeof(value) + HEADER_NBYTES // 2)

    # Names and calls

    def push_name(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise ValueError("a name that is no text")
        # Both may be long texts from the memo, joined anew by each instruction of one byte.
        if len(module) + len(name) > NAME_LENGTH_MAX:
            raise ValueError(f"a name of {len(module) + len(name)} characters")
        # With an attribute and an `Opaque` of its own.
        self.charge(2 * (len(module) + len(name)) + 5 * OBJECT_NBYTES)
        self.stack.append(_Name(f"{module}.{name}"))

    def call(self, callee: Any, args: Any) -> Any:
        if isinstance(callee, Opaque):
            return callee
        if not isinstance(callee, _Name) or not isinstance(args, tuple):
            raise ValueError("a call of what is no name")
        maker = self.known.get(callee)
        if maker is None:
            return callee.opaque
        if isinstance(maker, str):
            self.charge(OBJECT_NBYTES)
            return PickledObject(maker, args)
        if len(args) > ARGUMENTS_MAX:
            raise ValueError(f"{len(args)} arguments for {callee}")
        self.charge(RESULT_NBYTES + _copied_nbytes(args))
        return maker(*args)

    def build(self, state: Any) -> None:
        """Give what is on top its state. Only records keep it."""
        target = self.stack[-1]
        if isinstance(target, PickledObject):
            if isinstance(state, tuple) and len(state) == 2 and state[0] is None:
                state = state[1]  # slots
            target.state = state
        # A dict may have attributes, such as `_metadata` of a module's state dict: no part of it.
        elif not isinstance(target, (Opaque, dict)):
            raise ValueError(f"a {type(target).__name__} is given a state")

    def extend(self, items: list[Any]) -> None:
        """Append to the list on top."""
        target = self.stack[-1]
        if isinstance(target, list):
            is_large = len(target) + len(items) > LARGE_ITEMS
            item_nbytes = LARGE_LIST_ITEM_NBYTES if is_large else LIST_ITEM_NBYTES
            self.charge(item_nbytes * len(items) + (0 if target else LIST_FILLED_NBYTES))
            target.extend(items)
        elif not isinstance(target, Opaque):
            raise ValueError(f"items for a {type(target).__name__}")

    def set_items(self, items: list[Any]) -> None:
        """Put keys, each before its value, into the dict on top."""
        target = self.stack[-1]
        if isinstance(target, Opaque):
            return
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError(f"pairs for a {type(target).__name__}")
        count = len(items) // 2
        is_large = len(target) + count > LARGE_ITEMS
        item_nbytes = LARGE_DICT_ITEM_NBYTES if is_large else DICT_ITEM_NBYTES
        self.charge(item_nbytes * count + (0 if target else DICT_FILLED_NBYTES))
        each = iter(items)
        for key, value in zip(each, each, strict=True):
            _check_key(key)
            target[key] = value

    def push_tuple(self, items: Sequence[Any]) -> None:
        made = tuple(items)
        self.push_made(made, sys.getsizeof(made) + HEADER_NBYTES)


def _copied_nbytes(args: Any) -> int:
    """What a function of ours may copy of its arguments."""
    nbytes = 0
    for one in args if isinstance(args, tuple) else ():
        if isinstance(one, (str, bytes)):
            nbytes += len(one)
        elif isinstance(one, tuple):
            nbytes += LIST_ITEM_NBYTES * len(one)
        elif isinstance(one, (dict, list)) and one:
            nbytes += DICT_FILLED_NBYTES + LARGE_DICT_ITEM_NBYTES * len(one)
    return nbytes


def _settled(value: Any) -> Any:
    """A name that is not called stands for a class or a function: `Opaque` as a value."""
    return value.opaque if type(value) is _Name else value


def _check_key(key: Any) -> None:
    """Keys are hashed by a recursion in C that no limit protects: only flat ones get there.

    And small ones: a shared part of a key is hashed each time that it is named.
    """
    level, depth, count = [key], 0, 0
    while level:
        count += len(level)
        inner: list[Any] = []
        for part in level:
            if isinstance(part, tuple) and depth < KEY_DEPTH_MAX:
                if count + len(inner) + len(part) > KEY_ITEMS_MAX:
                    raise ValueError(f"a key of more than {KEY_ITEMS_MAX} items")
                inner += part
            elif not (
                part is None or isinstance(part, (str, int, float, bytes, PickledObject, Opaque))
            ):
                raise ValueError(f"a key of type {type(part).__name__}")
        level, depth = inner, depth + 1


def _long(machine: _Machine, width: int) -> None:
    nbytes = machine.number(width)
    if nbytes > INT_NBYTES_MAX:
        raise UnsupportedFormat(f"an integer of {nbytes} bytes; at most {INT_NBYTES_MAX}")
    machine.push_scalar(int.from_bytes(machine.take(nbytes), "little", signed=True))


def _text(machine: _Machine, width: int) -> None:
    nbytes = machine.number(width)
    data = machine.take(nbytes)
    # One wide character makes all others 4 bytes wide: a long text is charged before it exists.
    is_long = nbytes > LONG_TEXT_NBYTES
    machine.charge(5 * nbytes if is_long else 0)
    # Lone surrogates are let through, as by the module `pickle`.
    machine.push_scalar(str(data, "utf-8", "surrogatepass"))
    machine.charge(-5 * nbytes if is_long else 0)


def _blob(machine: _Machine, width: int) -> None:
    data = machine.take(machine.number(width))
    machine.charge(len(data))
    machine.push_made(bytes(data), OBJECT_NBYTES)


def _tuple(machine: _Machine, count: int) -> None:
    stack = machine.stack
    if len(stack) < count or any(item is _MARK for item in stack[len(stack) - count :]):
        raise ValueError("too few items on the stack")
    machine.push_tuple([_settled(item) for item in machine.popped(count)])


def _frozen(machine: _Machine) -> None:
    # Values have no sets, so the items are dropped.
    machine.items()
    machine.push_made(Opaque("builtins.frozenset"), OBJECT_NBYTES)


def _new_with_names(machine: _Machine) -> None:
    callee, args, names = machine.popped(3)
    made = machine.call(callee, args)
    # Functions of ours take no arguments by name: a call that has some makes nothing.
    machine.stack.append(made if not names else _settled(callee))


def _persistent(machine: _Machine) -> None:
    if machine.persistent is None:
        raise Corrupt("a pickle that refers to storage outside of it, where there is none")
    machine.push_made(machine.persistent(machine.stack.pop()), RESULT_NBYTES)


# The instructions of protocols 2 to 5 that values need (names as in the module pickletools).
_INSTRUCTIONS: dict[int, Callable[[_Machine], Any]] = {
    # The stated version decides nothing: each instruction is known or is not.
    0x80: lambda m: m.take(1),  # PROTO
    0x95: lambda m: m.take(8),  # FRAME
    0x28: lambda m: m.stack.append(_MARK),  # MARK
    0x30: lambda m: m.stack.pop(),  # POP
    0x31: lambda m: m.items(),  # POP_MARK
    0x4E: lambda m: m.stack.append(None),  # NONE
    0x88: lambda m: m.stack.append(True),  # NEWTRUE
    0x89: lambda m: m.stack.append(False),  # NEWFALSE
    0x4A: lambda m: m.push_scalar(int.from_bytes(m.take(4), "little", signed=True)),  # BININT
    0x4B: lambda m: m.stack.append(m.number(1)),  # BININT1
    0x4D: lambda m: m.push_scalar(m.number(2)),  # BININT2
    0x8A: lambda m: _long(m, 1),  # LONG1
    0x8B: lambda m: _long(m, 4),  # LONG4
    0x47: lambda m: m.push_scalar(struct.unpack(">d", m.take(8))[0]),  # BINFLOAT
    0x8C: lambda m: _text(m, 1),  # SHORT_BINUNICODE
    0x58: lambda m: _text(m, 4),  # BINUNICODE
    0x8D: lambda m: _text(m, 8),  # BINUNICODE8
    0x43: lambda m: _blob(m, 1),  # SHORT_BINBYTES
    0x42: lambda m: _blob(m, 4),  # BINBYTES
    0x8E: lambda m: _blob(m, 8),  # BINBYTES8
    0x5D: lambda m: m.push_made([], LIST_NBYTES),  # EMPTY_LIST
    0x61: lambda m: m.extend([_settled(m.stack.pop())]),  # APPEND
    0x65: lambda m: m.extend(m.items()),  # APPENDS
    0x29: lambda m: m.stack.append(()),  # EMPTY_TUPLE
    0x74: lambda m: m.push_tuple(m.items()),  # TUPLE
    0x85: lambda m: _tuple(m, 1),  # TUPLE1
    0x86: lambda m: _tuple(m, 2),  # TUPLE2
    0x87: lambda m: _tuple(m, 3),  # TUPLE3
    0x7D: lambda m: m.push_made({}, DICT_NBYTES),  # EMPTY_DICT
    0x73: lambda m: m.set_items([_settled(item) for item in m.popped(2)]),  # SETITEM
    0x75: lambda m: m.set_items(m.items()),  # SETITEMS
    0x8F: lambda m: m.push_made(Opaque("builtins.set"), OBJECT_NBYTES),  # EMPTY_SET
    0x90: lambda m: m.extend(m.items()),  # ADDITEMS
    0x91: _frozen,  # FROZENSET
    0x63: lambda m: m.push_name(m.line(), m.line()),  # GLOBAL
    0x93: lambda m: m.push_name(*m.popped(2)),  # STACK_GLOBAL
    0x52: lambda m: m.stack.append(m.call(*m.popped(2))),  # REDUCE
    # NEWOBJ: the table says what a class makes of its arguments
    0x81: lambda m: m.stack.append(m.call(*m.popped(2))),
    0x92: _new_with_names,  # NEWOBJ_EX
    0x62: lambda m: m.build(_settled(m.stack.pop())),  # BUILD
    0x71: lambda m: m.memorize(m.number(1)),  # BINPUT
    0x72: lambda m: m.memorize(m.number(4)),  # LONG_BINPUT
    0x51: _persistent,  # BINPERSID
}
_STEPS = [_INSTRUCTIONS.get(code) for code in range(256)]
