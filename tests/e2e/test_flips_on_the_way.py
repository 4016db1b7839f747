"""A byte that changes on its way from the store is requested once more, and does no harm.

Method: a store that flips one byte of the n-th answer it gives of a step's objects, for every n of
an operation. Each ends as it does without flips. That damage in the store still ends in Corrupt is
shown in `test_flips.py`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import ckpt
import ckpt.commit.live
from ckpt.commit.log import Log
from ckpt.commit.names import SEGMENTS_PREFIX, record_key
from ckpt.errors import Corrupt
from storage import ByteRange, Store, open_store
from storage.memory import MemoryBucket, MemoryStore
from storage.retry import NO_RETRY

KEY = os.urandom(32)


class FlippingStore(MemoryStore):
    """Flips the first byte of the answer number `nth`, counted from 1, about a step, or what else
    has this prefix.
    """

    def __init__(self, bucket: MemoryBucket, nth: int = 0, prefix: str = "steps/") -> None:
        super().__init__(bucket)
        self.nth, self.count, self.prefix = nth, 0, prefix

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        data = super().get(key, byte_range)
        return bytes([data[0] ^ 1]) + data[1:] if data and self._strikes(key) else data

    def get_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        super().get_into(key, start, buffers)
        if self._strikes(key):
            buffers[-1][0] ^= 1

    def _strikes(self, key: str) -> bool:
        self.count += key.startswith(self.prefix)
        return key.startswith(self.prefix) and self.count == self.nth


def _state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(300, generator=generator) for name in ("a", "b")}


def _load(store: MemoryStore) -> None:
    state = _state(2)
    ckpt.load(state, store)
    assert all(torch.equal(state[name], _state(1)[name]) for name in state)


def _open(store: MemoryStore) -> None:
    with ckpt.open(store) as checkpoint:
        assert torch.equal(checkpoint["b"], _state(1)["b"])


def _verify(store: MemoryStore) -> None:
    assert ckpt.verify(store).ok


def _copy(store: MemoryStore) -> None:
    there = MemoryStore(MemoryBucket())
    ckpt.copy(store, there, root=True)
    _load(there)


def _reshard(store: MemoryStore) -> None:
    there = MemoryStore(MemoryBucket())
    ckpt.reshard(store, there, ranks=2)
    _load(there)


@pytest.fixture
def bucket() -> MemoryBucket:
    bucket = MemoryBucket()
    ckpt.save(_state(1), MemoryStore(bucket), step=1, dedup=True)
    return bucket


@pytest.mark.parametrize("operation", [_load, _open, _verify, _copy, _reshard])
def test_a_byte_flipped_on_its_way_is_read_again(
    bucket: MemoryBucket,
    operation: Callable[[MemoryStore], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    usual = FlippingStore(bucket)
    operation(usual)
    assert usual.count > 1
    for nth in range(1, usual.count + 1):
        caplog.clear()
        store = FlippingStore(bucket, nth)
        with caplog.at_level(logging.WARNING):
            operation(store)
        assert store.count > usual.count, "a flip that nobody noticed"


def _save(store: MemoryStore) -> None:
    state = _state(2)
    ckpt.load(state, store)
    ckpt.save(_state(3), store, step=2)
    with ckpt.open(store) as checkpoint:
        assert checkpoint.step == 2 and torch.equal(checkpoint["b"], _state(3)["b"])


def _follow(store: MemoryStore) -> None:
    with ckpt.follow(["b"], store) as follower:
        assert follower.poll() is not None
        follower.swap()
        assert follower.poll() is None
        assert torch.equal(follower.tensors["b"], _state(1)["b"])


def _pin(store: MemoryStore) -> None:
    ckpt.pin(store, 1)
    assert ckpt.history(store)[0].kind == "PIN"


def _train(store: MemoryStore) -> None:
    state = _state(2)
    keep = ckpt.KeepLatest(1)
    with ckpt.Checkpointer(state, store, save=ckpt.EverySteps(1), keep=keep) as training:
        restored = training.restore()
        assert restored is not None and restored.step == 1
        for step in (2, 3):
            training.step(step)
            training.wait()
    assert not training.failures
    assert [info.step for info in ckpt.list_steps(store)] == [3]


@pytest.mark.parametrize("prefix", ["log/0", "FORMAT"])
@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("operation", [_load, _verify, _copy, _save, _train, _follow, _pin])
def test_a_record_or_format_flipped_on_its_way_is_read_again(
    operation: Callable[[Any], None], prefix: str, is_encrypted: bool
) -> None:
    def opened(nth: int = 0) -> tuple[FlippingStore, Store]:
        """A root as it is before the operation."""
        bucket = MemoryBucket()
        options: dict[str, Any] = {"encryption_key": KEY} if is_encrypted else {}
        for step in (0, 1):
            ckpt.save(_state(step), open_store(MemoryStore(bucket), **options), step=step)
        store = FlippingStore(bucket, nth, prefix)
        return store, open_store(store, retry=NO_RETRY, **options)

    store, root = opened()
    operation(root)
    usual = store.count
    assert usual > 0
    for nth in range(1, usual + 1):
        store, root = opened(nth)
        operation(root)
        assert store.count >= usual


def test_a_record_that_is_damaged_is_read_twice() -> None:
    bucket = MemoryBucket()
    ckpt.save(_state(1), MemoryStore(bucket), step=1)
    store = FlippingStore(bucket, prefix="log/0")
    data = store.get(record_key(1))
    store.delete(record_key(1))
    store.put_if_absent(record_key(1), data[:-1] + bytes([data[-1] ^ 1]))
    store.count = 0
    with pytest.raises(Corrupt, match="checksum is"):
        Log(store).record(1)
    assert store.count == 2


def test_a_segment_flipped_on_its_way_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that are folded as early as they can be."""
    monkeypatch.setattr(ckpt.commit.live, "RECORD_NBYTES", 100)
    bucket = MemoryBucket()
    for step in range(20):
        ckpt.save(_state(step), MemoryStore(bucket), step=step)
    store = FlippingStore(bucket, 1, SEGMENTS_PREFIX)
    assert [info.step for info in ckpt.list_steps(store)] == list(range(20))
    assert store.count > 1
