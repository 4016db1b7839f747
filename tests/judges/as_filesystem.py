"""A store of ours as a filesystem of fsspec, so that fsspec's own tests can judge it."""

from __future__ import annotations

import io
from typing import Any

from fsspec import AbstractFileSystem

from storage import ByteRange, KeyExistsError, KeyNotFoundError, Store


class StoreFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Files are objects. A directory is there as long as a file is below it."""

    protocol = "judged"
    cachable = False

    def __init__(self, store: Store, part_nbytes: int) -> None:
        super().__init__()
        self.store = store
        self.part_nbytes = part_nbytes

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path).strip("/")
        below = f"{path}/" if path else ""
        entries: dict[str, dict[str, Any]] = {}
        for listed in self.store.list(below):
            name, slash, _ = listed.key[len(below) :].partition("/")
            kind = {"size": 0, "type": "directory"} if slash else self._file(listed.key)
            entries.setdefault(name, {**kind, "name": below + name})
        if path and not entries:
            try:
                entries[path] = self._file(path)
            except KeyNotFoundError:
                raise FileNotFoundError(path) from None
        return list(entries.values()) if detail else [entry["name"] for entry in entries.values()]

    def _file(self, key: str) -> dict[str, Any]:
        return {"name": key, "size": self.store.info(key).nbytes, "type": "file"}

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        key = self._strip_protocol(path)
        try:
            if start is None and end is None:
                return self.store.get(key)
            begin, stop, _ = slice(start, end).indices(self.store.info(key).nbytes)
            return self.store.get(key, ByteRange(begin, max(begin, stop)))
        except KeyNotFoundError:
            raise FileNotFoundError(path) from None

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        key = self._strip_protocol(path)
        if mode != "create":  # a key of ours is written once
            self.store.delete(key)
        try:
            if len(value) <= self.part_nbytes:
                self.store.put_if_absent(key, bytes(value))
                return
            with self.store.create(key, len(value), part_nbytes=self.part_nbytes) as writer:
                for index, start in enumerate(range(0, len(value), self.part_nbytes)):
                    writer.write_part(index, [memoryview(value)[start : start + self.part_nbytes]])
        except KeyExistsError:
            raise FileExistsError(path) from None

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.BytesIO:
        if mode == "rb":
            return io.BytesIO(self.cat_file(path))
        if "x" in mode and self.exists(path):
            raise FileExistsError(path)
        return _Written(self, path, "create" if "x" in mode else "overwrite")

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        if not self.isdir(path1):
            self.pipe_file(path2, self.cat_file(path1))

    def rm_file(self, path: str) -> None:
        self._rm(path)

    def _rm(self, path: str) -> None:
        self.store.delete(self._strip_protocol(path))

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """Comes with its first file."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Comes with its first file."""

    def rmdir(self, path: str) -> None:
        """Goes with its last file."""


class _Written(io.BytesIO):
    """A file that is there once it is closed."""

    def __init__(self, filesystem: StoreFileSystem, path: str, mode: str) -> None:
        super().__init__()
        self._publish = lambda data: filesystem.pipe_file(path, data, mode=mode)

    def close(self) -> None:
        if not self.closed:
            self._publish(self.getvalue())
        super().close()
