"""No changed bit of a stored checkpoint is ever loaded: it is refused, or it did no harm.

Method: two ranks save about 18 KiB, with a small block so that every tensor has several. One bit of
one object is flipped between the store and the reader; a load must raise an error of ours or give
exactly the saved bits. The default run flips every bit of the small objects and a seeded sample of
the data files', --soak every bit.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

import ckpt
from ckpt.errors import CheckpointError, Corrupt, LoadInterrupted
from ckpt.format.manifest import Manifest
from ckpt.format.manifest_codec import decode_manifest
from ckpt.loading.checkpoint import Checkpoint
from ckpt.loading.contents import LocatedCheckpoint
from ckpt.loading.load import LoadOptions, load_state
from ckpt.loading.plan import ReadPath
from ckpt.saving import plan, task
from ckpt.world.base import SoloWorld
from storage import ByteRange, Store, open_store
from storage.memory import MemoryStore
from storage.wrap import WrappedStore
from tests.conftest import Scale
from tests.e2e.job import Job, Sharded
from tests.results import Counted
from tests.thread_ranks import RanksFailed

pytestmark = pytest.mark.long

BLOCK_NBYTES = 256
KEYS = ["FORMAT", "log", "MANIFEST", "rank00000", "rank00001"]


class FlippedStore(WrappedStore):
    """`inner`, read with one bit changed: bit `bit` of object `key`."""

    def __init__(self, inner: Store, key: str, bit: int) -> None:
        super().__init__(inner)
        self.key, self.offset, self.mask = key, bit // 8, 1 << bit % 8

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        data = self.inner.get(key, byte_range)
        if key != self.key:
            return data
        changed = bytearray(data)
        self._flip(memoryview(changed), byte_range.start if byte_range else 0)
        return bytes(changed)

    def get_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        self.inner.get_into(key, start, buffers)
        for buffer in buffers if key == self.key else ():
            self._flip(buffer, start)
            start += len(buffer)

    def _flip(self, data: memoryview, start: int) -> None:
        if start <= self.offset < start + len(data):
            data[self.offset - start] ^= self.mask


def _full(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "rows": torch.randn(24, 64, generator=generator),
        "runs": torch.randn(26, 65, generator=generator),
        "double": torch.randn(250, generator=generator, dtype=torch.float64),
        "half": torch.randn(1201, generator=generator).bfloat16(),
        "flag": torch.tensor(True),
    }


def _state(seed: int, rank: int = 0, size: int = 1) -> dict[str, Any]:
    full = _full(seed)
    state: dict[str, Any] = dict(full)
    state["rows"] = Sharded(full["rows"], rank, size, dim=1)
    state["runs"] = Sharded(full["runs"], rank, size, dim=None)
    return {**state, "step": seed, "notes": {"lr": 0.1 * seed, "name": "x" * seed}}


def _same(a: Any, b: Any) -> bool:
    """Bit for bit, values and their types included."""
    if isinstance(a, Sharded):
        return _same(a.local.detach(), b.local.detach())
    if isinstance(a, torch.Tensor):
        bits = [t.detach().contiguous().flatten().view(torch.uint8) for t in (a, b)]
        return a.dtype == b.dtype and torch.equal(*bits)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    return type(a) is type(b) and bool(a == b)


class Saved(NamedTuple):
    store: Store
    keys: dict[str, str]
    nbytes: dict[str, int]
    manifest: Manifest


@pytest.fixture
def saved(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Saved:
    for module in (plan, task):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK_NBYTES)
    store = open_store(f"memory://{request.node.name}")
    Job(2, lambda rank: store).save(lambda rank: _state(3, rank, 2), step=3)
    nbytes = {info.key: info.nbytes for info in store.list("")}
    keys = {name: max(key for key in nbytes if name in key) for name in KEYS}
    assert 16_000 < sum(nbytes.values()) < 30_000, nbytes
    manifest = decode_manifest(store.get(keys["MANIFEST"]))
    return Saved(store, keys, nbytes, manifest)


def _outcome(store: Store, state: dict[str, Any], path: ReadPath | None = None) -> Exception | None:
    """What a load into `state` raised. A wrong kind of error, or wrong bits, fail the test."""
    options = LoadOptions(path=path or ReadPath())
    try:
        load_state(state, store=store, world=SoloWorld(), step=None, options=options)
    except CheckpointError as error:
        return error
    return None


def _expected_block(saved: Saved, key: str, offset: int) -> str | None:
    """What the error for a changed byte of a data file must say; None outside of all tensors."""
    chunks = saved.manifest.chunks
    for chunk in range(len(chunks)):
        name = saved.manifest.files[int(chunks.file[chunk])]
        start = int(chunks.byte_start[chunk])
        if key.endswith(name) and start <= offset < start + saved.manifest.chunk_nbytes(chunk):
            fqn = saved.manifest.fqns[saved.manifest.tensor_of(chunk)]
            return f"{key}: block {(offset - start) // BLOCK_NBYTES} of {fqn!r}"
    return None


@pytest.mark.parametrize("name", KEYS)
def test_every_flipped_bit_is_refused_or_harmless(
    name: str, saved: Saved, scale: Scale, rng: random.Random, counted: Counted
) -> None:
    key = saved.keys[name]
    bits = range(8 * saved.nbytes[key])
    sample = scale.count(800 if name.startswith("rank") else len(bits), len(bits))
    chosen = rng.sample(bits, sample)
    good, state = _state(3), _state(5)
    blank = {"step": 0, "notes": {"lr": 0.0, "name": ""}}
    refused = 0
    for bit in chosen:
        for leaf in state.values():
            tensor = leaf.local.detach() if isinstance(leaf, Sharded) else leaf
            if isinstance(tensor, torch.Tensor):
                tensor.zero_()
        state.update(blank)
        error = _outcome(FlippedStore(saved.store, key, bit), state)
        expected = _expected_block(saved, key, bit // 8)
        if error is None:
            assert expected is None
            assert _same(state, good), f"bit {bit} of {key} was loaded"
            continue
        refused += 1
        if name.startswith("rank"):
            # What lies between the tensors is nothing to a load, but for the checksums behind them.
            assert isinstance(error, LoadInterrupted)
            assert (expected or f"{key}: its checksums") in str(error)
        else:
            assert not isinstance(error, LoadInterrupted), f"bit {bit} of {key}: {error}"
            assert key in str(error)
    counted(flipped_bits=len(chosen), refused=refused, harmless=len(chosen) - refused)
    part = refused / len(chosen)
    assert part > (0.5 if name.startswith("rank") else 0.99), f"only {part:.0%} refused"


@pytest.mark.parametrize("path", [ReadPath(), ReadPath(gap_nbytes_max=0, request_nbytes_max=4096)])
def test_every_flipped_byte_of_a_table_in_a_file_is_refused(saved: Saved, path: ReadPath) -> None:
    """Fetched with the blocks before it, and by a request of its own; also where the checksum that
    was changed is that of no block.
    """
    for file, name in enumerate(saved.manifest.files):
        (key,) = (k for k in saved.nbytes if k.endswith(name))
        stop = saved.nbytes[key]
        start = stop - int(saved.manifest.seals.nbytes[file])
        for offset in range(start, stop, 3):
            flipped = FlippedStore(saved.store, key, 8 * offset + offset % 8)
            error = _outcome(flipped, _state(5), path)
            assert isinstance(error, LoadInterrupted), f"byte {offset} of {key}"
            assert f"{key}: its checksums ({stop - start} bytes) are not those" in str(error)


def test_every_flipped_bit_of_a_seal_is_refused(saved: Saved) -> None:
    """By the digest of the manifest; under a right one, where the manifest was made by another, by
    the tables.
    """
    data = saved.store.get(saved.keys["MANIFEST"])
    first = data.index(saved.manifest.seals.digests.tobytes())
    for offset in range(first, first + saved.manifest.seals.digests.nbytes):
        error = _outcome(FlippedStore(saved.store, saved.keys["MANIFEST"], 8 * offset), _state(5))
        assert error is not None and not isinstance(error, LoadInterrupted)
        assert saved.keys["MANIFEST"] in str(error)
    prefix = saved.keys["MANIFEST"].removesuffix("MANIFEST")
    seals = saved.manifest.seals
    for file, name in enumerate(saved.manifest.files):
        digests = seals.digests.copy()
        digests[file, 7] ^= 1
        changed = replace(saved.manifest, seals=seals._replace(digests=digests))
        opened = Checkpoint(saved.store, LocatedCheckpoint(prefix, changed, None))
        with pytest.raises(Corrupt, match=f"{name}: its checksums"):
            for fqn in opened:
                opened.read(fqn)


def test_every_byte_of_every_tensor_is_covered_by_a_checksum(saved: Saved) -> None:
    """The complement of the sample: one bit in each block of each chunk, none is harmless."""
    chunks = saved.manifest.chunks
    count = 0
    for chunk in range(len(chunks)):
        name = saved.manifest.files[int(chunks.file[chunk])]
        (key,) = (k for k in saved.nbytes if k.endswith(name))
        start, nbytes = int(chunks.byte_start[chunk]), saved.manifest.chunk_nbytes(chunk)
        for offset in {*range(start, start + nbytes, BLOCK_NBYTES), start + nbytes - 1}:
            error = _outcome(FlippedStore(saved.store, key, 8 * offset + 7), _state(5))
            assert isinstance(error, LoadInterrupted)
            assert str(_expected_block(saved, key, offset)) in str(error)
            count += 1
    assert count > 50


def test_every_block_is_checked_by_loads_of_parts_and_of_shared_blocks(saved: Saved) -> None:
    """Three ranks load what two have saved: each needs parts of chunks, and all need replicas."""
    chunks = saved.manifest.chunks
    size = 3
    for chunk in range(len(chunks)):
        name = saved.manifest.files[int(chunks.file[chunk])]
        (key,) = (k for k in saved.nbytes if k.endswith(name))
        start, nbytes = int(chunks.byte_start[chunk]), saved.manifest.chunk_nbytes(chunk)
        for offset in range(start, start + nbytes, BLOCK_NBYTES):
            flipped = FlippedStore(saved.store, key, 8 * offset + 3)
            states = [_state(5, rank, size) for rank in range(size)]
            with pytest.raises(RanksFailed) as caught:
                Job(size, lambda rank, s=flipped: s).load(states.__getitem__)  # type: ignore[misc]
            errors = list(caught.value.errors.values())
            assert {type(error) for error in errors} == {LoadInterrupted} and len(errors) == size
            assert str(_expected_block(saved, key, offset)) in str(errors[0])


def test_every_block_is_checked_that_is_read_beside_its_target() -> None:
    """Memory of other strides is filled by a copy of what was read."""
    store = MemoryStore()
    saved = torch.arange(300 * 300.0).reshape(300, 300)
    ckpt.save({"x": saved}, store, step=1, telemetry=False)
    (key,) = [info.key for info in store.list("steps/") if info.key.endswith(".safetensors")]
    start = store.get(key).index(saved.numpy().tobytes())
    loaded = torch.zeros(300, 300).t()
    ckpt.load({"x": loaded}, store)
    assert torch.equal(loaded, saved)
    for offset in range(start, start + saved.nbytes, 64 << 10):
        with pytest.raises(LoadInterrupted, match="does not match its checksum"):
            ckpt.load({"x": loaded}, FlippedStore(store, key, 8 * offset + 3))
