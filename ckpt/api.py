"""The public functions save, async_save, begin, load and forget, and the paths of bytes that they
take.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal, SupportsIndex, TypeVar

import torch.distributed as dist

from ckpt.commit.appender import BACKGROUND_SECONDS, BLOCKING_SECONDS, checked_seconds, patience_for
from ckpt.commit.locate import ResumePoint
from ckpt.commit.names import checked_period, line_prefix, plain_float, plain_int
from ckpt.errors import InvalidArgument, NoCheckpoint, SaveDropped
from ckpt.layout.memory import gc_paused
from ckpt.layout.plain import Ranks
from ckpt.loading.block_sums import BlockCache
from ckpt.loading.load import LoadOptions, LoadReport, load_state
from ckpt.loading.plan import ReadPath
from ckpt.process import GroupContext, this_process
from ckpt.saving.background import PendingSave, Preparation, WhenBusy
from ckpt.saving.image import Staging, WritePath
from ckpt.saving.save import flattened, save_task
from ckpt.saving.shared import SharedSave, begin_shared, open_place, place_of
from ckpt.saving.staging import LentCopy, Snapshot, buffers_for, stage
from ckpt.saving.task import PartMemory, SaveOptions, SaveReport, SaveTask
from ckpt.state.names import GroupOptions
from ckpt.state.resize import Resize
from ckpt.wings import wing
from ckpt.world.base import collectively
from storage import Store, StoreLike, open_store
from storage.errors import InvalidUrlError
from storage.hidden import hides_secrets
from storage.location import child_of, place_on_filesystem

MIB = 1 << 20
REMOTE_REQUESTS = 4  # in flight at once per rank
REMOTE_REQUESTS_MAX = 16  # where more of them move more: reads of 128 MiB
CACHED_READERS_MAX = 4  # threads per rank that copy and check what is in memory
DISK_REQUESTS = 4  # in flight at once per rank, around the page cache
# Less goes through the page cache, unless `io` says otherwise: a file that is saved in the
# background, and all that a rank loads, or saves while training waits.
DIRECT_SAVE_NBYTES_MIN = 4 * MIB
DIRECT_LOAD_NBYTES_MIN = 16 * MIB
# A rank's save goes through it, too, while training waits, if it takes no more of the memory that
# is left, and all ranks a quarter, who may be on one host.
CACHED_SHARE_MAX = 1 / 8

Io = Literal["auto", "buffered", "direct"]


@hides_secrets
def save(
    state: Any,
    url: StoreLike,
    *,
    step: SupportsIndex,
    line: str = "",
    process_group: dist.ProcessGroup | None = None,
    replicas: Literal["warn", "strict"] = "warn",
    io: Io = "auto",
    unsafe_single_writer: bool = False,
    user: Mapping[str, str] | None = None,
    metric: float | None = None,
    dedup: bool = False,
    full_every: SupportsIndex | timedelta = 10,
    telemetry: bool = True,
    retry_seconds_max: float = BLOCKING_SECONDS,
    storage_options: Mapping[str, Any] | None = None,
    into: str | None = None,
) -> SaveReport:
    """Save `state` as the checkpoint of `step` below `url`; returns when it is durable.

    `state` is any nesting of dicts and lists with modules, optimizers, schedulers, objects with
    `state_dict()`, tensors and values. Collective over `process_group` (default: all ranks), or
    without torch.distributed on this process alone. Nothing that exists is overwritten.

    Ranks may hold different things, such as stages of a pipeline with the names of the whole model:
    names of different ranks are united, and a plain tensor or value of one name on several ranks
    has to be the same there.

    Replicas of buffers and plain tensors that differ between ranks are warned of, or refused
    (`replicas="strict"`); parameters that no engine shares, steps and small plain state of
    optimizers that differ are always refused. What an engine declares equal on several ranks (DDP,
    HSDP, DTensors) is compared as well, in a sample of 0.5 % of what a rank writes, another one at
    each step, or in full if "strict". Where it differs, the first rank's is stored, with a warning.
    `user` are notes to keep with the checkpoint, `metric` is how good it is: a finite number, of
    the first rank. How the save went, on every rank, is kept for `ckpt report`, unless
    `telemetry=False`. A store that cannot refuse a second writer is used only with
    `unsafe_single_writer=True`. `io="buffered"` writes local files through the page cache, where
    the next load finds them, `"direct"` around it, and `"auto"` around it where a rank writes 16
    MiB or more and more than an eighth of the memory that is left, or all ranks a quarter.
    `async_save` does so from 4 MiB on, which costs the training fewer CPU seconds.

    Trainings that share a root have names: with `line="generator"` the root is that of this name,
    `<url>/lines/generator`. A first save to a root of a training that this process has neither
    restored nor loaded is warned of; it begins a line of its own.

    A request to a store that is away is repeated for up to `retry_seconds_max`; the state of the
    training stands still meanwhile.

    With `dedup=True`, what the previous checkpoint has with the same bytes is not written again but
    referred to, if that was saved with `dedup=True` too. Such a checkpoint loads through its root;
    what it refers to is not retired before it. Every save number `full_every` writes everything,
    or with a `timedelta` each one that would refer to older files, so that one damaged file does
    not end more checkpoints. So does one before which all live checkpoints of the training share a
    file with the newest, such as the fourth of a root.

    `into=token` writes the part of one of several writers of a checkpoint that `ckpt.begin` began;
    it exists when all parts are committed. A writer saves once; a part that failed ends that save.
    `user`, `metric`, `dedup` and `telemetry` are none of a part's.

    Raises the same error on every rank, and the previous checkpoint is still the latest then:
    InvalidState, StoreRefused, Fenced, RankFailed, or the store's error on one rank. Two leave it
    open whether the checkpoint exists: OutcomeUnknown when the commit got no answer, on all ranks;
    and its subclass RankFailedInCommit when a rank is lost while all are informed of the commit, on
    ranks that have not learned of it, where others may return. Waits first for an
    `async_save` in flight, and raises its failure if that was not raised before.
    """
    check_order(state, url, "save(state, url)")
    url = line_of(url, line)
    with gc_paused():
        context = this_process.of_group(process_group)
        call, place = f"ckpt.save(step={step})", None
        if into is None:
            store, session, memory = context.open_root(
                url, storage_options, unsafe_single_writer, call
            )
        else:
            # They are of the whole checkpoint, which `ckpt.begin` describes; a part that took them
            # would drop them.
            if dedup or user or metric is not None:
                raise InvalidArgument("into=: pass user= and metric= to ckpt.begin, dedup= nowhere")
            place = place_of(into)
            store = context.settled_store(url, storage_options, call)
            session, memory = open_place(context.world, store, place), PartMemory()
        one_of("replicas", replicas, ("warn", "strict"))
        path = write_path(io, store, context.staging, cached_ranks=context.world.size)
        full = checked_period(full_every, f"full_every={full_every!r}")
        options = SaveOptions(
            replicas=replicas,
            path=path,
            user=dict(user or {}),
            metric=plain_float(metric),
            dedup=dedup,
            full_every=full,
            telemetry=telemetry,
        )
        with patience_for(store, context.world, checked_seconds(retry_seconds_max)):
            task = SaveTask(session, store, memory, plain_int(step), options, place=place)
            return save_task(state, task)


@hides_secrets
def async_save(
    state: Any,
    url: StoreLike,
    *,
    step: SupportsIndex,
    line: str = "",
    snapshot: Snapshot | LentCopy = "step",
    when_busy: WhenBusy = "wait",
    host_bytes_max: SupportsIndex | None = None,
    replicas: Literal["warn", "strict"] = "warn",
    metric: float | None = None,
    dedup: bool = False,
    full_every: SupportsIndex | timedelta = 10,
    telemetry: bool = True,
    user: Mapping[str, str] | None = None,
    retry_seconds_max: float = BACKGROUND_SECONDS,
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
    unsafe_single_writer: bool = False,
    io: Io = "auto",
) -> PendingSave:
    """Save `state` like `save`, in the background; the training continues when this returns.

    The checkpoint has the state as it is at the call. What only a step of an optimizer changes
    (trainable parameters, state shaped like them) is copied while the next forward and backward
    run, and the step waits for that; everything else is copied before this returns. An optimizer
    counts when a step of it was seen since the call before; without that (the first call, a step
    that is not a `torch.optim.Optimizer`'s) all is copied at once, as with `snapshot="now"`.
    Before changing weights in place by other means (under `no_grad`, `load_state_dict`), call
    `wait_staged()`.

    While another save is in flight, `when_busy` makes this one wait for it, be skipped, or replace
    it; a skipped one raises SaveDropped from `result()`. `host_bytes_max` limits the memory of the
    copy on this rank, in bytes; a larger state is copied in waves, and steps wait for the last.
    With `dedup=True` (see `save`) all of it is copied, and hashed in the background.

    While the store is away, requests are repeated for up to `retry_seconds_max`, in the background.
    When a later save has to wait for this one, what has failed for 10 s by then is given up, so
    that training does not stand still for an outage.

    Collective like `save`, but only the first call for a url waits for other ranks. Errors of the
    save are raised by `PendingSave.result`, or by the next call that saves here. Raises ValueError
    for bad arguments at once.
    """
    started = time.perf_counter()
    check_order(state, url, "async_save(state, url)")
    url = line_of(url, line)
    with gc_paused():
        context = this_process.of_group(process_group)
        # Before anything waits, or drops the save in flight.
        if not isinstance(snapshot, LentCopy):
            one_of("snapshot", snapshot, ("step", "now"))
        one_of("when_busy", when_busy, ("wait", "skip", "replace"))
        one_of("replicas", replicas, ("warn", "strict"))
        full = checked_period(full_every, f"full_every={full_every!r}")
        # Opening a root is collective; from the second call on, no rank waits for another here.
        root = context.known_root(url, storage_options, unsafe_single_writer)
        is_skipped = root is not None and when_busy == "skip" and context.background.is_busy()
        if when_busy == "replace":
            context.background.replace()
        call = f"ckpt.async_save(step={step})"
        store, session, memory = root or context.open_root(
            url, storage_options, unsafe_single_writer, call
        )
        options = SaveOptions(
            replicas=replicas,
            path=write_path(io, store, context.staging),
            user=dict(user or {}),
            metric=plain_float(metric),
            dedup=dedup,
            full_every=full,
            telemetry=telemetry,
        )
        seconds_max = checked_seconds(retry_seconds_max)
        task = SaveTask(
            session, store, memory, plain_int(step), options, retry_seconds_max=seconds_max
        )
        if root is None:
            # Collective as opening is. What fails here fails in the save as well.
            flattened(state, task)
        # A skipped save is refused through its task: the other ranks may not have skipped it, and
        # all of them have to learn of it in one collective.
        if is_skipped:
            error = SaveDropped(f"the save of step {step} was skipped: another one is in flight")
            context.world.begin_call(call)
            pending = context.background.refuse(task, error)
        else:
            context.background.settle_before(task)
            if root is not None:
                context.world.begin_call(call)
            nbytes_max, staging = plain_int(host_bytes_max), context.staging
            pending = context.background.start(
                task, lambda: stage(state, task, staging, snapshot, nbytes_max)
            )
    pending.call_seconds = time.perf_counter() - started
    return pending


@hides_secrets
def make_ready(
    state: Any,
    url: StoreLike,
    *,
    host_bytes_max: SupportsIndex | None = None,
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
    io: Io = "auto",
) -> Preparation:
    """Make the memory of the first `async_save` of `state` in the background: copies into fresh
    memory take ten times as long. It is used by that save, or given back by `Preparation.stop`.

    Waits for no rank. Raises what the save would raise for this state and url.
    """
    with gc_paused():
        context = this_process.of_group(process_group)
        ranks = Ranks(context.world.rank, context.world.global_ranks)
        path = write_path(io, context.store(url, storage_options), context.staging)
        need = buffers_for(state, ranks, path, plain_int(host_bytes_max))
        return context.background.make_ready(context.staging, need)


@hides_secrets
def load(
    state: Any,
    url: StoreLike,
    *,
    step: SupportsIndex | None = None,
    attempt: str = "",
    line: str = "",
    strict: bool | Literal["state"] = True,
    rename: Callable[[str], str] | Mapping[str, str] | None = None,
    skip: Callable[[str], bool] | Iterable[str] = (),
    new: Callable[[str], bool] | Iterable[str] = (),
    group_options: GroupOptions = None,
    stacks: Mapping[str, str] | None = None,
    resize: Resize = None,
    cache: str | os.PathLike[str] | None = None,
    cache_bytes_max: SupportsIndex | None = None,
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
    io: Io = "auto",
    metadata_bytes_max: SupportsIndex | None = None,
) -> LoadReport:
    """Load the checkpoint of `step`, or the latest, into `state`, in place and bit for bit.

    `url` is a root or one step's directory, or what another library has written: what `ckpt import`
    takes, where it is, whose bytes nothing verifies; names may have another path in front there, if
    only one fits. The state may be sharded in any other way than the one
    that was saved. The ranks may hold different things, such as stages: together they have to have
    a place for everything. `strict="state"` takes what the state has from a checkpoint that has
    more, such as one stage from that of a whole model. `strict=False` tolerates missing and
    unexpected names; shapes and dtypes never differ, and where no name matches it raises Mismatch
    all the same. When fewer names match than not, the report and the log warn, with the nearest
    names. `rename` gives the checkpoint's name for a name of the state, `skip` leaves names out,
    `new` names what the checkpoint cannot have: a layer, or `optimizer.state.layer` where only the
    optimizer lacked it. Names in these three that match nothing are an error.

    Options of an optimizer's groups are those that were saved for their parameters; groups that do
    not correspond are an error where that would lose what live groups have differently.
    `group_options={"lr": "saved", "weight_decay": "live"}` says whose value holds, "live" alone
    keeps all.

    `stacks` are rules from names of the state to those of the checkpoint, in every layer and in the
    optimizer too, where one has several tensors in one: `{"experts.{}.weight": "experts.weight"}`
    loads one tensor for each expert from stacks, `{"qkv": "q + k + v"}` joins along dim 0,
    `{"q:8 + kv @1": "qkv"}` takes apart along dim 1, and `{"weight": "kernel^T"}` transposes.
    `{"q": "wq^I8"}` has halves where the checkpoint has pairs of rows, in each of 8 heads.

    `resize={"model.embed.weight": "mean"}` gives a tensor, or all tensors below a name, the rows
    (dim 0) that the state has, and the moments of parameters with them: rows more than the state's
    are left out, and rows that the checkpoint lacks are "zeros", the "mean" of all that it has
    (summed in double precision, which reads that tensor once more), or "init": what is there, zeros
    in an optimizer that has no state yet. `optim.state.embed.weight` is a rule for moments alone.

    The latest is the newest that a training has saved there. Imports and copies in another layout
    are not, unless there is nothing else. `line` is the name of a training that shares the root
    with others: the root is `<url>/lines/<line>` then. `attempt` names one of them, or one of
    several checkpoints of a step. Later saves of this process continue the line of what was loaded.
    Where that was an older one, named by its `step` or `attempt`, they begin a new line, which is
    the latest from then on (see `ckpt.commit.locate`).

    `cache` is a local directory that keeps what was read, at most about `cache_bytes_max` bytes,
    for the next load on this machine: what matches its checksum there is not read from `url` again.
    Ranks and jobs may share one; it may be removed at any time.

    `io="buffered"` reads local files through the page cache, `"direct"` around it. `"auto"` reads
    around it what is not in it, where memory is short or that is faster.

    What describes the checkpoint may take `metadata_bytes_max` bytes of memory (None: 1 GiB, as 25
    million parts do).

    Raises the same error on every rank: NoCheckpoint, Mismatch (with every problem), Corrupt,
    UnsupportedFormat with the state unchanged; LoadInterrupted when it is half-loaded.
    """
    check_order(state, url, "load(state, url)")
    url = line_of(url, line)
    with gc_paused():
        if strict not in (True, False, "state"):
            raise ValueError(f'strict={strict!r}; expected True, False or "state"')
        context = this_process.of_group(process_group)
        context.background.wait()
        context.world.begin_call("ckpt.load")
        policies = (
            [group_options] if isinstance(group_options, str) else (group_options or {}).values()
        )
        for policy in policies:
            one_of("group_options", policy, ("saved", "live"))
        if not isinstance(resize, Mapping | None):
            raise TypeError(f"resize={resize!r}; expected a mapping, as {{'model.embed': 'zeros'}}")
        for rule in (resize or {}).values():
            one_of("resize", rule, ("zeros", "mean", "init"))
        options = LoadOptions(
            strict=strict,
            rename=rename,
            skip=skip,
            new=new,
            group_options=group_options,
            stacks=dict(stacks or {}),
            resize=resize,
            metadata_bytes_max=plain_int(metadata_bytes_max),
        )
        try:
            opening = partial(_store_of, context, url, storage_options)
            store = collectively(context.world, "open", opening)
            path = read_path(store, io, context.world.size)
            if cache is not None:
                kept = collectively(
                    context.world, "cache", lambda: BlockCache(cache, plain_int(cache_bytes_max))
                )
                path = replace(path, cache=kept)
            report = load_state(
                state,
                store=store,
                world=context.world,
                step=plain_int(step),
                attempt=attempt,
                options=replace(options, path=path),
            )
        except NoCheckpoint as problem:
            # A url that no store takes may still be a file of another library.
            cause = problem.__cause__
            error = cause if isinstance(cause, InvalidUrlError) else problem
            if step is not None or attempt:
                raise error from None
            path_of = partial(read_path, io=io, world_size=context.world.size)
            of_another: LoadReport = wing("convert.foreign").load_foreign(
                state, url, error, context.world, options, path_of, storage_options
            )
            return of_another
        # Named by the caller, it may be an older one: then later saves begin a new line.
        on_purpose = step is not None or bool(attempt)
        this_process.registry.restored(store, ResumePoint(report.attempt, on_purpose))
        return report


def _store_of(
    context: GroupContext, url: StoreLike, storage_options: Mapping[str, Any] | None
) -> Store:
    """Raises NoCheckpoint, which all ranks know, where `url` cannot be that of a root."""
    try:
        return context.store(url, storage_options)
    except InvalidUrlError as error:
        raise NoCheckpoint(str(error)) from error


@hides_secrets
def begin(
    url: StoreLike,
    *,
    step: SupportsIndex,
    writers: Mapping[str, int],
    line: str = "",
    user: Mapping[str, str] | None = None,
    metric: float | None = None,
    modules: Sequence[str] = (),
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
    unsafe_single_writer: bool = False,
) -> SharedSave:
    """Begin a checkpoint of `step` that several jobs write: the model by the trainer, the state of
    the data by a loader, results by an evaluation.

        shared = ckpt.begin(url, step=100, writers={"trainer": 8, "loader": 1})
        ckpt.save({"model": model}, url, step=100, into=shared.token("trainer"))
        shared.commit()  # when the loader has saved its part into shared.token("loader")

    `writers` has the number of ranks of each; a name belongs to one writer alone. `modules` are the
    names that models have in the state, which exports leave out of names. Collective like `save`,
    over the ranks of the training, which commits. Raises InvalidArgument, and like `save`.
    """
    url = line_of(url, line)
    with gc_paused():
        context = this_process.of_group(process_group)
        store, session, memory = context.open_root(
            url, storage_options, unsafe_single_writer, f"ckpt.begin(step={step})"
        )
        options = SaveOptions(user=dict(user or {}), metric=plain_float(metric))
        task = SaveTask(session, store, memory, plain_int(step), options)
        ready = partial(context.settled_store, url, storage_options)
        return begin_shared(task, writers, modules, ready)


@hides_secrets
def forget(url: StoreLike, *, storage_options: Mapping[str, Any] | None = None) -> None:
    """Forget what this process remembers of the root at `url`: the next save claims it as a new job
    does, or begins a new root where none is.

    For a process that continues after its root was removed, restored from a backup or mended: saves
    refuse such a root with LogDiverged. Call it on all ranks. Waits for an `async_save` in flight,
    whose failure is still raised by its `result` or by the next save. Nothing in the store changes.
    """
    store = open_store(url, **(storage_options or {}))
    try:
        this_process.forget(store)
    finally:
        store.close()


_Choice = TypeVar("_Choice", bound=str)


def line_of(url: StoreLike, name: str) -> StoreLike:
    """The root of a named training below `url`, or `url` itself for "". Raises ValueError."""
    return child_of(url, line_prefix(name)) if name else url


def check_order(state: Any, url: Any, call: str, *more: type) -> None:
    """Raises TypeError where the two were swapped; `call` shows how it is written.

    `more` is what a url may be there.
    """
    places = (str, os.PathLike, Store, *more)
    is_place = isinstance(url, places) or place_on_filesystem(url) is not None
    if isinstance(state, places) and not is_place:
        raise TypeError(
            f"{call}: got {state!r} for the state and a {type(url).__name__} for the url; they are "
            "the other way round"
        )


def one_of(name: str, value: _Choice, choices: tuple[_Choice, ...]) -> _Choice:
    """`value`, if it is one of `choices`. Raises ValueError naming the argument."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}; expected one of {', '.join(map(repr, choices))}")
    return value


def write_path(io: Io, store: Store, staging: Staging, *, cached_ranks: int = 0) -> WritePath:
    """Object stores get larger parts, several at once; files are written around the page cache,
    but for a share of the memory, if the save is of `cached_ranks`, which may all be on this host.

    The numbers are in DECISIONS.md S1.
    """
    one_of("io", io, ("auto", "buffered", "direct"))
    if store.part_nbytes_min > 1:
        most = REMOTE_REQUESTS_MAX
        return WritePath(16 * MIB, REMOTE_REQUESTS, writers_max=most, staging=staging)
    if io == "buffered":
        return WritePath(staging=staging)
    # One part is checksummed while the one before it is on its way to the disk.
    least, share = (DIRECT_SAVE_NBYTES_MIN if io == "auto" else 0), 0.0
    if io == "auto" and cached_ranks:
        # All ranks of the job may be on this host; together they get a quarter.
        share = min(CACHED_SHARE_MAX, 1 / (4 * cached_ranks))
        least = DIRECT_LOAD_NBYTES_MIN
    return WritePath(
        direct=True, writers=1, direct_nbytes_min=least, cached_share_max=share, staging=staging
    )


def read_path(store: Store, io: Io = "auto", world_size: int = 0) -> ReadPath:
    """How loads read from `store`: object stores and disks get several requests at once, and memory
    where each of `world_size` ranks has cores for that, were all on this host (0: in one thread).
    The numbers are in DECISIONS.md S2 and S10.
    """
    one_of("io", io, ("auto", "buffered", "direct"))
    if store.part_nbytes_min > 1:
        return ReadPath(readers=REMOTE_REQUESTS, readers_max=REMOTE_REQUESTS_MAX)
    # From memory a request of 4 MiB takes half a millisecond, and what this program does between
    # two of them a tenth of that. Of 16 MiB, what was read is checked when it has left the cache.
    mask = getattr(os, "sched_getaffinity", None)
    # Containers and schedulers allow fewer cores than the machine has.
    cores = (len(mask(0)) if mask else os.cpu_count() or 1) // world_size if world_size else 1
    readers = max(1, min(CACHED_READERS_MAX, cores))
    path = ReadPath(request_nbytes_max=4 * MIB, cached_readers=readers)
    if io == "buffered":
        return path
    if io == "direct":
        return replace(path, direct_readers=DISK_REQUESTS, direct_always=True)
    return replace(
        path,
        direct_readers=DISK_REQUESTS,
        direct_nbytes_min=DIRECT_LOAD_NBYTES_MIN,
        through_share_max=min(CACHED_SHARE_MAX, 1 / (4 * world_size)) if world_size else 0.0,
    )


@hides_secrets
def resumed(
    url: StoreLike,
    attempt: str,
    *,
    on_purpose: bool = False,
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Note that `attempt` was loaded as the newest whole checkpoint: the training continues it."""
    store = this_process.of_group(process_group).store(url, storage_options)
    this_process.registry.restored(store, ResumePoint(attempt, on_purpose))
