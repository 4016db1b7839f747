"""A process that ends without closing its world ends well.

Method: processes of their own whose attendance asks the store without pause, and that leave while
it does. A thread that came back from the store while the interpreter is torn down would abort the
process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import time
import torch.distributed as dist
from ckpt.world import attendance
from ckpt.world.torch_world import TorchWorld

attendance.PERIOD_SECONDS = 0.0
attendance.POST_PERIODS = attendance.KEEP_PERIODS = 1
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
world = TorchWorld()
status = attendance.Status("here", 1, "training", 1, 0.0, 0.1)
ledger = attendance.Ledger(world.board(), 0, 1, lambda: status)
watch = attendance.Attendance(ledger, lambda appeared, gone: None)
time.sleep(0.3)  # nothing is waited for, and nothing stopped
assert ledger._count > 10, "it asked without pause"
"""


@pytest.mark.ranks
def test_a_process_that_ends_while_it_asks_the_store_ends_with_zero() -> None:
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


UNUSED = """
import sys, threading
import torch.distributed as dist
import ckpt

def refused(*arguments):
    raise RuntimeError("can't create new thread at interpreter shutdown")

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
# As Python 3.12.0 to 3.12.2 do from here on.
threading.Thread.start = refused
"""


def test_a_process_that_can_start_no_thread_ends_in_silence(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", UNUSED, str(tmp_path / "rendezvous")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "")
    assert "Traceback" not in done.stderr


def test_an_exit_waits_for_a_thread_that_asks_the_store() -> None:
    """One that returns from torch's store while the interpreter is taken down aborts it."""
    code = (
        "import time; from ckpt.world.heart import Heart\n"
        "Heart.begin(lambda: (time.sleep(0.5), print('has asked', flush=True)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "has asked\n"
