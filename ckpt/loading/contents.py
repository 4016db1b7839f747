"""What a checkpoint has, from its manifest alone: names, shapes, dtypes, values, where parts lie.

Needs no torch, and so do the commands and tools that move no tensor.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, TypeVar

from ckpt.commit.leases import LEASE_SECONDS_MAX, leased
from ckpt.commit.locate import decoded, latest_last, live_entries, locate
from ckpt.commit.log import Log
from ckpt.commit.names import plain_int
from ckpt.commit.records import LiveEntry
from ckpt.errors import NoCheckpoint
from ckpt.format.codec import decode_values
from ckpt.format.manifest import Manifest, MetadataBudget
from ckpt.layout.dtypes import DTYPES, torch_dtype
from ckpt.layout.kind import Kind
from ckpt.layout.region import Region, Shape
from ckpt.wings import wing
from storage import Store, StoreLike, open_store
from storage.errors import InvalidUrlError
from storage.hidden import hides_secrets

if TYPE_CHECKING:
    import torch

_Opened = TypeVar("_Opened", bound="CheckpointContents")


@dataclass(frozen=True, slots=True)
class LocatedCheckpoint:
    """A checkpoint in a store; `prefix` is its directory, "" or with a closing slash."""

    prefix: str
    manifest: Manifest
    entry: LiveEntry | None  # None for a step directory on its own


class StoredPart(NamedTuple):
    """A region of a tensor, and the file and bytes that hold it.

    `file` is as in the manifest: `../<step directory>/<name>` in another one's directory.
    """

    region: Region
    file: str
    byte_start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint. `alias_of` names the stored tensor of a tied one."""

    fqn: str
    dtype_name: str
    shape: Shape
    kind: Kind
    nbytes: int
    parts: tuple[StoredPart, ...]
    alias_of: str | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The element type. Raises ValueError where this torch does not have it."""
        return torch_dtype(self.dtype_name)


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One checkpoint of a root. `url` opens it by itself, also after it was copied elsewhere,
    unless it needs files of others: `references` are the attempts of those.

    Checkpoints of one `line` were saved by one training, one after the other; None for imports and
    copies in another layout, which no training resumes from. `committed_unix` is by the writer's
    clock, and `nbytes` what its own files take.
    """

    step: int
    attempt: str
    url: str
    pinned: bool
    verified: bool
    metric: float | None
    references: tuple[str, ...] = ()
    line: int | None = 0
    committed_unix: float | None = None
    nbytes: int = 0

    @classmethod
    def of(cls, entry: LiveEntry, url: str) -> StepInfo:
        """What the log of the root at `url` says of a checkpoint."""
        alike = {one.name: getattr(entry, one.name) for one in fields(cls) if one.name != "url"}
        return cls(url=f"{url.rstrip('/')}/{entry.prefix.rstrip('/')}", **alike)


class StoredTensor(NamedTuple):
    """A tensor of the manifest; `number` is its place in the columns."""

    number: int
    fqn: str
    dtype: str
    shape: Shape


@hides_secrets
def open_contents(
    url: StoreLike,
    step: SupportsIndex | None = None,
    storage_options: Mapping[str, Any] | None = None,
    *,
    attempt: str = "",
    budget: MetadataBudget | None = None,
) -> CheckpointContents:
    """What the checkpoint of `step` has, by default the latest one. Takes and raises what
    `open_checkpoint` does, and UnsupportedFormat beyond `budget`. Where its parts lie is checked
    when the first of them is asked for.
    """
    return CheckpointContents(
        *store_and_checkpoint(
            url, step, storage_options, attempt=attempt, budget=budget, ruled=True
        )
    )


def store_and_checkpoint(
    url: StoreLike,
    step: SupportsIndex | None,
    storage_options: Mapping[str, Any] | None,
    *,
    attempt: str = "",
    budget: MetadataBudget | None,
    ruled: bool = False,
) -> tuple[Store, LocatedCheckpoint]:
    """`find_checkpoint` at a url; where there is none of ours, but one of another library, that."""
    store: Store | None = None
    try:
        store = open_store(url, **(storage_options or {}))
        return store, find_checkpoint(store, step, attempt=attempt, budget=budget, ruled=ruled)
    except BaseException as error:
        # A store that was passed stays its caller's.
        if store is not None and store is not url:
            store.close()
        # A step or an attempt that is requested can only be one of ours.
        if step is None and not attempt and isinstance(error, (NoCheckpoint, InvalidUrlError)):
            opened: tuple[Store, LocatedCheckpoint]
            opened = wing("convert.foreign").foreign(url, error, storage_options, budget)
            return opened
        raise


@hides_secrets
def list_steps(
    url: StoreLike, storage_options: Mapping[str, Any] | None = None
) -> tuple[StepInfo, ...]:
    """The checkpoints of a root in the order of their commits; the last one is the latest.

    Those of no line (imports, copies in another layout) stand before all others for that reason.
    Empty when nothing was saved there yet, so that a training can ask before it loads. Raises
    NoCheckpoint when something else is at `url`, and the store's errors.
    """
    store = open_store(url, **(storage_options or {}))
    try:
        live = live_entries(store)
    except NoCheckpoint:
        # An empty place is where a training is about to save; anything else there is a wrong url.
        if next(iter(store.list("")), None) is None:
            return ()
        raise
    finally:
        store.close()
    return tuple(StepInfo.of(entry, store.url) for entry in latest_last(live))


def find_checkpoint(
    store: Store,
    step: SupportsIndex | None = None,
    *,
    attempt: str = "",
    budget: MetadataBudget | None = None,
    ruled: bool = False,
) -> LocatedCheckpoint:
    """The checkpoint of `step` or `attempt` in a root, by default the latest, or the one of a step
    directory. `budget` and `ruled` are as in `decode_manifest`.

    Raises like `open_checkpoint`.
    """
    number: int | None = plain_int(step)
    located = locate(store, number, attempt=attempt)
    manifest = decoded(store, located.prefix, located.data, number, budget, ruled=ruled)
    return LocatedCheckpoint(located.prefix, manifest, located.entry)


@contextmanager
def leased_checkpoint(
    store: Store,
    step: SupportsIndex | None = None,
    *,
    attempt: str = "",
    budget: MetadataBudget | None = None,
) -> Iterator[LocatedCheckpoint]:
    """`find_checkpoint`, with a lease until the block ends, for a day at most: retention by a rule
    leaves it. Without one where the store may only be read.
    """
    while True:
        located = find_checkpoint(store, step, attempt=attempt, budget=budget)
        # A step directory on its own has no log, so that nothing retires it.
        if located.entry is None:
            yield located
            return
        chosen = located.entry.attempt
        with leased(store, chosen, LEASE_SECONDS_MAX):
            # Retention that looked for leases just before may have retired it all the same.
            if Log(store).state().find(chosen) is not None:
                yield located
                return


class CheckpointContents:
    """What one checkpoint has, tied names included; reads nothing. Safe to use from several
    threads.
    """

    def __init__(self, store: Store, located: LocatedCheckpoint) -> None:
        self.store = store
        self.prefix = located.prefix
        self.manifest = located.manifest
        self.entry = located.entry

    @property
    def url(self) -> str:
        """The step directory."""
        return f"{self.store.url.rstrip('/')}/{self.prefix}".rstrip("/")

    @property
    def step(self) -> int:
        """The step that was saved."""
        return self.manifest.header.step

    @property
    def world_size(self) -> int:
        """How many ranks saved it."""
        return self.manifest.header.world_size

    @property
    def user(self) -> Mapping[str, str]:
        """The notes that were given to the save as `user=`."""
        # Names that begin with "ckpt." are the library's own; a save refuses them in `user=`.
        notes = self.manifest.header.user
        return {name: note for name, note in notes.items() if not name.startswith("ckpt.")}

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tied names, each with the fqn under which its tensor is stored."""
        return self.manifest.aliases

    @cached_property
    def values(self) -> dict[str, Any]:
        """The values that were the same on all ranks, by fqn."""
        return dict(decode_values(self.manifest.values)) if self.manifest.values else {}

    @cached_property
    def per_rank(self) -> tuple[dict[str, Any], ...]:
        """The `PerRank` values of each rank that saved, by fqn; empty when there were none."""
        return tuple(dict(decode_values(data)) for data in self.manifest.per_rank)

    @cached_property
    def _names(self) -> dict[str, None]:
        return dict.fromkeys(sorted((*self.manifest.fqns, *self.manifest.aliases)))

    def keys(self) -> tuple[str, ...]:
        """All tensor names, tied ones included, sorted."""
        return tuple(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, fqn: object) -> bool:
        return isinstance(fqn, str) and fqn in self._names

    def info(self, fqn: str) -> TensorInfo:
        """Dtype, shape and kind of a tensor, and where its parts are stored. Raises KeyError."""
        entry = self._stored(fqn)
        return TensorInfo(
            fqn=fqn,
            dtype_name=entry.dtype,
            shape=entry.shape,
            kind=Kind.of(int(self.manifest.kinds[entry.number])),
            nbytes=math.prod(entry.shape) * DTYPES[entry.dtype].itemsize,
            parts=tuple(self._parts(entry.number)),
            alias_of=self.aliases.get(fqn),
        )

    def close(self) -> None:
        """Release connections. What was read stays valid."""
        self.store.close()

    def __enter__(self: _Opened) -> _Opened:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Checkpoint step {self.step} of {self.url}: {len(self)} tensors>"

    def _stored(self, fqn: str) -> StoredTensor:
        stored = self.aliases.get(fqn, fqn)
        try:
            index = self.manifest.index(stored)
        except KeyError:
            tail = fqn.rpartition(".")[2]
            close = [name for name in self if name.endswith(f".{fqn}")]
            if not close:
                some = [name for name in self if name.endswith(tail)] or list(self)
                # Bounded, since every name is compared: a hint must not take seconds.
                close = difflib.get_close_matches(fqn, some[:2000], n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise KeyError(f"{fqn!r} is not in {self!r}{hint}") from None
        return StoredTensor(index, stored, self.manifest.dtypes[index], self.manifest.shapes[index])

    def _parts(self, index: int) -> Iterator[StoredPart]:
        chunks = self.manifest.chunks
        for chunk in chunks.of_tensor(index):
            place = self.manifest.files[int(chunks.file[chunk])], int(chunks.byte_start[chunk])
            yield StoredPart(chunks.region(chunk), *place, self.manifest.chunk_nbytes(chunk))
