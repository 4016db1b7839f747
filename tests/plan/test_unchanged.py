"""Which chunks are proved to be the same in two checkpoints, and what proves nothing.

Method: checkpoints of small jobs; what a manifest says is then changed by hand.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ckpt.commit.locate import live_entries, read_manifest
from ckpt.format.blake3 import digests_from
from ckpt.format.manifest import BoxTable, Manifest
from ckpt.format.manifest_codec import decode_manifest
from ckpt.loading.unchanged import unchanged_chunks
from ckpt.saving.report import SaveOptions
from storage import Store, open_store
from tests.e2e.job import Job, Sharded

ROWS = torch.arange(60.0).view(6, 10)


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Store:
    return open_store(f"memory://{request.node.name}")


def manifests(store: Store) -> list[Manifest]:
    return [decode_manifest(read_manifest(store, entry)) for entry in live_entries(store)]


def save(
    store: Store, step: int, size: int, *, dedup: bool = True, dim: int | None = 1, add: int = 0
) -> Manifest:
    """One tensor cut over the ranks, and one that they share; a change of the last rank's part."""
    full = ROWS.clone()
    full[-1, -1] += add
    state = {"same": torch.ones(3)}
    Job(size, lambda rank: store).save(
        lambda rank: {"cut": Sharded(full, rank, size, dim=dim), **state},
        step,
        SaveOptions(dedup=dedup),
    )
    return manifests(store)[-1]


@pytest.mark.parametrize("dim", [1, None])
def test_the_same_place_of_a_file_is_proof_and_equal_checksums_are_none(
    store: Store, dim: int | None
) -> None:
    first = save(store, 1, 2, dim=dim)
    second = save(store, 2, 2, dim=dim, add=1)
    assert unchanged_chunks(first, second).tolist() == [True, False, True]
    assert unchanged_chunks(second, second).all()
    without = replace(second, digests=digests_from(b""))
    assert unchanged_chunks(first, without).tolist() == [True, False, True], "by place alone"

    moved = replace(without.chunks, byte_start=without.chunks.byte_start + 4)
    assert not unchanged_chunks(first, replace(without, chunks=moved)).any()

    plain = [save(store, step, 2, dim=dim, dedup=False) for step in (3, 4)]
    assert np.array_equal(plain[0].checksums, plain[1].checksums)
    assert not unchanged_chunks(*plain).any()


def test_digests_prove_it_where_block_checksums_are_the_same(store: Store) -> None:
    first, again = save(store, 1, 2), save(open_store("memory://elsewhere"), 7, 2)
    assert unchanged_chunks(first, again).all(), "written twice, with the same digests"
    checksums = again.checksums.copy()
    checksums[0] ^= 1  # what was hashed is not what was written
    assert unchanged_chunks(first, replace(again, checksums=checksums)).tolist() == [
        False,
        True,
        True,
    ]


def test_another_cut_shape_dtype_or_name_proves_nothing(store: Store) -> None:
    first = save(store, 1, 2)
    assert unchanged_chunks(first, save(store, 2, 3)).tolist() == [False] * 3 + [True]
    assert unchanged_chunks(first, save(store, 3, 2, dim=0)).tolist() == [False, False, True]
    boxes = first.chunks.boxes
    swapped = BoxTable.of([boxes[1], boxes[0]])
    for other in (
        replace(first, dtypes=("int32", "float32")),
        replace(first, shapes=((10, 6), (3,))),
        replace(first, fqns=("other", "same")),
        replace(first, chunks=replace(first.chunks, boxes=swapped)),
    ):
        assert unchanged_chunks(first, other).tolist() == [False, False, True]
