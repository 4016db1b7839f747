"""A store of ours as a store of zarr, so that zarr's own tests can judge it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable
from typing import Any

from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    SuffixByteRequest,
)
from zarr.abc.store import Store as ZarrStore
from zarr.core.buffer import Buffer, BufferPrototype

from storage import ByteRange, KeyExistsError, KeyNotFoundError, open_store

_LEAF = "~"


class JudgedStore(ZarrStore):  # type: ignore[misc]
    """zarr replaces values, which our stores never do: it deletes first, and creates then."""

    supports_writes = True
    supports_deletes = True
    supports_listing = True

    def __init__(
        self, url: str, options: dict[str, Any] | None = None, *, read_only: bool = False
    ) -> None:
        super().__init__(read_only=read_only)
        self.url = url
        self.options = options or {}
        self.inner = open_store(url, **self.options)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.url, self.options, self.read_only)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JudgedStore) and (self.url, self.read_only) == (
            other.url,
            other.read_only,
        )

    def with_read_only(self, read_only: bool = False) -> JudgedStore:
        return JudgedStore(self.url, self.options, read_only=read_only)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        if not self._is_open:
            await self._open()
        try:
            return prototype.buffer.from_bytes(self._read(key, byte_range))
        except KeyNotFoundError:
            return None

    def _read(self, key: str, wanted: ByteRequest | None) -> bytes:
        if wanted is None:
            return self.inner.get(ours(key))
        nbytes = self.inner.info(ours(key)).nbytes
        if isinstance(wanted, RangeByteRequest):
            start, end = wanted.start, wanted.end
        elif isinstance(wanted, OffsetByteRequest):
            start, end = wanted.offset, nbytes
        elif isinstance(wanted, SuffixByteRequest):
            start, end = max(0, nbytes - wanted.suffix), nbytes
        else:
            raise ValueError(f"Unexpected byte_range, got {wanted}.")
        start = min(start, nbytes)
        return self.inner.get(ours(key), ByteRange(start, max(start, min(end, nbytes))))

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return [await self.get(key, prototype, wanted) for key, wanted in key_ranges]

    async def exists(self, key: str) -> bool:
        return self.inner.exists(ours(key))

    async def set(self, key: str, value: Buffer) -> None:
        self._check_writable()
        if not self._is_open:
            await self._open()
        if not isinstance(value, Buffer):
            raise TypeError(f"JudgedStore.set(): `value` must be a Buffer, got {type(value)}")
        self.inner.delete(ours(key))
        self.inner.put_if_absent(ours(key), value.to_bytes())

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        self._check_writable()
        try:
            self.inner.put_if_absent(ours(key), value.to_bytes())
        except KeyExistsError:
            return

    async def delete(self, key: str) -> None:
        self._check_writable()
        self.inner.delete(ours(key))

    async def list(self) -> AsyncIterator[str]:
        for entry in self.inner.list(""):
            yield theirs(entry.key)

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        for entry in self.inner.list(prefix_of_ours(prefix)):
            yield theirs(entry.key)

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        below = prefix.rstrip("/") + "/" if prefix else ""
        keys = [theirs(entry.key) for entry in self.inner.list(prefix_of_ours(below))]
        names = {key[len(below) :].partition("/")[0] for key in keys}
        for name in sorted(names):
            yield name


def ours(key: str) -> str:
    """Our key for zarr's: as a disk, ours have no `a` next to `a/b`, nor parts like `.tmp-x`."""
    return prefix_of_ours(key) + _LEAF


def prefix_of_ours(prefix: str) -> str:
    """The same for the beginning of a key: a dot more before `.tmp-`."""
    return re.sub(r"(^|/)(\.+tmp-)", r"\1.\2", prefix)


def theirs(key: str) -> str:
    """zarr's key for ours."""
    return re.sub(r"(^|/)\.(\.+tmp-)", r"\1\2", key.removesuffix(_LEAF))


def _again(url: str, options: dict[str, Any], read_only: bool) -> JudgedStore:
    return JudgedStore(url, options, read_only=read_only)
