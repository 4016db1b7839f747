"""Run seeds, each in a fresh child of one parent, so that it finds the same memory every time.

python -m tests.simulation 17             one seed
python -m tests.simulation 0-99           a hundred; one line of JSON for each
python -m tests.simulation 17 --trace     every point of it, on standard error
"""

# ruff: noqa: E402 - the standard library is patched before others take functions out of it
from __future__ import annotations

import os
import sys

if os.environ.get("PYTHONHASHSEED") != "0":  # sets of strings are iterated by their hashes
    os.environ["PYTHONHASHSEED"] = "0"
    os.environ["OMP_NUM_THREADS"] = "1"
    os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])

from tests.simulation import primitives

primitives.install()

from tests.simulation import runs

if __name__ == "__main__":
    runs.main(sys.argv[1:])
