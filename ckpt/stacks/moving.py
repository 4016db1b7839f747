"""Memory that takes a tensor of the other form, as memory that takes what a checkpoint has.

A slice is box `[i]` of its stack, so its pieces have a dim more there; a part is a box along a dim
that both have. A piece of a whole is cut into pieces of its parts. What is one run of elements here
and not there, such as a part of a column, is cut into boxes.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from ckpt.errors import CheckpointError, Mismatch
from ckpt.layout.holdings import of_view, shaped
from ckpt.layout.memory import local_view
from ckpt.layout.piece import Holding, Piece
from ckpt.layout.region import Box, Shape, Span, boxes_of
from ckpt.stacks.forms import Turn
from ckpt.stacks.rules import Origin, restack
from ckpt.state.binding import Binding
from ckpt.state.types import Catalog, Stacks


def in_form_of_state(
    catalog: Catalog, stacks: Stacks
) -> tuple[Catalog, Sequence[str], Callable[[Binding], Binding]]:
    """`catalog` in the form that `stacks` says, from names of a state to its names; why it cannot
    be, and what a binding to it fills of what is stored. Raises CheckpointError for what is no
    rule.
    """
    # `stacks` of a load go from the state's names to the checkpoint's, rules the other way.
    steps = restack(catalog, ((old, new) for new, old in stacks.items()))

    def stored(binding: Binding) -> Binding:
        # The last step has the state's form, the first one starts from what is stored.
        for step in reversed(steps):
            binding = _in_stored_form(binding, step.origins)
        return binding

    return steps[-1].catalog, steps[-1].problems, stored


def _in_stored_form(binding: Binding, origins: Mapping[str, Origin]) -> Binding:
    """`binding`, of the catalog that was restacked, with what the checkpoint really has.

    What is common to all slices is compared, and given to the stack, before anything is installed.
    """
    otherwise = "load into slices, or leave the optimizer out with skip="
    moving = Moving(origins, lambda problem: Mismatch(f"{problem}; {otherwise}"))
    plain, others = [], []
    for some in binding.plain:
        left, own = some.without(origins)
        plain.append(left)
        others += own
    others += binding.others
    moved = [stored for holding in others for stored in moving.moved(holding)]
    return replace(binding, plain=plain, others=moved, steps=[*moving.steps, *binding.steps])


class Moving:
    """Moves holdings to the names and regions of the checkpoint; `steps` follow their filling, and
    raise what `refused` makes of a problem.
    """

    def __init__(
        self, origins: Mapping[str, Origin], refused: Callable[[str], CheckpointError]
    ) -> None:
        self.origins, self.refused = origins, refused
        self.steps: list[Callable[[], None]] = []

    def moved(self, holding: Holding) -> Iterator[Holding]:
        """What is stored for `holding`, with the memory that each takes."""
        kept = tuple(piece for piece in holding.pieces if piece.fqn not in self.origins)
        if len(kept) == len(holding.pieces):
            yield holding
            return
        if kept:
            yield holding._replace(pieces=kept)
        for piece in holding.pieces:
            origin = self.origins.get(piece.fqn)
            if origin is None or not piece.local_region.numel:
                continue
            view = local_view(holding, piece)
            if origin.is_common:
                yield from self.common(holding, piece, view, origin)
            elif origin.turn is not None:
                yield from _turned(holding, piece, view, origin.stored[0], origin.turn)
            elif origin.number is not None:
                yield from _lifted(holding, piece, view, origin)
            else:
                yield from _cut(holding, piece, view, origin)

    def common(
        self, holding: Holding, piece: Piece, view: torch.Tensor, origin: Origin
    ) -> Iterator[Holding]:
        """One for all: where the checkpoint has several, each is read, and they are compared."""
        if len(origin.stored) == 1:
            yield of_view(holding, piece._replace(fqn=origin.stored[0]), view)
            return
        # In memory of their own, so that nothing of the state changes before they are compared.
        every = [(fqn, torch.empty_like(view)) for fqn in origin.stored]
        for fqn, target in every:
            yield of_view(holding, piece._replace(fqn=fqn), target)
        first_fqn, first = every[0]

        def compare() -> None:
            for fqn, other in every[1:]:
                if not torch.equal(_bits(other), _bits(first)):
                    raise self.refused(
                        f"{piece.fqn}: its slices have different ones in the checkpoint, "
                        f"{first_fqn} {first.item()} and {fqn} {other.item()}, and a stack has "
                        "one for all"
                    )
            view.copy_(first)

        self.steps.append(compare)


def _bits(number: torch.Tensor) -> torch.Tensor:
    return number.reshape(1).view(torch.uint8)  # NaN is equal to itself then


def _boxes(piece: Piece, view: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """A piece as boxes, each with its memory."""
    if isinstance(piece.region, Box):
        yield piece.region, shaped(view, piece.region.shape)
        return
    flat, start = view.view(-1), 0
    for box in boxes_of(piece.region, piece.global_shape):
        yield box, flat[start : start + box.numel].view(box.shape)
        start += box.numel


def _with(values: Shape, dim: int | None, one: int) -> Shape:
    """`values` with `one` at `dim`, or before all of them (None)."""
    return (one, *values) if dim is None else (*values[:dim], one, *values[dim + 1 :])


def _lifted(
    holding: Holding, piece: Piece, view: torch.Tensor, origin: Origin
) -> Iterator[Holding]:
    """A piece of a part, as one of the whole."""
    start, dim = origin.starts[origin.number or 0], origin.dim
    shape, region = _with(piece.global_shape, dim, origin.starts[-1]), piece.region
    of_whole = piece._replace(fqn=origin.stored[0], global_shape=shape)
    if isinstance(region, Span) and not dim:
        # Along the first dim, or one in front, a run of the part is a run of the whole.
        before = start * math.prod(shape[1:])
        moved = Span(region.start + before, region.stop + before)
        yield of_view(holding, of_whole._replace(region=moved), view)
        return
    for (offset, sizes), memory in _boxes(piece, view):
        if dim is None:
            lifted, memory = Box((start, *offset), (1, *sizes)), memory.unsqueeze(0)
        else:
            lifted = Box(_with(offset, dim, offset[dim] + start), sizes)
        yield of_view(holding, of_whole._replace(region=lifted), memory)


def _cut(holding: Holding, piece: Piece, view: torch.Tensor, origin: Origin) -> Iterator[Holding]:
    """A piece of a whole, as pieces of its parts."""
    starts, dim, shape = origin.starts, origin.dim or 0, piece.global_shape
    region = piece.region
    if isinstance(region, Span) and not dim:
        flat, row = view.view(-1), math.prod(shape[1:])
        # Along the first dim, or one in front, a run of the whole is a run of each part.
        low, high = region.start, region.stop
        for number, one in _parts(origin, piece, low // row, -(-high // row)):
            start = max(low, starts[number] * row)
            stop = min(high, starts[number + 1] * row)
            span = Span(start - starts[number] * row, stop - starts[number] * row)
            memory = flat[start - low : stop - low]
            yield of_view(holding, one._replace(region=span), memory)
        return
    for (offset, sizes), whole in _boxes(piece, view):
        low, high = offset[dim], offset[dim] + sizes[dim]
        for number, one in _parts(origin, piece, low, high):
            start, stop = max(low, starts[number]), min(high, starts[number + 1])
            memory = whole.narrow(dim, start - low, stop - start)
            box = Box(_with(offset, dim, start - starts[number]), _with(sizes, dim, stop - start))
            if origin.dim is None:
                box, memory = Box(offset[1:], sizes[1:]), memory.select(0, 0)
            yield of_view(holding, one._replace(region=box), memory)


def _parts(origin: Origin, piece: Piece, low: int, high: int) -> Iterator[tuple[int, Piece]]:
    """The parts that have something of `low` to `high` along the dim, by number."""
    starts, dim, shape = origin.starts, origin.dim, piece.global_shape
    for number in range(bisect_right(starts, low) - 1, bisect_left(starts, high)):
        size = starts[number + 1] - starts[number]
        own = shape[1:] if dim is None else _with(shape, dim, size)
        # A rule may state a part of no rows, as in `k:0`.
        if size:
            yield number, piece._replace(fqn=origin.stored[number], global_shape=own)


def _turned(
    holding: Holding, piece: Piece, view: torch.Tensor, stored: str, turn: Turn
) -> Iterator[Holding]:
    """A piece of a turned tensor, as pieces of the one that is stored."""
    shape, dim = piece.global_shape, turn.dim
    one = piece._replace(fqn=stored, global_shape=turn.shape(shape))
    if not turn.heads and len(shape) < 2:
        yield of_view(holding, one, view)
        return
    for (offset, sizes), memory in _boxes(piece, view):
        if not turn.heads:
            box = Box(turn.shape(offset), turn.shape(sizes))
            yield of_view(holding, one._replace(region=box), memory.transpose(-1, -2))
            continue
        # Rows that follow each other here do not in the other form: each is a box of its own.
        for number in range(sizes[dim]):
            row = turn.row(offset[dim] + number, shape[dim])
            box = Box(_with(offset, dim, row), _with(sizes, dim, 1))
            yield of_view(holding, one._replace(region=box), memory.narrow(dim, number, 1))
