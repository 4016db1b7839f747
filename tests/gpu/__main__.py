"""All tests marked gpu, then some of them again under the sanitizers that are installed.

    make test-gpu                     on this machine's accelerator
    make test-gpu DEVICE=cpu          what can be run without one
    python -m tests.gpu [--device TYPE] [arguments of pytest]

Says what was not run, and why. Without an accelerator that is all it does, and it exits with 0.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from tests.gpu.setups import SETUPS, why_not

__all__ = ["FILES", "Pass", "accelerator_here", "main", "passes"]

# torch's sanitizer follows streams and events, compute-sanitizer the bytes: one rank shows both.
FILES = ("tests/gpu", "tests/e2e/test_device.py", "tests/sharding/test_device.py")
"""Where tests are marked gpu. Other files import what a machine with a device may not have."""
SANITIZED = "one-plain or one-offload_over_an_axis or one-low_precision or one-unshard_early"


class Pass(NamedTuple):
    """One run of pytest, or, with `skipped`, why there is none."""

    title: str
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}
    skipped: str = ""


def accelerator_here() -> str:
    """This machine's accelerator as torch names it; empty without one."""
    own = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "" if own is None else own.type


def passes(device: str, more: Sequence[str], compute_sanitizer: str | None) -> list[Pass]:
    """What is run on the device, and what is not. `compute_sanitizer`: where it is installed."""
    tests = (sys.executable, "-m", "pytest", "-m", "gpu", "--device", device)
    sanitized = (*tests, "-k", SANITIZED, "tests/gpu")
    on_cuda = device == "cuda"
    titles = ("torch's CUDA sanitizer", "compute-sanitizer")
    made = [Pass("all tests marked gpu", (*tests, *FILES, *more))]
    if not on_cuda:
        return made + [Pass(title, skipped=f"{device} is not CUDA") for title in titles]
    made.append(Pass(titles[0], sanitized, {"TORCH_CUDA_SANITIZER": "1"}))
    if compute_sanitizer is None:
        return [*made, Pass(titles[1], skipped="it is not installed")]
    # The caching allocator would hide what lies beyond a tensor.
    whole = (compute_sanitizer, "--target-processes", "all", "--error-exitcode", "9", *sanitized)
    return [*made, Pass(titles[1], whole, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=accelerator_here())
    asked, more = parser.parse_known_args()
    if not asked.device:
        print(
            "This machine has no accelerator that torch can use: none of the tests marked gpu is "
            "run. `make test-gpu DEVICE=cpu` runs them on the CPU.",
            flush=True,
        )
        print(f"There are {collected()} of them.")
        return 0
    planned = passes(asked.device, more, shutil.which("compute-sanitizer"))
    codes = {}
    for one in planned:
        if not one.skipped:
            print(f"\n== {one.title} on {asked.device}", flush=True)
            environment = {**os.environ, **one.environment}
            codes[one.title] = subprocess.run(one.command, env=environment).returncode
    print(f"\n== {asked.device}: what was run, and what was not")
    for one in planned:
        outcome = f"not run: {one.skipped}" if one.skipped else f"exit {codes[one.title]}"
        print(f"  {one.title}: {outcome}")
    for kind in SETUPS:
        why = why_not(SETUPS[kind](asked.device))
        print(f"  ranks set up as {kind!r}: {f'not run: {why}' if why else 'run'}")
    return max(codes.values())


def collected() -> int:
    """How many tests are marked gpu."""
    command = (sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", *FILES)
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(r"(\d+)(?:/\d+)? tests collected", said)
    assert match is not None, said
    return int(match[1])


if __name__ == "__main__":
    sys.exit(main())
