"""Random schedules of kills over simulated hosts: jobs that save near states, and what comes back.

    python -m tests.near.schedules SEED:NUMBER [copies | parity]

A schedule is a list of starts of one or two jobs and of things that happen to hosts between them.
Each start restores, trains and saves with the real code, until its fault strikes. What it restores
is judged by `evidence`, from the folders of its hosts, and by what was acknowledged before. The
state of a step is a function of the step.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from ckpt.commit.locate import resumable
from ckpt.commit.log import Log, read_format
from ckpt.commit.session import SessionRegistry
from ckpt.errors import CheckpointError, NoCheckpoint
from ckpt.near.value import Near
from ckpt.service.events import NearSaved, SaveEvent
from ckpt.service.policies import EverySteps
from ckpt.service.restore import RestoreReport, restore_latest
from ckpt.service.target import Target
from ckpt.service.tiers import Tiers
from ckpt.service.training import Training
from ckpt.world.base import World
from storage import StorageError
from storage.memory import MemoryStore
from storage.testing import Killed
from tests.e2e.job import Sharded
from tests.near.evidence import Hosts, Promise, rebuilds
from tests.near.machines import (
    KILLS,
    DurableStore,
    Fault,
    HostOs,
    HostServer,
    Kind,
    Machines,
    Processes,
)
from tests.service.chaos import ThreadTarget
from tests.thread_ranks import RankKilled, RanksFailed, run_ranks

HOSTS = 8
OPERATIONS_MAX = 90  # of one rank in one start; most have fewer
EXPECTED = (Killed, RankKilled, CheckpointError, StorageError)
DEADLINE_SECONDS = 120.0  # machines may stand still; the dead are noticed at once


class Start(NamedTuple):
    """One start of a job: `hosts[rank]`, how long it trains, and what befalls it.

    `meanwhile` is started during a pause. `goes_back` to an older durable checkpoint at its end.
    """

    job: int
    hosts: tuple[int, ...]
    steps: int
    near_every: int
    save_every: int
    fault: Fault = Fault()
    goes_back: bool = False
    meanwhile: tuple[Start, ...] = ()
    replicas: int = 0
    parity: int = 0


class Incident(NamedTuple):
    """Something that happens to a host while nothing runs there."""

    kind: str  # lost, damaged, copied, back
    host: int


class Schedule(NamedTuple):
    """What happens, in this order. `in_memory`: tiers are files that processes map."""

    seed: str
    in_memory: bool
    events: tuple[Start | Incident, ...]


# Making one ---------------------------------------------------------------------------------------


def schedule_of(
    seed: str, *, starts_max: int = 3, has_copies: bool = False, has_parity: bool = False
) -> Schedule:
    """The schedule of a seed; with `has_copies`, of jobs that keep them as far as they can, with
    `has_parity`, parity on three hosts or more.
    """
    rng = random.Random(seed)
    ranks_max = 5 if has_parity else 4 if has_copies else 3
    jobs = rng.choice((1, 1, 1, 2))
    hosts_of: dict[int, tuple[int, ...]] = {}
    events: list[Start | Incident] = []
    for _ in range(rng.randint(2, starts_max)):
        job = rng.randrange(jobs)
        events.append(_start(rng, job, hosts_of, ranks_max))
        events += _incidents(rng, events[-1])
    for job in range(jobs):
        # Whatever was left: each job is started once more, and nothing happens to it.
        last = _start(rng, job, hosts_of, ranks_max)
        events.append(last._replace(fault=Fault(), steps=0, goes_back=False, meanwhile=()))
    in_memory = rng.random() < 0.6
    if has_copies or has_parity:
        events = [_with_copies(rng, event, has_parity) for event in events]
    return Schedule(seed, in_memory, tuple(events))


def _with_copies(rng: random.Random, event: Start | Incident, has_parity: bool) -> Start | Incident:
    if isinstance(event, Incident):
        return event
    successors = [_with_copies(rng, one, has_parity) for one in event.meanwhile]
    meanwhile = tuple(one for one in successors if isinstance(one, Start))
    if has_parity and (count := len(set(event.hosts))) > 2:
        return event._replace(parity=rng.randint(2, count - 1), meanwhile=meanwhile)
    replicas = min(rng.choice((1, 1, 2)), len(set(event.hosts)) - 1)
    return event._replace(replicas=replicas, meanwhile=meanwhile)


def _start(
    rng: random.Random, job: int, hosts_of: dict[int, tuple[int, ...]], ranks_max: int
) -> Start:
    hosts = _hosts(rng, hosts_of.get(job, ()), ranks_max)
    hosts_of[job] = hosts
    kinds: list[Kind] = ["none", "rank", "rank", "host", "host", "all", "all", "all"]
    kinds += ["pause", "pause", "full", "error"]
    kind = rng.choice(kinds)
    rank = rng.randrange(len(hosts))
    nth = rng.randint(1, OPERATIONS_MAX)
    start = Start(
        job,
        hosts,
        steps=rng.randint(2, 6),
        near_every=rng.choice((1, 1, 2)),
        save_every=rng.choice((2, 3, 5, 100)),
        fault=Fault(kind, rank, nth, rng.random() < 0.5),
        goes_back=rng.random() < 0.08,
    )
    if kind != "pause":
        return start
    # The same job again, which takes this one for dead; sometimes another one on these hosts.
    other = {job: hosts if rng.random() < 0.7 else _hosts(rng, hosts, ranks_max)}
    successor = _start(rng, job, other, ranks_max)
    fault = successor.fault if successor.fault.kind in KILLS else Fault()
    return start._replace(meanwhile=(successor._replace(fault=fault, meanwhile=()),))


def _hosts(rng: random.Random, before: tuple[int, ...], ranks_max: int) -> tuple[int, ...]:
    """Mostly those before; fewer, more, or in another order; sometimes any."""
    size = rng.randint(1, ranks_max)
    match rng.randrange(8 if before else 1):
        case 0:
            some = rng.sample(range(HOSTS), rng.randint(1, size))
            return tuple(rng.choice(some) for _ in range(size))
        case 1:
            return tuple(rng.sample(before, len(before)))
        case 2:
            return (*before, rng.randrange(HOSTS))[-ranks_max:]
        case 3:
            return tuple(dict.fromkeys(before))
        case _:
            return before


def _incidents(rng: random.Random, start: Start | Incident) -> Iterator[Incident]:
    assert isinstance(start, Start)
    if start.fault.kind == "host" and rng.random() < 0.5:
        yield Incident("lost", start.hosts[start.fault.rank])
    for kind, share in (("copied", 0.3), ("lost", 0.08), ("damaged", 0.2), ("back", 0.15)):
        if rng.random() < share:
            yield Incident(kind, rng.choice((*start.hosts, rng.randrange(HOSTS))))


# Running one --------------------------------------------------------------------------------------


class Violation(AssertionError):
    """A promise was broken."""


@dataclass
class Job:
    """One training: its durable root, and what it was promised."""

    number: int
    store: MemoryStore = field(default_factory=MemoryStore)
    durable: set[str] = field(default_factory=set)
    near: Promise | None = None


class Expected(NamedTuple):
    """What a start restores: one of `these`, as origin and attempt; none when that is empty. All
    but the oldest are damaged. With `is_refused` nothing is certain to be whole although hosts have
    records: a job must not begin anew as if nothing had been there.
    """

    these: frozenset[tuple[str, str]]
    is_refused: bool = False


class NothingWhole(Exception):
    """Nothing that there is can be restored, and the job says so."""


class Run:
    """One run of a schedule below `top`. `counts` says what happened in it."""

    def __init__(self, schedule: Schedule, top: Path) -> None:
        self.schedule = schedule
        self.machines = Machines(top)
        self.hosts = Hosts(top)
        self.jobs: dict[int, Job] = {}
        self.counts: Counter[str] = Counter()
        self.trace: list[str] = []
        self.problems: list[Exception] = []

    def go(self) -> None:
        """Raises Violation, with the schedule and what happened until then."""
        try:
            with self._patched():
                for event in self.schedule.events:
                    self.trace.append(str(event))
                    if isinstance(event, Start):
                        self._run(event)
                    else:
                        self._happen(event)
        except Exception as error:
            starts = [event for event in self.schedule.events if isinstance(event, Start)]
            has_copies = any(start.replicas for start in starts)
            kind = " copies" * has_copies
            if any(start.parity for start in starts):
                kind = " parity"
            happened = "\n  ".join(self.trace)
            raise Violation(
                f"schedule {self.schedule.seed} (in_memory={self.schedule.in_memory}): {error!r}\n"
                f"replay: python -m tests.near.schedules {self.schedule.seed}"
                f"{kind}\n  {happened}"
            ) from error

    @contextmanager
    def _patched(self) -> Iterator[None]:
        in_memory = self.schedule.in_memory
        with (
            patch("ckpt.near.tier.LocalStore", self.machines.store),
            patch("ckpt.near.tier.is_in_memory", lambda path: in_memory),
            patch("ckpt.near.memory.os", HostOs(self.machines)),
            patch("ckpt.near.peers.PeerServer", HostServer),
            patch("ckpt.near.peers.PEER_SECONDS", 5.0),
        ):
            yield

    def _happen(self, incident: Incident) -> None:
        host, promises = incident.host, [j for j in self.jobs.values() if j.near is not None]
        match incident.kind:
            case "lost":
                self.hosts.lose(host)
            case "copied":
                self.hosts.keep_copy(host)
            case "back" if not self.hosts.come_back(host):
                return
            case "damaged":
                rng = random.Random(f"{self.schedule.seed}:{len(self.trace)}")
                damage = self.hosts.damage(host, rng)
                if damage is None:
                    return
                folder, rank = damage
                self.trace.append(f"    {folder} rank {rank} of host {host}")
                for job in promises:
                    assert job.near is not None
                    if rank is None and folder.endswith(job.near.attempt):
                        job.near = job.near.without_parity(host)
                    elif rank is None:
                        job.near = job.near.without_record(host)
                    elif folder.endswith(job.near.attempt):
                        job.near = job.near.without(host, rank)
        if incident.kind in ("lost", "back"):
            for job in promises:
                assert job.near is not None
                job.near = job.near.without(host).without_record(host)
        self.counts[incident.kind] += 1

    def _run(self, start: Start) -> None:
        job = self.jobs.setdefault(start.job, Job(start.job))
        expected = self._expected(job, start)
        processes = Processes(start.hosts, start.fault, lambda: self._meanwhile(start))
        life = _Life(self, job, start, processes, self.machines.start(processes), expected)
        try:
            run_ranks(len(start.hosts), life.rank_main, deadline_seconds=DEADLINE_SECONDS)
        except RanksFailed as failed:
            for error in failed.errors.values():
                if isinstance(error, NothingWhole):
                    self.counts["nothing whole"] += 1
                elif not isinstance(error, EXPECTED) or not processes.struck:
                    raise error from None
        if self.problems:
            raise self.problems[0]
        kind = start.fault.kind if processes.struck else "none"
        self.counts[f"fault {kind}"] += 1
        self.trace.append(f"    {kind} of {len(processes.operations)} operations")

    def _meanwhile(self, start: Start) -> None:
        for successor in start.meanwhile:
            self.trace.append(f"  meanwhile {successor}")
            self._run(successor)

    # what has to come back

    def _expected(self, job: Job, start: Start) -> Expected:
        try:
            root = read_format(job.store)
        except NoCheckpoint:
            return Expected(frozenset())
        log = Log(job.store).state()
        lacking = job.durable - {entry.attempt for entry in log.live}
        if lacking:
            raise Violation(f"acknowledged, and not in the log: {lacking}")
        proofs = self.hosts.proofs(root, log.epoch, start.hosts)
        self._check_promise(job, start, log.epoch, proofs)
        durable = resumable(log.live)
        these: set[tuple[str, str]] = set()
        for proof in proofs:
            newest = durable[0] if durable else None
            if newest and newest.slot > proof.after_slot and newest.step > proof.step:
                break
            these.add(("near", proof.attempt))
            if not proof.is_damaged:
                self.counts["only parity has all of it"] += not all(proof.homes)
                return Expected(frozenset(these))
        if durable:
            these.add(("durable", durable[0].attempt))
        is_refused = not durable and self.hosts.has_records(root, log.epoch, start.hosts)
        return Expected(frozenset(these), is_refused)

    def _check_promise(self, job: Job, start: Start, epoch: int, proofs: list[Any]) -> None:
        near = job.near
        if near is None or not near.is_due(start.hosts):
            return
        if near.epoch != epoch:
            self.counts["epoch claimed without a near record"] += 1
            return
        self.counts["promise due"] += 1
        self.counts["promise due although files are lost"] += near.has_lost
        kept = [p for p in proofs if not p.is_damaged and p.order >= (near.epoch, near.number)]
        if not kept:
            raise Violation(f"was acknowledged, and nothing newer is there: {near}")


class _Life:
    """One start, as its ranks see it."""

    def __init__(
        self,
        run: Run,
        job: Job,
        start: Start,
        processes: Processes,
        paths: list[Path],
        expected: Expected,
    ) -> None:
        self._run = run
        self._job = job
        self._start = start
        self._processes = processes
        self._paths = paths
        self._expected = expected
        self._registry = SessionRegistry()
        self._worlds: dict[int, World] = {}
        processes.has_died = lambda rank: self._worlds[rank].close()

    def rank_main(self, world: World) -> None:
        self._worlds[world.rank] = world
        store = DurableStore(self._job.store, self._processes, world.rank)
        target = ThreadTarget(world, store, self._registry)
        state = state_at(self._job.number, 0, world.rank, world.size)
        near = Near(
            self._paths[world.rank],
            every=EverySteps(self._start.near_every),
            replicas=self._start.replicas,
            parity=self._start.parity,
        )
        seen = partial(self._saw, target)
        training = Training(target, state, target.world(), (seen,) if world.rank == 0 else ())
        own = Tiers([near], EverySteps(self._start.save_every), training, {})
        try:
            self._train(training, own)
            if self._start.fault.kind in KILLS and not self._processes.struck:
                self._processes.die(everyone=True)
        finally:
            with suppress(*EXPECTED):
                own.close()

    def _train(self, training: Training, near: Tiers) -> None:
        progress, start = training.progress, self._start
        report = self._restore(training, near)
        progress.resume(report.step if report else 0)
        for step in range(progress.step + 1, progress.step + 1 + start.steps):
            advance(training.state, self._job.number, step, training.world)
            progress.advance(step)
            near.stepped()
            if step % start.save_every == 0:
                self._save(training)
        if start.goes_back:
            near.collect(wait=True)
            self._go_back(training, near)
        near.collect(wait=True)

    def _restore(self, training: Training, near: Tiers) -> RestoreReport | None:
        rank = training.world.rank
        try:
            report = restore_latest(training.state, training.target, training.world, tiers=near)
        except NoCheckpoint:
            if self._expected.is_refused:
                raise NothingWhole from None
            raise
        self._check(report, training)
        # After a pause, others may have replaced what was read before it.
        is_near = report is not None and report.origin == "near"
        if report is not None and is_near and rank == 0 and not self._processes.struck:
            self._promise(training.target, report.attempt, is_restored=True)
        return report

    def _check(self, report: RestoreReport | None, training: Training) -> None:
        """A fault that has struck by now may be why it is an older one, but no wrong one."""
        step, rank, size = report.step if report else 0, training.world.rank, training.world.size
        wanted = state_at(self._job.number, step, rank, size)
        for name in ("rows", "runs"):
            if not torch.equal(training.state[name].local, wanted[name].local):
                raise Violation(f"wrong bytes in {name} of rank {rank}: {report}")
        if training.state["step"] != step:
            raise Violation(f"step {training.state['step']} came back: {report}")
        these = self._expected.these
        restored = (report.origin, report.attempt) if report else None
        if not self._processes.struck and restored not in (these or {None}):
            raise Violation(f"restored {restored}, expected one of {sorted(these)}: {report}")
        self._run.counts[f"restored {report.origin if report else 'nothing'}"] += rank == 0

    def _save(self, training: Training) -> None:
        pending = training.target.start(training.state, step=training.progress.step, metric=None)
        self._job.durable.add(pending.result().attempt)

    def _go_back(self, training: Training, near: Tiers) -> None:
        live = Log(self._job.store).state().live
        if not live:
            return
        self._job.near = None
        chosen = live[len(live) // 2]
        restore_latest(
            training.state,
            training.target,
            training.world,
            step=chosen.step,
            attempt=chosen.attempt,
            tiers=near,
        )
        training.progress.resume(chosen.step)
        self._run.counts["went back"] += training.world.rank == 0

    def _saw(self, target: ThreadTarget, event: SaveEvent) -> None:
        if isinstance(event, NearSaved):
            self._run.counts["near saved"] += 1
            try:
                start = self._start
                how = {"replicas": start.replicas, "has_parity": bool(start.parity)}
                self._promise(target, event.report.attempt, **how)
            except Exception as error:  # what an observer raises is logged and goes no further
                self._run.problems.append(error)

    def _promise(
        self,
        target: Target,
        attempt: str,
        *,
        replicas: int = 0,
        has_parity: bool = False,
        is_restored: bool = False,
    ) -> None:
        """This near checkpoint was acknowledged: it is whole, with all its copies, and every host
        has its record.
        """
        job = self._job
        state = Log(job.store).state()
        root, hosts = read_format(job.store), self._start.hosts
        proofs = self._run.hosts.proofs(root, state.epoch, hosts)
        proof = next((one for one in proofs if one.attempt == attempt), None)
        if target.ranked_session().epoch != state.epoch:
            return  # fenced, and about to learn it
        if proof is None or proof.recorded != {*hosts}:
            raise Violation(f"{attempt} was acknowledged, and the hosts have {proof}")
        if is_restored and proof.is_damaged:
            return  # its bytes were compared: what was damaged is not needed, and proves no more
        made = [rebuilds(proof.groups, rank, hosts) for rank in range(len(proof.homes))]
        if any(len(h) <= replicas and not m for h, m in zip(proof.homes, made, strict=True)) or (
            has_parity and not all(made)
        ):
            raise Violation(f"{attempt} was acknowledged, and lacks copies: {proof}")
        if job.near is None or (job.near.epoch, job.near.number) < proof.order:
            where = (proof.homes, proof.recorded)
            job.near = Promise(*proof.order, attempt, *where, groups=proof.groups)


@cache
def _full(job: int, step: int) -> torch.Tensor:
    return torch.arange(24, dtype=torch.float32).reshape(12, 2) + 100 * step + 100_000 * job


def state_at(job: int, step: int, rank: int, size: int) -> dict[str, Any]:
    """What a rank has at a step: sharded rows and sharded runs."""
    full = _full(job, step)
    rows, runs = Sharded(full, rank, size), Sharded(-full, rank, size, dim=None)
    return {"rows": rows, "runs": runs, "step": step}


def advance(state: dict[str, Any], job: int, step: int, world: World) -> None:
    """Have the state be that of `step`, in place, as a training does."""
    newer = state_at(job, step, world.rank, world.size)
    for name in ("rows", "runs"):
        state[name].local.data.copy_(newer[name].local.data)
    state["step"] = step


def run_schedule(schedule: Schedule) -> Counter[str]:
    """What happened. Raises Violation."""
    # In memory where there is such a directory: nothing here is to survive.
    shared = Path("/dev/shm")
    top = tempfile.mkdtemp(prefix="near-", dir=shared if shared.is_dir() else None)
    try:
        run = Run(schedule, Path(top))
        run.go()
        return run.counts
    finally:
        shutil.rmtree(top, ignore_errors=True)


if __name__ == "__main__":
    has = {f"has_{name}": name in sys.argv for name in ("copies", "parity")}
    print(run_schedule(schedule_of(sys.argv[1], **has)))
