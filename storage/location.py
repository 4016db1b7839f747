"""Where objects are, as a caller says it: a url, a path, a place on a filesystem of fsspec, or a
store that the caller made.

Everything that takes a url takes the others as well. What is derived from a url (a name for
messages, a place below it) is derived from them too, here and once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeGuard

from storage.errors import InvalidUrlError
from storage.store import ObjectInfo, Store, check_key, check_prefix, redacted
from storage.wrap import WrappedStore

_CACHES = re.compile(r"([a-z]*cached?(://)?::)+")


class OnFilesystem(Protocol):
    """A filesystem of fsspec with a path on it: an `FSMap`, a `UPath` or a `DirFileSystem`."""

    @property
    def fs(self) -> Any:
        """The filesystem."""


StoreLike: TypeAlias = str | os.PathLike[str] | OnFilesystem | Store
"""A url, a path, a place on a filesystem of fsspec, or an open store that stays its caller's:
nothing here closes it.
"""


class FilesystemPlace(NamedTuple):
    """A path on a filesystem of fsspec."""

    filesystem: Any
    path: str


def place_on_filesystem(where: StoreLike) -> FilesystemPlace | None:
    """What an FSMap, a UPath or a DirFileSystem consists of; None for everything else."""
    filesystem = getattr(where, "fs", None)
    if is_url(where) or isinstance(where, Store) or not hasattr(filesystem, "unstrip_protocol"):
        return None
    path = getattr(where, "path", None)  # an FSMap calls it its root
    return FilesystemPlace(filesystem, getattr(where, "root", "") if path is None else path)


def is_url(where: StoreLike) -> TypeGuard[str | os.PathLike[str]]:
    """Whether `where` is a url or a path, and no object that has its options already."""
    return isinstance(where, str | os.PathLike)


def url_of(where: StoreLike) -> str:
    """The url, for messages and comparisons. Raises InvalidUrlError for what is no location."""
    if isinstance(where, Store):
        return where.url
    if (place := place_on_filesystem(where)) is not None:
        return redacted(place.filesystem.unstrip_protocol(place.path))
    path = os.fspath(where) if isinstance(where, os.PathLike) else where
    if not isinstance(path, str) or not path or "\0" in path:
        raise InvalidUrlError(
            "expected a path, a url such as s3://bucket/run, an FSMap, a UPath, or a "
            "storage.Store such as FsspecStore(filesystem, path), "
            f"got {path!r}{'' if path is where else f' from {where!r}'}"
        )
    return path


def fixed(where: StoreLike) -> StoreLike:
    """`where` as it is now: after a chdir, a relative path would be another place."""
    if not is_url(where):
        return where
    text = url_of(where)
    scheme = "file://" if text.startswith("file://") else ""
    path = text.removeprefix(scheme)
    is_path = not ("://" in path or "::" in path) and not (scheme and path.startswith("~"))
    return scheme + os.path.abspath(path) if is_path and path else text


def child_of(where: StoreLike, path: str) -> StoreLike:
    """The place `path` below `where`: a longer url, or the store with its keys below `path`."""
    path = path.strip("/")
    if isinstance(where, Store):
        return PrefixStore(where, path)
    if (place := place_on_filesystem(where)) is not None:
        below: OnFilesystem = place.filesystem.get_mapper(f"{place.path.rstrip('/')}/{path}")
        return below
    # Of a chain, the path is that of the first part; a cache without one has that of the next.
    url = url_of(where)
    if url.startswith("peer://"):  # an IPv6 address is no chain
        return f"{url.rstrip('/')}/{path}"
    caches = _CACHES.match(url)
    begin = caches[0] if caches else ""
    first, chain, rest = url[len(begin) :].partition("::")
    if begin + chain and re.fullmatch(r"[a-z]+(://)?", first):  # a protocol alone: its root
        return f"{begin}{first.removesuffix('://')}://{path}{chain}{rest}"
    return f"{begin}{first.rstrip('/')}/{path}{chain}{rest}"


def folder_of(file: StoreLike) -> StoreLike:
    """The folder that holds `file`, the url or path of one, on a filesystem of fsspec or not."""
    if (place := place_on_filesystem(file)) is not None:
        folder: OnFilesystem = place.filesystem.get_mapper(place.path.rpartition("/")[0])
        return folder
    url = url_of(file)
    return url.rpartition("/")[0] or ("/" if url.startswith("/") else ".")


class BorrowedStore(WrappedStore):
    """A caller's store: `close` leaves it open, for it is not ours to close."""

    def get_bounded(self, key: str, nbytes_max: int) -> bytes:
        return self.inner.get_bounded(key, nbytes_max)

    def close(self) -> None:
        """Does nothing: the caller that made the store closes it."""


def is_borrowed_from(store: Store, owned: Store) -> bool:
    """Whether `store` is what `open_store(owned)` returned."""
    while isinstance(store, WrappedStore) and not isinstance(store, BorrowedStore):
        store = store.inner
    return isinstance(store, BorrowedStore) and store.inner is owned


class PrefixStore(WrappedStore):
    """The part of `inner` below `prefix`, like a directory of a disk; keys are relative to it.

    Closing it closes `inner`.
    """

    def __init__(self, inner: Store, prefix: str) -> None:
        super().__init__(inner)
        self._prefix = f"{check_key(prefix)}/"

    @property
    def url(self) -> str:  # type: ignore[override]
        return f"{self.inner.url.rstrip('/')}/{self._prefix[:-1]}"

    @property
    def place(self) -> str:
        return f"{self.inner.place.rstrip('/')}/{self._prefix[:-1]}"

    def get_bounded(self, key: str, nbytes_max: int) -> bytes:
        return self.inner.get_bounded(self._inner_key(key), nbytes_max)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        # `after=""` means from the first key on, so it must not become the prefix itself: a store
        # may have an object of just that name.
        last_seen = self._prefix + after if after else ""
        for entry in self.inner.list(self._prefix + check_prefix(prefix), after=last_seen):
            yield entry._replace(key=entry.key.removeprefix(self._prefix))

    def info(self, key: str) -> ObjectInfo:
        return super().info(key)._replace(key=key)

    def why_not_delete(self, prefix: str) -> str:
        return self.inner.why_not_delete(self._prefix + prefix)

    def abort_unfinished(self, prefix: str) -> int:
        return self.inner.abort_unfinished(self._prefix + check_prefix(prefix))

    def _inner_key(self, key: str) -> str:
        # Checked before the prefix goes in front: `../x` would be inside of `inner` then.
        return self._prefix + check_key(key)
