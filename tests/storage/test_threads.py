"""Work by threads also ends where no thread can be started, as when an interpreter ends.

Method: the start of a thread is refused, as Python 3.12.0 to 3.12.2 refuse it once the main thread
has ended; and a script that ends while it saves.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpt
from ckpt.commit.log import at_once
from storage.threads import as_done, in_order


@pytest.fixture
def threadless(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refused)
    yield


def test_work_is_done_without_threads(threadless: None) -> None:
    assert list(in_order(abs, [-2, -1], threads=2, name="x")) == [2, 1]
    assert sorted(as_done(abs, [-2, -1], threads=2, name="x")) == [1, 2]
    assert at_once(lambda: 1, lambda: 2) == (1, 2)


def test_a_failure_without_threads_is_raised(threadless: None) -> None:
    with pytest.raises(ZeroDivisionError):
        list(in_order(lambda item: 1 // item, [1, 0], threads=2, name="x"))


def test_work_without_threads_may_use_other_pools(threadless: None) -> None:
    def work(item: int) -> int:
        return sum(in_order(abs, [item, item], threads=2, name="inner"))

    assert list(in_order(work, [-1, -2], threads=2, name="outer")) == [2, 4]


SCRIPT = """
import sys, torch, ckpt
ckpt.async_save({str(n): torch.zeros(1 << 20) for n in range(40)}, sys.argv[1], step=1)
"""


def test_a_save_in_flight_at_exit_is_saved(tmp_path: Path) -> None:
    """Not waited for by the script: the interpreter waits."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "root")]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "has failed" not in done.stderr
    assert [one.step for one in ckpt.list_steps(str(tmp_path / "root"))] == [1]
