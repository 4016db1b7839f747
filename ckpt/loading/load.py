"""Load a checkpoint into a live state, in place: everything is checked before anything is written.

locate -> manifest -> bind state -> plan -> match needs -> private reads, shared reads -> finish
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial, reduce
from operator import and_
from typing import Any, NamedTuple

import numpy as np

from ckpt.commit.locate import decoded, live_entries, locate
from ckpt.commit.names import MANIFEST_NAME
from ckpt.errors import (
    CheckpointError,
    Corrupt,
    LoadInterrupted,
    Mismatch,
    RankFailed,
    UnsupportedFormat,
)
from ckpt.format.codec import decode_values
from ckpt.format.joint_manifest import is_groups
from ckpt.format.manifest import DELTA, WRITERS, Manifest, MetadataBudget
from ckpt.layout.dtypes import torch_dtype
from ckpt.layout.kind import Kind
from ckpt.layout.plain import Ranks
from ckpt.loading.block_sums import BlockSums, sums_of
from ckpt.loading.checkpoint import mean_row, unequal
from ckpt.loading.exchange import (
    Exchange,
    Group,
    Origins,
    ShareLimits,
    Sharing,
    Weight,
    fetched,
    long_only,
    share,
)
from ckpt.loading.matching import LoadSums, matched
from ckpt.loading.plan import LISTED_MIN, ReadPath, length, needed_part, plan_reads
from ckpt.loading.reader import Reader
from ckpt.short import ShortRecord
from ckpt.state.bind import bind_state
from ckpt.state.binding import Binding, filling
from ckpt.state.matching import Tally, with_nearest
from ckpt.state.names import GroupOptions, Left
from ckpt.state.resize import Resize
from ckpt.state.types import CHECKPOINT, Catalog, Loaded, ProblemKind, Stacks, Strict, TensorEntry
from ckpt.telemetry.record import PhaseSpan, Recorder
from ckpt.wings import wing
from ckpt.world.base import World, collectively, decided_json, from_coordinator
from storage import Store

logger = logging.getLogger(__name__)

BYTES_AWAY = "away_bytes"  # the counter of what came from ranks that have other files
SHOWN_MAX = 5  # names of a checkpoint in a message
RETIRED_MAX = 20  # times in a row that retention may be faster than one load
IS_DELTA = "it is a delta; ckpt.follow applies it, and ckpt.load without step= takes an anchor"


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What a load accepts and how it reads."""

    strict: Strict = True
    rename: Callable[[str], str] | Mapping[str, str] | None = None
    skip: Callable[[str], bool] | Iterable[str] = ()
    new: Callable[[str], bool] | Iterable[str] = ()
    group_options: GroupOptions = None
    stacks: Stacks = field(default_factory=dict)
    resize: Resize = None
    metadata_bytes_max: int | None = None
    path: ReadPath = field(default_factory=ReadPath)
    sharing: ShareLimits = field(default_factory=ShareLimits)


@dataclass(frozen=True, slots=True, repr=False)
class LoadReport(ShortRecord):
    """What a load did. Of the tensor bytes that this rank read, `nbytes_read` came from the store
    and `nbytes_cached` from the local copy. `spans` and `counters` are this rank's own. `warnings`
    name what is probably a mistake.
    """

    step: int
    attempt: str
    loaded: Loaded
    nbytes_read: int
    nbytes_cached: int = 0
    spans: tuple[PhaseSpan, ...] = field(default=(), compare=False)
    counters: Mapping[str, float] = field(default_factory=dict, compare=False)
    warnings: tuple[str, ...] = ()


def load_state(
    state: Any,
    *,
    store: Store,
    world: World,
    step: int | None,
    options: LoadOptions,
    attempt: str = "",
) -> LoadReport:
    """Fill `state` from the checkpoint of `step`, or from the latest; collective over `world`.

    `attempt` selects one of several checkpoints of the step. When the latest is retired while it is
    read, the load begins again with the one that is the latest then.

    Raises Mismatch, NoCheckpoint, Corrupt or UnsupportedFormat and leaves the state unchanged, and
    LoadInterrupted when it failed half-way; then the state must be loaded again before use.
    """
    recorder = Recorder()
    last: LoadInterrupted | None = None
    for _ in range(RETIRED_MAX):
        try:
            with recorder.span("manifest"):
                nbytes_max = options.metadata_bytes_max
                located = broadcast_manifest(store, world, step, attempt, nbytes_max)
            # Its tensors are bytes: bound to the state, every name would be missing.
            if DELTA in located[1].header.required:
                raise Mismatch([IS_DELTA], f"{store.url}/{located[0]}")
            return load_located(
                state, store=store, world=world, located=located, options=options, recorder=recorder
            )
        except LoadInterrupted as interrupted:
            header = located[1].header
            if not _was_retired(store, world, header.attempt):
                raise
            # Only the latest may be replaced by a newer one: a checkpoint that was requested by
            # its step or attempt is either that one or an error.
            if step is not None or attempt:
                raise LoadInterrupted(
                    f"{interrupted}\nStep {header.step} ({header.attempt}) was retired while it "
                    f"was read, and its files are deleted; {store.url} still has other steps."
                ) from interrupted
            last = interrupted
        except Exception as error:
            if last is None:
                raise
            # The first try has changed the state, so this is an interrupted load even where the
            # second try failed before it changed anything.
            raise LoadInterrupted(
                f"{last}\nThe load of the next one failed too: {error}"
            ) from error
    assert last is not None
    raise last


def _was_retired(store: Store, world: World, attempt: str) -> bool:
    """Whether the log no longer has `attempt`. The coordinator reads it; False when it cannot."""
    answer = None if world.rank else b""
    # The caller should see what interrupted the load, not why the log cannot be read.
    with suppress(CheckpointError):
        if world.rank == 0 and all(one.attempt != attempt for one in live_entries(store)):
            answer = b"retired"
    try:
        return bool(world.broadcast("retired", answer))
    except RankFailed:
        return False  # a rank is dead, and that interrupted the load


def load_located(
    state: Any,
    *,
    store: Store,
    world: World,
    located: tuple[str, Manifest],
    options: LoadOptions,
    origins: Origins | None = None,
    recorder: Recorder | None = None,
) -> LoadReport:
    """Fill `state` from the checkpoint with this prefix and manifest, the same on all ranks, whose
    files `store` has, or `origins`. Collective; raises like `load_state`.
    """
    prefix, manifest = located
    origins = origins or Origins(tuple(range(world.size)), {})
    recorder = recorder or Recorder()
    header = manifest.header
    path = f"{store.url.rstrip('/')}/{prefix}".rstrip("/")
    where = f"{path} (step {header.step}, {header.attempt})"
    block_sums = sums_of(store, prefix, manifest, options.path.cache)

    # Ranks of several hosts read for each other what they do not know yet.
    alone = len(origins.ranks) == world.size

    def bound() -> tuple[Binding, Reader]:
        binding = bind_to(state, manifest, world, options, where)
        path, owners = options.path, origins.owners
        return binding, _planned(block_sums, binding, path, owners, alone=alone)

    with recorder.span("bind"):
        binding, reader = collectively(world, "compare", bound)
    with recorder.span("plan"):
        groups, sums, warnings = compared(
            reader, binding, (block_sums, where), world, options, ranks=origins.ranks
        )
    means: dict[str, list[float]] = {}
    # Read while the state is untouched: damage there is refused like any other.
    if sums.averaged:
        means = _mean_rows(world, binding, block_sums, options.path, origins)

    def prepare() -> Sharing:
        sharing, limits = Sharing(reader.needs, []), options.sharing
        if world.size > 1:
            sharing = share(reader.blocks, groups, world.rank, limits, reader.needs)
            sharing = fetched(sharing, reader.blocks, reader.files, origins.owners, limits)
        binding.prepare()
        return sharing

    sharing = collectively(world, "prepare", prepare)
    # Everything that can be refused was refused: from here on a failure leaves a state of two
    # checkpoints.
    with filling(state, f"step {manifest.header.step} ({manifest.header.attempt})"):
        with recorder.span("read"):
            nbytes_away = transfer(reader, sharing, world, options, sums, origins)
        with recorder.span("finish"):
            loaded = collectively(world, "finish", partial(binding.finish, means))
    recorder.count("read_bytes", reader.nbytes_read + nbytes_away)
    recorder.count("passed_bytes", reader.nbytes_passed)
    recorder.count("cached_bytes", reader.nbytes_cached)
    recorder.count("direct_bytes", reader.nbytes_direct)
    recorder.count(BYTES_AWAY, nbytes_away)
    return LoadReport(
        manifest.header.step,
        manifest.header.attempt,
        loaded,
        reader.nbytes_read + nbytes_away,
        reader.nbytes_cached,
        recorder.spans(),
        recorder.counters(),
        warnings,
    )


def broadcast_manifest(
    store: Store,
    world: World,
    step: int | None,
    attempt: str,
    metadata_bytes_max: int | None = None,
) -> tuple[str, Manifest]:
    """The coordinator reads the manifest and broadcasts it; every rank decodes it, in that memory
    (None: 1 GiB).
    """

    def read() -> bytes:
        located = locate(store, step, attempt=attempt)
        # The step travels along: a rank that passed another one must not load this one unnoticed.
        # So does what FORMAT says of data files: thousands of ranks need not read it as well.
        lines = [located.prefix.encode(), str(step).encode(), store.known_encoding.hex().encode()]
        return b"\n".join([*lines, located.data])

    message = from_coordinator(world, "manifest", read)
    prefix, step_of_rank0, encoding, encoded = message.split(b"\n", 3)

    def decode() -> Manifest:
        requested = step_of_rank0.decode()
        if requested != str(step):
            raise Mismatch(
                [f"step={step} was passed where rank 0 passed step={requested}; pass the same"]
            )
        store.learn_encoding(bytes.fromhex(encoding.decode()))
        budget = MetadataBudget(metadata_bytes_max)
        return decoded(store, prefix.decode(), encoded, step, budget, ruled=LISTED_MIN)

    return prefix.decode(), collectively(world, "decode", decode)


def _planned(
    block_sums: BlockSums, binding: Binding, path: ReadPath, away: Collection[int], *, alone: bool
) -> Reader:
    """What reads what `binding` fills; of a large checkpoint, by the chunks that it needs."""
    store, prefix, manifest = block_sums.store, block_sums.directory, block_sums.manifest
    needs = binding.others, binding.plain
    try:  # only now is what a large manifest says of its chunks checked
        part = needed_part(manifest, *needs, alone=alone)
        reads = plan_reads(part, *needs)
    except (Corrupt, UnsupportedFormat) as error:
        raise type(error)(f"{store.url}/{prefix}{MANIFEST_NAME}: {error}") from error
    sums = block_sums if part is manifest else sums_of(store, prefix, part, path.cache)
    return Reader(sums, reads, path, away)


def bind_to(
    state: Any, manifest: Manifest, world: World, options: LoadOptions, where: str
) -> Binding:
    """The live memory that the checkpoint fills. Raises Mismatch with everything that is wrong."""
    form = in_form_of_state(manifest, options.stacks)
    if form.problems:
        raise Mismatch([f"stacks=: {problem}" for problem in form.problems], where)
    binding = bind_state(
        state,
        form.catalog,
        Ranks(world.rank, world.global_ranks),
        strict=options.strict,
        rename=options.rename,
        skip=options.skip,
        new=options.new,
        group_options=options.group_options,
        resize=options.resize,
    )
    fatal: Sequence[str] = binding.fatal
    # What is left over may have its place on another rank, or equal what the state ties it to; see
    # `compared`.
    if world.size > 1 or (fatal and not binding.left.untied):
        fatal = binding.fatal_here
    if world.size == 1:
        fatal = [*fatal, *binding.unmatched]
    if options.stacks and (stacked := set(binding.averaged).difference(manifest.fqns)):
        rest = "stacks= makes it of others, which have no mean; pass 'zeros' or 'init' in resize="
        fatal = [*fatal, *(f"{fqn}: {rest}" for fqn in sorted(stacked))]
    if fatal:
        raise Mismatch(fatal, where)
    return form.stored(binding)


def _mean_rows(
    world: World, binding: Binding, sums: BlockSums, path: ReadPath, origins: Origins
) -> dict[str, list[float]]:
    """By the checkpoint's names, the mean rows that any rank needs. Collective; each tensor is read
    by one rank, so the sum does not depend on how the state lies on ranks.
    """

    of_ranks = decided_json(world, "averaged", "averaged", binding.averaged, list)
    names = sorted({name for own in of_ranks for name in own})

    def mine() -> dict[str, list[float]]:
        if origins.owners:
            text = "near files of other hosts are not averaged; pass 'zeros' or 'init' in resize="
            raise Mismatch([f"{name}: {text}, or restore by step=" for name in names])
        return {name: mean_row(sums, name, path) for name in names[world.rank :: world.size]}

    rows = collectively(world, "average", mine)
    of_ranks = decided_json(world, "mean rows", "mean rows", rows, list)
    return {name: row for own in of_ranks for name, row in own.items()}


class FormOfState(NamedTuple):
    """A checkpoint's catalog in the form of the state, the problems of that, and a function from a
    binding of this form to one of what is stored.
    """

    catalog: Catalog
    problems: Sequence[str] = ()
    stored: Callable[[Binding], Binding] = lambda binding: binding


def in_form_of_state(manifest: Manifest, stacks: Stacks) -> FormOfState:
    """What the checkpoint has, in the form that `stacks` says, from names of a state to names of
    the checkpoint. Raises CheckpointError for what is no rule.
    """
    catalog = catalog_of(manifest)
    if not stacks:
        return FormOfState(catalog)
    return FormOfState(*wing("stacks.moving").in_form_of_state(catalog, stacks))


def _left_by_all(world: World, catalog: Catalog, mine: Left) -> Left:
    """What all ranks have left, of `mine`. Collective.

    A rank that holds a stage, or some experts, has no place for most of a checkpoint; that is a
    mistake only where all ranks together have none. Names are bits in the order of the
    checkpoint's own, so that a rank sends an eighth of a byte for each.
    """
    # Of a leaf and "", or of param groups and a parameter.
    every: set[tuple[str, str]] = {(name, "") for name in (*catalog.tensors, *catalog.values)}
    every |= {(name, "") for own in catalog.per_rank for name in own}
    for fqn, value in catalog.values.items():
        if is_groups(value, fqn):
            every |= {(fqn, str(param)) for group in value for param in group["params"]}
    numbers = {name: number for number, name in enumerate(sorted(every))}
    left = [(name, "") for name in mine.names]
    left += [(fqn, param) for fqn, params in mine.params.items() for param in params]
    bits = np.zeros(len(numbers), dtype=np.bool_)
    bits[[numbers[name] for name in left if name in numbers]] = True

    def common(every: list[str]) -> str:
        return f"{reduce(and_, (int(one, 16) for one in every)):x}"

    packed = np.packbits(bits, bitorder="little").tobytes()[::-1].hex() or "0"
    by_all = int(decided_json(world, "left", "left by all", packed, common), 16)
    stored = np.frombuffer(by_all.to_bytes(len(bits) // 8 + 1, "little"), dtype=np.uint8)
    of_all = np.unpackbits(stored, bitorder="little")

    # What is not in the checkpoint under this name, because of `rename`, has no number: only this
    # rank can know of it.
    def is_left(fqn: str, param: str) -> bool:
        number = numbers.get((fqn, param))
        return number is None or bool(of_all[number])

    return Left(
        [name for name in mine.names if is_left(name, "")],
        {
            fqn: [param for param in params if is_left(fqn, param)]
            for fqn, params in mine.params.items()
        },
        mine.tied,
    )


def _refuse_left(world: World, left: Left, sums: BlockSums, path: ReadPath, where: str) -> None:
    """Raise Mismatch on all ranks for what no rank's state has a place for. Collective.

    Writers that know no ties store a tied tensor under each of its names. Where all that is left
    has the bits of what the state ties it to, nothing is lost: each rank compares a share.
    """

    def decide(every: list[tuple[dict[str, str], list[str]]]) -> dict[str, str]:
        tied = {name: held for own, _ in every for name, held in own.items()}
        return tied if tied.keys() >= {name for _, untied in every for name in untied} else {}

    mine = {name: left.tied[name] for name in left.names if name in left.tied}, left.untied
    tied = decided_json(world, "ties", "tied names", mine, decide)

    def refuse() -> None:
        texts = {problem.fqn: problem.text for problem in left.problems(CHECKPOINT)}
        if tied:
            wrong = unequal(sums, tied, path, world.rank, world.size)
            texts = {name: f"{texts.get(name, name)}; their values differ" for name in wrong}
        if texts:
            raise Mismatch([*texts.values()], where)

    collectively(world, "compare", refuse)


def _warnings_of(
    binding: Binding, manifest: Manifest, world: World, tally: Tally, where: str
) -> tuple[str, ...]:
    """Those of the binding, and one when the checkpoint has only a small share of the names.

    `tally` counts the names of all ranks, so all of them raise Mismatch where nothing matched; the
    names of one rank alone would not do, because it may hold new ones only.
    """
    missing = [p for p in binding.problems if p.kind is ProblemKind.MISSING]
    # Tensors decide where there are any: a counter that matches has not loaded a model.
    has_tensors = tally.tensors + tally.missing_tensors
    if not (tally.tensors if has_tensors else tally.matched or not tally.missing):
        # Values alone (a step count) that match are not enough: every tensor would keep its
        # initial bytes, and the training would start anew unnoticed.
        names = f"{tally.missing_tensors} tensors" if tally.matched else f"{len(missing)} names"
        more = len(manifest.fqns) - SHOWN_MAX
        has = ", ".join(manifest.fqns[:SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")
        nothing = (
            f"none of the {names} of the state is in the checkpoint, which is an error with "
            f"strict=False, too; it has {has or 'no tensors'}"
        )
        problems = [nothing, *(problem.text for problem in missing)]
        world.agree("compare", Mismatch(problems, where) if missing else None)
    warnings = list(binding.warnings)
    if 0 < tally.matched < tally.missing and missing:
        names = with_nearest([problem.fqn for problem in missing], manifest.fqns)
        of_all = " of all ranks" if world.size > 1 else ""
        warnings.append(
            f"only {tally.matched} of {tally.matched + tally.missing} names of the state{of_all} "
            f"are in {where}; the others were left unchanged: {names}; is a rename= missing?"
        )
    if world.rank == 0:
        for warning in warnings:
            logger.warning("%s", warning)
    return tuple(warnings)


def compared(
    reader: Reader,
    binding: Binding,
    located: tuple[BlockSums, str],
    world: World,
    options: LoadOptions,
    *,
    ranks: Sequence[int] | None = None,
) -> tuple[list[Group], LoadSums, tuple[str, ...]]:
    """With whom of `ranks` this rank shares what it needs, the sums over all ranks, and warnings.

    Collective; raises Mismatch on all ranks for mistakes that only all of them together can see.
    `located` are the sums of the checkpoint's blocks and where it is.
    """
    block_sums, where = located
    manifest = block_sums.manifest
    # Where one rank has a place for everything, no other has to be asked.
    has_left = options.strict is True and len(binding.fatal) > len(binding.fatal_here)
    averaged = len(binding.averaged) if options.resize else 0
    if world.size == 1:
        if has_left:
            _refuse_left(world, binding.left, block_sums, options.path, where)
        sums = LoadSums(binding.tally, Weight(0, 0, 0), averaged=averaged)
        return [], sums, _warnings_of(binding, manifest, world, sums.tally, where)
    counts = [*binding.tally, length(reader.away), int(has_left), averaged]
    mine = counts, list(binding.unmatched)
    groups, sums = matched(reader, mine, world, options.sharing, ranks)
    # Decided by sums that all ranks have, so that all divide alike.
    if sums.weight.is_tiny() and not sums.away:
        groups, sums = [], sums._replace(weight=Weight(sums.weight.unique, 0, 0))
    elif sums.weight.is_little(options.sharing):
        groups = long_only(groups, options.sharing)
    if sums.unmatched:
        world.agree("compare", Mismatch(sums.unmatched, where))
    if sums.has_left == world.size:
        left = _left_by_all(world, in_form_of_state(manifest, options.stacks).catalog, binding.left)
        _refuse_left(world, left, block_sums, options.path, where)
    return groups, sums, _warnings_of(binding, manifest, world, sums.tally, where)


def transfer(
    reader: Reader,
    sharing: Sharing,
    world: World,
    options: LoadOptions,
    sums: LoadSums,
    origins: Origins | None = None,
) -> int:
    """Read, exchange and deliver all bytes. A failure on one rank is raised on all of them.

    Returns the bytes that came from ranks of other hosts, which `origins` names.
    """
    moves = sharing.moves
    if moves:
        # Known beforehand, so that a file's table can come with its only request.
        reader.expect(sharing.private, [move.runs for move in moves if move.source is None])
    # Private blocks first: a damaged one ends the load before any bytes are sent between ranks.
    collectively(world, "read", lambda: reader.read_private(sharing.private))
    weight, limits = sums.weight, options.sharing
    is_shared = bool(weight.long or (weight.repeated and not weight.is_little(limits)))
    # The same on all ranks: one that stayed away alone would leave the others waiting.
    if not is_shared and not sums.away:
        return 0
    exchange = Exchange(reader, world, f"load {sums.name} failed")
    owners = None
    if origins is not None and sums.away:
        # Only those that this rank has moves from: the others need not read for it.
        owners = frozenset(origins.owners.values()).intersection(move.source for move in moves)
    exchange.run(moves, limits, options.path, owners)
    world.agree("read", exchange.error)
    return exchange.nbytes_away


def catalog_of(manifest: Manifest) -> Catalog:
    """Names, shapes, dtypes and values of a checkpoint, without its tensors' bytes."""
    header = manifest.header
    # Of many thousand tensors few differ in more than their names.
    entry = cache(lambda name, shape, kind: TensorEntry(torch_dtype(name), shape, Kind.of(kind)))
    entries = map(entry, manifest.dtypes, manifest.shapes, manifest.kinds.tolist())
    return Catalog(
        tensors=dict(zip(manifest.fqns, entries, strict=True)),
        values=decode_values(manifest.values),
        aliases=dict(manifest.aliases),
        per_rank=[decode_values(values) for values in manifest.per_rank],
        worlds=header.worlds if WRITERS in header.user else [range(header.world_size)],
    )
