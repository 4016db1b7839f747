"""From a store and a step to the manifest of one checkpoint; which commits of a root are states of
one training, one after the other. Needs no torch.

A root can hold more than what one training has saved: imports, copies in another layout, and what
was saved before a training went back to an older step. Every commit of a training belongs to a
line; all other commits belong to none. A session continues the line of the checkpoint that it
restored. A session that restored an older checkpoint on purpose, or none, begins a new line with
its next commit.

A session that has restored nothing begins a line only where it may (`check_beginning`): a job that
forgot to restore must not go unnoticed. Trainings that share a root for good have names: each is a
root of its own below it (`ckpt.commit.names.line_prefix`).

The latest checkpoint is the newest commit of any line (`ckpt.commit.log.latest_of`). It is always
in the line that was written last, and never an import.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ckpt.commit.log import Log, LogState, at_once, latest_of, read_format
from ckpt.commit.names import MANIFEST_NAME, PUBLISHED, line_names
from ckpt.commit.records import FIRST_LINE, LiveEntry, manifest_digest
from ckpt.commit.routes import Route, is_delta, newest_first, routes_to
from ckpt.errors import Corrupt, LogDiverged, NoCheckpoint, StoreRefused, UnsupportedFormat
from ckpt.format.checksum import once_more, raising_corrupt
from ckpt.format.manifest import PARENT, Manifest, MetadataBudget, is_reference
from ckpt.format.manifest_codec import decode_manifest
from storage import CorruptObjectError, KeyNotFoundError, Store, TooLargeError

logger = logging.getLogger(__name__)

Beginning = Literal["refuse", "warn", "anew", "quiet"]
"""What to do where a process that has restored nothing saves to a root of another training: refuse
it (a `Checkpointer`), warn (a bare save), or begin a line of its own as it was asked to."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """What a process has restored from a root. `on_purpose`: it requested this one, by its step or
    attempt, rather than the newest one that is whole. `attempt` is "" for what no commit has, such
    as a near checkpoint before the first: a new line begins.
    """

    attempt: str
    on_purpose: bool


@dataclass(frozen=True, slots=True)
class OwnLine:
    """The line of one session: that of the checkpoint `restored` since its last commit, else its
    own `line`, which is None before its first commit.
    """

    restored: ResumePoint | None = None
    line: int | None = None

    def of_next(self, state: LogState) -> int:
        """The line of a commit that follows `state`."""
        if self.restored is None:
            return _new_line(state) if self.line is None else self.line
        entry = state.find(self.restored.attempt)
        # It was retired since, or it is an import: nothing of a line is continued.
        if entry is None or entry.line is None:
            return _new_line(state)
        newest = next(e for e in state.newest_first() if e.line == entry.line)
        # The newest one that is whole may be older than damaged ones of the same line.
        continues = newest is entry or not self.restored.on_purpose
        return entry.line if continues else _new_line(state)


def check_beginning(store: Store, state: LogState, beginning: Beginning) -> None:
    """Refuse or warn, as `beginning` says, where a training has saved before. Raises
    StoreRefused.
    """
    newest = next((entry for entry in state.newest_first() if entry.line is not None), None)
    if newest is not None:
        others = f"{line_text(newest.line)}, whose newest checkpoint is step {newest.step}"
        _begin(store, beginning, others)


def check_new_root(store: Store, beginning: Beginning) -> None:
    """As `check_beginning`, before a root is made above those of named lines."""
    if beginning != "quiet" and (names := set(line_names(store)) - {PUBLISHED}):
        _begin(store, beginning, f"the named lines {', '.join(sorted(names))}")


def _begin(store: Store, beginning: Beginning, others: str) -> None:
    others = f"{store.url} holds {others}, which this process has neither restored nor loaded"
    ways = (
        "To continue that training, call restore() (or ckpt.load) before the first save; to begin "
        "another one here, pass begin_anew=True or line=NAME to Checkpointer; or save to another "
        "url"
    )
    if beginning == "refuse":
        raise StoreRefused(f"{others}. Nothing was saved. {ways}")
    if beginning == "warn":
        logger.warning("%s: this save begins a line of its own. %s", others, ways)
    if beginning == "anew":
        logger.warning("%s: a line of its own begins here, as begin_anew=True asks", others)


def _new_line(state: LogState) -> int:
    """The name of a line that begins with the next commit: its slot, which no line had before."""
    has_lines = any(entry.line is not None for entry in state.newest_first())
    return state.slot + 1 if has_lines else FIRST_LINE


def resumable(live: Sequence[LiveEntry]) -> list[LiveEntry]:
    """What a training may resume from, in the order in which to try.

    The line of the latest checkpoint, newest commit first; then checkpoints of other lines with
    lower steps than any of that line, because it may have begun there. Later steps of other lines
    are what the training went back from. Without any line, everything, newest first.
    """
    latest = latest_of(live)
    if latest is None or latest.line is None:
        return list(reversed(live))
    own = [entry for entry in reversed(live) if entry.line == latest.line]
    first_step = min(entry.step for entry in own)
    others = [
        entry
        for entry in reversed(live)
        if entry.line not in (None, latest.line) and entry.step < first_step
    ]
    return [*own, *others]


def of_step(live: Sequence[LiveEntry], step: int | None) -> list[LiveEntry]:
    """The checkpoints of one step, or of all: of lines, newest first, then those of none."""
    entries = [entry for entry in reversed(live) if step in (None, entry.step)]
    # The sort is stable: within both groups the order stays.
    return sorted(entries, key=lambda entry: entry.line is None)


def latest_last(live: Sequence[LiveEntry]) -> list[LiveEntry]:
    """All checkpoints in the order of their commits, but those of no line first, so that the last
    one is always the latest.
    """
    return sorted(live, key=lambda entry: (entry.line is not None, entry.slot))


def line_text(line: int | None) -> str:
    """A line in words: `line 0`, or `no line`."""
    return "no line" if line is None else f"line {line}"


AGAIN_MAX = 32  # looks between two tries of a checkpoint that could not be taken


class NewCommits:
    """Looks at the log of one root: two small requests while nothing is new. Writes nothing.

    Commits count as seen once `seen` was called. What a training commits after it went back to an
    older step is new, and so is the latest again, whatever the steps. What could not be taken comes
    again, after 1, 2, 4 and more looks: files of a mirror may arrive late, and damage is mended.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._log = Log(store)
        self._root = ""
        self._seen_slot = -1
        self._again: frozenset[str] = frozenset()
        self._idle, self._wait = 0, 1
        self._same: dict[str, str] = {}
        self._news, self._is_known = -1, False

    def wait(self, seconds: float) -> None:
        """Until the store reports something that the last look did not know, or for `seconds`."""
        self._news, self._is_known = self.store.refresh(seconds, self._news), True

    def look(self, present: str = "") -> list[Route]:
        """Ways to the unseen checkpoints from the attempt that is `present`, in the order in which
        to try them: see `resumable` and `routes_to`.

        Empty where nothing was saved yet. Raises LogDiverged when the root is another one or its
        log was rolled back, NoCheckpoint when something else is at its url, Corrupt for a damaged
        log, and the store's errors.
        """
        if not self._is_known:
            self._news = self.store.refresh()
        self._is_known = False
        if not self._root and not self._is_there():
            return []
        # First of all: what another log says is no news of this root.
        if (newest := self._log.newest) is not None and not self._log.holds(newest):
            self._check_root()
        state = self._log.state()
        # Nothing new: only what could not be taken is tried again, less and less often.
        if state.slot <= self._seen_slot:
            self._idle += 1
            if not self._again or self._idle < self._wait:
                return []
            self._idle, self._wait = 0, min(2 * self._wait, AGAIN_MAX)
        routes: list[Route] = []
        for entry in newest_first(resumable(state.live), state.live):
            if entry.slot > self._seen_slot or entry.attempt in self._again:
                routes += self._routes_to(entry, state.live, present)
        if routes and not routes[0]:  # the newest one is present
            self.seen()
            return []
        return list(filter(None, routes))

    def _routes_to(self, entry: LiveEntry, live: Sequence[LiveEntry], present: str) -> list[Route]:
        has_deltas = any(map(is_delta, live))
        return routes_to(entry, live, present, self._same_as if has_deltas else lambda _: "")

    def _same_as(self, anchor: LiveEntry) -> str:
        """The delta with the same state, which only the anchor's manifest names."""
        if anchor.attempt not in self._same:
            try:
                header = decode_manifest(read_manifest(self.store, anchor), ruled=True).header
            except (Corrupt, UnsupportedFormat, KeyNotFoundError):
                # The anchor itself is read later and raises this; here it costs one way among
                # several.
                return ""
            self._same[anchor.attempt] = "".join(header.publication or ())
        return self._same[anchor.attempt]

    def seen(self, but: Iterable[str] = ()) -> None:
        """Everything that `look` or `of_step` knew of is seen, but for these attempts."""
        if (newest := self._log.newest) is not None:
            self._seen_slot = max(self._seen_slot, newest.slot)
        if (again := frozenset(but)) != self._again:
            self._again, self._idle, self._wait = again, 0, 1

    def look_again(self) -> None:
        """Nothing is seen any more: the next look gives the newest there is."""
        self._seen_slot = -1

    def of_step(self, step: int, attempt: str, present: str = "") -> list[Route]:
        """Ways to the checkpoints of one step, or to the one that is called `attempt`, as `look`
        orders them.

        Raises as `look`, and NoCheckpoint where there is none.
        """
        self._news = self.store.refresh()
        if not self._root and not self._is_there():
            raise NoCheckpoint(f"{self.store.url} has no checkpoint yet: it is empty")
        live = self._log.state().live
        self._check_root()
        entries = [one for one in of_step(live, step) if attempt in ("", one.attempt)]
        if not entries:
            steps = ", ".join(str(one.step) for one in live[-10:])
            raise NoCheckpoint(
                f"{self.store.url} has no step {step}{attempt and ' '}{attempt}; the newest are "
                f"{steps or 'none'}"
            )
        routes: list[Route] = []
        for one in entries:
            own = self._routes_to(one, live, present)
            # What is present is wanted again: it is read as if it were not.
            routes += own if all(own) else self._routes_to(one, live, "")
        return routes

    def _is_there(self) -> bool:
        """Whether there is a root. Raises NoCheckpoint when something else is there."""
        try:
            self._root = read_format(self.store)
        except NoCheckpoint:
            if next(iter(self.store.list("")), None) is None:
                return False  # the training is about to begin
            raise
        return True

    def _check_root(self) -> None:
        """Raise LogDiverged unless this is the root of the first look, with the same log."""
        try:
            root = read_format(self.store)
        except NoCheckpoint as error:
            raise self._diverged(f"it is gone: {error}") from error
        if root != self._root:
            raise self._diverged("another training has begun a root there")
        newest = self._log.newest
        if newest is not None and not self._log.holds(newest):
            raise self._diverged(f"slot {newest.slot} of its log is not what it was")

    def _diverged(self, why: str) -> LogDiverged:
        return LogDiverged(
            f"{self.store.url} is not the root that was followed: {why}. What was loaded stays as "
            "it is; follow the place where the training saves now"
        )


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

    # The MANIFEST is read while `steps/` is still being listed: one round less. What that read
    # fails with, the later one raises.
    early: dict[LiveEntry, bytes] = {}

    def read_early(state: LogState) -> None:
        with suppress(NoCheckpoint, KeyNotFoundError, Corrupt):
            entry = chosen(state)
            early[entry] = read_manifest(store, entry)

    try:
        state = state_of(store, read_early)
    except NoCheckpoint as no_root:
        return _by_path(store, no_root)
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
    return once_more(lambda: _checked_manifest(store, entry), store)


def _checked_manifest(store: Store, entry: LiveEntry) -> bytes:
    where = f"{store.url}/{entry.prefix}{MANIFEST_NAME}"
    mended = f"`ckpt salvage --step {entry.step}` can rebuild it from the data files"
    try:
        # Bounded by what was committed: an object that was put there instead may have any size.
        data = store.get_bounded(entry.prefix + MANIFEST_NAME, entry.manifest_nbytes)
    except (CorruptObjectError, TooLargeError) as error:
        raise Corrupt(f"{where} was changed: {error}; {mended}") from None
    committed = entry.manifest_nbytes
    if len(data) != committed:
        raise Corrupt(f"{where} has {len(data)} bytes, {committed} were committed; {mended}")
    if manifest_digest(data) != entry.manifest_digest:
        raise Corrupt(
            f"{where}: the digest of its {len(data)} bytes is not the committed one: they were "
            f"changed; {mended}"
        )
    return data


def _by_path(store: Store, no_root: NoCheckpoint) -> Located:
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
    data = _by_path(store, no_root).data
    return entry_of_manifest(decode_manifest(data, ruled=True), data)


def entry_of_manifest(manifest: Manifest, data: bytes) -> LiveEntry:
    """What a MANIFEST of these bytes says of a checkpoint: without slot, line, marks and metric."""
    header = manifest.header
    return LiveEntry(
        attempt=header.attempt,
        step=header.step,
        slot=0,
        manifest_nbytes=len(data),
        manifest_digest=manifest_digest(data),
        references=manifest.references,
        line=None,
        committed_unix=float(header.created_unix),
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

    `../<directory>/<name>` is a file of another attempt, next to the step directory. The only place
    where such names become keys. Raises NoCheckpoint for one in a directory opened alone.
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
    ruled: int = False,
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
