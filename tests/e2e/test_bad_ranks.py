"""Ranks that disagree, fail or die: one clear error on all of them within seconds, and no hang.

Method: what can go wrong on one rank goes wrong there, first with ranks as threads, then with real
processes over gloo that call the public functions. Each time the root must hold what it held before
and take the next save.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckpt
from ckpt.commit.locate import live_entries
from ckpt.commit.session import SessionRegistry, open_session
from ckpt.errors import (
    CheckpointError,
    InvalidArgument,
    InvalidState,
    Mismatch,
    RankFailed,
    StoreRefused,
)
from ckpt.saving.save import save_task
from ckpt.saving.task import PartMemory, SaveOptions, SaveReport, SaveTask
from ckpt.state.types import PerRank
from ckpt.world.base import World
from storage import Store, open_store
from tests.e2e.engines import Engine, build, full_model
from tests.e2e.job import NO_WAITING, Job, assert_is_step, state_at
from tests.ranks import run_ranks
from tests.thread_ranks import RanksFailed
from tests.thread_ranks import run_ranks as run_threads

SIZE = 3


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Store:
    return open_store(f"memory://{request.node.name}")


def _one_error(call: Callable[[], Any], size: int = SIZE) -> CheckpointError:
    """The error that all ranks raised, with one text."""
    with pytest.raises(RanksFailed) as caught:
        call()
    errors = list(caught.value.errors.values())
    assert len(errors) == size, caught.value
    assert len({(type(error), str(error)) for error in errors}) == 1, caught.value
    assert isinstance(errors[0], CheckpointError)
    return errors[0]


def _check_goes_on(job: Job, steps: list[int]) -> None:
    """Nothing of the failed save is left, and the same job saves and loads."""
    store = job.store_of(0)
    assert [entry.step for entry in live_entries(store)] == steps
    homes = {info.key.split("/")[1] for info in store.list("steps/")}
    assert homes == {entry.prefix.split("/")[1] for entry in live_entries(store)}
    job.save(lambda rank: state_at(50, rank, job.size), step=50)
    states = [state_at(0, rank, job.size) for rank in range(job.size)]
    job.load(lambda rank: states[rank])
    for rank, state in enumerate(states):
        assert_is_step(state, 50, rank, job.size)


def test_values_that_differ_are_named_with_their_ranks(store: Store) -> None:
    job = Job(SIZE, lambda rank: store)
    job.save(lambda rank: state_at(1, rank, SIZE), step=1)

    def differing(rank: int) -> dict[str, Any]:
        return {**state_at(2, rank, SIZE), "seed": 5 + (rank == 1), "same": [1, 2]}

    error = _one_error(lambda: job.save(differing, step=2))
    assert isinstance(error, InvalidState)
    for text in ("seed", "on 0, 2", "on 1", "PerRank"):
        assert text in str(error)
    assert "same" not in str(error)
    _check_goes_on(job, [1])


def test_optimizer_state_of_some_ranks_only_is_named_as_that(store: Store) -> None:
    """What is missing then may be a weight, of which each rank leaves the writing to the other."""
    job = Job(SIZE, lambda rank: store)

    def stepped_on_one(rank: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        if rank == 1:
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
        return {"model": model, "optim": optimizer}

    states = [stepped_on_one(rank) for rank in range(SIZE)]
    error = _one_error(lambda: job.save(states.__getitem__, step=1))
    assert "are missing" in str(error) and "state on some ranks only" in str(error)


def test_replicas_that_differ_are_warned_of_or_refused(store: Store) -> None:
    job = Job(SIZE, lambda rank: store)

    def differing(rank: int) -> dict[str, Any]:
        return {"mean": torch.full((4,), float(rank == 2)), "same": torch.ones(4)}

    reports = job.save(differing, step=1)
    for report in reports:
        (warning,) = report.warnings
        assert "mean" in warning
        assert "2" in warning
        assert "same" not in warning
    error = _one_error(lambda: job.save(differing, 2, SaveOptions(replicas="strict")))
    assert isinstance(error, InvalidState)
    assert "mean" in str(error)
    _check_goes_on(job, [1])


def test_parameters_that_differ_are_refused_and_buffers_warned_of(store: Store) -> None:
    """Experts of one name on each rank are no replicas: all but one would be gone."""
    job = Job(SIZE, lambda rank: store)
    job.save(lambda rank: state_at(1, rank, SIZE), step=1)

    def model(rank: int, *, trained: bool) -> dict[str, Any]:
        experts = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        with torch.no_grad():
            for param in experts[0].parameters():
                param.fill_(1.0)  # ranks are threads, and draw from one generator
            experts[0].weight += float(trained and rank == 2)
            experts[1].running_mean += rank
        return {"experts": experts}

    reports = job.save(partial(model, trained=False), step=2)
    assert "experts.1.running_mean" in reports[0].warnings[0]
    error = _one_error(lambda: job.save(partial(model, trained=True), step=3))
    assert isinstance(error, InvalidState)
    for text in ("experts.0.weight", "on 0, 1; ", "on 2)", "a name of its own"):
        assert text in str(error), error
    _check_goes_on(job, [1, 2])


def test_names_shapes_and_dtypes_that_differ_between_ranks_are_refused(store: Store) -> None:
    """A tensor of another shape or dtype on one rank, and one that a rank alone has."""
    job = Job(SIZE, lambda rank: store)
    job.save(lambda rank: state_at(1, rank, SIZE), step=1)
    for other in (torch.zeros(4), torch.zeros(3, dtype=torch.float64)):
        error = _one_error(
            lambda other=other: job.save(lambda rank: {"t": other if rank else torch.zeros(3)}, 2)
        )
        assert isinstance(error, InvalidState)
        assert "t" in str(error)
    _check_goes_on(job, [1])


@pytest.mark.parametrize("bad", range(SIZE))
def test_a_rank_that_raises_while_it_describes_its_state_is_named(store: Store, bad: int) -> None:
    job = Job(SIZE, lambda rank: store)
    job.save(lambda rank: state_at(1, rank, SIZE), step=1)

    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise KeyError("no such thing")

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError("not called")

    class Working(Broken):
        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

    def state_of(rank: int) -> dict[str, Any]:
        return {**state_at(2, rank, SIZE), "thing": Broken() if rank == bad else Working()}

    error = _one_error(lambda: job.save(state_of, step=2))
    assert f"rank {bad}" in str(error)
    assert "no such thing" in str(error)
    _check_goes_on(job, [1])


@pytest.mark.parametrize("bad", range(SIZE))
def test_ranks_that_pass_other_steps_get_one_error(store: Store, bad: int) -> None:
    job = Job(SIZE, lambda rank: store)
    job.save(lambda rank: state_at(1, rank, SIZE), step=1)
    steps = [7 + (rank == bad) for rank in range(SIZE)]
    error = _one_error(lambda: job.save(lambda rank: state_at(2, rank, SIZE), step_of=steps))
    assert isinstance(error, InvalidState)
    assert "step=8" in str(error)
    assert "step=7" in str(error)
    _check_goes_on(job, [1])


@pytest.mark.parametrize("asked", [[1, 2, 1], [None, 2, None], [1, None, 1], [2, 1, 1]])
def test_ranks_that_ask_for_other_steps_get_one_error(
    store: Store, asked: list[int | None]
) -> None:
    job = Job(SIZE, lambda rank: store)
    for step in (1, 2):
        job.save(lambda rank, step=step: state_at(step, rank, SIZE), step=step)
    states = [state_at(0, rank, SIZE) for rank in range(SIZE)]
    error = _one_error(lambda: job.load(lambda rank: states[rank], step_of=asked))
    assert isinstance(error, Mismatch)
    assert f"step={asked[1]}" in str(error)
    assert f"step={asked[0]}" in str(error)
    for rank, state in enumerate(states):
        assert_is_step(state, 0, rank, SIZE)


def test_a_step_that_is_no_step_is_reported_on_all_ranks(store: Store) -> None:
    job = Job(SIZE, lambda rank: store)
    job.save(lambda rank: state_at(1, rank, SIZE), step=1)
    assert isinstance(
        _one_error(lambda: job.save(lambda r: state_at(2, r, SIZE), -1)), InvalidArgument
    )
    _check_goes_on(job, [1])


class LateForCommit(NamedTuple):
    """A save of one rank. The victim comes to the round in which a commit is announced only when
    the coordinator has made it.
    """

    store: Store
    registry: SessionRegistry
    victim: int
    is_committed: threading.Event

    def __call__(self, world: World) -> SaveReport:
        agree = world.agree

        def late(phase: str, error: BaseException | None) -> None:
            if phase == "commit" and world.rank == 0:
                self.is_committed.set()
            elif phase == "commit" and world.rank == self.victim:
                assert self.is_committed.wait(20.0)
            agree(phase, error)

        world.agree = late  # type: ignore[method-assign]
        session = open_session(world, self.store, self.registry, sources=NO_WAITING)
        state, options = state_at(1, world.rank, world.size), SaveOptions()
        memory = PartMemory()
        return save_task(state, SaveTask(session, self.store, memory, 1, options))


@pytest.mark.parametrize("victim", range(3))
def test_a_rank_that_is_lost_leaves_no_survivor_with_a_wrong_outcome(
    store: Store, victim: int
) -> None:
    """It dies at each of its calls in turn: who returns has a checkpoint, who raises RankFailed has
    none, and RankFailedInCommit says that this is not known.
    """
    seen = set()
    for call in range(1, 11):
        place = open_store(f"{store.url}/{call}")
        save = LateForCommit(place, SessionRegistry(), victim, threading.Event())
        with pytest.raises(RanksFailed) as failed:
            run_threads(3, save, kill={victim: call})
        ended = {**failed.value.errors, **failed.value.results}
        exists = bool(live_entries(place))
        for rank, outcome in ended.items():
            if rank == victim:
                continue
            kind = "returned" if isinstance(outcome, SaveReport) else type(outcome).__name__
            if kind == "RankFailedInCommit":
                assert isinstance(outcome, RankFailed) and outcome.rank == victim, outcome
                assert rank != 0, "the coordinator knows what is so"
                assert "next restore" in str(outcome), outcome
            else:
                assert (kind, exists) in {("returned", True), ("RankFailed", False)}, (call, rank)
            seen.add((kind, exists))
    expected = {("RankFailed", False), ("RankFailedInCommit", True)}
    assert expected | ({("returned", True)} if victim else set()) <= seen, seen


def test_ranks_that_see_different_roots_are_refused(request: pytest.FixtureRequest) -> None:
    """Rank 1 looks at an empty place, then at another root."""
    names = [f"memory://{request.node.name}-{place}" for place in range(2)]
    here, there = (open_store(name) for name in names)
    job = Job(SIZE, lambda rank: there if rank == 1 else here)
    for seen in ("no root", "root"):
        error = _one_error(lambda: job.save(lambda rank: state_at(1, rank, SIZE), step=1))
        assert isinstance(error, StoreRefused)
        assert "rank 1" in str(error)
        assert seen in str(error)
        assert not list(here.list("steps/"))
        assert live_entries(here) == ()
        if seen == "no root":
            Job(1, lambda rank: there).save(lambda rank: {"other": 1}, step=1)


# --- PerRank --------------------------------------------------------------------------------------


def _joined(values: Any, rank: int, world_size: int) -> dict[str, Any]:
    return {"from": [value["at"] for value in values], "rank": rank, "of": world_size}


def test_each_rank_gets_its_own_value_back_on_as_many_ranks(store: Store) -> None:
    job = Job(SIZE, lambda rank: store)
    job.save(lambda rank: {"data": PerRank({"at": 10 + rank}, _joined)}, step=1)
    states = [{"data": PerRank({"at": 0}, _joined)} for _ in range(SIZE)]
    job.load(lambda rank: states[rank])
    assert [state["data"].value for state in states] == [{"at": 10}, {"at": 11}, {"at": 12}]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_on_other_world_sizes_on_reshard_decides(store: Store, size: int) -> None:
    Job(SIZE, lambda rank: store).save(lambda rank: {"data": PerRank({"at": 10 + rank})}, step=1)
    states = [{"data": PerRank({"at": 0}, _joined)} for _ in range(size)]
    Job(size, lambda rank: store).load(lambda rank: states[rank])
    for rank, state in enumerate(states):
        assert state["data"].value == {"from": [10, 11, 12], "rank": rank, "of": size}


def test_on_other_world_sizes_without_on_reshard_nothing_is_touched(store: Store) -> None:
    def state_of(rank: int) -> dict[str, Any]:
        return {"data": PerRank({"at": rank}), "t": torch.full((4,), float(rank))}

    Job(SIZE, lambda rank: store).save(state_of, step=1)
    states = [state_of(7) for _ in range(2)]
    error = _one_error(lambda: Job(2, lambda rank: store).load(lambda rank: states[rank]), 2)
    assert isinstance(error, Mismatch)
    assert "data" in str(error)
    assert "on_reshard" in str(error)
    for state in states:
        assert state["data"].value == {"at": 7}
        assert torch.equal(state["t"], torch.full((4,), 7.0))


# --- real processes -------------------------------------------------------------------------------


def _raised(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def _state(value: int) -> dict[str, Any]:
    return {"t": torch.full((257,), float(value)), "value": value}


def _with_broken_coordinator(call: Callable[[], object]) -> None:
    """`call`, while the coordinator cannot read what the others send it."""
    from ckpt.saving import task

    def fails(*args: Any) -> Any:
        raise MemoryError("no room for the parts")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(task, "StructureReader", fails)
        call()


def _disagree(base: str) -> dict[str, Any]:
    """Everything that ranks can disagree about, one after the other, in one group."""
    rank = dist.get_rank()
    root = f"{base}/run"
    outcomes: dict[str, Any] = {}
    ckpt.save(_state(1), root, step=1)
    outcomes["steps"] = _raised(lambda: ckpt.save(_state(2), root, step=2 + rank))
    outcomes["values"] = _raised(lambda: ckpt.save(_state(2 + rank), root, step=2))
    mine = f"{base}/rank{rank}"
    outcomes["roots"] = _raised(lambda: ckpt.save(_state(2), mine, step=2))
    file = f"{base}/a-file"
    Path(file).touch()
    dist.barrier()
    outcomes["urls"] = _raised(lambda: ckpt.save(_state(2), file if rank == 1 else root, step=2))
    outcomes["load urls"] = _raised(lambda: ckpt.load(_state(2), file if rank == 1 else root))
    outcomes["step"] = _raised(lambda: ckpt.save(_state(2), root, step=-1))
    outcomes["load steps"] = _raised(lambda: ckpt.load(_state(2), root, step=1 if rank else 9))
    state = {**_state(0), "only here": 1} if rank == 1 else _state(0)
    outcomes["names"] = _raised(lambda: ckpt.load(state, root))
    outcomes["untouched"] = torch.equal(state["t"], torch.zeros(257)) and state["value"] == 0
    outcomes["parts"] = _raised(
        lambda: _with_broken_coordinator(lambda: ckpt.save(_state(2), root, step=2))
    )
    ckpt.save(_state(5), root, step=5)
    state = _state(0)
    outcomes["loaded"] = ckpt.load(state, root).step
    assert torch.equal(state["t"], _state(5)["t"])
    return outcomes


@pytest.mark.ranks
def test_ranks_that_disagree_get_one_error_and_go_on(tmp_path: Path) -> None:
    outcomes = run_ranks(3, _disagree, str(tmp_path), timeout_seconds=50)
    expected = {
        "steps": ("InvalidState", "rank 1: step=3 was passed where rank 0 passed step=2"),
        "values": ("InvalidState", "value"),
        "roots": ("StoreRefused", "ranks look at different storage"),
        "urls": ("RankFailed", "rank 1"),
        "load urls": ("NoCheckpoint", "is a file"),
        "step": ("InvalidArgument", "step=-1"),
        "load steps": ("NoCheckpoint", "no step 9"),
        "names": ("Mismatch", "only here"),
        "parts": ("RankFailed", "no room for the parts"),
    }
    for what, (kind, text) in expected.items():
        answers = {answer[what] for answer in outcomes}
        assert len(answers) == 1, answers
        assert answers.pop()[0] == kind, (what, answers)
        assert text in outcomes[0][what][1]
    assert outcomes[0]["load urls"][1].startswith("rank 1: ")
    assert all(answer["untouched"] and answer["loaded"] == 5 for answer in outcomes)
    assert [info.step for info in ckpt.list_steps(str(tmp_path / "run"))] == [1, 5]


def _die_in_a_save(root: str, victim: int, phase: str) -> tuple[str, str]:
    """All ranks save step 2; the victim kills itself when it begins `phase`."""
    from ckpt.saving import save

    ckpt.save(_state(1), root, step=1)
    dist.barrier()
    if dist.get_rank() == victim:
        real = getattr(save, phase)

        def die(*args: Any, **options: Any) -> Any:
            if phase == "write_files":
                real(*args, **options)  # after its data files are there
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(save, phase, die)
    return _raised(lambda: ckpt.save(_state(2), root, step=2))


def _go_on(root: str) -> int:
    state = _state(0)
    step = ckpt.load(state, root).step
    assert torch.equal(state["t"], _state(step)["t"])
    ckpt.save(_state(3), root, step=3)
    ckpt.load(state, root)
    assert state["value"] == 3
    return step


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("victim", "phase"), [(2, "_flattened"), (1, "write_files"), (0, "_create_manifest")]
)
def test_a_killed_rank_is_named_and_the_next_job_goes_on(
    tmp_path: Path, victim: int, phase: str
) -> None:
    root = str(tmp_path / "run")
    outcomes = run_ranks(3, _die_in_a_save, root, victim, phase, allow_dead=[victim])
    assert outcomes[victim] is None
    for answer in outcomes[:victim] + outcomes[victim + 1 :]:
        kind, text = answer
        # The others cannot know that the coordinator died before its commit.
        assert kind == ("RankFailed" if victim else "RankFailedInCommit")
        if victim:
            assert f"rank {victim} has died" in text
    assert run_ranks(2, _go_on, root) == [1, 1]
    assert [info.step for info in ckpt.list_steps(root)] == [1, 3]
    assert len(list((tmp_path / "run" / "steps").iterdir())) == 2, "the dead save left files"


def _half_loaded(engine: Engine, root: str) -> tuple[str, str]:
    """A data file of step 2 is damaged: the load of it marks the training, that of step 1 heals."""
    training = build(engine, "adamw")
    for step in (1, 2):
        training.step(step)
        ckpt.save(training.state, root, step=step)
    if dist.get_rank() == 0:
        (damaged,) = Path(root).glob("steps/00000002-*/rank00001-*.safetensors")
        data = bytearray(damaged.read_bytes())
        data[5000] ^= 1
        damaged.chmod(0o600)
        damaged.write_bytes(data)
    dist.barrier()
    other = build(engine, "adamw", seed=5)
    other.step(3)
    outcome = _raised(lambda: ckpt.load(other.state, root))
    for use in (lambda: other.step(4), lambda: ckpt.save(other.state, root, step=3)):
        assert _raised(use)[0] == "LoadInterrupted"
    ckpt.load(other.state, root, step=1)
    first = build(engine, "adamw")
    first.step(1)
    loaded = full_model(other)
    for name, tensor in full_model(first).items():
        if "running" not in name:  # BatchNorm's statistics are one rank's
            assert torch.equal(loaded[name], tensor), name
    assert other.step(4) == first.step(4)
    ckpt.save(other.state, root, step=3)
    return outcome


@pytest.mark.ranks
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1-flat"])
def test_a_damaged_block_marks_the_training_on_all_real_ranks(
    tmp_path: Path, engine: Engine
) -> None:
    outcomes = run_ranks(3, _half_loaded, engine, str(tmp_path / "run"))
    assert len(set(outcomes)) == 1
    kind, text = outcomes[0]
    assert kind == "LoadInterrupted"
    assert "rank00001" in text
    assert "block 0" in text


def test_a_metric_that_is_no_number_is_one_error(store: Store) -> None:
    """The first rank's counts; it is refused before any rank has written."""
    job = Job(SIZE, lambda rank: store)
    error = _one_error(
        lambda: job.save(
            lambda rank: state_at(1, rank, SIZE), step=1, options=SaveOptions(metric=float("inf"))
        )
    )
    assert "metric=inf" in str(error)
    assert not list(store.list("steps/"))
    _check_goes_on(job, [])


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((3, 4, 3), "3 on 0, 2; 4 on 1"),
        ((0.1, 0.1, -0.0), "0.1 on 0, 1; -0.0 on 2"),
        ((True, 1, 1), "True on 0; 1 on 1, 2"),
        ((1.0, float("inf"), 1 << 70), r"1\.0 on 0; crc32c [0-9a-f]{8} on 1; crc32c"),
        (("cosine", "linear", "cosine"), "'cosine' on 0, 2; 'linear' on 1"),
        ((None, "None", None), "None on 0, 2; 'None' on 1"),
        (("a" * 41, "b", "b"), "crc32c [0-9a-f]{8} on 0; 'b' on 1, 2"),
        (([1], [2], [1]), "crc32c [0-9a-f]{8} on 0, 2; crc32c [0-9a-f]{8} on 1"),
    ],
)
def test_short_values_that_differ_between_ranks_are_shown(
    store: Store, values: tuple[Any, ...], text: str
) -> None:
    job = Job(3, lambda rank: store)
    error = _one_error(lambda: job.save(lambda rank: {"step": values[rank]}, 1), 3)
    assert re.search(rf"step: the value differs between ranks \({text}", str(error))
