"""Roots that hosts serve and others pass on: the same names, the same bytes, from whom answers.

Method: real servers on the loopback, over directories; what goes wrong is done by the parent: it
dies, is silent, lags, lies or damages what it sends. Requests and bytes are counted.
"""

from __future__ import annotations

import gc
import json
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from storage import (
    AccessDeniedError,
    ByteRange,
    InvalidUrlError,
    KeyNotFoundError,
    ShortReadError,
    StorageError,
    Store,
    TooLargeError,
    open_store,
)
from storage.local import LocalStore
from storage.location import BorrowedStore
from storage.peers import relay as relays
from storage.peers import server as servers
from storage.peers.relay import News, RelayStore
from storage.peers.server import PeerServer, _PeerHandler
from storage.peers.store import CHECKSUM, ObjectBlock, PeerStore, checksum_of
from storage.retry import NO_RETRY
from storage.store import UNFINISHED_MARK, ObjectInfo

TOKEN = "0123456789abcdef"
ROOT = "lines/published"
STEP = "steps/00000001-e000001-0123456789abcdef/"


class Tree:
    """A directory that is served, and relays behind it; all end with the test."""

    def __init__(self, path: Path) -> None:
        self.store = LocalStore(str(path / "root"))
        self.stack = ExitStack()
        self.origin = self.serve(RelayStore([BorrowedStore(self.store)], ROOT))

    def serve(self, relay: RelayStore, token: str = TOKEN) -> PeerServer:
        server = PeerServer(relay, token, "127.0.0.1")
        self.stack.callback(relay.close)
        self.stack.callback(server.close)
        return server

    def relay(self, *parents: PeerServer | int | Store, cache_nbytes_max: int = 1 << 30) -> Any:
        stores = [
            one
            if isinstance(one, Store)
            else peer(one.port if isinstance(one, PeerServer) else one)
            for one in parents
        ]
        relay = RelayStore(stores, ROOT, cache_nbytes_max=cache_nbytes_max)
        self.stack.callback(relay.close)
        return relay

    def commit(self, slot: int, **files: bytes) -> None:
        for name, data in files.items():
            self.store.put_if_absent(f"{STEP}{name}", data)
        self.store.put_if_absent(f"log/{slot:020d}", b"record %d" % slot)


PEERS: list[PeerStore] = []


def peer(port: int, token: str = TOKEN) -> PeerStore:
    PEERS.append(PeerStore("127.0.0.1", port, token, policy=NO_RETRY, seconds=1.0))
    return PEERS[-1]


@pytest.fixture(autouse=True)
def _peers_end() -> Iterator[None]:
    yield
    while PEERS:
        PEERS.pop().close()


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    tree = Tree(tmp_path)
    with tree.stack:
        yield tree


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, str]]:
    """Requests by port and path, and under "bytes" what was sent of objects."""
    counts: Counter[tuple[int, str]] = Counter()
    answer, stream = _PeerHandler._answer, _PeerHandler._stream

    def counted(self: Any) -> None:
        counts[self.server.port, self.path.partition("?")[0]] += 1
        answer(self)

    def streamed(self: Any, head: Any, spans: Any, blocks: Any) -> None:
        counts[self.server.port, "bytes"] += sum(stop - start for _, start, stop in spans)
        stream(self, head, spans, blocks)

    monkeypatch.setattr(_PeerHandler, "_answer", counted)
    monkeypatch.setattr(_PeerHandler, "_stream", streamed)
    return counts


def noise(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


# --- reading -----------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes_max", [1 << 30, 200, 0])
def test_a_relay_reads_what_the_root_has(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, nbytes_max: int
) -> None:
    """Blocks of 64 bytes, so that objects have many; through two hosts; with and without room."""
    monkeypatch.setattr(relays, "BLOCK_NBYTES", 64)
    monkeypatch.setattr(servers, "BLOCK_NBYTES", 64)
    files = {"a": b"", "b": noise(63), "c": noise(64), "d": noise(1000), "e": noise(7)}
    tree.commit(0, **files)
    tree.store.put_if_absent("FORMAT", b"hello")
    first = tree.relay(tree.origin, cache_nbytes_max=nbytes_max)
    relay = tree.relay(tree.serve(first), cache_nbytes_max=nbytes_max)
    assert list(relay.list("")) == list(tree.store.list(""))
    assert list(relay.list("steps/", after=f"{STEP}b")) == list(
        tree.store.list("steps/", after=f"{STEP}b")
    )
    for name, data in files.items():
        key = STEP + name
        assert relay.get(key) == data == relay.get_bounded(key, len(data))
        assert relay.info(key) == tree.store.info(key)
        for start in range(0, len(data), 31):
            end = min(len(data), start + 100)
            assert relay.get(key, ByteRange(start, end)) == data[start:end]
        buffers = bytearray(len(data) // 2), bytearray(len(data) - len(data) // 2)
        relay.get_into(key, 0, [memoryview(one) for one in buffers])
        assert b"".join(buffers) == data
        with pytest.raises(ShortReadError):
            relay.get(key, ByteRange(0, len(data) + 1))
    with pytest.raises(TooLargeError):
        relay.get_bounded(f"{STEP}d", 999)
    for one in (first, relay):
        kept = sum(map(len, one._blocks.values()))
        assert kept == one._cached_nbytes <= nbytes_max
    assert not relay.exists("log/00000000000000000001") and not relay.exists("steps/x")
    with pytest.raises(KeyNotFoundError):
        relay.get("x")


def test_a_relay_that_nobody_closes_leaves_no_connection(tree: Tree) -> None:
    """As in a process that has loaded from `peer://` and goes on: its stores are dropped."""
    store = PeerStore("127.0.0.1", tree.origin.port, TOKEN, policy=NO_RETRY, seconds=1.0)
    relay = RelayStore([store], ROOT)
    relay.exists("x")
    (kept,) = store._idle
    assert kept.sock is not None
    del store, relay
    gc.collect()
    assert kept.sock is None


def test_nothing_is_written_through_a_relay(tree: Tree) -> None:
    relay = tree.relay(tree.origin)
    writes: list[Callable[[], object]] = [
        lambda: relay.put_if_absent("a", b""),
        lambda: relay.create("a", 1, part_nbytes=1),
        lambda: relay.delete("a"),
        lambda: relay.abort_unfinished(""),
    ]
    for write in writes:
        with pytest.raises(AccessDeniedError, match="can only be read"):
            write()
    # Nor by who speaks to the server as to one of a directory.
    direct = peer(tree.origin.port)
    for request in (
        lambda: direct.put_if_absent("a", b"x"),
        lambda: direct.delete("FORMAT"),
        lambda: direct.get("FORMAT"),
        lambda: list(direct.list("")),
    ):
        with pytest.raises(StorageError, match=r"no such request|Error"):
            request()
    assert not list(tree.store.list(""))


def test_only_the_root_that_is_served_is_read(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    tree.commit(0)
    other = RelayStore([peer(tree.origin.port)], "")
    with pytest.raises(StorageError, match="the root '' is not served here, but 'lines/published'"):
        other.refresh()
    direct = peer(tree.origin.port)
    for key in ("../secret", "log/../../secret", "/etc/passwd"):
        with pytest.raises(StorageError):
            direct.parts(
                "/files", len, 1 << 20, {"root": ROOT, "prefix": key, "start": "0", "stop": "6"}
            )
    with pytest.raises(StorageError, match="another token"):
        RelayStore([peer(tree.origin.port, "0123456789abcdeF")], ROOT).refresh()


# --- news --------------------------------------------------------------------------------------


def test_who_waits_has_news_at_once_by_one_request(
    tree: Tree, requests: Counter[tuple[int, str]]
) -> None:
    tree.commit(0)
    relay = tree.relay(tree.serve(middle := tree.relay(tree.origin)))
    seen = relay.refresh()
    requests.clear()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(relay.refresh, 20.0, seen)
        while not requests[tree.origin.port, "/news"]:
            threading.Event().wait(0.01)
        tree.commit(1, a=b"new")
        assert waiting.result(10) == seen + 1
    assert relay.get("log/00000000000000000001") == b"record 1"
    assert relay.get(f"{STEP}a") == b"new"
    assert set(requests.values()) - {3 + 8} == {1}, "the bytes came with their names"
    requests.clear()
    assert middle.refresh(20.0, 0) == 2 and not requests, "who does not know it need not wait"


def test_no_news_are_waited_for_no_longer_than_asked(tree: Tree) -> None:
    tree.commit(0)
    relay = tree.relay(tree.origin)
    seen = relay.refresh()
    assert relay.refresh(0.2, seen) == seen


@pytest.mark.parametrize("seed", range(200))
def test_news_since_any_state_give_the_newest(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects come, go and change; readers of any age take the news, or all of it."""
    rng = random.Random(seed)

    class Source(LocalStore):
        def __init__(self) -> None:
            super().__init__(str(tmp_path))

    relay = RelayStore([Source()], "", cache_nbytes_max=0)
    monkeypatch.setattr(relays, "GONE_MAX", rng.choice((0, 1, 50)))
    there: dict[str, ObjectInfo] = {}
    readers: list[tuple[str, dict[str, ObjectInfo]]] = [("", {})]
    for _ in range(30):
        for _ in range(rng.randrange(4)):
            key = rng.choice("abcdef")
            if rng.random() < 0.4:
                there.pop(key, None)
            else:
                there[key] = ObjectInfo(key, rng.randrange(3), 0.0)
        parent = relay._active
        relay._take(parent, parent.state, News("s", True, list(there.values()), ()))
        nth = rng.randrange(len(readers))
        state, known = readers[nth]
        news = relay.news(state)
        known = {} if news.is_all else dict(known)
        for key in news.removed:
            known.pop(key, None)
        known |= {one.key: one for one in news.added}
        assert known == there == dict(relay._index)
        readers.append((news.state, known))
        assert not relay.news(news.state).added and not relay.news(news.state).is_all
    assert relay.news("other.3").is_all and relay.news("nonsense").is_all


def test_what_has_changed_under_its_name_is_read_again(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root that was made anew: its log is shorter, so it is believed after a while."""
    tree.commit(0, a=noise(200_000))
    tree.commit(1)
    relay = tree.relay(tree.origin)
    assert relay.get(f"{STEP}a") == noise(200_000)
    for info in list(tree.store.list("")):
        tree.store.delete(info.key)
    tree.commit(0, a=noise(200_000, 1))
    monkeypatch.setattr(relays, "LIST_SECONDS", 0.0)
    relay.refresh()
    assert relay.get(f"{STEP}a") == noise(200_000), "believed at once"
    monkeypatch.setattr(relays, "BEHIND_SECONDS", 0.0)
    relay.refresh()
    assert relay.get(f"{STEP}a") == noise(200_000, 1) and not relay.exists(
        "log/00000000000000000001"
    )


# --- once --------------------------------------------------------------------------------------


@pytest.mark.parametrize("parents", [1, 2])
def test_a_directory_that_grows_is_read_all_the_same(tree: Tree, parents: int) -> None:
    """Another rank's file has come since the last news, which name the one that is read."""
    tree.commit(0, a=noise(200_000))  # too large to come with the news
    relay = tree.relay(*[tree.origin] * parents)
    relay.refresh()
    tree.commit(1, b=noise(100_000))
    tree.origin.store.refresh()
    assert relay.get(f"{STEP}a") == noise(200_000)
    assert not any(one.until for one in relay._parents), "who answers so has not failed"


def test_a_tree_takes_each_byte_once_from_its_parent(
    tree: Tree, requests: Counter[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight readers at the same time, of a directory at once and of one that is too large."""
    size = relays.BLOCK_NBYTES
    for slot, limit in enumerate((64 << 20, 0)):
        monkeypatch.setattr(relays, "DIRECTORY_NBYTES_MAX", limit)
        name = f"f{slot}"
        tree.commit(slot, **{name: noise(size + 100, slot)})
        middle = tree.serve(tree.relay(tree.origin))
        readers = [tree.relay(middle) for _ in range(8)]
        requests.clear()
        with ThreadPoolExecutor(8) as pool:
            wanted = noise(size + 100, slot)
            got = [pool.submit(one.get, STEP + name) for one in readers]
            assert all(one.result() == wanted for one in got)
        there = sum(info.nbytes for info in tree.store.list(""))
        assert size + 100 <= requests[tree.origin.port, "bytes"] <= there + 8 * 8
        assert requests[middle.port, "bytes"] >= 8 * (size + 100)


# --- parents that fail -------------------------------------------------------------------------


@pytest.fixture
def silent() -> Iterator[int]:
    """A port where connections are taken, and nothing is answered."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def dead_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def test_the_next_parent_is_read_where_one_is_dead_or_silent(tree: Tree, silent: int) -> None:
    tree.commit(0, a=b"bytes")
    for port in (dead_port(), silent):
        relay = tree.relay(port, tree.origin)
        assert relay.get(f"{STEP}a") == b"bytes"
        assert relay._parents[0].until and not relay._parents[1].until
    seen = relay.refresh()
    tree.origin.close()
    with pytest.raises(StorageError, match=r"what is new: none of 2 hosts answered\n  - .*\n  - "):
        relay.refresh(20.0, seen)
    assert relay.get(f"{STEP}a") == b"bytes", "what was read is there"


def test_a_root_is_read_from_its_store_where_no_host_answers(tree: Tree) -> None:
    tree.commit(0, a=noise(1000))
    relay = tree.relay(tree.origin, BorrowedStore(tree.store))
    seen = relay.refresh()
    tree.origin.close()
    tree.commit(1, b=noise(500))
    assert relay.refresh(20.0, seen) > seen
    assert relay.get(f"{STEP}a") == noise(1000) and relay.get(f"{STEP}b") == noise(500)


def test_an_object_that_one_parent_lacks_is_read_from_the_next(tree: Tree, tmp_path: Path) -> None:
    """The first has deleted it since it said what it has."""
    tree.commit(0, a=noise(200_000))
    other = Tree(tmp_path / "other")
    with other.stack:
        other.commit(0)
        other.commit(1, a=noise(200_000), b=noise(5))
        relay = tree.relay(other.origin, BorrowedStore(tree.store))
        relay.refresh()
        other.store.delete(f"{STEP}a")
        assert relay.get(f"{STEP}a") == noise(200_000)
        other.store.delete(f"{STEP}b")
        relay.doubt()
        with pytest.raises(KeyNotFoundError):
            relay.get(f"{STEP}b")


def test_a_parent_that_is_behind_takes_nothing_back(tree: Tree, tmp_path: Path) -> None:
    other = Tree(tmp_path / "other")
    with other.stack:
        for slot in range(3):
            tree.commit(slot)
            if slot < 2:
                other.commit(slot)
        relay = tree.relay(tree.origin, other.origin)
        seen = relay.refresh()
        tree.origin.close()
        assert relay.refresh(1.5, seen) == seen
        assert relay.exists("log/00000000000000000002")
        other.commit(2)
        other.commit(3)
        assert relay.refresh(20.0, seen) == seen + 1
        assert relay.exists("log/00000000000000000003")


# --- parents that lie --------------------------------------------------------------------------


def answering(*bodies: bytes) -> Callable[[socket.socket], None]:
    def serve(listening: socket.socket) -> None:
        for body in bodies:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(body)

    return serve


def head(value: Any, after: bytes = b"", length: int | None = None) -> bytes:
    data = json.dumps(value).encode()
    body = CHECKSUM.pack(len(data)) + data + checksum_of([memoryview(data)]) + after
    nbytes = len(body) if length is None else length
    return f"HTTP/1.1 200 OK\r\nContent-Length: {nbytes}\r\n\r\n".encode() + body


def news_of(**changed: Any) -> dict[str, Any]:
    return {"state": "s", "all": True, "added": [], "removed": [], "parts": [], **changed}


BLOCK = b"bytes" + checksum_of([memoryview(b"bytes")])
LIES = {
    "no json": b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n\x04\0\0\0{{{{",
    "no head": head([1]),
    "no state": head({"parts": []}),
    "no names": head(news_of(added=[["a", -1, 0]])),
    "no key": head(news_of(added=[["../a", 1, 0.0]])),
    "no list": head(news_of(added=7)),
    "no removed": head(news_of(removed=None)),
    "no parts": head({**news_of(), "parts": None}),
    "a part without an end": head(news_of(parts=[["a", 0, float("inf")]])),
    "a part without bytes": head(news_of(parts=[["a", 5, 5]])),
    "a part of too much": head(news_of(parts=[["a", 0, 1 << 50]])),
    "a part that ends early": head(news_of(parts=[["a", 0, 5]]), BLOCK[:-1]),
    "other bytes": head(news_of(parts=[["a", 0, 5]]), b"bytez" + BLOCK[5:]),
    "no length": b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 100,
    "an endless answer": head(news_of(), length=1 << 40),
    "a head of too much": b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n\xff\xff\xff\xff____",
    "more than it says": head(news_of(), b"more"),
    "another head": head(news_of()).replace(b'"s"', b'"t"'),
    "no http": b"\0" * 1000,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_parent_that_lies_is_left_for_the_next(tree: Tree, lie: str) -> None:
    tree.commit(0, a=b"bytes")
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
        pool.submit(answering(LIES[lie]), listening)
        relay = tree.relay(listening.getsockname()[1], tree.origin)
        assert relay.get(f"{STEP}a") == b"bytes"
        assert relay._parents[0].until


def test_a_relay_keeps_no_bytes_that_do_not_fit_their_names(tree: Tree) -> None:
    """A host sends the right bytes of a name as those of another, too long or in the middle."""
    tree.commit(0, a=b"bytes", b=b"other bytes")
    relay = tree.relay(tree.origin)
    relay.refresh()
    for wrong in (
        ObjectBlock(f"{STEP}b", 0, b"bytes"),
        ObjectBlock(f"{STEP}b", 3, b"bytes"),
        ObjectBlock("x", 0, b"x"),
    ):
        assert not relay._keep([wrong])
    assert relay.get(f"{STEP}b") == b"other bytes" and ("x", 0) not in relay._blocks


def test_bytes_that_are_damaged_on_their_way_are_asked_for_again(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.commit(0, a=noise(200_000))
    relay = tree.relay(PeerStore("127.0.0.1", tree.origin.port, TOKEN))
    relay.refresh()
    sums = iter([b"\0\0\0\0"])
    monkeypatch.setattr(
        servers, "checksum_of", lambda views: next(sums, None) or checksum_of(views)
    )
    assert relay.get(f"{STEP}a") == noise(200_000)
    assert next(sums, None) is None


def test_requests_share_a_connection(tree: Tree) -> None:
    tree.commit(0, a=noise(200_000))
    relay = tree.relay(tree.origin)
    for _ in range(5):
        relay.refresh()
    assert relay.get(f"{STEP}a") == noise(200_000)
    assert len(tree.origin._known) == 1 == len(relay._parents[0]._peer._idle)


def test_a_host_that_starts_again_has_its_port_at_once(tree: Tree) -> None:
    """Connections that its predecessor has closed are remembered by the system for a minute."""
    tree.commit(0)
    port, client = tree.origin.port, peer(tree.origin.port)
    assert RelayStore([client], ROOT).refresh()
    tree.origin.close()
    threading.Event().wait(0.2)  # for its threads to end their connections
    client.close()
    again = RelayStore([BorrowedStore(tree.store)], ROOT)
    tree.stack.callback(again.close)
    server = PeerServer(again, TOKEN, "127.0.0.1", range(port, port + 1))
    tree.stack.callback(server.close)
    assert tree.relay(server).refresh()
    with pytest.raises(StorageError, match="cannot listen"):
        PeerServer(again, TOKEN, "127.0.0.1", range(port, port + 1))


def test_the_last_host_is_waited_for_as_a_store_is(tree: Tree) -> None:
    """So that a training may start again; all before it are soon left for the next."""
    store: Any = open_store(f"peer://a:1,b:2/{ROOT}", token=TOKEN)
    first, last = (parent.store.policy for parent in store.inner._parents)
    assert first.deadline_seconds == relays.PARENT_SECONDS < last.deadline_seconds == 120.0
    store.close()


@pytest.mark.parametrize("name", ["two\nlines", f"{UNFINISHED_MARK}x"])
def test_a_file_whose_name_is_no_key_is_left_out(tree: Tree, tmp_path: Path, name: str) -> None:
    tree.commit(0, a=b"bytes")
    (tmp_path / "root" / name).write_bytes(b"of somebody else")
    assert tree.relay(tree.origin).get(f"{STEP}a") == b"bytes"
    plain = PeerServer(tree.store, TOKEN, "127.0.0.1")
    tree.stack.callback(plain.close)
    assert [one.key for one in peer(plain.port).list("steps/")] == [f"{STEP}a"]
    assert name not in [one.key for one in peer(plain.port).list("")]


# --- ends --------------------------------------------------------------------------------------


def test_closing_ends_those_who_wait(tree: Tree) -> None:
    tree.commit(0)
    relay = tree.relay(tree.origin)
    seen = relay.refresh()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(relay.refresh, 25.0, seen) for _ in range(2)]
        while not relay._asks:
            threading.Event().wait(0.01)
        threading.Event().wait(0.1)
        relay.close()
        for one in waiting:
            assert isinstance(one.exception(10), StorageError)
    assert not relay._parents[0]._peer._busy and not relay._parents[0]._peer._idle


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("peer://host", {}, "expected peer://HOST:PORT"),
        ("peer://host:1,host", {"token": TOKEN}, "expected peer://HOST:PORT"),
        ("peer://host:1", {}, "needs the token"),
        ("peer://host:1", {"token": "a\nb"}, "needs the token"),
        (
            "peer://host:1",
            {"token": TOKEN, "fall": "x"},
            r"got the storage options \['fall', 'token'\]",
        ),
    ],
)
def test_urls_and_options_that_are_wrong_are_refused(
    url: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidUrlError, match=said):
        open_store(url, **options)


def test_a_url_opens_hosts_and_the_root_behind_them(tree: Tree, tmp_path: Path) -> None:
    below = LocalStore(str(tmp_path / "run" / ROOT))
    below.put_if_absent("FORMAT", b"x")
    url = f"peer://127.0.0.1:{dead_port()},[::1]:{dead_port()}/{ROOT}"
    store = open_store(url, token=TOKEN, fallback=str(tmp_path / "run"))
    assert store.url == url.replace(",", "/").partition("/[")[0].rstrip("/") + f"/{ROOT}"
    relay: Any = store.inner  # type: ignore[attr-defined]
    assert TOKEN not in repr([vars(one.store) for one in relay._parents])
    store.close()
