"""From opening a checkpoint behind a network to its first tensor byte: three rounds of requests.

Method: requests of one round wait at the store until all of them are there, so that a load which
sends one of them after another's answer never ends. Nothing depends on which comes first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch

import ckpt
from storage import ByteRange, ObjectInfo, Store
from storage.memory import MemoryStore
from storage.wrap import WrappedStore

MIB = 1 << 20


class Rounds(WrappedStore):
    """Far away: requests of a round are answered once all of them have come."""

    def __init__(self, inner: Store, rounds: Sequence[Sequence[str]]) -> None:
        super().__init__(inner)
        self.part_nbytes_min = 5 * MIB
        self.requests: list[str] = []
        self._barriers: dict[str, threading.Barrier] = {}
        for together in rounds:
            barrier = threading.Barrier(len(together), timeout=60)
            self._barriers |= dict.fromkeys(together, barrier)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        self._arrive(f"get {key}")
        return self.inner.get(key, byte_range)

    def get_bounded(self, key: str, nbytes_max: int) -> bytes:
        self._arrive(f"get {key}")
        return self.inner.get_bounded(key, nbytes_max)

    def get_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        self._arrive(f"read {key}")
        self.inner.get_into(key, start, buffers)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        self._arrive(f"list {prefix}")
        return self.inner.list(prefix, after=after)

    def info(self, key: str) -> ObjectInfo:
        self._arrive(f"info {key}")
        return self.inner.info(key)

    def _arrive(self, request: str) -> None:
        self.requests.append(request)
        if (barrier := self._barriers.get(request)) is not None:
            barrier.wait()


def test_a_load_sends_three_rounds_before_the_first_tensor() -> None:
    """The log's listing and FORMAT; the newest record, the one before it, and a look behind it; the
    manifest, and a listing of what is newer. Then tensor bytes come.
    """
    inner = MemoryStore()
    state = {"weight": torch.arange(8.0)}
    for step in range(3):
        ckpt.save(state, inner, step=step)
    (data,) = [i.key for i in inner.list("steps/00000002") if i.key.endswith(".safetensors")]
    (manifest,) = [i.key for i in inner.list("steps/00000002") if i.key.endswith("MANIFEST")]
    last, before, behind = sorted(i.key for i in inner.list("log/"))[-1], "", ""
    slot = int(last.rsplit("/", 1)[1])
    before, behind = (last.replace(f"{slot:d}", f"{slot + n:d}") for n in (-1, 1))
    rounds = [
        ["list log/", "get FORMAT"],
        [f"get {last}", f"get {before}", f"info {behind}"],
        [f"get {manifest}", "list steps/"],
        [f"read {data}"],
    ]
    far = Rounds(inner, rounds)
    state["weight"].zero_()
    ckpt.load(state, far)
    assert torch.equal(state["weight"], torch.arange(8.0))
    assert sorted(far.requests) == sorted(request for one in rounds for request in one)
