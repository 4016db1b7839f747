"""The files of `examples/clusters` start the program that is there, and each level of a grace
period is longer than the one inside of it.

Method: the files are parsed. Their commands go through the parsers of torchrun and of the program;
Kubernetes objects, and the pods in JobSet and PyTorchJob, are compared with the API's schema where
`kubernetes-validate` is installed. The program itself is preempted and continued on two ranks.
With --soak the commands of pods and of SkyPilot run as they are written, on two CPU processes.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.ranks import run_ranks

yaml: Any = pytest.importorskip("yaml", reason="comes with the extra [docs]")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "clusters"
PROGRAM = "examples/clusters/train.py"
KUBERNETES = ("kubernetes_job", "kubernetes_jobset", "kubernetes_pytorchjob")
SLURM = (FOLDER / "slurm.sbatch").read_text()
# What a reader fills in, by what stands for it here.
FILLED = {
    "IMAGE": "registry.example/image:1",
    "BUCKET": "bucket",
    "ROLE_ARN": "arn:aws:iam::123456789012:role/training",
    "STORAGE_CLASS": "shared",
}
SCHEMA_VERSION = "1.31"


class Pod(NamedTuple):
    """The pods of one part of an object: how many, and their spec."""

    count: int
    spec: dict[str, Any]

    @property
    def container(self) -> dict[str, Any]:
        (container,) = self.spec["containers"]
        return container

    @property
    def environment(self) -> dict[str, str]:
        return {variable["name"]: variable["value"] for variable in self.container["env"]}


def objects(name: str) -> list[dict[str, Any]]:
    """The objects of a file, filled in."""
    text = (FOLDER / f"{name}.yaml").read_text()
    for word, value in FILLED.items():
        text = re.sub(rf"\b{word}\b", value, text)
    return list(yaml.safe_load_all(text))


def pods(name: str) -> list[Pod]:
    pods_of_parts = []
    for one in objects(name):
        spec = one.get("spec", {})
        if one["kind"] == "Job":
            pods_of_parts.append(Pod(spec["completions"], spec["template"]["spec"]))
        elif one["kind"] == "JobSet":
            (jobs,) = spec["replicatedJobs"]
            job = jobs["template"]["spec"]
            pods_of_parts.append(
                Pod(jobs["replicas"] * job["completions"], job["template"]["spec"])
            )
        elif one["kind"] == "PyTorchJob":
            for replicas in spec["pytorchReplicaSpecs"].values():
                pods_of_parts.append(Pod(replicas["replicas"], replicas["template"]["spec"]))
    assert pods_of_parts
    return pods_of_parts


def parsed(words: list[str]) -> tuple[Any, Any]:
    """A command as torchrun and as the program read it; torchrun's part is None without it."""
    from torch.distributed.run import get_args_parser

    from examples.clusters.train import parser

    launcher, *rest = [word.replace("$(JOB_COMPLETION_INDEX)", "0") for word in words]
    if launcher == "torchrun":
        launched = get_args_parser().parse_args(rest)
        script, rest = launched.training_script, launched.training_script_args
    else:
        assert launcher == "python"
        launched, (script, *rest) = None, [word for word in rest if word != "-u"]
    assert script == PROGRAM
    return launched, parser().parse_args(rest)


@pytest.mark.parametrize("name", KUBERNETES)
def test_pods_start_the_program_and_give_it_time(name: str) -> None:
    for pod in pods(name):
        launched, arguments = parsed(pod.container["command"])
        left = pod.spec["terminationGracePeriodSeconds"]
        if launched is None:
            (sleep,) = [int(word) for word in pre_stop(pod) if word.isdigit()]
            assert arguments.grace_seconds + sleep < left
            assert pod.spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
        else:
            waits = int(pod.environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
            assert arguments.grace_seconds < waits < left
            assert launched.nnodes == str(pod.count)
            gpus = pod.container["resources"]["limits"]["nvidia.com/gpu"]
            assert launched.nproc_per_node == str(gpus)
        mounted = {mount["name"] for mount in pod.container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod.spec["volumes"]}
        assert any(mount["mountPath"] == "/dev/shm" for mount in pod.container["volumeMounts"])


def pre_stop(pod: Pod) -> list[str]:
    command: list[str] = pod.container["lifecycle"]["preStop"]["exec"]["command"]
    return command


@pytest.mark.parametrize("name", KUBERNETES)
def test_what_pods_refer_to_is_in_the_same_file(name: str) -> None:
    there = {(one["kind"], one["metadata"]["name"]) for one in objects(name)}
    for pod in pods(name):
        if "serviceAccountName" in pod.spec:
            assert ("ServiceAccount", pod.spec["serviceAccountName"]) in there
        for volume in pod.spec["volumes"]:
            claim = volume.get("persistentVolumeClaim")
            assert claim is None or ("PersistentVolumeClaim", claim["claimName"]) in there
        url = parsed(pod.container["command"])[1].url
        mounts = [mount["mountPath"] for mount in pod.container["volumeMounts"]]
        assert url.startswith(("s3://bucket/", *(f"{mount}/" for mount in mounts)))


def test_the_first_pod_is_named_as_its_controller_names_it() -> None:
    (job,) = pods("kubernetes_job")
    assert ("Service", job.spec["subdomain"]) in {
        (one["kind"], one["metadata"]["name"]) for one in objects("kubernetes_job")
    }
    name = objects("kubernetes_job")[-1]["metadata"]["name"]
    launched, _ = parsed(job.container["command"])
    assert launched.master_addr == f"{name}-0.{job.spec['subdomain']}"
    jobset = objects("kubernetes_jobset")[-1]
    (jobs,) = jobset["spec"]["replicatedJobs"]
    launched, _ = parsed(pods("kubernetes_jobset")[0].container["command"])
    name = jobset["metadata"]["name"]
    assert launched.master_addr == f"{name}-{jobs['name']}-0-0.{name}"


@pytest.mark.parametrize("name", KUBERNETES)
def test_objects_fit_the_schema_of_the_api(name: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="not a dependency; optional")
    for one in objects(name):
        kind, spec = one["kind"], one.get("spec", {})
        if kind == "JobSet":
            template = spec["replicatedJobs"][0]["template"]
            one = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **template}
        elif kind == "PyTorchJob":
            template = spec["pytorchReplicaSpecs"]["Worker"]["template"]
            one = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}}
            one["template"] = template
        validator.validate(one, SCHEMA_VERSION, strict=True)


def test_pre_stop_signals_the_ranks_and_nothing_else() -> None:
    """By their command lines, as torchrun starts them; none of these processes is signalled."""
    for name in ("kubernetes_job", "kubernetes_jobset"):
        (pod,) = pods(name)
        command = " ".join(pre_stop(pod))
        (pattern,) = set(re.findall(r"-f '([^']*)'", command))
        assert re.search(pattern, f"/usr/bin/python3.11 -u {PROGRAM} s3://bucket/x")
        assert not re.search(pattern, f"/usr/bin/python3.11 /usr/bin/torchrun {PROGRAM} x")
        assert not re.search(pattern, command)


def test_slurm_gives_every_level_its_time() -> None:
    signalled = re.search(r"^#SBATCH --signal=B:USR1@(\d+)$", SLURM, re.M)
    waits = re.search(r"^export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)$", SLURM, re.M)
    grace = re.search(r"--grace-seconds (\d+)", SLURM)
    assert signalled and waits and grace
    assert int(grace[1]) < int(waits[1]) < int(signalled[1])
    subprocess.run(["bash", "-n", str(FOLDER / "slurm.sbatch")], check=True)
    assert PROGRAM in SLURM and "#SBATCH --requeue" in SLURM


def test_skypilot_runs_the_program() -> None:
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    command = task["run"].replace("\\\n", " ").removeprefix("exec ")
    variables = {"$SKYPILOT_NUM_NODES": "2", "$SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    variables |= {"$SKYPILOT_NODE_RANK": "0", '$(echo "$SKYPILOT_NODE_IPS" | head -n 1)': "host"}
    for name, value in {**variables, "$URL": task["envs"]["URL"]}.items():
        assert name in command
        command = command.replace(name, value)
    launched, arguments = parsed(shlex.split(command))
    assert launched.nnodes == str(task["num_nodes"]) and "$" not in command
    assert arguments.url.startswith("s3://")


@pytest.mark.ranks
def test_the_program_is_preempted_and_continues(tmp_path: Path) -> None:
    stopped = run_ranks(2, preempted_then_continued, str(tmp_path / "root"))
    assert stopped[0] == stopped[1] >= SIGNALLED


SIGNALLED = 12  # SIGTERM reaches rank 1 in this step


def preempted_then_continued(url: str) -> int:
    """On each rank; the step after which all of them stopped."""
    import ckpt
    import examples.clusters.train as program

    steps = 0

    class Clock:
        @staticmethod
        def sleep(_: float) -> None:
            nonlocal steps
            steps += 1
            if steps == SIGNALLED and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGTERM)

    program.time = Clock  # type: ignore[assignment]
    settings: Any = {"every": 10**6, "grace_seconds": 100.0, "step_seconds": 0.0}
    with pytest.raises(ckpt.Preempted) as caught:
        program.train(url, steps=10**6, **settings)
    stopped = caught.value.step
    assert caught.value.saved_step == stopped
    steps = SIGNALLED
    program.train(url, steps=stopped + 2, **settings)
    assert steps == SIGNALLED + 2  # it went on, and did not begin again
    assert [info.step for info in ckpt.list_steps(url)] == [stopped, stopped + 2]
    return stopped


# --- with --soak: the commands run ---------------------------------------------------------------


def started(words: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """One command of a file, in the folder that its relative paths mean."""
    words = (
        [sys.executable, "-m", "torch.distributed.run", *words[1:]]
        if (words[0] == "torchrun")
        else [sys.executable, *words[1:]]
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(words, cwd=ROOT, env=variables)


def commands(name: str, url: str, port: int) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The command of each of two pods, changed only where this machine is not that cluster."""
    for rank, pod in enumerate((pods(name) * 2)[:2]):
        words = []
        for word in pod.container["command"]:
            word = word.replace("$(JOB_COMPLETION_INDEX)", str(rank))
            word = re.sub(r"^--nproc-per-node=8$", "--nproc-per-node=1", word)
            word = re.sub(r"^--master-addr=.*", "--master-addr=127.0.0.1", word)
            word = re.sub(r"^--master-port=.*", f"--master-port={port}", word)
            words.append(url if word.startswith(("s3://", "/checkpoints/")) else word)
        operator = {"RANK": str(rank), "WORLD_SIZE": "2"}  # what the operator of PyTorchJob sets
        operator |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        yield words, {**pod.environment, **(operator if words[0] == "python" else {})}


@pytest.mark.soak
@pytest.mark.ranks
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", KUBERNETES)
def test_commands_of_pods_are_preempted_and_finish(name: str, tmp_path: Path) -> None:
    import ckpt

    url = str(tmp_path / "root")

    def both(*more: str) -> list[subprocess.Popen[bytes]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        return [
            started([*words, *more], environment)
            for words, environment in commands(name, url, port)
        ]

    running = both("--steps=1000000", "--every=10", "--step-seconds=0.01")
    while not (tmp_path / "root").exists() or not ckpt.list_steps(url):
        assert all(process.poll() is None for process in running)
        time.sleep(0.2)
    running[1].terminate()
    statuses = [process.wait(timeout=120) for process in running]
    assert 0 not in statuses
    if name == "kubernetes_pytorchjob":
        assert statuses == [143, 143]
    (*_, newest) = [info.step for info in ckpt.list_steps(url)]
    assert [process.wait(timeout=240) for process in both(f"--steps={newest + 5}")] == [0, 0]
    assert ckpt.list_steps(url)[-1].step == newest + 5


@pytest.mark.soak
@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_the_command_of_skypilot_runs(tmp_path: Path) -> None:
    import ckpt

    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    (tmp_path / "bin").mkdir()
    launcher = tmp_path / "bin" / "torchrun"
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m torch.distributed.run "$@"\n')
    launcher.chmod(0o755)
    url = str(tmp_path / "root")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "2"}
    variables |= {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "127.0.0.1", "URL": url}
    variables |= {"PATH": f"{launcher.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = task["run"].replace("--master-port=29500", f"--master-port={port}")
    subprocess.run(["bash", "-c", command], cwd=ROOT, env={**os.environ, **variables}, check=True)
    assert ckpt.list_steps(url)[-1].step == 1000
