"""What differs between two checkpoints: names, shapes, dtypes, values, and by how much.

    manifests -> names -> checksums of the same bytes -> places that differ -> read those -> numbers

Two checkpoints that were sharded in other ways are compared by their checksums too: where spans of
both end at the same byte, the checksum of all blocks before follows from theirs
(`ckpt.format.checksum`). Data is read only where checksums differ, or where regions do not
line up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from ckpt.convert.naming import Rename, is_chosen, renamed, renamer
from ckpt.convert.sources.derived import restacked
from ckpt.convert.sources.source import CheckpointSource, NativeSource, ReadRequest, SourceTensor
from ckpt.convert.targets.files import Progress
from ckpt.errors import CheckpointError
from ckpt.format.checksum import joined_crc32c
from ckpt.format.codec import encode_values
from ckpt.format.manifest import Int64s, Manifest
from ckpt.layout.dtypes import DTYPES, torch_dtype
from ckpt.layout.region import Shape, Span
from ckpt.loading.checkpoint import Checkpoint
from ckpt.loading.contents import list_steps
from ckpt.short import ShortRecord
from ckpt.state.types import Stacks
from storage import StoreLike
from storage.hidden import hides_secrets
from storage.threads import in_order

BAND_NUMEL = 1 << 19  # elements read together
LOOK_NUMEL = 1 << 15  # elements looked at together: all that is computed of them stays in the cache


class Amount(NamedTuple):
    """By how much the elements of two tensors differ, where their bytes do.

    `changed` counts elements with other bits, of `compared` that were looked at (those in blocks
    that differ; the rest is known to be the same). `max_abs` is the largest |b - a|, `max_rel` the
    largest |b - a| / max(|a|, |b|), `norm` the 2-norm of b - a, and `norm_a` that of a over what
    was compared. Elements that are not finite in one of the two are counted in `not_finite` and in
    no other number but `changed`. Computed in float64 (complex: moduli).
    """

    changed: int
    compared: int
    max_abs: float
    max_rel: float
    norm: float
    norm_a: float
    not_finite: int

    @property
    def relative_norm(self) -> float:
        """`norm / norm_a`: 0 when nothing changed, infinite where a was all zero."""
        if self.norm == 0:
            return 0.0
        return self.norm / self.norm_a if self.norm_a else math.inf

    @classmethod
    def total(cls, parts: Iterable[Amount]) -> Amount:
        """That of several tensors, or parts of one, together; at least one."""
        changed, compared, abs_, rel, norm, norm_a, not_finite = zip(*parts, strict=True)
        return cls(
            sum(changed),
            sum(compared),
            max(abs_),
            max(rel),
            math.hypot(*norm),
            math.hypot(*norm_a),
            sum(not_finite),
        )


@dataclass(frozen=True, slots=True)
class TensorChange:
    """A tensor that both checkpoints have and that differs.

    `amount` is None where elements cannot be compared (other shapes), or were not requested.
    """

    fqn: str
    dtype_a: str
    dtype_b: str
    shape_a: Shape
    shape_b: Shape
    amount: Amount | None

    @property
    def what(self) -> str:
        """The coarsest thing that differs: "shape", "dtype" or "values"."""
        if self.shape_a != self.shape_b:
            return "shape"
        return "dtype" if self.dtype_a != self.dtype_b else "values"


class ValueChange(NamedTuple):
    """A value that differs, or that one of the two lacks (`has_a`, `has_b`).

    Of dicts and lists, the innermost: `fqn` is then such as `optimizer.param_groups[0].lr`.
    """

    fqn: str
    a: Any
    b: Any
    has_a: bool
    has_b: bool


@dataclass(frozen=True, slots=True, repr=False)
class DiffReport(ShortRecord):
    """How checkpoint b differs from checkpoint a; names are sorted.

    `same` counts tensors with the same name, shape, dtype and bytes. `nbytes_read` are the tensor
    bytes that were read from both. `per_rank_differs` is about `PerRank` values.
    """

    url_a: str
    url_b: str
    step_a: int
    step_b: int
    same: int
    changed: tuple[TensorChange, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    values: tuple[ValueChange, ...]
    per_rank_differs: bool
    nbytes_read: int

    @property
    def identical(self) -> bool:
        """Whether tensors and values are the same, to the bit; layouts may differ."""
        lists = (self.changed, self.only_a, self.only_b, self.values)
        return not any(lists) and not self.per_rank_differs


@dataclass(frozen=True, slots=True)
class DiffOptions:
    """What to compare. `include` and `exclude` are shell patterns of names as b has them.

    `rename` gives the name in b for a name in a. `stacks` are rules from names in a to names in b,
    before any renaming, for experts that are one tensor in one of them: {"experts.weight":
    "experts.{}.weight"} compares a's stacks with b's experts. With `data=False` nothing is read but
    the manifests, and tensors whose regions do not line up, and those of `stacks`, count as
    changed.
    """

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    rename: Rename | None = None
    stacks: Stacks = field(default_factory=dict)
    data: bool = True
    threads: int = 3


@hides_secrets
def newest_two(url: StoreLike, options: Mapping[str, Any] | None) -> tuple[int | None, int | None]:
    """The step before the newest of a root, and the newest; None, None where no step is.

    Raises CheckpointError for one step.
    """
    steps = [info.step for info in list_steps(url, options)]
    if len(set(steps)) == 1:
        raise CheckpointError(
            f"{url} has 1 step: nothing to compare with; name another checkpoint after it, as in "
            "`ckpt diff A B`"
        )
    # The newest step may be there twice, where a training went back and came to it again.
    return ([step for step in steps if step != steps[-1]][-1], steps[-1]) if steps else (None, None)


def diff_checkpoints(
    a: Checkpoint, b: Checkpoint, options: DiffOptions, progress: Progress | None = None
) -> DiffReport:
    """As `diff`, of checkpoints that are open."""
    for one in (a, b):
        # Checksums are in the data files: asked for tensor by tensor, each would wait for a file.
        one.sums.read_all(options.threads)
    of_a: CheckpointSource = NativeSource(a)
    of_b = NativeSource(b)
    if options.stacks:
        of_a = restacked(of_a, options.stacks)
    # Names that b would have, each with the name in a.
    new_names = renamed((*of_a.contents.tensors, *of_a.contents.aliases), options.rename)
    names_a = {new: name for name, new in new_names.items() if is_chosen(new, options)}
    names_b = {name: name for name in b if is_chosen(name, options)}
    pairs = [_pair(a, of_a, of_b, names_a[name], name) for name in names_b if name in names_a]
    differing = [pair for pair in pairs if pair.differs]
    amounts: dict[str, Amount] = {}
    nbytes_read = 0
    if options.data:
        amounts, nbytes_read = _amounts(of_a, of_b, differing, options.threads, progress)
    changed = []
    for pair in differing:
        amount = amounts.get(pair.change.fqn)
        if amount is not None and not amount.changed and pair.change.what == "values":
            continue  # regions did not line up, and the elements are the same
        changed.append(replace(pair.change, amount=amount))
    return DiffReport(
        url_a=a.url,
        url_b=b.url,
        step_a=a.step,
        step_b=b.step,
        same=len(pairs) - len(changed),
        changed=tuple(sorted(changed, key=lambda change: change.fqn)),
        only_a=tuple(sorted(names_a.keys() - names_b.keys())),
        only_b=tuple(sorted(names_b.keys() - names_a.keys())),
        values=tuple(_value_changes(of_a.contents.values, of_b.contents.values, options)),
        per_rank_differs=a.manifest.per_rank != b.manifest.per_rank,
        nbytes_read=nbytes_read,
    )


class _Pair(NamedTuple):
    """One tensor in both. `spans` are the elements to read; all of them when nothing is known."""

    fqn_a: str
    change: TensorChange  # if it is one
    spans: tuple[Span, ...]

    @property
    def differs(self) -> bool:
        return self.change.what != "values" or bool(self.spans)

    @property
    def itemsizes(self) -> int:
        """Bytes of one element in both."""
        return DTYPES[self.change.dtype_a].itemsize + DTYPES[self.change.dtype_b].itemsize


def _pair(
    a: Checkpoint, of_a: CheckpointSource, of_b: NativeSource, name_a: str, name_b: str
) -> _Pair:
    """`of_a` is checkpoint a, or has stacks of what it has, or slices of it."""
    one, other = _info(of_a, name_a), _info(of_b, name_b)
    # Other shapes: there are no elements that correspond to each other, so none are read.
    spans: tuple[Span, ...] = ()
    if one.shape == other.shape and (numel := math.prod(one.shape)):
        spans = (Span(0, numel),)
        if one.dtype == other.dtype and name_a in a:
            b = of_b.checkpoint
            spans = _differing_spans(a, _number(a, name_a), b, _number(b, name_b))
    change = TensorChange(name_b, one.dtype, other.dtype, one.shape, other.shape, None)
    return _Pair(name_a, change, spans)


def _info(source: CheckpointSource, name: str) -> SourceTensor:
    return source.contents.tensors[source.contents.aliases.get(name, name)]


def _read(source: CheckpointSource, name: str, span: Span) -> torch.Tensor:
    info = _info(source, name)
    target = torch.empty(span.numel, dtype=torch_dtype(info.dtype))
    source.fill([ReadRequest(info.fqn, span, target)])
    return target


def _number(checkpoint: Checkpoint, name: str) -> int:
    return checkpoint.manifest.index(checkpoint.aliases.get(name, name))


def _differing_spans(one: Checkpoint, at_a: int, other: Checkpoint, at_b: int) -> tuple[Span, ...]:
    """Elements of one tensor that may differ, as ascending disjoint spans; nothing else does."""
    a, b = one.manifest, other.manifest
    numel = math.prod(a.shapes[at_a])
    itemsize = DTYPES[a.dtypes[at_a]].itemsize
    if not (a.is_sealed and b.is_sealed):  # another library's has no checksums
        return (Span(0, numel),)
    # A block of a box is no run of the tensor's row-major order: only equal boxes are comparable.
    chunks_a, chunks_b = a.chunks.of_tensor(at_a), b.chunks.of_tensor(at_b)
    sums_a, sums_b = one.sums.of_chunks(chunks_a), other.sums.of_chunks(chunks_b)
    if (a.chunks.box[[*chunks_a]] >= 0).any() or (b.chunks.box[[*chunks_b]] >= 0).any():
        same = (
            a.header.block_bytes == b.header.block_bytes
            and [*map(a.region, chunks_a)] == [*map(b.region, chunks_b)]
            and np.array_equal(sums_a, sums_b)
        )
        return () if same else (Span(0, numel),)
    ends_a, ends_b = _block_ends(a, at_a, itemsize), _block_ends(b, at_b, itemsize)
    if np.array_equal(ends_a, ends_b) and np.array_equal(sums_a, sums_b):
        return ()
    # From one common end to the next, the bytes of both are the same elements, in whole blocks.
    common = np.intersect1d(ends_a, ends_b, assume_unique=True)
    stops_a = np.searchsorted(ends_a, common) + 1
    stops_b = np.searchsorted(ends_b, common) + 1
    spans: list[Span] = []
    start = first_a = first_b = 0
    for stop, last_a, last_b in np.stack([common, stops_a, stops_b], axis=1).tolist():
        crc_a = _joined(sums_a, ends_a, first_a, last_a, start)
        if crc_a != _joined(sums_b, ends_b, first_b, last_b, start):
            low, high = start // itemsize, stop // itemsize
            if spans and spans[-1].stop == low:
                spans[-1] = Span(spans[-1].start, high)
            else:
                spans.append(Span(low, high))
        start, first_a, first_b = stop, last_a, last_b
    return tuple(spans)


def _block_ends(manifest: Manifest, index: int, itemsize: int) -> Int64s:
    """Where each block of a tensor of spans ends, in bytes of the whole tensor."""
    chunks = manifest.chunks
    block = manifest.header.block_bytes
    ends: list[Int64s] = [np.zeros(0, dtype=np.int64)]
    for chunk in chunks.of_tensor(index):
        start = int(chunks.span_start[chunk]) * itemsize
        stop = start + int(chunks.numel[chunk]) * itemsize
        ends.append(np.append(np.arange(start + block, stop, block, dtype=np.int64), stop))
    return np.concatenate(ends)


def _joined(sums: Any, ends: Any, first: int, last: int, start: int) -> int:
    """The checksum of blocks `first` to `last`, the first of which starts at byte `start`."""
    if last - first == 1:
        return int(sums[first])
    edges = [start, *ends[first:last].tolist()]
    sizes = [high - low for low, high in pairwise(edges)]
    return joined_crc32c(sums[first:last].tolist(), sizes)


# Data where checksums differ ----------------------------------------------------------------


def _amounts(
    a: CheckpointSource,
    b: CheckpointSource,
    pairs: Sequence[_Pair],
    threads: int,
    progress: Progress | None,
) -> tuple[dict[str, Amount], int]:
    """The amount for each of `pairs` that can be compared, by the name in b; and bytes read."""
    total = sum(span.numel * pair.itemsizes for pair in pairs for span in pair.spans)
    done = 0
    amounts: dict[str, Amount] = {}

    def look(band: tuple[_Pair, Span]) -> tuple[_Pair, Span, Amount]:
        pair, span = band
        elements_a, elements_b = _read(a, pair.fqn_a, span), _read(b, pair.change.fqn, span)
        parts = [slice(start, start + LOOK_NUMEL) for start in range(0, span.numel, LOOK_NUMEL)]
        return pair, span, Amount.total(_amount(elements_a[p], elements_b[p]) for p in parts)

    bands = (
        (pair, Span(start, min(start + BAND_NUMEL, span.stop)))
        for pair in pairs
        for span in pair.spans
        for start in range(span.start, span.stop, BAND_NUMEL)
    )
    for pair, span, amount in in_order(  # nothing else holds it: an error here ends its threads
        look, bands, threads=threads, name="ckpt-diff", ahead=2 * threads
    ):
        name = pair.change.fqn
        amounts[name] = Amount.total([amounts[name], amount]) if name in amounts else amount
        done += span.numel * pair.itemsizes
        if progress is not None:
            progress(done, total)
    return amounts, total


def _amount(a: torch.Tensor, b: torch.Tensor) -> Amount:
    """Of two 1-D tensors of one length, of any dtypes."""
    wide_a, wide_b = _wide(a), _wide(b)
    if a.dtype == b.dtype:
        # By bytes: a NaN is equal to the same NaN, and 0 differs from -0.
        same = a.view(torch.uint8).view(a.numel(), -1) == b.view(torch.uint8).view(a.numel(), -1)
        changed = ~same.all(dim=1)
    else:
        changed = ~((wide_a == wide_b) | (wide_a.isnan() & wide_b.isnan()))
    # An infinite difference, or inf - inf, would hide what all other elements say.
    finite = wide_a.isfinite() & wide_b.isfinite()
    zero = torch.zeros((), dtype=wide_a.dtype)
    difference = torch.where(finite & changed, wide_b - wide_a, zero).abs()
    largest = torch.maximum(wide_a.abs(), wide_b.abs())
    relative = torch.where(difference > 0, difference / largest, torch.zeros_like(difference))
    return Amount(
        changed=int(changed.sum()),
        compared=a.numel(),
        max_abs=float(difference.max()),
        max_rel=float(relative.max()),
        norm=float(difference.norm()),
        norm_a=float(torch.where(finite, wide_a, zero).abs().norm()),
        not_finite=int((changed & ~finite).sum()),
    )


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128)
    # Through float32: torch takes a third less time for the two steps than for one from float8.
    is_tiny = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    return tensor.to(torch.float32).to(torch.float64) if is_tiny else tensor.double()


# Values -------------------------------------------------------------------------------------


def _value_changes(
    a: Mapping[str, Any], values_b: Mapping[str, Any], options: DiffOptions
) -> Iterator[ValueChange]:
    change = renamer(options.rename)
    values_a = {change(name): value for name, value in a.items()}
    for name in sorted(values_a.keys() | values_b.keys()):
        if not is_chosen(name, options):
            continue
        has_a, has_b = name in values_a, name in values_b
        if has_a and has_b:
            yield from _leaf_changes(name, values_a[name], values_b[name])
        else:
            yield ValueChange(name, values_a.get(name), values_b.get(name), has_a, has_b)


def _leaf_changes(path: str, a: Any, b: Any) -> Iterator[ValueChange]:
    """What differs inside two values, whatever the order of keys."""
    # As stored, because == says that NaN differs from itself and that True is 1.
    if encode_values(a) == encode_values(b):
        return
    if type(a) is dict and type(b) is dict and not any(str(key).startswith("$") for key in a):
        for key in {**a, **b}:
            is_name = isinstance(key, str) and key.isidentifier()
            inner = f"{path}.{key}" if is_name else f"{path}[{key!r}]"
            if key in a and key in b:
                yield from _leaf_changes(inner, a[key], b[key])
            else:
                yield ValueChange(inner, a.get(key), b.get(key), key in a, key in b)
    # A list of plain numbers, such as a shape or betas, is one value: shown whole, it reads better.
    elif type(a) is type(b) in (list, tuple) and len(a) == len(b) and any(map(_is_nested, a)):
        for index, (of_a, of_b) in enumerate(zip(a, b, strict=True)):
            yield from _leaf_changes(f"{path}[{index}]", of_a, of_b)
    else:
        yield ValueChange(path, a, b, True, True)


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict | list | tuple)
