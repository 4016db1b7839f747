"""No changed bit of a file that a checkpoint refers to is ever loaded.

Method: step 2 refers to step 1, with blocks of 1 KiB. One bit of one of step 1's files, or of step
2's own, is flipped on the way to the reader: a load of step 2 raises an error of ours that names
the file, or gives exactly the saved bits, and that only where step 2 needs nothing of the byte.
"""

from __future__ import annotations

import random

import pytest

from ckpt.commit.locate import file_keys, live_entries, read_manifest
from ckpt.errors import CheckpointError
from ckpt.format.manifest_codec import decode_manifest
from ckpt.loading.load import LoadOptions, load_state
from ckpt.saving import dedup, plan, task
from ckpt.world.base import SoloWorld
from storage import open_store
from tests.conftest import Scale
from tests.e2e.job import Job
from tests.e2e.lora import DEDUP, assert_is_lora, lora_at
from tests.e2e.test_flips import FlippedStore
from tests.results import Counted


def test_every_flipped_bit_of_what_is_referred_to_is_refused_or_harmless(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    scale: Scale,
    rng: random.Random,
    counted: Counted,
) -> None:
    for module in (dedup, plan, task):
        monkeypatch.setattr(module, "BLOCK_BYTES", 1024)
    store = open_store(f"memory://{request.node.name}")
    job = Job(2, lambda rank: store, memories={})
    for step in (1, 2):
        job.save(lambda rank, step=step: lora_at(step, rank, 2), step=step, options=DEDUP)
    entry = live_entries(store)[-1]
    manifest = decode_manifest(read_manifest(store, entry))
    keys = file_keys(entry.prefix, manifest)
    bits = [
        (key, bit)
        for key, nbytes in zip(keys, manifest.file_nbytes.tolist(), strict=True)
        for bit in range(8 * nbytes)
    ]
    chunks = manifest.chunks
    needed: dict[str, list[range]] = {}
    for chunk in range(len(chunks)):
        start = int(chunks.byte_start[chunk])
        place = range(start, start + manifest.chunk_nbytes(chunk))
        needed.setdefault(keys[int(chunks.file[chunk])], []).append(place)
    # Headers and checksums say what the blocks of a file of another attempt must be.
    tables, starts = manifest.seals.nbytes, manifest.file_data_start
    columns = zip(starts.tolist(), (manifest.file_nbytes - tables).tolist(), strict=True)
    data = {key: range(*place) for key, place in zip(keys, columns, strict=True)}
    refused, count = 0, scale.count(80, 20_000)
    for key, bit in rng.sample(bits, count):
        state = lora_at(0)
        flipped = FlippedStore(store, key, bit)
        is_needed = any(bit // 8 in place for place in needed[key])
        try:
            load_state(state, store=flipped, world=SoloWorld(), step=None, options=LoadOptions())
        except CheckpointError as error:
            assert key in str(error) and (is_needed or bit // 8 not in data[key])
            refused += 1
        else:
            assert_is_lora(state, 2)
            assert not is_needed, (key, bit)
    counted(flipped_bits=count, refused=refused, harmless=count - refused)
    assert refused > 0
