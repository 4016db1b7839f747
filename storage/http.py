"""What stores over HTTP have in common: how a range is read, and what a short answer means; how
idle connections end; and TLS among hosts that have one certificate.
"""

from __future__ import annotations

import http.client
import ssl
from abc import abstractmethod
from collections.abc import Sequence

from storage.errors import ShortReadError
from storage.ranges import flat_views
from storage.store import ByteRange, Store, check_key


class HttpStore(Store):
    """A store that can fetch a whole object, or a range that is not empty, by one request."""

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        if byte_range is None:
            return self._fetch_all(check_key(key), None)
        target = bytearray(byte_range.nbytes)
        self.get_into(key, byte_range.start, [memoryview(target)])
        return bytes(target)

    def get_bounded(self, key: str, nbytes_max: int) -> bytes:
        return self._fetch_all(check_key(key), nbytes_max)

    def get_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        check_key(key)
        views = flat_views(buffers)
        nbytes = sum(view.nbytes for view in views)
        if nbytes:
            got = self._fetch_range(key, start, views)
        else:
            got = 0
            nbytes = max(0, start - self.info(key).nbytes)  # HTTP has no empty range
        if got != nbytes:
            raise ShortReadError(
                f"read {key} in {self.url}: bytes {start} to {start + nbytes} were requested, "
                f"{got} of these {nbytes} came"
            )

    @abstractmethod
    def _fetch_all(self, key: str, nbytes_max: int | None) -> bytes:
        """The whole object; TooLargeError by what the answer's head says of its length."""

    @abstractmethod
    def _fetch_range(self, key: str, start: int, views: Sequence[memoryview]) -> int:
        """Fill `views`, none of them empty, from byte `start` on; how many bytes came."""


def close_all(idle: list[http.client.HTTPConnection]) -> None:
    """Close connections that nobody uses, and forget them; one thread at a time."""
    while idle:
        idle.pop().close()


def server_tls(certificate: str) -> ssl.SSLContext:
    """For who listens. Raises OSError where `certificate` has no key and certificate in PEM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def client_tls(certificate: str) -> ssl.SSLContext:
    """Trusts who has the key of exactly this certificate; its name may be any."""
    context = ssl.create_default_context(cafile=certificate)
    # Hosts are reached by addresses, and one certificate is that of all of them.
    context.check_hostname = False
    return context
