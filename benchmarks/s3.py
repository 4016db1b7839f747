"""Save to and load from S3 in one process, against the best raw client and DCP over s3fs.

    python -m benchmarks.s3 [--mib 256] [--rounds 5] [--endpoint URL]
    python -m benchmarks.s3 --disturbed
    python -m benchmarks.s3 --cpu
    python -m benchmarks.s3 --delay 4 --gbit 0.125

The server is a real Ceph RADOS gateway where its programs are installed (`make test-ceph` installs
them) or the one of `--endpoint`, else moto, which is so slow that all clients look alike. The raw
client is obstore with the same bytes, parts and unsigned payloads: one `put` from memory with as
many parts in flight, and ranged `get`s, 4 and 16 at once, copied into the memory of the state.

With `--disturbed`, saves and loads go through a proxy that refuses a tenth of all requests with
`SlowDown` and swallows the third part, or range, of each; compared with the same through a proxy
that forwards everything.

With `--cpu`, a server that keeps nothing (`benchmarks.bare_s3`): CPU seconds of putting and getting
a GiB in parts and ranges, four at once, and of 1,000 small puts, beside obstore, boto3 and s3fs.

With `--delay`, loads go through a proxy whose answers come so many seconds late, over a link of
`--gbit` that all share: with as many requests in flight as a load finds right, with a fixed number,
and by obstore with 4 and with 16. What counts is the product of the two: 4 s at 0.125 Gb/s needs as
many requests as 50 ms at 10 Gb/s, which no proxy in Python carries.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import obstore
import s3fs
import torch
import torch.distributed.checkpoint as dcp
from botocore.config import Config
from obstore.store import S3Store
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

import ckpt
import ckpt.api as api
from benchmarks.measure import Sample, extra_memory, interleaved, ratio, report, row, speed, wall
from ckpt.layout.memory import host_bytes
from storage import Store, open_store
from tests.counting import AtOnce
from tests.fault_proxy import Request, Rule, fault_proxy
from tests.servers import S3Server, free_port, moto_server

MIB = 1 << 20
IN_FLIGHT = 4  # as ckpt has it for object stores
PART_NBYTES = 16 * MIB
RANGE_NBYTES = 8 * MIB
UP = Path(__file__).parent.parent / "tests" / "ceph" / "up.sh"


@contextlib.contextmanager
def server(endpoint: str | None, directory: Path) -> Iterator[tuple[str, S3Server]]:
    """A name for the report, and a server."""
    if endpoint:
        yield endpoint, S3Server(endpoint)
    elif shutil.which("radosgw"):
        command = [str(UP), str(directory), str(free_port())]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        try:
            yield "Ceph RADOS gateway", S3Server(done.stdout.split()[-1])
        finally:
            subprocess.run([str(UP), "--down", str(directory)], check=True)
    else:
        with moto_server() as moto:
            yield "moto", moto


class Raw:
    """The same bytes with obstore alone."""

    def __init__(self, server: S3Server, bucket: str) -> None:
        self.store = S3Store(
            bucket,
            endpoint=server.endpoint_url,
            region="us-east-1",
            access_key_id=server.key,
            secret_access_key=server.secret,
            unsigned_payload=True,
            client_options={"allow_http": True, "timeout": timedelta(minutes=10)},
        )

    def upload(self, key: str, tensors: list[torch.Tensor]) -> None:
        obstore.put(
            self.store,
            key,
            (host_bytes(tensor) for tensor in tensors),
            chunk_size=PART_NBYTES,
            max_concurrency=IN_FLIGHT,
        )

    def download(
        self,
        key: str,
        tensors: list[torch.Tensor],
        chunk_nbytes: int,
        in_flight: int = IN_FLIGHT,
    ) -> None:
        """`chunk_nbytes=0`: whole ranges, then one copy; otherwise streamed in such chunks."""

        def fetch(start: int, target: memoryview) -> None:
            if not chunk_nbytes:
                content = obstore.get_range(self.store, key, start=start, length=len(target))
                target[:] = memoryview(content)
                return
            options: Any = {"range": (start, start + len(target))}
            offset = 0
            for chunk in obstore.get(self.store, key, options=options).stream(chunk_nbytes):
                target[offset : offset + len(chunk)] = memoryview(chunk)
                offset += len(chunk)

        requests = []
        position = 0
        for tensor in tensors:
            view = host_bytes(tensor)
            for start in range(0, len(view), RANGE_NBYTES):
                requests.append((position + start, view[start : start + RANGE_NBYTES]))
            position += len(view)
        with ThreadPoolExecutor(in_flight) as pool:
            list(pool.map(lambda request: fetch(*request), requests))


Samples = dict[str, list[Sample]]


def measured_clients(server: S3Server, *, mib: int, rounds: int) -> tuple[Samples, Samples]:
    """Uploads and downloads of ours, bare obstore and DCP over s3fs, in turn."""
    saved, loaded, _, _ = _clients(server, mib=mib, rounds=rounds)
    return saved, loaded


def _clients(server: S3Server, *, mib: int, rounds: int) -> tuple[Samples, Samples, int, int]:
    """`measured_clients`, and the bytes of memory that a save and a load of ours take."""
    bucket = server.make_bucket()
    tensors = [torch.randn(4 * MIB) for _ in range(max(1, mib // 16))]
    state = {f"layer{layer}.weight": tensor for layer, tensor in enumerate(tensors)}
    raw = Raw(server, bucket)
    fsspec_options = {**server.options, "skip_instance_cache": True}
    options = {**server.options, "unsigned_payload": True}
    steps = iter(range(1 << 30))
    root = f"s3://{bucket}/ours-{uuid.uuid4().hex}"
    theirs = f"s3://{bucket}/dcp"

    def save() -> None:
        ckpt.save(state, root, step=next(steps), storage_options=options)

    def clear(_: str) -> None:
        # The gateway keeps objects in memory; old steps go, the log and the root stay.
        keys = [entry["path"] for page in obstore.list(raw.store) for entry in page]
        for key in keys:
            if "/steps/" in key:
                obstore.delete(raw.store, key)

    uploads: dict[str, Callable[[], object]] = {
        "ours": save,
        "raw": lambda: raw.upload("raw", tensors),
        "dcp": lambda: dcp.save(
            state, storage_writer=FsspecWriter(theirs, **fsspec_options), no_dist=True
        ),
    }
    saved = interleaved(uploads, rounds=rounds, between=clear)
    save_memory = extra_memory(save)
    downloads: dict[str, Callable[[], object]] = {
        "ours": lambda: ckpt.load(state, root, storage_options=options),
        "raw": lambda: raw.download("raw", tensors, 0),
        "raw streamed": lambda: raw.download("raw", tensors, 256 << 10),
        "raw, as many": lambda: raw.download("raw", tensors, 0, api.REMOTE_REQUESTS_MAX),
        "dcp": lambda: dcp.load(
            state, storage_reader=FsspecReader(theirs, **fsspec_options), no_dist=True
        ),
    }
    expected = [tensor.clone() for tensor in tensors]
    loaded = interleaved(downloads, rounds=rounds, between=lambda _: None)
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
    return saved, loaded, save_memory, extra_memory(downloads["ours"])


def measure(name: str, server: S3Server, *, mib: int, rounds: int) -> None:
    """Interleaved rounds of everything, and one report."""
    saved, loaded, save_memory, load_memory = _clients(server, mib=mib, rounds=rounds)
    best = min(
        (name for name in loaded if name.startswith("raw")),
        key=lambda peer: ratio(loaded, peer, "ours"),
    )
    title = f"{mib} MiB, one process, {name}, median of {rounds}"
    report(
        title,
        [
            row("upload, speed over raw obstore", f"{speed(saved, 'ours', 'raw'):.2f}x", ">= 0.9x"),
            row("upload, speed over DCP and s3fs", f"{speed(saved, 'ours', 'dcp'):.2f}x", ">= 2x"),
            row(
                "upload, CPU seconds of DCP's",
                f"{ratio(saved, 'ours', 'dcp', 'cpu_seconds'):.2f}x",
                "none",
            ),
            row("upload, DCP's; ours", f"{wall(saved, 'dcp')}; {wall(saved, 'ours')}", "none"),
            row("upload, extra memory", f"{save_memory // MIB} MiB", "none"),
            row(
                f"download, speed over {best} obstore",
                f"{speed(loaded, 'ours', best):.2f}x",
                ">= 0.9x",
            ),
            row(
                "download, speed over DCP and s3fs", f"{speed(loaded, 'ours', 'dcp'):.2f}x", ">= 2x"
            ),
            row(
                "download, CPU seconds of DCP's",
                f"{ratio(loaded, 'ours', 'dcp', 'cpu_seconds'):.2f}x",
                "none",
            ),
            row("download, DCP's; ours", f"{wall(loaded, 'dcp')}; {wall(loaded, 'ours')}", "none"),
            row("download, extra memory", f"{load_memory // MIB} MiB", "none"),
        ],
    )


def far(server: S3Server, *, mib: int, rounds: int, delay: float, gbit: float) -> None:
    """Loads over a long link, with as many requests in flight as they find right, and others."""
    tensors = [torch.randn(4 * MIB) for _ in range(max(1, mib // 16))]
    state = {f"layer{layer}.weight": tensor for layer, tensor in enumerate(tensors)}
    bucket = server.make_bucket()
    root, most = f"s3://{bucket}/ours", api.REMOTE_REQUESTS_MAX
    ckpt.save(state, root, step=0, storage_options={**server.options, "unsigned_payload": True})
    Raw(server, bucket).upload("raw", tensors)
    seen: dict[str, list[int]] = {"ours": [], "ours, fixed": []}
    with fault_proxy(server.endpoint_url, rule=lambda request: "") as proxy:
        proxy.delay_seconds, proxy.bandwidth = delay, gbit * 1e9 / 8
        there = S3Server(proxy.endpoint_url)
        options, raw = {**there.options, "unsigned_payload": True}, Raw(there, bucket)

        def load(name: str, requests_max: int) -> None:
            api.REMOTE_REQUESTS_MAX, proxy.in_flight = requests_max, AtOnce()
            ckpt.load(state, root, storage_options=options)
            seen[name].append(proxy.in_flight.most)

        loads: dict[str, Callable[[], object]] = {
            "ours": lambda: load("ours", most),
            "ours, fixed": lambda: load("ours, fixed", api.REMOTE_REQUESTS),
        }
        for count in (IN_FLIGHT, most):
            loads[f"obstore, {count}"] = partial(raw.download, "raw", tensors, 256 << 10, count)
        times = interleaved(loads, rounds=rounds, between=lambda _: None)
    peers = [name for name in loads if name.startswith("obstore")]
    best = min(peers, key=lambda peer: ratio(times, peer, "ours"))
    rows = [
        row(f"speed over {peer}", f"{speed(times, 'ours', peer):.2f}x", bar)
        for peer, bar in (("ours, fixed", "none"), (peers[0], "none"), (best, ">= 0.9x"))
    ]
    counts = ", ".join(f"{name}: {max(counts)}" for name, counts in seen.items())
    rows.append(row("requests in flight at most", counts, "none"))
    title = f"{mib} MiB, one process, {delay:g} s and {gbit:g} Gb/s away, median of {rounds}"
    report(title, rows)


def disturbed(server: S3Server, *, mib: int, rounds: int) -> None:
    """Saves and loads through a proxy that disturbs, against the same through one that does not."""
    state = {f"layer{n}.weight": torch.randn(4 * MIB) for n in range(max(1, mib // 16))}
    bucket, steps = server.make_bucket(), iter(range(1 << 30))
    with (
        fault_proxy(server.endpoint_url) as calm,
        fault_proxy(server.endpoint_url, held_seconds=600) as rough,
    ):
        proxies, rng = {"undisturbed": calm, "disturbed": rough}, random.Random(1)

        def save(name: str) -> None:
            rough.rule = disturbing("PUT", "partNumber=", rng)
            options = {**S3Server(proxies[name].endpoint_url).options, "unsigned_payload": True}
            ckpt.save(state, f"s3://{bucket}/{name}", step=next(steps), storage_options=options)

        def load(name: str) -> None:
            rough.rule = disturbing("GET", ".safetensors", rng)
            options = {**S3Server(proxies[name].endpoint_url).options, "unsigned_payload": True}
            ckpt.load(state, f"s3://{bucket}/{name}", storage_options=options)

        rows = []
        for what, run in (("save", save), ("load", load)):
            times = interleaved(
                {name: partial(run, name) for name in proxies},
                rounds=rounds,
                between=lambda _: None,
            )
            longer = ratio(times, "disturbed", "undisturbed")
            rows.append(row(f"{what}, time over an undisturbed one", f"{longer:.2f}x", "<= 1.3x"))
            both = f"{wall(times, 'undisturbed')}; {wall(times, 'disturbed')}"
            rows.append(row(f"{what}, undisturbed; disturbed", both, "none"))
        counts = rough.counts
        rows.append(
            row(
                "requests swallowed and refused", f"{counts['held']}, {counts['slow_down']}", "none"
            )
        )
        rows.append(
            row(
                "requests sent, over undisturbed",
                f"{len(rough.requests) / len(calm.requests):.2f}x",
                "none",
            )
        )
    report(f"{mib} MiB, one process, behind proxies, median of {rounds}", rows)


def cpu(*, mib: int, rounds: int) -> None:
    """CPU seconds of this process, for the same requests by each client."""
    parts = [memoryview(bytearray(PART_NBYTES)) for _ in range(max(1, mib // 16))]
    gib, small = len(parts) * PART_NBYTES / (1 << 30), bytes(1000)
    with bare_server() as server:
        raw, theirs = Raw(server, "bucket").store, s3fs.S3FileSystem(**server.options)
        stores = {
            f"ours{name}": open_store(
                "s3://bucket/run", **server.options, unsigned_payload=unsigned
            )
            for name, unsigned in (("", True), (", signed", False))
        }
        boto = boto3.client(
            "s3",
            endpoint_url=server.endpoint_url,
            aws_access_key_id=server.key,
            aws_secret_access_key=server.secret,
            region_name="us-east-1",
            config=Config(
                request_checksum_calculation="when_required",
                s3={"payload_signing_enabled": False},
            ),
        )
        part = {"Bucket": "bucket", "Key": "k", "UploadId": "u"}

        def put(store: Store) -> None:
            nbytes = len(parts) * PART_NBYTES
            with store.create("large", nbytes, part_nbytes=PART_NBYTES) as writer:
                at_once(lambda index: writer.write_part(index, [parts[index]]))

        def at_once(each: Callable[[int], object]) -> None:
            with ThreadPoolExecutor(IN_FLIGHT) as pool:
                list(pool.map(each, range(len(parts))))

        def into(index: int, data: Any) -> None:
            parts[index][:RANGE_NBYTES] = memoryview(data)

        def span(index: int) -> tuple[int, int]:
            return index * PART_NBYTES, index * PART_NBYTES + RANGE_NBYTES

        def by_boto(index: int) -> None:
            start, end = span(index)
            got = boto.get_object(Bucket="bucket", Key="k", Range=f"bytes={start}-{end - 1}")
            into(index, got["Body"].read())

        ours = stores["ours"]
        kinds: dict[str, dict[str, Callable[[], object]]] = {
            "put of a GiB": {
                **{name: partial(put, store) for name, store in stores.items()},
                "obstore": lambda: obstore.put(
                    raw, "k", iter(parts), chunk_size=PART_NBYTES, max_concurrency=IN_FLIGHT
                ),
                "boto3": lambda: at_once(
                    lambda n: boto.upload_part(**part, PartNumber=n + 1, Body=bytes(parts[n]))
                ),
                "s3fs": lambda: at_once(
                    lambda n: theirs.call_s3(
                        "upload_part", **part, PartNumber=n + 1, Body=bytes(parts[n])
                    )
                ),
            },
            "get of a GiB": {
                "ours": lambda: at_once(
                    lambda n: ours.get_into("large", span(n)[0], [parts[n][:RANGE_NBYTES]])
                ),
                "obstore": lambda: at_once(
                    lambda n: into(
                        n, obstore.get_range(raw, "k", start=span(n)[0], length=RANGE_NBYTES)
                    )
                ),
                "boto3": lambda: at_once(by_boto),
                "s3fs": lambda: at_once(
                    lambda n: into(n, theirs.cat_file("bucket/k", None, *span(n)))
                ),
            },
            "1,000 small puts": {
                "ours": lambda: [ours.put_if_absent(f"k{n}", small) for n in range(1000)],
                "obstore": lambda: [obstore.put(raw, f"k{n}", small) for n in range(1000)],
                "boto3": lambda: [
                    boto.put_object(Bucket="bucket", Key=f"k{n}", Body=small) for n in range(1000)
                ],
                "s3fs": lambda: [theirs.pipe_file(f"bucket/k{n}", small) for n in range(1000)],
            },
        }
        bars = {"put of a GiB": "<= 0.45, signed 1.0", "get of a GiB": "<= 0.35"}
        rows = []
        for kind, clients in kinds.items():
            samples = interleaved(clients, rounds=rounds, between=lambda _: None)
            per = {"put of a GiB": gib, "get of a GiB": gib / 2}.get(kind, 1.0)
            seconds = {
                name: statistics.median(sample.cpu_seconds for sample in some) / per
                for name, some in samples.items()
            }
            shown = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
            rows.append(row(f"CPU seconds, {kind}", shown, bars.get(kind, "<= 0.4")))
        for store in stores.values():
            store.close()
    report(f"CPU of clients, {mib} MiB, median of {rounds}", rows)


@contextlib.contextmanager
def bare_server() -> Iterator[S3Server]:
    """`benchmarks.bare_s3` in a process of its own."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.bare_s3", str(port)]
    process = subprocess.Popen(command)
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        yield S3Server(f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait()


def disturbing(method: str, what: str, rng: random.Random) -> Rule:
    """A tenth of all requests is refused, and the third of the kind swallowed."""
    numbers = itertools.count(1)

    def rule(request: Request) -> str:
        if request.method == method and what in request.path and next(numbers) == 3:
            return "held"
        return "slow_down" if rng.random() < 0.1 else ""

    return rule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--endpoint", default=None, help="an S3 server that is running")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds; from a far server")
    parser.add_argument("--gbit", type=float, default=0.5, help="Gb/s of the link to it")
    parser.add_argument("--cpu", action="store_true", help="CPU seconds beside other clients")
    parser.add_argument("--disturbed", action="store_true", help="behind a proxy that fails")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if arguments.cpu:
        cpu(mib=arguments.mib, rounds=arguments.rounds)
        return
    with (
        tempfile.TemporaryDirectory() as directory,
        server(arguments.endpoint, Path(directory)) as (name, running),
    ):
        size = {"mib": arguments.mib, "rounds": arguments.rounds}
        if arguments.disturbed:
            disturbed(running, **size)
            return
        if arguments.delay:
            far(running, **size, delay=arguments.delay, gbit=arguments.gbit)
            return
        measure(name, running, **size)


if __name__ == "__main__":
    main()
