"""From a url to a source, whatever format is there. Formats are known by their registry alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from itertools import islice
from pkgutil import iter_modules
from typing import Any, NamedTuple, SupportsIndex, TypeAlias

from ckpt.commit.log import FORMAT_KEY
from ckpt.commit.names import MANIFEST_NAME
from ckpt.convert.sources.budget import MemoryBudget
from ckpt.convert.sources.source import CheckpointSource, FileSource, native_source
from ckpt.errors import NoCheckpoint
from ckpt.format.manifest import NBYTES_MAX, MetadataBudget
from ckpt.layout.region import Shape
from storage import Store, StoreLike, open_store
from storage.location import folder_of, url_of

LISTED_MAX = 10_000  # files of a folder that are looked at
Change: TypeAlias = Callable[[CheckpointSource], CheckpointSource]


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """How to look at a source. `step` and `attempt` are for roots of ours.

    `parameter_names` are the names of the parameters of optimizers that only number them, in the
    optimizer's order; `shapes` are those of a model's parameters by their names, in its order.
    `memory_bytes_max` is how much memory what describes the tensors may take,
    besides the bytes of the tensors (None: 64 MiB); for roots of ours nothing is counted.
    """

    step: SupportsIndex | None = None
    parameter_names: Sequence[str] | None = None
    memory_bytes_max: int | None = None
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    attempt: str = ""
    shapes: Mapping[str, Shape] | None = None


class SourcePlace(NamedTuple):
    """Where a format may be: a folder of a store, with the names of its first files, and what its
    source is made with. Of a place that is one file, `keys` are that file where it is there.
    """

    store: Store
    keys: Sequence[str]
    budget: MemoryBudget
    options: SourceOptions = SourceOptions()

    @property
    def names(self) -> Sequence[str] | None:
        """Of an optimizer's parameters."""
        return self.options.parameter_names

    @property
    def top(self) -> list[str]:
        """Files that lie in no folder of this one, sorted."""
        return sorted(key for key in self.keys if "/" not in key)

    def opened(self, after: int = -1) -> FolderSource | None:
        """The source of the first format that is in the folder, of those `after` an order."""
        each = (one.open_folder(self) for one in formats() if one.order > after)
        return next((opened for opened in each if opened is not None), None)


class FolderSource(NamedTuple):
    """A folder's source, and which of its files that is made of: names, or beginnings of them."""

    source: FileSource
    files: Collection[str] = ()
    folders: tuple[str, ...] = ()


class Format(NamedTuple):
    """How a format is opened; both functions return None where it is not there, and raise like
    `open_source`. The lowest `order` is asked first. `open_file` gets a name that ends as those of
    files do, whether or not it is one.
    """

    order: int
    title: str  # for messages
    open_folder: Callable[[SourcePlace], FolderSource | None]
    open_file: Callable[[SourcePlace, str], FileSource | None] = lambda place, name: None
    suffixes: tuple[str, ...] = ()


@cache
def formats() -> Sequence[Format]:
    """All formats of `ckpt.convert.formats`, in their order."""
    # A format is a module in that folder: no list has to name it.
    room = import_module("ckpt.convert.formats")
    modules = (import_module(f"{room.__name__}.{one.name}") for one in iter_modules(room.__path__))
    known: list[Format] = [module.FORMAT for module in modules]
    return sorted(known, key=lambda one: one.order)


def is_file_name(name: str) -> bool:
    """Whether a url that ends so is that of a file."""
    return any(name.endswith(one.suffixes) for one in formats())


def open_source(
    url: StoreLike,
    options: SourceOptions | None = None,
    open_store: Callable[..., Store] = open_store,
    changes: Sequence[Change] = (),
) -> CheckpointSource:
    """The checkpoint at `url`: a file or a directory, local or in an object store. A `Store` is a
    directory. Of the source, `changes` make others, one after the other.

    Reads what describes it, and no tensor. Raises NoCheckpoint when nothing known is there, Corrupt
    when it contradicts itself, UnsupportedFormat when it cannot be read, and the store's errors.
    """
    options = options or SourceOptions()
    path = "" if isinstance(url, Store) else url_of(url)  # a caller's store is a folder
    name = path.rpartition("/")[2]
    is_file = is_file_name(name)
    if not is_file and os.path.isfile(path.removeprefix("file://")):
        raise NoCheckpoint(f"{path}: a file of no known format; known are {_known()}")
    store = open_store(folder_of(url) if is_file else url, **options.storage_options)
    source: CheckpointSource | None = None
    try:
        source = _open_file(store, name, options) if is_file else _open_folder(store, options)
        for change in changes:
            source = change(source)
        return source
    except BaseException:
        # A source closes its store.
        (source or store).close()
        raise


def _open_file(store: Store, name: str, options: SourceOptions) -> CheckpointSource:
    keys = [name] if store.exists(name) else []
    budget = MemoryBudget(options.memory_bytes_max)
    place = SourcePlace(store, keys, budget, options)
    for one in formats():
        if (source := one.open_file(place, name)) is not None:
            return source
    raise NoCheckpoint(f"{store.url}/{name} is not there")


def _open_folder(store: Store, options: SourceOptions) -> CheckpointSource:
    if store.exists(FORMAT_KEY) or store.exists(MANIFEST_NAME):
        # `memory_bytes_max` may raise the limit of our own metadata, and never lowers it.
        nbytes_max = max(options.memory_bytes_max or 0, NBYTES_MAX)
        return native_source(store, options.step, options.attempt, MetadataBudget(nbytes_max))
    # A bucket may have millions. DCP asks for its metadata by name where it is not among these.
    keys = [info.key for info in islice(store.list(""), LISTED_MAX)]
    budget = MemoryBudget(options.memory_bytes_max)
    opened = SourcePlace(store, keys, budget, options).opened()
    if opened is None:
        raise NoCheckpoint(
            f"{store.url}: no checkpoint of a known format; known are {_known()}. It has "
            f"{', '.join(keys[:5]) or 'nothing'}"
        )
    opened.source.left_out = tuple(
        key
        for key in sorted(keys)
        if key not in opened.files and not key.startswith(opened.folders or "\0")
    )
    return opened.source


def _known() -> str:
    titles = (one.title for one in formats() if one.title)
    return ", ".join(["one of our own roots or steps", *titles])
