"""An object that several processes write together is published whole, once, or not at all.

Method: two stores on one place write parts in turn; on a disk, and on an S3 server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage import KeyExistsError, KeyNotFoundError, Store, open_store
from tests.servers import S3Server, moto_server

PART = 5 << 20
Open = Callable[[], Store]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with moto_server() as running:
        yield running


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.server)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    if request.param == "local":
        return lambda: open_store(str(tmp_path / "place"))
    server: S3Server = request.getfixturevalue("server")
    url = f"s3://{server.make_bucket()}/place"
    return lambda: open_store(url, **server.options)


def parts_of(data: bytes) -> list[memoryview]:
    return [memoryview(data)[start : start + PART] for start in range(0, len(data), PART)]


DATA = bytes(range(256)) * (11 << 12)  # 11 MiB: two parts and a shorter one


def write(open_: Open, token: str, indexes: list[int]) -> dict[int, str]:
    store = open_()
    writer = store.joint("a/object", len(DATA), part_nbytes=PART, token=token)
    for index in indexes:
        writer.write_part(index, [parts_of(DATA)[index]])
    writer.close()
    store.close()
    return writer.receipts


def test_parts_of_two_processes_make_one_object(place: Open) -> None:
    store = place()
    token = store.begin_joint("a/object", len(DATA), part_nbytes=PART)
    receipts = write(place, token, [2, 0])
    assert not list(store.list(""))
    with pytest.raises(ValueError, match="1 parts were never written"):
        store.end_joint("a/object", len(DATA), part_nbytes=PART, token=token, receipts=receipts)
    receipts |= write(place, token, [1])
    store.end_joint("a/object", len(DATA), part_nbytes=PART, token=token, receipts=receipts)
    assert store.get("a/object") == DATA


def test_an_object_that_is_there_is_not_replaced(place: Open) -> None:
    store = place()
    token = store.begin_joint("a/object", len(DATA), part_nbytes=PART)
    receipts = write(place, token, [0, 1, 2])
    store.put_if_absent("a/object", b"first")
    with pytest.raises(KeyExistsError):
        store.end_joint("a/object", len(DATA), part_nbytes=PART, token=token, receipts=receipts)
    assert store.get("a/object") == b"first"


def test_nothing_is_left_of_an_aborted_object(place: Open) -> None:
    store = place()
    token = store.begin_joint("a/object", len(DATA), part_nbytes=PART)
    write(place, token, [1])
    store.abort_joint("a/object", token)
    with pytest.raises(KeyNotFoundError):
        store.info("a/object")
    assert store.abort_unfinished("") == 0
