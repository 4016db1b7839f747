"""What keeps a root sound and small: checks, repairs, deletion, pins. None of these needs torch."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

from ckpt.operate import arguments as given
from ckpt.operate.arguments import Argument, operation

if TYPE_CHECKING:
    from ckpt.service.removing import PinReport, PruneReport, Removal
    from ckpt.tools.mend import MendReport
    from ckpt.tools.rescue import RescueReport
    from ckpt.tools.salvage import Salvaged
    from ckpt.tools.verify import VerifyReport


@operation
def verify(
    url: given.Url,
    step: given.Step = None,
    *,
    attempt: given.Attempt = "",
    mark: Annotated[bool, Argument("record success in the log")] = False,
    threads: given.Threads = 3,
    progress: "given.Progress | None" = None,
    metadata_bytes_max: given.MetadataMax = None,
    storage_options: given.Options = None,
) -> "VerifyReport":
    """Read a whole checkpoint and report every changed byte.

    Reports all damage instead of stopping at the first. `progress(done, total)` counts bytes.
    What describes the checkpoint may take `metadata_bytes_max` bytes of memory (None: 1 GiB).
    Retention leaves the checkpoint meanwhile. What another library has written has no checksums:
    that all of it can be read is all that is reported, with 0 blocks.
    Raises NoCheckpoint, Corrupt when the log or the manifest itself is damaged (then there is
    nothing to compare with: see `ckpt salvage`), UnsupportedFormat beyond the memory, and errors
    of the store that say nothing about the bytes.
    """
    from ckpt.commit.maintenance import Maintenance
    from ckpt.commit.names import plain_int
    from ckpt.errors import NoCheckpoint
    from ckpt.format.manifest import MetadataBudget
    from ckpt.loading.contents import leased_checkpoint
    from ckpt.tools.verify import read_other, verify_located
    from ckpt.wings import wing
    from storage.errors import InvalidUrlError

    budget = MetadataBudget(plain_int(metadata_bytes_max))
    try:
        with given.opened(url, storage_options) as store:
            with leased_checkpoint(store, step, attempt=attempt, budget=budget) as located:
                report = verify_located(store, located, plain_int(threads), progress)
            if mark and report.ok:
                # By its attempt: a newer one may have become the latest while this one was read.
                Maintenance.open(store).verified(report.attempt)
        return report
    except (NoCheckpoint, InvalidUrlError) as error:
        # What another library has written has neither, and no log to record it in.
        if step is not None or attempt or mark:
            raise
        return read_other(*wing("convert.foreign").foreign(url, error, storage_options, budget))


@operation
def salvage(
    url: given.Url,
    *,
    step: Annotated[
        "int | None", Argument("of a root; default: all without a MANIFEST", given.whole)
    ] = None,
    dry_run: given.DryRun = False,
    storage_options: given.Options = None,
) -> "tuple[Salvaged, ...]":
    """Rebuild a lost MANIFEST from the data files, reading and checking all of them.

    Of a step's directory, a copy of one, or a root: there, of all steps without a MANIFEST, or of
    all attempts of `step`. Damaged files are reported, not raised, and leave no MANIFEST. Raises
    NoCheckpoint where there is no step directory, Corrupt when another MANIFEST is there, and the
    store's errors.
    """
    from ckpt.tools.salvage import salvage_all

    return salvage_all(url, step, dry_run=dry_run, storage_options=storage_options)


@operation
def rescue(
    near: Annotated[Sequence[str], Argument("the directory of one host", collect=list)],
    url: given.Root,
    *,
    storage_options: given.Options = None,
) -> "RescueReport":
    """Make the newest near checkpoint of a dead job durable, from its hosts' directories.

    Commits the newest near checkpoint of the root at `url` that the directories `near` have. Can be
    repeated. Raises NoCheckpoint when there is none that is newer than what is durable, with the
    reasons; CheckpointError when a job claims the root meanwhile.
    """
    from ckpt.tools.rescue import rescue_in

    with given.opened(url, storage_options) as store:
        return rescue_in(store, near)


@operation
def mend(
    url: given.Root, *, dry_run: given.DryRun = False, storage_options: given.Options = None
) -> "MendReport":
    """Bring back every whole checkpoint where log, FORMAT or MANIFESTs were lost or damaged.

    Lists all step directories, reads every record and MANIFEST, and all bytes of a checkpoint whose
    MANIFEST is missing. Stop all writers first. Can be repeated; does nothing to a whole root, nor
    with `dry_run`. A process that had saved there is fenced by it. Raises NoCheckpoint when `url`
    is no root, Corrupt for holes beyond number, CheckpointError when another process appends
    meanwhile.
    """
    from ckpt.tools.mend import mend_store

    with given.opened(url, storage_options) as store:
        return mend_store(store, dry_run=dry_run)


@operation
def prune(
    url: given.Root,
    *,
    keep_last: given.KeepLast = None,
    keep_every: given.KeepEveryStep = None,
    keep_best: given.KeepBestOf = None,
    keep_younger: given.KeepAge = None,
    retire_unmeasured: given.RetireUnmeasured = False,
    retire_after: Annotated[
        "float | None",
        Argument(
            "only what these rules have given up for that long, e.g. 1d; default: at once",
            given.seconds,
            "TIME",
        ),
    ] = None,
    dry_run: given.DryRun = False,
    confirm: "Callable[[PruneReport], bool] | None" = None,
    storage_options: given.Options = None,
) -> "PruneReport":
    """Retire and delete old checkpoints; a running training is not disturbed.

    A checkpoint is kept if any rule keeps it; always kept are the latest, the last verified one,
    pinned ones, those whose files a kept one needs, and imports. `keep_best` is a number, or one
    and "min" or "max"; ages are in seconds. `confirm` is asked before anything is deleted; what
    others did meanwhile is looked at again then. Raises InvalidArgument without a rule,
    CheckpointError for one that matches nothing, and the store's errors.
    """
    from ckpt.service.removing import prune_store, rule_of

    rule = rule_of(keep_last, keep_every, keep_best, keep_younger, retire_unmeasured)
    with given.opened(url, storage_options) as store:
        return prune_store(store, rule, retire_after, dry_run=dry_run, confirm=confirm)


@operation
def rm(
    url: given.Root,
    step: given.OneStep = None,
    *,
    attempt: given.Attempt = "",
    dry_run: given.DryRun = False,
    confirm: "Callable[[Removal], bool] | None" = None,
    storage_options: given.Options = None,
) -> "Removal":
    """Delete one checkpoint, unless another one needs it or it is the last.

    By its step or its attempt. `confirm` is asked before it is deleted. Raises NoCheckpoint when
    there is none, CheckpointError for several of that step without `attempt`, NotRetired for what
    is needed, and the store's errors.
    """
    from ckpt.service.removing import remove

    with given.opened(url, storage_options) as store:
        return remove(store, step, attempt, dry_run=dry_run, confirm=confirm)


@operation
def pin(
    url: given.Root,
    step: given.OneStep = None,
    *,
    attempt: given.Attempt = "",
    storage_options: given.Options = None,
) -> "PinReport":
    """Keep one checkpoint, whatever rules say, until it is unpinned.

    By its step or its attempt. Call it on one rank, from any process: a training that saves there
    is not disturbed. Does nothing to one that is pinned. Raises NoCheckpoint when there is none,
    CheckpointError for several of that step without `attempt`, and the store's errors.
    """
    from ckpt.service.removing import set_pinned

    with given.opened(url, storage_options) as store:
        return set_pinned(store, step, attempt, pinned=True)


@operation
def unpin(
    url: given.Root,
    step: given.OneStep = None,
    *,
    attempt: given.Attempt = "",
    storage_options: given.Options = None,
) -> "PinReport":
    """Lift the pin of a checkpoint: rules decide about it again.

    Takes and raises what `pin` does.
    """
    from ckpt.service.removing import set_pinned

    with given.opened(url, storage_options) as store:
        return set_pinned(store, step, attempt, pinned=False)
