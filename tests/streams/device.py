"""The device that is none: streams, events, and the module that torch finds for it.

The module stands in for `torch.cuda`. Which device it works on is set by `using`, one at a time.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import library as operators
from torch.utils import backend_registration

from tests.streams.allocator import Allocator
from tests.streams.capture import Capture
from tests.streams.clocks import Agent, Finding, Moment

__all__ = ["NAME", "Device", "Event", "Stream", "device", "register", "using"]

NAME = "sim"
_TYPE = 20  # of PrivateUse1, in torch's own count


class Stream(torch.Stream):
    """Work in order, beside that of other streams."""

    agent: Agent

    def __new__(cls, device: Any = None, *, priority: int = 0, name: str = "") -> Stream:
        here = using()
        number = len(here.streams)
        made = super().__new__(cls, stream_id=number, device_index=0, device_type=_TYPE)
        made.agent = Agent(name or f"stream {number}")
        here.streams.append(made)
        return made

    def __init__(self, device: Any = None, *, priority: int = 0, name: str = "") -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        """What comes next on this stream waits for all that the other was given."""
        other.passes_on_to(self.agent)

    def passes_on_to(self, agent: Agent) -> None:
        """What the agent does next waits for all that this stream was given."""
        capture = using().capture
        if capture is not None:
            capture.waits(agent, for_part=capture.has(self.agent), what=str(self.agent))
        agent.learn(self.agent.moment())

    def wait_event(self, event: Any) -> None:
        """What comes next on this stream waits for what was before the event."""
        capture = using().capture
        if capture is not None:
            for_part = event.capture is capture
            capture.waits(self.agent, for_part=for_part, what="an event from before")
        self.agent.learn(event.moment)

    def record_event(self, event: Any = None) -> Event:
        """A mark behind all that the stream was given."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits until the stream has done all that it was given."""
        using().host_waits(self.agent.moment(), "Stream.synchronize")

    def query(self) -> bool:
        """Whether the host knows that the stream is done: a slow device is not."""
        return using().host.has_seen(self.agent, self.agent.time)

    def __enter__(self) -> Any:
        using().enter(self)
        return self

    def __exit__(self, *exc: Any) -> None:
        using().leave()

    def __hash__(self) -> int:
        return hash(self.stream_id)


class Event:
    """A mark in a stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.moment: Moment = {}
        self.capture: Capture | None = None
        """The graph that it was recorded in."""

    def record(self, stream: Stream | None = None) -> None:
        """Mark what the stream (the current one) was given."""
        agent, capture = (stream or using().current()).agent, using().capture
        self.moment = agent.moment()
        self.capture = capture if capture is not None and capture.has(agent) else None

    def wait(self, stream: Stream | None = None) -> None:
        """The stream (the current one) waits for the mark."""
        (stream or using().current()).wait_event(self)

    def synchronize(self) -> None:
        """The host waits for the mark."""
        using().host_waits(self.moment, "Event.synchronize")

    def query(self) -> bool:
        """Whether the host knows that the mark was reached."""
        return all(using().host.has_seen(agent, time) for agent, time in self.moment.items())


class Device:
    """One device and its host during one scenario."""

    def __init__(self) -> None:
        self.host = Agent("the host")
        self.findings: list[Finding] = []
        self.is_over = False
        self.skips_waits = False
        """Whether copies that the host waits for are only started: a mutant."""
        self.is_capturing = False
        """Whether the current stream records a graph."""
        self.capture: Capture | None = None
        """The graph that is recorded now."""
        self.streams_of_nodes: dict[Any, Stream] = {}
        """Of nodes of the graph of autograd whose number does not tell it any more."""
        self.generator = torch.zeros(16, dtype=torch.uint8)
        """The state of the device's random numbers."""
        self.modes: tuple[Any, ...] = ()
        """What watches operations; a thread of its own has to enter them."""
        self.counts: Counter[str] = Counter()
        """Operations by name, and "kernels", "copies", "collectives", "host waits"."""
        self.host_waits_by: Counter[str] = Counter()
        self.allocator = Allocator(self.host, self.report)
        self.allocator.taken_on = lambda stream: self.works(stream, "memory is taken")
        self.streams: list[Stream] = []
        self.groups: dict[str, Agent] = {}
        self.backwards: list[Backward] = []
        self._stacks = threading.local()
        self.record_stream: Callable[[torch.Tensor, torch.Stream], None] = _nobody
        """Set by who knows where tensors have their memory."""
        self.stream_at: list[tuple[int, Stream]] = []
        """From which number on nodes of the graph were made under which stream."""

    def start(self) -> None:
        """Make the stream that is there from the beginning."""
        Stream(name="the default stream")

    def end(self) -> None:
        """The scenario is over: what comes now is not its."""
        self.is_over = True

    def report(self, finding: Finding) -> None:
        """Add a finding, once."""
        if not self.is_over and finding not in self.findings:
            self.findings.append(finding)

    def host_waits(self, moment: Moment, how: str) -> None:
        """The host stands still until that moment."""
        if self.capture is not None:
            self.capture.host_waits(how)
        if any(not self.host.has_seen(agent, time) for agent, time in moment.items()):
            self.counts["host waits"] += 1
            self.host_waits_by[how] += 1
        self.host.learn(moment)

    def works(self, agent: Agent, what: str) -> None:
        """A stream does something, or memory is taken on it."""
        if self.capture is not None:
            self.capture.works(agent, what)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """What the current stream is given inside is recorded as a graph."""
        self.capture = Capture(self.current().agent, self.report)
        self.is_capturing = True
        try:
            yield
            self.capture.end()
        finally:
            self.capture, self.is_capturing = None, False

    @contextmanager
    def on_thread(self, thread: Agent) -> Iterator[None]:
        """What the host does inside is done by that thread of it, in no order with the others."""
        before = self.host
        self.host = self.allocator.host = thread
        try:
            yield
        finally:
            self.host = self.allocator.host = before

    # --- the current stream -----------------------------------------------------------------------

    @property
    def _stack(self) -> list[Stream]:
        if not hasattr(self._stacks, "all"):
            self._stacks.all = []
        stack: list[Stream] = self._stacks.all
        return stack

    def enter(self, stream: Stream | None) -> None:
        """Make the stream the current one of this thread."""
        self._stack.append(self.current() if stream is None else stream)

    def leave(self) -> None:
        """Go back to the one before."""
        self._stack.pop()

    def current(self) -> Stream:
        """Where operations of this thread go: in a backward, to the stream of the forward."""
        backward = self.backwards[-1] if self.backwards else None
        if backward is None or len(self._stack) > backward.depth:
            return self._stack[-1] if self._stack else self.streams[0]
        return backward.stream_of(_current_node(), self)

    def note_forward(self) -> None:
        """Nodes of the graph from here on belong to the current stream."""
        if self.backwards:
            return
        stream = self.current()
        if not self.stream_at or self.stream_at[-1][1] is not stream:
            self.stream_at.append((_next_node_number(), stream))

    def stream_of(self, node: Any, unknown: Stream) -> Stream:
        """On which stream a node of the graph of autograd was made."""
        if node in self.streams_of_nodes:
            return self.streams_of_nodes[node]
        number, made = node._sequence_nr(), unknown
        for first, one in self.stream_at:
            if first <= number:
                made = one
        return made

    @contextmanager
    def backward(self) -> Iterator[None]:
        """A backward pass, called by this thread, runs inside."""
        running = Backward(self.current(), len(self._stack))
        self.backwards.append(running)
        try:
            yield
        finally:
            running.end()
            self.backwards.pop()


class Backward:
    """One backward pass: autograd runs each node on the stream of its forward, lets it wait for the
    nodes before it, and lets the caller's stream wait for all at the end.

    Here a node waits for everything that ran before it in the pass, and all run in the caller's
    thread: an exception in a hook would end the process in a thread of torch's for this device.
    """

    def __init__(self, caller: Stream, depth: int) -> None:
        self.depth = depth
        """How many streams the caller had entered."""
        self._caller = caller
        self._last = caller
        self._used = [caller]

    def stream_of(self, node: Any, device: Device) -> Stream:
        """Where what the node does goes to. Outside of any node: to the caller's stream."""
        stream = self._caller
        if node is not None:
            stream = device.stream_of(node, self._caller)
            device.works(stream.agent, "a node of the backward that was made before the graph")
        else:
            self.end()
        if stream is not self._last:
            stream.wait_stream(self._last)
            self._last = stream
            self._used.append(stream)
        return stream

    def end(self) -> None:
        """The caller's stream waits for all that were used: before callbacks run on it, which may
        give others more to do.
        """
        used, self._used = self._used, []
        for stream in used:
            if stream is not self._caller:
                self._caller.wait_stream(stream)


def _nobody(tensor: torch.Tensor, stream: torch.Stream) -> None:
    raise AssertionError("nobody watches this device")


def _current_node() -> Any:
    return torch._C._current_autograd_node()


def _next_node_number() -> int:
    return int(torch._C._autograd._get_sequence_nr())


# --- the module that torch finds -----------------------------------------------------------------

_using: list[Device] = []
_kept: list[Any] = []
"""What torch forgets when nobody else has it."""


def using() -> Device:
    """The device of the scenario that runs now."""
    return _using[-1]


@contextmanager
def device() -> Iterator[Device]:
    """A new device; all that happens inside is its."""
    made = Device()
    _using.append(made)
    made.start()
    try:
        yield made
    finally:
        _using.pop()


@contextmanager
def _stream(stream: Stream | None) -> Iterator[None]:
    using().enter(stream)
    try:
        yield
    finally:
        using().leave()


class _OnDevice:
    """Stands for `torch.cuda.device`: there is one device only."""

    def __init__(self, device: Any = None) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: Any) -> None:
        pass


def _synchronize(device: Any = None) -> None:
    for stream in using().streams:
        stream.synchronize()


@functools.cache
def register() -> None:
    """Let torch know the device. Once for a process: it cannot be undone."""
    module = ModuleType(f"torch.{NAME}")
    there: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "stream": _stream,
        "device": _OnDevice,
        "current_stream": lambda device=None: using().current(),
        "default_stream": lambda device=None: using().streams[0],
        "set_stream": lambda stream: using().enter(stream),
        "synchronize": _synchronize,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device_count": lambda: 1,
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device: using().generator.clone(),
        "set_rng_state": lambda state, device: using().generator.copy_(state),
        "is_current_stream_capturing": lambda: using().is_capturing,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    for name, value in there.items():
        setattr(module, name, value)
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=module)
    kernels = operators.Library("aten", "IMPL")
    kernels.impl("record_stream", _record_stream, "PrivateUse1")
    _kept.append(kernels)


def _record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """Comes here where torch calls it with all dispatch modes off."""
    using().record_stream(tensor, stream)
