"""Tests and benchmarks of a device, on a machine without a network, in bounded time.

    python3 kit/run.py [--seconds 420] [--device cuda] [--out DIR] [--parts NAME ...] [--small]

Needs this interpreter's torch and nothing else: the wheels beside this file are unpacked into a
temporary folder. Each part has its share of the time and runs in processes of its own; one that
fails or is killed costs no other part anything. After each part, DIR has `results.json` and
`table.txt`. Ends with 0 when every part passed, 1 otherwise, 2 when nothing could be run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
TAIL_LINES = 30
ENDING_SECONDS = 15.0
"""Of the time that was asked for: to end the last part's processes, and to tidy up."""
OTHERS = ("tests/e2e/test_device.py", "tests/sharding/test_device.py")

SEEN = """\
import json, platform, sys, torch, ckpt, sharding, storage
import benchmarks.on_device, pytest, tests.gpu.real, xdist.remote, xdist.workermanage  # compiles
own = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
kind = own.type if own is not None else ""
module = torch.get_device_module(kind) if kind else None
print(json.dumps({
    "python": platform.python_version(), "torch": torch.__version__, "device": kind,
    "cards": [module.get_device_name(n) for n in range(module.device_count())]
    if hasattr(module, "get_device_name") else [],
    "cuda": torch.version.cuda, "shardpoint": ckpt.__version__,
}))
"""


# A collective of one rank. NCCL may wait for ever for an interface that leads nowhere.
COLLECTIVE = """\
import sys, tempfile, torch, torch.distributed as dist
kind, backend = sys.argv[1:]
torch.get_device_module(kind).set_device(0)
dist.init_process_group(
    backend, init_method="file://" + tempfile.mkdtemp() + "/one", rank=0, world_size=1
)
one = torch.ones(1, device=kind)
dist.all_reduce(one)
print(one.item(), flush=True)
"""
COLLECTIVE_SECONDS = 25
# What to try, in this order: as the machine is, over loopback alone, without NCCL.
WAYS: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("the machine's interfaces", {}),
    ("loopback", {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}),
    ("gloo", {"SHARDPOINT_TEST_BACKEND": "gloo"}),
)


class Part(NamedTuple):
    """One command and its share of the time that is left when it starts."""

    name: str
    share: float
    command: tuple[str, ...]
    needs: str = ""
    """Why it is left out here; empty where it runs."""
    environment: Mapping[str, str] = {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=420, help="for everything together")
    parser.add_argument("--device", help="cuda, xpu, ...; by default what torch finds; or cpu")
    parser.add_argument("--out", default="kit-results", help="folder for results.json, table.txt")
    parser.add_argument("--parts", nargs="+", help="only these, by their names in the table")
    parser.add_argument("--directory", help="for checkpoints; /dev/shm, where there is one")
    parser.add_argument("--small", action="store_true", help="small sizes; always so on a CPU")
    asked = parser.parse_args()
    deadline = time.monotonic() + asked.seconds - ENDING_SECONDS
    out = Path(asked.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kit-") as folder:
        site = Path(folder) / "site"
        problem = unpacked(site)
        if problem:
            print(problem, file=sys.stderr)
            return 2
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(HERE / "source"), str(site))),
            "PYTHONUNBUFFERED": "1",
            # torch and the wheels may lie there as sources alone, and each part imports both often.
            "PYTHONPYCACHEPREFIX": str(Path(folder) / "bytecode"),
            "PYTHONDONTWRITEBYTECODE": "",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": folder,
            # Plugins of the machine's own may not fit the tests.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        seen = subprocess.run(
            (sys.executable, "-c", SEEN),
            cwd=HERE / "source",
            env=environment,
            capture_output=True,
            text=True,
        )
        if seen.returncode:
            print(f"{seen.stderr}\nThe packages or torch cannot be imported here.", file=sys.stderr)
            return 2
        facts: dict[str, Any] = json.loads(seen.stdout.splitlines()[-1])
        device = asked.device or facts["device"] or "cpu"
        small = asked.small or device == "cpu"
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else folder
        planned = parts(device, small, asked.directory or memory, Path(folder) / "rows.json")
        if asked.parts:
            planned = [one for one in planned if one.name in asked.parts]
        way = collectives(device, environment, deadline) if device != "cpu" else ""
        results = Results(
            out, {**facts, "device": device, "seconds": asked.seconds, "collectives": way}
        )
        for number, part in enumerate(planned):
            left = deadline - time.monotonic()
            waiting = sum(one.share for one in planned[number:] if not one.needs)
            seconds = left * part.share / waiting if waiting else 0
            results.add(part, *carried_out(part, seconds, environment, out, Path(folder)))
    print(results.table(), flush=True)
    return int(any(one["outcome"] not in ("passed", "left out") for one in results.parts))


def collectives(device: str, environment: dict[str, str], deadline: float) -> str:
    """Find out how one rank's collectives work here; what it takes stays in `environment`."""
    own = "nccl" if device == "cuda" else "gloo"
    for name, more in WAYS:
        backend = more.get("SHARDPOINT_TEST_BACKEND", own)
        command = (sys.executable, "-c", COLLECTIVE, device, backend)
        seconds = min(COLLECTIVE_SECONDS, deadline - time.monotonic())
        with contextlib.suppress(subprocess.TimeoutExpired):
            tried = subprocess.run(
                command, env={**environment, **more}, capture_output=True, timeout=max(1, seconds)
            )
            if tried.returncode == 0:
                environment.update(more)
                return f"over {name}"
    return "none works"


def unpacked(site: Path) -> str:
    """Unpack all wheels for this interpreter; returns what prevents it."""
    wheels = sorted((HERE / "wheels").glob("*.whl"))
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    tags = {wheel.stem.split("-")[-3] for wheel in wheels}
    wrong = sorted(tag for tag in tags if re.fullmatch(r"cp3\d+", tag) and tag != own)
    if own not in tags and any("abi3" not in w.stem for w in wheels if wrong):
        return (
            f"This kit has wheels for {', '.join(wrong)}, and this interpreter is {own}: run it "
            f"with another, or build one with `make kit PYTHON_VERSION=3.{sys.version_info.minor}`."
        )
    if importlib.util.find_spec("torch") is None:
        return f"{sys.executable} has no torch; the kit uses the one that is there."
    for wheel in wheels:
        # Of packages that torch needs, too, its own versions stay: they come with it.
        with zipfile.ZipFile(wheel) as file:
            file.extractall(site)
    return ""


def parts(device: str, small: bool, directory: str, rows: Path) -> list[Part]:
    """All parts in their order: what is most worth knowing first. Rows of benchmarks go to `rows`,
    failures of tests beside it.
    """
    failures = rows.with_name("failures.txt")
    python = sys.executable
    workers = max(2, min(14, (os.cpu_count() or 1) - 1))  # ranks wait half of the time
    many = ("-n", str(workers))
    tests = (
        *(python, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "gpu", "-o", "addopts="),
        *("-p", "xdist.plugin", "-p", "pytest_timeout", "--failures", str(failures)),
        *("-s", "--import-mode=importlib", "--device", device),  # ranks say where they were ended
    )
    bench = (
        *(python, "-m", "benchmarks.on_device", "--device", device, "--directory", directory),
        *("--json", str(rows)),
    )
    rounds = ("--rounds", "1" if small else "2")
    sizes = ("--gib", "0.05") if small else ("--gib", "1")
    large = "0.1" if small else "8"
    host_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    no_memory = f"{host_gib} GiB of memory are too few" if host_gib < 3 * 40 else ""
    no_memory = "sizes are small" if small else no_memory
    widths = ("--widths", "64") if small else ("--widths", "1024", "2896", "8192")
    sanitizer = shutil.which("compute-sanitizer") or ""
    has_compiler = any(map(shutil.which, ("c++", "g++", "clang++")))
    no_compiler = "" if has_compiler else "there is no compiler, and torch.compile wants one"
    # Without a device the tests are all there is to learn; the benchmarks only show that they run.
    most = 30 if device == "cpu" else 12
    no_cuda = "" if device == "cuda" else f"{device} is not CUDA"
    no_sanitizer = no_cuda or ("" if sanitizer else "it is not installed")
    # The caching allocator would hide what lies beyond a tensor.
    bare = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    once = (python, "-m", "tests.gpu.once", "plain", "--device", device)

    def checked(tool: str) -> tuple[str, ...]:
        one = (sanitizer, "--tool", tool, "--target-processes", "all", "--error-exitcode", "9")
        # NCCL asks for kernels of other cards.
        return (*one, *(("--report-api-errors", "no") if tool == "memcheck" else ()), *once)

    def state(package: str) -> Part:
        missing = "" if importlib.util.find_spec(package) else f"{package} is not installed"
        file = "tests/layout/test_composites.py" if package == "torchao" else "tests/wild"
        return Part(f"{package} states", 1, (*tests[:-2], "-k", package, file), missing)

    def measured(name: str, share: float, *options: str, needs: str = "") -> Part:
        command = (*bench, *options, "--parts", *name.split())
        return Part(name, share, command, needs)

    def saved(name: str, gib: str, needs: str = "") -> Part:
        command = (*bench, "--rounds", "1", "--gib", gib, "--parts", "saves", "--alone")
        return Part(name, 4, command, needs)

    return [
        Part("scenarios, one rank", most, (*tests, *many, "-k", "one-", "tests/gpu")),
        Part(
            "scenarios, ranks that share it",
            most,
            # A device takes its time to let a process begin: all of them begin one after another.
            (*tests, "-n", str(max(2, workers // 3)), "-k", "sharing-", "tests/gpu"),
        ),
        Part("other tests of a device", 4, (*tests, *many, *OTHERS)),
        measured("steps", 4, *rounds, *widths),
        measured("wrapper", 4, *rounds, *widths),
        measured("compiled", 3, *rounds, *widths, needs=no_compiler),
        measured("ddp", 3, *rounds, *widths),
        measured("saves", 5, *rounds, *sizes),
        saved("large saves", large),
        saved("saves of 40 GiB", "40", no_memory),
        measured("loads near", 5, *rounds, *sizes),
        measured("dicts", 3, *rounds, "--gib", large),
        Part("compute-sanitizer memcheck", 4, checked("memcheck"), no_sanitizer, bare),
        Part("compute-sanitizer racecheck", 3, checked("racecheck"), no_sanitizer, bare),
        Part(
            "torch's CUDA sanitizer",
            3,
            (*tests, *many, "-k", "one-plain or one-offload_over_an_axis", "tests/gpu"),
            no_cuda,
            {"TORCH_CUDA_SANITIZER": "1"},
        ),
        state("torchao"),
        state("bitsandbytes"),
    ]


def carried_out(
    part: Part, seconds: float, environment: dict[str, str], out: Path, folder: Path
) -> tuple[str, float, str, list[Any]]:
    """Outcome, seconds, log, and the rows that a benchmark wrote."""
    if part.needs:
        return "left out", 0.0, part.needs, []
    print(f"== {part.name}, {seconds:.0f} s at most", flush=True)
    rows, failures = folder / "rows.json", folder / "failures.txt"
    rows.unlink(missing_ok=True)
    failures.unlink(missing_ok=True)
    log = out / (re.sub(r"\W+", "-", part.name) + ".log")
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            part.command,
            cwd=HERE / "source",
            env={**environment, **part.environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            code = None
        kill(process)
    taken = time.monotonic() - started
    outcome = "out of time" if code is None else "passed" if code == 0 else f"exit {code}"
    if failures.exists():  # pytest tells of them at its end, which a part may not reach
        with log.open("a") as file:
            file.write(failures.read_text(errors="replace"))
    written = rows.read_text().splitlines() if rows.exists() else []
    return outcome, taken, log.read_text(errors="replace"), [json.loads(one) for one in written]


def kill(process: subprocess.Popen[bytes]) -> None:
    """The process, and every one that it has started in its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):  # at the first they say where they stood
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        time.sleep(1.0)
    process.wait()


class Results:
    """What was found so far, on disk after each part."""

    def __init__(self, out: Path, facts: dict[str, Any]) -> None:
        self.out, self.facts = out, facts
        self.parts: list[dict[str, Any]] = []

    def add(self, part: Part, outcome: str, seconds: float, log: str, blocks: list[Any]) -> None:
        """Add a part and write everything down."""
        counts: dict[str, int] = {}
        for word in re.findall(r"\b(PASSED|FAILED|SKIPPED|ERROR) ", log):
            counts[word.lower()] = counts.get(word.lower(), 0) + 1
        # A failure of pytest is in its summary again.
        failed = sorted(set(re.findall(r"^FAILED (\S+)", log, re.MULTILINE)))
        if failed:
            counts["failed"] = len(failed)
        if outcome == "passed" and any("FAILED" in block["title"] for block in blocks):
            outcome = "failed in part"
        self.parts.append(
            {
                "name": part.name,
                "outcome": outcome,
                "seconds": round(seconds, 1),
                "tests": counts,
                "failed": failed,
                "blocks": blocks,
                "why": log if outcome == "left out" else "",
                "tail": [] if outcome in ("passed", "left out") else log.splitlines()[-TAIL_LINES:],
            }
        )
        (self.out / "results.json").write_text(
            json.dumps({**self.facts, "parts": self.parts}, indent=1)
        )
        (self.out / "table.txt").write_text(self.table())

    def table(self) -> str:
        """All of it as text: facts, outcomes, figures."""
        facts = ", ".join(f"{name} {value}" for name, value in self.facts.items())
        lines = [facts, ""]
        for one in self.parts:
            tests = ", ".join(f"{count} {word}" for word, count in one["tests"].items())
            detail = one["why"] or tests
            lines.append(
                f"{one['name']}: {one['outcome']}, {one['seconds']} s; {detail}".rstrip("; ")
            )
            lines += [f"    failed: {name}" for name in one["failed"]]
            for block in one["blocks"]:
                lines += [f"  {block['title']}", *(f"    {line}" for line in block["lines"])]
        return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
