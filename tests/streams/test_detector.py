"""Does the detector find what is wrong, and nothing else?

Method: tiny programs with one planted mistake each, and beside each the same program put right. All
run in one process of their own, since a device cannot be taken back once torch has it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.streams.device import NAME, Event, Stream, using
from tests.streams.groups import world
from tests.streams.simulation import simulated

Program = Callable[[bool], None]


class Planted(NamedTuple):
    """A program: called with True it is right. `kind` of what is found otherwise."""

    body: Program
    kind: str


PLANTED: dict[str, Planted] = {}


def planted(kind: str) -> Callable[[Program], Program]:
    def add(body: Program) -> Program:
        PLANTED[body.__name__] = Planted(body, kind)
        return body

    return add


def data(numel: int = 1000) -> torch.Tensor:
    return torch.zeros(numel, device=NAME)


def main() -> Stream:
    return using().current()


# --- graphs --------------------------------------------------------------------------------------


@contextmanager
def recorded() -> Iterator[Stream]:
    """A graph that begins on a stream of its own."""
    side = Stream()
    side.wait_stream(main())
    with side, using().capturing():
        yield side


@planted("graph")
def a_graph_in_which_the_host_waits(right: bool) -> None:
    x = data()
    with recorded() as stream:
        x.add_(1)
        if not right:
            stream.synchronize()


@planted("graph")
def a_graph_that_waits_for_what_is_not_in_it(right: bool) -> None:
    other, event = Stream(), Event()
    event.record(other)
    with recorded() as stream:
        if right:
            other.wait_stream(stream)
            event.record(other)
        stream.wait_event(event)


@planted("graph")
def a_graph_that_does_not_wait_for_a_stream_of_its_own(right: bool) -> None:
    other, x = Stream(), data()
    with recorded() as stream:
        other.wait_stream(stream)
        with other:
            x.add_(1)
        if right:
            stream.wait_stream(other)


@planted("graph")
def work_beside_a_graph(right: bool) -> None:
    other = Stream()
    with recorded() as stream:
        if right:
            other.wait_stream(stream)
        with other:
            data()
        if right:
            stream.wait_stream(other)


@planted("graph")
def a_backward_in_a_graph_of_a_forward_before_it(right: bool) -> None:
    x = data().requires_grad_()
    loss = (x * 2).sum()
    with recorded():
        data()  # with its first operation the stream is known
        if right:
            loss = (x * 2).sum()
        loss.backward()


# --- streams -------------------------------------------------------------------------------------


@planted("race")
def a_read_of_what_another_stream_writes(right: bool) -> None:
    side, x = Stream(), data()
    if right:
        side.wait_stream(main())
    with side:
        x.sum()


@planted("race")
def a_write_to_what_another_stream_reads(right: bool) -> None:
    side, x = Stream(), data()
    side.wait_stream(main())
    with side:
        x.sum()
    if right:
        main().wait_stream(side)
    x.zero_()


@planted("race")
def an_event_recorded_too_early(right: bool) -> None:
    side, x, event = Stream(), data(), Event()
    if not right:
        event.record()
    x.add_(1)
    if right:
        event.record()
    side.wait_event(event)
    with side:
        x.sum()


@planted("race")
def overlapping_parts_of_one_tensor(right: bool) -> None:
    side, x = Stream(), data()
    side.wait_stream(main())
    with side:
        x[500:].add_(1)
    x[: 500 if right else 501].add_(1)


@planted("race")
def a_wait_through_a_third_stream(right: bool) -> None:
    one, other, x = Stream(), Stream(), data()
    one.wait_stream(main())
    with one:
        x.add_(1)
    if right:
        other.wait_stream(one)
    main().wait_stream(other)
    x.sum()


@planted("race")
def a_backward_that_goes_to_another_stream(right: bool) -> None:
    side, x = Stream(), torch.zeros(10, device=NAME, requires_grad=True)
    side.wait_stream(main())
    with side:
        loss = (x * 2).sum()
    loss.backward()  # on the stream of the forward, which the caller's waits for
    other = Stream()
    if right:
        other.wait_stream(main())
    with other:
        x.grad.sum()


@planted("race")
def a_view_made_by_set(right: bool) -> None:
    side, x = Stream(), data()
    view = x.new_empty(0).set_(x.untyped_storage(), 100, (10,), (1,))
    side.wait_stream(main())
    with side:
        view.zero_()
    if right:
        main().wait_stream(side)
    x[105].sum()


# --- the host ------------------------------------------------------------------------------------


@planted("race")
def the_host_reads_a_copy_under_way(right: bool) -> None:
    host = torch.empty(1000, pin_memory=True)
    host.copy_(data(), non_blocking=True)
    if right:
        main().synchronize()
    host.sum()


@planted("race")
def the_host_writes_to_what_is_being_copied(right: bool) -> None:
    host = torch.zeros(1000).pin_memory()
    x = host.to(NAME, non_blocking=True)
    event = main().record_event()
    if right:
        event.synchronize()
    host.zero_()
    x.sum()


@planted("race")
def a_copy_that_makes_its_own_pinned_memory(right: bool) -> None:
    host = data().to("cpu", non_blocking=right is False)
    host.sum()


# --- memory --------------------------------------------------------------------------------------


@planted("given out")
def memory_freed_while_another_stream_reads(right: bool) -> None:
    side, x = Stream(), data()
    side.wait_stream(main())
    with side:
        x.sum()
    if right:
        x.record_stream(side)
    del x
    data(1000)


@planted("given out")
def memory_freed_and_waited_for_too_late(right: bool) -> None:
    side, x = Stream(), data()
    side.wait_stream(main())
    with side:
        x.sum()
    del x
    if right:
        main().wait_stream(side)
    data(1000)
    main().wait_stream(side)


@planted("given out")
def a_storage_emptied_while_another_stream_reads(right: bool) -> None:
    side, x = Stream(), data()
    side.wait_stream(main())
    with side:
        x.sum()
    if right:
        main().wait_stream(side)
    x.untyped_storage().resize_(0)
    data(10)


@planted("freed")
def a_use_after_the_memory_was_given_away(right: bool) -> None:
    x = data()
    if not right:
        x.untyped_storage().resize_(0)
    x.add_(1)


@planted("freed")
def a_use_beyond_what_is_left_of_a_storage(right: bool) -> None:
    x = data()
    view = x[900:]
    x.untyped_storage().resize_(4000 if right else 400)
    view.add_(1)


@planted("freed")
def a_use_of_memory_that_came_back_is_of_new_memory(right: bool) -> None:
    x = data()
    x.untyped_storage().resize_(0)
    if right:
        x.untyped_storage().resize_(4000)
    x.zero_()


# --- collectives ---------------------------------------------------------------------------------


@planted("race")
def a_collective_that_nobody_waits_for(right: bool) -> None:
    x = data()
    work: Any = dist.all_reduce(x, async_op=True)
    if right:
        work.wait()
    x.sum()


@planted("race")
def a_collective_waited_for_by_the_wrong_stream(right: bool) -> None:
    x, side = data(), Stream()
    work: Any = dist.all_reduce(x, async_op=True)
    with side:
        work.wait()
    if right:
        main().wait_stream(side)
    x.sum()


@planted("race")
def a_collective_that_starts_before_its_input(right: bool) -> None:
    x, side = data(), Stream()
    if right:
        side.wait_stream(main())
    with side:
        work: Any = dist.all_reduce(x, async_op=True)
    work.wait()


@planted("given out")
def the_input_of_a_collective_freed_on_its_own_stream(right: bool) -> None:
    # The group holds on to it until somebody waits; who waits is not who may give it out again.
    x, side = data(), Stream()
    side.wait_stream(main())
    with side:
        work: Any = dist.all_reduce(x, async_op=True)
    del x
    with side:
        work.wait()
    if right:
        main().wait_stream(side)
    data(1000)


# --- the run -------------------------------------------------------------------------------------


def run_all() -> dict[str, tuple[list[str], list[str]]]:
    """Of each program: what is found when it is right, and when it is wrong."""
    texts_by_name = {}
    for name, one in PLANTED.items():
        texts = []
        for right in (True, False):
            with world(2), simulated() as device:
                one.body(right)
                device.end()
                texts.append([str(finding) for finding in device.findings])
        texts_by_name[name] = (texts[0], texts[1])
    return texts_by_name


@functools.cache
def results() -> dict[str, tuple[list[str], list[str]]]:
    (texts_by_name,) = run_ranks(1, run_all, group=False, timeout_seconds=150)
    assert isinstance(texts_by_name, dict)
    return texts_by_name


@pytest.mark.ranks
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found_and_the_right_program_is_left_alone(name: str) -> None:
    right, wrong = results()[name]
    assert right == []
    assert wrong and all(text.startswith(f"{PLANTED[name].kind}: ") for text in wrong), wrong


def counted() -> dict[str, int]:
    with world(2), simulated() as device:
        x = data(1 << 20)
        x.add_(1).clone()  # the clone is freed at once
        x.sum().item()
        host = torch.empty(1 << 20, pin_memory=True)
        host.copy_(x, non_blocking=True)
        host.copy_(x)
        torch.empty(1 << 20).copy_(x, non_blocking=True)
        x.to(torch.bfloat16)
        side = Stream()
        side.wait_stream(main())
        x.record_stream(side)
        del x
        data(1 << 20)
        side.synchronize()
        data(1 << 20)
        dist.barrier()
        device.end()
        allocator = device.allocator
        return {
            **device.counts,
            "live": allocator.live_bytes,
            "peak": allocator.live_peak_bytes,
            "reserved": allocator.reserved_bytes,
        }


@pytest.mark.ranks
def test_kernels_copies_waits_and_bytes_are_counted() -> None:
    (counts,) = run_ranks(1, counted, group=False, timeout_seconds=150)
    MiB = 1 << 20
    # zeros, add_, clone, sum, item's read, three copies, a cast, two more zeros
    assert counts["kernels"] == 10 and counts["copies"] == 5
    # item, the copy that blocks, the one into memory that is not pinned, synchronize
    assert counts["host waits"] == 4
    assert counts["copies of memory that is not pinned"] == 1
    assert counts["live"] == 0 and counts["peak"] == 8 * MiB
    # x and its clone in one segment of 20 MiB, and what waits for the side stream takes no other
    assert counts["reserved"] == 22 * MiB
    assert counts["collectives"] == 1


def gradient_in_other_memory() -> tuple[bool, bool, bool]:
    with world(2), simulated():
        param = torch.nn.Parameter(torch.ones(3))
        shown = data(12).view(3, 4)
        param.grad = torch.empty_like(param)
        param.grad.data = shown
        is_there = param.grad.data_ptr() == shown.data_ptr() and param.grad.shape == (3, 4)
        again = param.grad is param.grad
        param.grad = torch.zeros(3)
        return is_there, again, param.grad.device.type == "cpu"


@pytest.mark.ranks
def test_a_gradient_may_lie_in_other_memory_than_its_parameter() -> None:
    (answers,) = run_ranks(1, gradient_in_other_memory, group=False, timeout_seconds=150)
    assert answers == (True, True, True)
