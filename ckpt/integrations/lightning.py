"""Checkpoints of Lightning's Trainer and of Fabric, in one root of this library.

    checkpoints = LightningCheckpoints("s3://bucket/run")
    trainer = Trainer(plugins=[checkpoints], callbacks=[ModelCheckpoint(every_n_train_steps=500)])
    trainer.fit(model, ckpt_path=checkpoints.latest())

Lightning decides when to save, what to keep and what a checkpoint has; this plug-in stores that,
checked and committed, in the background, and gives it back. A path that Lightning makes up is the
name of a checkpoint in the root, and no file.

It gets everything gathered on one rank. For models that are sharded, pass a strategy instead, which
saves the shards of every rank where they lie, and resumes on another number of ranks and under
another of these strategies:

    strategy = SavingModelParallelStrategy("s3://bucket/run", data_parallel_size=8)
    trainer = Trainer(strategy=strategy, callbacks=[ModelCheckpoint(every_n_train_steps=500)])
    trainer.fit(model, ckpt_path=strategy.latest())

With Fabric, use `ckpt.Checkpointer` in the loop that you write instead: it saves shards too.

    model, optimizer = fabric.setup(model, optimizer)
    state = unwrapped({"model": model, "optim": optimizer})
    with ckpt.Checkpointer(state, "s3://bucket/run") as checkpointer:
        ...
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.wrappers import _FabricModule, _FabricOptimizer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn

from ckpt.api import async_save, load
from ckpt.commit.writer import NotRetired
from ckpt.errors import CheckpointError, NoCheckpoint
from ckpt.loading.checkpoint import open_checkpoint
from ckpt.loading.contents import StepInfo, list_steps
from ckpt.process import session_of
from ckpt.saving.background import PendingSave
from ckpt.state.types import PerRank
from ckpt.world.torch_world import group_of_this_process
from storage.hidden import hides_secrets

logger = logging.getLogger(__name__)

_PATH = "lightning_path"  # among the notes of a checkpoint
_ENTRY = "lightning"
_LOOPS = "loops"  # Lightning's own name


class LightningCheckpoints(CheckpointIO):
    """A plug-in for `lightning.Trainer(plugins=[...])` and `lightning.Fabric(plugins=[...])`.

    `saving` are further arguments of `ckpt.async_save`. A save returns when its tensors are copied;
    a failure is raised by the next save, load, removal, or at the end of the training.
    """

    @hides_secrets
    def __init__(
        self, url: str, *, storage_options: Mapping[str, Any] | None = None, **saving: Any
    ) -> None:
        self.url = url
        self._storage_options = storage_options
        self._saving = saving
        self._in_flight: list[tuple[str, PendingSave]] = []
        self._attempts: dict[str, str] = {}
        self._groups: list[dist.ProcessGroup | None] = []

    def latest(self) -> str | None:
        """The path of the newest checkpoint, for `ckpt_path=`; None when there is none yet."""
        self._wait()
        entries = self._entries()
        return self._path_of(entries[-1]) if entries else None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Begin to save. Raises InvalidState for what cannot be stored without pickle.

        Lightning calls it on one rank, with everything gathered.
        """
        if storage_options is not None:
            raise TypeError("pass storage_options to LightningCheckpoints(...), once for all")
        # What Lightning has gathered is this checkpoint's own, and goes when the call returns.
        state, step = {_ENTRY: _Tree(_plain(checkpoint))}, int(checkpoint.get("global_step", 0))
        self._begin(state, step, path, snapshot="now")

    def _begin(
        self, state: dict[str, Any], step: int, path: str | os.PathLike[str], **options: Any
    ) -> None:
        self._wait()
        name = os.fspath(path)
        how, user = {**options, **self._saving}, {_PATH: name}
        pending = async_save(state, self.url, step=step, user=user, **self._root(), **how)
        self._in_flight = [(name, pending)]

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """What was saved under `path`, tensors on the CPU or on the device `map_location`.

        Nothing here is pickled, whatever `weights_only` says. Raises NoCheckpoint, Corrupt.
        """
        tree = _Tree({})
        self._fill({_ENTRY: tree}, path, strict=True)
        if map_location is not None and not isinstance(map_location, str | torch.device):
            raise TypeError(f"map_location={map_location!r}: expected a device or its name")
        content = tree.content
        return content if map_location is None else move_data_to_device(content, map_location)

    def _fill(self, state: dict[str, Any], path: str | os.PathLike[str], *, strict: bool) -> None:
        entry = self.find(path)
        root = self._root()
        load(state, self.url, step=entry.step, attempt=entry.attempt, strict=strict, **root)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Retire what was saved under `path`. The only checkpoint of a root stays."""
        self.retire(self.find(path))

    def find(self, path: str | os.PathLike[str]) -> StepInfo:
        """The newest checkpoint that was saved under `path`. Raises NoCheckpoint."""
        self._wait()
        name = os.fspath(path)
        known = self._attempts.get(name)
        for entry in reversed(self._entries()):
            if entry.attempt == known or (known is None and self._path_of(entry) == name):
                self._attempts[name] = entry.attempt
                return entry
        raise NoCheckpoint(
            f"{self.url}: nothing was saved as {name!r}; the newest is {self.latest()!r}"
        )

    def teardown(self) -> None:
        """Wait for the save in flight. Raises its error."""
        self._wait()

    def _wait(self) -> None:
        """For the save in flight; what had its path before is retired then."""
        # Lightning overwrites files such as last.ckpt: the one before goes once the new one is
        # committed, so there is never none.
        while self._in_flight:
            name, pending = self._in_flight.pop()
            attempt = pending.result().attempt
            before = self._attempts.get(name)
            self._attempts[name] = attempt
            for entry in self._entries() if before else ():
                if entry.attempt == before:
                    self.retire(entry)

    def retire(self, entry: StepInfo) -> None:
        """Retire a checkpoint. The only one of a root stays."""
        is_unsafe = bool(self._saving.get("unsafe_single_writer"))
        session = session_of(self.url, unsafe_single_writer=is_unsafe, **self._root())
        if session is None:
            raise CheckpointError(
                f"{self.url}: this process has saved nothing here, so it removes nothing; use "
                "`ckpt prune`"
            )
        try:
            session.retire(entry.attempt)
        except NotRetired as error:
            logger.info("%s stays: %s", entry.attempt, error)

    def _entries(self) -> tuple[StepInfo, ...]:
        """What the root has, in the order of commits."""
        try:
            return list_steps(self.url, self._storage_options)
        except NoCheckpoint:
            return ()

    def _path_of(self, entry: StepInfo) -> str:
        for name, attempt in self._attempts.items():
            if attempt == entry.attempt:
                return name
        # One that was saved by other means, as by `ckpt.save`, has no path: its url stands for it.
        with open_checkpoint(
            self.url, entry.step, self._storage_options, attempt=entry.attempt
        ) as checkpoint:
            return checkpoint.user.get(_PATH, entry.url)

    def _root(self) -> dict[str, Any]:
        return {"process_group": self._group(), "storage_options": self._storage_options}

    def _group(self) -> dist.ProcessGroup | None:
        """This process alone."""
        # Lightning calls one rank, and a save over all ranks would wait for the others.
        if not self._groups:
            self._groups = [group_of_this_process()]
        return self._groups[0]


class _ShardedCheckpoints(LightningCheckpoints):
    """The same root with checkpoints of all ranks. Collective are `save`, `load`, `find`
    and what waits.
    """

    def save(self, parts: dict[str, Any], rest: dict[str, Any], path: str) -> None:
        """Begin to save `parts` where they lie. `rest` is kept as the first rank has it, which is
        what Lightning's strategies do, but for the progress of loops: positions in the data differ.
        """
        step = int(rest.get("global_step", 0))
        state = {**parts, _LOOPS: PerRank(_Tree(_plain(rest.pop(_LOOPS, {}))), _first)}
        if self._is_first:
            state[_ENTRY] = _Tree(_plain(rest))
        self._begin(state, step, path)

    def load(self, parts: dict[str, Any], path: str, *, strict: bool) -> dict[str, Any]:
        """Fill `parts`, and return the rest."""
        rest, loops = _Tree({}), _Tree({})
        state = {**parts, _ENTRY: rest, _LOOPS: PerRank(loops, _first)}
        self._fill(state, path, strict=strict)
        return {**rest.content, _LOOPS: loops.content}

    def retire(self, entry: StepInfo) -> None:
        """By the first rank: call it when all others have found the checkpoint."""
        if self._is_first:
            super().retire(entry)

    @property
    def _is_first(self) -> bool:
        return not dist.is_initialized() or dist.get_rank() == 0

    def _group(self) -> dist.ProcessGroup | None:
        return None


class _SavesShards(Strategy):
    """What the strategies below have in common; put it before another strategy of Lightning's."""

    @hides_secrets
    def __init__(
        self,
        url: str,
        *args: Any,
        storage_options: Mapping[str, Any] | None = None,
        saving: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        how = dict(saving or {})
        self._shards = _ShardedCheckpoints(url, storage_options=storage_options, **how)

    def latest(self) -> str | None:
        """The path of the newest checkpoint, for `ckpt_path=`; None when there is none yet."""
        return self._shards.latest()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # into the model as the strategy has sharded it

    @property
    def lightning_restore_optimizer(self) -> bool:
        # Lightning would look for states in the dict, and `load_checkpoint` has loaded them.
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # it stays where it lies

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing: `load_checkpoint` has filled the model and the optimizers."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing, likewise."""

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        if storage_options is not None:
            raise TypeError("pass storage_options to the strategy, once for all")
        has_optimizers = "optimizer_states" in checkpoint
        self._shards.save(self._parts(has_optimizers), checkpoint, self._path(filepath))

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        if (module := self.lightning_module) is None:
            raise CheckpointError("the strategy has no model yet; load within a Trainer's run")
        parts = self._parts(module.trainer.state.fn == TrainerFn.FITTING)
        strict = bool(module.strict_loading)
        return self._shards.load(parts, self._path(checkpoint_path), strict=strict)

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        entry = self._shards.find(self._path(filepath))
        # The first rank retires it, and another one that still looks for it would not find it.
        self.barrier("remove_checkpoint")
        self._shards.retire(entry)

    def teardown(self) -> None:
        self._shards.teardown()
        super().teardown()

    def _parts(self, has_optimizers: bool) -> dict[str, Any]:
        optimizers = self.optimizers if has_optimizers else []
        numbered = {f"optimizer_{index}": each for index, each in enumerate(optimizers)}
        return {"model": self.model, **numbered}

    def _path(self, path: str | os.PathLike[str]) -> str:
        """The first rank's: names of files may have a time in them."""
        return str(self.broadcast(os.fspath(path)))


class SavingDDPStrategy(_SavesShards, DDPStrategy):
    """Lightning's DDPStrategy with the checkpoints of all ranks in the root `url`.

    Further arguments are those of the strategy; `saving` are arguments of `ckpt.async_save`. A
    checkpoint of one of these three strategies loads under the others, on any number of ranks.
    """


class SavingFSDPStrategy(_SavesShards, FSDPStrategy):
    """Lightning's FSDPStrategy with sharded checkpoints, as `SavingDDPStrategy`."""


class SavingModelParallelStrategy(_SavesShards, ModelParallelStrategy):
    """Lightning's ModelParallelStrategy (`fully_shard`, tensor parallelism) with sharded
    checkpoints, as `SavingDDPStrategy`.
    """


def unwrapped(state: dict[str, Any]) -> dict[str, Any]:
    """`state` with the modules and optimizers themselves where Fabric's wrappers of them are."""
    return {name: _without_wrapper(thing) for name, thing in state.items()}


def _without_wrapper(thing: Any) -> Any:
    if isinstance(thing, _FabricModule):
        # What runs, with the strategy's own wrapper; `.module` would be what is below that.
        return dict(thing.named_children())["_forward_module"]
    return thing.optimizer if isinstance(thing, _FabricOptimizer) else thing


class _Tree:
    """A tree of values and tensors as an object with state, loadable without a live one."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def state_dict(self) -> dict[str, Any]:
        return self.content

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.content = state


def _first(states: Sequence[Any], rank: int, world_size: int) -> Any:
    """On another number of ranks every rank gets what the first one had."""
    return states[0]


def _plain(tree: Any) -> Any:
    """`tree` with Lightning's own kinds of dicts and paths as plain ones."""
    if isinstance(tree, Mapping):
        return {key: _plain(item) for key, item in tree.items()}
    if isinstance(tree, list):
        return [_plain(item) for item in tree]
    if isinstance(tree, tuple):
        return tuple(_plain(item) for item in tree)
    return os.fspath(tree) if isinstance(tree, os.PathLike) else tree
