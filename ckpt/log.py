"""The log of a root: which checkpoints exist, told by a dense row of small records that never
change.

Every record carries the complete live set, so the last one is enough to know everything. This file
holds the bytes (FORMAT object and records) and reading; `ckpt.session` appends.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, NoReturn, get_args

import msgpack

from ckpt.errors import CheckpointError, Corrupt, NoCheckpoint, UnsupportedFormat
from ckpt.format.checksum import crc32c
from storage.errors import KeyNotFoundError, TooLargeError
from storage.store import Store

FORMAT_KEY = "FORMAT"
FORMAT_VERSION = 1
FORMAT_NBYTES_MAX = 4096
LOG_PREFIX = "log/"
STEPS_PREFIX = "steps/"
MANIFEST_NAME = "MANIFEST"
TELEMETRY_NAME = "TELEMETRY"  # how the save went; optional, nothing depends on it
LISTED_MAX = 1000  # a page of S3
RECORD_MAGIC = b"SHPTLOG1"
RECORD_NBYTES_MAX = (
    4 * 1024 * 1024
)  # about 30,000 live checkpoints; bounds what a hostile record costs
STEP_MAX = 10**18 - 1
INTEGER_MAX = 2**63 - 1
FIRST_LINE = 0  # of every commit whose record does not tell its line

Kind = Literal["CLAIM", "COMMIT", "RETIRE", "PIN", "UNPIN", "VERIFIED"]
KINDS: tuple[str, ...] = get_args(Kind)

_ATTEMPT = re.compile(r"e([0-9]{6,18})-[0-9a-f]{16}")
_STEP_DIR = re.compile(r"([0-9]{8,18})-(e[0-9]{6,18}-[0-9a-f]{16})")
_FILE_NAME = re.compile(r"MANIFEST|TELEMETRY|[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.safetensors")
_FORMAT_LINE = re.compile(rb"shardpoint (1) ([0-9a-f]{32}) ([0-9a-f]{8})\n")
_FORMAT_START = re.compile(rb"shardpoint ([0-9]{1,9})[ \n]")


# --- values ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LiveEntry:
    """One checkpoint that exists: its manifest, and what retention has to know of it.

    `slot` is the log position of its COMMIT. `references` are attempts whose files it needs.
    `line` names the training that it is a state of: the slot of that line's first commit. None for
    what no training has saved: imports, and copies in another layout.
    """

    attempt: str
    step: int
    slot: int
    manifest_nbytes: int
    manifest_digest: bytes
    pinned: bool
    verified: bool
    metric: float | None
    references: tuple[str, ...]
    line: int | None = FIRST_LINE

    @property
    def prefix(self) -> str:
        """The step directory, with the closing slash."""
        return step_prefix(self.step, self.attempt)


@dataclass(frozen=True, slots=True)
class Record:
    """One log record. `time_unix` is for display only; `live` is ascending in `slot`.

    `previous` is the digest of the record in the slot before; None in slot 0, and in records of
    0.1, which did not keep it.
    """

    kind: Kind
    slot: int
    epoch: int
    write_id: bytes
    time_unix: float
    attempt: str | None
    live: tuple[LiveEntry, ...]
    previous: bytes | None = None


@dataclass(frozen=True, slots=True)
class LogState:
    """What the newest record says. An empty log has slot -1 and epoch 0."""

    slot: int
    epoch: int
    live: tuple[LiveEntry, ...]

    @property
    def latest(self) -> LiveEntry | None:
        """What a training resumes from: see `latest_of`."""
        return latest_of(self.live)

    def find(self, attempt: str) -> LiveEntry | None:
        """The live entry of that attempt."""
        return next((entry for entry in self.live if entry.attempt == attempt), None)


def latest_of(live: Sequence[LiveEntry]) -> LiveEntry | None:
    """The newest commit of a training's line; where there is no line, the newest commit.

    `live` is ascending in `slot`. None when it is empty.
    """
    of_a_line = (entry for entry in reversed(live) if entry.line is not None)
    return next(of_a_line, live[-1] if live else None)


EMPTY_STATE = LogState(slot=-1, epoch=0, live=())


@dataclass(frozen=True, slots=True)
class RootFormat:
    """What the FORMAT object says: the format's version and the root's identity (32 hex digits)."""

    version: int
    root: str


# --- names ----------------------------------------------------------------------------------------


def record_key(slot: int) -> str:
    """The key of a log slot."""
    return f"{LOG_PREFIX}{slot:020d}"


def attempt_name(epoch: int, unique: bytes) -> str:
    """The name of a new attempt from its session's epoch and 8 random bytes."""
    if len(unique) != 8:
        raise ValueError(f"an attempt name needs 8 random bytes, got {len(unique)}")
    return f"e{epoch:06d}-{unique.hex()}"


def attempt_epoch(attempt: str) -> int:
    """The epoch in an attempt's name. Raises ValueError for anything that is no attempt name."""
    match = _ATTEMPT.fullmatch(attempt)
    if match is None or f"{int(match[1]):06d}" != match[1] or int(match[1]) < 1:
        raise ValueError(f"not an attempt name: {attempt!r}")
    return int(match[1])


def step_prefix(step: int, attempt: str) -> str:
    """The directory of an attempt, with the closing slash."""
    return f"{STEPS_PREFIX}{step:08d}-{attempt}/"


def parse_step_key(key: str) -> tuple[int, str, str] | None:
    """(step, attempt, file name) of a key that we may have written, None for any other key.

    Deletion rests on it: what has no such name is never touched.
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


def manifest_digest(encoded_manifest: bytes | memoryview) -> bytes:
    """The digest of a manifest as the log keeps it: SHA-256, 32 bytes."""
    return hashlib.sha256(encoded_manifest).digest()


# --- the FORMAT object ----------------------------------------------------------------------------


def encode_format(root: str) -> bytes:
    """The one line of a root's FORMAT object."""
    line = f"shardpoint {FORMAT_VERSION} {root}".encode("ascii")
    data = line + b" %08x\n" % crc32c(line)
    assert _FORMAT_LINE.fullmatch(data), f"not a root id: {root!r}"
    return data


def decode_format(data: bytes, *, where: str) -> RootFormat:
    """Parse a FORMAT object. Raises UnsupportedFormat for a newer version, Corrupt for a damaged
    one.
    """
    start = _FORMAT_START.match(data)
    if start is not None and int(start[1]) > FORMAT_VERSION:
        raise UnsupportedFormat(
            f"{where} says format version {int(start[1])}, this library reads up to "
            f"{FORMAT_VERSION}; upgrade shardpoint"
        )
    match = _FORMAT_LINE.fullmatch(data)
    if match is None:
        raise Corrupt(
            f"{where} is not a shardpoint FORMAT line (got {data[:60]!r}); if this is no "
            "checkpoint root, choose another url; if it was damaged, load by a step directory's "
            "own path, <url>/steps/<step>-<attempt>"
        )
    line = data[: match.end(2)]
    if crc32c(line) != int(match[3], 16):
        raise Corrupt(
            f"{where}: checksum {match[3].decode()} does not match its line (expected "
            f"{crc32c(line):08x}); load by a step directory's own path, "
            "<url>/steps/<step>-<attempt>"
        )
    return RootFormat(version=int(match[1]), root=match[2].decode())


def read_format(store: Store) -> RootFormat:
    """The identity of the root. Raises NoCheckpoint when there is no FORMAT object, with a guess at
    what the caller may have meant."""
    where = f"{store.url}/{FORMAT_KEY}"
    try:
        return decode_format(store.get_bounded(FORMAT_KEY, FORMAT_NBYTES_MAX), where=where)
    except TooLargeError as error:
        raise Corrupt(
            f"{error}: a FORMAT object has one line; this is not a shardpoint root, choose another "
            "url"
        ) from None
    except KeyNotFoundError:
        raise _no_checkpoint(store) from None


def _no_checkpoint(store: Store, looked_at_max: int = 1000) -> NoCheckpoint:
    """Say that there is no root here, and look once at what is here instead."""
    keys = [info.key for info in itertools.islice(store.list(""), looked_at_max)]
    below = sorted({key[: -len("/FORMAT")] for key in keys if key.endswith("/FORMAT")})
    message = f"{store.url} has no shardpoint checkpoint: no {FORMAT_KEY} object"
    if below:
        message += f"; did you mean {store.url.rstrip('/')}/{below[0]} ?"
    elif any(key.startswith((LOG_PREFIX, STEPS_PREFIX)) for key in keys):
        message += (
            f", though there is a {LOG_PREFIX} or {STEPS_PREFIX} folder: the copy is incomplete or "
            "FORMAT was removed; load by a step directory's own path, <url>/steps/<step>-<attempt>"
        )
    elif MANIFEST_NAME in keys:
        message += "; it is the directory of one step: did you mean to open it by its own path?"
    elif keys:
        message += f"; it holds other things (such as {keys[0]!r}): check the url"
    else:
        message += "; it is empty or does not exist: check the url, or save something there first"
    return NoCheckpoint(message)


# --- record bytes ---------------------------------------------------------------------------------


def encode_record(record: Record) -> bytes:
    """The canonical bytes of a record: magic, msgpack map, crc32c of all before (little-endian)."""
    body = {
        "kind": record.kind,
        "slot": record.slot,
        "epoch": record.epoch,
        "write_id": record.write_id,
        "time_unix": record.time_unix,
        "attempt": record.attempt,
        "live": [_entry_map(entry) for entry in record.live],
    }
    if record.previous is not None:
        body["previous"] = record.previous
    data = RECORD_MAGIC + bytes(msgpack.packb(body, use_bin_type=True))
    data += struct.pack("<I", crc32c(data))
    if len(data) > RECORD_NBYTES_MAX:
        raise CheckpointError(
            f"the live set of {len(record.live)} checkpoints needs a log record of {len(data)} "
            "bytes, "
            f"at most {RECORD_NBYTES_MAX} are allowed; retire old checkpoints (ckpt prune)"
        )
    return data


def record_digest(encoded: bytes) -> bytes:
    """The digest of a record as the record after it keeps it: SHA-256, 32 bytes."""
    return hashlib.sha256(encoded).digest()


def _entry_map(entry: LiveEntry) -> dict[str, Any]:
    # The first line is not written: a root with one line has records as before there were lines.
    line = {} if entry.line == FIRST_LINE else {"line": entry.line}
    return {
        "attempt": entry.attempt,
        "step": entry.step,
        "slot": entry.slot,
        "manifest_nbytes": entry.manifest_nbytes,
        "manifest_digest": entry.manifest_digest,
        "pinned": entry.pinned,
        "verified": entry.verified,
        "metric": entry.metric,
        "references": list(entry.references),
        **line,
    }


def decode_record(data: bytes, *, slot: int, where: str) -> Record:
    """Parse a record that may be hostile. Only the exact bytes that `encode_record` makes pass.

    Raises Corrupt naming the object and the next move, UnsupportedFormat for unknown kinds or
    fields.
    """
    if len(data) > RECORD_NBYTES_MAX:
        _corrupt(where, f"{len(data)} bytes, at most {RECORD_NBYTES_MAX} are allowed")
    if len(data) < len(RECORD_MAGIC) + 4 or not data.startswith(RECORD_MAGIC):
        _corrupt(where, f"no record starts with {data[:8]!r}")
    (stored,) = struct.unpack("<I", data[-4:])
    if crc32c(data[:-4]) != stored:
        _corrupt(where, f"checksum is {crc32c(data[:-4]):08x}, {stored:08x} was written")
    try:
        body = msgpack.unpackb(
            data[len(RECORD_MAGIC) : -4], raw=False, strict_map_key=True, use_list=True
        )
    except Exception as error:  # msgpack raises a dozen classes for bad input
        _corrupt(where, f"not msgpack ({type(error).__name__})")
    record = _record_of(body, slot=slot, where=where)
    if encode_record(record) != data:
        _corrupt(where, "not in canonical form")
    return record


def _record_of(body: Any, *, slot: int, where: str) -> Record:
    got = _typed(body, Record, where)
    kind = _checked(got["kind"], str, where, "kind")
    if kind not in KINDS:
        raise UnsupportedFormat(
            f"{where}: record kind {kind[:40]!r} is not known to this version; upgrade shardpoint"
        )
    live = _checked(got["live"], list, where, "live")
    record = Record(
        kind=kind,
        slot=_integer(got["slot"], where, "slot"),
        epoch=_integer(got["epoch"], where, "epoch"),
        write_id=_checked(got["write_id"], bytes, where, "write_id"),
        time_unix=_checked(got["time_unix"], float, where, "time_unix"),
        attempt=None if got["attempt"] is None else _attempt(got["attempt"], where),
        live=tuple(_entry_of(entry, where) for entry in live),
        previous=_checked(got["previous"], bytes, where, "previous") if "previous" in got else None,
    )
    problem = record_problem(record, slot=slot)
    if problem is not None:
        _corrupt(where, problem)
    return record


def _entry_of(body: Any, where: str) -> LiveEntry:
    got = _typed(body, LiveEntry, where)
    references = _checked(got["references"], list, where, "references")
    metric, line = got["metric"], got.get("line", FIRST_LINE)
    return LiveEntry(
        attempt=_attempt(got["attempt"], where),
        step=_integer(got["step"], where, "step"),
        slot=_integer(got["slot"], where, "slot of a checkpoint"),
        manifest_nbytes=_integer(got["manifest_nbytes"], where, "manifest_nbytes"),
        manifest_digest=_checked(got["manifest_digest"], bytes, where, "manifest_digest"),
        pinned=_checked(got["pinned"], bool, where, "pinned"),
        verified=_checked(got["verified"], bool, where, "verified"),
        metric=None if metric is None else _checked(metric, float, where, "metric"),
        references=tuple(_attempt(name, where) for name in references),
        line=None if line is None else _integer(line, where, "line"),
    )


def record_problem(record: Record, *, slot: int) -> str | None:
    """What is wrong with a record that claims to stand in `slot`, None when it makes sense.

    Writers check their own records with it before sending, readers what they got.
    """
    if record.slot != slot:
        return f"says slot {record.slot}, expected {slot}"
    if record.epoch < 1 or len(record.write_id) != 16 or not math.isfinite(record.time_unix):
        return "epoch, write id or time is out of range"
    if (record.attempt is None) != (record.kind == "CLAIM"):
        return f"attempt of a {record.kind} is {record.attempt!r}"
    if record.previous is not None and (slot == 0 or len(record.previous) != 32):
        return "digest of the record before is out of range"
    names = {entry.attempt for entry in record.live}
    slots = [entry.slot for entry in record.live]
    if len(names) != len(slots) or slots != sorted(set(slots)) or any(s > slot for s in slots):
        return "live set is not ascending and unique"
    for entry in record.live:
        problem = _entry_problem(entry, record, names)
        if problem is not None:
            return f"checkpoint {entry.attempt}: {problem}"
    return _kind_problem(record)


def _entry_problem(entry: LiveEntry, record: Record, names: set[str]) -> str | None:
    if attempt_epoch(entry.attempt) > record.epoch:
        return f"is of a later epoch than the record's {record.epoch}"
    if entry.step > STEP_MAX or not 1 <= len(entry.manifest_digest) <= 64:
        return "step or manifest digest is out of range"
    if entry.metric is not None and not math.isfinite(entry.metric):
        return "metric is not a finite number"
    if entry.line is not None and entry.line > entry.slot:
        return f"is of line {entry.line}, which begins after its commit"
    if list(entry.references) != sorted(set(entry.references)) or entry.attempt in entry.references:
        return "references are not ascending and unique"
    missing = [name for name in entry.references if name not in names]
    return f"references {missing[0]}, which is not live" if missing else None


def _kind_problem(record: Record) -> str | None:
    own = [entry for entry in record.live if entry.attempt == record.attempt]
    at_slot = [entry for entry in record.live if entry.slot == record.slot]
    if record.kind == "COMMIT":
        return None if own and own == at_slot else "the committed attempt is not in its live set"
    if at_slot:
        return f"a {record.kind} cannot bring a checkpoint to life"
    if record.kind == "RETIRE" and own:
        return "the retired attempt is still in its live set"
    if record.kind in ("PIN", "UNPIN", "VERIFIED") and not own:
        return f"the attempt of a {record.kind} is not in its live set"
    return None


def _typed(body: Any, cls: type, where: str) -> dict[str, Any]:
    """The map's fields, which must be those of `cls`, no more; those with a default may lack."""
    expected = [field.name for field in fields(cls)]
    optional = [field.name for field in fields(cls) if field.default is not MISSING]
    if not isinstance(body, dict):
        _corrupt(where, f"expected a map, got {type(body).__name__}")
    missing = [name for name in expected if name not in body and name not in optional]
    if missing:
        _corrupt(where, f"field {missing[0]!r} is missing")
    extra = [name for name in body if name not in expected]
    if extra:
        # Who rewrote the live set would drop what it does not know, so it may not go on.
        raise UnsupportedFormat(
            f"{where}: field {str(extra[0])[:40]!r} is not known to this version; upgrade "
            "shardpoint"
        )
    return body


def _checked(value: Any, cls: type, where: str, name: str) -> Any:
    if type(value) is not cls:
        _corrupt(where, f"{name} is {type(value).__name__}, expected {cls.__name__}")
    return value


def _integer(value: Any, where: str, name: str) -> int:
    if type(value) is not int or not 0 <= value <= INTEGER_MAX:
        _corrupt(where, f"{name} is not an integer from 0 to 2**63 - 1")
    return value


def _attempt(value: Any, where: str) -> str:
    try:
        attempt_epoch(_checked(value, str, where, "attempt"))
    except ValueError:
        _corrupt(where, f"{value[:60]!r} is not an attempt name")
    return str(value)


def _corrupt(where: str, problem: str) -> NoReturn:
    raise Corrupt(
        f"log record {where} is damaged: {problem}. The checkpoints themselves are not affected: "
        "load by a step directory's own path, <url>/steps/<step>-<attempt>"
    )


# --- reading --------------------------------------------------------------------------------------


class Log:
    """Reads the log of one root. Remembers the newest record it saw, so that looking again is one
    request. Safe to use from several threads: a stale memory costs requests, nothing else."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._newest: Record | None = None

    def state(self) -> LogState:
        """What exists now. At most 50 requests for a million records, one or two when warm."""
        newest = self._newest
        known = newest.slot if newest is not None else -1
        last = self._last_slot(self._last_listed() if newest is None else known)
        if last == known:
            return state_after(newest)
        found = self.record(last)
        self.saw(found)
        return state_after(found)

    def digest_of(self, state: LogState) -> bytes | None:
        """What the record after `state`, which `state()` has returned last, keeps of the newest
        one. None while the log is empty.
        """
        newest = self._newest
        if newest is None or newest.slot != state.slot:
            return None if state.slot < 0 else record_digest(self.raw(state.slot))
        return record_digest(encode_record(newest))

    def record(self, slot: int) -> Record:
        """One record. Raises Corrupt when it is damaged, KeyNotFoundError when the slot is free."""
        key = record_key(slot)
        return decode_record(self.raw(slot), slot=slot, where=f"{self.store.url}/{key}")

    def raw(self, slot: int) -> bytes:
        """The bytes in a slot, whatever they are; no more than a record may have."""
        key = record_key(slot)
        try:
            return self.store.get_bounded(key, RECORD_NBYTES_MAX)
        except TooLargeError as error:
            _corrupt(f"{self.store.url}/{key}", str(error))

    def history(self) -> Iterator[Record]:
        """All records from the first on: as many requests as records. Raises Corrupt at a hole."""
        last = self.state().slot
        for slot in range(last + 1):
            try:
                yield self.record(slot)
            except KeyNotFoundError:
                _corrupt(f"{self.store.url}/{record_key(slot)}", "it was removed")

    def saw(self, record: Record) -> None:
        """Remember a record that is known to stand in the log, as an appender does with its own."""
        if self._newest is None or record.slot > self._newest.slot:
            self._newest = record

    def _last_listed(self) -> int:
        """A slot known to be occupied, or -1: where requests take long, one page of a listing
        stands for a dozen of them. Others may follow, so nothing rests on its being fresh.
        """
        last = -1
        if self.store.part_nbytes_min > 1:
            for found in itertools.islice(self.store.list(LOG_PREFIX), LISTED_MAX):
                if found.key != record_key(last + 1):
                    break
                last += 1
        return last

    def _last_slot(self, known: int) -> int:
        """The last occupied slot at or after `known`, which is occupied (or -1: none known).

        Slots are dense, so: gallop until a free slot, then bisect. Each step is one request.
        """
        low, stride = known, 1
        while self._occupied(low + stride):
            low += stride
            # Mostly there is one new record or none, so look at the next one before taking off.
            stride = 1 if low == known + 1 else stride * 4
        high = low + stride
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._occupied(middle) else (low, middle)
        return low

    def _occupied(self, slot: int) -> bool:
        try:
            self.store.info(record_key(slot))
        except KeyNotFoundError:
            return False
        return True


def state_after(record: Record | None) -> LogState:
    """The state that a record leaves behind; without a record the log is empty."""
    if record is None:
        return EMPTY_STATE
    return LogState(slot=record.slot, epoch=record.epoch, live=record.live)
