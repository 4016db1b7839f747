"""The stage of a near save in its tier: files in memory that are filled where they will lie.

A background save copies the state into buffers that are laid out as the parts of its files. Here
those buffers are a mapping of files of the tier, so what was copied need not be written: a name
makes a data file of it. There is one copy of the state in all, and two generations take turns: the
files of the older one become the buffers of the next save, for fresh memory costs ten times a copy.

A durable save of the same step sends these files (`hold`). Until it is over nobody writes into
them, whether the tier still has names for them or not, so near saves take a third generation in the
meantime, or are skipped where there is no room for one.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate

from ckpt.errors import SaveDropped
from ckpt.saving.image import Staging
from storage import KeyExistsError, NoSpaceError, StorageError, Store
from storage.file_io import allocate
from storage.forks import ForkSafeLock
from storage.ranges import address_of, flat_views, touch
from storage.store import ObjectWriter, unfinished_name
from storage.wrap import WrappedStore

STAGE_FOLDER = "stage"
GENERATIONS = 2  # whole states that a tier needs room for: a kept one, and one that is written


class MappedFile:
    """A file of `capacity` bytes at `path`, all of them memory of this process."""

    def __init__(self, path: str, capacity: int) -> None:
        self.path = path
        self.capacity = capacity
        self.holds = 0  # other saves that read its memory
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _reserve(fd, capacity)
            self.memory = memoryview(mmap.mmap(fd, capacity))
        # A file left here would take memory of the host after this process as well.
        except BaseException:
            os.unlink(path)
            raise
        finally:
            # The mapping outlives the descriptor.
            os.close(fd)
        self.address = address_of(self.memory)

    def use_again(self) -> None:
        """Give a file that is under construction again its full capacity."""
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _reserve(fd, self.capacity)
        finally:
            os.close(fd)

    def discard(self) -> None:
        """Remove it. Its memory is freed when nothing refers to it any more."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


def _reserve(fd: int, nbytes: int) -> None:
    """Put memory behind a file, all of whose bytes have some already: a write into a mapping has no
    other way to fail than a signal.
    """
    # What is there is left out: the system would walk over each of its pages again.
    start = os.fstat(fd).st_size
    os.ftruncate(fd, nbytes)
    if start >= nbytes:
        return
    try:
        allocate(fd, nbytes, start=start)
    except OSError as error:
        # ramfs, which cannot reserve, cannot be full either.
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise


class TierMemory(Staging):
    """The buffers of near saves, one save at a time, as files below `folder`.

    The files of a save are under construction until it was published; `recycle` takes those of
    older saves back. Used by the thread that trains, and by the worker while a save is under way;
    what `hold` returns is called by any thread. There are never more than `generations_max` states,
    and `generations` of them stay between saves.
    """

    is_one_range = True

    def __init__(self, folder: str, *, generations_max: int = GENERATIONS) -> None:
        super().__init__()
        self.generations_max = generations_max
        self.generations = GENERATIONS
        self._folder = os.path.join(folder, STAGE_FOLDER)
        self._spares: list[MappedFile] = []
        self._held: list[MappedFile] = []  # taken back, and not free yet
        self._of_attempts: dict[str, list[MappedFile]] = {}
        self._starts: list[int] = []
        self._planned: tuple[int, ...] = ()
        # Held while a file is made ahead: a save that began meanwhile, and made one of its own,
        # would take the room of a third generation.
        self._making = ForkSafeLock()
        self.files: list[MappedFile] = []

    def expect(self, counts: Sequence[int], nbytes: int, *, pinned: bool) -> None:
        """A save begins whose files have so many parts. Raises NoSpaceError when they do not fit,
        SaveDropped when they would but for files that another save still reads.

        What an earlier save has neither published nor given up is used again.
        """
        self.give_up()
        with self._making, self._lock:
            spares, self._spares = self._spares, []
            self._planned = ()
            # States that other saves read and that have no names any more.
            held = -(-len(self._held) // len(counts))
        wanted = [count * nbytes for count in counts]
        try:
            # The room was measured for so many states: one more would fill the tier.
            if held and not spares and len(self._of_attempts) + held >= self.generations_max:
                raise SaveDropped(self._dropped())
            for capacity in wanted:
                self.files.append(self._file(spares, capacity))
        except OSError as error:
            if held:
                raise SaveDropped(self._dropped()) from error
            raise _translated(error, f"make room in {self._folder}") from error
        finally:
            self._keep_spares(spares, wanted, self.generations - held)
        self._starts = [0, *accumulate(counts)]

    def _dropped(self) -> str:
        return (
            f"the near save is skipped: a durable save still reads files of an older one, and "
            f"{self._folder} has no room for another state besides them"
        )

    def _keep_spares(
        self, spares: Sequence[MappedFile], wanted: Sequence[int], generations: int
    ) -> None:
        """Of what is left, keep what makes up `generations` with the save under way and those that
        are published; more, or of other sizes, would take the room of the next save.
        """
        free = Counter([*wanted] * max(0, generations - len(self._of_attempts) - 1))
        for spare in spares:
            if free[spare.capacity] > 0:
                free[spare.capacity] -= 1
                with self._lock:
                    self._spares.append(spare)
            else:
                spare.discard()

    def hold(self) -> Callable[[], None]:
        files = list(self.files)
        self.generations = self.generations_max  # the next save needs others meanwhile
        with self._lock:
            for file in files:
                file.holds += 1

        def release() -> None:
            with self._lock:
                for file in files:
                    file.holds -= 1
                self._spares += [file for file in self._held if not file.holds]
                self._held = [file for file in self._held if file.holds]

        return release

    def plan_ahead(self, counts: Sequence[int]) -> None:
        """The files of the first saves will have so many parts: for `make`."""
        self._planned = tuple(counts)

    def make(
        self, nbytes: int, count: int, *, pinned: bool, is_stopped: Callable[[], bool]
    ) -> None:
        """Make the files of `count` saves, of parts of `nbytes`, until a save begins."""
        for parts in self._planned * count:
            with self._making:
                if is_stopped():
                    return
                file = self._file([], parts * nbytes)
                touch(file.memory)  # the pages are there; now this process has them mapped as well
                with self._lock:
                    self._spares.append(file)

    def _file(self, spares: list[MappedFile], capacity: int) -> MappedFile:
        for spare in [spare for spare in spares if spare.capacity == capacity]:
            spares.remove(spare)
            try:
                spare.use_again()
            except FileNotFoundError:
                continue  # a job that began meanwhile has removed what was under construction
            except BaseException:
                spare.discard()
                raise
            return spare
        os.makedirs(self._folder, exist_ok=True)
        return MappedFile(self._new_path(), capacity)

    def _new_path(self) -> str:
        return os.path.join(self._folder, unfinished_name("file", secrets.token_hex(8)))

    def take(self, nbytes: int, *, pinned: bool, part: int = 0) -> memoryview:
        index = bisect_right(self._starts, part) - 1
        start = (part - self._starts[index]) * nbytes
        return self.files[index].memory[start : start + nbytes]

    def give_back(self, buffer: memoryview) -> None:
        """Nothing: the bytes are those of the file."""

    def keep(self, count_max: int) -> None:
        """Nothing: `recycle` and `expect` decide."""

    def published(self, attempt: str) -> None:
        """The files of the save under way are data files of `attempt` now."""
        self._of_attempts[attempt], self.files = self.files, []

    def give_up(self) -> None:
        """The save under way came to nothing: its files may be used by the next one."""
        self._take_back(self.files)
        self.files = []

    @property
    def attempts(self) -> set[str]:
        """Those whose files are memory of this process."""
        return set(self._of_attempts)

    def recycle(self, kept: Collection[str]) -> None:
        """The attempts of this process that are not `kept` end: their files have no names as data
        files any more when this returns. Those that another save reads stay as they are.
        """
        for attempt in [name for name in self._of_attempts if name not in kept]:
            self._take_back(self._of_attempts.pop(attempt))

    def _take_back(self, files: Sequence[MappedFile]) -> None:
        for file in files:
            path = self._new_path()
            try:
                # Renamed before anything is written: a reader must not see a data file that
                # changes.
                os.rename(file.path, path)
            except OSError:  # somebody has removed it
                continue
            file.path = path
            with self._lock:
                (self._held if file.holds else self._spares).append(file)

    def close(self) -> None:
        """Remove what is under construction; data files stay."""
        self.give_up()
        with self._lock:
            left, self._spares, self._held = [*self._spares, *self._held], [], []
        for file in left:
            file.discard()
        self._of_attempts = {}


class MappedStore(WrappedStore):
    """The store of a tier whose new objects are the files of `memory`, in the order of their
    numbers. `nbytes_put` counts the bytes that were not there already.
    """

    def __init__(self, inner: Store, memory: TierMemory) -> None:
        super().__init__(inner)
        self._memory = memory
        self.nbytes_put = 0

    def create(
        self, key: str, nbytes: int, *, part_nbytes: int, durable: bool = True, direct: bool = False
    ) -> AbstractContextManager[ObjectWriter]:
        # `rank00003-001.safetensors`: the second file of this rank is the second that was staged.
        index = int(key.rpartition("-")[2].partition(".")[0])
        final = os.path.join(self.inner.place, key)
        return _MappedWriter(self, self._memory.files[index], final, nbytes, part_nbytes)


class _MappedWriter(ObjectWriter, AbstractContextManager["_MappedWriter"]):
    """A mapped file on its way to a name: bytes that are in place are left alone."""

    def __init__(
        self, store: MappedStore, file: MappedFile, final: str, nbytes: int, part_nbytes: int
    ) -> None:
        self.part_nbytes = part_nbytes
        self._store = store
        self._file = file
        self._final = final
        self._nbytes = nbytes

    def write_part(self, index: int, buffers: Sequence[memoryview]) -> None:
        start = index * self.part_nbytes
        for view in flat_views(buffers):
            if address_of(view) != self._file.address + start:
                self._put(start, view)
            start += len(view)

    def _put(self, start: int, view: memoryview) -> None:
        # Not into the mapping: what follows the tensors may be longer than was planned.
        try:
            with open(self._file.path, "r+b", buffering=0) as file:
                while view:
                    written = os.pwrite(file.fileno(), view, start)
                    self._store.nbytes_put += written
                    start, view = start + written, view[written:]
        except OSError as error:
            raise _translated(error, f"write {self._final}") from error

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            return
        try:
            os.truncate(self._file.path, self._nbytes)
            os.makedirs(os.path.dirname(self._final), exist_ok=True)
            # `link` refuses where the key exists, `rename` would replace it.
            os.link(self._file.path, self._final)
            os.unlink(self._file.path)
        except FileExistsError as error:
            raise KeyExistsError(f"create {self._final}: exists already") from error
        except OSError as error:
            raise _translated(error, f"create {self._final}") from error
        self._file.path = self._final


def _translated(error: OSError, what: str) -> StorageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
        return NoSpaceError(f"{what}: {error.strerror}; free space or use another place")
    return StorageError(f"{what}: {error.strerror or error}")
