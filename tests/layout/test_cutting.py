"""How the components of a composite are cut is proved by its own slices, or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckpt.layout import cutting
from ckpt.layout.composite import Parts, wrapper_type
from ckpt.layout.cutting import Unproved, WholeParts, cutting_of, cutting_of_whole


class Blocks(torch.Tensor):
    """Rows of codes in one dim, a scale for each `block` elements or one for all, and its shape."""

    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, shape: Any, block: int) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)
        made.codes, made.scale, made.sizes, made.block = codes, scale, torch.Size(shape), block
        return made

    def __tensor_flatten__(self) -> Any:
        me: Any = self
        return ["codes", "scale"], [me.sizes, me.block]

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: Any, shape: Any, strides: Any) -> Any:
        return Blocks(parts["codes"], parts["scale"], *context)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.aten.slice.Tensor or args[1]:
            raise NotImplementedError(f"{func}")
        me, _, start, stop = args
        row = me.sizes[1]
        if start * row % me.block or stop * row % me.block:
            raise ValueError("inside of a block")
        scale = me.scale
        if scale.numel() > 1:
            scale = scale[start * row // me.block : stop * row // me.block]
        codes = me.codes[start * row : stop * row]
        if me.block == COLUMN_BY_COLUMN:
            codes = me.codes.view(row, -1)[:, start:stop].reshape(-1)
        return Blocks(codes, scale, (stop - start, row), me.block)


# A block size that says that the codes of a column follow each other.
COLUMN_BY_COLUMN = 3
KIND = wrapper_type(Blocks, "mine.Blocks")


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "_answers", {})


def parts(rows: int, row: int, block: int) -> Parts:
    scale = torch.ones(max(rows * row // block, 1))
    return Parts(
        {"codes": torch.zeros(rows * row), "scale": scale}, [torch.Size((rows, row)), block]
    )


def test_what_slices_show() -> None:
    known = cutting_of(KIND, parts(4, 6, 8), (4, 6), torch.float32, (0,))
    assert known.dims == {"codes": {0: 0}, "scale": {0: 0}}
    # The shape in the context is that of the tensor, wherever it is asked for.
    assert known.context_at((20, 6)) == [torch.Size((20, 6)), 8]
    # Of the whole, as a checkpoint has it, the same follows for a shard.
    plain = [{"$data": "size", "value": (8, 6)}, 8]
    dtypes = dict.fromkeys(("codes", "scale"), torch.float32)
    whole = WholeParts({"codes": (48,), "scale": (6,)}, dtypes, plain)
    again = cutting_of_whole(KIND, whole, ((8, 6), (4, 6)), torch.float32, (0,))
    assert again.dims == known.dims and again.local_shapes == {"codes": (24,), "scale": (3,)}
    with pytest.raises(Unproved, match=r"\(2, 6\) has no slice along dim 0"):
        cutting_of_whole(KIND, whole, ((8, 6), (2, 6)), torch.float32, (0,))


@pytest.mark.parametrize(
    ("rows", "dim", "said"),
    [
        (0, 0, "no elements"),
        (4, 1, "no slice along dim 1"),
        # One scale may be that of the whole tensor, or that of a block as large as the shard.
        (1, 0, "allow 2 ways"),
    ],
)
def test_what_they_leave_open_is_not_guessed(rows: int, dim: int, said: str) -> None:
    with pytest.raises(Unproved, match=said):
        cutting_of(KIND, parts(rows, 8, 8), (rows, 8), torch.float32, (dim,))


def test_shapes_alone_prove_nothing() -> None:
    """The shards' codes have the sizes of halves, and lie otherwise."""
    with pytest.raises(Unproved, match="no slice along dim 0"):
        cutting_of(KIND, parts(4, 6, COLUMN_BY_COLUMN), (4, 6), torch.float32, (0,))
