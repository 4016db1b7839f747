"""Comparison of what a state dict has once for several ranks: where they differ, all ranks raise.

Values are compared by one digest of all of them. Of optimizer state the ranks compare what they
must agree on, see `Holding.must_agree`: counts and small plain tensors. The `step` of a sharded
parameter is given by the rank that holds the parameter's first element, and every rank has one of
its own: a witness of what that one gives. Digests travel in the message of the values.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

from ckpt.errors import InvalidState, Mismatch
from ckpt.format.codec import decode_values, encode_values
from ckpt.format.joint_manifest import disagreement, or_per_rank
from ckpt.layout.assign import is_small_and_agreed
from ckpt.layout.piece import Holding
from ckpt.saving.replica_check import digests_of
from ckpt.world.base import World


class _Tensor(NamedTuple):
    """A tensor of one rank. Other ranks may have another model with tensors of the same names, so
    `owners` are part of the key: the ranks that it is laid out over (see `Owned`).

    `is_given`: this rank gives it to the dict. Otherwise another rank gives one of the name, which
    has to be equal.
    """

    fqn: str
    owners: tuple[int, ...] | None
    is_given: bool


_Key = tuple[str, tuple[int, ...] | None]  # name and owners

Agreed = Mapping[_Tensor, int]
"""The crc32c of each tensor of one rank on which the ranks must agree."""
NOTHING: Agreed = {}


def agreed_state(given: Iterable[Holding], witnesses: Iterable[Holding]) -> Agreed:
    """Digests of what is small and must agree, as its memory is now."""
    tensors: list[_Tensor] = []
    pieces = []
    for holdings, is_given in ((given, True), (witnesses, False)):
        for holding in holdings:
            for piece in holding.pieces:
                # Larger state follows from equal parameters and gradients: reading it would cost a
                # pass.
                if is_small_and_agreed(holding, piece):
                    tensors.append(_Tensor(piece.fqn, holding.owners, is_given))
                    pieces.append((holding, piece))
    return dict(zip(tensors, digests_of(pieces).tolist(), strict=True))


def check_values(
    world: World,
    values: Mapping[str, Any],
    agreed: Agreed = NOTHING,
    *,
    each_has_its_own: bool = False,
) -> None:
    """Raise on all ranks, naming what differs, unless all have the same values. One round.

    Raises Mismatch for `values`. Raises InvalidState where `agreed` differs, or where a rank has a
    tensor that no rank gives. With `each_has_its_own`, ranks that all give theirs may differ.
    """
    encoded = encode_values(dict(values))
    digest = hashlib.sha256(encoded).digest()
    messages = world.gather("values", digest + _encoded(agreed))
    # Digests are enough while nothing differs; the values themselves cost a second round, once.
    if len({message[: len(digest)] for message in messages}) > 1:
        _refuse_values(world, encoded)
    # Most ranks send the same: each message is decoded once.
    ranks_by_message: dict[bytes, list[int]] = {}
    for rank, message in enumerate(messages):
        ranks_by_message.setdefault(message[len(digest) :], []).append(rank)
    ranks_of: dict[_Key, dict[int | None, list[int]]] = {}
    given: set[_Key] = set()
    witnessed: set[_Key] = set()
    for part, ranks in ranks_by_message.items():
        for (fqn, owners, is_given), crc in _decoded(part).items():
            key = (fqn, owners)
            ranks_of.setdefault(key, {}).setdefault(crc, []).extend(ranks)
            (given if is_given else witnessed).add(key)
    problems = []
    for key, by_digest in ranks_of.items():
        fqn = key[0]
        if key not in given:
            problems.append(
                f"{fqn}: ranks {sorted(chain.from_iterable(by_digest.values()))} have it, and the "
                "rank that holds the parameter's first element, which gives it to the dict, has "
                "none; set it on all ranks that have state of the parameter" + or_per_rank(fqn)
            )
        elif len(by_digest) > 1 and (key in witnessed or not each_has_its_own):
            groups = {digest: sorted(ranks) for digest, ranks in by_digest.items()}
            text = disagreement(fqn, groups, "a state dict has one for all")
            problems.append(text + or_per_rank(fqn, values))
    if problems:
        raise InvalidState(sorted(problems))


def _refuse_values(world: World, encoded: bytes) -> None:
    differ: dict[str, list[int]] = {}
    everybody = [decode_values(part) for part in world.gather("differing values", encoded)]
    for rank, theirs in enumerate(everybody):
        for fqn in {*theirs, *everybody[0]}:
            # As bytes: a NaN equals itself there, and True is not 1.
            if encode_values(theirs.get(fqn)) != encode_values(everybody[0].get(fqn)):
                differ.setdefault(fqn, []).append(rank)
    raise Mismatch(
        [
            f"{fqn}: ranks {ranks} have another value than rank 0; all ranks need the same "
            f"optimizer and the same dict{or_per_rank(fqn, everybody[0])}"
            for fqn, ranks in sorted(differ.items())
        ]
    )


def _encoded(agreed: Agreed) -> bytes:
    """The same on ranks that have the same. Groups of ranks are few and long: they are counted."""
    number_of: dict[tuple[int, ...] | None, int] = {}
    tensors = sorted(agreed, key=lambda tensor: (tensor.fqn, tensor.is_given))
    rows = [
        (fqn, number_of.setdefault(owners, len(number_of)), is_given)
        for fqn, owners, is_given in tensors
    ]
    digests = [agreed[tensor] for tensor in tensors]
    return zlib.compress(json.dumps([list(number_of), rows, digests]).encode(), 1)


def _decoded(part: bytes) -> Agreed:
    groups, rows, digests = json.loads(zlib.decompress(part))
    owners = [None if group is None else tuple(group) for group in groups]
    tensors = [_Tensor(fqn, owners[number], is_given) for fqn, number, is_given in rows]
    return dict(zip(tensors, digests, strict=True))
