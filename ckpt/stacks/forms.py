"""How rules of `stacks=` are written, and where they hold in a name.

    experts.{}.weight             slices: the whole has a dim more, the first; slice i is box [i]
    q_proj:8 + k_proj + v_proj    parts, one after the other along dim 0, here the first of 8 rows
    gate + up @1                  along dim 1
    kernel^T                      the last two dims swapped; of one dim, a tensor as it is
    wq^I8, w13^I @1               interleaved: rows 2i and 2i + 1, in each of 8 heads, where the
                                  other side has rows i of two halves; along dim 0 or @ another

A rule with several of these is several steps, each of which sees what the one before has made.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch

from ckpt.errors import CheckpointError
from ckpt.layout.region import Shape

NUMBER = "{}"


class StackPlace(NamedTuple):
    """Where a rule holds in a name: what is before and after, and the number of the part."""

    head: str
    tail: str
    number: int | None


class Turn(NamedTuple):
    """How elements move within a tensor: its last two dims are swapped (no `heads`), or what is
    interleaved along `dim` becomes two halves, in each of `heads`; with `is_back`, halves are
    interleaved.
    """

    heads: int = 0
    dim: int = 0
    is_back: bool = False

    @property
    def back(self) -> Turn:
        """The turn in the other direction."""
        return self._replace(is_back=not self.is_back)

    def problem(self, shape: Shape) -> str | None:
        """Why a tensor of `shape` cannot be turned so."""
        if self.heads and len(shape) <= self.dim:
            return f"no dim {self.dim}"
        if self.heads and shape[self.dim] % (2 * self.heads):
            return f"not an even number of rows for each of {self.heads} heads in dim {self.dim}"
        return None

    def shape(self, shape: Shape) -> Shape:
        """That of the turned tensor; of offsets too, where dims are swapped."""
        if self.heads or len(shape) < 2:
            return shape
        return (*shape[:-2], shape[-1], shape[-2])

    def row(self, row: int, size: int) -> int:
        """Where a row of the turned tensor is in the one that is turned, which has `size`."""
        half = size // self.heads // 2
        start, rest = row - row % (2 * half), row % (2 * half)
        if self.is_back:
            return start + rest % 2 * half + rest // 2
        return start + rest % half * 2 + rest // half

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The turned tensor, row-major."""
        shape = tuple(tensor.shape)
        if not self.heads:
            return tensor if len(shape) < 2 else tensor.transpose(-1, -2).contiguous()
        half = shape[self.dim] // self.heads // 2
        pair = (2, half) if self.is_back else (half, 2)
        apart = tensor.reshape(*shape[: self.dim], self.heads, *pair, *shape[self.dim + 1 :])
        return apart.transpose(self.dim + 1, self.dim + 2).reshape(shape)


class RuleSide(NamedTuple):
    """One side of a step: a whole, its slices, or its parts along `dim`, some of whose `sizes` are
    stated; or what is turned.
    """

    names: tuple[str, ...]
    sizes: tuple[int | None, ...] = ()
    dim: int | None = None
    turn: Turn | None = None

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
                is_part = self.is_many or self.turn is not None
                return StackPlace(
                    match["head"] or "", match["tail"] or "", number if is_part else None
                )
        return None


class StackRule(NamedTuple):
    """What a checkpoint calls `old` is to be `new`; one of them consists of the other's parts, or
    is the other, turned. `text` is for messages.
    """

    old: RuleSide
    new: RuleSide
    text: str

    @property
    def is_split(self) -> bool:
        """Whether a whole becomes its parts."""
        return self.new.is_many

    @property
    def back(self) -> StackRule:
        """The rule in the other direction."""
        old, new = self.new, self.old
        if new.turn is not None:
            # The old side alone says how a step turns.
            old, new = old._replace(turn=new.turn.back), new._replace(turn=None)
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
_PART = re.compile(r"\s*(?P<name>.*?)(?:\^(?P<turn>T|I(?!0)\d*))?(?::(?P<size>\d+))?\s*", re.DOTALL)


class _Term(NamedTuple):
    name: str
    turn: Turn | None
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
    dim = int(side["dim"]) if side["dim"] else None
    turns = {None: None, "T": Turn()}
    parts = [
        _Term(
            m["name"],
            turns[m["turn"]] if m["turn"] in turns else Turn(int(m["turn"][1:] or 1), dim or 0),
            int(m["size"]) if m["size"] else None,
        )
        for m in matches
        if m is not None
    ]
    return _RuleText(parts, dim)


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
    if is_back := whole.is_many or (whole.parts[0].turn and not many.is_many):
        many, whole = whole, many
    steps, one = [], whole.parts[0]
    is_joined = len(many.parts) > 1
    for part in many.parts:
        # The last step gives the name, so that those before keep what the part is called.
        end = part.whole if is_joined or one.turn else one.name
        if NUMBER in part.name:
            steps.append(StackRule(RuleSide((part.name,)), RuleSide((end,)), text))
        if part.turn:
            of = end if NUMBER in part.name else part.name
            steps.append(StackRule(RuleSide((of,), turn=part.turn), RuleSide((end,)), text))
    end = one.name
    if is_joined:
        parts = RuleSide(
            tuple(part.whole for part in many.parts),
            tuple(part.size for part in many.parts),
            many.dim or 0,
        )
        steps.append(StackRule(parts, RuleSide((end,)), text))
    if one.turn:
        last = end if is_joined else many.parts[0].whole
        steps.append(StackRule(RuleSide((last,), turn=one.turn.back), RuleSide((end,)), text))
    return [step.back for step in reversed(steps)] if is_back else steps


def _problems_of(old: object, new: object, every_old: Sequence[str]) -> Iterator[str]:
    if not (isinstance(old, str) and isinstance(new, str)):
        yield "expected names"
        return
    sides = (_side(old), _side(new))
    parts = [part for side in sides for part in side.parts]
    has_turn = any(part.turn for part in parts)
    counts = {part.name.count(NUMBER) for side in sides if side.is_many for part in side.parts}
    if sides[0].is_many == sides[1].is_many and not (has_turn and not sides[0].is_many):
        yield (
            f"expected {NUMBER} once, in the name of slices, or parts joined by ' + ', on one "
            "side, and the name of the whole on the other"
        )
    elif counts - {0, 1} or len(counts) > 1:
        yield f"expected {NUMBER} once, or in none of the parts"
    elif any(
        (part.size is not None or (side.dim is not None and not (part.turn and part.turn.heads)))
        and len(side.parts) == 1
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
