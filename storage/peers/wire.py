"""What the server of a directory and its clients agree on: names, limits, errors as answers.

    GET, DELETE /o/KEY                an object; GET takes one range
    PUT  /o/KEY                       put if absent: the bytes, then their crc32c
    POST /begin?key&nbytes&part       an object of several parts: gives the name of the upload
    PUT  /part?upload&index           one part: the bytes, then their crc32c
    POST /shorten?upload&nbytes       the object of an upload has fewer bytes
    POST /end?upload, DELETE /part    publish an upload, or give it up
    GET  /info?key, /list?prefix      what is there, as JSON; a list has up to LIST_MAX objects
    POST /abort?prefix, PUT /sync     as the methods of a store

Every request has the token in its Authorization, and nowhere else.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from http import HTTPStatus

import crc32c as _crc32c

from storage import errors
from storage.errors import StorageError

MIB = 1 << 20
OBJECTS = "/o/"
BODY_NBYTES_MAX = 16 * MIB  # of a part, and of an object that is put at once
LIST_MAX = 1000
CHECKSUM = struct.Struct("<I")

# Of each class the closest status; the name in the answer is what counts.
_STATUS: dict[type[StorageError], HTTPStatus] = {
    errors.KeyNotFoundError: HTTPStatus.NOT_FOUND,
    errors.KeyExistsError: HTTPStatus.CONFLICT,
    errors.ShortReadError: HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
    errors.InvalidKeyError: HTTPStatus.BAD_REQUEST,
    errors.TooLargeError: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    errors.AccessDeniedError: HTTPStatus.FORBIDDEN,
    errors.NoSpaceError: HTTPStatus.INSUFFICIENT_STORAGE,
    errors.SlowDownError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.TransientError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.OutcomeUnknownError: HTTPStatus.INTERNAL_SERVER_ERROR,
}
_CLASSES = {kind.__name__: kind for kind in _STATUS}


def status_of(error: StorageError) -> HTTPStatus:
    """The status that an answer with this error has."""
    return _STATUS.get(type(error), HTTPStatus.INTERNAL_SERVER_ERROR)


def error_of(name: str, text: str) -> StorageError:
    """The error that an answer stands for."""
    return _CLASSES.get(name, StorageError)(text)


def checksum_of(buffers: Iterable[memoryview]) -> bytes:
    """What follows the bytes of a body: the crc32c of all of them."""
    value = 0
    for buffer in buffers:
        value = _crc32c.crc32c(buffer, value)
    return CHECKSUM.pack(value)
