"""Urls open the right store or say what is wrong with them, and no message holds a secret."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest

import ckpt
from storage import (
    AccessDeniedError,
    ByteRange,
    InvalidUrlError,
    StorageError,
    Store,
    open_store,
)
from storage.encoding.store import EncodedStore
from storage.local import LocalStore
from storage.location import child_of
from storage.store import redacted


def plain(store: Store) -> Store:
    """The store of the storage itself, below what encodes."""
    assert isinstance(store, EncodedStore)
    return store.inner


def test_paths_and_file_urls_name_the_same_store(tmp_path: Path) -> None:
    open_store(str(tmp_path)).put_if_absent("a", b"x")
    assert open_store(f"file://{tmp_path}").get("a") == b"x"
    assert isinstance(plain(open_store("relative/path")), LocalStore)


def test_opening_makes_nothing(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "not" / "there"))
    assert list(store.list("")) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "expected a path, a url"),
        ("s3:/bucket/run", "did you mean 's3://bucket/run'"),
        ("s3:/key:hunter2@bucket/run", r"did you mean 's3://\*\*\*@bucket/run'"),
        ("s3//bucket/run", "did you mean 's3://bucket/run'"),
        ("s3:bucket/run", "did you mean 's3://bucket/run'"),
        ("file:runs/7b", "did you mean 'file://runs/7b'"),
        ("file:/runs/7b", "did you mean 'file:///runs/7b'"),
        ("s4://bucket/run", "unknown protocol 's4'; did you mean s3://"),
        ("s3://", "not a bucket name"),
        ("s3:///run", "not a bucket name"),
        ("s3://key:hunter2@bucket/run", "credentials"),
        ("s3://bucket/run?secret=hunter2", "storage options"),
        ("s3://bucket/a/../b", "not a key"),
        ("memory://", "names no store"),
        ("file://", "names no directory"),
        ("nothing+known://user:hunter2@host", "unknown protocol"),
        ("simplecach::s3://bucket/run", "unknown protocol 'simplecach'; did you mean simplecache"),
        ("simplecache::s4://bucket/run", "unknown protocol 's4'"),
        ("runs/7::b", "unknown protocol 'b'"),
        ("dir::s3://key:hunter2@bucket/run", r"changes nothing; write s3://\*\*\*@bucket/run"),
        ("file::s3://bucket/run", "file reads no other filesystem"),
        ("s3://a::zip://b::s3://key:hunter2@c", "s3 reads no other filesystem"),
        ("zip::", "unknown protocol ''"),
    ],
)
def test_a_bad_url_says_what_to_do(url: str, says: str) -> None:
    with pytest.raises(
        ValueError if "not a key" in says else InvalidUrlError, match=says
    ) as caught:
        open_store(url)
    assert "hunter2" not in str(caught.value)


def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"x")
    with pytest.raises(InvalidUrlError, match=r"model\.pt is a file") as caught:
        open_store(str(tmp_path / "model.pt"))
    assert f"such as {str(tmp_path)!r}" in str(caught.value)


def test_a_path_object_is_a_path(tmp_path: Path) -> None:
    open_store(tmp_path).put_if_absent("a", b"x")
    assert open_store(str(tmp_path)).get("a") == b"x"
    with pytest.raises(InvalidUrlError, match="did you mean 's3://bucket/run'"):
        open_store(Path("s3://bucket/run"))  # pathlib has made one slash of two


def test_paths_with_the_beginning_of_a_protocol_stay_paths(tmp_path: Path) -> None:
    for name in ("s3", "s3/bucket", "files:x", "./s3:bucket", "./s3//bucket", "c:runs"):
        assert isinstance(plain(open_store(name)), LocalStore)


def test_an_archive_or_host_that_is_not_there_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"no connection .*not_there"):
        open_store(f"zip://x::{tmp_path}/not_there.zip")


def test_file_urls_may_be_relative_or_below_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    open_store("file://x/y").put_if_absent("a", b"x")
    open_store("file://~/x").put_if_absent("a", b"x")
    assert (tmp_path / "x/y/a").exists() and (tmp_path / "home/x/a").exists()


# fsspec leaves the files of its block caches to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("cache", ["simplecache", "filecache", "blockcache", "cached"])
def test_a_cache_before_a_root_reads_and_never_writes(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As fsspec parses it; as a path it would name a local folder, and a save filled that."""
    monkeypatch.chdir(tmp_path)
    open_store("file://root").put_if_absent("steps/1", b"0123456789")
    url = f"{cache}::file://{tmp_path}/root"
    options: dict[str, Any] = {cache: {"cache_storage": str(tmp_path / "cache")}}
    store = open_store(url, **options)
    assert [entry.key for entry in store.list("")] == ["steps/1"]
    assert store.get("steps/1") == b"0123456789"
    assert store.get("steps/1", ByteRange(3, 5)) == b"34"
    open_store("root").put_if_absent("steps/2", b"new")
    assert store.info("steps/2").nbytes == 3 and not store.exists("steps/3")
    assert len(list(store.list("steps/"))) == 2
    for write in (
        lambda: store.put_if_absent("b", b"x"),
        lambda: store.create("b", 1, part_nbytes=1).__enter__(),
        lambda: store.delete("steps/1"),
        lambda: store.exclusive_create,
    ):
        with pytest.raises(AccessDeniedError, match=r"can only be read; save to file:///"):
            write()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "root"]


def test_a_folder_in_an_archive_can_be_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "run.zip", "w") as archive:
        archive.writestr("run/steps/1", b"0123456789")
        archive.writestr("run2/x", b"another")
    for url in (f"zip://run::{tmp_path}/run.zip", f"zip://run::simplecache::{tmp_path}/run.zip"):
        store = open_store(url)
        assert [entry[:2] for entry in store.list("")] == [("steps/1", 10)]
        assert store.get("steps/1", ByteRange(3, 5)) == b"34"
    for whole in (f"zip::{tmp_path}/run.zip", f"zip://::{tmp_path}/run.zip"):
        assert [e.key for e in open_store(whole).list("run/")] == ["run/steps/1"]
        assert open_store(child_of(whole, "run")).get("steps/1") == b"0123456789"


@pytest.mark.parametrize(
    ("url", "below"),
    [
        ("zip://run::s3://b/x.zip", "zip://run/a/b::s3://b/x.zip"),
        ("zip::/x.zip", "zip://a/b::/x.zip"),
        ("simplecache::s3://b/run/", "simplecache::s3://b/run/a/b"),
        ("simplecache://::/run", "simplecache://::/run/a/b"),
        ("filecache::zip://::s3://b/x.zip", "filecache::zip://a/b::s3://b/x.zip"),
    ],
)
def test_places_below_chains(url: str, below: str) -> None:
    assert child_of(url, "a/b") == below


def test_a_save_below_a_cache_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for unsafe in (False, True):
        with pytest.raises(StorageError, match=r"simplecache::.* can only be read"):
            ckpt.save({"a": 1}, "simplecache::file://root", step=1, unsafe_single_writer=unsafe)
    assert list(tmp_path.iterdir()) == []


def test_unknown_storage_options_are_refused(tmp_path: Path) -> None:
    """A typing error in `endpoint_url` must not send a checkpoint to another server."""
    for url in (str(tmp_path), "memory://x", "s3://bucket/run"):
        with pytest.raises(InvalidUrlError, match="endpont_url"):
            open_store(url, endpont_url="http://localhost")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:hunter2@host:1/a", "https://***@host:1/a"),
        ("abfs://c/a?sig=hunter2&x=hunter2#hunter2", "abfs://c/a?sig=***&x=***#***"),
        ("s3://bucket/run", "s3://bucket/run"),
        ("/plain/path?not=a query", "/plain/path?not=a query"),
        ("x://[hunter2", "x://***"),
        ("memory:///run", "memory:///run"),
        ("zip://a::https://u:hunter2@h/a.zip", "zip://a::https://***@h/a.zip"),
        ("https://u:hunter2@[::1]:80/a", "https://***@[::1]:80/a"),
    ],
)
def test_redacted_urls_hold_no_secret(url: str, shown: str) -> None:
    assert redacted(url) == shown
