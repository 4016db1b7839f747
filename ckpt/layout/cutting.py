"""Which components of a composite are cut when the composite is, proved by its own slices.

A type says nowhere how its components lie. What is assumed of them is tried: two shards, one after
the other, are made one composite twice as large, and the type's own slice of it (its own split,
where it has no slices) has to give back both, byte for byte. Exactly one assumption must hold.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ckpt.layout.composite import CompositeType, Parts
from ckpt.layout.plain_context import NoPlainForm, context_of, plain_of
from ckpt.layout.region import Shape
from ckpt.layout.tensor import copyable

__all__ = [
    "Cutting",
    "Unproved",
    "WholeParts",
    "cutting_of",
    "cutting_of_whole",
    "with_shape",
]

# Three choices for each of six components, and two for the context, are about as many.
ASSUMPTIONS_MAX = 1024

# A dim of the tensor, and the dim of the component that is cut with it; None: no dim is.
_Choice = tuple[int | None, Shape]


class Unproved(Exception):
    """Nothing shows how the components are cut; the text says why."""


@dataclass(frozen=True, slots=True)
class Cutting:
    """How the components of a composite are cut with it.

    `dims` has, for each component, the dims of it that are cut, by the dims of the tensor that they
    are cut with. `local_shapes` are the components' own on this rank, for a shard of `local_shape`.
    """

    dims: Mapping[str, Mapping[int, int]]
    local_shapes: Mapping[str, Shape]
    local_shape: Shape
    context: Any
    has_shape: bool
    device: torch.device

    def context_at(self, shape: Shape) -> Any:
        """The context of a composite of `shape`, of which these shards may be parts."""
        plain = self.context
        if self.has_shape:
            plain = with_shape(plain, self.local_shape, shape)
        return context_of(plain, self.device)


class WholeParts(NamedTuple):
    """A composite as a checkpoint has it: plain context, and shape and dtype of each component."""

    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, torch.dtype]
    context: Any


class _Question(NamedTuple):
    """What is to be proved: how shards of a type, of `shape`, follow each other along `dim`."""

    kind: CompositeType
    shape: Shape
    dim: int
    dtype: torch.dtype
    context: Any
    dtypes: Mapping[str, torch.dtype]
    choices: Mapping[str, Sequence[_Choice]]


class _Answer(NamedTuple):
    along: Mapping[str, int | None]
    shapes: Mapping[str, Shape]
    has_shape: bool


def cutting_of(
    kind: CompositeType, parts: Parts, shape: Shape, dtype: torch.dtype, dims: Sequence[int]
) -> Cutting:
    """How a tensor is cut of which `parts` are a shard of `shape`, cut along `dims`. Raises
    Unproved.
    """
    shapes = {name: tuple(item.shape) for name, item in parts.components.items()}
    dtypes = {name: item.dtype for name, item in parts.components.items()}
    plain = _plain(parts.context)
    device = next((item.device for item in parts.components.values()), torch.device("cpu"))

    def choices(name: str, dim: int) -> Iterator[_Choice]:
        yield from ((along, shapes[name]) for along in (*range(len(shapes[name])), None))

    answers = {}
    for dim in dims:
        each = {name: list(choices(name, dim)) for name in shapes}
        answers[dim] = _answer(_Question(kind, shape, dim, dtype, plain, dtypes, each))
    return _joined(answers, shapes, shape, plain, device)


def cutting_of_whole(
    kind: CompositeType,
    whole: WholeParts,
    shapes: tuple[Shape, Shape],
    dtype: torch.dtype,
    dims: Sequence[int],
) -> Cutting:
    """How `whole` is cut along `dims` for a shard; `shapes` are the tensor's and the shard's.
    Raises Unproved.
    """
    shape, local_shape = shapes
    if len(dims) > 1:
        raise Unproved("it is cut along several dims; load it into state that has such a tensor")
    plain = whole.context
    if not dims:
        return _joined({}, whole.shapes, shape, plain, torch.device("cpu"))
    (dim,) = dims
    rows, local_rows = shape[dim], local_shape[dim]

    def choices(name: str) -> Iterator[_Choice]:
        sizes = whole.shapes[name]
        for along, size in enumerate(sizes):
            if size * local_rows % rows == 0:
                cut = size * local_rows // rows
                yield along, (*sizes[:along], cut, *sizes[along + 1 :])
        yield None, sizes

    # What the context says of the whole's shape, it says of a shard's; whether it does is tried.
    local = with_shape(plain, shape, local_shape)
    each = {name: list(choices(name)) for name in whole.shapes}
    answer = _answer(_Question(kind, local_shape, dim, dtype, local, whole.dtypes, each))
    if local != plain and not answer.has_shape:
        raise Unproved("its context has the shape of the tensor, which its slices keep")
    return _joined({dim: answer}, answer.shapes, local_shape, local, torch.device("cpu"))


def _joined(
    answers: Mapping[int, _Answer],
    shapes: Mapping[str, Shape],
    local_shape: Shape,
    context: Any,
    device: torch.device,
) -> Cutting:
    dims: dict[str, dict[int, int]] = {name: {} for name in shapes}
    for dim, answer in answers.items():
        for name, along in answer.along.items():
            if along is None:
                continue
            if along in dims[name].values():
                raise Unproved(f"two of its dims are one dim of {name}")
            dims[name][dim] = along
    has_shape = {answer.has_shape for answer in answers.values()}
    if len(has_shape) > 1:
        raise Unproved("its context follows some of the cuts only")
    return Cutting(dims, shapes, local_shape, context, has_shape == {True}, device)


def _plain(context: Any) -> Any:
    try:
        return plain_of(context)
    except NoPlainForm as odd:
        raise Unproved(f"it has {odd}") from odd


def with_shape(plain: Any, old: Shape, new: Shape) -> Any:
    """A context in plain form with `new` wherever it has `old`."""
    if isinstance(plain, (list, tuple)):
        if tuple(plain) == old and old:
            return type(plain)(new)
        return type(plain)(with_shape(item, old, new) for item in plain)
    if isinstance(plain, dict):
        return {key: with_shape(item, old, new) for key, item in plain.items()}
    return plain


# --- the proof -----------------------------------------------------------------------------------

_answers: dict[str, _Answer | str] = {}


def _answer(question: _Question) -> _Answer:
    """The one assumption that holds. Answers are kept: a model has few kinds of shards."""
    kind, shape, dim, dtype, context, dtypes, choices = question
    key = repr((kind.name, shape, dim, dtype, context, dict(dtypes), dict(choices)))
    known = _answers.get(key)
    if known is None:
        try:
            known = _proved(question)
        except Unproved as odd:
            known = str(odd)
        _answers[key] = known
    if isinstance(known, str):
        raise Unproved(known)
    return known


def _proved(question: _Question) -> _Answer:
    if not question.shape[question.dim]:
        raise Unproved("this rank has no elements of it")
    names = list(question.choices)
    count = math.prod(len(each) for each in question.choices.values())
    if count > ASSUMPTIONS_MAX:
        raise Unproved(f"it has {len(names)} components, in {count} ways to be cut")
    experiment = _Experiment(question)
    held: list[_Answer] = []
    for chosen in itertools.product(*question.choices.values()):
        for has_shape in (False, True) if experiment.has_shape else (False,):
            answer = _Answer(
                {name: along for name, (along, _) in zip(names, chosen, strict=True)},
                {name: sizes for name, (_, sizes) in zip(names, chosen, strict=True)},
                has_shape,
            )
            if experiment.holds(answer):
                held.append(answer)
    if len(held) != 1:
        raise Unproved(
            f"a {question.kind.name} of {question.shape} has no slice along dim {question.dim} "
            "that shows it"
            if not held
            else f"the slices of a {question.kind.name} of {question.shape} allow {len(held)} ways "
            f"to cut it along dim {question.dim}, such as a scale of the tensor or of each shard"
        )
    return held[0]


class _Experiment:
    """Tries assumptions about one question; memory of each size is made once."""

    def __init__(self, question: _Question) -> None:
        self.question = question
        shape, dim = question.shape, question.dim
        self.rows = shape[dim]
        self.shape = (*shape[:dim], 2 * self.rows, *shape[dim + 1 :])
        self.made: dict[tuple[str, Shape], torch.Tensor] = {}
        context = question.context
        self.has_shape = with_shape(context, shape, self.shape) != context

    def holds(self, answer: _Answer) -> bool:
        """Whether slices of two shards together are these shards."""
        kind, cpu = self.question.kind, torch.device("cpu")
        context = self.question.context
        if answer.has_shape:
            context = with_shape(context, self.question.shape, self.shape)
        whole = {name: self.doubled(name, answer) for name in answer.along}
        try:
            parts = Parts(whole, context_of(context, cpu))
            both = kind.build(parts, self.shape, self.question.dtype)
            if tuple(both.shape) != self.shape:
                return False
            taken = [kind.take(part) for part in self.halves(both)]
        # A wrong assumption fails somewhere in the library, in any way that it likes.
        except Exception:
            return False
        return all(self.is_shard(parts, index, whole, answer) for index, parts in enumerate(taken))

    def halves(self, both: Any) -> Sequence[Any]:
        dim, rows = self.question.dim, self.rows
        aten = torch.ops.aten
        try:
            return [
                aten.slice.Tensor(both, dim, index * rows, (index + 1) * rows) for index in (0, 1)
            ]
        except (NotImplementedError, TypeError, AssertionError):
            # NF4 tensors have no slices, and are sharded by splits.
            parts: Sequence[Any] = aten.split.Tensor(both, rows, dim)
            return parts if len(parts) == 2 else ()

    def is_shard(
        self, parts: Parts, index: int, whole: Mapping[str, torch.Tensor], answer: _Answer
    ) -> bool:
        if parts.components.keys() != whole.keys():
            return False
        expected = {}
        for name, along in answer.along.items():
            size = 0 if along is None else answer.shapes[name][along]
            one = whole[name]
            expected[name] = one if along is None else one.narrow(along, index * size, size)
            if parts.components[name].shape != expected[name].shape:
                return False
        if not all(_equal(parts.components[name], expected[name]) for name in whole):
            return False
        # Some slices forget the dtype that a tensor pretends to have.
        without = (self.question.dtype, torch.float32)
        taken, asked = _plain(parts.context), self.question.context
        return bool(_without(taken, without) == _without(asked, without))

    def doubled(self, name: str, answer: _Answer) -> torch.Tensor:
        along, sizes = answer.along[name], list(answer.shapes[name])
        if along is not None:
            sizes[along] *= 2
        key = (name, tuple(sizes))
        if key not in self.made:
            self.made[key] = _filled(tuple(sizes), self.question.dtypes[name])
        return self.made[key]


def _filled(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Bytes of which no two halves are equal."""
    made = torch.empty(shape, dtype=dtype)
    index = torch.arange(made.numel() * made.element_size())
    pattern = (index * 167 + (index >> 8) * 59 + (index >> 16) * 101).to(torch.uint8)
    _bytes(made).copy_(pattern)
    return made


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(_bytes(a.contiguous()), _bytes(b.contiguous()))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return copyable(tensor).reshape(-1).view(torch.uint8)


def _without(plain: Any, dtypes: Sequence[torch.dtype]) -> Any:
    """A context without the dtypes that a tensor may only pretend to have."""
    names = [plain_of(dtype) for dtype in dtypes]
    if plain in names:
        return None
    if isinstance(plain, (list, tuple)):
        return type(plain)(_without(item, dtypes) for item in plain)
    if isinstance(plain, dict):
        return {key: _without(item, dtypes) for key, item in plain.items()}
    return plain
