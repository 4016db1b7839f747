"""The story of a job: what happens to it, written to its root as it happens. FORMAT.md, "Jobs".

A job has a small object, `ckpt.telemetry.record.JobRecord`. Each record has a new key, and those
before the newest two are deleted. A thread of the coordinator writes them, through a connection of
its own, so that neither a step nor a save waits. What a store does not take is in the next record.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from ckpt.commit.log import read_format
from ckpt.commit.names import JOBS_PREFIX
from ckpt.errors import CheckpointError, NoCheckpoint
from ckpt.service.events import Restored, SaveEvent, SaveFailed, SaveSucceeded
from ckpt.service.inflight import SavesInFlight
from ckpt.service.target import UrlTarget
from ckpt.service.training import Training
from ckpt.telemetry.record import BEAT_SECONDS, JOBS_MAX, JobRecord, as_text, job_keys
from ckpt.version import __version__
from storage import RetryPolicy, Store, open_store

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.5  # between looks at what has happened, which send nothing
SLOW_SECONDS = 30.0  # after which the log says how far a save is, and between two such lines
NEWS_SECONDS = 1.0  # between two records, however much happens
# A record is three requests: a job makes at most one in 30 s, and 60 ahead of that.
AHEAD_MAX = 20
REFILL_SECONDS = 90.0
OLD_MAX = 20  # records that a store does not delete, before no more are written
STORE_SECONDS = 5.0  # for a record that a store does not take, and for the last one at the end


class Story:
    """The story of one job, from here to `close`: on the coordinator, of a url with `telemetry`;
    elsewhere nothing.
    """

    def __init__(self, training: Training) -> None:
        # Not the training itself: a state whose Checkpointer was dropped must not stay.
        self._progress, self._costs, now = training.progress, training.costs, time.time()
        self._record = JobRecord(
            begun_unix=now,
            noted_unix=now,
            host=socket.gethostname(),
            ranks=training.world.size,
            software=f"shardpoint {__version__}, torch {torch.__version__}",
        )
        # The padded time has keys sort by it. Two jobs may begin in one millisecond, hence the
        # token.
        self._key = f"{JOBS_PREFIX}{int(1000 * now):014d}-{secrets.token_hex(8)}-"
        self._number = 0  # of the newest record
        self._old: list[str] = []  # keys to delete
        self._root = ""  # its identity, once it was seen
        self._newest_error: BaseException | None = None
        self._allowed, self._tried_seconds = float(AHEAD_MAX), time.monotonic()
        self._said_seconds = self._tried_seconds
        self._has_news, self._has_failed = True, False
        self._lock = threading.RLock()
        self._closing, self._is_over = threading.Event(), threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ckpt-story")
        # Until `begin`, which most ranks never come to: `close` must not wait for them.
        self._is_over.set()

    def begin(self, training: Training, saves: SavesInFlight) -> None:
        """Write from now on, until `close`, or until nobody has `saves` any more."""
        target = training.target
        if not training.is_coordinator or not isinstance(target, UrlTarget):
            return
        if target.saving.get("telemetry"):
            # Saves repeat what fails for minutes, and count it.
            retry = RetryPolicy(deadline_seconds=STORE_SECONDS)
            store = open_store(target.where, retry=retry, **(target.storage_options or {}))
            self._is_over.clear()
            self._pool.submit(self._tick, store, weakref.ref(saves))

    def heard(self, event: SaveEvent) -> None:
        """Something has happened to the training."""
        if isinstance(event, SaveFailed):
            self._failed(event.step, event.error)
        elif isinstance(event, Restored) and not self._record.restored:
            report = event.report
            self._note(
                True,
                restored=report.attempt,
                restored_step=report.step,
                restore_seconds=event.seconds,
                steps_lost=report.reached_step and report.reached_step - report.step,
                seconds_lost=report.seconds_lost,
            )
        elif isinstance(event, SaveSucceeded):
            # The first one may have made the root; later ones are no news: they may be many.
            self._note(not self._number, saved=self._record.saved + 1)

    def ends(self, ending: str, error: BaseException | None = None) -> None:
        """How the job ends, or is about to. The first one counts."""
        if not self._record.ending:
            self._note(True, ending=ending, cause="" if error is None else as_text(error))

    def close(self, *, waits: bool = True) -> None:
        """Have the last record written, and wait for it, for some seconds at most. May be
        repeated.
        """
        self.ends("failed")
        self._closing.set()
        self._is_over.wait(STORE_SECONDS if waits else 0.0)
        self._pool.shutdown(wait=False)

    def _note(self, is_news: bool, **fields: Any) -> None:
        with self._lock:
            self._record = self._record.model_copy(update=fields)
            self._has_news = self._has_news or is_news

    def _failed(self, step: int, error: BaseException) -> None:
        with self._lock:  # by the thread that writes or the one that trains: the first to see it
            if error is not self._newest_error:
                self._newest_error, self._has_news = error, True
                self._record = self._record.after_failure(step, error)

    # the thread that writes

    def _tick(self, store: Store, ref: weakref.ref[SavesInFlight]) -> None:
        """Look once, then submit the next look: an interpreter that ends waits for tasks to finish
        and takes no new ones, so that a program that never calls `close` ends, too.
        """
        is_last = self._closing.wait(TICK_SECONDS)
        # Weak: a Checkpointer that nobody has closed and nobody has any more ends its story, too.
        saves = ref()
        is_last = is_last or saves is None
        try:
            for step, error in saves.failing() if saves else ():
                self._failed(step, error)
            now = time.monotonic()
            if saves and now - self._said_seconds > SLOW_SECONDS:
                self._said_seconds = now
                for text in saves.slow(SLOW_SECONDS):
                    logger.info("%s", text)
            since = now - self._tried_seconds
            is_due = since >= (NEWS_SECONDS if self._has_news else BEAT_SECONDS)
            allowed = min(self._allowed + since / REFILL_SECONDS, AHEAD_MAX)
            # One that has only restored, such as an evaluation, is no job of this root.
            has_begun = self._progress.calls or self._record.saved or self._record.failed
            if has_begun and (is_last or (is_due and allowed >= 1)):
                self._allowed, self._tried_seconds = allowed - 1, now
                self._write(store, list(saves.steps) if saves else [])
                self._has_failed = False
        except Exception as error:  # as of an observer: none of it must end a training
            self._has_news = True
            if not self._has_failed:
                text = "%s: what happens to this job is not noted there for now: %s: %s"
                logger.warning(text, store.url, type(error).__name__, error)
            self._has_failed = True
        if not is_last:
            with suppress(RuntimeError):  # the pool takes no tasks: the interpreter ends
                self._pool.submit(self._tick, store, ref)
            return
        store.close()
        self._is_over.set()

    def _write(self, store: Store, saving: list[int]) -> None:
        with self._lock:
            self._has_news = False
            now, step = time.time(), self._progress.step
            update: dict[str, Any] = {"noted_unix": now, "step": step, "saving": saving}
            update["first_step"] = self._progress.first_step
            for name in ("training_seconds", "blocked_seconds"):
                update[name] = max(getattr(self._costs, name), 0.0)
            self._record = record = self._record.model_copy(update=update)
        try:
            root = read_format(store)
        except NoCheckpoint:
            if self._root:
                raise  # a record must not be all that is there of a root that was removed
            return  # the first save makes the root
        if not self._root:
            commit = commit_of_script()  # takes a while, in which more may happen
            with self._lock:
                self._record = record = self._record.model_copy(update={"commit": commit})
            jobs = job_keys(store)
            # One fewer than JOBS_MAX, to leave a place for this job.
            kept = {keys[-1] for keys in jobs[1 - JOBS_MAX :]}
            stale = [key for keys in jobs for key in keys if key not in kept]
            self._root, self._old = root, stale[:OLD_MAX]
        # Another root under this url has a story of its own, and a store that deletes nothing would
        # be filled.
        if root != self._root or len(self._old) > 2 * OLD_MAX:
            raise CheckpointError(f"root {root} is there, with {len(self._old)} records that stay")
        self._number += 1
        key = f"{self._key}{self._number:08d}"
        data = record.model_dump_json().encode()
        # Not durable: a power failure may take the end of a story, and a sync would compete with
        # those of saves.
        with store.create(key, len(data), part_nbytes=len(data), durable=False) as writer:
            writer.write_part(0, [memoryview(data)])
        self._old.append(key)
        for old in self._old[:-2]:  # a reader that has listed the newest but one may still read it
            store.delete(old)
            self._old.remove(old)


def commit_of_script() -> str:
    """The commit of the git repository that the running script is in; "" where there is none."""
    folder = os.path.dirname(os.path.abspath(sys.argv[0]))
    # Without any tag (`--exclude=*`) `describe` gives the hash itself, and "-dirty" behind it.
    command = ["git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=STORE_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()[:64]
