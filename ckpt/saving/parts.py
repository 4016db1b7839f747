"""The parts of all ranks, as the coordinator has them.

Note "known structures": while only values change, the structure of a part stays the same from save
to save, and so does everything that follows from the structures of all: the table of chunks, the
proof that they cover every tensor, and most of the manifest's bytes. Each rank sends its structure
when it has changed; the coordinator keeps what it has worked out until any of them does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ckpt.format.manifest_codec import ManifestEncoder
from ckpt.format.merging import KeptMerge
from ckpt.format.part import Part
from ckpt.format.part_codec import PartReader, PartStructure
from ckpt.saving.joint_parts import PARTS, JointParts
from ckpt.saving.messages import joined, split
from ckpt.telemetry.history import RankReport
from ckpt.world.base import World


class Structures:
    """The structures of the parts of all ranks; see note "known structures".

    Sender and coordinator forget together, because a round that fails on one rank fails on all.
    `sent` is this rank's own, the rest is empty except on the coordinator. A process alone sends
    nothing; it compares with the `last` part. `joint` is for saves of so many ranks that parts are
    merged on their way to the coordinator.
    """

    def __init__(self) -> None:
        self.sent = b""
        self.last: Part | None = None
        self.kept = KeptMerge()
        self.encoder = ManifestEncoder()
        self.joint = JointParts()
        self._of_ranks: dict[int, PartStructure] = {}

    def forget(self) -> None:
        """Have this rank send its structure again."""
        self.sent = b""
        self.last = None
        self.joint.forget()

    def parts(self, received: Sequence[tuple[bytes, bytes]]) -> list[Part]:
        """The parts of structures (empty when known) and variable rests, in rank order.

        Raises Corrupt.
        """
        reader = PartReader(self._of_ranks.values())
        new = {
            rank: reader.structure(structure)
            for rank, (structure, _) in enumerate(received)
            if structure
        }
        if new:
            self._of_ranks |= new
            self.kept, self.encoder = KeptMerge(), ManifestEncoder()
        return [
            reader.part(self._of_ranks[rank], variable)
            for rank, (_, variable) in enumerate(received)
        ]


class Received(NamedTuple):
    """The parts and reports of all ranks, in rank order."""

    parts: list[Part]
    reports: list[RankReport]


def gather_parts(
    part: Part, report: RankReport, world: World, known: Structures
) -> Callable[[], Received]:
    """Send this rank's part to the coordinator. Returns a function that decodes what it received.

    Decoding may raise, so the function is called later, in a step in which all ranks agree: an
    error here would leave the others waiting for the coordinator's answer.
    """
    if world.size == 1:
        if known.last is None or not part.is_like(known.last):
            known.kept, known.encoder = KeptMerge(), ManifestEncoder()
        known.last = part
        return lambda: Received([part], [report])
    structure = part.structure()
    payload = joined(b"" if structure == known.sent else structure, part.variable())
    received = world.gather_to_coordinator(PARTS, joined(report.encode(), payload))
    known.sent = structure

    def decode() -> Received:
        pairs = [split(data) for data in received or []]
        parts = known.parts([split(payload) for _, payload in pairs])
        return Received(parts, [RankReport.decode(report) for report, _ in pairs])

    return decode
