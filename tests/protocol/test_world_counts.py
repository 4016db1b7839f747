"""What rounds cost: requests to the rendezvous store and messages, of every rank, as ranks grow.

Method: ranks are threads, each with a TorchWorld and a heart of its own, around one TCPStore.
Requests are counted where torch's prefixes pass them on, messages where the heart sends them.
"""

from __future__ import annotations

import contextlib
import dis
import errno
import math
import select
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from ckpt.errors import RankFailed
from ckpt.world.base import Message
from ckpt.world.heart import Heart
from ckpt.world.job import Process
from ckpt.world.link import NOBODY, Frame, FrameKind, Link, Neighbour
from ckpt.world.liveness import Card, hosts_of
from ckpt.world.place import Place, listening
from ckpt.world.rounds import Deadlines, Rounds, _Wait
from ckpt.world.torch_world import TorchWorld, _GlooTransfers
from ckpt.world.tree import CHILDREN_MAX, family
from tests.versions import TORCH

SIZES = (16, 32, 64)
STORE: Any = dist.Store  # type: ignore[attr-defined]  # torch hides them from checkers
TCP_STORE: Any = dist.TCPStore  # type: ignore[attr-defined]


class CountingStore(STORE):  # type: ignore[misc]
    """Counts the requests that one rank makes of the store, by kind."""

    def __init__(self, client: Any) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._client = client

    def _request(self, kind: str, *args: Any) -> Any:
        self.counts[kind] += 1
        return getattr(self._client, kind)(*args)

    def set(self, key: str, value: Any) -> None:
        self._request("set", key, value)

    def get(self, key: str) -> Any:
        return self._request("get", key)

    def add(self, key: str, amount: int) -> Any:
        return self._request("add", key, amount)

    def check(self, keys: list[str]) -> Any:
        return self._request("check", keys)

    def compare_set(self, key: str, expected: Any, desired: Any) -> Any:
        return self._request("compare_set", key, expected, desired)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._request("wait", keys, *timeout)

    def multi_get(self, keys: list[str]) -> Any:
        return self._request("multi_get", keys)

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self._request("multi_set", keys, values)

    def delete_key(self, key: str) -> Any:
        return self._request("delete_key", key)


class Cost:
    """Requests and messages of every rank, from here to `stop`."""

    def __init__(self, processes: list[Process]) -> None:
        self._processes = processes
        self._began = self._now()
        self.requests: list[int] = []
        self.messages: list[int] = []

    def stop(self) -> None:
        pairs = [(b - a, d - c) for (a, c), (b, d) in zip(self._began, self._now(), strict=True)]
        self.requests, self.messages = [one for one, _ in pairs], [two for _, two in pairs]

    def _now(self) -> list[tuple[int, int]]:
        return [(process.store.counts.total(), process.heart.sent) for process in self._processes]

    def __str__(self) -> str:
        return (
            f"requests: {sum(self.requests)}, at most {max(self.requests)} of one rank; "
            f"messages: {sum(self.messages)}, at most {max(self.messages)}"
        )


class Ranks:
    """Ranks of one world, which do the same thing when told."""

    def __init__(
        self, clients: list[Any], pool: ThreadPoolExecutor, round_seconds_max: float
    ) -> None:
        self.size = len(clients)
        self._limits = Deadlines(round_seconds_max=round_seconds_max)
        self._pool = pool
        self.processes = [
            Process(rank, CountingStore(client), Heart(rank, ("127.0.0.1",)))
            for rank, client in enumerate(clients)
        ]
        for process in self.processes:
            process.store.set(f"shardpoint/process/{process.rank}", process.heart.card.encode())
        with self.costing() as self.creation:
            self.worlds: list[TorchWorld] = self.all(lambda r: self._world(self.processes[r]))

    def _world(self, process: Process) -> TorchWorld:
        return TorchWorld(members=tuple(range(self.size)), deadlines=self._limits, process=process)

    def all(self, act: Callable[[int], Any]) -> list[Any]:
        return list(self._pool.map(act, range(self.size)))

    @contextlib.contextmanager
    def costing(self) -> Iterator[Cost]:
        cost = Cost(self.processes)
        yield cost
        cost.stop()

    def close(self) -> None:
        self.all(lambda r: self.worlds[r].close())
        self.all(lambda r: self.processes[r].heart.stop())


def client_of(server: Any) -> Any:
    """A connection of its own; torch 2.6 clones none."""
    return TCP_STORE("127.0.0.1", server.port, is_master=False)


@contextlib.contextmanager
def ranks_of(
    size: int, *, round_seconds_max: float = 60.0, transfers: bool = False
) -> Iterator[Ranks]:
    """Ranks with one client of a store; with one each for `transfers`: gloo waits in requests."""
    server = TCP_STORE("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(size) as pool:
        ranks = Ranks(
            [client_of(server) if transfers else server for _ in range(size)],
            pool,
            round_seconds_max,
        )
        yield ranks
        ranks.close()


def _joined(rank: int) -> Callable[[list[bytes]], bytes]:
    return lambda below: b" ".join([b"%d" % rank, *below, b""])


@pytest.mark.parametrize("size", SIZES)
def test_a_round_costs_two_messages_a_rank_and_no_request(size: int) -> None:
    """Above that, it would not end at N log N."""
    with ranks_of(size) as ranks:
        with ranks.costing() as gathered:
            got = ranks.all(lambda r: ranks.worlds[r].gather("a", b"%d" % r))
        assert got == [[b"%d" % r for r in range(size)]] * size
        with ranks.costing() as shared:
            ranks.all(lambda r: ranks.worlds[r].broadcast("b", None if r else b"x" * 3_000_000))
        with ranks.costing() as collected:
            ranks.all(lambda r: ranks.worlds[r].gather_to_coordinator("c", b""))
        with ranks.costing() as merged:
            got = ranks.all(lambda r: ranks.worlds[r].merge_to_coordinator("d", _joined(r)))
        assert sorted(b"".join(got[0]).split()) == sorted(b"%d" % r for r in range(1, size))
        with ranks.costing() as duplicated:
            others = ranks.all(lambda r: ranks.worlds[r].duplicate())
        ranks.all(lambda r: others[r].close())
    costs = {"create": ranks.creation, "gather": gathered, "broadcast": shared}
    costs |= {"gather to 0": collected, "merge to 0": merged, "duplicate": duplicated}
    print(f"{size} ranks", *(f"{name}: {cost}" for name, cost in costs.items()), sep="\n  ")
    assert sum(gathered.messages) == 2 * (size - 1)
    assert sum(shared.messages) == sum(collected.messages) == size - 1
    assert sum(merged.messages) == size - 1
    assert max(gathered.messages) <= 1 + CHILDREN_MAX
    for cost in (gathered, shared, collected, merged):
        assert sum(cost.requests) == 0
    assert max(ranks.creation.requests) <= 4 and sum(ranks.creation.messages) <= size
    assert max(duplicated.requests) <= 1 and sum(duplicated.messages) == 0


def test_an_agreement_without_an_error_tells_all_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, nbytes = Rounds.answer, []

    def count(self: Rounds, number: int, name: str, body: bytes) -> None:
        nbytes.append(len(body))
        answer(self, number, name, body)

    monkeypatch.setattr(Rounds, "answer", count)
    with ranks_of(16) as ranks:
        ranks.all(lambda r: ranks.worlds[r].agree("write", None))
        assert nbytes == [0]

        def fail(rank: int) -> str:
            with pytest.raises(RankFailed) as caught:
                ranks.worlds[rank].agree("write", ValueError("no") if rank in (3, 9) else None)
            return str(caught.value)

        (text,) = set(ranks.all(fail))
        assert "rank 3 failed in phase 'write': ValueError: no; rank 9 failed" in text


def test_who_waits_asks_nobody() -> None:
    """Rank 0 comes late, so 15 wait. A late rank in the middle of the tree is waited for alike."""
    with ranks_of(16) as ranks, ThreadPoolExecutor(16) as pool:
        for late in (0, 5):
            came = [threading.Event() for _ in range(16)]

            def wait(rank: int, came: list[threading.Event] = came) -> list[bytes]:
                came[rank].set()
                return ranks.worlds[rank].gather("late", b"")

            waiting = [pool.submit(wait, rank) for rank in range(16) if rank != late]
            assert all(one.wait(60.0) for rank, one in enumerate(came) if rank != late)
            settled = threading.Event()
            settled.wait(0.5)  # everybody has sent what there is to send
            with ranks.costing() as cost:
                settled.wait(1.0)
            pool.submit(wait, late).result(60.0)
            assert all(one.result(60.0) == [b""] * 16 for one in waiting)
            assert (sum(cost.requests), sum(cost.messages)) == (0, 0)


def test_a_transfer_that_takes_long_asks_nobody() -> None:
    """One rank is late by more than a second, when all have come and connected."""
    with ranks_of(4, transfers=True) as ranks:

        def transfer(rank: int) -> None:
            send = [[memoryview(b"x")] * (peer != rank) for peer in range(4)]
            recv = [[memoryview(bytearray(1))] * (peer != rank) for peer in range(4)]
            ranks.worlds[rank].all_to_all("tensors", send, recv)
            assert all(bytes(view) == b"x" for views in recv for view in views)

        ranks.all(transfer)
        late: Any = ranks.worlds[0]
        meet, pause = late._meet, threading.Event()

        def meet_and_pause(*args: Any) -> None:
            meet(*args)
            pause.wait(1.3)

        late._meet = meet_and_pause
        with ranks.costing() as cost:
            ranks.all(transfer)
        assert (sum(cost.requests), sum(cost.messages)) == (0, 2 * 3)


@pytest.mark.skipif(TORCH < (2, 7), reason="gloo of torch 2.6 connects all ranks at once")
@pytest.mark.parametrize("size", SIZES)
def test_a_transfer_costs_those_who_have_something_for_each_other(size: int) -> None:
    """Each rank has something for the next one only. Who has met before asks the store nothing."""
    with ranks_of(size, transfers=True) as ranks:

        def transfer(rank: int) -> None:
            send = [[memoryview(b"x")] * (peer == (rank + 1) % size) for peer in range(size)]
            recv = [
                [memoryview(bytearray(1))] * (peer == (rank - 1) % size) for peer in range(size)
            ]
            ranks.worlds[rank].all_to_all("tensors", send, recv)
            assert bytes(recv[rank - 1][0]) == b"x"

        with ranks.costing() as first:
            ranks.all(transfer)
        with ranks.costing() as second:
            ranks.all(transfer)
        assert max(first.requests) <= 1 + 2 * 2 and sum(second.requests) == 0
        assert sum(first.messages) == sum(second.messages) == 2 * (size - 1)


def test_lengths_that_differ_are_one_error_on_all_ranks() -> None:
    """Rank 2 has something for rank 1, which expects less, or nothing."""
    for expected in (0, 2):
        with ranks_of(4, transfers=True) as ranks:

            def transfer(rank: int, expected: int = expected) -> str:
                send = [[memoryview(bytes(3))] * (rank == 2 and peer == 1) for peer in range(4)]
                room = memoryview(bytearray(expected))
                recv = [[room] * (rank == 1 and peer == 2) for peer in range(4)]
                with pytest.raises(RankFailed) as caught:
                    ranks.worlds[rank].all_to_all("tensors", send, recv)
                return str(caught.value)

            (text,) = set(ranks.all(transfer))
            assert text == (
                f"all-to-all 'tensors': rank 2 sends 3 bytes to rank 1, which expects {expected}"
            )


def test_flags_and_checks_ask_nobody() -> None:
    with ranks_of(40) as ranks:
        raised = [threading.Event() for _ in range(40)]
        with ranks.costing() as cost:
            ranks.worlds[39].raise_flag("stop")
            ranks.all(lambda r: ranks.worlds[r].gather("settled", b""))
            for rank, world in enumerate(ranks.worlds):
                if world.flag_is_up("stop"):
                    raised[rank].set()
                world.check_neighbour("training")
        assert all(one.is_set() for one in raised)
        assert sum(cost.requests) == 0
        assert sum(cost.messages) == 39 + 2 * 39


def test_who_has_not_come_is_named_and_not_who_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 2 stays away; rank 1, through which it is reached, comes in time."""
    monkeypatch.setattr("ckpt.world.tree.CHILDREN_MAX", 2)
    with ranks_of(7, round_seconds_max=1.0) as ranks:
        assert family(2, 7).parent == 1

        def come(rank: int) -> str:
            if rank == 2:
                return ""
            with pytest.raises(RankFailed) as caught:
                ranks.worlds[rank].gather("parts", b"")
            assert caught.value.rank == 2
            return str(caught.value)

        said = ranks.all(come)
        assert {text for text in said if text} == {
            "rank 2 did not answer within 1 s in phase 'parts' (rank 2 missing); it hangs, or took "
            "another path"
        }


def test_who_leaves_after_its_last_round_still_passes_on_those_below(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 says goodbye and closes; rank 2, which is reached through it, comes after that."""
    monkeypatch.setattr("ckpt.world.tree.CHILDREN_MAX", 2)
    with ranks_of(7) as ranks, ThreadPoolExecutor(7) as pool:
        assert family(2, 7).parent == 1

        def leave(rank: int) -> list[bytes] | None:
            world = ranks.worlds[rank]
            got = world.gather_to_coordinator("goodbye", b"%d" % rank)
            world.close()
            return got

        leaving = [pool.submit(leave, rank) for rank in range(7) if rank != 2]
        threading.Event().wait(0.5)  # what would go wrong has gone wrong
        pool.submit(leave, 2).result(60.0)
        got = [one.result(60.0) for one in leaving]
        assert got == [[b"%d" % rank for rank in range(7)], *[None] * 5]


def test_a_stranger_is_shown_the_door(caplog: pytest.LogCaptureFixture) -> None:
    with ranks_of(2) as ranks:
        card = ranks.processes[0].heart.card
        for said in (
            b"GET / HTTP/1.1" + bytes(100),
            Frame(FrameKind.HELLO, NOBODY, name="x").encode(),
            # Of this job, as it seems, and none of its cards.
            *(
                Frame(FrameKind.HELLO, NOBODY, name=card.token, body=body).encode()
                for body in (b"[1]", b"null", b'[0, "", 5, 1, "", ["", 1, ""]]', b"[" * 5000)
            ),
        ):
            with socket.create_connection(("127.0.0.1", card.port), timeout=60.0) as stranger:
                stranger.sendall(said)
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""
        assert ranks.all(lambda r: ranks.worlds[r].gather("fine", b"")) == [[b""] * 2] * 2
        assert not ranks.processes[0].heart._nameless
    assert "none of ours" in caplog.text and "nothing more" not in caplog.text


def test_strangers_that_say_nothing_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port scanner, or one that sends its first message byte by byte, costs no more than this."""
    monkeypatch.setattr("ckpt.world.heart.NAMELESS_MAX", 3)
    with ranks_of(2) as ranks, contextlib.ExitStack() as stack:
        heart: Any = ranks.processes[0].heart
        address = ("127.0.0.1", heart.card.port)
        strangers = [
            stack.enter_context(socket.create_connection(address, timeout=60.0)) for _ in range(5)
        ]
        assert [one.recv(1) for one in strangers[:2]] == [b"", b""]
        assert len(heart._nameless) <= 3
        assert ranks.all(lambda r: ranks.worlds[r].gather("fine", b"")) == [[b""] * 2] * 2


class FullListener(socket.socket):
    """A listener of a process without a free descriptor, until told."""

    is_full = True
    asked = 0

    def accept(self) -> Any:
        type(self).asked += 1
        if self.is_full:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_a_process_without_descriptors_does_not_ask_without_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Listener(FullListener):
        """Its own counts."""

    real = listening(Place())
    kind = (real.family, real.type, real.proto)
    monkeypatch.setattr(
        "ckpt.world.heart.listening", lambda place: Listener(*kind, fileno=real.detach())
    )
    heart: Any = Heart(0, ())
    with socket.create_connection(("127.0.0.1", heart.card.port), timeout=60.0) as stranger:
        threading.Event().wait(1.0)
        assert 1 <= Listener.asked < 50
        Listener.is_full = False
        stranger.sendall(bytes(100))
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    heart.stop()


def test_the_heart_gives_itself_more_tasks_than_its_alarm_holds() -> None:
    """As when it passes on a burst of answers to children whose connections are full."""
    heart: Any = Heart(0, ())
    done = threading.Event()

    def burst() -> None:
        for _ in range(10_000):
            heart._later(lambda: None)
        heart._later(done.set)

    heart._later(burst)
    assert done.wait(60.0)
    heart.stop()


FIRST, SECOND, THIRD = b"first " * 50_000, b"second" * 50_000, b"third"


def interrupted_at(number: int, call: Callable[[], object], function: str) -> bool:
    """`call()` with Ctrl-C at that chance in `function` and what it calls; whether it came so far.

    Python looks for it after calls, before steps back and where a function begins.
    """
    steps, after = 0, ""

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal steps, after
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            now = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            # A call that raises ends without a look, and an exception there would be half taken up.
            if now != "PUSH_EXC_INFO" and after.startswith(("CALL", "JUMP_BACKWARD", "RESUME")):
                steps += 1
                if steps == number:
                    raise KeyboardInterrupt
            after = now
        return trace

    def begin(frame: Any, event: str, arg: Any) -> Any:
        return trace(frame, event, arg) if after or frame.f_code.co_name == function else None

    before = sys.gettrace()
    # Python 3.12 gives events of opcodes only where a frame has asked for them beforehand.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(begin)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return steps >= number


sees_steps = pytest.mark.skipif(
    sys.version_info[:3] == (3, 13, 0), reason="this Python shows steps at times"
)


@sees_steps
def test_ctrl_c_neither_cuts_a_message_nor_sends_it_twice() -> None:
    """Wherever it comes: other worlds use the connection after it. The messages are larger than
    what the kernel takes at once.
    """
    number, came = 0, True
    with listening(Place()) as listener:
        while came:
            number += 1
            ours = socket.create_connection(("127.0.0.1", listener.getsockname()[1]))
            theirs, _ = listener.accept()
            with ours, theirs:
                link: Any = Link(ours, None, None)
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
                link.send(FIRST)  # some of it is left
                assert not link.flush()
                received = theirs.recv(70_000)
                assert select.select([], [ours], [], 60.0)[1]
                came = interrupted_at(number, partial(link.send, SECOND), "send")
                assert not link._lock.locked()
                link.send(THIRD)
                while not link.flush():
                    if select.select([theirs], [ours], [], 60.0)[0]:
                        received += theirs.recv(1_000_000)
                ours.shutdown(socket.SHUT_WR)
                while more := theirs.recv(1_000_000):
                    received += more
            whole = received in (FIRST + SECOND + THIRD, FIRST + THIRD)
            assert whole, f"interrupted at chance {number}: {len(received)} bytes"
    assert number > 10


def test_the_last_messages_of_a_process_arrive_although_it_has_not_read_all() -> None:
    """The kernel holds them, because the other side reads nothing just then, and would drop them
    with a connection that is closed with something unread.
    """
    with ranks_of(2) as ranks:
        ending: Any = ranks.processes[0].heart
        slow: Any = ranks.processes[1].heart
        ranks.all(lambda r: ranks.worlds[r].gather("start", b""))
        reads_again = threading.Event()
        slow._later(lambda: reads_again.wait(60.0))
        ends: Any = ending._links[Neighbour(False, 1)]
        there: Any = slow._links[Neighbour(True, 0)]
        world = ranks.worlds[1]._rounds._world
        ranks.worlds[0]._rounds.spread(b"x" * 1_000_000)
        while ends._count[0] < ends._outbox[-1][0]:
            threading.Event().wait(0.01)
        ending._later(lambda: ending._selector.unregister(ends.sock))
        there.sock.send(Frame(FrameKind.NEWS, world, body=b"unread").encode())
        stopping = threading.Thread(target=ending.stop)
        stopping.start()
        threading.Event().wait(0.5)
        reads_again.set()
        stopping.join()
        with pytest.raises(RankFailed, match="rank 0 has left"):
            ranks.worlds[1].gather("parts", b"")
        assert len(ranks.worlds[1]._rounds.news()) == 1_000_000


def test_news_and_flags_reach_ranks_without_a_connection() -> None:
    with ranks_of(3) as ranks:
        ranks.all(lambda r: ranks.worlds[r].gather("start", b""))
        rounds: Any = [world._rounds for world in ranks.worlds]
        rounds[1].spread(b"newest")
        rounds[1].raise_flag("up")
        # Behind them on the same connections.
        ranks.all(lambda r: ranks.worlds[r].gather("after", b""))
        assert [one.news() for one in rounds] == [b"newest"] * 3
        assert all(one.flag_is_up("up") for one in rounds)


def test_an_end_that_nobody_can_look_into_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def death(card: Card, refusal: OSError | None = None) -> str:
        raise RuntimeError("no way to look")

    with ranks_of(3) as ranks:
        monkeypatch.setattr(Card, "death", death)
        heart: Any = ranks.processes[2].heart
        heart._links[Neighbour(True, 0)].sock.shutdown(socket.SHUT_RDWR)

        def come(rank: int) -> None:
            with pytest.raises(RankFailed, match="RuntimeError: no way to look"):
                ranks.worlds[rank].gather("parts", b"")

        ranks.all(come)


def test_a_host_name_that_python_refuses_is_an_address_that_does_not_answer() -> None:
    heart = Heart(0, ("x" * 64,))
    with pytest.raises(OSError, match="x" * 64):
        heart.card._replace(network="").connect(5.0)
    heart.stop()


def test_the_host_of_the_store_is_reached_by_the_name_that_all_use_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many machines have their own name at a loopback address, which leads others to themselves."""
    way = (socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", 29500))
    monkeypatch.setattr("socket.getaddrinfo", lambda *args, **kwargs: [way])
    monkeypatch.setattr("socket.gethostname", lambda: "short")
    assert hosts_of(SimpleNamespace(host="node0.cluster", port=29500)) == ("node0.cluster", "short")
    assert hosts_of(SimpleNamespace(host="127.0.0.1", port=29500)) == ("short",)
    assert hosts_of(SimpleNamespace()) == ("short",)  # as a FileStore, which has no host


def test_who_waits_for_storage_is_asked_anew() -> None:
    """All have answered that rank 1 is missing, and then it waits for its storage: a pause, and no
    endless asking of the store.
    """
    with ranks_of(2) as ranks:
        rounds: Any = ranks.worlds[0]._rounds
        waiting = _Wait(rounds, 1, "parts")
        waiting._asked, rounds._absent[1] = 1, {1}
        assert waiting.is_answered()
        ranks.worlds[1].report_storage_wait(True)
        waiting.next(is_early=True)
        assert not waiting.is_answered()


def test_the_tree_is_flat_and_in_rank_order() -> None:
    for size in (1, 2, 3, 33, 34, 64, 1057, 1058, 4097):
        for rank in range(size):
            parent, blocks = family(rank, size)
            assert len(blocks) <= CHILDREN_MAX
            below = [one for block in blocks for one in block]
            assert below == list(range(rank + 1, rank + 1 + len(below)))
            assert all(family(block.start, size).parent == rank for block in blocks)
            depth = 0
            while parent is not None:
                parent, depth = family(parent, size).parent, depth + 1
            assert depth <= math.ceil(math.log(size, CHILDREN_MAX)) + (size > 1)


def test_who_has_nothing_to_move_starts_no_thread() -> None:
    """Of a move's end in a load: most ranks pass nothing on."""
    waited: list[tuple[Any, ...]] = []
    wires = _GlooTransfers(
        SimpleNamespace(recv=None, send=None), cast(Any, None), "x", lambda *how: waited.append(how)
    )
    empty = Message(1, 2, memoryview(b""))
    wires.move([], [])
    wires.move([empty], [empty])
    assert waited == []
