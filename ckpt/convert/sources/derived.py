"""Sources some of whose tensors are made of those of another: stacks, dense forms, plain numbers.

Published block-quantized weights are read as the numbers that they stand for, band by band:

    weight, weight_scale_inv    float8 in blocks of rows x columns, a factor for each block
    weight_blocks, _scales      MXFP4: two 4-bit floats in a byte, a power of two for each 32

MXFP4 is of the OCP Microscaling Formats specification 1.0 (2023): floats of 2 exponent bits and one
of the mantissa, scales of 8 exponent bits with the bias 127, of which 255 is no number.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from ckpt.convert.sources.source import (
    CheckpointSource,
    ReadRequest,
    Refusal,
    SourceContents,
    SourceTensor,
)
from ckpt.errors import CheckpointError, InvalidState
from ckpt.layout.composites import dense_form, type_named, unknown_types
from ckpt.layout.descriptions import TYPE_KEY, is_description, shown_type
from ckpt.layout.dtypes import DTYPES, dtype_name, torch_dtype
from ckpt.layout.kind import Kind
from ckpt.layout.region import Shape, Span
from ckpt.loading.checkpoint import piece_of
from ckpt.loading.contents import StoredTensor
from ckpt.stacks.moving import Moving
from ckpt.stacks.rules import Origin, Restacked, restack
from ckpt.state.types import Catalog, Stacks, TensorEntry
from ckpt.state.values import join_tree, references

# What is read and multiplied at once, by each thread: some 6 MiB with the indexes.
BAND_NUMEL = 128 << 10
KEPT_MAX = 2
_SCALE_INV = "_scale_inv"
_MX_GROUP, _NV_GROUP = 32, 16
_MX_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MX_VALUES = (*_MX_HALF, *(-value for value in _MX_HALF))


class DerivedSource(CheckpointSource):
    """`source` with other `contents`, in which the names `made` are not its own: `make` fills them.

    The newest whole tensors that a chain of such sources has made are kept, by source and name: two
    in all, because a step may be made of the one before, and one of each step.
    """

    def __init__(
        self, source: CheckpointSource, contents: SourceContents, made: Collection[str] = ()
    ) -> None:
        super().__init__(source.url, contents, source.stored_nbytes)
        self.source, self.made = source, made
        self.format, self.left_out = source.format, source.left_out
        # One for the whole chain: each step with its own would hold several times as much.
        self._kept: dict[tuple[int, str], torch.Tensor] = {}
        self._lock = threading.RLock()  # making one may ask the step before
        if isinstance(source, DerivedSource):
            self._kept, self._lock = source._kept, source._lock

    def fill(self, wanted: Sequence[ReadRequest]) -> None:
        if plain := [request for request in wanted if request.fqn not in self.made]:
            self.source.fill(plain)
        for request in wanted:
            if request.fqn in self.made:
                self.make(request)

    def make(self, request: ReadRequest) -> None:
        """Fill one that `source` does not have."""
        raise NotImplementedError

    def copy_whole(self, request: ReadRequest, make: Callable[[], torch.Tensor]) -> None:
        """Fill a request from the whole tensor, which `make` returns contiguous: one at a time, and
        kept until the next, because a tensor is written in many parts.
        """
        tensors, key = self._kept, (id(self), request.fqn)
        # Held while it is made: two threads would make the same tensor twice, with the memory of
        # both.
        with self._lock:
            if key not in tensors:
                # Before the next is made, so that one step never holds two.
                for other in [one for one in tensors if one[0] == id(self)]:
                    del tensors[other]
                tensors[key] = make().view(-1)
                while len(tensors) > KEPT_MAX:
                    del tensors[next(iter(tensors))]
            request.target.copy_(tensors[key][request.span.start : request.span.stop])

    def close(self) -> None:
        self.source.close()


def restacked(source: CheckpointSource, stacks: Stacks) -> CheckpointSource:
    """`source` in another form by the rules of `stacks`, from its names to new ones.

    Raises CheckpointError for rules that are none, or that the source does not fit.
    """
    if not stacks:
        return source
    contents = source.contents
    entries = {
        fqn: TensorEntry(torch_dtype(info.dtype), info.shape, info.kind)
        for fqn, info in contents.tensors.items()
    }
    catalog = Catalog(entries, contents.values, contents.aliases, contents.per_rank)
    for step in restack(catalog, stacks.items())[1:]:  # the first is the catalog as it is
        if step.problems:
            problems = "".join(f"\n- {problem}" for problem in step.problems)
            raise CheckpointError(f"stacks= does not fit {source!r}:{problems}")
        source = RestackedSource(source, step)
    return source


class RestackedSource(DerivedSource):
    """`source` after one step of a rule. A slice, or a part of rows, is a run of elements of its
    whole, so nothing is read that was not asked for. Parts along another dim, and transposes, are
    made one at a time, in the memory of twice that tensor.
    """

    def __init__(self, source: CheckpointSource, step: Restacked) -> None:
        self._origins, catalog = step.origins, step.catalog
        tensors = {
            fqn: SourceTensor(fqn, dtype_name(entry.dtype), entry.shape, entry.kind)
            for fqn, entry in catalog.tensors.items()
        }
        contents = replace(
            source.contents, tensors=tensors, values=catalog.values, aliases=catalog.aliases
        )
        super().__init__(source, contents)

    def fill(self, wanted: Sequence[ReadRequest]) -> None:
        moving, requests = Moving(self._origins, CheckpointError), list[ReadRequest]()
        for request in wanted:
            info, origin = self.contents.tensors[request.fqn], self._origins.get(request.fqn)
            if origin is not None and (origin.turn is not None or origin.dim):
                self.copy_whole(request, partial(self._made, origin))
                continue
            entry = StoredTensor(0, info.fqn, info.dtype, info.shape)
            for one in moving.moved(piece_of(entry, request.region, request.target)):
                requests.append(ReadRequest(one.pieces[0].fqn, one.pieces[0].region, one.local))
        self.source.fill(requests)
        for compare in moving.steps:
            compare()

    def _made(self, origin: Origin) -> torch.Tensor:
        parts = [self.source.read(fqn) for fqn in origin.stored]
        if origin.turn is not None:
            return origin.turn.of(parts[0])
        if origin.number is None:
            return torch.cat(parts, origin.dim or 0)
        start, stop = origin.starts[origin.number : origin.number + 2]
        return parts[0].narrow(origin.dim or 0, start, stop - start).contiguous()


class DenseSource(DerivedSource):
    """`source` with a dense tensor, of its outer dtype, in place of each composite that a state has
    under a name. Those that have no such form are refused where they are asked for.

    A composite is put together by its own library and turned into numbers by it, one at a time:
    memory is that of the largest one and of its dense form.
    """

    def __init__(self, source: CheckpointSource) -> None:
        contents = source.contents
        described = {fqn: value for fqn, value in contents.values.items() if is_description(value)}
        owners: dict[str, str] = {}
        dense: dict[str, SourceTensor] = {}
        refused = dict(contents.refused)
        for fqn, value in described.items():
            parts = references(value)
            owners |= dict.fromkeys(parts, fqn)
            kind = type_named(str(value[TYPE_KEY]))
            problems = unknown_types(value)
            if kind is not None and (kind.dense is None or -1 in value["shape"]):
                problems = [*problems, f"a {shown_type(value)} has no dense form"]
            absent = [name for name in parts if name not in contents.tensors]
            problems = [*problems, *(f"its component {name} is not there" for name in absent)]
            if problems:
                refused[fqn] = Refusal(problems[0], True)
                continue
            dtype, shape = str(value["dtype"]), tuple(value["shape"])
            if kind is not None and kind.outline is not None:
                other, into = kind.outline(value["context"])
                dtype, shape = dtype_name(into), shape if other is None else other
            of_parts = contents.tensors[parts[0]].kind if parts else Kind.OTHER
            dense[fqn] = SourceTensor(fqn, dtype, shape, of_parts)
        # Other names of a composite are other names of its components there.
        aliases = {}
        for alias, fqn in contents.aliases.items():
            owner = owners.get(fqn)
            if owner is None:
                aliases[alias] = fqn
            elif alias.endswith(part := fqn.removeprefix(owner)):
                aliases[alias.removesuffix(part)] = owner
        kept = {fqn: info for fqn, info in contents.tensors.items() if fqn not in owners}
        values = {fqn: value for fqn, value in contents.values.items() if fqn not in described}
        made = replace(
            contents, tensors=kept | dense, values=values, aliases=aliases, refused=refused
        )
        super().__init__(source, made, described)
        self._described = described

    def make(self, request: ReadRequest) -> None:
        self.copy_whole(request, partial(self._made, request.fqn))

    def _made(self, fqn: str) -> torch.Tensor:
        value = self._described[fqn]
        info = self.contents.tensors[fqn]
        dense = dense_form(fqn, join_tree(value, self.source.read))
        if tuple(dense.shape) != info.shape:
            raise CheckpointError(
                f"{fqn}: the dense form of a {shown_type(value)} has shape {tuple(dense.shape)}"
            )
        return dense.to(torch_dtype(info.dtype)).contiguous()


class Dequantize(NamedTuple):
    """Into which dtype block-quantized weights are turned.

    `block` are the rows and columns that share a factor of `weight_scale_inv`: what the model's
    configuration calls `weight_block_size`. No file says it, and shapes alone do not decide it.
    """

    dtype: str = "bfloat16"
    block: tuple[int, int] = (128, 128)


class _Quantized(NamedTuple):
    """Data and its factors: a number for each element in blocks, or (`block` is None) two of 4 bits
    in a byte, in groups of `group`. Factors are divided by that of the whole tensor, if any.
    """

    data: SourceTensor
    scale: SourceTensor
    block: tuple[int, int] | None
    group: int = _MX_GROUP
    divisor: SourceTensor | None = None

    @property
    def parts(self) -> list[str]:
        """Names of what it consists of."""
        return [part.fqn for part in (self.data, self.scale, self.divisor) if part is not None]

    @property
    def shape(self) -> Shape:
        """That of the numbers."""
        if self.block is not None:
            return self.data.shape
        return (*self.scale.shape[:-1], self.scale.shape[-1] * self.group)


class DequantizedSource(DerivedSource):
    """`source` with plain tensors in place of quantized ones. Raises InvalidState for those whose
    parts do not fit together, listing all.
    """

    def __init__(self, source: CheckpointSource, how: Dequantize) -> None:
        known = DTYPES.get(how.dtype)
        if known is None or not torch_dtype(how.dtype).is_floating_point or min(how.block) < 1:
            raise InvalidState([f"{how!r}: say a floating dtype, and a block of positive sizes"])
        problems: list[str] = []
        contents = source.contents
        self._quantized = _quantized(contents.tensors, how, problems)
        gone = {fqn for pair in self._quantized.values() for fqn in pair.parts}
        problems += [
            f"{alias}: is another name of {fqn}, which is quantized"
            for alias, fqn in contents.aliases.items()
            if fqn in gone
        ]
        if problems:
            raise InvalidState(problems)
        tensors = {f: info for f, info in contents.tensors.items() if f not in gone}
        for fqn, pair in self._quantized.items():
            tensors[fqn] = SourceTensor(fqn, how.dtype, pair.shape, pair.data.kind)
        made = replace(contents, tensors=tensors)
        super().__init__(source, made, self._quantized)

    def make(self, request: ReadRequest) -> None:
        span, pair = request.span, self._quantized[request.fqn]
        for start in range(span.start, span.stop, BAND_NUMEL):
            band = Span(start, min(start + BAND_NUMEL, span.stop))
            numbers = self._packed(pair, band) if pair.block is None else self._scaled(pair, band)
            request.target[start - span.start : band.stop - span.start] = numbers.to(
                request.target.dtype
            )

    def _scaled(self, pair: _Quantized, band: Span) -> torch.Tensor:
        data, scale, block = pair.data, pair.scale, pair.block
        assert block is not None, "4 bits are packed"
        rows, columns = data.shape[-2:]
        per_matrix, per_row = scale.shape[-2:] if len(scale.shape) > 1 else (1, 1)
        offset = torch.arange(band.start, band.stop)
        row = offset.div(columns, rounding_mode="floor")
        matrix = row.div(rows, rounding_mode="floor")
        in_matrix = (row - matrix * rows).div(block[0], rounding_mode="floor")
        line = matrix * per_matrix + in_matrix
        number = line * per_row + (offset - row * columns).div(block[1], rounding_mode="floor")
        # A band is a run of elements, so its factors lie in the lines from its first to its last.
        first = int(line[0]) * per_row
        factors = self._read(scale, Span(first, (int(line[-1]) + 1) * per_row))
        return self._read(data, band).float() * factors.float()[number - first]

    def _packed(self, pair: _Quantized, band: Span) -> torch.Tensor:
        first = band.start // 2
        # An odd end needs the whole of its byte.
        packed = self._read(pair.data, Span(first, -(-band.stop // 2)))
        # The low half of a byte comes first.
        codes = torch.stack([packed & 15, packed >> 4], -1).view(-1)
        # A band may begin in the middle of a byte.
        codes = codes[band.start - 2 * first :][: band.numel]
        groups = torch.arange(band.start, band.stop).div(pair.group, rounding_mode="floor")
        start = int(groups[0])
        scales = self._read(pair.scale, Span(start, int(groups[-1]) + 1))
        if pair.divisor is not None:
            factors = scales.float() / self._read(pair.divisor, Span(0, 1))
        else:
            factors = torch.ldexp(torch.ones(scales.numel()), scales.int() - 127)
            factors[scales == 255] = math.nan
        return torch.tensor(_MX_VALUES)[codes.int()] * factors[groups - start]

    def _read(self, info: SourceTensor, span: Span) -> torch.Tensor:
        memory = torch.empty(span.numel, dtype=torch_dtype(info.dtype))
        self.source.fill([ReadRequest(info.fqn, span, memory)])
        return memory


def _quantized(
    tensors: Mapping[str, SourceTensor], how: Dequantize, problems: list[str]
) -> dict[str, _Quantized]:
    """What is quantized, by the name that it has then. Names and dtypes say so; shapes are
    checked.
    """
    result: dict[str, _Quantized] = {}
    for fqn, scale in tensors.items():
        if fqn.endswith(_SCALE_INV):
            name = fqn.removesuffix(_SCALE_INV)
            data = tensors.get(name)
            if data is None or not data.dtype.startswith("float8_"):
                problems.append(f"{fqn}: there is no float8 tensor {name} that it belongs to")
            elif not _fits(data, scale, how.block):
                problems.append(
                    f"{name}: has shape {data.shape}, and {fqn} {scale.shape}, which are no blocks "
                    f"of {how.block}; pass dequantize_block= as the model's weight_block_size"
                )
            else:
                result[name] = _Quantized(data, scale, how.block)
        elif fqn.endswith("_scales") and scale.dtype == "uint8":
            name = fqn.removesuffix("_scales")
            data = tensors.get(f"{name}_blocks")
            if data is None or data.dtype != "uint8":
                problems.append(f"{fqn}: there is no uint8 tensor {name}_blocks that it belongs to")
            elif data.shape != (*scale.shape, _MX_GROUP // 2) or name in tensors:
                problems.append(
                    f"{name}_blocks: has shape {data.shape}, and {fqn} {scale.shape}: no groups of "
                    f"{_MX_GROUP // 2} bytes, or there is a tensor {name} as well"
                )
            else:
                result[name] = _Quantized(data, scale, None)
        elif fqn.endswith("_scale"):
            name = fqn.removesuffix("_scale")
            made = _compressed(tensors, name, scale, how)
            if isinstance(made, str):
                problems.append(made)
            elif made is not None:
                result[name] = made
    return result


def _compressed(
    tensors: Mapping[str, SourceTensor], name: str, scale: SourceTensor, how: Dequantize
) -> _Quantized | str | None:
    """A weight of compressed-tensors, why it cannot be dequantized, or None for what is none."""
    data, packed = tensors.get(name), tensors.get(f"{name}_packed")
    if packed is not None:
        divisor = tensors.get(f"{name}_global_scale")
        group = _MX_GROUP if divisor is None else _NV_GROUP
        wanted = (*scale.shape[:-1], scale.shape[-1] * group // 2) if scale.shape else ()
        kinds = "uint8", "uint8" if divisor is None else "float8_e4m3fn", True
        is_one = divisor is None or math.prod(divisor.shape) == 1
        if (packed.dtype, scale.dtype, is_one) != kinds or packed.shape != wanted or data:
            return (
                f"{packed.fqn}: {packed.dtype}{[*packed.shape]} with scales "
                f"{scale.dtype}{[*scale.shape]} is neither NVFP4 nor MXFP4; import it as it is"
            )
        return _Quantized(packed, scale, None, group, divisor)
    if data is None or not (data.dtype.startswith("float8_") or data.dtype == "int8"):
        return None
    if f"{name}_zero_point" in tensors or len(data.shape) < 2:
        return f"{name}: has a zero point, or one dim, and is not dequantized; import it as it is"
    # One for the tensor, one for each row, or one for each block.
    whole = data.shape[-2:]
    for block in ((1, whole[1]), how.block):
        if _fits(data, scale, block):
            return _Quantized(data, scale, block)
    if math.prod(scale.shape) == 1 and len(data.shape) == 2 and 0 not in whole:
        return _Quantized(data, scale, (whole[0], whole[1]))
    return (
        f"{name}: has shape {data.shape}, and {scale.fqn} {scale.shape}, which are no rows or "
        f"blocks of {how.block}; pass dequantize_block= as the model's block_structure"
    )


def _fits(data: SourceTensor, scale: SourceTensor, block: tuple[int, int]) -> bool:
    if len(data.shape) < 2 or 0 in data.shape:
        return False
    blocks = [-(-size // of) for size, of in zip(data.shape[-2:], block, strict=True)]
    return scale.shape == (*data.shape[:-2], *blocks) and DTYPES[scale.dtype].itemsize >= 2
