"""Filesystems of fsspec, and what names a place on one, stand wherever a url does."""

from __future__ import annotations

import gc
import io
import os
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

import ckpt
from ckpt.commit.session import Session
from ckpt.errors import Fenced, StoreRefused
from storage import (
    ExclusiveCreate,
    FsspecStore,
    InvalidUrlError,
    KeyExistsError,
    OutcomeUnknownError,
    StorageError,
    Store,
    StoreLike,
    open_store,
)
from storage.local import LocalStore
from storage.location import child_of, folder_of, url_of
from storage.testing import StoreContract
from storage.url import with_its_options
from storage.wrap import WrappedStore
from tests.servers import S3Server


class OwnFileSystem(LocalFileSystem):  # type: ignore[misc]
    """Creates exclusively, as a service would: at the end, whole, one of all writers."""

    protocol = "ownfs"
    cachable = False

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "x" not in mode:
            return super()._open(path, mode, **options)
        return OneWins(self, path)


class OneWins(io.BytesIO):
    def __init__(self, filesystem: OwnFileSystem, path: str) -> None:
        super().__init__()
        self.filesystem, self.path = filesystem, path

    def close(self) -> None:
        try:
            if not self.closed:
                self.publish()
        finally:  # as fsspec's own files: who lost does not try again when it is collected
            super().close()

    def publish(self) -> None:
        temp = f"{self.path}.{uuid.uuid4().hex}"
        Path(temp).write_bytes(self.getvalue())
        try:
            os.link(temp, self.path)
        finally:
            os.unlink(temp)


class LooksFirst(OwnFileSystem):
    """Looks when it opens and writes when it closes: two writers both win."""

    protocol = "looksfirst"

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "x" in mode and self.exists(path):
            raise FileExistsError(path)
        return Replaces(self, path) if "x" in mode else super()._open(path, mode, **options)


class Replaces(OneWins):
    def publish(self) -> None:
        Path(self.path).write_bytes(self.getvalue())


class Unanswered(OwnFileSystem):
    """The answer to an exclusive create of a key of ours is lost."""

    protocol = "unanswered"

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        lost = "x" in mode and "probe" not in path
        return Lost(self, path) if lost else super()._open(path, mode, **options)


class Lost(OneWins):
    def publish(self) -> None:
        super().publish()
        raise OSError("the connection was reset")


@pytest.fixture(autouse=True)
def own_protocols() -> Iterator[None]:
    for cls in (OwnFileSystem, LooksFirst, Unanswered):
        fsspec.register_implementation(cls.protocol, cls, clobber=True)
    yield


class TestFsspecStoreThatCreatesExclusively(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return FsspecStore(OwnFileSystem(), f"{tmp_path}/root")


@pytest.mark.server
class TestFsspecStoreOnS3(StoreContract):
    """By s3fs's own conditional writes, which the probe has to find."""

    @pytest.fixture
    def store(self, moto: S3Server) -> Store:
        filesystem = fsspec.filesystem("s3", **moto.options)
        # moto looks and writes without a lock: under load, two of the probe's writers may win.
        for _ in range(5):
            store = FsspecStore(filesystem, f"{moto.make_bucket()}/run")
            if store.exclusive_create is ExclusiveCreate.CONDITIONAL:
                return store
        raise AssertionError("the probe finds no exclusive create")

    def test_abort_unfinished_removes_what_died_and_nothing_else(self, store: Store) -> None:
        """Nothing is there to remove: s3fs holds a small file in memory until it is closed."""
        with pytest.raises(ZeroDivisionError), store.create("a", 9, part_nbytes=5) as writer:
            writer.write_part(0, [memoryview(b"01234")])
            raise ZeroDivisionError
        assert store.abort_unfinished("") == 0 and list(store.list("")) == []


@pytest.mark.parametrize(
    ("filesystem", "expected"),
    [
        (OwnFileSystem, ExclusiveCreate.CONDITIONAL),
        (LooksFirst, ExclusiveCreate.NONE),
        (LocalFileSystem, ExclusiveCreate.NONE),  # the file is there before it is whole
        (MemoryFileSystem, ExclusiveCreate.NONE),
    ],
)
def test_exclusive_create_is_proved_and_never_believed(
    filesystem: Any, expected: ExclusiveCreate, tmp_path: Path
) -> None:
    store = FsspecStore(filesystem(), f"{tmp_path}/root")
    assert store.exclusive_create is expected
    assert list(store.list("")) == [] and store.abort_unfinished("") == 0


def test_options_configuration_and_environment_are_fsspecs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf: dict[str, Any] = {}
    fsspec.config.set_conf_env(conf, {"FSSPEC_OWNFS_REGION": "a", "FSSPEC_OWNFS_LABEL": "b"})
    monkeypatch.setattr(fsspec.config, "conf", conf)
    store = open_store(f"ownfs://{tmp_path}", label="mine")
    while isinstance(store, WrappedStore):
        store = store.inner
    assert isinstance(store, FsspecStore)
    assert store.filesystem.storage_options == {"region": "a", "label": "mine"}


def test_two_writers_are_safe_on_a_filesystem_that_proves_it(tmp_path: Path) -> None:
    url = f"ownfs://{tmp_path}/run"
    state = {"w": torch.arange(5.0)}
    ckpt.save(state, url, step=1)
    with ThreadPoolExecutor(6) as pool:
        sessions = list(pool.map(lambda _: Session.claim(open_store(url)), range(6)))
    assert sorted(session.epoch for session in sessions) == [2, 3, 4, 5, 6, 7]
    with pytest.raises(Fenced):
        ckpt.save(state, url, step=2)


def test_a_filesystem_without_proof_needs_a_single_writer(tmp_path: Path) -> None:
    state = {"w": torch.arange(5.0)}
    with pytest.raises(StoreRefused, match="unsafe_single_writer"):
        ckpt.save(state, f"looksfirst://{tmp_path}/run", step=1)
    ckpt.save(state, f"looksfirst://{tmp_path}/run", step=1, unsafe_single_writer=True)


def test_a_probe_that_fails_once_is_repeated(tmp_path: Path) -> None:
    class Stumbles(OwnFileSystem):
        stumbled = False

        def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
            if "x" in mode and not self.stumbled:
                self.stumbled = True
                raise ConnectionResetError("once")
            return super()._open(path, mode, **options)

    store = open_store(FsspecStore(Stumbles(), str(tmp_path)))
    assert store.exclusive_create is ExclusiveCreate.CONDITIONAL and store.retries == 1


def test_a_probe_that_cannot_race_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    store = FsspecStore(OwnFileSystem(), str(tmp_path))
    with monkeypatch.context() as patch, pytest.raises(StorageError, match="start new thread"):
        patch.setattr(threading.Thread, "start", refused)
        assert store.exclusive_create
    gc.collect()  # a file that was left open would write now
    assert not list(tmp_path.iterdir())
    assert store.exclusive_create is ExclusiveCreate.CONDITIONAL


def test_a_lost_answer_is_an_unknown_outcome(tmp_path: Path) -> None:
    store = FsspecStore(Unanswered(), str(tmp_path))
    with pytest.raises(OutcomeUnknownError, match=r"create a in .*reset"):
        store.put_if_absent("a", b"x")
    with pytest.raises(KeyExistsError):
        FsspecStore(OwnFileSystem(), str(tmp_path)).put_if_absent("a", b"y")
    # A save reads back what it may have written.
    assert ckpt.save({"w": torch.arange(5.0)}, f"unanswered://{tmp_path}/run", step=1).step == 1
    assert [entry.step for entry in ckpt.list_steps(f"ownfs://{tmp_path}/run")] == [1]


def places(tmp_path: Path) -> dict[str, StoreLike]:
    own = OwnFileSystem()
    return {
        "registered": f"ownfs://{tmp_path}/run",
        "store": FsspecStore(own, f"{tmp_path}/run"),
        "FSMap": own.get_mapper(f"{tmp_path}/run"),
        "DirFileSystem": DirFileSystem(f"{tmp_path}/run", own),
        "FSMap of a disk": LocalFileSystem().get_mapper(f"{tmp_path}/run"),
    }


@pytest.mark.parametrize(
    "name", ["registered", "store", "FSMap", "DirFileSystem", "FSMap of a disk"]
)
def test_a_place_on_a_filesystem_is_taken_wherever_a_url_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves, loads, tools, conversions and a Checkpointer; nothing is written anywhere else."""
    monkeypatch.chdir(tmp_path)
    place = places(tmp_path)[name]
    state = {"model": torch.nn.Linear(5, 3), "step": 1}
    ckpt.save(state, place, step=1)
    ckpt.async_save(state, place, step=2).wait()
    with ckpt.Checkpointer(state, place) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None and restored.step == 2
    other = {"model": torch.nn.Linear(5, 3), "step": 0}
    assert ckpt.load(other, place).step == 2
    assert torch.equal(other["model"].weight, state["model"].weight)  # type: ignore[attr-defined]
    assert [entry.step for entry in ckpt.list_steps(place)] == [1, 2]
    assert ckpt.verify(place).step == 2
    target = child_of(place, "out")
    ckpt.export(place, target if name != "registered" else f"{target}/model.safetensors")
    ckpt.import_checkpoint(target, child_of(place, "in"), step=3)
    assert ckpt.diff(place, child_of(place, "in")).only_b == ("bias", "weight")
    assert os.listdir(tmp_path) == ["run"]


def test_places_of_disks_and_s3_open_the_stores_of_ours(moto: S3Server, tmp_path: Path) -> None:
    assert isinstance(with_its_options(LocalFileSystem().get_mapper(str(tmp_path))), LocalStore)
    bucket = moto.make_bucket()
    filesystem = fsspec.filesystem("s3", use_listings_cache=False, **moto.options)
    place = filesystem.get_mapper(f"{bucket}/run")
    store = with_its_options(place)
    assert isinstance(store, Store) and store.url == url_of(place) == f"s3://{bucket}/run"
    assert with_its_options(filesystem.get_mapper(f"{bucket}/run")) is store
    assert store.exclusive_create is ExclusiveCreate.CONDITIONAL and store.part_nbytes_min > 1
    open_store(place).put_if_absent("a", b"x")
    assert place["a"] == b"x"


def test_a_subclass_is_used_as_it_is(tmp_path: Path) -> None:
    """Such as one that encrypts: the store of a disk would write around it, under its protocol."""

    class Inverts(LocalFileSystem):  # type: ignore[misc]
        cachable = False

        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
            super().pipe_file(path, bytes(255 - byte for byte in value))

    place = Inverts().get_mapper(str(tmp_path))
    open_store(place).put_if_absent("a", b"\0\1")
    assert (tmp_path / "a").read_bytes() == b"\xff\xfe"


@pytest.mark.judges
def test_universal_paths_are_places(tmp_path: Path) -> None:
    import upath

    name = uuid.uuid4().hex
    for place in (
        upath.UPath(f"memory://{name}/run"),
        upath.UPath(tmp_path),
        upath.UPath(f"file://{tmp_path}/b"),
    ):
        state = {"w": torch.arange(5.0)}
        ckpt.save(state, place, step=1, unsafe_single_writer=True)
        assert ckpt.load({"w": torch.zeros(5)}, place).step == 1
        assert (place / "FORMAT").exists()
    assert url_of(folder_of(upath.UPath(f"memory://{name}/run"))) == f"memory:///{name}"


def test_filesystems_of_two_servers_are_two_places() -> None:
    one, other = (FsspecStore(MemoryFileSystem(server=name), "/run") for name in ("a", "b"))
    assert one.url == other.url and one.place != other.place
    assert one.place == FsspecStore(MemoryFileSystem(server="a"), "/run").place


def test_a_filesystem_without_a_path_is_refused() -> None:
    with pytest.raises(InvalidUrlError, match=r"FsspecStore\(filesystem, path\)"):
        open_store(MemoryFileSystem())
