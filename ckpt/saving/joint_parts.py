"""The joint parts of a save, on their way up the tree of ranks.

Every rank merges its part with what those right below it have sent, and sends that on.

Note "known structures": while only values change, the structure of a part stays the same from save
to save, and so does all that follows from the structures of all: the rules of chunks, the proof
that they cover every tensor, and most of the manifest's bytes. A rank sends its structure when it
has changed, and forgets it with the ranks above: a round that fails on one rank fails on all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ckpt.errors import Corrupt
from ckpt.format.joint_codec import (
    SentStructure,
    StructureReader,
    decode_rest,
    digest_of_structure,
    encode_rest,
    encode_structure,
)
from ckpt.format.joint_manifest import JointTable, ReplicaRegions
from ckpt.format.joint_part import (
    JointMerge,
    JointRest,
    JointStructure,
    merge_structures,
    rest_of,
    structure_of,
)
from ckpt.format.part import Part
from ckpt.telemetry.history import RankReport
from ckpt.world.base import World
from ckpt.world.frames import joined, pack, split, unpack

PARTS = "parts"  # the round in which parts go to the coordinator


class JointReceived(NamedTuple):
    """What all ranks have contributed, as the coordinator has it, and the reports of all, in rank
    order. The `table` is made when it is first needed: making it may refuse the save.
    """

    rest: JointRest
    reports: list[RankReport]
    regions: ReplicaRegions
    table: Callable[[], JointTable]


class JointParts:
    """What one rank keeps from save to save: its own structure, those of the ranks right below, and
    what it has made of them. `below` are those of the ranks below, in rank order.
    """

    def __init__(self) -> None:
        self._sent = b""  # digest of the structure that the rank above knows
        self._last: Part | None = None
        self._own: JointStructure | None = None
        self.below: list[SentStructure] = []
        self._merged: JointMerge | None = None
        self._encoded: tuple[bytes, bytes] | None = None  # the merged structure, and its digest
        self._table: JointTable | None = None
        self._regions: ReplicaRegions | None = None

    def forget(self) -> None:
        """Have this rank send its structure again."""
        self._sent = b""
        self._last = None

    def payload(self, part: Part, report: RankReport, below: Sequence[bytes]) -> bytes:
        """This rank's part and report, and what came from below, as one message to the rank above.

        Raises Corrupt.
        """
        merged, rest, reports = self._update(part, report, below)
        if self._encoded is None:
            data = encode_structure(merged.structure)
            self._encoded = data, digest_of_structure(data)
        structure, digest = self._encoded
        known = digest == self._sent
        self._sent = digest
        return joined(reports, joined(b"" if known else structure, encode_rest(rest, digest)))

    def received(self, part: Part, report: RankReport, below: Sequence[bytes]) -> JointReceived:
        """On the coordinator, the contributions of all. Raises Corrupt."""
        merged, rest, reports = self._update(part, report, below)
        if self._regions is None:
            self._regions = ReplicaRegions(merged.structure)
        decoded = [RankReport.decode(data) for data in unpack(reports)]
        return JointReceived(rest, decoded, self._regions, self._made_table)

    def _made_table(self) -> JointTable:
        assert self._merged is not None
        if self._table is None:
            self._table = JointTable(self._merged.structure)
        return self._table

    def _update(
        self, part: Part, report: RankReport, below: Sequence[bytes]
    ) -> tuple[JointMerge, JointRest, bytes]:
        """All structures merged, the rests merged, and the reports, packed."""
        reports, sent = [pack(report.encode())], []
        for message in below:
            of_ranks, rest = split(message)
            reports.append(of_ranks)
            sent.append(split(rest))
        changed = self._note_own(part)
        changed |= self._note_below([structure for structure, _ in sent])
        if changed or self._merged is None:
            assert self._own is not None
            structures = [self._own, *(one.structure for one in self.below)]
            self._merged = None  # what this replaces need not be in memory beside it
            self._encoded = self._table = self._regions = None
            self._merged = merge_structures(structures)
        pairs = zip(sent, self.below, strict=True)
        rests = [rest_of(part), *(decode_rest(rest, known) for (_, rest), known in pairs)]
        return self._merged, self._merged.rest(rests), b"".join(reports)

    def _note_own(self, part: Part) -> bool:
        """Keep this rank's structure; whether it has changed."""
        same = self._last is not None and part.is_like(self._last)
        self._last = part
        if same:
            return False
        structure = structure_of(part)
        if self._own is not None and structure.is_like(self._own):
            return False
        self._own = structure
        return True

    def _note_below(self, structures: Sequence[bytes]) -> bool:
        """Keep the structures that were sent, empty ones being known; whether any has changed."""
        known: dict[int, SentStructure] = dict(enumerate(self.below))
        new: dict[int, SentStructure] = {}
        reader = StructureReader([self._own] if self._own and structures else ())
        for index, data in enumerate(structures):
            if data and (index not in known or digest_of_structure(data) != known[index].digest):
                new[index] = reader.read(data)
            if not data and index not in known:
                raise Corrupt("a rank's structure is taken for known, and was never sent")
        if new:
            self.below = [new.get(index) or known[index] for index in range(len(structures))]
        return bool(new)


def gather_joint_parts(
    part: Part, report: RankReport, world: World, known: JointParts
) -> Callable[[], JointReceived | None]:
    """Send this rank's part up the tree, merged with those below. Returns a function that decodes
    what came on the coordinator, and gives None elsewhere.

    Decoding and merging may raise. The function raises what this rank met, so it must be called in
    a step in which all ranks agree; on a rank above one that failed it gives None as well.
    """
    failed: list[Exception] = []

    def merged(below: list[bytes]) -> bytes:
        if not all(below):
            return b""
        try:
            return known.payload(part, report, below)
        except Exception as error:
            # The ranks above wait for this message: an error is raised when all have met.
            failed.append(error)
            return b""

    received = world.merge_to_coordinator(PARTS, merged)

    def decode() -> JointReceived | None:
        if failed:
            raise failed[0]
        if received is None or not all(received):
            return None
        return known.received(part, report, received)

    return decode
