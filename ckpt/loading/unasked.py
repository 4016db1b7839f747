"""What a checkpoint has and no rank has a place for.

A rank that holds a stage, or some experts, has no place for most of a checkpoint. That is a mistake
only where all ranks together have none, which takes a round: names are bits in the order of the
checkpoint's own, so that a rank sends an eighth of a byte for each.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ckpt.format.uniting import is_groups
from ckpt.state.names import Left
from ckpt.state.types import Catalog
from ckpt.world.base import World

_Bits = npt.NDArray[np.bool_]
_Name = tuple[str, str]  # of param groups and a parameter, or of a leaf and ""


def left_by_all(world: World, catalog: Catalog, mine: Left) -> Left:
    """What all ranks have left, of `mine`. Collective."""
    names = _names_of(catalog)
    numbers = {name: number for number, name in enumerate(names)}
    bits = np.zeros(len(names), dtype=np.bool_)
    left = [(name, "") for name in mine.names]
    left += [(fqn, param) for fqn, params in mine.params.items() for param in params]
    bits[[numbers[name] for name in left if name in numbers]] = True
    received = world.gather_to_coordinator("left", zlib.compress(np.packbits(bits).tobytes()))
    common = None if received is None else zlib.compress(_common(received))
    packed = zlib.decompress(world.broadcast("left by all", common))
    by_all = _unpacked(packed)
    # What is not in the checkpoint under this name, because of `rename`, has no number: only this
    # rank can know of it.
    return Left(
        [name for name in mine.names if _is_left((name, ""), numbers, by_all)],
        {
            fqn: [param for param in params if _is_left((fqn, param), numbers, by_all)]
            for fqn, params in mine.params.items()
        },
        mine.tied,
    )


def _is_left(name: _Name, numbers: dict[_Name, int], by_all: _Bits) -> bool:
    number = numbers.get(name)
    return number is None or bool(by_all[number])


def _names_of(catalog: Catalog) -> list[_Name]:
    """All names of a checkpoint, in an order that follows from it alone."""
    names: set[_Name] = {(name, "") for name in (*catalog.tensors, *catalog.values)}
    names |= {(name, "") for own in catalog.per_rank for name in own}
    for fqn, value in catalog.values.items():
        if is_groups(value, fqn):
            names |= {(fqn, str(param)) for group in value for param in group["params"]}
    return sorted(names)


def _common(received: Sequence[bytes]) -> bytes:
    common = np.frombuffer(zlib.decompress(received[0]), dtype=np.uint8)
    for one in received[1:]:
        common = common & np.frombuffer(zlib.decompress(one), dtype=np.uint8)
    return common.tobytes()


def _unpacked(packed: bytes) -> _Bits:
    return np.unpackbits(np.frombuffer(packed, dtype=np.uint8)).astype(np.bool_)
