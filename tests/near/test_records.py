"""The bytes of the near log, and a tier as a directory.

Method: records are encoded, damaged at every byte and decoded; tiers are folders with small data
files that a save has written.
"""

from __future__ import annotations

import os
import random
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt.errors import CheckpointError, Corrupt, Fenced
from ckpt.format.checksum import crc32c, seal_of
from ckpt.near.records import (
    NearFile,
    NearHead,
    NearRecord,
    decode_near_record,
    encode_near_record,
)
from ckpt.near.tier import Tier, newest_epoch, tiers_in
from storage.errors import AccessDeniedError

ROOT = "0123456789abcdef0123456789abcdef"


def record(
    epoch: int = 3, number: int = 7, attempt: str = "", table: bytes = b"0" * 64
) -> NearRecord:
    head = NearHead(
        root=ROOT,
        epoch=epoch,
        number=number,
        step=10 * number,
        attempt=attempt or f"e{epoch:06d}-{number:016x}",
        world_size=2,
        after_slot=4,
        anchor="",
        is_new_line=False,
        time_unix=1.5,
    )
    files = tuple(
        NearFile(rank, i, 100 + i, seal_of(table)) for rank, i in ((0, 0), (0, 1), (1, 0))
    )
    return NearRecord(head, files)


def test_a_record_comes_back_and_no_damage_does() -> None:
    made = record()
    data = encode_near_record(made)
    assert decode_near_record(data, "here") == made
    assert made.files[1].name == "rank00000-001.safetensors"
    for index in range(len(data)):
        changed = bytearray(data)
        changed[index] ^= 1 << (index % 8)
        with pytest.raises(CheckpointError, match="here"):
            decode_near_record(bytes(changed), "here")
    for stop in range(0, len(data), 7):
        with pytest.raises(Corrupt, match="here"):
            decode_near_record(data[:stop], "here")


def test_a_record_with_a_right_checksum_is_not_trusted_either() -> None:
    data, rng = encode_near_record(record())[:-4], random.Random(5)
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(8, len(changed))] = rng.randrange(256)
        sealed = bytes(changed) + struct.pack("<I", crc32c(bytes(changed)))
        try:
            decoded = decode_near_record(sealed, "here")
        except CheckpointError:
            continue
        assert encode_near_record(decoded) == sealed


@pytest.mark.parametrize(
    "files",
    [
        (),
        (NearFile(1, 0, 9, seal_of(b"0000")),),
        (NearFile(0, 0, 9, seal_of(b"0000")), NearFile(1, 1, 9, seal_of(b"0000"))),
        (NearFile(0, 1, 9, seal_of(b"0000")), NearFile(1, 0, 9, seal_of(b"0000"))),
        (NearFile(0, 0, 3, seal_of(b"0000")), NearFile(1, 0, 9, seal_of(b"0000"))),
    ],
)
def test_records_that_leave_files_out_are_refused(files: tuple[NearFile, ...]) -> None:
    with pytest.raises(ValueError, match="near record"):
        encode_near_record(replace(record(), files=files))


def test_a_tier_has_what_was_put_there_and_drops_the_rest(tmp_path: Path) -> None:
    tier, again = Tier(tmp_path, ROOT), Tier(tmp_path, ROOT)
    assert tier.host == again.host != Tier(tmp_path / "other", ROOT).host
    old, new = record(number=1), record(number=2)
    for one in (old, new):
        tier.put(one)
        again.put(one)  # another rank of the host
        for file in one.files:
            tier.store.put_if_absent(one.prefix + file.name, b"\1" * (file.nbytes - 64) + b"0" * 64)
    assert [r.head.number for r in tier.records()] == [2, 1] and newest_epoch(tier.store) == 3
    assert all(tier.has(new, file) for file in new.files)
    tier.drop({new.head.attempt}, epoch=3)
    assert tier.records() == [new] and not any(tier.has(old, file) for file in old.files)
    assert all(tier.has(new, file) for file in new.files)
    with pytest.raises(Corrupt, match="another record"):
        tier.put(record(number=2, attempt="e000003-00000000000000ff"))
    assert [one.host for one in tiers_in(tmp_path)] == [tier.host]


def test_a_rank_drops_its_own_files_alone(tmp_path: Path) -> None:
    tier, old = Tier(tmp_path, ROOT), record()
    tier.put(old)
    for file in old.files:
        tier.store.put_if_absent(old.prefix + file.name, b"0")
    tier.drop(set(), epoch=3, rank=1)
    left = [info.key.removeprefix(old.prefix) for info in tier.store.list(old.prefix)]
    assert left == [file.name for file in old.files if file.rank != 1]
    assert 0 < len(left) < len(old.files) and tier.records() == [old]


def test_a_file_of_another_length_or_seal_does_not_count(tmp_path: Path) -> None:
    tier, made = Tier(tmp_path, ROOT), record()
    first, second, third = made.files
    tier.store.put_if_absent(made.prefix + first.name, b"0" * (first.nbytes - 1))
    tier.store.put_if_absent(made.prefix + second.name, b"1" * second.nbytes)
    assert not any(tier.has(made, file) for file in (first, second, third))


def test_a_tier_leaves_alone_what_a_newer_session_has(tmp_path: Path) -> None:
    tier, newer = Tier(tmp_path, ROOT), record(epoch=4)
    tier.put(newer)
    for file in newer.files:
        tier.store.put_if_absent(newer.prefix + file.name, b"0" * file.nbytes)
    with pytest.raises(Fenced, match="epoch 4"):
        tier.refuse_fenced(3)
    tier.drop(set(), epoch=3)
    tier.forget(epoch=3)
    assert tier.records() == [newer] and tier.has(newer, newer.files[0])


def test_damaged_and_foreign_objects_in_a_tier_do_no_harm(tmp_path: Path) -> None:
    tier, good = Tier(tmp_path, ROOT), record()
    tier.put(good)
    folder = tmp_path / ROOT / "records"
    (folder / "e000009-000000000001").write_bytes(b"nothing")
    (folder / "e000003-000000000009").write_bytes(encode_near_record(good))
    (folder / "notes.txt").write_bytes(b"mine")
    assert tier.records() == [good]
    tier.drop(set(), epoch=9)
    assert (folder / "notes.txt").exists()


@pytest.mark.parametrize("damaged", [b"", b"0" * 31, b"x" * 32, b"0" * 1000])
def test_a_damaged_name_of_a_host_is_replaced_for_all_its_ranks(
    tmp_path: Path, damaged: bytes
) -> None:
    before = Tier(tmp_path, ROOT)
    before.put(record())
    path = tmp_path / ROOT / "HOST"
    path.unlink()
    path.write_bytes(damaged)
    names = {Tier(tmp_path, ROOT).host for _ in range(3)}
    assert len(names) == 1 and names != {before.host}
    assert Tier(tmp_path, ROOT).records() == [record()]
    (tmp_path / ROOT / "HOST-1").write_bytes(damaged)
    assert {Tier(tmp_path, ROOT).host for _ in range(3)}.isdisjoint(names)


def test_a_directory_without_any_whole_name_is_refused(tmp_path: Path) -> None:
    Tier(tmp_path, ROOT)
    for number in range(8):
        (tmp_path / ROOT / (f"HOST-{number}" if number else "HOST")).write_bytes(b"")
    with pytest.raises(Corrupt, match="remove it"):
        Tier(tmp_path, ROOT)


def test_a_tier_is_private_and_no_one_elses(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "near", ROOT)
    tier.close()
    assert (tmp_path / "near" / ROOT).stat().st_mode & 0o777 == 0o700
    (tmp_path / "near" / ROOT).chmod(0o755)
    Tier(tmp_path / "near", ROOT).close()
    assert (tmp_path / "near" / ROOT).stat().st_mode & 0o777 == 0o700
    (tmp_path / "near" / ROOT).chmod(0o777)
    with pytest.raises(AccessDeniedError, match="others can change"):
        Tier(tmp_path / "near", ROOT)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(AccessDeniedError, match="others can change"):
        Tier(tmp_path / "open", ROOT)
    (tmp_path / "open").chmod(0o1777)  # such as /dev/shm
    Tier(tmp_path / "open", ROOT).close()
    for place in (tmp_path / "link", tmp_path / "elsewhere" / ROOT):
        place.parent.mkdir(exist_ok=True)
        place.symlink_to(tmp_path / "near", target_is_directory=True)
    for path in (tmp_path / "link", tmp_path / "elsewhere"):
        with pytest.raises(AccessDeniedError, match="is a link"):
            Tier(path, ROOT)
    if os.geteuid() == 0:
        (tmp_path / "theirs").mkdir(mode=0o700)
        os.chown(tmp_path / "theirs", 12345, 12345)
        with pytest.raises(AccessDeniedError, match="user 12345"):
            Tier(tmp_path / "theirs", ROOT)
