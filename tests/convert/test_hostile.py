"""Crafted pickles run nothing and eat nothing: they are refused, or read as values.

Method: pickles that do harm where the module `pickle` reads them, each through every way that a
pickle takes into the converters; a canary that any of them would set off stays silent.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import tracemalloc
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt
from ckpt.convert.sources.opening import open_source
from ckpt.convert.sources.pickles import Opaque, PickledObject, read_pickle
from ckpt.convert.sources.torch_pickle import read_tree
from ckpt.errors import CheckpointError, Corrupt, UnsupportedFormat


class Runs:
    """A pickle of it creates a file where code runs."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


class RunsWithState(Runs):
    def __reduce__(self) -> Any:
        return eval, (f"__import__('os').mkdir({str(self.canary)!r})",), {"a": 1}


def hand_written(canary: Path) -> list[bytes]:
    """Programs in the instructions that pickles of today hardly have."""
    path = str(canary).encode()
    text = b"\x8c" + bytes([len(path)]) + path
    return [
        b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93" + text + b"\x85R.",
        b"\x80\x02cos\nmkdir\n" + text + b"\x85R.",
        b"\x80\x02(cos\nmkdir\n" + text + b"o.",  # OBJ
        b"\x80\x02(" + text + b"ios\nmkdir\n.",  # INST
        b"\x80\x02cos\nmkdir\n" + text + b"\x85\x81.",  # NEWOBJ
        b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93" + text + b"\x85}\x92.",  # NEWOBJ_EX
        b"\x80\x02\x82\x01.",  # a name of copyreg's registry
        b"\x80\x02]cos\nmkdir\nb.",  # a state for a list
    ]


def programs(canary: Path) -> list[bytes]:
    made = [pickle.dumps(kind(canary), p) for kind in (Runs, RunsWithState) for p in (2, 4, 5)]
    return made + hand_written(canary)


def test_nothing_runs_anywhere(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for number, data in enumerate(programs(canary)):
        pickle_file = tmp_path / f"{number}.pt"
        with zipfile.ZipFile(pickle_file, "w") as file:
            file.writestr("archive/data.pkl", data)
        folder = tmp_path / f"dcp{number}"
        folder.mkdir()
        (folder / ".metadata").write_bytes(data)
        for url in (pickle_file, folder):
            with pytest.raises(CheckpointError):
                ckpt.import_checkpoint(str(url), str(tmp_path / "root"))
            with pytest.raises(CheckpointError):
                ckpt.export(str(url), str(tmp_path / "m.safetensors"))
        assert not canary.exists(), data
        assert not (tmp_path / "root").exists(), "an import that is refused makes no root"
    with pytest.raises(FileExistsError):
        pickle.loads(programs(canary)[0])  # the canary works
        pickle.loads(programs(canary)[1])


def test_code_beside_tensors_costs_only_itself(tmp_path: Path) -> None:
    """Tensors are exported; an import says what it cannot take, and continues with skip=."""
    canary = tmp_path / "canary"
    torch.save({"w": torch.ones(3), "bad": Runs(canary), "fine": 5}, tmp_path / "m.pt")
    ckpt.export(str(tmp_path / "m.pt"), str(tmp_path / "m.safetensors"))
    with pytest.raises(ckpt.errors.InvalidState, match=r"bad: it is a posix\.mkdir.*skip="):
        ckpt.import_checkpoint(str(tmp_path / "m.pt"), str(tmp_path / "root"))
    report = ckpt.import_checkpoint(str(tmp_path / "m.pt"), str(tmp_path / "root"), skip=["bad"])
    assert report.values == ("fine",) and not canary.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        b"\x80\x02",
        b"\x80\x02.",
        b"\x80\x02K",
        b"\x80\x02t.",
        b"\x80\x02\x86.",
        b"\x80\x02(((.",
        b"\x80\x02]a.",
        b"\x80\x02]K\x01K\x02s.",
        b"\x80\x02}]K\x01s.",  # a list as a key
        b"\x80\x02h\x05.",  # a memo that is not there
        b"\x80\x02X\xff\xff\xff\xff.",
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b".",  # bytes of an exbibyte
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b".",
        b"\x80\x02\x8b" + struct.pack("<I", 1 << 31) + b".",
        b"\x80\x02Q.",
        b"\x80\x02X\x01\x00\x00\x00\xff.",
        b"garbage that is no pickle",
    ],
)
def test_broken_programs_are_refused(data: bytes) -> None:
    with pytest.raises((Corrupt, UnsupportedFormat)):
        read_pickle(data, {})


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02]r\xff\xff\xff\xff0].",  # LONG_BINPUT: a memo of 32 GiB for others
        b"\x80\x04" + b"\x8c\x01a" * 50_000 + b".",
        b"\x80\x02" + b"]" * 30_000 + b"a" * 29_999 + b".",  # 30,000 lists in each other
        b"\x80\x02]q\x00" + b"]q\x01(h\x00h\x00h\x00h\x00eq\x00" * 30 + b".",  # 4 to the 30th
    ],
)
def test_bombs_take_memory_like_their_length(data: bytes, tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        with suppress(CheckpointError):
            read_pickle(data, {})
        with zipfile.ZipFile(tmp_path / "m.pt", "w") as file:
            file.writestr("archive/data.pkl", data)
        with suppress(CheckpointError):
            open_source(str(tmp_path / "m.pt"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


def test_deep_keys_do_not_overflow_the_stack() -> None:
    """Tuples in tuples as a key are hashed by recursion in C, which nothing stops."""
    with pytest.raises(Corrupt):
        read_pickle(b"\x80\x02})" + b"\x85" * 300_000 + b"K\x01s.", {})


def test_names_are_values_of_ours() -> None:
    value = read_pickle(b"\x80\x02cos\nsystem\n.", {})
    assert isinstance(value, Opaque) and value.name == "os.system"
    kind = type(Path("a"))  # of pathlib._local in Python 3.13
    record = read_pickle(pickle.dumps(Path("a"), 2), {f"{kind.__module__}.PosixPath": "path"})
    assert isinstance(record, PickledObject) and record.args == ("a",)


def test_plain_values_come_back_from_every_protocol() -> None:
    value = {
        "a": [None, True, False, 0, -1, 255, 65536, -(2**31), 2**70, 1.5, float("inf")],
        "b": ("x" * 300, "", "ü\U0001f600", b"", b"\x00\xff" * 200),
        3: {"nested": ({}, [], (), ((1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)))},
        None: [{}] * 3,
    }
    for protocol in (2, 3, 4, 5):
        assert read_tree(pickle.dumps(value, protocol)) == value


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", [{}, [], 3, None, ("w",)], ids=repr)
def test_names_in_metadata_that_are_none_are_refused(tmp_path: Path, name: Any) -> None:
    dcp.save({"w": torch.arange(6.0)}, checkpoint_id=tmp_path)
    with open(tmp_path / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    (index,) = metadata.storage_data
    object.__setattr__(index, "fqn", name)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(Corrupt, match="no name of a tensor"):
        open_source(str(tmp_path))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_flipped_and_cut_metadata_is_refused_or_harmless(
    tmp_path: Path, rng: Any, scale: Any
) -> None:
    """Any byte of .metadata changed: an error of ours, or tensors within their files. No other
    exception, no hang.
    """
    dcp.save({"model": {"w": torch.arange(6.0).view(2, 3)}, "n": 3}, checkpoint_id=tmp_path / "d")
    good = (tmp_path / "d" / ".metadata").read_bytes()
    for _ in range(scale.count(150, 5000)):
        data = bytearray(good)
        if rng.random() < 0.2:
            data = data[: rng.randrange(len(data))]
        else:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (tmp_path / "d" / ".metadata").write_bytes(bytes(data))
        try:
            source = open_source(str(tmp_path / "d"))
            for name in source.contents.tensors:
                source.read(name)
        except CheckpointError:
            continue


def test_flipped_and_cut_files_are_refused_or_read(tmp_path: Path, rng: Any, scale: Any) -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(6.0), "n": [1, 2]}, buffer)
    good = buffer.getvalue()
    for _ in range(scale.count(150, 5000)):
        data = bytearray(good)
        if rng.random() < 0.2:
            data = data[: rng.randrange(len(data))]
        else:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (tmp_path / "m.pt").write_bytes(bytes(data))
        try:
            source = open_source(str(tmp_path / "m.pt"))
            for name in source.contents.tensors:
                source.read(name)
        except CheckpointError:
            continue


@pytest.mark.parametrize("name", ["weights.txt", "m.safetensors", "m.pt"])
def test_a_file_that_is_no_checkpoint_is_reported_as_such(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"hello")
    why = "no known format|no safetensors|not a |no file"
    with pytest.raises(CheckpointError, match=f"{name}.*({why})"):
        ckpt.import_checkpoint(str(tmp_path / name), str(tmp_path / "root"))
    assert not (tmp_path / "root").exists()


# --- bounds ---------------------------------------------------------------------------------------


def _nested(step: bytes, count: int) -> bytes:
    return b"\x80\x02]q\x00" + step * count + b"."


_COPIED = b"}q\x00(" + b"".join(b"K%cK\x01" % n for n in range(200)) + b"u"
SMALL_BOMBS = {
    "shared lists": _nested(b"]q\x01(h\x00h\x00h\x00h\x00eq\x00", 30),
    "shared tuples": b"\x80\x02)q\x00" + b"h\x00h\x00\x86q\x00" * 80 + b".",
    "shared long names": b"\x80\x02X\x00\x10\x00\x00"
    + b"n" * 4096
    + b"q\x01]q\x00"
    + b"}q\x02(h\x01h\x00uq\x030](h\x03h\x03eq\x00" * 12
    + b".",
    "deep tuples": b"\x80\x02)" + b"\x85" * 30_000 + b".",
    "deep lists": b"\x80\x02" + b"]" * 30_000 + b"a" * 29_999 + b".",
    "deep dicts": b"\x80\x02" + b"}K\x01" * 30_000 + b"}" + b"s" * 30_000 + b".",
    "contains itself": b"\x80\x02]q\x00h\x00a.",
    "keys of shared tuples": b"\x80\x02}K\x01q\x00"
    + b"("
    + b"h\x00" * 1000
    + b"tq\x00"
    + ((b"(" + b"h\x00" * 1000 + b"tq\x00") * 3)
    + b"K\x01s.",
    "copies of a mapping": b"\x80\x02"
    + _COPIED
    + b"]("
    + b"ccollections\nOrderedDict\nh\x00\x85R" * 3000
    + b"e.",
    "a layout that is a tree": b"\x80\x02ctorch.serialization\n_get_layout\n)q\x00"
    + b"h\x00h\x00\x86q\x00" * 60
    + b"\x85R.",
    "a number that is a tree": b"\x80\x02ctorch\nSize\n)q\x00"
    + b"h\x00h\x00\x86q\x00" * 60
    + b"\x85\x85R.",
}


@pytest.mark.parametrize("what", SMALL_BOMBS)
@pytest.mark.parametrize("way", ["file", "dcp", "entry"])
def test_small_bombs_end_in_an_error_and_in_64_mib(what: str, way: str, tmp_path: Path) -> None:
    """As a whole file, as the metadata of a DCP directory, and beside a tensor."""
    data = SMALL_BOMBS[what]
    target = tmp_path / "m.pt"
    if way == "dcp":
        target = tmp_path / "dcp"
        target.mkdir()
        (target / ".metadata").write_bytes(data)
    else:
        if way == "entry":
            head = data[:2]
            data = head + b"}X\x03\x00\x00\x00bad" + data[2:-1] + b"s."
        with zipfile.ZipFile(target, "w") as file:
            file.writestr("archive/data.pkl", data)
            file.writestr("archive/data/0", b"")
    open_source(str(_small(tmp_path)))  # what is imported and remembered once
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            ckpt.import_checkpoint(str(target), str(tmp_path / "root"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20, f"{peak >> 20} MiB for {len(data)} bytes"


def _small(tmp_path: Path) -> Path:
    torch.save({"w": torch.ones(2)}, tmp_path / "small.pt")
    return tmp_path / "small.pt"


def test_shared_parts_of_usual_states_are_taken(tmp_path: Path) -> None:
    """Many groups that share their options, as pickle writes them: by reference."""
    betas, notes = (0.9, 0.999), {"a": [1, 2, 3], "b": "text"}
    groups = [{"lr": 0.1, "betas": betas, "notes": notes} for _ in range(2000)]
    torch.save({"w": torch.ones(2), "groups": groups}, tmp_path / "m.pt")
    report = ckpt.import_checkpoint(str(tmp_path / "m.pt"), str(tmp_path / "root"))
    assert "groups" in report.values


UNSAFE = ("../w", "a/../../w", "a\\..\\w", "..", "a\0w")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", UNSAFE, ids=repr)
def test_names_that_leave_a_folder_are_refused(tmp_path: Path, name: str) -> None:
    """As in safetensors files: other programs take names for paths, or end them at a NUL."""
    tensor = torch.arange(6.0)
    nested = {"model": {name: tensor, "b": tensor + 1}}  # an export may leave "model." out
    states = [{name: tensor}, {"tied": tensor, name: tensor}, nested]
    for number, state in enumerate(states):
        file, folder = tmp_path / f"{number}.pt", tmp_path / f"{number}"
        torch.save(state, file)
        dcp.save(state, checkpoint_id=folder)
        for source in (file, folder):
            with pytest.raises(Corrupt, match="is no name of a tensor"):
                open_source(str(source))
            with pytest.raises(Corrupt, match="is no name of a tensor"):
                ckpt.import_checkpoint(str(source), tmp_path / "root")
    assert not (tmp_path / "root" / "log").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_names_with_dots_are_no_paths(tmp_path: Path) -> None:
    for name in ("a..w", "a.b/c..d", "ü"):
        torch.save({name: torch.arange(6.0)}, tmp_path / "x.pt")
        assert [*open_source(str(tmp_path / "x.pt")).contents.tensors] == [name]
