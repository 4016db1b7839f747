"""ckpt-chaos, which kills a training at events of files and compares what the resumed one has made:
over our examples, and over the trainings that `ckpt rehearse` judges.

Method: its command. All crash points of our examples pass, killed before an event and by SIGTERM,
on one rank and on two; a training that forgets something is seen where it is a matter of the final
state, as by a rehearsal.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.rehearse.test_all import NAMED

ROOT = Path(__file__).parents[2]
CHAOS = shutil.which("ckpt-chaos", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
pytestmark = [
    pytest.mark.judges,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(CHAOS is None, reason="needs ckpt-chaos"),
]
DIGEST = """
import sys, ckpt
from ckpt.rehearse.seen import text_of
with ckpt.open(sys.argv[1], int(sys.argv[2])) as one:
    print([(name, text_of(one[name])) for name in sorted(one)])
"""


def verdicts(tmp_path: Path, options: list[str], command: list[str]) -> Counter[str]:
    """How often ckpt-chaos gives which verdict."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    if "--ranks" not in options:
        own |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        own |= {"LOCAL_RANK": "0", "MASTER_PORT": str(port)}
    done = subprocess.run(
        [str(CHAOS), "run", "--work", "work", "--grace", "20", *options, "--", *command],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | own,
    )
    judged = done.stdout.partition("3/3 judging")[2]
    assert judged, done.stdout[-2000:] + done.stderr[-2000:]
    named = re.findall(
        r"\s(PASS|HARD_FAIL|SILENT_DIVERGENCE|LOST_WORK|CONTROL_FAIL)(?:\s|$)", judged
    )
    assert done.returncode == ({*named} > {"PASS"}), judged
    return Counter(named)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("example", "step"), [("train_fsdp2.py", 20), ("frameworks/recipe.py", 8)])
def test_crash_points_of_an_example_pass(
    example: str, step: int, ranks: int, tmp_path: Path
) -> None:
    """The first saves in the call, the other in the background and on SIGTERM."""
    (tmp_path / "digest.py").write_text(DIGEST)
    options = ["--max-points", "8", "--modes", "before,term"]
    options += ["--result-cmd", f"{sys.executable} digest.py {{out}} {step}"]
    options += ["--ranks", "2", "--crash-rank", "1"] if ranks == 2 else []
    command = [sys.executable, str(ROOT / "examples" / example), "{out}"]
    counts = verdicts(tmp_path, options, [*command, *(["8"] if step == 8 else [])])
    assert counts.keys() == {"PASS"} and counts["PASS"] >= 8, counts


@pytest.mark.parametrize("what", ["", *NAMED])
def test_what_a_rehearsal_names_is_seen(what: str, tmp_path: Path) -> None:
    options = ["--max-points", "6", "--modes", "before", "--result-file", "{out}/final"]
    command = [sys.executable, "-m", "tests.judges.chaotic", "{out}", *([what] * bool(what))]
    counts = verdicts(tmp_path, options, command)
    assert counts["PASS"] >= 1, "the one that was not killed is the same"
    assert counts.keys() == ({"PASS", "SILENT_DIVERGENCE"} if what else {"PASS"}), counts
