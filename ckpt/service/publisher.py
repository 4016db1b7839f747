"""Publish the weights of a training for those who follow it: `ckpt.publish`, and publications of a
Checkpointer, with a world and a worker of their own, so that no save waits for them.

compare with the bits published last -> delta -> commit -> (anchor -> commit) -> retire old chains

What is new is published as a delta, all of it as an anchor where one is due. A delta is a
checkpoint of no line that needs the publication before it, by the log's own references: nothing
retires a base under a live delta. An anchor is a checkpoint in a line like any other. Where both
have one state, followers take the delta, and the next delta needs the anchor.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import Parameter, signature
from itertools import compress
from operator import not_
from typing import Any, NamedTuple, SupportsIndex
from zlib import crc32

import torch
import torch.distributed as dist

from ckpt.api import Io, check_order, line_of, write_path
from ckpt.commit.appender import BACKGROUND_SECONDS, checked_seconds
from ckpt.commit.leases import leases_of
from ckpt.commit.locate import ResumePoint, read_manifest
from ckpt.commit.names import PUBLISHED, checked_count, plain_int
from ckpt.commit.session import ReferenceRetired
from ckpt.commit.writer import NotRetired
from ckpt.errors import (
    CheckpointError,
    Failure,
    Fenced,
    InvalidArgument,
    OutcomeUnknown,
    RankFailed,
)
from ckpt.format.delta import DeltaBlock, encode_delta
from ckpt.format.manifest_codec import decode_manifest
from ckpt.layout.memory import SideStreams, devices_of, gc_paused, storage_of
from ckpt.layout.plain import times_changed
from ckpt.process import GroupContext, this_process
from ckpt.saving.background import Background, PendingSave
from ckpt.saving.plan import contents_of
from ckpt.saving.published import Fresh, LivePart, Published, others_of, views_of
from ckpt.saving.save import save_task
from ckpt.saving.staging import LentCopy, changed_by_steps
from ckpt.saving.step_gate import Gate, seen_since, steps
from ckpt.saving.task import PartMemory, SaveOptions, SaveReport, SaveTask
from ckpt.service.policies import Observation, SavePolicy
from ckpt.service.restore import Restorable, TierRestorable
from ckpt.service.serving import Serving, place_of
from ckpt.service.target import Target, UrlTarget
from ckpt.service.tiers import FAILURES_MAX, TierSaves, TierValue
from ckpt.service.training import Training
from ckpt.world.base import collectively
from storage import StorageError, Store, StoreLike
from storage.hidden import hides_secrets

logger = logging.getLogger(__name__)

DELTAS = "delta"  # what the state of a delta has: a tensor of bytes for each rank
ANCHORS_KEPT = 2  # with all that was published since the oldest of them
RETIRED_MAX = 2  # by one publication, which adds one

# By process, because a forked child inherits this dict, and none of the threads that serve.
_serving: dict[tuple[int, str, str], Serving] = {}  # by process, address and root


@hides_secrets
def publish(
    state: Any,
    url: StoreLike,
    *,
    step: SupportsIndex,
    line: str = PUBLISHED,
    dtype: torch.dtype | None = torch.bfloat16,
    anchor_every: SupportsIndex = 50,
    anchor_larger: float = 0.5,
    user: Mapping[str, str] | None = None,
    retry_seconds_max: float = BACKGROUND_SECONDS,
    serve: str = "",
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
    unsafe_single_writer: bool = False,
    io: Io = "auto",
) -> PendingSave:
    """Publish the weights of `state`, a model most often, for `ckpt.follow(..., line=line)`, in the
    background like `async_save`; `result()` of what it returns waits until it is durable.

    Floating-point tensors are cast to `dtype` (None: as they are). What differs to the bit from the
    publication before is saved as a delta, at the root of the line `<url>/lines/<line>`. All of it
    is saved as an anchor, a checkpoint like any other, at first, after a restart, where replicas
    differ, when other tensors or values that are no tensors are there, and behind a delta when
    there were `anchor_every` since the last one, or they have more than `anchor_larger` times its
    bytes. This process keeps the published bits where the tensors lie. Of older publications two
    anchors stay, what came since the older of them, and what a follower has leased.

    With `serve`, such as "0.0.0.0:29700", rank 0 serves the publications until the process ends to
    followers of `peer://HOST:PORT` that have the same SHARDPOINT_TOKEN.

    Collective like `async_save`, and the same holds for changes of the state meanwhile. `result`
    raises like that of `async_save`, and InvalidUrlError without the package zstandard.
    """
    # First of all, while the only locals are the arguments.
    given = locals()
    group = given.pop("process_group")
    return _publish(lambda: this_process.of_group(group), **given)


def _publish(
    context_of: Callable[[], GroupContext],
    *,
    state: Any,
    url: StoreLike,
    step: SupportsIndex,
    line: str,
    user: Mapping[str, str] | None,
    retry_seconds_max: float,
    serve: str,
    storage_options: Mapping[str, Any] | None,
    unsafe_single_writer: bool,
    io: Io,
    **how: Any,
) -> PendingSave:
    started = time.perf_counter()
    check_order(state, url, "publish(state, url)")
    dtype, due = _checked(line, **how)
    if serve:
        place_of(serve)
    url = line_of(url, line)
    with gc_paused():
        context = context_of()
        call = f"ckpt.publish(step={step})"
        root = context.known_root(url, storage_options, unsafe_single_writer)
        if root is None:
            # Whatever is there, an anchor begins a new line.
            world = context.world
            context.background.wait()
            opened = collectively(world, "open", lambda: context.store(url, storage_options))
            if serve:
                collectively(world, "serve", lambda: _serve(context, opened, serve, line))
            this_process.registry.restored(opened, ResumePoint("", False))
        store, session, memory = root or context.open_root(
            url, storage_options, unsafe_single_writer, call
        )
        path = write_path(io, store, context.staging)
        options = SaveOptions(path=path, user=dict(user or {}), publication=())
        seconds = checked_seconds(retry_seconds_max)
        task = SaveTask(session, store, memory, plain_int(step), options, retry_seconds_max=seconds)
        context.background.settle_before(task)
        if root is not None:
            context.world.begin_call(call)
        try:
            made = Publication.begin(state, task, dtype)
        except Exception as error:
            # Not raised: the other ranks may have begun, and hear of it as of any failed save.
            pending = context.background.refuse(task, error)
        else:
            pending = context.background.begin(task, made.gate, lambda: made.finish(due))
    pending.call_seconds = time.perf_counter() - started
    return pending


def _serve(context: GroupContext, store: Store, address: str, line: str) -> None:
    key = (os.getpid(), address, store.place)
    if context.world.rank == 0 and key not in _serving:
        _serving[key] = Serving(store, address, line)


def _checked(
    line: str, dtype: torch.dtype | None, anchor_every: SupportsIndex, anchor_larger: float
) -> tuple[torch.dtype | None, Due]:
    if not line:
        raise InvalidArgument('line="": publications need a line of their own')
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InvalidArgument(f"dtype={dtype!r}: expected a floating-point dtype, or None")
    return dtype, Due(checked_count(plain_int(anchor_every), "anchor_every"), float(anchor_larger))


class Due(NamedTuple):
    """When an anchor follows a delta: after `every` deltas, or when those since the last anchor
    have more than the share `larger` of its bytes.
    """

    every: int
    larger: float

    def is_now(self, published: Published) -> bool:
        """Whether the next anchor is due."""
        share = published.nbytes / max(published.anchor_nbytes, 1)
        return published.count >= self.every or share > self.larger


@dataclass
class Publication:
    """A state that is being published: what is new in it, or all of it, is taken now, or before the
    next step of an optimizer.

    `published` has what was published last, or for an anchor what this one takes.
    """

    state: Any
    task: SaveTask
    published: Published
    is_delta: bool
    later: Sequence[LivePart]
    gate: Gate
    reading: SideStreams
    versions: Sequence[int | None]
    blocks: list[DeltaBlock] = field(default_factory=list)
    fresh: list[Fresh] = field(default_factory=list)

    @classmethod
    def begin(cls, state: Any, task: SaveTask, dtype: torch.dtype | None) -> Publication:
        """Take what may change at any time; steps that change the rest are held back. Waits for no
        rank. Raises InvalidState and LoadInterrupted.
        """
        steps.watch()
        flat = contents_of(state, task.ranks, task.memory.plans).flat
        views, known = list(views_of(flat)), task.memory.published
        is_delta = known is not None and known.dtype is dtype and known.is_like(flat)
        if known is None or not is_delta:
            known = Published(dtype, others_of(flat))
        changes = changed_by_steps(flat, seen_since(task.memory.steps_seen))
        waits = [storage_of(view) in changes.storages for _, view in views]
        later = list(compress(views, waits))
        gate = Gate(changes.storages, changes.parameters)
        versions = [times_changed(view) for _, view in later]
        made = cls(state, task, known, is_delta, later, gate, SideStreams(()), versions)
        made._take(compress(views, map(not_, waits)))
        # Behind what was just queued: the worker's own stream knows nothing of it.
        made.reading = SideStreams(devices_of(view for _, view in views))
        # With nothing left to read, no step has to wait.
        if later:
            steps.hold(gate)
        else:
            gate.open()
        return made

    def _take(self, views: Iterable[LivePart]) -> None:
        if not self.is_delta:
            self.published.fill(views)
            return
        for block, fresh in self.published.difference(views, self.task.ranks):
            self.blocks += [block] if block is not None else []
            self.fresh.append(fresh)

    def finish(self, due: Due) -> SaveReport:
        """Take the rest and publish; collective. Returns how the delta was saved, or else the
        anchor. Raises like `save_task`; the next publication is then from the last one that is
        committed, or an anchor.
        """
        task, published, error, encoded = self.task, self.published, None, b""
        try:
            with self.reading.copying():
                self._take(self.later)
            if self.versions != [times_changed(view) for _, view in self.later]:
                raise CheckpointError(
                    "the state was changed by something else than a step of an optimizer while it "
                    "was published; call wait_staged() of what ckpt.publish returns before"
                )
            encoded = encode_delta(self.blocks)
        except Exception as caught:
            error = caught  # the other ranks wait
        self.gate.open()
        task.session.world.agree("begin", error)
        # A rank whose last publication failed, or that holds other things now, needs an anchor.
        mine = published.attempts[0] if self.is_delta else ""
        received = [*map(json.loads, task.session.world.gather("bases", self._base_and_sums(mine)))]
        sums: dict[str, int] = {}
        is_same = all(sums.setdefault(*one) == one[1] for _, own in received for one in own.items())
        if not is_same and task.session.world.rank == 0:
            logger.warning("step %d: replicas differ, so an anchor is published", task.step)
        report = None
        if {base for base, _ in received} == {mine} and mine and is_same:
            report = self._save_delta(encoded)
        with self.reading.copying():
            # Whatever is published next, delta or anchor: these bits are in it.
            published.take(self.fresh)
        if report is None or due.is_now(published):
            same = () if report is None else (report.attempt,)
            # Until the anchor is committed: a failure leaves the next publication to begin anew.
            task.memory.published = None
            options = replace(task.options, publication=same)
            own = replace(task, options=options, contents=published.contents)
            anchor = save_task(self.state, own)
            published.attempts, published.anchor_nbytes = (anchor.attempt, *same), anchor.nbytes
            published.count = published.nbytes = 0
            report = report or anchor
        task.memory.published = published
        if task.session.session is not None:
            _retire_old(task)
        return report

    def _base_and_sums(self, base: str) -> bytes:
        """The base of the delta, and a checksum for each group of ranks that hold the same."""
        sums = Counter[str]()
        for one in self.fresh:
            if one.group:
                change = one.key, self.published.digests[one.key], one.after
                sums[str(one.group)] += crc32(repr(change).encode())
        return json.dumps([base, sums]).encode()

    def _save_delta(self, encoded: bytes) -> SaveReport | None:
        """None where the publication that it is from was retired meanwhile."""
        task, published = self.task, self.published
        blob = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        attempts = published.attempts
        options = replace(task.options, in_line=False, publication=attempts, telemetry=False)
        task.memory.published = None  # until it is known what was published
        try:
            # Of its own: names and plans of a delta must not replace those of the state.
            own = replace(task, options=options, memory=PartMemory())
            report = save_task({DELTAS: {f"{task.session.world.rank:05d}": blob}}, own)
        except ReferenceRetired:
            return None
        except OutcomeUnknown:
            raise
        except Exception:
            task.memory.published = published
            raise
        published.attempts = (report.attempt,)
        published.count += 1
        published.nbytes += report.nbytes
        return report


def _retire_old(task: SaveTask) -> None:
    """Retire what was published before the oldest anchor that is kept, newest first: nothing that
    is left needs it. Failures are logged; they cost space, and the next publication tries again.
    """
    session = task.session.session
    assert session is not None
    try:
        live = session.state().live
        anchors = [entry for entry in live if entry.line is not None]
        oldest = anchors[-ANCHORS_KEPT].slot if len(anchors) > ANCHORS_KEPT else 0
        old = [entry for entry in reversed(live) if entry.slot < oldest]
        # Followers on their way from an old publication hold a lease on it.
        leased = leases_of(task.store, now_unix=time.time()) if old else {}
        retired = 0
        for entry in old:
            if retired == RETIRED_MAX:
                break
            manifest = decode_manifest(read_manifest(task.store, entry), ruled=True)
            if entry.attempt in leased or manifest.header.publication is None:
                continue
            try:
                retired += session.retire(entry.attempt) is not None
            except NotRetired as refused:
                logger.info("not retired: %s", refused)
    except (CheckpointError, StorageError) as error:
        logger.warning("old publications stay until the next one: %s", error)


@dataclass(frozen=True)
class Publishing(TierValue):
    """What a Checkpointer publishes: arguments of `publish`, and `every`, a policy by the step."""

    every: SavePolicy
    how: Mapping[str, Any]
    path = ""

    def saves(self, save: SavePolicy, training: Training, *_: Any) -> TierSaves:
        return Publications(self, training)


def publishing(wanted: object, target: Target) -> tuple[Publishing, ...]:
    """What the caller of a Checkpointer has said: None, a policy, or a mapping with one as `every`.

    Raises TypeError and InvalidArgument.
    """
    if wanted is None:
        return ()
    given = dict(wanted) if isinstance(wanted, Mapping) else {"every": wanted}
    every = given.pop("every", None)
    if not isinstance(every, SavePolicy) or every.needs_clock:
        raise TypeError(
            f"publish={wanted!r}: expected a policy by the step alone, such as ckpt.EverySteps(1),"
            ' or {"every": ckpt.EverySteps(1), "state": model, "dtype": torch.bfloat16}'
        )
    if not isinstance(target, UrlTarget):
        raise TypeError("publish= goes with a url; this Target saves in its own way")
    # From the signature, so that `publish` and `Checkpointer(publish=)` cannot differ in a default.
    parameters = signature(publish).parameters.items()
    defaults: dict[str, Any] = {name: one.default for name, one in parameters}
    # The Checkpointer has its own of these.
    del defaults["process_group"], defaults["step"]
    own: dict[str, Any] = {"url": target.where, "line": PUBLISHED}
    own |= {name: getattr(target, name) for name in ("storage_options", "unsafe_single_writer")}
    if unknown := sorted(given.keys() - (defaults.keys() - own.keys())):
        raise TypeError(f"publish= has {', '.join(map(repr, unknown))}, which is for ckpt.publish")
    saving = {name: target.saving[name] for name in ("retry_seconds_max", "io", "user")}
    how = {**defaults, **saving, **given, **own}
    _checked(PUBLISHED, how["dtype"], how["anchor_every"], how["anchor_larger"])
    return (Publishing(every, how),)


class Publications(TierSaves):
    """The publications of one training. They restore nothing: the checkpoints next to them do."""

    def __init__(self, publishing: Publishing, training: Training) -> None:
        self._every, self._how, self._training = publishing.every, publishing.how, training
        self._context: GroupContext | None = None
        self._begun: PendingSave | None = None
        self._lasting: Exception | None = None

    def stepped(self, *, lends: bool = False) -> Sequence[LentCopy]:
        progress, how = self._training.progress, dict(self._how)
        self.collect(wait=False)
        if not self._every.reasons(Observation(progress.step, progress.previous_step)):
            return ()
        self.collect(wait=True)
        if self._lasting is not None:
            raise self._lasting
        if how["state"] is Parameter.empty:
            how["state"] = self._training.model()
        how["step"] = progress.step
        try:
            self._begun = _publish(self._opened, **how)
        except (CheckpointError, StorageError) as error:
            self._fail(progress.step, error)
        return ()

    def _opened(self) -> GroupContext:
        """As that of the process, for these publications alone. Collective at first."""
        if self._context is None:
            target = self._training.target
            assert isinstance(target, UrlTarget)
            shared = this_process.of_group(target.process_group)
            # Saves hold rounds in the world of the process at any time.
            world = shared.world.duplicate()
            self._context = GroupContext(
                shared.group, shared.everyone, world, shared.registry, Background(world)
            )
        return self._context

    def collect(self, *, wait: bool, timeout_seconds: float = math.inf) -> None:
        pending = self._begun
        if pending is None or not (wait or pending.done()):
            return
        pending.wait(None if math.isinf(timeout_seconds) else timeout_seconds)
        # Not before the wait, whose TimeoutError leaves the publication under way.
        self._begun = None
        try:
            pending.result()
        except Exception as error:
            self._fail(pending.step, error)

    def _fail(self, step: int, error: Exception) -> None:
        lost = self._training.target.failure() or self._opened().world.failure
        if lost is not None:
            raise lost from error
        if isinstance(error, Fenced):
            # Raised where all ranks have learned of it: when the next one is due.
            self._lasting = error
        self.failures = (*self.failures, Failure(step, error))[-FAILURES_MAX:]
        logger.warning("the publication of step %d has failed: %s", step, error)

    def candidates(self, store: Store, root: str, epoch: int) -> Sequence[TierRestorable]:
        return ()

    def restored(self, chosen: Restorable, own: TierRestorable | None, number: int) -> None:
        """What is published next is again compared with what was published last."""

    def leave(self, failure: RankFailed) -> None:
        if self._context is not None:
            self._context.world.end(failure)
            self._context.background.give_up()

    def close(self) -> None:
        own = os.getpid(), self._how["serve"]  # in a forked child, nobody would end the servers
        for key in [key for key in _serving if key[:2] == own]:
            _serving.pop(key).close()
        if self._context is not None:
            self._context.background.close()
            self._context.world.close()
