"""Checkpoints are read from http servers, archives and Hugging Face, which hold no new ones."""

from __future__ import annotations

import functools
import http.server
import io
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec
import pytest
import torch

import ckpt
from storage import ByteRange, ShortReadError, StorageError, TransientError, open_store
from storage.generic import FsspecStore

NBYTES = 4 << 20


class IgnoresRanges(http.server.SimpleHTTPRequestHandler):
    """As `python -m http.server` does."""

    def log_message(self, *args: Any) -> None:
        """Quiet."""


class KnowsRanges(IgnoresRanges):
    def send_head(self) -> Any:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if wanted is None or not path.is_file():
            return super().send_head()
        data = path.read_bytes()
        start, end = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        return io.BytesIO(data[start:end])


class Slow(IgnoresRanges):
    """Sends files in two halves, the second half a second after `half` is set."""

    def __init__(self, *args: Any, half: threading.Event, **named: Any) -> None:
        self._half = half
        super().__init__(*args, **named)

    def copyfile(self, source: Any, outputfile: Any) -> None:
        data = source.read()
        outputfile.write(data[: len(data) // 2])
        self._half.set()
        time.sleep(0.5)
        outputfile.write(data[len(data) // 2 :])


@contextmanager
def served(handler: Callable[..., Any]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((NBYTES // 4,), value), "b": torch.full((3,), value)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ckpt.save(state(1.0), tmp_path / "site/run", step=1)
    ckpt.save(state(2.0), tmp_path / "site/run", step=2)
    return tmp_path / "site"


def test_a_root_on_an_http_server_is_read(folder: Path) -> None:
    with served(functools.partial(KnowsRanges, directory=str(folder))) as url:
        target = state(0.0)
        assert ckpt.load(target, f"{url}/run").step == 2
        assert torch.equal(target["w"], state(2.0)["w"])
        assert [entry.step for entry in ckpt.list_steps(f"{url}/run")] == [1, 2]
        assert ckpt.verify(f"{url}/run", 1).step == 1
        for unsafe in (False, True):
            with pytest.raises(StorageError, match=r"http://.* can only be read"):
                ckpt.save(target, f"{url}/run", step=3, unsafe_single_writer=unsafe)


def test_a_server_that_ignores_ranges_leaves_the_state_alone(folder: Path, tmp_path: Path) -> None:
    with served(functools.partial(IgnoresRanges, directory=str(folder))) as url:
        target = state(0.0)
        with pytest.raises(StorageError, match=r"ignores byte ranges.*simplecache::http://"):
            ckpt.load(target, f"{url}/run")
        assert torch.equal(target["w"], state(0.0)["w"])
        # The way out that the message names.
        options = {"simplecache": {"cache_storage": str(tmp_path / "cache")}}
        ckpt.load(target, f"simplecache::{url}/run", storage_options=options)
        assert torch.equal(target["w"], state(2.0)["w"])


@pytest.mark.parametrize("whole", [False, True])
def test_a_file_that_another_thread_still_copies_is_waited_for(tmp_path: Path, whole: bool) -> None:
    """simplecache shows the half that it has; a server that sends too little sends no more."""
    (tmp_path / "key").write_bytes(bytes(NBYTES) + b"the end")
    half, last = threading.Event(), ByteRange(NBYTES, NBYTES + 7)
    handler = functools.partial(Slow, directory=str(tmp_path), half=half)
    options: dict[str, Any] = {"simplecache": {"cache_storage": str(tmp_path / "cache")}}
    with served(handler) as url, ThreadPoolExecutor(1) as pool:
        first = pool.submit(
            open_store(f"simplecache::{url}", **options).get, "key", ByteRange(0, 7)
        )
        store = open_store(f"simplecache::{url}", **options)
        assert half.wait(10)
        while not any((tmp_path / "cache").iterdir()):
            time.sleep(0.01)
        read = store.get("key") if whole else store.get("key", last)
        assert read.endswith(b"the end") and len(read) == (NBYTES + 7 if whole else 7)
        assert first.result() == bytes(7)
        with pytest.raises(ShortReadError, match="ends before"):
            store.get("key", ByteRange(NBYTES, NBYTES + 8))


def test_threads_that_read_one_file_copy_it_once(tmp_path: Path) -> None:
    """Two copies at once into one file of simplecache show a length with holes to a third."""
    (tmp_path / "key").write_bytes(bytes(NBYTES))
    copies: list[str] = []

    class Counted(Slow):
        def copyfile(self, source: Any, outputfile: Any) -> None:
            with suppress(BrokenPipeError):  # a look at the length, which reads no body
                super().copyfile(source, outputfile)
                copies.append(self.path)

    handler = functools.partial(Counted, directory=str(tmp_path), half=threading.Event())
    options: dict[str, Any] = {"simplecache": {"cache_storage": str(tmp_path / "cache")}}
    with served(handler) as url, ThreadPoolExecutor(4) as pool:
        store = open_store(f"simplecache::{url}", **options)
        reads = [pool.submit(store.get, "key", ByteRange(start, start + 7)) for start in range(4)]
        assert [read.result() for read in reads] == [bytes(7)] * 4
    assert copies == ["/key"]


@pytest.mark.parametrize("cached", [False, True])
def test_a_server_that_says_no_length_is_read(tmp_path: Path, cached: bool) -> None:
    (tmp_path / "key").write_bytes(b"0123456789")
    options: dict[str, Any] = {"simplecache": {"cache_storage": str(tmp_path / "cache")}}
    with served(functools.partial(SaysNoLength, directory=str(tmp_path))) as url:
        store = open_store(f"simplecache::{url}" if cached else url, **(options if cached else {}))
        assert store.get("key") == b"0123456789"
        with pytest.raises(ShortReadError, match="ends before"):
            store.get("key", ByteRange(5, 20))


def test_a_length_that_cannot_be_asked_for_is_a_store_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe("/lengths/key", b"0123456789")

    def lost(path: str) -> dict[str, Any]:
        raise ConnectionError("planted")

    monkeypatch.setattr(filesystem, "info", lost)
    with pytest.raises(TransientError, match=r"read key in .*planted"):
        FsspecStore(filesystem, "/lengths").get("key", ByteRange(5, 20))


def test_a_root_in_an_archive_is_read(folder: Path, tmp_path: Path) -> None:
    shutil.make_archive(str(tmp_path / "site"), "zip", folder)
    with served(functools.partial(KnowsRanges, directory=str(tmp_path))) as url:
        for place in (f"zip://run::{tmp_path}/site.zip", f"zip://run::{url}/site.zip"):
            target = state(0.0)
            assert ckpt.load(target, place).step == 2
            assert torch.equal(target["w"], state(2.0)["w"])
            with pytest.raises(StorageError, match="can only be read"):
                ckpt.save(target, place, step=3, unsafe_single_writer=True)


class SaysNoLength(KnowsRanges):
    """One that ends each answer by closing, as those that make or compress them do."""

    def send_header(self, name: str, value: str) -> None:
        if name != "Content-Length":
            super().send_header(name, value)


class Hub(KnowsRanges):
    """As much of the Hub as reading takes: what its client asks of a repository's files."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer([self._entry(self._root() / path) for path in asked["paths"]])

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if not path.startswith("/api/"):
            return super().do_GET()
        if "/tree/" not in path:
            return self._answer({"id": "me/runs", "sha": "0" * 40, "siblings": []})
        top = self._root() / unquote(path.partition("/tree/")[2]).partition("/")[2]
        if not top.is_dir():
            self.send_error(404)
            return None
        files = top.rglob("*") if "recursive=true" in self.path.lower() else top.iterdir()
        return self._answer([self._entry(one) for one in sorted(files)])

    def translate_path(self, path: str) -> str:
        return str(self._root() / unquote(urlsplit(path).path).partition("/resolve/main/")[2])

    def end_headers(self) -> None:
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", '"1"')
        super().end_headers()

    def send_error(self, code: int, *args: Any) -> None:
        self.send_response(code)
        self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _root(self) -> Path:
        return Path(self.directory)

    def _entry(self, path: Path) -> dict[str, Any]:
        name = path.relative_to(self._root()).as_posix()
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": "1", "size": 0}
        return {"type": "file", "path": name, "oid": "1", "size": path.stat().st_size}

    def _answer(self, what: Any) -> None:
        data = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def test_a_folder_of_hugging_face_is_read(folder: Path) -> None:
    pytest.importorskip("huggingface_hub")
    with served(functools.partial(Hub, directory=str(folder))) as url:
        options: dict[str, Any] = {"endpoint": url, "token": False}
        store = open_store("hf://me/runs/run", **options)
        assert store.exists("FORMAT") and not store.exists("no/such")
        target = state(0.0)
        assert ckpt.load(target, "hf://me/runs/run", storage_options=options).step == 2
        assert torch.equal(target["w"], state(2.0)["w"])
