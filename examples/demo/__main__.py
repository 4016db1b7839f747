"""Train, die in a save, resume, be preempted, resume again, lose a host, export, look at it.

python -m examples.demo [--url s3://bucket/prefix] [--option endpoint_url=http://localhost:9000]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ckpt
from examples.demo.report import Run, write_report
from examples.demo.timeline import Story, timeline
from storage import open_store

HERE = Path(__file__).resolve().parent
STEPS = 120
SAVE_EVERY = 20
KILLED_IN_SAVE_OF = 80
PREEMPTED_AFTER = 85
NEAR_EVERY = 5
HOST_LOST_AFTER = 33
LOST_HOST_UNTIL = 60
# Another number of ranks adds up gradients in another order: 5e-7 of the loss where measured.
TOLERANCE = 1e-3


class Demo:
    """Where everything goes, and how jobs are started."""

    def __init__(self, url: str, out: Path, storage_options: dict[str, Any]) -> None:
        self.url, self.out, self.storage_options = url, out, storage_options

    @contextmanager
    def job(
        self, name: str, ranks: int, *arguments: str
    ) -> Iterator[list[subprocess.Popen[bytes]]]:
        """A training of `ranks` processes; they are gone when the block ends."""
        environment = {**os.environ, "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        environment["INIT_METHOD"] = (self.out / f"meet-{name}").as_uri()
        command = [sys.executable, "-m", "examples.demo.train", "--url", self.url]
        command += ["--storage-options", json.dumps(self.storage_options)]
        command += ["--losses", str(self.losses(name)), "--steps", str(STEPS), *arguments]
        log = (self.out / f"{name}.log").open("wb")
        processes = [
            subprocess.Popen(
                command, env={**environment, "RANK": str(rank)}, stdout=log, stderr=log
            )
            for rank in range(ranks)
        ]
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
            log.close()

    def losses(self, name: str) -> Path:
        """Where rank 0 of a job notes its losses."""
        return self.out / f"{name}.jsonl"

    def run(self, name: str, ranks: int, *arguments: str) -> Run:
        """Run a job to its end."""
        with self.job(name, ranks, *arguments) as processes:
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes):
                    break
                time.sleep(0.05)
            failed = [rank for rank, process in enumerate(processes) if process.wait(60)]
        if failed:
            log = (self.out / f"{name}.log").read_text(errors="replace")
            sys.exit(f"{name}: ranks {failed} failed\n{log[-4000:]}")
        return self.read(name)

    def has_reached(self, name: str, step: int) -> bool:
        """Whether a job has noted the loss of that step."""
        file = self.losses(name)
        return file.exists() and f'"step": {step},' in file.read_text(encoding="utf-8")

    def read(self, name: str) -> Run:
        """The losses that a job has noted, by step."""
        lines = self.losses(name).read_text(encoding="utf-8").splitlines()
        return {entry["step"]: entry["loss"] for entry in map(json.loads, lines)}


def main() -> None:
    """Run everything; exits with an error when something is not as promised."""
    started = time.monotonic()
    demo = _demo()
    say(f"checkpoints go to {demo.url}, everything else to {demo.out}")

    say("\n1. an uninterrupted training on 4 ranks (FSDP2), to compare with")
    whole = demo.run("uninterrupted", 4)
    say(f"   loss {whole[1]:.3f} -> {whole[STEPS]:.3f} in {STEPS} steps")

    say(f"2. the same training, saving every {SAVE_EVERY} steps; SIGKILL in the middle of a save")
    killed = train_and_kill(demo)
    latest = ckpt.list_steps(demo.url, storage_options=demo.storage_options)[-1]
    expect(latest.step == KILLED_IN_SAVE_OF - SAVE_EVERY, f"latest is step {latest.step}")
    say(
        f"   killed in the save of step {KILLED_IN_SAVE_OF}; the latest checkpoint is {latest.step}"
    )
    report = ckpt.verify(demo.url, storage_options=demo.storage_options)
    expect(report.ok, f"verify: {report.damage}")
    say(f"   verified: all {report.blocks} blocks are as they were written")

    say("3. resumed on 4 ranks")
    same = demo.run("resumed-4", 4, "--resume", "--resume-step", str(latest.step))
    different = [step for step, loss in same.items() if loss != whole[step]]
    expect(len(same) == STEPS - latest.step and not different, f"losses differ at {different}")
    say(f"   {len(same)} losses, every one bit-equal to the uninterrupted training")

    say("4. resumed on 2 ranks, saving again; SIGTERM to one of them, as when a job is preempted")
    half = train_and_preempt(demo)
    saved = ckpt.list_steps(demo.url, storage_options=demo.storage_options)[-1]
    expect(saved.step == max(half) < STEPS, f"latest is step {saved.step}")
    say(f"   both ranks saved step {saved.step}, which was their last one, and exited with 0")
    half |= demo.run("resumed-2-again", 2, "--resume", "--save-every", str(SAVE_EVERY))
    apart = max(abs(loss - whole[step]) for step, loss in half.items())
    expect(len(half) == STEPS - latest.step and apart < TOLERANCE, f"losses differ by {apart}")
    say(f"   {len(half)} losses, at most {apart:.1e} from the uninterrupted training")
    kept = [step.step for step in ckpt.list_steps(demo.url, storage_options=demo.storage_options)]
    say(f"   kept by KeepLatest(2) | KeepEvery(60): steps {', '.join(map(str, kept))}")

    say(
        f"5. 4 ranks on 2 hosts, near saves every {NEAR_EVERY} steps with a copy at the other host;"
    )
    say("   one host dies with all that it had, and the training continues on 2 ranks")
    near, durable = lose_a_host(demo, whole)

    say("6. exported, and loaded without this library")
    model = demo.out / "model.safetensors"
    exported = ckpt.export(demo.url, str(model), storage_options=demo.storage_options)
    say(f"   {model}: {len(exported.tensors)} tensors, {exported.nbytes:,} bytes")
    command = [sys.executable, str(HERE / "evaluate.py"), str(model), str(STEPS + 1)]
    loss = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    expect(abs(loss - whole[STEPS]) < 0.25, f"the exported model has a loss of {loss}")
    say(f"   its loss on the next batch is {loss:.3f}; the training ended with {whole[STEPS]:.3f}")

    runs = {"uninterrupted": whole, "killed": killed, "4 ranks": same, "2 ranks": half}
    stored = []
    for step in (latest.step, STEPS):
        with ckpt.open(demo.url, step, storage_options=demo.storage_options) as checkpoint:
            stored.append((checkpoint, [checkpoint.info(fqn) for fqn in checkpoint]))
    picture = demo.out / "report.html"
    events = {KILLED_IN_SAVE_OF: "SIGKILL while saving", latest.step: "resumed from here"}
    events[saved.step] = "SIGTERM: saved, and left"
    happened = [
        ("SIGKILL to 4 ranks in the middle of a save", KILLED_IN_SAVE_OF - latest.step),
        ("SIGTERM to one of 2 ranks", 0),
        ("one of 2 hosts lost, near saves on", HOST_LOST_AFTER - near),
        ("the same without near saves", HOST_LOST_AFTER - durable),
    ]
    write_report(picture, runs, stored, events=events, happened=happened)
    ends = (SAVE_EVERY, KILLED_IN_SAVE_OF, latest.step, saved.step)
    story = Story(whole, killed, same, half, *ends)
    (demo.out / "timeline.json").write_text(story.to_json(), encoding="utf-8")
    (demo.out / "timeline.svg").write_text(timeline(story), encoding="utf-8")
    say("\nwhat happened                               steps to train again")
    for event, steps in happened:
        say(f"{event:44}{steps:2}")
    here = Path.cwd()
    options = "".join(f" -o {key}={value}" for key, value in demo.storage_options.items())
    say(f"\nall as promised, in {time.monotonic() - started:.0f} s. Look next:")
    for line in (
        f"ls {shortened(demo.url, here)}{options}",
        f"watch {shortened(demo.url, here)}{options} --once",
    ):
        say(f"  {shortened(Path(sys.executable).with_name('ckpt'), here)} {line}")
    say(f"  and, in a browser, {picture}")


def train_and_kill(demo: Demo) -> Run:
    """Kill all ranks when some have stored their part of a checkpoint, and one has not."""
    store = open_store(demo.url, **demo.storage_options)
    arguments = ("--save-every", str(SAVE_EVERY), "--straggle-at", str(KILLED_IN_SAVE_OF))
    with demo.job("killed", 4, *arguments) as processes:
        while not list(store.list(f"steps/{KILLED_IN_SAVE_OF:08d}-")):
            if any(process.poll() is not None for process in processes):
                log = (demo.out / "killed.log").read_text(errors="replace")
                sys.exit(f"the training ended before it was killed\n{log[-4000:]}")
            time.sleep(0.02)
        for process in processes:
            process.send_signal(signal.SIGKILL)
    store.close()
    return demo.read("killed")


def train_and_preempt(demo: Demo) -> Run:
    """SIGTERM to one rank in the middle of the training; both end by themselves, with status 0."""
    with demo.job("resumed-2", 2, "--resume", "--save-every", str(SAVE_EVERY)) as processes:
        while not demo.has_reached("resumed-2", PREEMPTED_AFTER):
            if any(process.poll() is not None for process in processes):
                log = (demo.out / "resumed-2.log").read_text(errors="replace")
                sys.exit(f"the training ended before it was preempted\n{log[-4000:]}")
            time.sleep(0.02)
        processes[1].send_signal(signal.SIGTERM)
        codes = [process.wait(60) for process in processes]
    expect(codes == [0, 0], f"exit codes {codes}")
    return demo.read("resumed-2")


def lose_a_host(demo: Demo, whole: Run) -> tuple[int, int]:
    """Lose a host in the middle of a training, and continue from what the other one has, on fewer
    ranks, one of them on a new host. Returns the steps of the newest near and durable checkpoint.
    """
    hosts = [demo.out / f"host{number}" for number in range(3)]
    near = Demo(f"{demo.url.rstrip('/')}-near", demo.out, demo.storage_options)
    how = ("--save-every", str(SAVE_EVERY), "--near-every", str(NEAR_EVERY), "--hosts")
    with near.job("host-lost", 4, *how, *(str(hosts[rank // 2]) for rank in range(4))) as processes:
        while not near.has_reached("host-lost", HOST_LOST_AFTER):
            if any(process.poll() is not None for process in processes):
                log = (demo.out / "host-lost.log").read_text(errors="replace")
                sys.exit(f"the training ended before its host was lost\n{log[-4000:]}")
            time.sleep(0.02)
        for process in processes[2:]:
            process.kill()
        shutil.rmtree(hosts[1])
    durable = ckpt.list_steps(near.url, storage_options=near.storage_options)[-1].step
    until = ("--resume", "--until", str(LOST_HOST_UNTIL))
    resumed = near.run("host-replaced", 2, *until, *how, str(hosts[0]), str(hosts[2]))
    reports = [
        json.loads(Path(f"{near.losses('host-replaced')}.restored-{rank}").read_text("utf-8"))
        for rank in range(2)
    ]
    step = reports[0]["step"]
    for report in reports:
        expect((report["origin"], report["step"]) == ("near", step), f"restored {report}")
        expect(report["nbytes"]["durable"] == 0, f"read the durable root: {report}")
    expect(step > durable, f"near step {step} is not newer than the durable step {durable}")
    peers = sum(report["nbytes"]["other hosts"] for report in reports)
    expect(peers > 0, "nothing came from another host")
    apart = max(abs(loss - whole[number]) for number, loss in resumed.items())
    expect(len(resumed) == LOST_HOST_UNTIL - step and apart < TOLERANCE, f"differ by {apart}")
    say(f"   lost after step {HOST_LOST_AFTER}; resumed from near step {step}, where the newest")
    say(f"   durable one was {durable}: 0 of those read, {peers:,} bytes from the other host,")
    say(f"   {len(resumed)} losses at most {apart:.1e} from the uninterrupted training")
    return step, durable


def shortened(path: str | Path, folder: Path) -> str:
    """As one types it in `folder`."""
    return str(path).removeprefix(f"{folder}/")


def say(text: str) -> None:
    """Print a line for the person who watches."""
    print(text, flush=True)


def expect(holds: bool, text: str) -> None:
    """End the demo when it does not show what it says."""
    if not holds:
        sys.exit(f"the demo failed: {text}")


def _demo() -> Demo:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--url", help="where checkpoints go; default: a folder of --out")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="emptied first")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    if out.exists() and not (out / "uninterrupted.log").exists() and any(out.iterdir()):
        sys.exit(f"{out} is there and is not from an earlier demo; choose another with --out")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    url = str(out / "checkpoints")
    if arguments.url:
        # A folder of its own for every run: the demo deletes nothing in a store.
        url = f"{arguments.url.rstrip('/')}/demo-{time.strftime('%Y%m%d-%H%M%S')}"
    return Demo(url, out, dict(option.split("=", 1) for option in arguments.option))


if __name__ == "__main__":
    main()
