"""Urls open the right store or say what is wrong with them, and no message holds a secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage import InvalidUrlError, StorageError, Store, open_store
from storage.encoding.store import EncodedStore
from storage.keys import redacted
from storage.local import LocalStore


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
        ("s4://bucket/run", "unknown protocol 's4'; did you mean s3://"),
        ("s3://", "not a bucket name"),
        ("s3:///run", "not a bucket name"),
        ("s3://key:hunter2@bucket/run", "credentials"),
        ("s3://bucket/run?secret=hunter2", "storage options"),
        ("s3://bucket/a/../b", "not a key"),
        ("memory://", "names no store"),
        ("file://", "names no directory"),
        ("nothing+known://user:hunter2@host", "unknown protocol"),
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
    ],
)
def test_redacted_urls_hold_no_secret(url: str, shown: str) -> None:
    assert redacted(url) == shown
