"""Memory that takes a tensor of the other form, as memory that takes what a checkpoint has.

A slice is box `[i]` of its stack, so its pieces have a dim more there. A piece of a stack is cut
into pieces of its slices: a box at every index of its first dim, a span where a slice ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from ckpt.errors import Mismatch
from ckpt.layout.holdings import of_view, shaped
from ckpt.layout.memory import local_view
from ckpt.layout.piece import Holding, Piece
from ckpt.layout.region import Box, Region, Shape, Span
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
    restacked = restack(catalog, ((old, new) for new, old in stacks.items()))
    stored = partial(_in_stored_form, origins=restacked.origins)
    return restacked.catalog, restacked.problems, stored


def _in_stored_form(binding: Binding, origins: Mapping[str, Origin]) -> Binding:
    """`binding`, of the catalog that was restacked, with what the checkpoint really has.

    What is common to all slices is compared, and given to the stack, before anything is installed.
    """
    moving = _Moving(origins)
    plain, others = [], []
    for some in binding.plain:
        left, own = some.without(origins)
        plain.append(left)
        others += own
    others += binding.others
    moved = [stored for holding in others for stored in moving.moved(holding)]
    return replace(binding, plain=plain, others=moved, steps=[*moving.steps, *binding.steps])


class _Moving:
    """Moves holdings to the names and regions of the checkpoint; `steps` follow their filling."""

    def __init__(self, origins: Mapping[str, Origin]) -> None:
        self.origins = origins
        self.steps: list[Callable[[], None]] = []

    def moved(self, holding: Holding) -> Iterator[Holding]:
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
            elif origin.number is not None:
                yield _lifted(holding, piece, view, origin)
            else:
                yield from _cut(holding, piece, view, origin)

    def common(
        self, holding: Holding, piece: Piece, view: torch.Tensor, origin: Origin
    ) -> Iterator[Holding]:
        """One for all: where the checkpoint has several, each is read, and they are compared."""
        if len(origin.stored) == 1:
            yield of_view(holding, piece._replace(fqn=origin.stored[0]), view)
            return
        every = [(fqn, torch.empty_like(view)) for fqn in origin.stored]
        for fqn, target in every:
            yield of_view(holding, piece._replace(fqn=fqn), target)
        first_fqn, first = every[0]

        def compare() -> None:
            for fqn, other in every[1:]:
                if not torch.equal(_bits(other), _bits(first)):
                    raise Mismatch(
                        [
                            f"{piece.fqn}: its slices have different ones in the checkpoint, "
                            f"{first_fqn} {first.item()} and {fqn} {other.item()}, and a stack has "
                            "one for all; load into slices, or leave the optimizer out with skip="
                        ]
                    )
            view.copy_(first)

        self.steps.append(compare)


def _bits(number: torch.Tensor) -> torch.Tensor:
    return number.reshape(1).view(torch.uint8)  # NaN is equal to itself then


def _lifted(holding: Holding, piece: Piece, view: torch.Tensor, origin: Origin) -> Holding:
    """A piece of a slice, as one of the stack."""
    index, shape, region = origin.number or 0, piece.global_shape, piece.region
    if isinstance(region, Span):
        before = index * math.prod(shape)
        lifted: Region = Span(region.start + before, region.stop + before)
    else:
        view = shaped(view, region.shape).unsqueeze(0)
        lifted = Box((index, *region.offset), (1, *region.shape))
    of_stack = piece._replace(
        fqn=origin.stored[0], global_shape=(origin.total, *shape), region=lifted
    )
    return of_view(holding, of_stack, view)


def _cut(holding: Holding, piece: Piece, view: torch.Tensor, origin: Origin) -> Iterator[Holding]:
    """A piece of a stack, as pieces of its slices."""
    shape: Shape = piece.global_shape[1:]
    one = piece._replace(global_shape=shape)
    region = piece.region
    if isinstance(region, Box):
        view = shaped(view, region.shape)
        inside = Box(region.offset[1:], region.shape[1:])
        for row in range(region.shape[0]):
            fqn = origin.stored[region.offset[0] + row]
            yield of_view(holding, one._replace(fqn=fqn, region=inside), view.select(0, row))
        return
    view = view.view(-1)
    numel = math.prod(shape)
    for number in range(region.start // numel, -(-region.stop // numel)):
        start = max(region.start, number * numel)
        stop = min(region.stop, (number + 1) * numel)
        span = Span(start - number * numel, stop - number * numel)
        memory = view[start - region.start : stop - region.start]
        yield of_view(holding, one._replace(fqn=origin.stored[number], region=span), memory)
