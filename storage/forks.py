"""Locks that a forked child may take, whatever its parent's threads were doing at the fork.

A fork copies the memory of a process and one of its threads. A lock that another thread held stays
held in the child for ever, because nobody is there who could release it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref


def ForkSafeLock() -> threading.Lock:
    """A new `threading.Lock` that is free in a forked child; like that, a function.

    What it protects must bear being seen half changed there: a count that is one too high, not a
    structure in pieces.
    """
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def keep_for_ever(of_parent: object) -> None:
    """In a forked child: never destroy what is its parent's. What would be destroyed, connections
    and pools above all, waits for threads that are not here.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(of_parent))


_locks: weakref.WeakSet[threading.Lock] = weakref.WeakSet()


def _renew_all() -> None:
    for lock in list(_locks):
        if lock.locked():  # by a thread that is not here
            lock.release()


os.register_at_fork(after_in_child=_renew_all)
