"""Worlds without processes: agreement on errors, rounds of threads, and what happens when one dies.

Method: `tests.thread_ranks.run_ranks` with scripted errors and kills.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

import pytest

import ckpt.world.tree
from ckpt.errors import Corrupt, Fenced, InvalidState, Mismatch, OutcomeUnknown, RankFailed
from ckpt.world.base import SoloWorld, World, decided, from_coordinator, shared
from tests.thread_ranks import RankKilled, RanksFailed, run_ranks


def failing(errors: dict[int, BaseException]) -> dict[int, BaseException]:
    """What each of three ranks raises from agree() when these ranks bring these errors."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, lambda world: world.agree("write", errors.get(world.rank)))
    return caught.value.errors


def test_gather_and_share_give_every_rank_the_same() -> None:
    def rank(world: World) -> tuple[list[bytes], list[bytes] | None, bytes]:
        mine = b"%d" % world.rank
        coordinator_only = b"hello" if world.rank == 0 else None
        return (
            world.gather("a", mine),
            world.gather_to_coordinator("b", mine),
            world.broadcast("c", coordinator_only),
        )

    results = run_ranks(3, rank)
    assert [r[0] for r in results] == [[b"0", b"1", b"2"]] * 3
    assert [r[1] for r in results] == [[b"0", b"1", b"2"], None, None]
    assert [r[2] for r in results] == [b"hello"] * 3


def merging(world: World) -> tuple[list[bytes] | None, list[list[bytes]]]:
    """What the coordinator of a world gets, and what came to this rank to be merged."""
    came: list[list[bytes]] = []

    def merge(below: list[bytes]) -> bytes:
        came.append(below)
        return b"(%d%s)" % (world.rank, b"".join(below))

    return world.merge_to_coordinator("parts", merge), came


def test_payloads_are_merged_by_every_rank_of_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ckpt.world.tree, "CHILDREN_MAX", 2)
    results = run_ranks(6, merging)
    assert [got for got, _ in results] == [[b"(1(2))", b"(3(4)(5))"], *[None] * 5]
    assert [came for _, came in results] == [
        [],
        [[b"(2)"]],
        [[]],
        [[b"(4)", b"(5)"]],
        [[]],
        [[]],
    ]
    assert merging(SoloWorld()) == ([], [])


def views(world: World, data: Sequence[bytes | bytearray]) -> list[list[memoryview]]:
    """One buffer for each other rank."""
    return [[memoryview(one)] if rank != world.rank else [] for rank, one in enumerate(data)]


def test_exchange_delivers_uneven_and_empty_buffers() -> None:
    def rank(world: World) -> list[bytes]:
        send = [bytes([world.rank * 16 + peer]) * (3 * world.rank + peer) for peer in range(4)]
        send[world.rank] = b""
        recv = [bytearray(0 if p == world.rank else 3 * p + world.rank) for p in range(4)]
        world.all_to_all("tensors", views(world, send), views(world, recv))
        return [bytes(b) for b in recv]

    for me, got in enumerate(run_ranks(4, rank)):
        assert got == [b"" if p == me else bytes([p * 16 + me]) * (3 * p + me) for p in range(4)]


def test_agree_without_errors_returns_and_the_world_goes_on() -> None:
    def rank(world: World) -> int:
        world.agree("plan", None)
        return len(world.gather("more", b""))

    assert run_ranks(3, rank) == [3, 3, 3]


def test_one_failing_rank_is_named_on_all_ranks_with_one_text() -> None:
    errors = failing({1: OSError("disk full")})
    assert {str(e) for e in errors.values()} == {
        "rank 1 failed in phase 'write': OSError: disk full"
    }
    assert all(isinstance(e, RankFailed) and e.rank == 1 for e in errors.values())
    assert isinstance(errors[1].__cause__, OSError)


def test_common_class_is_kept_and_problems_name_their_ranks() -> None:
    errors = failing({0: Mismatch(["w: shape"]), 2: Mismatch(["w: shape", "b: missing"])})
    for error in errors.values():
        assert isinstance(error, Mismatch)
        assert error.problems == ("ranks 0, 2: w: shape", "rank 2: b: missing")


@pytest.mark.parametrize("other", [Corrupt("MANIFEST"), InvalidState(["w: lazy"])])
def test_a_state_that_does_not_fit_comes_before_other_errors(other: Exception) -> None:
    """Rank 0 binds its state, rank 2 has planned: both in one phase."""
    for first, last in ((Mismatch(["w: shape"]), other), (other, Mismatch(["w: shape"]))):
        errors = failing({0: first, 2: last})
        rank = 0 if isinstance(first, Mismatch) else 2
        assert {str(one) for one in errors.values()} == {str(Mismatch([f"rank {rank}: w: shape"]))}
        assert {type(one) for one in errors.values()} == {Mismatch}
    errors = failing({0: Mismatch(["w: shape"]), 2: OSError("disk full")})
    assert {type(one) for one in errors.values()} == {RankFailed}


def test_problem_of_all_ranks_names_none() -> None:
    errors = failing({rank: InvalidState(["x: sparse"]) for rank in range(3)})
    assert {e.problems for e in errors.values() if isinstance(e, InvalidState)} == {("x: sparse",)}


@pytest.mark.parametrize("cls", [Fenced, OutcomeUnknown])
def test_outcome_of_the_coordinator_is_the_outcome_of_all(cls: type[Exception]) -> None:
    assert {type(e) for e in failing({0: cls("text")}).values()} == {cls}


@pytest.mark.parametrize("is_decided", [False, True])
def test_an_error_of_the_coordinator_is_raised_on_all_ranks(is_decided: bool) -> None:
    def made(every: Sequence[bytes] = ()) -> bytes:
        raise Mismatch(["w: shape", *(one.decode() for one in every)])

    def rank(world: World) -> bytes:
        if not is_decided:
            return from_coordinator(world, "manifest", made)
        return decided(world, "ask", "tell", lambda: b"of %d" % world.rank, made)

    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, rank)
    assert [type(error) for error in caught.value.errors.values()] == [Mismatch] * 3
    problems = ["w: shape", *(["of 0", "of 1", "of 2"] * is_decided)]
    expected = {tuple(f"rank 0: {problem}" for problem in problems)}
    assert {error.problems for error in caught.value.errors.values()} == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize("culprit", [0, 2])
def test_what_a_rank_cannot_make_is_raised_on_all_ranks(culprit: int) -> None:
    def rank(world: World) -> list[int]:
        def made() -> int:
            if world.rank == culprit:
                raise Mismatch(["w: shape"])
            return world.rank

        return shared(world, "facts", made)

    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, rank)
    errors = caught.value.errors.values()
    assert [type(error) for error in errors] == [Mismatch] * 3
    assert {str(error) for error in errors} == {str(Mismatch([f"rank {culprit}: w: shape"]))}
    assert run_ranks(3, lambda world: shared(world, "facts", lambda: [world.rank])) == (
        [[[0], [1], [2]]] * 3
    )


def test_all_ranks_get_what_the_coordinator_decides() -> None:
    def rank(world: World) -> bytes:
        return decided(world, "ask", "tell", lambda: b"%d" % world.rank, b"-".join)

    assert run_ranks(3, rank) == [b"0-1-2"] * 3 and rank(SoloWorld()) == b"0"


def test_different_classes_become_rank_failed() -> None:
    errors = failing({0: Fenced("newer session"), 2: OSError("no space")})
    assert {type(e) for e in errors.values()} == {RankFailed}
    assert "rank 2" in str(errors[1]) and "newer session" in str(errors[1])


def test_agreed_error_brought_back_to_agree_keeps_its_text() -> None:
    def rank(world: World) -> None:
        try:
            world.agree("write", OSError("disk full") if world.rank == 1 else None)
        except RankFailed as error:
            world.agree("save", error)

    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, rank)
    assert {str(e) for e in caught.value.errors.values()} == {
        "rank 1 failed in phase 'write': OSError: disk full"
    }


def test_solo_world_raises_the_error_itself() -> None:
    error = OSError("disk full")
    with pytest.raises(OSError) as caught:
        SoloWorld().agree("write", error)
    assert caught.value is error


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("call", [1, 2, 3, 4, 5])
def test_killed_rank_is_named_by_all_others(victim: int, call: int) -> None:
    def rank(world: World) -> None:
        world.gather("one", b"")
        world.broadcast("two", b"x" if world.rank == 0 else None)
        world.gather_to_coordinator("three", b"")
        world.agree("four", None)
        world.merge_to_coordinator("five", lambda below: b"")
        world.agree("six", None)

    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, rank, kill={victim: call})
    errors = caught.value.errors
    assert isinstance(errors.pop(victim), RankKilled)
    assert {(type(e), getattr(e, "rank", None)) for e in errors.values()} == {(RankFailed, victim)}
    assert set(errors) == {0, 1, 2} - {victim}


def test_rank_that_skips_a_round_is_named() -> None:
    def rank(world: World) -> None:
        if world.rank != 2:
            world.gather("only two", b"")

    with pytest.raises(RanksFailed, match="rank 2 has left in phase 'only two'"):
        run_ranks(3, rank)


def test_other_name_in_the_same_round_is_an_error_on_all_ranks() -> None:
    with pytest.raises(RanksFailed, match="the same calls in the same order") as caught:
        run_ranks(2, lambda world: world.gather(f"round {world.rank}", b""))
    assert set(caught.value.errors) == {0, 1}


def test_exchange_of_other_length_is_an_error() -> None:
    def rank(world: World) -> None:
        send, recv = [bytearray(5)] * 2, [bytearray(4)] * 2
        world.all_to_all("t", views(world, send), views(world, recv))

    with pytest.raises(RanksFailed, match="rank 0 sends 5 bytes to rank 1, which expects 4"):
        run_ranks(2, rank)


def test_hanging_rank_is_named_at_the_deadline() -> None:
    seen = threading.Event()

    def rank(world: World) -> None:
        if world.rank == 0:
            try:
                world.gather("slow", b"")
            finally:
                seen.set()
        else:
            assert seen.wait(20.0)

    with pytest.raises(RanksFailed, match=r"rank 1 did not answer within 0\.05 s in phase 'slow'"):
        run_ranks(2, rank, deadline_seconds=0.05)


def test_what_rank_0_has_passed_on_reaches_a_rank_that_comes_after_the_end() -> None:
    """As over sockets: it lies there when the rank wakes up."""
    ended = threading.Event()

    def rank(world: World) -> bytes:
        if world.rank == 1:
            assert ended.wait(20.0)
        got = world.broadcast("outcome", b"saved" if world.rank == 0 else None)
        if world.rank == 0:
            with pytest.raises(RankFailed):
                world.gather("more", b"")
            ended.set()
        else:
            with pytest.raises(RankFailed):
                world.gather("more", b"")
        return got

    assert run_ranks(2, rank, deadline_seconds=0.05) == [b"saved"] * 2


def test_a_flag_of_one_rank_is_seen_by_all_and_a_duplicate_has_its_own() -> None:
    def rank(world: World) -> tuple[bool, bool, bool]:
        before = world.flag_is_up("stop")
        world.gather("looked", b"")
        if world.rank == 1:
            world.raise_flag("stop")
        world.gather("raised", b"")
        return before, world.flag_is_up("stop"), world.duplicate().flag_is_up("stop")

    assert run_ranks(3, rank) == [(False, True, False)] * 3


def test_a_duplicate_talks_beside_its_world() -> None:
    def rank(world: World) -> list[list[bytes]]:
        first, second = world.duplicate(), world.duplicate()
        mine = b"%d" % world.rank
        return [second.gather("a", mine), world.gather("b", mine), first.gather("c", mine)]

    assert run_ranks(2, rank) == [[[b"0", b"1"]] * 3] * 2


def test_looking_reports_a_dead_rank_without_waiting_in_duplicates_too() -> None:
    def rank(world: World) -> tuple[int, str]:
        duplicate = world.duplicate()
        duplicate.check_neighbour("before")
        world.gather("looked", b"")
        with contextlib.suppress(RankFailed):
            world.gather("death", b"")
        with pytest.raises(RankFailed) as caught:
            duplicate.check_neighbour("training")
        return caught.value.rank, str(caught.value)

    with pytest.raises(RanksFailed) as failed:
        run_ranks(3, rank, kill={1: 2})
    assert failed.value.results == {r: (1, "rank 1 has died in phase 'training'") for r in (0, 2)}
