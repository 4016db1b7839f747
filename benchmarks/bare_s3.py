"""An S3 server that keeps nothing, for CPU seconds of clients: `python -m benchmarks.bare_s3 PORT`.

Bodies are swallowed and ranges are zeros, so that a client waits for nobody. In a process of its
own: only the client's CPU is measured.
"""

from __future__ import annotations

import re
import socket
import sys
import threading

_ZEROS = memoryview(bytes(64 << 20))
_ETAG = b'ETag: "e"\r\nLast-Modified: Thu, 26 Nov 2026 10:00:00 GMT\r\n'
_NOTHING = b"<Error><Code>NoSuchKey</Code></Error>"
_UPLOAD = b"<R><UploadId>u</UploadId><ETag>e</ETag></R>"


def _serve(client: socket.socket) -> None:
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    scratch, data = memoryview(bytearray(1 << 20)), b""
    while True:
        while b"\r\n\r\n" not in data:
            received = client.recv(1 << 16)
            if not received:
                return
            data += received
        head, _, data = data.partition(b"\r\n\r\n")
        if b"100-continue" in head.lower():
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        left = (int(length[1]) if length else 0) - len(data)
        data = data[left:] if left < 0 else b""
        while left > 0:
            left -= client.recv_into(scratch, min(left, len(scratch)))
        asked = re.search(rb"(?i)\r\nrange: *bytes=(\d+)-(\d+)", head)
        if re.match(rb"GET \S*/(FORMAT|MANIFEST)[ ?]", head):
            client.sendall(_head(404, len(_NOTHING), b"") + _NOTHING)  # a place without a root
        elif asked:
            nbytes = int(asked[2]) - int(asked[1]) + 1
            covered = b"Content-Range: bytes %s-%s/1073741824\r\n" % (asked[1], asked[2])
            client.sendall(_head(206, nbytes, _ETAG + covered))
            client.sendall(_ZEROS[:nbytes])
        else:
            body = _UPLOAD if head.startswith(b"POST") else b""
            client.sendall(_head(200, len(body), _ETAG) + body)


def _head(status: int, nbytes: int, headers: bytes) -> bytes:
    return b"HTTP/1.1 %d OK\r\nContent-Length: %d\r\n%s\r\n" % (status, nbytes, headers)


def main() -> None:
    with socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=64) as listener:
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_serve, args=(client,), daemon=True).start()


if __name__ == "__main__":
    main()
