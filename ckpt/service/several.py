"""Begin a checkpoint that several jobs write; `ckpt.saving.shared` is how they do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, SupportsIndex

import torch.distributed as dist

from ckpt.api import line_of
from ckpt.commit.names import plain_float, plain_int
from ckpt.layout.memory import gc_paused
from ckpt.process import this_process
from ckpt.saving.shared import SharedSave, begin_shared
from ckpt.saving.task import SaveOptions, SaveTask
from storage import StoreLike
from storage.hidden import hides_secrets


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
