"""Locks that a forked child may take, whatever its parent's threads were doing at the fork.

A fork copies the memory of a process and one of its threads. A lock that another thread held stays
held in the child for ever, because nobody is there who could release it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref


class ForkSafeLock:
    """A `threading.Lock` that is free in a forked child.

    What it protects must bear being seen half changed there: a count that is one too high, not a
    structure in pieces.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _locks.add(self)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As of `threading.Lock`."""
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        """As of `threading.Lock`."""
        self._lock.release()

    def renew(self) -> None:
        """Forget who holds it. Only for a child that has a single thread."""
        self._lock = threading.Lock()

    def __enter__(self) -> ForkSafeLock:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def keep_for_ever(of_parent: object) -> None:
    """In a forked child: never destroy what is its parent's. What would be destroyed, connections
    and pools above all, waits for threads that are not here.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(of_parent))


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _renew_all() -> None:
    for lock in list(_locks):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
