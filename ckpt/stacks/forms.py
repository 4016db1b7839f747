"""How rules of `stacks=` are written, and where they hold in a name.

    experts.{}.weight             slices: the whole has a dim more, the first; slice i is box [i]
    q_proj:8 + k_proj + v_proj    parts, one after the other along dim 0, here the first of 8 rows
    gate + up @1                  along dim 1
    kernel^T                      the last two dims swapped; of one dim, a tensor as it is

A rule with several of these is several steps, each of which sees what the one before has made.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from ckpt.errors import CheckpointError

NUMBER = "{}"


class StackPlace(NamedTuple):
    """Where a rule holds in a name: what is before and after, and the number of the part."""

    head: str
    tail: str
    number: int | None


class RuleSide(NamedTuple):
    """One side of a step: a whole, its slices, or its parts along `dim`, some of whose `sizes` are
    stated.
    """

    names: tuple[str, ...]
    sizes: tuple[int | None, ...] = ()
    dim: int | None = None
    is_transposed: bool = False

    @property
    def text(self) -> str:
        """For messages."""
        return " + ".join(self.names)

    @property
    def is_many(self) -> bool:
        """Whether it is what a whole consists of."""
        return self.dim is not None or NUMBER in self.names[0]

    def place(self, name: str) -> StackPlace | None:
        """Where `name` has this form; None where it does not."""
        for number, own in enumerate(self.names):
            if match := _pattern(own).fullmatch(name):
                if NUMBER in own:
                    number = int(match["number"])
                is_part = self.is_many or self.is_transposed
                return StackPlace(
                    match["head"] or "", match["tail"] or "", number if is_part else None
                )
        return None


class StackRule(NamedTuple):
    """What a checkpoint calls `old` is to be `new`; one of them consists of the other's parts, or
    is its transpose. `text` is for messages.
    """

    old: RuleSide
    new: RuleSide
    text: str

    @property
    def is_split(self) -> bool:
        """Whether a whole becomes its parts."""
        return self.new.is_many

    @property
    def is_transposed(self) -> bool:
        """Whether a tensor becomes its transpose."""
        return self.old.is_transposed

    @property
    def back(self) -> StackRule:
        """The rule in the other direction."""
        old, new = self.new, self.old
        if self.is_transposed:
            # The old side alone says that a step transposes.
            old, new = old._replace(is_transposed=True), new._replace(is_transposed=False)
        return StackRule(old, new, self.text)

    def place(self, name: str) -> StackPlace | None:
        """Where `name` has the old form; None where it does not."""
        # "experts" is in "experts.0.weight", too, which is a slice already.
        return None if self.is_split and self.new.place(name) else self.old.place(name)

    def new_name(self, place: StackPlace, number: int | None = None) -> str:
        """The name in the new form, of part `number` where it is one of parts."""
        new = self.new.names[0 if number is None or self.new.dim is None else number]
        new = new if number is None else new.replace(NUMBER, str(number))
        return f"{place.head}{new}{place.tail}"


@cache
def _pattern(form: str) -> re.Pattern[str]:
    # Without leading zeros: `1` and `01` would be the same slice.
    middle = re.escape(form).replace(re.escape(NUMBER), "(?P<number>0|[1-9][0-9]*)")
    # The shortest head: where a name has a form twice, the first counts.
    return re.compile(rf"(?P<head>(?:.*?\.)?){middle}(?P<tail>(?:\..*)?)", re.DOTALL)


_SIDE = re.compile(r"(?P<parts>.*?)(?:\s*@\s*(?P<dim>\d+))?", re.DOTALL)
_PART = re.compile(r"\s*(?P<name>.*?)(?P<transposed>\^T)?(?::(?P<size>\d+))?\s*", re.DOTALL)


class _Term(NamedTuple):
    name: str
    is_transposed: bool
    size: int | None

    @property
    def whole(self) -> str:
        """What its slices are called together on the way to another form."""
        return self.name.replace(f".{NUMBER}", "").replace(f"{NUMBER}.", "")


class _RuleText(NamedTuple):
    parts: list[_Term]
    dim: int | None

    @property
    def is_many(self) -> bool:
        return len(self.parts) > 1 or NUMBER in self.parts[0].name


def _side(text: str) -> _RuleText:
    """One side of a rule as it is written."""
    side = _SIDE.fullmatch(text)
    assert side is not None, "both groups may be empty"
    # With its spaces: a name may have a plus in it.
    matches = [_PART.fullmatch(part) for part in side["parts"].split(" + ")]
    parts = [
        _Term(m["name"], bool(m["transposed"]), int(m["size"]) if m["size"] else None)
        for m in matches
        if m is not None
    ]
    return _RuleText(parts, int(side["dim"]) if side["dim"] else None)


def steps_of(pairs: Iterable[tuple[str, str]]) -> list[list[StackRule]]:
    """The steps of each rule from names to new ones. Raises CheckpointError for what is no rule."""
    rules = list(pairs)
    problems = [
        f"the rule {old!r} to {new!r}: {problem}"
        for old, new in rules
        for problem in _problems_of(old, new, [other for other, _ in rules])
    ]
    if problems:
        raise CheckpointError(f"stacks=: {'; '.join(problems)}")
    return [_steps(old, new) for old, new in rules]


def _steps(old: str, new: str) -> list[StackRule]:
    text, many, whole = f"the rule {old!r} to {new!r}", _side(old), _side(new)
    # Written from the whole to its parts: made the other way round, and turned at the end.
    if is_back := whole.is_many or (whole.parts[0].is_transposed and not many.is_many):
        many, whole = whole, many
    steps, one = [], whole.parts[0]
    is_joined = len(many.parts) > 1
    for part in many.parts:
        # The last step gives the name, so that those before keep what the part is called.
        end = part.whole if is_joined or one.is_transposed else one.name
        if NUMBER in part.name:
            steps.append(StackRule(RuleSide((part.name,)), RuleSide((end,)), text))
        if part.is_transposed:
            of = end if NUMBER in part.name else part.name
            steps.append(StackRule(RuleSide((of,), is_transposed=True), RuleSide((end,)), text))
    end = one.name
    if is_joined:
        parts = RuleSide(
            tuple(part.whole for part in many.parts),
            tuple(part.size for part in many.parts),
            many.dim or 0,
        )
        steps.append(StackRule(parts, RuleSide((end,)), text))
    if one.is_transposed:
        last = end if is_joined else many.parts[0].whole
        steps.append(StackRule(RuleSide((last,), is_transposed=True), RuleSide((end,)), text))
    return [step.back for step in reversed(steps)] if is_back else steps


def _problems_of(old: object, new: object, every_old: Sequence[str]) -> Iterator[str]:
    if not (isinstance(old, str) and isinstance(new, str)):
        yield "expected names"
        return
    sides = (_side(old), _side(new))
    parts = [part for side in sides for part in side.parts]
    has_transposed = any(part.is_transposed for part in parts)
    counts = {part.name.count(NUMBER) for side in sides if side.is_many for part in side.parts}
    if sides[0].is_many == sides[1].is_many and not (has_transposed and not sides[0].is_many):
        yield (
            f"expected {NUMBER} once, in the name of slices, or parts joined by ' + ', on one "
            "side, and the name of the whole on the other"
        )
    elif counts - {0, 1} or len(counts) > 1:
        yield f"expected {NUMBER} once, or in none of the parts"
    elif any(
        (side.dim is not None or part.size is not None) and len(side.parts) == 1
        for side in sides
        for part in side.parts
    ):
        yield "expected @dim and sizes where parts are joined by ' + '"
    elif any(not between for part in parts for between in part.whole.split(".")):
        yield "expected names with something between their dots"
    elif len({part.whole for side in sides for part in side.parts if side.is_many}) < sum(
        len(side.parts) for side in sides if side.is_many
    ):
        yield "expected parts of different names"
    elif any(
        whole.parts[0].name == part.name
        for many, whole in (sides, sides[::-1])
        for part in many.parts
        if len(many.parts) > 1
    ):
        yield "expected another name for the whole than for its parts"
    elif every_old.count(old) > 1:
        yield "there is another one for the same name"
