"""What arguments of operators' functions mean, once, for the command line and for Python.

An argument's annotation says what help shows and how its text is read: `Annotated[type, Argument]`.
Imports nothing slow: the signatures are all that `ckpt --help` and completion need.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, Literal, SupportsIndex, TypeAlias, TypeVar, cast

if TYPE_CHECKING:
    from storage import Store, StoreLike

F = TypeVar("F", bound=Callable[..., Any])
Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument as the command line takes it.

    `parse` reads its text and raises ValueError. Without `flag` a keyword gets its own name, and
    any other argument has a place instead. `collect` makes one value of those of an argument that
    may be given again. `bare` is the value of the flag alone.
    """

    help: str
    parse: Callable[[str], Any] = str
    metavar: str = ""
    flag: str = ""
    collect: Callable[[Sequence[Any]], Any] | None = None
    choices: tuple[str, ...] = ()
    bare: str | None = None

    @staticmethod
    def of(annotation: Any) -> Argument | None:
        """What an annotation says of an argument; None where that is Python's alone."""
        said = getattr(annotation, "__metadata__", ())
        return next((one for one in said if isinstance(one, Argument)), None)

    def choices_of(self, annotation: Any) -> tuple[str, ...]:
        """The words that it takes; () where it takes any."""
        kind: Any = annotation.__origin__
        is_literal = getattr(kind, "__origin__", None) is Literal
        return self.choices or (kind.__args__ if is_literal else ())


def operation(function: F) -> F:
    """`function` for users: wrong arguments raise InvalidArgument, and no frame of it shows a
    secret of its `*options`. Its imports wait for the first call. A report that has `seconds` says
    how long it took.
    """

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        from storage.hidden import hidden_arguments

        # First of all: an error below would show the frames in which secrets lie as they came.
        args, named = hidden_arguments(function, args, named)
        # Bound here: each value is checked by the annotation of its parameter.
        bound = inspect.signature(function).bind(*args, **named)
        for name, value in bound.arguments.items():
            bound.arguments[name] = _checked(bound.signature.parameters[name], value)
        started = time.monotonic()
        made = function(*bound.args, **bound.kwargs)
        seconds = time.monotonic() - started
        return replace(made, seconds=seconds) if hasattr(made, "seconds") else made

    return cast(F, call)


@contextmanager
def opened(url: StoreLike, options: Mapping[str, Any] | None) -> Iterator[Store]:
    """The store at `url` until the block ends."""
    from storage import open_store

    with closing(open_store(url, **(options or {}))) as store:
        yield store


def _checked(parameter: inspect.Parameter, value: Any) -> Any:
    """`value`, where a text of the command line could make it, with plain numbers for those of
    numpy and torch; one text or path stands for a list of it. Raises InvalidArgument for any other.
    """
    from ckpt.commit.names import is_finite, plain_float, plain_int
    from ckpt.errors import InvalidArgument

    argument = Argument.of(parameter.annotation)
    # None for an empty list, too: callers pass on arguments of their own, by default None.
    if argument is None or (value is None and parameter.default in (None, ())):
        return value if argument is None else parameter.default
    shown, is_right, wanted = f"{parameter.name}={value!r}", True, ""
    if argument.collect is list:
        if argument.parse is rename_rule and (callable(value) or isinstance(value, Mapping)):
            return value
        wanted = "a list of texts"
        # A text is a sequence too, of letters: `include="model.*"` means that one pattern.
        each = [value] if isinstance(value, (str, os.PathLike)) else value
        try:
            return [os.fspath(one) for one in each]
        except TypeError:
            is_right = False
    elif argument.collect is dict:
        # No more of it: it may be a secret.
        shown = f"{parameter.name}= is a {type(value).__name__}"
        is_right, wanted = hasattr(value, "items"), "a mapping"
    elif argument.parse in (whole, count, nbytes, params):
        # By exact type: True is an int to Python, and is no number of ranks.
        value, least = plain_int(value), int(argument.parse in (count, params))
        is_right, wanted = type(value) is int and value >= least, f"an int of at least {least}"
    elif argument.parse in (seconds, price):
        is_other = isinstance(value, (bool, str, bytes))  # float() takes these for numbers
        value = value if isinstance(value, (int, float)) else plain_float(value)
        is_right, wanted = not is_other and is_finite(value) and value > 0, "a number above 0"
        if argument.parse is price:
            is_right, wanted = is_right or (not is_other and value == 0), "a number of at least 0"
    elif choices := argument.choices_of(parameter.annotation):
        is_right, wanted = value in choices, f"one of {', '.join(map(repr, choices))}"
    if not is_right:
        raise InvalidArgument(f"{shown}: expected {wanted}")
    return value


# How texts are read ----------------------------------------------------------------------------


def nbytes(text: str) -> int:
    """SIZE, such as 5GB, 500MB, 2GiB or 1048576."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", text.strip().upper())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write e.g. 5GB, 500MB or 2GiB")
    # As the IEC has it: 5GB are powers of ten, 5GiB of two.
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " KMGT".index(match[2] or " "))


def whole(text: str) -> int:
    """N: at least 0."""
    # Not by int() alone, which takes signs, spaces and underscores.
    if not text.isdigit():
        raise ValueError(f"{text!r} is not a number of at least 0")
    return int(text)


def count(text: str) -> int:
    """N: at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{text!r} is not a number of at least 1")
    return int(text)


def port(text: str) -> int:
    """PORT: 0 to 65535."""
    if not text.isdigit() or int(text) > 65535:
        raise ValueError(f"{text!r} is not a port, which is a number up to 65535")
    return int(text)


def block(text: str) -> tuple[int, int]:
    """ROWSxCOLUMNS: two numbers of at least 1."""
    rows, _, columns = text.partition("x")
    return count(rows), count(columns)


def best(text: str) -> tuple[int, str]:
    """N[:min|max]: how many, and which are the best."""
    number, _, mode = text.partition(":")
    if mode not in ("", "min", "max"):
        raise ValueError(f"{text!r}: write N, N:min or N:max")
    return count(number), mode or "min"


def params(text: str) -> int:
    """A number of parameters, such as 70B."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text.upper())
    number = 0 if match is None else float(match[1]) * 1000 ** " KMBT".index(match[2] or " ")
    # Beyond 64 bits nothing is a model, and reports hold numbers of that width.
    if number < 1 or number >= 2**63:
        raise ValueError(f"{text!r} is not a number of parameters; write e.g. 70B")
    return round(number)


def price(text: str) -> float:
    """A number of at least 0."""
    if re.fullmatch(r"\d+(\.\d*)?|\.\d+", text) is None:
        raise ValueError(f"{text!r} is not a number of at least 0")
    return float(text)


def seconds(text: str) -> float:
    """TIME, such as 90m, in seconds."""
    # Never without a unit: 90 would be seconds to some, and minutes to others.
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None or not float(match[1]):
        raise ValueError(f"{text!r} is not a time; write e.g. 0.5s, 90m, 12h or 7d")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def key_value(text: str) -> tuple[str, Any]:
    """KEY=VALUE of a store's options; the value may be JSON. No repr shows a secret one."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ValueError(f"{text!r} is not KEY=VALUE")
    with suppress(ValueError):
        value = json.loads(value)  # numbers, true, {"nested": "options"}
    # Hidden as soon as it is read: from here on it is in frames that a report of errors may show.
    from storage.hidden import without_secrets

    return key, without_secrets({key: value})[key]


def old_new(text: str) -> tuple[str, str]:
    """OLD=NEW."""
    old, _, new = text.partition("=")
    if not old or not new:
        raise ValueError(f"{text!r} is not OLD=NEW")
    return old, new


def rename_rule(text: str) -> str:
    """A rule of `rename`: `old=new`, or `re:pattern=replacement`."""
    if "=" not in text:
        raise ValueError(f"{text!r} is not OLD=NEW or re:PATTERN=NEW")
    if text.startswith("re:"):
        # The last "=" divides it, because a pattern may have one, as in (?=...).
        try:
            re.compile(text[3:].rpartition("=")[0])
        except re.error as error:
            raise ValueError(f"{text!r} is not a regular expression: {error}") from error
    return text


def lines_of(path: str) -> list[str]:
    """The words of a file."""
    with open(path, encoding="utf-8") as file:
        return file.read().split()


# What several functions take -------------------------------------------------------------------

_PLACE = "a path, s3://bucket/prefix, or any url of fsspec"
Url: TypeAlias = Annotated["StoreLike", Argument(f"{_PLACE}; a root, or one step's directory")]
Root: TypeAlias = Annotated["StoreLike", Argument(f"a root: {_PLACE}")]
Step: TypeAlias = Annotated[
    "SupportsIndex | None", Argument("default: the latest", whole, flag="--step")
]
OneStep: TypeAlias = Annotated[
    "SupportsIndex | None", Argument("its step, as `ckpt ls` shows it", whole, flag="--step")
]
Attempt: TypeAlias = Annotated[
    str, Argument("which checkpoint of that step, as `ckpt ls` shows it", metavar="NAME")
]
Options: TypeAlias = Annotated[
    "Mapping[str, Any] | None",
    Argument(
        "an option of the store, such as endpoint_url=http://localhost:9000; repeatable",
        key_value,
        "KEY=VALUE",
        "-o --option",
        dict,
    ),
]
OtherOptions: TypeAlias = Annotated[
    "Mapping[str, Any] | None",
    Argument(
        "an option of the other store (default: the same); repeatable",
        key_value,
        "KEY=VALUE",
        "--other-option",
        dict,
    ),
]
Unfold: TypeAlias = Annotated[bool, Argument("a line for each name, also where blocks repeat it")]
MetadataMax: TypeAlias = Annotated[
    "SupportsIndex | None",
    Argument(
        "memory for what describes checkpoints, and 10 seconds of a CPU a GiB; default: 1GiB",
        nbytes,
        "SIZE",
    ),
]
MemoryMax: TypeAlias = Annotated[
    "SupportsIndex | None",
    Argument(
        "memory for the metadata of other libraries' files, besides the bytes of the tensors; "
        "default: 64MiB",
        nbytes,
        "SIZE",
    ),
]
OutputMax: TypeAlias = Annotated[
    "SupportsIndex | None",
    Argument(
        "bytes of tensors to write; default: 64MiB and 8 times those that are stored",
        nbytes,
        "SIZE",
    ),
]
Threads: TypeAlias = Annotated[SupportsIndex, Argument("threads that move bytes", count, "N")]
Layout: TypeAlias = Annotated[
    Literal["fsdp2", "flat", "replicated"],
    Argument("fsdp2: rows, as fully_shard cuts; flat: even runs, as FSDP1; replicated"),
]
Include: TypeAlias = Annotated[
    Sequence[str], Argument("only names that match; repeatable", metavar="PATTERN", collect=list)
]
Exclude: TypeAlias = Annotated[
    Sequence[str], Argument("no names that match; repeatable", metavar="PATTERN", collect=list)
]
Rename: TypeAlias = Annotated[
    "Mapping[str, str] | Callable[[str], str] | Sequence[str] | None",
    Argument(
        "new names: backbone=model for all names below, re:PATTERN=NEW anywhere; repeatable, in "
        "order",
        rename_rule,
        "OLD=NEW",
        collect=list,
    ),
]
Stacks: TypeAlias = Annotated[
    "Mapping[str, str] | None",
    Argument(
        "a tensor as several, or several as one: 'experts.weight=experts.{}.weight', "
        "'q + k + v=qkv', 'kernel^T=weight'; repeatable, before --rename",
        old_new,
        "OLD=NEW",
        "--stack",
        dict,
    ),
]


def price_of(flag: str, text: str) -> Argument:
    """The price of something, which somebody has to say."""
    return Argument(f"price {text}", price, "PRICE", f"--price-{flag}")


StoragePrice: TypeAlias = Annotated["float | None", price_of("storage", "of 1 GiB for a month")]
WritesPrice: TypeAlias = Annotated["float | None", price_of("writes", "of 1,000 PUT requests")]
Near: TypeAlias = Annotated[
    Sequence[str],
    Argument(
        "a directory of near checkpoints of a host, seen from here; repeatable",
        metavar="DIR",
        collect=list,
    ),
]
DryRun: TypeAlias = Annotated[bool, Argument("report only; write and delete nothing")]
KeepLast: TypeAlias = Annotated["int | None", Argument("the N newest", count, "N")]
KeepEveryStep: TypeAlias = Annotated[
    "int | None", Argument("the first at or after each multiple", count, "STEPS")
]
KeepBestOf: TypeAlias = Annotated[
    "int | tuple[int, str] | None",
    Argument("by metric; default: the lowest", best, "N[:min|max]"),
]
KeepAge: TypeAlias = Annotated[
    "float | None", Argument("younger than e.g. 90m, 12h, 7d", seconds, "AGE")
]
RetireUnmeasured: TypeAlias = Annotated[
    bool, Argument("with --keep-best: delete checkpoints without a metric too; default: keep them")
]
