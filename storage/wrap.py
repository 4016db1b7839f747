"""A store around a store, for those that change a few operations and pass on the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from storage.store import ByteRange, ExclusiveCreate, JointWriter, ObjectInfo, ObjectWriter, Store

if TYPE_CHECKING:
    from storage.patience import Patience


class WrappedStore(Store):
    """Passes everything on to `inner`. Closing it closes `inner`.

    A subclass that keeps objects under other keys in `inner` overrides `_inner_key`, and what
    returns keys: `list`, `info` and `abort_unfinished`.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.part_nbytes_min = inner.part_nbytes_min
        self.is_disk = inner.is_disk

    @property
    def url(self) -> str:  # type: ignore[override]
        return self.inner.url

    @property
    def place(self) -> str:
        return self.inner.place

    @property
    def exclusive_create(self) -> ExclusiveCreate:  # type: ignore[override]
        return self.inner.exclusive_create

    @property
    def retries(self) -> int:
        return self.inner.retries

    def encrypting(self, other: Store) -> Store:
        return self.inner.encrypting(other)

    @property
    def known_encoding(self) -> bytes:
        return self.inner.known_encoding

    def learn_encoding(self, known: bytes) -> None:
        self.inner.learn_encoding(known)

    def begin_root(self, root: str) -> None:
        self.inner.begin_root(root)

    @property
    def patience(self) -> Patience | None:
        return self.inner.patience

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        return self.inner.get(self._inner_key(key), byte_range)

    def get_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        self.inner.get_into(self._inner_key(key), start, buffers)

    def get_direct_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        self.inner.get_direct_into(self._inner_key(key), start, buffers)

    def is_cold(self, key: str, byte_range: ByteRange) -> bool:
        return self.inner.is_cold(self._inner_key(key), byte_range)

    def create(
        self,
        key: str,
        nbytes: int,
        *,
        part_nbytes: int,
        durable: bool = True,
        direct: bool = False,
    ) -> AbstractContextManager[ObjectWriter]:
        return self.inner.create(
            self._inner_key(key), nbytes, part_nbytes=part_nbytes, durable=durable, direct=direct
        )

    def begin_joint(self, key: str, nbytes: int, *, part_nbytes: int) -> str:
        return self.inner.begin_joint(self._inner_key(key), nbytes, part_nbytes=part_nbytes)

    def joint(self, key: str, nbytes: int, *, part_nbytes: int, token: str) -> JointWriter:
        place = self._inner_key(key)
        return self.inner.joint(place, nbytes, part_nbytes=part_nbytes, token=token)

    def end_joint(
        self, key: str, nbytes: int, *, part_nbytes: int, token: str, receipts: Mapping[int, str]
    ) -> None:
        place = self._inner_key(key)
        self.inner.end_joint(place, nbytes, part_nbytes=part_nbytes, token=token, receipts=receipts)

    def abort_joint(self, key: str, token: str) -> None:
        self.inner.abort_joint(self._inner_key(key), token)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self.inner.put_if_absent(self._inner_key(key), data)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        return self.inner.list(prefix, after=after)

    def info(self, key: str) -> ObjectInfo:
        return self.inner.info(self._inner_key(key))

    def delete(self, key: str) -> None:
        self.inner.delete(self._inner_key(key))

    def why_not_delete(self, prefix: str) -> str:
        return self.inner.why_not_delete(prefix)

    def sync(self, keys: Iterable[str]) -> None:
        self.inner.sync([self._inner_key(key) for key in keys])

    def abort_unfinished(self, prefix: str) -> int:
        return self.inner.abort_unfinished(prefix)

    def close(self) -> None:
        self.inner.close()

    def _inner_key(self, key: str) -> str:
        """The key in `inner` of the object `key`."""
        return key
