"""One tensor where another model has several, or its transpose, by a rule that the user states.

A checkpoint in the one form is read as if it were in the other: a rule (`stacks/forms`) changes
names and shapes of its catalog, and says of every changed tensor what it is made of. Nothing is
gathered: each rank reads the regions that it holds of the other form.

Optimizer state follows its parameter. What has the parameter's shape is changed like it, what has
no dims (a step) is common to all slices, and anything else is refused, since nothing tells whether
an optimizer would make the same of slices and of stacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

from ckpt.stacks.forms import StackPlace, StackRule, Turn, steps_of
from ckpt.state.names import split_state_name
from ckpt.state.types import Catalog, TensorEntry
from ckpt.state.values import all_groups, join, references


class Origin(NamedTuple):
    """What a tensor in the other form is made of: the tensors `stored`, one after the other along
    `dim`, or along a first dim of their own (None). Part i is `starts[i]` to `starts[i + 1]` there.

    With `number`, it is that part of the one stored. With `is_common`, it is any of `stored`, which
    have to be equal; with `turn`, the one stored, turned.
    """

    stored: tuple[str, ...]
    number: int | None = None
    starts: Sequence[int] = ()
    dim: int | None = None
    is_common: bool = False
    turn: Turn | None = None


class Restacked(NamedTuple):
    """A catalog in the other form: of each tensor that the checkpoint does not have, the origin.

    `problems` say why some of it cannot be.
    """

    catalog: Catalog
    origins: Mapping[str, Origin]
    problems: Sequence[str]


def restack(catalog: Catalog, pairs: Iterable[tuple[str, str]]) -> list[Restacked]:
    """`catalog` as rules from its names to new ones change it, step by step; the last has all of
    them. A rule whose new form it has already changes nothing; one with neither form is a
    problem, and the last step. Raises CheckpointError for what is no rule.
    """
    done = [Restacked(catalog, {}, ())]
    for rule in chain.from_iterable(
        steps for steps in steps_of(pairs) if not _is_new(done[-1].catalog, steps)
    ):
        made = _Restacking(done[-1].catalog)
        made.apply(rule)
        tensors = {name: entry for name, entry in made.tensors.items() if name not in made.gone}
        values = {
            name: value for name, value in made.values.items() if name not in made.gone_values
        }
        catalog = replace(made.catalog, tensors=tensors, values=values, aliases=made.aliases)
        done.append(Restacked(catalog, made.origins, made.problems))
        # Later steps would only report what follows from these.
        if made.problems:
            break
    return done


def _is_new(catalog: Catalog, steps: Sequence[StackRule]) -> bool:
    """Whether a catalog has what the last of `steps` makes, and nothing that they begin with."""
    made = {name for step in steps[:-1] for name in step.new.names}
    first = [step for step in steps if not made.issuperset(step.old.names)]
    names = catalog.tensors
    return any(map(steps[-1].back.place, names)) and not any(
        step.place(name) for step in first for name in names
    )


class _Param(NamedTuple):
    """A tensor of the model in its old form, and of how many parts it is, or is one."""

    total: int
    entry: TensorEntry


class _Slices(NamedTuple):
    """What is one in one form and `total` in the other: what it is called in the old form, by the
    number of the slice (None for a stack), at a place; `key` ends the name of some state.
    """

    place: StackPlace
    key: str
    total: int
    names: dict[int | None, str]

    @property
    def first(self) -> str:
        return next(iter(self.names.values()))


class _ParamState(NamedTuple):
    """Of some state of an optimizer: what comes before the parameter's name, that name, the
    state's name, and the name of the whole.
    """

    prefix: str
    param: str
    key: str
    fqn: str


def _gathered(rows: Iterable[tuple[StackPlace, str, int, str]]) -> list[_Slices]:
    """Place with a number, key, total and name of each, as slices that belong together."""
    gathered: dict[tuple[StackPlace, str], _Slices] = {}
    for place, key, total, name in rows:
        whole = place._replace(number=None), key
        slices = gathered.setdefault(whole, _Slices(*whole, total, {}))
        slices.names[place.number] = name
    return list(gathered.values())


class _Restacking:
    """A catalog that rules are applied to, one after the other."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.tensors = dict(catalog.tensors)
        self.values = dict(catalog.values)
        self.aliases = dict(catalog.aliases)
        self.origins: dict[str, Origin] = {}
        self.problems: list[str] = []
        self.gone: set[str] = set()
        self.gone_values: set[str] = set()

    def apply(self, rule: StackRule) -> None:
        catalog = self.catalog
        states = list(self.states(catalog.tensors))
        # Names of states contain those of parameters: they follow their parameter below.
        of_optimizers = {state.fqn for state in states}
        params = _gathered(
            (place, "", 0, fqn)
            for fqn in catalog.tensors
            if fqn not in of_optimizers and (place := rule.place(fqn)) is not None
        )
        if not params:
            if not any(rule.back.place(fqn) for fqn in catalog.tensors):
                self.problems.append(
                    f"{rule.old.text}: the checkpoint has it not, and no {rule.new.text}"
                )
            return
        self.refuse_what_cannot_follow(rule)
        known: dict[str, _Param] = {}
        for slices in params:
            self.add_param(rule, slices, known)
        self.change_aliases(rule, known)
        by_suffix = _by_suffix(known)
        self.add_states(rule, states, by_suffix)
        self.add_values(rule, by_suffix)
        for path, _ in all_groups(catalog.values):
            fqn = join(path, "param_groups")
            self.values[fqn] = self.regrouped(rule, fqn, by_suffix)

    def states(self, names: Iterable[str]) -> Iterator[_ParamState]:
        """Those of `names` that are the state of a parameter of an optimizer."""
        optimizers = [
            (join(path, "state."), {name for group in groups for name in group["params"]})
            for path, groups in all_groups(self.catalog.values)
        ]
        for fqn in names:
            for prefix, params in optimizers:
                if fqn.startswith(prefix):
                    parts = split_state_name(fqn[len(prefix) :], params)
                    if parts is not None:
                        yield _ParamState(prefix, *parts, fqn)
                    break

    def refuse_what_cannot_follow(self, rule: StackRule) -> None:
        own = {fqn for values in self.catalog.per_rank for fqn in values}
        self.problems += [
            f"{fqn}: was saved as each rank's own, so {rule.text} cannot change it"
            for fqn in sorted(own)
            if rule.place(fqn)
        ]
        self.problems += [
            f"{fqn}: consists of other tensors, so {rule.text} cannot change it"
            for fqn, value in self.catalog.values.items()
            if rule.place(fqn) and references(value)
        ]

    def add_param(self, rule: StackRule, slices: _Slices, known: dict[str, _Param]) -> None:
        entry = self.tensors[slices.first]
        if not rule.is_split:
            total = len(rule.old.names)
            if rule.old.dim is None:
                # By the highest number: a slice that is missing between is reported as such.
                total = 1 + max(number for number in slices.names if number is not None)
            for fqn in slices.names.values():
                known[fqn] = _Param(total, self.tensors[fqn])
            self.stack(rule, slices._replace(total=total))
        elif starts := self.starts(rule, slices.first):
            known[slices.first] = _Param(len(starts) - 1, entry)
            self.split(rule, slices)

    def starts(self, rule: StackRule, fqn: str) -> Sequence[int]:
        """Where the parts of a whole begin, and its end; of what has none, a problem."""
        shape, dim, sizes = self.tensors[fqn].shape, rule.new.dim, list(rule.new.sizes)
        if dim is None:
            if shape and shape[0]:
                return range(shape[0] + 1)
            self.problems.append(f"{fqn}: has shape {shape}, and no slices to take out")
            return ()
        if len(shape) <= dim:
            self.problems.append(f"{fqn}: has shape {shape}, and no dim {dim} to cut")
            return ()
        # Parts without a stated size share what is left, in equal parts.
        left, unknown = shape[dim] - sum(filter(None, sizes)), sizes.count(None)
        if left < 0 or left % max(unknown, 1) or (left and not unknown):
            self.problems.append(
                f"{fqn}: has shape {shape}, whose dim {dim} does not make the parts of "
                f"{rule.text}; state their sizes, as in 'q:{shape[dim]} + k:0'"
            )
            return ()
        return (0, *accumulate(left // unknown if size is None else size for size in sizes))

    def split(self, rule: StackRule, slices: _Slices) -> None:
        fqn, dim = slices.first, rule.new.dim
        starts = self.starts(rule, fqn)
        shape = self.tensors[fqn].shape
        for number, (start, stop) in enumerate(pairwise(starts)):
            name = rule.new_name(slices.place, number) + slices.key
            part = shape[1:] if dim is None else (*shape[:dim], stop - start, *shape[dim + 1 :])
            one = self.tensors[fqn]._replace(shape=part)
            self.add(name, one, Origin((fqn,), number, starts, dim))
        self.gone.add(fqn)

    def stack(self, rule: StackRule, slices: _Slices) -> None:
        name = rule.new_name(slices.place) + slices.key
        if not self.is_complete(rule, slices):
            return
        parts = [slices.names[number] for number in range(slices.total)]
        entry, dim = self.tensors[parts[0]], rule.old.dim
        if (turn := rule.old.turn) is not None:
            if problem := turn.problem(entry.shape):
                self.problems.append(f"{name}: {parts[0]} has shape {entry.shape}, and {problem}")
                return
            turned = entry._replace(shape=turn.shape(entry.shape))
            self.add(name, turned, Origin((parts[0],), turn=turn))
            self.gone.update({parts[0]} - {name})
            return
        if dim is not None and len(entry.shape) <= dim:
            self.problems.append(f"{name}: {parts[0]} has shape {entry.shape}, and no dim {dim}")
            return
        for fqn, size in zip(parts, rule.old.sizes or [None] * len(parts), strict=True):
            other = self.tensors[fqn]
            own, wanted = list(other.shape), list(entry.shape)
            if dim is not None and len(own) == len(wanted):
                if size not in (None, own[dim]):
                    self.problems.append(f"{fqn}: has shape {other.shape}, unlike {rule.text}")
                    return
                own[dim] = wanted[dim]
            if (other.dtype, own) != (entry.dtype, wanted):
                self.problems.append(
                    f"{name}: its slices differ: {parts[0]} is {entry.dtype}{list(entry.shape)}, "
                    f"{fqn} is {other.dtype}{list(other.shape)}"
                )
                return
        if dim is None:
            shape = (slices.total, *entry.shape)
            starts: Sequence[int] = range(slices.total + 1)
        else:
            starts = (0, *accumulate(self.tensors[fqn].shape[dim] for fqn in parts))
            shape = (*entry.shape[:dim], starts[-1], *entry.shape[dim + 1 :])
        self.add(name, entry._replace(shape=shape), Origin(tuple(parts), None, starts, dim))
        self.gone.update(parts)

    def is_complete(self, rule: StackRule, slices: _Slices) -> bool:
        place, key, total, names = slices
        lacking = [number for number in range(total) if number not in names]
        if lacking:
            name = rule.back.new_name(place, lacking[0]) + key
            more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
            self.problems.append(
                f"{rule.new_name(place)}{key}: the checkpoint has {len(names)} of its {total} "
                f"slices and lacks {name}{more}"
            )
        return not lacking

    def add(self, name: str, entry: TensorEntry, origin: Origin) -> None:
        # A transpose, or what is common to all slices, may keep its name.
        if name in self.tensors and name not in origin.stored:
            self.problems.append(
                f"{name}: the checkpoint has it, and {origin.stored[0]}, of which it would be made"
            )
        self.tensors[name] = entry
        self.origins[name] = origin

    def change_aliases(self, rule: StackRule, known: Mapping[str, _Param]) -> None:
        """Other names of what is changed: in the new form too, where the rule holds in them."""
        numbers: dict[tuple[StackPlace, StackPlace], dict[int | None, str]] = {}
        for alias, stored in self.catalog.aliases.items():
            place = rule.place(alias)
            if stored not in known:
                if place is not None:
                    self.problems.append(f"{alias}: is tied to {stored}, which {rule.text} leaves")
                continue
            # A name of another form, such as that of a module around it, is no name of the new one.
            del self.aliases[alias]
            to = rule.place(stored)
            if place is None or to is None:
                continue
            if rule.is_split:
                for number in range(known[stored].total):
                    self.aliases[rule.new_name(place, number)] = rule.new_name(to, number)
            elif place.number == to.number:
                both = place._replace(number=None), to._replace(number=None)
                numbers.setdefault(both, {})[to.number] = stored
        for (place, to), names in numbers.items():
            total = known[next(iter(names.values()))].total
            if self.is_complete(rule, _Slices(place, "", total, names)):
                self.aliases[rule.new_name(place)] = rule.new_name(to)

    def add_states(
        self, rule: StackRule, states: Iterable[_ParamState], by_suffix: Mapping[str, _Param]
    ) -> None:
        rows = []
        for state in states:
            place = rule.place(state.param)
            if place is None:
                continue
            param, shape = by_suffix.get(state.param), self.tensors[state.fqn].shape
            if param is not None and not param.entry.shape:
                self.problems.append(
                    f"{state.fqn}: its parameter has no dims, so nothing tells whether each slice "
                    "has its own or all have one; leave the optimizer out with skip="
                )
            elif param is None or shape not in ((), param.entry.shape):
                self.problems.append(
                    f"{state.fqn}: has shape {list(shape)}, another one than its parameter, so "
                    f"{rule.text} cannot change it"
                )
            else:
                place = place._replace(head=state.prefix + place.head)
                rows.append((place, f".{state.key}", param.total, state.fqn))
        for slices in _gathered(rows):
            if not self.tensors[slices.first].shape:
                self.add_common(rule, slices)
            elif rule.is_split:
                self.split(rule, slices)
            else:
                self.stack(rule, slices)

    def add_common(self, rule: StackRule, slices: _Slices) -> None:
        """What has no dims: of a parameter's state one, common to all slices."""
        if not rule.is_split and not self.is_complete(rule, slices):
            return
        names = self.new_names(rule, slices)
        stored = [slices.names[number] for number in sorted(slices.names, key=lambda n: n or 0)]
        for name in names:
            self.add(name, self.tensors[stored[0]], Origin(tuple(stored), is_common=True))
        self.gone.update({*stored}.difference(names))

    def new_names(self, rule: StackRule, slices: _Slices) -> list[str]:
        """What is one for all slices, in the new form: once for each slice, or for the stack."""
        numbers = range(slices.total) if rule.is_split else [None]
        return [rule.new_name(slices.place, number) + slices.key for number in numbers]

    def add_values(self, rule: StackRule, by_suffix: Mapping[str, _Param]) -> None:
        for slices in _gathered(
            (
                place._replace(head=state.prefix + place.head),
                f".{state.key}",
                by_suffix[state.param].total,
                state.fqn,
            )
            for state in self.states(self.catalog.values)
            if state.param in by_suffix and (place := rule.place(state.param)) is not None
        ):
            names = self.new_names(rule, slices)
            values = [self.catalog.values[fqn] for fqn in slices.names.values()]
            if not rule.is_split:
                # For the problem that it notes where a slice is missing.
                self.is_complete(rule, slices)
            if any(value != values[0] for value in values):
                self.problems.append(f"{names[0]}: differs between its slices, and is one for all")
            self.values |= dict.fromkeys(names, values[0])
            self.gone_values.update({*slices.names.values()}.difference(names))

    def regrouped(
        self, rule: StackRule, fqn: str, by_suffix: Mapping[str, _Param]
    ) -> list[dict[str, Any]]:
        """The param groups `fqn` with the names of parameters in the new form."""
        groups = []
        rows = []  # of each slice of a stack, with the number of its group for a name
        # All slices of a stack become one entry, where the first of them stood.
        listed: set[str] = set()
        for index, group in enumerate(self.values[fqn]):
            params: dict[str, None] = {}
            for name in group["params"]:
                place, param = rule.place(name), by_suffix.get(name)
                if place is None or param is None:
                    params[name] = None
                elif rule.is_split:
                    params |= {rule.new_name(place, n): None for n in range(param.total)}
                else:
                    stacked = rule.new_name(place)
                    params |= {} if stacked in listed else {stacked: None}
                    listed.add(stacked)
                    rows.append((place, f" in {fqn}", param.total, str(index)))
            groups.append({**group, "params": [*params]})
        for slices in _gathered(rows):
            # As above: a stack needs all of its slices in the groups, too.
            self.is_complete(rule, slices)
            if len(numbers := sorted({int(index) for index in slices.names.values()})) > 1:
                self.problems.append(
                    f"{fqn}: the slices of {rule.new_name(slices.place)} are in groups {numbers}, "
                    "and one parameter is in one group"
                )
        return groups


def _by_suffix(known: Mapping[str, _Param]) -> dict[str, _Param]:
    """By every name that an optimizer may have for a parameter: its full one, or a module's own,
    where that means parameters of one shape only.
    """
    by_suffix: dict[str, _Param] = {}
    ambiguous: set[str] = set()
    for fqn, param in known.items():
        rest = fqn
        while rest:
            if by_suffix.setdefault(rest, param) != param and rest != fqn:
                ambiguous.add(rest)
            rest = rest.partition(".")[2]
    return {rest: param for rest, param in by_suffix.items() if rest not in ambiguous}
