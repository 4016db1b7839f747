"""A directory behind a server: it is a store like any other, and gives strangers nothing.

Method: the contract of stores against a server in this process, on the loopback; hostile requests
byte by byte over a plain socket.
"""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from storage import KeyExistsError, KeyNotFoundError, NoSpaceError, StorageError, Store
from storage.errors import TransientError
from storage.local import LocalStore
from storage.peers import server as peer_server
from storage.peers.server import PeerServer
from storage.peers.store import PeerStore, checksum_of
from storage.retry import NO_RETRY
from storage.testing import StoreContract

TOKEN = "0123456789abcdef"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PeerServer]:
    server = PeerServer(LocalStore(str(tmp_path / "tier")), TOKEN, "127.0.0.1")
    yield server
    server.close()


CLIENTS: list[PeerStore] = []


@pytest.fixture(autouse=True)
def clients_end() -> Iterator[None]:
    yield
    while CLIENTS:
        CLIENTS.pop().close()


def client(server: PeerServer, token: str = TOKEN, **how: object) -> PeerStore:
    """A store at the far end of `server`, until the test ends."""
    CLIENTS.append(PeerStore("127.0.0.1", server.port, token, **how))  # type: ignore[arg-type]
    return CLIENTS[-1]


class TestPeerStore(StoreContract):
    @pytest.fixture
    def store(self, server: PeerServer) -> Iterator[Store]:
        yield client(server)


# --- what is sent -----------------------------------------------------------------------------


def test_parts_that_are_longer_than_a_request_are_cut(
    server: PeerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.peers.store.BODY_NBYTES_MAX", 1000)
    store, data = client(server), bytes(range(256)) * 40
    with store.create("a", len(data), part_nbytes=4096) as writer:
        for index in (2, 0, 1):
            writer.write_part(index, [memoryview(data)[index * 4096 : (index + 1) * 4096]])
    assert store.get("a") == data
    store.put_if_absent("b", data)
    with pytest.raises(KeyExistsError):
        store.put_if_absent("b", data)
    assert store.get("b") == data


def test_a_part_that_is_damaged_on_its_way_is_not_taken(server: PeerServer, tmp_path: Path) -> None:
    """The checksum of its sender is that of other bytes."""
    head = f"PUT /o/a HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 9\r\n\r\n"
    answer = raw(server, head.encode() + b"hallo" + checksum_of([memoryview(b"hello")]))
    assert answer.startswith(b"HTTP/1.1 503") and b"not those that were sent" in answer
    assert not list(server.store.list(""))


def test_an_answer_that_is_lost_is_asked_for_again(server: PeerServer) -> None:
    """Every kept connection is dead when it is used again: as after a restart of a switch."""
    store = client(server)
    data = bytes(10_000)
    with store.create("a", len(data), part_nbytes=4096) as writer:
        for index in range(3):
            for connection in store._idle:
                assert connection.sock is not None
                connection.sock.shutdown(socket.SHUT_RDWR)
            writer.write_part(index, [memoryview(data)[index * 4096 : (index + 1) * 4096]])
    assert store.get("a") == data
    assert store.retries == 3


def test_the_lost_answer_of_an_end_is_looked_up(
    server: PeerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = client(server)
    request = store.request
    ended: list[str] = []

    def losing(method: str, path: str, **how: Any) -> Any:
        value = request(method, path, **how)
        if path == "/end" and not ended:
            ended.append(path)
            raise TransientError("the connection broke before the answer")
        return value

    monkeypatch.setattr(store, "request", losing)
    with store.create("a", 100, part_nbytes=100) as writer:
        writer.write_part(0, [memoryview(bytes(100))])
    assert ended and store.get("a") == bytes(100)


def test_the_same_part_twice_is_one_part_and_another_is_refused(server: PeerServer) -> None:
    store = client(server)
    upload = store.request("POST", "/begin", key="a", nbytes="5", part="3")
    for _ in range(2):
        store.request("PUT", "/part", [memoryview(b"abc")], upload=upload, index="0")
    with pytest.raises(StorageError, match="written before"):
        store.request("PUT", "/part", [memoryview(b"abd")], upload=upload, index="0")
    with pytest.raises(StorageError, match="1 parts were never written"):
        store.request("POST", "/end", upload=upload)
    assert list(store.list("")) == [] and server.store.abort_unfinished("") == 0


def test_what_a_sender_leaves_is_given_up(
    server: PeerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_server, "UPLOAD_SECONDS", -1.0)
    store = client(server, policy=NO_RETRY)
    upload = store.request("POST", "/begin", key="a", nbytes="5", part="5")
    server.service_actions()
    with pytest.raises(KeyNotFoundError):
        store.request("PUT", "/part", [memoryview(b"abcde")], upload=upload, index="0")
    assert not [path for path in (tmp_path / "tier").rglob("*") if path.is_file()]


def test_a_full_disk_there_is_a_full_disk_here(tmp_path: Path) -> None:
    class Full(LocalStore):
        def put_if_absent(self, key: str, data: bytes) -> None:
            raise NoSpaceError(f"create {key}: no space left")

    server = PeerServer(Full(str(tmp_path)), TOKEN, "127.0.0.1")
    try:
        with pytest.raises(NoSpaceError, match="no space left"):
            client(server).put_if_absent("a", b"x")
    finally:
        server.close()


# --- strangers --------------------------------------------------------------------------------


def raw(server: PeerServer, request: bytes) -> bytes:
    """All that a server answers before it closes the connection, or is silent for a second."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        sock.sendall(request)
        sock.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := sock.recv(1 << 16):
            answer += piece
    return answer


def authorized(line: str, *headers: str, body: bytes = b"") -> bytes:
    head = [line + " HTTP/1.1", f"Authorization: Bearer {TOKEN}", *headers]
    return "\r\n".join([*head, "", ""]).encode("latin-1") + body


def test_without_the_token_there_is_nothing(server: PeerServer) -> None:
    server.store.put_if_absent("secret", b"forty-two")
    for token in ("", "x", TOKEN[:-1], TOKEN + "0", TOKEN.upper(), "é"):
        for request in (
            f"GET /o/secret HTTP/1.1\r\nAuthorization: Bearer {token}\r\n\r\n",
            f"PUT /o/new HTTP/1.1\r\nAuthorization: Bearer {token}\r\nContent-Length: 4\r\n\r\n",
            f"GET /o/secret?token={TOKEN} HTTP/1.1\r\n\r\n",
            f"GET /list HTTP/1.1\r\nAuthorization: {token}\r\n\r\n",
            f"POST /abort HTTP/1.1\r\nAuthorization: Bearer {token}\r\n"
            f"Authorization: Bearer {TOKEN}\r\n\r\n",
        ):
            answer = raw(server, request.encode())
            assert answer.startswith(b"HTTP/1.1 401"), answer
            assert b"forty-two" not in answer and TOKEN.encode() not in answer
    assert [entry.key for entry in server.store.list("")] == ["secret"]


def test_no_name_leads_out_of_the_directory(server: PeerServer, tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"forty-two")
    (tmp_path / "tier").mkdir(exist_ok=True)
    names = ["../outside", "%2e%2e/outside", "..%2foutside", "/etc/passwd", "a/../../outside"]
    names += [
        "%2fetc/passwd",
        "a%00b",
        ".tmp-0123456789abcdef-a",
        "%ff",
        "",
        ".",
        "a//b",
        "a" * 999,
    ]
    for name in names:
        for method in ("GET", "PUT", "DELETE"):
            body = b"" if method != "PUT" else checksum_of([])
            length = f"Content-Length: {len(body)}"
            answer = raw(server, authorized(f"{method} /o/{name}", length, body=body))
            assert answer.split(b" ")[1] in (b"400", b"404"), (name, answer)
        for query in ("list?prefix=", "abort?prefix=", "info?key=", "begin?nbytes=1&part=1&key="):
            method = "GET" if query[0] in "li" else "POST"
            answer = raw(server, authorized(f"{method} /{query}{name}"))
            assert b"forty-two" not in answer and b"root:" not in answer
    assert (tmp_path / "outside").read_bytes() == b"forty-two"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside", "tier"]


@pytest.mark.parametrize(
    "given", ["bytes=5-2", "bytes=-5", "bytes=0-", "bytes=0-1,2-3", "x", "bytes=1e3-2", "bytes=-"]
)
def test_absurd_ranges_are_refused(server: PeerServer, given: str) -> None:
    server.store.put_if_absent("a", b"0123456789")
    assert raw(server, authorized("GET /o/a", f"Range: {given}")).startswith(b"HTTP/1.1 400")


def test_ranges_beyond_the_end_give_what_is_there(server: PeerServer) -> None:
    server.store.put_if_absent("a", b"0123456789")
    huge = "9" * 18
    answer = raw(server, authorized("GET /o/a", f"Range: bytes=8-{huge}"))
    assert answer.startswith(b"HTTP/1.1 206") and answer.endswith(b"\r\n\r\n89")
    answer = raw(server, authorized("GET /o/a", f"Range: bytes={huge}-{huge}"))
    assert answer.startswith(b"HTTP/1.1 416")


def test_bodies_are_bounded_before_they_are_read(server: PeerServer) -> None:
    for length in ("99999999999", "-1", "x", "3", "1e3"):
        answer = raw(server, authorized("PUT /o/a", f"Content-Length: {length}"))
        assert answer.split(b" ")[1] in (b"400", b"413"), (length, answer)
    chunked = authorized("PUT /o/a", "Transfer-Encoding: chunked", body=b"0\r\n\r\n")
    assert raw(server, chunked).split(b" ")[1] == b"400"
    twice = authorized("PUT /o/a", "Content-Length: 5", "Content-Length: 6", body=b"x" * 6)
    assert raw(server, twice).split(b" ")[1] == b"400"
    begin = authorized("POST /begin?key=a&nbytes=1&part=99999999999")
    assert raw(server, begin).split(b" ")[1] == b"413"
    assert list(server.store.list("")) == []


def test_nonsense_is_answered_or_dropped(server: PeerServer) -> None:
    for request in (
        b"\x16\x03\x01\x02\x00\x01" + bytes(500),
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        authorized("BREW /o/a"),
        authorized("GET /list?" + "&".join(f"f{n}=1" for n in range(99))),
        authorized("GET /o/a", *(f"X-{n}: 1" for n in range(200))),
        authorized("PUT /part?upload=../../x&index=0", "Content-Length: 4", body=b"\0" * 4),
    ):
        answer = raw(server, request)
        assert not answer.startswith((b"HTTP/1.1 2", b"HTTP/1.1 5")) or b" 505 " in answer, answer
    assert client(server).exists("a") is False


def test_connections_are_bounded_and_slow_ones_end(
    server: PeerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_server, "HEAD_SECONDS", 0.2)
    server.store.put_if_absent("a", b"x")
    slow = [socket.create_connection(("127.0.0.1", server.port), 30) for _ in range(200)]
    for sock in slow:
        sock.settimeout(30)
        try:
            sock.sendall(b"GET /o/a HTT")
            assert sock.recv(100) == b""  # closed by the server: this one is late, or too many
        except ConnectionError:
            pass
        sock.close()
    monkeypatch.setattr(peer_server, "HEAD_SECONDS", 30.0)
    assert client(server).get("a") == b"x"


REST = f"P/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()


def half(
    server: PeerServer, address: str = "127.0.0.1", said: bytes = b"GET /o/a HTT"
) -> socket.socket:
    """A connection that has not shown the token; `REST` does."""
    sock = socket.create_connection(
        ("127.0.0.1", server.port), timeout=30, source_address=(address, 0)
    )
    sock.sendall(said)
    return sock


def is_open(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "TLS"])
def test_strangers_take_no_room_of_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_encrypted: bool
) -> None:
    inside, outside = tls_of(tmp_path) if is_encrypted else (None, None)
    server = PeerServer(LocalStore(str(tmp_path / "tier")), TOKEN, "127.0.0.1", tls=inside)
    with ExitStack() as stack:
        stack.callback(server.close)
        server.store.put_if_absent("a", b"x")
        said = b"\x16\x03\x01" if is_encrypted else b"GET"
        ours = stack.enter_context(half(server)) if not is_encrypted else None
        strangers = [stack.enter_context(half(server, "127.0.0.2", said)) for _ in range(300)]
        # At once: no stranger has had the time to be late.
        assert client(server, tls=outside, policy=NO_RETRY).get("a") == b"x"
        count = sum(is_open(sock) for sock in strangers)
        assert 0 < count <= peer_server.STRANGERS_PER_ADDRESS
        if ours is not None:
            ours.sendall(REST)
            assert b" 200 " in ours.recv(1000)
    assert "Traceback" not in capsys.readouterr().err


def test_who_has_shown_the_token_is_no_stranger(server: PeerServer) -> None:
    with ExitStack() as stack:
        ranks = []
        for _ in range(140):
            ranks.append(stack.enter_context(half(server)))
            ranks[-1].sendall(REST)
            assert b" 404 " in ranks[-1].recv(1000)
        for _ in range(140):
            stack.enter_context(half(server))
        assert not client(server, policy=NO_RETRY).exists("a")
        for rank in ranks:
            rank.sendall(authorized("GET /o/a"))
            assert b" 404 " in rank.recv(1000)


def test_connections_of_those_with_the_token_are_bounded(
    server: PeerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an address with many, the oldest ends; another address keeps its own, and is served."""
    monkeypatch.setattr(peer_server, "KNOWN_MAX", 20)
    monkeypatch.setattr(peer_server, "KNOWN_PER_ADDRESS", 12)
    with ExitStack() as stack:

        def known(address: str) -> socket.socket:
            sock = stack.enter_context(half(server, address))
            sock.sendall(REST)
            assert b" 404 " in sock.recv(1000)
            return sock

        few = [known("127.0.0.2") for _ in range(4)]
        many = [known("127.0.0.3") for _ in range(40)]
        more = [known("127.0.0.4") for _ in range(9)]
        assert sum(map(is_open, [*few, *many, *more])) == 20
        assert all(map(is_open, [*few, *more])) and is_open(many[-1]) and not is_open(many[0])
        assert not client(server).exists("a"), "a client whose connection ended comes again"
        for sock in few:
            sock.setblocking(True)
            sock.sendall(authorized("GET /o/a"))
            assert b" 404 " in sock.recv(1000)


@pytest.mark.parametrize("header", ["", "Checked: 1"])
def test_a_long_answer_has_time_to_be_read(
    server: PeerServer, monkeypatch: pytest.MonkeyPatch, header: str
) -> None:
    monkeypatch.setattr(peer_server, "HEAD_SECONDS", 0.3)
    nbytes = 12 << 20  # more than sockets hold
    server.store.put_if_absent("a", bytes(nbytes))
    with socket.create_connection(("127.0.0.1", server.port), 30) as sock:
        sock.sendall(
            authorized("GET /o/a", f"Range: bytes=0-{nbytes - 1}", *filter(None, [header]))
        )
        came = len(sock.recv(100))
        time.sleep(2)  # the server looks twice a second for connections that are late
        while piece := sock.recv(1 << 20):
            came += len(piece)
            if came > nbytes:
                break
    assert came > nbytes


def test_a_body_that_does_not_come_ends(
    server: PeerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_server, "HEAD_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", server.port), 30) as sock:
        sock.sendall(authorized("GET /o/a"))
        assert b" 404 " in sock.recv(10_000)  # from now on the connection may be idle for long
        sock.sendall(authorized("PUT /o/a", "Content-Length: 1000") + b"x")
        assert b" 2" not in sock.recv(1000)[:13]
    assert not client(server).exists("a")


def test_uploads_are_bounded(server: PeerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_server, "UPLOADS_MAX", 2)
    store = client(server, policy=NO_RETRY)
    for key in "ab":
        store.request("POST", "/begin", key=key, nbytes="1", part="1")
    with pytest.raises(TransientError, match="2 uploads are under way"):
        store.request("POST", "/begin", key="c", nbytes="1", part="1")


def test_the_token_is_in_no_message(server: PeerServer) -> None:
    store = client(server, policy=NO_RETRY)
    assert TOKEN not in f"{store.url} {vars(store)['url']}"
    with pytest.raises(StorageError) as refused:
        client(server, "another", policy=NO_RETRY).get("a")
    server.close()
    with pytest.raises(StorageError) as gone:
        store.get("a")
    for caught in (refused, gone):
        assert TOKEN not in f"{caught.value!r} {caught.value.__cause__!r}"
        assert "another" not in str(caught.value).replace("has another token", "")


def test_a_server_that_is_idle_closes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_server, "LOOK_SECONDS", 3600.0)
    server = PeerServer(LocalStore(str(tmp_path / "tier")), TOKEN, "127.0.0.1")
    client(server).put_if_absent("a", b"b")
    closing = threading.Thread(target=server.close, daemon=True)
    closing.start()
    closing.join(20.0)
    assert not closing.is_alive()


# --- TLS --------------------------------------------------------------------------------------


def test_with_a_certificate_everything_is_encrypted(tmp_path: Path) -> None:
    inside, outside = tls_of(tmp_path)
    server = PeerServer(LocalStore(str(tmp_path / "tier")), TOKEN, "127.0.0.1", tls=inside)
    try:
        store, data = client(server, tls=outside), bytes(range(256)) * 1000
        store.put_if_absent("a", data)
        assert store.get("a") == data
        strict = client(server, tls=ssl.create_default_context(), policy=NO_RETRY)
        with pytest.raises(TransientError, match="certificate"):
            strict.get("a")
        with pytest.raises(StorageError):
            client(server, policy=NO_RETRY).get("a")
    finally:
        server.close()


def tls_of(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of a server, and of a client that trusts it."""
    certificate, key = certificate_of(folder)
    inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    inside.load_cert_chain(certificate, key)
    outside = ssl.create_default_context(cafile=str(certificate))
    outside.check_hostname = False
    return inside, outside


def certificate_of(folder: Path) -> tuple[Path, Path]:
    """A certificate that has signed itself, and its key."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=job"]
    try:
        subprocess.run(
            [*command, "-keyout", str(key), "-out", str(certificate)],
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs openssl: {error}")
    return certificate, key
