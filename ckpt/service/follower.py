"""Keep up with a training: what it commits comes into a model that serves or evaluates.

The committed checkpoint is the publication: nothing is sent, and the training knows nothing of its
followers.

    look -> candidates, newest first -> read aside what changed, check -> swap at the caller's word
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple, SupportsIndex

import torch
import torch.distributed as dist
from torch import nn

from ckpt.api import Io, check_order, line_of, read_path
from ckpt.commit.leases import leased
from ckpt.commit.locate import NewCommits
from ckpt.commit.names import checked_count, plain_int
from ckpt.commit.routes import Route
from ckpt.errors import (
    CheckpointError,
    Corrupt,
    LoadInterrupted,
    Mismatch,
    NoCheckpoint,
    RankFailed,
)
from ckpt.format.manifest import DELTA, MODULES, Manifest
from ckpt.layout.dtypes import torch_dtype
from ckpt.layout.memory import gc_paused
from ckpt.loading.load import LoadOptions, broadcast_manifest
from ckpt.loading.patch import DeltaPatch, read_patch, read_state
from ckpt.loading.swap_load import Aside, Present, Where
from ckpt.process import store_of, world_of
from ckpt.service.restore import Skipped, condition_of
from ckpt.service.serving import Serving, peer_options
from ckpt.world.base import World, collectively, from_coordinator
from storage import StorageError, Store, StoreLike
from storage.hidden import hides_secrets

logger = logging.getLogger(__name__)

# A follower that is killed leaves its lease behind: for so long it holds up retention.
LEASE_SECONDS = 900
NEWS_SECONDS = 30.0  # that a look waits where the store reports what is new
RETIRED_MAX = 20  # times in a row that retention may be faster than one update
SKIPPED_MAX = 20  # that are remembered


@dataclass(frozen=True, slots=True)
class Update:
    """A checkpoint that was read and checked, and is not in the model yet.

    `names` are tensors, as the checkpoint calls them, of which something changes on this rank.
    `nbytes` are to be copied by the swap, of `nbytes_total` that are followed here; `nbytes_read`
    came from the store. `skipped`: newer checkpoints that were not taken, and why.
    """

    step: int
    attempt: str
    names: tuple[str, ...]
    nbytes: int
    nbytes_total: int
    nbytes_read: int
    skipped: tuple[Skipped, ...] = ()


class Changed(NamedTuple):
    """Elements that a swap has written: `positions`, int64 and row-major, of `part`, memory of the
    tensor `name` on this rank.
    """

    name: str
    part: torch.Tensor
    positions: torch.Tensor


class Swapped(NamedTuple):
    """What a swap did: the step that the model has now, bytes copied, and seconds it took.

    `changed`, where deltas were taken: what an engine has to make anew that holds the weights in
    another form, such as blocks of low precision. None after a whole load: all of `Update.names`.
    """

    step: int
    attempt: str
    nbytes: int
    seconds: float
    changed: tuple[Changed, ...] | None = None


_Named = tuple[int, str]  # a checkpoint: its step and its attempt
_Path = list[_Named]  # what to read for the last of them: all but the first are deltas


@hides_secrets
def follow(
    model_or_names: Any,
    url: StoreLike,
    *,
    line: str = "",
    strict: bool = True,
    rename: Callable[[str], str] | Mapping[str, str] | None = None,
    skip: Callable[[str], bool] | Iterable[str] = (),
    stacks: Mapping[str, str] | None = None,
    aside: Where = "host",
    lease_seconds: SupportsIndex = LEASE_SECONDS,
    serve: str = "",
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
    io: Io = "auto",
    metadata_bytes_max: SupportsIndex | None = None,
) -> Follower:
    """Follow the training that saves at `url`: each of its checkpoints can be taken into a model.

        with ckpt.follow(model, "s3://bucket/run") as follower:
            while serving:
                if follower.poll():  # a newer checkpoint was read into other memory
                    follower.swap()  # and is in it
                serve(batch)

    `model_or_names` is a model of any engine, sharded in any way; a state as `ckpt.load` takes it;
    or names of tensors (or patterns such as `"model.layers.*"`), which `Follower.tensors` then has
    as plain tensors. A model alone is filled from the only model of the checkpoint. Everything in
    it has to be in the checkpoint, unless `strict=False`; the checkpoint may have more. `rename`,
    `skip`, `stacks` and `metadata_bytes_max` are those of `ckpt.load`.

    `line` is the name of a training that shares the root with others, as in `ckpt.save`, or that of
    what `ckpt.publish` publishes, "published" by default: then of a later publication only what is
    new is read and written, if digests show that the model has its base.

    Nothing is read yet, and there need be no checkpoint. Of a later one only chunks are read that
    are not proved to be in memory: a training that saves with `dedup=True` gives the proof. Nobody
    else may change the tensors that are followed. The new bytes lie in host memory until the swap,
    or with `aside="device"` in the model's. While a checkpoint is read, retention leaves it, for
    at most `lease_seconds`; 0 asks for no lease, and a reader without write access gets none.

    Where a host serves the root, `url` is `peer://HOST:PORT`; of several, with commas between, the
    first is read that answers, and `fallback` in `storage_options` is the url of the root itself.
    The coordinator passes on what it has read to others at `serve`, such as "0.0.0.0:29700". See
    docs/howto/inference.md.

    Collective over `process_group` (default: all ranks), as are the methods. Raises the store's
    errors, ValueError and TypeError for bad arguments.
    """
    check_order(model_or_names, url, "follow(model, url)")
    if aside not in ("host", "device"):
        raise ValueError(f'aside={aside!r}; expected "host" or "device"')
    if strict not in (True, False):
        raise ValueError(f"strict={strict!r}; expected True or False")
    target = followed(model_or_names)
    url = line_of(url, line)
    storage_options = peer_options(url, storage_options)
    store = store_of(
        url, process_group=process_group, storage_options=storage_options, call="ckpt.follow"
    )
    seconds = plain_int(lease_seconds)
    options = LoadOptions(
        "state" if strict else False,
        rename,
        skip,
        stacks=dict(stacks or {}),
        path=read_path(store, io),
        metadata_bytes_max=plain_int(metadata_bytes_max),
    )
    # A duplicate: saves and loads of this process hold rounds in the other one.
    world = world_of(process_group).duplicate()
    how = FollowOptions(options, aside, seconds and checked_count(seconds, "lease_seconds"))
    follower = Follower(target, store, world, how)
    if serve:
        try:
            collectively(world, "serve", lambda: follower.pass_on(serve, line))
        except BaseException:
            follower.close()
            raise
    return follower


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """How a follower reads. `sleep` and `now_seconds` are the clock of `Follower.updates`."""

    load: LoadOptions
    aside: Where = "host"
    lease_seconds: int = LEASE_SECONDS
    sleep: Callable[[float], None] = time.sleep
    now_seconds: Callable[[], float] = time.monotonic


class Follower:
    """A model, or some tensors, that keeps up with a root; made by `ckpt.follow`.

    All ranks make the same calls in the same order, and have the same step. After an error the
    model is as it was, unless it is LoadInterrupted, and the next call tries again. A call waits
    for one that another thread has begun.
    """

    def __init__(
        self, target: Followed, store: Store, world: World, options: FollowOptions
    ) -> None:
        self._target = target
        self._store = store
        self._world = world
        self._options = options
        self._serving: list[Serving] = []  # on the coordinator, at most one
        self._commits = NewCommits(store)  # used on the coordinator alone
        self._lock = threading.Lock()
        self._present: list[tuple[_Named, Present]] = []  # at most one
        self._staged: list[tuple[Update, Aside | DeltaPatch]] = []  # at most one
        self._skipped: list[Skipped] = []

    @property
    def step(self) -> int | None:
        """The step that the model has; None before the first swap, and after one that failed."""
        return self._present[0][0][0] if self._present else None

    @property
    def attempt(self) -> str:
        """The name of the checkpoint that the model has; "" as `step` is None."""
        return self._present[0][0][1] if self._present else ""

    @property
    def staged(self) -> Update | None:
        """The update that a swap would take over."""
        return self._staged[0][0] if self._staged else None

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors that are followed by name. Empty before the first swap, and for models."""
        return self._target.tensors

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """The checkpoints that were skipped lately, and why, oldest first."""
        return tuple(self._skipped)

    def poll(self) -> Update | None:
        """Look for a newer checkpoint, and read it into other memory; the one that is ready for a
        swap, or None.

        What was committed later is newer, whatever its step: a training that went back is
        followed. While nothing is new, this is two small requests by the coordinator. A checkpoint
        that is damaged or not all there is left for the one before it, and tried again by later
        calls; None where nothing was ever saved, or what the model has is the newest that is whole.

        Raises NoCheckpoint when the model has none and none can be loaded, or when something else
        is at the url; Mismatch when the model does not fit, LogDiverged when the root was moved or
        exchanged, Corrupt when its log is lost or damaged, UnsupportedFormat, and StorageError or
        RankFailed when a store or rank fails.
        """
        with self._lock:
            self._world.begin_call("Follower.poll")
            self._look_and_read(lambda: False)
            return self.staged

    def go_to(self, step: SupportsIndex, *, attempt: str = "") -> Update:
        """Read the checkpoint of `step` into other memory, an older one too; swap takes it over.

        `poll` then gives what is committed after this call. Raises like `poll`, and NoCheckpoint
        when no checkpoint of the step is whole.
        """
        number = plain_int(step)
        with self._lock:
            skipped: list[Skipped] = []
            of_step, _ = self._agreed(
                lambda: self._commits.of_step(number, attempt, self.attempt), lambda: False
            )
            if not self._read_first(of_step, skipped)[0]:
                raise self._nothing_whole(f"checkpoint of step {number}", skipped)
            self._mark_seen()
            return self._staged[0][0]

    def swap(self) -> Swapped | None:
        """Take over what was read, between two uses of the model; None where nothing is ready.

        Copies from memory to memory, and two small rounds of several ranks. Raises LoadInterrupted
        where that fails: the model is a mixture, and the next update is read whole. Of deltas it
        raises what has failed, and the model is as it was.
        """
        with self._lock:
            began = self._options.now_seconds()
            self._check_same()
            if not self._staged:
                return None
            # Popped before the copy: an update whose swap has failed halfway must not be swapped
            # again.
            update, aside = self._staged.pop()
            # Until it is done, nothing is known of the memory.
            before = self._present.copy()
            self._present.clear()
            try:
                memory = aside.swap(self._world)
            except BaseException as error:
                # A patch that fails otherwise has written nothing, so the memory is what it was.
                if isinstance(aside, DeltaPatch) and not isinstance(error, LoadInterrupted):
                    self._present += before
                self._commits.look_again()
                raise
            self._target.taken(aside.state)
            self._present.append(((update.step, update.attempt), memory))
            seconds = self._options.now_seconds() - began
            changed = None
            if isinstance(aside, DeltaPatch):
                parts = [(one.piece, one.positions) for one in aside.writes]
                changed = tuple([Changed(one.piece.fqn, one.view, where) for one, where in parts])
            return Swapped(update.step, update.attempt, update.nbytes, seconds, changed)

    def updates(
        self, *, timeout: float | None = None, poll_seconds: float = 5.0
    ) -> Iterator[Update]:
        """Each update once it is ready; the loop's body swaps it, or not.

        Looks every `poll_seconds`, or at once where a host reports what is new, and ends when
        nothing came for `timeout` seconds (None: never). Raises like `poll`.
        """
        began = self._options.now_seconds()
        given: Update | None = None

        def is_late() -> bool:
            return timeout is not None and self._options.now_seconds() - began >= timeout

        while True:
            with self._lock:
                ends = self._look_and_read(is_late)
                update = self.staged
            # By identity: an update that the loop's body did not swap is not yielded a second time.
            if update is not None and update is not given:
                given = update
                yield update
                began = self._options.now_seconds()
            elif ends:
                return
            elif self._store.reports_news:
                # The coordinator alone waits for news; the others wait for it in the round of the
                # next look.
                spent = self._options.now_seconds() - began
                left = math.inf if timeout is None else timeout - spent
                if self._world.rank == 0:
                    with suppress(StorageError):  # the look that follows raises it on all ranks
                        self._commits.wait(min(NEWS_SECONDS, max(left, 0.01)))
            else:
                self._options.sleep(poll_seconds)

    def pass_on(self, address: str, line: str) -> None:
        """The coordinator serves the root of `line` to others, until `close`."""
        if self._world.rank == 0:
            self._serving.append(Serving(self._store, address, line))

    def close(self) -> None:
        """Drop what was read and not taken over. The model stays as it is."""
        for serving in self._serving:
            serving.close()
        with self._lock:
            self._staged.clear()
            self._world.close()

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        has = "nothing yet" if self.step is None else f"step {self.step}"
        return f"<Follower of {self._store.url}: {has}>"

    # One look -------------------------------------------------------------------------------

    def _look_and_read(self, is_late: Callable[[], bool]) -> bool:
        """Stage the newest unseen checkpoint that is whole, if any; whether the caller is late."""
        for _ in range(RETIRED_MAX):
            candidates, ends = self._agreed(lambda: self._commits.look(self.attempt), is_late)
            skipped: list[Skipped] = []
            is_staged, was_retired = self._read_first(candidates, skipped)
            # Where retention was faster, there is something newer now.
            if is_staged or not was_retired:
                # With a model in place, a damaged checkpoint is no error: the model stays in use.
                if skipped and not (self._staged or self._present):
                    raise self._nothing_whole("checkpoint", skipped)
                if candidates:
                    self._mark_seen(skipped)
                break
        return ends

    def _mark_seen(self, skipped: Sequence[Skipped] = ()) -> None:
        if self._world.rank == 0:
            self._commits.seen(but=(one.attempt for one in skipped))

    def _nothing_whole(self, what: str, skipped: Sequence[Skipped]) -> NoCheckpoint:
        reasons = "".join(f"\n  - step {one.step} ({one.attempt}): {one.reason}" for one in skipped)
        return NoCheckpoint(f"{self._store.url} has no {what} that is whole{reasons}")

    def _agreed(
        self, look: Callable[[], Sequence[Route]], is_late: Callable[[], bool]
    ) -> tuple[list[_Path], bool]:
        """What the coordinator sees, on all ranks: what to try, newest first, and whether to end.
        Collective.
        """

        def seen() -> bytes:
            paths = [[(one.step, one.attempt) for one in route] for route in look()]
            return json.dumps([paths, is_late()]).encode()

        paths, late = json.loads(from_coordinator(self._world, "look", seen))
        return [[(step, attempt) for step, attempt in path] for path in paths], late

    def _read_first(self, candidates: Sequence[_Path], skipped: list[Skipped]) -> tuple[bool, bool]:
        """Stage the first candidate that is whole: whether there is one, and whether one was
        retired before it was read. What was staged before stays until then.
        """
        was_retired = False
        for candidate in candidates:
            result = self._read(candidate)
            if isinstance(result, Aside | DeltaPatch):
                nbytes = (result.nbytes, result.nbytes_total, result.nbytes_read)
                update = Update(*candidate[-1], result.names, *nbytes, tuple(skipped))
                self._staged[:] = [(update, result)]
                return True, was_retired
            skip, is_retired = result
            was_retired |= is_retired
            if not is_retired:
                self._store.doubt()
            skipped.append(skip)
            others = [one for one in self._skipped if one.attempt != skip.attempt]
            is_known = len(others) < len(self._skipped)
            self._skipped = [*others, skip][-SKIPPED_MAX:]
            if self._world.rank == 0 and not is_known:
                logger.warning("step %d (%s) is skipped: %s", *skip)
        return False, was_retired

    def _read(self, path: _Path) -> Aside | DeltaPatch | tuple[Skipped, bool]:
        """Read one checkpoint; or why it has to be skipped, and whether it was retired."""
        world, options, candidate = self._world, self._options, path[-1]
        known = self._present[0][1] if self._present else None
        # One lease is enough for all ranks.
        seconds = options.lease_seconds if world.rank == 0 else 0
        try:
            with leased(self._store, candidate[1], seconds), gc_paused():
                located = [
                    broadcast_manifest(self._store, world, *one, options.load.metadata_bytes_max)
                    for one in path
                ]
                if DELTA not in located[-1][1].header.required:
                    located = located[-1:]  # it only looked like a delta in the log
                first = located[0][1]
                is_patch = known is not None and DELTA in first.header.required
                of = known.manifest if known is not None and is_patch else first
                state = collectively(world, "names", lambda: self._target.state_for(of))
                where = state, self._store, located, world
                if known is not None and is_patch:
                    return read_patch(*where, (options.load, known, self.attempt))
                return read_state(*where, (options.load, known, options.aside))
        except (Corrupt, NoCheckpoint, RankFailed, StorageError) as error:
            # A rank is gone: the ranks can agree on nothing any more, not even on what to skip.
            if world.failure is not None:
                raise
            condition = condition_of(self._store, world, candidate[1])
            # Damage that only its bytes show is known from the error alone.
            is_damaged = isinstance(error, Corrupt) or isinstance(error.__cause__, Corrupt)
            if condition == "unknown" and not is_damaged:
                raise
            what = condition if condition != "unknown" else "damaged"
            return Skipped(*candidate, f"{what}: {error}"), condition == "retired"

    def _check_same(self) -> None:
        """Raise CheckpointError, on all ranks, unless all of them are about to swap the same."""
        world = self._world
        if world.size == 1:
            return
        mine = self._staged[0][0].attempt if self._staged else ""
        said = world.broadcast("swap of", mine.encode() if world.rank == 0 else None).decode()
        wrong = None
        if said != mine:
            what = [one or "nothing" for one in (said, mine)]
            wrong = CheckpointError(
                f"rank 0 swaps {what[0]}, this rank {what[1]}: make the same calls on all ranks"
            )
        # A second round, because ranks that agree with rank 0 have to raise as well.
        world.agree("swap of", wrong)


class Followed:
    """The live state behind a follower: `state_for` a manifest, it is as a load of that checkpoint
    takes it, and nothing of it is changed by that. `tensors` are those that are followed by name.
    """

    def __init__(self, state_for: Callable[[Manifest], Any]) -> None:
        self.state_for = state_for
        self.tensors: Mapping[str, torch.Tensor] = {}

    def taken(self, state: Any) -> None:
        """`state`, as `state_for` made it, was filled."""


class _NamedTensors(Followed):
    def __init__(self, patterns: Sequence[str]) -> None:
        super().__init__(self._matched)
        self._patterns = tuple(patterns)
        self._tensors: dict[str, torch.Tensor] = {}
        self.tensors = MappingProxyType(self._tensors)

    def taken(self, state: Any) -> None:
        # In place: a caller that keeps the mapping sees the new tensors.
        self._tensors.clear()
        self._tensors.update(state)

    def _matched(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        """The tensors of these names: those that there are, or new memory."""
        stored = {name: name for name in manifest.fqns} | dict(manifest.aliases)
        matched: dict[str, torch.Tensor] = {}
        missing = []
        for pattern in self._patterns:
            fits = (name for name in stored if fnmatchcase(name, pattern))
            # A name may have brackets, which fnmatch takes for a set of characters: exact names
            # come first.
            names = [pattern] if pattern in stored else sorted(fits)
            if not names:
                missing.append(f"{pattern}: no tensor of the checkpoint has this name")
            for name in names:
                if name not in matched:
                    number, known = manifest.index(stored[name]), self._tensors.get(name)
                    dtype, shape = torch_dtype(manifest.dtypes[number]), manifest.shapes[number]
                    if known is None or known.dtype is not dtype or tuple(known.shape) != shape:
                        known = torch.empty(shape, dtype=dtype)
                    matched[name] = known
        if missing:
            raise Mismatch(missing, f"of step {manifest.header.step}")
        return matched


def followed(model_or_names: Any) -> Followed:
    """What is to be filled. Raises TypeError for what is neither a state nor names."""
    if isinstance(model_or_names, nn.Module):
        return Followed(lambda manifest: _in_its_place(model_or_names, manifest))
    if isinstance(model_or_names, str):
        return _NamedTensors([model_or_names])
    if isinstance(model_or_names, os.PathLike):
        raise TypeError(f"follow(model_or_names, url): got the path {model_or_names} first")
    if not isinstance(model_or_names, Mapping):
        items = list(model_or_names)
        if items and all(isinstance(item, str) for item in items):
            return _NamedTensors(items)
    if not model_or_names:
        raise ValueError("follow(model_or_names, url): nothing to follow was given")
    return Followed(lambda manifest: model_or_names)


def _in_its_place(model: nn.Module, manifest: Manifest) -> Any:
    """A model on its own, under the name that it has in the checkpoint, most often one."""
    entries = json.loads(manifest.header.user.get(MODULES, '[""]'))
    if len(entries) > 1:
        raise CheckpointError(
            f"step {manifest.header.step} has {len(entries)} modules, "
            f"{', '.join(map(repr, entries[:20]))}; say which one is followed, as in "
            f"follow({{{entries[0]!r}: model}}, url)"
        )
    state: Any = model
    for part in reversed(entries[0].split(".") if entries and entries[0] else []):
        state = {part: state}
    return state
