"""All benchmarks, one after the other: `make bench`. Each can be run by itself, with options.

python -m benchmarks [save_load small_tensors export manifest]
"""

from __future__ import annotations

import subprocess
import sys

BENCHMARKS = ("save_load", "small_tensors", "export", "manifest")


def main() -> None:
    """Run those named on the command line, or all. Exits with 1 when one fails."""
    chosen = sys.argv[1:] or BENCHMARKS
    if unknown := [name for name in chosen if name not in BENCHMARKS]:
        sys.exit(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    failed = []
    for name in chosen:
        print(f"\n== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode:
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
