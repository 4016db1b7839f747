"""Blobs of `torch.save` inside of files: what is in them, and where their tensors' bytes are.

A blob is opened with one or two small reads, several blobs that lie near each other with one, and
its tensors are never read to find out where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from ckpt.convert.sources.budget import FIXED_NBYTES, Account, MemoryBudget
from ckpt.convert.sources.torch_pickle import StorageRef, TensorRef, read_tree
from ckpt.convert.sources.zips import ZipEntry, data_start, read_directory
from ckpt.errors import Corrupt, UnsupportedFormat
from ckpt.layout.dtypes import DTYPES
from storage import ShortReadError, Store
from storage.threads import in_order

HEAD_NBYTES = 2048  # usually with the whole pickle of a tensor
TAIL_NBYTES = 1024  # usually with the whole directory
WHOLE_NBYTES_MAX = 16 << 10  # blobs up to this size are read in one piece
BATCH_NBYTES = 4 << 20
READERS = 4
PICKLE_NBYTES_MAX = 1 << 30
SAME_NBYTES_MAX = 1024  # of pickles that are remembered: those of tensors recur byte for byte
SAME_MEMORY_NBYTES_MAX = 1 << 20


class Blob(NamedTuple):
    """Bytes `start` to `stop` of a file, a whole file of torch.save in themselves."""

    file: str
    start: int
    stop: int


class Opened(NamedTuple):
    """What a blob holds: a tree with `TensorRef`s, and where in the file each storage begins.

    The tree was charged to `account`, everything else to `directory`; a caller closes the one that
    it does not keep.
    """

    tree: Any
    storages: dict[str, tuple[int, int]]  # key -> first byte in the file, nbytes
    account: Account
    directory: Account

    def close(self) -> None:
        """Nothing of it is kept."""
        self.account.close()
        self.directory.close()

    def start_of(self, tensor: TensorRef) -> int:
        """The byte of the file where the tensor's first element is.

        Raises Corrupt when the storage is shorter than the tensor needs it.
        """
        storage: StorageRef = tensor.storage
        start, nbytes = self.storages.get(storage.key, (0, -1))
        if nbytes < storage.nbytes:
            raise Corrupt(f"storage {storage.key[:50]} has {nbytes} bytes, not {storage.nbytes}")
        return start + tensor.offset * DTYPES[tensor.dtype].itemsize


def open_blobs(
    store: Store, blobs: Sequence[Blob], budget: MemoryBudget
) -> Iterator[tuple[Blob, Opened]]:
    """Every blob with its content, in the order of files.

    Raises Corrupt or UnsupportedFormat naming file and bytes, and the store's errors.
    """
    batches = _batches(sorted(set(blobs)))
    for opened in in_order(
        lambda batch: _open_batch(store, batch, budget),
        batches,
        threads=READERS,
        name="ckpt-open",
        ahead=2 * READERS,
    ):
        yield from opened


def open_blob(
    store: Store, blob: Blob, budget: MemoryBudget, *, is_outermost: bool = False
) -> Opened:
    """One blob. Raises like `open_blobs`.

    With `is_outermost`, the bytes of its tensors were not counted in `budget` before, and are now.
    """
    return _opened(_Peeks(store, blob.file, [blob]), blob, budget, is_outermost)


class _InMemory:
    """Reads a blob that is in memory."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read(self, start: int, stop: int) -> bytes:
        return self.data[start:stop]


def blob_in_memory(data: bytes) -> Opened:
    """What a blob of torch.save holds that is in memory. Raises Corrupt, UnsupportedFormat."""
    blob = Blob("", 0, len(data))
    return _content(_InMemory(data), blob, MemoryBudget(), is_outermost=True)


def _batches(blobs: Sequence[Blob]) -> Iterator[list[Blob]]:
    """Blobs of one file, as many as are opened with about `BATCH_NBYTES` of reads."""
    batch: list[Blob] = []
    nbytes = 0
    for blob in blobs:
        if batch and (blob.file != batch[0].file or nbytes > BATCH_NBYTES):
            yield batch
            batch, nbytes = [], 0
        batch.append(blob)
        is_whole = blob.stop - blob.start <= WHOLE_NBYTES_MAX
        nbytes += blob.stop - blob.start if is_whole else HEAD_NBYTES + TAIL_NBYTES
    if batch:
        yield batch


def _open_batch(store: Store, batch: list[Blob], budget: MemoryBudget) -> list[tuple[Blob, Opened]]:
    peeks = _Peeks(store, batch[0].file, batch)
    return [(blob, _opened(peeks, blob, budget, False)) for blob in batch]


class _Peeks:
    """Reads a file. The heads and tails of its blobs are read ahead, in few requests."""

    def __init__(self, store: Store, file: str, blobs: Sequence[Blob]) -> None:
        self.store = store
        self.file = file
        self.known: list[tuple[int, bytearray]] = []
        for start, stop in _ranges(blobs):
            self.known.append((start, self._get(start, stop)))
        self.index = 0

    def read(self, start: int, stop: int) -> bytes | bytearray:
        """Bytes `start` to `stop` of the file."""
        for first, data in self.known[self.index :]:
            if first <= start and stop <= first + len(data):
                return data[start - first : stop - first]
            if first > stop:
                break
        return self._get(start, stop)

    def advance(self, start: int) -> None:
        """Nothing before `start` will be requested any more."""
        while self.index < len(self.known):
            first, data = self.known[self.index]
            if first + len(data) > start:
                return
            self.index += 1

    def _get(self, start: int, stop: int) -> bytearray:
        data = bytearray(stop - start)
        try:
            self.store.get_into(self.file, start, [memoryview(data)] if data else [])
        except ShortReadError as error:
            raise Corrupt(f"{self.store.url}/{self.file}: it is cut off") from error
        return data


def _ranges(blobs: Sequence[Blob]) -> list[tuple[int, int]]:
    """The heads and tails of blobs as byte ranges; ranges that meet are joined."""
    ranges: list[tuple[int, int]] = []
    for blob in blobs:
        if blob.stop - blob.start <= WHOLE_NBYTES_MAX:
            ends = [(blob.start, blob.stop)]
        else:
            ends = [
                (blob.start, blob.start + HEAD_NBYTES),
                (blob.stop - TAIL_NBYTES, blob.stop),
            ]
        for start, stop in ends:
            if ranges and start <= ranges[-1][1]:
                ranges[-1] = (ranges[-1][0], max(ranges[-1][1], stop))
            else:
                ranges.append((start, stop))
    return ranges


def _opened(peeks: _Peeks, blob: Blob, budget: MemoryBudget, is_outermost: bool) -> Opened:
    peeks.advance(blob.start)
    try:
        return _content(peeks, blob, budget, is_outermost=is_outermost)
    except (Corrupt, UnsupportedFormat) as error:
        where = f"{peeks.store.url}/{blob.file}, bytes {blob.start} to {blob.stop}"
        raise type(error)(f"{where}: {error}") from error


def _tree_of(data: bytes | bytearray, account: Account) -> Any:
    """The tree of a pickle, which is the same object for equal pickles of a tensor."""
    tensor = _tensor_of(bytes(data)) if len(data) <= SAME_NBYTES_MAX else None
    return read_tree(data, account) if tensor is None else tensor


@lru_cache(maxsize=512)
def _tensor_of(data: bytes) -> TensorRef | None:
    """The tensor that a pickle is; None when it is anything else, which might be changed, or has to
    be charged to a budget.
    """
    budget = MemoryBudget(FIXED_NBYTES + SAME_MEMORY_NBYTES_MAX)
    try:
        tree = read_tree(data, Account(budget))
    except UnsupportedFormat:
        return None
    return tree if isinstance(tree, TensorRef) else None


def _content(
    peeks: _Peeks | _InMemory, blob: Blob, budget: MemoryBudget, *, is_outermost: bool
) -> Opened:
    account, directory = Account(budget), Account(budget)
    nbytes, allowed = blob.stop - blob.start, 0

    def note_storage(entry: ZipEntry) -> None:
        nonlocal allowed
        # Now and not when all entries are known: the room for them is what their tensors allow.
        if is_outermost and entry.is_stored and "/data/" in entry.name:
            more = min(entry.nbytes, nbytes - allowed)
            budget.allow(more)
            allowed += more

    entries = read_directory(
        lambda start, stop: peeks.read(blob.start + start, blob.start + stop),
        nbytes,
        directory.charge,
        note_storage,
    )
    pickle = next((name for name in entries if name.endswith("/data.pkl")), None)
    if pickle is None:
        raise UnsupportedFormat("a zip file that torch.save did not write: it has no data.pkl")
    folder = pickle.removesuffix("data.pkl")
    if f"{folder}constants.pkl" in entries:
        raise UnsupportedFormat("a TorchScript archive; save the module's state dict instead")
    data = f"{folder}data/"
    if is_outermost:
        budget.allow(_tensor_nbytes(entries, data, nbytes) - allowed)

    def start_of(entry: ZipEntry) -> int:
        header = blob.start + entry.header_start
        start = blob.start + data_start(entry, peeks.read(header, header + 30))
        if start + entry.nbytes > blob.stop:
            raise Corrupt(f"{entry.name}: it lies outside of the file")
        return start

    order = entries.get(f"{folder}byteorder")
    if order is not None:
        start = start_of(order)
        if peeks.read(start, start + min(order.nbytes, 16)) != b"little":
            raise UnsupportedFormat("it was written on a big-endian machine")
    program = entries[pickle]
    if program.nbytes > PICKLE_NBYTES_MAX:
        raise UnsupportedFormat(f"{pickle} has {program.nbytes} bytes")
    start = start_of(program)
    account.charge(program.nbytes)
    tree = _tree_of(peeks.read(start, start + program.nbytes), account)
    account.release(program.nbytes)
    storages = {
        name.removeprefix(data): (start_of(entry), entry.nbytes)
        for name, entry in entries.items()
        if name.startswith(data)
    }
    return Opened(tree, storages, account, directory)


def _tensor_nbytes(entries: Mapping[str, ZipEntry], folder: str, blob_nbytes: int) -> int:
    """Bytes of storages that are in the blob. Entries may lie over each other: what they say counts
    up to the length of the blob without its pickle.
    """
    stored, others = 0, 0
    for name, entry in entries.items():
        if name.startswith(folder):
            stored += entry.nbytes if entry.is_stored else 0
        else:
            others += entry.nbytes
    return max(0, min(stored, blob_nbytes - others))
