"""A store that a caller made stands wherever a url does, stays open, and has places below it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from storage import (
    InvalidKeyError,
    InvalidUrlError,
    PrefixStore,
    Store,
    TransientError,
    open_store,
    options_of_other,
)
from storage.local import LocalStore
from storage.location import child_of, is_borrowed_from, url_of
from storage.memory import MemoryStore
from storage.testing import FaultPlan, FaultyStore, StoreContract


class TestPrefixStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        inner = MemoryStore()
        inner.put_if_absent("run/7", b"an object of the name of the prefix")
        inner.put_if_absent("run/70/other", b"a neighbour that must not show")
        return PrefixStore(inner, "run/7")


class TestBorrowedStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(LocalStore(str(tmp_path)))


def test_every_method_that_takes_keys_is_below_the_prefix() -> None:
    """A new method of Store that is passed on unchanged would act beside the place."""
    keys = {"key": "x", "keys": ["x"], "prefix": "x/"}
    methods = [
        (name, parameters)
        for name, method in vars(Store).items()
        if callable(method) and keys.keys() & (parameters := _parameters(method))
    ]
    assert len(methods) > 15
    for name, parameters in methods:
        inner = mock.MagicMock(spec=Store, part_nbytes_min=1, is_disk=False, url="", place="")
        result = getattr(PrefixStore(inner, "run/7"), name)(
            **{parameter: keys.get(parameter, 0) for parameter in parameters}
        )
        if name == "list":
            list(result)  # a generator calls when it is read
        ((_, (first, *_), _),) = inner.method_calls
        for key in [first] if isinstance(first, str) else first:
            assert key.startswith("run/7/x"), name


def _parameters(method: Any) -> set[str]:
    """The names of those that have no default, but `self`."""
    parameters = inspect.signature(method).parameters.values()
    return {p.name for p in parameters if p.default is p.empty} - {"self"}


class Closing(MemoryStore):
    """Counts how often it was closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


def test_a_callers_store_stays_open_also_below_a_prefix() -> None:
    own = Closing()
    for where in (own, PrefixStore(own, "a"), child_of(child_of(own, "a"), "b/")):
        store = open_store(where)
        store.put_if_absent("x", b"y")
        store.close()
    assert own.closed == 0
    assert sorted(entry.key for entry in own.list("")) == ["a/b/x", "a/x", "x"]


def test_an_opened_store_is_known_by_the_object_it_came_from() -> None:
    own, other = MemoryStore(), MemoryStore()
    assert is_borrowed_from(open_store(own), own)
    assert not is_borrowed_from(open_store(own), other)
    assert not is_borrowed_from(own, own)


def test_options_of_a_store_object_are_refused() -> None:
    with pytest.raises(InvalidUrlError, match=r"memory://x: .*has its options already, got key"):
        open_store(MemoryStore(name="x"), key="secret")
    # Options are handed on from url to url only.
    assert options_of_other("s3://a", {"key": 1}, MemoryStore(), None) == {}
    assert options_of_other(MemoryStore(), None, "s3://a", {"key": 1}) == {"key": 1}
    assert options_of_other(Path("a"), {}, "b", None) == {}


@pytest.mark.parametrize("bad", [3, b"run", "", "a\0b", None, [MemoryStore()]])
def test_what_is_no_location_is_refused(bad: Any) -> None:
    for use in (open_store, url_of, lambda where: child_of(where, "x")):
        with pytest.raises(InvalidUrlError, match=r"expected a path, a url .* or a storage\.Store"):
            use(bad)


def test_places_below_urls_paths_and_stores() -> None:
    assert child_of("s3://b/run/", "/steps/1/") == "s3://b/run/steps/1"
    assert child_of(Path("runs"), "steps/1") == "runs/steps/1"
    own = MemoryStore(name="x")
    below = child_of(own, "steps/1")
    assert isinstance(below, Store) and url_of(below) == "memory://x/steps/1"
    # Open stores are known by their places, so different places must not be equal.
    assert len({own.place, below.place, PrefixStore(own, "steps/10").place}) == 3
    with pytest.raises(InvalidKeyError):
        PrefixStore(own, "../outside")
    with pytest.raises(InvalidKeyError):
        PrefixStore(own, "inside").get("../x")


def test_what_fails_in_a_callers_store_is_repeated_unless_it_repeats_itself() -> None:
    own = MemoryStore()
    own.put_if_absent("a", b"x")
    flaky = FaultyStore(own, FaultPlan(1, error=TransientError))
    store = open_store(flaky)
    assert store.get("a") == b"x" and store.retries == 1
    again = open_store(store)
    assert again.patience is store.patience
