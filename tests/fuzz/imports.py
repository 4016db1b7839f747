"""Files of other libraries, imported and exported whole: output, memory and errors are bounded.

Method: pickles are mutated inside of their zip files, metadata and headers next to honest data, so
that what comes behind the first reader is reached. What is written counts, whatever the input says.
"""

from __future__ import annotations

import io
import tempfile
import warnings
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save as save_safetensors

import ckpt
from ckpt.errors import CheckpointError
from storage.errors import StorageError
from storage.memory import MemoryBucket, MemoryStore
from tests.fuzz.target import Target

OUTPUT_NBYTES_MAX = 1 << 20  # of tensors
BESIDE_NBYTES_MAX = 1 << 20  # of files and records around them
REFUSALS = (CheckpointError, StorageError)


def _converted(files: Mapping[str, bytes]) -> None:
    """Import and export a folder of these files, and count what is written."""
    source = MemoryStore()
    for key, data in files.items():
        source.put_if_absent(key, data)
    allowed = OUTPUT_NBYTES_MAX + BESIDE_NBYTES_MAX + 8 * sum(map(len, files.values()))
    refused: list[Exception] = []
    for convert in (ckpt.import_checkpoint, ckpt.export):
        bucket = MemoryBucket()
        try:
            convert(source, MemoryStore(bucket), output_bytes_max=OUTPUT_NBYTES_MAX)  # type: ignore[operator]
        except REFUSALS as error:
            refused.append(error)
        finally:
            ckpt.forget(MemoryStore(bucket))
        store = MemoryStore(bucket)
        written = sum(info.nbytes for info in store.list(""))
        assert written <= allowed, f"{convert.__name__} wrote {written} bytes"
    if refused:
        raise refused[0]


def _saved(state: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


@cache
def _states() -> list[object]:
    base = torch.arange(12.0)
    optimizer = {"state": {"w": {"m": base}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
    return [
        {"w": base.view(3, 4), "t": base.view(3, 4).t(), "e": base[:1].expand(50)},
        {"model": {"w": base.view(3, 4), "n": torch.tensor(3)}, "opt": optimizer, "step": 7},
    ]


def _pickles() -> list[bytes]:
    return [
        next(file.read(name) for name in file.namelist() if name.endswith("data.pkl"))
        for file in (zipfile.ZipFile(io.BytesIO(_saved(state))) for state in _states())
    ]


def _read_pickle(data: bytes) -> None:
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as file:
        file.writestr("archive/data.pkl", data)
        for number in range(3):
            file.writestr(f"archive/data/{number}", bytes(48))
    _converted({"pytorch_model.bin": whole.getvalue()})


@cache
def _folder() -> Mapping[str, bytes]:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group is there
        dcp.save(_states()[1], checkpoint_id=folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _read_metadata(data: bytes) -> None:
    _converted({**_folder(), ".metadata": data})


def _headers() -> list[bytes]:
    whole = save_safetensors({"a": torch.ones(2, 3), "b.c": torch.zeros(4, dtype=torch.bfloat16)})
    return [whole[8 : 8 + int.from_bytes(whole[:8], "little")]]


def _read_header(data: bytes) -> None:
    whole = len(data).to_bytes(8, "little") + data + bytes(32)
    _converted({"model.safetensors": whole})


TARGETS = (
    Target("import.pickle", _read_pickle, _pickles, refusals=REFUSALS),
    Target("import.torch", lambda data: _converted({"pytorch_model.bin": data}),
           lambda: [*map(_saved, _states())], refusals=REFUSALS),
    Target("import.dcp", _read_metadata, lambda: [_folder()[".metadata"]], refusals=REFUSALS),
    Target("import.safetensors", _read_header, _headers, refusals=REFUSALS),
)  # fmt: skip
