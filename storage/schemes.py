"""Factories of stores for schemes that this package does not have.

    storage.register_store("vault", lambda url, **options: VaultStore(url, **options))

A package makes its scheme known to every process, the command line included, by an entry point of
the group `shardpoint.stores` whose name is the scheme and whose object is the factory. It is
imported at the first url of that scheme.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from storage.errors import InvalidUrlError, StorageError
from storage.forks import ForkSafeLock
from storage.store import Store, redacted

StoreFactory = Callable[..., Store]
"""Called as `factory(url, **storage_options)`; returns the store at `url`, without a request."""

ENTRY_POINTS = "shardpoint.stores"
BUILT_IN = frozenset(
    {"file", "local", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "fsspec", "peer"}
)
_SCHEME = re.compile(r"[a-z][a-z0-9.\-]*")

_factories: dict[str, StoreFactory] = {}
_lock = ForkSafeLock()


def register_store(scheme: str, factory: StoreFactory) -> None:
    """Open urls `SCHEME://...` by `factory(url, **storage_options)`, in this process.

    The factory returns a `Store`, and sends no request yet. It comes before fsspec's filesystem of
    that name, which `fsspec+SCHEME://` still opens. Registering the same factory again changes
    nothing. Raises InvalidUrlError for a scheme that is none, is built in, or has another factory,
    and for a factory that cannot be called.
    """
    if not isinstance(scheme, str) or not _SCHEME.fullmatch(scheme):
        raise InvalidUrlError(
            f"register_store({scheme!r}): expected a scheme such as 'vault': a lower-case letter, "
            "then lower-case letters, digits, '.' and '-', without '://'"
        )
    if scheme in BUILT_IN:
        raise InvalidUrlError(
            f"register_store({scheme!r}): {scheme}:// is built in; choose another scheme"
        )
    if not callable(factory):
        raise InvalidUrlError(
            f"register_store({scheme!r}): expected a factory that is called with the url and "
            f"returns a storage.Store, got {factory!r}"
        )
    with _lock:
        known = _factories.setdefault(scheme, factory)
    # Not replaced: open stores of the first one would share urls with those of the second.
    if known is not factory:
        raise InvalidUrlError(
            f"register_store({scheme!r}): {scheme}:// is opened by {known!r} already; choose "
            "another scheme"
        )


def registered_schemes() -> tuple[str, ...]:
    """The schemes that were registered here or that installed packages offer, sorted."""
    return tuple(sorted({*_factories, *(entry.name for entry in _entries())}))


def factory_of(scheme: str) -> StoreFactory | None:
    """The factory for urls of `scheme`, None without one.

    Raises InvalidUrlError when a package offers the scheme and its factory cannot be imported or
    called, or when several packages offer it.
    """
    factory = _factories.get(scheme)
    if factory is not None or scheme in BUILT_IN:
        return factory
    offers = {entry.value: entry for entry in _entries() if entry.name == scheme}
    if not offers:
        return None
    if len(offers) > 1:
        raise InvalidUrlError(
            f"{scheme}:// is offered by several packages ({', '.join(sorted(offers))}); remove "
            f"all but one, or choose by register_store({scheme!r}, ...)"
        )
    (entry,) = offers.values()
    try:
        loaded: StoreFactory = entry.load()
    except Exception as error:  # whatever a package raises while it is imported
        raise InvalidUrlError(
            f"{scheme}:// is offered by {entry.value}, which cannot be imported "
            f"({type(error).__name__}: {error}); mend or remove that package"
        ) from error
    register_store(scheme, loaded)
    return loaded


def open_registered(
    url: str, scheme: str, factory: StoreFactory, options: Mapping[str, Any]
) -> Store:
    """The store that `factory` makes of `url`.

    Raises InvalidUrlError for options that it does not take, for anything else than a store, and
    for what it raises itself (StorageError where a machine did not answer).
    """
    shown = redacted(url)
    _check_options(shown, factory, url, options)
    try:
        store = factory(url, **options)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"{shown}: the factory of {scheme}:// failed ({type(error).__name__}: {error})"
        ) from error
    except Exception as error:
        raise InvalidUrlError(
            f"{shown}: the factory of {scheme}:// failed ({type(error).__name__}: {error}); check "
            "the url and the storage options"
        ) from error
    if not isinstance(store, Store):
        raise InvalidUrlError(
            f"{shown}: the factory of {scheme}:// returned {store!r}; expected a storage.Store"
        )
    return store


def _check_options(shown: str, factory: StoreFactory, url: str, options: Mapping[str, Any]) -> None:
    """Compare with the signature, so that a TypeError raised inside the factory is not mistaken for
    an unknown option.
    """
    try:
        signature = inspect.signature(factory)
    except ValueError:  # built in C: the call itself will refuse them
        return
    try:
        signature.bind(url, **options)
    except TypeError as error:
        names = [
            name
            for name, parameter in list(signature.parameters.items())[1:]
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]
        raise InvalidUrlError(
            f"{shown}: got the storage options {sorted(options)}, its factory takes "
            f"{', '.join(names) or 'none'} ({error})"
        ) from error


def _entries() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=ENTRY_POINTS))
