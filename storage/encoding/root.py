"""How a root says that it is encoded: the line in front of what its FORMAT object has else.

It is readable without a key, and readers that know nothing of it refuse it as a newer format.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import NamedTuple

import crc32c

from storage.encoding.encryption_keys import EncryptionKey
from storage.encoding.layout import CIPHERS, COMPRESSIONS, NO_ROOT, damaged

FORMAT_KEY = "FORMAT"
FORMAT_NBYTES_MAX = 4096
_START = b"shardpoint 2 encoded "
_LINE = re.compile(
    rb"(shardpoint 2 encoded ([a-z0-9-]+) ([a-z0-9-]+) ([0-9a-f]{16}|-)) ([0-9a-f]{32}|-)"
)


_ROOT = re.compile(rb"shardpoint [0-9]+ ([0-9a-f]{32}) [0-9a-f]{8}\n")


class RootEncoding(NamedTuple):
    """What the FORMAT object of an encoded root says; `key_id` is "" without a cipher."""

    cipher: str
    compression: str
    key_id: str


def encode_root(secret: EncryptionKey | None, compression: str, data: bytes) -> bytes:
    """The FORMAT object of an encoded root, of which `data` is the FORMAT of a plain one."""
    cipher, key_id = ("none", "-") if secret is None else ("aes-256-gcm", secret.id)
    line = _START + f"{cipher} {compression} {key_id}".encode()
    line += b" " + (b"-" if secret is None else _check(secret, line, data))
    return line + b" %08x\n" % crc32c.crc32c(line + b"\n" + data) + data


def decode_root(stored: bytes, where: str) -> tuple[RootEncoding, bytes] | None:
    """How a root is encoded, and its FORMAT without the line that says so; None where it is not, or
    in a way that only newer versions know. Raises CorruptObjectError for a damaged line.
    """
    if not stored.startswith(_START):
        return None
    line, _, data = stored.partition(b"\n")
    said, _, checksum = line.rpartition(b" ")
    if checksum != b"%08x" % crc32c.crc32c(said + b"\n" + data):
        raise damaged(where, "its checksum does not match")
    match = _LINE.fullmatch(said)
    if match is None:
        return None
    cipher, compression, key_id = (match[group].decode() for group in (2, 3, 4))
    if cipher not in CIPHERS or compression not in COMPRESSIONS:
        return None
    return RootEncoding(cipher, compression, "" if cipher == "none" else key_id), data


def root_of(data: bytes) -> bytes:
    """The root's id, of the FORMAT of a plain root; zeros where that has none."""
    match = _ROOT.fullmatch(data)
    return NO_ROOT if match is None else bytes.fromhex(match[1].decode())


def check_root(secret: EncryptionKey, stored: bytes, where: str) -> None:
    """Raises CorruptObjectError unless FORMAT was made with `key`."""
    line, _, data = stored.partition(b"\n")
    said, _, _ = line.rpartition(b" ")
    match = _LINE.fullmatch(said)
    if match is None or not hmac.compare_digest(match[5], _check(secret, match[1], data)):
        raise damaged(where, "it was not made with this key")


def _check(secret: EncryptionKey, line: bytes, data: bytes) -> bytes:
    check_key = secret.derived(b"", b"shardpoint 1 FORMAT")
    return hmac.digest(check_key, line + b"\n" + data, hashlib.sha256)[:16].hex().encode()
