"""A store of one's own: objects in an SQLite file.

python examples/own_store.py objects.db
"""

import sqlite3
import sys
import threading
import time

import ckpt
from storage import (
    BufferedWriter,
    ByteRange,
    ExclusiveCreate,
    KeyExistsError,
    KeyNotFoundError,
    ObjectInfo,
    ShortReadError,
    Store,
    TransientError,
    check_key,
    check_prefix,
)


class SqliteStore(Store):
    exclusive_create = ExclusiveCreate.ATOMIC  # the primary key refuses the second writer

    def __init__(self, path):
        self.url = f"sqlite://{path}"  # shown in messages: no password belongs in it
        self._lock = threading.Lock()  # every method may be called from any thread
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._run("PRAGMA synchronous = FULL")  # durable on return: commits rest on it
        self._run("CREATE TABLE IF NOT EXISTS objects (key TEXT PRIMARY KEY, data BLOB, time REAL)")

    def _run(self, sql, *values):
        try:
            with self._lock:
                return self._db.execute(sql, values).fetchall()
        except sqlite3.OperationalError as error:  # locked by another process: nothing happened
            raise TransientError(f"{self.url}: {error}") from error

    def get(self, key, byte_range=None):
        size = self.info(key).nbytes
        start, end = byte_range or (0, size)
        if end > size:
            raise ShortReadError(f"read {key} in {self.url}: it has {size} bytes, not {end}")
        sql = "SELECT substr(data, ?, ?) FROM objects WHERE key = ?"
        return self._run(sql, start + 1, end - start, key)[0][0] or b""

    def get_into(self, key, start, buffers):
        nbytes = sum(buffer.nbytes for buffer in buffers)
        data = memoryview(self.get(key, ByteRange(start, start + nbytes)))
        for buffer in buffers:
            if buffer.nbytes:
                buffer.cast("B")[:], data = data[: buffer.nbytes], data[buffer.nbytes :]

    def create(self, key, nbytes, *, part_nbytes, durable=True, direct=False):
        return BufferedWriter(key, nbytes, part_nbytes=part_nbytes, publish=self.put_if_absent)

    def put_if_absent(self, key, data):
        try:
            self._run("INSERT INTO objects VALUES (?, ?, ?)", check_key(key), data, time.time())
        except sqlite3.IntegrityError as error:
            raise KeyExistsError(f"create {key}: it is in {self.url} already") from error

    def list(self, prefix, *, after=""):
        sql = "SELECT key, length(data), time FROM objects WHERE key > ? AND key >= ? ORDER BY key"
        for row in self._run(sql, after, check_prefix(prefix)):
            if not row[0].startswith(prefix):
                return
            yield ObjectInfo(*row)

    def info(self, key):
        sql = "SELECT key, length(data), time FROM objects WHERE key = ?"
        for row in self._run(sql, check_key(key)):
            return ObjectInfo(*row)
        raise KeyNotFoundError(f"read {key}: no such object in {self.url}")

    def delete(self, key):
        self._run("DELETE FROM objects WHERE key = ?", check_key(key))

    def sync(self, keys):
        pass  # every object is durable when it is there

    def abort_unfinished(self, prefix):
        check_prefix(prefix)
        return 0  # an object under construction is in the memory of its writer and dies with it

    def close(self):
        self._db.close()


if __name__ == "__main__":
    store = SqliteStore(sys.argv[1])
    for step in (1, 2):
        ckpt.save({"step": step}, store, step=step)
    print([info.step for info in ckpt.list_steps(store)])
    store.close()
