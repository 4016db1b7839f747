"""Tensors of a state with more or fewer rows than the checkpoint: what `resize=` does.

Dim 0 alone may differ, so the elements of both are in one row-major order, one of them cut off. A
box or a span of the state is one of the checkpoint up to there; what lies behind are new rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Literal, NamedTuple, TypeAlias

import torch

from ckpt.layout.holdings import WholeTensors, of_view, shaped
from ckpt.layout.memory import local_view
from ckpt.layout.piece import Holding, Piece
from ckpt.layout.region import Box, Region, Shape, Span

RowRule: TypeAlias = Literal["zeros", "mean", "init"]
Resize: TypeAlias = Mapping[str, RowRule] | None
"""By the name of a tensor, or of all below it, what new rows are."""


class StoredRows(NamedTuple):
    """How many rows the checkpoint has of a tensor, and what the missing ones become."""

    number: int
    rule: RowRule


class NewRows(NamedTuple):
    """Memory for `region` of a tensor, whose rows have `row_shape`; the checkpoint, which calls the
    tensor `fqn`, lacks it.
    """

    fqn: str
    rule: RowRule
    view: torch.Tensor
    region: Region
    row_shape: Shape

    def fill(self, means: Mapping[str, Sequence[float]]) -> None:
        """Write zeros or the mean of all stored rows, in row-major order by name; "init" leaves
        the state's own.
        """
        if self.rule == "zeros":
            self.view.zero_()
        elif self.rule == "mean":
            row = torch.tensor(means[self.fqn], dtype=torch.float64)
            if isinstance(self.region, Span):
                # A span may begin and end within a row.
                row = row[torch.arange(self.region.start, self.region.stop) % len(row)]
            else:
                row = row.view(self.row_shape)
                for dim, start in enumerate(self.region.offset[1:]):
                    row = row.narrow(dim, start, self.region.shape[dim + 1])
            self.view.copy_(row.to(self.view.dtype))


def with_rows(shape: Shape, of_param: Shape, stored_rows: int | None) -> Shape | None:
    """The shape that state of `shape` has for a parameter that is resized to `of_param`; None where
    it is unclear which of its dims are the `stored_rows`.
    """
    if not shape or shape == of_param:
        return shape
    if stored_rows is None:
        return None
    if shape == (stored_rows, *of_param[1:]):
        return of_param
    # State that has no dim of so many rows does not follow them.
    if stored_rows not in shape:
        return shape
    # One number per row, unless another dim of the parameter is as long: then either may be meant.
    is_column = shape[0] == stored_rows and math.prod(shape) == stored_rows
    return (of_param[0], *shape[1:]) if is_column and stored_rows not in of_param[1:] else None


def in_stored_rows(
    plain: Sequence[WholeTensors], others: Sequence[Holding], resized: Mapping[str, StoredRows]
) -> tuple[list[WholeTensors], list[Holding], list[NewRows]]:
    """What a load fills, cut to the rows that the checkpoint has of `resized`, and the rest."""
    cut = [some.without(resized) for some in plain]
    kept: list[Holding] = []
    new: list[NewRows] = []
    for holding in [*chain.from_iterable(own for _, own in cut), *others]:
        if pieces := tuple(piece for piece in holding.pieces if piece.fqn not in resized):
            kept.append(holding._replace(pieces=pieces))
        for piece in holding.pieces:
            if piece.fqn in resized and piece.local_region.numel:
                _cut(holding, piece, resized[piece.fqn], kept, new)
    return [left for left, _ in cut], kept, new


def _cut(
    holding: Holding, piece: Piece, rows: StoredRows, kept: list[Holding], new: list[NewRows]
) -> None:
    """Divide a piece where the rows of the checkpoint end."""
    view, region, row = local_view(holding, piece), piece.region, piece.global_shape[1:]
    there: Region
    beyond: Region
    if isinstance(region, Box):
        view = shaped(view, region.shape)
        count = min(max(rows.number - region.offset[0], 0), region.shape[0])
        start, rest = region.offset[0] + count, region.offset[1:]
        there = Box(region.offset, (count, *region.shape[1:]))
        beyond = Box((start, *rest), (region.shape[0] - count, *region.shape[1:]))
    else:
        view = view.view(-1)
        count = min(max(rows.number * math.prod(row) - region.start, 0), region.numel)
        there = Span(region.start, region.start + count)
        beyond = Span(region.start + count, region.stop)
    if there.numel:
        stored = piece._replace(global_shape=(rows.number, *row), region=there)
        kept.append(of_view(holding, stored, view[:count]))
    if beyond.numel:
        new.append(NewRows(piece.fqn, rows.rule, view[count:], beyond, row))
