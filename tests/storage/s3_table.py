"""Every option of s3fs in every region: what s3fs would send, and what we send.

    python -m tests.storage.s3_table [--regions N]

A request that moves an object is prepared twice with the same arguments: by s3fs itself, stopped
just before it is sent, and by `storage.s3`. Compared are method, url and all headers but the time,
the signature and the id of the call, none of which two requests share; what is signed is compared.
The table has one row for each option, and the number of requests and differences.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import botocore.session
import s3fs
from fsspec.asyn import sync

from storage.retry import NO_RETRY
from storage.s3.client import with_defaults
from storage.s3.store import S3Store

BUCKET = "bucket-of-test"
KMS = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "key", "BucketKeyEnabled": True}
SSE_C = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": "k" * 32}
# The options of `s3fs.S3FileSystem`, and what they may hold for a session, a client, its config
# and each request.
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "anon": {"anon": True},
    "key, secret": {"key": "a", "secret": "b"},
    "token": {"key": "a", "secret": "b", "token": "t"},
    "username, password": {"username": "a", "password": "b"},
    "endpoint_url": {"endpoint_url": "https://s3.example.com"},
    "endpoint_url with a path": {"endpoint_url": "https://gateway.example.com/s3/v2"},
    "endpoint_url without TLS": {"endpoint_url": "http://s3.example.com:81"},
    "use_ssl": {"use_ssl": False},
    "requester_pays": {"requester_pays": True},
    "version_aware": {"version_aware": True},
    "default_block_size": {"default_block_size": 1 << 20, "default_fill_cache": False},
    "default_cache_type": {"default_cache_type": "none"},
    "max_concurrency": {"max_concurrency": 3, "fixed_upload_size": True},
    "local_expiry_check": {"local_expiry_check": True},
    "SSE-S3": {"s3_additional_kwargs": {"ServerSideEncryption": "AES256"}},
    "SSE-KMS": {"s3_additional_kwargs": KMS},
    "SSE-C": {"s3_additional_kwargs": SSE_C},
    "ACL": {"s3_additional_kwargs": {"ACL": "bucket-owner-full-control"}},
    "StorageClass": {"s3_additional_kwargs": {"StorageClass": "STANDARD_IA"}},
    "Tagging": {"s3_additional_kwargs": {"Tagging": "a=b&c=d e"}},
    "owner": {"s3_additional_kwargs": {"ExpectedBucketOwner": "123456789012"}},
    "content": {"s3_additional_kwargs": {"ContentType": "a/b", "CacheControl": "no-cache"}},
    "metadata": {"s3_additional_kwargs": {"Metadata": {"team": "a b"}}},
    "object lock": {
        "s3_additional_kwargs": {
            "ObjectLockMode": "GOVERNANCE",
            "ObjectLockRetainUntilDate": "2030-01-01T00:00:00Z",
        }
    },
    "legal hold": {"s3_additional_kwargs": {"ObjectLockLegalHoldStatus": "ON"}},
    "verify": {"client_kwargs": {"verify": False}},
    "api_version": {"client_kwargs": {"api_version": "2006-03-01"}},
    "credentials of the client": {
        "client_kwargs": {"aws_access_key_id": "a", "aws_secret_access_key": "b"}
    },
    "path style": {"config_kwargs": {"s3": {"addressing_style": "path"}}},
    "virtual style": {"config_kwargs": {"s3": {"addressing_style": "virtual"}}},
    "accelerate": {"config_kwargs": {"s3": {"use_accelerate_endpoint": True}}},
    "FIPS": {"config_kwargs": {"use_fips_endpoint": True}},
    "dual-stack": {"config_kwargs": {"use_dualstack_endpoint": True}},
    "signed bodies": {"config_kwargs": {"s3": {"payload_signing_enabled": True}}},
    "unsigned bodies": {"config_kwargs": {"s3": {"payload_signing_enabled": False}}},
    "signature v2": {"config_kwargs": {"signature_version": "s3"}},
    "checksums when supported": {
        "config_kwargs": {
            "request_checksum_calculation": "when_supported",
            "response_checksum_validation": "when_supported",
        }
    },
    "agent": {"config_kwargs": {"user_agent_extra": "x/1", "user_agent_appid": "me"}},
    "proxies": {"config_kwargs": {"proxies": {"https": "http://127.0.0.1:9"}}},
    "timeouts": {"config_kwargs": {"connect_timeout": 3, "read_timeout": 4, "tcp_keepalive": True}},
    "retries": {"config_kwargs": {"retries": {"mode": "standard"}}},
    "injected prefix": {"config_kwargs": {"inject_host_prefix": False}},
}
BODY = b"0123456789"
REQUESTS: tuple[tuple[str, dict[str, Any], bytes], ...] = (
    ("get_object", {"Range": "bytes=5-9"}, b""),
    ("get_object", {}, b""),
    (
        "put_object",
        {"Metadata": {"write-id": "i"}, "IfNoneMatch": "*", "ChecksumCRC32C": "c"},
        BODY,
    ),
    ("upload_part", {"UploadId": "u+/=", "PartNumber": 7, "ChecksumCRC32C": "c"}, BODY),
)
KEY = "run/a b+ü/#1?.x"
# What no two requests share, and what belongs to how the body is sent.
_OWN = ("amz-sdk-invocation-id", "x-amz-date", "date", "expect")


def regions() -> list[str]:
    """All that botocore knows for S3."""
    session = botocore.session.get_session()
    known = [
        session.get_available_regions("s3", partition_name=partition)
        for partition in session.get_available_partitions()
    ]
    return sorted({region for some in known for region in some})


@contextmanager
def models_read_once() -> Iterator[None]:
    """Every session reads botocore's models of 10 MiB anew, and there are thousands of them."""
    create = botocore.session.create_loader
    botocore.session.create_loader = functools.cache(create)
    try:
        yield
    finally:
        botocore.session.create_loader = create


class _Stopped(BaseException):
    pass


def differences(name: str, region: str) -> list[str]:
    """What the requests of the option of that name have, and should not have, in a region."""
    given = OPTIONS[name]
    options = {**given, "client_kwargs": {"region_name": region, **given.get("client_kwargs", {})}}
    store = S3Store(BUCKET, "run", options=options, retry=NO_RETRY)
    try:
        return [
            f"{name}, {region}, {method}: {problem}"
            for method, arguments, body in REQUESTS
            for problem in _compared(store, options, method, arguments, body)
        ]
    finally:
        store.close()


def _compared(
    store: S3Store, options: dict[str, Any], method: str, arguments: dict[str, Any], body: bytes
) -> list[str]:
    arguments = {"Key": KEY, **arguments}
    if "Metadata" in arguments:
        arguments = {**arguments, "Metadata": {**store.metadata, **arguments["Metadata"]}}
    theirs = _prepared(_by_s3fs(store, options, method, arguments, body))
    ours = _prepared(_by_us(store, method, arguments, body))
    if isinstance(theirs, str) or isinstance(ours, str):
        return [] if theirs == ours else [f"{ours!r} instead of {theirs!r}"]
    names = sorted({*theirs, *ours})
    return [
        f"{name} is {ours.get(name)!r} instead of {theirs.get(name)!r}"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]


def _prepared(made: Any) -> Any:
    """Comparable: a dict of everything that two requests share, or the name of an error."""
    if isinstance(made, str):
        return made
    url, headers = made
    shared = {name.lower(): value for name, value in headers}
    authorization = shared.pop("authorization", "")
    # Of version 4 all but the signature, which has the time in it; of version 2 the key.
    # Features of the client that were used, a set.
    features = re.compile(r"(?<= m/)[^ ]+")
    agent = shared["user-agent"]
    shared["user-agent"] = features.sub(lambda m: ",".join(sorted(m[0].split(","))), agent)
    shared["signed"] = re.sub(r"Signature=\w+|:.*", "", authorization)
    return {"url": url, **{name: shared[name] for name in shared if name not in _OWN}}


def _by_us(store: S3Store, method: str, arguments: dict[str, Any], body: bytes) -> Any:
    client = store.client()
    preparing = asyncio.run_coroutine_threadsafe(client.prepare(method, arguments), client.loop)
    try:
        return preparing.result().request(arguments, [body] if body else [])
    except Exception as error:
        return type(error).__name__


def _by_s3fs(
    store: S3Store, options: dict[str, Any], method: str, arguments: dict[str, Any], body: bytes
) -> Any:
    """As s3fs sends it, with the same default settings."""
    mine = with_defaults(options)
    filesystem = s3fs.S3FileSystem(**mine)
    taken: list[Any] = []

    async def prepare() -> None:
        client = await filesystem.set_session()
        s3 = dict(client.meta.config.s3 or {})
        if "payload_signing_enabled" not in s3:  # a default of ours, and no other
            is_https = client.meta.endpoint_url.startswith("https")
            client.meta.config.s3 = {**s3, "payload_signing_enabled": not is_https}

        def take(request: Any, **_: Any) -> None:
            taken.append(request)
            raise _Stopped

        client.meta.events.register_first("before-send.s3", take)
        sent = {**arguments, "Body": body} if body else arguments
        try:
            await filesystem._call_s3(method, Bucket=BUCKET, **sent)
        except _Stopped:
            pass
        finally:
            client.meta.events.unregister("before-send.s3", take)

    try:
        sync(filesystem.loop, prepare)
    except Exception as error:
        return type(error).__name__
    headers = [
        (name, value.decode() if isinstance(value, bytes) else str(value))
        for name, value in taken[0].headers.items()
    ]
    return taken[0].url, headers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--regions", type=int, default=0, help="only the first so many")
    chosen = regions()[: parser.parse_args().regions or None]
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "a")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "b")
    os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
    print(f"| option | regions | requests | differences |\n| {'--- | ' * 4}".rstrip())
    total = 0
    for name in OPTIONS:
        with models_read_once():
            problems = [problem for region in chosen for problem in differences(name, region)]
        total += len(problems)
        count = len(chosen) * len(REQUESTS)
        print(f"| {name} | {len(chosen)} | {count} | {len(problems)} |", flush=True)
        for problem in problems[:3]:
            print(f"    {problem}")
    print(f"| all | {len(chosen)} | {len(OPTIONS) * len(chosen) * len(REQUESTS)} | {total} |")


if __name__ == "__main__":
    main()
