"""The bytes of a manifest: columns of integers and a string table, encoded and decoded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from ckpt.errors import Corrupt, UnsupportedFormat
from ckpt.format.blake3 import DIGEST_NBYTES, Digests, digests_from, no_digests
from ckpt.format.columns import (
    Ints,
    pack_ints,
    pack_map,
    pack_strings,
    unpack_ints,
    unpack_map,
    unpack_strings,
)
from ckpt.format.coverage import check_cover
from ckpt.format.datafile import NDIM_MAX, bounded_numel
from ckpt.format.manifest import (
    FEATURES,
    NUMEL_MAX,
    VERSION,
    BoxTable,
    ChunkTable,
    Header,
    Int64s,
    Manifest,
    starts_of,
)
from ckpt.format.references import (
    REFERENCES,
    is_data_file_name,
    is_reference,
    parse_reference,
    reference_to,
)
from ckpt.layout.dtypes import DTYPES
from ckpt.layout.region import Shape

MAGIC = b"\x93CKPTMF\n"


DIGEST_BYTES = 32


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of a MANIFEST object: one encoding per manifest."""
    body = pack_map({**_fields_of_tensors(manifest), **_fields_of_chunks(manifest)})
    head = MAGIC + VERSION.to_bytes(4, "little") + bytes(4) + len(body).to_bytes(8, "little")
    digest = hashlib.sha256(head)
    digest.update(body)
    return head + body + digest.digest()


def _fields_of_tensors(m: Manifest) -> dict[str, bytes]:
    shapes = sorted(set(m.shapes))
    shape_ids = {shape: index for index, shape in enumerate(shapes)}
    dtypes = sorted(set(m.dtypes))
    dtype_ids = {name: index for index, name in enumerate(dtypes)}
    aliases = sorted(m.aliases.items())
    targets = [m.index(target) for _, target in aliases]
    counts = [len(m.files), len(m.fqns), len(shapes), len(m.chunks), len(m.chunks.boxes)]
    counts += [len(m.checksums), len(aliases), len(m.per_rank)]
    file_names, file_name_sizes = pack_strings(m.files)
    fqns, fqn_sizes = pack_strings(m.fqns)
    alias_names, alias_name_sizes = pack_strings([name for name, _ in aliases])
    return {
        "header": m.header.model_dump_json().encode("utf-8"),
        "counts": np.array(counts, dtype="<u8").tobytes(),
        "file_names": file_names,
        "file_name_sizes": file_name_sizes,
        "file_nbytes": pack_ints(m.file_nbytes),
        "file_data_starts": pack_ints(m.file_data_start),
        "fqns": fqns,
        "fqn_sizes": fqn_sizes,
        "dtype_names": ",".join(dtypes).encode("ascii"),
        "dtype_ids": pack_ints([dtype_ids[name] for name in m.dtypes]),
        "shape_ndims": pack_ints([len(shape) for shape in shapes]),
        "shape_dims": pack_ints(
            np.array([size for shape in shapes for size in shape], dtype=np.uint64), constant=False
        ),
        "shape_ids": pack_ints([shape_ids[shape] for shape in m.shapes]),
        "kinds": pack_ints(m.kinds),
        "alias_names": alias_names,
        "alias_name_sizes": alias_name_sizes,
        "alias_targets": pack_ints(targets),
        "values": m.values,
        "per_rank": b"".join(m.per_rank),
        "per_rank_sizes": pack_ints([len(data) for data in m.per_rank]),
    }


def _fields_of_chunks(m: Manifest) -> dict[str, bytes]:
    chunks = m.chunks
    itemsizes = np.array([DTYPES[name].itemsize for name in m.dtypes], dtype=np.int64)
    counts = np.diff(chunks.first)
    nbytes = chunks.numel.astype(np.int64) * np.repeat(itemsizes, counts)
    boxes = chunks.boxes
    return {
        "chunk_counts": pack_ints(counts),
        "chunk_files": pack_ints(chunks.file),
        "chunk_numels": pack_ints(chunks.numel),
        "chunk_skips": pack_ints(_skips(chunks)),
        "chunk_gaps": pack_ints(_gaps(m, nbytes, np.repeat(itemsizes, counts))),
        "chunk_boxes": pack_ints(chunks.box.astype(np.int64) + 1),
        "box_ndims": pack_ints(np.diff(boxes.first), constant=False),
        "box_offsets": pack_ints(boxes.offsets, constant=False),
        "box_sizes": pack_ints(boxes.sizes, constant=False),
        "checksums": m.checksums.astype("<u4").tobytes(),
        **({"blake3": m.digests.tobytes()} if len(m.digests) else {}),
    }


def _skips(chunks: ChunkTable) -> Int64s:
    """Elements between each span and the one before it in its tensor; zero for boxes."""
    skips = np.zeros(len(chunks), dtype=np.int64)
    spans = np.flatnonzero(chunks.box < 0)
    starts = chunks.span_start[spans].astype(np.int64)
    ends = starts + chunks.numel[spans].astype(np.int64)
    tensor = np.searchsorted(chunks.first, spans, side="right")
    previous = np.zeros(len(spans), dtype=np.int64)
    same = tensor[1:] == tensor[:-1]
    previous[1:][same] = ends[:-1][same]
    skips[spans] = starts - previous
    return skips


def _gaps(m: Manifest, nbytes: Int64s, itemsizes: Int64s) -> npt.NDArray[np.uint64]:
    """Bytes between each chunk and the one before it in its file, both in the canonical order.

    Modulo 2^64: a file in another order costs space and nothing else.
    """
    order = file_order(m.chunks.file, itemsizes)
    file = m.chunks.file[order]
    starts = m.chunks.byte_start[order].astype(np.int64)
    expected = np.empty(len(order), dtype=np.int64)
    if len(order):
        expected[1:] = (starts + nbytes[order])[:-1]
        begins = np.append(True, file[1:] != file[:-1])
        expected[begins] = m.file_data_start[file[begins]]
    gaps = np.empty(len(order), dtype=np.uint64)
    gaps[order] = (starts - expected).astype(np.uint64)
    return gaps


def file_order(files: Ints, itemsizes: Ints) -> npt.NDArray[np.intp]:
    """Chunks by file, then widest elements first, then as they come: the order that gaps are told
    by.
    """
    if not len(files):
        return np.empty(0, dtype=np.intp)
    widest_first = np.array([9] * 17, dtype=np.uint8)
    widest_first[[16, 8, 4, 2, 1]] = [0, 1, 2, 3, 4]
    # 16-bit keys are sorted by radix, ten times faster than anything else.
    key: Ints = files.astype(np.uint16 if int(files.max()) < 1 << 13 else np.uint64)
    key = (key << key.dtype.type(3)) | widest_first[itemsizes]
    return np.argsort(key, kind="stable")


class _Counts(NamedTuple):
    files: int
    tensors: int
    shapes: int
    chunks: int
    boxes: int
    blocks: int
    aliases: int
    ranks: int


def decode_manifest(data: bytes | memoryview) -> Manifest:
    """The manifest that `data` encodes; its columns may be views of `data`.

    Raises UnsupportedFormat when a newer version is needed, Corrupt naming the field for anything
    else that is not
    a complete and consistent manifest: every tensor is covered exactly once, every chunk lies in
    its file.
    """
    body = _open_envelope(memoryview(data).cast("B"))
    fields = unpack_map(body)
    header = _decode_header(_field(fields, "header"))
    counts = _decode_counts(fields, header)
    files = _decode_names(fields, "file_name", counts.files)
    _check_file_names(files, header)
    file_nbytes = _small(
        unpack_ints(_field(fields, "file_nbytes"), counts.files, "file_nbytes"), "file_nbytes"
    )
    data_start = _small(
        unpack_ints(_field(fields, "file_data_starts"), counts.files, "file_data_starts"),
        "file_data_starts",
    )
    fqns = _decode_names(fields, "fqn", counts.tensors)
    if any(a >= b for a, b in pairwise(fqns)):
        raise Corrupt("field 'fqns': names are not sorted, or one appears twice")
    dtypes = _decode_dtypes(fields, counts)
    shapes, numels = _decode_shapes(fields, counts)
    kinds = unpack_ints(_field(fields, "kinds"), counts.tensors, "kinds")
    if counts.tensors and int(kinds.max()) > 15:
        raise Corrupt(f"field 'kinds': {int(kinds.max())}, at most 15")
    itemsizes = np.array([DTYPES[name].itemsize for name in dtypes], dtype=np.uint8)
    checksums = np.frombuffer(_field(fields, "checksums"), dtype="<u4")
    chunks = _decode_chunks(
        fields, counts, header, _Frame(file_nbytes, data_start, itemsizes, fqns, shapes, numels)
    )
    _check_references_used(files, chunks)
    return Manifest(
        header=header,
        files=files,
        file_nbytes=file_nbytes,
        file_data_start=data_start,
        fqns=fqns,
        dtypes=dtypes,
        shapes=shapes,
        kinds=kinds,
        aliases=_decode_aliases(fields, counts, fqns),
        chunks=chunks,
        checksums=checksums,
        values=bytes(_field(fields, "values")),
        per_rank=_decode_per_rank(fields, counts),
        digests=_decode_digests(fields, counts),
    )


def _open_envelope(view: memoryview) -> memoryview:
    head = len(MAGIC) + 16
    if bytes(view[: len(MAGIC)]) != MAGIC:
        raise Corrupt("not a manifest: it does not start with the magic bytes")
    if len(view) < head + DIGEST_BYTES:
        raise Corrupt(f"manifest cut short: {len(view)} bytes")
    version = int.from_bytes(view[8:12], "little")
    if version > VERSION:
        raise UnsupportedFormat(
            f"manifest of format version {version}, this library reads up to {VERSION}: install "
            f"a newer one"
        )
    length = int.from_bytes(view[16:24], "little")
    if version != VERSION or any(view[12:16]) or head + length + DIGEST_BYTES != len(view):
        raise Corrupt(f"manifest envelope: version {version}, {length} bytes in {len(view)}")
    if hashlib.sha256(view[: head + length]).digest() != bytes(view[head + length :]):
        raise Corrupt("manifest does not match its own sha256")
    return view[head : head + length]


def _field(fields: Mapping[str, memoryview], name: str) -> memoryview:
    if name not in fields:
        raise Corrupt(f"field {name!r} is missing")
    return fields[name]


def _decode_header(data: memoryview) -> Header:
    try:
        header = Header.model_validate_json(bytes(data))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Corrupt(f"field 'header': {where}: {first['msg']}") from error
    if header.version != VERSION:
        raise Corrupt(
            f"field 'header': version {header.version} in an envelope of version {VERSION}"
        )
    check_required(header)
    return header


def check_required(header: Header) -> None:
    """Raises UnsupportedFormat when the checkpoint needs what this version does not know."""
    unknown = sorted(set(header.required) - FEATURES)
    if unknown:
        raise UnsupportedFormat(
            f"the checkpoint needs {', '.join(unknown)!r:.200}, unknown to this library: install "
            f"a newer one"
        )


def _decode_counts(fields: Mapping[str, memoryview], header: Header) -> _Counts:
    """How long columns are. Everything is bounded by bytes that are there, before anything is
    allocated.
    """
    raw = _field(fields, "counts")
    if len(raw) != 8 * len(_Counts._fields):
        raise Corrupt(f"field 'counts': {len(raw)} bytes, expected {8 * len(_Counts._fields)}")
    counts = _Counts(*np.frombuffer(raw, dtype="<u8").tolist())
    bounds = _Counts(
        files=len(_field(fields, "file_names")),
        tensors=len(_field(fields, "fqns")) + 1,
        shapes=counts.tensors,
        chunks=counts.blocks,
        boxes=counts.chunks,
        blocks=len(_field(fields, "checksums")) // 4,
        aliases=len(_field(fields, "alias_names")) + 1,
        ranks=len(_field(fields, "per_rank")),
    )
    for name, count, bound in zip(_Counts._fields, counts, bounds, strict=True):
        if count > bound:
            raise Corrupt(f"field 'counts': {count} {name}, there can be at most {bound}")
    if 4 * counts.blocks != len(_field(fields, "checksums")):
        raise Corrupt(
            f"field 'checksums': {len(fields['checksums'])} bytes for {counts.blocks} blocks"
        )
    if counts.ranks not in (0, header.world_size):
        raise Corrupt(f"field 'counts': values of {counts.ranks} of {header.world_size} ranks")
    return counts


def _decode_names(fields: Mapping[str, memoryview], name: str, count: int) -> tuple[str, ...]:
    sizes = unpack_ints(_field(fields, f"{name}_sizes"), count, f"{name}_sizes")
    return unpack_strings(_field(fields, f"{name}s"), sizes, f"{name}s")


def _check_file_names(files: Sequence[str], header: Header) -> None:
    own = [name for name in files if not is_reference(name)]
    references = files[len(own) :]
    for name in own:
        if not is_data_file_name(name):
            raise Corrupt(f"field 'file_names': {name!r:.250} is no name of a data file")
    # A name that is anything but a data file of another step's directory would lead out of the
    # root, or back into this directory under a second name.
    inside = reference_to(header.step, header.attempt, "")
    for name in references:
        if parse_reference(name) is None or name.startswith(inside):
            raise Corrupt(f"field 'file_names': {name!r:.300} is no data file of another attempt")
    if len(set(own)) != len(own):
        raise Corrupt("field 'file_names': a name appears twice")
    if any(a >= b for a, b in pairwise(references)):
        raise Corrupt("field 'file_names': files of other attempts are not sorted, or named twice")
    if references and REFERENCES not in header.required:
        raise Corrupt(f"field 'header': names files of other attempts without {REFERENCES!r}")


def _check_references_used(files: Sequence[str], chunks: ChunkTable) -> None:
    """Whoever keeps a file of another attempt alive must need it."""
    if not any(map(is_reference, files)):
        return
    used = np.bincount(chunks.file, minlength=len(files)).tolist()
    for name, count in zip(files, used, strict=True):
        if is_reference(name) and not count:
            raise Corrupt(f"field 'file_names': {name!r:.300} holds no chunk of this checkpoint")


def _decode_digests(fields: Mapping[str, memoryview], counts: _Counts) -> Digests:
    data = fields.get("blake3")
    if data is None:
        return no_digests()
    if not len(data) or len(data) != DIGEST_NBYTES * counts.chunks:
        raise Corrupt(f"field 'blake3': {len(data)} bytes for {counts.chunks} chunks")
    return digests_from(data)


def _small(values: Ints, name: str) -> Int64s:
    """As int64, which the values must fit into with room to add."""
    if len(values) and int(values.max()) >= 1 << 62:
        raise Corrupt(f"field {name!r}: {int(values.max())} is beyond 2^62")
    return values.astype(np.int64)


def _ids(fields: Mapping[str, memoryview], name: str, count: int, limit: int) -> Ints:
    ids = unpack_ints(_field(fields, name), count, name)
    if count and int(ids.max()) >= limit:
        raise Corrupt(f"field {name!r}: index {int(ids.max())}, there are {limit}")
    return ids


def _decode_dtypes(fields: Mapping[str, memoryview], counts: _Counts) -> tuple[str, ...]:
    raw = _field(fields, "dtype_names")
    text = bytes(raw[:4096]).decode("ascii", "replace")
    names = text.split(",") if text else []
    unknown = [name for name in names if name not in DTYPES]
    if unknown or len(set(names)) != len(names) or len(raw) > 4096:
        raise Corrupt(
            f"field 'dtype_names': {unknown or names!r:.200} are not known dtypes, each once"
        )
    return tuple([names[i] for i in _ids(fields, "dtype_ids", counts.tensors, len(names)).tolist()])


def _decode_shapes(
    fields: Mapping[str, memoryview], counts: _Counts
) -> tuple[tuple[Shape, ...], Int64s]:
    ndims = unpack_ints(_field(fields, "shape_ndims"), counts.shapes, "shape_ndims")
    if counts.shapes and int(ndims.max()) > NDIM_MAX:
        raise Corrupt(f"field 'shape_ndims': {int(ndims.max())} dims, at most {NDIM_MAX}")
    first = starts_of(ndims).tolist()
    dims = unpack_ints(
        _field(fields, "shape_dims"), first[-1], "shape_dims", constant=False
    ).tolist()
    shapes = [tuple(dims[a:b]) for a, b in pairwise(first)]
    numels = np.array([bounded_numel(shape) for shape in shapes], dtype=np.int64)
    if counts.shapes and int(numels.max()) > NUMEL_MAX:
        raise Corrupt(f"field 'shape_dims': a tensor of {int(numels.max())} elements")
    ids = _ids(fields, "shape_ids", counts.tensors, counts.shapes)
    return tuple([shapes[index] for index in ids.tolist()]), numels[ids]


def _decode_aliases(
    fields: Mapping[str, memoryview], counts: _Counts, fqns: Sequence[str]
) -> dict[str, str]:
    names = _decode_names(fields, "alias_name", counts.aliases)
    targets = _ids(fields, "alias_targets", counts.aliases, counts.tensors)
    aliases = {name: fqns[target] for name, target in zip(names, targets.tolist(), strict=True)}
    if len(aliases) != len(names) or (aliases and not aliases.keys().isdisjoint(fqns)):
        raise Corrupt(
            "field 'alias_names': a name appears twice, or is the name of a stored tensor"
        )
    return aliases


def _decode_per_rank(fields: Mapping[str, memoryview], counts: _Counts) -> tuple[bytes, ...]:
    data = _field(fields, "per_rank")
    sizes = unpack_ints(_field(fields, "per_rank_sizes"), counts.ranks, "per_rank_sizes")
    if counts.ranks and int(sizes.max()) > len(data):
        raise Corrupt(f"field 'per_rank_sizes': {int(sizes.max())} of {len(data)} bytes")
    first = starts_of(sizes).tolist()
    if first[-1] != len(data):
        raise Corrupt(f"field 'per_rank': {first[-1]} of {len(data)} bytes are used")
    return tuple([bytes(data[a:b]) for a, b in pairwise(first)])


class _Frame(NamedTuple):
    """What the chunks must fit into."""

    file_nbytes: Int64s
    data_start: Int64s
    itemsizes: npt.NDArray[np.uint8]
    fqns: Sequence[str]
    shapes: Sequence[Shape]
    numels: Int64s


def _decode_chunks(
    fields: Mapping[str, memoryview], counts: _Counts, header: Header, frame: _Frame
) -> ChunkTable:
    first = _decode_first(fields, counts)
    files = _ids(fields, "chunk_files", counts.chunks, counts.files)
    numels = unpack_ints(_field(fields, "chunk_numels"), counts.chunks, "chunk_numels")
    skips = unpack_ints(_field(fields, "chunk_skips"), counts.chunks, "chunk_skips")
    if counts.chunks:
        # As floats: the sum of hostile integers could wrap around and look right.
        total = float(numels.sum(dtype=np.float64)) + float(skips.sum(dtype=np.float64))
        if total > NUMEL_MAX or int(numels.min()) == 0:
            raise Corrupt("field 'chunk_numels': an empty chunk, or more elements than can be")
    itemsizes = np.repeat(frame.itemsizes, np.diff(first))
    byte_start = _decode_byte_starts(fields, counts, files, numels, itemsizes, frame)
    first_block = _decode_first_block(numels, itemsizes, header.block_bytes, counts)
    del itemsizes
    box, boxes = _decode_boxes(fields, counts)
    span_start = _decode_span_starts(first, numels, skips, box, frame)
    chunks = ChunkTable(first, files, byte_start, span_start, numels, box, boxes, first_block)
    problems = check_cover(chunks, frame.fqns, frame.shapes, frame.numels)
    if problems:
        raise Corrupt(f"chunks do not cover their tensors: {'; '.join(problems[:5])}")
    return chunks


def _decode_first(fields: Mapping[str, memoryview], counts: _Counts) -> Int64s:
    per_tensor = unpack_ints(_field(fields, "chunk_counts"), counts.tensors, "chunk_counts")
    if counts.tensors and int(per_tensor.max()) > counts.chunks:
        raise Corrupt(f"field 'chunk_counts': {int(per_tensor.max())} of {counts.chunks} chunks")
    first = starts_of(per_tensor)
    if int(first[-1]) != counts.chunks:
        raise Corrupt(f"field 'chunk_counts': add up to {int(first[-1])}, expected {counts.chunks}")
    return first


def _runs(counts: Ints, total: int) -> list[tuple[int, int]]:
    """Ranges of `counts` that add up to about a 32nd of `total` each.

    Columns are worked on in such runs: temporaries for a million chunks at once would take more
    memory than the
    manifest.
    """
    ends = np.cumsum(counts, dtype=np.int64)
    marks = np.arange(1, 33) * max(total // 32, 1 << 13)
    cuts = np.unique(np.searchsorted(ends, marks, side="left") + 1)
    inner = [cut for cut in cuts.tolist() if cut < len(counts)]
    return list(pairwise([0, *inner, len(counts)]))


def _decode_byte_starts(
    fields: Mapping[str, memoryview],
    counts: _Counts,
    files: Ints,
    numels: Ints,
    itemsizes: Ints,
    frame: _Frame,
) -> Ints:
    gaps = unpack_ints(_field(fields, "chunk_gaps"), counts.chunks, "chunk_gaps")
    if np.any(frame.data_start > frame.file_nbytes):
        raise Corrupt("field 'file_data_starts': data would start behind the end of a file")
    if not counts.chunks:
        return np.zeros(0, dtype=np.int64)
    largest = int(frame.file_nbytes.max())
    byte_start: Ints = np.empty(counts.chunks, dtype=np.uint32 if largest < 1 << 32 else np.int64)
    per_file = np.bincount(files, minlength=counts.files)
    for low, high in _runs(per_file, counts.chunks):
        index = np.flatnonzero((files >= low) & (files < high))
        if not len(index):
            continue
        index = index[file_order(files[index], itemsizes[index])]
        nbytes = np.multiply(numels[index], itemsizes[index], dtype=np.int64)
        inside = np.flatnonzero(per_file[low:high]) + low
        starts = _byte_starts(nbytes, gaps[index], per_file[inside], frame.data_start[inside])
        _check_inside_files(starts, nbytes, inside, per_file[inside], frame)
        byte_start[index] = starts
    return byte_start


def _byte_starts(nbytes: Int64s, gaps: Ints, per_file: Ints, data_start: Int64s) -> Int64s:
    """Where chunks start that follow each other, file by file. Modulo 2^64, as the encoder."""
    ends = nbytes.astype(np.uint64) + gaps.astype(np.uint64)
    np.cumsum(ends, out=ends)
    last_before = starts_of(per_file)[1:-1] - 1
    base = data_start.astype(np.uint64)
    base[1:] -= ends[last_before]
    ends += np.repeat(base, per_file)
    return ends.view(np.int64) - nbytes


def _check_inside_files(
    starts: Int64s, nbytes: Int64s, files: npt.NDArray[np.intp], per_file: Ints, frame: _Frame
) -> None:
    """Chunks, by file: within their file's bytes and disjoint."""
    limits = frame.file_nbytes[files]
    firsts = starts_of(per_file)
    low = np.minimum.reduceat(starts, firsts[:-1])
    high = np.maximum.reduceat(starts, firsts[:-1])
    # Starts below 2^62 first: only then can an end be computed without wrapping around.
    if np.any(low < frame.data_start[files]) or np.any(high > limits):
        raise Corrupt("field 'chunk_gaps': a chunk starts outside of its file")
    ends = starts + nbytes
    if np.any(np.maximum.reduceat(ends, firsts[:-1]) > limits):
        raise Corrupt("field 'chunk_gaps': a chunk ends behind its file")
    overlap = starts[1:] < ends[:-1]
    overlap[firsts[1:-1] - 1] = False  # neighbours of different files
    if overlap.any():
        file = np.repeat(files, per_file)
        order = np.lexsort((starts, file))
        starts, ends, file = starts[order], ends[order], file[order]
        if np.any((starts[1:] < ends[:-1]) & (file[1:] == file[:-1])):
            raise Corrupt("field 'chunk_gaps': two chunks share bytes of a file")


def _decode_first_block(numels: Ints, itemsizes: Ints, block_bytes: int, counts: _Counts) -> Ints:
    small = counts.blocks < 1 << 31
    first_block: Ints = np.zeros(counts.chunks + 1, dtype=np.int32 if small else np.int64)
    at = 0
    step = 1 << 14
    for start in range(0, counts.chunks, step):
        part = slice(start, start + step)
        blocks = np.multiply(numels[part], itemsizes[part], dtype=np.int64)
        blocks += block_bytes - 1
        blocks //= block_bytes
        np.cumsum(blocks, out=blocks)
        blocks += at
        at = int(blocks[-1])
        if at > counts.blocks:
            break
        first_block[start + 1 : start + 1 + len(blocks)] = blocks
    if at != counts.blocks:
        raise Corrupt(f"field 'checksums': {counts.blocks}, expected {at}")
    return first_block


def _decode_boxes(fields: Mapping[str, memoryview], counts: _Counts) -> tuple[Ints, BoxTable]:
    """Per chunk the index of its box or -1, and the boxes."""
    ids = _ids(fields, "chunk_boxes", counts.chunks, counts.boxes + 1)
    ndims = unpack_ints(_field(fields, "box_ndims"), counts.boxes, "box_ndims", constant=False)
    if counts.boxes and int(ndims.max()) > NDIM_MAX:
        raise Corrupt(f"field 'box_ndims': {int(ndims.max())} dims, at most {NDIM_MAX}")
    first = starts_of(ndims)
    total = int(first[-1])
    offsets = unpack_ints(_field(fields, "box_offsets"), total, "box_offsets", constant=False)
    sizes = unpack_ints(_field(fields, "box_sizes"), total, "box_sizes", constant=False)
    if total and max(int(offsets.max()), int(sizes.max())) > NUMEL_MAX:
        raise Corrupt("field 'box_sizes': a box of more than 2^58 elements")
    if counts.chunks and not counts.boxes:
        return np.broadcast_to(np.array([-1], dtype=np.int8), (counts.chunks,)), BoxTable(
            first, offsets, sizes
        )
    box: Ints = ids.astype(np.int16 if counts.boxes < 1 << 15 else np.int64)
    np.subtract(box, 1, out=box)
    return box, BoxTable(first, offsets, sizes)


def _decode_span_starts(first: Int64s, numels: Ints, skips: Ints, box: Ints, frame: _Frame) -> Ints:
    """First element of each span, -1 for boxes. Spans end within their tensor."""
    if not len(numels):
        return np.zeros(0, dtype=np.int64)
    has_boxes = box.strides != (0,)
    small = int(frame.numels.max()) < 1 << 31
    result: Ints = np.empty(len(numels), dtype=np.int32 if small else np.int64)
    counts = np.diff(first)
    for low, high in _runs(counts, len(numels)):
        part = slice(int(first[low]), int(first[high]))
        if part.start == part.stop:
            continue
        lengths = numels[part].astype(np.int64)
        if has_boxes:
            lengths[box[part] >= 0] = 0
            if np.any(skips[part][box[part] >= 0]):
                raise Corrupt("field 'chunk_skips': not zero for a box")
        starts = np.cumsum(lengths + skips[part].astype(np.int64))
        at = first[low:high] - part.start
        base = np.where(at > 0, starts[np.maximum(at, 1) - 1], 0)
        starts -= np.repeat(base, counts[low:high])
        if np.any(starts > np.repeat(frame.numels[low:high], counts[low:high])):
            raise Corrupt("field 'chunk_numels': a span ends behind its tensor")
        starts -= lengths
        if has_boxes:
            starts[box[part] >= 0] = -1
        result[part] = starts
    return result
