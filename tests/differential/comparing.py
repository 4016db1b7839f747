"""What a call gave, as values that outlive the next call, and where two of them differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

# Families by which exceptions are compared, most special first.
FAMILIES = (
    NotImplementedError, AssertionError, ValueError, TypeError, KeyError, IndexError,
    AttributeError, RuntimeError,
)  # fmt: skip


@dataclass(frozen=True)
class Raised:
    """An exception, by family."""

    family: str
    text: str


class Tensor(NamedTuple):
    """A tensor, or the part of one that this rank holds; `about` has all but the values.

    `offset` is where `value` begins in the tensor of which it is a part.
    """

    about: tuple[Any, ...]
    value: torch.Tensor
    offset: tuple[int, ...] = ()


class Difference(NamedTuple):
    """Where the two sides differ: a path into the result, what differs, and both values."""

    where: str
    what: str
    """"value", "keys", "order", "shape", "dtype", "kind", "raised" or "about"."""
    torch: Any
    ours: Any
    values: tuple[Any, Any] = (None, None)
    """torch's and ours as they are, for those who look closer."""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}: torch {self.torch}, ours {self.ours}"


def raised(error: BaseException) -> Raised:
    """The exception's family, and its words for a reader."""
    for family in FAMILIES:
        if isinstance(error, family):
            return Raised(family.__name__, f"{type(error).__name__}: {error}"[:600])
    return Raised(type(error).__name__, str(error)[:600])


def frozen(value: Any) -> Any:
    """A copy that later calls do not change, in which sharded tensors are what they hold here."""
    if isinstance(value, DTensor):
        placements = tuple(str(placement) for placement in value.placements)
        about = ("DTensor", tuple(value.shape), placements, tuple(value.device_mesh.shape))
        _, offset = compute_local_shape_and_global_offset(
            value.shape, value.device_mesh, value.placements
        )
        local = value.to_local().detach().clone()
        return Tensor((*about, value.dtype), local, tuple(offset) if local.numel() else ())
    if hasattr(value, "local_shards"):
        metadata = value.metadata()
        chunks = [(m.shard_offsets, m.shard_sizes) for m in metadata.shards_metadata]
        return {
            "about": (
                "ShardedTensor", tuple(metadata.size), metadata.tensor_properties.dtype, chunks
            ),
            "shards": [
                [list(s.metadata.shard_offsets), frozen(s.tensor)] for s in value.local_shards()
            ],
        }  # fmt: skip
    if isinstance(value, torch.Tensor):
        about = ("Tensor", tuple(value.shape), value.dtype, value.requires_grad)
        return Tensor(about, value.detach().clone())
    if isinstance(value, Mapping):
        return {key: frozen(_named(key, item)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [frozen(item) for item in value]
    return value


def _named(key: Any, value: Any) -> Any:
    """Names of parameters in a group are keys: their order means nothing, unlike that of ids."""
    if key == "params" and isinstance(value, list) and all(isinstance(one, str) for one in value):
        return sorted(value)
    return value


def differences(
    theirs: Any, ours: Any, tolerance: float, where: str = "", *, ordered: bool = False
) -> Iterator[Difference]:
    """Where two frozen values differ; values of tensors by more than `tolerance`, relatively.

    `ordered`: the order of keys counts too.
    """
    if isinstance(theirs, Raised) or isinstance(ours, Raised):
        families = [one.family if isinstance(one, Raised) else None for one in (theirs, ours)]
        if families[0] != families[1]:
            yield _difference(where, "raised", theirs, ours)
    elif type(theirs) is not type(ours):
        yield _difference(where, "kind", theirs, ours)
    elif isinstance(theirs, Tensor):
        yield from _of_tensors(theirs, ours, tolerance, where)
    elif isinstance(theirs, dict):
        if set(theirs) != set(ours):
            only = [[key for key in a if key not in b] for a, b in _both_ways(theirs, ours)]
            both = (list(theirs), list(ours))
            yield Difference(where, "keys", f"has {only[0]}", f"has {only[1]}", both)
        elif ordered and list(theirs) != list(ours):
            yield _difference(where, "order", list(theirs), list(ours))
        for key in theirs:
            if key in ours:
                path = f"{where}.{key}"
                yield from differences(theirs[key], ours[key], tolerance, path, ordered=ordered)
    elif isinstance(theirs, list):
        if len(theirs) != len(ours):
            yield _difference(where, "kind", theirs, ours)
        for index, (a, b) in enumerate(zip(theirs, ours, strict=False)):
            yield from differences(a, b, tolerance, f"{where}[{index}]", ordered=ordered)
    elif theirs is not ours and theirs != ours:
        yield _difference(where, "value", theirs, ours)


def _difference(where: str, what: str, theirs: Any, ours: Any) -> Difference:
    return Difference(where, what, _brief(theirs), _brief(ours), (theirs, ours))


def _both_ways(a: Any, b: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    return (a, b), (b, a)


def _of_tensors(theirs: Tensor, ours: Tensor, tolerance: float, where: str) -> Iterator[Difference]:
    if theirs.about != ours.about:
        what = "about"
        if theirs.about[0] == ours.about[0]:
            what = "shape" if theirs.about[1] != ours.about[1] else "about"
        yield Difference(where, what, theirs.about, ours.about, (theirs, ours))
        return
    a, b = theirs.value, ours.value
    if a.shape != b.shape:
        yield Difference(where, "shape", tuple(a.shape), tuple(b.shape), (theirs, ours))
    elif not are_close(a, b, tolerance):
        yield Difference(where, "value", _brief(a), _brief(b), (theirs, ours))


def are_close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """Whether values are apart by at most `tolerance` times the largest; equal NaNs are equal."""
    if a.numel() == 0 or torch.equal(a, b):
        return True
    if not a.is_floating_point():
        return False
    a, b = a.double(), b.double()
    scale = max(0.1, float(a.nan_to_num(0.0, 0.0, 0.0).abs().max()))
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _brief(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) < 400 else f"{text[:400]}..."
