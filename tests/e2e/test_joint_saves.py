"""Saves whose parts are merged on their way up a tree: manifests, errors, and a rank that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch

import ckpt.world.tree
from benchmarks.scale import LAYOUTS, Model
from ckpt.commit.locate import live_entries
from ckpt.errors import Corrupt
from ckpt.format.part import JointMerge, JointStructure, merge_structures
from ckpt.saving.task import SaveOptions
from ckpt.state.types import PerRank
from ckpt.tools.salvage import salvage
from storage import Store, open_store
from tests.e2e.job import Job
from tests.salvaged import matches_manifest
from tests.thread_ranks import RanksFailed

RANKS = 9
INNER = 3  # below rank 1, which is below rank 0; rank 4 is below it


@pytest.fixture(autouse=True)
def deep(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ckpt.world.tree, "CHILDREN_MAX", 2)
    yield


def state_of(rank: int, step: int) -> dict[str, Any]:
    model = Model(LAYOUTS["FSDP2 uneven"], 3, rank, RANKS)
    for parameter in model.parameters():
        parameter.fill_(step)
    return {
        "model": model,
        "everywhere": torch.full((40,), float(step)),
        "step": step,
        "own": PerRank({"seed": 100 * step + rank}),
    }


def job_of(name: str) -> tuple[Job, Store]:
    store = open_store(f"memory://{name}")
    return Job(RANKS, lambda rank: store, memories={}), store


def texts_of(job: Job, state: Callable[[int], Any], options: SaveOptions) -> set[tuple[str, str]]:
    with pytest.raises(RanksFailed) as caught:
        job.save(state, step=7, options=options)
    assert len(caught.value.errors) == RANKS
    return {(type(error).__name__, str(error)) for error in caught.value.errors.values()}


def test_saves_through_a_deep_tree_are_what_their_files_say() -> None:
    """Three saves, the second and third of the same structure. `salvage` makes the same manifest
    from the data files, of all parts at once.
    """
    job, store = job_of("deep")
    for step in (1, 2, 3):
        job.save(partial(state_of, step=step), step=step)
        entry = live_entries(store)[-1]
        assert matches_manifest(store, salvage(store, entry.prefix))
        states = [state_of(rank, 0) for rank in range(RANKS)]
        job.load(states.__getitem__)
        for rank, state in enumerate(states):
            assert state["step"] == step and state["own"].value == {"seed": 100 * step + rank}
            assert all(bool((one == step).all()) for one in state["model"].parameters())
            assert state["everywhere"].tolist() == [float(step)] * 40


def _with(name: str, values: dict[int, Any]) -> Callable[[int], Any]:
    """States in which some ranks have something else under a name."""
    return lambda rank: {**state_of(rank, 1), name: values.get(rank, values[-1])}


DIFFERENCES = {
    "values": _with("step", {-1: 1, 2: 2, 5: 2, 8: 3}),
    "replicas": _with("everywhere", {-1: torch.ones(40), 4: torch.zeros(40)}),
    "shapes": _with("everywhere", {-1: torch.ones(40), 3: torch.ones(41), 6: torch.ones(9)}),
    "dtypes": _with("everywhere", {-1: torch.ones(40), 8: torch.ones(40, dtype=torch.float64)}),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_all_ranks_raise_what_they_raise_without_a_tree(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same class and words, which name ranks and tensors; the next save commits."""
    options = SaveOptions(replicas="strict")
    job, store = job_of(f"differing-{what}")
    texts = texts_of(job, DIFFERENCES[what], options)
    assert len(texts) == 1
    monkeypatch.setattr(ckpt.world.tree, "CHILDREN_MAX", RANKS)
    flat, _ = job_of(f"differing-{what}-flat")
    assert texts_of(flat, DIFFERENCES[what], options) == texts
    assert not live_entries(store)
    monkeypatch.setattr(ckpt.world.tree, "CHILDREN_MAX", 2)
    job.save(lambda rank: state_of(rank, 1), step=8)
    assert len(live_entries(store)) == 1


def test_a_rank_that_cannot_merge_fails_the_save_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so itself; those above it pass on that there is nothing, and have no error."""

    def failing(parts: Sequence[JointStructure]) -> JointMerge:
        if parts[0].first_rank == INNER:
            raise Corrupt("a part that came here is damaged")
        return merge_structures(parts)

    job, store = job_of("failing")
    with monkeypatch.context() as patch:
        patch.setattr("ckpt.saving.task.merge_structures", failing)
        texts = texts_of(job, lambda rank: state_of(rank, 1), SaveOptions())
    assert texts == {("Corrupt", f"rank {INNER}: a part that came here is damaged")}
    assert not live_entries(store) and not list(store.list("steps/"))
    job.save(lambda rank: state_of(rank, 2), step=8)
    assert [entry.step for entry in live_entries(store)] == [8]
