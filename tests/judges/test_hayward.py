"""hayward, which looks for code in files of models: nothing in ours, and we run nothing of what it
finds.

Method: its command, over a checkpoint of ours with all kinds of values and over its exports; and
over files with a program in each form of tests/convert/test_hostile.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import CheckpointError
from tests.convert.test_hostile import programs

HAYWARD = shutil.which("hayward", path=str(Path(sys.executable).parent))
pytestmark = [
    pytest.mark.judges,
    pytest.mark.skipif(HAYWARD is None, reason="needs hayward"),
]


def findings(place: Path) -> list[dict[str, Any]]:
    """What it has to say of the files there; also of those that it could not read whole."""
    command = [str(HAYWARD), "scan", "--quiet", "-f", "json", "--fail-on", "never", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    listed: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
    return listed


def test_hayward_finds_nothing_in_our_files(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    values = {"step": 3, "text": "import os", "raw": b"\x80\x02cos\nsystem\n", "pair": (1, [None])}
    state = {"model": model, "optimizer": optimizer, "rng": ckpt.rng_state(), "values": values}
    ckpt.save(state, tmp_path / "run", step=1)
    for name in ("weights.safetensors", "weights.pt"):
        ckpt.export(tmp_path / "run", tmp_path / "run" / name)
    ckpt.export(tmp_path / "run", tmp_path / "run" / "training.pt", optimizer=True)
    ckpt.export(tmp_path / "run", tmp_path / "run" / "dcp", format="dcp", optimizer=True)
    assert findings(tmp_path / "run") == []


def test_what_hayward_finds_is_refused_and_never_run(tmp_path: Path) -> None:
    canary, tensor = tmp_path / "canary", tmp_path / "plain.pt"
    torch.save({"w": torch.ones(2)}, tensor)
    planted = tmp_path / "planted"
    planted.mkdir()
    for number, program in enumerate(programs(canary)):
        file = planted / f"{number}.pt"
        with zipfile.ZipFile(tensor) as source, zipfile.ZipFile(file, "w") as into:
            for entry in source.namelist():
                is_program = entry.endswith("data.pkl")
                into.writestr(entry, program if is_program else source.read(entry))
    seen = {Path(one["file"]).name for one in findings(planted)}
    assert len(seen) >= 10  # of 14: it knows no names of copyreg's registry, and the like
    for file in planted.iterdir():
        try:
            with ckpt.open(file) as checkpoint:
                assert not list(checkpoint)
        except CheckpointError:
            pass
        assert not canary.exists(), file
