"""What is fuzzed: each reader of bytes that others may have written, with samples to start from.

A reader returns, or refuses with an error that it documents; anything else is a bug. Where a value
has one encoding only, what was read is encoded again and compared. `seal` makes the checksums of a
format right after a mutation: otherwise nothing behind them would be reached.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import struct
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import msgpack
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save as save_safetensors

import ckpt
from ckpt.cli.commandline import build_parser
from ckpt.commit.log import decode_format, encode_format
from ckpt.commit.records import (
    RECORD_MAGIC,
    decode_record,
    decode_segment,
    encode_record,
    encode_segment,
)
from ckpt.convert.formats.dcp import read_metadata
from ckpt.convert.formats.safetensors import open_safetensors
from ckpt.convert.sources.blobs import Blob, open_blob, read_directory
from ckpt.convert.sources.budget import MemoryBudget
from ckpt.convert.sources.pickles import read_pickle
from ckpt.format.checksum import crc32c
from ckpt.format.codec import decode_values, encode_values
from ckpt.format.columns import pack_map, pack_regular, unpack_map, unpack_regular
from ckpt.format.datafile import CHECKSUMS, parse_entry_name
from ckpt.format.datafile_index import describe_file, read_data_file_index
from ckpt.format.joint_codec import decode_part, encode_part
from ckpt.format.manifest import MetadataBudget
from ckpt.format.manifest_codec import MAGIC, decode_manifest
from ckpt.telemetry.record import decode_telemetry
from ckpt.world.link import Frame, FrameKind, FrameReader
from storage.errors import StorageError
from storage.memory import MemoryStore
from storage.url import open_store
from tests.format.encoding import encode_manifest
from tests.format.sample import make_increments, make_sample
from tests.fuzz import encoded, imports, joint, peers, tiers
from tests.fuzz.target import Target

# A root's own objects -----------------------------------------------------------------------------


@cache
def _root() -> dict[str, bytes]:
    """The objects of a root: the second step has files of the first, the third only its own."""
    with tempfile.TemporaryDirectory() as folder:
        weights = {"w": torch.arange(6.0), "n": 3, "text": "a", "deep": {"list": [1, (2.5, None)]}}
        ckpt.save(weights, folder, step=1, dedup=True)
        ckpt.save({**weights, "n": 4}, folder, step=2, dedup=True)
        ckpt.save(weights, folder, step=3)
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _objects(ending: str) -> list[bytes]:
    return [data for key, data in sorted(_root().items()) if ending in key]


def _records() -> list[bytes]:
    return [data[len(RECORD_MAGIC) : -4] for data in _objects("log/")]


def _sealed_record(body: bytes) -> bytes:
    data = RECORD_MAGIC + body
    return data + struct.pack("<I", crc32c(data))


def _read_record(data: bytes) -> None:
    # Where it lies is not part of it: the slot that it names is the one that is asked for.
    try:
        slot = msgpack.unpackb(data[len(RECORD_MAGIC) : -4], raw=False).get("slot", 0)
    except Exception:  # the reader is to say it
        slot = 0
    record = decode_record(data, slot=slot, where="x")
    assert encode_record(record) == data


def _segments() -> list[bytes]:
    records = [decode_record(data, slot=n, where="x") for n, data in enumerate(_objects("log/"))]
    return [encode_segment(record.live) for record in records if record.live]


def _read_segment(data: bytes) -> None:
    entries = decode_segment(data, where="x")
    assert decode_segment(encode_segment(entries), where="x") == entries


def _manifests() -> list[bytes]:
    samples = [make_sample(), *make_increments()]
    encoded = [encode_manifest(sample.manifest) for sample in samples] + _objects("MANIFEST")
    return [data[len(MAGIC) + 16 : -32] for data in encoded]


def _sealed_manifest(body: bytes) -> bytes:
    head = MAGIC + (1).to_bytes(4, "little") + bytes(4) + len(body).to_bytes(8, "little")
    return head + body + hashlib.sha256(head + body).digest()


def _read_manifest(data: bytes) -> None:
    ruled = decode_manifest(data, MetadataBudget(1 << 28), ruled=True)
    parts = list(ruled.chunks.files_by_tensor())
    manifest = decode_manifest(data)
    encode_manifest(manifest)
    assert parts == list(manifest.chunks.files_by_tensor())


def _targets_of_fields() -> list[Target]:
    """One for each field of a manifest: mutations of a whole one mostly break its map."""
    fields = unpack_map(_manifests()[-1])
    return [_target_of_field(f"manifest.{name}", name, fields) for name in fields]


def _target_of_field(target: str, name: str, others: Mapping[str, memoryview]) -> Target:
    fields = {key: bytes(data) for key, data in others.items()}
    return Target(
        target,
        _read_manifest,
        lambda: [fields[name]],
        lambda field: _sealed_manifest(pack_map({**fields, name: field})),
    )


def _data_files() -> list[bytes]:
    return [*make_sample().files.values(), *_objects(".safetensors")]


def _sealed_data_file(data: bytes) -> bytes:
    """With the checksum of its header and that of its table, where there are such."""
    length = 8 + int.from_bytes(data[:8], "little")
    try:
        where = json.loads(data[8:length])[CHECKSUMS]["data_offsets"]
        start, stop = (length + int(offset) for offset in where)
        table = bytearray(data[start:stop])
        table[4:8] = struct.pack("<I", crc32c(data[:length]))
        table[-4:] = struct.pack("<I", crc32c(bytes(table[:-4])))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, struct.error):
        return data
    return data[:start] + bytes(table) + data[stop:]


def _read_data_file(data: bytes) -> None:
    describe_file(read_data_file_index(lambda start, stop: data[start:stop], len(data)))


def _read_entry_name(data: bytes) -> None:
    parse_entry_name(data.decode(errors="replace"))


def _values() -> list[bytes]:
    nested: Any = {"a": [1, -(2**70), 0.5, None, True, b"x", "ü"], "b": ({}, ()), "c": {1: 2}}
    return [encode_values(value) for value in (nested, {}, 0, [nested] * 3)]


def _read_values(data: bytes) -> None:
    assert encode_values(decode_values(data)) == data


def _columns() -> list[bytes]:
    rows = [range(9), [7] * 5, [0, 1, 0, 1, 5], [2**61, 3]]
    return [
        struct.pack("<H", len(row)) + pack_regular(torch.tensor(row).numpy())
        for row in map(list, rows)
    ]


def _read_columns(data: bytes) -> None:
    (count,) = struct.unpack("<H", data[:2].ljust(2, b"\0"))
    assert len(unpack_regular(memoryview(data[2:]), count, "column")) == count


def _encoded_parts() -> list[bytes]:
    return [encode_part(part) for part in make_sample().parts]


def _read_part(data: bytes) -> None:
    decode_part(data)


def _read_telemetry(data: bytes) -> None:
    decode_telemetry(data)


def _read_format(data: bytes) -> None:
    assert encode_format(decode_format(data, where="x")) == data


def _frames() -> list[bytes]:
    return [
        Frame(FrameKind.UP, bytes(8), 3, "parts", b"12345").encode(),
        Frame(FrameKind.BYE, bytes(8)).encode() + Frame(FrameKind.NEWS, bytes(8)).encode(),
    ]


def _read_frames(data: bytes) -> None:
    list(FrameReader(1 << 16).feed(data))


# Files of others ----------------------------------------------------------------------------------


@cache
def _saved() -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(2, 3), "o": {"state": {0: {"step": 1}}, "f": 0.5}}, buffer)
    return buffer.getvalue()


@cache
def _dcp_metadata() -> bytes:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group is there
        state = {"w": torch.ones(2, 3), "deep": {"list": [torch.zeros(2), 1]}}
        dcp.save(state, checkpoint_id=folder)
        return (Path(folder) / ".metadata").read_bytes()


def _read_dcp(data: bytes) -> None:
    store = MemoryStore()
    store.put_if_absent(".metadata", data)
    read_metadata(store, "", MemoryBudget())


def _pickles() -> list[bytes]:
    values = [{"a": [1, 2.5, "x", None, (True, b"y")]}, [{}] * 3, {1: {2: {3: ()}}}]
    return [pickle.dumps(value, protocol) for value in values for protocol in (2, 4, 5)]


def _read_pickle(data: bytes) -> None:
    read_pickle(data, {})


def _read_torch_file(data: bytes) -> None:
    store = MemoryStore()
    store.put_if_absent("x.pt", data)
    open_blob(store, Blob("x.pt", 0, len(data)), MemoryBudget(), is_outermost=True)


def _read_zip(data: bytes) -> None:
    read_directory(lambda start, stop: data[start:stop], len(data), MemoryBudget().charge)


def _safetensors() -> list[bytes]:
    tensors = {"a": torch.ones(2, 3), "b.c": torch.zeros(0, 4, dtype=torch.bfloat16)}
    return [save_safetensors(tensors), save_safetensors(tensors, {"format": "pt"})]


def _read_safetensors(data: bytes) -> None:
    store = MemoryStore()
    store.put_if_absent("m.safetensors", data)
    open_safetensors(store, "m.safetensors", MemoryBudget())


def _indexes() -> list[bytes]:
    weight_map = {"a": "m.safetensors", "b.c": "m.safetensors"}
    return [json.dumps({"metadata": {"total_size": 24}, "weight_map": weight_map}).encode()]


def _read_index(data: bytes) -> None:
    store = MemoryStore()
    store.put_if_absent("m.safetensors", _safetensors()[0])
    store.put_if_absent("m.safetensors.index.json", data)
    open_safetensors(store, "m.safetensors.index.json", MemoryBudget())


# Texts of users -----------------------------------------------------------------------------------


def _urls() -> list[bytes]:
    return [b"s3://bucket/prefix", b"memory://name", b"file://path/..", b"./pa~th", b"~/a"]


def _read_url(data: bytes) -> None:
    text = data.decode(errors="surrogateescape")
    # Nothing is reached over a network, and no file system of another library is loaded.
    if "://" not in text or text.startswith(("memory://", "file://")):
        open_store(text).close()


def _commands() -> list[bytes]:
    return [
        b"ls\0memory://a",
        b"export\0a\0b\0--dtype\0bfloat16",
        b"prune\0a\0--keep-last=3\0--dry-run",
        b"cost\0--params\0" + b"70B\0--every\0" + b"10m\0--mtbf\0" + b"6h",
    ]


PARSER = build_parser()  # once: what is read is the line


def _read_command(data: bytes) -> None:
    words = data.decode(errors="surrogateescape").split("\0")
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        PARSER.parse_args(words)


TARGETS = (
    Target("record", _read_record, _records, _sealed_record),
    Target("record.unsealed", _read_record, lambda: _objects("log/")),
    Target("segment", _read_segment, _segments),
    Target("format", _read_format, lambda: _objects("FORMAT")),
    Target("manifest", _read_manifest, _manifests, _sealed_manifest),
    Target("datafile", _read_data_file, _data_files, _sealed_data_file),
    Target("entryname", _read_entry_name, lambda: [b"a.b@0:4,2:8", b"@__x@span:1:9", b"a@@b"]),
    Target("values", _read_values, _values),
    Target("columns", _read_columns, _columns),
    Target(
        "part",
        _read_part,
        lambda: [encode_part(part) for part in make_sample().parts],
        joint.sealed_part,
    ),
    Target("telemetry", _read_telemetry, lambda: _objects("TELEMETRY")),
    Target("frames", _read_frames, _frames, refusals=(ValueError,)),
    Target("dcp", _read_dcp, lambda: [_dcp_metadata()]),
    Target("pickle", _read_pickle, _pickles),
    Target("torchfile", _read_torch_file, lambda: [_saved()]),
    Target("zip", _read_zip, lambda: [_saved()]),
    Target("safetensors", _read_safetensors, _safetensors),
    Target("index", _read_index, _indexes),
    Target("url", _read_url, _urls, refusals=(StorageError,)),
    Target("command", _read_command, _commands, refusals=(SystemExit,)),
    *tiers.TARGETS,
    *peers.TARGETS,
    *encoded.TARGETS,
    *joint.TARGETS,
    *imports.TARGETS,
)


def all_targets() -> dict[str, Target]:
    """By name: every reader, and each field of a manifest by itself."""
    return {target.name: target for target in (*TARGETS, *_targets_of_fields())}
