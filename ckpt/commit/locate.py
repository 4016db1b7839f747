"""From a store and a step to the manifest of one checkpoint. Needs no torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from ckpt.commit.lines import of_step, resumable
from ckpt.commit.log import Log, LogState, at_once, read_format
from ckpt.commit.names import MANIFEST_NAME
from ckpt.commit.records import LiveEntry, manifest_digest
from ckpt.errors import Corrupt, NoCheckpoint, UnsupportedFormat
from ckpt.format.checksum import once_more, raising_corrupt
from ckpt.format.manifest import PARENT, Manifest, MetadataBudget, is_reference
from ckpt.format.manifest_codec import decode_manifest
from storage import CorruptObjectError, KeyNotFoundError, Store, TooLargeError

logger = logging.getLogger(__name__)

READERS = 8  # records that are read at the same time
UNDER_WAY_SECONDS = 600  # for which a step directory without MANIFEST and COMMIT is no surprise


class Located(NamedTuple):
    """One checkpoint: where its files are, and the bytes of its manifest.

    `prefix` is the step's directory: see `file_key`. `entry` is what the log says of it; None
    for a step directory that was opened by its own path.
    """

    prefix: str
    data: bytes
    entry: LiveEntry | None


def live_entries(store: Store) -> tuple[LiveEntry, ...]:
    """The checkpoints of a root, oldest commit first. Raises NoCheckpoint when it is no root."""
    return state_of(store).live


def state_of(store: Store, meanwhile: Callable[[LogState], None] | None = None) -> LogState:
    """What the log of a root says. Raises NoCheckpoint when it is no root.

    Where requests take long, `meanwhile` gets what `Log.state` gives it.
    """
    if store.part_nbytes_min == 1:
        read_format(store)
        return Log(store).state()
    # Where requests take long, what does not need each other's answer is asked at once.
    return at_once(lambda: Log(store).state(meanwhile), lambda: read_format(store))[0]


def locate(store: Store, step: int | None = None, *, attempt: str = "") -> Located:
    """The checkpoint of `step`, or the latest; `store` is a root or a single step directory.

    Of several checkpoints of a step, the newest that a training saved, else the newest; or the one
    that is named by `attempt`.

    Raises NoCheckpoint naming what is there, Corrupt when the manifest is not the committed one,
    ValueError for a step that is no int.
    """
    if step is not None and type(step) is not int:
        raise ValueError(f"step={step!r}: expected an int")
    is_latest = step is None and not attempt

    def chosen(state: LogState) -> LiveEntry:
        # The latest is found without reading what else there is.
        latest = state.latest if is_latest else None
        return latest or _choose(store, state.live, step, attempt)

    early: dict[LiveEntry, bytes] = {}

    def read_early(state: LogState) -> None:
        with suppress(NoCheckpoint, KeyNotFoundError, Corrupt):
            entry = chosen(state)
            early[entry] = read_manifest(store, entry)

    try:
        state = state_of(store, read_early)
    except NoCheckpoint as no_root:
        return _by_path(store, step, no_root)
    # A younger one is the save of a training that runs.
    old = time.time() - UNDER_WAY_SECONDS
    if is_latest and any(one.is_written or one.modified_unix < old for one in state.uncommitted):
        logger.warning(state.uncommitted_text(store.url))
    entry = chosen(state)
    try:
        return Located(entry.prefix, early.get(entry) or read_manifest(store, entry), entry)
    except KeyNotFoundError:
        if entry not in live_entries(store):
            # Retired while we looked; the log knows the rest.
            return locate(store, step, attempt=attempt)
        raise Corrupt(_missing(store, state.live, entry)) from None


def _missing(store: Store, live: tuple[LiveEntry, ...], entry: LiveEntry) -> str:
    """What to say and do where a live checkpoint has no MANIFEST."""
    if next(iter(store.list(entry.prefix)), None) is not None:
        return (
            f"{store.url}/{entry.prefix}{MANIFEST_NAME} is missing, although step {entry.step} is "
            f"committed; `ckpt mend {store.url}` rebuilds it from the data files"
        )
    others = [other for other in resumable(live) if other is not entry]
    instead = f"the newest one before it is step {others[0].step} (pass step=)" if others else ""
    return (
        f"{store.url}/{entry.prefix} is empty, although slot {entry.slot} of the log has the "
        f"commit of step {entry.step} ({entry.attempt}): its directory was removed, or a backup "
        "was restored right before the commit and its process was killed, so that nobody has "
        f"acknowledged it. `ckpt rm {store.url} --step {entry.step}` takes it out, and so does the "
        f"next job that saves there{'; ' * bool(instead)}{instead}"
    )


def read_manifest(store: Store, entry: LiveEntry) -> bytes:
    """The bytes of a live checkpoint's manifest. Raises Corrupt when they are not the committed
    ones, KeyNotFoundError when they are gone.
    """
    return once_more(lambda: _checked_manifest(store, entry))


def _checked_manifest(store: Store, entry: LiveEntry) -> bytes:
    where = f"{store.url}/{entry.prefix}{MANIFEST_NAME}"
    mended = f"`ckpt salvage --step {entry.step}` can rebuild it from the data files"
    try:
        # Bounded by what was committed: an object that was put there instead may have any size.
        data = store.get_bounded(entry.prefix + MANIFEST_NAME, entry.manifest_nbytes)
    except (CorruptObjectError, TooLargeError) as error:
        raise Corrupt(f"{where} was changed: {error}; {mended}") from None
    if len(data) != entry.manifest_nbytes:
        raise Corrupt(
            f"{where} has {len(data)} bytes, {entry.manifest_nbytes} were committed; {mended}"
        )
    if manifest_digest(data) != entry.manifest_digest:
        raise Corrupt(
            f"{where}: the digest of its {len(data)} bytes is not the committed one: they were "
            f"changed; {mended}"
        )
    return data


def _by_path(store: Store, step: int | None, no_root: NoCheckpoint) -> Located:
    """A step directory opened by its own path. It has one step: a request for another is refused
    later.
    """
    try:
        with raising_corrupt():
            return Located("", store.get(MANIFEST_NAME), None)
    except KeyNotFoundError:
        raise no_root from None


def entry_by_path(store: Store, no_root: NoCheckpoint) -> LiveEntry:
    """A step directory opened by its own path, as the log of its root would list it: without a
    slot, and with the time at which its save began. Raises `no_root` where there is none.
    """
    data = _by_path(store, None, no_root).data
    return entry_of_manifest(decode_manifest(data, ruled=True), data)


def entry_of_manifest(manifest: Manifest, data: bytes) -> LiveEntry:
    """What a MANIFEST of these bytes says of a checkpoint: without slot, line, marks and metric."""
    return LiveEntry(
        attempt=manifest.header.attempt,
        step=manifest.header.step,
        slot=0,
        manifest_nbytes=len(data),
        manifest_digest=manifest_digest(data),
        pinned=False,
        verified=False,
        metric=None,
        references=manifest.references,
        line=None,
        committed_unix=float(manifest.header.created_unix),
        nbytes=manifest.own_nbytes + len(data),
    )


def _choose(store: Store, live: tuple[LiveEntry, ...], step: int | None, attempt: str) -> LiveEntry:
    if not live:
        raise NoCheckpoint(f"{store.url} has no checkpoint yet: nothing was committed")
    for entry in of_step(live, step):
        if attempt in ("", entry.attempt):
            return entry
    steps = sorted({entry.step for entry in live})
    shown = ("... " if len(steps) > 10 else "") + ", ".join(map(str, steps[-10:]))
    count = "1 step" if len(steps) == 1 else f"{len(steps)} steps"
    if attempt:
        raise NoCheckpoint(
            f"{store.url} has no live checkpoint {attempt}: it was retired, or never there"
        )
    raise NoCheckpoint(f"{store.url} has no step {step}; it has {count}: {shown}")


def file_key(prefix: str, file: str) -> str:
    """The key of a manifest's data file; `prefix` is the step directory, "" or with its slash.

    `../<directory>/<name>` is a file of another attempt, beside the step directory. The only place
    where such names become keys. Raises NoCheckpoint for one where nothing is beside.
    """
    if not is_reference(file):
        return prefix + file
    parent, slash, _ = prefix.rstrip("/").rpartition("/")
    if not prefix:
        raise NoCheckpoint(f"{file} lies outside of this directory; open the checkpoint's root")
    return parent + slash + file.removeprefix(PARENT)


def file_keys(prefix: str, manifest: Manifest) -> list[str]:
    """`file_key` of all files of `manifest`, in its order."""
    return [file_key(prefix, file) for file in manifest.files]


def decoded(
    store: Store,
    prefix: str,
    data: bytes,
    requested: int | None,
    budget: MetadataBudget | None = None,
    *,
    ruled: bool = False,
) -> Manifest:
    """The manifest that lies at `prefix`, whose bytes are `data`; `requested` is the step that it
    should be of. `budget` and `ruled` are as in `decode_manifest`.

    Raises Corrupt and UnsupportedFormat with its key, and NoCheckpoint when it is of another step,
    or of a step directory opened by itself that needs files of others.
    """
    where = f"{store.url}/{prefix}{MANIFEST_NAME}"
    try:
        manifest = decode_manifest(data, budget, ruled=ruled)
    except (Corrupt, UnsupportedFormat) as error:
        raise type(error)(f"{where}: {error}") from error
    step = manifest.header.step
    # A step directory has its own step only, whichever was requested.
    if requested not in (None, step):
        raise NoCheckpoint(f"{where} is of step {step}; step {requested} is not here")
    if prefix or not manifest.references:
        return manifest
    names = ", ".join(manifest.references[:3])
    names += f" and {len(manifest.references) - 3} more" if len(manifest.references) > 3 else ""
    root, _, directory = store.url.rstrip("/").rpartition("/steps/")
    if directory.endswith(manifest.header.attempt):
        where = f"open step {step} of {root}"
    else:
        where = f"open step {step} of the root that it was saved in ({manifest.header.root})"
    raise NoCheckpoint(
        f"{store.url} is not complete: step {step} was saved with dedup=True and shares files with "
        f"{names}, which are not in this directory; {where}, or copy it whole from there: "
        f"ckpt cp ROOT TARGET --step {step}"
    )
