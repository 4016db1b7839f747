"""What a newcomer does in the first hour, with the installed package alone: `python first_hour.py`.

A training on two ranks is killed in the middle, resumed on one rank, looked at, exported, reported.
Works in the current folder, which should be empty; needs the standard library, and `ckpt` and
`torchrun` beside this Python. The first step that does not do what it promises ends it. Where
Chromium is installed, the pages are opened in it, wide and narrow, light and dark, and are left as
pictures in `screens`, for somebody to look at.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import ModuleType
from typing import Any

BIN = Path(sys.executable).parent
WAIT_SECONDS = 300  # a guard against hanging, not a measurement
ROOT = "runs/first"
BROWSER = Path(__file__).resolve().parents[1] / "tests" / "tools" / "browser.py"
SCREENS = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
import ckpt

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer}
with ckpt.Checkpointer(state, sys.argv[1], save=ckpt.EverySteps(10)) as checkpointer:
    resumed = checkpointer.restore()
    first = resumed.step + 1 if resumed else 1
    last = first + int(sys.argv[2])
    print("first step", first, flush=True)
    for step in range(first, last):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step(step)
dist.destroy_process_group()
"""


def main() -> None:
    """All steps in order."""
    Path("train.py").write_text(PROGRAM, encoding="utf-8")
    version = ckpt("--version")
    newest = killed_training()
    resumed_training(newest)
    looked_at()
    exported()
    reported()
    followed()
    print(f"the first hour with {version.strip()}: trained, killed, resumed, exported, reported")


def ckpt(*arguments: str) -> str:
    """The output of one command, which must succeed."""
    done = subprocess.run(
        [str(BIN / "ckpt"), *arguments], capture_output=True, text=True, timeout=WAIT_SECONDS
    )
    if done.returncode:
        sys.exit(f"ckpt {' '.join(arguments)}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def check(holds: bool, what: str) -> None:
    if not holds:
        sys.exit(f"the first hour: {what}")


def training(ranks: int, steps: int) -> subprocess.Popen[str]:
    """In a session of its own, so that it can be killed as a whole."""
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.Popen(
        [*command, "train.py", ROOT, str(steps)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def steps_saved() -> list[int]:
    return [one["step"] for one in json.loads(ckpt("ls", ROOT, "--json"))["checkpoints"]]


def killed_training() -> int:
    """Kills a training on two ranks after its second save; the newest step that is whole."""
    running = training(ranks=2, steps=10**9)
    deadline = time.monotonic() + WAIT_SECONDS
    while len(list(Path(ROOT).glob("steps/*"))) < 3:
        check(running.poll() is None, "the training ended by itself")
        check(time.monotonic() < deadline, "the training saved nothing")
        time.sleep(0.05)
    # torchrun first: it could tell nobody any more. Its ranks have sessions of their own.
    for pid in [running.pid, *ranks_of(running.pid)]:
        os.kill(pid, signal.SIGKILL)
    running.wait()
    steps = steps_saved()
    check(bool(steps) and all(step % 10 == 0 for step in steps), f"steps {steps}")
    return steps[-1]


def ranks_of(parent: int) -> list[int]:
    """The children of a process."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="utf-8")
    return [int(pid) for pid in children.split()]


def resumed_training(newest: int) -> None:
    """One rank goes on where two were killed."""
    output, _ = training(ranks=1, steps=20).communicate(timeout=WAIT_SECONDS)
    check(f"first step {newest + 1}\n" in output, f"resumed after {newest}: {output}")
    check(steps_saved()[-1] == newest + 20, f"not {newest + 20}: {steps_saved()}")


def looked_at() -> None:
    ckpt("verify", ROOT)
    check("model.0.weight" in ckpt("show", ROOT), "`ckpt show` shows no weight")
    check("step" in ckpt("ls", ROOT), "`ckpt ls` shows no step")


def exported() -> None:
    """One safetensors file, read by its own format: the length of a header, then the header."""
    ckpt("export", ROOT, "model.safetensors")
    with Path("model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    shape = header["0.weight"]["shape"]
    check(shape == [256, 64], f"the exported weight has the shape {shape}")


def reported() -> None:
    ckpt("report", ROOT, "--output", "report.html")
    check("</html>" in Path("report.html").read_text(encoding="utf-8"), "the report is cut short")
    check("of each rank" in ckpt("cost", "--params", "70B", "--ranks", "512"), "`ckpt cost`")
    check("a checkpoint" in ckpt("cost", ROOT, "--mtbf", "6h"), "`ckpt cost` of a root")


def followed() -> None:
    """In the terminal, and by the local web page; with a browser, as somebody sees it."""
    newest = steps_saved()[-1]
    check(str(newest) in ckpt("watch", ROOT, "--once"), "`ckpt watch` does not show the newest")
    serving = subprocess.Popen(
        [str(BIN / "ckpt"), "serve", ROOT, "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert serving.stdout is not None
        url = re.search(r"https?://[^\s,;]+", serving.stdout.readline())
        check(url is not None, "`ckpt serve` names no page")
        assert url is not None
        with urllib.request.urlopen(url[0], timeout=WAIT_SECONDS) as answer:
            page = answer.read().decode()
        check(str(newest) in page, "the page does not show the newest step")
        library = browser_library()
        if library.CHROMIUM is None:
            print("no browser here: the pages were not opened in one")
        else:
            seen_in_a_browser(library, url[0])
    finally:
        # Not SIGINT, which a shell has its jobs in the background ignore.
        serving.terminate()
        serving.wait(timeout=WAIT_SECONDS)


def browser_library() -> ModuleType:
    """tests/tools/browser.py, by its path: the repository must not be imported here."""
    found = importlib.util.spec_from_file_location("browser", BROWSER)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def seen_in_a_browser(library: ModuleType, url: str) -> None:
    """The page of `ckpt serve` with a save that is made meanwhile, and the report's page."""
    Path("screens").mkdir(exist_ok=True)
    with library.browser(Path("profile").resolve()) as page:
        page.open(url)
        page.wait_for("document.getElementById('live').textContent === 'live'")
        resumed_training(steps_saved()[-1])
        newest = steps_saved()[-1]
        page.wait_for(f"document.body.textContent.includes('step {newest}')")
        looked_through(library, page, "serve")
        page.open(Path("report.html").resolve().as_uri())
        looked_through(library, page, "report")
        check(page.complaints == [], f"the browser complains: {page.complaints}")


def looked_through(library: ModuleType, page: Any, name: str) -> None:
    """A page on all screens: nothing is cut, and all text has contrast."""
    for width, scheme in SCREENS:
        page.show_as(width=width, scheme=scheme)
        for what in (library.CUT, library.HARD_TO_READ):
            bad = page.evaluate(what)
            check(bad == [], f"{name}, {width} wide, {scheme}: {bad}")
        height = page.evaluate("document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = page.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        Path(f"screens/{name}-{width}-{scheme}.png").write_bytes(base64.b64decode(shot["data"]))


if __name__ == "__main__":
    main()
