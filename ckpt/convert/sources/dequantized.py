"""Published block-quantized weights, read as the numbers that they stand for, band by band.

    weight, weight_scale_inv    float8 in blocks of rows x columns, a factor for each block
    weight_blocks, _scales      MXFP4: two 4-bit floats in a byte, a power of two for each 32

MXFP4 is of the OCP Microscaling Formats specification 1.0 (2023): floats of 2 exponent bits and one
of the mantissa, scales of 8 exponent bits with the bias 127, of which 255 is no number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ckpt.convert.sources.source import (
    CheckpointSource,
    ReadRequest,
    SourceContents,
    SourceTensor,
)
from ckpt.errors import InvalidState
from ckpt.layout.dtypes import DTYPES, torch_dtype
from ckpt.layout.region import Span

# What is read and multiplied at once, by each thread: some 6 MiB with the indexes beside it.
BAND_NUMEL = 128 << 10
_SCALE_INV = "_scale_inv"
_MX_GROUP = 32
_MX_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MX_VALUES = (*_MX_HALF, *(-value for value in _MX_HALF))


class Dequantize(NamedTuple):
    """Into which dtype block-quantized weights are turned.

    `block` are the rows and columns that share a factor of `weight_scale_inv`: what the model's
    configuration calls `weight_block_size`. No file says it, and shapes alone do not decide it.
    """

    dtype: str = "bfloat16"
    block: tuple[int, int] = (128, 128)


class _Scaled(NamedTuple):
    """Float8 data and its factors."""

    data: SourceTensor
    scale: SourceTensor
    block: tuple[int, int]


class _Packed(NamedTuple):
    """MXFP4 data and its scales."""

    data: SourceTensor
    scale: SourceTensor


class DequantizedSource(CheckpointSource):
    """`source` with plain tensors in place of quantized ones. Raises InvalidState for those whose
    parts do not fit together, listing all.
    """

    def __init__(self, source: CheckpointSource, how: Dequantize) -> None:
        known = DTYPES.get(how.dtype)
        if known is None or not torch_dtype(how.dtype).is_floating_point or min(how.block) < 1:
            raise InvalidState([f"{how!r}: say a floating dtype, and a block of positive sizes"])
        self.source = source
        self.format, self.left_out = source.format, source.left_out
        problems: list[str] = []
        self._quantized = _quantized(source.contents.tensors, how, problems)
        gone = {t.fqn for pair in self._quantized.values() for t in (pair.data, pair.scale)}
        for alias, fqn in source.contents.aliases.items():
            if fqn in gone:
                problems.append(f"{alias}: is another name of {fqn}, which is quantized")
        if problems:
            raise InvalidState(problems)
        tensors = {f: info for f, info in source.contents.tensors.items() if f not in gone}
        for fqn, pair in self._quantized.items():
            shape = pair.data.shape
            if isinstance(pair, _Packed):
                shape = (*shape[:-2], shape[-2] * _MX_GROUP)
            tensors[fqn] = SourceTensor(fqn, how.dtype, shape, pair.data.kind)
        made = _with_tensors(source.contents, tensors)
        super().__init__(source.url, made, source.stored_nbytes)

    def fill(self, wanted: Sequence[ReadRequest]) -> None:
        plain = [request for request in wanted if request.fqn not in self._quantized]
        if plain:
            self.source.fill(plain)
        for fqn, span, target in wanted:
            pair = self._quantized.get(fqn)
            if pair is None:
                continue
            for start in range(span.start, span.stop, BAND_NUMEL):
                band = Span(start, min(start + BAND_NUMEL, span.stop))
                if isinstance(pair, _Packed):
                    numbers = self._packed(pair, band)
                else:
                    numbers = self._scaled(pair, band)
                target[start - span.start : band.stop - span.start] = numbers.to(target.dtype)

    def close(self) -> None:
        self.source.close()

    def _scaled(self, pair: _Scaled, band: Span) -> torch.Tensor:
        data, scale, (block_rows, block_columns) = pair
        rows, columns = data.shape[-2:]
        per_matrix, per_row = scale.shape[-2:]
        offset = torch.arange(band.start, band.stop)
        row = offset.div(columns, rounding_mode="floor")
        matrix = row.div(rows, rounding_mode="floor")
        in_matrix = (row - matrix * rows).div(block_rows, rounding_mode="floor")
        line = matrix * per_matrix + in_matrix
        block = line * per_row + (offset - row * columns).div(block_columns, rounding_mode="floor")
        first = int(line[0]) * per_row
        factors = self._read(scale, Span(first, (int(line[-1]) + 1) * per_row))
        return self._read(data, band).float() * factors.float()[block - first]

    def _packed(self, pair: _Packed, band: Span) -> torch.Tensor:
        first = band.start // 2
        packed = self._read(pair.data, Span(first, -(-band.stop // 2)))
        codes = torch.stack([packed & 15, packed >> 4], -1).view(-1)
        codes = codes[band.start - 2 * first :][: band.numel]
        groups = torch.arange(band.start, band.stop).div(_MX_GROUP, rounding_mode="floor")
        start = int(groups[0])
        scales = self._read(pair.scale, Span(start, int(groups[-1]) + 1))
        factors = torch.ldexp(torch.ones(scales.numel()), scales.int() - 127)
        factors[scales == 255] = math.nan
        return torch.tensor(_MX_VALUES)[codes.int()] * factors[groups - start]

    def _read(self, info: SourceTensor, span: Span) -> torch.Tensor:
        memory = torch.empty(span.numel, dtype=torch_dtype(info.dtype))
        self.source.fill([ReadRequest(info.fqn, span, memory)])
        return memory


def _with_tensors(contents: SourceContents, tensors: Mapping[str, SourceTensor]) -> SourceContents:
    return SourceContents(
        tensors,
        contents.values,
        contents.aliases,
        contents.refused,
        contents.modules,
        contents.per_rank,
        contents.step,
    )


def _quantized(
    tensors: Mapping[str, SourceTensor], how: Dequantize, problems: list[str]
) -> dict[str, _Scaled | _Packed]:
    """What is quantized, by the name that it has then. Names and dtypes say so; shapes are
    checked.
    """
    result: dict[str, _Scaled | _Packed] = {}
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
                result[name] = _Scaled(data, scale, how.block)
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
                result[name] = _Packed(data, scale)
    return result


def _fits(data: SourceTensor, scale: SourceTensor, block: tuple[int, int]) -> bool:
    if len(data.shape) < 2 or 0 in data.shape:
        return False
    blocks = [-(-size // of) for size, of in zip(data.shape[-2:], block, strict=True)]
    return scale.shape == (*data.shape[:-2], *blocks) and DTYPES[scale.dtype].itemsize >= 2
