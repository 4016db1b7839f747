"""Trainings on several hosts, under everything that happens to hosts, links, disks and stores.

Method: jobs of real processes on hosts that are network namespaces, with clocks hours apart, live
one after the other on one root; one fault meets each at a random moment, and an onlooker loads what
is listed meanwhile. The weights of a step are a function of the step. What every rank was told is
compared with the root: `history` and `near_history` say which promises that breaks, and are tested
by `test_history`. Every fault has to show that it struck. `--seed` repeats the schedules, though
not what the machine does meanwhile.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from storage import Store, open_store
from tests.cluster.agent import KEEP
from tests.cluster.cluster import HOSTS, Cluster, Place
from tests.cluster.disk import FailingDisk, loop_disk, no_loop_disk, shim, small_disk
from tests.cluster.faults import (
    COPIED,
    NEAR,
    NEAR_ON_DISKS,
    ON_DISK,
    ON_S3,
    Fault,
    live_once,
    without_effect,
)
from tests.cluster.gateway import Gateway, gateway
from tests.cluster.history import (
    CHECKS,
    broken_promises,
    counts,
    left_behind,
    read_history,
    root_of,
    wrong_bits,
)
from tests.cluster.near_history import NEAR_CHECKS, due_promises, left_in_tiers
from tests.cluster.network import Network, unavailable
from tests.conftest import Scale
from tests.results import Counted
from tests.servers import S3Server, moto_server

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(7200)]

DISK_NBYTES = 32 << 20  # of a root on a disk
AGAIN = 2  # lives more for a fault that struck nobody
TIER_NBYTES = 16 << 20  # of a host's memory for near states


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if reason := unavailable():
        pytest.skip(reason)
    with Network(HOSTS) as made:
        yield made


@pytest.fixture(scope="module")
def s3(network: Network) -> Iterator[S3Server]:
    """A moto server on a host of its own."""
    with moto_server(network.store.address, network.store.within) as server:
        yield server


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """What makes calls fail."""
    library = shim(tmp_path)
    if library is None:
        pytest.skip("a disk that fails needs a C compiler")
    return library


def _live(
    cluster: Cluster, store: Store, faults: Sequence[Fault], rng: random.Random, lives: int
) -> None:
    """Lives with faults, each as often as the others, and a last life on all hosts without one."""
    order = [*faults] * (lives // len(faults)) + rng.sample(faults, lives % len(faults))
    rng.shuffle(order)
    cluster.look(cluster.network.hosts[-1])
    for fault in order:
        live_once(cluster, fault, rng)
        cluster.problems += wrong_bits(store)
    idle = without_effect(cluster)  # their job had ended, or had not come so far
    for fault in [fault for fault in faults if fault.name in idle] * AGAIN:
        if fault.name in without_effect(cluster):
            live_once(cluster, fault, rng, early=0.0)
    last = cluster.start(cluster.network.hosts, 1, steps=20, ends="harmless")
    cluster.finish(last)


def _judge(cluster: Cluster, store: Store, kept_min: int, counted: Counted) -> None:
    """Compare what callers were told with what is there."""
    events = read_history(cluster.folder)
    tiers = cluster.place.tiers
    checks = CHECKS if tiers is None else (*CHECKS, *NEAR_CHECKS)
    broken = [*cluster.problems, *broken_promises(events, root_of(store, kept_min), checks)]
    broken += [*left_behind(store), *left_in_tiers(tiers or {})]
    effects = {name: dict(effect) for name, effect in sorted(cluster.effects.items())}
    print(f"{dict(counts(events))}, {len(due_promises(events))} near promises due")
    print(f"met {dict(cluster.met)}\neffects {effects}")
    idle = without_effect(cluster)
    counted(**counts(events), faults=sum(cluster.met.values()), kinds_of_faults=len(cluster.met))
    if tiers is not None:
        counted(near_promises_due=len(due_promises(events)))
    counted(broken_promises=len(broken), faults_without_effect=len(idle))
    assert not broken, "\n".join(broken)
    assert any(event.kind == "saved" for event in events)
    assert any(event.kind == "seen" for event in events), "the onlooker saw nothing"
    assert not idle, f"these faults met nobody, so the schedule proves nothing: {idle}"


def test_jobs_on_s3(
    network: Network,
    s3: S3Server,
    tmp_path: Path,
    rng: random.Random,
    scale: Scale,
    counted: Counted,
) -> None:
    url = f"s3://{s3.make_bucket()}/run"
    with (
        closing(open_store(url, **s3.options)) as store,
        gateway(network, s3.endpoint_url) as between,
        Cluster(network, tmp_path, _on_s3(url, s3, between)) as cluster,
    ):
        _live(cluster, store, ON_S3, rng, scale.count(len(ON_S3), 20 * len(ON_S3)))
        _judge(cluster, store, 2, counted)


def test_jobs_on_a_shared_disk(
    network: Network,
    library: Path,
    tmp_path: Path,
    rng: random.Random,
    scale: Scale,
    counted: Counted,
) -> None:
    with small_disk(tmp_path / "disk", DISK_NBYTES, network.guard) as folder:
        disk = FailingDisk(library, tmp_path / "control", folder)
        place = Place(f"{folder}/run", {}, folder=folder, disk=disk)
        with (
            closing(open_store(place.url)) as store,
            Cluster(network, tmp_path, place) as cluster,
        ):
            _live(cluster, store, ON_DISK, rng, scale.count(len(ON_DISK), 20 * len(ON_DISK)))
            _judge(cluster, store, 2, counted)


@pytest.mark.parametrize("medium", ["memory", "disk", "copies"])
def test_jobs_with_near_tiers(
    network: Network,
    s3: S3Server,
    library: Path,
    tmp_path: Path,
    rng: random.Random,
    scale: Scale,
    counted: Counted,
    medium: str,
) -> None:
    url = f"s3://{s3.make_bucket()}/run"
    if medium == "disk" and (reason := no_loop_disk(tmp_path)):
        pytest.skip(reason)
    faults = {"memory": NEAR, "disk": NEAR_ON_DISKS, "copies": COPIED}[medium]
    top = tmp_path / "hosts"
    with ExitStack() as stack:
        for host in network.hosts:
            if medium == "disk":
                stack.enter_context(loop_disk(top / host.name, DISK_NBYTES, network.guard))
            else:
                stack.enter_context(small_disk(top / host.name, TIER_NBYTES, network.guard))
        store = stack.enter_context(closing(open_store(url, **s3.options)))
        between = stack.enter_context(gateway(network, s3.endpoint_url))
        place = _on_s3(url, s3, between)._replace(
            tiers={host.name: top / host.name for host in network.hosts},
            disk=FailingDisk(library, tmp_path / "control", top),
            save_every=10,
            replicas=int(medium == "copies"),
        )
        cluster = stack.enter_context(Cluster(network, tmp_path, place))
        _live(cluster, store, faults, rng, scale.count(len(faults), 20 * len(faults)))
        _judge(cluster, store, KEEP, counted)


def _on_s3(url: str, server: S3Server, between: Gateway) -> Place:
    return Place(url, {**server.options, "endpoint_url": between.url}, between)
