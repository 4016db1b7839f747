"""What a root has, what happened to it, what it takes and costs. None of these needs torch."""

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, SupportsIndex, cast

from ckpt.operate import arguments as given
from ckpt.operate.arguments import Argument, operation

if TYPE_CHECKING:
    from ckpt.tools.cost import CostReport
    from ckpt.tools.near_tiers import NearListing
    from ckpt.tools.overview import DiskUsage, LogReport, RootListing
    from ckpt.tools.report import Report
    from storage import StoreLike

OPTIMIZERS = (
    "adam", "adamw", "adagrad", "lion", "muon", "rmsprop", "sgd-momentum", "sgd", "none"
)  # fmt: skip


@operation
def ls(
    url: given.Url,
    *,
    near: Annotated[bool, Argument("URL is a directory of near checkpoints on this host")] = False,
    storage_options: given.Options = None,
) -> "RootListing | NearListing":
    """List the checkpoints of a root, with their times and sizes.

    A step's directory has one, as what another library has written (its attempt names the format),
    and a directory of near checkpoints those of this host, with `near=True`. Raises NoCheckpoint
    when `url` is none of them, and the store's errors.
    """
    if near:
        from ckpt.tools.near_tiers import near_listing

        return near_listing(os.fspath(cast(str, url)))
    from ckpt.errors import NoCheckpoint
    from ckpt.tools.overview import listing, listing_of_other
    from storage.errors import InvalidUrlError

    # Ours first: a file of another library is no store at all, and its folder is no root, so only
    # these two errors mean that it may be one.
    try:
        with given.opened(url, storage_options) as store:
            return listing(store)
    except (NoCheckpoint, InvalidUrlError):
        return listing_of_other(url, storage_options)


@operation
def log(
    url: given.Root,
    *,
    count: Annotated[
        SupportsIndex, Argument("newest N records; 0: all", given.whole, "N", "-n --count")
    ] = 30,
    storage_options: given.Options = None,
) -> "LogReport":
    """Show the history of a root: claims, commits, retirements, pins.

    As `ckpt.history`, and `problem` says why no job may append to the log, "" where one may.
    """
    from ckpt.tools.overview import log_report

    with given.opened(url, storage_options) as store:
        return log_report(store, int(count) or None)


@operation
def disk_usage(url: given.Url, *, storage_options: given.Options = None) -> "DiskUsage":
    """Show what every checkpoint takes, and what unfinished saves left.

    Lists a root once; no object is read but the log. A single step's directory counts as a root
    with one checkpoint. Raises NoCheckpoint when neither is at `url`, Corrupt when the log is
    damaged, and the store's errors.
    """
    from ckpt.tools.overview import usage_of

    with given.opened(url, storage_options) as store:
        return usage_of(store)


@operation
def report(
    url: given.Root,
    *,
    near: given.Near = (),
    gib_month: given.StoragePrice = None,
    thousand_writes: given.WritesPrice = None,
    metadata_bytes_max: given.MetadataMax = None,
    storage_options: given.Options = None,
) -> "Report":
    """Report on the saves of a root: how long, how large, which ranks were slow.

    What its log, listings, telemetry and newest manifest say, and its near checkpoints in the
    directories `near` of hosts; no tensor is read. Raises NoCheckpoint when `url` is no root,
    Corrupt when its log is damaged, and the store's errors. Telemetry that is missing or damaged is
    left out, and what would take more than `metadata_bytes_max` bytes of memory (None: 1 GiB).
    """
    from ckpt.commit.names import plain_int
    from ckpt.tools.cost import Prices, per_day
    from ckpt.tools.report import report_of

    made = report_of(
        url,
        near=near,
        storage_options=storage_options,
        metadata_bytes_max=plain_int(metadata_bytes_max),
    )
    return replace(made, per_day=per_day(made, Prices(gib_month, thousand_writes)))


def _time(flag: str, text: str) -> Argument:
    return Argument(f"time {text}", given.seconds, "TIME", flag)


@operation
def cost(
    url: Annotated[
        "StoreLike | None",
        Argument("a root; numbers that you leave out come from its telemetry and log"),
    ] = None,
    *,
    params: Annotated["int | None", Argument("parameters, such as 70B", given.params, "N")] = None,
    optimizer: Annotated["str | None", Argument("default: adamw", choices=OPTIMIZERS)] = None,
    dtype: Annotated["str | None", Argument("of the parameters; default: float32")] = None,
    state_dtype: Annotated[
        "str | None", Argument("of the optimizer's states; default: as --dtype")
    ] = None,
    master_dtype: Annotated[
        "str | None", Argument("of a second copy of the parameters; default: none")
    ] = None,
    ranks: Annotated["int | None", Argument("processes that save", given.count, "N")] = None,
    keep: Annotated["int | None", Argument("checkpoints that are kept", given.count, "N")] = None,
    every_seconds: Annotated[
        "float | None", _time("--every", "from one save to the next, such as 10m")
    ] = None,
    mtbf_seconds: Annotated[
        "float | None", _time("--mtbf", "between failures of the whole job, on average, such as 6h")
    ] = None,
    blocked_seconds: Annotated[
        "float | None", _time("--blocked", "that a save costs the training, such as 0.5s")
    ] = None,
    persist_seconds: Annotated[
        "float | None", _time("--persist", "from the call of a save until the checkpoint exists")
    ] = None,
    restart_seconds: Annotated[
        "float | None", _time("--restart", "from a failure to the first step of the new job")
    ] = None,
    bandwidth: Annotated[
        "int | None",
        Argument("bytes per second of the store; gives --persist", given.nbytes, "SIZE"),
    ] = None,
    gib_month: given.StoragePrice = None,
    thousand_writes: given.WritesPrice = None,
    thousand_reads: Annotated[
        "float | None", given.price_of("reads", "of 1,000 GET requests")
    ] = None,
    rank_hour: Annotated[
        "float | None",
        given.price_of(
            "rank-hour", "of one rank for an hour: of its GPU, and its part of the machine"
        ),
    ] = None,
    storage_options: given.Options = None,
) -> "CostReport":
    """Compute what checkpoints cost: bytes, requests, money, lost work, and how often to save.

    Of a model in numbers, or of what the root `url` measured with numbers that are given in its
    place. Neither prices nor speeds are assumed: what follows from one that is missing is None.
    Raises InvalidArgument for numbers that do not go together, and what `report` does.
    """
    from ckpt.tools.cost import ModelNumbers, Prices, cost_report

    load = {
        "ranks": ranks,
        "keep": keep,
        "every_seconds": every_seconds,
        "mtbf_seconds": mtbf_seconds,
        "blocked_seconds": blocked_seconds,
        "persist_seconds": persist_seconds,
        "restart_seconds": restart_seconds,
    }
    return cost_report(
        None if url is None else lambda: report(url, storage_options=storage_options),
        ModelNumbers(params, optimizer, dtype, state_dtype, master_dtype),
        {name: value for name, value in load.items() if value is not None},
        Prices(gib_month, thousand_writes, thousand_reads, rank_hour),
        bandwidth,
    )
