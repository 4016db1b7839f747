"""torchtitan's trainer with this library's checkpoints instead of its own.

    config = llama3_8b()
    config.checkpoint = TorchtitanCheckpoints.Config(
        enable=True, folder="s3://bucket/run", interval=500
    )
    trainer = config.build()
    trainer.train()

The manager has torchtitan's own interface, so the trainer runs as it is, with every parallelism
that it has: each rank saves its shards and stages in the background, and a job resumes on another
number of ranks and in another layout. Model, optimizers, learning rates, the trainer's counters and
the position in the data are saved; a preempted job saves before it ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchtitan.components.checkpointer import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
    ModelWrapper,
)
from torchtitan.tools import filesystem

from ckpt.errors import CheckpointError, NoCheckpoint
from ckpt.loading.checkpoint import open_checkpoint
from ckpt.loading.load import LoadReport
from ckpt.service.checkpointer import Checkpointer
from ckpt.service.policies import EverySteps, Never, OnPreemption
from ckpt.service.restore import RestoreReport
from ckpt.service.retention import KeepAll, KeepLatest
from ckpt.service.target import Pending, UrlTarget
from ckpt.state.types import PerRank

_NAMED = frozenset((MODEL, OPTIMIZER))
# What torchtitan's own manager does with weights on the way.
_EXPORT = "every checkpoint here is complete; `ckpt export` writes the weights of any of them"
_IMPORT = "`ckpt import` it first, and name the root of that as checkpoint.initial_load_path"
_ELSE = {
    "last_save_model_only": _EXPORT,
    "last_save_in_hf": _EXPORT,
    "initial_load_in_hf": _IMPORT,
    "initial_load_in_hf_quantized": _IMPORT,
}


class TorchtitanCheckpoints(BaseCheckpointManager):
    """Saves and loads for `torchtitan.trainer.Trainer`; what its `Config` builds.

    All methods that the trainer calls are collective. They raise as `ckpt.Checkpointer` does.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's options. `folder` may be a url; a path is below the job's dump folder."""

        last_save_model_only: bool = False

    def __init__(
        self,
        config: Config,
        *,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        dataloader: Any,
        states: dict[str, Any],
        base_folder: str = "",
        **_: Any,
    ) -> None:
        self.enable = config.enable
        self.save_future = None  # the trainer never waits for a save: a Checkpointer does
        if not self.enable:
            return
        wanted = {key: what for key, what in _ELSE.items() if getattr(config, key)}
        if wrong := [f"checkpoint.{key}=True: {what}" for key, what in wanted.items()]:
            raise ValueError("; ".join(wrong))
        self.url = filesystem.join(base_folder, config.folder)
        self._config = config
        self._dataloader = dataloader
        self._state = {
            MODEL: ModelWrapper(model_parts),
            OPTIMIZER: optimizers,
            LR_SCHEDULER: lr_schedulers,
            **states,
        }
        self._open: list[Checkpointer] = []

    def _load(self, step: int = -1) -> bool:
        """Restore `step`, or the newest, or else begin from `initial_load_path`."""
        excluded = set(self._config.exclude_from_loading)
        if unknown := excluded - {*self._state, DATALOADER}:
            raise ValueError(f"checkpoint.exclude_from_loading: nothing is called {unknown}")
        wanted = {name: part for name, part in self._state.items() if name not in excluded}
        url, first = self.url, self._config.initial_load_path
        report = _restore(url, wanted, None if step < 0 else step)
        if report is None and first:
            url = first
            if self._config.initial_load_model_only:
                wanted, excluded = {MODEL: self._state[MODEL]}, {DATALOADER}
            if (report := _restore(url, wanted, None)) is None:
                raise NoCheckpoint(f"checkpoint.initial_load_path: {url} has no checkpoint")
        if report is None:
            return False
        if report.step and DATALOADER not in excluded:
            self._restore_position(url, report)
        return True

    def _restore_position(self, url: str, report: RestoreReport) -> None:
        """Give the loader of this rank its position: torchtitan names those of all ranks by their
        places among the data-parallel ones, which are others in another layout.
        """
        with open_checkpoint(url, report.step, attempt=report.attempt) as checkpoint:
            positions = [values.get(DATALOADER) or {} for values in checkpoint.per_rank]
        if self._dataloader is None or not any(positions):
            return
        position = {key: value for one in positions for key, value in one.items()}
        degree = getattr(self._dataloader, "dp_world_size", None)
        saved_degree = position.get("world_size", degree)
        if degree is not None and saved_degree != degree:
            raise CheckpointError(
                f"{url}, step {report.step}: saved with a data-parallel degree of {saved_degree}, "
                f"this job has {degree}: torchtitan's loaders do not divide a position in the "
                "data; keep the degree, or start the data from the beginning with "
                'checkpoint.exclude_from_loading=["dataloader"]'
            )
        self._dataloader.load_state_dict(position)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Step `curr_step` is done; save if it is time. Waits for the last one."""
        if self._config.load_only:
            return False
        saves = self._checkpointer()
        is_begun = saves.step(curr_step)
        is_first = curr_step == 1 and self._config.enable_first_step_checkpoint
        if (last_step or is_first) and not is_begun:
            saves.save_now()
            is_begun = True
        if last_step:
            saves.wait()
        return is_begun

    def _checkpointer(self) -> Checkpointer:
        if not self._open:
            state = dict(self._state)
            if self._dataloader is not None:
                state[DATALOADER] = PerRank(self._dataloader)
            kept = self._config.keep_latest_k
            self._open = [
                Checkpointer(
                    state,
                    _TitanTarget(self.url),
                    save=EverySteps(self._config.interval) | OnPreemption(),
                    only=True,  # the trainer saves its last step itself
                    keep=KeepLatest(kept) if kept else KeepAll(),
                )
            ]
        return self._open[0]

    def _maybe_wait_for_staging(self) -> None:
        """Nothing to do: the step of an optimizer waits by itself until its tensors are copied."""

    def _wait_for_saving(self) -> None:
        self._checkpointer().wait()

    def _close(self) -> None:
        """Wait for what is in flight; while an error is handled, for this rank alone."""
        error = sys.exc_info()[1]
        for saves in self._open:
            saves.__exit__(type(error) if error else None, error, None)
        self._open = []


def _restore(url: str, state: dict[str, Any], step: int | None) -> RestoreReport | None:
    with Checkpointer(state, _TitanTarget(url), save=Never()) as reader:
        return reader.restore(step)


class _TitanTarget(UrlTarget):
    """A root where model and optimizers are saved under the names that torchtitan gives their
    tensors: it splits what is fused in memory, so a model may be fused in one job and not in the
    next.
    """

    def start(self, state: dict[str, Any], *, step: int, metric: float | None) -> Pending:
        return super().start(_named(state), step=step, metric=metric)

    def make_ready(self, state: dict[str, Any]) -> Callable[[], object]:
        return super().make_ready(_named(state))

    def load(self, state: dict[str, Any], **options: Any) -> LoadReport:
        named = _named(state)
        report = super().load(named, **options)
        # What torchtitan splits may be a copy: the parts themselves have to be filled from it.
        for name in _NAMED & state.keys():
            state[name].load_state_dict(named[name])
        return report


def _named(state: dict[str, Any]) -> dict[str, Any]:
    """`state` with dicts of tensors and values, flat, by names: stages hold different ones."""
    return {key: part.state_dict() if key in _NAMED else part for key, part in state.items()}
