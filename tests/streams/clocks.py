"""Agents with vector clocks, and the accesses that they make to bytes.

Every stream, every process group and the host is an agent: what one agent does, it does in order.
Between two agents there is order only where one of them has waited for the other. A vector clock
says of each agent how much of the others it has waited for (Mattern, Fidge, 1988); two accesses of
the same bytes, one of them a write, are a race unless the later agent has seen the earlier access.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Access", "Agent", "Finding", "Moment", "unordered"]

Moment = dict["Agent", int]
"""How far each agent had come, as somebody knew it."""


class Agent:
    """Something that does one thing after the other."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.time = 0
        self._seen: Moment = {}

    def __repr__(self) -> str:
        return self.name

    def step(self) -> int:
        """Do the next thing; returns when that is, by the agent's own count."""
        self.time += 1
        self._seen[self] = self.time
        return self.time

    def moment(self) -> Moment:
        """All that has been done so far, as the agent knows it."""
        return dict(self._seen)

    def learn(self, moment: Moment) -> None:
        """Everything up to that moment is over before the agent does its next thing."""
        seen = self._seen
        for agent, time in moment.items():
            if seen.get(agent, 0) < time:
                seen[agent] = time

    def has_seen(self, agent: Agent, time: int) -> bool:
        """Whether what that agent did then is over before this one does its next thing."""
        return agent is self or self._seen.get(agent, 0) >= time


class Access(NamedTuple):
    """Bytes from `start` on, before `end`, used by an agent at its own time."""

    start: int
    end: int
    agent: Agent
    time: int
    writes: bool
    what: str

    def __str__(self) -> str:
        return f"{self.what} {'writes' if self.writes else 'reads'} on {self.agent}"


class Finding(NamedTuple):
    """Something that goes wrong on a device with other timing. `kind`: "race" (two unordered
    accesses), "given out" (memory that others may still use is free for others), "freed" (an access
    after the memory was given away), "graph" (what a graph that is recorded cannot have).
    """

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def unordered(new: Access, history: Iterable[Access]) -> list[Access]:
    """Which of these accesses the new one must not meet, and may."""
    return [
        old
        for old in history
        if old.start < new.end
        and new.start < old.end
        and (old.writes or new.writes)
        and not new.agent.has_seen(old.agent, old.time)
    ]


def with_access(new: Access, history: Iterable[Access]) -> list[Access]:
    """The history that later accesses have to be compared with, the new one in it.

    What lies inside a newer write is ordered before it, or was reported: who has seen the write has
    seen that too. Of an agent's own reads the last one of the same bytes stands for the others.
    """
    kept = [
        old
        for old in history
        if not (
            new.start <= old.start
            and old.end <= new.end
            and (new.writes or (old.agent is new.agent and not old.writes))
        )
    ]
    kept.append(new)
    return kept
