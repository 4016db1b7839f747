"""A step that is recorded as a graph, by the rules that CUDA has for streams that are captured.

The graph begins on one stream. Another stream joins it by waiting for one that is in it, and must
be waited for before the graph ends. What is in it may not wait for what is not, the host may not
wait at all, and what other streams do meanwhile, taking memory too, would not be done by a replay.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.streams.clocks import Agent, Finding

__all__ = ["Capture"]


class Capture:
    """A graph that is being recorded. `report` is called with what breaks a rule."""

    def __init__(self, origin: Agent, report: Callable[[Finding], None]) -> None:
        self._origin = origin
        self._report = report
        self._began = {origin: origin.time}
        """Which agents are in the graph, and how far they had come when they joined."""

    def has(self, agent: Agent) -> bool:
        """Whether what the agent does now becomes part of the graph."""
        return agent in self._began

    def waits(self, agent: Agent, *, for_part: bool, what: str) -> None:
        """The agent waits for something. `for_part`: for a part of the graph."""
        if for_part:
            self._began.setdefault(agent, agent.time)
        elif self.has(agent):
            self._find(f"{agent}, which is in the graph, waits for {what}, which is not")

    def host_waits(self, how: str) -> None:
        """The host waits."""
        self._find(f"the host waits: {how}")

    def works(self, agent: Agent, what: str) -> None:
        """The agent does something, or takes memory."""
        if not self.has(agent):
            self._find(f"{what} on {agent}, which is not in the graph")

    def end(self) -> None:
        """All that was recorded must be over when the stream is that it began on."""
        for agent, began in self._began.items():
            if agent.time > began and not self._origin.has_seen(agent, agent.time):
                self._find(f"{self._origin} does not wait for the end of {agent}")

    def _find(self, text: str) -> None:
        self._report(Finding("graph", text))
