"""Publish the weights of a training for those who follow it: `ckpt.publish`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist

from ckpt.api import Io, check_order, line_of, write_path
from ckpt.commit.appender import BACKGROUND_SECONDS, checked_seconds
from ckpt.commit.names import PUBLISHED, checked_count, plain_int
from ckpt.errors import InvalidArgument
from ckpt.layout.memory import gc_paused
from ckpt.process import this_process
from ckpt.saving.background import PendingSave
from ckpt.saving.publishing import Due, Publication
from ckpt.saving.task import SaveOptions, SaveTask
from ckpt.world.base import collectively
from storage import StoreLike
from storage.hidden import hides_secrets


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

    Collective like `async_save`, and the same holds for changes of the state meanwhile. `result`
    raises like that of `async_save`, and InvalidUrlError without the package zstandard.
    """
    started = time.perf_counter()
    check_order(state, url, "publish(state, url)")
    due = Due(checked_count(plain_int(anchor_every), "anchor_every"), float(anchor_larger))
    if not line:
        raise InvalidArgument('line="": publications need a line of their own')
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InvalidArgument(f"dtype={dtype!r}: expected a floating-point dtype, or None")
    url = line_of(url, line)
    with gc_paused():
        context = this_process.of_group(process_group)
        call = f"ckpt.publish(step={step})"
        root = context.known_root(url, storage_options, unsafe_single_writer)
        if root is None:
            # Whatever is there, an anchor begins a new line.
            opened = collectively(
                context.world, "open", lambda: context.store(url, storage_options)
            )
            this_process.restored(opened, "", on_purpose=False)
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
            pending = context.background.refuse(task, error)
        else:
            pending = context.background.begin(task, made.gate, lambda: made.finish(due))
    pending.call_seconds = time.perf_counter() - started
    return pending
