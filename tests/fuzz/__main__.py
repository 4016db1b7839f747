"""Search with coverage for inputs that a reader of foreign bytes neither takes nor refuses.

    python -m tests.fuzz manifest --seconds 600

Needs `atheris` (libFuzzer for Python). An input that takes more than 2 seconds (`--patience` on a
machine with other work), or more memory than 512 MiB at once, ends the search like an error does.
What breaks a reader is printed and kept in `tests/fuzz/corpus`; with `--keep`, so are some of the
inputs that reached what none before them had reached.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
KEPT_NBYTES_MAX = 2048  # per input; large ones say little


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help="by default all, one after the other")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--patience", type=int, default=2, help="seconds for one input")
    parser.add_argument("--keep", type=int, default=0, metavar="N", help="inputs to keep of each")
    parser.add_argument("--search", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.search:
        return _search(args)
    from tests.fuzz.targets import all_targets

    failed = 0
    for name in args.targets or all_targets():
        samples = all_targets()[name].samples()
        with tempfile.TemporaryDirectory() as folder:
            failed += _run(name, samples, Path(folder), args)
    return 1 if failed else 0


def _run(name: str, samples: list[bytes], folder: Path, args: argparse.Namespace) -> bool:
    """Whether an input broke the reader. Each search is a process: libFuzzer ends its own."""
    inputs = folder / "inputs"
    inputs.mkdir()
    own = CORPUS / name
    for number, sample in enumerate(samples):
        (inputs / f"sample{number}").write_bytes(sample)
    if own.exists():
        shutil.copytree(own, inputs, dirs_exist_ok=True)
    command = [sys.executable, "-m", "tests.fuzz", name, "--search", str(folder)]
    command += ["--seconds", str(args.seconds), "--patience", str(args.patience)]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stderr.splitlines()
    states = [line for line in lines if "cov:" in line]
    print(f"{name}: {states[-1] if states else 'no state'}", flush=True)
    broken = [path for path in folder.iterdir() if path.is_file()]
    for path in broken:
        _keep(own, path.read_bytes())
        print("\n".join([line for line in lines if "cov:" not in line][-40:]), flush=True)
    if args.keep:
        # Each was written because it reached what none before it had reached.
        new = [path for path in inputs.iterdir() if not path.name.startswith("sample")]
        small = sorted(path.read_bytes() for path in new if path.stat().st_size <= KEPT_NBYTES_MAX)
        for data in random.Random(0).sample(small, min(args.keep, len(small))):
            _keep(own, data)
    return bool(broken)


def _keep(folder: Path, data: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / hashlib.sha256(data).hexdigest()[:12]).write_bytes(data)


def _search(args: argparse.Namespace) -> int:
    import atheris

    with atheris.instrument_imports(include=["ckpt", "storage"]):
        from tests.fuzz.targets import all_targets
    from tests.fuzz.mutations import mutated

    folder = Path(args.search)
    target = all_targets()[args.targets[0]]
    samples = target.samples()

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        return mutated(data or samples[0], samples, random.Random(seed))[:max_size]

    options = [f"-max_total_time={args.seconds}", f"-timeout={args.patience}", "-rss_limit_mb=4096"]
    options += ["-malloc_limit_mb=512", f"-artifact_prefix={folder}/", "-max_len=65536"]
    arguments = [sys.argv[0], *options, str(folder / "inputs")]
    atheris.Setup(arguments, target.try_, custom_mutator=mutate)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
