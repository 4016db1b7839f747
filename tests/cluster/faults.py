"""What happens to a life: one function for each fault, which returns what shows that it struck.

A fault acts while a job lives, and is over when its function returns. Its counts are of what it did
to somebody: packets lost, requests refused, calls that failed, processes that stood still. A fault
without any has proved nothing, and the test says so.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

from tests.cluster.cluster import (
    END_SECONDS,
    PATIENCE_SECONDS,
    STEPS_MAX,
    Cluster,
    Ends,
    Running,
    some_hosts,
)
from tests.cluster.disk import NAMES, READS, SYNCS, WRITES, fill, read_only
from tests.cluster.gateway import Orders
from tests.cluster.history import Event
from tests.cluster.network import Host

SAVED_SECONDS = 60.0  # for a save on a machine with much else to do

Happening = Callable[[Cluster, Running, random.Random], Counter[str]]


class Fault(NamedTuple):
    """A fault, and how the documents say that a job ends that it meets. `prepare` gives further
    fields of the `Start` of its ranks.
    """

    happen: Happening
    ends: Ends = "any"
    prepare: Callable[[Cluster], dict[str, Any]] = lambda cluster: {}

    @property
    def name(self) -> str:
        return self.happen.__name__


def some_seconds(rng: random.Random) -> float:
    """Less than a rank waits for the store or for others."""
    return rng.uniform(0.5, 3.0)


def long_or_short(rng: random.Random) -> float:
    """Less than the patience of ranks, or more."""
    return rng.choice((1.0, 3.0, PATIENCE_SECONDS + 3))


# Processes ---------------------------------------------------------------------------------------


def nothing(cluster: Cluster, life: Running, rng: random.Random) -> Counter[str]:
    """The life ends by itself, with the clocks of its hosts hours apart."""
    began = [event for event in cluster.events(life) if event.kind == "began"]
    wrong = {round((event.facts["clock"] - time.time()) / 3600) for event in began}
    return Counter({"clocks apart": len(wrong)})


def kill_a_rank(cluster: Cluster, life: Running, rng: random.Random) -> Counter[str]:
    """SIGKILL one rank."""
    return Counter(killed=life.signal(signal.SIGKILL, [rng.randrange(len(life.pids))]))


def kill_a_host(cluster: Cluster, life: Running, rng: random.Random) -> Counter[str]:
    """SIGKILL all ranks of a host."""
    return Counter(killed=life.signal(signal.SIGKILL, life.ranks_on(rng.choice(life.hosts))))


def kill_all(cluster: Cluster, life: Running, rng: random.Random) -> Counter[str]:
    """SIGKILL the whole job."""
    return Counter(killed=life.signal(signal.SIGKILL))


def lose_a_host(cluster: Cluster, life: Running, rng: random.Random) -> Counter[str]:
    """A host loses power: it sends no word, not even that its connections are over. What is in its
    folder is gone, and an empty host comes back.
    """
    host = rng.choice(life.hosts)
    before = cluster.network.lost()
    with _cut_off(cluster, host, [*cluster.network.hosts, cluster.network.store]):
        # The first packets that get no answer, and then the end of what sends them.
        time.sleep(0.3)
        killed = life.signal(signal.SIGKILL, life.ranks_on(host))
        files = cluster.lose_host(host)
        time.sleep(some_seconds(rng))
    lost = cluster.network.lost() - before
    effects = Counter({"killed": killed, "packets lost": lost})
    return effects + Counter({"files lost": files})


def stop_a_rank(cluster: Cluster, life: Running, rng: random.Random) -> Counter[str]:
    """SIGSTOP one rank for some seconds."""
    with _standing(cluster, life, [rng.randrange(len(life.pids))]) as stopped:
        time.sleep(some_seconds(rng))
    return Counter({"stood still": stopped})


def rival(cluster: Cluster, life: Running, rng: random.Random) -> Counter[str]:
    """A second job begins on the same root while the first goes on, which is fenced."""
    hosts = rng.sample(cluster.network.hosts, cluster.place.replicas + rng.choice((1, 2)))
    other = cluster.start(hosts, 1, steps=rng.randrange(4, 12), ends="any")
    cluster.finish(other)
    saved = sum(event.kind in ("saved", "near saved") for event in cluster.events(other))
    return Counter({"saves of the rival": saved})


def two_at_once(cluster: Cluster, life: Running, rng: random.Random) -> Counter[str]:
    """Two more jobs begin at the same moment on the same root."""
    hosts = rng.sample(cluster.network.hosts, 2 * (cluster.place.replicas + 1))
    halves = hosts[::2], hosts[1::2]
    jobs = [cluster.start(half, 1, steps=8, ends="any") for half in halves]
    for job in jobs:
        cluster.finish(job)
    events = [event for job in jobs for event in cluster.events(job)]
    saved = sum(event.kind in ("saved", "near saved") for event in events)
    return Counter({"saves of rivals": saved})


def zombie(cluster: Cluster, life: Running, rng: random.Random) -> Counter[str]:
    """The job stands still until another one has lived on its root, and goes on then."""
    with _standing(cluster, life, range(len(life.pids))) as stopped:
        effects = rival(cluster, life, rng)
    return effects + Counter({"stood still": stopped})


@contextmanager
def _standing(cluster: Cluster, life: Running, ranks: Sequence[int]) -> Iterator[int]:
    """Ranks stand still; how many do."""
    began = time.monotonic()
    life.signal(signal.SIGSTOP, list(ranks))
    time.sleep(0.1)
    try:
        yield life.stopped()
    finally:
        life.signal(signal.SIGCONT, list(ranks))
        cluster.note(life.number, "stopped", seconds=time.monotonic() - began)


# Links -------------------------------------------------------------------------------------------


def lose_the_store(cluster: Cluster, life: Running, rng: random.Random) -> Counter[str]:
    """The store is away for some seconds, for all hosts or for one, or only its answers are."""
    network, before = cluster.network, cluster.network.lost()
    for host in rng.choice((network.hosts, [rng.choice(life.hosts)])):
        if rng.random() < 0.5:
            network.cut(host, network.store)
        else:
            network.cut(network.store, host, one_way=True)
    return _packets_lost(cluster, before, some_seconds(rng))


def isolate_a_host(cluster: Cluster, life: Running, rng: random.Random) -> Counter[str]:
    """One host reaches no other, but perhaps the store, for less or for more than the patience."""
    network, before = cluster.network, cluster.network.lost()
    host = rng.choice(life.hosts)
    with _cut_off(cluster, host, [*network.hosts, *([network.store] * rng.randrange(2))]):
        time.sleep(long_or_short(rng))
    return Counter({"packets lost": network.lost() - before})


def split_in_halves(cluster: Cluster, life: Running, rng: random.Random) -> Counter[str]:
    """Half of the hosts of the job reach the other half no longer; one half may lose the store."""
    network, before = cluster.network, cluster.network.lost()
    hosts = list(dict.fromkeys(life.hosts))
    rng.shuffle(hosts)
    half = hosts[: len(hosts) // 2]
    for one in half:
        for other in hosts:
            if other not in half:
                network.cut(one, other)
    if rng.random() < 0.5:
        for one in half:
            network.cut(one, network.store)
    return _packets_lost(cluster, before, long_or_short(rng))


def split_in_one_direction(cluster: Cluster, life: Running, rng: random.Random) -> Counter[str]:
    """What one host sends to another is lost, for less or for more than the patience."""
    before = cluster.network.lost()
    one, other = rng.sample(list(dict.fromkeys(life.hosts)), 2)
    cluster.network.cut(one, other, one_way=True)
    return _packets_lost(cluster, before, long_or_short(rng))


def slow_link(cluster: Cluster, life: Running, rng: random.Random) -> Counter[str]:
    """All that goes to one host and comes from it shares 200 kB/s for some seconds."""
    host = rng.choice(life.hosts)
    cluster.network.slow_down(host, 200_000)
    try:
        time.sleep(some_seconds(rng) + 1)
    finally:
        held = cluster.network.speed_up(host)
    return Counter({"packets held up": held})


def lose_a_peer(cluster: Cluster, life: Running, rng: random.Random) -> Counter[str]:
    """Copies of near states do not reach one host, or come from it; the training is not cut."""
    before, host = cluster.network.lost(), rng.choice(life.hosts)
    for other in set(life.hosts) - {host}:
        cluster.network.cut_second(host, other)
    effects = _packets_lost(cluster, before, long_or_short(rng))
    failed = [event for event in cluster.events(life) if event.kind == "near failed"]
    return effects + Counter({"near saves failed": len(failed)})


@contextmanager
def _cut_off(cluster: Cluster, host: Host, others: Sequence[Host]) -> Iterator[None]:
    for other in others:
        if other != host:
            cluster.network.cut(host, other)
    try:
        yield
    finally:
        cluster.network.mend()


def _packets_lost(cluster: Cluster, before: int, seconds: float) -> Counter[str]:
    try:
        time.sleep(seconds)
    finally:
        cluster.network.mend()
    return Counter({"packets lost": cluster.network.lost() - before})


# The store ---------------------------------------------------------------------------------------


def slow_store(cluster: Cluster, life: Running, rng: random.Random) -> Counter[str]:
    """Answers of the store come late."""
    return _gateway(cluster, Orders(delay_seconds=rng.uniform(0.2, 1.0)), rng, ["waited"])


def narrow_store(cluster: Cluster, life: Running, rng: random.Random) -> Counter[str]:
    """All bodies together share a narrow link to the store."""
    return _gateway(cluster, Orders(bandwidth=rng.uniform(5e4, 2e5)), rng, ["waited"])


def failing_store(cluster: Cluster, life: Running, rng: random.Random) -> Counter[str]:
    """Requests are refused, cut and reset in every way that clouds know."""
    kinds = ("error500", "slow_down", "too_many", "held", "reset", "cut_body")
    return _gateway(cluster, Orders(rng.uniform(0.2, 0.7), kinds), rng, kinds)


def lost_answers(cluster: Cluster, life: Running, rng: random.Random) -> Counter[str]:
    """What was requested happened, and the answer is lost."""
    return _gateway(cluster, Orders(rng.uniform(0.3, 0.7), ("lost_reply",)), rng, ["lost_reply"])


def failing_names(cluster: Cluster, life: Running, rng: random.Random) -> Counter[str]:
    """The name of the store is not resolved, while old connections break."""
    orders = Orders(0.7, ("reset",), names=rng.choice(("refuse", "silent")))
    return _gateway(cluster, orders, rng, ["names refused", "names not answered"])


def _gateway(
    cluster: Cluster, orders: Orders, rng: random.Random, shown: Sequence[str]
) -> Counter[str]:
    gateway = cluster.place.gateway
    assert gateway is not None
    before = gateway.order(orders)
    time.sleep(some_seconds(rng) + 1.0)
    after = gateway.order(Orders())
    return Counter({name: after[name] - before[name] for name in shown if after[name]})


def expiring_credentials(cluster: Cluster, life: Running, rng: random.Random) -> Counter[str]:
    """The store refuses the credentials of the job from now on; the next ones come later."""
    gateway, number = cluster.place.gateway, _credentials(cluster)
    assert gateway is not None
    cluster.wait_for(life, lambda events: any(e.kind == "saved" for e in events), SAVED_SECONDS)
    before = gateway.order(Orders(valid_from=number + 1))
    time.sleep(some_seconds(rng))
    _write_credentials(cluster, number + 1, valid_seconds=3600)
    deadline, new = time.monotonic() + SAVED_SECONDS, f"with cred-{number + 1}"
    after = gateway.order(Orders(valid_from=number + 1))
    while not after[new] and life.alive() and time.monotonic() < deadline:
        time.sleep(0.2)
        after = gateway.order(Orders(valid_from=number + 1))
    gateway.order(Orders())
    refused = after["expired"] - before["expired"]
    # Without both, nothing has expired in the middle.
    return Counter({"refused as expired": refused}) if after[new] else Counter()


def with_credentials(cluster: Cluster) -> dict[str, Any]:
    """A job whose credentials come from a program, and have to be fetched anew again and again."""
    configuration = cluster.folder / "aws.config"
    program = f"cat {_credentials_file(cluster)}"
    configuration.write_text(f"[default]\nregion = us-east-1\ncredential_process = {program}\n")
    # Clients fetch new ones from 15 minutes before the end on.
    _write_credentials(cluster, _credentials(cluster) + 1, valid_seconds=900 + 2)
    secrets = ("key", "secret", "token")
    options = {name: v for name, v in cluster.place.options.items() if name not in secrets}
    environment = {"AWS_CONFIG_FILE": str(configuration), "AWS_EC2_METADATA_DISABLED": "true"}
    return {"options": options, "environment": environment}


def _credentials_file(cluster: Cluster) -> Path:
    return cluster.folder / "credentials.json"


def _credentials(cluster: Cluster) -> int:
    """The number of the newest ones."""
    path = _credentials_file(cluster)
    key = json.loads(path.read_text())["AccessKeyId"] if path.exists() else "cred-0"
    return int(key.removeprefix("cred-"))


def _write_credentials(cluster: Cluster, number: int, *, valid_seconds: int) -> None:
    until = datetime.now(timezone.utc) + timedelta(seconds=valid_seconds)
    fields = {
        "Version": 1,
        "AccessKeyId": f"cred-{number}",
        "SecretAccessKey": "secret",
        "SessionToken": "token",
        "Expiration": until.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    new = _credentials_file(cluster).with_suffix(".new")
    new.write_text(json.dumps(fields))
    new.rename(_credentials_file(cluster))


# Disks -------------------------------------------------------------------------------------------


def fill_the_disk(cluster: Cluster, life: Running, rng: random.Random) -> Counter[str]:
    """Somebody else's file takes all space that is left, for some seconds."""
    assert cluster.place.folder is not None
    with _disk_counts(cluster, "no space") as effects:
        fill(cluster.place.folder, some_seconds(rng))
    return effects


def fill_a_tier(cluster: Cluster, life: Running, rng: random.Random) -> Counter[str]:
    """The same in the folder of one host's near states."""
    assert cluster.place.tiers is not None
    folder = cluster.place.tiers[rng.choice(life.hosts).name]
    with _disk_counts(cluster, "no space") as effects:
        fill(folder, some_seconds(rng))
    failed = [event for event in cluster.events(life) if event.kind == "near failed"]
    return effects + Counter({"near saves failed": len(failed)})


def make_read_only(cluster: Cluster, life: Running, rng: random.Random) -> Counter[str]:
    """The disk is remounted read-only for some seconds, as a kernel does after errors."""
    assert cluster.place.folder is not None
    with _disk_counts(cluster, "read only") as effects, read_only(cluster.place.folder):
        time.sleep(some_seconds(rng))
    return effects


def failing_disk(cluster: Cluster, life: Running, rng: random.Random) -> Counter[str]:
    """Calls end with EIO: reads, writes, syncs, changes of names, or any of them."""
    disk = cluster.place.disk
    assert disk is not None
    kinds = rng.choice((READS, WRITES, SYNCS, NAMES, WRITES | SYNCS, 15))
    with _disk_counts(cluster, "failed") as effects:
        disk.fail(kinds, rng.choice((20, 60, 100)))
        time.sleep(some_seconds(rng))
        disk.recover()
    return effects


def slow_disk(cluster: Cluster, life: Running, rng: random.Random) -> Counter[str]:
    """Every call to the disk takes long."""
    disk = cluster.place.disk
    assert disk is not None
    with _disk_counts(cluster, "delayed") as effects:
        disk.slow_down(rng.uniform(0.02, 0.2))
        time.sleep(some_seconds(rng) + 1.0)
        disk.recover()
    return effects


@contextmanager
def _disk_counts(cluster: Cluster, name: str) -> Iterator[Counter[str]]:
    """Of the calls of this cluster's processes, those that were counted in the block."""
    disk, effects = cluster.place.disk, Counter[str]()
    assert disk is not None
    before = disk.counts()[name]
    yield effects
    effects[f"calls {name}"] = disk.counts()[name] - before


# An operator -------------------------------------------------------------------------------------


def operator(cluster: Cluster, life: Running, rng: random.Random) -> Counter[str]:
    """Somebody looks, verifies, prunes, copies, imports and reshards meanwhile."""
    cluster.wait_for(life, lambda events: any(e.kind == "saved" for e in events), SAVED_SECONDS)
    source, step = _import_source(cluster, life)
    url = cluster.place.url
    commands = (
        ["verify", url],
        ["prune", url, "--keep-last", "2", "--yes"],
        ["cp", url, f"{url}-copy-{life.number}"],
        ["import", source, url, "--step", str(step)],
        ["reshard", url, "--ranks", str(rng.randrange(1, 5))],
    )
    effects = Counter[str]()
    for words in rng.sample(commands, len(commands)):
        code, errors = run_ckpt(cluster, rng.choice(cluster.network.hosts), words)
        effects[words[0]] += code == 0
        if code or "Traceback" in errors:
            cluster.problems.append(f"ckpt {' '.join(words)} ended with {code}: {errors}")
    return effects


def run_ckpt(cluster: Cluster, host: Host, words: Sequence[str]) -> tuple[int, str]:
    """Run a command on a host; its exit status and what it wrote about errors."""
    options = cluster.place.options
    given = [f"-o{key}={value}" for key, value in options.items() if key != "client_kwargs"]
    region = ["env", "AWS_DEFAULT_REGION=us-east-1"]
    command = [*region, sys.executable, "-W", "ignore", "-m", "ckpt", *words, *given]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with host.popen(command, **pipes) as process:
        _, errors = process.communicate(timeout=END_SECONDS)
    return process.returncode, errors


def _import_source(cluster: Cluster, life: Running) -> tuple[str, int]:
    """A file of another library, and the step that it is to have here."""
    from safetensors.torch import save_file

    from tests.cluster.agent import IMPORTED_FROM, state_of

    step = IMPORTED_FROM + life.number
    state = state_of(step, 0, 1)
    path = cluster.folder / f"import-{life.number}.safetensors"
    tensors = {"rows.tensor": state["rows"].local.detach(), "replica": state["replica"]}
    save_file(tensors, str(path))
    return str(path), step


# Lives -------------------------------------------------------------------------------------------


def live_once(
    cluster: Cluster, fault: Fault, rng: random.Random, *, early: float | None = None
) -> None:
    """One life with one fault at a random moment. Its history says what became of it.

    Some faults strike before the first step, a share of `early`: a restore may fail then, which is
    an error of the job. Others strike while it trains.
    """
    hosts, per_host = some_hosts(cluster, rng)
    is_early = rng.random() < (EARLY if early is None else early)
    # What is to end well outlives its fault: a last save that fails is an error of the job, too.
    outlives = fault.ends == "harmless"
    ends: Ends = "any" if outlives and is_early else fault.ends
    steps = STEPS_MAX if outlives else rng.randrange(30, 60)
    life = cluster.start(hosts, per_host, steps=steps, ends=ends, **fault.prepare(cluster))
    if not is_early:
        cluster.wait_for(life, _has_stepped, SAVED_SECONDS)
    time.sleep(rng.uniform(0.1, 1.5))
    cluster.met[fault.name] += bool(life.alive())
    effects = fault.happen(cluster, life, rng)
    cluster.effects.setdefault(fault.name, Counter()).update(effects)
    if outlives:
        cluster.wait_for(life, _has_stepped, SAVED_SECONDS)
        life.end()
    cluster.finish(life)


def _has_stepped(events: Sequence[Event]) -> bool:
    return any(event.kind == "stepped" for event in events)


def without_effect(cluster: Cluster) -> list[str]:
    """The faults that this schedule has not shown to strike: they prove nothing."""
    return [name for name, effects in cluster.effects.items() if not sum(effects.values())]


# Which faults there are, by what a job saves to ---------------------------------------------------

EARLY = 0.2  # so many of the faults strike before the first step

PROCESSES = (
    Fault(nothing, "harmless"),
    Fault(stop_a_rank, "harmless"),
    Fault(kill_a_rank),
    Fault(kill_a_host),
    Fault(kill_all),
    Fault(rival, "fenced"),
    Fault(zombie, "fenced"),
    Fault(two_at_once, "fenced"),
)
LINKS = (
    Fault(isolate_a_host),
    Fault(split_in_halves),
    Fault(split_in_one_direction),
)
STORE = (
    Fault(lose_the_store, "harmless"),
    Fault(slow_store, "harmless"),
    Fault(narrow_store, "harmless"),
    Fault(failing_store, "harmless"),
    Fault(lost_answers, "harmless"),
    Fault(failing_names, "harmless"),
    Fault(expiring_credentials, "harmless", with_credentials),
)
DISK = (
    Fault(fill_the_disk, "harmless"),
    Fault(make_read_only, "harmless"),
    Fault(failing_disk, "harmless"),
    Fault(slow_disk, "harmless"),
)
ON_S3 = (*PROCESSES, *LINKS, *STORE, Fault(slow_link, "harmless"), Fault(operator, "harmless"))
ON_DISK = (*PROCESSES, *DISK, Fault(operator, "harmless"))
NEAR = (
    *PROCESSES,
    *LINKS,
    Fault(lose_a_host),
    Fault(lose_the_store, "harmless"),
    Fault(slow_link, "harmless"),
    Fault(fill_a_tier, "harmless"),
)
COPIED = (*NEAR, Fault(lose_a_peer, "harmless"), Fault(lose_a_host), Fault(lose_a_host))
NEAR_ON_DISKS = (*NEAR, Fault(failing_disk, "harmless"), Fault(slow_disk, "harmless"))
