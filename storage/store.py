"""The one interface between checkpoints and bytes: a store maps keys to immutable objects.

Keys are relative, `/`-separated, never start or end with `/`, and have no empty, `.` or `..` part.
A key is written once; nothing is ever overwritten. How long failed requests are repeated is a bound
of the store that may change while a caller waits.
"""

from __future__ import annotations

import enum
import functools
import logging
import math
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple
from urllib.parse import urlsplit

from storage.errors import InvalidKeyError, KeyNotFoundError, ShortReadError, TooLargeError
from storage.forks import ForkSafeLock

logger = logging.getLogger(__name__)

# Objects under construction on back-ends that need a name for them; never a key, never listed.
UNFINISHED_MARK = ".tmp-"

# A file name has at most 255 bytes (ext4, xfs, NFS), and an unfinished one is this much longer.
PART_BYTES_MAX = 255 - len(UNFINISHED_MARK) - 17
# The limit of S3, with room for the prefix of the store.
KEY_BYTES_MAX = 768


@functools.lru_cache(maxsize=4096)  # a key is used for thousands of small reads in a row
def check_key(key: str) -> str:
    """`key` itself. Raises InvalidKeyError when it must not be used in any store."""
    problem = _key_problem(key)
    if problem:
        raise InvalidKeyError(
            f"{key[:200]!r} is not a key: {problem}; expected a relative path like 'steps/1/data'"
        )
    return key


def is_key(key: str) -> bool:
    """Whether `check_key` lets it pass."""
    return not _key_problem(key)


def check_prefix(prefix: str) -> str:
    """`prefix` itself, which may end anywhere within a key. Raises InvalidKeyError."""
    whole_parts, _, rest = prefix.rpartition("/")
    if whole_parts:
        check_key(whole_parts)
    elif prefix.startswith("/"):
        raise InvalidKeyError(f"{prefix[:200]!r} is not a prefix: keys are relative")
    if rest in (".", ".."):
        raise InvalidKeyError(f"{prefix[:200]!r} is not a prefix: it ends in {rest!r}")
    if rest and not rest.startswith("."):
        check_key(rest)
    return prefix


def unfinished_name(name: str, token: str) -> str:
    """Name for the object `name` while it is under construction; `token` has 16 characters."""
    return f"{UNFINISHED_MARK}{token}-{name}"


def finished_name(name: str) -> str | None:
    """The name that an unfinished object was meant to get; None for any other name."""
    if not name.startswith(UNFINISHED_MARK) or len(name) < len(UNFINISHED_MARK) + 18:
        return None
    return name[len(UNFINISHED_MARK) + 17 :]


def _key_problem(key: str) -> str:
    if not key:
        return "it is empty"
    try:
        nbytes = len(key.encode())
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    if nbytes > KEY_BYTES_MAX:
        return f"it has {nbytes} bytes, the limit is {KEY_BYTES_MAX}"
    # isprintable is the quick test; spaces and any script are fine, control characters are not.
    if not key.isprintable() and any(ord(c) < 32 or ord(c) == 127 for c in key):
        return "it holds a control character"
    for part in key.split("/"):
        # On a disk such a key leads out of the root; manifests name files, and may be hostile.
        if part in ("", ".", ".."):
            return f"it has the part {part!r}"
        if part.startswith(UNFINISHED_MARK):
            return f"names that start with {UNFINISHED_MARK!r} are for objects under construction"
        if len(part) > PART_BYTES_MAX // 4 and len(part.encode()) > PART_BYTES_MAX:
            return f"a part has more than {PART_BYTES_MAX} bytes"
    return ""


def redacted(url: str) -> str:
    """`url` without user names, passwords and query values: fit for messages and logs."""
    if "::" in url and "[" not in url:  # a chain of urls, and no IPv6 address
        return "::".join(map(redacted, url.split("::")))
    try:
        parts = urlsplit(url)
    except ValueError:  # it cannot be taken apart, so all of it may be a secret
        return url.partition("://")[0] + "://***"
    if not parts.scheme or "://" not in url:
        return url
    place, path = parts.netloc, parts.path
    if "@" in place or (":" in place and "@" in path):  # a password may hold a slash
        place, _, path = f"{place}{path}".rpartition("@")[2].partition("/")
        place, path = f"***@{place}", f"/{path}" if path else ""
    query = re.sub(r"=[^&;]*", "=***", f"?{parts.query}" if parts.query else "")
    return f"{parts.scheme}://{place}{path}{query}{'#***' if parts.fragment else ''}"


class ByteRange(NamedTuple):
    """Bytes `start` to `end` of an object; `end` is one past the last byte."""

    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


class ObjectInfo(NamedTuple):
    """What a listing returns for an object. `modified_unix` is seconds, for display and ages.

    `nbytes` is the object's length. In a listing of an encoded root it is what the object takes in
    the storage: the length itself stands inside of it.
    """

    key: str
    nbytes: int
    modified_unix: float


class ExclusiveCreate(enum.Enum):
    """Whether two writers can be trusted not to both create one key."""

    ATOMIC = "atomic"  # guaranteed by the operating system or by construction
    CONDITIONAL = (
        "conditional"  # requested with every write; a server may ignore it, so probe first
    )
    NONE = "none"  # check, then write, at best: commits are refused


class ObjectWriter(ABC):
    """An object under construction, invisible until its `with` block ends without an exception.

    The object is cut into parts of exactly `part_nbytes`, the last one shorter. Parts are written
    in any order and from any thread, each exactly once.
    """

    part_nbytes: int

    @abstractmethod
    def write_part(self, index: int, buffers: Sequence[memoryview]) -> None:
        """Write part `index` (from 0): the concatenation of `buffers`. Returns when the buffers may
        change.
        """

    def shorten(self, nbytes: int) -> None:
        """The object will have `nbytes`, at least 1 and not more than `create` was given.

        For objects whose length is known once they are written. Before the last part is written;
        raises ValueError when a part was written that ends behind `nbytes`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot write an object whose length is not known before, which "
            "compression needs: implement `shorten`"
        )


class JointWriter(ABC):
    """One process's part in writing an object that several processes write together.

    `receipts` are what `Store.end_joint` needs of each part that was written here.
    """

    receipts: dict[int, str]

    @abstractmethod
    def write_part(self, index: int, buffers: Sequence[memoryview]) -> None:
        """Write part `index` (from 0) as `ObjectWriter.write_part` does."""

    @abstractmethod
    def close(self) -> None:
        """Everything written here is durable on return, once the object is published."""


class Store(ABC):
    """Objects by key. Every method may be called from any thread."""

    url: str  # for messages: never holds a secret
    exclusive_create: ExclusiveCreate
    part_nbytes_min: int = 1  # of every part but the last of an object of several parts
    is_disk: bool = False  # a file system: it can be full to the last byte
    reports_news: bool = False  # `refresh` waits for what is new, and other calls mostly ask nobody

    @property
    def place(self) -> str:
        """Which storage this is: two open stores of one place hold the same objects.

        For comparing only. Two places may still be one, where one is mounted twice.
        """
        return self.url

    def refresh(self, seconds: float = 0.0, seen: int = -1) -> int:
        """Learn what is new, in a store that `reports_news`: what there is now, or within `seconds`
        another thing than when a call gave `seen`. Others do nothing, and give 0.
        """
        return 0

    def doubt(self) -> None:  # noqa: B027 - most stores have nothing else to read
        """What was read here is not what was written: read it elsewhere, if possible."""

    @property
    def retries(self) -> int:
        """Requests that were repeated so far because they had failed; 0 where nobody repeats."""
        return 0

    def encrypting(self, other: Store) -> Store:
        """`other` with its objects encrypted by the key of the root that is here; `other` itself
        where this root is not encrypted. Raises as reading FORMAT does.
        """
        return other

    @property
    def known_encoding(self) -> bytes:
        """What this store has found out of how its objects are encoded, for other processes with
        the same store, which then need not ask; b"" for nothing.
        """
        return b""

    def learn_encoding(self, known: bytes) -> None:  # noqa: B027 - most stores need not know
        """Take what `known_encoding` of another process gave. Raises as reading FORMAT does."""

    def begin_root(self, root: str) -> None:  # noqa: B027 - most stores need not know
        """What is written from now on belongs to the new root of this id (32 hex digits), whose
        FORMAT comes last.
        """

    @property
    def patience(self) -> Patience | None:
        """How long requests that fail are repeated here, and may be changed; None where nobody
        repeats.
        """
        return None

    @abstractmethod
    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """The object, or exactly the bytes of `byte_range`.

        Raises KeyNotFoundError, and ShortReadError when the object ends before the range does.
        """

    def get_bounded(self, key: str, nbytes_max: int) -> bytes:
        """The object, if it has at most `nbytes_max` bytes: for objects that others may have
        written.

        Raises KeyNotFoundError, and TooLargeError before anything of a larger one is read.
        """
        check_bound(self.url, key, self.info(key).nbytes, nbytes_max)
        return self.get(key)

    @abstractmethod
    def get_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers`, one after the other, with the bytes from `start` on.

        Raises like `get`; after an error the buffers hold undefined bytes.
        """

    def get_direct_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        """`get_into` around the page cache, where the back-end can."""
        self.get_into(key, start, buffers)

    def is_cold(self, key: str, byte_range: ByteRange) -> bool:
        """Whether most of these bytes are on a disk and not in this machine's memory, so that it is
        better to read them by `get_direct_into`, several requests at once.

        False where that is not known. Raises KeyNotFoundError.
        """
        return False

    @abstractmethod
    def create(
        self, key: str, nbytes: int, *, part_nbytes: int, durable: bool = True, direct: bool = False
    ) -> AbstractContextManager[ObjectWriter]:
        """A new object of `nbytes`, published whole at the end of the `with` block or not at all.

        With `durable=False` it may be lost in a power failure until `sync` was called for it.
        With `direct=True`: write around the page cache where the back-end can; buffers should be
        4096-aligned, and `part_nbytes` a multiple of 4096. Elsewhere the hint is ignored.
        Raises NoSpaceError, AccessDeniedError, KeyExistsError (at the latest when the block ends).
        """

    def begin_joint(self, key: str, nbytes: int, *, part_nbytes: int) -> str:
        """Begin an object that several processes write: a token for all of them.

        "" where this back-end cannot: then one process has to write all of it. Nothing is visible
        before `end_joint`.
        """
        return ""

    def joint(self, key: str, nbytes: int, *, part_nbytes: int, token: str) -> JointWriter:
        """A writer of parts of the object that `begin_joint` began, in any process."""
        raise NotImplementedError(f"{self.url} has no objects that several processes write")

    def end_joint(
        self, key: str, nbytes: int, *, part_nbytes: int, token: str, receipts: Mapping[int, str]
    ) -> None:
        """Publish the object, durable on return; `receipts` are those of all its parts.

        Raises KeyExistsError, ValueError when a part is missing, and nothing is published then.
        """
        raise NotImplementedError(f"{self.url} has no objects that several processes write")

    def abort_joint(self, key: str, token: str) -> None:
        """Remove what was written of an object that will not be published."""
        raise NotImplementedError(f"{self.url} has no objects that several processes write")

    @abstractmethod
    def put_if_absent(self, key: str, data: bytes) -> None:
        """Create `key`, durable on return.

        Raises KeyExistsError when another's object exists already, OutcomeUnknownError when no
        answer came: the object may exist now or later. Never leaves a partial object, never retries
        by itself after an attempt whose outcome is unknown.
        """

    @abstractmethod
    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix` and is greater than `after`, in ascending key
        order.

        `prefix` is a plain string prefix. Objects under construction are not listed.
        """

    @abstractmethod
    def info(self, key: str) -> ObjectInfo:
        """Size and age of one object. Raises KeyNotFoundError."""

    def exists(self, key: str) -> bool:
        """Whether there is such an object now."""
        try:
            self.info(key)
        except KeyNotFoundError:
            return False
        return True

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object; removing what is not there is not an error."""

    def why_not_delete(self, prefix: str) -> str:
        """Why `delete` refuses what is below the directory `prefix` ("a/b/"): a symbolic link leads
        there. "" when it does not.
        """
        return ""

    @abstractmethod
    def sync(self, keys: Iterable[str]) -> None:
        """Returns when these objects, and the directories that lead to them, survive a power
        failure.
        """

    @abstractmethod
    def abort_unfinished(self, prefix: str) -> int:
        """Remove what died writers left under construction below `prefix`; returns how many.

        Never through a symbolic link to a directory.
        """

    def rest(self) -> None:  # noqa: B027 - most stores hold little
        """Release connections, threads and open files until the next call needs them."""

    @abstractmethod
    def close(self) -> None:
        """Release connections and threads. The store is not used afterwards."""


def check_bound(url: str, key: str, nbytes: int, nbytes_max: int | None) -> None:
    """Raises TooLargeError when an object of `nbytes` is more than the caller takes."""
    if nbytes_max is not None and nbytes > nbytes_max:
        raise TooLargeError(
            f"read {key} in {url}: it has {nbytes} bytes, at most {nbytes_max} were expected"
        )


def short_read(url: str, key: str, wanted: ByteRange, nbytes: int) -> ShortReadError:
    """The error for an object of `nbytes` that ends before the requested bytes."""
    return ShortReadError(
        f"read {key} in {url}: bytes {wanted.start} to {wanted.end} were requested, the object has "
        f"{nbytes}"
    )


LOG_SECONDS = 30.0  # between lines about one wait


class Patience:
    """How long failed requests are repeated, and whether any is being repeated, for all users of
    one retry policy.

    Any thread may change the bound at any time; a pause that exceeds the new one ends at once. A
    wait is logged when it begins, and every `LOG_SECONDS` while it lasts.
    """

    def __init__(self) -> None:
        self.usual_seconds = 0.0  # the policy's own bound
        self.who = ""  # whose requests these are, for lines of the log: "rank 3"
        self.repeated = 0  # requests, so far
        self._changed = threading.Condition(ForkSafeLock())
        self._seconds: float | None = None
        self._waiting = 0
        self._began = 0.0
        self._logged = -math.inf
        self._is_logged = False  # whether a line was logged for this wait
        self._reporting = ForkSafeLock()
        self._on_wait: Callable[[bool], object] | None = None
        self._reported = False  # what `_on_wait` was called with last

    @property
    def seconds(self) -> float:
        """The bound as it is now, in seconds."""
        bound = self._seconds
        return self.usual_seconds if bound is None else bound

    def set(self, seconds: float | None, on_wait: Callable[[bool], object] | None = None) -> None:
        """Give up requests that have failed for `seconds`; None stands for the policy's own bound.

        `on_wait(True)` is called when the first request begins to be repeated, `on_wait(False)`
        when the last one has ended, from any thread; it must not raise.
        """
        with self._changed:
            self._seconds = seconds
            # A request that pauses between two tries looks again, and is given up if it is time.
            self._changed.notify_all()
        # The former listener hears the end, and the new one what is so now.
        with self._reporting:
            if self._reported and self._on_wait is not None:
                self._on_wait(False)
            self._on_wait, self._reported = on_wait, False
        self._report()

    def shorten(self, seconds: float) -> None:
        """Lower the bound that was set; never raise it."""
        with self._changed:
            if self._seconds is not None:
                self._seconds = min(self._seconds, seconds)
            self._changed.notify_all()

    def sleep(self, seconds: float) -> None:
        """Wait so long, or until the bound changes."""
        with self._changed:
            self._changed.wait(seconds)

    def begin(self, now: float) -> None:
        """A request has failed and will be repeated."""
        with self._changed:
            self._waiting += 1
            if self._waiting == 1:
                self._began, self._is_logged = now, False
        self._report()

    def count(self) -> None:
        """A request will be repeated, for the first time or again."""
        with self._changed:
            self.repeated += 1

    def note(self, error: object, limit: float, now: float) -> None:
        """A request has failed, for the first time or again."""
        # One line for all: behind a store that is away, every thread has a request that failed.
        with self._changed:
            if now - self._logged < LOG_SECONDS:
                return
            self._logged, self._is_logged = now, True
            waited = now - self._began
        whose = f"{self.who}: " if self.who else ""
        logger.warning(
            "%s%s; tried again since %.0f s, for %g s at most", whose, error, waited, limit
        )

    def end(self, now: float, *, is_answered: bool) -> None:
        """A repeated request was answered, or given up."""
        with self._changed:
            self._waiting -= 1
            is_over = is_answered and not self._waiting and self._is_logged
            waited = now - self._began
        if is_over:
            logger.warning("the store answers again, after %.1f s", waited)
        self._report()

    def _report(self) -> None:
        with self._reporting:  # one at a time, so that the last call has the newest value
            waits = self._waiting > 0
            if waits != self._reported and self._on_wait is not None:
                self._reported = waits
                self._on_wait(waits)
