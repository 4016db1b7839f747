"""Checkpoints of version 1 are readable for ever, and today's encoders still write the same bytes.

`tests/golden/v1` and `v1_references` are never regenerated. A change of the bytes is a new version
of the format, with a directory of its own.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from ckpt.commit.locate import file_key
from ckpt.format.checksum import Digests, digest_of
from ckpt.format.codec import decode_values
from ckpt.format.columns import unpack_map
from ckpt.format.datafile import DIGESTS
from ckpt.format.datafile_index import DataFileIndex, digests_in, read_data_file_index
from ckpt.format.manifest_codec import decode_manifest
from ckpt.format.part import TensorRecord
from ckpt.tools.salvage import salvage
from storage import open_store
from tests.format.encoding import encode_manifest
from tests.format.sample import (
    ALIASES,
    HEADER,
    INCREMENTS,
    PER_RANK,
    STEP_DIR,
    TENSORS,
    VALUES,
    increment_dir,
    make_increments,
    make_sample,
    region_bytes,
)
from tests.salvaged import matches_manifest

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "golden" / "v1"
GOLDEN_REFERENCES = ROOT / "golden" / "v1_references"
FORMAT_MD = ROOT.parent / "FORMAT.md"


def test_golden_checkpoint_decodes_to_the_values_it_was_made_of() -> None:
    """Manifest, tensors, values and aliases of the files in the tree against sample.py's inputs."""
    step = GOLDEN / STEP_DIR
    manifest = decode_manifest((step / "MANIFEST").read_bytes())
    assert manifest.header == HEADER and manifest.aliases == ALIASES
    assert decode_values(manifest.values) == VALUES
    assert [decode_values(data) for data in manifest.per_rank] == PER_RANK
    infos = zip(manifest.fqns, manifest.dtypes, manifest.shapes, manifest.kinds, strict=True)
    assert [TensorRecord(f, d, s, int(k)) for f, d, s, k in infos] == list(TENSORS)
    for i in range(len(manifest.chunks)):
        data = (step / manifest.files[int(manifest.chunks.file[i])]).read_bytes()
        start = int(manifest.chunks.byte_start[i])
        stored = data[start : start + manifest.chunk_nbytes(i)]
        assert stored == region_bytes(TENSORS[manifest.tensor_of(i)], manifest.region(i))


def test_golden_checkpoint_can_be_salvaged() -> None:
    store = open_store(str(GOLDEN))
    assert matches_manifest(store, salvage(store, STEP_DIR)) is True


def test_encoders_still_write_the_golden_bytes() -> None:
    """The same inputs through today's code: every file of the directory, and no other."""
    sample = make_sample()
    expected = {**sample.files, "MANIFEST": encode_manifest(sample.manifest)}
    there = {path.name: path.read_bytes() for path in (GOLDEN / STEP_DIR).iterdir()}
    assert there == expected


def test_golden_increments_have_the_bytes_that_were_saved_in_whatever_directory() -> None:
    """Three saves, the later two with references: every chunk, read where the manifest says."""
    for trained, header in enumerate(INCREMENTS):
        prefix = increment_dir(header) + "/"
        manifest = decode_manifest((GOLDEN_REFERENCES / prefix / "MANIFEST").read_bytes())
        assert manifest.header == header
        assert manifest.references == ((INCREMENTS[0].attempt,) if trained else ())
        for chunk in range(len(manifest.chunks)):
            key = file_key(prefix, manifest.files[int(manifest.chunks.file[chunk])])
            data = (GOLDEN_REFERENCES / key).read_bytes()
            start = int(manifest.chunks.byte_start[chunk])
            stored = data[start : start + manifest.chunk_nbytes(chunk)]
            info = TENSORS[manifest.tensor_of(chunk)]
            assert stored == region_bytes(info, manifest.region(chunk), trained)
            index, digests = _digests(data)
            place = index.offsets.tolist().index(start)
            assert digests[place].tobytes() == digest_of([stored])


def _digests(data: bytes) -> tuple[DataFileIndex, Digests]:
    index = read_data_file_index(lambda start, stop: data[start:stop], len(data))
    start, nbytes = index.extras[DIGESTS]
    return index, digests_in("golden", index, data[start : start + nbytes])


def test_encoders_still_write_the_golden_increments() -> None:
    for header, sample in zip(INCREMENTS, make_increments(), strict=True):
        expected = {**sample.files, "MANIFEST": encode_manifest(sample.manifest)}
        directory = GOLDEN_REFERENCES / increment_dir(header)
        assert {path.name: path.read_bytes() for path in directory.iterdir()} == expected


def test_golden_increments_can_be_salvaged() -> None:
    store = open_store(str(GOLDEN_REFERENCES))
    for header in INCREMENTS:
        report = salvage(store, increment_dir(header))
        assert report.problems == () and report.missing == ()
        assert matches_manifest(store, report) is True


TEXTS = ("header", "file_names", "fqns", "dtype_names", "alias_names")


def dump(data: bytes, base: int = 0) -> str:
    """Hex lines as FORMAT.md shows them."""
    lines = []
    for offset in range(0, len(data), 16):
        row = data[offset : offset + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{base + offset:06x}  {row.hex(' ', -8):33}  {text}".rstrip())
    return "\n".join(lines)


def documented_dumps() -> dict[str, str]:
    sample = make_sample()
    data = sample.files["rank00001-000.safetensors"]
    manifest = encode_manifest(sample.manifest)
    last = encode_manifest(make_increments()[-1].manifest)
    return {
        "header": data[: len(data[:8192].split(b"   ")[0])].decode("latin-1")[8:],
        "data": dump(data[0x10F0:], 0x10F0),
        "manifest": _shortened(dump(manifest), 4, 3),
        "fields": "\n".join(
            f"{name:18}{bytes(view).decode() if name in TEXTS else bytes(view).hex(' ', -8)}"
            for name, view in unpack_map(manifest[24:-32]).items()
        ),
        "references": "\n".join(
            f"{name:18}{_wrapped(view) if name == 'file_names' else bytes(view).hex(' ', -8)}"
            for name, view in unpack_map(last[24:-32]).items()
            if name.startswith(("file_", "chunk_"))
        ),
    }


def _shortened(dump: str, first: int, last: int) -> str:
    lines = dump.split("\n")
    return "\n".join([*lines[:first], "...", *lines[-last:]])


def _wrapped(names: memoryview) -> str:
    return bytes(names).decode().replace("rs", f"rs\n{'':18}").rstrip()


@pytest.mark.parametrize("name", ["header", "data", "manifest", "fields", "references"])
def test_worked_example_of_the_specification_is_true(name: str) -> None:
    """FORMAT.md's listings, byte for byte, are what the encoders write for the sample."""
    pattern = rf"<!-- example:{name} -->\n+```\n(.*?)\n```"
    listing = re.search(pattern, FORMAT_MD.read_text(encoding="utf-8"), re.DOTALL)
    assert listing is not None, f"FORMAT.md has no listing {name!r}"
    shown = listing[1]
    if name == "header":
        shown = shown.replace("\n", "")
        assert shown.encode("utf-8").decode("latin-1") == documented_dumps()[name]
    else:
        assert shown == documented_dumps()[name]


def test_manifest_ends_with_its_sha256() -> None:
    data = (GOLDEN / STEP_DIR / "MANIFEST").read_bytes()
    assert hashlib.sha256(data[:-32]).digest() == data[-32:]
