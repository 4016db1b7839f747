"""Safetensors files that hide bytes, share them, or name things twice are refused.

Method: headers written by hand, each wrong in one way that Python's JSON and the offsets of single
tensors do not show; the right one of the same bytes is imported.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.convert.sources.opening import open_source
from ckpt.errors import Corrupt


def _entry(start: int, stop: int) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}


def _text(**tensors: dict[str, Any]) -> str:
    return json.dumps(tensors)


def _write(path: Path, header: str, nbytes: int = 8) -> str:
    data = header.encode()
    path.write_bytes(struct.pack("<Q", len(data)) + data + bytes(range(nbytes)))
    return str(path)


TWICE = f'{{"a": {json.dumps(_entry(0, 4))}, "a": {json.dumps(_entry(4, 8))}}}'


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (_text(a=_entry(0, 3), b=_entry(4, 8)), "a hole before 'b'"),
        (_text(a=_entry(1, 4), b=_entry(4, 8)), "a hole before 'a'"),
        (_text(a=_entry(0, 4), b=_entry(4, 7)), "8 bytes of data, its tensors have 7"),
        (_text(a=_entry(0, 5), b=_entry(4, 8)), "bytes of another tensor in 'b'"),
        (_text(a=_entry(0, 8), b=_entry(0, 8)), "bytes of another tensor in 'b'"),
        (_text(a=_entry(0, 9)), "8 bytes of data, its tensors have 9"),
        (TWICE, "'a' is there twice"),
        (_text(**{"../a": _entry(0, 8)}), "'../a' is no name"),
        (_text(**{"a/../../b": _entry(0, 8)}), "is no name"),
        (_text(**{"a\0b": _entry(0, 8)}), "is no name"),
        (_text(a=_entry(0, 8), __metadata__={"tied": ["a"]}), "no readable header"),
    ],
)
@pytest.mark.parametrize("what", ["file", "folder"])
def test_holes_overlaps_doubles_and_bad_names(
    tmp_path: Path, header: str, text: str, what: str
) -> None:
    path = _write(tmp_path / "model.safetensors", header)
    url = path if what == "file" else str(tmp_path)
    with pytest.raises(Corrupt) as caught:
        open_source(url)
    assert text in str(caught.value) and "model.safetensors" in str(caught.value)
    with pytest.raises(Corrupt):
        ckpt.import_checkpoint(url, str(tmp_path / "root"))
    assert not (tmp_path / "root").exists()


def test_an_index_that_names_a_tensor_twice(tmp_path: Path) -> None:
    _write(tmp_path / "a.safetensors", _text(w=_entry(0, 8)))
    _write(tmp_path / "b.safetensors", _text(w=_entry(0, 8)))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}')
    with pytest.raises(Corrupt, match="'w' is there twice"):
        open_source(str(index))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": 1}', '{"weight_map": {}}']
)
def test_a_damaged_index_is_corrupt(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / f"{name}.index.json").write_text(text)
    with pytest.raises(Corrupt, match=f"{name}.index.json: .*index"):
        open_source(str(tmp_path))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_an_index_names_no_file_outside(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.index.json").write_text('{"weight_map": {"w": "../x"}}')
    with pytest.raises(Corrupt, match="no readable index"):
        open_source(str(tmp_path))


def test_a_whole_file_with_empty_tensors_is_read(tmp_path: Path) -> None:
    """In any order of its header; tensors of no size lie between others."""
    header = _text(b=_entry(4, 8), none=_entry(4, 4), a=_entry(0, 4), last=_entry(8, 8))
    source = open_source(_write(tmp_path / "model.safetensors", header))
    assert source.read("a").tolist() == [0, 1, 2, 3]
    assert source.read("b").tolist() == [4, 5, 6, 7]
