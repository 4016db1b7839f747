"""What a prune deletes, what it leaves alone, and that a full disk does not stop it.

Method: real saves on local disks, foreign files and links put in by hand; a store that is full, and
a tmpfs of 8 MiB where one can be mounted.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.cli import main
from ckpt.commit.log import Log
from ckpt.commit.maintenance import Maintenance
from ckpt.commit.names import MANIFEST_NAME, RESERVE_KEY, step_prefix
from ckpt.commit.records import LiveEntry, manifest_digest
from ckpt.commit.session import Session
from ckpt.commit.writer import RESERVE_NBYTES, Commit, NotRetired, delete_attempt, keep_reserve
from ckpt.errors import CheckpointError
from ckpt.format.manifest_codec import decode_manifest
from storage import open_store
from storage.errors import AccessDeniedError, NoSpaceError
from storage.local import LocalStore
from storage.memory import MemoryStore
from storage.store import ByteRange, Store
from storage.wrap import WrappedStore
from tests.format.encoding import encode_manifest
from tests.protocol.invariants import History, RecordingStore, check_all, check_fresh_session


def _saved(root: Path, *steps: int) -> list[Path]:
    """The directories of these steps, in their order."""
    for step in steps:
        ckpt.save({"x": torch.ones(100) * step}, str(root), step=step)
    return [next((root / "steps").glob(f"{step:08d}-*")) for step in steps]


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- what is deleted ------------------------------------------------------------------------------


def test_foreign_files_in_a_step_directory_stay(tmp_path: Path) -> None:
    root = tmp_path / "run"
    first, _ = _saved(root, 1, 2)
    foreign = ["adapter.safetensors", "notes.txt", "rank0.safetensors"]
    for name in foreign:
        (first / name).write_bytes(b"mine")
    assert main(["prune", str(root), "--keep-last", "1", "--yes"]) == 0
    assert _names(first) == foreign
    assert [step.step for step in ckpt.list_steps(str(root))] == [2]
    ckpt.forget(str(root))
    _saved(root, 3)  # claims, and sweeps what older epochs left
    assert _names(first) == foreign


def test_files_that_the_manifest_lists_go_whatever_their_names(tmp_path: Path) -> None:
    root = tmp_path / "run"
    first, _ = _saved(root, 1, 2)
    (own,) = first.glob("rank*")
    manifest = first / MANIFEST_NAME
    data = manifest.read_bytes()
    renamed = dataclasses.replace(decode_manifest(data), files=("weights-of-0.safetensors",))
    manifest.write_bytes(encode_manifest(renamed))
    own.rename(first / "weights-of-0.safetensors")
    (first / "adapter.safetensors").write_bytes(b"mine")
    assert main(["prune", str(root), "--keep-last", "1", "--yes"]) == 0
    assert _names(first) == ["adapter.safetensors"]


def test_the_manifest_is_read_only_where_a_name_is_not_ours() -> None:
    """Each deletion would else cost one more request, of megabytes for a large model."""

    class Counting(WrappedStore):
        got: list[str]

        def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
            self.got.append(key)
            return super().get(key, byte_range)

    store = Counting(MemoryStore())
    manifest = step_prefix(1, "e000001-00000000000000aa") + MANIFEST_NAME
    for foreign, read in ((None, []), ("adapter.safetensors", [manifest])):
        store.got = []
        for name in filter(None, (MANIFEST_NAME, "rank00000-000.safetensors", foreign)):
            store.put_if_absent(manifest.removesuffix(MANIFEST_NAME) + name, b"x")
        assert delete_attempt(store, step=1, attempt="e000001-00000000000000aa") == 2
        assert store.got == read


def test_a_damaged_manifest_lists_nothing(tmp_path: Path) -> None:
    root = tmp_path / "run"
    first, _ = _saved(root, 1, 2)
    (first / MANIFEST_NAME).write_bytes(b"damaged")
    (first / "adapter.safetensors").write_bytes(b"mine")
    assert main(["prune", str(root), "--keep-last", "1", "--yes"]) == 0
    assert _names(first) == ["adapter.safetensors"]


# --- links ----------------------------------------------------------------------------------------


def _linked(root: Path, folder: Path) -> Path:
    """Move a step directory away and leave a link; where it is now."""
    elsewhere = root.parent / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    return elsewhere


def test_a_step_behind_a_link_is_not_retired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "run"
    first, second, _ = _saved(root, 1, 2, 3)
    elsewhere = _linked(root, first)
    before = _names(elsewhere)
    assert main(["prune", str(root), "--keep-last", "1", "--yes"]) == 1
    assert "is a symbolic link" in "".join(capsys.readouterr())
    assert _names(elsewhere) == before and not second.exists()
    assert [step.step for step in ckpt.list_steps(str(root))] == [1, 3]
    assert ckpt.verify(str(root), 1).ok  # links are followed for reading
    assert not any(r.kind == "RETIRE" and r.attempt in first.name for r in _records(root))
    with pytest.raises(NotRetired, match="symbolic link"):
        Maintenance.open(LocalStore(str(root))).retire(first.name.partition("-")[2])


def _records(root: Path) -> list[Any]:
    return list(Log(LocalStore(str(root))).history())


def test_a_failed_attempt_behind_a_link_stays(tmp_path: Path) -> None:
    root = tmp_path / "run"
    session = Session.claim(LocalStore(str(root)))
    attempt = session.new_attempt()
    session.store.put_if_absent(step_prefix(1, attempt) + MANIFEST_NAME, b"x")
    elsewhere = _linked(root, root / step_prefix(1, attempt))
    # Before anything is tried, and not by the store when it comes to the first file.
    with pytest.raises(AccessDeniedError, match=f"delete {step_prefix(1, attempt)} in .* link"):
        session.discard(attempt, step=1)
    assert _names(elsewhere) == [MANIFEST_NAME]


def test_a_sweep_goes_round_a_linked_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = LocalStore(str(tmp_path / "run"))
    session = Session.claim(store)
    _save(session, 1)
    orphans = [session.new_attempt() for _ in range(3)]
    for attempt in orphans:
        store.put_if_absent(step_prefix(2, attempt) + "rank00000-000.safetensors", b"x")
    linked = tmp_path / "run" / step_prefix(2, orphans[1]).rstrip("/")
    elsewhere = _linked(tmp_path / "run", linked)
    unfinished = elsewhere / ".tmp-0123456789abcdef-rank00001-000.safetensors"
    unfinished.write_bytes(b"x")
    later = Session.claim(store)
    with caplog.at_level(logging.WARNING):
        assert sorted(later.sweep()) == sorted([orphans[0], orphans[2]])
    assert orphans[1] in caplog.text and "symbolic link" in caplog.text
    assert store.abort_unfinished(step_prefix(2, orphans[1])) == 0
    assert _names(elsewhere) == sorted([unfinished.name, "rank00000-000.safetensors"])


# --- a full disk ----------------------------------------------------------------------------------


class _FullStore(WrappedStore):
    """A disk on which `left` bytes are free, and a file takes whole blocks of 4 KiB."""

    is_disk = True

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.is_disk = True
        self.left = 1 << 30

    def put_if_absent(self, key: str, data: bytes) -> None:
        nbytes = _blocks(len(data))
        if nbytes > self.left:
            raise NoSpaceError(f"create {key}: no space left")
        self.inner.put_if_absent(key, data)
        self.left -= nbytes

    def delete(self, key: str) -> None:
        nbytes = sum(_blocks(info.nbytes) for info in self.inner.list(key) if info.key == key)
        self.inner.delete(key)
        self.left += nbytes


def _blocks(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


def _save(session: Session, step: int) -> LiveEntry:
    attempt, manifest = session.new_attempt(), b"manifest of %d" % step
    prefix = step_prefix(step, attempt)
    session.store.put_if_absent(prefix + "rank00000-000.safetensors", bytes(10000))
    session.store.put_if_absent(prefix + MANIFEST_NAME, manifest)
    return session.commit(Commit(attempt, step, len(manifest), manifest_digest(manifest)))


def _full_root(*, reserve: bool) -> tuple[_FullStore, History, Session]:
    history = History()
    store = _FullStore(RecordingStore(MemoryStore(), history))
    session = Session.claim(store)
    if reserve:
        keep_reserve(store)
    for step in (1, 2, 3):
        history.acknowledged.append(_save(session, step).attempt)
    store.left = 0
    return store, history, session


@pytest.mark.parametrize("who", ["session", "maintenance"])
def test_a_full_disk_is_pruned_in_the_reserve(who: str) -> None:
    store, history, session = _full_root(reserve=True)
    writer = session if who == "session" else Maintenance.open(store)
    for _ in range(2):
        oldest = writer.state().live[0]
        assert writer.retire(oldest.attempt) is not None
        assert not list(store.list(oldest.prefix))
        assert store.info(RESERVE_KEY).nbytes == RESERVE_NBYTES
        store.left = 0  # somebody else takes what was freed
    assert [entry.step for entry in writer.state().live] == [3]
    store.left = 1 << 20
    assert not check_all(store, history) and not check_fresh_session(store)


def test_what_dead_jobs_left_goes_before_the_reserve() -> None:
    store, history, session = _full_root(reserve=True)
    store.left = 1 << 20
    orphan = step_prefix(9, session.new_attempt()) + "rank00000-000.safetensors"
    store.put_if_absent(orphan, bytes(10000))
    later = Session.claim(store)
    store.left = 0
    assert later.retire(later.state().live[0].attempt) is not None
    deleted = [event.key for event in history.changes if event.op == "delete"]
    assert deleted[0] == orphan and RESERVE_KEY not in deleted


def test_without_any_space_nothing_is_deleted() -> None:
    store, history, session = _full_root(reserve=False)
    before = [info.key for info in store.list("")]
    with pytest.raises(NoSpaceError, match="nothing is deleted before that; remove any file"):
        session.retire(session.state().live[0].attempt)
    assert [info.key for info in store.list("")] == before
    assert not check_all(store, history)


def test_a_root_on_a_disk_has_a_reserve_and_others_have_none(tmp_path: Path) -> None:
    _saved(tmp_path / "run", 1)
    assert (tmp_path / "run" / RESERVE_KEY).stat().st_size == RESERVE_NBYTES
    ckpt.save({"x": torch.ones(3)}, "memory://no-reserve", step=1)
    store = open_store("memory://no-reserve")
    assert RESERVE_KEY not in [info.key for info in store.list("")]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    try:
        made = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_file_system_is_pruned(small_disk: Path) -> None:
    root = small_disk / "run"
    for step in (1, 2, 3):
        ckpt.save({"x": torch.ones(300_000) * step}, str(root), step=step)
    _fill(small_disk / "filler")
    with pytest.raises((CheckpointError, NoSpaceError)):
        ckpt.save({"x": torch.ones(300_000) * 4}, str(root), step=4)
    _fill(small_disk / "filler2")
    assert main(["prune", str(root), "--keep-last", "1", "--yes"]) == 0
    assert [step.step for step in ckpt.list_steps(str(root))] == [3]
    assert (root / RESERVE_KEY).stat().st_size == RESERVE_NBYTES
    ckpt.save({"x": torch.ones(300_000) * 5}, str(root), step=5)
    assert ckpt.verify(str(root), 5).ok


def _fill(path: Path) -> None:
    """Take all space that is left."""
    with path.open("wb", buffering=0) as file:
        for nbytes in (1 << 20, 4096, 1):
            try:
                while True:
                    os.write(file.fileno(), bytes(nbytes))
            except OSError:
                continue
