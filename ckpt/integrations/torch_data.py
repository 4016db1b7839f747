"""Stateful data loaders (`torchdata.stateful_dataloader`) that continue on another number of ranks.

    state = {"model": model, "optim": optimizer, "data": ckpt.PerRank(loader, divide_samples)}

On as many ranks as saved, every rank's loader gets its own state back, whatever it is. On another
number, `divide_samples` divides what the job has read of the epoch among the new ranks. It reads
map-style datasets read through a `StatefulDistributedSampler`, with and without worker processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any


def divide_samples(
    states: Sequence[Mapping[str, Any]], rank: int, world_size: int
) -> dict[str, Any]:
    """The state of the loader of `rank`, one of `world_size`, from those of all ranks that saved.

    The sampler deals one permutation to the ranks in turn, so what `n` ranks have read together is
    its beginning, and other ranks continue behind it. They begin at a whole batch: when what was
    read does not divide evenly, the last samples, less than one batch per rank, are read a second
    time; none is left out. Raises ValueError for loaders of another kind, and for ranks that are
    not equally far.
    """
    read = [_read(state, number) for number, state in enumerate(states)]
    if len({*read}) > 1:
        raise ValueError(
            "the data loaders are not equally far: samples read on each rank are "
            f"{[samples for samples, _ in read]}; save where all ranks have done the same step"
        )
    samples, batches = read[0]
    # Rounded up: the last batch of an epoch may be a small one.
    batch_size = -(-samples // batches) if batches else 1
    mine = len(states) * samples // world_size // batch_size
    state = deepcopy(dict(states[0]))
    _set(state, samples=mine * batch_size, batches=mine)
    return state


def _read(state: Mapping[str, Any], rank: int) -> tuple[int, int]:
    """The samples and batches that one rank has read of this epoch."""
    try:
        main = _main(state)
        sampler = main["_sampler_iter_state"]
        return sampler["sampler_state"]["yielded"], main["_sampler_iter_yielded"]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"the state of rank {rank} is not that of a StatefulDataLoader with a "
            "StatefulDistributedSampler; give PerRank an on_reshard of your own"
        ) from error


def _main(state: Mapping[str, Any]) -> Any:
    """Where the main process's progress stands: deeper with worker processes."""
    return state["_snapshot"]["_main_snapshot"] if "_snapshot" in state else state


def _set(state: dict[str, Any], *, samples: int, batches: int) -> None:
    # torchdata keeps the same position in several places, and none of them is read alone.
    main = _main(state)
    main["_sampler_iter_yielded"] = batches
    main["_sampler_iter_state"]["samples_yielded"] = samples
    main["_sampler_iter_state"]["sampler_state"]["yielded"] = samples
    if "_snapshot" in state:
        snapshot = state["_snapshot"]
        snapshot["_snapshot_step"] = batches
        snapshot["_last_yielded_worker_id"] = (batches - 1) % main["_num_workers"]
        state["_steps_since_snapshot"] = 0
    else:
        state["_num_yielded"] = batches
