"""The live s3fs session of a bucket: botocore prepares and signs a request, `Wire` carries it.

Addressing, regions and their redirects, access points, Express sessions, encryption, payer,
checksums, credentials and their refresh are decided by botocore alone. Of s3fs we use the session,
the credentials and the single request. Not its files: `with fs.open()` publishes a truncated object
when the block raises. Not its listing cache: others write too. Not its retries: it would repeat a
conditional write whose first reply was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import http.client
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import botocore.exceptions as boto
import s3fs
from aiobotocore.awsrequest import AioAWSResponse
from botocore.awsrequest import AWSRequest
from botocore.httpsession import URLLib3Session, mask_proxy_url
from fsspec.config import apply_config

from storage.errors import InvalidUrlError
from storage.s3.wire import Route, Wire, WireRequest
from storage.threads import Pool

T = TypeVar("T")

_THREADS_MAX = 64
_FRESH_SECONDS = 30.0  # botocore renews credentials earlier before their end than that
# Stand for the arguments that differ between requests; no url and no header holds them otherwise.
_MARK = "m4rk-of-shardpoint"
_MARK_NUMBER = 918273645
_WITH_BODY = ("put_object", "upload_part")
_KEY_MARK = f"{_MARK}-Key"
_ID = "amz-sdk-invocation-id"

PREFIX_NBYTES_MAX = 255

# Of one object each: no constant fits.
_OF_ONE_OBJECT = {
    *("Bucket", "Key", "Body", "IfMatch", "IfNoneMatch", "Range", "PartNumber", "UploadId"),
    *("ContentLength", "ContentMD5", "ChecksumAlgorithm", "ChecksumCRC32", "ChecksumCRC32C"),
    *("ChecksumCRC64NVME", "ChecksumSHA1", "ChecksumSHA256"),
}


@dataclass(frozen=True, slots=True)
class Transfer:
    """How bytes go to S3: the options that are ours and not s3fs's.

    `unsigned_payload`: leave the body out of the signature; None means over https only, where TLS
    protects it. `checksums`: send one with every object, for the server to check.
    """

    unsigned_payload: bool | None = None
    checksums: bool = True


def with_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `s3fs.S3FileSystem` for a caller's; what the caller set stays, and what
    fsspec's configuration (files, `FSSPEC_S3`, `fsspec.config.conf`) sets. Raises InvalidUrlError.
    """
    options = apply_config(s3fs.S3FileSystem, dict(options))
    refused = _OF_ONE_OBJECT & set(options.get("s3_additional_kwargs") or {})
    if refused:
        raise InvalidUrlError(
            f"s3_additional_kwargs: {', '.join(sorted(refused))} of an object cannot be the same "
            "for all; leave it out"
        )
    config = {
        "connect_timeout": 10,
        "read_timeout": 60,
        "max_pool_connections": 32,
        "retries": {"total_max_attempts": 1},  # storage/retry.py repeats, nobody else
        # Our own checksums cover the data, and many servers do not know these headers.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        **(options.get("config_kwargs") or {}),
    }
    # Instances of one's own: what others set or cached on a shared one must not reach us.
    return {
        **options,
        "config_kwargs": config,
        "asynchronous": False,
        "skip_instance_cache": True,
        "use_listings_cache": False,
    }


class S3Client:
    """An s3fs client of one process, and the connections of its bucket.

    `what` names the store in messages. `unsigned` leaves bodies out of signatures; None does so
    over https, which protects them. Coroutines run on `loop`, which is fsspec's.
    """

    def __init__(
        self, bucket: str, what: str, options: Mapping[str, Any], unsigned: bool | None
    ) -> None:
        self._bucket = bucket
        self.what = what
        self._filesystem = s3fs.S3FileSystem(**options)
        # s3fs repeats by itself what botocore does not, conditional writes among it.
        self._filesystem.retries = 1
        self._unsigned = unsigned
        self._models: dict[tuple[str, ...], Model] = {}
        self._threads = Pool(_THREADS_MAX, thread_name_prefix="s3")
        self.wire = Wire(self._route)
        self._router: URLLib3Session | None = None
        self._timeouts = (10.0, 60.0)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Where botocore runs; never wait for it from itself."""
        loop: asyncio.AbstractEventLoop = self._filesystem.loop
        return loop

    def close(self) -> None:
        """Close connections and threads; requests under way end by themselves."""
        self.wire.close()
        self._threads.shutdown(wait=False)

    async def call(self, method: str, **arguments: Any) -> Any:
        """One request, sent once: what botocore makes of the answer."""
        await self._client()
        return await self._filesystem._call_s3(method, Bucket=self._bucket, **arguments)

    def known(self, method: str, arguments: Mapping[str, Any]) -> Model | None:
        """How such a request looks, if that was asked a short while ago."""
        model = self._models.get((method, *arguments))
        is_fresh = model is not None and time.monotonic() - model.made < _FRESH_SECONDS
        return model if is_fresh else None

    async def prepare(self, method: str, arguments: Mapping[str, Any]) -> Model:
        """Have botocore prepare and sign a request of that kind, and stop it before it is sent."""
        client = await self._client()
        operation = client.meta.method_to_api_mapping[method]
        sample = _Sample(operation)
        token = _sampled.set(sample)
        marked = {name: _mark(name, value) for name, value in arguments.items()}
        if method in _WITH_BODY:
            marked["Body"] = b"body"
        try:
            with contextlib.suppress(_BeforeSend):
                await self._filesystem._call_s3(method, Bucket=self._bucket, **marked)
        finally:
            _sampled.reset(token)
        auths = []

        async def note_auth(**given: Any) -> Any:
            auths.append(await client._request_signer.get_auth_instance(**given))
            return auths[-1]

        signer = copy.copy(client._request_signer)
        signer.get_auth_instance = note_auth
        again = _request(sample.method, sample.url, sample.before, b"", sample.context)
        await signer.sign(operation, again)
        # Signed a second time, to learn what the signature adds: those headers are made anew for
        # each request, and the rest stays as botocore made it.
        known = {*(name.lower() for name in again.headers), "content-length"}
        after = [(name, value) for name, value in sample.after if name.lower() not in known]
        if any(name.lower() == "transfer-encoding" for name, _ in after):
            raise InvalidUrlError(f"{self.what}: a storage option asks for bodies in chunks")
        auth = auths[0] if auths else None
        final = dict(sample.after)  # some headers are completed late
        before = [(name, final.get(name, value)) for name, value in sample.before]
        model = Model(sample.method, sample.url, before, after, sample.context, auth)
        self._models[(method, *arguments)] = model
        return model

    async def renew(self, *, ask_region: bool) -> None:
        """Prepare everything anew; with `ask_region`, botocore finds out where the bucket is, and
        remembers it.
        """
        self._models.clear()
        if ask_region:
            with contextlib.suppress(boto.ClientError):  # a refusal names the region, too
                await self.call("head_bucket")

    async def in_thread(self, request: WireRequest, send: Callable[[], T]) -> T:
        """`send()` on a thread, which carries `request`; it is ended when this is cancelled."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, send)
        except asyncio.CancelledError:
            request.drop()
            raise

    async def _client(self) -> Any:
        """The client for the bucket, whose requests `Wire` carries."""
        filesystem = self._filesystem
        general = await filesystem.set_session()
        self._take_over(general)
        client = await filesystem.get_s3(self._bucket)
        self._take_over(client)
        return client

    def _take_over(self, client: Any) -> None:
        endpoint, config = client._endpoint, client.meta.config
        given = endpoint.http_session
        # Done before: s3fs keeps its clients.
        if isinstance(given, _Carrier):
            return
        self._timeouts = (config.connect_timeout, config.read_timeout)
        self._router = URLLib3Session(
            verify=given._verify,
            proxies=given._proxy_config._proxies,
            timeout=self._timeouts,
            max_pool_connections=config.max_pool_connections,
            socket_options=given._socket_options,
            client_cert=config.client_cert,
            proxies_config=config.proxies_config,
        )
        endpoint.http_session = _Carrier(self)
        events = client.meta.events
        events.register_last("before-sign.s3", _note_unsigned)
        events.register_first("before-send.s3", _note_signed)
        if (config.s3 or {}).get("payload_signing_enabled") is None:
            unsigned = self._unsigned
            if unsigned is None:
                unsigned = urlsplit(client.meta.endpoint_url).scheme == "https"
            config.s3 = {**(config.s3 or {}), "payload_signing_enabled": not unsigned}

    def _route(self, url: str) -> Route:
        router = self._router
        assert router is not None, "a request is prepared before it is sent"
        proxy = router._proxy_config.proxy_url_for(url)
        pool = router._get_connection_manager(url, proxy).connection_from_url(url)
        router._setup_ssl_cert(pool, url, router._verify)

        def target(url: str) -> str:
            return str(router._get_request_target(url, proxy))

        is_forwarded = proxy is not None and target(url) == url

        def connect() -> http.client.HTTPConnection:
            connection: http.client.HTTPConnection = pool._new_conn()
            if proxy is not None and not is_forwarded:
                pool._prepare_proxy(connection)
            else:
                connection.connect()
            return connection

        headers = router._proxy_config.proxy_headers_for(proxy) if is_forwarded else {}
        shown = mask_proxy_url(proxy) if proxy else ""
        return Route(connect, target, tuple(headers.items()), shown, self._timeouts[1])


@dataclass(frozen=True)
class Model:
    """A request that botocore prepared, with marks where its arguments stand.

    `before` and `after` are the headers that it had when it was signed, and those that were added
    later. Requests of its kind differ in their arguments, their time and their signature alone.
    """

    method: str
    url: str
    before: Sequence[tuple[str, str]]
    after: Sequence[tuple[str, str]]
    context: Mapping[str, Any] = field(repr=False)
    auth: Any = field(repr=False)
    made: float = field(default_factory=time.monotonic)

    def request(
        self, arguments: Mapping[str, Any], body: Sequence[memoryview | bytes]
    ) -> tuple[str, list[tuple[str, str]]]:
        """Its url and headers with these arguments, signed now."""
        url = self.url
        values: dict[str, str] = {}
        for name, value in arguments.items():
            if isinstance(value, dict):
                values |= {_inner_mark(name, inner): text for inner, text in value.items()}
            else:
                values[str(_mark(name, value))] = str(value)
        for mark, value in values.items():
            if mark != _KEY_MARK and mark in url:
                url = url.replace(mark, quote(value, safe="-._~"))
        url = url.replace(_KEY_MARK, quote(arguments["Key"], safe="/-._~"))  # last: it is anything
        before = [(name, values.get(value, value)) for name, value in self.before]
        request = _request(self.method, url, before, _Body(body) if body else b"", self.context)
        if self.auth is not None:
            self.auth.add_auth(request)
        headers = [*request.headers.items(), *self.after]
        if self.method != "GET":
            headers.append(("Content-Length", str(_nbytes(body))))
        return url, [(name, str(uuid.uuid4()) if name == _ID else v) for name, v in headers]


class _Carrier:
    """What a botocore client has for a transport: `Wire`, on the threads of the session."""

    def __init__(self, client: S3Client) -> None:
        # Weak: s3fs keeps what closes its sessions as long as `client` has its filesystem.
        self._client = weakref.ref(client)
        self._sessions: dict[str, Any] = {}  # s3fs looks whether any is closed

    async def send(self, prepared: Any) -> Any:
        """The answer to a request, whatever its status. Raises as `Wire.exchange`."""
        client, request = self._client(), WireRequest()
        assert client is not None, "a request holds it"
        answer = await client.in_thread(request, partial(_sent, client, request, prepared))
        status, headers, content = answer
        return AioAWSResponse(prepared.url, status, headers, _Content(content))

    async def __aenter__(self) -> _Carrier:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """As botocore closes its own."""
        if (client := self._client()) is not None:
            client.wire.close()


def _sent(
    client: S3Client, request: WireRequest, prepared: Any
) -> tuple[int, dict[str, str], bytes]:
    headers = _headers(prepared)
    body = prepared.body.read() if hasattr(prepared.body, "read") else prepared.body
    body = body.encode() if isinstance(body, str) else body
    where = f"{prepared.method} in {client.what}"
    with client.wire.exchange(
        request, where, prepared.method, prepared.url, headers, [body] if body else []
    ) as response:
        content = response.read()
        names = {name.lower(): value for name, value in response.getheaders()}
        return response.status, names, content


class _Content:
    """A whole body, read as botocore reads one that is still coming."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    async def read(self) -> bytes:
        """All of it."""
        return self._content


# Not an Exception: s3fs translates all of these into errors of its own.
class _BeforeSend(BaseException):
    """The request is prepared; botocore must not send it."""


class _Sample:
    """What was noted of a request of `operation`."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.method = self.url = ""
        self.before: list[tuple[str, str]] = []
        self.after: list[tuple[str, str]] = []
        self.context: dict[str, Any] = {}


_sampled: contextvars.ContextVar[_Sample | None] = contextvars.ContextVar("sample", default=None)


def _note_unsigned(request: Any, operation_name: str, **_: Any) -> None:
    sample = _sampled.get()
    if sample is not None and sample.operation == operation_name:
        sample.method, sample.url = request.method, request.url
        sample.before = _headers(request)
        sample.context = dict(request.context)


def _note_signed(request: Any, event_name: str, **_: Any) -> None:
    sample = _sampled.get()
    if sample is not None and event_name.rpartition(".")[2] == sample.operation:
        sample.after = _headers(request)
        raise _BeforeSend


class _Body:
    """Several pieces of memory, as botocore reads a file to sign it."""

    def __init__(self, pieces: Sequence[memoryview | bytes]) -> None:
        self._pieces = [memoryview(piece) for piece in pieces]
        self._left = self._pieces[::-1]

    def __len__(self) -> int:
        return _nbytes(self._pieces)

    def tell(self) -> int:
        """Always the beginning, where botocore goes back to."""
        return 0

    def seek(self, offset: int) -> None:
        """Begin anew."""
        self._left = self._pieces[::-1]

    def read(self, nbytes: int) -> memoryview | bytes:
        """At most so many bytes of one piece; b"" at the end."""
        while self._left:
            piece = self._left.pop()
            if piece.nbytes > nbytes:
                self._left.append(piece[nbytes:])
            if piece.nbytes:
                return piece[:nbytes]
        return b""


def _request(
    method: str,
    url: str,
    headers: Sequence[tuple[str, str]],
    body: _Body | bytes,
    context: Mapping[str, Any],
) -> Any:
    request = AWSRequest(method=method, url=url, headers=dict(headers), data=body)
    request.context = dict(context)  # it notes its time there
    return request


def _mark(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {inner: _inner_mark(name, inner) for inner in value}
    return _MARK_NUMBER if isinstance(value, int) else f"{_MARK}-{name}"


def _inner_mark(name: str, inner: str) -> str:
    return f"{_MARK}-{name}-{inner}"


def _nbytes(body: Sequence[memoryview | bytes]) -> int:
    return sum(memoryview(piece).nbytes for piece in body)


def _headers(request: Any) -> list[tuple[str, str]]:
    """Without Expect: bodies are sent at once."""
    return [
        (name, value.decode() if isinstance(value, bytes) else str(value))
        for name, value in request.headers.items()
        if name.lower() != "expect"
    ]
