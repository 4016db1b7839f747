"""Schemes of other packages: registered by a call or by an entry point, refused when bad."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from storage import (
    InvalidUrlError,
    StorageError,
    Store,
    TransientError,
    open_store,
    register_store,
    schemes,
)
from storage.memory import MemoryBucket, MemoryStore
from storage.testing import FaultPlan, FaultyStore

BUCKET = MemoryBucket()


def vault(url: str, *, token: str = "", region: str = "here") -> Store:
    if token == "boom":
        raise TypeError("a mistake inside of the factory")
    if token == "away":
        raise ConnectionRefusedError("nobody listens")
    if token == "denied":
        raise TransientError("later")
    return MemoryStore(BUCKET, name=url)


NOT_CALLABLE = "vault"


@pytest.fixture(autouse=True)
def forget_schemes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(schemes, "_factories", {})
    yield


def offer(monkeypatch: pytest.MonkeyPatch, *offers: tuple[str, str]) -> None:
    """Entry points as installed packages would have them."""
    points = [EntryPoint(name, value, schemes.ENTRY_POINTS) for name, value in offers]
    monkeypatch.setattr(
        schemes, "entry_points", lambda *, group: points if group == "shardpoint.stores" else []
    )


def test_a_registered_scheme_opens_with_its_options() -> None:
    register_store("vault", vault)
    register_store("vault", vault)  # a module that is imported twice
    store = open_store("vault://a/b", token="t")
    assert store.url == "memory://vault://a/b" and store.patience is not None
    open_store("VAULT://a/b").put_if_absent("scheme/in/capitals", b"x")
    assert store.get("scheme/in/capitals") == b"x"


@pytest.mark.parametrize(
    ("scheme", "factory", "says"),
    [
        ("s3", vault, "s3:// is built in"),
        ("memory", vault, "built in"),
        ("Vault", vault, "expected a scheme such as 'vault'"),
        ("vault://", vault, "expected a scheme"),
        ("fsspec+vault", vault, "expected a scheme"),
        ("", vault, "expected a scheme"),
        (3, vault, "expected a scheme"),
        ("vault", "no function", "expected a factory .* got 'no function'"),
        ("taken", vault, "taken:// is opened by .* already"),
    ],
)
def test_a_bad_registration_is_refused(scheme: Any, factory: Any, says: str) -> None:
    register_store("taken", MemoryStore)
    with pytest.raises(InvalidUrlError, match=says):
        register_store(scheme, factory)


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"tokn": "x"}, InvalidUrlError, r"options \['tokn'\], its factory takes token, region"),
        ({"token": "boom"}, InvalidUrlError, "failed .*a mistake inside"),
        ({"token": "away"}, StorageError, "failed .*nobody listens"),
        ({"token": "denied"}, TransientError, "later"),
    ],
)
def test_what_a_factory_refuses_is_a_typed_error(
    options: dict[str, Any], kind: type[Exception], says: str
) -> None:
    register_store("vault", vault)
    with pytest.raises(kind, match=says) as caught:
        open_store("vault://user:hunter2@host/a", **options)
    assert type(caught.value) is kind and "hunter2" not in str(caught.value)


def test_a_factory_must_return_a_store() -> None:
    register_store("vault", lambda url: url)
    with pytest.raises(InvalidUrlError, match=r"returned 'vault://x'; expected a storage\.Store"):
        open_store("vault://x")


def test_what_a_registered_store_fails_is_repeated() -> None:
    register_store("flaky", lambda url: FaultyStore(vault(url), FaultPlan(1, error=TransientError)))
    store = open_store("flaky://x")
    assert list(store.list("none/")) == [] and store.retries == 1


def test_unknown_protocols_name_what_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, ("depot", "nowhere:f"))
    register_store("vault", vault)
    with pytest.raises(InvalidUrlError, match=r"did you mean vault://\?.*registered: depot, vault"):
        open_store("valt://x")


def test_a_scheme_before_the_one_of_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that creates exclusively is worth more than the filesystem of that name."""
    register_store("ftp", vault)
    assert open_store("ftp://x").url == "memory://ftp://x"


def test_an_entry_point_makes_a_scheme_known(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, ("depot", f"{__name__}:vault"), ("s3", "nowhere:f"))
    assert open_store("depot://a", token="t").url == "memory://depot://a"


@pytest.mark.parametrize(
    ("offers", "says"),
    [
        ([("depot", "no_such_module:f")], "no_such_module:f, which cannot be imported"),
        ([("depot", f"{__name__}:no_such_name")], "cannot be imported"),
        ([("depot", f"{__name__}:NOT_CALLABLE")], "expected a factory"),
        ([("depot", "a:f"), ("depot", "b:f")], r"several packages \(a:f, b:f\)"),
    ],
)
def test_a_bad_entry_point_is_refused(
    offers: list[tuple[str, str]], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, *offers)
    with pytest.raises(InvalidUrlError, match=says):
        open_store("depot://a")


def test_a_registration_decides_between_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, ("depot", "a:f"), ("depot", "b:f"))
    register_store("depot", vault)
    assert open_store("depot://a").url == "memory://depot://a"
