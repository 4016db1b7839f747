"""Replicas that an engine declares equal and that have drifted: never stored as a mixture.

Ranks share the writing of a replica, so that parts of all of them were stored, also with
`replicas="strict"`, and nobody was warned. Real ranks save tensors of which some have other
elements; what is stored is one replica's, and what is said names tensor, ranks and index.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckpt
from ckpt.errors import CheckpointError, InvalidState, RankFailed
from ckpt.layout.piece import Piece
from ckpt.layout.region import Box, Span
from ckpt.saving.replica_check import Block, ReplicaSums, _in_words, _located
from tests.ranks import run_ranks

SIZE = 1 << 20  # elements: 4 MiB


def replicated(size: int = SIZE) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.arange(float(size)), mesh, [Replicate()])


def drift(tensor: Any, *indices: int, ranks: tuple[int, ...] = (2,)) -> None:
    """On these ranks the local tensor has other elements; without indices, all are."""
    if dist.get_rank() in ranks:
        local = tensor.to_local().view(-1)
        local[list(indices) if indices else slice(None)] += 1


def stored(root: str, step: int, *names: str) -> list[torch.Tensor]:
    with ckpt.open(root, step=step) as checkpoint:
        return [checkpoint[name] for name in names]


def _saved_whole(root: str) -> None:
    tensor = replicated()
    ckpt.save({"w": tensor}, root, step=1)
    drift(tensor)
    report = ckpt.save({"w": tensor}, root, step=2)
    (warning,) = [text for text in report.warnings if text.startswith("w: ")]
    for part in ("declared equal on ranks 0 to 3", "on ranks 0, 1, 3 and on rank 2", "first at"):
        assert part in warning, warning
    assert torch.equal(stored(root, 2, "w")[0], torch.arange(float(SIZE)))
    # It stays so, and all is compared: one element is noticed and located.
    tensor.to_local().copy_(torch.arange(float(SIZE)))
    drift(tensor, 777_777, ranks=(1, 3))
    report = ckpt.save({"w": tensor}, root, step=3)
    assert any("first at index [777777]" in text for text in report.warnings), report.warnings
    assert torch.equal(stored(root, 3, "w")[0], torch.arange(float(SIZE)))
    # Equal again: the ranks share the writing from the next save on.
    tensor.to_local().copy_(torch.arange(float(SIZE)))
    assert not ckpt.save({"w": tensor}, root, step=4).warnings
    ckpt.save({"w": tensor}, root, step=5)
    files = sorted((Path(root) / "steps").glob("00000005*/rank*"))
    sizes = [file.stat().st_size for file in files]
    assert len(sizes) == 4 and max(sizes) < SIZE * 4 // 2


@pytest.mark.ranks
def test_a_drifted_replica_is_stored_as_one_rank_has_it(tmp_path: Path) -> None:
    run_ranks(4, _saved_whole, str(tmp_path))


def _hybrid(root: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    expected = [param.full_tensor().detach() for param in model.parameters()]
    with torch.no_grad():
        for param in model.parameters():
            drift(param, ranks=(2, 3))
    report = ckpt.save({"m": model}, root, step=1)
    names = [f"m.{name}" for name, _ in model.named_parameters()]
    for tensor, value in zip(stored(root, 1, *names), expected, strict=True):
        assert torch.equal(tensor, value)
    assert any(
        "declared equal on ranks 0, 2, and different on rank 0 and on rank 2" in text
        for text in report.warnings
    ), report.warnings
    with pytest.raises(InvalidState, match=r"m\.0\.bias: declared equal .* first at index \[0\]"):
        ckpt.save({"m": model}, root, step=2, replicas="strict")


@pytest.mark.ranks
def test_a_replica_group_that_is_off_is_not_mixed_in(tmp_path: Path) -> None:
    run_ranks(4, _hybrid, str(tmp_path))


def _strict(root: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    whole = torch.arange(1000.0 * 300).reshape(1000, 300)
    state = {
        "run": replicated(),
        "box": distribute_tensor(whole, mesh, [Replicate(), Shard(1)]),
        "turned": distribute_tensor(whole.t(), mesh, [Replicate(), Shard(0)]),
    }

    def save(step: int) -> None:
        ckpt.save(state, root, step=step, replicas="strict")

    save(1)
    drift(state["run"], 4321)
    drift(state["box"], 10 * 150 + 7, ranks=(3,))
    with pytest.raises(InvalidState) as raised:
        save(2)
    assert len(raised.value.problems) == 2
    box, run = raised.value.problems
    assert "box: declared equal on ranks 1, 3" in box and "first at index [10, 157]" in box
    assert "run: declared equal on ranks 0 to 3" in run and "first at index [4321]" in run
    assert not list((Path(root) / "steps").glob("00000002*"))
    state["run"].to_local().copy_(torch.arange(float(SIZE)))
    drift(state["box"], 10 * 150 + 7, ranks=(1,))
    save(3)
    # In the background: the same words, and the next save is judged anew.
    drift(state["box"], 5, ranks=(2,))
    said = (
        r"box: declared equal on ranks 0, 2, and different on rank 0 and on rank 2, first at index"
    )
    for step in (4, 5):
        with pytest.raises(InvalidState, match=rf"{said} \[0, 5\]"):
            ckpt.async_save(state, root, step=step, replicas="strict").result()
    with pytest.raises(InvalidState, match=rf"{said} \[0, 5\]"):
        save(6)
    drift(state["box"], 5, ranks=(0,))
    assert not ckpt.async_save(state, root, step=7, replicas="strict").result().warnings
    drift(state["run"], 99, ranks=(1,))
    with pytest.raises(InvalidState, match=r"run: .* on ranks 0, 2, 3 and on rank 1, .*\[99\]"):
        ckpt.async_save(state, root, step=8, replicas="strict").result()


@pytest.mark.ranks
def test_strict_compares_all_replicas(tmp_path: Path) -> None:
    run_ranks(4, _strict, str(tmp_path))


def _async(root: str) -> None:
    tensor = replicated()
    state = {"w": tensor}
    ckpt.async_save(state, root, step=1).result()
    drift(tensor)
    with pytest.raises(CheckpointError, match="would mix what they have: w: declared") as raised:
        ckpt.async_save(state, root, step=2).result()
    assert not isinstance(raised.value, (InvalidState, RankFailed))  # a training goes on
    report = ckpt.async_save(state, root, step=3).result()
    assert "on ranks 0, 1, 3 and on rank 2, first at index [0]" in report.warnings[0]
    assert torch.equal(stored(root, 3, "w")[0], torch.arange(float(SIZE)))
    tensor.to_local().copy_(torch.arange(float(SIZE)))
    for step in (4, 5):
        assert not ckpt.async_save(state, root, step=step).result().warnings
    drift(tensor, ranks=(1,))
    with pytest.raises(CheckpointError, match="on ranks 0, 2, 3 and on rank 1, first at index"):
        ckpt.async_save(state, root, step=6).result()


@pytest.mark.ranks
def test_a_save_in_the_background_mixes_nothing(tmp_path: Path) -> None:
    """What it has copied is shares of a mixture, so that the next save is the first whole one."""
    run_ranks(4, _async, str(tmp_path))


def test_where_bytes_have_changed_since_the_ranks_are_named() -> None:
    """A training may have changed them since: the checksums are those of the save."""
    blocks, sums = [], []
    for rank in range(3):
        tensor = torch.arange(100.0)
        tensor[7] += rank == 2
        piece = Piece("w", (100,), tensor.dtype, Span(0, 100), Box((0,), (100,)), (0, 1, 2))
        sums.append(ReplicaSums(True, {(0, 1, 2): [Block(piece, 0, tensor)]}))
        sums[-1].compute()
        blocks.append(tensor)
    differing = [([0, 1, 2], [0])]

    def text() -> str:
        (only,) = _in_words([_located(each, differing) for each in sums])
        return only

    said = "w: declared equal on ranks 0 to 2, and different on ranks 0, 1 and on rank 2, first"
    assert text() == f"{said} at index [7]"
    blocks[0][3] += 1  # rank 1 has the bytes still
    assert text() == f"{said} at index [7]"
    blocks[1][3] += 1
    assert text() == f"{said} at or after index [0]"


def _at_exit(root: str) -> None:
    tensor = replicated()
    drift(tensor, ranks=(1,))
    with ckpt.Checkpointer({"w": tensor}, root, save=ckpt.AtExit()) as checkpointer:
        checkpointer.step(7)
    assert torch.equal(stored(root, 7, "w")[0], torch.arange(float(SIZE)))


@pytest.mark.ranks
def test_the_last_save_of_a_training_is_made_again(tmp_path: Path) -> None:
    run_ranks(2, _at_exit, str(tmp_path))


def _sampled(root: str) -> list[float]:
    tensor = replicated()
    # One of 64 blocks that a sample may have.
    drift(tensor, *range(40 * SIZE // 64, 41 * SIZE // 64), ranks=(1,))
    counts = []
    for step in range(1, 200):
        report = ckpt.save({"w": tensor}, root, step=step)
        counts.append(report.counters["replica_bytes"])
        if report.warnings:
            break
    return counts


@pytest.mark.ranks
def test_each_save_compares_another_sample(tmp_path: Path) -> None:
    """At most 1 % of what a rank writes, until something is noticed; then all."""
    counts = run_ranks(2, _sampled, str(tmp_path))[0]
    assert 1 < len(counts) < 199
    assert 0 < max(counts[:-1]) <= SIZE * 4 / 2 / 100
    assert counts[-1] >= SIZE * 4


def _failing_alone(root: str) -> None:
    tensor, bad = replicated(), {"bad": object()} if dist.get_rank() else {}
    ckpt.save({"w": tensor}, root, step=1)
    drift(tensor, ranks=(1,))
    assert ckpt.save({"w": tensor}, root, step=2).warnings
    tensor.to_local().copy_(torch.arange(float(SIZE)))
    with pytest.raises(CheckpointError, match="bad"):
        ckpt.save({"w": tensor, **bad}, root, step=3)
    assert not ckpt.save({"w": tensor}, root, step=4).warnings


@pytest.mark.ranks
def test_a_rank_that_fails_alone_keeps_no_other_view_of_replicas(tmp_path: Path) -> None:
    run_ranks(2, _failing_alone, str(tmp_path))


def _unlike(root: str) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    names = ("a", "b") if rank else ("a",)
    tensors = [distribute_tensor(torch.ones(2000), mesh, [Replicate()]) for _ in range(2)]
    state = dict(zip(names, tensors, strict=False))
    for step in (1, 2):
        with pytest.raises(CheckpointError, match=r"b: |other tensors are declared"):
            ckpt.save(state, root, step=step, replicas="strict")


@pytest.mark.ranks
def test_replicas_that_a_rank_lacks_are_refused(tmp_path: Path) -> None:
    run_ranks(2, _unlike, str(tmp_path))


def _without(root: str) -> None:
    torch.manual_seed(dist.get_rank())
    mesh = init_device_mesh("cpu", (2,))
    state = {"s": distribute_tensor(torch.arange(64.0), mesh, [Shard(0)]), "t": torch.ones(4)}
    assert "replica_bytes" not in ckpt.save(state, root, step=1).counters


@pytest.mark.ranks
def test_a_state_without_replicas_compares_nothing(tmp_path: Path) -> None:
    run_ranks(2, _without, str(tmp_path))
