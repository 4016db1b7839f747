"""Targets: what ranks send to each other, on connections that others may reach.

They have passed the token of the job by then. So joint parts are decoded and no more: rules that
contradict each other are an error of all ranks, whatever raises it. A first message on a connection
names who connects.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from functools import cache

from ckpt.errors import CheckpointError
from ckpt.format.columns import pack_map, unpack_map
from ckpt.format.joint_codec import (
    SentStructure,
    StructureReader,
    decode_rest,
    digest_of_structure,
    encode_rest,
    encode_structure,
)
from ckpt.format.part import JointRest, JointStructure, Part, merge_structures
from ckpt.saving.task import JointParts
from ckpt.telemetry.record import RankReport
from ckpt.world.base import joined, split
from ckpt.world.link import Frame, FrameKind, FrameReader, card_of
from ckpt.world.liveness import Card, ProcessIdentity
from tests.format.many_parts import parts_of, random_parts
from tests.fuzz.target import Target

RANKS = 3
REPORT = RankReport((), 0.5, 0)
_COUNT_NBYTES = 4


@cache
def _parts() -> Sequence[Part]:
    return parts_of(random_parts(3, RANKS, tensors=4))


@cache
def _others() -> tuple[JointStructure, JointRest]:
    """What all ranks but the first contribute."""
    merge = merge_structures([part.structure for part in _parts()[1:]])
    return merge.structure, merge.rest([part.rest for part in _parts()[1:]])


def _structures() -> list[bytes]:
    """Before it is compressed: the length of the tensors, these, and the rest."""
    fields = unpack_map(encode_structure(_others()[0]))
    tensors = bytes(fields["tensors"])
    length = len(tensors).to_bytes(_COUNT_NBYTES, "little")
    return [length + tensors + zlib.decompress(fields["packed"])]


def _sealed_structure(data: bytes) -> bytes:
    stop = _COUNT_NBYTES + int.from_bytes(data[:_COUNT_NBYTES], "little")
    packed = zlib.compress(data[stop:], level=1)
    return pack_map({"tensors": data[_COUNT_NBYTES:stop], "packed": packed})


def _read_structure(data: bytes) -> None:
    StructureReader([_parts()[0].structure]).read(data)


def _rests() -> list[bytes]:
    return [encode_rest(_others()[1], bytes(32))]


def _read_rest(data: bytes) -> None:
    decode_rest(data, SentStructure(_others()[0], bytes(32)))


def _messages() -> list[bytes]:
    """What the other ranks send, one above the other, as one message to rank 0."""
    above = JointParts().payload(_parts()[2], REPORT, [])
    return [JointParts().payload(_parts()[1], REPORT, [above])]


def _read_message(data: bytes) -> None:
    _, rest = split(data)
    structure, rest = split(rest)
    decode_rest(rest, StructureReader().read(structure))


def _sealed_message(data: bytes) -> bytes:
    """With the digest of its structure in the rest."""
    reports, rest = split(data)
    structure, rest = split(rest)
    return joined(reports, joined(structure, _with_digest(rest, digest_of_structure(structure))))


def _with_digest(rest: bytes, digest: bytes) -> bytes:
    """A rest, of a part or of a joint one, with the digest of another structure."""
    try:
        fields = {name: bytes(data) for name, data in unpack_map(rest).items()}
    except CheckpointError:
        return rest
    return pack_map({**fields, "structure_digest": digest})


def sealed_part(data: bytes) -> bytes:
    """With the digest of its structure."""
    structure, rest = split(data)
    digest = hashlib.sha256(structure).digest()
    return joined(structure, _with_digest(rest, digest))


def _cards() -> list[bytes]:
    who = ProcessIdentity("machine", 7, "123")
    card = Card(3, "token", ("10.0.0.3", "host"), 4711, "network", who).encode()
    again = Frame(FrameKind.AGAIN, bytes(16), 2, "token", (7).to_bytes(8, "little") + card)
    return [Frame(FrameKind.HELLO, bytes(16), 1, "token", card).encode(), again.encode()]


def _read_greeting(data: bytes) -> None:
    for frame in FrameReader(16 << 10).feed(data):
        if frame.kind in (FrameKind.HELLO, FrameKind.AGAIN, FrameKind.KNOCK):
            received, card = card_of(frame)
            assert received >= 0 and Card.decode(card.encode()) == card


TARGETS = (
    Target("joint.structure", _read_structure, _structures, _sealed_structure),
    Target("joint.rest", _read_rest, _rests),
    Target("joint.message", _read_message, _messages, _sealed_message),
    Target("greeting", _read_greeting, _cards, refusals=(ValueError,)),
)
