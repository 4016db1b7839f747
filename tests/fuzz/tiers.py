"""Targets: the directory of a near tier, whose files anybody on the host may have written."""

from __future__ import annotations

import os
import re
import struct
import tempfile
from contextlib import suppress
from pathlib import Path

from ckpt.errors import CheckpointError
from ckpt.format.checksum import crc32c
from ckpt.near.records import NEAR_MAGIC, NearRecord, decode_near_record, encode_near_record
from ckpt.near.status import TierStatus, decode_status, encode_status, read_status, write_status
from ckpt.near.tier import HOST_KEY, Tier, near_key
from ckpt.tools.near_tiers import tier_views
from storage.errors import StorageError
from tests.fuzz.target import Target
from tests.near.test_records import record

IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
ROOT = "0123456789abcdef0123456789abcdef"
FILES_MAX = 32
_HOST = re.compile("[0-9a-f]{32}")
# Between the files of a directory, and between the name and the bytes of each.
_NEXT, _BYTES = b"\n==\n", b"\n--\n"


def _near_records() -> list[bytes]:
    encoded = [encode_near_record(record()), encode_near_record(record(number=9))]
    return [data[len(NEAR_MAGIC) : -4] for data in encoded]


def _sealed_near(body: bytes) -> bytes:
    data = NEAR_MAGIC + body
    return data + struct.pack("<I", crc32c(data))


def _read_near_record(data: bytes) -> None:
    assert encode_near_record(decode_near_record(data, "x")) == data


def _statuses() -> list[bytes]:
    statuses = (TierStatus(1, 7, 1.5), TierStatus(3, 512, 1e9, 498, 1e9))
    return [encode_status(status)[:-4] for status in statuses]


def _sealed_status(body: bytes) -> bytes:
    return body + struct.pack("<I", crc32c(body))


def _read_status(data: bytes) -> None:
    assert encode_status(decode_status(data, "x")) == data


def _read_host(data: bytes) -> None:
    """The name of a directory, from one damaged file or from several."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as top:
        folder = Path(top) / ROOT
        folder.mkdir()
        for number, name in enumerate(data.split(_NEXT)[:FILES_MAX]):
            (folder / (f"{HOST_KEY}-{number}" if number else HOST_KEY)).write_bytes(name)
        tier = Tier(top, ROOT)
        assert _HOST.fullmatch(tier.host) and Tier(top, ROOT).host == tier.host
        tier.close()


def _folders() -> list[bytes]:
    one, status = record(), encode_status(TierStatus(3, 512, 1e9, 498, 1e9))
    held = {
        HOST_KEY: b"0" * 32,
        "STATUS": status,
        near_key(one): encode_near_record(one),
        one.prefix + one.files[0].name: bytes(100),
        "steps/00000007-e000002-0123456789abcdef/rank00000-000.safetensors": b"x",
        "steps/.tmp-0123456789abcdef-rank00000-000.safetensors": b"x",
    }
    whole = _NEXT.join([name.encode() + _BYTES + data for name, data in held.items()])
    return [whole, _NEXT.join(whole.split(_NEXT)[1:]), b""]


def _fill(folder: Path, data: bytes) -> None:
    for part in data.split(_NEXT)[:FILES_MAX]:
        name, _, content = part.partition(_BYTES)
        path = Path(os.fsdecode(name.replace(b"\0", b"")))
        if path.is_absolute() or ".." in path.parts:
            continue  # that is no file in this directory
        with suppress(OSError):  # names that no file system takes
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)


def _records(tier: Tier) -> list[NearRecord]:
    """Those that count. Damaged ones do not, and hide none of the others."""
    try:
        return tier.records()
    except CheckpointError as error:
        raise AssertionError("a damaged record is an error") from error


def _read_folder(data: bytes) -> None:
    """All that a rank, a restore and an operator do with a directory that somebody filled."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as top:
        folder = Path(top) / ROOT
        folder.mkdir()
        _fill(folder, data)
        tier_views([top])
        tier = Tier(top, ROOT)
        assert _HOST.fullmatch(tier.host)
        with suppress(CheckpointError, OSError):
            read_status(str(folder))
        with suppress(CheckpointError, OSError):
            write_status(str(folder), TierStatus(3, 513, 1e9))
            assert (status := read_status(str(folder))) and status.epoch >= 3
        for one in _records(tier):
            assert one.head.root == ROOT
            tier.whole_ranks(one)
        with suppress(CheckpointError):  # what is there may be of a later epoch
            tier.refuse_fenced(3)
        mine = record(number=77)
        tier.put(mine)
        assert mine in _records(tier)
        tier.drop({mine.head.attempt}, epoch=3, rank=0)
        tier.drop({mine.head.attempt}, epoch=3)
        assert mine in _records(tier) and tier.room()[1] >= 0
        tier.sweep_unfinished()
        tier.forget(epoch=3)
        assert not [one for one in _records(tier) if one.head.epoch <= 3]
        tier.close()


TARGETS = (
    Target("near", _read_near_record, _near_records, _sealed_near),
    Target("near.status", _read_status, _statuses, _sealed_status),
    Target("near.host", _read_host, lambda: [b"0" * 32, b"x" + _NEXT + b"0" * 32]),
    Target("near.folder", _read_folder, _folders, refusals=(CheckpointError, StorageError)),
)
