"""From a store and a step to the manifest of one checkpoint. Needs no torch."""

from __future__ import annotations

from typing import NamedTuple

from ckpt.errors import Corrupt, NoCheckpoint
from ckpt.log import MANIFEST_NAME, LiveEntry, Log, manifest_digest, read_format
from storage import KeyNotFoundError, Store


class Located(NamedTuple):
    """One checkpoint found: where its files are, and the bytes of its manifest.

    `prefix` goes in front of the manifest's file names. `entry` is what the log says of it; None
    for a step directory that was opened by its own path.
    """

    prefix: str
    data: bytes
    entry: LiveEntry | None


def live_entries(store: Store) -> tuple[LiveEntry, ...]:
    """The checkpoints of a root, oldest commit first. Raises NoCheckpoint when it is no root."""
    read_format(store)
    return Log(store).state().live


def locate(store: Store, step: int | None = None, *, attempt: str = "") -> Located:
    """The checkpoint of `step`, or the latest; `store` is a root or a single step directory.

    With `attempt`, that one of several checkpoints of a step.

    Raises NoCheckpoint naming what is there, Corrupt when the manifest is not the committed one.
    """
    try:
        live = live_entries(store)
    except NoCheckpoint as no_root:
        return _by_path(store, step, no_root)
    entry = _choose(store, live, step, attempt)
    where = f"{store.url}/{entry.prefix}{MANIFEST_NAME}"
    try:
        data = store.get(entry.prefix + MANIFEST_NAME)
    except KeyNotFoundError:
        if entry not in live_entries(store):
            return locate(
                store, step, attempt=attempt
            )  # retired while we looked; the log knows the rest
        raise Corrupt(
            f"{where} is missing, although step {entry.step} is committed; `ckpt salvage` can "
            "rebuild it from the data files"
        ) from None
    if len(data) != entry.manifest_nbytes or manifest_digest(data) != entry.manifest_digest:
        raise Corrupt(
            f"{where}: its {len(data)} bytes are not the {entry.manifest_nbytes} that were "
            "committed; `ckpt salvage` can rebuild it from the data files"
        )
    return Located(entry.prefix, data, entry)


def _by_path(store: Store, step: int | None, no_root: NoCheckpoint) -> Located:
    """A step directory opened by its own path. It has one step: a wish for another is refused
    later.
    """
    try:
        return Located("", store.get(MANIFEST_NAME), None)
    except KeyNotFoundError:
        raise no_root from None


def _choose(store: Store, live: tuple[LiveEntry, ...], step: int | None, attempt: str) -> LiveEntry:
    if not live:
        raise NoCheckpoint(f"{store.url} has no checkpoint yet: nothing was committed")
    for entry in reversed(live):
        if step in (None, entry.step) and attempt in ("", entry.attempt):
            return entry
    steps = sorted({entry.step for entry in live})
    shown = ", ".join(map(str, steps[-10:]))
    if attempt:
        raise NoCheckpoint(f"{store.url} has no live checkpoint {attempt}: it was retired")
    raise NoCheckpoint(f"{store.url} has no step {step}; it has {len(steps)} steps: ... {shown}")
