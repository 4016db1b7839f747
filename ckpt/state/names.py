"""From the names of a state to the names in a checkpoint: renames, skips and tied names in one
place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch

from ckpt.layout.composites import unknown_types
from ckpt.layout.descriptions import is_description, shown_type
from ckpt.layout.region import Shape
from ckpt.state.resize import Resize, RowRule, StoredRows
from ckpt.state.types import CHECKPOINT, CallArguments, Catalog, Problem, ProblemKind
from ckpt.state.values import references


class Left(NamedTuple):
    """What the checkpoint has and this rank's state has no place for: names of leaves, and, by the
    names of param groups, parameters. `tied` are those that the state has no second place for, each
    with the one that it has.
    """

    names: Sequence[str]
    params: Mapping[str, Sequence[str]]
    tied: Mapping[str, str] = {}

    @property
    def untied(self) -> list[str]:
        """Names that are not tied, and param groups with parameters more."""
        groups = [fqn for fqn, params in self.params.items() if params]
        return groups + [name for name in self.names if name not in self.tied]

    def problems(self, call: CallArguments) -> list[Problem]:
        """All of it, as unexpected names."""
        more = [
            Problem(
                ProblemKind.UNEXPECTED,
                fqn,
                f"{fqn}: the {call.source}'s optimizer has {len(params)} parameters more, "
                f"{params[0]} the first"
                + call.moves(rename="pass rename=", leave="leave them out"),
            )
            for fqn, params in self.params.items()
            if params
        ]
        return more + [
            Problem(
                ProblemKind.UNEXPECTED,
                name,
                f"{name}: is in the {call.source} and has no place in the state"
                + (f", which ties it to {self.tied[name]}" if name in self.tied else "")
                + call.moves(
                    rename="untie them"
                    if name in self.tied
                    else "pass rename= if the state calls it otherwise",
                    leave="leave it out",
                ),
            )
            for name in self.names
        ]


Rename = Mapping[str, str] | Callable[[str], str] | None
Skip = Callable[[str], bool] | Iterable[str] | None
# Of options of param groups: whose value holds, of each or of all.
GroupOptions = Mapping[str, Literal["saved", "live"]] | Literal["saved", "live"] | None


class Names:
    """Finds what the checkpoint has for a name of the state, and records names and problems.

    `aliases` are the tied names of the live state: each to the name that its tensor goes by.
    """

    def __init__(
        self,
        catalog: Catalog,
        rename: Rename,
        skip: Skip,
        *,
        aliases: Mapping[str, str],
        call: CallArguments = CHECKPOINT,
        new: Skip = None,
        group_options: GroupOptions = None,
        resize: Resize = None,
    ) -> None:
        # With `resize`, tensors there have the rows of the state; see `resized`.
        self._tensors = dict(catalog.tensors) if resize else {}
        self.catalog = replace(catalog, tensors=self._tensors) if resize else catalog
        self.call = call
        self.aliases = aliases
        self.rename, renames = _renamer(rename)
        self.is_skipped, skips = _matcher(skip)
        self.is_new, news = _matcher(new)
        options = {} if isinstance(group_options, str) else dict(group_options or {})
        self._rules = {
            "rename": renames,
            "skip": skips,
            "new": news,
            "group_options": Rules(options),
            "resize": Rules(resize or ()),
        }
        self._resize = dict(resize or {})
        self.resized: dict[str, StoredRows] = {}
        self._group_options = group_options if isinstance(group_options, str) else options
        self.has_rename = rename is not None
        # Whether a name that both sides have may be left alone, or has to be asked for by a rule.
        self.has_resize = bool(resize)
        self.has_skip = bool(skip) or bool(new) or self.has_resize
        self.problems: list[Problem] = []
        self.used: set[str] = set()
        # Where memory of optimizers begins that is filled already.
        self.filled: set[tuple[torch.device, int]] = set()
        self.loaded_tensors: list[str] = []
        self.missing_tensors: list[str] = []
        self.loaded_values: list[str] = []
        self.skipped: list[str] = []
        self.new: list[str] = []
        # Names of the checkpoint of which the state has one tensor with another name: with that.
        self.tied: dict[str, str] = {}
        # By the name of param groups: parameters of the checkpoint's that the state's lack. Of
        # several optimizers that are parts of one, all of them.
        self.extra_params: dict[str, list[str]] = {}
        self._tied: dict[str, list[str]] | None = None
        self._by_rest: dict[str, str] | None = None
        self._by_words: dict[str, dict[int, str]] | None = None

    def tensor(self, fqn: str) -> str | None:
        """The checkpoint's name of tensor `fqn`. None, and a problem, when it has none."""
        name = self.rename(fqn) if self.has_rename else fqn
        if name in self.catalog.tensors:
            return name
        for other in self.equivalents(fqn):
            if other in self.catalog.tensors:
                return other
        if name in self.catalog.values:
            value = self.catalog.values[name]
            self.used |= {name, *references(value)}
            if is_description(value) and (unknown := unknown_types(value)):
                self.report(fqn, unknown[0])
                return None
            what, advice = "value", "load into a value"
            if is_description(value):
                what, advice = shown_type(value), "put such a tensor into the state"
            self.report(
                fqn,
                f"is a {what} in the {self.call.source} and a plain tensor in the state; "
                f"{advice}{self.call.or_skip}",
            )
        else:
            self.missing_tensors.append(fqn)
            self.report_missing(fqn, name)
        return None

    def value(self, fqn: str) -> tuple[str, Any] | None:
        """The checkpoint's name and value of `fqn`. None, and a problem, when it has none."""
        name = self.rename(fqn)
        if name in self.catalog.values:
            self.used.add(name)
            return name, self.catalog.values[name]
        if name in self.catalog.tensors:
            self.used.add(name)
            self.report(
                fqn,
                f"is a tensor in the {self.call.source} and a value in the state; put a tensor "
                f"there{self.call.or_skip}",
            )
        elif any(name in own for own in self.catalog.per_rank):
            self.used.add(name)
            self.report(
                fqn, "was saved per rank; mark it with PerRank(...) in the state, or skip= it"
            )
        elif any(known.startswith(f"{name}~group") for known in self.catalog.values):
            self.report(
                fqn, "was saved per group; mark it with PerGroup(...) in the state, or skip= it"
            )
        else:
            self.report_missing(fqn, name)
        return None

    def description(self, fqn: str) -> tuple[str, dict[str, Any]] | None:
        """The checkpoint's name and description of the composite `fqn`. None, and a problem, when
        it has none.
        """
        for name in self.equivalents(fqn):
            if is_description(value := self.catalog.values.get(name)):
                self.used |= {name, *references(value)}
                if unknown := unknown_types(value):
                    self.report(fqn, unknown[0])
                    return None
                return name, value
        name = self.rename(fqn)
        if name in self.catalog.tensors or name in self.catalog.values:
            self.used.add(name)
            self.report(
                fqn,
                f"is a plain tensor or a value in the {self.call.source}, and consists of other "
                f"tensors in the state; load into a plain one and convert it{self.call.or_skip}",
            )
        else:
            self.missing_tensors.append(fqn)
            self.report_missing(fqn, name)
        return None

    def equivalents(self, fqn: str) -> Iterator[str]:
        """All names that the checkpoint may know a tensor by, the most direct first."""
        if self._tied is None:  # made only where a name is not the checkpoint's as it is
            self._tied = {}
            for tied, stored in self.aliases.items():
                self._tied.setdefault(stored, []).append(tied)
        stored_live = self.aliases.get(fqn, fqn)
        for live in (fqn, stored_live, *self._tied.get(stored_live, ())):
            name = self.rename(live)
            yield name
            stored = self.catalog.aliases.get(name, name)
            yield stored
            yield from (tied for tied, to in self.catalog.aliases.items() if to == stored)

    def skip(self, fqn: str) -> bool:
        """Whether the caller wants `fqn` left alone; the report then lists it.

        Likewise for what is new, which is a problem where the checkpoint has it.
        """
        if self.is_skipped(fqn):
            self.skipped.append(fqn)
            return True
        if not self.is_new(fqn):
            return False
        self.new.append(fqn)
        name, catalog = self.rename(fqn), self.catalog
        has = any(one in catalog.tensors or one in catalog.values for one in self.equivalents(fqn))
        if (
            has
            or f"{name}.param_groups" in catalog.values
            or any(name in o for o in catalog.per_rank)
        ):
            self.report_not_new(fqn)
        return True

    def report_not_new(self, fqn: str) -> None:
        """Note that the checkpoint has what `new` says it cannot have."""
        self.report(
            fqn, f"is in the {self.call.source}, and new= says that it is not; load it, or skip= it"
        )

    def group_option(self, option: str) -> Literal["saved", "live"] | None:
        """Which value of an option of param groups holds, where the caller says so."""
        if isinstance(self._group_options, str):
            return self._group_options
        self._rules["group_options"](option)
        return self._group_options.get(option)

    def row_rule(self, fqn: str) -> RowRule | None:
        """What new rows of a tensor are, where the caller says so by one of its names."""
        tied = [name for name, to in self.aliases.items() if to == fqn]
        heads = [self._rules["resize"].longest(name) for name in (fqn, *tied)]
        return next((self._resize[head] for head in heads if head is not None), None)

    def stored_rows(self, fqn: str) -> int | None:
        """The rows that the checkpoint has of a tensor of the state, if it has that."""
        for name in self.equivalents(fqn):
            if name in self.resized:
                return self.resized[name].number
            if name in self.catalog.tensors and (shape := self.catalog.tensors[name].shape):
                return shape[0]
        return None

    def resize(self, fqn: str, saved: str, shape: Shape, rule: RowRule) -> None:
        """Take what the checkpoint calls `saved` as if it had the `shape` of `fqn`, where they
        differ in their rows alone.
        """
        entry, known = self.catalog.tensors[saved], self.resized.get(saved)
        if not shape or entry.shape[1:] != shape[1:] or not entry.shape:
            return
        number = entry.shape[0] if known is None else known.number
        has_mean = number > 0 and entry.dtype.is_floating_point
        if known is not None and known.rule != rule:
            text = f"{self.call.source} has one tensor for two: pass one rule for both in resize="
            self.report(fqn, text)
        elif rule == "mean" and shape[0] > number and not has_mean:
            text = f"{self.call.source} has {number} rows of {entry.dtype}, which have no "
            text += "mean; pass 'zeros' or 'init' for it in resize="
            self.report(fqn, text)
        if shape[0] != number or known is not None:
            self.resized[saved] = StoredRows(number, rule)
            self._tensors[saved] = entry._replace(shape=shape)

    def unmatched(self) -> list[str]:
        """What is wrong with rules of the caller's that have matched nothing. Ranks that hold
        different things may each have others; the texts are the same on all of them.
        """
        texts = []
        for argument, rules in self._rules.items():
            # A name to skip may be the checkpoint's alone, which nothing asks for otherwise.
            if argument == "skip" and rules.unmatched:
                catalog = self.catalog
                for known in (catalog.tensors, catalog.values, catalog.aliases, *catalog.per_rank):
                    for name in known:
                        rules(name)
            texts += [
                f"{argument}={name!r}: matches {_NOTHING[argument]}; correct it or leave it out"
                for name in sorted(rules.unmatched)
            ]
        return texts

    def report(self, fqn: str, text: str, kind: ProblemKind = ProblemKind.VALUE) -> None:
        """Note that `fqn` cannot be loaded; `text` follows its name in the message."""
        self.problems.append(Problem(kind, fqn, f"{fqn}: {text}"))

    def report_missing(self, fqn: str, name: str) -> None:
        """Note that the checkpoint has nothing for `fqn`, which would be called `name` there."""
        where = "" if name == fqn else f" as {name}"
        like, note = self._like(name), ""
        if not like and (like := self._like_but_for_numbers(name)) and self.call.rename:
            note = " (stacks= has rules for experts one by one and in one tensor)"
        there = f", which has {like!r}{note}" if like else ""
        self.report(
            fqn,
            f"is not in the {self.call.source}{where}{there}"
            + self.call.moves(
                rename="pass rename= if it has another name there",
                leave="leave it as it is",
                is_missing=True,
            ),
            ProblemKind.MISSING,
        )

    def _like(self, name: str) -> str:
        """A tensor of the checkpoint that differs from `name` in its first part only, or "".

        No closer look: it would take hours where all of a large model's names are missing.
        """
        if self._by_rest is None:
            self._by_rest = {}
            for known in self.catalog.tensors:
                self._by_rest.setdefault(known, known)
                self._by_rest.setdefault(known.partition(".")[2], known)
        rest = name.partition(".")[2]
        # One word alone, such as "weight", would be found under any layer.
        for part in (name, rest):
            if "." in part and part in self._by_rest:
                return self._by_rest[part]
        return ""

    def _like_but_for_numbers(self, name: str) -> str:
        """A tensor of the checkpoint whose name is `name` with numbers more or less in it, or "":
        a list of stages, experts one by one.
        """
        if self._by_words is None:
            self._by_words = {}
            for known in self.catalog.tensors:
                words, count = _words_of(known)
                self._by_words.setdefault(words, {}).setdefault(count, known)
        words, count = _words_of(name)
        # One word alone, such as "weight", would be found under any layer.
        others = self._by_words.get(words, {}) if "." in words else {}
        return next((known for other, known in sorted(others.items()) if other != count), "")

    def left(self, entries: set[str]) -> tuple[Left, int]:
        """What of the checkpoint was not requested, and how many names are under other entries.

        `entries` are the top-level names of the state in the checkpoint; "" means all.
        """
        catalog = self.catalog
        # Sorted below: all ranks report in one order, and a set has another one in each process.
        per_rank = {name for own in catalog.per_rank for name in own}
        names = (*catalog.tensors, *catalog.values, *sorted(per_rank))
        left = [name for name in names if name not in self.used]
        requested = [n for n in left if "" in entries or not entries.isdisjoint(heads(n))]
        unexpected = [name for name in requested if not self.is_skipped(name)]
        params = {fqn: extra for fqn, extra in self.extra_params.items() if extra}
        if unexpected:
            self.tied |= {self.rename(a): self.rename(held) for a, held in self.aliases.items()}
        return Left(unexpected, params, self.tied), len(left) - len(requested)


def _words_of(name: str) -> tuple[str, int]:
    """`name` without its numbers, and how many they are."""
    parts = name.split(".")
    words = [part for part in parts if not part.isdecimal()]
    return ".".join(words), len(parts) - len(words)


class Rules:
    """Names, each of which also stands for all names below it; `unmatched` have matched nothing so
    far.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(names)
        self.unmatched = set(self._names)

    def __call__(self, fqn: str) -> bool:
        # Asked for each tensor, and most loads have no rule.
        return bool(self._names) and self.longest(fqn) is not None

    def longest(self, fqn: str) -> str | None:
        """The longest of the names that matches; all that do are matched."""
        matching = [head for head in heads(fqn) if head in self._names]
        self.unmatched.difference_update(matching)
        return matching[0] if matching else None


_NOTHING = {
    "rename": "no name of the state",
    "skip": "no name of the state or the checkpoint",
    "new": "no name of the state",
    "group_options": "no option of a group",
    "resize": "no tensor of the state",
}


def _renamer(rename: Rename) -> tuple[Callable[[str], str], Rules]:
    if rename is None:
        return lambda fqn: fqn, Rules()
    if callable(rename):
        return rename, Rules()
    if not isinstance(rename, Mapping):
        raise TypeError(f"rename={rename!r}; expected a mapping, as {{'a': 'b'}}, or a function")
    table = dict(rename)
    rules = Rules(table)

    def by_longest_prefix(fqn: str) -> str:
        # The most specific rule wins.
        head = rules.longest(fqn)
        return fqn if head is None else table[head] + fqn[len(head) :]

    return by_longest_prefix, rules


def _matcher(names: Skip) -> tuple[Callable[[str], bool], Rules]:
    """A function of the caller's may rightly match nothing; names are meant to be there."""
    if callable(names):
        return names, Rules()
    rules = Rules([names] if isinstance(names, str) else names or ())
    return rules, rules


def heads(fqn: str) -> Iterator[str]:
    """A name, and what is before each of its dots, the longest first."""
    length = len(fqn)
    while length > 0:
        yield fqn[:length]
        length = fqn.rfind(".", 0, length)


def split_state_name(name: str, params: Collection[str]) -> tuple[str, str] | None:
    """`name` as a parameter and the name of its state; None when it starts with none of `params`.

    Both may have dots ("layer.weight" and "moments.first"), so there may be several ways to cut;
    the longest name of a parameter wins.
    """
    head = next((head for head in heads(name) if head in params and head != name), None)
    return None if head is None else (head, name[len(head) + 1 :])


# Parts of names that torch's wrappers (FSDP, compile, activation checkpoints) insert.
_WRAPPER_PARTS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})


def bare_names(state_dict: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """`state_dict` by the names of the bare module, whatever wrapper it was taken from.

    A leading "module." (DDP, DataParallel) goes when the name is not among `known` and is without
    it.
    """
    return {bare_name(name, known): value for name, value in state_dict.items()}


def bare_name(name: str, known: Collection[str]) -> str:
    """`name` without the parts that wrappers add to it."""
    # A module of the user's may have such a name, "module" above all.
    if name in known:
        return name
    bare = clean_name(name)
    short = bare.removeprefix("module.")
    return short if bare not in known and short in known else bare


def clean_name(name: str) -> str:
    """A dotted name without the parts that torch's wrappers insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)
