"""A process that ends without closing its world ends well.

Method: processes of their own whose worlds beat without pause, and that leave while they do. A
thread that came back from the store while the interpreter is torn down would abort the process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, time
import torch.distributed as dist
from ckpt.world.torch_world import TorchWorld
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
world = TorchWorld()
time.sleep(0.05)  # beats meanwhile; nothing is waited for
"""


@pytest.mark.ranks
def test_a_process_that_ends_while_its_heart_beats_ends_with_zero() -> None:
    root = Path(__file__).resolve().parents[2]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT], cwd=root, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for process in running:
        _, text = process.communicate(timeout=120)
        assert process.returncode == 0, text
