"""What the log of a root promises, as a model in plain data that knows nothing of `ckpt`.

A world is a root (slots with records, MANIFESTs, data files), writes that are still on their way, a
backup, and jobs with what they remember. An action is one call of one job or command, or something
that happens to the root. `Model.apply` says what the call reports, and the world is then what it
must be. Where the product looks at a few slots, the model looks at all of them.

A record is a value: two records are the same one when all they say is the same, which includes the
record before them. `nonce` keeps those apart that a job writes before and after a restore.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

Attempt = tuple[int, int]  # epoch and step
Uid = int  # a record, see `uid_of`
NONE: Uid = -1


class Entry(NamedTuple):
    attempt: Attempt
    slot: int
    pinned: bool
    references: tuple[Attempt, ...]


class Rec(NamedTuple):
    """A record. `previous` is the one that it was made for, which stands for its digest."""

    kind: str
    slot: int
    epoch: int
    by: str
    nonce: int
    attempt: Attempt | None
    live: tuple[Entry, ...]
    previous: Uid


_uids: dict[Rec, Uid] = {}
_records: list[Rec] = []


def uid_of(record: Rec) -> Uid:
    """A number for a record, the same for equal ones."""
    if record not in _uids:
        _uids[record] = len(_records)
        _records.append(record)
    return _uids[record]


def record_of(uid: Uid) -> Rec:
    return _records[uid]


class View(NamedTuple):
    """What a reader is to see: the last slot, and the newest record."""

    end: int
    newest: Uid

    @property
    def live(self) -> tuple[Entry, ...]:
        return () if self.newest == NONE else record_of(self.newest).live

    @property
    def epoch(self) -> int:
        return 0 if self.newest == NONE else record_of(self.newest).epoch

    def find(self, attempt: Attempt | None) -> Entry | None:
        return next((entry for entry in self.live if entry.attempt == attempt), None)

    def users_of(self, attempt: Attempt) -> list[Entry]:
        return [entry for entry in self.live if attempt in entry.references]


class Refused(Exception):
    """A call ends with the error of this name."""


class Dead(Exception):
    """The process ends here."""


class Job(NamedTuple):
    """What a process knows. A command is one with the epoch 0, which writes under any."""

    name: str
    epoch: int = 0
    memory: View | None = None  # the end of the log that it saw last
    known: Uid = NONE  # the record that it built on last
    pending: Uid = NONE  # sent, without an answer
    fenced: bool = False
    diverged: bool = False
    leftovers: tuple[Attempt, ...] = ()
    stalled: tuple[Attempt, tuple[Attempt, ...], Uid] | None = None


class Action(NamedTuple):
    """`fault` is how its first write of the log ends, or after how many deletions it is killed."""

    name: str
    job: str = ""
    fault: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in self if part)


class Root(NamedTuple):
    """A copy of everything below a root."""

    slots: tuple[tuple[int, Uid], ...]
    manifests: frozenset[Attempt]
    data: frozenset[Attempt]
    acknowledged: frozenset[Attempt]
    leased: Attempt | None


Draft = tuple[str, int, Attempt | None, tuple[Entry, ...]]
Build = Callable[[View], "Draft | None"]


class Model:
    """One world. `copy` it to go two ways from it."""

    def __init__(self) -> None:
        self.slots: dict[int, Uid] = {}
        self.manifests: set[Attempt] = set()
        self.data: set[Attempt] = set()
        self.late: tuple[Uid, ...] = ()
        self.backup: Root | None = None
        self.jobs: dict[str, Job] = {}
        self.leased: Attempt | None = None
        self.acknowledged: set[Attempt] = set()
        self.steps = self.exchanges = 0
        self._fault = ""
        self.has_met_the_fault = False

    def copy(self) -> Model:
        other = Model.__new__(Model)
        other.__dict__.update(self.__dict__)
        other.slots, other.jobs = dict(self.slots), dict(self.jobs)
        other.manifests, other.data = set(self.manifests), set(self.data)
        other.acknowledged = set(self.acknowledged)
        return other

    def key(self) -> tuple[object, ...]:
        """Equal for worlds that nothing tells apart."""
        jobs = tuple(sorted(self.jobs.items()))
        files = frozenset(self.manifests), frozenset(self.data), frozenset(self.acknowledged)
        rest = self.late, self.backup, self.leased, self.steps, self.exchanges
        return tuple(sorted(self.slots.items())), files, jobs, rest

    def apply(self, action: Action) -> str:
        """What the call reports: "done", "nothing", "landed", "lost", "killed", or an error."""
        self._fault, self.has_met_the_fault = action.fault, not action.fault
        try:
            return str(getattr(self, f"do_{action.name}")(action.job))
        except Refused as refused:
            return str(refused)
        except Dead:
            self.jobs.pop(action.job, None)
            return "killed"

    # --- reading ----------------------------------------------------------------------------------

    def view(self) -> View:
        """What counts: see FORMAT.md, "The log". Refused where records are missing, or the newest
        two do not follow each other.
        """
        end = max(self.slots, default=-1)
        if len(self.slots) != end + 1:
            raise Refused("Corrupt")
        view = self._ending(end)
        # Attempts newer than the latest prove that records are lost at the end.
        latest = max((entry.attempt[1] for entry in view.live[-1:]), default=0)
        newer = [one for one in self.data | self.manifests if one[1] > latest]
        of_this = [one for one in newer if one in self.manifests and one[0] == view.epoch]
        if any(one[0] > view.epoch for one in newer) or self._lost(of_this):
            raise Refused("Corrupt")
        return view

    def is_refused(self) -> bool:
        """Whether a reader who knows nothing gets an error."""
        try:
            self.view()
        except Refused:
            return True
        return False

    def _lost(self, attempts: list[Attempt]) -> list[Attempt]:
        """Those of some attempts that are not live and that no record tells of, where they are
        several of an epoch: a job commits or deletes one before the next.
        """
        named = {record_of(uid).attempt for uid in self.slots.values()}
        left = [one for one in attempts if one not in named]
        return [one for one in left if sum(other[0] == one[0] for other in left) > 1]

    def _ending(self, end: int) -> View:
        """What a reader sees that finds the newest record in a slot."""
        if end < 0:
            return View(-1, NONE)
        newest = self.slots[end]
        if record_of(newest).previous != self.slots.get(end - 1, NONE):
            raise Refused("Corrupt")
        return View(end, newest)

    def _look(self, job: Job) -> tuple[Job, View]:
        """What a process sees that remembers the end of the log: it asks for the next slot."""
        if job.memory is None:
            view = self.view()
        else:
            end = job.memory.end
            while end + 1 in self.slots:
                end += 1
            view = job.memory if end == job.memory.end else self._ending(end)
        if job.memory is None or view.end > job.memory.end:
            job = job._replace(memory=view)
        return job, view

    def _prove(self, job: Job) -> None:
        if job.diverged:
            raise Refused("LogDiverged")
        if job.known != NONE and self.slots.get(record_of(job.known).slot) != job.known:
            raise Refused("LogDiverged")
        if job.known != NONE and 0 not in self.slots:
            raise Refused("Corrupt")

    def _check_end(self, view: View) -> None:
        """What a writer looks at before its first append."""
        for slot in range(1, view.end + 1):
            if record_of(self.slots[slot]).previous != self.slots[slot - 1]:
                raise Refused("Corrupt")

    # --- appending --------------------------------------------------------------------------------

    def _append(self, job: Job, build: Build) -> tuple[Job, Uid]:
        """Raises what `build` raises; the job as it is then is in `self.jobs`."""
        job, _ = self._settle(job)
        while True:
            job, view = self._look(job)
            self._keep(job)
            self._prove(job)
            job = self._keep(job._replace(known=(job.memory or view).newest))
            draft = build(view)
            if draft is None:
                return job, NONE
            uid = self._record(job, view, draft)
            if job.stalled is not None and job.stalled[2] == NONE:
                attempt, references, _ = job.stalled
                self._keep(job._replace(stalled=(attempt, references, uid)))
                raise Refused("stalled")
            job, stands = self._put(job, uid)
            if stands:
                return job, uid

    def _record(self, job: Job, view: View, draft: Draft) -> Uid:
        kind, epoch, attempt, live = draft
        slot = view.end + 1
        live = tuple(e._replace(slot=slot) if e.slot < 0 else e for e in live)
        nonce = self.exchanges
        return uid_of(Rec(kind, slot, epoch, job.name, nonce, attempt, live, view.newest))

    def _put(self, job: Job, uid: Uid) -> tuple[Job, bool]:
        job = self._keep(job._replace(pending=uid))
        slot, fault = record_of(uid).slot, ""
        if not self._fault.startswith("deleted"):
            fault, self._fault = self._fault, ""
        self.has_met_the_fault |= bool(fault)
        if fault == "killed before":
            raise Dead
        if fault in ("twice", "late"):
            self.late = tuple(sorted((*self.late, uid)))
        is_taken = slot in self.slots
        if fault not in ("lost", "late") and not is_taken:
            self.slots[slot] = uid
        if fault == "killed after":
            raise Dead
        if fault in ("applied", "lost", "late"):
            raise Refused("OutcomeUnknown")
        if is_taken and self.slots[slot] != uid:
            return self._keep(job._replace(pending=NONE)), False
        return self._stands(job, uid), True

    def _stands(self, job: Job, uid: Uid) -> Job:
        record, lacks_manifest = record_of(uid), False
        is_there = self._is_in_place(record)
        if is_there and self._manifest_is_gone(record):
            try:
                job, view = self._look(job)
                lacks_manifest = view.find(record.attempt) is not None
            except Refused:
                is_there = False
        job = self._keep(job._replace(pending=NONE, diverged=not is_there))
        if not is_there:
            raise Refused("LogDiverged")
        if lacks_manifest:
            with contextlib.suppress(Refused):
                self._take_back(job, record.attempt)
            raise Refused("LogDiverged")
        memory = job.memory
        if memory is None or record.slot > memory.end:
            memory = View(record.slot, uid)
        return self._keep(job._replace(memory=memory, known=uid))

    def _is_in_place(self, record: Rec) -> bool:
        """Whether the record that a job has appended stands on the one that it was made for."""
        before = self.slots.get(record.slot - 1, NONE)
        return before == record.previous and self.slots.get(record.slot) == uid_of(record)

    def _manifest_is_gone(self, record: Rec) -> bool:
        return record.kind == "COMMIT" and record.attempt not in self.manifests

    def _take_back(self, job: Job, attempt: Attempt | None) -> tuple[Job, Uid]:
        def build(view: View) -> Draft | None:
            entry = view.find(attempt)
            if entry is None or view.users_of(entry.attempt):
                return None
            return "RETIRE", view.epoch, attempt, tuple(e for e in view.live if e != entry)

        return self._append(job, build)

    def _settle(self, job: Job) -> tuple[Job, str]:
        if job.pending == NONE:
            return job, "nothing"
        record = record_of(job.pending)
        if self._manifest_is_gone(record) and record.slot not in self.slots:
            raise Refused("LogDiverged")
        job, landed = self._put(job, job.pending)
        if not landed and record.kind == "COMMIT" and job.epoch:
            assert record.attempt is not None
            job = self._keep(job._replace(leftovers=_with(job.leftovers, record.attempt)))
        return job, "landed" if landed else "lost"

    def _keep(self, job: Job) -> Job:
        self.jobs[job.name] = job
        return job

    def _checked(self, job: Job, view: View) -> int:
        """The epoch that a job writes under. Raises when it may not write."""
        if not job.epoch:
            return view.epoch
        if job.fenced or view.epoch > job.epoch:
            self._keep(self.jobs[job.name]._replace(fenced=True))
            raise Refused("Fenced")
        if view.epoch < job.epoch:
            raise Refused("LogDiverged")
        return job.epoch

    def _seen(self, job: Job) -> tuple[Job, View]:
        job, view = self._look(job)
        self._keep(job)
        self._checked(job, view)
        return self.jobs[job.name], view

    # --- what jobs do -----------------------------------------------------------------------------

    def do_claim(self, name: str) -> str:
        self.jobs.pop(name, None)
        job, view = self._look(Job(name))
        try:
            self._check_end(view)
            job, uid = self._append(job, lambda v: ("CLAIM", v.epoch + 1, None, v.live))
        except Refused:
            self.jobs.pop(name, None)  # no session came of it
            raise
        self._keep(job._replace(epoch=record_of(uid).epoch))
        return "done"

    def do_save(self, name: str) -> str:
        return self._save(name, ())

    def do_dedup(self, name: str) -> str:
        live = self.view().live
        return self._save(name, () if not live else (live[-1].attempt,))

    def do_stall(self, name: str) -> str:
        """As a save, up to the put of its COMMIT."""
        attempt = self._write_files(self.jobs[name])
        self._keep(self.jobs[name]._replace(stalled=(attempt, (), NONE)))
        try:
            self._commit(self.jobs[name], attempt, ())
        except Refused as refused:
            if str(refused) != "stalled":
                self._keep(self.jobs[name]._replace(stalled=None))
                self._give_up(name, attempt, str(refused))
            raise
        raise AssertionError("a stalled commit does not end")

    def do_resume(self, name: str) -> str:
        job = self.jobs[name]
        assert job.stalled is not None
        attempt, references, uid = job.stalled
        job = self._keep(job._replace(stalled=None))
        try:
            job, stands = self._put(job, uid)
            if not stands:
                self._commit(job, attempt, references)
        except Refused as refused:
            self._give_up(name, attempt, str(refused))
            raise
        self.acknowledged.add(attempt)
        return "done"

    def _save(self, name: str, references: tuple[Attempt, ...]) -> str:
        attempt = self._write_files(self.jobs[name])
        try:
            self._commit(self.jobs[name], attempt, references)
        except Refused as refused:
            self._give_up(name, attempt, str(refused))
            raise
        self.acknowledged.add(attempt)
        return "done"

    def _write_files(self, job: Job) -> Attempt:
        self.steps += 1
        attempt = (job.epoch, self.steps)
        self.data.add(attempt)
        if self._fault == "killed at manifest":
            self.has_met_the_fault = True
            raise Dead
        self.manifests.add(attempt)
        return attempt

    def _commit(self, job: Job, attempt: Attempt, references: tuple[Attempt, ...]) -> None:
        def build(view: View) -> Draft:
            epoch = self._checked(self.jobs[job.name], view)
            if any(view.find(one) is None for one in references):
                raise Refused("ReferenceRetired")
            entry = Entry(attempt, -1, False, references)
            return "COMMIT", epoch, attempt, (*view.live, entry)

        if job.fenced:
            raise Refused("Fenced")
        self._append(job, build)

    def _give_up(self, name: str, attempt: Attempt, error: str) -> None:
        if error != "OutcomeUnknown":
            job = self.jobs[name]
            self._keep(job._replace(leftovers=_with(job.leftovers, attempt)))

    def do_settle(self, name: str) -> str:
        pending = self.jobs[name].pending
        _, outcome = self._settle(self.jobs[name])
        attempt = None if pending == NONE else record_of(pending).attempt
        if outcome == "landed" and record_of(pending).kind == "COMMIT":
            assert attempt is not None
            self.acknowledged.add(attempt)
        return outcome

    def do_sweep(self, name: str) -> str:
        job, _ = self._settle(self.jobs[name])
        job, _ = self._seen(job)
        view = self.view()
        self._check_end(view)
        self._prove(job)
        needed = {one for entry in view.live for one in (entry.attempt, *entry.references)}
        left = {one for one in self.data | self.manifests if one[0] < job.epoch} - needed
        written = [one for one in left if one in self.manifests]
        # A dead save, or a checkpoint whose COMMIT was the newest record.
        since = max((entry.attempt[0] for entry in view.live[-1:]), default=0)
        named = {
            record_of(uid).attempt for slot, uid in self.slots.items() if slot >= view.end - 16
        }
        doubtful = [one for one in written if one[0] >= since and one not in named]
        stay = {*self._lost(written), *doubtful}
        for attempt in sorted(left - stay, key=lambda one: one[1]):
            self._delete(attempt)
        return "done"

    def do_sweep_failed(self, name: str) -> str:
        job = self.jobs[name]
        if not job.leftovers:
            return "done"
        job, _ = self._settle(job)
        job, view = self._seen(job)
        left = tuple(one for one in job.leftovers if view.find(one) is None)
        self._keep(job._replace(leftovers=left))
        for attempt in left:
            self._delete(attempt)
            rest = tuple(one for one in self.jobs[name].leftovers if one != attempt)
            self._keep(self.jobs[name]._replace(leftovers=rest))
        return "done"

    def do_take_back(self, name: str) -> str:
        job, _ = self._settle(self.jobs[name])
        job, view = self._seen(job)
        if not view.live or view.live[-1].attempt in self.manifests | self.data:
            return "nothing"
        _, uid = self._take_back(job, view.live[-1].attempt)
        return "nothing" if uid == NONE else "done"

    def do_retire(self, name: str) -> str:
        """The oldest checkpoint."""
        return self._retire(self._opened(name), self.view().live[0].attempt)

    def do_prune(self, name: str) -> str:
        """All but the latest, and what is pinned, needed, or leased by a reader."""
        _, view = self._seen(self._opened(name))
        kept = {entry.attempt for entry in view.live if entry.pinned}
        kept |= {entry.attempt for entry in view.live[-1:]}
        for entry in reversed(view.live):
            if entry.attempt in kept:
                kept.update(entry.references)
        for entry in reversed(view.live):
            if entry.attempt not in kept and entry.attempt != self.leased:
                try:
                    self._retire(self.jobs[name], entry.attempt)
                except Refused as refused:
                    if str(refused) != "NotRetired":
                        raise
        return "done"

    def do_pin(self, name: str) -> str:
        return self._mark(name, True)

    def do_unpin(self, name: str) -> str:
        return self._mark(name, False)

    def _opened(self, name: str) -> Job:
        """A job that is there, or a command that begins."""
        if name != "command":
            return self.jobs[name]
        job, view = self._look(Job(name))
        self._check_end(view)
        if not view.epoch:
            raise Refused("NoCheckpoint")
        return self._keep(job)

    def _mark(self, name: str, pinned: bool) -> str:
        attempt = self.view().live[0].attempt

        def build(view: View) -> Draft | None:
            entry = view.find(attempt)
            if entry is None:
                raise Refused("NoCheckpoint")
            if entry.pinned == pinned:
                return None
            epoch = self._checked(self.jobs[name], view)
            live = tuple(e._replace(pinned=pinned) if e == entry else e for e in view.live)
            return "PIN" if pinned else "UNPIN", epoch, attempt, live

        job = self._opened(name)
        if job.fenced:
            raise Refused("Fenced")
        return "nothing" if self._append(job, build)[1] == NONE else "done"

    def _retire(self, job: Job, attempt: Attempt) -> str:
        def build(view: View) -> Draft | None:
            entry = view.find(attempt)
            if entry is None:
                return None
            if entry.pinned or view.users_of(attempt) or len(view.live) == 1:
                raise Refused("NotRetired")
            live = tuple(e for e in view.live if e != entry)
            return "RETIRE", self._checked(self.jobs[job.name], view), attempt, live

        job, view = self._look(job)
        victim = view.find(attempt)
        self._keep(job)
        if job.fenced:
            raise Refused("Fenced")
        job, uid = self._append(job, build)
        if uid == NONE:
            return "nothing"
        if victim is not None:
            job, view = self._seen(job)
            self._prove(job)
            if view.find(attempt) is not None or view.users_of(attempt):
                raise Refused("NotRetired")
            self._delete(attempt)
        return "done"

    def _delete(self, attempt: Attempt) -> None:
        for files in (self.manifests, self.data):
            if attempt not in files:
                continue
            if self._fault == "deleted 0":
                self.has_met_the_fault = True
                raise Dead
            if self._fault.startswith("deleted"):
                self._fault = f"deleted {int(self._fault.split()[1]) - 1}"
            files.remove(attempt)

    # --- what happens to the root -----------------------------------------------------------------

    def do_arrive(self, which: str) -> str:
        uid = self.late[int(which)]
        self.late = tuple(one for index, one in enumerate(self.late) if index != int(which))
        self.slots.setdefault(record_of(uid).slot, uid)
        return "done"

    def do_lease(self, _: str) -> str:
        self.leased = self.view().live[0].attempt
        return "done"

    def do_back_up(self, _: str) -> str:
        self.backup = self._root()
        return "done"

    def do_restore(self, _: str) -> str:
        assert self.backup is not None
        self._become(self.backup)
        return "done"

    def do_go_on_elsewhere(self, _: str) -> str:
        """The backup is a copy in which another job claims and saves."""
        assert self.backup is not None
        here, jobs, late = self._root(), self.jobs, self.late
        self._become(self.backup)
        self.jobs, self.late = {}, ()
        outcomes = self.do_claim("elsewhere"), self.do_save("elsewhere")
        assert outcomes == ("done", "done")
        self.backup = self._root()
        self._become(here)
        self.jobs, self.late = jobs, late
        return "done"

    def do_copy_over(self, _: str) -> str:
        """The backup is copied over what is there; nothing is removed."""
        assert self.backup is not None
        self.exchanges += 1
        self.slots = {**self.slots, **dict(self.backup.slots)}
        self.manifests |= self.backup.manifests
        self.data |= self.backup.data
        self.leased = self.leased or self.backup.leased
        # What the other log has overwritten is lost by that; nobody can know of it.
        listed = {e.attempt for uid in self.slots.values() for e in record_of(uid).live}
        self.acknowledged = (self.acknowledged | self.backup.acknowledged) & listed
        return "done"

    def _root(self) -> Root:
        files = frozenset(self.manifests), frozenset(self.data), frozenset(self.acknowledged)
        return Root(tuple(sorted(self.slots.items())), *files, self.leased)

    def _become(self, root: Root) -> None:
        self.exchanges += 1
        self.slots, self.manifests = dict(root.slots), set(root.manifests)
        self.data, self.acknowledged = set(root.data), set(root.acknowledged)
        self.leased = root.leased


def _with(names: tuple[Attempt, ...], name: Attempt) -> tuple[Attempt, ...]:
    return names if name in names else (*names, name)


def broken_promises(model: Model) -> list[str]:
    """What the world of a model must never be."""
    retired = {record_of(uid).attempt for uid in model.slots.values() if _is_retire(uid)}
    try:
        view = model.view()
        model._check_end(view)
    except Refused:
        # Nobody writes before `ckpt mend`, which brings back what is whole.
        lost = model.acknowledged - retired - (model.manifests & model.data)
        return [f"{one} was acknowledged and cannot be brought back" for one in sorted(lost)]
    problems = [
        f"{one} is needed by {entry.attempt} and not live"
        for entry in view.live
        for one in entry.references
        if view.find(one) is None
    ]
    lost = model.acknowledged - retired - {entry.attempt for entry in view.live}
    problems += [f"{one} was acknowledged and is not listed" for one in sorted(lost)]
    torn = {e.attempt for e in view.live if e.attempt in model.acknowledged}
    torn -= model.manifests & model.data
    return problems + [f"{one} was acknowledged and its files are gone" for one in sorted(torn)]


def _is_retire(uid: Uid) -> bool:
    return record_of(uid).kind == "RETIRE"
