"""Pins: what no rule and no `ckpt rm` retires. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any, SupportsIndex

from ckpt.commit.lines import line_text, of_step
from ckpt.commit.log import LogState
from ckpt.commit.maintenance import Maintenance
from ckpt.commit.numbers import plain_int
from ckpt.commit.records import LiveEntry
from ckpt.errors import CheckpointError, NoCheckpoint
from storage import Store, StoreLike, open_store
from storage.hidden import hides_secrets


@hides_secrets
def pin(
    url: StoreLike,
    step: SupportsIndex,
    *,
    attempt: str = "",
    storage_options: Mapping[str, Any] | None = None,
) -> str:
    """Keep the checkpoint of `step` until it is unpinned, whatever rules say; returns its attempt.

    Call it on one rank, from any process: a training that saves there is not disturbed. Does
    nothing to one that is pinned. Raises NoCheckpoint when there is none, CheckpointError for
    several of that step without `attempt`, and the store's errors.
    """
    return _marked(url, step, attempt, storage_options, pinned=True)


@hides_secrets
def unpin(
    url: StoreLike,
    step: SupportsIndex,
    *,
    attempt: str = "",
    storage_options: Mapping[str, Any] | None = None,
) -> str:
    """Lift the pin of a checkpoint: rules decide about it again. Takes and raises what `pin`
    does.
    """
    return _marked(url, step, attempt, storage_options, pinned=False)


def _marked(
    url: StoreLike,
    step: SupportsIndex,
    attempt: str,
    storage_options: Mapping[str, Any] | None,
    *,
    pinned: bool,
) -> str:
    with closing(open_store(url, **(storage_options or {}))) as store:
        maintenance = Maintenance.open(store)
        entry = chosen(store, maintenance.state(), plain_int(step), attempt)
        (maintenance.pin if pinned else maintenance.unpin)(entry.attempt)
    return entry.attempt


def chosen(store: Store, state: LogState, step: int, attempt: str) -> LiveEntry:
    """The one checkpoint that is meant. Raises NoCheckpoint, and CheckpointError for several."""
    of_it = of_step(state.live, step)
    matching = [entry for entry in of_it if attempt in ("", entry.attempt)]
    choices = ", ".join(f"{entry.attempt} ({line_text(entry.line)})" for entry in of_it)
    if not matching:
        steps = sorted({entry.step for entry in state.live})
        there = f"it has {choices}" if choices else f"the root has steps {steps[-10:]}"
        wanted = f"checkpoint {attempt} of step {step}" if attempt else f"step {step}"
        raise NoCheckpoint(f"{store.url} has no {wanted}; {there}")
    if len(matching) > 1:
        raise CheckpointError(
            f"{store.url} has {len(matching)} checkpoints of step {step}; choose one by its "
            f"attempt: {choices}"
        )
    return matching[0]
