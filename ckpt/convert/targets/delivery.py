"""Write planned files to a store: by all ranks, resumable, and read back on request.

While files are being written, a note beside them (`<name>.unfinished`) identifies the export. Each
file appears whole or not at all, so an export that finds its own note continues after the files
that are there. When all others are durable, the coordinator writes the last file, which turns
several files into one checkpoint, and removes the note.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ckpt.convert.sources.source import CheckpointSource
from ckpt.convert.targets.files import Data, Fixed, PlannedFile
from ckpt.convert.targets.writing import (
    Meter,
    Progress,
    Writing,
    fill_part,
    write_file,
    write_share,
)
from ckpt.errors import CheckpointError, Corrupt
from ckpt.format.checksum import crc32c
from ckpt.format.object_parts import PART_NBYTES, part_nbytes_for
from ckpt.layout.buffers import aligned_buffer
from ckpt.saving.resumable import is_written, stored
from ckpt.world.base import World, collectively
from storage import KeyExistsError, StorageError, Store, StoreLike

logger = logging.getLogger(__name__)

NOTE_SUFFIX = ".unfinished"
JOINT_NBYTES_MIN = 64 << 20  # smaller files are not worth the rounds that writing together takes


class Delivery(NamedTuple):
    """Where files go, and how. `name` is the target's in `folder`, "" for a directory. With
    `alone`, the folder may have no other file whose name ends so.
    """

    folder: StoreLike
    name: str
    options: Mapping[str, Any]
    threads: int
    part_nbytes: int
    verify: bool
    world: World
    alone: str = ""


def deliver(
    source: CheckpointSource,
    files: Sequence[PlannedFile],
    delivery: Delivery,
    progress: Progress | None,
    open_store: Callable[..., Store],
) -> int:
    """Write all files; returns how many were there already. Collective over the ranks, and raises
    the same error on all of them.

    After an error nothing is left of what was written; after a kill, also of one rank, the next
    call continues.
    """
    world = delivery.world
    store = collectively(
        world, "open target", lambda: open_store(delivery.folder, **delivery.options)
    )
    try:
        job = _Job(world, store, source, files, delivery)
        there = job.begin()
        try:
            job.write(there, progress)
            if delivery.verify:
                mine = job.mine(set())
                collectively(world, "verify", lambda: verify_files(source, store, mine))
            job.end(there)
        except BaseException:
            job.undo()
            raise
        return len(there)
    finally:
        store.close()


class _Job:
    def __init__(
        self,
        world: World,
        store: Store,
        source: CheckpointSource,
        files: Sequence[PlannedFile],
        delivery: Delivery,
    ) -> None:
        self.world = world
        self.store = store
        self.source = source
        self.files = files
        self.delivery = delivery
        self.note_key = f"{delivery.name or '.export'}{NOTE_SUFFIX}"
        self.note = _digest(source, files).encode()
        self.own: set[str] = set()  # what this rank may have created, or found from an earlier run

    @property
    def is_coordinator(self) -> bool:
        return self.world.rank == 0

    @property
    def data_files(self) -> Sequence[PlannedFile]:
        """All files except the last of several: that one completes them."""
        return self.files[:-1] if len(self.files) > 1 else self.files

    def begin(self) -> set[str]:
        """The files that an earlier, killed export of the same has finished.

        Raises CheckpointError when there is anything else.
        """
        finished = collectively(self.world, "look at the target", self._look)
        there = set(self._agreed("target", finished))
        if self.is_coordinator:
            self.own |= there
        return there

    def _look(self) -> bytes:
        if not self.is_coordinator:
            return b""
        self._refuse_others()
        note = stored(self.store, self.note_key)
        if note is not None and note != self.note:
            raise CheckpointError(
                f"{self.store.url}/{self.note_key} is the note of another export that did not "
                "finish; run that one again, or remove this file and what it has written"
            )
        present = [
            file.key
            for file in self.files
            if is_written(self.store, file.key, file.nbytes, _head_of(file))
        ]
        if note is not None and len(present) == len(self.files):
            return json.dumps(present).encode()  # killed between the last file and the note
        if present and (note is None or self.files[-1].key in present):
            raise CheckpointError(
                f"{self.store.url}/{present[0]} is there already and nothing is ever overwritten; "
                "remove it, or export to another name"
            )
        if note is None:
            try:
                self.store.put_if_absent(self.note_key, self.note)
            except KeyExistsError as error:
                raise CheckpointError(
                    f"{self.store.url}/{self.note_key}: another export has just begun"
                ) from error
        else:
            for file in self.files:
                self.store.abort_unfinished(file.key)
        return json.dumps(present).encode()

    def _refuse_others(self) -> None:
        """Raise CheckpointError for files that readers of the folder would take for part of it."""
        suffix, own = self.delivery.alone, {file.key for file in self.files}
        if not suffix:
            return
        for info in self.store.list(""):
            if info.key.endswith(suffix) and "/" not in info.key and info.key not in own:
                raise CheckpointError(
                    f"{self.store.url}/{info.key} is there, and readers load every *{suffix} of a "
                    "folder: export into an empty one"
                )

    def is_joint(self, file: PlannedFile) -> bool:
        """Whether all ranks write this file together. A file that contains checksums of its data is
        written by one rank, because they are taken from the data as it passes.
        """
        return self.world.size > 1 and not file.checksums and file.nbytes >= JOINT_NBYTES_MIN

    def part_nbytes_of(self, file: PlannedFile) -> int:
        """The size of the parts of a file that all ranks write together."""
        return part_nbytes_for(file.nbytes, self.delivery.part_nbytes)

    def mine(self, there: set[str]) -> list[PlannedFile]:
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

    def write(self, there: set[str], progress: Progress | None) -> None:
        """All data files: small ones by a rank each, large ones by all ranks together."""
        tokens = self.begin_joint(there)
        mine = [file for file in self.mine(there) if file.key not in tokens]
        large = [file for file in self.data_files if file.key in tokens]
        nbytes = sum(file.nbytes for file in mine)
        nbytes += sum(file.nbytes for file in large) // self.world.size
        meter = Meter(nbytes, progress)
        delivery = self.delivery
        writing = Writing(self.source, self.store, delivery.threads, delivery.part_nbytes)
        receipts: dict[str, dict[int, str]] = {}

        def run() -> None:
            for file in mine:
                self.create(file, partial(write_file, writing, file, meter))
            for file in large:
                count = -(-file.nbytes // self.part_nbytes_of(file))
                rank, size = self.world.rank, self.world.size
                first, stop = (count * edge // size for edge in (rank, rank + 1))
                token = tokens[file.key]
                receipts[file.key] = write_share(writing, file, token, (first, stop), meter)

        try:
            collectively(self.world, "write", run)
            if large:
                gathered = self.world.gather_to_coordinator(
                    "receipts", json.dumps(receipts).encode()
                )
                collectively(self.world, "join", lambda: self.join(large, tokens, gathered))
        except BaseException:
            for key, token in tokens.items():
                if self.is_coordinator:
                    self.store.abort_joint(key, token)
            raise

    def begin_joint(self, there: set[str]) -> dict[str, str]:
        """The tokens of the files that all ranks write together, by key."""
        if self.world.size == 1:
            return {}
        tokens: dict[str, str] = {}

        def run() -> bytes:
            for file in self.data_files if self.is_coordinator else ():
                if self.is_joint(file) and file.key not in there:
                    token = self.store.begin_joint(
                        file.key, file.nbytes, part_nbytes=self.part_nbytes_of(file)
                    )
                    tokens.update({file.key: token} if token else {})
            return json.dumps(tokens).encode()

        agreed: dict[str, str] = self._agreed("tokens", collectively(self.world, "begin", run))
        return agreed

    def _agreed(self, name: str, encoded: bytes) -> Any:
        """What the coordinator has encoded as JSON, on all ranks."""
        return json.loads(self.world.broadcast(name, encoded if self.is_coordinator else None))

    def join(
        self,
        files: Sequence[PlannedFile],
        tokens: Mapping[str, str],
        gathered: Sequence[bytes] | None,
    ) -> None:
        """The coordinator publishes what all ranks have written."""
        by_rank = [json.loads(data) for data in gathered or ()]
        for file in files if self.is_coordinator else ():
            receipts = {int(n): r for own in by_rank for n, r in own[file.key].items()}
            end_joint = partial(
                self.store.end_joint,
                file.key,
                file.nbytes,
                part_nbytes=self.part_nbytes_of(file),
                token=tokens[file.key],
                receipts=receipts,
            )
            self.create(file, end_joint)

    def end(self, there: set[str]) -> None:
        """Write the last file, which completes the others, then remove the note of the export."""

        def run() -> None:
            if not self.is_coordinator:
                return
            for last in self.files[len(self.data_files) :]:
                assert all(isinstance(piece, Fixed) for piece in last.pieces)
                if last.key not in there:
                    data = b"".join(p.data for p in last.pieces if isinstance(p, Fixed))
                    self.create(last, partial(self.store.put_if_absent, last.key, data))
            self.store.delete(self.note_key)

        collectively(self.world, "end", run)

    def create(self, file: PlannedFile, write: Callable[[], None]) -> None:
        """Run `write`, which creates `file`. After a failure it is ours to remove, since its
        outcome may be unknown, unless another one was there.
        """
        self.own.add(file.key)
        try:
            write()
        except KeyExistsError:
            self.own.discard(file.key)
            raise

    def undo(self) -> None:
        """Remove what this rank has written. The last file goes first, since it makes the others a
        checkpoint. After the death of a rank everything stays, and the next export continues it.
        """
        if self.world.failure is not None:
            return
        gone = [file.key for file in reversed(self.files) if file.key in self.own]
        for key in [*gone, self.note_key] if self.is_coordinator else gone:
            try:
                self.store.delete(key)
            except StorageError as error:
                # The failure that led here is what the caller has to know.
                logger.warning("%s/%s is left of a failed export: %s", self.store.url, key, error)


def _head_of(file: PlannedFile) -> bytes:
    """The bytes that a file is known to begin with."""
    first = file.pieces[0] if file.pieces else None
    return first.data if isinstance(first, Fixed) else b""


def _digest(source: CheckpointSource, files: Sequence[PlannedFile]) -> str:
    """A digest that identifies an export: of its source, and of every byte known in advance."""
    digest = hashlib.sha256(f"{source.url} {source.contents.step}".encode())
    for file in files:
        digest.update(f"\n{file.key} {file.nbytes}".encode())
        for piece in file.pieces:
            if isinstance(piece, Fixed):
                digest.update(piece.data)
            elif isinstance(piece, Data):
                digest.update(f"{piece.output.tensor.fqn} {piece.span}".encode())
    return digest.hexdigest()


def verify_files(source: CheckpointSource, store: Store, files: Sequence[PlannedFile]) -> None:
    """Raise Corrupt naming every tensor whose bytes in the files differ from the source.

    Both are read anew, in memory bounded by two parts.
    """
    ours, theirs = aligned_buffer(PART_NBYTES), aligned_buffer(PART_NBYTES)
    wrong: list[str] = []
    for file in files:
        for start in range(0, file.nbytes, PART_NBYTES):
            nbytes = min(PART_NBYTES, file.nbytes - start)
            fill_part(source, file.pieces, start, ours[:nbytes])
            store.get_into(file.key, start, [theirs[:nbytes]])
            for piece, low, high in _data_in(file, start, start + nbytes):
                inside = slice(low - start, high - start)
                if crc32c(ours[inside]) != crc32c(theirs[inside]):
                    wrong.append(f"{piece.output.name} in {file.key}")
    if wrong:
        some = ", ".join(sorted(set(wrong))[:10])
        raise Corrupt(f"{store.url}: written bytes differ from those of {source.url}: {some}")


def _data_in(file: PlannedFile, start: int, stop: int) -> Iterator[tuple[Data, int, int]]:
    for piece in file.pieces:
        low, high = max(piece.start, start), min(piece.start + piece.nbytes, stop)
        if low < high and isinstance(piece, Data):
            yield piece, low, high
