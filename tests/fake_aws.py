"""Amazon's part of S3, on the loopback: hosts and regions, certificates, proxies, Express, rules.

Names are resolved inside the process that `resolving` covers; no other host is asked. Where AWS's
documents say how a request is answered, this answers it that way, and counts.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import http.server
import re
import select
import socket
import socketserver
import ssl
import struct
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from email.utils import formatdate
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import crc32c
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Threads(socketserver.ThreadingTCPServer):
    """A server of daemon threads; a client that goes away is nothing to speak of."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing."""


@contextmanager
def serving(server: socketserver.BaseServer) -> Iterator[None]:
    """`server` answers in this block."""
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# Proxies -----------------------------------------------------------------------------------------


class HttpProxy(Threads):
    """Forwards plain requests, and tunnels by CONNECT, to the addresses in `hosts` alone."""

    def __init__(self, hosts: Mapping[str, str], authorization: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _ProxyHandler)
        self.hosts = hosts  # "name:port" or "*" to an endpoint
        self.authorization = authorization
        self.requests: list[str] = []  # first lines
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def upstream(self, place: str) -> str:
        """Host and port for "name:port"."""
        return urlsplit(self.hosts.get(place) or self.hosts["*"]).netloc


@contextmanager
def http_proxy(hosts: Mapping[str, str], authorization: str = "") -> Iterator[HttpProxy]:
    """A running proxy; with `authorization`, that header is asked for."""
    proxy = HttpProxy(hosts, authorization)
    with serving(proxy):
        yield proxy


class _ProxyHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # of two small writes, the second waited 40 ms
    server: HttpProxy

    def _forward(self) -> None:
        self.server.requests.append(self.requestline)
        if self._is_refused():
            return
        address = urlsplit(self.path)
        place = address.netloc if address.port else f"{address.netloc}:80"
        upstream = http.client.HTTPConnection(self.server.upstream(place), timeout=60)
        nbytes = int(self.headers.get("Content-Length", 0))
        target = address.path + (f"?{address.query}" if address.query else "")
        upstream.putrequest(self.command, target, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() != "host":
                upstream.putheader(name, value)
        upstream.endheaders(self.rfile.read(nbytes) if nbytes else None)
        response = upstream.getresponse()
        answer = response.read()
        self.send_response_only(response.status)
        for name, value in response.getheaders():
            dropped = ["transfer-encoding", "connection"]
            dropped += [] if self.command == "HEAD" else ["content-length"]
            if name.lower() not in dropped:
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
        upstream.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward

    def do_CONNECT(self) -> None:
        self.server.requests.append(self.requestline)
        if self._is_refused():
            return
        host, _, port = self.server.upstream(self.path).partition(":")
        with socket.create_connection((host, int(port)), timeout=60) as upstream:
            upstream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.send_response_only(200)
            self.end_headers()
            pairs = {self.connection: upstream, upstream: self.connection}
            with contextlib.suppress(OSError):
                while True:
                    for ready in select.select([*pairs], [], [], 60)[0]:
                        data = ready.recv(1 << 16)
                        if not data:
                            return
                        pairs[ready].sendall(data)
        self.close_connection = True

    def _is_refused(self) -> bool:
        wanted = self.server.authorization
        if not wanted or self.headers.get("Proxy-Authorization") == wanted:
            return False
        self.send_response_only(407)
        self.send_header("Content-Length", "0")
        self.end_headers()
        self.close_connection = True
        return True

    def log_message(self, format: str, *arguments: Any) -> None:
        """Quiet."""


# Amazon ------------------------------------------------------------------------------------------

KEY, SECRET = "AKIAFAKE", "secret-of-fake"
# The regions whose buckets the global host serves; later ones answer it with 400.
# https://docs.aws.amazon.com/general/latest/gr/s3.html
CLASSIC = {
    *("us-east-1", "us-east-2", "us-west-1", "us-west-2", "eu-west-1", "eu-west-2", "eu-west-3"),
    *("eu-central-1", "eu-north-1", "ap-south-1", "ap-northeast-1", "ap-northeast-2"),
    *("ap-northeast-3", "ap-southeast-1", "ap-southeast-2", "ca-central-1", "sa-east-1"),
}
_HOST = re.compile(
    r"(?:(?P<bucket>.+?)\.)?(?P<service>(?:s3-accelerate|s3-accesspoint|s3express-control|"
    r"s3express(?:-fips)?-(?P<zone>[a-z0-9-]+)|s3)(?:-fips)?(?:\.dualstack)?)"
    r"(?:\.(?P<region>[a-z]{2}(?:-[a-z]+)+-\d))?\.(?P<domain>amazonaws\.com(?:\.cn)?)"
)
_PART_NBYTES_MIN = 5 << 20
_WINDOW_SECONDS = 15 * 60


@dataclass
class Object:
    """What was written, with the headers that come back."""

    data: bytes
    headers: dict[str, str]
    modified: float = field(default_factory=time.time)


@dataclass
class Upload:
    """One under way."""

    key: str
    headers: dict[str, str]
    parts: dict[int, tuple[bytes, str]] = field(default_factory=dict)


@dataclass
class Bucket:
    """`is_new`: made today, so that the global host redirects. `zone`: of S3 Express."""

    name: str
    region: str
    is_new: bool = False
    zone: str = ""
    kms_key: str = ""  # what its policy asks for with every object
    requester_pays: bool = False
    is_locked: bool = False
    is_versioned: bool = False
    is_accelerated: bool = False
    objects: dict[str, Object] = field(default_factory=dict)
    uploads: dict[str, Upload] = field(default_factory=dict)
    older: list[tuple[str, Object | None]] = field(default_factory=list)  # None: a delete marker


class Seen(NamedTuple):
    """A request that came, and its answer."""

    method: str
    host: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    status: int
    code: str

    @property
    def operation(self) -> str:
        """As AWS calls it, nearly."""
        kinds = ("session", "uploads", "partNumber", "uploadId", "list-type")
        return f"{self.method} {next((kind for kind in kinds if kind in self.query), '')}".strip()


class Refusal(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, code: str, text: str = "", **headers: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code
        self.text = text  # more elements of its body
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class FakeAws(Threads):
    """The servers of all regions at one port. Attributes are what a test changes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _AwsHandler)
        self.port = int(self.server_address[1])
        self.buckets: dict[str, Bucket] = {}
        self.access_points: dict[str, str] = {}  # "name-account" to a bucket
        self.secrets: dict[str, tuple[str, str]] = {KEY: (SECRET, "")}  # with the session's token
        self.expired: set[str] = set()  # access keys
        self.seen: list[Seen] = []
        self.skew_seconds = 0.0
        self.slow_downs = 0  # how many requests are answered so
        self.slow_seconds = 0.0  # in the middle of each body
        self.authority = Authority(folder)
        self.lock = threading.Lock()

    def make(self, name: str, region: str, **kinds: Any) -> Bucket:
        """A new bucket."""
        self.buckets[name] = Bucket(name, region, **kinds)
        return self.buckets[name]

    @property
    def environment(self) -> dict[str, str]:
        """Credentials and authority, and nothing of this machine."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_CA_BUNDLE": str(self.authority.path),
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/nowhere",
            "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
        }

    def count(self, operation: str, code: str = "") -> int:
        """How many such requests were answered so; "" for well."""
        return sum(one.operation == operation and one.code == code for one in self.seen)

    # Where a request goes

    def answer(
        self, method: str, host: str, target: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        raw_path, _, raw_query = target.partition("?")
        path = unquote(raw_path)
        query = dict(parse_qsl(raw_query, keep_blank_values=True))
        status, code = 200, ""
        try:
            with self.lock:
                if self.slow_downs and "session" not in query:
                    self.slow_downs -= 1
                    raise Refusal(503, "SlowDown")
            bucket, key, place = self._bucket(host, path, query)
            region, service = self._authorized(method, host, raw_path, raw_query, headers, body)
            self._check_place(bucket, place, region, service, query)
            self._check_rules(bucket, method, query, headers, body)
            with self.lock:
                status, given, answer = Operations(self, bucket).run(
                    method, key, query, headers, body
                )
        except Refusal as refusal:
            status, code = refusal.status, refusal.code
            text = f"<Code>{code}</Code><Message>fake</Message>{refusal.text}"
            given, answer = refusal.headers, _xml("Error", text)
        with self.lock:
            self.seen.append(Seen(method, host, path, query, headers, status, code))
        return status, given, answer

    def _bucket(
        self, host: str, path: str, query: Mapping[str, str]
    ) -> tuple[Bucket, str, re.Match[str]]:
        place = _HOST.fullmatch(host)
        if place is None:
            raise Refusal(400, "InvalidURI", f"<Host>{host}</Host>")
        name, key = place["bucket"] or "", path[1:]
        if not name:
            name, _, key = key.partition("/")
        if place["service"].startswith("s3-accesspoint"):
            name = self.access_points.get(name, "")
        if name not in self.buckets:
            raise Refusal(404, "NoSuchBucket")
        return self.buckets[name], key, place

    def _check_place(
        self,
        bucket: Bucket,
        place: re.Match[str],
        region: str,
        service: str,
        query: Mapping[str, str],
    ) -> None:
        here = {"x_amz_bucket_region": bucket.region}
        if bool(place["zone"]) != bool(bucket.zone) or (place["zone"] or "") != bucket.zone:
            raise Refusal(404, "NoSuchBucket")
        if place["service"].startswith("s3-accelerate") and not bucket.is_accelerated:
            raise Refusal(400, "InvalidRequest")
        if bucket.zone and service != "s3express":
            raise Refusal(400, "AuthorizationHeaderMalformed")
        is_global = not place["region"] and not place["service"].startswith("s3-accelerate")
        if is_global and bucket.region not in CLASSIC:
            raise Refusal(400, "IllegalLocationConstraintException", **here)
        if is_global and bucket.is_new and bucket.region != "us-east-1":
            there = f"https://{bucket.name}.s3.{bucket.region}.amazonaws.com/"
            raise Refusal(307, "TemporaryRedirect", **here, Location=there)
        if place["region"] and place["region"] != bucket.region:
            text = f"<Bucket>{bucket.name}</Bucket>"
            raise Refusal(301, "PermanentRedirect", text, **here)
        if region != bucket.region:
            text = f"<Region>{bucket.region}</Region>"
            raise Refusal(400, "AuthorizationHeaderMalformed", text, **here)

    # Who sends it

    def _authorized(
        self,
        method: str,
        host: str,
        path: str,
        raw_query: str,
        headers: Mapping[str, str],
        body: bytes,
    ) -> tuple[str, str]:
        """Region and service that it is signed for, after a look at the whole signature."""
        match = re.fullmatch(
            r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d+)/([^/]+)/([^/]+)/aws4_request, ?"
            r"SignedHeaders=([^,]+), ?Signature=(\w+)",
            headers.get("authorization", ""),
        )
        if match is None:
            raise Refusal(403, "AccessDenied")
        access_key, day, region, service, names, signature = match.groups()
        if access_key in self.expired:
            raise Refusal(400, "ExpiredToken")
        if access_key not in self.secrets:
            raise Refusal(403, "InvalidAccessKeyId")
        secret, token = self.secrets[access_key]
        header = "x-amz-s3session-token" if "session" in access_key else "x-amz-security-token"
        if token and headers.get(header) != token:
            raise Refusal(403, "InvalidToken")
        sent = datetime.strptime(headers["x-amz-date"], "%Y%m%dT%H%M%SZ")
        now = datetime.fromtimestamp(time.time() + self.skew_seconds, timezone.utc)
        if abs((now - sent.replace(tzinfo=timezone.utc)).total_seconds()) > _WINDOW_SECONDS:
            raise Refusal(403, "RequestTimeTooSkewed")
        digest = headers["x-amz-content-sha256"]
        if digest != "UNSIGNED-PAYLOAD" and digest != hashlib.sha256(body).hexdigest():
            raise Refusal(400, "XAmzContentSHA256Mismatch")
        pairs = sorted(tuple(pair.partition("=")[::2]) for pair in raw_query.split("&") if pair)
        query = "&".join(f"{name}={value}" for name, value in pairs)
        lines = [f"{name}:{headers[name].strip()}" for name in names.split(";")]
        canonical = "\n".join([method, path, query, *lines, "", names, digest])
        scope = f"{day}/{region}/{service}/aws4_request"
        hashed = hashlib.sha256(canonical.encode()).hexdigest()
        text = "\n".join(["AWS4-HMAC-SHA256", headers["x-amz-date"], scope, hashed])
        secret_key = f"AWS4{secret}".encode()
        for part in (day, region, service, "aws4_request"):
            secret_key = hmac.new(secret_key, part.encode(), hashlib.sha256).digest()
        if hmac.new(secret_key, text.encode(), hashlib.sha256).hexdigest() != signature:
            raise Refusal(403, "SignatureDoesNotMatch", f"<CanonicalRequest>{canonical}</>")
        return region, service

    def _check_rules(
        self,
        bucket: Bucket,
        method: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        body: bytes,
    ) -> None:
        creates = (method == "PUT" and "partNumber" not in query) or "uploads" in query
        creates = creates and method != "GET"
        if "x-amz-write-offset-bytes" in headers:
            raise Refusal(501, "NotImplemented")  # appends
        key = headers.get("x-amz-server-side-encryption-aws-kms-key-id")
        if creates and bucket.kms_key and key != bucket.kms_key:
            raise Refusal(403, "AccessDenied")
        if bucket.requester_pays and headers.get("x-amz-request-payer") != "requester":
            raise Refusal(403, "AccessDenied")
        checksum = headers.get("x-amz-checksum-crc32c")
        if method == "PUT" and bucket.is_locked and not checksum:
            raise Refusal(400, "InvalidRequest")
        if checksum and method == "PUT":
            expected = base64.b64encode(struct.pack(">I", crc32c.crc32c(body))).decode()
            if checksum != expected:
                raise Refusal(400, "BadDigest")
        if bucket.zone and method == "GET":
            prefix = query.get("prefix", "")
            if (prefix and not prefix.endswith("/")) or "start-after" in query:
                raise Refusal(400, "InvalidArgument")


class Operations:
    """What S3 does with objects, in memory."""

    def __init__(self, aws: FakeAws, bucket: Bucket) -> None:
        self.aws = aws
        self.bucket = bucket

    def run(
        self, method: str, key: str, query: dict[str, str], headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        bucket = self.bucket
        region = {"x-amz-bucket-region": bucket.region}
        if "session" in query:
            return 200, {}, self._session()
        if not key:
            if method == "HEAD":
                return 200, region, b""
            return 200, region, self._uploads(query) if "uploads" in query else self._list(query)
        if "uploadId" in query or "uploads" in query:
            return self._multipart(method, key, query, headers, body)
        if method == "PUT":
            return 200, self._put(key, body, headers), b""
        if method == "DELETE":
            if bucket.is_versioned or bucket.is_locked:
                bucket.older.append((key, bucket.objects.get(key)))
                bucket.older.append((key, None))
            bucket.objects.pop(key, None)
            return 204, {}, b""
        stored = bucket.objects.get(key)
        if stored is None:
            raise Refusal(404, "NoSuchKey")
        modified = formatdate(stored.modified, usegmt=True)
        given = {**stored.headers, "Last-Modified": modified, "Accept-Ranges": "bytes"}
        if "range" not in headers:
            return 200, given, stored.data
        first, _, last = headers["range"].removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last) + 1, len(stored.data))
        if start >= len(stored.data):
            raise Refusal(416, "InvalidRange")
        given["Content-Range"] = f"bytes {start}-{end - 1}/{len(stored.data)}"
        return 206, given, stored.data[start:end]

    def _put(self, key: str, data: bytes, headers: Mapping[str, str]) -> dict[str, str]:
        bucket = self.bucket
        if headers.get("if-none-match") == "*" and key in bucket.objects:
            raise Refusal(412, "PreconditionFailed")
        if key in bucket.objects and bucket.is_versioned:
            bucket.older.append((key, bucket.objects[key]))
        kept = ("x-amz-meta-", "x-amz-server-side-encryption", "x-amz-storage-class")
        given = {name: value for name, value in headers.items() if name.startswith(kept)}
        given["ETag"] = f'"{hashlib.md5(data).hexdigest()}"'
        bucket.objects[key] = Object(data, given)
        return given

    def _multipart(
        self, method: str, key: str, query: dict[str, str], headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        bucket = self.bucket
        if "uploads" in query:
            name = uuid.uuid4().hex
            bucket.uploads[name] = Upload(key, headers)
            return 200, {}, _xml("InitiateMultipartUploadResult", f"<UploadId>{name}</UploadId>")
        upload = bucket.uploads.get(query["uploadId"])
        if upload is None or upload.key != key:
            raise Refusal(404, "NoSuchUpload")
        if method == "PUT":
            tag = f'"{hashlib.md5(body).hexdigest()}"'
            upload.parts[int(query["partNumber"])] = (body, tag)
            return 200, {"ETag": tag}, b""
        if method == "DELETE":
            del bucket.uploads[query["uploadId"]]
            return 204, {}, b""
        if method == "GET":
            parts = "".join(
                f"<Part><PartNumber>{n}</PartNumber><ETag>{tag}</ETag><Size>{len(data)}</Size></Part>"
                for n, (data, tag) in upload.parts.items()
            )
            return 200, {}, _xml("ListPartsResult", parts)
        listed = re.findall(r"<PartNumber>(\d+)</PartNumber>", body.decode())
        parts_in_order = [upload.parts[int(number)][0] for number in listed]
        if any(len(part) < _PART_NBYTES_MIN for part in parts_in_order[:-1]):
            raise Refusal(400, "EntityTooSmall")
        kept = {**upload.headers, "if-none-match": headers.get("if-none-match", "")}
        tag = self._put(key, b"".join(parts_in_order), kept)["ETag"]
        del bucket.uploads[query["uploadId"]]
        return 200, {}, _xml("CompleteMultipartUploadResult", f"<ETag>{tag}</ETag>")

    def _list(self, query: Mapping[str, str]) -> bytes:
        bucket, prefix = self.bucket, query.get("prefix", "")
        names = sorted(name for name in bucket.objects if name.startswith(prefix))
        if bucket.zone:  # "in an order that is not lexicographical"
            names.sort(key=lambda name: hashlib.md5(name.encode()).hexdigest())
        names = [name for name in names if name > query.get("start-after", "")]
        first, size = int(query.get("continuation-token", 0)), int(query.get("max-keys", 1000))
        page, is_more = names[first : first + size], first + size < len(names)
        text = "".join(
            f"<Contents><Key>{quote(name)}</Key><Size>{len(bucket.objects[name].data)}</Size>"
            f"<LastModified>{_iso(bucket.objects[name].modified)}</LastModified></Contents>"
            for name in page
        )
        more = f"<NextContinuationToken>{first + size}</NextContinuationToken>" if is_more else ""
        return _xml(
            "ListBucketResult",
            f"<IsTruncated>{str(is_more).lower()}</IsTruncated>{more}"
            f"<EncodingType>url</EncodingType>{text}",
        )

    def _uploads(self, query: Mapping[str, str]) -> bytes:
        text = "".join(
            f"<Upload><Key>{quote(upload.key)}</Key><UploadId>{name}</UploadId></Upload>"
            for name, upload in self.bucket.uploads.items()
            if upload.key.startswith(query.get("prefix", ""))
        )
        return _xml("ListMultipartUploadsResult", f"<EncodingType>url</EncodingType>{text}")

    def _session(self) -> bytes:
        if not self.bucket.zone:
            raise Refusal(400, "InvalidRequest")
        name = f"session-{uuid.uuid4().hex}"
        self.aws.secrets[name] = (name[::-1], f"token-of-{name}")
        return _xml(
            "CreateSessionResult",
            f"<Credentials><SessionToken>token-of-{name}</SessionToken><SecretAccessKey>{name[::-1]}"
            f"</SecretAccessKey><AccessKeyId>{name}</AccessKeyId>"
            f"<Expiration>{_iso(time.time() + 300)}</Expiration></Credentials>",
        )


def _xml(name: str, text: str) -> bytes:
    space = " xmlns='http://s3.amazonaws.com/doc/2006-03-01/'"
    space *= name != "Error"  # AWS's errors have none, and botocore reads none that has one
    return f"<?xml version='1.0'?><{name}{space}>{text}</{name}>".encode()


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")


class _AwsHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: FakeAws

    def setup(self) -> None:
        self.request = self.server.authority.wrapped(self.request)  # may raise: not trusted
        super().setup()

    def finish(self) -> None:
        super().finish()
        self.request.close()

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        host = headers["host"].partition(":")[0]
        status, given, answer = self.server.answer(self.command, host, self.path, headers, body)
        self.send_response_only(status)
        for name, value in given.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command != "HEAD":
            half = len(answer) // 2 if self.server.slow_seconds else 0
            self.wfile.write(answer[:half])
            if half:
                self.wfile.flush()
                time.sleep(self.server.slow_seconds)  # what a slow body is
            self.wfile.write(answer[half:])

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def log_message(self, format: str, *arguments: Any) -> None:
        """Quiet."""


class Authority:
    """Signs certificates for the hosts of AWS as it has them: one label before the service."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority of a test")])
        self.path = folder / "authority.pem"
        root = self._signed(self._name, self._key, [], is_authority=True)
        self.path.write_bytes(root.public_bytes(serialization.Encoding.PEM))
        self._contexts: dict[str, ssl.SSLContext] = {}
        self._lock = threading.Lock()

    def wrapped(self, plain: socket.socket) -> socket.socket:
        """TLS over `plain`, with a certificate for the name that the client asks for."""

        def choose(used: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
            used.context = self._context(name or "localhost")

        first = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        first.sni_callback = choose
        return first.wrap_socket(plain, server_side=True)

    def _context(self, name: str) -> ssl.SSLContext:
        place = _HOST.fullmatch(name)
        service = name if place is None else name.removeprefix(f"{place['bucket']}.")
        with self._lock:
            if service not in self._contexts:
                key = ec.generate_private_key(ec.SECP256R1())
                short = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server of a test")])
                signed = self._signed(short, key, [service, f"*.{service}"])
                path = self._folder / f"{uuid.uuid4().hex}.pem"
                path.write_bytes(
                    signed.public_bytes(serialization.Encoding.PEM)
                    + key.private_bytes(
                        serialization.Encoding.PEM,
                        serialization.PrivateFormat.PKCS8,
                        serialization.NoEncryption(),
                    )
                )
                self._contexts[service] = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                self._contexts[service].load_cert_chain(path)
            return self._contexts[service]

    def _signed(
        self, name: x509.Name, key: Any, hosts: list[str], *, is_authority: bool = False
    ) -> x509.Certificate:
        now = datetime.now(timezone.utc)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        )
        if hosts:
            names = x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256())


@contextmanager
def fake_aws(folder: Path) -> Iterator[FakeAws]:
    """A running one, whose names this process resolves."""
    aws = FakeAws(folder)
    with serving(aws), resolving(aws.port):
        yield aws


@contextmanager
def resolving(port: int) -> Iterator[None]:
    """The names of AWS lead to `port` of the loopback; no other name but those of it resolves."""
    ask = socket.getaddrinfo

    def resolve(host: Any, service: Any, *more: Any, **named: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if isinstance(name, str) and name.endswith(("amazonaws.com", "amazonaws.com.cn")):
            return ask("127.0.0.1", port, *more, **named)
        if name not in ("localhost", "127.0.0.1", "::1", None):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ask(host, service, *more, **named)

    socket.getaddrinfo = resolve  # type: ignore[assignment]
    try:
        yield
    finally:
        socket.getaddrinfo = ask
