"""Rebuilds a lost or damaged MANIFEST from the data files of a step alone.

Nothing is committed here: a rebuilt checkpoint becomes visible only through the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from ckpt.commit.locate import file_key
from ckpt.commit.log import FORMAT_KEY
from ckpt.commit.names import MANIFEST_NAME, STEPS_PREFIX, parse_step_key
from ckpt.errors import CheckpointError, Corrupt, InvalidState, NoCheckpoint
from ckpt.format.checksum import Digests, is_outage, raising_corrupt
from ckpt.format.datafile import DIGESTS
from ckpt.format.datafile_index import (
    DataFileIndex,
    FileDescription,
    OpenedFile,
    contradictions,
    digests_in,
    extra_of,
    files_by_rank,
    open_file,
    open_index,
    part_of_rank,
)
from ckpt.format.joint_manifest import build_manifest
from ckpt.format.manifest import Manifest, parse_reference
from ckpt.format.object_parts import data_file_name
from ckpt.format.part import FileColumns
from ckpt.short import ShortRecord
from ckpt.tools.relay import check_tiles, tiles_of
from storage import StoreLike, open_store
from storage.errors import CorruptObjectError, KeyExistsError, KeyNotFoundError
from storage.hidden import hides_secrets
from storage.location import folder_of, url_of
from storage.store import Store

SUFFIX = ".safetensors"
MISSING_MAX = 10_000  # names listed


@dataclass(frozen=True, slots=True)
class SalvageReport:
    """What was found below a step's prefix.

    `manifest` is there only when every file is there, every checksum matches and every tensor is
    covered; otherwise `missing` and `problems` say why not.
    """

    prefix: str
    files: tuple[str, ...]
    nbytes_checked: int
    missing: tuple[str, ...]
    problems: tuple[str, ...]
    manifest: Manifest | None

    @property
    def is_complete(self) -> bool:
        return self.manifest is not None


@dataclass(frozen=True, slots=True, repr=False)
class Salvaged(ShortRecord):
    """What became of one step directory. `whole`: it opens by its own path, or would."""

    directory: str
    whole: bool
    step: int | None
    tensors: int
    files: tuple[str, ...]
    nbytes_checked: int
    missing: tuple[str, ...]
    problems: tuple[str, ...]
    dry_run: bool


@hides_secrets
def salvage_all(
    url: StoreLike, step: int | None, *, dry_run: bool, storage_options: Mapping[str, Any] | None
) -> tuple[Salvaged, ...]:
    """Salvage what is at `url`. See `ckpt.operate.salvage`."""
    options = storage_options or {}
    # Shells complete directories with a slash, and the last name decides below.
    url = (url.rstrip("/") or url) if isinstance(url, str) else url
    name = url_of(url).rstrip("/").rpartition("/")[2]
    is_step = parse_step_key(f"{STEPS_PREFIX}{name}/{MANIFEST_NAME}") is not None
    if not is_step and name and step is None:
        with closing(open_store(url, **options)) as store:
            # Data files at the top: a copy of one checkpoint, whatever its name.
            is_step = not store.exists(FORMAT_KEY) and any(
                is_data_file(info.key) for info in store.list("")
            )
    with closing(open_store(folder_of(url) if is_step else url, **options)) as store:
        names = [name] if is_step else _directories_without(store, step)
        return tuple(_salvaged(store, directory, dry_run) for directory in names)


def _salvaged(store: Store, directory: str, dry_run: bool) -> Salvaged:
    report = salvage(store, directory)
    if report.manifest is not None and not dry_run:
        write_manifest(store, report)
    return Salvaged(
        directory=f"{store.url}/{report.prefix}",
        whole=report.is_complete,
        step=report.manifest.header.step if report.manifest else None,
        tensors=len(report.manifest.fqns) if report.manifest else 0,
        files=report.files,
        nbytes_checked=report.nbytes_checked,
        missing=report.missing,
        problems=report.problems,
        dry_run=dry_run,
    )


def _directories_without(store: Store, step: int | None) -> list[str]:
    """The step directories of a root that have no MANIFEST, or all those of `step`."""
    files: dict[str, set[str]] = {}
    for info in store.list(STEPS_PREFIX):
        parsed = parse_step_key(info.key)
        if parsed is not None and step in (None, parsed[0]):
            folder, _, name = info.key.rpartition("/")
            files.setdefault(folder, set()).add(name)
    if not files:
        wanted = "no step directories" if step is None else f"nothing of step {step}"
        raise NoCheckpoint(f"{store.url}: {wanted} below {STEPS_PREFIX}")
    return [name for name in files if step is not None or MANIFEST_NAME not in files[name]]


def salvage(store: Store, prefix: str) -> SalvageReport:
    """Rebuild the manifest of the step directory `prefix` (such as `steps/00000010-e000001-...`).

    Reads every byte and compares all checksums, in little memory. What the checkpoint shares with
    others is read in their directories. Changes nothing. Raises StorageError when the store does;
    damaged files are reported, not raised.
    """
    prefix = prefix.rstrip("/")
    names = [info for info in store.list(prefix + "/") if is_data_file(info.key[len(prefix) + 1 :])]
    files: list[OpenedFile] = []
    problems: list[str] = []
    checked = 0
    for info in names:
        with _listed(problems):
            # Of a listing only the name: see `ObjectInfo` for the sizes of encoded roots.
            with raising_corrupt():
                nbytes = store.info(info.key).nbytes
            file = open_file(store, info.key, info.key[len(prefix) + 1 :], nbytes)
            checked += check_tiles(store, info.key, tiles_of(file.described))
            files.append(file)
    missing = _missing(files)
    shared = _Shared(store, prefix)
    # After all own files are checked: what they refer to follows from their headers.
    files = [shared.added_to(file) for file in files]
    missing += tuple(shared.missing)
    problems += shared.problems
    checked += shared.nbytes_checked
    problems += contradictions(files)
    manifest = None
    if files and not missing and not problems:
        try:
            parts = [part_of_rank(rank, own) for rank, own in files_by_rank(files).items()]
            manifest = build_manifest(files[0].place.header, parts)
        except (InvalidState, Corrupt) as error:
            problems.append(str(error))
    if not names:
        problems.append(f"no data files below {prefix}/ in {store.url}")
    present = tuple(sorted(info.key[len(prefix) + 1 :] for info in names))
    return SalvageReport(prefix, present, checked, missing, tuple(problems), manifest)


def write_manifest(store: Store, report: SalvageReport) -> bytes:
    """Create the MANIFEST of a complete report; returns its bytes, whose digest a commit names.

    An equal one is left alone. Raises InvalidState when the report is incomplete, Corrupt when
    another MANIFEST is there: it is not overwritten.
    """
    if report.manifest is None:
        missing = [f"{name}: missing" for name in report.missing]
        raise InvalidState([*missing, *report.problems] or ["nothing was salvaged"])
    return put_manifest(store, f"{report.prefix}/{MANIFEST_NAME}", report.manifest)


@contextmanager
def _listed(problems: list[str]) -> Iterator[None]:
    """What is damaged is listed; an outage is an error."""
    try:
        yield
    except CheckpointError as error:
        if is_outage(error):
            raise
        problems.append(str(error))


def put_manifest(
    store: Store, key: str, manifest: Manifest, error: type[CheckpointError] = Corrupt
) -> bytes:
    """Create a MANIFEST; returns its bytes. An equal one, of an earlier run that ended before its
    commit, is left alone. Raises `error` when another one is there, or a damaged one.
    """
    data = manifest.data
    try:
        store.put_if_absent(key, data)
    except KeyExistsError:
        is_same = False
        with suppress(CorruptObjectError):
            is_same = store.get(key) == data
        if not is_same:
            raise error(
                f"{store.url}/{key} is there and differs from what the data files say: move it "
                "away, then repeat"
            ) from None
    return data


def is_data_file(name: str) -> bool:
    """Whether a name inside a checkpoint's directory is that of a data file."""
    return name.endswith(SUFFIX) and "/" not in name


class _Shared:
    """Finds what files of one checkpoint have in files of others; collects what is wrong."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._opened: dict[str, tuple[DataFileIndex, Digests] | None] = {}
        self.nbytes_checked = 0
        self.missing: list[str] = []
        self.problems: list[str] = []

    def added_to(self, file: OpenedFile) -> OpenedFile:
        """`file` with the chunks that its rank has in files of other attempts."""
        chosen: dict[str, list[int]] = {}
        for name, start, stop in file.place.references:
            if (opened := self._open(name, file.place)) is None:
                continue
            with _listed(self.problems):
                chunks = _chunks_between(name, opened[0], start, stop)
                key = file_key(self._prefix, name)
                tiles = [one for one in tiles_of(opened[0]) if start <= one.start < stop]
                self.nbytes_checked += check_tiles(self._store, key, tiles)
                chosen.setdefault(name, []).extend(chunks)
        columns = []
        for name, some in chosen.items():
            opened = self._opened[name]
            assert opened is not None, "chunks were chosen in it"
            index, digests = opened
            firsts = index.first_block
            sums = [index.checksums[firsts[one] : firsts[one + 1]] for one in some]
            own = FileColumns(
                name=name,
                nbytes=index.nbytes,
                data_start=len(index.header),
                chunks=[index.chunks[position] for position in some],
                offsets=index.offsets[some],
                block_counts=np.diff(firsts)[some],
                checksums=np.concatenate(sums),
                digests=digests[some],
                seal=index.seal,
            )
            columns.append(own)
        return file._replace(referenced=tuple(columns))

    def _open(self, name: str, place: FileDescription) -> tuple[DataFileIndex, Digests] | None:
        if name not in self._opened:
            # Before it is read, so that a missing or damaged file is reported once.
            self._opened[name] = None
            with _listed(self.problems):
                try:
                    self._opened[name] = self._read(name, place)
                except KeyNotFoundError:
                    self.missing.append(name)
        return self._opened[name]

    def _read(self, name: str, place: FileDescription) -> tuple[DataFileIndex, Digests]:
        key = file_key(self._prefix, name)
        with raising_corrupt():
            nbytes = self._store.info(key).nbytes
        index, other = open_index(self._store, key, nbytes)
        reference = parse_reference(name)
        if reference is None or other.header.attempt != reference.attempt:
            raise Corrupt(f"{key}: is a file of {other.header.attempt}")
        # A manifest has one size of blocks for all its chunks, those of other attempts included.
        if index.block_bytes != place.header.block_bytes:
            raise Corrupt(f"{key}: has blocks of {index.block_bytes} bytes")
        if DIGESTS not in index.extras:
            raise Corrupt(f"{key}: has no {DIGESTS}, which chunks that are shared must have")
        data = extra_of(self._store, key, index, DIGESTS)
        return index, digests_in(key, index, data)


def _chunks_between(name: str, index: DataFileIndex, start: int, stop: int) -> range:
    """The chunks that are bytes `start` to `stop` of a file. Raises Corrupt for parts of chunks."""
    first, last = np.searchsorted(index.offsets, [start, stop]).tolist()
    ends = index.offsets[last - 1] + index.chunks[last - 1].nbytes if last else -1
    if first >= last or int(index.offsets[first]) != start or int(ends) != stop:
        raise Corrupt(f"{name}: bytes {start} to {stop} are not whole chunks")
    return range(first, last)


def _missing(files: Sequence[OpenedFile]) -> tuple[str, ...]:
    """Names of files that other files refer to. A rank without any file lacks its first one."""
    if not files:
        return ()
    ranks = files_by_rank(files)
    missing: list[str] = []
    for rank in range(files[0].place.header.world_size):
        own = [file.place for file in ranks.get(rank, ())]
        there = {place.file_index for place in own}
        count = max((place.file_count for place in own), default=1)
        names = (
            data_file_name(rank, position) for position in range(count) if position not in there
        )
        missing += islice(names, MISSING_MAX - len(missing))
        if len(missing) >= MISSING_MAX:  # a crafted file can claim billions of ranks
            break
    return tuple(missing)
