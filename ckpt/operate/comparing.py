"""A checkpoint against another one, or against a state that is to be loaded."""

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Annotated, SupportsIndex

from ckpt.operate import arguments as given
from ckpt.operate.arguments import Argument, operation

if TYPE_CHECKING:
    from ckpt.tools.diff import DiffReport
    from ckpt.tools.plan import LoadPlan
    from storage import StoreLike


@operation
def diff(
    url: Annotated["StoreLike", Argument("checkpoint a: a root, or one step's directory")],
    other: Annotated[
        "StoreLike | None",
        Argument("checkpoint b; default: the same root, and of it the newest"),
    ] = None,
    *,
    step_a: Annotated[
        "SupportsIndex | None", Argument("of a; default: the latest", given.whole, "STEP")
    ] = None,
    step_b: Annotated[
        "SupportsIndex | None", Argument("of b; default: the latest", given.whole, "STEP")
    ] = None,
    attempt_a: given.Attempt = "",
    attempt_b: given.Attempt = "",
    quick: Annotated[bool, Argument("compare checksums only; read no tensor")] = False,
    include: given.Include = (),
    exclude: given.Exclude = (),
    stacks: given.Stacks = None,
    rename: given.Rename = None,
    threads: given.Threads = 3,
    progress: "given.Progress | None" = None,
    metadata_bytes_max: given.MetadataMax = None,
    storage_options: given.Options = None,
    other_options: given.OtherOptions = None,
) -> "DiffReport":
    """Show which tensors and values differ between two checkpoints, and by how much.

    Checkpoint a is at `url`, b at `other`: both are roots or single steps' directories. With one
    root and neither steps nor attempts, its newest step is compared with the one before it.
    `include` and `exclude` are shell patterns of names as b has them. `rename` gives the name in b
    for a name in a; `stacks` are rules from names in a to names in b, before any renaming, for
    experts that are one tensor in one of them. With `quick`, tensors whose regions do not line up,
    and those of `stacks`, count as changed. What another library has written is read in full.

    Memory is bounded by the number of threads, whatever the size of tensors. `progress(done,
    total)` counts bytes read. `other_options` default to `storage_options` when both urls have the
    same protocol. What describes both may take `metadata_bytes_max` bytes of memory (None: 1 GiB).
    Raises NoCheckpoint, UnsupportedFormat beyond that, Corrupt, CheckpointError for `stacks` that a
    does not fit, InvalidArgument for a wrong `rename`, and the stores' errors.
    """
    from ckpt.commit.names import plain_int
    from ckpt.format.manifest import MetadataBudget
    from ckpt.loading.checkpoint import Checkpoint
    from ckpt.loading.contents import store_and_checkpoint
    from ckpt.loading.plan import ReadPath
    from ckpt.tools.diff import DiffOptions, diff_checkpoints, newest_two
    from storage import options_of_other

    options = DiffOptions(
        include, exclude, rename, dict(stacks or {}), not quick, plain_int(threads)
    )
    if other is None:
        other = url
        # Where anything is chosen, the rest has its usual meaning: the latest.
        if step_a is step_b is None and not (attempt_a or attempt_b):
            step_a, step_b = newest_two(url, storage_options)
    options_b = options_of_other(url, storage_options, other, other_options)
    # One for both, which are in memory at the same time.
    budget = MetadataBudget(plain_int(metadata_bytes_max))
    with ExitStack() as stack:
        opened = []
        for place, step, attempt, of_store in (
            (url, step_a, attempt_a, storage_options),
            (other, step_b, attempt_b, options_b),
        ):
            store, located = store_and_checkpoint(
                place, step, of_store, attempt=attempt, budget=budget
            )
            stack.callback(store.close)
            # Bands are read by several threads, each with one request.
            opened.append(Checkpoint(store, located, path=ReadPath()))
        return diff_checkpoints(opened[0], opened[1], options, progress)


@operation
def plan_ranks(
    url: given.Url,
    *,
    step: given.Step = None,
    attempt: given.Attempt = "",
    ranks: Annotated[
        "SupportsIndex | None", Argument("default: as when it was saved", given.count, "N")
    ] = None,
    layout: given.Layout = "fsdp2",
    like: Annotated[
        "StoreLike | None",
        Argument(
            "the state to load into looks like this one: a checkpoint of ours or of torch, or a "
            "safetensors file; default: a state that fits",
            metavar="URL",
        ),
    ] = None,
    entry: Annotated[
        "str | None",
        Argument("with --like: the entry of the state that it is; default: the only model"),
    ] = None,
    memory_bytes_max: given.MemoryMax = None,
    metadata_bytes_max: given.MetadataMax = None,
    storage_options: given.Options = None,
    other_options: given.OtherOptions = None,
) -> "LoadPlan":
    """Show what a load would read, per rank, and which names would not fit; reads no tensor.

    Of a load on `ranks` ranks with an even layout. Parameters and optimizer state are sharded by
    `layout`, all other tensors are whole on every rank. The state wants all that the checkpoint
    has, or what a checkpoint `like` has, of any format that `ckpt.export` reads: with `entry`, its
    names stand below that name. Blocks that several ranks need count once, as they are read by one
    and exchanged. Time and memory grow with ranks times chunks: at most `metadata_bytes_max` bytes
    of memory (None: 1 GiB), and 10 seconds of a CPU for each GiB. Raises like `ckpt.plan_load`, and
    InvalidArgument for no ranks or an unknown layout.
    """
    from ckpt.commit.names import plain_int
    from ckpt.convert.sources.opening import SourceOptions, open_source
    from ckpt.errors import InvalidArgument
    from ckpt.format.manifest import MetadataBudget
    from ckpt.loading.contents import store_and_checkpoint
    from ckpt.tools.plan import plan_of_ranks
    from storage import options_of_other

    contents = None
    if like is not None:
        options = SourceOptions(
            memory_bytes_max=plain_int(memory_bytes_max),
            storage_options=options_of_other(url, storage_options, like, other_options),
        )
        with closing(open_source(like, options)) as source:
            contents = source.contents
    elif entry is not None:
        raise InvalidArgument("entry= is for like=; it names the place of that model")
    budget = MetadataBudget(plain_int(metadata_bytes_max))
    store, located = store_and_checkpoint(
        url, step, storage_options, attempt=attempt, budget=budget
    )
    with closing(store):
        return plan_of_ranks(store, located, plain_int(ranks), layout, contents, entry, budget)
