"""A near tier: a directory of one host with the newest states of one training, as data files.

    PATH/<root uuid>/HOST                      a name for this directory, made once; if it is
                                               damaged, HOST-1 has another one, and so on
    PATH/<root uuid>/records/e<epoch>-<number>  the near log
    PATH/<root uuid>/steps/<step>-<attempt>/    data files of the ranks of this host

Ranks of a host share it. Nothing in it is changed, and a process that dies leaves whole files,
or unfinished ones, which are no keys. FORMAT.md, "Near tiers", has the bytes.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import re
import secrets
from collections.abc import Collection

from ckpt.commit.names import STEPS_PREFIX, attempt_epoch, parse_step_key
from ckpt.errors import CheckpointError, Corrupt, Fenced, NoCheckpoint
from ckpt.format.checksum import is_outage, seal_of
from ckpt.format.datafile_index import OpenedFile, check_blocks, contradictions, open_file
from ckpt.near.parity import SUFFIX, Parity, read_parity
from ckpt.near.records import (
    NEAR_NBYTES_MAX,
    NearFile,
    NearRecord,
    decode_near_record,
    encode_near_record,
)
from storage import (
    CorruptObjectError,
    KeyExistsError,
    KeyNotFoundError,
    ShortReadError,
    StorageError,
    Store,
    TooLargeError,
)
from storage.file_io import is_in_memory, private_folder
from storage.local import LocalStore
from storage.store import ByteRange

logger = logging.getLogger(__name__)

HOST_KEY = "HOST"
NAMES_MAX = 8  # of a directory: the first that is not damaged counts
RECORDS_PREFIX = "records/"
_HOST = re.compile(r"[0-9a-f]{32}")
_RECORD = re.compile(r"records/e([0-9]{6,18})-([0-9]{12,19})")


def near_key(record: NearRecord) -> str:
    """The key of a record in a tier."""
    epoch, number = record.order
    return f"{RECORDS_PREFIX}e{epoch:06d}-{number:012d}"


class Tier:
    """The tier of one host for the durable root `root`. Every method may be called by any rank of
    the host. `store` has its objects as they are stored; `files` has the data files as they were
    written, which are encrypted where the root in `durable` is.

    Methods raise the errors of the file system (StorageError), among them AccessDeniedError for a
    directory that others can change, or that is another user's.
    """

    def __init__(
        self, path: str | os.PathLike[str], root: str, durable: Store | None = None
    ) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self.root = root
        # Refused where others may write: files here are loaded as the training's own.
        private_folder(os.path.join(self.path, root))
        self.store: Store = LocalStore(os.path.join(self.path, root))
        self.host = self._host()
        self._durable = durable
        self._known: dict[str, NearRecord] = {}  # that were read; a key never gets another one
        self.files = self.files_in(self.store)
        self.is_in_memory = is_in_memory(self.store.place)

    def files_in(self, store: Store) -> Store:
        """The data files in the tier `store` of this root, this one or another host's."""
        return store if self._durable is None else self._durable.encrypting(store)

    def _host(self) -> str:
        """The name of this directory. Two hosts have two, where file numbers may be the same.

        Raises Corrupt when too many names are damaged.
        """
        for number in range(NAMES_MAX):
            # A damaged name is neither changed nor removed, or two ranks could take two names: both
            # continue to the next key.
            key = f"{HOST_KEY}-{number}" if number else HOST_KEY
            if name := self._name_in(key):
                if number:
                    logger.warning("%s/%s is damaged; %s counts", self.store.url, HOST_KEY, key)
                return name
        raise Corrupt(f"all {NAMES_MAX} names of {self.store.url} are damaged: remove it")

    def _name_in(self, key: str) -> str:
        """The name that `key` has, from now on if it did not exist; "" for a damaged one."""
        while True:
            with contextlib.suppress(KeyNotFoundError):
                try:
                    name = self.store.get_bounded(key, 32).decode("ascii", "replace")
                except TooLargeError:
                    return ""
                return name if _HOST.fullmatch(name) else ""
            # Of ranks that begin together one wins; the others read its name.
            with contextlib.suppress(KeyExistsError):
                self.store.put_if_absent(key, secrets.token_hex(16).encode())

    def room(self) -> tuple[int, int]:
        """How many bytes fit: what is free for this user, and what the tier has taken."""
        status = os.statvfs(self.store.place)
        own = sum(info.nbytes for info in self.store.list(STEPS_PREFIX))
        # What the tier has counts as free: older states are replaced.
        return status.f_bavail * status.f_frsize, own

    # records

    def records(self, epoch: int | None = None) -> list[NearRecord]:
        """The readable records of this root, or those of an epoch, newest first. Damaged ones are
        logged.
        """
        names = [_RECORD.fullmatch(info.key) for info in self.store.list(RECORDS_PREFIX)]
        known = [self._record(n[0]) for n in names if n and epoch in (None, int(n[1]))]
        return sorted(filter(None, known), key=lambda record: record.order, reverse=True)

    def _record(self, key: str) -> NearRecord | None:
        """The record at a key; None where none counts. Raises where a store fails: what cannot be
        read now may be one to keep.
        """
        if (known := self._known.get(key)) is not None:
            return known
        where = f"{self.store.url}/{key}"
        try:
            record = decode_near_record(self.store.get_bounded(key, NEAR_NBYTES_MAX), where)
            if near_key(record) == key and record.head.root == self.root:
                self._known[key] = record
                return record
            logger.warning("a near record does not count: %s is that of another place", where)
        except KeyNotFoundError:
            pass  # another rank has dropped it
        except CheckpointError as error:
            if is_outage(error) and not isinstance(error, TooLargeError):
                raise
            logger.warning("a near record does not count: %s", error)
        return None

    def refuse_fenced(self, epoch: int) -> None:
        """Raise Fenced when a session of a later epoch uses this tier."""
        refuse_fenced(self.store, epoch)

    def put(self, record: NearRecord) -> None:
        """Write a record, unless another rank of this host has: durable on return.

        Raises Corrupt when another record is there.
        """
        encoded, key = encode_near_record(record), near_key(record)
        try:
            self.store.put_if_absent(key, encoded)
        except KeyExistsError:
            if self.store.get_bounded(key, NEAR_NBYTES_MAX) != encoded:
                raise Corrupt(f"{self.store.url}/{key} is another record") from None

    # files

    def has(self, record: NearRecord, file: NearFile) -> bool:
        """Whether a file of a record is here, as `has_file` says."""
        return has_file(self.files, record.prefix, file)

    def whole_ranks(self, record: NearRecord) -> list[int]:
        """The ranks of which all files that a record names are here."""
        lacking = {file.rank for file in record.files if not self.has(record, file)}
        return [rank for rank in range(record.head.world_size) if rank not in lacking]

    def opened(
        self, record: NearRecord, rank: int, *, with_blocks: bool = False
    ) -> list[OpenedFile]:
        """The files of a rank that a record names, all their bytes read `with_blocks`.

        Raises Corrupt, KeyNotFoundError.
        """
        opened, head = [], record.head
        for file in [file for file in record.files if file.rank == rank]:
            key = record.prefix + file.name
            where = f"{self.store.url}/{key}"
            one = open_file(self.files, key, file.name, file.nbytes)
            own = one.place.header
            named = (own.root, own.attempt, own.step, own.world_size, one.place.rank)
            if named != (head.root, head.attempt, head.step, head.world_size, rank):
                raise Corrupt(f"{where}: says it is {named}")
            if one.described.seal != file.seal:
                raise Corrupt(f"{where}: its checksums are not those of the record")
            if with_blocks:
                check_blocks(self.files, key, one.described)
            opened.append(one)
        if problems := contradictions(opened):
            raise Corrupt("; ".join(problems))
        return opened

    def has_parity(self, prefix: str) -> bool:
        """Whether there are parity files below the prefix of an attempt."""
        return any(info.key.endswith(SUFFIX) for info in self.store.list(prefix))

    def parities(self, prefix: str) -> list[Parity]:
        """The readable ones. Damaged ones are logged."""
        parities = []
        for key in [info.key for info in self.store.list(prefix) if info.key.endswith(SUFFIX)]:
            try:
                parities.append(read_parity(self.store, key))
            except (Corrupt, KeyNotFoundError, ShortReadError) as error:
                logger.warning("a parity file does not count: %s", error)
        return parities

    def over(self, store: Store) -> Tier:
        """This tier with `store` in place of its own: files that are rebuilt are there as well."""
        other = copy.copy(self)
        other.store, other.files = store, self.files_in(store)
        return other

    def drop(self, kept: Collection[str], *, epoch: int, rank: int | None = None) -> None:
        """Delete records and files of all attempts but `kept`, those of later epochs than `epoch`
        left out: they are another session's. Records go first. With `rank`, the files of that one
        alone, so that no rank waits for another to have room.
        """
        if rank is None:
            self.forget(kept, epoch=epoch)
        own = "" if rank is None else f"rank{rank:05d}-"
        # Records went first: a crash in between leaves files that no record names.
        for key in [info.key for info in self.store.list(STEPS_PREFIX)]:
            _, attempt, name = parse_step_key(key) or (0, "", "")
            if not attempt or attempt in kept or not name.startswith(own):
                continue
            if attempt_epoch(attempt) <= epoch:
                self.store.delete(key)

    def forget(self, kept: Collection[str] = (), *, epoch: int) -> None:
        """Delete all records of `epoch` and before, but those of the attempts `kept`: their states
        do not count any more.
        """
        for info in list(self.store.list(RECORDS_PREFIX)):
            match = _RECORD.fullmatch(info.key)
            if match is None or int(match[1]) > epoch:
                continue
            record = self._record(info.key) if kept else None
            if record is None or record.head.attempt not in kept:
                self._known.pop(info.key, None)
                self.store.delete(info.key)

    def sweep_unfinished(self) -> None:
        """Remove what dead processes left half written; no rank of this host may be writing."""
        self.store.abort_unfinished("")

    def close(self) -> None:
        """Close the files that are open."""
        with contextlib.suppress(StorageError):
            self.store.close()


def newest_epoch(store: Store) -> int:
    """The highest epoch that a record in a tier is of; 0 without any. `store` is that of the tier,
    wherever it is.
    """
    matches = (_RECORD.fullmatch(info.key) for info in store.list(RECORDS_PREFIX))
    return max((int(match[1]) for match in matches if match), default=0)


def refuse_fenced(store: Store, epoch: int) -> None:
    """Raise Fenced when a session of a later epoch uses the tier `store`, wherever it is."""
    if (newest := newest_epoch(store)) > epoch:
        raise Fenced(
            f"{store.url} has near checkpoints of a newer session (epoch {newest}, this process "
            f"has epoch {epoch}): another job trains on from this root. If this one should, stop "
            "the other job and restart this one"
        )


def has_file(files: Store, prefix: str, file: NearFile) -> bool:
    """Whether the `files` of a tier have that of a record below `prefix`, in full length and with
    the checksum table that the record has the seal of. Blocks are compared with it when they are
    read.
    """
    table = ByteRange(file.nbytes - file.seal.nbytes, file.nbytes)
    try:
        if files.info(prefix + file.name).nbytes != file.nbytes:
            return False
        return seal_of(files.get(prefix + file.name, table)) == file.seal
    except (KeyNotFoundError, ShortReadError):
        return False
    except CorruptObjectError as error:
        logger.warning("a near file does not count: %s", error)
        return False


def tier_roots(path: str | os.PathLike[str]) -> list[str]:
    """The durable roots that have a tier below a directory.

    Raises NoCheckpoint where there is no such directory.
    """
    if not os.path.isdir(path):
        raise NoCheckpoint(f"{path} is not a directory of this host")
    names = sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
    return [name for name in names if os.path.exists(os.path.join(path, name, HOST_KEY))]


def tiers_in(path: str | os.PathLike[str], durable: Store | None = None) -> list[Tier]:
    """The tiers below a directory, one for each durable root that saved there. That of `durable` is
    needed for `files` that are encrypted.

    Raises NoCheckpoint where there is no such directory.
    """
    return [Tier(path, name, durable) for name in tier_roots(path)]
