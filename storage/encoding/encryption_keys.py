"""Keys: where they come from, what they are called, and the keys that are derived from them.

A key has 32 bytes. Its id follows from it, so that a wrong key is found without trying. Nothing
here is shown in a message, a repr or a pickle.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

from storage.errors import AccessDeniedError, InvalidUrlError

KeySource: TypeAlias = bytes | str | os.PathLike[str] | Callable[[str], bytes]
"""32 bytes; the path of a file that holds them, as they are or as 64 hex digits; or a function that
returns them. It gets the id of the key that the root needs (16 hex digits), or "" for a new root.
"""

KEY_NBYTES = 32
SALT_NBYTES = 32
_FILE_NBYTES_MAX = 1024
_HEX = re.compile(rb"\s*([0-9a-fA-F]{64})\s*")


class EncryptionKey:
    """A key of 32 bytes. What is encrypted is encrypted with keys that are derived from it."""

    __slots__ = ("_mac", "id")

    def __init__(self, secret: bytes) -> None:
        # Not an attribute: debuggers and logs show attributes.
        self._mac: Callable[[bytes], bytes] = lambda salt: hmac.digest(salt, secret, hashlib.sha256)
        self.id: str = self.derived(b"", b"shardpoint 1 key id").hex()[:16]

    def derived(self, salt: bytes, info: bytes) -> bytes:
        """32 bytes of HKDF with SHA-256 (RFC 5869) of this key."""
        # Without a salt, zeros stand for it. One block of the expansion has the wanted length.
        return hmac.digest(self._mac(salt or bytes(32)), info + b"\1", hashlib.sha256)

    def __repr__(self) -> str:
        return f"<key {self.id}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key is not pickled: pass where it comes from, such as a file's path")


class _OutOfSight:
    """A function that returns a key. Its repr is that of every other one with the same key."""

    __slots__ = ("_give", "_id")

    def __init__(self, secret: bytes) -> None:
        self._give: Callable[[], bytes] = lambda: secret
        self._id = EncryptionKey(secret).id

    def __call__(self, wanted_id: str) -> bytes:
        return self._give()

    def __repr__(self) -> str:
        return f"<key {self._id}>"


def out_of_sight(source: KeySource | bytearray | None) -> KeySource | None:
    """`source`, as a function where it is the key itself: no repr, log or attribute shows it."""
    return _OutOfSight(bytes(source)) if isinstance(source, bytes | bytearray) else source


def read_key(source: KeySource, wanted_id: str, url: str) -> EncryptionKey:
    """The key that `source` gives for the root at `url`.

    Raises InvalidUrlError for what is no key, AccessDeniedError for one with another id than
    `wanted_id` ("" takes any), and what a function of the caller's raises.
    """
    key = EncryptionKey(_secret(source, wanted_id, url))
    if wanted_id and key.id != wanted_id:
        raise AccessDeniedError(
            f"{url} is encrypted with the key {wanted_id}, and encryption_key is the key {key.id}; "
            "pass the key that the root was made with"
        )
    return key


def _secret(source: Any, wanted_id: str, url: str) -> bytes:
    origin = "encryption_key"
    # Refused without showing it: as a path it would appear in a message about a missing file.
    if isinstance(source, str) and _HEX.fullmatch(source.encode("utf-8", "replace")):
        raise InvalidUrlError(
            f"{url}: encryption_key is text that may be the key itself; pass bytes.fromhex(...) of "
            "it, or the path of a file that holds it"
        )
    if isinstance(source, str | os.PathLike):
        origin = f"the key file {os.fspath(source)}"
        secret = _read_file(source, url)
    elif callable(source):
        origin = "the function encryption_key"
        secret = source(wanted_id)
    else:
        secret = source
    if isinstance(secret, bytes | bytearray) and len(secret) == KEY_NBYTES and not any(secret):
        raise InvalidUrlError(
            f"{url}: {origin} gave 32 zeros, which is no secret; a key is os.urandom(32)"
        )
    # Neither its bytes nor its repr: a key with one digit too few is nearly the key.
    if not isinstance(secret, bytes | bytearray) or len(secret) != KEY_NBYTES:
        what = f"{len(secret)} bytes" if isinstance(secret, bytes | bytearray) else "no bytes"
        del secret, source  # pages of errors show the variables of a traceback
        raise InvalidUrlError(
            f"{url}: {origin} gave {what}; a key is {KEY_NBYTES} random bytes, such as "
            "os.urandom(32), and a file holds them as they are or as 64 hex digits"
        )
    return bytes(secret)


def _read_file(path: str | os.PathLike[str], url: str) -> bytes:
    try:
        with open(os.path.expanduser(path), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            # Not read: pages of errors show the variables of a traceback.
            data = b"" if mode & 0o007 else file.read(_FILE_NBYTES_MAX)
    except OSError as error:
        raise InvalidUrlError(
            f"{url}: the key file {os.fspath(path)} cannot be read: {error.strerror}"
        ) from None
    if mode & 0o007:
        raise InvalidUrlError(
            f"{url}: every user of this host may use the key file {os.fspath(path)} (mode "
            f"{mode & 0o777:o}); make it your own with chmod 600"
        )
    match = _HEX.fullmatch(data)
    return data if match is None else bytes.fromhex(match[1].decode())
