"""What near tiers promise beside the log, as a model in plain data that knows nothing of `ckpt`.

One host with a tier, one durable root, and jobs of one rank. A job that starts takes the newest
state: the newest near one of the root's newest epoch, unless a durable checkpoint was committed
after that line of the training began and has a higher step. A near state of an older epoch is
nobody's. Every state has a number of its own, so that each can be told from all others.
"""

from __future__ import annotations

from typing import NamedTuple

NOTHING = ("nothing", 0, 0)


class State(NamedTuple):
    """What a job trains from: `step`, and which of all states that were ever saved."""

    step: int = 0
    number: int = 0


class Near(NamedTuple):
    """The newest near state of an epoch; `after_slot` is where its line of the training began."""

    state: State
    after_slot: int


class Commit(NamedTuple):
    slot: int
    state: State


class Job(NamedTuple):
    """`epoch` is 0 before it has claimed the root; `after_slot` is None before its first near save
    is prepared. `is_notified`: it knows that it was superseded.
    """

    state: State
    epoch: int = 0
    after_slot: int | None = None
    is_notified: bool = False


class Action(NamedTuple):
    name: str  # start, near, durable, back, lose
    job: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.job}".strip()


class Root(NamedTuple):
    """One world. Tuples alone, so that worlds can be compared."""

    epoch: int = 0
    slots: int = 0  # of the log
    commits: tuple[Commit, ...] = ()
    near: tuple[tuple[int, Near], ...] = ()  # by epoch
    jobs: tuple[tuple[str, Job], ...] = ()
    saved: int = 0  # how many states there ever were

    def job(self, name: str) -> Job | None:
        return dict(self.jobs).get(name)

    def newest(self) -> tuple[str, int, int]:
        """What a job that starts restores: where from, the step, and which state."""
        near = dict(self.near).get(self.epoch)
        durable = self.commits[-1] if self.commits else None
        if near is not None and not _is_before(near, durable):
            return ("near", *near.state)
        return NOTHING if durable is None else ("durable", *durable.state)

    def with_job(self, name: str, job: Job | None) -> Root:
        jobs = {key: value for key, value in self.jobs if key != name}
        if job is not None:
            jobs[name] = job
        return self._replace(jobs=tuple(sorted(jobs.items())))

    def with_near(self, epoch: int, near: Near) -> Root:
        kept = {key: value for key, value in self.near if key != epoch}
        return self._replace(near=tuple(sorted({**kept, epoch: near}.items())))


def _is_before(near: Near, durable: Commit | None) -> bool:
    if durable is None:
        return False
    return durable.slot > near.after_slot and durable.state.step > near.state.step


def possible(root: Root) -> list[Action]:
    """What may happen next."""
    actions = []
    for name in "AB" if root.slots or root.jobs else "A":
        actions.append(Action("start", name))
        if root.job(name) is not None:
            actions += [Action("near", name), Action("durable", name)]
            if root.commits:
                actions.append(Action("back", name))
    return [*actions, Action("lose")] if root.near else actions


def after(root: Root, action: Action) -> tuple[Root, str]:
    """The world then, and what the job is told."""
    name = action.job
    if action.name == "lose":  # the host is exchanged, with all that runs there
        return root._replace(near=(), jobs=()), "done"
    if action.name == "start":
        return _started(root, name)
    job = root.job(name)
    assert job is not None
    if action.name == "back":
        return _gone_back(root, name, job)
    root, job = _claimed(root, job)
    if action.name == "near":
        return _near_saved(root, name, job)
    job = job._replace(state=State(job.state.step, root.saved + 1))
    root = root._replace(saved=root.saved + 1)
    if root.epoch > job.epoch:
        return root.with_job(name, job), "Fenced"
    root = root._replace(
        slots=root.slots + 1, commits=(*root.commits, Commit(root.slots, job.state))
    )
    return root.with_job(name, job), "done"


def _started(root: Root, name: str) -> tuple[Root, str]:
    origin, step, number = newest = root.newest()
    job = Job(State(step, number))
    if origin == "near":  # what was restored is recorded under the epoch of this job
        before = dict(root.near)[root.epoch]
        root, job = _claimed(root, job)
        job = job._replace(after_slot=root.slots - 1)
        root = root.with_near(job.epoch, Near(before.state, root.slots - 1))
        root = root._replace(near=tuple(one for one in root.near if one[0] == job.epoch))
    return root.with_job(name, job), " ".join(map(str, newest))


def _claimed(root: Root, job: Job) -> tuple[Root, Job]:
    if job.epoch:
        return root, job
    root = root._replace(epoch=root.epoch + 1, slots=root.slots + 1)
    return root, job._replace(epoch=root.epoch)


def _near_saved(root: Root, name: str, job: Job) -> tuple[Root, str]:
    if job.after_slot is None:
        if root.epoch > job.epoch:
            return root.with_job(name, None), "Fenced"
        # Of jobs before, nothing stays.
        job = job._replace(after_slot=root.slots - 1)
        root = root._replace(near=())
    job = job._replace(state=State(job.state.step + 1, root.saved + 1))
    root = root._replace(saved=root.saved + 1)
    if job.is_notified or any(epoch > job.epoch for epoch, _ in root.near):
        return root.with_job(name, job._replace(is_notified=True)), "Fenced"
    assert job.after_slot is not None
    return root.with_near(job.epoch, Near(job.state, job.after_slot)).with_job(name, job), "done"


def _gone_back(root: Root, name: str, job: Job) -> tuple[Root, str]:
    """To the oldest checkpoint, on purpose."""
    job = job._replace(state=root.commits[0].state)
    if job.after_slot is not None:
        if root.epoch > job.epoch:
            return root.with_job(name, None), "Fenced"
        job = job._replace(after_slot=root.slots - 1)
        root = root._replace(near=tuple(one for one in root.near if one[0] > job.epoch))
    return root.with_job(name, job), "done"
