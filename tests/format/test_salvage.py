"""A lost MANIFEST is rebuilt bit for bit from data files, or the report says what is missing."""

from __future__ import annotations

import pytest

from ckpt.errors import Corrupt, InvalidState, NoCheckpoint
from ckpt.tools.salvage import put_manifest, salvage, write_manifest
from storage import ByteRange, CorruptObjectError, Store, open_store
from storage.memory import MemoryStore
from tests.format.encoding import encode_manifest
from tests.format.sample import HEADER, STEP_DIR, make_sample
from tests.salvaged import matches_manifest

SAMPLE = make_sample()
NAMES = sorted(SAMPLE.files)


def store_of(name: str, files: dict[str, bytes]) -> Store:
    store = open_store(f"memory://salvage-{name}")
    for file, data in files.items():
        store.put_if_absent(f"{STEP_DIR}/{file}", data)
    return store


def test_the_manifest_is_rebuilt_bit_for_bit() -> None:
    """All files there: the rebuilt manifest encodes to the bytes that the save would have
    written.
    """
    store = store_of("whole", SAMPLE.files)
    report = salvage(store, STEP_DIR)
    assert report.is_complete and not report.missing and not report.problems
    assert matches_manifest(store, report) is None
    assert write_manifest(store, report) == encode_manifest(SAMPLE.manifest)
    assert matches_manifest(store, report) is True
    assert write_manifest(store, report) == store.get(f"{STEP_DIR}/MANIFEST")
    assert report.files == tuple(NAMES)


def test_every_missing_file_is_named_and_nothing_is_written() -> None:
    for number, lost in enumerate(NAMES):
        rest = {name: data for name, data in SAMPLE.files.items() if name != lost}
        store = store_of(f"lost-{number}", rest)
        report = salvage(store, STEP_DIR)
        assert report.missing == (lost,) and report.manifest is None
        with pytest.raises(InvalidState, match=lost):
            write_manifest(store, report)
        assert [info.key for info in store.list(STEP_DIR + "/MANIFEST")] == []


def test_any_damaged_byte_is_found() -> None:
    """Every 13th byte of a file changed: the report names the file, and no manifest comes out."""
    name = NAMES[0]
    data = SAMPLE.files[name]
    for offset in [*range(0, 900, 13), *range(4096, len(data), 7)]:
        damaged = bytearray(data)
        damaged[offset] ^= 0x10
        store = store_of(f"damaged-{offset}", {**SAMPLE.files, name: bytes(damaged)})
        report = salvage(store, STEP_DIR)
        assert report.manifest is None and name in " ".join(report.problems)


def test_a_file_of_another_attempt_is_not_mixed_in() -> None:
    other = make_sample(HEADER.model_copy(update={"attempt": "e000002-0000000000000000"}))
    store = store_of("mixed", {**SAMPLE.files, NAMES[1]: other.files[NAMES[1]]})
    report = salvage(store, STEP_DIR)
    assert report.manifest is None and "header differs" in " ".join(report.problems)


def test_a_copied_file_under_another_name_is_reported() -> None:
    store = store_of("copied", {**SAMPLE.files, "copy.safetensors": SAMPLE.files[NAMES[1]]})
    report = salvage(store, STEP_DIR)
    assert report.manifest is None and "same file of rank 1" in " ".join(report.problems)


def test_another_manifest_is_never_overwritten() -> None:
    store = store_of("other", {**SAMPLE.files, "MANIFEST": b"something else"})
    report = salvage(store, STEP_DIR)
    assert report.is_complete and matches_manifest(store, report) is False
    with pytest.raises(Corrupt, match="differs"):
        write_manifest(store, report)
    assert store.get(f"{STEP_DIR}/MANIFEST") == b"something else"


class Damaged(MemoryStore):
    """Nothing in it can be decoded any more."""

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        raise CorruptObjectError(f"{key} is damaged")


def test_a_damaged_manifest_is_to_be_moved_away() -> None:
    """The caller says which error that is: a rescue takes no older checkpoint then."""
    store = Damaged()
    store.put_if_absent("MANIFEST", b"x")
    with pytest.raises(NoCheckpoint, match="move it away"):
        put_manifest(store, "MANIFEST", SAMPLE.manifest, NoCheckpoint)


def test_nothing_there_is_said_so() -> None:
    report = salvage(store_of("none", {}), STEP_DIR)
    assert report.manifest is None and "no data files" in report.problems[0]
