"""What the library asks of the device's module, it asks of any accelerator's, not of CUDA's alone.

Method: the device that is none is an accelerator that the library knows nothing of.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

from ckpt.saving.step_gate import seen_since, steps
from ckpt.state.rng import RandomStates
from tests.ranks import run_ranks
from tests.streams.device import NAME, device, register
from tests.streams.groups import world
from tests.streams.simulation import simulated


def states_of_generators() -> list[Any]:
    register()
    with device() as made:
        made.generator.fill_(3)
        saved = RandomStates().state_dict()
        made.generator.fill_(4)
        RandomStates().load_state_dict(saved)
        loaded = made.generator.tolist()
        del saved[NAME]  # a checkpoint of a machine without it
        made.generator.fill_(5)
        RandomStates().load_state_dict(saved)
        module: Any = torch.get_device_module(NAME)
        module.is_initialized = lambda: False  # nothing there to save, and nothing may start it
        return [loaded, made.generator.tolist(), RandomStates().state_dict()[NAME], saved["cuda"]]


@pytest.mark.ranks
def test_random_states_of_any_accelerator_are_saved_and_loaded() -> None:
    ((loaded, left, unstarted, cudas),) = run_ranks(1, states_of_generators, group=False)
    assert loaded == [3] * 16
    assert left == [5] * 16
    assert unstarted == cudas == []


def steps_seen() -> list[bool]:
    with world(1), simulated() as made:
        steps.watch()

        def is_seen(kind: str, *, captures: bool) -> bool:
            made.is_capturing = captures
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3, device=kind))], lr=0.1)
            optimizer.step()
            return optimizer in seen_since(WeakKeyDictionary())

        seen = [is_seen("cpu", captures=True)]
        seen += [is_seen(NAME, captures=captures) for captures in (False, True)]
        module: Any = torch.get_device_module(NAME)
        del module.is_current_stream_capturing  # as on devices without graphs
        return [*seen, is_seen(NAME, captures=True)]


@pytest.mark.ranks
def test_a_step_that_is_captured_does_not_count_on_any_accelerator() -> None:
    (seen,) = run_ranks(1, steps_seen, group=False)
    assert seen == [True, True, False, True]
