"""Manifests with a seal per file in place of checksums: bytes, hostile ones, parts, growth."""

from __future__ import annotations

import hashlib
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import ckpt
from ckpt.errors import Corrupt, InvalidState, UnsupportedFormat
from ckpt.format.checksum_tables import CHECKSUM_TABLES, NO_SEALS
from ckpt.format.columns import pack_ints, pack_map, unpack_map
from ckpt.format.joint_codec import encode_rest
from ckpt.format.joint_part import rest_of
from ckpt.format.manifest import PROGRESSIONS, Header, Manifest, int64s
from ckpt.format.manifest_codec import decode_manifest, encode_manifest
from ckpt.format.merging import build_manifest
from ckpt.saving.joint_parts import JointParts
from ckpt.telemetry.history import RankReport
from tests.format.many_parts import header_of, random_parts
from tests.format.sample import (
    HEADER,
    INCREMENTS,
    STEP_DIR,
    TENSORS,
    make_increments,
    make_sample,
    tensor_bytes,
)
from tests.format.test_manifest import column, counts, envelope


def sealed(header: Header) -> Header:
    required = (*header.required, PROGRESSIONS, CHECKSUM_TABLES)
    return header.model_copy(update={"required": required})


GOLDEN = Path(__file__).parent.parent / "golden" / "v1_checksum_tables"
SAMPLE = make_sample(sealed(HEADER))
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


@pytest.mark.parametrize("number", range(3))
def test_it_comes_back_and_says_the_same_as_the_one_with_checksums(number: int) -> None:
    """The samples with references: files of other attempts have seals, too."""
    sample = make_increments()[number]
    header = sealed(INCREMENTS[number])
    data = encode_manifest(build_manifest(header, sample.parts))
    there = decode_manifest(data)
    assert encode_manifest(there) == data and len(there.seals.nbytes) == len(there.files)
    assert not len(there.checksums) and not len(there.digests)
    assert there.block_count == len(sample.manifest.checksums)
    plain = replace(
        there,
        header=sample.manifest.header,
        checksums=sample.manifest.checksums,
        digests=sample.manifest.digests,
        seals=NO_SEALS,
    )
    assert encode_manifest(plain) == encode_manifest(sample.manifest)


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
        ({"checksums": bytes(48)}, "field 'checksums': in a manifest with 'checksum_tables'"),
        ({"blake3": bytes(256)}, "field 'blake3': in a manifest with 'checksum_tables'"),
        ({"counts": counts(blocks=11)}, "blocks"),
        ({"counts": counts(blocks=13)}, "blocks"),
        (
            {
                "header": body()["header"].replace(b',"checksum_tables"', b""),
                "checksums": bytes(48),
            },
            "field 'table_nbytes': in a manifest without 'checksum_tables'",
        ),
    ],
)
def test_hostile_fields_are_corrupt(changes: dict[str, bytes | None], message: str) -> None:
    with pytest.raises(Corrupt, match=message):
        decode_manifest(with_fields(**changes))


def test_a_claim_of_more_chunks_than_there_can_be_takes_no_memory() -> None:
    """Neither checksums nor columns bound them here: 2^26 is the most."""
    many = 1 << 30
    claims = with_fields(counts=counts(chunks=many, blocks=many), chunk_files=bytes([0x10, 0]))
    tracemalloc.start()
    with pytest.raises(Corrupt, match="1073741824 chunks, there can be at most 67108864"):
        decode_manifest(claims)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_readers_that_do_not_know_tables_refuse_them_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "ckpt.format.manifest_codec.FEATURES", frozenset({"references", "progressions"})
    )
    with pytest.raises(UnsupportedFormat, match=r"checksum_tables.*install a newer one"):
        decode_manifest(ENCODED)


@pytest.mark.parametrize("seed", range(6))
def test_parts_that_travel_have_seals_alone(seed: int) -> None:
    """A message grows by less than 48 bytes per file, whatever the number of blocks."""
    for part in random_parts(seed, 9):
        report = RankReport((), 0.0, 0)
        few = replace(part, checksums=part.checksums[:0])
        assert JointParts().payload(few, report, []) == JointParts().payload(part, report, [])
        rest = rest_of(part)
        none = rest.own._replace(seals=NO_SEALS, nbytes=int64s([]), data_start=int64s([]))
        grown = len(encode_rest(rest, bytes(32))) - len(encode_rest(replace(rest, own=none), b""))
        assert grown < 64 + 48 * len(part.files)


def test_parts_without_seals_make_no_manifest_with_them() -> None:
    parts = [replace(part, seals=NO_SEALS) for part in random_parts(1, 4)]
    with pytest.raises(ValueError, match="needs the seals of all files"):
        build_manifest(sealed(header_of(4)), parts)


def test_more_chunks_than_readers_take_fail_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = random_parts(1, 4)
    monkeypatch.setattr("ckpt.format.merging.SEALED_CHUNKS_MAX", 3)
    assert len(build_manifest(header_of(4), parts).chunks) > 3
    with pytest.raises(InvalidState, match="at most 3 fit into one manifest"):
        build_manifest(sealed(header_of(4)), parts)


def test_the_bytes_do_not_grow_with_the_blocks() -> None:
    """A thousand times the blocks: the same manifest but for the numbers in it."""

    def manifest_of(blocks: int) -> Manifest:
        manifest = SAMPLE.manifest
        first = np.arange(len(manifest.chunks) + 1) * blocks
        seals = manifest.seals._replace(nbytes=manifest.seals.nbytes * blocks)
        return replace(manifest, chunks=replace(manifest.chunks, first_block=first), seals=seals)

    few, many = (len(encode_manifest(manifest_of(blocks))) for blocks in (1, 1000))
    assert many <= few + 3 * len(SAMPLE.manifest.files)


def test_golden_checkpoint_is_read_and_written_for_ever() -> None:
    """`tests/golden/v1_checksum_tables` is never regenerated: whole tensors, every byte checked,
    and today's encoders write the same bytes.
    """
    for name, data in {**SAMPLE.files, "MANIFEST": ENCODED}.items():
        assert (GOLDEN / STEP_DIR / name).read_bytes() == data, name
    url = f"{GOLDEN}/{STEP_DIR}"
    assert ckpt.verify(url).ok
    with ckpt.open(url) as opened:
        for info in TENSORS:
            tensor = opened[info.fqn].contiguous().flatten()
            assert tensor.view(torch.uint8).numpy().tobytes() == tensor_bytes(info)
