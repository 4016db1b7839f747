"""Memory of the device, as torch's caching allocator gives it out: a pool for each stream.

Freed memory is given out again at once on its own stream, where order makes that harmless. To other
streams it must not be given; those that have used it are to be named by `record_stream`, and then
the memory waits until the host knows that they have come so far. The host is taken to run ahead of
the device: it knows only what it has waited for.

Sizes are rounded as there: to 512 bytes; up to 1 MiB from segments of 2 MiB, up to 10 MiB from
segments of 20 MiB, above in segments of whole 2 MiB; the best fitting free block is split.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.streams.clocks import Access, Agent, Finding

__all__ = ["Allocator", "Block"]

KiB, MiB = 1 << 10, 1 << 20


class Block:
    """Bytes at an address, given out or free, with what was done to them."""

    def __init__(self, start: int, size: int, pool: Agent | None, segment: tuple[int, int]) -> None:
        self.start = start
        self.size = size
        self.pool = pool
        """The stream that it was given out on; None: memory of the host."""
        self.segment = segment
        """Where what it was cut from starts, and how large that is."""
        self.is_free = False
        self.is_checked = True
        """Whether it has been compared, since it was freed, with what may be done to it next."""
        self.users: set[Agent] = set()
        """Streams of `record_stream`."""
        self.history: list[Access] = []
        self.is_pinned = False
        self.nbytes = 0
        self.origin = ""

    @property
    def end(self) -> int:
        return self.start + self.size


class Allocator:
    """All memory there is. `report` is called with what is found."""

    def __init__(self, host: Agent, report: Callable[[Finding], None]) -> None:
        self.host = host
        self._report = report
        self._next = 1 << 20
        self._free: dict[Agent, list[Block]] = {}
        self._waiting: list[tuple[Block, list[tuple[Agent, int]]]] = []
        self.live_bytes = self.live_peak_bytes = 0
        self.reserved_bytes = 0
        self.taken_on: Callable[[Agent], None] = lambda stream: None
        """Called with the stream whenever memory of the device is given out."""

    def reset_peak(self) -> None:
        """Forget how much was live before."""
        self.live_peak_bytes = self.live_bytes

    def empty_cache(self) -> None:
        """Give all that is free back to the device, also parts of segments: how a model was made
        should not show in what its steps take.
        """
        self._end_waiting()
        for pool in self._free.values():
            self.reserved_bytes -= sum(block.size for block in pool)
            pool.clear()

    def on_host(self, nbytes: int, *, pinned: bool) -> Block:
        """Memory of the host. It is never given out again here: torch's allocator of pinned memory
        waits for the copies that use it.
        """
        block = self._new(max(nbytes, 1), None)
        block.nbytes, block.is_pinned = nbytes, pinned
        return block

    def allocate(self, nbytes: int, stream: Agent) -> Block:
        """Memory of the device, for use on that stream."""
        self.taken_on(stream)
        self._end_waiting()
        pool = self._free.setdefault(stream, [])
        for block in pool:
            self._check_reuse(block, stream)
        size = -(-max(nbytes, 1) // 512) * 512
        block = self._take(size, stream, pool)
        block.is_free, block.users, block.nbytes = False, set(), nbytes
        self.live_bytes += block.size
        self.live_peak_bytes = max(self.live_peak_bytes, self.live_bytes)
        return block

    def free(self, block: Block) -> None:
        """The host lets go of the memory."""
        if block.pool is None or block.is_free:
            if not (block.is_free or block.is_pinned):
                self._check_host(block)
            block.is_free = True
            return
        block.is_free, block.is_checked = True, False
        self.live_bytes -= block.size
        others = [user for user in block.users if user is not block.pool]
        if others:
            self._waiting.append((block, [(user, user.step()) for user in others]))
        else:
            self._give_back(block)

    def _check_host(self, block: Block) -> None:
        """Only pinned memory of the host waits for the copies that use it."""
        for old in block.history:
            if not self.host.has_seen(old.agent, old.time):
                text = f"{block.origin or 'memory'} of the host was freed while {old}"
                self._report(Finding("given out", text))

    def _end_waiting(self) -> None:
        still = []
        for block, marks in self._waiting:
            if all(self.host.has_seen(agent, time) for agent, time in marks):
                self._give_back(block)
            else:
                still.append((block, marks))
        self._waiting = still

    def _check_reuse(self, block: Block, stream: Agent) -> None:
        """What is given out on the stream next may be this block: is everybody done with it?"""
        if block.is_checked:
            return
        block.is_checked = True
        for old in list(block.history):
            known = stream.has_seen(old.agent, old.time) or self.host.has_seen(old.agent, old.time)
            if not known:
                block.history.remove(old)  # one mistake, one finding
                self._report(
                    Finding(
                        "given out",
                        f"{block.origin or 'memory'} was freed and may be given out again on "
                        f"{stream} while {old}",
                    )
                )

    def _take(self, size: int, stream: Agent, pool: list[Block]) -> Block:
        small = size <= MiB
        fitting = [
            block for block in pool if block.size >= size and (_is_small_segment(block) == small)
        ]
        if fitting:
            block = min(fitting, key=lambda one: (one.size, one.start))
            pool.remove(block)
        else:
            whole = _segment_size(size)
            self.reserved_bytes += whole
            block = self._new(whole, stream)
        rest = block.size - size
        if rest >= (512 if small else MiB + 1):
            tail = Block(block.start + size, rest, stream, block.segment)
            tail.is_free, tail.is_checked = True, block.is_checked
            tail.history = [one for one in block.history if one.end > tail.start]
            block.size = size
            block.history = [one for one in block.history if one.start < block.end]
            pool.append(tail)
        return block

    def _new(self, size: int, pool: Agent | None) -> Block:
        block = Block(self._next, size, pool, (self._next, size))
        self._next += -(-size // (2 * MiB)) * 2 * MiB
        return block

    def _give_back(self, block: Block) -> None:
        assert block.pool is not None
        pool = self._free.setdefault(block.pool, [])
        for other in list(pool):
            if other.segment == block.segment and (
                other.end == block.start or block.end == other.start
            ):
                pool.remove(other)
                block.start, block.size = min(block.start, other.start), block.size + other.size
                seen = set(block.history)
                block.history += [one for one in other.history if one not in seen]
                block.is_checked = block.is_checked and other.is_checked
        pool.append(block)


def _is_small_segment(block: Block) -> bool:
    return block.segment[1] == 2 * MiB


def _segment_size(size: int) -> int:
    if size <= MiB:
        return 2 * MiB
    return 20 * MiB if size < 10 * MiB else -(-size // (2 * MiB)) * 2 * MiB
