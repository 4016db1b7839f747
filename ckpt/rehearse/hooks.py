"""What a rehearsal does in the processes of a training: it gives the run a root of its own, saves
when the plan says so, kills at the boundary that the plan names, and writes down what happens.

`install` is called when `ckpt` is imported in a process that `ckpt.rehearse.runs` has started. Each
rank appends its steps to `trace-RANK` in the folder of its run, a line of JSON for each.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader

from ckpt.commit.session import Session
from ckpt.layout.plain import Ranks
from ckpt.rehearse import watch
from ckpt.rehearse.seen import digests, random_states, seen, text_of
from ckpt.rehearse.watch import ResumeWatch
from ckpt.service.checkpointer import SAVE_DEFAULT, Checkpointer
from ckpt.service.policies import Never, OnPreemption, OnSignal, SavePolicy
from ckpt.service.target import UrlTarget
from storage.location import url_of

SAVE_SECONDS = 60.0  # for a save that the plan waits for
OTHERS_SECONDS = 30.0  # for all ranks to come to the end of the plan
SIGNAL_SECONDS = 0.5  # a step takes so long after the signal: ranks agree on it in the background


def install(folder: str) -> None:
    """Make this process follow the plan of the run in `folder`."""
    hooks = Hooks(Path(folder))
    _around(Checkpointer, "__init__", hooks.made)
    _around(Checkpointer, "restore", hooks.restore)
    _around(Checkpointer, "step", hooks.step)
    _around(Session, "commit", hooks.commit)
    _around(watch, "place_of", lambda _, url: hooks.root(url))
    _around(ResumeWatch, "__init__", hooks.watch_made)
    _around(ResumeWatch, "restored", lambda _, one, step: hooks.restored(step))
    _around(ResumeWatch, "step", hooks.watch_step)
    _around(torch, "save", hooks.torch_save)
    _around(torch.autograd, "backward", hooks.backward)
    optimizers.register_optimizer_step_pre_hook(hooks.updating)
    optimizers.register_optimizer_step_post_hook(lambda *_: hooks.kill("after the optimizer"))
    # What a rehearsal compares is the state, not kernels that add in any order.
    torch.use_deterministic_algorithms(True, warn_only=True)


def _around(owner: Any, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    # A function, which becomes a method; `bind` sees the signature of the original.
    setattr(owner, name, lambda *args, **named: around(original, *args, **named))


class Hooks:
    """The plan and the trace of one rank of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._pid = folder, os.getpid()
        self._plan = json.loads((folder / "plan").read_text())
        self._states: list[Any] = []
        self._owner: Any = None  # whose steps are those of the training: the first one made
        self._rank, self._size = 0, 1
        self._calls, self._done = 0, -1  # of `step`, and the step of the newest one
        self._record: dict[str, Any] = {}  # of the step under way
        self._pending: Any = None
        self._signalled = False
        self._iterators: set[type] = set()

    def _begin(self, owner: Any, state: Any) -> None:
        if self._owner is None:
            self._owner = owner
            if dist.is_available() and dist.is_initialized():
                self._rank, self._size = dist.get_rank(), dist.get_world_size()
            self._follow(DataLoader)
            self._write()
        self._states.append(state)

    def _write(self, **record: Any) -> None:
        """Write down what happened, and begin anew."""
        with open(self._folder / f"trace-{self._rank}", "a", encoding="utf-8") as file:
            file.write(json.dumps(self._record | record) + "\n")
        self._record = {}

    def _take(self, when: str) -> None:
        self._record[when] = seen(self._states, inspect.currentframe())
        self._record[f"{when}_random"] = random_states()

    def root(self, url: str) -> str:
        """The folder used instead of `url`."""
        is_other = not url.startswith(self._plan["root"])
        root = f"{self._plan['root']}/{zlib.crc32(url.encode()):08x}" if is_other else url
        os.makedirs(root, exist_ok=True)
        return root

    def restored(self, step: int) -> None:
        """The state is that of `step`."""
        self._record, self._done = {}, step
        self._write(restored=step, restored_random=random_states())

    def _stepped(self, step: int) -> None:
        """Step `step` is done, and not saved yet."""
        if self._pending is not None:
            self._pending.result(SAVE_SECONDS)
            self._pending = None
        time.sleep(SIGNAL_SECONDS * self._signalled)
        self._take("last")
        self._write(step=step)
        self._calls, self._done = self._calls + 1, step
        self.kill("before the save")

    def _end(self, step: int) -> None:
        """End this process where the plan ends, and the other ranks are there as well."""
        if self._calls < self._plan["count"] and step != self._plan["last"]:
            return
        # A rank that died first would fail the collectives of the others in their last step.
        (self._folder / f"end-{self._rank}").touch()
        until = time.monotonic() + OTHERS_SECONDS
        while time.monotonic() < until and len([*self._folder.glob("end-*")]) < self._size:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)  # whatever the script does at its end

    def kill(self, boundary: str, step: int | None = None) -> None:
        """Die if the plan says so here; `step`: by default the newest one done."""
        where = [boundary, self._done if step is None else step]
        # Workers of data loaders are forks that have these hooks too, and are not the rank.
        if where != self._plan["kill"] or self._signalled or os.getpid() != self._pid:
            return
        # In a thread of a save, the record is under way in the main one.
        if threading.current_thread() is threading.main_thread():
            self._write()
        self._signalled = boundary == "by SIGTERM"
        (self._folder / f"{'signalled' if self._signalled else 'killed'}-{self._rank}").touch()
        os.kill(os.getpid(), signal.SIGTERM if self._signalled else signal.SIGKILL)

    # a Checkpointer, and what stands for it where a training saves by hand

    def made(self, make: Any, one: Checkpointer, state: Any, target: Any, **named: Any) -> None:
        """A Checkpointer is made: it gets another root, and the plan's saves, and no near tiers."""
        # Only the plan saves, or runs would differ by when the script does. What is to be proved
        # stays: policies that save on a signal.
        is_own = isinstance(target, UrlTarget)
        place = self.root(target.url if is_own else url_of(target))
        given: SavePolicy = named.pop("save", SAVE_DEFAULT)
        kinds = OnSignal | OnPreemption | Never
        lasting = [policy for policy in given.alternatives() if isinstance(policy, kinds)]
        save = reduce(or_, lasting or [Never() if named.get("only") else OnSignal()])
        named |= {"near": None, "storage_options": None, "save": save}
        self._begin(one, state)
        target = replace(target, where=place, storage_options=None) if is_own else place
        make(one, state, target, **named)

    def restore(self, restore: Any, one: Checkpointer, *args: Any, **how: Any) -> Any:
        """`Checkpointer.restore`."""
        report = restore(one, *args, **how)
        if report is not None and one is self._owner:
            self.restored(report.step)
        return report

    def step(self, do: Any, one: Checkpointer, step: Any, metric: Any = None) -> Any:
        """`Checkpointer.step`."""
        if one is not self._owner:
            return do(one, step, metric)
        self._stepped(int(step))
        begun = do(one, step, metric)
        # At the same steps in every run, whatever takes longer in one of them.
        if step in self._plan["saves"]:
            self._pending = one.save_now()
            if self._plan["kill"] == ["after the save", step]:
                self._pending.result(SAVE_SECONDS)
                self.kill("after the save")
        self._end(step)
        return begun

    def commit(self, commit: Any, session: Session, record: Any) -> Any:
        """`Session.commit`, which makes a checkpoint exist."""
        self.kill("in the save", record.step)
        return commit(session, record)

    def watch_made(self, make: Any, one: ResumeWatch, state: Any, directory: str) -> None:
        """A training that saves by hand begins."""
        make(one, state, directory)
        self._begin(one, state)

    def watch_step(self, step: Any, one: ResumeWatch, number: int) -> bool:
        """A training that saves by hand has done a step."""
        self._stepped(number)
        self._end(number)
        return number in self._plan["saves"]

    def torch_save(self, save: Any, state: Any, file: Any, *args: Any, **named: Any) -> None:
        """`torch.save`: a kill in it leaves half a file."""
        save(state, file, *args, **named)
        if ["in the save", self._done] == self._plan["kill"] and isinstance(file, (str, Path)):
            os.truncate(file, os.path.getsize(file) // 2)
            self.kill("in the save")

    # what a step consists of

    def _is_on(self) -> bool:
        is_main = threading.current_thread() is threading.main_thread()
        return is_main and self._owner is not None and os.getpid() == self._pid

    def _append(self, name: str, value: Any) -> None:
        if self._is_on():
            self._record.setdefault(name, []).append(text_of(value))

    def moment(self) -> None:
        """The step under way has read its data, and changes parameters from here on."""
        if isinstance(self._owner, ResumeWatch):
            self.kill("after the save")
        self.kill("by SIGTERM")
        if self._is_on() and "first" not in self._record:
            self._take("first")
            if self._plan["digests"]:
                ranks = Ranks(self._rank, tuple(range(self._size)))
                self._record["digests"] = digests(self._states, ranks)

    def updating(self, _: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """A step of an optimizer; with a closure, its backward is still to come."""
        if not any(map(callable, (*args[1:], *named.values()))):
            self.moment()

    def backward(self, backward: Any, tensors: Any, *args: Any, **named: Any) -> Any:
        """`torch.autograd.backward`, of a loss."""
        self.moment()
        self._append("losses", tensors)
        return backward(tensors, *args, **named)

    def _follow(self, kind: type[DataLoader[Any]]) -> None:
        if "__iter__" in vars(kind):
            _around(kind, "__iter__", self._iterate)
        for one in kind.__subclasses__():
            self._follow(one)

    def _iterate(self, iterate: Any, loader: Any) -> Any:
        before = random_states() if self._is_on() else None
        iterator = iterate(loader)
        # A DataLoader without a generator seeds its workers from torch's own: a second iterator
        # after a resume shifts all that is drawn later.
        if before is not None and before != random_states():
            self._record["drawn"] = True
        kind = type(iterator)
        if kind not in self._iterators and kind.__module__ != "builtins":
            self._iterators.add(kind)
            _around(kind, "__next__", self._fetch)
        return iterator

    def _fetch(self, fetch: Any, iterator: Any) -> Any:
        self.kill("in the data loader")
        batch = fetch(iterator)
        self._append("late_batches" if "first" in self._record else "batches", batch)
        return batch
