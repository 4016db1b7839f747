"""Several jobs write one checkpoint, which exists when one of them commits it.

Method: jobs as processes, some of several ranks; each saves its part into one attempt. Before the
commit nothing is visible; afterwards each job, and one that knows all names, loads what was saved.
Then each way to fail: a writer that died, names of two writers, a part that lacks, a job that was
replaced, a writer that comes too late or twice.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import ckpt
import ckpt.saving.save as saving
from ckpt.errors import Fenced, InvalidArgument, InvalidState, StoreRefused
from ckpt.saving.shared import SharedSave
from ckpt.saving.task import Attempt, WriterPlace
from ckpt.tools.salvage import salvage
from storage import open_store
from tests.ranks import run_ranks

WRITERS = {"trainer": 1, "loader": 1}


def training(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(seed))
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return {"model": model, "optim": optimizer, "step": seed}


def data(seed: int) -> dict[str, Any]:
    return {"data": {"position": seed, "order": torch.arange(5) * seed}}


def files_of(shared: SharedSave) -> list[str]:
    directory = Path(shared.path.removeprefix("file://"))
    return sorted(os.listdir(directory)) if directory.exists() else []


def begun(url: str, step: int = 2, **options: Any) -> SharedSave:
    return ckpt.begin(url, step=step, writers=WRITERS, **options)


def test_two_writers_make_one_checkpoint(tmp_path: Path) -> None:
    url = str(tmp_path)
    ckpt.save(training(1), url, step=1)
    shared = begun(url, user={"who": "both"}, metric=0.5, modules=["model"])
    report = ckpt.save(data(2), url, step=2, into=shared.token("loader"))
    ckpt.save(training(2), url, step=2, into=shared.token("trainer"))
    assert report.step == 2 and report.nbytes > 0
    assert [info.step for info in ckpt.list_steps(url)] == [1]
    assert shared.commit() == shared.commit() == shared.path
    assert [info.step for info in ckpt.list_steps(url)] == [1, 2]
    together = training(5) | data(5)
    ckpt.load(together, url)
    assert torch.equal(together["model"].weight, training(2)["model"].weight)
    assert torch.equal(together["data"]["order"], data(2)["data"]["order"])
    assert (together["data"]["position"], together["step"]) == (2, 2)
    alone = data(7)
    ckpt.load(alone, url)  # each job loads what it has
    assert alone["data"]["position"] == 2
    with ckpt.open(shared.path) as checkpoint:
        assert checkpoint.user == {"who": "both"}
    assert ckpt.verify(url).ok
    ckpt.save(training(3), url, step=3)
    assert ckpt.list_steps(url)[1].metric == 0.5


def test_the_manifest_can_be_salvaged(tmp_path: Path) -> None:
    url = str(tmp_path)
    shared = begun(url)
    ckpt.save(training(2), url, step=2, into=shared.token("trainer"))
    ckpt.save(data(2), url, step=2, into=shared.token("loader"))
    manifest = Path(shared.commit().removeprefix("file://")) / "MANIFEST"
    before = manifest.read_bytes()
    manifest.unlink()
    report = salvage(open_store(url), f"steps/{manifest.parent.name}")
    assert report.manifest is not None and report.manifest.data == before


def test_a_missing_part_is_refused_and_may_follow(tmp_path: Path) -> None:
    url = str(tmp_path)
    shared = begun(url)
    ckpt.save(training(2), url, step=2, into=shared.token("trainer"))
    with pytest.raises(
        InvalidState, match=r"writer 'loader' has saved no part of step 2"
    ) as failed:
        shared.commit()
    assert "wait for its ckpt.save(..., into=)" in str(failed.value)
    assert not ckpt.list_steps(url)
    ckpt.save(data(2), url, step=2, into=shared.token("loader"))
    shared.commit()
    assert [info.step for info in ckpt.list_steps(url)] == [2]


def test_names_of_two_writers_are_refused(tmp_path: Path) -> None:
    url = str(tmp_path)
    shared = begun(url)
    ckpt.save(training(2), url, step=2, into=shared.token("trainer"))
    ckpt.save(data(2) | {"step": 2}, url, step=2, into=shared.token("loader"))
    with pytest.raises(InvalidState) as failed:
        shared.commit()
    assert "step: writers 'trainer' and 'loader' have both saved it" in str(failed.value)
    assert not ckpt.list_steps(url)
    shared.discard()
    assert files_of(shared) == []
    ckpt.save(training(3), url, step=3)
    assert [info.step for info in ckpt.list_steps(url)] == [3]


def test_discarded_parts_are_never_committed(tmp_path: Path) -> None:
    url = str(tmp_path)
    shared = begun(url)
    ckpt.save(data(2), url, step=2, into=shared.token("loader"))
    ckpt.save(training(2), url, step=2, into=shared.token("trainer"))
    shared.discard()
    assert files_of(shared) == []
    with pytest.raises(ckpt.CheckpointError):
        shared.commit()
    assert not ckpt.list_steps(url)


def test_a_writer_saves_once(tmp_path: Path) -> None:
    url = str(tmp_path)
    shared = begun(url)
    token = shared.token("loader")
    ckpt.save(data(2), url, step=2, into=token)
    with pytest.raises(InvalidState, match="a part is written once"):
        ckpt.save(data(3), url, step=2, into=token)
    ckpt.save(training(2), url, step=2, into=shared.token("trainer"))
    shared.commit()
    state = data(9)
    ckpt.load(state, url, strict="state")
    assert state["data"]["position"] == 2


def test_wrong_calls_are_refused(tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    shared = begun(url)
    token = shared.token("loader")
    with pytest.raises(InvalidArgument, match=r"expected one of trainer, loader"):
        shared.token("eval")
    with pytest.raises(InvalidArgument, match=r"into='x': expected SharedSave\.token"):
        ckpt.save(data(2), url, step=2, into="x")
    with pytest.raises(InvalidState, match="step=3 was passed where"):
        ckpt.save(data(2), url, step=3, into=token)
    with pytest.raises(InvalidArgument, match=r"pass user= and metric= to ckpt\.begin"):
        ckpt.save(data(2), url, step=2, into=token, metric=1.0)
    with pytest.raises(InvalidArgument, match=r"such as {'trainer': 8, 'loader': 1}"):
        ckpt.begin(url, step=2, writers={"a/b": 1})
    other = str(tmp_path / "b")
    ckpt.save(data(1), other, step=1)
    with pytest.raises(StoreRefused, match=r"pass the url that ckpt\.begin was given"):
        ckpt.save(data(2), other, step=2, into=token)
    two = ckpt.begin(url, step=4, writers={"trainer": 1, "loader": 2})
    with pytest.raises(InvalidState, match="was begun with 2 ranks, and 1 save"):
        ckpt.save(data(2), url, step=4, into=two.token("loader"))


def test_ranks_with_tokens_of_two_saves_are_refused(tmp_path: Path) -> None:
    first, second = (begun(str(tmp_path / name)) for name in ("first", "second"))
    place = WriterPlace(second.header, "trainer", 0, 1)
    with pytest.raises(InvalidState, match="into="):
        saving._refuse_other_task(Attempt(first.header, None), replace(first.task, place=place))


def test_what_cannot_be_committed_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="metric=nan"):
        begun(str(tmp_path), metric=float("nan"))
    with pytest.raises(InvalidArgument, match="into="):
        ckpt.save(data(1), str(tmp_path), step=2, into="[" * 100_000)


def test_a_late_commit_is_not_what_a_restart_resumes(tmp_path: Path) -> None:
    url = str(tmp_path)
    ckpt.save(training(1), url, step=1)
    shared = begun(url)
    ckpt.save(training(2), url, step=2, into=shared.token("trainer"))
    ckpt.save(training(3), url, step=3)  # the training did not wait for the results of step 2
    ckpt.save({"result": 0.7}, url, step=2, into=shared.token("loader"))
    shared.commit()
    state = training(9)
    assert ckpt.load(state, url).step == 3
    results: dict[str, Any] = {"result": 0.0}
    ckpt.load(results, url, step=2)
    assert results["result"] == 0.7


def _die_while_writing(url: str, token: str) -> None:
    # After its data files, before its PART.
    saving._create_manifest = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
    ckpt.save(data(2), url, step=2, into=token)


def _begin_and_leave(url: str) -> str:
    shared = begun(url)
    ckpt.save(training(2), url, step=2, into=shared.token("trainer"))
    return shared.token("loader")


@pytest.mark.ranks
def test_a_writer_that_died_leaves_no_part(tmp_path: Path) -> None:
    url = str(tmp_path)
    shared = begun(url)
    run_ranks(1, _die_while_writing, url, shared.token("loader"), allow_dead={0})
    assert "rank00001-000.safetensors" in files_of(shared)
    ckpt.save(training(2), url, step=2, into=shared.token("trainer"))
    with pytest.raises(InvalidState, match="writer 'loader' has saved no part"):
        shared.commit()
    shared.discard()
    assert files_of(shared) == []


@pytest.mark.ranks
def test_the_next_job_sweeps_parts_and_refuses_their_writers(tmp_path: Path) -> None:
    url = str(tmp_path)
    (token,) = run_ranks(1, _begin_and_leave, url)
    (left,) = (tmp_path / "steps").iterdir()
    assert {"PART-trainer", "rank00000-000.safetensors"} <= set(os.listdir(left))
    ckpt.save(training(3), url, step=3)
    assert not left.exists() or not os.listdir(left)
    with pytest.raises(Fenced, match="can never be committed; begin a new one"):
        ckpt.save(data(2), url, step=2, into=token)
    assert [info.step for info in ckpt.list_steps(url)] == [3]


@pytest.mark.ranks
def test_a_job_that_was_replaced_cannot_commit(tmp_path: Path) -> None:
    url = str(tmp_path)
    shared = begun(url)
    ckpt.save(training(2), url, step=2, into=shared.token("trainer"))
    ckpt.save(data(2), url, step=2, into=shared.token("loader"))
    run_ranks(1, _train_on, url)
    with pytest.raises(Fenced):
        shared.commit()
    assert [info.step for info in ckpt.list_steps(url)] == [3]


def _train_on(url: str) -> None:
    ckpt.save(training(3), url, step=3)


def _sharded(url: str, tokens: Path) -> None:
    """Ranks 0 and 1 train, ranks 2 and 3 read data."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]

    def state(seed: int) -> dict[str, Any]:
        if rank >= 2:
            return {
                "position": ckpt.PerRank(10 * seed + rank),
                "order": data(seed)["data"]["order"],
            }
        torch.manual_seed(seed)
        model = nn.Linear(6, 8)
        mesh = dist.device_mesh.DeviceMesh.from_group(mine, "cpu")
        fully_shard(model, mesh=mesh)
        return {"model": model, "rng": ckpt.PerRank(100 * seed + rank)}

    shared = None
    if rank < 2:
        writers = {"trainer": 2, "loader": 2}
        shared = ckpt.begin(url, step=2, writers=writers, process_group=mine)
    sent = [None if shared is None else shared.token("loader")]
    dist.broadcast_object_list(sent, src=0)
    token = shared.token("trainer") if shared is not None else sent[0]
    ckpt.save(state(2), url, step=2, into=token, process_group=mine)
    dist.barrier()
    if shared is not None:
        shared.commit()
    dist.barrier()
    live, wanted = state(5), state(2)
    ckpt.load(live, url, process_group=mine)
    if rank >= 2:
        assert live["position"].value == 20 + rank
        assert torch.equal(live["order"], wanted["order"])
    else:
        assert live["rng"].value == 200 + rank
        local = [one["model"].weight.to_local() for one in (live, wanted)]
        assert torch.equal(*local)


@pytest.mark.ranks
def test_sharded_writers_get_their_own_back(tmp_path: Path) -> None:
    run_ranks(4, _sharded, str(tmp_path / "run"), tmp_path)
