"""Any run of any tensor is read right, however its parts lie in files.

Method: random tensors are cut into random boxes and runs, stored with random strides and gaps, and
random runs of elements are read with tiny buffers, so that every way of copying is taken.
"""

from __future__ import annotations

import io
import random
import zipfile
from pathlib import Path

import pytest
import torch

import ckpt
import ckpt.convert.export
import ckpt.convert.sources.source
import ckpt.convert.targets.delivery
from ckpt.convert.sources.blobs import Blob, open_blobs
from ckpt.convert.sources.budget import MemoryBudget
from ckpt.convert.sources.source import (
    Chunk,
    FileSource,
    ReadRequest,
    SourceContents,
    SourceTensor,
    check_chunks,
)
from ckpt.errors import Corrupt
from ckpt.layout.region import Box, Shape, Span, span_of
from storage import Store, open_store
from tests.conftest import Scale
from tests.stores import CountingStore


def boxes(rng: random.Random, box: Box) -> list[Box]:
    """`box` cut at random, into one to a few boxes."""
    if not box.shape or rng.random() < 0.3 or max(box.shape) < 2:
        return [box]
    dim = rng.choice([d for d, n in enumerate(box.shape) if n > 1])
    cut = rng.randrange(1, box.shape[dim])

    def part(start: int, size: int) -> Box:
        offset = (*box.offset[:dim], box.offset[dim] + start, *box.offset[dim + 1 :])
        return Box(offset, (*box.shape[:dim], size, *box.shape[dim + 1 :]))

    return [*boxes(rng, part(0, cut)), *boxes(rng, part(cut, box.shape[dim] - cut))]


class Building:
    """A file in the making, and the chunks that lie in it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.data = bytearray()

    def add(self, tensor: torch.Tensor, region: Box | Span) -> Chunk:
        self.data += bytes(8 * self.rng.randrange(5))
        start = len(self.data)
        if isinstance(region, Span):
            part = tensor.view(-1)[region.start : region.stop]
        else:
            part = tensor[tuple(slice(o, o + n) for o, n in zip(*region, strict=True))]
        stride: Shape | None = None
        if isinstance(region, Box) and part.dim() > 1 and self.rng.random() < 0.5:
            order = self.rng.sample(range(part.dim()), part.dim())
            stored = part.permute(order).contiguous()
            steps = dict(zip(order, stored.stride(), strict=True))
            stride = tuple(steps[dim] for dim in range(part.dim()))
            part = stored
        elif isinstance(region, Box) and (run := span_of(region, tuple(tensor.shape))) is not None:
            region = run
        flat = torch.empty(part.numel(), dtype=part.dtype).copy_(part.reshape(-1))
        self.data += flat.view(torch.uint8).numpy().tobytes()
        return Chunk(region, "file", start, stride)


def store_of(data: bytes, name: str) -> Store:
    store = open_store(f"memory://{name}")
    store.put_if_absent("file", bytes(data))
    return store


def test_random_runs_of_random_layouts(
    rng: random.Random, scale: Scale, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for number in range(scale.count(150, 5000)):
        monkeypatch.setattr(
            ckpt.convert.sources.source, "SCRATCH_NBYTES", rng.choice([64, 512, 1 << 20])
        )
        shape = tuple(rng.randrange(1, 9) for _ in range(rng.randrange(4)))
        dtype = rng.choice([torch.float32, torch.int64, torch.uint8, torch.bfloat16])
        tensor = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
        building = Building(rng)
        if rng.random() < 0.3 and tensor.numel() > 1:
            cut = rng.randrange(1, tensor.numel())
            regions: list[Box | Span] = [Span(0, cut), Span(cut, tensor.numel())]
        else:
            regions = list(boxes(rng, Box((0,) * len(shape), shape)))
        rng.shuffle(regions)
        chunks = [building.add(tensor, region) for region in regions]
        info = SourceTensor("t", str(dtype).removeprefix("torch."), shape)
        check_chunks(info, chunks, {"file": len(building.data)})
        store = store_of(building.data, f"{tmp_path.name}-{number}")
        source = FileSource(store, "test", SourceContents({"t": info}), {"t": chunks}, 0)
        assert torch.equal(source.read("t"), tensor)
        for _ in range(3):
            low = rng.randrange(tensor.numel())
            high = rng.randrange(low, tensor.numel()) + 1
            target = torch.empty(high - low, dtype=dtype)
            source.fill([ReadRequest("t", Span(low, high), target)])
            assert torch.equal(target, tensor.view(-1)[low:high])


def test_neighbours_are_read_together(tmp_path: Path) -> None:
    """A thousand small tensors of one file are a few requests."""
    building = Building(random.Random(1))
    tensors = {f"t{i:04}": torch.full((20,), float(i)) for i in range(1000)}
    infos = {name: SourceTensor(name, "float32", (20,)) for name in tensors}
    chunks = {name: [building.add(t, Span(0, 20))] for name, t in tensors.items()}
    store = CountingStore(store_of(building.data, tmp_path.name))
    source = FileSource(store, "test", SourceContents(infos), chunks, 0)
    targets = {name: torch.empty(20) for name in tensors}
    source.fill([ReadRequest(name, Span(0, 20), target) for name, target in targets.items()])
    assert all(torch.equal(targets[name], tensors[name]) for name in tensors)
    assert store.stats.requests_total <= 3


def test_neighbours_in_two_files_are_read_apart(tmp_path: Path) -> None:
    """One begins in its file where the other ends in the file before."""
    one, two = torch.arange(20.0), torch.arange(20.0, 40.0)
    store = store_of(one.numpy().tobytes(), tmp_path.name)
    store.put_if_absent("other", bytes(80) + two.numpy().tobytes())
    chunks = {"a": [Chunk(Span(0, 20), "file", 0)], "b": [Chunk(Span(0, 20), "other", 80)]}
    infos = {name: SourceTensor(name, "float32", (20,)) for name in chunks}
    source = FileSource(store, "test", SourceContents(infos), chunks, 0)
    targets = {name: torch.empty(20) for name in chunks}
    source.fill([ReadRequest(name, Span(0, 20), target) for name, target in targets.items()])
    assert torch.equal(targets["a"], one) and torch.equal(targets["b"], two)


@pytest.mark.parametrize("numel", [8, 10_000])
def test_blobs_that_lie_together_are_opened_together(tmp_path: Path, numel: int) -> None:
    """Whole where they are small, else the tail of one with the head of the next."""
    data, blobs = bytearray(), []
    for number in range(20):
        out = io.BytesIO()
        torch.save(torch.full((numel,), float(number)), out)
        blobs.append(Blob("file", len(data), len(data) + len(out.getvalue())))
        data += out.getvalue()
    store = CountingStore(store_of(data, tmp_path.name))
    opened = dict(open_blobs(store, blobs, MemoryBudget()))
    assert store.stats.requests_total <= (1 if numel == 8 else len(blobs) + 1)
    for number, blob in enumerate(blobs):
        start = opened[blob].start_of(opened[blob].tree)
        assert torch.frombuffer(data, dtype=torch.float32, count=1, offset=start) == number


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([], "regions have 0 of 12"),
        ([Chunk(Span(0, 11), "file", 0)], "regions have 11 of 12"),
        ([Chunk(Span(0, 12), "file", 0), Chunk(Span(0, 12), "file", 0)], "overlap"),
        ([Chunk(Span(0, 12), "file", 1)], "is said to be in bytes 1 to 49"),
        ([Chunk(Span(0, 12), "file", -4)], "bytes -4"),
        ([Chunk(Box((0, 0), (3, 4)), "file", 0, (5, 1))], "bytes 0 to 56"),
        ([Chunk(Box((0, 1), (3, 4)), "file", 0)], "not inside"),
    ],
)
def test_layouts_that_cannot_be_are_refused(chunks: list[Chunk], words: str) -> None:
    with pytest.raises(Corrupt, match=words):
        check_chunks(SourceTensor("t", "float32", (3, 4)), chunks, {"file": 48})


def test_checksums_of_torch_files_are_right_when_parts_are_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ckpt.convert.export, "PART_NBYTES", 4096)
    state = {f"t{i}": torch.randn(i * 977 + 1) for i in range(12)}
    torch.save(state, tmp_path / "in.pt")
    ckpt.export(str(tmp_path / "in.pt"), str(tmp_path / "out.pt"), threads=4)
    with zipfile.ZipFile(tmp_path / "out.pt") as file:
        assert file.testzip() is None and len(file.namelist()) == 15


def test_verify_finds_what_is_not_as_in_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that changes a byte is found out, and nothing is left of its file."""
    torch.save({"a": torch.arange(100.0), "b": torch.ones(3)}, tmp_path / "in.pt")
    whole = ckpt.convert.targets.delivery.write_file

    def changed(writing: object, file: object, meter: object) -> None:
        whole(writing, file, meter)  # type: ignore[arg-type]
        path = tmp_path / "out" / "m.safetensors"
        data = bytearray(path.read_bytes())
        data[-20] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(ckpt.convert.targets.delivery, "write_file", changed)
    with pytest.raises(Corrupt, match=r"differ from those of .*: a in m\.safetensors"):
        ckpt.export(str(tmp_path / "in.pt"), str(tmp_path / "out" / "m.safetensors"), verify=True)
    assert not list((tmp_path / "out").iterdir())
