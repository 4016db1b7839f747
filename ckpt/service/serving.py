"""Publications without a store between: a trainer's host serves them, followers pass them on."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from ckpt.commit.names import line_prefix
from ckpt.errors import InvalidArgument
from ckpt.world.job import place_of_environment, token_of_environment
from ckpt.world.place import TOKEN_VARIABLE, Tls
from storage import Store, StoreLike
from storage.encoding.store import EncodedStore
from storage.location import BorrowedStore, is_url, url_of
from storage.peers.relay import RelayStore
from storage.peers.server import PeerServer

logger = logging.getLogger(__name__)

_ADDRESS = re.compile(r"(\[.+\]|[^:\[\]]+):([0-9]{1,5})")


def place_of(address: str) -> tuple[str, int]:
    """Where to listen. Raises InvalidArgument."""
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None or int(match[2]) >= 1 << 16:
        raise InvalidArgument(
            f"serve={address!r}: expected HOST:PORT, such as '10.0.0.7:29700' or '0.0.0.0:29700'"
        )
    return match[1].strip("[]"), int(match[2])


class Serving:
    """The root in `store`, that of `line`, is served at `address` until `close`, to followers with
    the token in SHARDPOINT_TOKEN; with TLS if there is SHARDPOINT_CERTIFICATE.

    It serves what `store` reads, as it is stored. Raises InvalidArgument and StorageError.
    """

    def __init__(self, store: Store, address: str, line: str) -> None:
        host, port = place_of(address)
        token, certificate = token_of_environment(), place_of_environment().certificate
        # The token alone opens the weights to a client, so it must not be guessed.
        if len(token) < 16 or not token.isascii() or not token.isprintable():
            raise InvalidArgument(
                f"serve={address!r}: set {TOKEN_VARIABLE} to the same 16 or more characters for "
                "who serves and who follows, such as the output of `openssl rand -hex 16`"
            )
        tls = Tls(certificate).server if certificate else None
        while isinstance(store, EncodedStore):  # bytes are passed on as they are
            store = store.inner
        self._own: list[RelayStore] = []
        if not isinstance(store, RelayStore):
            store = RelayStore([BorrowedStore(store)], line_prefix(line) if line else "")
            self._own.append(store)
        # This port and no other: followers were given it before there was a server.
        self._server = PeerServer(store, token, host, range(port, port + 1), tls=tls)
        # IPv6 stands in brackets in a url.
        shown = f"[{host}]" if ":" in host else host
        self.url = f"peer://{shown}:{self._server.port}/{store.root}".rstrip("/")
        logger.info("%s is served at %s", store.url, self.url)

    def close(self) -> None:
        """Serve no more."""
        self._server.close()
        for relay in self._own:
            relay.close()


def peer_options(url: StoreLike, options: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """`options`, with the token and the certificate of the environment for a `peer://`."""
    if not is_url(url) or not url_of(url).startswith("peer://"):
        return options
    own = {"token": token_of_environment(), "certificate": place_of_environment().certificate}
    return {name: value for name, value in own.items() if value} | dict(options or {})
