"""Trainings on several hosts, under everything that happens to hosts, links, disks and stores.

Method: jobs of real processes on hosts that are network namespaces, with clocks hours apart, live
one after the other on one root; one fault meets each at a random moment. The weights of a step are
a function of the step. Afterwards, what every rank was told is compared with the root: what was
acknowledged exists with the right bits, unless the log retired it; nobody restored less than was
acknowledged; no fenced job committed; all ranks were told the same; every rank ended by its
deadline; a sweep leaves nothing behind. Where the documents say that a training goes on, it did.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from storage import open_store
from tests.cluster.history import broken_promises, counts, left_behind, read_history
from tests.cluster.network import Network, unavailable
from tests.cluster.schedule import DEADLY, HARMLESS, HOSTS, Cluster, disk, live_once
from tests.conftest import Scale
from tests.servers import S3Server, moto_server

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]


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


def _live(cluster: Cluster, kind: str, rng: random.Random, lives: int) -> None:
    faults = [*HARMLESS[""], *HARMLESS[kind], *DEADLY]
    order = faults * (lives // len(faults)) + rng.sample(faults, lives % len(faults))
    rng.shuffle(order)
    problems = [problem for fault in order for problem in live_once(cluster, fault, rng)]
    events = read_history(cluster.folder)
    print(f"{kind}: {counts(events)}, met {dict(cluster.met)}")
    with closing(open_store(cluster.url, **cluster.options)) as store:
        problems += broken_promises(events, store) + left_behind(store)
    assert not problems, "\n".join(problems)
    assert any(event.kind == "saved" for event in events)


def test_jobs_on_s3(
    network: Network, s3: S3Server, tmp_path: Path, rng: random.Random, scale: Scale
) -> None:
    url = f"s3://{s3.make_bucket()}/run"
    with Cluster(network, tmp_path, url, s3.options) as cluster:
        _live(cluster, "s3", rng, scale.count(44, 440))


def test_jobs_on_a_shared_disk(
    network: Network, tmp_path: Path, rng: random.Random, scale: Scale
) -> None:
    with disk(tmp_path / "disk") as folder, Cluster(network, tmp_path, f"{folder}/run") as cluster:
        _live(cluster, "disk", rng, scale.count(36, 360))
