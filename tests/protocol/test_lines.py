"""Lines: a training resumes what it has saved itself, never an import or a copy in another layout.

Method: roots in memory and on disk, each process simulated by a registry of its own or by a clean
module state; the log says which line every commit is of.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt
from ckpt.commit.locate import ResumePoint, latest_last, of_step, resumable
from ckpt.commit.log import Log, LogState, latest_of
from ckpt.commit.names import MANIFEST_NAME, step_prefix
from ckpt.commit.records import RECORD_MAGIC, LiveEntry, decode_record, encode_record
from ckpt.commit.session import Session, SessionRegistry
from ckpt.commit.writer import Commit
from ckpt.errors import Corrupt, Fenced
from ckpt.format.checksum import crc32c
from ckpt.integrations.dcp import DcpReader, DcpWriter
from ckpt.operate import import_checkpoint
from storage import Store, open_store
from storage.memory import MemoryStore
from tests.versions import ALONE


def entry(slot: int, step: int, line: int | None) -> LiveEntry:
    name = f"e000001-{slot:016x}"
    return LiveEntry(name, step, slot, 100, b"d" * 32, False, False, None, (), line)


def saved(session: Session, step: int, *, in_line: bool = True) -> LiveEntry:
    attempt = session.new_attempt()
    session.store.put_if_absent(step_prefix(step, attempt) + MANIFEST_NAME, b"m")
    return session.commit(Commit(attempt, step, 1, b"d", in_line=in_line))


def lines(store: MemoryStore) -> list[tuple[int, int | None]]:
    return [(entry.step, entry.line) for entry in Log(store).state().live]


def new_process(store: Store, restored: ResumePoint | None = None) -> Session:
    registry = SessionRegistry()
    if restored is not None:
        registry.restored(store, restored)
    return registry.session(store)


# --- what a line is -------------------------------------------------------------------------------


def test_job_goes_on_with_the_line_of_what_it_restored() -> None:
    store = MemoryStore()
    first = new_process(store)
    saved(first, 10)
    newest = saved(first, 20)
    second = new_process(store, ResumePoint(newest.attempt, on_purpose=True))
    saved(second, 30)
    saved(second, 40)
    assert lines(store) == [(10, 0), (20, 0), (30, 0), (40, 0)]


def test_going_back_on_purpose_begins_a_line_that_is_resumed_next_time() -> None:
    store = MemoryStore()
    first = new_process(store)
    old = saved(first, 10)
    saved(first, 20)
    second = new_process(store, ResumePoint(old.attempt, on_purpose=True))
    begun = saved(second, 11)
    assert begun.line == begun.slot
    saved(second, 12)
    assert lines(store) == [(10, 0), (20, 0), (11, begun.line), (12, begun.line)]
    state = Log(store).state()
    assert state.latest is not None and state.latest.step == 12
    third = new_process(store, ResumePoint(state.latest.attempt, on_purpose=False))
    assert saved(third, 13).line == begun.line
    # Within one process, too.
    third.restored(ResumePoint(old.attempt, on_purpose=True))
    again = saved(third, 11)
    assert again.line == again.slot


def test_falling_back_from_a_damaged_one_stays_in_the_line() -> None:
    store = MemoryStore()
    first = new_process(store)
    whole = saved(first, 10)
    saved(first, 20)
    assert saved(new_process(store, ResumePoint(whole.attempt, on_purpose=False)), 11).line == 0


def test_job_that_restored_nothing_begins_a_line() -> None:
    store = MemoryStore()
    saved(new_process(store), 10)
    begun = saved(new_process(store), 1)
    assert begun.line == begun.slot


def test_training_that_begins_with_an_import_has_the_first_line() -> None:
    store = MemoryStore()
    imported = saved(new_process(store), 0, in_line=False)
    state = Log(store).state()
    assert state.latest == imported and imported.line is None
    saved(new_process(store, ResumePoint(imported.attempt, on_purpose=False)), 1)
    assert lines(store) == [(0, None), (1, 0)]


# --- what is chosen -------------------------------------------------------------------------------

LIVE = [entry(1, 0, None), entry(2, 100, 0), entry(3, 200, 0), entry(5, 110, 5), entry(6, 120, 5)]
LIVE += [entry(7, 120, None), entry(8, 0, None)]


def test_latest_is_of_a_line_if_there_is_one() -> None:
    assert latest_of(LIVE) == LIVE[4]
    assert latest_of([LIVE[0], LIVE[-1]]) == LIVE[-1] and latest_of([]) is None
    assert latest_last(LIVE)[-1] == LIVE[4] and sorted(latest_last(LIVE), key=LIVE.index) == LIVE


def test_resume_falls_back_within_its_line_and_to_where_it_began() -> None:
    assert [one.slot for one in resumable(LIVE)] == [6, 5, 2]
    assert [one.slot for one in resumable([LIVE[0], LIVE[-1]])] == [8, 1]
    assert resumable([]) == []


def test_of_one_step_the_training_s_own_comes_first() -> None:
    assert [one.slot for one in of_step(LIVE, 120)] == [6, 7]
    assert [one.slot for one in of_step(LIVE, 0)] == [8, 1]


# --- records --------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", [b"\x01", b"\xff", b"\xc2", b"\xa1x"])
def test_record_with_a_line_that_makes_no_sense_is_refused(line: bytes) -> None:
    """A later slot, below zero, a bool, a text."""
    store = MemoryStore()
    session = new_process(store)
    saved(session, 10, in_line=False)
    state: LogState = Log(store).state()
    data = encode_record(Log(store).record(state.slot))
    assert data.count(b"\xa4line\xc0") == 1
    body = data[:-4].replace(b"\xa4line\xc0", b"\xa4line" + line)
    if line == b"\x01":
        body = data[:-4].replace(b"\xa4line\xc0", b"\xa4line\x02")
    assert body.startswith(RECORD_MAGIC)
    with pytest.raises(Corrupt):
        sealed = body + crc32c(body).to_bytes(4, "little")
        decode_record(sealed, slot=state.slot, where="log/1")


# --- whole calls ----------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "run")


def imported(root: str, tmp_path: Path, step: int = 0) -> str:
    source = tmp_path / "other.safetensors"
    save_file({"x": torch.full((3,), -1.0)}, source)
    return import_checkpoint(str(source), root, step=step).attempt


def test_import_into_a_training_never_becomes_what_it_resumes(root: str, tmp_path: Path) -> None:
    ckpt.save({"x": torch.full((3,), 5.0)}, root, step=5)
    attempt = imported(root, tmp_path)
    state = {"x": torch.zeros(3)}
    assert ckpt.load(state, root).step == 5 and state["x"][0] == 5
    assert ckpt.open(root).step == 5 and ckpt.list_steps(root)[-1].step == 5
    with ckpt.Checkpointer(state, root, save=ckpt.EverySteps(1)) as checkpointer:
        report = checkpointer.restore()
        assert report is not None and report.step == 5
        state["x"].fill_(6.0)
        checkpointer.step(6)
    assert [(info.step, info.line) for info in ckpt.list_steps(root)] == [(0, None), (5, 0), (6, 0)]
    # It is there for who names it, also when the training has that step.
    assert ckpt.load(state, root, attempt=attempt).step == 0 and state["x"][0] == -1
    same_step = imported(root, tmp_path, step=6)
    assert ckpt.load(state, root, step=6).attempt != same_step and state["x"][0] == 6
    with ckpt.Checkpointer(state, root) as checkpointer:
        report = checkpointer.restore(attempt=same_step)
        assert report is not None and report.attempt == same_step and state["x"][0] == -1


def test_import_does_not_fence_the_training_that_runs(root: str, tmp_path: Path) -> None:
    store = open_store(root)
    training = new_process(store)
    saved(training, 1)
    imported(root, tmp_path)
    assert saved(training, 2).line == 0 and training.sweep() == []
    ckpt.save({"x": torch.zeros(3)}, root, step=3)  # this process is a new job
    with pytest.raises(Fenced):
        saved(training, 4)
    assert [(info.step, info.line) for info in ckpt.list_steps(root)][:3] == [
        (0, None),
        (1, 0),
        (2, 0),
    ]


def test_import_that_a_new_job_overtakes_is_not_committed(root: str) -> None:
    store = open_store(root)
    saved(new_process(store), 1)
    guest = Session.beside(store)
    new_process(store)
    with pytest.raises(Fenced):
        saved(guest, 0, in_line=False)


def test_root_of_imports_alone_loads_the_newest(root: str, tmp_path: Path) -> None:
    imported(root, tmp_path)
    state = {"x": torch.zeros(3)}
    assert ckpt.load(state, root).step == 0 and state["x"][0] == -1
    with ckpt.Checkpointer(state, root) as checkpointer:
        report = checkpointer.restore()
        assert report is not None and report.step == 0


def test_rollback_through_the_checkpointer_is_what_the_next_job_resumes(root: str) -> None:
    state = {"x": torch.zeros(3)}
    for step in (1, 2, 3):
        ckpt.save({"x": torch.full((3,), float(step))}, root, step=step)
    with ckpt.Checkpointer(state, root, save=ckpt.EverySteps(1)) as checkpointer:
        checkpointer.restore(step=1)
        state["x"].fill_(2.5)
        checkpointer.step(2)
    known = [(info.step, info.line) for info in ckpt.list_steps(root)]
    assert [step for step, _ in known] == [1, 2, 3, 2]
    assert [line for _, line in known[:3]] == [0, 0, 0] and known[3][1] not in (0, None)
    with ckpt.Checkpointer(state, root) as checkpointer:
        report = checkpointer.restore()
        assert report is not None and report.step == 2 and state["x"][0] == 2.5


def test_copied_root_keeps_its_lines(root: str, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        ckpt.save({"x": torch.full((3,), float(step))}, root, step=step)
    imported(root, tmp_path)
    ckpt.load({"x": torch.zeros(3)}, root, step=1)
    ckpt.save({"x": torch.zeros(3)}, root, step=2)
    store = open_store(root)
    target = str(tmp_path / "copy")
    ckpt.copy(root, target, root=True)
    before = {info.attempt: info.line for info in ckpt.list_steps(root)}
    after = {info.attempt: info.line for info in ckpt.list_steps(target)}
    assert list(before) == list(after)
    assert [line is None for line in before.values()] == [line is None for line in after.values()]
    new = ckpt.list_steps(target)[-1].line
    # Its name is a slot of the new log, which no later line can have again.
    assert new is not None and 0 < new <= Log(open_store(target)).state().slot
    assert Log(store).state().latest is not None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_dcp_plugin_goes_on_with_the_line_that_it_has_read(root: str) -> None:
    import torch.distributed.checkpoint

    dcp: Any = torch.distributed.checkpoint
    state = {"x": torch.zeros(3)}
    for step in (1, 2):
        dcp.save(state, storage_writer=DcpWriter(root, step=step), **ALONE)
    with ckpt.Checkpointer(state, root, save=ckpt.EverySteps(1)) as checkpointer:
        checkpointer.restore()
        checkpointer.step(3)
    dcp.load(state, storage_reader=DcpReader(root, step=1), **ALONE)
    dcp.save(state, storage_writer=DcpWriter(root, step=2), **ALONE)
    known = [(info.step, info.line == 0) for info in ckpt.list_steps(root)]
    assert known == [(1, True), (2, True), (3, True), (2, False)]
