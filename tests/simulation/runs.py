"""Seeds, one after the other: each is a forked child of a parent that has imported everything.

A child finds exactly the memory that every other child of such a parent finds, whatever ran before
it. Nothing of a child is left over: threads of killed processes end with it.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import importlib
import json
import logging
import os
import random
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.simulation import primitives
from tests.simulation.bugs import BUGS
from tests.simulation.job import Simulation
from tests.simulation.scheduler import Scheduler

REAL_SECONDS_MAX = 300  # of a child: it hangs, which is a bug of the simulation
WARM_UP = "warm up"


def main(arguments: list[str]) -> None:
    """The command line; see `python -m tests.simulation --help`."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("seeds", nargs="+", help="numbers, or ranges such as 0-99")
    parser.add_argument("--trace", action="store_true", help="every point, on standard error")
    parser.add_argument("--bug", choices=BUGS, help="a planted one: tests.simulation.bugs")
    parser.add_argument("--until-seen", action="store_true", help="stop at the first problem")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    gc.disable()
    for name in in_child(WARM_UP, trace=False)["modules"]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)  # what is imported late: its locks would be simulated
    gc.collect()
    gc.freeze()
    if chosen.bug:
        BUGS[chosen.bug]()
    for text in chosen.seeds:
        first, _, last = text.partition("-")
        for seed in range(int(first), int(last or first) + 1):
            outcome = in_child(str(seed), trace=chosen.trace)
            print(json.dumps(outcome), flush=True)
            if chosen.until_seen and outcome["problems"]:
                return


def in_child(seed: str, *, trace: bool) -> dict[str, Any]:
    """What a seed gave: problems, counts and the digest of its trace."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="simulation-", dir=memory) as folder:
        return _in_child(seed, Path(folder), trace=trace)


def _in_child(seed: str, folder: Path, *, trace: bool) -> dict[str, Any]:
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            faulthandler.dump_traceback_later(REAL_SECONDS_MAX, exit=True)
            os.close(read)
            result = _simulate(seed, folder, trace)
            if seed == WARM_UP:
                result["modules"] = sorted(sys.modules)
            answer = json.dumps(result).encode()
            with os.fdopen(write, "wb") as pipe:
                pipe.write(answer)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not answer:
        return {"seed": seed, "problems": [f"no answer, status {status}"], "counts": {}}
    given: dict[str, Any] = json.loads(answer)
    return given


def _simulate(seed: str, folder: Path, trace: bool) -> dict[str, Any]:
    scheduler = Scheduler(seed)
    if trace:
        scheduler.echo = lambda line: print(line, file=sys.stderr)
    random.seed(seed)  # pauses between tries have some of it
    primitives.begin(scheduler)
    try:
        problems, counts = Simulation(scheduler, seed, folder).run()
    except Exception as error:
        problems = ["".join(traceback.format_exception(error)), *scheduler.trace]
        counts = {}
    finally:
        primitives.end()
    return {
        "seed": seed,
        "problems": problems,
        "counts": dict(counts),
        "digest": scheduler.digest,
        "seconds": round(scheduler.now, 3),
    }
