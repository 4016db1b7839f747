"""No secret of a user is ever in an error, a repr or a log line of ours, whatever goes wrong.

Method: distinctive credentials, a server that answers every request by repeating all that it was
sent (as S3 does for a wrong signature), connections that fail, options that are refused; every
exception with its causes, every repr and every log record of our packages and of s3fs at debug
level is searched.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

import ckpt
from storage import Store, open_store
from storage.retry import NO_RETRY
from storage.testing import write_object
from tests.servers import free_port

pytestmark = pytest.mark.server

SECRET = "SeCrEt0fTheUser+/DistinctiveEnough"
TOKEN = "T0kEnOfTheUser//DistinctiveEnough=="
KEY = "AKIADISTINCTIVEKEY00"


class _Echo(BaseHTTPRequestHandler):
    """Refuses everything and says why at length, the whole request included."""

    protocol_version = "HTTP/1.1"

    def _refuse(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        code = {"GET": "SignatureDoesNotMatch", "PUT": "AccessDenied"}.get(self.command, "Odd")
        said = "\n".join(f"{name}:{value}" for name, value in self.headers.items())
        body = (
            f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message>"
            f"<CanonicalRequest>{said}</CanonicalRequest></Error>"
        ).encode()
        self.send_response(400 if code == "Odd" else 403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _refuse

    def log_message(self, format: str, *arguments: Any) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def echo_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def uses(store: Store) -> list[Callable[[], object]]:
    return [
        lambda: store.get("a"),
        lambda: store.get_into("a", 0, [memoryview(bytearray(9))]),
        lambda: store.put_if_absent("a", b"x"),
        lambda: store.info("a"),
        lambda: list(store.list("")),
        lambda: store.delete("a"),
        lambda: store.abort_unfinished(""),
        lambda: write_object(store, "a", b"x", part_nbytes=5 << 20),
        lambda: write_object(store, "a", bytes(11 << 20), part_nbytes=5 << 20),
    ]


def words_of(error: BaseException) -> str:
    """Everything that a traceback shows, and the fields of all exceptions in the chain."""
    return "".join(traceback.format_exception(error)) + repr(error)


def assert_silent(text: str) -> None:
    for secret in (SECRET, TOKEN):
        assert secret not in text, text[:2000]


@pytest.mark.parametrize("is_there", [True, False], ids=["refused", "unreachable"])
def test_nothing_that_goes_wrong_shows_a_secret(
    echo_url: str, caplog: pytest.LogCaptureFixture, is_there: bool
) -> None:
    for name in ("storage", "ckpt", "s3fs", "fsspec"):
        caplog.set_level(logging.DEBUG, logger=name)
    store = open_store(
        "s3://bucket/run",
        retry=NO_RETRY,
        endpoint_url=echo_url if is_there else f"http://127.0.0.1:{free_port()}",
        key=KEY,
        secret=SECRET,
        token=TOKEN,
    )
    failed = 0
    for use in uses(store):
        try:
            use()
        except Exception as error:
            failed += 1
            assert_silent(words_of(error))
    assert failed == len(uses(store))
    assert_silent(caplog.text)
    assert_silent(repr(store) + repr(vars(store)) + repr(getattr(store, "inner", "")))
    store.close()


def test_a_save_that_fails_shows_no_secret(echo_url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="ckpt")
    options = {"endpoint_url": echo_url, "key": KEY, "secret": SECRET, "token": TOKEN}
    calls: tuple[Callable[..., object], ...] = (ckpt.save, ckpt.load)
    for call in calls:
        with pytest.raises(Exception) as caught:
            call({"a": 1}, "s3://bucket/run", step=1, storage_options=options)
        assert_silent(words_of(caught.value))
    assert_silent(caplog.text)


def test_options_that_are_refused_are_named_not_shown() -> None:
    for url, options in (
        ("s3://bucket/run", {"no_such_option": SECRET}),
        (f"s3://{KEY}:{SECRET}@bucket/run", {}),
        ("s3://bucket/run", {"endpoint_url": f"http://{KEY}:{SECRET}@127.0.0.1:1"}),
        (f"s3://bucket/run?secret={SECRET}", {}),
        (f"gs://{KEY}:{SECRET}@bucket/run", {"token": SECRET, "no_such": SECRET}),
        ("file:///tmp/x", {"secret": SECRET}),
    ):
        with pytest.raises(Exception) as caught:
            open_store(url, **options)  # type: ignore[arg-type]
        assert_silent(words_of(caught.value))
