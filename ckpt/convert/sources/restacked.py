"""A checkpoint in which stacks of experts are read as their slices, or slices as stacks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from ckpt.convert.sources.source import (
    CheckpointSource,
    ReadRequest,
    SourceContents,
    SourceTensor,
)
from ckpt.errors import CheckpointError
from ckpt.layout.dtypes import dtype_name, torch_dtype
from ckpt.layout.region import Span
from ckpt.stacks.rules import Origin, restack
from ckpt.state.types import Catalog, Stacks, TensorEntry


class RestackedSource(CheckpointSource):
    """`source` as the rules of `stacks` change it, from its names to new ones. A slice is a run of
    elements of its stack, so nothing is read that was not asked for.

    Raises CheckpointError for rules that are none, or that the source does not fit.
    """

    def __init__(self, source: CheckpointSource, stacks: Stacks) -> None:
        self.source = source
        self.format, self.left_out = source.format, source.left_out
        contents = source.contents
        catalog = Catalog(
            {
                fqn: TensorEntry(torch_dtype(info.dtype), info.shape, info.kind)
                for fqn, info in contents.tensors.items()
            },
            contents.values,
            contents.aliases,
            contents.per_rank,
        )
        restacked = restack(catalog, stacks.items())
        if restacked.problems:
            problems = "".join(f"\n- {problem}" for problem in restacked.problems)
            raise CheckpointError(f"stacks= does not fit {source!r}:{problems}")
        self._origins = restacked.origins
        tensors = {
            fqn: SourceTensor(fqn, dtype_name(entry.dtype), entry.shape, entry.kind)
            for fqn, entry in restacked.catalog.tensors.items()
        }
        made = SourceContents(
            tensors,
            restacked.catalog.values,
            restacked.catalog.aliases,
            contents.refused,
            contents.modules,
            contents.per_rank,
            contents.step,
        )
        super().__init__(source.url, made, source.stored_nbytes)

    def fill(self, wanted: Sequence[ReadRequest]) -> None:
        requests: list[ReadRequest] = []
        common: list[tuple[ReadRequest, list[ReadRequest]]] = []
        for request in wanted:
            origin = self._origins.get(request.fqn)
            if origin is None:
                requests.append(request)
            elif origin.is_common:
                every = [
                    request._replace(fqn=fqn, target=torch.empty_like(request.target))
                    for fqn in origin.stored
                ]
                common.append((request, every))
                requests += every
            else:
                requests += self._stored(request, origin)
        self.source.fill(requests)
        for request, every in common:
            _settle(request, every)

    def _stored(self, request: ReadRequest, origin: Origin) -> Iterator[ReadRequest]:
        """What the source has to be asked for."""
        shape = self.contents.tensors[request.fqn].shape
        span, target = request.span, request.target
        if origin.number is not None:
            before = origin.number * math.prod(shape)
            moved = Span(span.start + before, span.stop + before)
            yield ReadRequest(origin.stored[0], moved, target)
            return
        numel = math.prod(shape[1:])
        for number in range(span.start // numel, -(-span.stop // numel)):
            start, stop = max(span.start, number * numel), min(span.stop, (number + 1) * numel)
            yield ReadRequest(
                origin.stored[number],
                Span(start - number * numel, stop - number * numel),
                target[start - span.start : stop - span.start],
            )

    def close(self) -> None:
        self.source.close()


def _settle(request: ReadRequest, every: Sequence[ReadRequest]) -> None:
    """Fill in what the slices have in common. Raises CheckpointError where they differ."""
    first = every[0]
    for other in every[1:]:
        if not torch.equal(other.target.view(torch.uint8), first.target.view(torch.uint8)):
            raise CheckpointError(
                f"{request.fqn}: its slices have different ones, {first.fqn} {first.target.item()} "
                f"and {other.fqn} {other.target.item()}, and a stack has one for all"
            )
    request.target.copy_(first.target)
