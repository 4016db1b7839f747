"""Search with coverage for inputs that a reader of foreign bytes neither takes nor refuses.

    python -m tests.fuzz manifest --seconds 600

Needs `atheris` (libFuzzer for Python). An input that takes more than 2 seconds of a CPU, or 64 MiB
of memory more than was ever taken before, ends the search like an error does; `--patience` bounds
the time by a clock. What reached new code is then tried once more with all memory counted. What
breaks a reader is printed and kept in `tests/fuzz/corpus`; with `--keep`, so are some of the inputs
that reached what none before them had reached. `--results` appends what was counted, for
docs/guarantee_counts.py.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import random
import re
import resource
import secrets
import shutil
import subprocess
import sys
import tempfile
import tracemalloc
from functools import partial
from pathlib import Path

from tests.results import Counted, append, this_run

COMMAND = "python -m tests.fuzz"
CORPUS = Path(__file__).parent / "corpus"
KEPT_NBYTES_MAX = 2048  # per input; large ones say little


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help="by default all, one after the other")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--patience", type=int, default=10, help="seconds for one input")
    parser.add_argument("--seed", type=int, default=secrets.randbits(31), help="of libFuzzer")
    parser.add_argument("--results", type=Path, metavar="FILE", help="append what was counted")
    parser.add_argument("--keep", type=int, default=0, metavar="N", help="inputs to keep of each")
    parser.add_argument("--search", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)  # of what lies in a tier and does not count
    if args.search:
        return _search(args)
    from tests.fuzz.targets import all_targets

    failed = 0
    run = this_run(COMMAND, args.seed)
    for name in args.targets or all_targets():
        samples = all_targets()[name].samples()
        with tempfile.TemporaryDirectory() as folder:
            counts = search_with_coverage(name, samples, Path(folder), args)
        failed += counts["broken"]
        if args.results:
            test = f"tests/fuzz/__main__.py::search_with_coverage[{name}]"
            append(args.results, test, not counts["broken"], counts, run)
    return 1 if failed else 0


def search_with_coverage(
    name: str, samples: list[bytes], folder: Path, args: argparse.Namespace
) -> Counted:
    """How many inputs were tried, and how many broke the reader. Each search is a process:
    libFuzzer ends its own.
    """
    counts, before = Counted(), _cpu_seconds()
    inputs = folder / "inputs"
    inputs.mkdir()
    own = CORPUS / name
    for number, sample in enumerate(samples):
        (inputs / f"sample{number}").write_bytes(sample)
    if own.exists():
        shutil.copytree(own, inputs, dirs_exist_ok=True)
    command = [sys.executable, "-m", "tests.fuzz", name, "--search", str(folder)]
    command += ["--seconds", str(args.seconds), "--patience", str(args.patience)]
    command += ["--seed", str(args.seed)]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stderr.splitlines()
    states = [line for line in lines if "cov:" in line]
    print(f"{name}: {states[-1] if states else 'no state'}", flush=True)
    broken = [path for path in folder.iterdir() if path.is_file()]
    for path in broken:
        _keep(own, path.read_bytes())
        print("\n".join([line for line in lines if "cov:" not in line][-40:]), flush=True)
    # Each was written because it reached what none before it had reached.
    new = [path for path in inputs.iterdir() if not path.name.startswith("sample")]
    tried = max(
        (int(match[1]) for line in states if (match := re.match(r"#(\d+)", line))), default=0
    )
    counts(inputs=tried, broken=len(broken) + _beyond_bounds(name, new))
    counts(CPU_seconds=round(_cpu_seconds() - before))
    if args.keep:
        small = sorted(path.read_bytes() for path in new if path.stat().st_size <= KEPT_NBYTES_MAX)
        for data in random.Random(0).sample(small, min(args.keep, len(small))):
            _keep(own, data)
    return counts


def _beyond_bounds(name: str, paths: list[Path]) -> int:
    """How many of these inputs break the reader when all memory is counted. They are kept."""
    from tests.fuzz.bounds import within_bounds
    from tests.fuzz.targets import all_targets

    broken = 0
    tracemalloc.start()
    for path in paths:
        try:
            within_bounds(all_targets()[name], path.read_bytes())
        except Exception as error:
            broken += 1
            print(f"{name}: {error!r}", flush=True)
            _keep(CORPUS / name, path.read_bytes())
    tracemalloc.stop()
    return broken


def _cpu_seconds() -> float:
    """Of the searches of this process that are over, and of itself."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def _keep(folder: Path, data: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / hashlib.sha256(data).hexdigest()[:12]).write_bytes(data)


def _search(args: argparse.Namespace) -> int:
    import atheris

    with atheris.instrument_imports(include=["ckpt", "storage"]):
        from tests.fuzz.targets import all_targets
    from tests.fuzz.bounds import within_rough_bounds
    from tests.fuzz.mutations import mutated

    folder = Path(args.search)
    target = all_targets()[args.targets[0]]
    samples = target.samples()
    for sample in samples:  # what is imported late takes memory, too
        target.try_(sample)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        return mutated(data or samples[0], samples, random.Random(seed))[:max_size]

    options = [f"-max_total_time={args.seconds}", f"-timeout={args.patience}", "-rss_limit_mb=4096"]
    options += [f"-seed={args.seed or 1}", f"-artifact_prefix={folder}/", "-max_len=65536"]
    # A file of an input that is slow by a clock would count as one that broke the reader.
    options += [f"-report_slow_units={args.patience}"]
    arguments = [sys.argv[0], *options, str(folder / "inputs")]
    atheris.Setup(arguments, partial(within_rough_bounds, target), custom_mutator=mutate)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
