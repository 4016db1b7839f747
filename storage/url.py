"""From a url to a store."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from storage.encoding.store import ENCODING_OPTIONS, EXPECT_ROOT, EncodedStore, EncodingOptions
from storage.errors import InvalidUrlError
from storage.hidden import without_secrets
from storage.local import LocalStore
from storage.location import (
    BorrowedStore,
    PrefixStore,
    StoreLike,
    child_of,
    is_url,
    place_on_filesystem,
    url_of,
)
from storage.memory import MemoryBucket, MemoryStore
from storage.retry import RetryingStore, RetryPolicy
from storage.schemes import factory_of, open_registered, registered_schemes
from storage.store import Store, redacted
from storage.wrap import SpreadStore

_PROTOCOL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://?")
_MISSPELLED = re.compile(r"(s3a?|gs|az|memory|file)(?://|:(?!/))", re.IGNORECASE)
_FORCE_FSSPEC = "fsspec+"
_CHAIN = "::"
_CLOUDS = {"gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}

# What `memory://NAME` finds again within this process: it is data, like a directory of a disk.
_memory_buckets: dict[str, MemoryBucket] = {}

_STORES = "shardpoint_stores"  # of a filesystem: a store for each call would connect anew
# Arguments of fsspec's classes, which say how a filesystem is used, and not what it is.
_OF_EVERY_FILESYSTEM = {
    *("use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache"),
    *("asynchronous", "loop", "batch_size"),
}


def options_of_other(
    url: StoreLike,
    options: Mapping[str, Any] | None,
    other: StoreLike,
    other_options: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The options of the store at `other`: its own if it was given any, even none; else those of
    the store at `url` where both are urls of the same protocol. How a root is encoded does not
    depend on that: what is copied from an encrypted root is encrypted with the same key, unless
    another one is given, or None.
    """
    own = dict(other_options or {})
    if not is_url(url) or not is_url(other):
        return own
    is_same = other_options is None and _split(url_of(url))[0] == _split(url_of(other))[0]
    inherited = {
        name: value
        for name, value in (options or {}).items()
        if (is_same or name in ENCODING_OPTIONS) and name != EXPECT_ROOT
    }
    return {**inherited, **own}


def open_store(
    url: StoreLike, *, retry: RetryPolicy | None = None, **storage_options: Any
) -> Store:
    """The store at `url`. Nothing is read or written yet: a wrong bucket shows at first use.

    - a path or `file://PATH`, both relative too or below `~`: a directory of this machine;
    - `memory://NAME`: lives as long as this process, one per name;
    - `s3://BUCKET/PREFIX`: S3, with the session and credentials of s3fs. `storage_options` are
      those of `s3fs.S3FileSystem`, such as `endpoint_url`, `key`, `secret`, `anon`, `profile`,
      those of `storage.s3.client.Transfer` (`unsigned_payload`, `checksums`), and
      `spread`: the number of key prefixes over which a new root spreads its data files (see
      `storage.wrap`);
    - `gs://BUCKET/PREFIX` and `az://CONTAINER/PREFIX`, or `gcs`, `abfs`, `abfss`: with obstore
      (`shardpoint[fast]`), which creates exclusively there; without it, and with options that
      gcsfs or adlfs has and obstore has not, like any other protocol;
    - `peer://HOST:PORT/ROOT`: a root that followers read where others serve it; several hosts
      with commas between. `storage_options` are those of `storage.peers.relay.open_peer`;
    - a scheme of your own: see `register_store`;
    - any other protocol of fsspec, those of `fsspec.register_implementation` included: see
      `storage.FsspecStore`. `fsspec+PROTOCOL://` takes this way for a protocol that has a store of
      its own. A chain such as `simplecache::s3://BUCKET/PREFIX` can be read only;
    - an `FSMap`, a `UPath` or a `DirFileSystem` of fsspec: the place it names, with the options it
      has; on disks and S3 by the stores above, elsewhere by its filesystem;
    - a `Store`: it has its options already, and closing what is returned leaves it open.

    Two options are for all of them, and for objects of a root alone: `encryption_key` (32 bytes,
    the path of a file with them, or a function that returns them for the id of a key) and
    `compression` ("zstd", or with a level "zstd:3"). They say how a new root is encoded; of an
    existing one, only the key of an encrypted one has to be given. See `storage.encoding`.
    `expect_root`, the id of a root (32 hex digits), refuses every other root at `url`.

    No repr, attribute or variable of a frame of ours shows a key or a credential in the options;
    the caller's own mapping does.

    `retry` applies to stores behind a network, those of callers included unless they repeat what
    fails themselves; None means the usual policy. Raises InvalidUrlError.
    """
    storage_options = without_secrets(storage_options)
    encoding = EncodingOptions.taken_from(storage_options)
    return EncodedStore(_open_plain(url, retry, storage_options), encoding)


def with_its_options(where: StoreLike) -> str | os.PathLike[str] | Store:
    """`where` itself, or the store of a place on a filesystem, with the options that it has: the
    same store at every call.
    """
    place = place_on_filesystem(where)
    if place is None:
        return where if is_url(where) or isinstance(where, Store) else url_of(where)
    # Kept with the filesystem, so that both are forgotten together.
    known: dict[tuple[int, str], Store] = vars(place.filesystem).setdefault(_STORES, {})
    key = (os.getpid(), place.path)
    if key not in known:
        known[key] = _open_place(*place)
    return known[key]


def _open_place(filesystem: Any, path: str) -> Store:
    # Exactly these classes: a subclass does something of its own, whatever its protocol.
    made_by = f"{type(filesystem).__module__}.{type(filesystem).__name__}"
    if made_by == "fsspec.implementations.local.LocalFileSystem":
        return _open_local(path)
    if made_by == "s3fs.core.S3FileSystem" and not filesystem.storage_args:
        options = filesystem.storage_options.items()
        own = {name: value for name, value in options if name not in _OF_EVERY_FILESYSTEM}
        return _open_plain(f"s3://{path}", None, own)
    from storage.generic import FsspecStore

    return FsspecStore(filesystem, path)


def _open_plain(
    url: StoreLike, retry: RetryPolicy | None, storage_options: dict[str, Any]
) -> Store:
    """The store at `url`, whose objects are those of the storage."""
    url = with_its_options(url)
    if isinstance(url, Store):
        if storage_options:
            raise InvalidUrlError(
                f"{url.url}: a Store object has its options already, got "
                f"{', '.join(sorted(storage_options))}; set them where it is made"
            )
        return _retrying(BorrowedStore(url), retry)
    url = url_of(url)
    protocol, rest = _split(url)
    if protocol in ("", "file", "local"):
        _refuse_options(url, storage_options)
        if protocol and not rest:
            raise InvalidUrlError("file:// names no directory; write file:///absolute/path")
        return _open_local(os.path.expanduser(rest))
    if protocol == "memory":
        _refuse_options(url, storage_options)
        return _open_memory(url, rest)
    if protocol == "peer":
        from storage.peers.relay import open_peer

        options, root = dict(storage_options), rest.partition("/")[2].strip("/")
        behind, its_options = options.pop("fallback", None), options.pop("fallback_options", None)
        below = child_of(behind, root) if behind is not None and root else behind
        others = below is not None and [_open_plain(below, None, without_secrets(its_options))]
        return open_registered(url, protocol, partial(open_peer, others=others or ()), options)
    policy = retry if retry is not None else RetryPolicy()
    if protocol in ("s3", "s3a"):
        try:
            from storage.s3.store import open_s3  # s3fs takes half a second to import
        except ImportError as error:
            raise InvalidUrlError(
                f"{redacted(url)}: s3:// needs s3fs ({error}); pip install s3fs"
            ) from error
        options = dict(storage_options)
        spread = options.pop("spread", None)
        store = RetryingStore(open_s3(url, rest, options, policy), policy)
        return SpreadStore(store, spread)
    if protocol in _CLOUDS and importlib.util.find_spec("obstore") is not None:
        from storage.clouds import open_cloud

        options = _cloud_options(_CLOUDS[protocol], storage_options)
        if not _needs_fsspec(url, _CLOUDS[protocol], options):
            return RetryingStore(open_cloud(_CLOUDS[protocol], rest, options, policy), policy)
    if (factory := factory_of(protocol)) is not None:
        return _retrying(open_registered(url, protocol, factory, storage_options), retry)
    for each in _protocols(protocol, url):
        _check_protocol(url, each)
    from storage.generic import open_generic

    return RetryingStore(open_generic(url.removeprefix(_FORCE_FSSPEC), storage_options), policy)


def _cloud_options(cloud: str, options: dict[str, Any]) -> dict[str, Any]:
    """`options`, with those of fsspec's configuration."""
    import fsspec

    protocols = tuple(name for name, kind in _CLOUDS.items() if kind == cloud)
    return dict(fsspec.config.apply_config(SimpleNamespace(protocol=protocols), options))


def _needs_fsspec(url: str, cloud: str, options: dict[str, Any]) -> bool:
    """Whether gcsfs or adlfs is there and has options that obstore has not.

    Raises InvalidUrlError for options that neither has.
    """
    from storage.clouds import unknown_options
    from storage.generic import options_of_filesystem

    unknown = unknown_options(cloud, options)
    if not unknown:
        return False
    try:
        known = options_of_filesystem(cloud)
    except (ImportError, ValueError):
        return False
    if misspelled := sorted(set(unknown) - known):
        raise InvalidUrlError(
            f"{redacted(url)}: unknown storage options {', '.join(misspelled)}; neither obstore "
            f"nor fsspec's filesystem for {cloud}:// has them"
        )
    return True


def _retrying(store: Store, retry: RetryPolicy | None) -> Store:
    """A store of somebody else's code, with failed requests repeated unless it does so itself."""
    if store.patience is not None:
        return store
    return RetryingStore(store, retry if retry is not None else RetryPolicy())


def _split(url: str) -> tuple[str, str]:
    """Protocol in lower case, "" for a plain path, and what follows `://`. "::" for a chain."""
    # As paths these would fill the disk of one machine with what was meant for a store.
    if url.startswith("peer://"):  # an IPv6 address is no chain
        return "peer", url.removeprefix("peer://")
    if _CHAIN in url and factory_of(url.partition("://")[0].lower()) is None:
        return _CHAIN, url
    match = _PROTOCOL.match(url) or _MISSPELLED.match(url)
    if match is None:
        return "", url
    protocol = match[1].lower()
    if not match[0].endswith("://"):
        rest = url[match.end() :]
        if protocol == "file" and match[0].endswith("/"):
            rest = f"/{rest}"
        raise InvalidUrlError(
            f"a url begins with {protocol + '://'!r}, got {match[0]!r}; did you mean "
            f"{redacted(f'{protocol}://{rest}')!r}? Write './' before it for a path."
        )
    return protocol, url[match.end() :]


def _open_local(path: str) -> LocalStore:
    if os.path.exists(path) and not os.path.isdir(path):
        raise InvalidUrlError(
            f"{path} is a file; a store is a directory that holds objects: pass a directory, new "
            f"or old, such as {os.path.dirname(path) or '.'!r} (`ckpt import` and `ckpt export` "
            "read files of torch.save and safetensors)"
        )
    return LocalStore(path)


def _open_memory(url: str, rest: str) -> Store:
    name, _, prefix = rest.strip("/").partition("/")
    if not name:
        raise InvalidUrlError(f"{url!r} names no store; write memory://NAME")
    store = MemoryStore(_memory_buckets.setdefault(name, MemoryBucket()), name=name)
    return PrefixStore(store, prefix) if prefix else store


def _refuse_options(url: str, options: dict[str, Any]) -> None:
    if options:
        raise InvalidUrlError(
            f"{redacted(url)} takes no storage options, got {', '.join(sorted(options))}"
        )


def _protocols(protocol: str, url: str) -> list[str]:
    """The protocols of which fsspec has to open `url`: those of each part of a chain."""
    if protocol != _CHAIN:
        return [protocol.removeprefix(_FORCE_FSSPEC)]
    bits = url.removeprefix(_FORCE_FSSPEC).split(_CHAIN)
    # As fsspec does: a word alone is a protocol, anything else without one is a path.
    return [
        bit.partition("://")[0] if "://" in bit or re.fullmatch(r"[a-z]*", bit) else "file"
        for bit in bits
    ]


def _check_protocol(url: str, protocol: str) -> None:
    import fsspec

    registered = registered_schemes()
    # What was registered as a class is in fsspec's registry only.
    own = {*fsspec.available_protocols(), *fsspec.registry}
    if protocol in own:
        return
    known = {*own, "s3", "file", "memory", "peer", *registered}
    alike = sorted(name for name in known if name[:1] == protocol[:1])
    close = difflib.get_close_matches(protocol, alike, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}://?" if close else "write a path or s3://bucket/prefix"
    raise InvalidUrlError(
        f"{redacted(url)}: unknown protocol {protocol!r}; {hint} "
        f"(registered: {', '.join(registered) or 'none'}; fsspec.available_protocols() lists the "
        "others)"
    )
