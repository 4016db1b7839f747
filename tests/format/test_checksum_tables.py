"""A manifest has a seal per file and no checksums: bytes, hostile ones, parts, growth."""

from __future__ import annotations

import hashlib
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from ckpt.errors import Corrupt, InvalidState
from ckpt.format.columns import pack_ints, pack_map, unpack_map
from ckpt.format.joint_codec import encode_rest
from ckpt.format.joint_manifest import build_manifest
from ckpt.format.manifest import Manifest, int64s
from ckpt.format.manifest_codec import decode_manifest
from ckpt.saving.task import JointParts
from ckpt.telemetry.record import RankReport
from tests.format.encoding import encode_manifest
from tests.format.many_parts import header_of, parts_of, random_parts
from tests.format.sample import (
    make_sample,
)
from tests.format.test_manifest import column, counts, envelope

SAMPLE = make_sample()
ENCODED = encode_manifest(SAMPLE.manifest)


def body() -> dict[str, bytes]:
    return {name: bytes(data) for name, data in unpack_map(ENCODED[24:-32]).items()}


def with_fields(**changes: bytes | None) -> bytes:
    fields = {**body(), **changes}
    return envelope(pack_map({name: data for name, data in fields.items() if data is not None}))


def test_seals_are_those_of_the_last_bytes_of_the_files() -> None:
    """As FORMAT.md has it: SHA-256 of the reserved tensor, in the order of files."""
    fields = body()
    files = list(SAMPLE.files.values())
    nbytes = SAMPLE.manifest.seals.nbytes.tolist()
    assert fields["table_nbytes"] == pack_ints(nbytes) and "checksums" not in fields
    tables = [data[-size:] for data, size in zip(files, nbytes, strict=True)]
    assert all(table.startswith(b"CKS1") for table in tables)
    expected = b"".join([hashlib.sha256(table).digest() for table in tables])
    assert fields["table_digests"] == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"table_nbytes": column(44, 41)}, "field 'table_nbytes': 41 bytes in file number 1"),
        ({"table_nbytes": column(8, 44)}, "field 'table_nbytes': 8 bytes in file number 0"),
        ({"table_nbytes": column(44, 1 << 40)}, "field 'table_nbytes': .* in file number 1"),
        ({"table_nbytes": column((1 << 64) - 4, 44)}, "field 'table_nbytes'"),
        ({"table_nbytes": column(12, 12)}, "tables too small for 12 blocks"),
        ({"table_nbytes": column(44, 44, 44)}, "field 'table_nbytes'"),
        ({"table_nbytes": None}, "field 'table_nbytes' is missing"),
        ({"table_digests": None}, "field 'table_digests' is missing"),
        ({"table_digests": bytes(63)}, "field 'table_digests': 63 bytes for 2 files"),
        ({"counts": counts(blocks=11)}, "blocks"),
        ({"counts": counts(blocks=13)}, "blocks"),
    ],
)
def test_hostile_fields_are_corrupt(changes: dict[str, bytes | None], message: str) -> None:
    with pytest.raises(Corrupt, match=message):
        decode_manifest(with_fields(**changes))


def test_a_claim_of_more_chunks_than_there_can_be_takes_no_memory() -> None:
    """Columns do not bound them: 2^26 is the most."""
    many = 1 << 30
    claims = with_fields(counts=counts(chunks=many, blocks=many), chunk_files=bytes([0x10, 0]))
    tracemalloc.start()
    with pytest.raises(Corrupt, match="1073741824 chunks, there can be at most 67108864"):
        decode_manifest(claims)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("seed", range(6))
def test_parts_that_travel_have_seals_alone(seed: int) -> None:
    """A message grows by less than 48 bytes per file, whatever the number of blocks."""
    for one in random_parts(seed, 9):
        part = one.part
        report = RankReport((), 0.0, 0)
        files = [file._replace(checksums=file.checksums[:0]) for file in one.files]
        few = one._replace(files=tuple(files)).part
        assert JointParts().payload(few, report, []) == JointParts().payload(part, report, [])
        rest = part.rest
        none = rest.own.taken(int64s([]))
        grown = len(encode_rest(rest, bytes(32))) - len(encode_rest(replace(rest, own=none), b""))
        assert grown < 64 + 48 * len(part.files)


def test_more_chunks_than_readers_take_fail_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(random_parts(1, 4))
    assert len(build_manifest(header_of(4), parts).chunks) > 3
    monkeypatch.setattr("ckpt.format.joint_manifest.CHUNKS_MAX", 3)
    with pytest.raises(InvalidState, match="at most 3 fit into one manifest"):
        build_manifest(header_of(4), parts)


def test_the_bytes_do_not_grow_with_the_blocks() -> None:
    """A thousand times the blocks: the same manifest but for the numbers in it."""

    def manifest_of(blocks: int) -> Manifest:
        manifest = SAMPLE.manifest
        first = np.arange(len(manifest.chunks) + 1) * blocks
        seals = manifest.seals._replace(nbytes=manifest.seals.nbytes * blocks)
        return replace(manifest, chunks=replace(manifest.chunks, first_block=first), seals=seals)

    few, many = (len(encode_manifest(manifest_of(blocks))) for blocks in (1, 1000))
    assert many <= few + 3 * len(SAMPLE.manifest.files)
