"""From tensors, and from what engines own, to holdings under full names."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import compress
from operator import not_
from typing import Any, NamedTuple

import torch

from ckpt.layout.kind import Kind
from ckpt.layout.modules import describe_tensor
from ckpt.layout.piece import Holding, Owned, Piece
from ckpt.layout.plain import BY_ALL, Held, Ranks, with_copies
from ckpt.layout.region import Box, Shape, whole
from ckpt.layout.sharded_tensor import describe_sharded_tensor, is_sharded_tensor
from ckpt.layout.tensor import are_plain, is_plain

Named = tuple[str, torch.Tensor]


def holdings_of(
    owned: Owned,
    local: torch.Tensor,
    name_of: Callable[[str], str | None],
    *,
    kind: Kind,
    must_agree: bool = False,
) -> Iterator[Holding]:
    """`local`, laid out like `owned.local`, as holdings of its own dtype.

    `name_of` gives the full name for the name that a piece has in `owned`; pieces for which it
    gives None are left out.
    """
    dtype = local.dtype
    must_agree = must_agree or owned.must_agree
    for view in owned.views:
        pieces = []
        for piece in view.pieces:
            fqn = name_of(piece.fqn)
            if fqn is not None:
                # Not `_replace`, which takes 2.5 times as long: there are thousands of pieces.
                pieces.append(
                    Piece(
                        fqn,
                        piece.global_shape,
                        dtype,
                        piece.region,
                        piece.local_region,
                        piece.holders,
                    )
                )
        if pieces:
            shown = local
            if view.window is not None:  # the part that the pieces lie in, the same memory
                shape, stride, offset = view.window
                shown = local.as_strided(shape, stride, local.storage_offset() + offset)
            yield Holding(shown, tuple(pieces), kind, owned.synchronized, owned.owners, must_agree)


def tensor_holdings(
    fqn: str,
    tensor: torch.Tensor,
    kind: Kind,
    ranks: Ranks,
    *,
    held: Held | None = None,
    must_agree: bool = False,
) -> list[Holding]:
    """Any tensor as holdings under one name; a plain one is held as `held` says.

    `must_agree` is for plain ones alone: others say by themselves who has the same. Raises
    UnsupportedTensor, with the name, when it cannot take part.
    """
    owned = describe_tensor(fqn, tensor, ranks, held or BY_ALL)
    if held is None:
        owned = with_copies(owned, lambda name: name, ranks)
    must_agree = must_agree and is_plain(tensor)
    names = owned, owned.local, lambda name: name
    return list(holdings_of(*names, kind=kind, must_agree=must_agree))


def form_holdings(
    fqn: str, value: Any, kind: Kind, ranks: Ranks, *, shape: Shape | None
) -> list[Holding]:
    """A tensor of a state dict, in any form, as holdings. Raises UnsupportedTensor.

    `shape` is that of the live tensor of this name, which a flat local part stands for.
    """
    if not is_sharded_tensor(value):
        return tensor_holdings(fqn, value, kind, ranks)
    return [
        holding
        for shard in describe_sharded_tensor(fqn, value, ranks, shape)
        for holding in holdings_of(shard, shard.local, lambda name: name, kind=kind)
    ]


def of_view(holding: Holding, piece: Piece, view: torch.Tensor) -> Holding:
    """A part of `holding`: one piece that is all of `view`."""
    piece = piece._replace(local_region=whole(tuple(view.shape)))
    return holding._replace(local=view, pieces=(piece,))


def shaped(view: torch.Tensor, shape: Shape) -> torch.Tensor:
    """`view` in the shape of its region; a box may lie in flat memory."""
    return view if tuple(view.shape) == shape else view.view(shape)


class WholeTensors(NamedTuple):
    """Plain tensors that this rank has whole, as columns; no two are the same elements of memory.

    States of many thousand tensors consist of these, and a holding with a piece for each of them
    costs several times what a load does with it. `addresses` are where they start.
    """

    fqns: Sequence[str]
    tensors: Sequence[torch.Tensor]
    addresses: Sequence[int]
    holders: tuple[int, ...]
    held: Mapping[str, tuple[int, ...]]  # by name, where others hold a tensor; see `Ranks`

    def holdings(self, *, kept: bool) -> list[Holding]:
        """The same as holdings. Those that are to be `kept` never have the object itself, which
        may then go away before them.
        """
        holdings = []
        # There are few shapes; a region is made once for each.
        regions: dict[Shape, tuple[Shape, Box]] = {}
        kind = Kind.OTHER
        for fqn, tensor in zip(self.fqns, self.tensors, strict=True):
            size = tensor.shape
            known = regions.get(size)
            if known is None:
                shape = tuple(size)
                known = regions[size] = (shape, whole(shape))
            shape, box = known
            local = tensor.detach() if kept or tensor.requires_grad else tensor
            holders = self.held.get(fqn) or self.holders
            piece = Piece(fqn, shape, tensor.dtype, box, box, holders)
            holdings.append(Holding(local, (piece,), kind, False, ()))
        return holdings

    def without(self, names: Container[str]) -> tuple[WholeTensors, list[Holding]]:
        """Those that are not among `names`, and the others as holdings."""
        rows = [row for row, fqn in enumerate(self.fqns) if fqn in names]
        if not rows:
            return self, []
        left = self.only(sorted({*range(len(self.fqns))} - {*rows}))
        return left, self.only(rows).holdings(kept=False)

    def only(self, rows: Sequence[int]) -> WholeTensors:
        """Those in `rows`."""
        return WholeTensors(
            [self.fqns[row] for row in rows],
            [self.tensors[row] for row in rows],
            [self.addresses[row] for row in rows],
            self.holders,
            self.held,
        )


def whole_tensors(
    tensors: Sequence[Named], ranks: Ranks
) -> tuple[WholeTensors, dict[str, str], list[Named]]:
    """The plain ones of `tensors`, aliases of those that share their memory, and the others.

    Two tensors are tied when they are the same elements of the same memory.
    """
    others: list[Named] = []
    if not are_plain([tensor for _, tensor in tensors]):
        plain = [is_plain(tensor) for _, tensor in tensors]
        others = list(compress(tensors, map(not_, plain)))
        tensors = list(compress(tensors, plain))
    fqns, whole = map(list, zip(*tensors, strict=True)) if tensors else ([], [])
    addresses = [tensor.data_ptr() for tensor in whole]
    columns = WholeTensors(fqns, whole, addresses, ranks.everyone, ranks.held)
    # Almost always no two begin at one address, so nothing is tied.
    if len(set(addresses)) == len(addresses):
        return columns, {}, others
    first_rows, aliases = _untied(columns)
    return columns.only(first_rows), aliases, others


def _untied(tensors: WholeTensors) -> tuple[list[int], dict[str, str]]:
    """The rows of tensors that are tied to none before them, and the aliases of the rest."""
    rows = []
    aliases: dict[str, str] = {}
    by_address: dict[int, tuple[int, str, torch.Tensor]] = {}
    for row, (fqn, tensor, address) in enumerate(zip(*tensors[:3], strict=True)):
        # The address finds candidates; a view that begins where its base does is another tensor.
        first_row, first_fqn, first = by_address.setdefault(address, (row, fqn, tensor))
        if first is tensor:
            is_tied = first_row != row
        else:
            like = tensor.shape, tensor.stride(), tensor.dtype
            is_tied = tensor.numel() > 0 and like == (first.shape, first.stride(), first.dtype)
        if is_tied:
            aliases[fqn] = first_fqn
        else:
            rows.append(row)
    return rows, aliases
