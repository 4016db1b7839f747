"""Write planned files to a store: by all ranks, resumable, and read back on request.

While files are being written, a note next to them (`<name>.unfinished`) identifies the export. Each
file appears whole or not at all, so an export that finds its own note continues after the files
that are there. When all others are durable, the coordinator writes the last file, which turns
several files into one checkpoint, and removes the note.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ckpt.convert.sources.source import CheckpointSource
from ckpt.convert.targets.files import (
    Counted,
    Data,
    Fixed,
    Late,
    Meter,
    PlannedFile,
    Progress,
    fill_part,
)
from ckpt.errors import CheckpointError, Corrupt
from ckpt.format.checksum import crc32c, joined_crc32
from ckpt.format.object_parts import (
    PART_NBYTES,
    filled_parts,
    part_nbytes_for,
    send_parts,
    write_filled,
)
from ckpt.saving.resumable import is_written, stored
from ckpt.world.base import World, collectively
from storage import KeyExistsError, StorageError, Store
from storage.ranges import aligned_buffer

logger = logging.getLogger(__name__)

NOTE_SUFFIX = ".unfinished"
JOINT_NBYTES_MIN = 64 << 20  # smaller files are not worth the rounds that writing together takes


@dataclass(slots=True)
class Delivery:
    """Files on their way from a source to a store. `name` is the target's there, "" for a
    directory. With `alone`, the folder may have no other file whose name ends so.
    """

    world: World
    store: Store
    source: CheckpointSource
    files: Sequence[PlannedFile]
    name: str
    threads: int
    part_nbytes: int
    alone: str = ""
    own: set[str] = field(default_factory=set)
    """What this rank may have created, or an earlier run has left."""

    def deliver(self, progress: Progress | None, *, verify: bool) -> int:
        """Write all files; returns how many were there already. Collective over the ranks, and
        raises the same error on all of them.

        After an error nothing is left of what was written; after a kill, also of one rank, the next
        call continues.
        """
        finished = collectively(self.world, "look at the target", self._look)
        there = set(self._agreed("target", finished))
        if self.is_coordinator:
            self.own |= there
        try:
            self._write(there, progress)
            if verify:
                collectively(self.world, "verify", self._verify)
            collectively(self.world, "end", partial(self._end, there))
        except BaseException:
            self._undo()
            raise
        return len(there)

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank does what is done once."""
        return self.world.rank == 0

    @property
    def note_key(self) -> str:
        """Where the note of this export lies."""
        return f"{self.name or '.export'}{NOTE_SUFFIX}"

    @property
    def data_files(self) -> Sequence[PlannedFile]:
        """All files except the last of several: that one completes them."""
        return self.files[:-1] if len(self.files) > 1 else self.files

    def part_nbytes_of(self, file: PlannedFile) -> int:
        """The size of the parts of a file that all ranks write together."""
        return part_nbytes_for(file.nbytes, self.part_nbytes)

    def _look(self) -> list[str]:
        """The keys of files that an earlier, killed export of the same has finished.

        Raises CheckpointError when there is anything else.
        """
        if not self.is_coordinator:
            return []
        store, keys = self.store, {file.key for file in self.files}
        for info in store.list("") if self.alone else ():
            if info.key.endswith(self.alone) and "/" not in info.key and info.key not in keys:
                raise CheckpointError(
                    f"{store.url}/{info.key} is there, and readers load every *{self.alone} of a "
                    "folder: export into an empty one"
                )
        note, own_note = stored(store, self.note_key), self._digest()
        if note is not None and note != own_note:
            raise CheckpointError(
                f"{store.url}/{self.note_key} is the note of another export that did not "
                "finish; run that one again, or remove this file and what it has written"
            )
        present = []
        for file in self.files:
            # With its head, since a file of the same length may be another one.
            first = file.pieces[0] if file.pieces else None
            head = first.data if isinstance(first, Fixed) else b""
            if is_written(store, file.key, file.nbytes, head):
                present.append(file.key)
        if note is not None and len(present) == len(self.files):
            return present  # killed between the last file and the note
        # The last file is written behind all others: with some missing, it is another export's.
        if present and (note is None or self.files[-1].key in present):
            raise CheckpointError(
                f"{store.url}/{present[0]} exists already and nothing is ever overwritten; "
                "remove it, or export to another name"
            )
        if note is None:
            try:
                # Of two exports that begin at the same time, one gets the note.
                store.put_if_absent(self.note_key, own_note)
            except KeyExistsError as error:
                raise CheckpointError(
                    f"{store.url}/{self.note_key}: another export has just begun"
                ) from error
        else:
            for file in self.files:
                # Parts that the killed run has left: nothing will complete them.
                store.abort_unfinished(file.key)
        return present

    def _digest(self) -> bytes:
        """What identifies an export: its source, and every byte known in advance."""
        digest = hashlib.sha256(f"{self.source.url} {self.source.contents.step}".encode())
        for file in self.files:
            digest.update(f"\n{file.key} {file.nbytes}".encode())
            for piece in file.pieces:
                if isinstance(piece, Fixed):
                    digest.update(piece.data)
                elif isinstance(piece, Data):
                    digest.update(f"{piece.output.tensor.fqn} {piece.region}".encode())
        return digest.hexdigest().encode()

    def _agreed(self, name: str, value: Any) -> Any:
        """The coordinator's `value`, on all ranks."""
        encoded = json.dumps(value).encode() if self.is_coordinator else None
        return json.loads(self.world.broadcast(name, encoded))

    def _mine(self, there: set[str]) -> list[PlannedFile]:
        """This rank's files: the largest first, each to the rank that has the least so far."""
        # Every rank computes the same division from the same list, so no round is needed.
        load = [0] * self.world.size
        chosen = []
        todo = [file for file in self.data_files if file.key not in there]
        for file in sorted(todo, key=lambda file: (-file.nbytes, file.key)):
            rank = min(range(len(load)), key=lambda rank: (load[rank], rank))
            load[rank] += file.nbytes
            if rank == self.world.rank:
                chosen.append(file)
        return sorted(chosen, key=lambda file: file.key)

    def _write(self, there: set[str], progress: Progress | None) -> None:
        """All data files: small ones by a rank each, large ones by all ranks together."""
        rank, size = self.world.rank, self.world.size
        tokens = self._begin_joint(there)
        mine = [file for file in self._mine(there) if file.key not in tokens]
        large = [file for file in self.data_files if file.key in tokens]
        nbytes = sum(file.nbytes for file in mine) + sum(file.nbytes for file in large) // size
        meter = Meter(nbytes, progress)
        receipts: dict[str, dict[int, str]] = {}

        def run() -> None:
            for file in mine:
                self._create(file, partial(write_file, self, file, meter))
            for file in large:
                count = -(-file.nbytes // self.part_nbytes_of(file))
                first, stop = (count * edge // size for edge in (rank, rank + 1))
                share = _write_share(self, file, tokens[file.key], first, stop, meter)
                receipts[file.key] = share

        def join() -> None:
            by_rank = [json.loads(data) for data in gathered or ()]
            for file in large if self.is_coordinator else ():
                end_joint = partial(
                    self.store.end_joint,
                    file.key,
                    file.nbytes,
                    part_nbytes=self.part_nbytes_of(file),
                    token=tokens[file.key],
                    receipts={int(n): r for own in by_rank for n, r in own[file.key].items()},
                )
                self._create(file, end_joint)

        try:
            collectively(self.world, "write", run)
            if large:
                own = json.dumps(receipts).encode()
                gathered = self.world.gather_to_coordinator("receipts", own)
                collectively(self.world, "join", join)
        except BaseException:
            for key, token in tokens.items() if self.is_coordinator else ():
                self.store.abort_joint(key, token)
            raise

    def _begin_joint(self, there: set[str]) -> dict[str, str]:
        """The tokens of the files that all ranks write together, by key. A file that contains
        checksums of its data is written by one rank, because they are taken from the data as it
        passes.
        """
        if self.world.size == 1:
            return {}

        def run() -> dict[str, str]:
            tokens = {}
            for file in self.data_files if self.is_coordinator else ():
                is_joint = not file.checksums and file.nbytes >= JOINT_NBYTES_MIN
                if is_joint and file.key not in there:
                    part_nbytes = self.part_nbytes_of(file)
                    token = self.store.begin_joint(file.key, file.nbytes, part_nbytes=part_nbytes)
                    tokens.update({file.key: token} if token else {})
            return tokens

        agreed: dict[str, str] = self._agreed("tokens", collectively(self.world, "begin", run))
        return agreed

    def _verify(self) -> None:
        """Raise Corrupt naming every tensor whose bytes in the files differ from the source.

        Both are read anew, in memory bounded by two parts.
        """
        ours, theirs = aligned_buffer(PART_NBYTES), aligned_buffer(PART_NBYTES)
        wrong: set[str] = set()
        # All files, also those that an earlier run had finished.
        for file in self._mine(set()):
            for start in range(0, file.nbytes, PART_NBYTES):
                nbytes = min(PART_NBYTES, file.nbytes - start)
                fill_part(self.source, file.pieces, start, ours[:nbytes])
                self.store.get_into(file.key, start, [theirs[:nbytes]])
                for piece in file.pieces:
                    low, high = max(piece.start - start, 0), piece.start + piece.nbytes - start
                    inside = slice(low, min(high, nbytes))
                    if not isinstance(piece, Data) or low >= inside.stop:
                        continue
                    if crc32c(ours[inside]) != crc32c(theirs[inside]):
                        wrong.add(f"{piece.output.name} in {file.key}")
        if wrong:
            raise Corrupt(
                f"{self.store.url}: written bytes differ from those of {self.source.url}: "
                f"{', '.join(sorted(wrong)[:10])}"
            )

    def _end(self, there: set[str]) -> None:
        """Write the last file, which completes the others, then remove the note of the export."""
        if not self.is_coordinator:
            return
        for last in self.files[len(self.data_files) :]:
            assert all(isinstance(piece, Fixed) for piece in last.pieces)
            if last.key not in there:
                data = b"".join(p.data for p in last.pieces if isinstance(p, Fixed))
                self._create(last, partial(self.store.put_if_absent, last.key, data))
        self.store.delete(self.note_key)

    def _create(self, file: PlannedFile, write: Callable[[], None]) -> None:
        """Run `write`, which creates `file`. After a failure it is ours to remove, since its
        outcome may be unknown, unless somebody else had made it.
        """
        self.own.add(file.key)
        try:
            write()
        except KeyExistsError:
            # Somebody else has made it, and it is not ours to remove.
            self.own.discard(file.key)
            raise

    def _undo(self) -> None:
        """Remove what this rank has written. The last file goes first, since it makes the others a
        checkpoint. After the death of a rank everything stays, and the next export continues it.
        """
        # A rank that seems gone may still write. The next export continues with what is there.
        if self.world.failure is not None:
            return
        gone = [file.key for file in reversed(self.files) if file.key in self.own]
        for key in [*gone, self.note_key] if self.is_coordinator else gone:
            try:
                self.store.delete(key)
            except StorageError as error:
                # The failure that led here is what the caller has to know.
                logger.warning("%s/%s is left of a failed export: %s", self.store.url, key, error)


# One file -----------------------------------------------------------------------------------------


def write_file(delivery: Delivery, file: PlannedFile, meter: Meter) -> None:
    """Create one file. Raises the source's and the store's errors; nothing is visible then."""
    if file.nbytes == 0:
        delivery.store.put_if_absent(file.key, b"")
        return
    write_filled(
        delivery.store,
        file.key,
        file.nbytes,
        fill=partial(fill_part, delivery.source, file.pieces),
        finish=_finisher(file),
        threads=delivery.threads,
        part_nbytes=delivery.part_nbytes,
        durable=True,
        add=meter.add,
    )


def _finisher(file: PlannedFile) -> Callable[[int, memoryview, list[Counted]], None]:
    """What fills in the late bytes of a file's parts, from the crc32 of the data before them. Parts
    come in order, so that all data before a late piece has passed when its bytes are due.
    """
    checksums = [0] * file.checksums
    late = deque(piece for piece in file.pieces if isinstance(piece, Late))

    def finish(start: int, part: memoryview, counted: list[Counted]) -> None:
        for number, crc32, nbytes in counted:
            checksums[number] = joined_crc32(checksums[number], crc32, nbytes)
        stop = start + len(part)
        while late and late[0].start < stop:
            first, end = late[0].start, late[0].start + late[0].nbytes
            low, high = max(first, start), min(end, stop)
            if low < high:
                made = late[0].make(checksums)
                part[low - start : high - start] = made[low - first : high - first]
            if end > stop:
                return  # the rest of it is in the next part, and is made once more for that
            late.popleft()

    return finish


def _write_share(
    delivery: Delivery, file: PlannedFile, token: str, first: int, stop: int, meter: Meter
) -> dict[int, str]:
    """Write parts `first` to `stop` of a file that others write with us; returns their receipts."""
    part_nbytes, threads = delivery.part_nbytes_of(file), max(1, delivery.threads)
    writer = delivery.store.joint(file.key, file.nbytes, part_nbytes=part_nbytes, token=token)
    with closing(writer):
        parts = filled_parts(
            file.nbytes,
            part_nbytes,
            fill=partial(fill_part, delivery.source, file.pieces),
            finish=lambda start, part, counted: None,
            threads=threads,
            first=first,
            stop=stop,
        )
        with closing(parts):
            send_parts(writer, parts, threads=threads, add=meter.add, first=first)
    return writer.receipts
