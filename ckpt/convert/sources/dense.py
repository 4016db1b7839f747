"""Composites of a checkpoint, read as the dense tensors that they stand for.

A composite is put together by its own library and turned into numbers by it, one at a time: memory
is that of the largest one and of its dense form.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ckpt.convert.sources.source import (
    CheckpointSource,
    ReadRequest,
    Refusal,
    SourceContents,
    SourceTensor,
)
from ckpt.errors import CheckpointError
from ckpt.layout.composites import dense_form, type_named, unknown_types
from ckpt.layout.descriptions import TYPE_KEY, is_description, shown_type
from ckpt.layout.dtypes import dtype_name, torch_dtype
from ckpt.layout.kind import Kind
from ckpt.layout.region import Shape
from ckpt.state.values import join_tree, references


class DenseSource(CheckpointSource):
    """`source` with a dense tensor, of its outer dtype, in place of each composite that a state has
    under a name. Those that have no such form are refused where they are asked for.
    """

    def __init__(self, source: CheckpointSource) -> None:
        self.source = source
        self.format, self.left_out = source.format, source.left_out
        contents = source.contents
        described = {fqn: value for fqn, value in contents.values.items() if is_description(value)}
        gone: dict[str, str] = {}
        tensors: dict[str, SourceTensor] = {}
        refused = dict(contents.refused)
        for fqn, value in described.items():
            parts = references(value)
            gone |= dict.fromkeys(parts, fqn)
            problems = [*unknown_types(value), *_shapeless(value)]
            absent = [name for name in parts if name not in contents.tensors]
            problems += [f"its component {name} is not there" for name in absent]
            if problems:
                refused[fqn] = Refusal(problems[0], True)
                continue
            kind = contents.tensors[parts[0]].kind if parts else Kind.OTHER
            dtype, shape = _outline(value)
            tensors[fqn] = SourceTensor(fqn, dtype, shape, kind)
        self._described: Mapping[str, Any] = described
        self._lock = threading.Lock()
        self._last: tuple[str, torch.Tensor] | None = None
        kept = {fqn: info for fqn, info in contents.tensors.items() if fqn not in gone}
        # Other names of a composite are other names of its components there.
        aliases = {}
        for alias, fqn in contents.aliases.items():
            owner = gone.get(fqn)
            if owner is None:
                aliases[alias] = fqn
            elif alias.endswith(part := fqn.removeprefix(owner)):
                aliases[alias.removesuffix(part)] = owner
        made = SourceContents(
            kept | tensors,
            {fqn: value for fqn, value in contents.values.items() if fqn not in described},
            aliases,
            refused,
            contents.modules,
            contents.per_rank,
            contents.step,
        )
        super().__init__(source.url, made, source.stored_nbytes)

    def fill(self, wanted: Sequence[ReadRequest]) -> None:
        plain = [request for request in wanted if request.fqn not in self._described]
        if plain:
            self.source.fill(plain)
        for fqn, span, target in wanted:
            if fqn in self._described:
                # One at a time, and kept until the next: a tensor is written in many parts.
                with self._lock:
                    target.copy_(self._dense(fqn)[span.start : span.stop])

    def close(self) -> None:
        self.source.close()

    def _dense(self, fqn: str) -> torch.Tensor:
        if self._last is None or self._last[0] != fqn:
            self._last = None
            self._last = fqn, self._made(fqn)
        return self._last[1]

    def _made(self, fqn: str) -> torch.Tensor:
        value = self._described[fqn]
        info = self.contents.tensors[fqn]
        dense = dense_form(fqn, join_tree(value, self.source.read))
        if tuple(dense.shape) != info.shape:
            raise CheckpointError(
                f"{fqn}: the dense form of a {shown_type(value)} has shape {tuple(dense.shape)}"
            )
        return dense.to(torch_dtype(info.dtype)).contiguous().view(-1)


def _shapeless(value: Mapping[str, Any]) -> list[str]:
    """Why a composite has no dense form."""
    kind = type_named(str(value[TYPE_KEY]))
    if kind is not None and (kind.dense is None or -1 in value["shape"]):
        return [f"a {shown_type(value)} has no dense form"]
    return []


def _outline(value: Mapping[str, Any]) -> tuple[str, Shape]:
    """Dtype and shape of the dense form."""
    kind = type_named(str(value[TYPE_KEY]))
    dtype, shape = str(value["dtype"]), tuple(value["shape"])
    if kind is not None and kind.outline is not None:
        other, into = kind.outline(value["context"])
        return dtype_name(into), shape if other is None else other
    return dtype, shape
