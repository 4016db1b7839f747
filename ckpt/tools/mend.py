"""Repair a root whose log, FORMAT or MANIFESTs were lost: nothing is changed or deleted.

    records + step directories -> what is whole -> MANIFESTs, FORMAT, free slots, a claim, commits

A log is broken when records were lost, or when the root was rolled back, restored in part, or
merged from two copies; then it consists of several runs of records. Every checkpoint that any
record or step directory tells of, that is whole and was never retired, is live again.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ckpt.commit.live import LiveSet, with_live, write_segment
from ckpt.commit.locate import entry_of_manifest, file_keys, read_manifest
from ckpt.commit.log import (
    FORMAT_KEY,
    MENDED,
    Log,
    begins_chain,
    broken_log,
    encode_format,
    has_remains,
    latest_of,
    read_format,
)
from ckpt.commit.names import (
    LOG_PREFIX,
    MANIFEST_NAME,
    attempt_epoch,
    attempts_on,
    record_key,
    record_slot,
    step_prefix,
)
from ckpt.commit.records import (
    FIRST_LINE,
    Kind,
    LiveEntry,
    Record,
    encode_record,
    record_digest,
    record_problem,
)
from ckpt.commit.writer import must_look_first
from ckpt.errors import CheckpointError, Corrupt, NoCheckpoint
from ckpt.format.checksum import is_outage, raising_corrupt
from ckpt.format.manifest import Manifest
from ckpt.format.manifest_codec import decode_manifest
from ckpt.short import ShortRecord
from ckpt.tools.salvage import SalvageReport, salvage, write_manifest
from storage import KeyExistsError, Store

Live = tuple[LiveEntry, ...]
Body = tuple[Kind, int, str | None, Live]  # of a record: kind, epoch, attempt, live

HOLES_MAX = 10_000  # slots to fill: more than that is no accident
NO_SLOT = -1  # of a checkpoint that no record tells of
IMPORTED = "imported_from"  # in the user map of an import, which is of no line


@dataclass(frozen=True, slots=True, repr=False)
class MendReport(ShortRecord):
    """What was found and done.

    `breaks` says what is wrong in each slot that does not follow the one before; `filled` are slots
    that were free. `brought_back` are checkpoints that the newest record did not list, and
    `rebuilt` those whose MANIFEST was written again. `lost` are checkpoints whose files are not all
    there; they are left as they are. `format_written`: FORMAT was missing.
    """

    breaks: Mapping[int, str]
    filled: tuple[int, ...]
    brought_back: tuple[LiveEntry, ...]
    lost: tuple[LiveEntry, ...]
    latest: LiveEntry | None
    rebuilt: tuple[LiveEntry, ...] = ()
    format_written: bool = False
    dry_run: bool = False


def mend_store(store: Store, *, dry_run: bool) -> MendReport:
    """Make a root whole again. See `ckpt.operate.mend`."""
    has_format = store.exists(FORMAT_KEY) or not has_remains(store)
    if has_format:
        read_format(store)
    log = _Survey(store)
    files = _Directories(log)
    if not log.digests and not files.in_order:
        raise NoCheckpoint(f"{store.url} has no checkpoint yet, nor one that can be brought back")
    if not (has_format or log.records or files.in_order):
        raise Corrupt(
            f"{store.url} has no {FORMAT_KEY} object, and no record or MANIFEST that can be "
            "read: if the root is encrypted, pass its key"
        )
    listed = {entry.attempt for entry in log.known}
    back = tuple(entry for entry in files.in_order if entry.attempt not in listed)
    is_broken = bool(log.holes or back or log.is_refused())
    report = MendReport(
        log.breaks,
        log.holes,
        back,
        files.lost,
        latest_of(files.in_order if is_broken else log.known),
        tuple(files.salvaged),
        not has_format,
        dry_run,
    )
    if dry_run:
        return report
    root = read_format(store) if has_format else files.root
    if not has_format:
        store.put_if_absent(FORMAT_KEY, encode_format(root))
        # What was stored is read back: an encoded store takes the root's identity from there.
        read_format(store)
    # Raises StoreRefused where an append could overwrite the record of another writer.
    must_look_first(store, root, False)
    for salvaged in files.salvaged.values():
        write_manifest(store, salvaged)
    if is_broken:
        epochs = [files.epoch, *(record.epoch for record in log.records.values())]
        log.append(files.in_order, files.damaged, epoch=1 + max(epochs))
    return report


class _Survey:
    """All records of a log, readable or not, and where one run of them ends."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.records: dict[int, Record] = {}
        self.digests: dict[int, bytes] = {}
        self.breaks: dict[int, str] = {}
        log = Log(store)
        self._segments, self._write = log.segments, partial(write_segment, store)
        slots = [record_slot(info.key) for info in store.list(LOG_PREFIX)]
        for slot in sorted(slot for slot in slots if slot is not None):
            raw = log.raw(slot)
            self.digests[slot] = record_digest(raw)
            try:
                self.records[slot] = log.record(slot)
            except Corrupt as error:
                self.breaks[slot] = str(error)
        count = max(self.digests, default=-1) + 1
        # One stray record of a huge slot would otherwise have us write that many fillers.
        if count - len(self.digests) > HOLES_MAX:
            raise broken_log(store.url, f"{count - len(self.digests)} slots are missing")
        self.holes = tuple(slot for slot in range(count) if slot not in self.digests)
        for slot in range(count):
            problem = "" if slot in self.digests else "missing"
            if slot and slot in self.records:
                problem = broken_link(self.records.get(slot - 1), self.records[slot], self.digests)
            if problem:
                self.breaks[slot] = problem
        self.known = self.live_of(self.records[max(self.records)]) if self.records else ()

    @property
    def ends(self) -> list[Record]:
        """The last record of each run."""
        return [
            record
            for slot, record in sorted(self.records.items())
            if slot + 1 not in self.records or slot + 1 in self.breaks
        ]

    def is_refused(self) -> bool:
        """Whether readers or writers refuse the log as it is, however far they look back."""
        mark = max((s for s, r in self.records.items() if begins_chain(r)), default=-1)
        if any(slot > mark for slot in self.breaks):
            return True
        try:
            Log(self.store).check_end()
        except Corrupt:
            return True
        return False

    def live_of(self, record: Record | None) -> Live:
        """What is live after a record, as far as its segments are there."""
        if record is None:
            return ()
        try:
            return LiveSet(record.live, record.segments, record.gone, self._segments).all
        except Corrupt as error:
            self.breaks.setdefault(record.slot, str(error))
            return record.live

    # Appending ----------------------------------------------------------------------------------

    def append(self, wanted: Live, damaged: Live, *, epoch: int) -> None:
        """Fill the free slots; a claim that lists what may keep its slot, and commits of the rest
        of `wanted`, so that these are the checkpoints in this order.
        """
        new = [self._made(slot, self._filler(slot)) for slot in self.holes]
        slot = max(self.digests, default=-1) + 1
        live = _kept(wanted, damaged)
        # A new epoch, so that a process that still believes in the old log cannot append after
        # this. Readers compare the links of records back to this mark, and no further.
        mark = MENDED + secrets.token_bytes(8)
        new.append(self._made(slot, ("CLAIM", epoch, None, live), mark))
        names = {entry.attempt for entry in live}
        again = _references_first([one for one in wanted if one.attempt not in names], live)
        latest = latest_of(wanted)
        # What others refer to comes first, so the order may have changed; the latest is what a job
        # resumes from, and is committed once more to be the last.
        if latest is not None and latest_of((*live, *again)) != latest:
            again.append(latest)
        for entry in again:
            slot += 1
            others = tuple(one for one in live if one.attempt != entry.attempt)
            live = (*others, replace(entry, slot=slot))
            new.append(self._made(slot, ("COMMIT", epoch, entry.attempt, live)))
        # The first one last: a log that was mended in part has a hole, and is refused.
        for record in reversed(new):
            key = record_key(record.slot)
            try:
                self.store.put_if_absent(key, encode_record(record))
            except KeyExistsError:
                raise CheckpointError(
                    f"{self.store.url}/{key} was written meanwhile: stop what writes there, then "
                    "run it again"
                ) from None

    def _filler(self, slot: int) -> Body:
        """A record for a free slot that changes nothing."""
        before = next((self.records[s] for s in range(slot - 1, -1, -1) if s in self.records), None)
        live = self.live_of(before)
        if before is None or not live:
            return "CLAIM", 1 if before is None else before.epoch, None, ()
        last = live[-1]
        # A record that says again what is so already changes nothing.
        kind: Kind = "PIN" if last.pinned else "UNPIN"
        return kind, before.epoch, last.attempt, live

    def _made(self, slot: int, body: Body, write_id: bytes = b"") -> Record:
        """A record of this body; its segments are written."""
        kind, epoch, attempt, live = body
        write_id = write_id or secrets.token_bytes(16)
        # In a free slot too, the digest of whatever bytes are before it, damaged ones included.
        previous = self.digests[slot - 1] if slot else None
        bare = Record(kind, slot, epoch, write_id, time.time(), attempt, (), previous)
        record, _ = with_live(bare, LiveSet(live, segments=self._segments), self._write)
        problem = record_problem(record, slot=slot)
        assert problem is None, f"a record that mends {problem}"
        self.records[slot], self.digests[slot] = record, record_digest(encode_record(record))
        return record


class _Directories:
    """The checkpoints that records and step directories tell of, and which of them are whole.

    `in_order` are those, in the order of their commits; `salvaged` those without a MANIFEST, by
    their entry; `lost` those that are not whole, `damaged` the live ones of them of which something
    is left.
    """

    def __init__(self, log: _Survey) -> None:
        self.store, self._log = log.store, log
        self.salvaged: dict[LiveEntry, SalvageReport] = {}
        self._roots: Counter[str] = Counter()
        self.epoch = 0
        known = {e.attempt: e for _, r in sorted(log.records.items()) for e in r.live}
        known.update({entry.attempt: entry for end in log.ends for entry in log.live_of(end)})
        # Retired in any of the runs: its files may be gone, whatever another run says.
        retired = {r.attempt for r in log.records.values() if r.kind == "RETIRE"}
        whole: dict[str, LiveEntry] = {}
        there = set()
        for step, attempt, is_written, _ in attempts_on(self.store):
            there.add(attempt)
            self.epoch = max(self.epoch, attempt_epoch(attempt))
            if attempt not in retired:
                entry = known.get(attempt)
                if checkpoint := self._whole(step, attempt, entry, has_manifest=is_written):
                    whole[attempt] = checkpoint
        # What needs itself, which no writer of this library has made, is left out, too.
        whole_names = {entry.attempt for entry in _references_first([*whole.values()], ())}
        sound = {name: entry for name, entry in whole.items() if name in whole_names}
        self.in_order = self._ordered([*sound.values()])
        listed = {entry.attempt for entry in log.known}
        self.lost = tuple(
            entry
            for name, entry in known.items()
            if name not in sound and name not in retired and name in there | listed
        )
        self.damaged = tuple(one for one in self.lost if one.attempt in there & listed)

    @property
    def root(self) -> str:
        """The identity of the root that most of its checkpoints name; a new one where none does."""
        return self._roots.most_common(1)[0][0] if self._roots else secrets.token_hex(16)

    def _whole(
        self, step: int, attempt: str, entry: LiveEntry | None, *, has_manifest: bool
    ) -> LiveEntry | None:
        """The entry of a checkpoint that is whole, None for one that is not."""
        prefix = step_prefix(step, attempt)
        try:
            if not has_manifest:
                return self._salvaged(prefix, entry)
            if entry is None:
                with raising_corrupt():
                    data = self.store.get(prefix + MANIFEST_NAME)
            else:
                data = read_manifest(self.store, entry)
            manifest = decode_manifest(data, ruled=True)
            sizes = zip(file_keys(prefix, manifest), manifest.file_nbytes, strict=True)
            # Lengths only: to read all bytes of all checkpoints would take hours. `ckpt verify`
            # does it, and a load compares what it reads.
            if any(self.store.info(key).nbytes != nbytes for key, nbytes in sizes):
                return None
            return self._entry(prefix, manifest, data, entry)
        except CheckpointError as error:
            # A store that does not answer must not make a sound checkpoint count as lost.
            if is_outage(error):
                raise
            return None

    def _salvaged(self, prefix: str, entry: LiveEntry | None) -> LiveEntry | None:
        report = salvage(self.store, prefix)
        if report.manifest is None:
            return None
        made = self._entry(prefix, report.manifest, report.manifest.data, entry)
        # Another MANIFEST than was committed would be refused by every reader.
        if made is None or (entry is not None and entry.manifest_digest != made.manifest_digest):
            return None
        self.salvaged[made] = report
        return made

    def _entry(
        self, prefix: str, manifest: Manifest, data: bytes, known: LiveEntry | None
    ) -> LiveEntry | None:
        """What the log says of a checkpoint, or is to say of one that no record tells of."""
        is_import = IMPORTED in manifest.header.user
        made = entry_of_manifest(manifest, data)
        made = replace(made, slot=NO_SLOT, line=None if is_import else FIRST_LINE)
        # A directory that was copied under another name: its MANIFEST speaks of another step.
        if made.prefix != prefix:
            return None
        self._roots[manifest.header.root] += 1
        return known or made

    def _ordered(self, entries: Sequence[LiveEntry]) -> Live:
        """In the order of their commits: by slot, or by time where two logs have been merged, which
        have two commits of one slot. What no record tells of comes in by epoch and time.
        """
        slots = Counter(entry.slot for entry in entries)
        del slots[NO_SLOT]
        is_merged = max(slots.values(), default=0) > 1
        ordered = sorted(
            (entry for entry in entries if entry.slot != NO_SLOT),
            key=lambda entry: (is_merged and entry.committed_unix, entry.slot),
        )
        others = (entry for entry in entries if entry.slot == NO_SLOT)
        for entry in sorted(others, key=lambda entry: (*_age(entry), entry.step)):
            older = [place for place, one in enumerate(ordered, 1) if _age(one) <= _age(entry)]
            place = older[-1] if older else 0
            if entry.line is not None:
                before = next((e for e in reversed(ordered[:place]) if e.line is not None), None)
                entry = replace(entry, line=_line_after(before, entry, ordered))
            ordered.insert(place, entry)
        return tuple(ordered)


def _line_after(before: LiveEntry | None, entry: LiveEntry, others: Sequence[LiveEntry]) -> int:
    """The line of a checkpoint that no record tells of: that of the one before it, or a new one
    where another job began, or went back to, an earlier step: rules must not take one for both.
    """
    if before is None or before.line is None:
        return FIRST_LINE
    is_other_job = attempt_epoch(before.attempt) < attempt_epoch(entry.attempt)
    if is_other_job and entry.step <= before.step:
        return 1 + max(one.line or FIRST_LINE for one in others)
    return before.line


def _age(entry: LiveEntry) -> tuple[int, float]:
    # Of one without a record, MANIFEST has only the second in which its save began: a second more,
    # and it does not come before a commit of that same second.
    return attempt_epoch(entry.attempt), entry.committed_unix + (entry.slot == NO_SLOT)


def _kept(wanted: Live, damaged: Live) -> Live:
    """The first of `wanted` whose slots are in this order, and what is damaged."""
    kept: dict[int, LiveEntry] = {}
    names: set[str] = set()
    for entry in wanted:
        if entry.slot <= max(kept, default=NO_SLOT) or not names.issuperset(entry.references):
            break
        kept[entry.slot] = entry
        names.add(entry.attempt)
    for entry in damaged:
        if names.issuperset(entry.references) and entry.slot not in kept:
            kept[entry.slot] = entry
            names.add(entry.attempt)
    return tuple(entry for _, entry in sorted(kept.items()))


def _references_first(entries: Sequence[LiveEntry], known: Sequence[LiveEntry]) -> list[LiveEntry]:
    """The entries such that each comes after those that it needs, by whatever clock they were
    committed; else in the order given. Those whose references are not all there are left out.
    """
    there = {entry.attempt for entry in known}
    waiting, result = list(entries), list[LiveEntry]()
    while ready := next((e for e in waiting if there.issuperset(e.references)), None):
        waiting.remove(ready)
        there.add(ready.attempt)
        result.append(ready)
    return result


def broken_link(before: Record | None, record: Record, digests: Mapping[int, bytes]) -> str:
    """Why `record` does not follow the one in the slot before; "" when it does."""
    if before is None:
        return "the record before it is missing or damaged"
    if record.previous != digests.get(record.slot - 1):
        return "it builds on another record than is before it"
    return "the epoch went back" if record.epoch < before.epoch else ""
