"""Which chunks are proved to be the same in two checkpoints, and what proves nothing.

Method: checkpoints of small jobs; what a manifest says is then changed by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from ckpt.commit.locate import file_key, live_entries, read_manifest
from ckpt.commit.names import step_prefix
from ckpt.format.datafile_index import StoredSums, stored_sums
from ckpt.format.manifest import BoxTable, Manifest
from ckpt.format.manifest_codec import decode_manifest
from ckpt.loading.swap_load import unchanged_chunks
from ckpt.saving.task import SaveOptions
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


def _sums_of(stores: Sequence[Store], manifest: Manifest, file: int) -> StoredSums | None:
    prefix = step_prefix(manifest.header.step, manifest.header.attempt)
    key = file_key(prefix, manifest.files[file])
    for store in stores:
        if store.exists(key):
            return stored_sums(store, key, manifest, file)
    return None


def unchanged(old: Manifest, new: Manifest, *stores: Store, wanted: Any = None) -> list[bool]:
    """All that is proved by place and, with the stores that have their files, by digests."""
    wanted = range(len(new.chunks)) if wanted is None else wanted
    return unchanged_chunks(old, new, wanted, partial(_sums_of, stores)).tolist()


@pytest.mark.parametrize("dim", [1, None])
def test_the_same_place_of_a_file_is_proof_and_equal_checksums_are_none(
    store: Store, dim: int | None
) -> None:
    first = save(store, 1, 2, dim=dim)
    second = save(store, 2, 2, dim=dim, add=1)
    assert unchanged(first, second, store) == [True, False, True]
    assert all(unchanged(second, second, store))
    assert unchanged(first, second) == [True, False, True], "by place alone"

    moved = replace(second.chunks, byte_start=second.chunks.byte_start + 4)
    assert not any(unchanged(first, replace(second, chunks=moved), store))

    plain = [save(store, step, 2, dim=dim, dedup=False) for step in (3, 4)]
    assert not any(unchanged(*plain, store))


def test_digests_prove_it_where_block_checksums_are_the_same(store: Store) -> None:
    other = open_store("memory://elsewhere")
    first, again = save(store, 1, 2), save(other, 7, 2)
    assert all(unchanged(first, again, store, other)), "written twice, with the same digests"
    assert unchanged(first, again, store, other, wanted=[2]) == [False, False, True], (
        "as far as wanted"
    )

    def changed(sums: StoredSums | None) -> StoredSums | None:
        """What was hashed is not what was written."""
        assert sums is not None
        checksums = sums.described.checksums.copy()
        checksums[sums.described.first_block[0]] ^= 1
        return sums._replace(described=replace(sums.described, checksums=checksums))

    def sums_of(manifest: Manifest, file: int) -> StoredSums | None:
        there = _sums_of((store, other), manifest, file)
        return changed(there) if manifest is again and file == 0 else there

    proved = unchanged_chunks(first, again, range(3), sums_of)
    assert proved.sum() == 2 and not proved[again.chunks.file == 0].all()


def test_another_cut_shape_dtype_or_name_proves_nothing(store: Store) -> None:
    first = save(store, 1, 2)
    assert unchanged(first, save(store, 2, 3), store) == [False] * 3 + [True]
    assert unchanged(first, save(store, 3, 2, dim=0), store) == [False, False, True]
    boxes = first.chunks.boxes
    swapped = BoxTable.of([boxes[1], boxes[0]])
    for other in (
        replace(first, dtypes=("int32", "float32")),
        replace(first, shapes=((10, 6), (3,))),
        replace(first, fqns=("other", "same")),
        replace(first, chunks=replace(first.chunks, boxes=swapped)),
    ):
        assert unchanged(first, other, store) == [False, False, True]
