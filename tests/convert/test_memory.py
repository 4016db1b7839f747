"""An import takes at most 64 MiB of memory beside the bytes of tensors that are in the file.

Method: peak resident memory of a forked child for each file, above what it had after the import of
a tiny file. Honest files of many shapes are read or refused by name; crafted ones, from 500 bytes
to 20 MB, are refused. Soak runs take every word and every size.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.cli import main
from ckpt.convert.sources.blobs import ZipEntry, _tensor_nbytes
from ckpt.convert.sources.budget import (
    FIXED_NBYTES,
    MEMORY_NBYTES_MAX,
    Account,
    MemoryBudget,
)
from ckpt.convert.sources.opening import SourceOptions, open_source
from ckpt.convert.sources.pickles import read_pickle
from ckpt.errors import UnsupportedFormat
from tests.conftest import Scale

MIB = 1 << 20
SIZES = (500, 100_000, 1_200_000, 5_000_000, 20_000_000)

# Forks a child for each file, whose peak is above that of nothing but a tiny import.
MEASURE = """
import gc, json, os, sys, ckpt
from ckpt.errors import CheckpointError
def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(field))
def measure(path, root):
    ckpt.import_checkpoint(sys.argv[1], root + "-warm")
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status("VmRSS")
    try:
        ckpt.import_checkpoint(path, root)
        outcome = "read"
    except CheckpointError as error:
        outcome = f"{type(error).__name__}: {error}"[-1000:]
    return status("VmHWM") - before, outcome
ckpt.import_checkpoint(sys.argv[1], sys.argv[1] + "-first")
for line in sys.stdin:
    path = line[:-1]
    ours, theirs = os.pipe()
    if os.fork() == 0:
        try:
            os.write(theirs, json.dumps(measure(path, path + "-root")).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as answer:
        print(answer.read() or '[-1, "died"]', flush=True)
    os.wait()
"""

Measured = Callable[[list[Path]], list[tuple[int, str]]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    """A function: peak memory of an import of each file, in bytes, and what came of it.

    One process forks for all tests: it costs more to start than most imports.
    """
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("peak memory cannot be reset here")
    tiny = tmp_path_factory.mktemp("tiny") / "tiny.pt"
    torch.save({"w": torch.ones(2), "n": [1, {"a": 2}]}, tiny)
    with subprocess.Popen(
        [sys.executable, "-c", MEASURE, str(tiny)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        to, answers = process.stdin, process.stdout
        assert to is not None and answers is not None

        def measure(path: Path) -> tuple[int, str]:
            to.write(f"{path}\n")
            to.flush()
            peak, outcome = json.loads(answers.readline())
            return int(peak), str(outcome)

        yield lambda paths: [measure(path) for path in paths]


def put(path: Path, program: bytes, *records: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", program)
        for number, record in enumerate(records):
            file.writestr(f"archive/data/{number}", record)
    return path


# --- honest files ---


def _records(count: int) -> list[Any]:
    return [{"a": n, "b": n * 1.5, "c": f"record {n}"} for n in range(count)]


def _tensors(count: int, numel: int) -> dict[str, Any]:
    return {f"model.layers.{n}.weight": torch.zeros(numel) for n in range(count)}


HONEST: dict[str, Callable[[], Any]] = {
    "200 tensors": lambda: _tensors(200, 4096),
    "1,000 tiny tensors": lambda: _tensors(1000, 1),
    "strided": lambda: {"w": torch.zeros(2048, 2048).t()},
    "expanded": lambda: {"w": torch.zeros(1).expand(15 << 20)},
    "records": lambda: {"x": _records(8_000)},
    "text": lambda: {"x": "x" * (4 << 20), "y": "\xe4" * 100_000, "z": b"z" * 1_000_000},
}
HONEST_SOAK: dict[str, Callable[[], Any]] = {
    "1,000 tensors": lambda: _tensors(1000, 4096),
    "8,000 tiny tensors": lambda: _tensors(8000, 1),
    "40,000 records": lambda: {"x": _records(40_000)},
    "numbers": lambda: {"x": list(range(1000, 300_000))},
    "100,000 tensors": lambda: _tensors(100_000, 4096),
    "100,000 tiny tensors": lambda: _tensors(100_000, 1),
    "many records": lambda: {"x": _records(400_000)},
    "many numbers": lambda: {"x": list(range(3_000_000))},
    "long text": lambda: {"x": "x" * (40 << 20)},
}
READ = {
    *HONEST,
    *("1,000 tensors", "8,000 tiny tensors", "40,000 records", "numbers", "100,000 tensors"),
}


def test_honest_files_take_64_mib_and_their_tensors(
    tmp_path: Path, scale: Scale, measured: Measured
) -> None:
    states = {**HONEST, **(HONEST_SOAK if scale.soak else {})}
    paths, stored = [], []
    for number, make in enumerate(states.values()):
        paths.append(tmp_path / f"{number}.pt")
        torch.save(make(), paths[-1])
        with zipfile.ZipFile(paths[-1]) as file:
            stored.append(sum(i.file_size for i in file.infolist() if "/data/" in i.filename))
    for name, nbytes, (peak, outcome) in zip(states, stored, measured(paths), strict=True):
        assert 0 <= peak < MEMORY_NBYTES_MAX + nbytes, f"{name}: {peak / MIB:.1f} MiB: {outcome}"
        assert outcome == "read" if name in READ else "memory_bytes_max=" in outcome, name


def test_what_a_file_may_take_is_an_argument(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"x": list(range(100_000))}, path)
    with pytest.raises(UnsupportedFormat, match=r"m\.pt.* at most 1048576 .* memory_bytes_max="):
        ckpt.import_checkpoint(str(path), str(tmp_path / "root"), memory_bytes_max=MIB)
    assert main(["import", str(path), str(tmp_path / "root"), "--memory-bytes-max", "4MiB"]) == 1
    assert not (tmp_path / "root").exists()
    assert main(["import", str(path), str(tmp_path / "root"), "--memory-bytes-max", "64MiB"]) == 0
    torch.save({"w": torch.ones(3), "x": list(range(100_000))}, path)
    with pytest.raises(UnsupportedFormat, match="memory_bytes_max="):
        ckpt.export(str(path), str(tmp_path / "m.safetensors"), memory_bytes_max=MIB)


def test_bytes_of_tensors_that_are_there_count_and_no_others(tmp_path: Path) -> None:
    """Records that lie over each other, are compressed, or are claimed by the pickle are no room
    for objects.
    """
    options = SourceOptions(memory_bytes_max=4 * MIB)
    program = pickle.dumps({"x": list(range(1000, 31_000))}, 2)
    open_source(str(put(tmp_path / "room.pt", program, bytes(8 * MIB))), options).close()
    compressed, lying = tmp_path / "compressed.pt", put(tmp_path / "lying.pt", program, b"1234")
    with zipfile.ZipFile(compressed, "w") as file:
        file.writestr("archive/data.pkl", program)
        file.writestr("archive/data/0", bytes(8 * MIB), zipfile.ZIP_DEFLATED)
    data = lying.read_bytes()
    entry = data.rindex(b"PK\x01\x02")
    lying.write_bytes(
        data[: entry + 20] + struct.pack("<2I", 8 * MIB, 8 * MIB) + data[entry + 28 :]
    )
    for path in (put(tmp_path / "none.pt", program), compressed, lying):
        with pytest.raises(ckpt.CheckpointError, match=r"memory_bytes_max=|outside of the file"):
            open_source(str(path), options)
    entries = [ZipEntry(f"a/data/{n}", 0, 900, 0) for n in range(50)]
    entries.append(ZipEntry("a/data.pkl", 900, 50, 0))
    assert _tensor_nbytes({e.name: e for e in entries}, "a/data/", 1000) == 950


def test_small_pickles_are_charged_by_what_they_are() -> None:
    """The budget is asked for more at once, and gets back what was not spent."""
    budget, program = MemoryBudget(FIXED_NBYTES + MIB), pickle.dumps({"a": [1, 2.5, "x"]})
    for _ in range(200):
        read_pickle(program, {}, account=Account(budget))
    with pytest.raises(UnsupportedFormat, match="memory_bytes_max="):
        for _ in range(20_000):
            read_pickle(program, {}, account=Account(budget))


# --- crafted files ---

HEAD = (
    b"\x80\x04X\xe8\x03\x00\x00" + b"n" * 1000 + b"\x94"  # 0: a long text
    b"(" + b"K\x01" * 60 + b"t\x94"  # 1: a tuple
    b"}(" + b"".join(b"K%cN" % n for n in range(60)) + b"u\x94"  # 2: a dict
    b"ctorch\nFloatStorage\n\x94"  # 3
    b"(X\x07\x00\x00\x00storageh\x03X\x01\x00\x00\x000X\x03\x00\x00\x00cpuJ\xff\xff\xff\x7ft\x94"
    b"c" + b"a" * 400 + b"\n" + b"b" * 400 + b"\n\x94"  # 5: a long name
    b"ctorch._utils\n_rebuild_tensor_v2\n\x94"  # 6
)
STORAGE = b"h\x04Q"
WORDS = {
    "marks": b"(",
    "memo entries": b"\x94",
    "memo out of order": b"r%c%c%c\x7f",
    "fetched": b"h\x00",
    "lists": b"]",
    "lists with an item": b"]Na",
    "dicts": b"}",
    "dicts with an item": b"}K\x01Ns",
    "tuples": b"N\x85",
    "sets": b"\x8f",
    "integers": b"M\xff\xff",
    "long integers": b"\x8a\xf0" + b"\x7f" * 240,
    "floats": b"G" + b"\x01" * 8,
    "texts": b"\x8c\x01a",
    "wide texts": b"\x8c\x54" + b"a" * 80 + "\U0001f600".encode(),
    "bytes": b"C\x01a",
    "names": b"ca\nb\n",
    "names of long parts": b"h\x00h\x00\x93",
    "calls of a long name": b"h\x05)R",
    "a long name as items": b"]h\x05a",
    "storages": STORAGE,
    "tensors": b"h\x06(" + STORAGE + b"K\x00K\x01\x85K\x01\x85\x89NtR",
    "sizes": b"ctorch\nSize\nh\x01\x85R",
    "mappings": b"ccollections\nOrderedDict\nh\x02\x85R",
    "states": b"ca\nb\n)R}b",
    "shared": b"h\x01h\x01\x86q\x01",
}
WORDS_USUAL = ("marks", "lists", "tuples", "floats", "names", "tensors", "mappings", "shared")
WRAPS = {
    "left on the stack": (b"(", b"."),
    "in a list": (b"](", b"e."),
    "in a tuple": (b"(", b"t."),
    "in a dict": (b"}X\x01\x00\x00\x00xX\x01\x00\x00\x00y](", b"es."),
}


def program(word: bytes, nbytes: int, wrap: str) -> bytes:
    before, after = WRAPS[wrap]
    count = max(1, (nbytes - len(HEAD) - 20) // len(word))
    if b"%c" in word:
        body = b"".join(b"r" + (n + 1000).to_bytes(3, "little") + b"\x7f" for n in range(count))
    else:
        body = word * count
    return HEAD + before + body + after


def crafted(scale: Scale, folder: Path) -> list[Path]:
    usual = 300_000
    forms = {(usual, "in a list")}
    if scale.soak:
        forms |= {(usual, wrap) for wrap in WRAPS} | {(nbytes, "in a list") for nbytes in SIZES}
    paths = []
    names = WORDS if scale.soak else WORDS_USUAL
    for name, (nbytes, wrap) in itertools.product(names, sorted(forms)):
        path = folder / f"{name}, {wrap}, {nbytes}.pt"
        paths.append(put(path, program(WORDS[name], nbytes, wrap), b"1234"))
    return paths


def test_crafted_files_take_64_mib_whatever_their_length(
    tmp_path: Path, scale: Scale, measured: Measured
) -> None:
    paths = crafted(scale, tmp_path)
    worst = 0
    for path, (peak, outcome) in zip(paths, measured(paths), strict=True):
        worst = max(worst, peak)
        assert 0 <= peak < MEMORY_NBYTES_MAX, f"{path.stem}: {peak / MIB:.1f} MiB: {outcome}"
    print(f"{len(paths)} files, at most {worst / MIB:.1f} MiB")


def test_a_directory_of_empty_records_takes_64_mib(
    tmp_path: Path, scale: Scale, measured: Measured
) -> None:
    path = tmp_path / "m.pt"
    put(path, b"\x80\x02}.", *[b""] * scale.count(20_000, 150_000))
    ((peak, outcome),) = measured([path])
    assert 0 <= peak < MEMORY_NBYTES_MAX, f"{peak / MIB:.1f} MiB: {outcome}"


def _safetensors(path: Path, header: bytes, nbytes: int = 0) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(nbytes))
    return path


def _empty_entries(count: int, dims: int) -> bytes:
    entry = {"dtype": "U8", "shape": [0] + [1] * (dims - 1), "data_offsets": [0, 0]}
    return json.dumps({f"t{number}": entry for number in range(count)}).encode()


def test_headers_of_safetensors_files_take_64_mib(tmp_path: Path, measured: Measured) -> None:
    """Of tensors without bytes, of nested lists, of one long name; alone and behind an index."""
    files = [
        _safetensors(tmp_path / "many.safetensors", _empty_entries(150_000, 1)),
        _safetensors(tmp_path / "deep.safetensors", _empty_entries(60_000, 6)),
        _safetensors(tmp_path / "lists.safetensors", b'{"a":[' + b"[]," * 2_000_000 + b"0]}"),
        _safetensors(tmp_path / "name.safetensors", b'{"' + b"a" * 60_000_000 + b'":0}'),
    ]
    index = tmp_path / "big.safetensors.index.json"
    names = {f"t{number}": "few.safetensors" for number in range(700_000)}
    index.write_text(json.dumps({"weight_map": names}))
    few = _safetensors(tmp_path / "few.safetensors", _empty_entries(1000, 2))
    for path, (peak, outcome) in zip(files, measured(files), strict=True):
        is_refused = outcome.startswith("UnsupportedFormat") and "--memory-bytes-max" in outcome
        assert is_refused, (path, outcome)
        assert peak < MEMORY_NBYTES_MAX, (path, peak)
    ((peak, outcome), (_, read)) = measured([index, few])
    assert outcome.startswith("UnsupportedFormat") and peak < MEMORY_NBYTES_MAX, (outcome, peak)
    assert read == "read"


def test_bytes_of_tensors_beside_a_header_count(tmp_path: Path) -> None:
    """A long header is read where its tensors are there, or where its reader is trusted."""
    count, few = 3000, SourceOptions(memory_bytes_max=4 * MIB)
    header = _empty_entries(count, 1)
    path = _safetensors(tmp_path / "m.safetensors", header)
    with pytest.raises(UnsupportedFormat, match="memory_bytes_max="):
        open_source(str(path), few)
    assert len(open_source(str(path)).contents.tensors) == count
    entry = {"dtype": "U8", "shape": [8 * MIB], "data_offsets": [0, 8 * MIB]}
    header = header[:-1] + b', "all": ' + json.dumps(entry).encode() + b"}"
    path = _safetensors(tmp_path / "all.safetensors", header, 8 * MIB)
    assert len(open_source(str(path), few).contents.tensors) == count + 1


def test_a_plan_has_the_same_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, like = str(tmp_path / "run"), tmp_path / "m.safetensors"
    ckpt.save({"model": torch.nn.Linear(2, 2)}, root, step=1)
    _safetensors(like, _empty_entries(3000, 1))
    plan = ["plan", root, "--ranks", "1", "--like", str(like), "--entry", "model"]
    assert main([*plan, "--memory-bytes-max", "4MiB"]) != 0
    assert "--memory-bytes-max" in capsys.readouterr().err
    assert main(plan) != 0, "the state is another one"
    assert "model.t0" in capsys.readouterr().out
