"""Thousands of small tensors take short ways: packed by one copy when saved, read many at a time.

Each test saves and loads one process's state that drives one of these ways, or the way around it,
and compares every tensor bit for bit.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, repeat
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.errors import Mismatch
from ckpt.format.datafile import BLOCK_BYTES, StoredChunk, file_entries
from ckpt.layout.plain import Ranks
from ckpt.layout.region import Span
from ckpt.loading import reader
from ckpt.loading.contents import find_checkpoint
from ckpt.loading.load import catalog_of
from ckpt.loading.plan import plan_reads
from ckpt.saving.image import WritePath, copy_order, plan_files
from ckpt.saving.plan import Source
from ckpt.state.bind import bind_state
from ckpt.state.binding import _marked
from storage.local import LocalStore
from tests.counting import python_calls


def _small(count: int = 40) -> dict[str, torch.Tensor]:
    """Small tensors of several dtypes and shapes, some of them strided, between larger ones."""
    torch.manual_seed(0)
    state: dict[str, torch.Tensor] = {}
    for index in range(count):
        state[f"a{index:03d}"] = torch.randn(7, 3)
        state[f"b{index:03d}"] = torch.randn(5, 9).t()
        state[f"c{index:03d}"] = torch.randint(0, 100, (11,), dtype=torch.int64)[::2]
        state[f"d{index:03d}"] = torch.tensor(index)
        state[f"e{index:03d}"] = torch.randn(3, dtype=torch.bfloat16)
        state[f"f{index:03d}"] = torch.randn(4, dtype=torch.complex64).conj()
    state["a020.large"] = torch.randn(50_000)
    state["empty"] = torch.empty(0, 3)
    return state


def _blank(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {fqn: torch.zeros_like(tensor).resolve_conj() for fqn, tensor in state.items()}


@pytest.mark.parametrize("io", ["buffered", "direct", "auto"])
@pytest.mark.parametrize("count", [1, 40, 400])
def test_small_tensors_of_any_kind_come_back(tmp_path: Path, io: str, count: int) -> None:
    state = _small(count)
    for step in range(2):  # the second save takes the buffers of the first
        ckpt.save(state, str(tmp_path / "run"), step=step, io=io)  # type: ignore[arg-type]
    target = _blank(state)
    ckpt.load(target, str(tmp_path / "run"))
    for fqn, tensor in state.items():
        assert torch.equal(target[fqn], tensor), fqn


@pytest.mark.parametrize("numel", [256, 1 << 14, (1 << 14) + 1, 1 << 18])
def test_tensors_that_fill_a_mebibyte_come_back(tmp_path: Path, numel: int) -> None:
    state = {f"{index:04d}": torch.randn(numel) for index in range((5 << 18) // numel)}
    target = _blank(state)
    for step, save in enumerate((ckpt.save, lambda *a, **b: ckpt.async_save(*a, **b).result())):
        save(state, str(tmp_path / "run"), step=step)
        ckpt.load(target, str(tmp_path / "run"))
        assert all(map(torch.equal, target.values(), state.values()))
        for tensor in state.values():
            tensor.neg_()


@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize(
    "other", [torch.zeros(9, 7), torch.zeros(63), torch.zeros(7, 9, dtype=torch.int32)]
)
def test_one_that_does_not_fit_refuses_all(tmp_path: Path, other: torch.Tensor, count: int) -> None:
    state = {f"{index:02d}": torch.ones(7, 9) for index in range(count)}
    ckpt.save(state, str(tmp_path / "run"), step=0)
    target = {**_blank(state), "00": other}
    with pytest.raises(Mismatch, match=r"^(.|\n)*00: checkpoint has "):
        ckpt.load(target, str(tmp_path / "run"))
    assert not any(map(torch.any, target.values()))


def test_a_file_of_one_part_is_written_by_the_thread_that_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    url = str(tmp_path / "run")
    for step, mib in enumerate((5, 5, 20)):
        monkeypatch.setattr(threading.Thread, "start", start if step == 0 else noted)
        ckpt.save({"x": torch.zeros(mib << 18)}, url, step=step, io="direct")
        is_of_parts = mib == 20
        assert any(name.startswith("ckpt-write") for name in started) == is_of_parts


def test_loads_of_small_tensors_share_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fresh memory would take longer than reading; a forked child must not have its parent's."""
    state = _small()
    ckpt.save(state, tmp_path, step=0, io="buffered")
    ckpt.load(_blank(state), tmp_path, io="buffered")
    made = []
    monkeypatch.setattr(
        reader, "staging_buffer", lambda nbytes, **how: made.append(nbytes) or bytearray(nbytes)
    )
    for _ in range(2):
        ckpt.load(_blank(state), tmp_path, io="buffered")
    assert not made
    if not (pid := os.fork()):
        with suppress(BaseException):
            ckpt.load(_blank(state), tmp_path, io="buffered")
        os._exit(len(made))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def _calls_per_tensor(url: str, measured: Callable[[dict[str, torch.Tensor], str], object]) -> int:
    """How many calls each further tensor of a state costs, after the state was saved twice."""
    _marked.clear()  # states that earlier tests left half-loaded are looked for in each load
    calls = []
    for count in (500, 1500):
        state = {f"layer{index:04d}.weight": torch.randn(16) for index in range(count)}
        root = f"{url}/{count}"
        for step in range(2):
            ckpt.save(state, root, step=step, io="buffered")
        # The least of three: first calls import, and other threads may let garbage be collected.
        calls.append(min(python_calls(partial(measured, state, root)) for _ in range(3)))
    return round((calls[1] - calls[0]) / 1000)


def test_a_load_makes_few_calls_per_tensor(tmp_path: Path) -> None:
    assert _calls_per_tensor(str(tmp_path), ckpt.load) <= 10


def test_columns_of_whole_tensors_are_planned_as_their_holdings_are(tmp_path: Path) -> None:
    state = _small()
    url = str(tmp_path / "run")
    ckpt.save(state, url, step=0)
    tied = torch.zeros(7, 3)
    target = {**_blank(state), "a007": tied, "tied": tied, "again": torch.zeros(7, 3)}
    target["b003"] = torch.zeros(9, 5, requires_grad=True)
    target["c004"] = torch.zeros(13, dtype=torch.int64)[1::2]
    manifest = find_checkpoint(LocalStore(url)).manifest
    names = {"tied": "a007", "again": "a001"}
    binding = bind_state(target, catalog_of(manifest), Ranks.alone(), rename=names)
    columns = plan_reads(manifest, binding.others, binding.plain)
    rows = plan_reads(manifest, binding.holdings)
    assert len(columns.packed) > 3 * 40
    assert columns[:2] == rows[:2]


def test_a_small_tensor_that_is_wanted_twice_fills_both(tmp_path: Path) -> None:
    state = _small()
    ckpt.save(state, str(tmp_path / "run"), step=0)
    target = {**_blank(state), "again": torch.zeros(7, 3)}
    names = {"again": "a007"}
    ckpt.load(target, str(tmp_path / "run"), rename=names)
    assert torch.equal(target["again"], state["a007"])
    assert torch.equal(target["a007"], state["a007"])


@pytest.mark.parametrize("plain_first", [True, False])
def test_a_small_tensor_that_is_wanted_strided_and_plain_fills_both(
    tmp_path: Path, plain_first: bool
) -> None:
    state = _small()
    ckpt.save(state, str(tmp_path / "run"), step=0)
    strided, plain = torch.zeros(3, 7).t(), torch.zeros(7, 3)
    both = [plain, strided] if plain_first else [strided, plain]
    target = {**_blank(state), "a007": both[0], "again": both[1]}
    ckpt.load(target, str(tmp_path / "run"), rename={"again": "a007"})
    assert torch.equal(plain, state["a007"])
    assert torch.equal(strided, state["a007"])


@pytest.mark.parametrize("size", [6, 600])
def test_tensors_of_inference_mode_come_back_in_plain_and_strided_memory(
    tmp_path: Path, size: int
) -> None:
    with torch.inference_mode():
        state = {"plain": torch.randn(size, 4), "strided": torch.randn(size, 4)[:, ::2]}
        target = {"plain": torch.zeros(size, 4), "strided": torch.zeros(size, 4)[:, ::2]}
    ckpt.save(state, str(tmp_path / "run"), step=0)
    ckpt.load(target, str(tmp_path / "run"))
    assert all(torch.equal(target[fqn], tensor) for fqn, tensor in state.items())


def test_a_changed_bit_in_a_small_tensor_is_found_and_named(tmp_path: Path) -> None:
    state = _small()
    report = ckpt.save(state, str(tmp_path / "run"), step=0)
    file = next(Path(report.path).glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    offset = data.find(state["a013"].numpy().tobytes())
    data[offset] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)
    with pytest.raises(ckpt.errors.LoadInterrupted, match="a013"):
        ckpt.load(_blank(state), str(tmp_path / "run"))


def test_small_tensors_between_large_ones_are_read_by_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a rank does that needs all step counters of another rank's file, and no more of it."""
    moments = {f"p{index:03d}.exp_avg": torch.randn(1 << 14) for index in range(100)}
    steps = {f"p{index:03d}.step": torch.tensor(float(index)) for index in range(100)}
    url = str(tmp_path / "run")
    ckpt.save(moments | steps, url, step=0)
    requests = []
    get_into = LocalStore.get_into

    def counted(store: LocalStore, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        requests.append((key, sum(buffer.nbytes for buffer in buffers)))
        get_into(store, key, start, buffers)

    monkeypatch.setattr(LocalStore, "get_into", counted)
    target = {fqn: torch.zeros(()) for fqn in steps}
    ckpt.load(target, url, strict=False)
    assert all(torch.equal(target[fqn], steps[fqn]) for fqn in steps)
    # With the values and the checksums of all 200 behind them.
    (nbytes,) = [nbytes for key, nbytes in requests if key.endswith(".safetensors")]
    assert nbytes < 400 + 4 * 200 + 100


@pytest.mark.parametrize("seed", range(20))
def test_ranges_of_many_are_split_by_when_they_are_copied(seed: int) -> None:
    """A save in the background copies what an optimizer changes first: each byte once, in place."""
    draw = random.Random(seed)
    sizes = [draw.choice((1, 100, 1 << 10, 1 << 16, 3 << 19)) for _ in range(draw.randrange(1, 90))]
    chunks = [
        StoredChunk(f"{number:03d}", "uint8", (size,), Span(0, size), size, 0)
        for number, size in enumerate(sizes)
    ]
    sources = [Source(chunk, torch.empty(0), 0, 1) for chunk in chunks]
    entries = [file_entries(chunks, BLOCK_BYTES)]
    plans = plan_files(entries, [4096], WritePath(part_nbytes=2 << 20), 1)
    first = {number for number in range(len(sizes)) if draw.random() < 0.5}
    order = copy_order(plans, sources, first)
    for ranges, is_first in ((order.first, True), (order.later, False)):
        assert all((one.source in first) is is_first for part in ranges for one in part)
        assert all(one.run == 1 for part in ranges for one in part)
    whole = copy_order(plans, sources, ())
    for parts in (map(sum, zip(order.first, order.later, strict=True), repeat(())), whole.later):
        place, copied = 4096, [0] * len(sizes)
        for number, part in enumerate(parts):
            every = chain(*[one.each(sources) for one in part])
            for source, start, stop, offset, _ in sorted(every, key=lambda one: one.offset):
                assert number * plans[0].part_nbytes + offset == place
                assert start == copied[source]
                place, copied[source] = place + stop - start, stop
        assert copied == sizes
