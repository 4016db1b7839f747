"""Near saves: a save in the background whose files stay on the host, and the record of all ranks.

stage -> attempt -> data files in the tier of each host -> copies at other hosts -> record
                    each rank alone                        (or parity) each alone   on every host

No object store is asked for anything. What counts is said in `ckpt.near.records`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ckpt.commit.names import plain_int, step_prefix
from ckpt.commit.session import RankedSession
from ckpt.errors import Fenced, RankFailed
from ckpt.format.checksum import Seal
from ckpt.format.manifest import Header
from ckpt.format.part import Part
from ckpt.layout.memory import devices_of, gc_paused
from ckpt.near.memory import GENERATIONS, MappedStore, TierMemory
from ckpt.near.peers import Copies, open_copies
from ckpt.near.placement import Hosts, placed_copies
from ckpt.near.records import NearFile, NearHead, NearRecord, decode_near_record, encode_near_record
from ckpt.near.status import StatusNotes
from ckpt.near.value import Near
from ckpt.saving.background import Background, PendingSave
from ckpt.saving.image import MIB, FilePlan, Staging, WritePath, part_count
from ckpt.saving.save import flattened
from ckpt.saving.staging import BufferNeed, LentCopy, Snapshot, Staged, planned_files, stage
from ckpt.saving.task import Attempt, PartMemory, SaveOptions, SaveReport, SaveTask, header_of
from ckpt.service.restore import Restorable, TierRestorable
from ckpt.service.tiers import RecordNumbers
from ckpt.telemetry.record import RankReport, SaveTotals, totals_of
from ckpt.world.base import collectively, from_coordinator, joined, shared, split
from storage import StorageError

logger = logging.getLogger(__name__)

BYTES_COPIED = "near_bytes_copied"  # the counter of a save, of what was sent to other hosts


class NearSaves:
    """The near saves of one training on one rank, one at a time. `open` comes first.

    `begin` and `restored` are collective. Nothing of it asks the durable store, unless the training
    went back to a durable checkpoint.
    """

    def __init__(
        self,
        near: Near,
        hosts: Hosts,
        ranked: RankedSession,
        saving: Mapping[str, Any],
        numbers: RecordNumbers,
    ) -> None:
        self.tier = tier = hosts.tier
        self.hosts = hosts
        self.session = replace(ranked, world=ranked.world.duplicate())
        self.notes = StatusNotes(tier.store.place if hosts.is_first else "", ranked.epoch)
        self._near = near
        self._snapshot: Snapshot = saving.get("snapshot", "step")
        self._user = dict(saving.get("user") or {})
        self._background = Background(self.session.world)
        self._memory = PartMemory()
        self._mapped: TierMemory | None = None
        self._staging = Staging()
        self._store = tier.files
        # Memory has no page cache to go around.
        is_disk = not tier.is_in_memory
        self._path = WritePath(staging=self._staging, direct=is_disk, direct_nbytes_min=4 * MIB)
        self._copies: Copies | None = None
        self._copied_nbytes = 0  # in the newest save that had all its copies
        self._began = 0.0  # the newest save, by the monotonic clock
        self._numbers = numbers
        self._number = 0  # of the save under way
        self._after_slot = 0
        self._safe = ""  # the newest attempt whose record is on every host
        self._kept: set[str] | None = None  # attempts that files here may be of; None: any

    def begin(
        self, state: Any, step: int, *, lends: bool = False
    ) -> tuple[PendingSave, Sequence[LentCopy]]:
        """Begin a near save of `state`; the save before must be over. Waits for no rank.

        With `lends`, a durable save of the same step may use the copy, which the caller ends; there
        is none where the save has failed.
        """
        now = time.monotonic()
        if self._copies is not None and self._copied_nbytes:
            self._copies.pace.saved(self._copied_nbytes, now - self._began)
        self._began = now
        copies: list[LentCopy] = []
        with gc_paused():
            task = self._task(step)
            self._number = self._numbers.take()

            def begin() -> Staged:
                if self._mapped is not None:
                    self._make_room(self._mapped)
                staged = stage(state, task, self._staging, self._snapshot)
                if lends:
                    # Before the worker begins, which gives the memory back when the save is over.
                    copies.append(staged.lend(self._snapshot))
                return staged

            try:
                return self._background.start(task, begin, publish=self._publish), copies
            except BaseException:
                for copy in copies:
                    copy.end()
                raise

    def _make_room(self, mapped: TierMemory) -> None:
        known = mapped.attempts | {self._safe}
        # A session that was fenced may have recorded a state without learning that it had, and its
        # successor may be training on from that one: nothing is overwritten before this is known.
        self.tier.refuse_fenced(self.session.epoch)
        mapped.recycle({self._safe})
        # What this process has not mapped makes room now: of a job before it. Later there is none,
        # and what is left to delete, records and copies for others, waits for the worker.
        if self._kept is None or not self._kept <= known:
            with contextlib.suppress(StorageError):
                self._drop({self._safe})

    def stepped(self, seconds: float) -> None:
        """The training has done a step in `seconds`, saves that it waited for left out."""
        if self._copies is not None:
            self._copies.pace.stepped(seconds)

    def restored(self, chosen: Restorable, record: NearRecord | None, number: int) -> None:
        """The training continues from `chosen`. Of this tier, `record` alone counts from now on,
        under `number` if its epoch is an older one; unless it is the chosen one, it keeps its place
        among durable ones. Collective.
        """
        world, session = self.session.world, self.session.session
        kept = () if record is None else (record.head.attempt,)

        def forget() -> None:
            if session is not None and not isinstance(chosen, TierRestorable):
                self._after_slot = session.state().slot
            if self.hosts.is_first:
                self.tier.forget(kept, epoch=self.session.epoch)

        if kept != (chosen.attempt,):
            collectively(world, "forget near", forget)
            self._safe = ""
        if record is None:
            self.notes.saved(-1, 0.0)
            return
        head = record.head
        self._number = number
        if head.epoch != self.session.epoch:
            like = None if head.attempt == chosen.attempt else head
            self._record(head.step, head.attempt, record.files, like=like)
        self._safe = head.attempt
        self.notes.saved(head.step, head.time_unix)

    def give_up(self, failure: RankFailed) -> None:
        """End this world with `failure`, and what is in flight. Not collective."""
        self.session.world.end(failure)
        self._background.give_up()

    def close(self) -> None:
        """Wait for what is in flight and end. Not collective."""
        with contextlib.ExitStack() as closing:  # all of them, whatever one of them raises
            # Called in reverse: the worker ends first, then what it uses.
            closing.callback(self.tier.close)
            closing.callback(self.session.world.close)
            if self._copies is not None:
                # All ranks have ended the save in which they sent anything here.
                closing.callback(self._copies.close)
            if self._mapped is not None:
                closing.callback(self._mapped.close)
            closing.callback(self._background.close)

    # opening

    def open(self, state: Any, restored: str, *, allow_fewer: bool, shares_stage: bool) -> None:
        """Prepare for saves of `state`: what all ranks hold, and whether it fits. Collective.
        Of jobs before, only the near attempt `restored` stays, "" for none: call `restored` next.
        With `allow_fewer`, as few hosts as there are keep copies; where it `shares_stage`, durable
        saves at steps of these use their copies.

        Raises ValueError on all ranks, with the numbers, when a host has no room for two
        generations, or a new training too few hosts for copies; InvalidState like a save;
        StorageError when a host cannot serve its tier to those that keep copies there.
        """
        world = self.session.world
        task = self._task(0)
        contents = flattened(state, task)
        files: list[FilePlan] = []

        def facts() -> list[Any]:
            # What it raises is raised by all: `flattened` may differ in that between ranks.
            if isinstance(contents, Exception):
                raise contents
            files.extend(planned_files(contents, task))
            # Whole parts: a little more than the files have, and what mapped ones take.
            nbytes = part_count(files) * files[0].part_nbytes
            if self.hosts.is_first:
                self.tier.sweep_unfinished()
            own = self.tier.records(self.session.epoch)
            self._drop({restored, *(r.head.attempt for r in own)})
            slot = 0 if self.session.session is None else self.session.session.state().slot
            number, attempt = (own[0].head.number, own[0].head.attempt) if own else (0, "")
            room, rack = sum(self.tier.room()), self._near.rack
            return [nbytes, room, number, attempt, slot, rack]

        reports = shared(world, "near room", facts)
        racks: dict[str, str] = {}
        for name, report in zip(self.hosts.names, reports, strict=True):
            racks.setdefault(name, report[5])
        replicas, parity = operator.index(self._near.replicas), operator.index(self._near.parity)
        copies = placed_copies(
            racks, replicas, parity=parity, allow_fewer=allow_fewer, warns=world.rank == 0
        )
        rooms = [r[1] for r in reports]
        fits_more = self._check_room([r[0] for r in reports], rooms, copies)
        # Of an earlier Checkpointer of this process.
        number, newest = max((r[2], r[3]) for r in reports)
        self._numbers.begin_after(number)
        self._safe = restored or newest
        self._after_slot = reports[0][4]
        if any(copies.values()):
            self._copies = open_copies(world, self.hosts, copies, self._near)
        # What is encrypted is copied elsewhere first: no clear text may lie in the tier.
        in_place = self.tier.is_in_memory and self.tier.files is self.tier.store
        assert not isinstance(contents, Exception), "the ranks have raised it"
        sources = contents.plan.sources if in_place else ()
        # Copies from a device need pinned memory, which that of a file is not.
        if in_place and not devices_of(one.view for one in sources if not one.address):
            self._stage_in_tier(files, GENERATIONS + fits_more, shares_stage)

    def _stage_in_tier(
        self, files: Sequence[FilePlan], generations_max: int, shares_stage: bool
    ) -> None:
        """From now on, what is staged lies in the tier already."""
        self._mapped = TierMemory(self.tier.store.place, generations_max=generations_max)
        if shares_stage:
            self._mapped.generations = generations_max
        self._staging = self._mapped
        self._store = MappedStore(self.tier.store, self._mapped)
        # Of all generations, while the first steps run: fresh memory costs ten times a copy.
        self._mapped.plan_ahead([len(file.parts) for file in files])
        generations = self._mapped.generations - bool(self._safe)
        need = BufferNeed(files[0].part_nbytes, generations, pinned=False)
        self._background.make_ready(self._mapped, need)

    def _check_room(
        self, needs: Sequence[int], rooms: Sequence[int], copies: Mapping[str, tuple[str, ...]]
    ) -> bool:
        """Whether every host has room for one more state of its own ranks, besides the generations
        of all that it keeps. Raises ValueError when these do not fit.
        """
        ranks_of: dict[str, list[int]] = {}
        for rank, name in enumerate(self.hosts.names):
            ranks_of.setdefault(name, []).append(rank)
        own = {name: sum(needs[rank] for rank in ranks) for name, ranks in ranks_of.items()}
        kept, bytes_max = dict(own), plain_int(self._near.bytes_max)
        for name, others in copies.items():
            if self._near.parity:
                kept[name] += max((-(-own[one] // len(others)) for one in others), default=0)
                continue
            for other in others:
                kept[other] += own[name]
        all_fit_more = True
        for name, ranks in ranks_of.items():
            room, taken = rooms[ranks[0]], GENERATIONS * kept[name]
            limit = room if bytes_max is None else min(room, bytes_max)
            what = "their states"
            if of_others := kept[name] - own[name]:
                kind = "parity" if self._near.parity else "copies"
                what += f", and of {kind} of {of_others / MIB:.0f} MiB for other hosts,"
            if taken > limit:
                bound = "" if bytes_max is None else f", and bytes_max is {bytes_max / MIB:.0f} MiB"
                raise ValueError(
                    f"near tier of ranks {ranks[0]} to {ranks[-1]}: {GENERATIONS} generations of "
                    f"{what} take {taken / MIB:.0f} MiB there, "
                    f"{room / MIB:.0f} MiB are free{bound}; give it more room (a larger tmpfs, "
                    "fewer ranks on a host, fewer replicas, or parity= instead of replicas=), or "
                    "use a directory on a local disk"
                )
            fits_more = taken + own[name] <= limit
            all_fit_more = all_fit_more and fits_more
            if self.session.world.rank == 0:
                text = "near tier of ranks %d to %d: %d generations of %s take %.0f MiB, %.0f MiB "
                text += "are there; one more, while a durable save sends one, "
                text += "fits" if fits_more else "does not fit"
                sizes = taken / MIB, limit / MIB
                logger.info(text, ranks[0], ranks[-1], GENERATIONS, what, *sizes)
        return all_fit_more

    # one save

    def _task(self, step: int) -> SaveTask:
        options = SaveOptions(path=self._path, user=self._user)
        return SaveTask(self.session, self._store, self._memory, step, options)

    def _publish(
        self, task: SaveTask, modules: Callable[[], Sequence[str]], write: Callable[[Attempt], Part]
    ) -> SaveReport:
        """Agree on an attempt, let every rank `write` its share, and record what all have written.

        Raises the same on all ranks. The states that are recorded are as they were then.
        """
        world = task.session.world
        with task.recorder.span("attempt"):
            header = self._attempt(task, modules)
        is_written = False
        try:
            part = collectively(world, "near write", lambda: self._written(header, write))
            self._copy(task, header, part)
            is_written = True
            report = self._commit(task, header, part)
            if self._mapped is not None:
                self._mapped.published(header.attempt)
            return report
        except Exception as error:
            task.memory.plans.forget_part()
            self._kept = None
            is_fenced = isinstance(error, Fenced)
            if is_written and (is_fenced or world.failure is not None):
                # A rank is gone, or another job has taken over, and hosts may have the record:
                # others, who know that they have, may have dropped the state before, or train on
                # from this one. These files are left to the next job.
                if self._mapped is not None:
                    self._mapped.published(header.attempt)
                raise
            if self._mapped is not None:
                self._mapped.give_up()
            if is_fenced:
                raise  # another job trains on from one of the states that are here
            with contextlib.suppress(StorageError):
                if self._copies is None:
                    self.tier.drop({self._safe}, epoch=self.session.epoch, rank=world.rank)
                else:
                    self._drop({self._safe})  # and what others have put here
            raise

    def _attempt(self, task: SaveTask, modules: Callable[[], Sequence[str]]) -> Header:
        def made() -> bytes:
            session = task.session.session
            assert session is not None, "the coordinator has it"
            return header_of(task, session.new_attempt(), modules()).model_dump_json().encode()

        received = from_coordinator(task.session.world, "near attempt", made)
        return Header.model_validate_json(received)

    def _written(self, header: Header, write: Callable[[Attempt], Part]) -> Part:
        self.tier.refuse_fenced(self.session.epoch)
        self._drop({self._safe, header.attempt})
        return write(Attempt(header, None))

    def _copy(self, task: SaveTask, header: Header, part: Part) -> None:
        """Put the files of this rank into the tiers that keep copies of them, or make parity of
        those of others. Begins when every rank has written its own, so that all hosts have dropped
        older copies by then.
        """
        copies = self._copies
        if copies is None:
            return
        prefix, files = step_prefix(header.step, header.attempt), _files_of(part)
        send = partial(copies.send, prefix, files, epoch=self.session.epoch)
        with task.recorder.span("copies"):
            nbytes = collectively(task.session.world, "near copies", send)
        task.recorder.count(BYTES_COPIED, nbytes)
        self._copied_nbytes = nbytes

    def _drop(self, kept: set[str]) -> None:
        """Delete all attempts but `kept`: every rank its own files, the first of a host the rest,
        such as those of ranks that a world before had.
        """
        rank = None if self.hosts.is_first else self.session.world.rank
        self.tier.drop(kept, epoch=self.session.epoch, rank=rank)
        self._kept = set(kept)

    def _commit(self, task: SaveTask, header: Header, part: Part) -> SaveReport:
        """The coordinator makes the record of what all ranks have written; every host keeps it."""
        world = task.session.world
        # Lengths and seals are all that a record has of files: what is read is checked by them.
        own = [(one.nbytes, one.seal.nbytes, one.seal.digest.hex()) for one in _files_of(part)]
        mine = joined(task.rank_report().encode(), json.dumps(own).encode())
        with task.recorder.span("parts"):
            received = world.gather_to_coordinator("near files", mine)
        reports: list[RankReport] = []
        files: list[NearFile] = []
        for rank, (report, rows) in enumerate(map(split, received or ())):
            reports.append(RankReport.decode(report))
            for index, (nbytes, table, digest) in enumerate(json.loads(rows)):
                files.append(NearFile(rank, index, nbytes, Seal(table, bytes.fromhex(digest))))

        def totals() -> bytes:
            nbytes = sum(file.nbytes for file in files)
            place, now_unix = (header.step, header.attempt), time.time()
            made = totals_of(reports, *place, nbytes=nbytes, now_unix=now_unix)
            return made.model_dump_json().encode()

        with task.recorder.span("commit"):
            record, passed = self._record(header.step, header.attempt, files, totals)
        self._safe = header.attempt
        summary = SaveTotals.model_validate_json(passed)
        return SaveReport(
            step=header.step,
            attempt=header.attempt,
            path=f"{self.tier.store.url}/{record.prefix}".rstrip("/"),
            nbytes=summary.nbytes,
            warnings=(),
            totals=summary,
            spans=task.recorder.spans(),
            counters=task.recorder.counters(),
        )

    def _record(
        self,
        step: int,
        attempt: str,
        files: Sequence[NearFile],
        note: Callable[[], bytes] = lambda: b"",
        *,
        like: NearHead | None = None,
    ) -> tuple[NearRecord, bytes]:
        """Put one more record on every host; `files` and `note` count on the coordinator alone,
        which passes them on. It has the place among durable ones that the record `like` has.
        """
        world = self.session.world

        def record() -> bytes:
            session = self.session.session
            assert session is not None, "the coordinator has it"
            if like is not None:
                head = replace(like, epoch=self.session.epoch, number=self._number)
            else:
                point = session.resume_point
                head = NearHead(
                    root=self.session.root,
                    epoch=self.session.epoch,
                    number=self._number,
                    step=step,
                    attempt=attempt,
                    world_size=max(file.rank for file in files) + 1,
                    after_slot=self._after_slot,
                    anchor="" if point is None else point.attempt,
                    is_new_line=point is not None and point.on_purpose,
                    time_unix=time.time(),
                )
            return joined(encode_near_record(NearRecord(head, tuple(files))), note())

        received = from_coordinator(world, "near record", record)

        def put() -> tuple[NearRecord, bytes]:
            encoded, passed = split(received)
            made = decode_near_record(encoded, "the coordinator's near record")
            if self.hosts.is_first:
                self.tier.put(made)
                # Nobody else has looked at the tiers since the files were written: a process that
                # was stopped meanwhile must not count its state although another one trains on.
                self.tier.refuse_fenced(self.session.epoch)
            return made, bytes(passed)

        return collectively(world, "near record", put)


def _files_of(part: Part) -> list[NearFile]:
    """The files of a rank as a record names them."""
    return [
        NearFile(part.structure.first_rank, index, file.nbytes, file.seal)
        for index, file in enumerate(part.files)
    ]
