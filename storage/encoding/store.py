"""A store whose objects are encoded in the storage, and plain for those who read and write.

What a root is follows from its FORMAT object (`storage.encoding.layout`), or, where a step's
directory was opened by itself, from its objects. It is looked at when something depends on it, and
once: a plain root costs one small request for each open store that has not read FORMAT.
"""

from __future__ import annotations

import contextlib
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from storage.encoding.blocks import Zstd
from storage.encoding.encryption_keys import KeySource, out_of_sight, read_key
from storage.encoding.layout import (
    BLOCK_NBYTES,
    FOOTER_NBYTES,
    FORMAT_KEY,
    FORMAT_NBYTES_MAX,
    MAGIC,
    NO_ROOT,
    Codec,
    EncodedWriter,
    Footer,
    Grid,
    ObjectEncoder,
    ObjectIndex,
    RootEncoding,
    check_root,
    damaged,
    decode_root,
    encode_object,
    encode_root,
    root_of,
)
from storage.errors import (
    AccessDeniedError,
    CorruptObjectError,
    InvalidUrlError,
    KeyNotFoundError,
    ShortReadError,
    TooLargeError,
)
from storage.forks import ForkSafeLock
from storage.ranges import copy_to, drop_front, flat_views, take_front
from storage.store import (
    ByteRange,
    ObjectInfo,
    ObjectWriter,
    Store,
    check_bound,
    check_key,
    short_read,
)
from storage.wrap import WrappedStore

ENCODING_OPTIONS = ("encryption_key", "compression")
EXPECT_ROOT = "expect_root"  # an option of this one place, not of copies
MANIFEST_KEY = "MANIFEST"
PLAIN = b"plain"  # what processes say to each other of a root that is not encoded
TAIL_NBYTES = 32 << 10  # read for an index: enough for an object of 2 GiB
REQUEST_NBYTES = 16 << 20  # of neighbouring blocks that are read together
INDEXES_MAX = 4096  # that are remembered: 13 bytes for each MiB of an object
_PARTS_MAX = 10_000  # of one object, as S3 has it
# The directory of one step, in a root: its objects have it in front of their keys.
_STEP = re.compile(r"(?:.*/)?(steps/[0-9]{8,18}-e[0-9]{6,18}-[0-9a-f]{16}/)")
_ROOT_ID = re.compile(r"[0-9a-f]{32}")


class EncodingOptions(NamedTuple):
    """What a caller wants: a key and a level of zstd, for new roots and to open encoded ones; and
    which root it must be.
    """

    encryption_key: KeySource | None = None
    level: int | None = None
    root: bytes = NO_ROOT

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> EncodingOptions:
        """Take `encryption_key`, `compression` and `expect_root` out of `options`.

        Raises InvalidUrlError.
        """
        key = out_of_sight(options.pop("encryption_key", None))
        compression = options.pop("compression", None)
        expected = options.pop(EXPECT_ROOT, None)
        if expected is not None and not (
            isinstance(expected, str) and _ROOT_ID.fullmatch(expected)
        ):
            raise InvalidUrlError(
                f"expect_root={expected!r}: expected the id of a root, the 32 hex digits in FORMAT"
            )
        root = NO_ROOT if expected is None else bytes.fromhex(expected)
        if compression is None:
            return cls(key, None, root)
        name, colon, level = str(compression).partition(":")
        if name != "zstd" or (colon and not level.lstrip("-").isdigit()):
            raise InvalidUrlError(
                f"compression={compression!r}: expected 'zstd', or with a level 'zstd:3'"
            )
        if not -7 <= (number := int(level or 1)) <= 22:
            raise InvalidUrlError(f"compression={compression!r}: levels are -7 to 22")
        return cls(key, number, root)


class EncodedStore(WrappedStore):
    """`inner`, which may be an encoded root. All is as in a plain one, but for the sizes that a
    listing gives: they are those in the storage.

    With options, a new root is encoded as they say, and an existing one must be. Raises
    AccessDeniedError for a missing or wrong key, InvalidUrlError for options that do not fit the
    root, CorruptObjectError for objects that were changed, exchanged, are of another root or are
    not encoded.
    """

    def __init__(self, inner: Store, options: EncodingOptions | None = None) -> None:
        super().__init__(inner)
        self._options = options or EncodingOptions()
        self._wants_encoding = self._options[:2] != (None, None)
        self._is_known = False  # whether the root is encoded, and how; then:
        self._codec: Codec | None = None
        self._encoding: RootEncoding | None = None
        self._format = b""  # the FORMAT object that says so
        self._is_looked_for = False  # there was neither FORMAT nor MANIFEST
        self._new: Codec | None = None  # of a root that does not exist yet
        self._new_root = NO_ROOT
        match = _STEP.fullmatch(inner.url.rstrip("/") + "/")
        # What keys have in front below their root, where there is no FORMAT; None: not known.
        self._folder = None if match is None else match[1]
        self._indexes: OrderedDict[str, ObjectIndex] = OrderedDict()
        self._lock = ForkSafeLock()

    def encrypting(self, other: Store) -> Store:
        codec = self._write_codec("steps/")
        if codec is None or codec.secret is None:
            return other
        store = EncodedStore(other)
        store._codec, store._encoding = codec._replace(zstd=None), self._encoding
        store._format, store._is_known = self._format, True
        return store

    @property
    def known_encoding(self) -> bytes:
        """FORMAT of an encoded root, `PLAIN` for a root that is not encoded, b"" for neither."""
        with self._lock:
            if not self._is_known:
                return b""
            return PLAIN if self._encoding is None else self._format

    def learn_encoding(self, known: bytes) -> None:
        if known == PLAIN:
            self._settle(None)
        elif known:
            self._opened(FORMAT_KEY, known)

    def begin_root(self, root: str) -> None:
        self._expect(bytes.fromhex(root))
        with self._lock:
            self._new_root, self._new = bytes.fromhex(root), None
        self.inner.begin_root(root)

    # --- reading ----------------------------------------------------------------------------------

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        if byte_range is None:
            return self._opened(key, self.inner.get(key))
        if self._read_codec(key) is None:
            return self.inner.get(key, byte_range)
        if byte_range.start < 0 or byte_range.end < byte_range.start:
            raise ValueError(f"{key}: {byte_range} is not a range")
        target = bytearray(byte_range.nbytes)
        self.get_into(key, byte_range.start, [memoryview(target)])
        return bytes(target)

    def get_bounded(self, key: str, nbytes_max: int) -> bytes:
        if self._is_known and self._codec is None and key != FORMAT_KEY:
            return self.inner.get_bounded(key, nbytes_max)
        # Encoded objects of few bytes are longer; what they hold is compared below.
        stored = self.inner.get_bounded(key, 2 * nbytes_max + FORMAT_NBYTES_MAX)
        data = self._opened(key, stored, nbytes_max)
        check_bound(self.url, key, len(data), nbytes_max)
        return data

    def get_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        codec = self._read_codec(key)
        if codec is None:
            self.inner.get_into(key, start, buffers)
        else:
            self._decode_into(key, start, flat_views(buffers), codec)

    def get_direct_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        codec = self._read_codec(key)
        if codec is None:
            self.inner.get_direct_into(key, start, buffers)
        else:
            self._decode_into(key, start, flat_views(buffers), codec)

    def is_cold(self, key: str, byte_range: ByteRange) -> bool:
        return self._read_codec(key) is None and self.inner.is_cold(key, byte_range)

    def info(self, key: str) -> ObjectInfo:
        codec = None if key == FORMAT_KEY else self._read_codec(key)
        if codec is None:
            return self.inner.info(key)
        stored = self.inner.info(key)
        return stored._replace(nbytes=self._index(key, codec, stored).grid.nbytes)

    def exists(self, key: str) -> bool:
        return self.inner.exists(key)

    # --- writing ----------------------------------------------------------------------------------

    def put_if_absent(self, key: str, data: bytes) -> None:
        if key == FORMAT_KEY:
            self._expect(root_of(bytes(data)))
        codec = self._write_codec(check_key(key))
        if codec is not None and key == FORMAT_KEY:
            compression = "none" if codec.zstd is None else "zstd"
            self.inner.put_if_absent(key, encode_root(codec.secret, compression, bytes(data)))
            with self._lock:
                self._new_root, self._new = root_of(bytes(data)), None
        elif codec is not None:
            self._forget(key)
            self.inner.put_if_absent(key, encode_object(codec, self._name(key), bytes(data)))
        else:
            self.inner.put_if_absent(key, data)

    def create(
        self,
        key: str,
        nbytes: int,
        *,
        part_nbytes: int,
        durable: bool = True,
        direct: bool = False,
    ) -> AbstractContextManager[ObjectWriter]:
        codec = self._write_codec(check_key(key))
        if codec is None:
            return self.inner.create(
                key, nbytes, part_nbytes=part_nbytes, durable=durable, direct=direct
            )
        self._forget(key)
        encoder = ObjectEncoder(
            codec, self._name(key), Grid(nbytes, part_nbytes, min(BLOCK_NBYTES, part_nbytes))
        )
        longest = encoder.nbytes_max
        # One part stays one; several may become one more than S3 takes.
        size = longest if nbytes <= part_nbytes else part_nbytes
        while -(-longest // size) > _PARTS_MAX:
            size += part_nbytes

        def begin() -> AbstractContextManager[ObjectWriter]:
            return self.inner.create(key, longest, part_nbytes=size, durable=durable, direct=direct)

        return EncodedWriter(key, encoder, begin, size)

    def begin_joint(self, key: str, nbytes: int, *, part_nbytes: int) -> str:
        # Where a block lies is known to the process that has written all blocks before it.
        if self._write_codec(check_key(key)) is not None:
            return ""
        return self.inner.begin_joint(key, nbytes, part_nbytes=part_nbytes)

    def delete(self, key: str) -> None:
        self._forget(key)
        # Without FORMAT, what comes next may be another root.
        if key == FORMAT_KEY:
            self._is_known = False
        self.inner.delete(key)

    # --- what the root is -------------------------------------------------------------------------

    def _read_codec(self, key: str) -> Codec | None:
        """How objects are encoded that are there; None where nothing says that they are."""
        if not self._is_known and not self._is_looked_for:
            self._look(key)
        return self._codec if self._is_known else self._new_codec()

    def _write_codec(self, key: str) -> Codec | None:
        """How a new object is to be encoded; None as it is."""
        # A root may have been made since by another rank. Its FORMAT itself follows the options.
        is_of_root = key.startswith("steps/")
        if not self._is_known and key != FORMAT_KEY and (is_of_root or not self._is_looked_for):
            self._look(key)
        return self._codec if self._is_known else self._new_codec()

    def _new_codec(self) -> Codec | None:
        """How a root is encoded that does not exist yet."""
        source, level = self._options.encryption_key, self._options.level
        # Under the lock: a function that gives the key is called once, and all get one answer.
        with self._lock:
            if self._new is None and self._wants_encoding:
                secret = None if source is None else read_key(source, "", self.url)
                self._new = Codec(secret, None if level is None else Zstd(level), self._new_root)
            return self._new

    def _look(self, key: str) -> None:
        """Find out what the root is, if anything says so yet; `key` is what was asked for."""
        try:
            self.get_bounded(FORMAT_KEY, FORMAT_NBYTES_MAX)
            return
        except (KeyNotFoundError, TooLargeError):
            self._is_looked_for = True
        for name in (MANIFEST_KEY, key):
            if not self._is_known and _is_of_step(name):
                with contextlib.suppress(KeyNotFoundError, ShortReadError):
                    self._settle_by(name, self.inner.get(name, ByteRange(0, len(MAGIC))))

    def _settle_by(self, key: str, start: bytes) -> None:
        """The root is what this object of a step is, which begins with `start`."""
        if start != MAGIC:
            if self._options.root != NO_ROOT:
                raise InvalidUrlError(
                    f"{self.url} is a step's directory that does not say of which root it is, and "
                    f"expect_root is {self._options.root.hex()}; open the root, or leave it out"
                )
            self._settle(None)
            return
        nbytes = self.inner.info(key).nbytes
        footer = Footer.read(self._tail(key, nbytes, min(nbytes, FOOTER_NBYTES)), self._where(key))
        encoding = RootEncoding(footer.cipher, footer.compression, footer.key_id)
        self._settle(encoding, root=footer.root)

    def _opened(self, key: str, stored: bytes, nbytes_max: int | None = None) -> bytes:
        """An object that was read whole. FORMAT, and what is encoded, say what the root is."""
        if key == FORMAT_KEY:
            root = decode_root(stored, self._where(key))
            data = stored if root is None else root[1]
            # Of no form that is known: damage, or a newer version, which the reader finds.
            if root is not None or root_of(data) != NO_ROOT:
                self._settle(None if root is None else root[0], stored, root_of(data))
            return data
        wants = self._wants_encoding or self._options.root != NO_ROOT
        if not self._is_known and (stored.startswith(MAGIC) or wants):
            self._look(key)
        codec = self._codec if self._is_known else self._new_codec()
        return stored if codec is None else self._decoded(key, stored, codec, nbytes_max)

    def _settle(
        self, encoding: RootEncoding | None, stored: bytes = b"", root: bytes = NO_ROOT
    ) -> None:
        """The root is that, as its FORMAT `stored` says. Raises when the options do not fit."""
        if root != NO_ROOT or encoding is not None:
            self._expect(root)
        with self._lock:
            is_of_root = self._codec is None or self._codec.root == root
            if self._is_known and self._encoding == encoding and is_of_root:
                return
        if encoding is None and self._wants_encoding:
            raise self._misfit("encoded")
        codec = None if encoding is None else self._codec_of(encoding, root)
        if codec is not None and codec.secret is not None and stored:
            check_root(codec.secret, stored, self._where(FORMAT_KEY))
        with self._lock:
            self._codec, self._encoding, self._is_known = codec, encoding, True
            self._format = stored
            self._indexes.clear()

    def _expect(self, root: bytes) -> None:
        """Raises InvalidUrlError unless `root` is the root that the caller expects, if any."""
        expected = self._options.root
        if expected not in (NO_ROOT, root):
            raise InvalidUrlError(
                f"{self.url} is the root {root.hex()}, and expect_root is {expected.hex()}: "
                "another root lies there. Put the expected one back, or leave expect_root out"
            )

    def _misfit(self, what: str) -> InvalidUrlError:
        return InvalidUrlError(
            f"{self.url} is not {what}, as encryption_key or compression ask for; a root stays as "
            "it was made: leave them out, or begin a new root (`ckpt cp` copies this one into it)"
        )

    def _codec_of(self, encoding: RootEncoding, root: bytes) -> Codec:
        source, level = self._options.encryption_key, self._options.level
        secret = None
        if encoding.cipher != "none":
            if source is None:
                raise AccessDeniedError(
                    f"{self.url} is encrypted with the key {encoding.key_id}: pass it as "
                    'storage_options={"encryption_key": ...}, or as --key-file to a command'
                )
            secret = read_key(source, encoding.key_id, self.url)
        elif source is not None:
            raise self._misfit("encrypted")
        if encoding.compression == "none" and level is not None:
            raise self._misfit("compressed")
        return Codec(secret, None if encoding.compression == "none" else Zstd(level or 1), root)

    # --- objects ----------------------------------------------------------------------------------

    def _decoded(self, key: str, data: bytes, codec: Codec, nbytes_max: int | None) -> bytes:
        where, stored = self._where(key), memoryview(data)
        footer = self._footer(stored, codec, where)
        # Before a block is decoded: a few compressed bytes may stand for any number.
        check_bound(self.url, key, footer.grid.nbytes, nbytes_max)
        end = len(stored) - FOOTER_NBYTES
        if stored[: len(MAGIC)] != MAGIC or not 0 < footer.index_nbytes <= end - len(MAGIC):
            raise damaged(where, "it does not begin as an encoded object, or was cut")
        tagged = stored[end - footer.index_nbytes : end]
        index = self._checked(key, ObjectIndex(footer, tagged, codec.secret, where))
        entries = [index.entry(number) for number in range(index.grid.blocks_count)]
        return b"".join(
            index.decode(number, stored[entry.start : entry.end])
            for number, entry in enumerate(entries)
        )

    def _decode_into(self, key: str, start: int, views: list[memoryview], codec: Codec) -> None:
        index = self._index(key, codec)
        end = start + sum(view.nbytes for view in views)
        if end > index.grid.nbytes:
            raise short_read(self.url, key, ByteRange(start, end), index.grid.nbytes)
        if start == end:
            return
        for numbers in _runs(index, index.grid.blocks_within(start, end)):
            first, last = index.entry(numbers[0]), index.entry(numbers[-1])
            stored = memoryview(bytearray(last.end - first.start))
            try:
                self.inner.get_into(key, first.start, [stored])
            except ShortReadError as error:
                raise damaged(self._where(key), f"it was cut ({error})") from None
            for number in numbers:
                entry, block = index.entry(number), index.grid.block(number)
                within = stored[entry.start - first.start : entry.end - first.start]
                data = memoryview(index.decode(number, within))
                data = data[max(start - block.start, 0) : end - block.start]
                copy_to(take_front(views, data.nbytes), data, data.nbytes)
                views = drop_front(views, data.nbytes)

    def _index(self, key: str, codec: Codec, info: ObjectInfo | None = None) -> ObjectIndex:
        """The index of an object, read by two requests when it is needed first."""
        with self._lock:
            if (known := self._indexes.get(check_key(key))) is not None:
                self._indexes.move_to_end(key)
                return known
        stored_nbytes = (info or self.inner.info(key)).nbytes
        where = self._where(key)
        # The footer says how long the index before it is: mostly both are in one guess.
        tail = self._tail(key, stored_nbytes, min(stored_nbytes, TAIL_NBYTES))
        footer = self._footer(memoryview(tail), codec, where)
        wanted = footer.index_nbytes + FOOTER_NBYTES
        if wanted > stored_nbytes - len(MAGIC):
            raise damaged(where, "it was cut")
        if wanted > len(tail):
            tail = self._tail(key, stored_nbytes, wanted)
        tagged = memoryview(tail)[len(tail) - wanted : len(tail) - FOOTER_NBYTES]
        index = self._checked(key, ObjectIndex(footer, tagged, codec.secret, where))
        with self._lock:
            self._indexes[key] = index
            while len(self._indexes) > INDEXES_MAX:
                self._indexes.popitem(last=False)
        return index

    def _tail(self, key: str, stored_nbytes: int, nbytes: int) -> bytes:
        return self.inner.get(key, ByteRange(stored_nbytes - nbytes, stored_nbytes))

    def _footer(self, tail: memoryview, codec: Codec, where: str) -> Footer:
        footer = Footer.read(tail, where)
        expected = "" if codec.secret is None else codec.secret.id
        if footer.key_id != expected:
            # Of the cipher, too: an object that is only compressed anybody could have made.
            raise damaged(where, f"it says that its key is {footer.key_id!r}, not {expected!r}")
        # A root that does not say what it is: one whose FORMAT is lost, or that is being made.
        if footer.root != codec.root and (self._is_known or codec.root != NO_ROOT):
            raise CorruptObjectError(
                f"{where} is an object of the root {footer.root.hex()}, and this is "
                f"{codec.root.hex()}: it was put there from another root; restore its own from a "
                "copy, or load an older step"
            )
        return footer

    def _name(self, key: str) -> str:
        """What an object at `key` is called below its root."""
        return key if self._format else f"{self._folder or ''}{key}"

    def _checked(self, key: str, index: ObjectIndex) -> ObjectIndex:
        """`index`, if it is that of the object `key`. Raises CorruptObjectError."""
        name = index.name
        is_right = name == self._name(key)
        if not self._format and self._folder is None:
            # A step's directory that was written, or is read, by itself under another name.
            with self._lock:
                is_right = f"/{key}".endswith(f"/{name}")
                if not is_right and f"/{name}".endswith(f"/{key}"):
                    self._folder, is_right = name.removesuffix(key), True
        if not is_right:
            raise CorruptObjectError(
                f"{self._where(key)} is the object {name}: it was moved or exchanged; restore both"
            )
        return index

    def _forget(self, key: str) -> None:
        with self._lock:
            self._indexes.pop(key, None)

    def _where(self, key: str) -> str:
        return f"{self.url.rstrip('/')}/{key}"


def _is_of_step(key: str) -> bool:
    """Whether a store that has `key` may be a step's directory, or the directory of all."""
    folder, _, name = key.rpartition("/")
    return "/" not in folder and (name == MANIFEST_KEY or name.endswith(".safetensors"))


def _runs(index: ObjectIndex, numbers: range) -> Iterator[list[int]]:
    """`numbers` in runs of blocks that are stored one after the other, of some size."""
    run: list[int] = []
    end = nbytes = 0
    for number in numbers:
        entry = index.entry(number)
        if run and (entry.start != end or nbytes + entry.nbytes > REQUEST_NBYTES):
            yield run
            run, nbytes = [], 0
        run.append(number)
        end, nbytes = entry.end, nbytes + entry.nbytes
    yield run
