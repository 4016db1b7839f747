"""What a Checkpointer needs of saving and loading: one root, as the ranks of one training see it.

`UrlTarget` goes through the public functions. Tests, and trainings with ways of their own, bring
another `Target`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch.distributed as dist

from ckpt import api
from ckpt.commit.session import RankedSession, RootHold, Session
from ckpt.errors import CheckpointError, RankFailed
from ckpt.loading.load import LoadReport
from ckpt.process import (
    EndWorld,
    failure_of,
    hold,
    leaving,
    open_root,
    session_of,
    store_of,
    world_of,
)
from ckpt.saving.staging import LentCopy
from ckpt.saving.task import SaveReport
from ckpt.world.base import World
from storage import Store, StoreLike, options_of_other
from storage.hidden import without_secrets
from storage.location import child_of, fixed, url_of

MODEL_FIRST = "model-first"


class Pending(Protocol):
    """A save under way; `ckpt.reports.PendingSave` is one."""

    def done(self) -> bool:
        """Whether `result` returns or raises at once."""

    def hurry(self) -> None:
        """A newer save waits for this one: requests that failed for some seconds are given up."""

    def failure(self) -> BaseException | None:
        """Why the save has failed, None before that. Never waits."""

    def result(self, timeout_seconds: float | None = None) -> SaveReport:
        """The report, or the save's own error, the same on all ranks; TimeoutError leaves it
        running.
        """


class Target(ABC):
    """One root. Collective are `world`, `store`, `start`, `load` and `model_first`."""

    url: str

    def now_seconds(self) -> float:
        """A monotonic clock, by which saves are due and deadlines pass. Tests bring another one."""
        return time.monotonic()

    @abstractmethod
    def world(self) -> World:
        """A new world of the ranks that save and load here."""

    @abstractmethod
    def store(self) -> Store:
        """The open store of the root; it stays open."""

    def hold(self, *, begin_anew: bool) -> RootHold:
        """Keep the root for one training of this process: raises StoreRefused where another one has
        it. With `begin_anew`, its first save may begin a line next to those of other trainings.

        Collective. A target that keeps no lines has nothing to hold.
        """
        return RootHold(begin_anew)

    @abstractmethod
    def start(self, state: Any, *, step: int, metric: float | None) -> Pending:
        """Begin a save; the training may continue when this returns."""

    def using(self, copy: LentCopy) -> Target:
        """This target, whose `start` may use the copy that a near save makes of the same state, and
        ends it then. One that always makes its own returns itself.
        """
        return self

    def make_ready(self, state: Any) -> Callable[[], object]:
        """Make the memory of the first save ahead, in the background; not collective. Returns what
        stops that, and gives back what no save has used.
        """
        return lambda: None

    @abstractmethod
    def load(self, state: Any, *, step: int, attempt: str, **options: Any) -> LoadReport:
        """Fill `state` from that attempt; `options` are those of `ckpt.load`."""

    def load_from(self, state: Any, url: StoreLike, options: Mapping[str, Any]) -> LoadReport:
        """Fill `state` from another place; `options` are arguments of `ckpt.load`. Collective."""
        return api.load(state, url, **options)

    def resumed(self, attempt: str, *, on_purpose: bool = False) -> None:
        """What was loaded from `attempt` was the newest that is whole: training continues there.
        `on_purpose` when it had gone back to that one before, `attempt` is "" where nothing durable
        was loaded: see `ckpt.commit.locate`.

        Every rank calls it. A target that keeps no lines has nothing to do.
        """
        return

    def ranked_session(self) -> RankedSession:
        """The session of the root as all ranks see it, claimed now if it was not yet. Collective.

        A target without it has no near tiers.
        """
        raise CheckpointError(f"{self.url}: this Target has no near tiers; pass a url")

    @abstractmethod
    def session(self) -> Session | None:
        """The right to write here, on the coordinator and after the first save; else None."""

    @abstractmethod
    def failure(self) -> RankFailed | None:
        """Why no save or load can succeed here any more: a rank is gone. None while all is well."""

    def leaving(self) -> EndWorld:
        """What ends, when it is called later, all that this process has under way in the world of
        now, so that nothing of it is committed; the root is claimed anew after that.
        """
        return lambda failure: None

    def over(self, process_group: dist.ProcessGroup | None) -> Target:
        """This target, over the ranks of another process group, which is None for all ranks.

        A target without it cannot rejoin.
        """
        raise CheckpointError(
            f"{self.url}: this Target is for the ranks that it was made for; pass a url"
        )

    @abstractmethod
    def model_first(self) -> Target:
        """Where the model alone is saved when time is short: a root of its own, so that the latest
        checkpoint of this one can always be resumed from.
        """


@dataclass(frozen=True)
class UrlTarget(Target):
    """A root by its url, or by a store that the caller made. `saving` has arguments of
    `ckpt.async_save` that are the same for all saves of a Checkpointer.
    """

    where: StoreLike
    process_group: dist.ProcessGroup | None = None
    storage_options: Mapping[str, Any] | None = None
    unsafe_single_writer: bool = False
    saving: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "where", fixed(self.where))
        if self.storage_options is not None:
            # Kept for as long as a training, and shown by every debugger.
            object.__setattr__(self, "storage_options", without_secrets(self.storage_options))

    @property
    def url(self) -> str:  # type: ignore[override]
        """The url, also that of a store."""
        return url_of(self.where)

    @property
    def _root(self) -> dict[str, Any]:
        return {"process_group": self.process_group, "storage_options": self.storage_options}

    @property
    def _writing(self) -> dict[str, Any]:
        return {**self._root, "unsafe_single_writer": self.unsafe_single_writer}

    def world(self) -> World:
        # A duplicate: the worker of a save holds rounds in the other one at any time.
        return world_of(self.process_group).duplicate()

    def store(self) -> Store:
        return store_of(self.where, **self._root, call="Checkpointer.restore")

    def hold(self, *, begin_anew: bool) -> RootHold:
        return hold(self.where, begin_anew=begin_anew, **self._root)

    def start(self, state: Any, *, step: int, metric: float | None) -> Pending:
        how = {**self._writing, **self.saving}
        return api.async_save(state, self.where, step=step, metric=metric, **how)

    def using(self, copy: LentCopy) -> Target:
        # Of this class still: a subclass may save the state under other names.
        return replace(self, saving={**self.saving, "snapshot": copy})

    def make_ready(self, state: Any) -> Callable[[], object]:
        if self.saving.get("dedup"):
            return lambda: None  # dedup takes buffers as long as files
        how = {key: self.saving[key] for key in ("host_bytes_max", "io") if key in self.saving}
        return api.make_ready(state, self.where, **self._root, **how).stop

    def load(self, state: Any, *, step: int, attempt: str, **options: Any) -> LoadReport:
        how = {**self._root, "io": self.saving.get("io", "auto"), **options}
        return api.load(state, self.where, step=step, attempt=attempt, **how)

    def load_from(self, state: Any, url: StoreLike, options: Mapping[str, Any]) -> LoadReport:
        own, given = self.storage_options, options.get("storage_options")
        # Credentials of this root go to another place only where that is of the same protocol.
        how = {"storage_options": options_of_other(self.where, own, url, given)}
        return api.load(state, url, **{"process_group": self.process_group, **options, **how})

    def resumed(self, attempt: str, *, on_purpose: bool = False) -> None:
        api.resumed(self.where, attempt, on_purpose=on_purpose, **self._root)

    def ranked_session(self) -> RankedSession:
        return open_root(self.where, **self._writing).session

    def session(self) -> Session | None:
        return session_of(self.where, **self._writing)

    def failure(self) -> RankFailed | None:
        return failure_of(self.process_group)

    def leaving(self) -> EndWorld:
        return leaving(self.process_group)

    def over(self, process_group: dist.ProcessGroup | None) -> Target:
        return replace(self, process_group=process_group)

    def model_first(self) -> Target:
        target = replace(self, where=child_of(self.where, MODEL_FIRST))
        target.resumed("")  # each is of a line of its own, and no training resumes from it
        return target
