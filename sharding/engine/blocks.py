"""Where a parameter may be cut, if not anywhere: between its blocks, or nowhere.

`shard_placement_fn` returns these values. Optimizers and kernels that work on blocks of a matrix,
or on whole matrices, then see on each rank what they would see of the whole parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Blocks:
    """The parameter is cut between blocks of this shape only, counted from its start.

    A tuple is the shape of a block over the last dims: `Blocks((128, 128))`, `Blocks((1, 32))`. A
    number is a run of so many elements in row-major order, as 8-bit optimizers have them:
    `Blocks(256)`. The last blocks of a dim may be shorter. Raises ValueError for sizes below one.
    """

    shape: int | Shape

    def __post_init__(self) -> None:
        sizes = (self.shape,) if isinstance(self.shape, int) else self.shape
        if not sizes or min(sizes) < 1:
            raise ValueError(f"Blocks({self.shape}): sizes of a block are at least 1")

    def granularity(self, fqn: str, shape: Shape) -> int:
        """After how many elements of a parameter of `shape`, in row-major order, it may be cut, and
        again after as many. Raises ValueError, naming `fqn`, for blocks of more dims than it has.
        """
        if isinstance(self.shape, int):
            return self.shape
        if len(self.shape) > len(shape):
            raise ValueError(
                f"{fqn}: has shape {shape}, but its blocks {self.shape} have more dims; return "
                "Blocks of a number for runs of elements"
            )
        sizes = (1,) * (len(shape) - len(self.shape)) + self.shape
        first = next((dim for dim, size in enumerate(sizes) if size > 1), None)
        if first is None:
            return 1
        # What the blocks cut in later dims lies between their rows: all of these are taken whole.
        inner = math.prod(shape[first + 1 :])
        # A shorter last block would shift those of the next index of the dim before.
        fits = first == 0 or shape[first] % sizes[first] == 0
        return (sizes[first] if fits else shape[first]) * inner


@dataclass(frozen=True)
class Whole:
    """The parameter is not cut: one rank has all of it, in its own shape, and the others none."""

    def granularity(self, fqn: str, shape: Shape) -> int:
        """As for `Blocks`: after all its elements."""
        return max(math.prod(shape), 1)


Cutting = Blocks | Whole
Placing = Callable[[nn.Parameter], object]
"""What users pass as `shard_placement_fn`."""
