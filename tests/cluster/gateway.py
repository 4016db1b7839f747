"""What hosts reach S3 through: a proxy that fails as ordered, and the name server that names it.

    python -m tests.cluster.gateway UPSTREAM ADDRESS PORT

It runs in the namespace of the store and takes orders, one JSON object per line, from standard
input; every answer is a line with what was counted until then. `Gateway` is the other end.
"""

from __future__ import annotations

import json
import random
import re
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, NamedTuple

from tests.cluster.network import Network
from tests.fault_proxy import FaultProxy, Request, fault_proxy

NAME = "objects"  # what the name server knows; with a dot, moto would take it for a bucket's
PORT = 9000
DNS_PORT = 53
_KEY = re.compile(r"Credential=cred-(\d+)/")
_ANSWERED, _SERVFAIL = 0x8180, 0x8182  # flags of an answer, RFC 1035 section 4.1.1


class Orders(NamedTuple):
    """What the gateway does from now on.

    `rate` of the requests fail, in one of `kinds` (tests/fault_proxy.py). `delay_seconds` and
    `bandwidth` are of the link. Credentials before number `valid_from` are refused as expired.
    Names are answered, refused ("refuse") or not answered ("silent").
    """

    rate: float = 0.0
    kinds: tuple[str, ...] = ()
    delay_seconds: float = 0.0
    bandwidth: float = 0.0
    valid_from: int = 0
    names: str = "answer"


class Gateway:
    """A gateway that runs, from the process of the test."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.url = f"http://{NAME}:{PORT}"  # for hosts

    def order(self, orders: Orders) -> Counter[str]:
        """From now on it does this; what it has counted until now."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(orders._asdict()) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the gateway has ended: {self._process.wait()}"
        return Counter(json.loads(line))


@contextmanager
def gateway(network: Network, upstream_url: str) -> Iterator[Gateway]:
    """A gateway to `upstream_url`, which the namespace of the store can reach."""
    words = [sys.executable, "-m", "tests.cluster.gateway"]
    words += [upstream_url, network.store.address, str(PORT)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with network.store.popen(words, **pipes) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield Gateway(process)
        finally:
            process.kill()


class Names(threading.Thread):
    """A name server that knows one name."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.mode = "answer"
        self.counts: Counter[str] = Counter()
        self._address = address
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((address, DNS_PORT))

    def run(self) -> None:
        with closing(self._socket):
            while True:
                query, client = self._socket.recvfrom(512)
                if self.mode == "silent":
                    self.counts["names not answered"] += 1
                    continue
                answer = answered(query, self._address if self.mode == "answer" else "")
                if self.mode == "refuse":
                    self.counts["names refused"] += 1
                with suppress(OSError):  # a host that cannot be reached
                    self._socket.sendto(answer, client)


def answered(query: bytes, address: str) -> bytes:
    """The answer to a query of one question, RFC 1035: `address`, or a failure where that is ""."""
    end = 12
    while query[end]:
        end += 1 + query[end]
    end += 1
    question, (kind,) = query[12 : end + 4], struct.unpack_from(">H", query, end)
    name = ".".join(_labels(query[12:end])).lower()
    has = bool(address) and kind == 1 and name == NAME
    flags = _ANSWERED if address else _SERVFAIL
    head = query[:2] + struct.pack(">5H", flags, 1, int(has), 0, 0)
    # The name by reference, type A, class IN, valid for no second.
    record = struct.pack(">3HIH", 0xC00C, 1, 1, 0, 4) + socket.inet_aton(address) if has else b""
    return head + question + record


def _labels(data: bytes) -> Iterator[str]:
    start = 0
    while length := data[start]:
        yield data[start + 1 : start + 1 + length].decode("latin-1")
        start += 1 + length


class _Rule:
    """Decides about requests, by the newest orders."""

    def __init__(self) -> None:
        self.orders = Orders()
        self.counts: Counter[str] = Counter()
        self._rng = random.Random(0)
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> str:
        orders = self.orders
        match = _KEY.search(request.headers.get("authorization", ""))
        with self._lock:
            if match is not None and int(match[1]) < orders.valid_from:
                return "expired"
            if match is not None:
                self.counts[f"with cred-{match[1]}"] += 1
            return self._rng.choice(orders.kinds) if self._rng.random() < orders.rate else ""


def _obey(orders: Orders, rule: _Rule, proxy: FaultProxy, names: Names) -> None:
    rule.orders = orders
    proxy.delay_seconds, proxy.bandwidth = orders.delay_seconds, orders.bandwidth
    names.mode = orders.names


def _counts(rule: _Rule, proxy: FaultProxy, names: Names) -> Mapping[str, int]:
    counts = {kind or "passed": count for kind, count in proxy.counts.items()}
    return {**counts, **rule.counts, **names.counts, "waited": proxy.waited}


def main(words: Sequence[str]) -> None:
    """Serve until standard input ends."""
    upstream, address, port = words
    rule, names = _Rule(), Names(address)
    names.start()
    with fault_proxy(upstream, rule=rule, held_seconds=2.0, place=(address, int(port))) as proxy:
        print("ready", flush=True)
        for line in sys.stdin:
            fields = json.loads(line)
            _obey(Orders(**{**fields, "kinds": tuple(fields["kinds"])}), rule, proxy, names)
            proxy.requests.clear()  # of hours
            print(json.dumps(_counts(rule, proxy, names)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
