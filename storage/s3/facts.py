"""How an s3fs client reaches its bucket, for clients that share its session and credentials."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import botocore.exceptions as boto
import s3fs
from botocore import UNSIGNED
from botocore.credentials import RefreshableCredentials
from botocore.utils import get_environ_proxies
from fsspec.asyn import sync


@dataclass(frozen=True)
class ClientFacts:
    """How an s3fs client reaches its bucket, for another client of the same. Never shown in
    messages: it gives access to credentials. `problem` names what only s3fs can do; the rest is
    undefined then.
    """

    bucket: str
    endpoint_url: str
    bucket_in_host: bool
    region: str
    anonymous: bool
    connect_timeout_seconds: float
    read_timeout_seconds: float
    problem: str
    filesystem: Any = field(repr=False)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Where s3fs runs its requests; never wait for it from itself."""
        loop: asyncio.AbstractEventLoop = self.filesystem.loop
        return loop

    def credentials(self) -> tuple[str, str, str | None, bool]:
        """Access key, secret, session token, and whether they may change."""
        answer: tuple[str, str, str | None, bool] = sync(self.loop, _credentials, self.filesystem)
        return answer


async def ask_client(filesystem: s3fs.S3FileSystem, bucket: str) -> ClientFacts:
    """The client's own answer: the address of a request that it would sign. Sends nothing."""
    client = await filesystem.set_session()
    config = client.meta.config
    signed = await client.generate_presigned_url("get_object", {"Bucket": bucket, "Key": "k"})
    address = urlsplit(signed)
    in_host = address.path == "/k"
    problem = "" if in_host or address.path == f"/{bucket}/k" else "this endpoint's path"
    if config.signature_version not in ("s3v4", UNSIGNED):
        problem = f"signature_version {config.signature_version}"
    if address.scheme == "https" and filesystem.session.get_config_variable("ca_bundle"):
        problem = "ca_bundle"
    if config.proxies or get_environ_proxies(signed):
        problem = "proxies"
    return ClientFacts(
        bucket,
        f"{address.scheme}://{address.netloc}",
        in_host,
        client.meta.region_name if client.meta.region_name != "aws-global" else "us-east-1",
        config.signature_version is UNSIGNED,
        config.connect_timeout,
        config.read_timeout,
        problem,
        filesystem,
    )


async def _credentials(filesystem: s3fs.S3FileSystem) -> tuple[str, str, str | None, bool]:
    if filesystem.key and filesystem.secret:
        return filesystem.key, filesystem.secret, filesystem.token, False
    credentials = await filesystem.session.get_credentials()
    if credentials is None:
        raise boto.NoCredentialsError
    frozen = await credentials.get_frozen_credentials()
    may_expire = isinstance(credentials, RefreshableCredentials)
    return frozen.access_key, frozen.secret_key, frozen.token, may_expire
