"""Every layout on 1 to 4 ranks saved, and loaded under every layout on 1 to 4 ranks: same bits.

Method: no processes. A layout is a function from world size and rank to regions, declared through
`__ckpt_pieces__`; ranks are threads, the store is memory. The state is a module of several tensors
with AdamW over it, stepped once, so that every tensor has optimizer state with its regions. What a
layout loads is compared with the same regions cut out of the whole tensors by numpy-like slicing
in this file, not by the library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from ckpt.layout.piece import Owned, Piece, View
from ckpt.layout.region import Box, Span, whole
from storage import Store, open_store
from tests.e2e.job import Job, Sharded

pytestmark = pytest.mark.long

SIZES = (1, 2, 3, 4)
# Uneven along every dim, smaller than the world, of one and of three dims, and a bias.
SHAPES = {"weight": (13, 10), "conv": (6, 3, 5), "bias": (7,), "tiny": (2, 3)}


class Part(NamedTuple):
    """What a rank holds of a tensor: slices of the whole, a run of its elements, or some rows."""

    slices: tuple[slice, ...] | slice | list[int]
    holders: tuple[int, ...]


Layout = Callable[[tuple[int, ...], int, int], Part]


def _chunk(length: int, size: int, rank: int) -> slice:
    """torch.chunk's cut: equal chunks, the last ones short or empty."""
    step = -(-length // size)
    return slice(min(rank * step, length), min((rank + 1) * step, length))


def _along(dim: int) -> Layout:
    def layout(shape: tuple[int, ...], size: int, rank: int) -> Part:
        cut_dim = min(dim, len(shape) - 1)
        cut = [slice(0, n) for n in shape]
        cut[cut_dim] = _chunk(shape[cut_dim], size, rank)
        return Part(tuple(cut), (rank,))

    return layout


def _flat(shape: tuple[int, ...], size: int, rank: int) -> Part:
    return Part(_chunk(torch.Size(shape).numel(), size, rank), (rank,))


def _lopsided(shape: tuple[int, ...], size: int, rank: int) -> Part:
    """Runs of very different lengths, as members of one flat parameter get them."""
    numel = torch.Size(shape).numel()
    cuts = [0, *(numel * (index + 1) ** 2 // (size + 1) ** 2 for index in range(size - 1)), numel]
    return Part(slice(cuts[rank], cuts[rank + 1]), (rank,))


def _cyclic(shape: tuple[int, ...], size: int, rank: int) -> Part:
    """Every size-th row: several boxes in one local tensor, as FSDP over TP has them."""
    return Part(list(range(rank, shape[0], size)), (rank,))


def _hsdp(shape: tuple[int, ...], size: int, rank: int) -> Part:
    """Two groups that each shard along dim 0; on an odd world, all in one group."""
    if size % 2:
        return _along(0)(shape, size, rank)
    shards = size // 2
    cut = [slice(0, n) for n in shape]
    cut[0] = _chunk(shape[0], shards, rank % shards)
    return Part(tuple(cut), (rank % shards, rank % shards + shards))


def _tensor_parallel(shape: tuple[int, ...], size: int, rank: int) -> Part:
    """Matrices by column, convolutions by row, the rest on every rank."""
    if len(shape) == 2:
        return _along(1)(shape, size, rank)
    if len(shape) == 3:
        return _along(0)(shape, size, rank)
    return _replicated(shape, size, rank)


def _replicated(shape: tuple[int, ...], size: int, rank: int) -> Part:
    return Part(tuple(slice(0, n) for n in shape), tuple(range(size)))


LAYOUTS: dict[str, Layout] = {
    "rows": _along(0),
    "columns": _along(1),
    "depth": _along(2),
    "flat": _flat,
    "lopsided": _lopsided,
    "cyclic": _cyclic,
    "hsdp": _hsdp,
    "tp": _tensor_parallel,
    "ddp": _replicated,
}


def _local(full: torch.Tensor, part: Part) -> torch.Tensor:
    if isinstance(part.slices, slice):
        return full.reshape(-1)[part.slices].clone()
    return full[part.slices].contiguous().clone()


class Laid(nn.Module):
    """Rank `rank`'s parts of all tensors under one layout; "plain" holds them as they are."""

    def __init__(self, layout: str, size: int, rank: int, full: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.parts = {n: LAYOUTS[layout](s, size, rank) for n, s in SHAPES.items()}
        for name, part in self.parts.items():
            self.register_parameter(name, nn.Parameter(_local(full[name], part)))

    def __ckpt_pieces__(self) -> Iterable[Owned]:
        for name, part in self.parts.items():
            parameter = self.get_parameter(name)
            local = parameter.detach()
            pieces = tuple(
                Piece(name, SHAPES[name], local.dtype, region, inside, part.holders)
                for region, inside in _regions(part, tuple(local.shape))
            )
            yield Owned(parameter, local, (View(pieces),), True)


def _regions(part: Part, local: tuple[int, ...]) -> list[tuple[Box | Span, Box]]:
    """Where the parts of a local tensor of shape `local` lie in the whole, and in itself."""
    if isinstance(part.slices, slice):
        return [(Span(part.slices.start, part.slices.stop), whole(local))]
    if isinstance(part.slices, tuple):
        return [(Box(tuple(s.start for s in part.slices), local), whole(local))]
    if not part.slices:
        return [(Box((0,) * len(local), local), whole(local))]
    row, rest = (1, *local[1:]), (0,) * (len(local) - 1)
    return [
        (Box((row_index, *rest), row), Box((i, *rest), row))
        for i, row_index in enumerate(part.slices)
    ]


class Plain(nn.Module):
    """The same names as ordinary parameters, equal on every rank."""

    def __init__(self, full: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in full.items():
            self.register_parameter(name, nn.Parameter(tensor.clone()))


def _whole(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _state(layout: str, size: int, rank: int, seed: int, *, stepped: bool = True) -> dict[str, Any]:
    """The state of a seed: elementwise AdamW gives every layout the same elements."""
    model = Plain(_whole(seed)) if layout == "plain" else Laid(layout, size, rank, _whole(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    if stepped:
        for name, grad in _whole(seed + 1000).items():
            parameter = model.get_parameter(name)
            part = model.parts[name] if isinstance(model, Laid) else _replicated(grad.shape, 1, 0)
            parameter.grad = _local(grad, part)
        optimizer.step()
    return {"model": model, "optim": optimizer, "step": seed}


def _expect(state: dict[str, Any], good: dict[str, Any]) -> None:
    assert state["step"] == good["step"]
    loaded, wanted = state["optim"], good["optim"]
    assert loaded.param_groups[0]["lr"] == wanted.param_groups[0]["lr"]
    for name in SHAPES:
        parameter, expected = state["model"].get_parameter(name), good["model"].get_parameter(name)
        assert torch.equal(parameter, expected), name
        if parameter.numel() == 0:
            continue  # a rank that holds nothing needs no state
        entries = loaded.state[parameter], wanted.state[expected]
        assert entries[0].keys() == entries[1].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in entries[1].items():
            assert value.dtype == entries[0][key].dtype
            assert torch.equal(value, entries[0][key]), (name, key)


NAMES = [*LAYOUTS, "plain"]
CASES = [(name, size) for name in NAMES for size in SIZES]


def _saved(layout: str, size: int, store: Store) -> None:
    states = [_state(layout, size, rank, seed=3) for rank in range(size)]
    Job(size, lambda rank: store).save(lambda rank: states[rank], step=3)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", NAMES)
def test_what_a_layout_saves_every_layout_loads(
    request: pytest.FixtureRequest, layout: str
) -> None:
    for n in SIZES:
        store = open_store(f"memory://{request.node.name}-{n}")
        _saved(layout, n, store)
        for index, (target, m) in enumerate(CASES):
            states = [_state(target, m, rank, seed=5, stepped=bool(index % 3)) for rank in range(m)]
            Job(m, lambda rank, store=store: store).load(lambda r, states=states: states[r])
            for rank, state in enumerate(states):
                _expect(state, _state(target, m, rank, seed=3))


@pytest.mark.parametrize("size", SIZES)
def test_every_layout_saves_the_same_tensors(request: pytest.FixtureRequest, size: int) -> None:
    """Whoever saved, one rank that loads alone gets the same whole model and optimizer."""
    for layout in NAMES:
        store = open_store(f"memory://{request.node.name}-{layout}")
        _saved(layout, size, store)
        state = _state("plain", 1, 0, seed=9)
        Job(1, lambda rank, store=store: store).load(lambda rank, state=state: state)
        _expect(state, _state("plain", 1, 0, seed=3))


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_ranks_come_back_in_memory_with_holes(dim: int) -> None:
    """Whole tensors of one rank that are transposed, or every other element of larger memory."""
    store = open_store(f"memory://holes-{dim}")
    weight = torch.arange(60.0).reshape(10, 6)
    sharded = Job(2, lambda rank: store)
    sharded.save(lambda rank: {"w": Sharded(weight, rank, 2, dim=dim)})
    for target in (torch.zeros(6, 10).t(), torch.zeros(20, 12)[::2, 1::2]):
        Job(1, lambda rank: store).load(lambda rank, target=target: {"w": {"tensor": target}})
        assert torch.equal(target, weight)
