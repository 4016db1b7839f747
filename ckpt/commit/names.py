"""Names of the objects under a root: log records, step directories, attempts, data files. And steps
and counts as callers pass them: `int`, or what numpy and torch have in its place.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

from storage.store import Store

LOG_PREFIX = "log/"
SEGMENTS_PREFIX = "log/live/"  # behind all records in a listing
STEPS_PREFIX = "steps/"
LINES_PREFIX = "lines/"  # roots of their own, one for each named training
LEASES_PREFIX = "leases/"  # what readers ask retention to leave; see ckpt.commit.leases
JOBS_PREFIX = "jobs/"  # what happens to the jobs that save here; see ckpt.telemetry.record
MANIFEST_NAME = "MANIFEST"
TELEMETRY_NAME = "TELEMETRY"  # how the save went; optional, nothing depends on it
PART_PREFIX = "PART-"  # what one of several writers has of an attempt; see ckpt.saving.shared
RESERVE_KEY = "RESERVE"  # space kept back on a disk, see ckpt.commit.writer

_ATTEMPT = re.compile(r"e([0-9]{6,18})-[0-9a-f]{16}")
_RECORD = re.compile(r"log/([0-9]{20})")
_STEP_DIR = re.compile(r"([0-9]{8,18})-(e[0-9]{6,18}-[0-9a-f]{16})")
_LINE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NO_DATA = r"MANIFEST|TELEMETRY|PART-[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
_FILE_NAME = re.compile(rf"{_NO_DATA}|[A-Za-z0-9][A-Za-z0-9._-]{{0,199}}\.safetensors")

# Narrower than what readers accept: files that another writer named go only if the manifest lists
# them.
_OUR_NAME = re.compile(rf"{_NO_DATA}|rank[0-9]{{5,}}-[0-9]{{3,}}\.safetensors")


def line_prefix(name: str) -> str:
    """Where the root of a named training lies, below that of all. Raises ValueError for a bad
    name.
    """
    if not isinstance(name, str) or _LINE.fullmatch(name) is None:
        raise ValueError(
            f"line={name!r}: expected 1 to 100 letters, digits, '.', '_' and '-', such as "
            "'generator'"
        )
    return LINES_PREFIX + name


PUBLISHED = "published"  # the line of publications, if it has no other name


def line_names(store: Store) -> list[str]:
    """The named trainings below a root, at one request each."""
    names: list[str] = []
    while True:
        after = f"{LINES_PREFIX}{names[-1]}0" if names else ""  # "0" follows "/": behind all of it
        first = next(iter(store.list(LINES_PREFIX, after=after)), None)
        if first is None:
            return names
        names.append(first.key.split("/")[1])


def record_key(slot: int) -> str:
    """The key of a log slot."""
    return f"{LOG_PREFIX}{slot:020d}"


def segment_key(digest: bytes) -> str:
    """The key of a segment of the live set, by its SHA-256."""
    return f"{SEGMENTS_PREFIX}{digest.hex()}"


def record_slot(key: str) -> int | None:
    """The inverse of `record_key`, None for any other key."""
    match = _RECORD.fullmatch(key)
    return int(match[1]) if match else None


def attempt_name(epoch: int, unique: bytes) -> str:
    """The name of a new attempt from its session's epoch and 8 random bytes."""
    if len(unique) != 8:
        raise ValueError(f"an attempt name needs 8 random bytes, got {len(unique)}")
    return f"e{epoch:06d}-{unique.hex()}"


def attempt_epoch(attempt: str) -> int:
    """The epoch in an attempt's name. Raises ValueError for anything that is no attempt name."""
    match = _ATTEMPT.fullmatch(attempt)
    # With free padding, two names would stand for one epoch and sort differently.
    if match is None or f"{int(match[1]):06d}" != match[1] or int(match[1]) < 1:
        raise ValueError(f"not an attempt name: {attempt!r}")
    return int(match[1])


def step_prefix(step: int, attempt: str) -> str:
    """The directory of an attempt, with the closing slash."""
    return f"{STEPS_PREFIX}{step:08d}-{attempt}/"


def parse_step_key(key: str) -> tuple[int, str, str] | None:
    """(step, attempt, file name) of a key that we may have written, None for any other key.

    What has no such name is never touched. Of what has one, that is deleted which a manifest lists,
    or which has a name that this library gives (`is_our_name`).
    """
    parts = key.split("/")
    if len(parts) != 3 or parts[0] != "steps":
        return None
    match = _STEP_DIR.fullmatch(parts[1])
    if match is None or _FILE_NAME.fullmatch(parts[2]) is None:
        return None
    step, attempt = int(match[1]), match[2]
    try:
        attempt_epoch(attempt)
    except ValueError:
        return None
    return (step, attempt, parts[2]) if f"{step:08d}" == match[1] else None


def is_our_name(name: str) -> bool:
    """Whether a file in a step's directory has a name that this library gives to files there."""
    return _OUR_NAME.fullmatch(name) is not None


LISTED_MAX = 1000  # a page of S3


class StepDirectory(NamedTuple):
    """One attempt as a listing shows it: whether it has a MANIFEST, so that all of it was written,
    and when its first object was.
    """

    step: int
    attempt: str
    is_written: bool
    modified_unix: float


def attempts_on(store: Store, *, after: str = "") -> Iterator[StepDirectory]:
    """Every attempt that has an object of ours behind the key `after`, by its first one (MANIFEST
    comes before data files): one listing, and one more for each directory with more than a page of
    them.
    """
    listing = store.list(STEPS_PREFIX, after=after)
    directory, count = "", 0
    while (info := next(listing, None)) is not None:
        if directory and info.key.startswith(directory):
            count += 1
            if count == LISTED_MAX:
                # "0" is the character after "/": this key is greater than all keys in it.
                listing = store.list(STEPS_PREFIX, after=directory[:-1] + "0")
        elif (parsed := parse_step_key(info.key)) is not None:
            step, attempt, name = parsed
            directory, count = step_prefix(step, attempt), 0
            yield StepDirectory(step, attempt, name == MANIFEST_NAME, info.modified_unix)


def plain_int(value: Any) -> Any:
    """`value` as an int where it stands for one, else as it is: for the check that refuses it.

    A record of the log, a header and `type(...) is int` take nothing else than an int. Bools are
    left alone, because a count that is True is a mistake.
    """
    if type(value) is int or isinstance(value, bool):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def checked_count(value: Any, shown: str) -> int:
    """`value` as an int of at least 1. Raises ValueError, which begins with `shown`."""
    number = plain_int(value)
    if type(number) is not int or number < 1:
        raise ValueError(f"{shown}: expected an int of at least 1")
    return number


def checked_period(value: Any, shown: str) -> int | timedelta:
    """A period as a count of saves, or as a time. Raises ValueError, which begins with `shown`."""
    if isinstance(value, timedelta) and value > timedelta(0):
        return value
    try:
        return checked_count(value, shown)
    except ValueError as error:
        raise ValueError(f"{error}, or a timedelta above 0") from None


def plain_float(value: Any) -> Any:
    """`value` as a float where it stands for one, else as it is: for the check that refuses it.

    A tensor may change later, so its value is taken now.
    """
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        return value


def is_finite(value: Any) -> bool:
    """Whether `value` is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)
