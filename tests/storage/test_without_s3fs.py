"""Local roots need nothing of s3fs: neither its import, nor that it is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# As if these were not installed, in a process of its own.
PROGRAM = """
import sys

for name in ("s3fs", "aiobotocore", "botocore", "boto3", "aiohttp", "obstore"):
    sys.modules[name] = None

import torch

import ckpt
from ckpt.cli import main

url = sys.argv[1]
model = torch.nn.Linear(4, 4)
ckpt.save({"model": model}, url, step=1)
ckpt.async_save({"model": model}, url, step=2, dedup=True).wait()
assert ckpt.load({"model": model}, url).step == 2
with ckpt.Checkpointer({"model": model}, url) as checkpointer:
    checkpointer.restore()
ckpt.export(url, url + "/model.safetensors")
ckpt.verify(url)
assert main(["ls", url]) == 0
try:
    ckpt.load({"model": model}, "s3://bucket/run")
except ckpt.CheckpointError as error:
    print(type(error).__name__, error)
"""


def test_local_use_works_without_s3fs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert "InvalidUrlError s3://bucket/run: s3:// needs s3fs" in done.stdout
