"""The bytes of a manifest: columns of integers and a string table, encoded and decoded.

What is decoded keeps its bytes, and nothing encodes it again: one checkpoint has one MANIFEST.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
from pydantic import ValidationError

from ckpt.errors import Corrupt, UnsupportedFormat
from ckpt.format.checksum import decode_seals
from ckpt.format.chunk_columns import (
    CHUNK_NBYTES,
    ChunkBounds,
    Counts,
    chunk_rules,
    decode_chunks,
    decode_some,
)
from ckpt.format.columns import (
    as_int64s,
    ints_in,
    pack_ints,
    pack_map,
    pack_strings,
    required_field,
    unpack_map,
    unpack_strings,
)
from ckpt.format.datafile import NDIM_MAX
from ckpt.format.datafile_index import bounded_numel
from ckpt.format.manifest import (
    CHUNKS_MAX,
    DELTA,
    FEATURES,
    NUMEL_MAX,
    PUBLICATION,
    REFERENCES,
    VERSION,
    ChunkTable,
    Header,
    Int64s,
    Manifest,
    MetadataBudget,
    Wanted,
    is_data_file_name,
    is_reference,
    parse_reference,
    reference_to,
    starts_of,
)
from ckpt.layout.dtypes import DTYPES, ITEMSIZES
from ckpt.layout.region import Shape

MAGIC = b"\x93CKPTMF\n"
DIGEST_BYTES = 32
BLOCKS_MAX = 1 << 62


class Encoded(NamedTuple):
    """The bytes of a MANIFEST object, and their sha256."""

    data: bytes
    digest: bytes


def encoded(
    m: Manifest,
    sizes: tuple[int, int, int, int],
    tensors: Mapping[str, bytes],
    chunks: Mapping[str, bytes],
) -> Encoded:
    """The bytes of a MANIFEST object. `sizes` are counts of shapes, chunks, boxes and blocks, as
    `m.chunks` need not be there; `tensors` and `chunks` are the fields that describe these.
    """
    names, name_sizes = pack_strings(m.files)
    counts = [len(m.files), len(m.fqns), *sizes, len(m.aliases), len(m.per_rank)]
    body = pack_map(
        {
            "header": m.header.model_dump_json().encode("utf-8"),
            "counts": np.array(counts, dtype="<u8").tobytes(),
            "file_names": names,
            "file_name_sizes": name_sizes,
            "file_nbytes": pack_ints(m.file_nbytes),
            "file_data_starts": pack_ints(m.file_data_start),
            **tensors,
            "values": m.values,
            "per_rank": b"".join(m.per_rank),
            "per_rank_sizes": pack_ints(list(map(len, m.per_rank))),
            **chunks,
            "table_nbytes": pack_ints(m.seals.nbytes),
            "table_digests": m.seals.digests.tobytes(),
        }
    )
    head = MAGIC + VERSION.to_bytes(4, "little") + bytes(4) + len(body).to_bytes(8, "little")
    digest = hashlib.sha256(head)
    digest.update(body)
    end = digest.digest()
    # Continued over its own value: then it is the digest of the whole object, which COMMIT has.
    digest.update(end)
    return Encoded(b"".join([head, body, end]), digest.digest())


def fields_of_tensors(m: Manifest) -> dict[str, bytes]:
    """The fields that describe tensors and aliases, encoded."""
    # Thousands of tensors share a few shapes and dtypes. Sorted, as a manifest has one encoding.
    shapes = sorted(set(m.shapes))
    shape_ids = dict(zip(shapes, range(len(shapes)), strict=True))
    dtypes = sorted(set(m.dtypes))
    dtype_ids = dict(zip(dtypes, range(len(dtypes)), strict=True))
    names = sorted(m.aliases)
    targets = list(map(m.index, map(m.aliases.__getitem__, names)))
    fqns, fqn_sizes = pack_strings(m.fqns)
    alias_names, alias_name_sizes = pack_strings(names)
    return {
        "fqns": fqns,
        "fqn_sizes": fqn_sizes,
        "dtype_names": ",".join(dtypes).encode("ascii"),
        "dtype_ids": pack_ints(list(map(dtype_ids.__getitem__, m.dtypes))),
        "shape_ndims": pack_ints(list(map(len, shapes))),
        "shape_dims": pack_ints(np.array(list(chain(*shapes)), dtype=np.uint64), constant=False),
        "shape_ids": pack_ints(list(map(shape_ids.__getitem__, m.shapes))),
        "kinds": pack_ints(m.kinds),
        "alias_names": alias_names,
        "alias_name_sizes": alias_name_sizes,
        "alias_targets": pack_ints(targets),
    }


# Of a tensor: its name, places in columns, and what a walk over all of them keeps.
TENSOR_NBYTES = 400
TEXT_NBYTES = 2  # of each byte, which lies in the input already


def decode_manifest(
    data: bytes | memoryview, budget: MetadataBudget | None = None, *, ruled: int = False
) -> Manifest:
    """The manifest that `data` encodes; its columns may be views of `data`.

    Raises UnsupportedFormat when a newer version is needed, or more memory than `budget` has left;
    and Corrupt naming the field unless the manifest is complete and consistent: every tensor is
    covered exactly once, and every chunk lies inside its file. A table of `ruled` chunks or more
    (True: any table) stays rules until a chunk is asked for, which checks all. Without a `budget`
    it has one of its own.
    """
    budget = budget or MetadataBudget()
    budget.charge(TEXT_NBYTES * len(data), "a manifest")
    body = _open_envelope(memoryview(data).cast("B"))
    fields = unpack_map(body)
    header = _decode_header(required_field(fields, "header"))
    counts = _decode_counts(fields, header)
    named = counts.files + counts.tensors + counts.shapes + counts.aliases + counts.ranks
    budget.charge(TENSOR_NBYTES * named, f"a manifest of {counts.tensors} tensors")
    files = _decode_names(fields, "file_name", counts.files)
    _check_file_names(files, header)
    file_nbytes, data_start = (
        as_int64s(ints_in(fields, name, counts.files), name)
        for name in ("file_nbytes", "file_data_starts")
    )
    fqns = _decode_names(fields, "fqn", counts.tensors)
    if any(map(operator.ge, fqns, fqns[1:])):
        raise Corrupt("field 'fqns': names are not sorted, or one appears twice")
    dtypes = _decode_dtypes(fields, counts)
    shapes, numels = _decode_shapes(fields, counts)
    kinds = ints_in(fields, "kinds", counts.tensors)
    if counts.tensors and int(kinds.max()) > 15:
        raise Corrupt(f"field 'kinds': {int(kinds.max())}, at most 15")
    itemsizes = np.array(list(map(ITEMSIZES.__getitem__, dtypes)), dtype=np.uint8)
    seals = decode_seals(fields, file_nbytes - data_start)
    # A table has a word per block, so tables bound the count. As floats, a hostile sum cannot wrap
    # around.
    if counts.blocks > int((seals.nbytes // 4).sum(dtype=np.float64)):
        raise Corrupt(f"field 'table_nbytes': tables too small for {counts.blocks} blocks")
    bounds = ChunkBounds(file_nbytes, data_start, itemsizes, fqns, shapes, numels)

    def make() -> ChunkTable:
        # Before the table is made: a few hundred bytes may describe millions of chunks.
        budget.charge(CHUNK_NBYTES * counts.chunks, f"a table of {counts.chunks} chunks")
        chunks = decode_chunks(fields, counts, header, bounds)
        _check_references_used(files, chunks)
        return chunks

    def some(first: Int64s, wanted: Wanted) -> ChunkTable | None:
        if any(map(is_reference, files)):
            return None  # all of them are to be used, which a part does not show
        return decode_some(fields, counts, header, bounds, budget, first, wanted)

    chunks = chunk_rules(fields, counts, make, some) if 0 < ruled <= counts.chunks else make()
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
        values=bytes(required_field(fields, "values")),
        per_rank=_decode_per_rank(fields, counts),
        seals=seals,
        data=bytes(data),
        budget=budget,
    )


def _open_envelope(view: memoryview) -> memoryview:
    head = len(MAGIC) + 16
    if bytes(view[: len(MAGIC)]) != MAGIC:
        raise Corrupt("not a manifest: it does not start with the magic bytes")
    if len(view) < head + DIGEST_BYTES:
        raise Corrupt(f"manifest cut short: {len(view)} bytes")
    version = int.from_bytes(view[8:12], "little")
    # Before the digest: a newer version may end otherwise, and should be named.
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
    unknown = sorted(set(header.required) - FEATURES)
    if unknown:
        raise UnsupportedFormat(
            f"the checkpoint needs {', '.join(unknown)!r:.200}, unknown to this library: install "
            f"a newer one"
        )
    # A text that is parsed when it is asked for: what is wrong with it has to show here.
    if PUBLICATION in header.user or DELTA in header.required:
        try:
            if header.publication is None:
                raise ValueError("a delta that does not say of what")
        except (TypeError, ValueError, RecursionError) as error:
            raise Corrupt(f"field 'header': {error}") from error
    return header


def _decode_counts(fields: Mapping[str, memoryview], header: Header) -> Counts:
    """The lengths of all columns.

    Each is bounded by bytes that are present before anything is allocated: a hostile count must
    not reserve memory.
    """
    raw = required_field(fields, "counts")
    if len(raw) != 8 * len(Counts._fields):
        raise Corrupt(f"field 'counts': {len(raw)} bytes, expected {8 * len(Counts._fields)}")
    counts = Counts(*np.frombuffer(raw, dtype="<u8").tolist())
    bounds = Counts(
        files=len(required_field(fields, "file_names")),
        # Names are distinct: one at most takes no byte.
        tensors=len(required_field(fields, "fqns")) + 1,
        shapes=counts.tensors,
        chunks=min(counts.blocks, CHUNKS_MAX),
        boxes=counts.chunks,
        # Of more blocks than that nothing is made; their number is compared with the chunks.
        blocks=BLOCKS_MAX,
        aliases=len(required_field(fields, "alias_names")) + 1,
        ranks=len(required_field(fields, "per_rank")),
    )
    for name, count, bound in zip(Counts._fields, counts, bounds, strict=True):
        if count > bound:
            raise Corrupt(f"field 'counts': {count} {name}, there can be at most {bound}")
    if counts.ranks not in (0, header.world_size):
        raise Corrupt(f"field 'counts': values of {counts.ranks} of {header.world_size} ranks")
    return counts


def _decode_names(fields: Mapping[str, memoryview], name: str, count: int) -> tuple[str, ...]:
    sizes = ints_in(fields, f"{name}_sizes", count)
    return unpack_strings(required_field(fields, f"{name}s"), sizes, f"{name}s")


def _check_file_names(files: Sequence[str], header: Header) -> None:
    own = [name for name in files if not is_reference(name)]
    references = files[len(own) :]
    for name in own:
        if not is_data_file_name(name):
            raise Corrupt(f"field 'file_names': {name!r:.250} is not a name of a data file")
    # Names are joined to the step's directory: any other form could point outside of the root, or
    # back into this directory under a second name.
    inside = reference_to(header.step, header.attempt, "")
    for name in references:
        if parse_reference(name) is None or name.startswith(inside):
            raise Corrupt(
                f"field 'file_names': {name!r:.300} is not a data file of another attempt"
            )
    if len(set(own)) != len(own):
        raise Corrupt("field 'file_names': a name appears twice")
    if any(a >= b for a, b in pairwise(references)):
        raise Corrupt("field 'file_names': files of other attempts are not sorted, or named twice")
    if references and REFERENCES not in header.required:
        raise Corrupt(f"field 'header': names files of other attempts without {REFERENCES!r}")


def _check_references_used(files: Sequence[str], chunks: ChunkTable) -> None:
    """Raises Corrupt for a file of another attempt without chunks of this checkpoint.

    Deletion keeps every file that a manifest names, so an unused name would keep it for ever.
    """
    if not any(map(is_reference, files)):
        return
    used = np.bincount(chunks.file, minlength=len(files)).tolist()
    for name, count in zip(files, used, strict=True):
        if is_reference(name) and not count:
            raise Corrupt(f"field 'file_names': {name!r:.300} holds no chunk of this checkpoint")


def _decode_dtypes(fields: Mapping[str, memoryview], counts: Counts) -> tuple[str, ...]:
    raw = required_field(fields, "dtype_names")
    # The names of all dtypes take less.
    text = bytes(raw[:4096]).decode("ascii", "replace")
    names = text.split(",") if text else []
    unknown = [name for name in names if name not in DTYPES]
    if unknown or len(set(names)) != len(names) or len(raw) > 4096:
        raise Corrupt(
            f"field 'dtype_names': {unknown or names!r:.200} are not known dtypes, each once"
        )
    ids = ints_in(fields, "dtype_ids", counts.tensors, limit=len(names))
    return tuple([names[index] for index in ids.tolist()])


def _decode_shapes(
    fields: Mapping[str, memoryview], counts: Counts
) -> tuple[tuple[Shape, ...], Int64s]:
    ndims = ints_in(fields, "shape_ndims", counts.shapes)
    if counts.shapes and int(ndims.max()) > NDIM_MAX:
        raise Corrupt(f"field 'shape_ndims': {int(ndims.max())} dims, at most {NDIM_MAX}")
    first = starts_of(ndims).tolist()
    dims = ints_in(fields, "shape_dims", first[-1], constant=False).tolist()
    shapes = [tuple(dims[a:b]) for a, b in pairwise(first)]
    numels = np.array([bounded_numel(shape) for shape in shapes], dtype=np.int64)
    if counts.shapes and int(numels.max()) > NUMEL_MAX:
        raise Corrupt(f"field 'shape_dims': a tensor of {int(numels.max())} elements")
    ids = ints_in(fields, "shape_ids", counts.tensors, limit=counts.shapes)
    return tuple([shapes[index] for index in ids.tolist()]), numels[ids]


def _decode_aliases(
    fields: Mapping[str, memoryview], counts: Counts, fqns: Sequence[str]
) -> dict[str, str]:
    names = _decode_names(fields, "alias_name", counts.aliases)
    targets = ints_in(fields, "alias_targets", counts.aliases, limit=counts.tensors)
    aliases = {name: fqns[target] for name, target in zip(names, targets.tolist(), strict=True)}
    if len(aliases) != len(names) or (aliases and not aliases.keys().isdisjoint(fqns)):
        raise Corrupt(
            "field 'alias_names': a name appears twice, or is the name of a stored tensor"
        )
    return aliases


def _decode_per_rank(fields: Mapping[str, memoryview], counts: Counts) -> tuple[bytes, ...]:
    data = required_field(fields, "per_rank")
    sizes = ints_in(fields, "per_rank_sizes", counts.ranks)
    # Each of them before their sum, which could wrap around.
    if counts.ranks and int(sizes.max()) > len(data):
        raise Corrupt(f"field 'per_rank_sizes': {int(sizes.max())} of {len(data)} bytes")
    first = starts_of(sizes).tolist()
    if first[-1] != len(data):
        raise Corrupt(f"field 'per_rank': {first[-1]} of {len(data)} bytes are used")
    return tuple([bytes(data[a:b]) for a, b in pairwise(first)])
