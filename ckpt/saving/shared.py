"""One checkpoint that several jobs write: each writes its part, one of them commits all.

    begin -> attempt -> each writer: data files, then PART -> commit: PARTs, headers -> MANIFEST

The ranks of all writers are those of one world, the first writer's first. PART is the manifest that
a writer's files alone would have; that it is there says that all of its ranks are done and agree.
Only the session that began the attempt commits it, so the log fences as for any save.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain

from ckpt.commit.locate import ResumePoint
from ckpt.commit.log import Log, read_format
from ckpt.commit.names import PART_PREFIX, attempt_epoch, step_prefix
from ckpt.commit.session import RankedSession
from ckpt.errors import Corrupt, Fenced, InvalidArgument, InvalidState, NoCheckpoint, StoreRefused
from ckpt.format.codec import decode_values
from ckpt.format.datafile_index import contradictions, files_by_rank, open_file, part_of_rank
from ckpt.format.joint_manifest import build_manifest
from ckpt.format.manifest import WRITERS, Header, Manifest
from ckpt.format.manifest_codec import decode_manifest
from ckpt.format.object_parts import data_file_name
from ckpt.saving.save import Committed, discard, informed, store_manifest
from ckpt.saving.task import SaveTask, WriterPlace, header_of
from ckpt.world.base import World, collectively, from_coordinator
from storage import KeyNotFoundError, Store

SHOWN_MAX = 10
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, repr=False)
class SharedSave:
    """A checkpoint that several jobs write, begun by `ckpt.begin`; nothing of it is visible before
    `commit`.

    `writers` has the number of ranks of each. What is never committed is deleted by `discard`, or
    when the next job claims the root.
    """

    task: SaveTask
    header: Header
    writers: Mapping[str, int]
    continues: ResumePoint | None
    ready: Callable[[str], object]  # waits for saves in the background, by the name of a call

    def __repr__(self) -> str:
        about = f"step={self.header.step}, attempt={self.header.attempt!r}"
        return f"SharedSave({about}, writers={dict(self.writers)})"

    @property
    def path(self) -> str:
        """Where the checkpoint is once it is committed; `ckpt.open` and `ckpt.load` take it."""
        url, header = self.task.store.url, self.header
        return f"{url}/{step_prefix(header.step, header.attempt)}".rstrip("/")

    def token(self, writer: str) -> str:
        """What `ckpt.save(..., into=)` of that writer takes, as text that may be sent anywhere; it
        holds no secrets. Raises InvalidArgument for a name that `writers` lacks.
        """
        if writer not in self.writers:
            raise InvalidArgument(f"writer={writer!r}: expected one of {', '.join(self.writers)}")
        return json.dumps([self.header.model_dump_json(), writer])

    def commit(self) -> str:
        """Commit what all writers have saved, in one write; returns `path`. May be repeated.

        Collective over the ranks that began it. Raises InvalidState, the same on all ranks, where a
        writer has no part yet, or two have one name, and the checkpoint stays open: call it again,
        or `discard`. Raises like `ckpt.save` besides: Fenced when another job has claimed the root,
        OutcomeUnknown when the commit got no answer. After a later save of the same training it is
        a checkpoint that a restart does not resume, as an import.
        """
        ranked, header = self.task.session, self.header
        self.ready("SharedSave.commit")
        ranked.settle()

        def run() -> Committed:
            own = ranked.session
            # Repeated after a lost answer, the commit may be there already.
            if own is not None and own.state().find(header.attempt) is None:
                manifest = _united(self.task.store, header, self.writers)
                commit = store_manifest(self.task.store, manifest)
                # A save in between has moved the training on: a restart must not go back to this
                # one.
                metric, is_next = self.task.options.metric, own.resume_point == self.continues
                own.commit(commit._replace(metric=metric, in_line=is_next))
            return Committed()

        informed(ranked, run, f"step {header.step} ({header.attempt})")
        return self.path

    def discard(self) -> None:
        """Delete what the writers have saved; none of it can be committed afterwards. Collective
        over the ranks that began it. What cannot be deleted is left to the next job.
        """
        ranked = self.task.session
        self.ready("SharedSave.discard")
        collectively(ranked.world, "discard", lambda: discard(ranked, self.header))


def begin_shared(
    task: SaveTask,
    writers: Mapping[str, int],
    modules: Sequence[str],
    ready: Callable[[str], object],
) -> SharedSave:
    """Name an attempt for several writers. Collective; raises InvalidArgument and InvalidState."""
    bad = [name for name in writers if not isinstance(name, str) or not _NAME.fullmatch(name)]
    bad += [name for name, ranks in writers.items() if type(ranks) is not int or ranks < 1]
    if bad or not writers:
        raise InvalidArgument(
            f"writers={dict(writers)!r}: expected names of up to 100 letters, digits, '.', '_' and "
            "'-', each with its number of ranks, such as {'trainer': 8, 'loader': 1}"
        )

    def made() -> bytes:
        session = task.session.session
        assert session is not None, "the coordinator has it"
        header = header_of(task, session.new_attempt(), modules)
        user = {**header.user, WRITERS: json.dumps(list(writers.items()))}
        whole = {"user": user, "world_size": sum(writers.values())}
        return header.model_copy(update=whole).model_dump_json().encode()

    task.session.settle()
    header = Header.model_validate_json(from_coordinator(task.session.world, "attempt", made))
    session = task.session.session
    continues = session.resume_point if session else None
    return SharedSave(task, header, dict(writers), continues, ready)


def place_of(token: str) -> WriterPlace:
    """The place that a token names. Raises InvalidArgument for anything else."""
    try:
        text, writer = json.loads(token)
        header = Header.model_validate_json(text)
        writers = dict(json.loads(header.user[WRITERS]))
        ends = dict(zip(writers, accumulate(writers.values()), strict=True))
        return WriterPlace(header, writer, ends[writer] - writers[writer], writers[writer])
    except (KeyError, TypeError, ValueError, RecursionError) as error:  # as of the header
        raise InvalidArgument(
            f"into={token!r:.100}: expected SharedSave.token() of a save that ckpt.begin began"
        ) from error


def open_place(world: World, store: Store, place: WriterPlace) -> RankedSession:
    """The attempt of others as this world sees it; nothing is claimed. Collective.

    Raises StoreRefused where the root is another one, Fenced where a later job has claimed it, and
    InvalidState where the writer has another number of ranks.
    """
    header, own_epoch = place.header, attempt_epoch(place.header.attempt)

    def compare() -> None:
        if world.size != place.ranks:
            text = f"writer {place.writer!r} was begun with {place.ranks} ranks, and {world.size} "
            raise InvalidState([text + "save; pass their number to ckpt.begin(writers=)"])
        seen = "no root"
        with suppress(NoCheckpoint):
            seen = read_format(store)
        if seen != header.root:
            raise StoreRefused(
                f"{store.url} shows {seen}, and into= is of root {header.root}: pass the url that "
                "ckpt.begin was given, as this host reaches it"
            )
        # Only the first rank asks the log: one request for all.
        epoch = own_epoch if world.rank else Log(store).state().epoch
        if epoch != own_epoch:
            raise Fenced(
                f"{store.url}: {header.attempt} was begun by a job that another one has replaced "
                f"(epoch {epoch}), so it can never be committed; begin a new one"
            )
        # A part is written once: nothing of an attempt is ever overwritten.
        name = data_file_name(place.first_rank + world.rank, 0)
        if store.exists(first := step_prefix(header.step, header.attempt) + name):
            text = f"{store.url}/{first} is there: writer {place.writer!r} has saved its part, or "
            text += "died while it did, and a part is written once; discard() and begin another"
            raise InvalidState([text])

    collectively(world, "open part", compare)
    return RankedSession(world, header.root, own_epoch, None)


def _united(store: Store, header: Header, writers: Mapping[str, int]) -> Manifest:
    """The manifest of all parts. Raises InvalidState for a part that is not there, and for names
    of two writers; KeyNotFoundError and Corrupt for files that are not as their writers left them.
    """
    prefix, problems = step_prefix(header.step, header.attempt), list[str]()
    parts: dict[str, Manifest] = {}
    for writer in writers:
        try:
            parts[writer] = decode_manifest(store.get(f"{prefix}{PART_PREFIX}{writer}"))
        except KeyNotFoundError:
            problems.append(
                f"writer {writer!r} has saved no part of step {header.step} ({header.attempt}): "
                "wait for its ckpt.save(..., into=) to return, then commit; or discard()"
            )
    owners: dict[str, list[str]] = {}
    for writer, part in parts.items():
        values = [decode_values(data) for data in (part.values, *part.per_rank)]
        for name in {*part.fqns, *part.aliases, *chain.from_iterable(values)}:
            owners.setdefault(name, []).append(writer)
    twice = sorted(name for name, its in owners.items() if len(its) > 1)
    problems += [
        f"{name}: writers {' and '.join(map(repr, owners[name]))} have both saved it; give their "
        "states other names, discard() this save and begin another"
        for name in twice[:SHOWN_MAX]
    ]
    if problems:
        raise InvalidState(problems)
    files = [
        open_file(store, prefix + name, name, int(nbytes))
        for part in parts.values()
        for name, nbytes in zip(part.files, part.file_nbytes, strict=True)
    ]
    # Headers are compared, too: a PART says what its writer meant, the files what is there.
    wrong = contradictions(files)
    if wrong or files[0].place.header != header:
        raise Corrupt("; ".join(wrong) or f"{store.url}/{prefix}: files of another attempt")
    by_rank = files_by_rank(files).items()
    return build_manifest(header, [part_of_rank(rank, own) for rank, own in by_rank])
