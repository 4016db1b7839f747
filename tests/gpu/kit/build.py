"""Build the kit: one folder with which a machine without a network tests and measures its device.

    make kit [PYTHON_VERSION=3.12]            -> build/kit
    python -m tests.gpu.kit.build DIR [--python 3.12]

It has wheels of everything but torch and what comes with it (numpy, CUDA), our sources, the tests
of the device, the benchmarks, and `run.py`. At most 60 MiB.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
NBYTES_MAX = 60 << 20
SOURCES = ("storage", "ckpt", "sharding", "tests", "benchmarks", "pyproject.toml", "LICENSE")
NEEDED_TO_TEST = (
    *("hypothesis", "psutil", "pytest", "pytest-timeout", "pytest-xdist", "safetensors"),
    *("cryptography", "zstandard"),
)
# They come with torch; another version of them than it was built with may break it.
WITH_TORCH = ("torch", "numpy")
PLATFORMS = ("2_28", "2_27", "2_24", "2_17", "2_12", "2_5")


def needed() -> list[str]:
    """What the package and the tests of a device need, but for what comes with torch."""
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert listed is not None
    names = re.findall(r'"([^"]+)"', listed[1])
    own = [name for name in names if not re.match(rf"({'|'.join(WITH_TORCH)})\b", name)]
    return [*own, *NEEDED_TO_TEST]


def build(folder: Path, python: str) -> int:
    """Write the kit, in place of one that is there; returns its bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    platforms = [f"manylinux_{one}_x86_64" for one in PLATFORMS]
    platforms += [f"manylinux{one}_x86_64" for one in ("2014", "2010", "1")]
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        # Versions that are pinned for the interpreter of this folder may have no wheel for another.
        own = f"{sys.version_info.major}.{sys.version_info.minor}" == python
        constraints.write("\n".join(one for one in pinned if own and not one.startswith("torch")))
        constraints.flush()
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"),
                *("--only-binary=:all:", "--implementation", "cp", "--python-version", python),
                *(part for one in platforms for part in ("--platform", one)),
                *("-c", constraints.name, "-d", str(wheels), *needed()),
            ],
            check=True,
        )
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "golden", "corpus")
    for name in SOURCES:
        source, target = ROOT / name, folder / "source" / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=ignored)
        else:
            shutil.copy(source, target)
    shutil.copy(Path(__file__).with_name("run.py"), folder / "run.py")
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of the machine that it is for")
    given = parser.parse_args()
    nbytes = build(given.folder, given.python)
    print(f"{given.folder}: {nbytes / (1 << 20):.1f} MiB for Python {given.python}")
    if nbytes > NBYTES_MAX:
        print(f"That is more than {NBYTES_MAX >> 20} MiB.", file=sys.stderr)
        return 1
    print(f"There: python3 {given.folder.name}/run.py --seconds 420")
    return 0


if __name__ == "__main__":
    sys.exit(main())
